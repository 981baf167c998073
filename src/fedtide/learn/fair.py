"""The aggregation of q-FedAvg: clients with a high loss count more (q-FFL).

Li, Sanjabi, Beirami, Smith: *Fair Resource Allocation in Federated Learning*, ICLR 2020, Algorithm 2. What a client
sends and what the server makes of the sums, for q-FedAvg itself and for methods that aggregate so within clusters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fedtide.core.trees import map_leaves
from fedtide.core.types import Shard, Sum, Weighted, Weights
from fedtide.learn.local import Fitted
from fedtide.learn.task import Task

SMALLEST = 1e-10
"""Added to a loss of which powers are taken, as in the released code."""


@dataclass(frozen=True)
class Fair:
    """Weights by powers of the loss.

    Args:
        q: 0 weighs all alike; the larger, the more even accuracy is over clients.
        lipschitz: L, 1 / (local rate).
    """

    q: float
    lipschitz: float

    def felt(self, task: Task, received: Weights, shard: Shard) -> torch.Tensor:
        """F_i: the mean training loss of the received weights on a client's rows; to be taken before training."""
        # In float64 of torch a power that overflows is infinite, and the answer refused; of Python it is an exception.
        return torch.tensor(task.objective(received, shard) + SMALLEST, dtype=torch.float64)

    def sent(self, fitted: Fitted, felt: torch.Tensor, weight: float) -> dict[str, Weighted]:
        """What a client sends: its update and h_i.

        Args:
            fitted: local training.
            felt: F_i.
            weight: what the client counts for beside that.
        """
        # ||dw_i||^2 = L^2 * ||w_i - w||^2
        norm2 = self.lipschitz**2 * sum(float(d.double().square().sum()) for d in fitted.delta.params.values())
        utility = float(felt**self.q)
        steep = self.q * float(felt ** (self.q - 1)) * norm2 if self.q > 0 else 0.0
        return {
            # minus delta_i, as value and weight: -delta_i = L * F_i^q * (w_i - w)
            "delta": Weighted(fitted.delta, weight * self.lipschitz * utility),
            "h": Weighted(steep + self.lipschitz * utility, weight),
        }


def fairly(total: Any) -> Any:
    """The totals of clients that sent so, with sum_i h_i as the weight of "delta".

    So its mean is q-FedAvg's step; running statistics keep the mean with weights L * F_i^q. None stays None.

    >>> from fedtide.core.sums import mean
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
    kept = map_leaves(lambda value: value * (h / step.weight), step.value.buffers)
    return {**total, "delta": Sum(Weights(step.value.params, kept), h)}
