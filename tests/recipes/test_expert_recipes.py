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
        if method.name == "Local":
            assert options["cohort"].clients_per_round == 1
            continue
        local = options["local"]
        assert (local.lr, local.batch_size, local.epochs, local.weight_decay) == (5.86e-3, 10, 3, 1.1e-3)
        assert options["cohort"].clients_per_round == 20
        if name == "experts-cifar10" and method.name != "IFCA":
            assert options["exploration"].epsilon == 0.33


@pytest.mark.parametrize("name", ALL)
def test_what_clients_train_for_themselves_is_that_of_table_1(name):
    seen = set()
    for _, _, options in methods_of(name, "paper"):
        way = options.get("personal")
        if way is None or way.kind == "choice":
            continue
        seen.add(way.kind)
        solver = way.solver
        assert (solver.optimizer, solver.epochs, solver.batch_size) == ("adamw", 200, 10)
        if way.kind == "fine-tuned":
            assert solver.lr == 1e-4
            continue
        femnist = name == "experts-femnist"
        assert (solver.lr, solver.weight_decay) == (1.67e-3 if femnist else 2.69e-4, 9.89e-3)
        if way.kind == "mixture":
            assert (way.gating.lr, way.gating.weight_decay) == (3.07e-3 if femnist else 3e-6, 6.88e-4)
            gate = (way.gate.channels, way.gate.dense)
            assert gate == (((64, 16), (256,)) if femnist else ((12, 12), (8,)))
    assert seen >= {"fine-tuned", "mixture"}


def test_writers_of_femnist_take_part_three_in_a_hundred():
    for experiment, method, options in methods_of("experts-femnist", "paper"):
        assert (experiment.rounds, experiment.data.partition.clients) == (4000, 182)
        assert options["cohort"].clients_per_round == (1 if method.name == "Local" else 6)


def test_published_cfl_does_one_epoch():
    for experiment, method, options in methods_of("cfl-splits", "paper"):
        local = options["local"]
        assert (local.epochs, local.lr, local.momentum) == (1, 0.1, 0.9)
        if method.algorithm in ("cfl", "cfl-released") and method.name != "CFL, default thresholds":
            assert (options["eps1"], options["eps2"], options["split_after"]) == (0.4, 1.6, 20)
        assert experiment.rounds == 80


def test_ifca_on_turned_digits_does_ten_full_batch_steps():
    for experiment, method, options in methods_of("ifca-recovery", "paper"):
        assert (experiment.rounds, experiment.data.partition.clients, experiment.data.partition.samples) == (
            300,
            2400,
            100,
        )
        assert (options["local"].batch_size, options["local"].epochs, options["local"].lr) == (0, 10, 0.1)
        assert method.name == "FedAvg" or options["clusters"] == 4
