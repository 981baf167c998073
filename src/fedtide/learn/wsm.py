"""The re-weighted softmax: cross-entropy that gives no gradient to classes that a client does not have.

Legate: *Re-Weighted Softmax Cross-Entropy to Control Forgetting in Federated Learning*, thesis, 2022, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.core.config_types import Flag, Fraction, ingredient
from fedtide.core.errors import refused
from fedtide.core.types import Shard
from fedtide.learn.loss import Columns, CrossEntropy, each, keep_counted, mask_of

SAFE_BLEND = 0.3
"""Blend in the safe form of a method (docs/never-worse.md)."""


@ingredient
class WSM:
    """The re-weighted softmax (WSM): each class is weighted in the softmax by its fraction of the client's samples.

    Equation 15 of Legate's thesis (2022), `-(z_y - log sum_c a_c exp(z_c))` with `a_c` the fraction of class c among
    the samples that the client trains on, plus `-log(a_y)`, as in the released code: the gradients are the same, the
    value is never negative, and it equals cross-entropy for a client with equally many samples of each class. With
    `blend = 0`, the thesis, a class that a client does not hold gets no gradient, so training does not push it out of
    the model; with plain SGD a client of one class changes only running statistics. Weight decay, a proximal or control
    term and `blend` reach all classes. By default the gradient is that of the thesis; `safe = true` in a method stands
    for `blend = 0.3`
    (docs/never-worse.md).
    Evaluation and decisions between models use plain cross-entropy; q-FedAvg weights clients by this loss, so with
    `blend = 0` clients of one class count next to nothing there.

    When to use it: clients hold few of the classes, and few clients participate in a round. It adds no communication.
    The thesis found that at most rates it helps with BatchNorm, or BatchNorm and GroupNorm mixed, and hurts with
    GroupNorm alone.

    For sequences, fractions and loss are over the steps that count. Without `blend` a label that is not among the
    prepared samples has infinite loss.

    Args:
        blend: the part b of equal fractions in `a_c = (1 - b) n_c / n + b / C` of C classes; 0 is the thesis, 1 is
            cross-entropy.
        val: also count the client's validation samples, as in the released code. The thesis can be read either way.

    Raises:
        FedtideError: a label exceeds the model's outputs.

    >>> y = torch.tensor([0, 0, 0, 1])
    >>> shared, columns = WSM(blend=0.0).prepare(Shard(torch.zeros(4, 1), y, torch.arange(4)))
    >>> logits = torch.zeros(4, 3, requires_grad=True)
    >>> value = WSM(blend=0.0).value(logits, y, shared, columns)
    >>> round(value.item(), 4)  # -(3/4) log(3/4) - (1/4) log(1/4)
    0.5623
    >>> torch.autograd.grad(value, logits)[0].sum(0).tolist()
    [0.0, 0.0, 0.0]
    """

    blend: Fraction = 0.0
    val: Flag = False
    kind: Literal["wsm"] = "wsm"

    def prepare(self, shard: Shard) -> tuple[Tensor, Columns]:
        """Return the number of samples (or steps) of each class, up to the largest label; and the mask column."""
        counts = _counts(shard)
        if self.val and shard.val is not None:
            beside = _counts(shard.val)
            longest = max(len(counts), len(beside))
            counts = _padded(counts, longest) + _padded(beside, longest)
        return counts, mask_of(shard)

    def value(self, outputs: Tensor, y: Tensor, shared: Tensor, columns: Columns) -> Tensor:
        """Return the mean over samples, or over the steps that count."""
        outputs, y = keep_counted(outputs, y, columns)
        return F.cross_entropy(outputs + self._shift(shared, outputs), y)

    def each(self, outputs: Tensor, y: Tensor, shared: Tensor, eps: float = 0.0) -> Tensor:
        """Return the loss of every label, in the shape of `y`, smoothed over only the classes that the client has."""
        shift = self._shift(shared, outputs)
        if not eps:
            return each(outputs + shift, y)
        logp, has = F.log_softmax(outputs + shift, -1), shift.isfinite()
        found = F.nll_loss(logp.flatten(0, -2), y.flatten(), reduction="none").reshape(y.shape)
        others = -logp.masked_fill(~has, 0.0).sum(-1)  # as in torch, so that equal fractions give the same bits
        return (1 - eps) * found + others * (eps / has.sum().double())

    def graded(self, outputs: Tensor, y: Tensor, shared: Tensor, eps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss of every label of several clients, and its gradient by the outputs.

        Args:
            outputs: logits (clients, ..., classes).
            y: labels (clients, ...).
            shared: counts of the clients (clients, classes), up to the largest label of all.
            eps: label smoothing of each label over only the classes that its client has, in a shape that fits `y`.
        """
        shift = self._shift(shared, outputs).view(len(shared), *(1,) * (y.dim() - 1), -1)
        if eps is None:
            return CrossEntropy().graded(outputs + shift, y, None)
        has, at = shift.isfinite(), y[..., None]
        logp = F.log_softmax(outputs + shift, -1)
        found, others = -logp.gather(-1, at)[..., 0], logp.masked_fill(~has, 0.0).sum(-1) / has.sum(-1)
        gradient = logp.exp_().sub_(eps[..., None] * has / has.sum(-1, keepdim=True))
        off = (eps - 1)[..., None].expand(at.shape)
        return (1 - eps) * found - eps * others, gradient.scatter_add_(-1, at, off)

    def stacked(self, shared: Sequence[Tensor]) -> Tensor:
        """Stack the counts of several clients (clients, classes), up to the largest label of all."""
        longest = max(len(counts) for counts in shared)
        return torch.stack([_padded(counts, longest) for counts in shared])

    def _shift(self, counts: Tensor, outputs: Tensor) -> Tensor:
        """Return the logarithm of the fractions (..., classes), minus that of the largest.

        A constant for all logits changes nothing, and with this one the shift of equal fractions is exactly zero. For a
        class without samples it is minus infinity: its probability and its gradient are exactly zero.
        """
        classes = outputs.shape[-1]
        if counts.shape[-1] > classes:
            raise refused("loss: 'wsm': label", counts.shape[-1] - 1, f"0 to {classes - 1}, the model's")
        held = (1 - self.blend) * _padded(counts, classes) + self.blend * counts.sum(-1, keepdim=True) / classes
        return (held / held.amax(-1, keepdim=True)).log().to(outputs.dtype)


def _counts(shard: Shard) -> Tensor:
    return torch.bincount(shard.labels).double()


def _padded(counts: Tensor, length: int) -> Tensor:
    return F.pad(counts, (0, length - counts.shape[-1]))
