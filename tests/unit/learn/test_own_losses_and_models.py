"""A user's own loss: any function of outputs and labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtide as ft
from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Arrivals
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from fedtide.runs.build import host_of
from helpers.toys import played, toy


def trained(task: ft.Task) -> dict:
    people = ft.population(torch.arange(80.0).reshape(20, 4) / 80, torch.arange(20) % 2, ft.data.IID(clients=4))
    algorithm = ft.algorithms.fedavg(task, ft.LocalTrainer(lr=0.1, batch_size=5), cohort=ft.cohorts.Arrivals(2))
    return ft.simulate(algorithm, people, rounds=3).state.weights.params


def test_a_function_or_a_module_of_torch_is_a_loss():
    expected = trained(ft.Task(lambda: nn.Linear(4, 2)))
    assert same(trained(ft.Task(lambda: nn.Linear(4, 2), F.cross_entropy)), expected)
    assert same(trained(ft.Task(lambda: nn.Linear(4, 2), nn.CrossEntropyLoss())), expected)
    assert not same(trained(ft.Task(lambda: nn.Linear(4, 2), nn.CrossEntropyLoss(label_smoothing=0.5))), expected)


def test_a_module_in_the_place_of_the_function_that_makes_it_is_one_clear_line():
    with pytest.raises(FedtideError, match="found 'Linear', allowed: a function that makes a fresh module"):
        ft.Task(nn.Linear(4, 2))


@pytest.mark.parametrize(("rounds", "every"), [(-1, 1), (2, 0)])
def test_impossible_rounds_are_one_clear_line(rounds, every):
    people = ft.population(torch.zeros(20, 4), torch.arange(20) % 2, ft.data.IID(clients=4))
    with pytest.raises(FedtideError, match=r"found -1, allowed: 1 or more|eval_every: found 0, allowed: 1 or more"):
        ft.simulate(ft.algorithms.fedavg(ft.Task(lambda: nn.Linear(4, 2))), people, rounds=rounds, eval_every=every)


@pytest.mark.parametrize(("loss", "said"), [
    (lambda outputs, y: 3.0, "loss: found 3.0, allowed: a tensor without dimensions"),
    (lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"), r"loss: shape: found \(\d+,\), allowed"),
    (lambda outputs, y: torch.tensor(1.0), r"loss: found tensor\(1\.\), allowed: .* follows from the outputs"),
    (lambda outputs, y: {}["weight"], "loss: it failed with KeyError: 'weight'"),
    (lambda outputs: outputs.sum(), "loss: it failed with TypeError: .* positional argument"),
])  # fmt: skip
def test_a_loss_by_which_nothing_can_be_trained_is_one_clear_line(loss, said):
    with pytest.raises(FedtideError, match=said) as error:
        trained(ft.Task(lambda: nn.Linear(4, 2), loss))
    assert "\n" not in str(error.value)


# -- dropout knows only the global generator ---------------------------------------------------------------------------


def model(drop: float) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(drop), torch.nn.Linear(16, 3))


def run(seed: int = 0, disturb: bool = False, drop: float = 0.5):
    """Two rounds with a model that drops some of its hidden units."""
    experiment = toy("fedavg")
    host = host_of(experiment, experiment.method[0], 0, MemoryStore(None))
    algorithm = fedavg(Task(lambda: model(drop)), LocalTrainer(lr=0.5, batch_size=4), cohort=Arrivals(4))
    if disturb:
        torch.manual_seed(12345)
        torch.rand(7)
    before = torch.get_rng_state()
    made = played(experiment, host=replace(host, algorithm=algorithm), rounds=2, seed=seed)
    assert torch.equal(before, torch.get_rng_state())
    return made


def test_dropout_is_the_same_for_the_same_key_whatever_else_was_drawn():
    assert same(run().state, run(disturb=True).state)


def test_dropout_matters():
    assert not same(run().state, run(drop=0.0).state)


def test_nothing_is_dropped_when_it_is_judged():
    made = run()
    clients = made.host.population.clients
    first, second = (made.fleet.score(made.state.weights, clients) for _ in range(2))
    assert same(first, second)
