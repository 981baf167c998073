"""Settings of papers in their recipes, at the size "paper" unless it is said otherwise."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedtide.config import points, read
from fedtide.core.errors import FedtideError
from fedtide.runs.build import algorithm_of, rows_of, task_of

FOLDER = Path(__file__).parents[2] / "src/fedtide/recipes"
SCALES = ("nano", "cpu", "paper")


def recipe(name: str, scale: str = "paper", *sets: str):
    return read(FOLDER / f"{name}.toml", scale=scale, sets=sets)


def played(name: str, scale: str = "paper") -> list:
    return [point.experiment for point in points(recipe(name, scale))]


def methods_of(name: str) -> Iterator[tuple]:
    for experiment in played(name):
        for method in experiment.method:
            yield experiment, method, method.settings()


# -- periodic shift: fedtem --------------------------------------------------------------------------------------------

FEDTEM = ("emnist", "cifar110", "stackoverflow")
EVERY = pytest.mark.parametrize("name", FEDTEM)

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


@EVERY
def test_fedtem_has_the_settings_of_table_2(name):
    rate, eps, client, cohort, batch, rounds, lam, smooth = TABLE_2[name]
    experiment = recipe(f"fedtem-{name}")
    assert (experiment.rounds, experiment.seeds, experiment.shift.who.period) == (rounds, (0, 1, 2), 256)
    assert (experiment.shift.who.curve, experiment.shift.who.exponent) == ("linear", 1.0)
    for method in experiment.method:
        options = method.settings()
        server, local = options["server"], options["local"]
        assert (server.kind, server.lr, server.eps, server.beta1, server.beta2) == ("keras-adam", rate, eps, 0.9, 0.999)
        assert (local.optimizer, local.lr, local.batch_size) == ("sgd", client, batch)
        assert (local.epochs, local.local_steps) == (1, None)
        assert (options["cohort"].kind, options["cohort"].clients_per_round) == ("arrivals", cohort)
        if method.algorithm in ("fedtem", "fedtkm", "min-loss"):
            assert (options["lam"], options["eps"], method.all_transforms) == (lam, smooth, ())
        elif "lam" in options:
            assert options["lam"] == 0


@EVERY
@pytest.mark.parametrize("scale", SCALES)
def test_fedtem_has_every_method_with_two_branches_and_the_priors_of_the_paper(name, scale):
    experiment = played(f"fedtem-{name}", scale)[0]
    period = experiment.shift.who.period
    assert period / experiment.eval_every >= 8
    assert experiment.rounds >= period
    wanted = {key: value for key, value in METHODS.items() if (name, key) != ("stackoverflow", "T-shot")}
    assert {method.name: method.algorithm for method in experiment.method} == wanted
    options = {method.name: method.settings() for method in experiment.method}
    layer = "projection" if name == "stackoverflow" else "head"
    for method in experiment.method:
        kind = "component" if method.algorithm == "fedem" else "branch"
        if method.algorithm != "fedavg":  # Figure 9
            own = options[method.name]
            assert (own["components" if kind == "component" else "branches"], own[f"{kind}_layer"]) == (2, layer)
    always = [method.name for method in experiment.method if experiment.shift_of(method).who.kind == "always"]
    assert always == ["No shift", "No shift (s)"]
    assert (experiment.baseline, len(experiment.claim) >= 8) == ("No shift", True)
    prior = {method: own["prior"] for method, own in options.items() if "prior" in own}
    curve = "cosine" if name == "stackoverflow" else "linear"
    for method, kind in (("FedTEM", curve), ("FedTEM by certainty", curve), ("FedTKM", "linear")):
        assert (prior[method].kind, prior[method].period, prior[method].phase) == (kind, period, 0)
    assert prior["EM only by certainty"].kind == prior["EM only, overwritten"].kind == "em-only"
    printed, leaky = options["FedTKM"]["alpha"], options["FedTKM leaky"]
    assert (printed.kind, printed.eta, printed.schedule) == ("integral", 0.02, "zero-mid")
    assert (leaky["alpha"].kind, leaky["max_update_norm"]) == ("leaky", 1.0 if name == "stackoverflow" else None)
    assert (options["FedTEM"]["update"].kind, options["FedTEM by certainty"]["beta"]) == ("overwrite", 0.99)
    assert (prior["SCSGD"].kind, prior["SCSGD"].period) == ("block", period)
    assert scale == "nano" or options.get("T-shot", {"shots": period})["shots"] == period
    assert options["FedTKM"]["rescale"]  # Eq. 11 at test time
    assert {m.decide_per for m in experiment.method if m.algorithm == "fedtkm"} == {"batch"}  # section 3.2
    together = "sample" if name == "stackoverflow" else "batch"
    assert {m.decide_per for m in experiment.method if m.algorithm == "fedtem"} == {together}


P = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)
SHIFTS = {(curve, p) for curve in ("linear", "cosine") for p in P}
FIGURES = {
    **dict.fromkeys((*FEDTEM, "priors", "branch-choice", "smoothing", "selection", "period-length"), SHIFTS),
    "local-size": {("cosine", 1.0)},
}
ABLATIONS = tuple(name for name in FIGURES if name not in FEDTEM)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_fedtem_have_both_curves_and_seven_exponents_in_their_printed_form(name):
    experiments = played(f"fedtem-{name}")
    assert {(one.shift.who.curve, one.shift.who.exponent) for one in experiments} == FIGURES[name]
    assert {one.seeds for one in experiments} == {(0, 1, 2)}
    assert len({one.shift.who.period for one in experiments}) == (6 if name == "period-length" else 1)
    for method in recipe(f"fedtem-{name}").method if name in ABLATIONS and name != "priors" else ():
        options = method.settings()
        assert not method.all_transforms
        if method.algorithm == "fedtem":
            assert options["update"].kind == "overwrite"
            assert options["prior"].kind == "em-only" or not options["consistent_only"]
        if method.algorithm == "fedtkm":
            assert (options["update"].kind, options["alpha"].kind) == ("overwrite", "integral")
            assert options["rescale"]


def test_the_smoothing_of_idle_branches_is_searched_for_every_method_that_has_it():
    tried = set()
    for experiment in played("fedtem-smoothing"):
        options = {m.name: m.settings() for m in experiment.method}
        at = {(options[name]["lam"], options[name]["eps"]) for name in ("FedTEM", "FedTKM", "Min Loss")}
        assert len(at) == 1
        tried |= at
        assert {options[f"{name}, not at all"]["lam"] for name in ("FedTEM", "FedTKM", "Min Loss")} == {0}
    assert tried == {(lam, eps) for lam in (0.1, 0.25, 0.5) for eps in (0.1, 0.5, 1.0)}


def test_partitions_of_fedtem_have_the_clients_of_table_1():
    """3383 clients with 341,873 digits, 3400 with 329,712 characters; 500 and 500 with 50,000 each."""
    of = recipe("fedtem-emnist").data.partition.of
    assert {group: part.clients for group, part in of.items()} == {"day": 3383, "night": 3400}
    assert [part.samples for part in of.values()] == [round(341_873 / 3383), round(329_712 / 3400)] == [101, 97]
    of = recipe("fedtem-cifar110").data.partition.of
    parts = [(part.kind, part.clients, part.samples) for part in of.values()]
    assert parts == [("dirichlet", 500, 100), ("pachinko", 500, 100)]
    assert (of["day"].alpha, of["night"].alpha, of["night"].beta, of["night"].groups) == (1.0, 0.1, 10.0, "cifar-100")
    assert recipe("fedtem-stackoverflow").data.source.max_samples == 512


# -- the re-weighted softmax: wsm --------------------------------------------------------------------------------------

PLAIN = [("FedAvg", "fedavg", "cross-entropy"), ("FedAvg, WSM", "fedavg", "wsm")]
SIX = [
    (f"{name}{more}", name.lower(), loss)
    for name in ("FedAvg", "FedProx", "SCAFFOLD")
    for more, loss in (("", "cross-entropy"), (", WSM", "wsm"))
]
OURS = ("FedAvg, WSM blended (safe)", "fedavg", "wsm")
RATES = [0.007, 0.01, 0.03, 0.05, 0.07, 0.1, 0.3, 0.5, 0.7]
NORMED = [{"kind": "resnet18", "form": "cifar", "norm": norm} for norm in ("group", "batch", "mixed")]
BOTH = {"data.source.path, data.source.classes": [["cifar-10-batches-bin", 10], ["cifar-100-binary", 100]]}
# Clients, cohort, rounds; the methods, and what is swept: Tables 3.1 to 3.3, Figures 2.2 and 3.3.
THESIS = {
    "cifar10": (100, 10, 4000, PLAIN, {"method.local.lr": RATES}),
    "cifar100": (100, 2, 4000, PLAIN, {"method.local.lr": RATES}),
    "femnist": (100, 10, 2000, PLAIN, {"method.local.lr": RATES}),
    "baselines": (20, 2, 1500, [*SIX, OURS], BOTH),
    "norms": (100, 10, 8000, PLAIN, {"model": NORMED, "method.local.lr": [0.005, *RATES[:-2]]}),
    "forgetting": (100, 10, 4000, PLAIN, {"method.cohort": [10]}),
    "heterogeneity": (100, 10, 4000, PLAIN, {"data.partition.alpha": [0.01, 0.1, 0.2, 0.5, 1.0, 10.0, 100.0]}),
    "participation": (100, None, 4000, PLAIN, {"method.cohort": [1, 2, 5, 10, 30, 60]}),
    "local-work": (100, 10, 4000, PLAIN, {"method.local.epochs": [1, 3, 5, 10, 20]}),
}


@pytest.mark.parametrize("name", THESIS)
def test_wsm_has_the_settings_of_the_thesis(name):
    clients, cohort, rounds, methods, swept = THESIS[name]
    experiment = recipe(f"wsm-{name}")
    late = 1 if name == "baselines" else 100  # the thesis judges it once
    assert (experiment.rounds, experiment.average_last, len(experiment.seeds)) == (rounds, late, 5)
    found = {key: [list(v) if isinstance(v, tuple) else v for v in values] for key, values in experiment.sweep.items()}
    if name in ("heterogeneity", "participation", "local-work"):
        assert found.pop("method.local.lr") == [0.1]
    assert found == swept
    for one in played(f"wsm-{name}"):
        partition = one.data.partition
        assert (partition.kind, partition.clients, partition.samples) == ("dirichlet", clients, None)
        assert partition.alpha == 0.1 or name == "heterogeneity"
        assert (one.data.split.val, one.model.kind, one.model.form) == (0.1, "resnet18", "cifar")
        assert one.model.norm == "mixed" or name == "norms"
        if name != "femnist":
            (normalize,) = one.data.transforms
            assert (normalize.mean, normalize.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
        assert all(m.loss.blend == 0.3 * ("blended" in m.name) for m in one.method if m.loss.kind == "wsm")
        assert [(m.name, m.algorithm, m.loss.kind) for m in one.method] == methods
        for method in one.method:
            local = method.settings()["local"]
            assert method.settings()["cohort"].clients_per_round == cohort or name == "participation"
            assert (local.optimizer, local.batch_size, local.momentum, local.weight_decay) == ("sgd", 64, 0.0, 1e-4)
            assert local.epochs == 3 or name == "local-work"
            assert name != "baselines" or local.lr == (0.1 if method.algorithm == "fedavg" else 0.01)
            assert method.algorithm != "fedprox" or local.proximal == 1.1


@pytest.mark.parametrize("name", THESIS)
def test_random_crops_have_a_border_of_the_color_that_the_thesis_has(name):
    """Black for CIFAR, padded before it is normalized there; paper for characters."""
    crop, *rest = recipe(f"wsm-{name}").method[0].settings()["local"].augment
    if name == "femnist":
        assert (crop.padding, crop.fill, rest) == (2, "edge", [])
        return
    (normalize,) = recipe(f"wsm-{name}").data.transforms
    black = [-mean / std for mean, std in zip(normalize.mean, normalize.std, strict=True)]
    assert (crop.padding, crop.size, [step.kind for step in rest]) == (4, None, ["flip"])
    assert list(crop.fill) == pytest.approx(black, abs=1e-4)


def test_forgetting_is_measured_when_the_released_code_does():
    probed = recipe("wsm-forgetting").forgetting
    assert probed.rounds == (0, 1, 399, 799, 1199, 1599, 1999, 2399, 2799, 3199, 3599, 3999)
    assert (probed.part, probed.eval_clients) == ("val", 100)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "femnist", "baselines", "norms", "heterogeneity", "fmnist"])
def test_at_small_scale_every_method_is_tuned_alike(name):
    """Each method may choose among the same rates by validation rows, and seeds are five or more."""
    experiment = recipe(f"wsm-{name}", "cpu")
    assert min(len(experiment.sweep["method.local.lr"]) - 1, experiment.data.split.val) > 0
    assert len(experiment.seeds) >= 5
    assert any(claim.at for claim in experiment.claim)


# -- blends: pfedem and fedem ------------------------------------------------------------------------------------------

PFEDEM = ("pfedem-emnist", "pfedem-cifar", "pfedem-three", "pfedem-shared-labels")


@pytest.mark.parametrize("name", PFEDEM)
def test_pfedem_has_the_settings_of_its_paper(name):
    """Eighty clients of twenty steps in two hundred rounds, of ten cycles in six hundred; one method as printed."""
    for experiment in played(name):
        assert experiment.rounds == (600 if experiment.shift.what.cycles == 10 else 200)
        assert experiment.data.partition.clients == 80
        options = {method.name: method.settings() for method in experiment.method}
        for method, own in options.items():
            k = 3 if name == "pfedem-three" else 2
            assert own["local"].local_steps == (20 * k if method == "FedAvg, all steps" else 20)
            assert (own["local"].lr, own["local"].batch_size) == (0.03 if name == "pfedem-cifar" else 0.01, 128)
            assert own["cohort"].kind == "everyone"
        printed = options["pFedEM on PCA"]
        form = (printed["update"].kind, printed["normalize_by"], printed["inference"], printed["gaussian_init"].kind)
        assert form == ("overwrite", "participants", "global", "random")


@pytest.mark.parametrize(("name", "test"), [("pfedem-emnist", "balanced"), ("pfedem-cifar", "mixture")])
def test_digits_and_letters_are_judged_half_and_half_and_cifar_on_the_blend_of_the_round(name, test):
    for scale in ("cpu", "paper"):
        whats = [experiment.shift.what for experiment in played(name, scale)]
        assert {what.test for what in whats} == {test}
        cycles = {1, 3, 10} if name == "pfedem-emnist" or scale == "paper" else {3}
        expected = {(curve, count) for curve in ("linear", "cosine") for count in cycles}
        assert {(what.curve, what.cycles) for what in whats} == expected


def test_fedem_has_the_network_and_the_values_of_its_code():
    """Values of models.py, datasets.py and run_emnist.sh; the steps of its rate are those of "multi_step"."""
    for experiment, method, options in methods_of("fedem-emnist"):
        (scaled,) = experiment.data.transforms
        assert (scaled.mean, scaled.std, experiment.model.padding) == ((0.1307,), (0.3081,), "valid")
        partition, local = experiment.data.partition, options["local"]
        assert (experiment.rounds, partition.clients, partition.alpha) == (200, 100, 0.4)
        assert local.lr == (0.05 if method.algorithm == "fedem" else 0.01)
        epochs = 3 if method.name.endswith(" steps") else 1  # ours: one model with as many steps
        assert (local.batch_size, local.epochs, local.momentum, local.weight_decay) == (128, epochs, 0.9, 5e-4)
        assert (local.lr_schedule.at, local.lr_schedule.factor) == ((0.5, 0.75), 0.1)


# -- clusters and experts ----------------------------------------------------------------------------------------------

CIFAR = ("experts-cifar10", "experts-fmnist")


@pytest.mark.parametrize("name", CIFAR)
def test_experts_have_the_rates_and_networks_of_table_1(name):
    for experiment, method, options in methods_of(name):
        model, partition = experiment.model, experiment.data.partition
        assert (model.kind, model.channels, model.dense, model.dropout) == ("cifar-cnn", (128, 32), (1024,), (0, 0.8))
        assert (partition.clients, partition.pairs, partition.samples) == (20, "product", 750)
        split = experiment.data.split
        assert (split.merge, round(750 * split.test), split.val) == (True, 125, 0.2)  # 500 to train on
        if method.algorithm == "local":
            assert (options["solver"].lr, options["model"].channels) == (2.69e-4, (32, 256))
            continue
        local = options["local"]
        epochs = 6 if method.name.endswith(" steps") else 3  # ours: one model with as many steps
        assert (local.lr, local.batch_size, local.epochs, local.weight_decay) == (5.86e-3, 10, epochs, 1.1e-3)
        assert options["cohort"].clients_per_round == 20
        if name == "experts-cifar10" and method.name in ("Explored (choice)", "Anchored (safe)"):
            assert options["exploration"].epsilon == 0.33


# Rates and weight decays of local expert and gate, the gate's maps and widths, epochs and batch: Table 1 for CIFAR-10,
# the released configurations for the others.
TABLE = {
    **dict.fromkeys(CIFAR, ((2.69e-4, 9.89e-3), (3e-6, 6.88e-4), ((12, 12), (8,)), (200, 10))),
    "experts-femnist": ((1.673e-3, 1.462e-2), (3.07e-3, 2.688e-2), ((64, 16), (256,)), (200, 10)),
    "experts-rotated": ((2.016e-4, 1.894e-2), (2.111e-5, 1.361e-2), ((16, 16), (128,)), (600, 50)),
}


def ways_of(method):
    """All that clients make for themselves; the method's own mixture, if no transform takes its place."""
    personalized = [transform for transform in method.all_transforms if transform.kind == "personalized"]
    own = [method.settings()["mixture"]] if method.algorithm == "aem" and not personalized else []
    return [*own, *(way for each in personalized for way in (each.way, *each.others) if way is not None)]


@pytest.mark.parametrize("name", TABLE)
def test_clients_train_for_themselves_as_in_the_paper(name):
    seen = set()
    own, gating, gate, (epochs, batch) = TABLE[name]
    for _, method, _ in methods_of(name):
        for way in ways_of(method):
            if way.kind == "choice":
                continue
            seen.add(way.kind)
            solver = way.solver
            assert (solver.optimizer, solver.batch_size) == ("adamw", batch)
            if way.kind == "fine-tuned":
                assert (solver.lr, solver.epochs) == (1e-4, epochs)
                continue
            assert ((solver.lr, solver.weight_decay), solver.epochs) == (own, epochs)
            if way.kind == "mixture":
                assert (way.gating.lr, way.gating.weight_decay) == gating
                assert (way.gate.channels, way.gate.dense) == gate
                assert way.tune or name != "experts-rotated"
    assert seen >= {"fine-tuned", "mixture"}


@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_all_columns_of_table_2_are_played(scale):
    """Five ways with and without exploration, at one point for each p and J; a model of one's own knows neither."""
    for experiment in played("experts-cifar10", scale):
        methods = {method.name: method for method in experiment.method}
        for name in ("IFCA", "Explored"):
            others = [methods[f"{name} (choice)"].named(other).name for other in methods[f"{name} (choice)"].others]
            assert {f"{name}, {way}" for way in ("fine-tuned", "ensemble", "mixture")} <= set(others)
        assert methods["Local"].others == []
        assert len({methods[f"{name} (choice)"].settings()["clusters"] for name in ("IFCA", "Explored")}) == 1


def test_experts_on_femnist_and_turned_pictures_have_the_released_values():
    for experiment, method, options in methods_of("experts-femnist"):
        assert (experiment.rounds, experiment.data.partition.clients, experiment.model.dropout) == (4000, 182, 0.6593)
        own = [options["model"]] if method.algorithm == "local" else []
        assert {model.dropout for model in own or [w.model for w in ways_of(method) if hasattr(w, "model")]} <= {0.4883}
        if method.algorithm != "local":
            local = options["local"]
            assert (options["cohort"].clients_per_round, local.lr, local.weight_decay) == (6, 0.07239, 7.273e-4)
    for experiment, _, options in methods_of("experts-rotated"):
        local, model = options["local"], experiment.model
        assert (local.lr, local.weight_decay, local.batch_size, local.epochs) == (5.148e-4, 5.348e-4, 50, 5)
        assert (model.channels, model.dense, model.dropout) == ((64, 64), (384, 194), (0.0, 0.2162))
        assert options["cohort"].clients_per_round == 20


def test_published_cfl_does_one_epoch_and_ifca_ten_full_batch_steps():
    for experiment, method, options in methods_of("cfl-splits"):
        local = options["local"]
        assert (experiment.rounds, local.epochs, local.lr, local.momentum) == (80, 1, 0.1, 0.9)
        if method.algorithm == "cfl" and method.name != "CFL, default thresholds":
            assert (options["eps1"], options["eps2"], options["split_after"]) == (0.4, 1.6, 20)
        assert options.get("clusters", 4) == 4
    for experiment, method, options in methods_of("ifca-recovery"):
        partition, local = experiment.data.partition, options["local"]
        assert (experiment.rounds, partition.clients, partition.samples) == (300, 2400, 100)
        assert (local.batch_size, local.epochs, local.lr) == (0, 10, 0.1)
        assert method.name == "FedAvg" or options["clusters"] == 4


# -- fielding ----------------------------------------------------------------------------------------------------------

FIELDING = [path.stem.removeprefix("fielding-") for path in sorted(FOLDER.glob("fielding-*.toml"))]
# Tables 1 and 2: rounds, rounds between new data, learning rate, batch, local steps, participants; and the rounds that
# final accuracy is a mean of: one arrival or more, of Open Images the paper's own (section 3.1).
TABLES = {
    "fmow": (2000, 2, 0.05, 20, 20, 50, 100),
    "cityscapes": (200, 30, 0.001, 20, 20, 20, 30),
    "waymo": (100, 20, 0.001, 20, 20, 20, 20),
    "openimages": (400, 50, 0.05, 20, 20, 200, 100),
}
SHOWN_ON = {
    **{name: name for name in TABLES},
    **dict.fromkeys(
        ("aggregators", "feddrift", "heterogeneity", "malicious", "selection", "static", "threshold"), "fmow"
    ),
    **dict.fromkeys(("concept-drift", "representations"), "cityscapes"),
}
"""Figures, with their data."""
TIMED = (*TABLES, "aggregators", "concept-drift", "feddrift", "representations", "selection")
"""Figures whose axis is time."""
WITHOUT_TERM = ("FedYogi", "Fielding, Yogi", "q-FedAvg", "Fielding, q = 1")
"""Methods without the term of FedProx: two rivals that have none, and their clusters."""
OWN = ("characters", "real-time", "small-model", "by-sums")
"""On other data, or of another kind."""


def test_every_recipe_of_fielding_is_of_some_figure():
    assert sorted([*SHOWN_ON, *OWN]) == FIELDING


@pytest.mark.parametrize(("name", "data"), SHOWN_ON.items())
def test_fielding_has_the_settings_of_its_tables(name, data):
    rounds, gap, lr, batch, steps, participants, last = TABLES[data]
    experiment = recipe(f"fielding-{name}")
    assert (experiment.rounds, experiment.average_last) == (rounds, last)
    assert data in experiment.data.source.path.lower().replace("openimage", "openimages")
    what = experiment.shift.what
    still = name in ("concept-drift", "static")  # all data are there throughout
    assert what.kind == "static" if still else (what.kind, what.gap, what.retention) == ("stream", gap, 100)
    for method in experiment.method:
        options = method.settings()
        local, cohort = options["local"], options["cohort"]
        assert (local.lr, local.batch_size, local.local_steps) == (lr, batch, steps)
        assert cohort.kind == "everyone" if name == "feddrift" else cohort.clients_per_round == participants
        if method.algorithm == "flexcfl" and name != "concept-drift":
            assert options["clusters"] == "silhouette"
    if name in TIMED:
        assert experiment.devices.kind == "traces"
        assert experiment.devices.network == ("vit" if data == "waymo" else "resnet")


@pytest.mark.parametrize("name", [name for name in FIELDING if name != "small-model"])
@pytest.mark.parametrize("scale", SCALES)
def test_the_rivals_of_fielding_weigh_clients_alike_and_pull_alike(name, scale):
    experiment, pull = recipe(f"fielding-{name}", scale), {}
    for method in experiment.method:
        options = method.settings()
        pull[method.name] = options["local"].proximal
        assert options["weighting"] == "uniform"
        assert pull[method.name] == (0.0 if method.name in WITHOUT_TERM else 0.1)
    for claim in experiment.claim:
        assert {pull[rival] for rival in claim.rivals} <= {pull[claim.method]}, claim.text


def test_the_small_network_is_the_clients_and_concepts_are_those_of_the_paper():
    for scale in SCALES:
        small = recipe("fielding-small-model", scale)
        for name in ("representations", "concept-drift"):
            theirs = recipe(f"fielding-{name}", scale)
            if (name, scale) != ("concept-drift", "cpu"):  # its digits are no letters
                assert (small.model, small.data.source) == (theirs.model, theirs.data.source)
                assert small.data.transforms == theirs.data.transforms
        shared, private = (experiment.shift.how for experiment in played("fielding-concept-drift", scale))
        assert (shared.concepts, shared.begin) == (4, "dealt")
        swaps = (private.concepts, private.begin, private.fraction)
        assert swaps == (None, "source", 0.5)


# -- every recipe -----------------------------------------------------------------------------------------------------

AT_PAPER_SIZE = [path.stem for path in sorted(FOLDER.glob("*.toml")) if "[scale.paper]" in path.read_text()]
LACKING = {
    "fedtem-stackoverflow": {method for method in METHODS if METHODS[method] not in ("vanilla", "fedavg")},
    "fielding-concept-drift": {"Embedding", "Gradient"},
    "fielding-representations": {"Embedding", "Gradient", "Combined"},
}
"""Methods that need what the toy task has not: layers of a language model, or a network that another recipe trains."""


@pytest.fixture(scope="module")
def toy():
    """A small experiment, its rows, and rows that all may see."""
    experiment = recipe("demo", "nano")
    rows = rows_of(experiment, 0)
    return experiment, rows, rows.take(torch.arange(60))[0].float()


@pytest.mark.parametrize("name", AT_PAPER_SIZE)
def test_every_method_takes_the_settings_of_its_paper(toy, name):
    experiment, rows, public = toy
    for method in points(recipe(name))[0].experiment.method:
        task = task_of(experiment, method.model_copy(update={"init_from": None}), rows, public)
        if method.name in LACKING.get(name, ()):
            with pytest.raises(FedtideError, match=r"_layer: found 'projection'|no such file or folder: .*small-model"):
                algorithm_of(method, task)
        else:
            assert algorithm_of(method, task).name
