"""FeSEM by pencil and paper, on the quadratics: a client with target y that receives m sends w = (m + y) / 2.

And against plain loops in numpy: softmax regression, float64, 30 rounds, to 1e-8.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from fedtide.algorithms.fesem import fesem
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.handmade import By
from helpers.naive_drift import close_models, gradient_of
from helpers.quadratics import TASK, at, fleet_of, models, played
from helpers.stages import holding, rounds

HALF = LocalTrainer(lr=0.5, batch_size=0)


def begun(targets, start=1.0, **options):
    algorithm = fesem(TASK, HALF, **{"cohort": Everyone(), **options})
    fleet = fleet_of(algorithm, targets)
    state = algorithm.init(fleet, Rng(0))
    return algorithm, fleet, replace(state, weights=(at(start),) * len(state.weights))


def test_the_first_models_make_centers_and_then_each_trains_its_own():
    """w = 1 goes to 1/2, 5/2, 1 for targets 0, 4, 1. k-means: {1/2, 1} against {5/2}, so m = 3/4, 5/2.

    Then 3/8 and 7/8 from 3/4, and 13/4 from 5/2: m = 5/8, 13/4. Clients weigh alike, though client 1 has three rows.
    """
    (first, facts), (second, _) = played(*begun([[0], [4, 4, 4], [1]]), 2)
    assert models(first) == [0.75, 2.5]
    assert first.cluster.tolist() == [0, 1, 0]
    assert facts["members"].tolist() == [2, 1]
    assert models(second) == [0.625, 3.25]


def test_samples_may_weigh():
    """Targets 0 and 1 are in one cluster, with 1 and 3 rows: (1/2 + 3 * 1) / 4 = 7/8."""
    ((first, _),) = played(*begun([[0], [1, 1, 1], [9]], weighting="samples"), 1)
    assert models(first) == [0.875, 5.0]


def test_a_client_goes_to_the_nearest_center_after_training():
    """From centers 0 and 10, client 1 with target 16 trains 0 to 8, which is 8 from 0 and 2 from 10: it moves.

    The mean of its new cluster, which nobody else trained, is 8. Client 0 stays at 0.
    """
    algorithm, fleet, state = begun([[0], [16]])
    state = replace(state, weights=(at(0.0), at(10.0)), cluster=torch.tensor([0, 0]))
    ((state, facts),) = played(algorithm, fleet, state, 1)
    assert state.cluster.tolist() == [0, 1]
    assert models(state) == [0.0, 8.0]
    assert facts["members"].tolist() == [1, 1]


def test_a_newcomer_trains_the_mean_of_centers_and_an_absent_cluster_keeps_its_model():
    """Centers 0 and 10: client 2 with target 2 trains 5 to 7/2, which is nearer to 0. Nobody of cluster 1 takes part.

    Before evaluation it does the same: of centers 7/2 and 10 it trains 27/4 to 35/8, and finds the first.
    """
    algorithm, fleet, state = begun([[0], [16], [2]], cohort=By(lambda rng, fleet: torch.tensor([2])))
    state = replace(state, weights=(at(0.0), at(10.0)), cluster=torch.tensor([0, 1, -1]))
    payload, slot = algorithm.serve(state, torch.tensor([0, 1, 2]))
    assert slot.tolist() == [0, 1, 2]
    found = algorithm.adapt(payload[2], None, fleet.population.shard(2, Moment(0, 1)), Moment(0, 1), Rng(0))
    assert int(found.memory["found"]) == 0
    ((state, _),) = played(algorithm, fleet, state, 1)
    assert state.cluster.tolist() == [0, 1, 0]
    assert models(state) == [3.5, 10.0]


def test_until_k_clients_answer_there_is_one_cluster():
    """One of three answers: all models are its 1/2. Then all three answer, from 1/2: 1/4, 9/4, 17/4, each a center."""
    cohorts = iter([[0], [0, 1, 2]])
    targets = [[0], [4], [8]]
    by = By(lambda rng, fleet: torch.tensor(next(cohorts)))
    (one, _), (three, _) = played(*begun(targets, clusters=3, cohort=by), 2)
    assert models(one) == [0.5, 0.5, 0.5]
    assert one.cluster.tolist() == [-1, -1, -1]
    assert models(three) == [0.25, 2.25, 4.25]
    assert three.cluster.tolist() == [0, 1, 2]


def test_more_clusters_than_clients_are_refused():
    algorithm, fleet, _ = begun([[0], [1]], clusters=3)
    with pytest.raises(FedtideError, match="clusters: found 3, allowed: at most 2"):
        algorithm.check(fleet.population)


# -- against plain loops -----------------------------------------------------------------------------------------------

CLIENTS, DIMS, CLASSES, ROUNDS, RATE, EPOCHS = 8, 3, 4, 30, 1.0, 20
LINEAR = Task(lambda: nn.Linear(DIMS, CLASSES, bias=False), dtype=torch.float64)


def held():
    """Rows (x, y) of each client in each round: concept g calls class c by the name c + g, and two clients change."""
    draw = np.random.default_rng(4)
    truth = draw.normal(size=(CLASSES, DIMS)) * 2
    x = [draw.normal(size=(20 + 2 * i, DIMS)) + 0.7 for i in range(CLIENTS)]
    concepts = [[0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 2, 0, 1, 2, 1, 0]]
    return [
        [(x[i], (np.argmax(x[i] @ truth.T, axis=1) + concepts[t >= 5][i]) % CLASSES) for i in range(CLIENTS)]
        for t in range(ROUNDS)
    ]


def trained(w, x, y):
    for _ in range(EPOCHS):
        w = w - RATE * gradient_of(w, x, y)
    return w


def best_partition(x, k):
    """Of all ways to put rows in k clusters, that with the least squared distances to means; by lowest member."""
    ways = [way for way in product(range(k), repeat=len(x)) if list(dict.fromkeys(way)) == list(range(k))]

    def cost(way):
        groups = [x[np.array(way) == j] for j in range(k)]
        return sum(((rows - rows.mean(0)) ** 2).sum() for rows in groups)

    return list(min(ways, key=cost))


def naive(start, stages, k):
    """Algorithm 1: models and clusters after each round."""
    centers, member = None, None
    for now in stages:
        received = [start if member is None else centers[member[i]] for i in range(CLIENTS)]
        own = [trained(received[i], *now[i]) for i in range(CLIENTS)]
        if member is None:
            member = best_partition(np.stack([w.ravel() for w in own]), k)
            centers = [start] * k
        else:
            member = [int(np.argmin([np.linalg.norm(w - center) for center in centers])) for w in own]
        groups = [[w for w, j in zip(own, member, strict=True) if j == c] for c in range(k)]
        centers = [sum(group) / len(group) if group else center for group, center in zip(groups, centers, strict=True)]
        yield centers, member


def test_it_is_the_plain_loop():
    stages = held()
    who = [holding([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in now], classes=CLASSES) for now in stages]
    algorithm = fesem(LINEAR, LocalTrainer(lr=RATE, epochs=EPOCHS, batch_size=0), clusters=3, cohort=Everyone())
    start, members = LINEAR.init(Rng(0).at(-1, "server")).params["weight"].numpy(), []
    for (state, _, _), (centers, member) in zip(rounds(algorithm, who), naive(start, stages, 3), strict=True):
        assert state.cluster.tolist() == member
        close_models(state.weights, centers)
        members.append(member)
    assert members[0] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(set(map(tuple, members))) >= 2  # somebody moved
