"""The experiments on blends: the settings that the paper on pFedEM prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtide.config import points, read

FOLDER = Path(__file__).parents[2] / "src/fedtide/recipes"
PFEDEM = ("pfedem-emnist", "pfedem-cifar", "pfedem-three", "pfedem-shared-labels")


@pytest.mark.parametrize("name", PFEDEM)
def test_eighty_clients_of_twenty_steps_in_two_hundred_rounds_of_ten_cycles_in_six_hundred(name):
    for point in points(read(FOLDER / f"{name}.toml", scale="paper")):
        experiment = point.experiment
        assert experiment.rounds == (600 if experiment.shift.what.cycles == 10 else 200)
        assert experiment.data.partition.clients == 80
        for method in experiment.method:
            local = method.settings()["local"]
            k = 3 if name == "pfedem-three" else 2
            assert local.local_steps == (20 * k if method.name == "FedAvg, all steps" else 20)
            assert (local.lr, local.batch_size) == (0.03 if name == "pfedem-cifar" else 0.01, 128)
            assert getattr(method.settings()["cohort"], "kind", None) == "everyone"


@pytest.mark.parametrize(("name", "test"), [("pfedem-emnist", "balanced"), ("pfedem-cifar", "mixture")])
def test_digits_and_letters_are_judged_half_and_half_and_cifar_on_the_blend_of_the_round(name, test):
    for scale in ("cpu", "paper"):
        found = [p.experiment for p in points(read(FOLDER / f"{name}.toml", scale=scale))]
        assert {e.shift.what.test for e in found} == {test}
        cycles = {1, 3, 10} if name == "pfedem-emnist" or scale == "paper" else {3}
        assert {(e.shift.what.curve, e.shift.what.cycles) for e in found} == {
            (curve, c) for curve in ("linear", "cosine") for c in cycles
        }


@pytest.mark.parametrize("name", PFEDEM)
def test_one_of_them_is_as_the_paper_prints_it(name):
    for point in points(read(FOLDER / f"{name}.toml", scale="paper")):
        printed = next(m.settings() for m in point.experiment.method if m.name == "pFedEM on PCA")
        said = (printed["update"].kind, printed["normalize_by"], printed["inference"])
        assert said == ("overwrite", "participants", "global")
        assert printed["gaussian_init"].kind == "random"


def test_fedem_has_the_network_and_the_values_of_its_code():
    """Those of models.py, datasets.py and run_emnist.sh; the steps of its rate are those of "multi_step"."""
    (point,) = points(read(FOLDER / "fedem-emnist.toml", scale="paper"))
    experiment = point.experiment
    (scaled,) = experiment.data.transforms
    assert (scaled.mean, scaled.std, experiment.model.padding) == ((0.1307,), (0.3081,), "valid")
    assert (experiment.rounds, experiment.data.partition.clients, experiment.data.partition.alpha) == (200, 100, 0.4)
    for method in experiment.method:
        local = method.settings()["local"]
        assert local.lr == (0.05 if method.algorithm == "fedem" else 0.01)
        assert (local.batch_size, local.epochs, local.momentum, local.weight_decay) == (128, 1, 0.9, 5e-4)
        assert (local.lr_schedule.at, local.lr_schedule.factor) == ((0.5, 0.75), 0.1)
