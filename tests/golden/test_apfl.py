"""APFL by pencil and paper, naive implementations, and what it becomes at the ends of its mix.

The two quadratics of quadratics.py: gradients w and w - 4, all rows at once, two steps of 1/2; the model starts at 1.
Shares start at 1/2. Both models of a client start alike, so the first batch leaves its share as it is.

Client 0. Batch 1: m = 1, w_0 = 1/2, v_0 = 1 - 1/2 * 1/2 = 3/4. Batch 2: m = (3/4 + 1/2) / 2 = 5/8, w_0 = 1/4,
v_0 = 3/4 - 1/4 * 5/8 = 19/32, alpha = 1/2 - 1/2 * 1/4 * 5/8 = 27/64.
Client 1. Batch 1: w_1 = 5/2, v_1 = 1 + 3/4 = 7/4. Batch 2: m = 17/8 with gradient -15/8, w_1 = 13/4,
v_1 = 7/4 + 15/32 = 71/32, alpha = 1/2 - 1/2 * (-3/4) * (-15/8) < 0, so 0.
w = 1 + (-3/4 + 3 * 9/4) / 4 = 5/2. Client 0 judges by 27/64 * 19/32 + 37/64 * 5/2, client 1 by w.

The variant of PFLlib, one batch of client 0 from w = 1, v = 2, alpha = 1/2: w_0 = 1/2, v = 1; the difference 1/2 and
the mixed gradient (2 + 1) / 2 after the steps; alpha = 1/2 - 1/2 (3/4 + 0.01) = 0.12; kept
0.12 * 1 + 0.88 * 1/2 = 0.56.
"""

import copy

import pytest
import torch

from fedtide.algorithms.apfl import apfl
from fedtide.cohorts import Everyone, OneModel
from fedtide.core.base import Moment, Shard
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.core.weights import mix
from fedtide.laws.case import judged
from fedtide.learn.local import LocalTrainer
from helpers import quadratics
from helpers.by_batch import DATA, LOCAL, batches, close, gradient, rounds
from helpers.quadratics import TASK, at, fleet_of, value
from helpers.toys import network_of, played, toy

TWO = LocalTrainer(lr=0.5, batch_size=0, epochs=2)


def kept(fleet, client: int):
    return fleet.engine.memory.read(client, (99, 0))


def test_a_round_by_hand():
    algorithm = apfl(TASK, TWO, cohort=Everyone(), weighting="samples")
    fleet = fleet_of(algorithm)
    state, _ = next(quadratics.played(algorithm, fleet, OneModel(at(1.0), None), 1))
    assert value(state) == 2.5
    memories = [kept(fleet, client) for client in (0, 1)]
    assert [(float(m["own"].params["weight"]), m["alpha"]) for m in memories] == [(19 / 32, 27 / 64), (71 / 32, 0.0)]
    x = torch.ones(3, 1, dtype=torch.float64)
    told = algorithm.predict(state.weights, [*memories, None], x, torch.tensor([0, 1, 2])).told
    served = [27 / 64 * 19 / 32 + 37 / 64 * 2.5, 2.5, 2.5]
    torch.testing.assert_close(told, torch.cat([TASK.predict_rows(at(w), x[:1]) for w in served]))


def test_a_batch_of_the_variant_of_pfllib_by_hand():
    algorithm = apfl(TASK, LocalTrainer(lr=0.5, batch_size=0), variant="pfllib")
    shard = Shard(torch.ones(1, 1, dtype=torch.float64), torch.tensor([0]), torch.arange(1))
    memory = {"own": at(2.0), "alpha": 0.5}
    answer = algorithm.works["train"](at(1.0), memory, shard, Moment(0, 1), Rng(0))
    assert float(answer.update.params["weight"]) == -0.5
    assert answer.memory["alpha"] == pytest.approx(0.12)
    assert float(answer.memory["own"].params["weight"]) == pytest.approx(0.56)
    told = algorithm.predict(at(9.0), [answer.memory], shard.x, torch.tensor([0])).told
    assert torch.equal(told, TASK.predict_rows(answer.memory["own"], shard.x))


def test_a_share_is_one_at_most():
    """v = 1, w_i = 0, y = 4: the mix is 0.9, its gradient -3.1, and 0.9 + 1/2 * 3.1 is more than 1."""
    algorithm = apfl(TASK, LocalTrainer(lr=0.5, batch_size=0))
    shard = Shard(torch.ones(1, 1, dtype=torch.float64), torch.tensor([4]), torch.arange(1))
    answer = algorithm.works["train"](at(0.0), {"own": at(1.0), "alpha": 0.9}, shard, Moment(0, 1), Rng(0))
    assert answer.memory["alpha"] == 1.0


def paper(model, adaptive):
    def work(w, memory, shard, key):
        v, a = memory or (w, 0.6)
        u = w
        for x, y in batches(shard, key):
            m = [a * p + (1 - a) * q for p, q in zip(v, u, strict=True)]
            g, h = gradient(model, u, x, y), gradient(model, m, x, y)
            slope = sum(float(((p - q) * s).sum()) for p, q, s in zip(v, u, h, strict=True))
            u = [p - 0.1 * s for p, s in zip(u, g, strict=True)]
            v = [p - 0.1 * a * s for p, s in zip(v, h, strict=True)]
            if adaptive:
                a = min(1.0, max(0.0, a - 0.1 * slope))
        return u, (v, a)

    return work


def pfllib(model, adaptive):
    def work(w, memory, shard, key):
        v, a = memory or (w, 0.6)
        u = w
        for x, y in batches(shard, key):
            g, h = gradient(model, u, x, y), gradient(model, v, x, y)
            u = [p - 0.1 * s for p, s in zip(u, g, strict=True)]
            v = [p - 0.1 * s for p, s in zip(v, h, strict=True)]
            if adaptive:
                each = zip(v, u, h, g, strict=True)
                slope = sum(float(((p - q) * (a * s + (1 - a) * t)).sum()) for p, q, s, t in each)
                a = min(1.0, max(0.0, a - 0.1 * (slope + 0.02 * a)))
        return u, ([a * p + (1 - a) * q for p, q in zip(v, u, strict=True)], a)

    return work


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("naive", [paper, pfllib])
def test_a_naive_implementation_agrees_to_1e_10(naive, adaptive):
    options = {"local": LOCAL, "alpha": 0.6, "adaptive": adaptive, "variant": naive.__name__, "weighting": "samples"}
    run = played(toy("apfl", options, precision="fp64", data=DATA, rounds=5))
    model = network_of(run.steps[0].received.weights)
    memories: dict = {}
    expected = rounds(run.host.population, model, naive(model, adaptive), memories)
    for step, w in zip(run.steps, expected, strict=True):
        close(step.state.weights, w)
    assert len(memories) == 8
    assert not adaptive or len({a for _, a in memories.values()}) > 4
    for client, (v, a) in memories.items():
        close(kept(run.fleet, client)["own"], v)
        assert kept(run.fleet, client)["alpha"] == pytest.approx(a, abs=1e-10)


def test_at_zero_clients_judge_as_in_fedavg():
    runs = [
        played(toy(name, {"local": LOCAL, **o}, precision="fp64"))
        for name, o in (("apfl", {"alpha": 0, "adaptive": False}), ("fedavg", {}))
    ]
    ours, theirs = (judged(run)[-1] for run in runs)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-12, atol=0.0)


def test_at_one_each_client_trains_alone():
    """To the bit: `LocalTrainer` from the initial weights, once a round, which also predicts."""
    options = {"local": {**LOCAL, "momentum": 0.5}, "alpha": 1.0, "adaptive": False, "cohort": "everyone"}
    run = played(toy("apfl", options, shift={"who": "always"}, data=DATA), rounds=4)
    task, population = run.host.algorithm.task, run.host.population
    for client in (0, 5):
        weights = run.steps[0].received.weights
        for r in range(4):
            moment, key = Moment(r, 6, float(r)), Rng(0).at(r, client, "train")
            rows = population.shard(client, moment)
            weights = copy.deepcopy(
                LocalTrainer(**options["local"])(task, task.loss, weights, rows, moment, key).weights
            )
        assert same(kept(run.fleet, client)["own"], weights)
        assert same(mix(run.state.weights, weights, 1.0), weights)
