"""Losses: what a client minimizes.

A loss has `prepare(shard) -> (shared, columns)`, called once per client: what holds for all of its rows (class
fractions), and a tuple of tensors with an entry for each row (posteriors, which steps count). `value(outputs, y,
shared, columns)` is the mean over a batch, with the batch's part of each column. A loss that knows the value of every
label says it with `each(outputs, y, shared)`, for methods that weigh rows; one that can smooth labels does so in
`smoothed(outputs, y, shared, eps)`, the mean over labels that count, for methods with idle branches. Decisions (which
model, which posterior, utilities) use plain cross-entropy whatever loss trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

from fedtide.core.config_types import ingredient
from fedtide.core.errors import FedtideError
from fedtide.core.types import Shard

Columns = tuple[Tensor, ...]
"""Tensors with one entry for each row, cut and shuffled along with the rows."""


def label_count(y: Tensor, mask: Tensor | None) -> int:
    """How many labels the mean of a batch is taken over: its rows, or the steps that count."""
    return len(y) if mask is None else int(mask.sum())


def mask_of(shard: Shard) -> Columns:
    """Which steps of a client's sequences count, as a column; none for rows."""
    return () if shard.mask is None else (shard.mask,)


def keep_counted(outputs: Tensor, y: Tensor, columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs (labels, classes) and labels (labels,) of a batch: all, or those that a mask as its only column marks."""
    if not columns:
        return outputs.flatten(0, -2), y.flatten()
    (mask,) = columns
    return outputs[mask], y[mask]


class Loss(Protocol):
    """What a client minimizes."""

    def prepare(self, shard: Shard) -> tuple[Any, Columns]:
        """What the loss needs to know of the client's rows: one value for all, and columns with an entry for each."""

    def value(self, outputs: Any, y: Tensor, shared: Any, columns: Columns) -> Tensor:
        """The mean loss of a batch, a scalar that can be differentiated."""


@runtime_checkable
class StackedLoss(Loss, Protocol):
    """A loss by which several clients can be trained at once, its mean being that of all labels which count."""

    def each(self, outputs: Any, y: Tensor, shared: Any) -> Tensor:
        """The loss of every label, in the shape of `y`."""

    def stacked(self, shared: Sequence[Any]) -> Tensor | None:
        """What several clients prepared, clients along the first dimension; None where there is nothing."""


@ingredient
class CrossEntropy:
    """Mean cross-entropy of logits (rows, classes) against labels (rows,).

    Of sequences, logits (rows, steps, classes) and labels (rows, steps), it is the mean over all steps that count.

    >>> import torch
    >>> loss = CrossEntropy()
    >>> round(float(loss.value(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), None, ())), 6)
    0.693147
    """

    kind: Literal["cross-entropy"] = "cross-entropy"

    def prepare(self, shard: Shard) -> tuple[None, Columns]:
        """For sequences, which steps count; else no column."""
        return None, mask_of(shard)

    def value(self, outputs: Tensor, y: Tensor, shared: None, columns: Columns) -> Tensor:
        """The mean over rows, or over the steps that count."""
        return F.cross_entropy(*keep_counted(outputs, y, columns))

    def each(self, outputs: Tensor, y: Tensor, shared: None) -> Tensor:
        """The loss of every label, in the shape of `y`."""
        return each(outputs, y)

    def stacked(self, shared: Sequence[None]) -> None:
        """Nothing, as nothing is prepared."""

    def smoothed(self, outputs: Tensor, y: Tensor, shared: Any, eps: float) -> Tensor:
        """The mean over labels (labels,) of which the share eps is spread over all classes."""
        return F.cross_entropy(outputs, y, label_smoothing=eps)


def each(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of logits (..., classes) with every label, in the shape of `y`.

    >>> import torch
    >>> [round(value, 6) for value in each(torch.zeros(2, 2), torch.tensor([0, 1])).tolist()]
    [0.693147, 0.693147]
    """
    return F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none").reshape(y.shape)


@dataclass(frozen=True)
class Plain:
    """A function of (outputs, labels) as a loss: any loss of torch that returns the mean of a batch.

    >>> import torch
    >>> loss = Plain(torch.nn.CrossEntropyLoss())
    >>> round(float(loss.value(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), None, ())), 6)
    0.693147
    """

    function: Callable[[Any, Tensor], Tensor]

    def prepare(self, shard: Shard) -> tuple[None, Columns]:
        """Nothing, as the function needs outputs and labels alone."""
        return None, ()

    def value(self, outputs: Any, y: Tensor, shared: None, columns: Columns) -> Tensor:
        """What the function says.

        Raises:
            FedtideError: it does not fit the model's outputs, for example by its class weights.
        """
        try:
            return self.function(outputs, y)
        except RuntimeError as error:
            raise FedtideError(f"loss: it does not fit the model's outputs: {' '.join(str(error).split())}") from None


def as_loss(loss: Any) -> Any:
    """A loss as it is, or a plain function as one."""
    return loss if hasattr(loss, "prepare") else Plain(loss)
