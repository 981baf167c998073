"""Adaptive-FedAvg: FedAvg whose server sets the clients' learning rate by how much the global weights vary.

Canonaco, Bergamasco, Mongelluzzo, Roveri: *Adaptive Federated Learning in Presence of Concept Drift*, IJCNN 2021. With
default options it follows the paper with the decay rates of FedCCFA's code.

| symbol | meaning |
| --- | --- |
| `W_t` | the global weights after round t = 1, 2, ..., as a vector of P numbers |
| `m`, `v`, `r` | moving averages of the weights, of their variance, and of the ratio of two successive variances |
| `m^`, `v^`, `r^` | the same, corrected for their start at zero: divided by `1 - beta^t` |
| `eta_t` | the clients' learning rate in the round after round t; `eta_0` is that of `local` |

    m   <- b1 * m + (1 - b1) * W_t
    v   <- b2 * v + (1 - b2) * mean((W_t - m^_{t-1})^2)
    r   <- b3 * r + (1 - b3) * v^_t / v^_{t-1}
    eta <- min(eta_0, eta_0 * r^_t / t)

When to use it: one model for all clients, whose rows change suddenly. The rate falls as 1 / t while the weights settle,
and rises when they begin to move. After many rounds a change has to be large: the variance must grow t times.

Choices:
    - paper: the first ratio is 1, and `m^_0` is 0.
    - FedCCFA's code: b1 = 0.7, b2 = 0.3, b3 = 0.7. In that code no client uses this rate. Its published result is
      therefore FedAvg's.
    - paper: the rate goes with the model to whoever is asked.
    - ours: `t` counts rounds with an answer, because without an answer there are no new weights.
    - ours: the ratio is 1 if the variance before was zero, and the rate is at least 1e-12 of `eta_0`.
    - ours: a schedule of `local` multiplies the rate. Running statistics are no part of W. Averages are in float64.
"""

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, play_rounds, with_cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Reply, Shard, Weights, mean
from fedtide.core.rng import Rng
from fedtide.core.weights import flat
from fedtide.fields.types import OpenFraction
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Training, Weighting, step_server

LEAST = 1e-12
"""Smallest factor on the learning rate."""


@dataclass(frozen=True)
class Averages:
    """The number of steps t, the averages m (P,), v and r, and the factor on the clients' learning rate."""

    m: Tensor
    v: float = 0.0
    r: float = 0.0
    t: int = 0
    factor: float = 1.0


@dataclass(frozen=True)
class State:
    """The global weights, the server optimizer's memo, and the averages."""

    weights: Weights
    server: Any
    averages: Averages
    cohort: Any = None


@dataclass(frozen=True)
class Sent:
    """Payload of participants: the weights, and the factor on the learning rate."""

    weights: Weights
    factor: float


def adaptive_fedavg(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    beta1: OpenFraction = 0.7,
    beta2: OpenFraction = 0.3,
    beta3: OpenFraction = 0.7,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """FedAvg with a learning rate that follows the variance of the weights.

    Sends the weights and a factor down, and the update up in a sum.

    Args:
        local: local training; its learning rate is the largest one.
        beta1: decay rate of the mean of the weights.
        beta2: decay rate of their variance.
        beta3: decay rate of the ratio of variances.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        averages = Averages(torch.zeros_like(flat(weights.params), dtype=torch.float64))
        return State(weights, server.init(weights), averages, cohort.init(fleet))

    @Stepwise
    def train(payload: Sent, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        rated = Training(task, replace(local, lr=local.lr * payload.factor), weighting)
        return (yield from rated.start(payload.weights, memory, shard, moment, rng))

    def step(state: State, reply: Reply, moment: Moment, rng: Rng) -> tuple[State, Facts]:
        state, facts = step_server(state, server, mean(reply.total))
        averages = follow(state.averages, flat(state.weights.params).double(), beta1, beta2, beta3)
        return replace(state, averages=averages), {**facts, "factor": averages.factor}

    send = attrgetter("weights"), lambda state: Sent(state.weights, state.averages.factor)
    algorithm = Algorithm("adaptive-fedavg", init, {"train": train}, *play_rounds(cohort, step, *send), task.predict)
    return with_cohort(algorithm, cohort, task, local, sends=(Sent,))


def follow(last: Averages, weights: Tensor, beta1: float, beta2: float, beta3: float) -> Averages:
    """Return the averages after the next weights (P,).

    >>> averages, factors = Averages(torch.zeros(1, dtype=torch.float64)), []
    >>> for w in (1.0, 1.0, 3.0):
    ...     averages = follow(averages, torch.tensor([w], dtype=torch.float64), 0.7, 0.3, 0.7)
    ...     factors.append(round(averages.factor, 4))
    >>> factors
    [1.0, 0.2738, 1.0]
    """
    t = last.t + 1
    mean_before = last.m / (1 - beta1**last.t) if last.t else last.m
    variance_before = last.v / (1 - beta2**last.t) if last.t else 0.0
    m = beta1 * last.m + (1 - beta1) * weights
    v = beta2 * last.v + (1 - beta2) * float((weights - mean_before).square().mean())
    ratio = v / (1 - beta2**t) / variance_before if variance_before else 1.0
    r = beta3 * last.r + (1 - beta3) * ratio
    factor = min(1.0, r / (1 - beta3**t) / t)
    return Averages(m, v, r, t, max(factor, LEAST))


ENTRY = Entry("adaptive-fedavg", adaptive_fedavg, "weights and a factor down, update up", "global", helps=("drift",))
