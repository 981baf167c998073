"""The experiments of the thesis on the re-weighted softmax: its settings, and its data where one has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.shell import refused
from fedtide.config import points, read

FOLDER = Path(__file__).parents[2] / "src/fedtide/recipes"
PLAIN = [("FedAvg", "fedavg", "cross-entropy"), ("FedAvg, WSM", "fedavg", "wsm")]
SIX = [
    (f"{name}{more}", name.lower(), loss)
    for name in ("FedAvg", "FedProx", "SCAFFOLD")
    for more, loss in (("", "cross-entropy"), (", WSM", "wsm"))
]
# Clients, cohort, rounds; the methods and how many points there are.
THESIS = {
    "cifar10": (100, 10, 4000, PLAIN, 9),
    "cifar100": (100, 2, 4000, PLAIN, 9),
    "femnist": (100, 10, 2000, PLAIN, 9),
    "baselines": (20, 2, 1500, SIX, 2),
    "norms": (100, 10, 8000, PLAIN, 24),
    "forgetting": (100, 10, 4000, PLAIN, 1),
}


def recipe(name: str, scale: str):
    return read(FOLDER / f"wsm-{name}.toml", scale=scale)


@pytest.mark.parametrize("name", THESIS)
def test_settings_of_the_thesis_are_those_of_its_tables(name):
    clients, cohort, rounds, methods, many = THESIS[name]
    experiment = recipe(name, "paper")
    swept = points(experiment)
    assert (experiment.rounds, experiment.window, len(experiment.seeds), len(swept)) == (rounds, 100, 5, many)
    for each in (point.experiment for point in swept):
        partition = each.data.partition
        assert (partition.kind, partition.clients, partition.alpha, partition.rows) == ("dirichlet", clients, 0.1, None)
        assert each.data.split.valid == 0.1
        assert (each.model.kind, each.model.form) == ("resnet18", "cifar")
        assert name == "norms" or each.model.norm == "mixed"
        assert [(m.name, m.algorithm, m.loss.kind) for m in each.method] == methods
        for method in each.method:
            options = method.settings()
            local = options["local"]
            assert options["cohort"].size == cohort
            assert (local.optimiser, local.batch, local.epochs, local.momentum, local.weight_decay) == (
                "sgd", 64, 3, 0.0, 1e-4,
            )  # fmt: skip
            crop = 2 if name == "femnist" else 4
            assert [(a.kind, getattr(a, "padding", None)) for a in local.augment] == [
                ("random-crop", crop), *([] if name == "femnist" else [("flip", None)]),
            ]  # fmt: skip
            if method.algorithm == "fedprox":
                assert options["mu"] == 1.1


def test_forgetting_is_measured_when_the_released_code_does():
    probed = recipe("forgetting", "paper").forgetting
    assert probed.rounds == (1, 399, 799, 1199, 1599, 1999, 2399, 2799, 3199, 3599, 3999)
    assert (probed.part, probed.owners) == ("valid", 100)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "femnist", "baselines", "norms", "heterogeneity", "fmnist"])
def test_at_small_scale_every_method_is_tuned_alike(name):
    """Each method may choose among the same rates by validation rows, and seeds are five."""
    experiment = recipe(name, "cpu")
    assert len(experiment.sweep["method.local.rate"]) >= 2
    assert experiment.data.split.valid > 0
    assert len(experiment.seeds) == 5
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
