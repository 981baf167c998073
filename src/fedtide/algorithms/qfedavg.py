"""q-FedAvg: more even accuracy over clients, by weighing those with a high loss more.

Li, Sanjabi, Beirami, Smith: *Fair Resource Allocation in Federated Learning*, ICLR 2020, Algorithm 2. It minimises
`sum_i p_i F_i(w)^(q+1) / (q+1)`, with `p_i` the chance that client i is asked, times its rows with
`weighting = "samples"`. With one epoch of one full batch it is the paper's q-FedSGD.

| symbol | meaning |
| --- | --- |
| `F_i` | mean training loss of the received weights `w` on client i's rows, before training |
| `L` | the Lipschitz estimate, 1 / (local rate) |
| `w_i` | client i's weights after local training |

    dw_i    = L * (w - w_i)
    delta_i = F_i^q * dw_i
    h_i     = q * F_i^(q-1) * ||dw_i||^2 + L * F_i^q
    w      <- w - sum_i delta_i / sum_i h_i

When to use it: the worst-served clients matter more than the mean. `q = 0` is FedAvg with equal weights.

Choices:
    `L = 1 / local.rate` with the rate before its schedule. Clients are not weighted by their rows, as in the released
    code (`weighting = "samples"` does). `F_i + 1e-10` inside powers; at q = 0 the first term of `h_i` is left out. The
    norm is taken over trainable parameters in float64; running statistics move by the mean with weights `L * F_i^q`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.trees import map_leaves
from fedtide.core.types import Algorithm, Answer, Facts, Fleet, Moment, Shard, Weighted, Weights, shared_weights
from fedtide.core.values import NonNegative
from fedtide.core.weights import add
from fedtide.learn.local import LocalSolver
from fedtide.learn.task import Task
from fedtide.parts.cohort import Arrivals, Cohort
from fedtide.parts.weighting import Weighting, client_weight


@dataclass(frozen=True)
class State:
    """The global weights."""

    weights: Weights


def qfedavg(
    task: Task,
    local: LocalSolver = LocalSolver(),
    q: NonNegative = 1.0,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm:
    """FedAvg with fairness q.

    Args:
        task: model and loss.
        local: local training; its rate is also 1 / L.
        q: 0 is FedAvg with equal weights; the larger, the more even.
        cohort: who is asked.
        weighting: "uniform" (the released code) or "samples".
    """
    lipschitz = 1.0 / local.rate

    def init(fleet: Fleet, rng: Rng) -> State:
        return State(task.init(rng))

    def train(payload: Weights, memory: None, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        # In float64 of torch a power that overflows is infinite, and the answer refused; of Python it is an exception.
        f = torch.tensor(task.objective(payload, shard) + 1e-10, dtype=torch.float64)
        fitted = local(task, task.loss, payload, shard, moment, rng)
        if not fitted.steps:
            return None
        # ||dw_i||^2 = L^2 * ||w_i - w||^2
        norm2 = lipschitz**2 * sum(float(d.double().square().sum()) for d in fitted.delta.params.values())
        utility = float(f**q)
        h = (q * float(f ** (q - 1)) * norm2 if q > 0 else 0.0) + lipschitz * utility
        scale = client_weight(shard, weighting)
        return Answer(
            {
                # minus delta_i, as value and weight: -delta_i = L * F_i^q * (w_i - w)
                "delta": Weighted(fitted.delta, scale * lipschitz * utility),
                "h": Weighted(h, scale),
                "loss": Weighted(fitted.loss, len(shard)),
            }
        )

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        reply = fleet.ask("train", cohort(rng, fleet), state.weights)
        if reply.total is None or reply.total["h"].value == 0.0:
            return state, {}
        step, h = reply.total["delta"], reply.total["h"].value
        moved: Any = map_leaves(lambda value: value / h, step.value)
        weights = Weights(add(state.weights.params, moved.params), add(state.weights.buffers, mean(step).buffers))
        return State(weights), {"loss": mean(reply.total)["loss"]}

    return Algorithm("q-fedavg", init, {"train": train}, round, serve=shared_weights, predict=task.predict)
