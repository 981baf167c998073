"""q-FedAvg: more even accuracy over clients, by larger weights for clients with a high loss.

Li, Sanjabi, Beirami, Smith: *Fair Resource Allocation in Federated Learning*, ICLR 2020, Algorithm 2. It minimizes
`sum_i p_i F_i(w)^(q+1) / (q+1)`, with `p_i` the probability that client i participates, times its samples with
`weighting = "samples"`. With one epoch of full batches it is the paper's q-FedSGD.

| symbol | meaning |
| --- | --- |
| `F_i` | mean training loss of the received weights `w` on client i's samples, before training |
| `L` | the Lipschitz estimate, 1 / (local learning rate) |
| `w_i` | client i's weights after local training |

    dw_i    = L * (w - w_i)
    delta_i = F_i^q * dw_i
    h_i     = q * F_i^(q-1) * ||dw_i||^2 + L * F_i^q
    w      <- w - sum_i delta_i / sum_i h_i

When to use it: the worst-served clients matter more than the mean. `q = 0` is FedAvg with equal weights.

Choices:
    `L = 1 / local.lr` with the learning rate before its schedule. Clients are not weighted by their samples, as in the
    released code (`weighting = "samples"` does). Powers are of `F_i + 1e-10`; at q = 0 the first term of `h_i` is left
    out. The norm is over trainable parameters in float64; running statistics move by the mean with weights `L * F_i^q`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fedtide.algorithms.fedavg import State
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import NonNegative
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import Algorithm, Facts, Fleet, Sum, Weights, shared_weights
from fedtide.core.weights import mul
from fedtide.learn.local import LocalTrainer
from fedtide.learn.participation import with_cohort
from fedtide.learn.server import SGD, averaged
from fedtide.learn.task import Task
from fedtide.learn.training import Training
from fedtide.parts.weighting import Weighting


def qfedavg(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    q: NonNegative = 1.0,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[State]:
    """FedAvg with fairness q.

    Args:
        local: local training; its learning rate is also 1 / L.
        q: fairness; 0 is FedAvg with equal weights, larger values give more even accuracy.
        weighting: weight of a client: "uniform" 1 (the released code), "samples" its number of samples.
    """
    server = SGD()

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, server.init(weights), cohort.init(fleet))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients = cohort.pick(state.cohort, fleet, rng, partial(shared_weights, state))
        reply = fleet.ask("train", clients, state.weights, reveal=cohort.reveals)
        state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
        return averaged(state, server, mean(fairly(reply.total)))

    train = Training(task, local, weighting, q=q)
    made = Algorithm("q-fedavg", init, {"train": train}, round, shared_weights, task.predict)
    return with_cohort(made, cohort, task, local)


def fairly(total: Any) -> Any:
    """Set the weight of "delta" in q-FedAvg totals to sum_i h_i, so that its mean is q-FedAvg's step.

    Running statistics keep the mean with weights L * F_i^q. None stays None.

    >>> import torch
    >>> delta = Sum(Weights({"w": torch.tensor([6.0])}, {"mean": torch.tensor([6.0])}), 2.0)
    >>> made = mean(fairly({"delta": delta, "h": Sum(3.0, 1.0)}))["delta"]
    >>> made.params["w"].item(), made.buffers["mean"].item()
    (2.0, 3.0)
    """
    if total is None:
        return None
    step, h = total["delta"], total["h"].value
    if not h or not step.weight:
        return {**total, "delta": replace(step, weight=0.0)}
    return {**total, "delta": Sum(Weights(step.value.params, mul(step.value.buffers, h / step.weight)), h)}
