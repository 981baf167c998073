"""Training on a blend: every row trains each component, weighted by its posterior (FedEM, FedGMM)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtide.core.base import Shard, Weighted, Weights
from fedtide.core.errors import refused
from fedtide.learn.losses import Columns, CrossEntropy, is_stacked, known_part, mask_of
from fedtide.learn.task import Task

LEAST = 1e-12
"""Smallest share of a component, so that a vanished one can come back."""


@dataclass(frozen=True)
class SentMixture:
    """What clients receive: K models, and means mu, spreads and shares pi of Gaussians."""

    models: list[Weights]
    mu: Tensor
    spread: Tensor
    pi: Tensor | None = None


def weighs_rows(loss: Any, method: str) -> None:
    """Refuse a loss that has only a mean, for a method that weights samples."""
    if known_part(loss, "each") is None:
        allowed = f"CrossEntropy, WSM, or one with `each`, as {method} weights samples"
        raise refused("loss", type(loss).__name__, allowed)


def needs_likelihood(task: Task, key: str, found: str) -> None:
    """Refuse a target whose losses are no likelihoods, for what weighs models by posteriors."""
    if not task.target.likelihood:
        allowed = "one that needs no likelihood; or data.target = { kind = 'number', loss = 'gaussian' }, or counts"
        raise refused(key, found, allowed)


def mixture_notes(posteriors: Tensor, joints: Tensor) -> dict[str, Weighted]:
    """Build the part of an answer by which a mixture is watched: mean entropy and mean log-likelihood of its rows.

    Args:
        posteriors: (rows, K).
        joints: (rows, ...) log-joints of components and row.
    """
    n = len(posteriors)
    return {
        "entropy": Weighted(torch.special.entr(posteriors).sum(1).mean(), n),
        "log_likelihood": Weighted(joints.flatten(1).logsumexp(1).mean(), n),
    }


@dataclass(frozen=True)
class Blended:
    """The mean over rows of sum_k q_k * loss_k, with q (rows, K) from the E-step.

    Args:
        q: posteriors.
        base: the loss of a component, one that is defined per label.
    """

    q: Tensor
    base: Any = CrossEntropy()

    def prepare(self, shard: Shard) -> tuple[Any, Columns]:
        """Prepare the base loss; columns are each row's posteriors and, for sequences, the mask."""
        return self.base.prepare(shard)[0], (self.q, *mask_of(shard))

    def value(self, outputs: tuple[Tensor, Tensor], y: Tensor, shared: Any, columns: Columns) -> Tensor:
        """Return the sum divided by the number of rows, not by the sum of posteriors."""
        q, *masks = columns
        each = torch.stack([self.base.each(z, y, shared).flatten() for z in outputs[0]], 1)
        if not masks:
            return (q.to(each.dtype) * each).sum() / len(y)
        (mask,) = masks
        # Multiplying by the mask is not enough: a step that does not count may have an infinite loss.
        counted = each.T.reshape(-1, *y.shape).double().masked_fill(~mask, 0.0).sum(-1)
        return (q.T.to(each.dtype) * counted).sum() / mask.sum()

    @property
    def graded(self) -> Callable[[Tensor, Tensor, tuple[Any, Tensor]], tuple[Tensor, Tensor]] | None:
        """Return what gives losses (clients, rows), and gradients by logits (clients, rows, K, classes), if any."""
        graded = known_part(self.base, "graded")

        def both(logits: Tensor, y: Tensor, shared: tuple[Any, Tensor]) -> tuple[Tensor, Tensor]:
            prepared, q = shared
            q = q.to(logits.dtype)
            each, gradient = graded(logits, y[..., None].expand(q.shape), prepared)
            return (each * q).sum(-1), gradient.mul_(q[..., None])

        return None if graded is None else both

    @property
    def alike(self) -> Hashable:
        """Losses of several clients are of one kind if this is equal; None: they are not."""
        return id(self.base) if is_stacked(self.base) else None

    def stacked(self, shared: Sequence[Any]) -> Any:
        """Return what the base losses of several clients prepare, stacked."""
        return self.base.stacked(shared)

    def each(self, outputs: tuple[Tensor, Tensor], y: Tensor, shared: tuple[Any, Tensor]) -> Tensor:
        """Return the loss of every label, in the shape of `y`, of one of several clients."""
        prepared, q = shared
        each = torch.stack([self.base.each(z, y, prepared) for z in outputs[0]], -1)
        return (q.to(each.dtype).reshape(len(y), *[1] * (y.dim() - 1), -1) * each).sum(-1)
