"""The experiments on clusters and experts: the settings of the paper's Table 1 and of the released configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtide.config import points, read

FOLDER = Path(__file__).parents[2] / "src/fedtide/recipes"
CIFAR = ("experts-cifar10", "experts-fmnist")
ALL = (*CIFAR, "experts-rotated", "experts-femnist")


def methods_of(name: str, scale: str):
    for point in points(read(FOLDER / f"{name}.toml", scale=scale)):
        for method in point.experiment.method:
            yield point.experiment, method, method.settings()


@pytest.mark.parametrize("name", CIFAR)
def test_rates_and_networks_are_those_of_table_1(name):
    for experiment, method, options in methods_of(name, "paper"):
        model = experiment.model
        assert (model.kind, model.channels, model.dense, model.dropout) == ("cifar-cnn", (128, 32), (1024,), (0, 0.8))
        assert (experiment.data.partition.clients, experiment.data.partition.pairs) == (20, "product")
        assert (experiment.data.partition.samples, experiment.data.split.val) == (625, 0.2)  # 500 to train on
        if method.algorithm == "local":
            assert (options["solver"].lr, options["model"].channels) == (2.69e-4, (32, 256))
            continue
        local = options["local"]
        assert (local.lr, local.batch_size, local.epochs, local.weight_decay) == (5.86e-3, 10, 3, 1.1e-3)
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
    personalized = [each for each in method.all_transforms if each.kind == "personalized"]
    own = [method.settings()["mixture"]] if method.algorithm == "aem" and not personalized else []
    return [*own, *(way for each in personalized for way in (each.way, *each.others) if way is not None)]


@pytest.mark.parametrize("name", ALL)
def test_what_clients_train_for_themselves_is_that_of_the_paper(name):
    seen = set()
    own, gating, gate, (epochs, batch) = TABLE[name]
    for _, method, _ in methods_of(name, "paper"):
        for way in ways_of(method):
            if way.kind == "choice":
                continue
            seen.add(way.kind)
            solver = way.solver
            assert (solver.optimizer, solver.batch_size) == ("adamw", batch)
            if way.kind == "fine-tuned":
                assert (solver.lr, solver.epochs) == (1e-4, 200)
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
    experiment = read(FOLDER / "experts-cifar10.toml", scale=scale)
    ways = {
        method.name: [method.name, *(method.named(other).name for other in method.others)]
        for method in experiment.method
    }
    for name in ("IFCA", "Explored"):
        own = f"{name} (choice)"
        assert set(ways[own]) >= {own, *(f"{name}, {way}" for way in ("fine-tuned", "ensemble", "mixture"))}
    assert ways["Local"] == ["Local"]
    for point in points(experiment):
        assert (
            len(
                {
                    method.settings()["clusters"]
                    for method in point.experiment.method
                    if method.name in ("IFCA (choice)", "Explored (choice)")
                }
            )
            == 1
        )


def test_writers_of_femnist_take_part_three_in_a_hundred():
    for experiment, method, options in methods_of("experts-femnist", "paper"):
        assert (experiment.rounds, experiment.data.partition.clients) == (4000, 182)
        assert experiment.model.dropout == 0.6593
        ways = ways_of(method)
        own = [options["model"]] if method.algorithm == "local" else [w.model for w in ways if hasattr(w, "model")]
        assert {model.dropout for model in own} <= {0.4883}
        if method.algorithm != "local":
            assert options["cohort"].clients_per_round == 6
            assert (options["local"].lr, options["local"].weight_decay) == (0.07239, 7.273e-4)


def test_turned_pictures_have_the_released_rates():
    for experiment, _, options in methods_of("experts-rotated", "paper"):
        local, model = options["local"], experiment.model
        assert (local.lr, local.weight_decay, local.batch_size, local.epochs) == (5.148e-4, 5.348e-4, 50, 5)
        assert (model.channels, model.dense, model.dropout) == ((64, 64), (384, 194), (0.0, 0.2162))
        assert options["cohort"].clients_per_round == 20


def test_published_cfl_does_one_epoch():
    for experiment, method, options in methods_of("cfl-splits", "paper"):
        local = options["local"]
        assert (local.epochs, local.lr, local.momentum) == (1, 0.1, 0.9)
        if method.algorithm == "cfl" and method.name != "CFL, default thresholds":
            assert (options["eps1"], options["eps2"], options["split_after"]) == (0.4, 1.6, 20)
        assert experiment.rounds == 80
        assert options.get("clusters", 4) == 4


def test_ifca_on_turned_digits_does_ten_full_batch_steps():
    for experiment, method, options in methods_of("ifca-recovery", "paper"):
        assert (experiment.rounds, experiment.data.partition.clients, experiment.data.partition.samples) == (
            300,
            2400,
            100,
        )
        assert (options["local"].batch_size, options["local"].epochs, options["local"].lr) == (0, 10, 0.1)
        assert method.name == "FedAvg" or options["clusters"] == 4
