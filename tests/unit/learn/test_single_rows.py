"""A client with one row and a model with BatchNorm, for every registered algorithm: nothing can be learnt from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedtide.algorithms import REGISTRY
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite, same
from fedtide.core.types import Moment
from fedtide.learn.local import LocalSolver
from fedtide.learn.task import Task
from fedtide.parts.cohort import Everyone
from unit.fleets.handmade import fleet, people

SETTINGS = {"local": LocalSolver(rate=0.1, batch=4), "cohort": Everyone()}


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def after(name: str, each: list[int]):
    """The state and facts after a round of clients with so many rows."""
    most = people(len(each), max(each))
    lists = [most.parts["train"][client][:rows].tolist() for client, rows in enumerate(each)]
    population = replace(most, parts={**most.parts, "train": most.parts["train"].of(lists)})
    algorithm = REGISTRY[name].make(Task(normed), **SETTINGS)
    made = fleet(algorithm.works, population)
    made.begin(Moment(-1, 4))
    state = algorithm.init(made, Rng(0))
    made.begin(Moment(0, 4))
    return algorithm.round(state, made, Rng(0).at(0, "server")), state


@pytest.mark.parametrize("name", REGISTRY)
def test_a_single_row_stops_nobody(name):
    (state, _), before = after(name, [8, 1, 8])
    assert all_finite(state)
    assert not same(state.weights, before.weights)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_client_that_could_not_train_has_no_say_in_the_training_loss(name):
    """It has seen no batch: its loss is unknown, not zero."""
    (_, with_single), _ = after(name, [8, 8, 1])
    (_, without), _ = after(name, [8, 8])
    assert with_single["loss"] == pytest.approx(without["loss"], rel=1e-6)
    assert torch.isfinite(torch.as_tensor(with_single["loss"]))
