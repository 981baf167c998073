"""Plain local training: the work of every method whose clients train the received weights and send the update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedtide.cohorts.oort import utility
from fedtide.core.rng import Rng
from fedtide.core.types import Algorithm, Answer, Memory, Moment, S, Shard, Weighted, Weights
from fedtide.learn.local import LocalTrainer, Term
from fedtide.learn.task import Task
from fedtide.parts.weighting import Weighting, client_weight

SMALLEST = 1e-10
"""Constant added to a loss before taking powers, as in q-FedAvg's released code."""


@dataclass(frozen=True)
class Training:
    """Train the received weights and send the update as a weighted sum; a work.

    A method that uses it for a question thereby declares that the clients of that question may be trained at once
    (`fedtide.fleets.stacked`), unless they compute losses before training, for `q` or `utility`.

    Args:
        task: model and loss.
        local: local training.
        weighting: weight of a client in the mean.
        term: a gradient term.
        q: fairness: the update is weighted by a power of the loss, as in q-FedAvg; None for the plain mean.
        utility: also reveal "utility", which Oort asks for.

    >>> train = Training(Task(lambda: torch.nn.Linear(3, 2)), LocalTrainer(), "samples")
    >>> rows = Shard(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]), torch.arange(4))
    >>> answer = train(train.task.init(Rng(0)), None, rows, Moment(0, 1), Rng(0))
    >>> {name: leaf.weight for name, leaf in answer.total.items()}
    {'delta': 4.0, 'loss': 4}
    """

    task: Task
    local: LocalTrainer
    weighting: Weighting
    term: Term | None = None
    q: float | None = None
    utility: bool = False

    @property
    def looks(self) -> int:
        """Number of passes without gradients over a client's samples before training."""
        return int(self.utility) + int(self.q is not None)

    def __call__(self, payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        """Train one client; None without a step."""
        seen = {"utility": self._utility(payload, shard)} if self.utility else {}
        # A power that overflows is infinite in torch's float64, and the answer is refused; in Python it would raise.
        received = 0.0 if self.q is None else self.task.objective(payload, shard) + SMALLEST
        felt = torch.tensor(received, dtype=torch.float64)
        fitted = self.local(self.task, self.task.loss, payload, shard, moment, rng, extra=self.term)
        if not fitted.steps:
            return None  # no samples, or a single one with BatchNorm: "no step" must not pull the mean to zero
        weight = client_weight(shard, self.weighting)
        delta = fitted.delta
        total = {"delta": Weighted(delta, weight)} if self.q is None else self._fair(self.q, delta, felt, weight)
        return Answer({**total, "loss": Weighted(fitted.loss, len(shard))}, seen, update=delta)

    def _utility(self, received: Weights, shard: Shard) -> Tensor:
        return utility(self.task.losses(received, shard), int(self.local.distinct(torch.tensor(len(shard)))))

    def _fair(self, q: float, delta: Weights, loss: Tensor, weight: float) -> dict[str, Weighted]:
        """Build the answer of a q-FedAvg client, its update and h_i; see `fedtide.algorithms.qfedavg`."""
        lipschitz = 1.0 / self.local.lr
        # ||dw_i||^2 = L^2 * ||w_i - w||^2
        norm2 = lipschitz**2 * sum(float(d.double().square().sum()) for d in delta.params.values())
        power = float(loss**q)
        steep = q * float(loss ** (q - 1)) * norm2 if q > 0 else 0.0
        return {
            # minus delta_i, as value and weight: -delta_i = L * F_i^q * (w_i - w)
            "delta": Weighted(delta, weight * lipschitz * power),
            "h": Weighted(steep + lipschitz * power, weight),
        }


def with_training(algorithm: Algorithm[S], name: str, **changes: Any) -> Algorithm[S]:
    """Rename an algorithm whose clients only train, and change settings of that training.

    >>> from fedtide.algorithms.fedavg import fedavg
    >>> made = with_training(fedavg(Task(lambda: torch.nn.Linear(3, 2))), "fairer", q=1.0)
    >>> made.name, made.works["train"].q
    ('fairer', 1.0)
    """
    train = algorithm.works["train"]
    assert isinstance(train, Training)
    return replace(algorithm, name=name, works={**algorithm.works, "train": replace(train, **changes)})


def training_loss(answer: Answer) -> Tensor | None:
    """Return a client's mean training loss for the record: by convention the leaf "loss" of its answer, else None.

    >>> training_loss(Answer({"loss": Weighted(0.5, 3.0)})), training_loss(Answer({}))
    (tensor(0.5000, dtype=torch.float64), None)
    """
    leaf = answer.total.get("loss") if isinstance(answer.total, dict) else None
    if not isinstance(leaf, Weighted) or not isinstance(leaf.value, int | float | Tensor):
        return None
    value = torch.as_tensor(leaf.value, dtype=torch.float64)
    return None if value.dim() else value
