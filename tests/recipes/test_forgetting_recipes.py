"""The experiments of the thesis on the re-weighted softmax: its settings, and its data where one has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtide.config import points, read
from fedtide.runs.build import population_of, rows_of
from fedtide.runs.preflight import preflight
from helpers.shell import refused

FOLDER = Path(__file__).parents[2] / "src/fedtide/recipes"
PLAIN = [("FedAvg", "fedavg", "cross-entropy"), ("FedAvg, WSM", "fedavg", "wsm")]
SIX = [
    (f"{name}{more}", name.lower(), loss)
    for name in ("FedAvg", "FedProx", "SCAFFOLD")
    for more, loss in (("", "cross-entropy"), (", WSM", "wsm"))
]
OURS = ("FedAvg, WSM blended (safe)", "fedavg", "wsm")
RATES = [0.007, 0.01, 0.03, 0.05, 0.07, 0.1, 0.3, 0.5, 0.7]
NORMED = [{"kind": "resnet18", "form": "cifar", "norm": norm} for norm in ("group", "batch", "mixed")]
# Clients, cohort, rounds; the methods, and what is swept: Tables 3.1 to 3.3, Figures 2.2 and 3.3.
THESIS = {
    "cifar10": (100, 10, 4000, PLAIN, {"method.local.lr": RATES}),
    "cifar100": (100, 2, 4000, PLAIN, {"method.local.lr": RATES}),
    "femnist": (100, 10, 2000, PLAIN, {"method.local.lr": RATES}),
    "baselines": (
        20,
        2,
        1500,
        [*SIX, OURS],
        {"data.source.path, data.source.classes": [["cifar-10-batches-bin", 10], ["cifar-100-binary", 100]]},
    ),
    "norms": (100, 10, 8000, PLAIN, {"model": NORMED, "method.local.lr": [0.005, *RATES[:-2]]}),
    "forgetting": (100, 10, 4000, PLAIN, {"method.cohort": [10]}),
    "heterogeneity": (100, 10, 4000, PLAIN, {"data.partition.alpha": [0.01, 0.1, 0.2, 0.5, 1.0, 10.0, 100.0]}),
    "participation": (100, None, 4000, PLAIN, {"method.cohort": [1, 2, 5, 10, 30, 60]}),
    "local-work": (100, 10, 4000, PLAIN, {"method.local.epochs": [1, 3, 5, 10, 20]}),
}


def recipe(name: str, scale: str):
    return read(FOLDER / f"wsm-{name}.toml", scale=scale)


@pytest.mark.parametrize("name", THESIS)
def test_settings_of_the_thesis_are_those_of_its_tables(name):
    clients, cohort, rounds, methods, swept = THESIS[name]
    experiment = recipe(name, "paper")
    late = 1 if name == "baselines" else 100  # the thesis judges it once
    assert (experiment.rounds, experiment.average_last, len(experiment.seeds)) == (rounds, late, 5)
    found = {key: [list(v) if isinstance(v, tuple) else v for v in values] for key, values in experiment.sweep.items()}
    if name in ("heterogeneity", "participation", "local-work"):
        assert found.pop("method.local.lr") == [0.1]
    assert found == swept
    for each in (point.experiment for point in points(experiment)):
        partition = each.data.partition
        assert (partition.kind, partition.clients, partition.samples) == ("dirichlet", clients, None)
        assert partition.alpha == 0.1 or name == "heterogeneity"
        assert each.data.split.val == 0.1
        assert (each.model.kind, each.model.form) == ("resnet18", "cifar")
        assert each.model.norm == "mixed" or name == "norms"
        if name != "femnist":
            (normalize,) = each.data.transforms
            assert (normalize.mean, normalize.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
        assert all(m.loss.blend == 0.3 * ("blended" in m.name) for m in each.method if m.loss.kind == "wsm")
        assert [(m.name, m.algorithm, m.loss.kind) for m in each.method] == methods
        for method in each.method:
            options = method.settings()
            local = options["local"]
            assert options["cohort"].clients_per_round == cohort or name == "participation"
            assert (local.optimizer, local.batch_size, local.momentum, local.weight_decay) == ("sgd", 64, 0.0, 1e-4)
            assert local.epochs == 3 or name == "local-work"
            if name == "baselines":
                assert local.lr == (0.1 if method.algorithm == "fedavg" else 0.01)
            if method.algorithm == "fedprox":
                assert local.proximal == 1.1


@pytest.mark.parametrize("name", THESIS)
def test_random_crops_have_a_border_of_the_color_that_the_thesis_has(name):
    """Black for CIFAR, padded before it is normalized there; paper for characters."""
    crop, *rest = recipe(name, "paper").method[0].settings()["local"].augment
    if name == "femnist":
        assert (crop.padding, crop.fill, rest) == (2, "edge", [])
        return
    (normalize,) = recipe(name, "paper").data.transforms
    black = [-mean / std for mean, std in zip(normalize.mean, normalize.std, strict=True)]
    assert (crop.padding, crop.size, [each.kind for each in rest]) == (4, None, ["flip"])
    assert list(crop.fill) == pytest.approx(black, abs=1e-4)


def test_forgetting_is_measured_when_the_released_code_does():
    probed = recipe("forgetting", "paper").forgetting
    assert probed.rounds == (0, 1, 399, 799, 1199, 1599, 1999, 2399, 2799, 3199, 3599, 3999)
    assert (probed.part, probed.eval_clients) == ("val", 100)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "femnist", "baselines", "norms", "heterogeneity", "fmnist"])
def test_at_small_scale_every_method_is_tuned_alike(name):
    """Each method may choose among the same rates by validation rows, and seeds are five or more."""
    experiment = recipe(name, "cpu")
    assert len(experiment.sweep["method.local.lr"]) >= 2
    assert experiment.data.split.val > 0
    assert len(experiment.seeds) >= 5
    assert any(claim.at for claim in experiment.claim)


@pytest.mark.parametrize(("name", "scale", "missing"), [
    ("cifar10", "paper", "cifar-10-batches-bin"), ("cifar100", "paper", "cifar-100-binary"),
    ("femnist", "paper", "femnist"), ("fmnist", "cpu", "fashion-mnist"), ("norms", "paper", "cifar-10-batches-bin"),
])  # fmt: skip
def test_without_its_data_a_recipe_stops_with_one_line(capsys, tmp_path, monkeypatch, name, scale, missing):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDTIDE_DATA", str(tmp_path / "data"))
    said = refused(capsys, tmp_path, "run", f"recipe:wsm-{name}", "--scale", scale, "--out", tmp_path / "run")
    tried = f"{tmp_path / 'data' / missing}, {missing}"
    assert said == f"data.source: no such file or folder: {tried}; set data.directory or FEDTIDE_DATA"


@pytest.mark.parametrize("name", THESIS)
def test_the_size_of_the_thesis_fits_data_in_the_published_formats(data, name):
    experiment = read(
        FOLDER / f"wsm-{name}.toml",
        scale="paper",
        sets=["data.partition.clients=12", "method.cohort=2", "data.held_out_clients.clients=5"],
    )
    point = points(experiment)[0].experiment
    first = point.model_copy(update={"method": point.method[:1], "claim": (), "baseline": None})
    preflight(first)
    rows = rows_of(first, 0)
    assert (rows.classes, tuple(rows.shape)) == {
        "femnist": (62, (1, 28, 28)), "cifar100": (100, (3, 32, 32)),
    }.get(name, (10, (3, 32, 32)))  # fmt: skip
    judged = population_of(first, first.shift, 0).parts["test"].rows
    assert len(judged) > 0
    assert rows.held_out[judged].all()
