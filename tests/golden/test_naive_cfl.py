"""CFL against plain loops in numpy: softmax regression, float64, 30 rounds, to 1e-8; halves found by trying all."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from torch import nn

from fedtide.algorithms.cfl import cfl
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.naive_drift import close_models, gradient_of
from helpers.stages import begun, holding, rounds

CLIENTS, DIMS, CLASSES, GROUPS, ROUNDS, ROWS = 10, 3, 4, 3, 30, 12
RATE, EPOCHS, AFTER = 1.0, 4, 6


def update_of(w, x, y):
    own = w.copy()
    for _ in range(EPOCHS):
        own -= RATE * gradient_of(own, x, y)
    return own - w


def cross(halves, updates):
    """The largest cosine across."""
    one, two = halves
    return max(
        float((updates[i] * updates[j]).sum() / (np.linalg.norm(updates[i]) * np.linalg.norm(updates[j])))
        for i in one
        for j in two
    )


def best_halves(cluster, updates):
    """Of all ways to put a cluster in two, that with the least cosine across."""
    first, *rest = cluster
    ways = []
    for sides in product([0, 1], repeat=len(rest)):
        if any(sides):
            one = [first, *(i for i, side in zip(rest, sides, strict=True) if not side)]
            ways.append((one, [i for i, side in zip(rest, sides, strict=True) if side]))
    return min(ways, key=lambda halves: cross(halves, updates))


def naive(start, clients):
    """Models and clusters after each round."""
    clusters, models, largest = [list(range(CLIENTS))], [start], [0.0]
    for number in range(ROUNDS):
        updates = {i: update_of(models[k], *clients[i]) for k, cluster in enumerate(clusters) for i in cluster}
        for k in range(len(clusters)):
            cluster = clusters[k]
            mean = np.linalg.norm(np.mean([updates[i] for i in cluster], axis=0))
            largest[k] = max(largest[k], mean)
            most = max(np.linalg.norm(updates[i]) for i in cluster)
            if number < AFTER or len(cluster) <= 2 or mean >= largest[k] / 10 or most <= 6 * largest[k] / 10:
                continue
            halves = best_halves(cluster, updates)
            if np.sqrt((1 - cross(halves, updates)) / 2) > 0.1:
                clusters[k] = halves[0]
                clusters.append(halves[1])
                models.append(models[k])
                largest.append(largest[k])
        models = [
            model + np.mean([updates[i] for i in cluster], axis=0)
            for model, cluster in zip(models, clusters, strict=True)
        ]
        yield list(models), [sorted(cluster) for cluster in clusters]


def test_thirty_rounds_with_splits():
    draw = np.random.default_rng(1)
    truth = draw.normal(size=(CLASSES, DIMS)) * 2
    clients = []
    for i in range(CLIENTS):  # group g calls class c by the name c + g
        x = draw.normal(size=(ROWS, DIMS))
        clients.append((x, (np.argmax(x @ truth.T, axis=1) + i % GROUPS) % CLASSES))
    who = holding([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in clients], classes=CLASSES)
    task = Task(lambda: nn.Linear(DIMS, CLASSES, bias=False), dtype=torch.float64)
    algorithm = cfl(task, LocalTrainer(lr=RATE, epochs=EPOCHS, batch_size=0), split_after=AFTER)
    start, counts = begun(algorithm, who)[0].weights[0].params["weight"].numpy(), []
    for (state, _, fleet), (models, clusters) in zip(
        rounds(algorithm, [who] * ROUNDS), naive(start, clients), strict=True
    ):
        found = [(state.model == k).nonzero().flatten().tolist() for k in range(len(clusters))]
        assert found == clusters, f"round {fleet.moment.round}"
        close_models(state.weights, models)
        counts.append(len(clusters))
    assert counts[0] == 1
    assert counts[-1] == GROUPS
    assert all(len({i % GROUPS for i in cluster}) == 1 for cluster in clusters)
