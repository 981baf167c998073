"""Passes of a task's own module by its layers: losses and gradients of a client's batches without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedtide.learn.layer_stack import LayerStack
from fedtide.learn.layers import has_wide, known_layers
from fedtide.learn.plan import Layer, Plan, Room
from fedtide.models.branched import Branched, Branches

if TYPE_CHECKING:
    from fedtide.learn.task import Task

MOST_BYTES = 32 * 2**20
"""Bytes of what a pass makes of its rows, up to which it is faster than autograd: more leave a processor's caches."""
COPY = "model.copies.{}."
"""What names begin with in a copy of a model that is repeated as a whole."""


class ModulePasses:
    """Losses and gradients of a task's own module without autograd, but for the loss itself.

    Args:
        task: the model, on the CPU.
        layers: its layers, which read and write the module's parameters where they are.
        room: where their numbers are.
        copies: how often the model is repeated as a whole; 0 if it is not, or in a layer alone.
    """

    def __init__(self, task: Task, layers: Sequence[Layer], room: Room, copies: int) -> None:
        self.stack, self.names, self.copies = LayerStack(task, layers, room, None), task.scratch.names, copies
        self.branches = getattr(layers[-1], "branches", None)
        values = dict(zip(self.names, task.scratch.values, strict=True))
        self.copied = [
            pair
            for layer in self.stack.products
            for pair in layer.bind([[values[self._of(name, k)] for name in layer.names] for k in range(copies or 1)])
        ]
        self.most = MOST_BYTES // (self.stack.row_bytes * (copies or 1))  # rows of a batch
        self.last: Plan | None = None
        self.gradient: list[Tensor] = []

    @classmethod
    def of(cls, task: Task, shape: tuple[int, ...]) -> ModulePasses | None:
        """Return passes for rows of a shape; None where the module needs autograd, or a library is faster."""
        room, model = Room(task.dtype, torch.device(task.device)), getattr(task.scratch.module, "model", None)
        copies = 0
        if isinstance(task.scratch.module, Branched) and isinstance(model, Branches):
            copies = 0 if isinstance(model.copies[0], nn.Linear) else len(model.copies)
        within = COPY.format(0)[:-1] if copies else ""
        layers = known_layers(task, shape, room, within=within)
        return None if layers is None or has_wide(layers) else cls(task, layers, room, copies)

    def _of(self, name: str, copy: int) -> str:
        return COPY.format(copy) + name.removeprefix(COPY.format(0)) if self.copies else name

    def __call__(
        self, loss: Any, x: Tensor, y: Tensor, shared: Any, columns: tuple[Tensor, ...]
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Return the loss of a batch, and its gradient in storage that the next pass overwrites.

        None if the loss of a branched model reads its features.
        """
        for into, param in self.copied:
            into.copy_(param)
        plan = self.stack.forward(x.expand(self.copies or 1, *x.shape), "gradient")
        if plan is not self.last:
            named = self.stack.named(plan.gradient)
            parts = {self._of(name, k): each[k] for name, each in named.items() for k in range(len(each))}
            self.last, self.gradient = plan, [parts[name] for name in self.names]
        logits, dy = self._logits(plan.made[-1]), self._logits(plan.dy)
        value = _graded(logits, dy, loss, y, shared, columns)
        if value is None:
            features = (x if self.copies else plan.last_input()[0]) if logits.dim() > 2 else None
            value = _differentiated(logits, dy, features, loss, y, shared, columns)
        if value is None:
            return None
        for act in plan.backward:
            act()
        return value, self.gradient

    def _logits(self, made: Tensor) -> Tensor:
        """Return a view of outputs as the module returns them: (rows, outputs), of branches (K, rows, outputs)."""
        if self.copies:
            return made
        return made[0] if self.branches is None else made[0].unflatten(-1, (self.branches, -1)).transpose(0, 1)


def _graded(
    logits: Tensor, dy: Tensor, loss: Any, y: Tensor, shared: Any, columns: tuple[Tensor, ...]
) -> Tensor | None:
    """Write the gradient by the outputs and return the loss, of one whose gradient is known; else None."""
    if y.dim() != 1 or getattr(loss, "graded", None) is None:
        return None
    prepared, share = loss.stacked([shared]), 1 / len(y)
    if columns:
        prepared = (prepared, *(column[None] for column in columns))
    many = logits.dim() > 2
    each, gradient = loss.graded((logits.transpose(0, 1) if many else logits)[None], y[None], prepared)
    torch.mul(gradient[0].transpose(0, 1) if many else gradient[0], share, out=dy)
    return each.sum() * share


def _differentiated(
    logits: Tensor,
    dy: Tensor,
    features: Tensor | None,
    loss: Any,
    y: Tensor,
    shared: Any,
    columns: tuple[Tensor, ...],
) -> Tensor | None:
    """Write the gradient by the outputs and return the loss; None if it has one by the features of a branched model."""
    read = [each.detach().requires_grad_() for each in (logits, features) if each is not None]
    value = loss.value(read[0] if features is None else tuple(read), y, shared, columns)
    by_logits, *beside = torch.autograd.grad(value, read, allow_unused=True)
    if any(each is not None for each in beside):
        return None
    dy.zero_() if by_logits is None else dy.copy_(by_logits)
    return value.detach()  # type: ignore[no-any-return]
