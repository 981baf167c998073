"""Adaptive-FedAvg: derived by hand on two quadratics, and against a naive implementation in float64."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from fedtide.algorithms.adaptive_fedavg import LEAST, Averages, adaptive_fedavg, follow
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.fleets.stacked_engine import StackedEngine
from fedtide.learn.local import LocalTrainer
from helpers.quadratics import TASK, at, fleet_of, value
from helpers.quadratics import played as rounds_of
from helpers.toys import network_of, played, toy, trained_plainly

ROUNDS = 8
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}


def followed(*weights: float) -> list[Averages]:
    averages = [Averages(torch.zeros(1, dtype=torch.float64))]
    for w in weights:
        averages.append(follow(averages[-1], torch.tensor([w], dtype=torch.float64), 0.7, 0.3, 0.7))
    return averages[1:]


def test_the_factor_by_hand():
    """A weight that is 1, 1 and 3, with b1 = b3 = 0.7 and b2 = 0.3.

    t = 1: m = 0.3, m^ = 1. v = 0.7 (1 - 0)^2 = 0.7, v^ = 1. r = 0.3, r^ = 1: factor 1.
    t = 2: m = 0.21 + 0.3 = 0.51, m^ = 1. v = 0.21 + 0.7 (1 - 1)^2 = 0.21, v^ = 0.21 / 0.91 = 3/13.
           r = 0.21 + 0.3 * 3/13 = 3.63/13, r^ = r / 0.51: factor r^ / 2 = 3.63 / 13.26.
    t = 3: v = 0.063 + 0.7 (3 - 1)^2 = 2.863, v^ = 2.863 / 0.973, 12.75 times the one before.
           r = 0.7 * 3.63/13 + 0.3 * 2.863/0.973 * 13/3 = 4.02, r^ = r / 0.657 = 6.12, a third of it above 1: factor 1.
    """
    one, two, three = followed(1.0, 1.0, 3.0)
    assert (one.factor, three.factor) == (1.0, 1.0)
    assert two.factor == pytest.approx(3.63 / 13.26, abs=1e-12)
    assert three.r == pytest.approx(0.7 * 3.63 / 13 + 1.3 * 2.863 / 0.973, abs=1e-12)


def test_weights_that_never_move_leave_a_tiny_factor_and_no_nan():
    assert followed(*[0.0] * 5)[-1].factor == pytest.approx(1 / 5)  # a variance of zero: the ratio is 1
    assert followed(*[1.0] * 900)[-1].factor >= LEAST


def test_rounds_by_hand(monkeypatch):
    """One full step of 0.5 for each client moves w by half of its way to the mean target 3, times the factor.

    w = 1, 2, 2.5 in the first rounds, whose factor is 1. After w = 2: v = 0.7 * 4 = 2.8, v^ = 4. After w = 2.5:
    v = 0.84 + 0.7 * 0.25 = 1.015, v^ = 1.015 / 0.91, r = 0.21 + 0.3 v^ / 4, factor r / 0.51 / 2.
    """
    monkeypatch.setattr(type(TASK), "init", lambda task, rng: at(1.0))
    algorithm = adaptive_fedavg(TASK, LocalTrainer(lr=0.5, batch_size=0), cohort=Everyone())
    fleet = fleet_of(algorithm)
    fleet.begin(Moment(-1, 3, 0.0))
    state = algorithm.init(fleet, Rng(0))
    found = list(rounds_of(algorithm, fleet, state, 3))
    factor = (0.21 + 0.3 * 1.015 / 0.91 / 4) / 1.02
    assert [value(state) for state, _ in found] == pytest.approx([2.0, 2.5, 2.5 + 0.25 * factor], abs=1e-12)
    assert [facts["factor"] for _, facts in found[:2]] == pytest.approx([1.0, factor], abs=1e-12)


def naive(population, model: nn.Module) -> tuple[nn.Module, list[float]]:
    """The server's formulas as printed, on the parameters as a vector."""
    rate, rates = 0.1, []
    m = v = r = m_hat = v_hat = 0.0
    for number in range(ROUNDS):
        moment = Moment(number, ROUNDS, float(number))
        total, weight = 0.0, 0
        for client in population.arrivals(4, moment).tolist():
            shard = population.shard(client, moment)
            own = trained_plainly(copy.deepcopy(model), shard, Rng(0).at(number, client, "train"), lr=rate)
            total, weight = total + len(shard) * parameters_to_vector(own.parameters()).detach(), weight + len(shard)
        nn.utils.vector_to_parameters(total / weight, model.parameters())
        w, t = total / weight, number + 1
        v = 0.3 * v + 0.7 * float(torch.mean((w - m_hat) ** 2))
        m = 0.7 * m + 0.3 * w
        last, m_hat, v_hat = v_hat, m / (1 - 0.7**t), v / (1 - 0.3**t)
        r = 0.7 * r + 0.3 * (v_hat / last if number else 1.0)
        rate = min(0.1, 0.1 * r / (1 - 0.7**t) / t)
        rates.append(rate)
    return model, rates


def test_a_naive_implementation_agrees_to_1e_9():
    options = {"local": {"lr": 0.1, "batch_size": 4, "epochs": 2}}
    run = played(toy("adaptive-fedavg", options, rounds=ROUNDS, precision="fp64", data=DATA))
    expected, rates = naive(run.host.population, network_of(run.steps[0].received.weights))
    assert len({round(rate, 9) for rate in rates}) > 4
    assert [0.1 * float(step.facts["factor"]) for step in run.steps] == pytest.approx(rates, rel=1e-9)
    for name, found in run.state.weights.params.items():
        torch.testing.assert_close(found, expected.state_dict()[name], rtol=1e-9, atol=1e-9)


def test_two_rounds_are_those_of_fedavg_bit_for_bit():
    one, other = (played(toy(name, rounds=2)).state.weights.params for name in ("adaptive-fedavg", "fedavg"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_stack_serves_every_rate():
    engines = []

    def stacked(host):
        engines.append(StackedEngine(host))
        return engines[-1]

    run = played(toy("adaptive-fedavg"), engine=stacked)
    alone = played(toy("adaptive-fedavg"))
    assert len(engines[0]._stacks) == 1
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    for name, found in run.state.weights.params.items():
        close(found, alone.state.weights.params[name])
