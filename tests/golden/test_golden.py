"""Golden values, derived by hand on two quadratics (see quadratics.py) before the algorithms were written."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from fedtide.algorithms.fedavg import fedavg
from fedtide.algorithms.fedprox import fedprox
from fedtide.algorithms.fedsgd import fedsgd
from fedtide.algorithms.qfedavg import qfedavg
from fedtide.cohorts import Everyone, OneModel
from fedtide.core.base import Moment, Weights
from fedtide.learn.local import LocalTrainer, gradient_step
from fedtide.learn.schedules import Exponential
from fedtide.learn.server import SGD, Adagrad, Adam, Flash, KerasAdam, Yogi
from helpers.quadratics import TASK, after, at, fleet_of, population, value

ONE = LocalTrainer(lr=0.5, batch_size=0)
TWO = LocalTrainer(lr=0.5, batch_size=0, epochs=2)
EVERYONE = Everyone()
START = OneModel(at(1.0), None)


MANY = LocalTrainer(lr=0.1, batch_size=0, epochs=200)


def played(make, local: LocalTrainer = ONE, **options) -> float:
    """The model after one round of everybody."""
    return value(after(make(TASK, local, cohort=EVERYONE, **options), START))


def test_fedavg_one_step():
    """Client 0: 1 - 0.5 (1 - 0) = 0.5, update -0.5. Client 1: 1 - 0.5 (1 - 4) = 2.5, update 1.5.

    Weighted by rows: (1 * -0.5 + 3 * 1.5) / 4 = 1, so w = 2. Equally: (-0.5 + 1.5) / 2 = 0.5, so w = 1.5.
    """
    assert played(fedavg) == 2.0
    assert played(fedavg, weighting="uniform") == 1.5


def test_fedavg_two_local_steps_and_two_rounds():
    """Two steps: client 0 0.5 -> 0.25, update -0.75; client 1 2.5 -> 3.25, update 2.25.

    Round 0: (-0.75 + 3 * 2.25) / 4 = 1.5, w = 2.5. Round 1 from 2.5: client 0 2.5 -> 0.625, update -1.875; client 1
    2.5 -> 3.25 -> 3.625, update 1.125; mean (-1.875 + 3.375) / 4 = 0.375, w = 2.875. The fixed point is 3.
    """
    assert value(after(fedavg(TASK, TWO, cohort=EVERYONE), START, rounds=2)) == 2.875


def test_fedsgd():
    """Gradients 1 and -3, weighted by rows (1 * 1 + 3 * -3) / 4 = -2; w = 1 - 0.5 * -2 = 2."""
    assert played(fedsgd) == 2.0


@pytest.mark.parametrize(
    ("local", "mu", "expected"),
    [
        # Two steps of 0.5; the first is FedAvg's, as the pull is zero at the start. Client 0 at 0.5: gradient
        # 0.5 + 1 * (0.5 - 1) = 0, stays; update -0.5. Client 1 at 2.5: gradient (2.5 - 4) + (2.5 - 1) = 0, stays;
        # update 1.5. Mean (-0.5 + 4.5) / 4 = 1. (Both sit at (b + mu w) / (1 + mu).)
        (TWO, 1.0, 2.0),
        # Many steps reach the pulled optimum: client i ends at (b_i + 3 * 1) / 4: 0.75 and 1.75; updates -0.25 and
        # 0.75, mean (-0.25 + 2.25) / 4.
        (MANY, 3.0, pytest.approx(1.5, abs=1e-9)),
        # rate * mu = 1.5 < 2: client i ends at (b_i + 15 * 1) / 16, a sixteenth of the way to its optimum. Updates
        # -1/16 and 3/16, mean (-1 + 3 * 3) / 16 / 4 = 1/8. Without a pull both go all the way.
        (MANY, 15.0, pytest.approx(1.125, abs=1e-9)),
        (MANY, 0.0, pytest.approx(3.0, abs=1e-6)),
        # Where training starts v = w, whatever mu: the single step is FedAvg's.
        *((ONE, mu, 2.0) for mu in (0.0, 1.0, 15.0, 1000.0)),
    ],
)
def test_fedprox(local, mu, expected):
    assert played(fedprox, replace(local, proximal=mu)) == expected


def test_the_larger_q_the_more_even_are_the_losses():
    """Weighted by rows, q = 0 ends at 3, where client 0 has a loss of 4.5 and client 1 one of 0.5; at 2 both have 2."""
    spread = []
    for q in (0.0, 1.0, 5.0):
        algorithm = qfedavg(TASK, LocalTrainer(lr=0.1, batch_size=0), q=q, cohort=EVERYONE, weighting="samples")
        w = value(after(algorithm, START, rounds=50))
        spread.append(statistics.pvariance([0.5 * w**2, 0.5 * (w - 4) ** 2]))
    assert spread[0] > 2 * spread[1] > 4 * spread[2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # L = 1 / 0.5 = 2. F_0 = 0.5 (1 - 0)^2 = 0.5, F_1 = 0.5 (1 - 4)^2 = 4.5. dw_0 = 2 (1 - 0.5) = 1,
        # dw_1 = 2 (1 - 2.5) = -3. delta_0 = 0.5 * 1 = 0.5, delta_1 = 4.5 * -3 = -13.5.
        # h_0 = 1 * 1 * 1^2 + 2 * 0.5 = 2, h_1 = 1 * 1 * 3^2 + 2 * 4.5 = 18. w = 1 - (0.5 - 13.5) / (2 + 18).
        ({"q": 1.0}, pytest.approx(1.65, abs=1e-9)),
        # delta_0 = 0.25 * 1, delta_1 = 20.25 * -3 = -60.75; h_0 = 2 * 0.5 * 1 + 2 * 0.25 = 1.5,
        # h_1 = 2 * 4.5 * 9 + 2 * 20.25 = 121.5. w = 1 - (0.25 - 60.75) / 123.
        ({"q": 2.0}, pytest.approx(1 + 60.5 / 123, abs=1e-8)),
        # The mean of (w - w_i) with weights 1 and 3, w = 1 - (0.5 - 4.5) / 4.
        ({"q": 0.0, "weighting": "samples"}, pytest.approx(2.0, abs=1e-12)),
    ],
)
def test_qfedavg(options, expected):
    assert played(qfedavg, **options) == expected


def test_a_step_along_the_gradient_follows_the_schedule():
    """Client 0 has the gradient 1, and round 2 a rate of 1/2 * 1/4; FedSGD and IFCA by gradients take this step."""
    local, now = LocalTrainer(lr=0.5, lr_schedule=Exponential(0.5)), Moment(2, 9)
    step, _ = gradient_step(TASK, local, at(1.0), population().shard(0, now), now)
    assert float(step.params["weight"]) == -0.125


def test_qfedavg_refuses_a_client_whose_power_overflows():
    """F_1 is about 8e36 and finite; its tenth power is not. Client 0 alone makes the step."""
    algorithm, huge = qfedavg(TASK, ONE, q=10.0, cohort=EVERYONE), [[0], [4 * 10**18]]
    reply = fleet_of(algorithm, huge).ask("train", torch.arange(2), at(1.0))
    assert (reply.clients.tolist(), reply.refused.tolist()) == ([0], [1])
    made = value(after(algorithm, START, targets=huge))
    assert made == value(after(algorithm, START, targets=[[0]])) != 1.0


def test_qfedavg_stays_where_it_is_if_everybody_overflows():
    """F is about 5e59 for both, its tenth power infinite."""
    assert value(after(qfedavg(TASK, ONE, q=10.0, cohort=EVERYONE), OneModel(at(1e30), None))) == 1e30


# -- server optimizers, on updates d = 1 and then d = 0.5 --------------------------------------------------------------


def steps(optimizer, updates=(1.0, 0.5), start=1.0):
    weights = at(start)
    memo = optimizer.init(weights)
    for d in updates:
        weights, memo = optimizer.step(weights, memo, at(d))
    return float(weights.params["weight"])


def root(value: float, eps: float = 1e-3) -> float:
    return math.sqrt(value) + eps


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (SGD(0.1), 1 + 0.1 * 1 + 0.1 * 0.5),
        # m = 1, then 0.9 * 1 + 0.5 = 1.4.
        (SGD(0.1, momentum=0.9), 1 + 0.1 * (1 + 1.4)),
        # v = 1e-6 + 1, then + 0.25; m = d as b1 = 0.
        (Adagrad(lr=0.1, eps=1e-3), 1 + 0.1 * 1 / root(1.000001) + 0.1 * 0.5 / root(1.250001)),
        # As in the paper: m = 0.1, then 0.14; v = 0.99e-6 + 0.01 = 0.01000099, then 0.99 * that + 0.0025.
        (Adam(lr=0.1, eps=1e-3), 1 + 0.1 * 0.1 / root(0.01000099) + 0.1 * 0.14 / root(0.0124009801)),
        # As in Keras, t = 1: m = 0.1, v = 0.001, factor sqrt(0.001) / 0.1; t = 2: m = 0.14, v = 0.001249,
        # sqrt(0.001999) / 0.19.
        (
            KerasAdam(lr=0.1, eps=1e-4),
            1
            + 0.1 * math.sqrt(0.001) / 0.1 * 0.1 / root(0.001, 1e-4)
            + 0.1 * math.sqrt(1 - 0.999**2) / (1 - 0.9**2) * 0.14 / root(0.001249, 1e-4),
        ),
        # v = 1e-6 - 0.01 * 1 * sign(1e-6 - 1) = 0.010001; then d^2 = 0.25 > v: 0.010001 + 0.0025. m as Adam's.
        (Yogi(lr=0.1, eps=1e-3), 1 + 0.1 * 0.1 / root(0.010001) + 0.1 * 0.14 / root(0.012501)),
    ],
    ids=["sgd", "momentum", "adagrad", "adam", "keras-adam", "yogi"],
)
def test_server_optimizers(optimizer, expected):
    assert steps(optimizer) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "update", "expected"),
    [
        # The first step is about the rate for large updates: eta * d / (|d| + eps / sqrt(1 - b2)).
        (KerasAdam(lr=0.01, eps=1e-4), 5.0, 0.01 * 5 / (5 + 1e-4 / math.sqrt(0.001))),
        # v_0 = 1e-8 (FedScale): 1e-8 + 0.01.
        (Yogi(lr=0.1, eps=1e-8, initial_accumulator=1e-8), 1.0, 0.1 * 0.1 / root(0.01 + 1e-8, 1e-8)),
    ],
    ids=["keras-adam", "yogi"],
)
def test_first_steps_of_server_optimizers(optimizer, update, expected):
    assert steps(optimizer, (update,), 0.0) == pytest.approx(expected, abs=1e-12)


def test_yogi_and_adam_agree_where_v_is_the_squared_update():
    assert steps(Yogi(0.1, eps=1.0), (1.0,)) == pytest.approx(steps(Adam(0.1, eps=1.0), (1.0,)), abs=1e-12)


@pytest.mark.parametrize("optimizer", [SGD(0.1, 0.9), Adagrad(), Adam(), KerasAdam(), Yogi(), Flash()])
def test_without_a_mean_there_is_no_step(optimizer):
    weights = at(1.0)
    memo = optimizer.init(weights)
    assert optimizer.step(weights, memo, None) == (weights, memo)


@pytest.mark.parametrize("optimizer", [Adagrad(), Adam(), KerasAdam(), Yogi(), Flash()])
def test_an_update_whose_square_overflows_makes_no_step(optimizer):
    """1e200 squared is infinite, and so would the second moment be in all later rounds."""
    weights = at(1.0)
    memo = optimizer.init(weights)
    stepped, after_step = optimizer.step(weights, memo, at(1e200))
    assert stepped is weights
    assert after_step is memo


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(), Adam(), KerasAdam(), Yogi(), Flash()])
def test_buffers_bypass_the_optimizer(optimizer):
    """Running statistics move by their plain mean, whatever the rate."""
    weights = Weights({"w": torch.zeros(1)}, {"running_mean": torch.tensor([1.0])})
    delta = Weights({"w": torch.ones(1)}, {"running_mean": torch.tensor([0.25], dtype=torch.float64)})
    stepped, _ = optimizer.step(weights, optimizer.init(weights), delta)
    assert stepped.buffers["running_mean"].tolist() == [1.25]
    assert stepped.buffers["running_mean"].dtype == torch.float32


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(), Adam(), KerasAdam(), Yogi(), Flash()])
def test_buffers_that_no_update_moves_stay(optimizer):
    """Norm layers that stay at home send no running statistics."""
    weights = Weights({"w": torch.zeros(1)}, {"running_mean": torch.tensor([1.0])})
    stepped, _ = optimizer.step(weights, optimizer.init(weights), Weights({"w": torch.ones(1)}))
    assert stepped.buffers["running_mean"].tolist() == [1.0]


def test_adagrad_never_lowers_its_second_moment_and_no_update_keeps_it_positive():
    optimizer, weights = Adagrad(), at(0.0)
    memo = optimizer.init(weights)
    for d in (0.3, -0.1, 0.0, 2.0):
        before = float(memo.second["weight"])
        weights, memo = optimizer.step(weights, memo, at(d))
        assert float(memo.second["weight"]) >= before > 0


def test_a_huge_eps_makes_the_adaptive_step_proportional_to_the_update():
    """sqrt(v) + eps is then about 2 eps (v starts at eps^2), whatever d."""
    for optimizer in (Adagrad(1e6, eps=1e6), Adam(1e6, eps=1e6, beta1=0.0), Yogi(1e6, eps=1e6, beta1=0.0)):
        assert steps(optimizer, (1.4,), 0.0) == pytest.approx(2 * steps(optimizer, (0.7,), 0.0), rel=1e-9)
