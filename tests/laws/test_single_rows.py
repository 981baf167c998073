"""Clients with one row and a model with BatchNorm, or without rows: whatever the method, they abstain."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedtide.algorithms import REGISTRY
from fedtide.algorithms.scaffold import Sent
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite, same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.handmade import By, fleet, people

SETTINGS = {"local": LocalTrainer(lr=0.1, batch_size=4), "cohort": Everyone()}

ONE = ("fedavg", "fedsgd", "fedprox", "fedadam", "q-fedavg", "scaffold", "fedbuff")
"""Algorithms with one model of any build; the others need a layer to repeat."""


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def plain() -> nn.Module:
    return nn.Linear(1, 2)


def begun(name: str, each: list[int], build=normed, **options):
    """The algorithm, and its first state, among clients with so many rows."""
    most = people(len(each), max(each))
    lists = [most.parts["train"][client][:rows].tolist() for client, rows in enumerate(each)]
    population = replace(most, parts={**most.parts, "train": most.parts["train"].of(lists)})
    algorithm = REGISTRY[name].make(Task(build), **{**SETTINGS, **options})
    made = fleet(algorithm.works, population)
    made.begin(Moment(-1, 4))
    state = algorithm.init(made, Rng(0))
    made.begin(Moment(0, 4))
    return algorithm, made, state


def after(name: str, each: list[int], **options):
    """The state and facts after a round of clients with so many rows."""
    algorithm, made, state = begun(name, each, **options)
    return algorithm.round(state, made, Rng(0).at(0, "server")), state


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize(("build", "able"), [(normed, [0, 3]), (plain, [0, 1, 3])], ids=["normed", "plain"])
@pytest.mark.parametrize("name", ONE)
def test_whoever_cannot_train_abstains(name, build, able, weighting):
    _, made, state = begun(name, [8, 1, 0, 8], build, weighting=weighting)
    payload = Sent(state.weights, state.control) if name == "scaffold" else state.weights
    reply = made.ask("train", torch.arange(4), payload)
    assert reply.clients.tolist() == able
    assert reply.refused.tolist() == []


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("name", ONE)
def test_whoever_cannot_train_is_as_if_it_had_not_been_asked(name, weighting, rows):
    asked, before = after(name, [8, rows, 8], weighting=weighting)
    assert all_finite(asked)
    assert not same(asked[0].weights, before.weights)
    left_out, _ = after(name, [8, rows, 8], weighting=weighting, cohort=By(lambda rng, fleet: torch.tensor([0, 2])))
    assert same(asked, left_out)
