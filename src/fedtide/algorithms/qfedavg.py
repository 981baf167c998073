"""q-FedAvg: more even accuracy over clients, by larger weights for clients with a high loss.

Li, Sanjabi, Beirami, Smith: *Fair Resource Allocation in Federated Learning*, ICLR 2020, Algorithm 2. It minimizes
`sum_i p_i F_i(w)^(q+1) / (q+1)`, with `p_i` the probability that client i participates, times its samples with
`weighting = "samples"`. With one epoch of full batches it is the paper's q-FedSGD. With nothing but its name it plays
Algorithm 2 as released, with q = 1.

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
    - paper: `L = 1 / local.lr`, with the learning rate before its schedule (ours).
    - released code: clients are not weighted by their samples; `weighting = "samples"` does.
    - released code: powers are of `F_i + 1e-10`. At q = 0 the first term of `h_i` is left out (ours).
    - ours: the norm is over trainable parameters in float64; running statistics move by the mean with weights `L *
      F_i^q`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Facts, Memory, Moment, Reply, Shard, Sum, Weighted, Weights, mean
from fedtide.core.rng import Rng
from fedtide.core.weights import mul
from fedtide.fields.types import NonNegative
from fedtide.learn import SGD, LocalTrainer, Steps, Task, Training, Weighting, step_server

SMALLEST = 1e-10
"""Constant added to a loss before taking powers, as in the released code."""


def qfedavg(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    q: NonNegative = 1.0,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[OneModel]:
    """FedAvg with fairness q.

    Args:
        local: local training; its learning rate is also 1 / L.
        q: fairness; 0 is FedAvg with equal weights, larger values give more even accuracy.
        weighting: weight of a client: "uniform" 1 (the released code), "samples" its number of samples.
    """
    train, server = FairTraining(task, local, weighting, q=q), SGD()
    unprivate = "a client's weight is a power of its loss, which has no bound"

    def step(state: OneModel, reply: Reply, moment: Moment, rng: Rng) -> tuple[OneModel, Facts]:
        return step_server(state, server, mean(fair_totals(reply.total)))  # Algorithm 2

    return build_method("q-fedavg", task, local, server, cohort, train, step, unprivate=unprivate)


@dataclass(frozen=True)
class FairTraining(Training):
    """Training whose update is weighted by a power of the loss before it.

    Args:
        q: fairness.
    """

    q: float = 1.0

    @property
    def forward_passes(self) -> int:
        """Number of passes without gradients over a client's samples before training."""
        return super().forward_passes + 1

    def start(self, payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        """Begin to train one client, in steps."""
        # A power that overflows is infinite in torch's float64, and the answer is refused; in Python it would raise.
        loss = torch.tensor(self.task.objective(payload, shard) + SMALLEST, dtype=torch.float64)
        answer = yield from super().start(payload, memory, shard, moment, rng)
        if answer is None:
            return None
        delta, lipschitz = answer.total["delta"], 1.0 / self.local.lr
        # ||dw_i||^2 = L^2 * ||w_i - w||^2
        norm2 = lipschitz**2 * sum(float(d.double().square().sum()) for d in delta.value.params.values())
        power = float(loss**self.q)
        steep = self.q * float(loss ** (self.q - 1)) * norm2 if self.q > 0 else 0.0
        fair = {
            # minus delta_i, as value and weight: -delta_i = L * F_i^q * (w_i - w)
            "delta": Weighted(delta.value, delta.weight * lipschitz * power),
            "h": Weighted(steep + lipschitz * power, delta.weight),
        }
        return replace(answer, total=answer.total | fair)


def fair_totals(total: Any) -> Any:
    """Set the weight of "delta" in q-FedAvg totals to sum_i h_i, so that its mean is q-FedAvg's step.

    Running statistics keep the mean with weights L * F_i^q. None stays None.

    >>> from fedtide.core.base import mean
    >>> delta = Sum(Weights({"w": torch.tensor([6.0])}, {"mean": torch.tensor([6.0])}), 2.0)
    >>> made = mean(fair_totals({"delta": delta, "h": Sum(3.0, 1.0)}))["delta"]
    >>> made.params["w"].item(), made.buffers["mean"].item()
    (2.0, 3.0)
    """
    if total is None:
        return None
    step, h = total["delta"], total["h"].value
    if not h or not step.weight:
        return {**total, "delta": replace(step, weight=0.0)}
    return {**total, "delta": Sum(Weights(step.value.params, mul(step.value.buffers, h / step.weight)), h)}


ENTRY = Entry("q-fedavg", qfedavg, "weights down, update and one number up", "global")
