"""Losses that clients minimize.

A loss has `prepare(shard) -> (shared, columns)`, called once per client: a value shared by all of its samples (class
fractions), and a tuple of tensors with an entry for each sample (posteriors, masks). `value(outputs, y, shared,
columns)` is the mean over a batch, given the batch's part of each column. A loss that is defined per label also has
`each(outputs, y, shared, eps)` with label smoothing, for methods that weight samples, idle branches, and clients that
are trained together; one whose gradient is known in closed form has `graded(outputs, y, shared, eps)`, for small
networks that are. Decisions (best model, posteriors, utilities) use plain cross-entropy, whatever the training loss;
those of numbers are in `fedtide.learn.target`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.core.config_types import ingredient
from fedtide.core.errors import FedtideError, refused
from fedtide.core.types import Shard
from fedtide.learn.device import CPU

Columns = tuple[Tensor, ...]
"""Tensors with one entry for each sample, split and shuffled along with the samples."""


def label_count(y: Tensor, mask: Tensor | None) -> int:
    """Count the labels in a batch's mean: its samples, or the steps that count."""
    return len(y) if mask is None else int(mask.sum())


def mask_of(shard: Shard) -> Columns:
    """Return the mask of steps that count in a client's sequences as a column; no column without a mask."""
    return () if shard.mask is None else (shard.mask,)


IGNORED = -100
"""Label that a mean cross-entropy of torch leaves out."""


def keep_counted(outputs: Tensor, y: Tensor, columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return outputs (labels, classes) and labels (labels,) of a batch, restricted to the mask if there is one.

    On another device, which would be waited for to count them, all labels are returned, with `IGNORED` for those that
    do not count. Values that are no classes stay as they are.
    """
    if y.is_floating_point():
        return outputs, y
    if not columns:
        return outputs.flatten(0, -2), y.flatten()
    (mask,) = columns
    if y.device.type != CPU:
        return outputs.flatten(0, -2), y.masked_fill(~mask, IGNORED).flatten()
    return outputs[mask], y[mask]


def mean_of_each(
    loss: StackedLoss, outputs: Tensor, y: Tensor, columns: Sequence[Tensor], shared: Any, eps: float
) -> Tensor:
    """Return the mean of `loss.each` over a batch, restricted to the mask if there is one."""
    if y.device.type == CPU or not columns:
        return loss.each(*keep_counted(outputs, y, columns), shared, eps).mean()
    (mask,) = columns
    # Multiplying by the mask is not enough: a step that does not count may have an infinite loss.
    return loss.each(outputs, y, shared, eps).masked_fill(~mask, 0.0).sum() / mask.sum()


class Loss(Protocol):
    """A loss that clients minimize."""

    def prepare(self, shard: Shard) -> tuple[Any, Columns]:
        """Return what the loss needs of the client's samples: one shared value, and columns with one entry each."""

    def value(self, outputs: Any, y: Tensor, shared: Any, columns: Columns) -> Tensor:
        """Return the mean loss of a batch, a differentiable scalar."""


@runtime_checkable
class StackedLoss(Loss, Protocol):
    """A loss for training several clients at once: the mean of `each` over all labels that count.

    Where `prepare` has columns beside the mask, `shared` is a tuple of what is shared and those columns of the batch.
    """

    def each(self, outputs: Any, y: Tensor, shared: Any, eps: float = 0.0) -> Tensor:
        """Return the loss of every label, in the shape of `y`, with label smoothing `eps` (of idle branches)."""

    def stacked(self, shared: Sequence[Any]) -> Tensor | tuple[Any, ...] | None:
        """Stack the shared values of several clients along the first dimension; None if there are none."""


@ingredient
class CrossEntropy:
    """Mean cross-entropy of logits (samples, classes) against labels (samples,).

    For sequences, logits (samples, steps, classes) and labels (samples, steps): the mean over all steps that count.

    >>> import torch
    >>> loss = CrossEntropy()
    >>> round(float(loss.value(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), None, ())), 6)
    0.693147
    """

    kind: Literal["cross-entropy"] = "cross-entropy"

    def prepare(self, shard: Shard) -> tuple[None, Columns]:
        """Return the mask of sequences as the only column; no column otherwise."""
        return None, mask_of(shard)

    def value(self, outputs: Tensor, y: Tensor, shared: None, columns: Columns) -> Tensor:
        """Return the mean over samples, or over the steps that count."""
        if y.is_floating_point():
            raise refused("loss", "cross-entropy", "Task(..., target=population.target), as rows have no classes")
        return F.cross_entropy(*keep_counted(outputs, y, columns))

    def each(self, outputs: Tensor, y: Tensor, shared: None, eps: float = 0.0) -> Tensor:
        """Return the loss of every label, in the shape of `y`, with label smoothing `eps`."""
        return each(outputs, y, eps)

    def graded(self, outputs: Tensor, y: Tensor, shared: None, eps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss of every label, in the shape of `y`, and its gradient by the outputs.

        Args:
            outputs: logits (..., classes).
            y: labels (...).
            shared: nothing.
            eps: label smoothing of each label, in a shape that fits `y`; None for none.
        """
        logp, y = F.log_softmax(outputs, -1), y[..., None]
        found = -logp.gather(-1, y)[..., 0]
        if eps is not None:
            found = torch.lerp(found, -logp.mean(-1), eps.expand(found.shape))
        gradient = logp.exp_()
        if eps is None:
            off = gradient.new_full((1,) * y.dim(), -1.0)
        else:
            off, gradient = (eps - 1)[..., None], gradient.sub_((eps / gradient.shape[-1])[..., None])
        return found, gradient.scatter_add_(-1, y, off.expand(y.shape))

    def stacked(self, shared: Sequence[None]) -> None:
        """Return None, as nothing is prepared."""


def each(outputs: Tensor, y: Tensor, eps: float = 0.0) -> Tensor:
    """Return the cross-entropy of logits (..., classes) with every label, in the shape of `y`, smoothed by `eps`.

    >>> import torch
    >>> [round(value, 6) for value in each(torch.zeros(2, 2), torch.tensor([0, 1])).tolist()]
    [0.693147, 0.693147]
    """
    found = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none", label_smoothing=eps)
    return found.reshape(y.shape)


@dataclass(frozen=True)
class Plain:
    """A loss made of a function of (outputs, labels), such as any torch loss that returns the mean of a batch.

    >>> import torch
    >>> loss = Plain(torch.nn.CrossEntropyLoss())
    >>> round(float(loss.value(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), None, ())), 6)
    0.693147
    """

    function: Callable[[Any, Tensor], Tensor]

    def prepare(self, shard: Shard) -> tuple[None, Columns]:
        """Return nothing, as the function needs only outputs and labels."""
        return None, ()

    def value(self, outputs: Any, y: Tensor, shared: None, columns: Columns) -> Tensor:
        """Return the value of the function.

        Raises:
            FedtideError: the function does not fit the model's outputs, for example by its class weights.
        """
        try:
            return self.function(outputs, y)
        except RuntimeError as error:
            raise FedtideError(f"loss: it does not fit the model's outputs: {' '.join(str(error).split())}") from None


def known_part(loss: Any, name: str) -> Any:
    """Return what tells a loss in another way, such as `graded`; None if there is none, or it is of another loss.

    A class that says anew what the `value` is, or the loss of `each` label, has inherited what it does not say.

    >>> class Doubled(CrossEntropy):
    ...     def value(self, outputs, y, shared, columns):
    ...         return 2 * super().value(outputs, y, shared, columns)
    >>> known_part(CrossEntropy(), "graded") is None, known_part(Doubled(), "graded") is None
    (False, True)
    """
    for each in type(loss).__mro__:
        if name in vars(each):
            return getattr(loss, name)
        if "value" in vars(each) or "each" in vars(each):
            return None
    return getattr(loss, name, None)


def is_stacked(loss: Any) -> TypeGuard[StackedLoss]:
    """Tell whether a loss is defined per label, by the class that says what its `value` is."""
    return isinstance(loss, StackedLoss) and known_part(loss, "each") is not None


def as_loss(loss: Any) -> Any:
    """Return a loss unchanged, or wrap a plain function as a loss."""
    return loss if hasattr(loss, "prepare") else Plain(loss)
