"""FedSoft: derived by hand on softmax regressions, and against a naive implementation in float64.

By hand: two classes, x = 1. Center 0 has the weights (log 3, 0) and says (3/4, 1/4), center 1 has (0, log 3). Client 0
holds classes 0, 0, 0 and 1, client 1 holds class 1. So u_0 = (3/4, 1/4) and u_1 = (sigma, 1).
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedtide.algorithms.fedsoft import State, fedsoft
from fedtide.clusters.rounds import Served
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.quadratics import after, population
from helpers.toys import network_of, played, toy

LOG3 = math.log(3)
TASK = Task(lambda: nn.Linear(1, 2, bias=False), dtype=torch.float64)
ROUNDS = 8
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}


def center(*weights: float) -> Weights:
    return Weights({"weight": torch.tensor(weights, dtype=torch.float64)[:, None]})


CENTERS = (center(LOG3, 0), center(0, LOG3))


def says(difference: float) -> float:
    """The probability of class 0 if its weight is larger by so much."""
    return 1 / (1 + math.exp(-difference))


def rows(*y: int) -> Shard:
    return Shard(torch.ones(len(y), 1, dtype=torch.float64), torch.tensor(y), torch.arange(len(y)))


def trained(shard: Shard, memory=None, number: int = 0, **options):
    algorithm = fedsoft(TASK, LocalTrainer(lr=1.0, batch_size=0, epochs=2), **options)
    return algorithm.works["train"](Served(CENTERS), memory, shard, Moment(number, 9), Rng(0))


def test_two_steps_of_a_client_by_hand():
    """Client 0 starts at (3/4 log 3, 1/4 log 3), with a probability of class 0 of p = 1 / (1 + 3^-1/2).

    Its first step is e = 3/4 - p for class 0, and -e for class 1, without a pull as it is at the mean of the centers.
    The second is 3/4 - p' - lam e, with p' at a difference of log 3 / 2 + 2 e; the shares add up to 1.
    """
    answer = trained(rows(0, 0, 0, 1), lam=0.5)
    e = 3 / 4 - says(LOG3 / 2)
    moved = e + 3 / 4 - says(LOG3 / 2 + 2 * e) - 0.5 * e
    own = torch.tensor([3 / 4 * LOG3 + moved, 1 / 4 * LOG3 - moved], dtype=torch.float64)
    for s, part in answer.total["delta"].parts.items():
        found = CENTERS[s].params["weight"] + part.value.params["weight"]
        torch.testing.assert_close(found.flatten(), own, rtol=0, atol=1e-12)
        assert part.weight == 4 * (3 / 4, 1 / 4)[s]
    assert answer.memory["shares"].tolist() == [3 / 4, 1 / 4]


def test_a_center_that_fits_no_row_pulls_by_sigma():
    """Client 1 with sigma = 1/4 starts at (1/5, 4/5) log 3, and is pulled with lam * 5/4."""
    answer = trained(rows(1), lam=0.4, sigma=0.25)
    p = says(-0.6 * LOG3)
    moved = -p - says(-0.6 * LOG3 - 2 * p) + 0.5 * p
    found = CENTERS[0].params["weight"] + answer.total["delta"].parts[0].value.params["weight"]
    assert found.flatten().tolist() == pytest.approx([0.2 * LOG3 + moved, 0.8 * LOG3 - moved], abs=1e-12)
    assert [part.weight for part in answer.total["delta"].parts.values()] == [0.25, 1.0]


def test_a_round_by_hand():
    """One step each. Center 0 is the mean of the clients' weights by 4 * 3/4 and 1/4, center 1 by 1 and 1."""
    algorithm = fedsoft(TASK, LocalTrainer(lr=1.0, batch_size=0), sigma=0.25, cohort=Everyone())
    state = after(algorithm, State(CENTERS, (None, None)), who=population([[0, 0, 0, 1], [1]]))
    first, second = 3 / 4 * LOG3 + 3 / 4 - says(LOG3 / 2), 0.2 * LOG3 - says(-0.6 * LOG3)
    found = [float(weights.params["weight"][0]) for weights in state.weights]
    assert found == pytest.approx([(3 * first + second / 4) / 3.25, (first + second) / 2], abs=1e-12)


def test_shares_are_estimated_when_two_rounds_began_since():
    """Those of round 2 stay in round 3, whatever the rows, and go in round 4."""
    memory = trained(rows(0, 0, 0, 1), number=2).memory
    assert trained(rows(1), memory, number=3).memory["shares"].tolist() == [3 / 4, 1 / 4]
    assert trained(rows(1), memory, number=4).memory["shares"].tolist() == [1e-4, 1]
    assert trained(rows(1), memory, number=3, estimate_every=1).memory["shares"].tolist() == [1e-4, 1]


def test_a_client_is_served_the_mean_of_the_centers_by_its_shares():
    algorithm, x = fedsoft(TASK), torch.ones(2, 1, dtype=torch.float64)
    memory = algorithm.adapt(Served(CENTERS), None, rows(0, 0, 0, 1), Moment(0, 1), Rng(0)).memory
    assert algorithm.adapt(Served(CENTERS), None, rows(), Moment(0, 1), Rng(0)) is None
    found = algorithm.predict(Served(CENTERS), [memory, None], x, torch.tensor([0, 1]))
    assert found.told.exp()[:, 0].tolist() == pytest.approx([says(LOG3 / 2), 0.5], abs=1e-12)
    assert found.choice.tolist() == [0, 0]


def naive(population, centers: list[nn.Module]) -> list[nn.Module]:
    """As printed, with the sum of all pulls in the loss; a client keeps its shares in the odd rounds."""
    kept = {}
    for number in range(ROUNDS):
        moment = Moment(number, ROUNDS, float(number))
        new, total = [dict.fromkeys(c.state_dict(), 0.0) for c in centers], [0.0] * len(centers)
        for client in population.arrivals(4, moment).tolist():
            shard, key = population.shard(client, moment), Rng(0).at(number, client, "train")
            x, y = shard.x.double(), shard.y
            if kept.get(client, (None, -1))[1] != number // 2:
                with torch.no_grad():
                    best = torch.stack([F.cross_entropy(c(x), y, reduction="none") for c in centers]).argmin(0)
                u = [max(float((best == s).double().mean()), 0.05) for s in range(len(centers))]
                kept[client] = u, number // 2
            u, _ = kept[client]
            own, shuffle = copy.deepcopy(centers[0]), key.at("shuffle").torch()
            states = [c.state_dict() for c in centers]
            own.load_state_dict({
                name: sum(a * state[name] for a, state in zip(u, states, strict=True)) / sum(u) for name in states[0]
            })  # fmt: skip
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            for _ in range(2):
                for batch in torch.randperm(len(y), generator=shuffle).split(4):
                    loss = F.cross_entropy(own(x[batch]), y[batch])
                    for a, c in zip(u, centers, strict=True):
                        pairs = zip(own.parameters(), c.parameters(), strict=True)
                        loss = loss + 0.3 / 2 * a * sum(((p - q.detach()) ** 2).sum() for p, q in pairs)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            for s, a in enumerate(u):
                total[s] += a * len(y)
                for name, p in own.state_dict().items():
                    new[s][name] = new[s][name] + a * len(y) * p
        for s, c in enumerate(centers):
            c.load_state_dict({name: p / total[s] for name, p in new[s].items()})
    return centers


def test_a_naive_implementation_agrees_to_1e_9():
    options = {"clusters": 3, "lam": 0.3, "sigma": 0.05, "local": {"lr": 0.1, "batch_size": 4, "epochs": 2}}
    run = played(toy("fedsoft", options, rounds=ROUNDS, precision="fp64", data=DATA))
    expected = naive(run.host.population, [network_of(weights) for weights in run.steps[0].received.weights])
    for weights, model in zip(run.state.weights, expected, strict=True):
        for name, found in weights.params.items():
            torch.testing.assert_close(found, model.state_dict()[name], rtol=1e-9, atol=1e-9)
    assert (torch.stack([step.facts["importance"] for step in run.steps]) > 0.1).any(0).sum() > 1
