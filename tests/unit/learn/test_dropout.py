"""Dropout knows only the global generator: it is seeded from the client's key and left as it was found."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Arrivals
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from fedtide.runs.build import host_of
from helpers.toys import played, toy


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
