"""Plain local training: the work of every method whose clients train what they receive and send the update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedtide.cohorts.oort import utility
from fedtide.core.rng import Rng
from fedtide.core.types import Algorithm, Answer, Memory, Moment, Shard, Weighted, Weights
from fedtide.learn.local import Fitted, LocalTrainer, Term
from fedtide.learn.task import Task
from fedtide.parts.weighting import Weighting, client_weight

SMALLEST = 1e-10
"""Added to a loss of which powers are taken, as in q-FedAvg's released code."""


@dataclass(frozen=True)
class Training:
    """Train the received weights and send what changed, as a weighted sum; a work.

    A method that uses it for a question declares with it that the clients of that question may be trained at once
    (`fedtide.fleets.stacked`), as nothing else happens there; unless they look at losses first, for `q` or `utility`.

    Args:
        task: model and loss.
        local: local training.
        weighting: what a client counts for.
        term: a gradient term.
        q: fairness: the update is weighed by a power of the loss, as for q-FedAvg; None for the plain mean.
        utility: show the server what Oort asks for, "utility".

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
        """How many passes without gradients over a client's rows come before training."""
        return int(self.utility) + int(self.q is not None)

    def __call__(self, payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        """One client's training; None without a step."""
        seen = {"utility": self._utility(payload, shard)} if self.utility else {}
        # In float64 of torch a power that overflows is infinite, and the answer refused; of Python it is an exception.
        received = 0.0 if self.q is None else self.task.objective(payload, shard) + SMALLEST
        felt = torch.tensor(received, dtype=torch.float64)
        fitted = self.local(self.task, self.task.loss, payload, shard, moment, rng, extra=self.term)
        if not fitted.steps:
            return None  # no rows, or a single one and BatchNorm: "no step" must not pull the mean to zero
        weight = client_weight(shard, self.weighting)
        delta = (
            {"delta": Weighted(fitted.delta, weight)} if self.q is None else self._fair(self.q, fitted, felt, weight)
        )
        return Answer({**delta, "loss": Weighted(fitted.loss, len(shard))}, seen)

    def _utility(self, received: Weights, shard: Shard) -> Tensor:
        return utility(self.task.losses(received, shard), int(self.local.distinct(torch.tensor(len(shard)))))

    def _fair(self, q: float, fitted: Fitted, loss: Tensor, weight: float) -> dict[str, Weighted]:
        """What a client of q-FedAvg sends: its update and h_i; see `fedtide.algorithms.qfedavg`."""
        lipschitz = 1.0 / self.local.lr
        # ||dw_i||^2 = L^2 * ||w_i - w||^2
        norm2 = lipschitz**2 * sum(float(d.double().square().sum()) for d in fitted.delta.params.values())
        power = float(loss**q)
        steep = q * float(loss ** (q - 1)) * norm2 if q > 0 else 0.0
        return {
            # minus delta_i, as value and weight: -delta_i = L * F_i^q * (w_i - w)
            "delta": Weighted(fitted.delta, weight * lipschitz * power),
            "h": Weighted(steep + lipschitz * power, weight),
        }


def varied(algorithm: Algorithm, name: str, **changes: Any) -> Algorithm:
    """An algorithm whose clients only train, under another name and with changes to that training.

    >>> from fedtide.algorithms.fedavg import fedavg
    >>> made = varied(fedavg(Task(lambda: torch.nn.Linear(3, 2))), "fairer", q=1.0)
    >>> made.name, made.works["train"].q
    ('fairer', 1.0)
    """
    train = algorithm.works["train"]
    assert isinstance(train, Training)
    return replace(algorithm, name=name, works={**algorithm.works, "train": replace(train, **changes)})


def training_loss(answer: Answer) -> Tensor | None:
    """A client's mean training loss, for the record: the leaf "loss" of its answer, by convention; None without one.

    >>> training_loss(Answer({"loss": Weighted(0.5, 3.0)})), training_loss(Answer({}))
    (tensor(0.5000, dtype=torch.float64), None)
    """
    leaf = answer.total.get("loss") if isinstance(answer.total, dict) else None
    if not isinstance(leaf, Weighted) or not isinstance(leaf.value, int | float | Tensor):
        return None
    value = torch.as_tensor(leaf.value, dtype=torch.float64)
    return None if value.dim() else value
