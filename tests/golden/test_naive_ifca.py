"""IFCA against plain loops in numpy: softmax regression, float64, 20 rounds, to 1e-8."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedtide.algorithms.ifca import State, ifca
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment, Weights
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.branchnet import softmax
from helpers.naive_drift import close_models, gradient_of
from helpers.quadratics import fleet_of
from helpers.stages import holding

CLIENTS, DIMS, CLASSES, K, ROUNDS = 9, 3, 4, 3, 20
RATE, EPOCHS = 0.3, 2


def loss_of(w, x, y):
    return float(-np.log(softmax(x @ w.T)[np.arange(len(y)), y]).mean())


def naive(models, clients, variant, mu):
    """The models after each round, and who chose which."""
    rounds = []
    for _ in range(ROUNDS):
        chosen = [int(np.argmin([loss_of(w, x, y) for w in models])) for x, y in clients]
        after = []
        for j, w in enumerate(models):
            members = [(x, y) for (x, y), k in zip(clients, chosen, strict=True) if k == j]
            if not members:
                after.append(w.copy())
            elif variant == "gradient":
                after.append(w - RATE / len(clients) * sum(gradient_of(w, x, y) for x, y in members))
            else:
                rows, moved = sum(len(y) for _, y in members), np.zeros_like(w)
                for x, y in members:
                    own = w.copy()
                    for _ in range(EPOCHS):
                        own -= RATE * (gradient_of(own, x, y) + mu * (own - w))
                    moved += len(y) / rows * own
                after.append(moved)
        models = after
        rounds.append((models, chosen))
    return rounds


@pytest.mark.parametrize(("variant", "mu"), [("averaging", 0.0), ("averaging", 0.4), ("gradient", 0.0)])
def test_twenty_rounds(variant, mu):
    draw = np.random.default_rng(3)
    truth = draw.normal(size=(K, CLASSES, DIMS)) * 2
    clients = []
    for i in range(CLIENTS):
        x = draw.normal(size=(5 + i, DIMS))
        clients.append((x, np.argmax(x @ truth[i % K].T, axis=1)))
    start = draw.normal(size=(K, CLASSES, DIMS))
    who = holding([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in clients], classes=CLASSES)
    task = Task(lambda: nn.Linear(DIMS, CLASSES, bias=False), dtype=torch.float64)
    local = LocalTrainer(lr=RATE, epochs=EPOCHS, batch_size=0)
    alike = {"weighting": "uniform" if variant == "gradient" else "samples"}
    algorithm = ifca(task, replace(local, proximal=mu), clusters=K, variant=variant, cohort=Everyone(), **alike)
    fleet = fleet_of(algorithm, who=who)
    models = tuple(Weights({"weight": torch.from_numpy(w)}) for w in start)
    state = State(models, (None,) * K, torch.zeros(K, dtype=torch.float64))
    seen = set()
    for number, (expected, chosen) in enumerate(naive(list(start), clients, variant, mu)):
        fleet.begin(Moment(number, ROUNDS, 0.0))
        state, _ = algorithm.round(state, fleet, Rng(0).at(number, "server"))
        notes = fleet.queries[-1].notes
        assert [int(notes[i].branch) for i in range(CLIENTS)] == chosen, f"round {number}"
        close_models(state.weights, expected)
        seen |= set(chosen)
    assert len(seen) > 1
