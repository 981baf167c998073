"""FedAvgM, FedAdagrad, FedAdam and FedYogi: FedAvg with a stateful optimizer on the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: *Adaptive Federated Optimization*, ICLR 2021,
Algorithm 2; FedAvgM: Hsu, Qi, Brown: *Measuring the Effects of Non-Identical Data Distribution*, 2019.

With `d` the mean update of the cohort, FedAvgM steps along its running sum, `m = momentum * m + d; w += lr * m`
(heavy ball), and the others along `w += rate * m / (sqrt(v) + eps)`, with `m` and `v` the moments of `d` (see
`fedtide.learn.server` for each rule, and for the bias correction of Keras).

When to use it: rounds are few, gradients are sparse or of very different size from layer to layer (language models),
or clients' updates are noisy. Each has a server learning rate that has to be tuned.

Choices:
    FedAdam comes in two styles that are not the same method at the same numbers: "reddi" is the paper's (v starts at
    eps^2, no bias correction, b2 = 0.99), "keras" that of the periodic-shift experiments (v starts at 0, bias
    correction, b2 = 0.999, eps outside it). Running statistics bypass the optimizer and move by their plain mean.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import NonNegative, OpenFraction, Positive
from fedtide.core.types import Algorithm
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD, Adagrad, Adam, Yogi
from fedtide.learn.task import Task
from fedtide.parts.weighting import Weighting


def fedavgm(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    lr: Positive = 1.0,
    momentum: OpenFraction = 0.9,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """FedAvg with momentum on the server: `m = momentum * m + d; w += lr * m`.

    Args:
        task: model and loss.
        local: local training.
        lr: server learning rate.
        momentum: momentum of the server optimizer.
        cohort: selection of participants.
        weighting: weight of a client: "samples" its number of samples, "uniform" 1.
    """
    return replace(fedavg(task, local, SGD(lr, momentum), cohort, weighting), name="fedavgm")


def fedadagrad(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    lr: Positive = 0.1,
    eps: Positive = 1e-3,
    beta1: OpenFraction = 0.0,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """FedAvg with Adagrad on the server: `v += d^2`.

    Args:
        task: model and loss.
        local: local training.
        lr: server learning rate.
        eps: added to sqrt(v).
        beta1: decay rate of the first moment.
        cohort: selection of participants.
        weighting: weight of a client: "samples" its number of samples, "uniform" 1.
    """
    return replace(fedavg(task, local, Adagrad(lr, eps, beta1), cohort, weighting), name="fedadagrad")


def fedadam(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    lr: Positive = 0.01,
    eps: Positive = 1e-3,
    beta1: OpenFraction = 0.9,
    beta2: OpenFraction | None = None,
    style: Literal["reddi", "keras"] = "reddi",
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """FedAvg with Adam on the server, in the paper's style or in that of Keras.

    Args:
        task: model and loss.
        local: local training.
        lr: server learning rate.
        eps: added to sqrt(v).
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment; None means 0.99 for reddi and 0.999 for keras.
        style: "reddi" or "keras" (see the choices of this page).
        cohort: selection of participants.
        weighting: weight of a client: "samples" its number of samples, "uniform" 1.
    """
    return replace(fedavg(task, local, Adam(lr, eps, beta1, beta2, style), cohort, weighting), name="fedadam")


def fedyogi(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    lr: Positive = 0.01,
    eps: Positive = 1e-3,
    beta1: OpenFraction = 0.9,
    beta2: OpenFraction = 0.99,
    start: NonNegative | None = None,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """FedAvg with Yogi on the server: `v` moves by the sign of its distance to `d^2`.

    Args:
        task: model and loss.
        local: local training.
        lr: server learning rate.
        eps: added to sqrt(v).
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        start: initial value of v; None means eps^2.
        cohort: selection of participants.
        weighting: weight of a client: "samples" its number of samples, "uniform" 1.
    """
    return replace(fedavg(task, local, Yogi(lr, eps, beta1, beta2, start), cohort, weighting), name="fedyogi")
