"""Flash: its step and its early stop by hand, and against a naive implementation in float64."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedtide.algorithms.flash import flash
from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import Adam, Flash
from helpers.quadratics import TASK, at
from helpers.toys import network_of, played, toy

ROUNDS = 8
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}


def stepped(optimizer, *updates: float) -> list[float]:
    weights, found = at(1.0), []
    memo = optimizer.init(weights)
    for change in updates:
        weights, memo = optimizer.step(weights, memo, at(change))
        found.append(float(weights.params["weight"]))
    return found


def test_two_steps_by_hand():
    """Rate 0.1, tau 0.1, updates 0.2 and 0.1.

    v' = 0.01, m = 0.02, v = 0.0099 + 0.0004 = 0.0103. D^2 - v = 0.0297, b3 = 0.01 / 0.0397, d = 0.0297^2 / 0.0397.
    Then m = 0.028, v = 0.010197 + 0.0001 = 0.010297. D^2 - v = -0.000297, b3 = 0.0103 / 0.010597,
    d = (0.0103 * 0.0297^2 / 0.0397 - 0.000297^2) / 0.010597.
    """
    d = 0.0297**2 / 0.0397
    first = 1 + 0.1 * 0.02 / (math.sqrt(0.0103) - d + 0.1)
    d = (0.0103 * d - 0.000297**2) / 0.010597
    second = first + 0.1 * 0.028 / (math.sqrt(0.010297) - d + 0.1)
    assert stepped(Flash(lr=0.1, eps=0.1), 0.2, 0.1) == pytest.approx([first, second], abs=1e-12)


def test_without_a_drift_term_it_is_adam_bit_for_bit():
    """Updates of tau: v stays tau^2 = D^2, and so d stays 0."""
    updates = (0.25, -0.25, -0.25)
    assert stepped(Flash(lr=0.1, eps=0.25, beta2=0.5), *updates) == stepped(Adam(lr=0.1, eps=0.25, beta2=0.5), *updates)


def test_as_printed_a_sudden_update_above_a_tenth_steps_backward():
    """D = 1: sqrt(v) is 0.1, and d nearly 0.99."""
    assert stepped(Flash(), 1.0)[0] < 1 < stepped(Flash(), 0.05)[0]


def rows(*y: float, val: Shard | None = None) -> Shard:
    count = len(y)
    x = torch.ones(count, 1, dtype=torch.float64)
    return Shard(x, torch.tensor(y, dtype=torch.float64), torch.arange(count), fetch_val=lambda: val)


@pytest.mark.parametrize(
    ("gamma", "val", "epochs"),
    [
        # w = 1 goes half of its way to 0 in each epoch: 1/2, 1/4, 1/8, ... Losses w^2 / 2 on a validation row of 0:
        # 1/8, 1/32, 1/128, 1/512. Falls 3/32, 3/128, 3/512 against gamma / 2, gamma / 3, gamma / 4.
        (0.2, (0.0,), 2),  # 3/32 < 0.1
        (0.1, (0.0,), 3),  # 3/32 > 0.05, 3/128 < 0.0333
        (0.05, (0.0,), 4),  # 3/128 > 0.0167, 3/512 < 0.0125
        (0.0, (0.0,), 5),
        # A validation row of 1: the loss rises in the second epoch.
        (0.0, (1.0,), 2),
        (1e9, (), 5),
        (1e9, None, 5),
    ],
)
def test_when_a_client_stops(gamma, val, epochs):
    algorithm = flash(TASK, LocalTrainer(lr=0.5, batch_size=0, epochs=5), gamma=gamma)
    shard = rows(0.0, val=None if val is None else rows(*val))
    answer = algorithm.works["train"](at(1.0), None, shard, Moment(0, 1), Rng(0))
    assert float(answer.update.params["weight"]) == 0.5**epochs - 1
    assert answer.total["delta"].value == answer.update


def test_a_client_without_rows_abstains_and_steps_are_refused():
    work = flash(TASK).works["train"]
    assert work(at(1.0), None, rows(), Moment(0, 1), Rng(0)) is None
    assert work(at(1.0), None, replace(rows(), fetch_val=lambda: rows(1.0)), Moment(0, 1), Rng(0)) is None
    with pytest.raises(FedtideError, match=r"local\.local_steps: found 3"):
        flash(TASK, LocalTrainer(local_steps=3))


def naive(population, model: nn.Module, gamma: float) -> tuple[Weights, set[int]]:
    m, v, d = ({name: torch.full_like(p, start) for name, p in model.state_dict().items()} for start in (0, 0.01, 0))
    stops = set()
    for number in range(ROUNDS):
        moment = Moment(number, ROUNDS, float(number))
        change, total = {name: torch.zeros_like(p) for name, p in model.state_dict().items()}, 0
        for client in population.arrivals(4, moment).tolist():
            shard, key = population.shard(client, moment), Rng(0).at(number, client, "train")
            own, shuffle, before = copy.deepcopy(model), key.at("shuffle").torch(), None
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            for e in range(4):
                for batch in torch.randperm(len(shard.y), generator=shuffle).split(4):
                    optimizer.zero_grad()
                    F.cross_entropy(own(shard.x.double()[batch]), shard.y[batch]).backward()
                    optimizer.step()
                with torch.no_grad():
                    now = float(F.cross_entropy(own(shard.val.x.double()), shard.val.y))
                if before is not None and before - now < gamma / (e + 1):
                    break
                before = now
            stops.add(e)
            total += len(shard)
            for name, p in own.state_dict().items():
                change[name] += len(shard) * (p - model.state_dict()[name])
        new = {}
        for name, p in model.state_dict().items():
            delta, old = change[name] / total, v[name]
            m[name] = 0.9 * m[name] + 0.1 * delta
            v[name] = 0.99 * old + 0.01 * delta**2
            b3 = old.abs() / ((delta**2 - v[name]).abs() + old.abs())
            d[name] = b3 * d[name] + (1 - b3) * (delta**2 - v[name])
            new[name] = p + 0.02 * m[name] / (v[name] ** 0.5 - d[name] + 0.1)
        model.load_state_dict(new)
    return model.state_dict(), stops


def test_a_naive_implementation_agrees_to_1e_9():
    local = {"lr": 0.1, "batch_size": 4, "epochs": 4}
    options = {"local": local, "gamma": 0.1, "server": {"lr": 0.02, "eps": 0.1}, "weighting": "samples"}
    run = played(toy("flash", options, rounds=ROUNDS, precision="fp64", data=DATA))
    expected, stops = naive(run.host.population, network_of(run.steps[0].received.weights), 0.1)
    assert stops == {1, 3}
    for name, found in run.state.weights.params.items():
        torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-9)
