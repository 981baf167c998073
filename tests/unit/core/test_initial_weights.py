"""Weights to begin with, from a file or from another run."""

import pytest
import torch
from safetensors.torch import save_file

from fedtide.algorithms import REGISTRY
from fedtide.core.base import Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.mixtures.branches import branch_of
from fedtide.runs.build import host_of, task_of
from fedtide.runs.digest import digest_of
from fedtide.runs.preflight import preflight
from fedtide.runs.runner import Run
from helpers.toys import played, toy

ALIKE = {"ifca", "fedem", "fedgmm", "fedrc", "fedsoft", "min-loss", "vanilla"}
"""Whose models nothing but their weights tells apart."""


def drawn(model=None, seed: int = 7) -> Weights:
    experiment = toy("fedavg", **({} if model is None else {"model": model}))
    rows = host_of(experiment, experiment.method[0], 0).population.rows
    return task_of(experiment, experiment.method[0], rows).init(Rng(seed))


@pytest.fixture
def saved(tmp_path):
    """A file, and the weights in it."""
    weights = drawn()
    save_file(weights.params, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors", weights


def named(name: str) -> str:
    """The variant of the toys that runs as it is."""
    return {"pfedem": "pfedem pca", "fedgmm": "fedgmm pca"}.get(name, name)


@pytest.mark.parametrize("name", sorted(REGISTRY.keys() - ALIKE))
def test_every_method_begins_with_the_weights_that_it_is_given(name, saved):
    path, weights = saved
    received = played(toy(named(name), {"init_from": str(path)}), rounds=1).steps[0].received.weights
    for model in received if isinstance(received, tuple) else (received,):
        if name == "flexcfl":  # its groups begin with what members made of them
            continue
        for key, value in model.params.items():
            plain = key if branch_of(key) is None else key.replace(f"copies.{branch_of(key)}.", "")
            assert torch.equal(value, weights.params[plain.removeprefix("model.")]), key
    if name == "flexcfl":
        assert same(played(toy(name, {"init_from": str(path)}), rounds=1).state.start, weights)


@pytest.mark.parametrize("name", sorted(ALIKE))
def test_models_that_would_stay_alike_are_refused(name, saved):
    with pytest.raises(FedtideError, match="models would stay equal; allowed: none"):
        preflight(toy(named(name), {"init_from": str(saved[0])}))


def test_models_around_the_given_one_are_not(saved):
    path, weights = saved
    options = {"init_from": str(path), "init_noise": 0.1}
    first, second = played(toy("ifca", options), rounds=1).steps[0].received.weights
    assert same(first, weights)
    assert not same(second, weights)


@pytest.mark.parametrize("model", [None, "python:helpers.toys:normed"])
def test_a_run_begins_where_another_ended(model, tmp_path):
    changes = {} if model is None else {"model": model}
    first = toy("fedavg", rounds=3, **changes)
    run = Run(first, first.method[0], 0, tmp_path / "first" / "fedavg" / "0")
    list(run.play())
    ended = played(first).state.weights
    for path in (run.folder, run.folder / "checkpoints" / "00000003" / "state.safetensors"):
        begun = played(toy("fielding", {"init_from": str(path)}, **changes), rounds=1).steps[0].received
        assert all(same(model, ended) for model in begun.weights)


def test_frozen_networks_are_drawn_all_the_same(saved):
    options = {"representation": {"kind": "combined", "parts": ["embedding", "gradient"]}}
    plain, begun = (
        played(toy("fielding", {**options, **more}), rounds=1).state for more in ({}, {"init_from": str(saved[0])})
    )
    assert same(plain.reported, begun.reported)
    assert not same(plain.weights, begun.weights)


def test_what_is_in_the_file_decides_the_digest_of_a_run(saved):
    experiment = toy("fedavg", {"init_from": str(saved[0])})
    before = digest_of(experiment, experiment.method[0], 0)
    save_file(drawn(seed=8).params, saved[0])
    assert digest_of(experiment, experiment.method[0], 0) != before


def wrong_shape(folder):
    save_file(drawn({"kind": "mlp", "hidden": [6]}).params, folder / "file")


def wrong_name(folder):
    save_file({f"net.{name}": value for name, value in drawn().params.items()}, folder / "file")


def too_many(folder):
    save_file({**drawn().params, "tail.weight": torch.zeros(1)}, folder / "file")


def several(folder):
    experiment = toy("feddrift", rounds=1)
    list(Run(experiment, experiment.method[0], 0, folder / "file").play())


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda folder: None, "no such file or folder: "),
        (lambda folder: (folder / "file").write_text("no tensors"), "file: not a file of safetensors"),
        (lambda folder: (folder / "file").mkdir(), "file: found no checkpoint"),
        (wrong_shape, "shape of 'dense1.weight': found (6, 4), allowed: (5, 4)"),
        (wrong_name, "shape of 'dense1.weight': found None, allowed: (5, 4)"),
        (too_many, "found 'tail.weight', allowed: dense1.weight, dense1.bias, head.weight, head.bias"),
        (several, "number of models: found 10, allowed: 1, as in the state of a run with one model"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line_before_anything_runs(make, line, tmp_path):
    make(tmp_path)
    with pytest.raises(FedtideError) as caught:
        preflight(toy("fielding", {"init_from": str(tmp_path / "file")}))
    assert str(caught.value).startswith("method 'toy'.init_from: ")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
