"""The re-weighted softmax: cross-entropy that leaves alone the classes that a client does not have.

Legate: *Re-Weighted Softmax Cross-Entropy to Control Forgetting in Federated Learning*, thesis, 2022, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.core.config_types import Flag, NonNegative, ingredient
from fedtide.core.errors import FedtideError
from fedtide.core.types import Shard
from fedtide.learn.loss import Columns, each, keep_counted, mask_of


@ingredient
class WSM:
    """The re-weighted softmax (WSM): each class weighs in the softmax as much as in the client's rows.

    Equation 15 of Legate's thesis (2022), `-(z_y - log sum_c a_c exp(z_c))` with `a_c` the fraction of class c among
    the rows that the client trains on, plus `-log(a_y)`, as in the released code: the gradients are the same, the value
    is never negative, and it is cross-entropy where a client holds equally many rows of each class. A class that a
    client does not hold gets no gradient, so training there does not push it out of the model; by plain SGD a
    client of one class changes nothing but running statistics. Weight decay, a proximal or control term and `smoothing`
    reach all classes. Judging, and whatever decides between models, uses plain cross-entropy; q-FedAvg weighs clients
    by what they minimize, so those of one class count next to nothing there.

    When to use it: clients hold few of the classes, and few clients take part in a round. It costs nothing on the wire.
    The thesis found it to help with BatchNorm, or BatchNorm and GroupNorm mixed, and to hurt with GroupNorm alone.

    Of sequences, fractions and loss are over the steps that count. A label that is not among the prepared rows costs
    infinitely much.

    Args:
        smoothing: added to the client's count of every class, of those that it does not hold too; 0 is the thesis.
        val: whether the client's validation rows are counted as well, as in the released code.

    Raises:
        FedtideError: the rows have labels that the model has no output for.

    >>> y = torch.tensor([0, 0, 0, 1])
    >>> shared, columns = WSM().prepare(Shard(torch.zeros(4, 1), y, torch.arange(4)))
    >>> logits = torch.zeros(4, 3, requires_grad=True)
    >>> value = WSM().value(logits, y, shared, columns)
    >>> round(value.item(), 4)  # -(3/4) log(3/4) - (1/4) log(1/4)
    0.5623
    >>> torch.autograd.grad(value, logits)[0].sum(0).tolist()
    [0.0, 0.0, 0.0]
    """

    smoothing: NonNegative = 0.0
    val: Flag = False
    kind: Literal["wsm"] = "wsm"

    def prepare(self, shard: Shard) -> tuple[Tensor, Columns]:
        """How many rows (or steps) there are of each class, up to the largest label; which steps count."""
        counts = _counts(shard)
        if self.val and shard.val is not None:
            beside = _counts(shard.val)
            longest = max(len(counts), len(beside))
            counts = _padded(counts, longest) + _padded(beside, longest)
        return counts, mask_of(shard)

    def value(self, outputs: Tensor, y: Tensor, shared: Tensor, columns: Columns) -> Tensor:
        """The mean over rows, or over the steps that count."""
        outputs, y = keep_counted(outputs, y, columns)
        return F.cross_entropy(outputs + self._shift(shared, outputs), y)

    def each(self, outputs: Tensor, y: Tensor, shared: Tensor) -> Tensor:
        """The loss of every label, in the shape of `y`."""
        return each(outputs + self._shift(shared, outputs), y)

    def stacked(self, shared: Sequence[Tensor]) -> Tensor:
        """The counts of several clients (clients, classes), up to the largest label of all."""
        longest = max(len(counts) for counts in shared)
        return torch.stack([_padded(counts, longest) for counts in shared])

    def smoothed(self, outputs: Tensor, y: Tensor, shared: Tensor, eps: float) -> Tensor:
        """The mean over labels of which the share eps is spread over the classes that the client has, and no others."""
        shift = self._shift(shared, outputs)
        has = shift.isfinite()
        place = has.cumsum(0) - 1  # of each class among those
        return F.cross_entropy((outputs + shift)[:, has], place[y], label_smoothing=eps)

    def _shift(self, counts: Tensor, outputs: Tensor) -> Tensor:
        """The logarithm of the fractions (classes,), less that of the largest.

        A constant for all logits changes nothing, and with this one the shift of equal fractions is exactly zero.
        Minus infinity for a class without rows: its probability is exactly zero, and so is its gradient.
        """
        classes = outputs.shape[-1]
        if len(counts) > classes:
            raise FedtideError(f"loss: 'wsm' found label {len(counts) - 1}, allowed: 0 to {classes - 1}, the model's")
        held = _padded(counts, classes) + self.smoothing
        return (held / held.max()).log().to(outputs.dtype)


def _counts(shard: Shard) -> Tensor:
    labels = shard.y if shard.mask is None else shard.y[shard.mask]
    return torch.bincount(labels.flatten()).double()


def _padded(counts: Tensor, length: int) -> Tensor:
    return F.pad(counts, (0, length - len(counts)))
