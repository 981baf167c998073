"""A user's own loss: any function of outputs and labels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtide as ft
from fedtide.core.errors import FedtideError
from fedtide.core.trees import same


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
