"""The three experiments of the paper on periodic shift: its settings to the digit, and its data where one has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedtide.config import points, read
from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.learn.branched_task import with_branches
from fedtide.runs.build import population_of, rows_of, task_of
from fedtide.runs.preflight import preflight
from helpers.shell import refused

FOLDER = Path(__file__).parents[2] / "src/fedtide/recipes"
NAMES = ("emnist", "cifar110", "stackoverflow")
SCALES = ("nano", "cpu", "paper")
EVERY = pytest.mark.parametrize("name", NAMES)

METHODS = {
    "Vanilla": "vanilla", "No shift": "vanilla", "Vanilla (s)": "fedavg", "No shift (s)": "fedavg", "FedTEM": "fedtem",
    "FedTEM by certainty": "fedtem", "FedTKM": "fedtkm", "FedTKM leaky": "fedtkm", "EM only by certainty": "fedtem",
    "EM only, overwritten": "fedtem", "Min Loss": "min-loss", "SCSGD": "scsgd", "T-shot": "t-shot", "FedEM": "fedem",
}  # fmt: skip

# Table 2: server learning rate, epsilon of Adam, client learning rate, cohort, batch, rounds; then lambda and epsilon
# of the smoothed labels as in the authors' example commands.
TABLE_2 = {
    "emnist": (10**-2.5, 1e-4, 10**-1.5, 10, 20, 2049, 0.5, 0.1),
    "cifar110": (1.0, 1e-1, 10**-1.5, 10, 20, 8196, 0.1, 0.5),
    "stackoverflow": (0.01, 1e-5, 10**-0.5, 50, 16, 2048, 0.25, 0.0),
}


def recipe(name: str, scale: str, *sets: str):
    return read(FOLDER / f"fedtem-{name}.toml", scale=scale, sets=sets)


# -- settings ----------------------------------------------------------------------------------------------------------


@EVERY
def test_settings_of_the_paper_are_those_of_its_table(name):
    rate, eps, client, cohort, batch, rounds, lam, smooth = TABLE_2[name]
    experiment = recipe(name, "paper")
    assert (experiment.rounds, experiment.seeds, experiment.shift.who.period) == (rounds, (0, 1, 2), 256)
    assert (experiment.shift.who.curve, experiment.shift.who.exponent) == ("linear", 1.0)
    for method in experiment.method:
        options = method.settings()
        server, local = options["server"], options["local"]
        assert (server.kind, server.lr, server.eps) == ("keras-adam", rate, eps)
        assert (server.beta1, server.beta2) == (0.9, 0.999)
        assert (local.optimizer, local.lr, local.batch_size, local.epochs, local.local_steps) == (
            "sgd",
            client,
            batch,
            1,
            None,
        )
        assert (options["cohort"].kind, options["cohort"].clients_per_round) == ("arrivals", cohort)
        if method.algorithm in ("fedtem", "fedtkm", "min-loss"):
            assert (options["lam"], options["eps"], method.all_transforms) == (lam, smooth, ())
        elif "lam" in options:
            assert options["lam"] == 0


@EVERY
@pytest.mark.parametrize("scale", SCALES)
def test_every_method_of_the_paper_is_there_with_two_branches(name, scale):
    experiment = recipe(name, scale)
    wanted = {key: value for key, value in METHODS.items() if (name, key) != ("stackoverflow", "T-shot")}
    assert {method.name: method.algorithm for method in experiment.method} == wanted
    layer = "projection" if name == "stackoverflow" else "head"
    for method in experiment.method:
        said = method.settings()
        if method.algorithm == "fedavg":  # Figure 9
            continue
        count, of = ("components", "component_layer") if method.algorithm == "fedem" else ("branches", "branch_layer")
        assert (said[count], said[of]) == (2, layer)
    assert [m.name for m in experiment.method if experiment.shift_of(m).who.kind == "always"] == [
        "No shift", "No shift (s)",
    ]  # fmt: skip
    assert experiment.baseline == "No shift"
    assert len(experiment.claim) >= 8


@EVERY
@pytest.mark.parametrize("scale", SCALES)
def test_priors_are_those_that_the_paper_chose_and_know_the_period(name, scale):
    experiment = points(recipe(name, scale))[0].experiment
    period = experiment.shift.who.period
    prior = {m.name: m.settings()["prior"] for m in experiment.method if "prior" in m.settings()}
    curve = "cosine" if name == "stackoverflow" else "linear"
    for method, kind in (("FedTEM", curve), ("FedTEM by certainty", curve), ("FedTKM", "linear")):
        assert (prior[method].kind, prior[method].period, prior[method].phase) == (kind, period, 0)
    assert prior["EM only by certainty"].kind == prior["EM only, overwritten"].kind == "em-only"
    options = {m.name: m.settings() for m in experiment.method}
    printed = options["FedTKM"]["alpha"]
    assert (printed.kind, printed.eta, printed.schedule) == ("integral", 0.02, "zero-mid")
    assert options["FedTKM leaky"]["alpha"].kind == "leaky"
    assert options["FedTKM leaky"]["max_update_norm"] == (1.0 if name == "stackoverflow" else None)
    assert (options["FedTEM"]["update"].kind, options["FedTEM by certainty"]["beta"]) == ("overwrite", 0.99)
    assert (prior["SCSGD"].kind, prior["SCSGD"].period) == ("block", period)
    if "T-shot" in options:
        assert options["T-shot"]["shots"] == period or scale == "nano"
    assert options["FedTKM"]["rescale"]  # Eq. 11 at test time
    assert {m.decide_per for m in experiment.method if m.algorithm == "fedtkm"} == {"batch"}  # section 3.2
    together = "sample" if name == "stackoverflow" else "batch"
    assert {m.decide_per for m in experiment.method if m.algorithm == "fedtem"} == {together}


P = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)
SHIFTS = {(curve, p) for curve in ("linear", "cosine") for p in P}
FIGURES = {
    "emnist": SHIFTS, "cifar110": SHIFTS, "stackoverflow": SHIFTS,  # Figures 2 and 9
    "priors": SHIFTS, "branch-choice": SHIFTS, "smoothing": SHIFTS, "selection": SHIFTS, "period-length": SHIFTS,
    "local-size": {("cosine", 1.0)},
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_the_paper_have_both_curves_and_its_seven_exponents(name):
    played = [point.experiment for point in points(recipe(name, "paper"))]
    assert {(one.shift.who.curve, one.shift.who.exponent) for one in played} == FIGURES[name]
    assert {one.seeds for one in played} == {(0, 1, 2)}
    assert len({one.shift.who.period for one in played}) == (6 if name == "period-length" else 1)


ABLATIONS = tuple(name for name in FIGURES if name not in NAMES)


@pytest.mark.parametrize("name", [name for name in ABLATIONS if name != "priors"])
def test_figures_of_the_paper_are_of_its_own_forms(name):
    """The one on priors has both forms."""
    for method in recipe(name, "paper").method:
        options = method.settings()
        assert not method.all_transforms
        if method.algorithm == "fedtem":
            printed = (options["update"].kind, options["prior"].kind == "em-only" or not options["consistent_only"])
            assert printed == ("overwrite", True)
        if method.algorithm == "fedtkm":
            assert (options["update"].kind, options["alpha"].kind) == ("overwrite", "integral")
            assert options["rescale"]


@pytest.mark.parametrize("name", ABLATIONS)
def test_figures_of_the_paper_are_on_its_data(data, name):
    """The first point of each figure, with few clients, on rows in EMNIST's format."""
    fewer = [*SMALL["emnist"], "method.cohort=3", "data.held_out_clients={clients = 4, samples = 10}"]
    wide = recipe(name, "paper", *fewer)
    assert (wide.data.source.kind, wide.data.source.path, wide.rounds) == ("idx", "emnist-byclass", 2049)
    main = recipe("emnist", "paper")
    assert (wide.data.groups, wide.model) == (main.data.groups, main.model)
    assert recipe(name, "paper").data.partition == main.data.partition
    experiment = points(wide)[0].experiment
    preflight(experiment)
    for method in experiment.method:
        options = method.settings()
        server, local = options["server"], options["local"]
        assert (server.kind, server.lr, server.eps, local.lr) == ("keras-adam", 10**-2.5, 1e-4, 10**-1.5)
        if name != "smoothing" and options.get("lam"):
            assert (options["lam"], options["eps"]) == (0.5, 0.1)


def test_the_smoothing_of_idle_branches_is_searched_for_every_method_that_has_it():
    tried = set()
    for point in points(recipe("smoothing", "paper")):
        options = {m.name: m.settings() for m in point.experiment.method}
        at = {(options[name]["lam"], options[name]["eps"]) for name in ("FedTEM", "FedTKM", "Min Loss")}
        assert len(at) == 1
        tried |= at
        assert {options[f"{name}, not at all"]["lam"] for name in ("FedTEM", "FedTKM", "Min Loss")} == {0}
    assert tried == {(lam, eps) for lam in (0.1, 0.25, 0.5) for eps in (0.1, 0.5, 1.0)}


@EVERY
@pytest.mark.parametrize("scale", SCALES)
def test_a_period_has_eight_points_or_more(name, scale):
    experiment = recipe(name, scale)
    assert experiment.shift.who.period / experiment.eval_every >= 8
    assert experiment.rounds >= experiment.shift.who.period


# -- without the data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "missing"), [
    ("emnist", "emnist-byclass"), ("cifar110", "cifar-100-binary"), ("stackoverflow", "stackoverflow.jsonl"),
])  # fmt: skip
def test_without_its_data_the_papers_size_stops_with_one_line(capsys, tmp_path, monkeypatch, name, missing):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDTIDE_DATA", str(tmp_path / "data"))
    said = refused(capsys, tmp_path, "run", f"recipe:fedtem-{name}", "--scale", "paper", "--out", tmp_path / "run")
    tried = f"{tmp_path / 'data' / missing}, {missing}"
    assert said == f"data.source: no such file or folder: {tried}; set data.directory or FEDTIDE_DATA"


# -- with data that look like it ---------------------------------------------------------------------------------------


SMALL = {
    "emnist": [f"data.partition.of.{group}.{key}" for group in ("day", "night") for key in ("clients=3", "samples=15")],
    "cifar110": [
        f"data.partition.of.{group}.{key}" for group in ("day", "night") for key in ("clients=3", "samples=40")
    ],
    "stackoverflow": ["method.cohort=3"],
}
PARAMETERS = {"emnist": 1_214_588, "cifar110": 11_279_772}
"""Of the paper's networks with two branches."""


@EVERY
def test_the_papers_size_fits_data_in_the_published_formats(data, name):
    experiment = recipe(name, "paper", *SMALL[name], "method.cohort=3")
    kept = tuple(method for method in experiment.method if method.name == "FedTEM")
    experiment = experiment.model_copy(update={"method": kept, "claim": (), "baseline": None})
    preflight(experiment)
    rows = rows_of(experiment, 0)
    population = population_of(experiment, experiment.shift, 0)
    assert population.group_names == ("day", "night")
    assert population.expected(Moment(0, 256)).tolist() == [1, 0]
    mine = [set(rows.y[population.parts["train"].rows[_of(population, k)]].flatten().tolist()) for k in (0, 1)]
    if name == "emnist":
        assert mine[0] == set(range(10))
        assert mine[1] <= set(range(10, 62))
    if name == "cifar110":
        assert mine[0] <= set(range(100, 110))
        assert mine[1] <= set(range(100))
        assert rows.classes == 110
        assert tuple(population.shard(0, Moment(0, 1)).x.shape[1:]) == (3, 24, 24)
    if name == "stackoverflow":
        assert [population.names[i].split("/")[1] for i in (0, 1)] == ["answer", "question"]
        assert population.group.tolist() == [1, 0] * 4
        assert population.counts(population.clients, "test").tolist() == [2] * 8
    else:
        task = with_branches(task_of(experiment, experiment.method[0], rows), "head", 2)
        assert sum(p.numel() for p in task.init(Rng(0)).params.values()) == PARAMETERS[name]


def _of(population, group: int) -> torch.Tensor:
    """Which training entries belong to clients of a group."""
    return population.group[population.parts["train"].owner] == group


def test_partitions_of_the_papers_size_have_its_numbers_of_clients():
    """Table 1: 3383 clients with 341,873 digits, 3400 with 329,712 characters; 500 and 500 with 50,000 each."""
    of = recipe("emnist", "paper").data.partition.of
    assert {group: part.clients for group, part in of.items()} == {"day": 3383, "night": 3400}
    assert [round(n / of[group].clients) for group, n in (("day", 341_873), ("night", 329_712))] == [101, 97]
    assert [part.samples for part in of.values()] == [101, 97]
    of = recipe("cifar110", "paper").data.partition.of
    assert [(part.kind, part.clients, part.samples) for part in of.values()] == [
        ("dirichlet", 500, 100), ("pachinko", 500, 100),
    ]  # fmt: skip
    assert (of["day"].alpha, of["night"].alpha, of["night"].beta, of["night"].groups) == (1.0, 0.1, 10.0, "cifar-100")
    assert recipe("stackoverflow", "paper").data.source.max_samples == 512
