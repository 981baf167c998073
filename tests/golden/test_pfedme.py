"""pFedMe by pencil and paper, and a naive implementation.

The two quadratics of quadratics.py: gradients x and x - 4; the model starts at 1. lambda = 1/2, two inner steps of 1/2,
eta = 1/2, two batches of all rows.

Client 0, batch 1: theta = 1 - 1/2 = 1/2, then 1/2 - 1/2 (1/2 + 1/2 (1/2 - 1)) = 3/8; w_0 = 1 - 1/4 (1 - 3/8) = 27/32.
Batch 2: theta = 3/8 - 1/2 (3/8 + 1/2 (12/32 - 27/32)) = 39/128, then 39/128 - 1/2 (39/128 + 1/2 (39/128 - 108/128)) =
147/512; w_0 = 27/32 - 1/4 (27/32 - 147/512) = 1443/2048. Client 1 is the same from 4 on, three times as far:
theta = 4 - 3 * 147/512, w_1 = 4 - 3 * 1443/2048. By rows 1 and 3, w = (12 - 8 * 1443/2048) / 4 = 1629/1024.
"""

import pytest
import torch

from fedtide.algorithms.pfedme import pfedme
from fedtide.cohorts import Everyone, OneModel
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.schedules import Exponential
from fedtide.learn.server import SGD
from helpers import quadratics
from helpers.by_batch import DATA, LOCAL, batches, close, gradient, rounds
from helpers.quadratics import TASK, at, fleet_of, population, value
from helpers.toys import network_of, played, toy

TWO = LocalTrainer(lr=0.5, batch_size=0, epochs=2)
OPTIONS = {"lam": 0.5, "inner_steps": 2, "inner_lr": 0.5, "cohort": Everyone()}


def kept(fleet, client: int):
    return fleet.engine.memory.read(client, (99, 0))["own"]


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 1629 / 1024), (0.5, 1 + 605 / 2048)])
def test_a_round_by_hand(beta, expected):
    algorithm = pfedme(TASK, TWO, server=SGD(beta), weighting="samples", **OPTIONS)
    fleet = fleet_of(algorithm)
    state, _ = next(quadratics.played(algorithm, fleet, OneModel(at(1.0), None), 1))
    assert value(state) == expected
    assert [float(kept(fleet, k).params["weight"]) for k in (0, 1)] == [147 / 512, 4 - 3 * 147 / 512]
    x = torch.ones(2, 1, dtype=torch.float64)
    told = algorithm.predict(state.weights, [{"own": kept(fleet, 0)}, None], x, torch.tensor([0, 1])).told
    assert torch.equal(told, torch.cat([TASK.predict_rows(at(w), x[:1]) for w in (147 / 512, expected)]))


def test_both_rates_follow_the_schedule():
    """Client 0 at 1/4: theta = 3/4, then 3/4 - 1/4 (3/4 - 1/8) = 19/32; w_0 = 1 - 1/8 (1 - 19/32) = 243/256."""
    local, now = LocalTrainer(lr=0.5, batch_size=0, lr_schedule=Exponential(0.5)), Moment(1, 9)
    answer = pfedme(TASK, local, **OPTIONS).works["train"](at(1.0), None, population().shard(0, now), now, Rng(0))
    assert float(answer.memory["own"].params["weight"]) == 19 / 32
    assert float(answer.update.params["weight"]) == 243 / 256 - 1


def test_inner_steps_cost_passes_and_other_optimizers_are_refused():
    assert pfedme(TASK, TWO, inner_steps=7).traits.compute_cost("train", torch.tensor([3])).tolist() == [42]
    with pytest.raises(FedtideError, match=r"local.momentum: found 0.9, allowed: 0, as the copy moves"):
        pfedme(TASK, LocalTrainer(momentum=0.9))


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_a_naive_implementation_agrees_to_1e_10(decay):
    """lambda 3, four inner steps of 0.05; the decay is of theta."""
    local = {**LOCAL, "weight_decay": decay}
    options = {
        "local": local,
        "weighting": "samples",
        "lam": 3.0,
        "inner_steps": 4,
        "inner_lr": 0.05,
        "server": {"lr": 0.7},
    }
    run = played(toy("pfedme", options, precision="fp64", data=DATA, rounds=5))
    model = network_of(run.steps[0].received.weights)

    def work(w, memory, shard, key):
        theta = u = w
        for x, y in batches(shard, key):
            for _ in range(4):
                g = gradient(model, theta, x, y)
                theta = [p - 0.05 * (s + decay * p + 3.0 * (p - q)) for p, q, s in zip(theta, u, g, strict=True)]
            u = [q - 0.1 * 3.0 * (q - p) for p, q in zip(theta, u, strict=True)]
        return [p + 0.7 * (q - p) for p, q in zip(w, u, strict=True)], theta

    memories: dict = {}
    for step, w in zip(run.steps, rounds(run.host.population, model, work, memories), strict=True):
        close(step.state.weights, w)
    assert len(memories) == 8
    for client, theta in memories.items():
        close(kept(run.fleet, client), theta)
