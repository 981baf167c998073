"""Passes of a task's own module by its layers: losses and gradients of a client's batches without autograd."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.learn.device import Scratch
from fedtide.learn.fast.layers import Layer, Plan, Room, has_wide
from fedtide.learn.fast.stacks import LayerStack, feature_of, in_copy, known_copies
from fedtide.learn.losses import known_part

MOST_BYTES = 32 * 2**20
"""Bytes of a pass up to which it is faster than autograd: more bytes leave a processor's caches."""


class ModulePasses:
    """Losses and gradients of a task's own module without autograd, but for the loss itself.

    Args:
        scratch: the module of the model, on the CPU.
        layers: its layers, which read and write the module's parameters in place.
        room: storage of their numbers.
        copies: how often the model is repeated as a whole; 0 if it is not, or in a layer alone.
    """

    def __init__(self, scratch: Scratch, layers: Sequence[Layer], room: Room, copies: int) -> None:
        self.stack, self.names, self.copies = LayerStack(scratch, layers, room, None), scratch.names, copies
        self.params = scratch.params
        self.feature = feature_of(scratch) if copies else self.stack.feature
        values = {name: param.detach() for name, param in scratch.module.named_parameters()}
        self.copied = [
            pair
            for layer in self.stack.products
            for pair in layer.bind([[values[self._of(n, k)] for n in layer.names] for k in range(copies or 1)], room)
        ]
        self.most = MOST_BYTES // (self.stack.row_bytes * (copies or 1))  # rows of a batch
        self.last: Plan | None = None
        self.gradient: list[Tensor] = []

    @classmethod
    def of(cls, scratch: Scratch, shape: tuple[int, ...]) -> Self | None:
        """Return passes for rows of a shape; None if the module needs autograd, or a library is faster."""
        network, copies = known_copies(scratch, shape)
        return None if network is None or has_wide(network[0]) else cls(scratch, *network, copies)

    def _of(self, name: str, copy: int) -> str:
        return in_copy(name, copy) if self.copies else name

    def __call__(
        self, loss: Any, x: Tensor, y: Tensor, shared: Any, columns: tuple[Tensor, ...]
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Return the loss of a batch, and its gradient in storage that the next pass overwrites.

        None if the loss has a gradient by more than the outputs: by parameters, or a branched model's features. Each
        batch decides it for itself, as a run that is resumed knows of no earlier one; such a loss is called twice.
        """
        if x.requires_grad:
            x = x.detach()
        for into, param in self.copied:
            into.copy_(param)

        def judge(plan: Plan) -> tuple[Plan, Tensor] | None:
            plan.by_features = None
            value = self._graded(plan, loss, y, shared, columns)
            if value is None:
                value = self._differentiated(plan, loss, x, y, shared, columns)
            return None if value is None else (plan, value)

        judged = self.stack.run(x.expand(self.copies or 1, *x.shape), "gradient", judge)
        if judged is None:
            return None
        plan, value = judged
        if plan is not self.last:
            named = self.stack.named(plan.gradient)
            parts = {self._of(name, k): leaf[k] for name, leaf in named.items() for k in range(len(leaf))}
            self.last, self.gradient = plan, [parts[name] for name in self.names]
        return value, self.gradient

    def features(self, x: Tensor) -> Tensor | None:
        """Return the features (rows, d) of samples by a network with one branch; None for another one."""
        if self.feature != "shared" or self.copies:
            return None
        for into, param in self.copied:
            into.copy_(param)
        return self.stack.run(x[None], "outputs", lambda plan: plan.last_input()[0].clone())

    def _logits(self, outputs: Tensor) -> Tensor:
        """Return a view of outputs as the module returns them: (rows, outputs), of branches (K, rows, outputs)."""
        if self.copies:
            return outputs
        branches = self.stack.branches
        return outputs[0] if branches is None else outputs[0].unflatten(-1, (branches, -1)).transpose(0, 1)

    def _features(self, plan: Plan, x: Tensor) -> Tensor | None:
        """Return the features of a branched model for a batch, as the module returns them."""
        if self.feature is None:
            return None
        if self.feature == "branches":
            return plan.made[-1].transpose(0, 1).flatten(1)
        return x if self.copies else plan.last_input()[0]

    def _graded(self, plan: Plan, loss: Any, y: Tensor, shared: Any, columns: tuple[Tensor, ...]) -> Tensor | None:
        """Write the gradient by outputs and features and return the loss, if the gradient is known; else None."""
        by_all = self.stack.graded_by_features(loss)
        graded = by_all or known_part(loss, "graded")
        if (
            graded is None
            or y.dim() != 1
            or y.dtype != torch.int64
            or any(losses.dtype == torch.bool for losses in columns)
        ):
            return None  # a mask is for steps of sequences
        prepared, share = loss.stacked([shared]), 1 / y.shape[0]
        if columns:
            prepared = (prepared, *(column[None] for column in columns))
        logits, dy = self._logits(plan.made[-1]), self._logits(plan.dy)
        many = logits.dim() > 2
        try:
            if by_all is None:
                losses, gradient = graded((logits.transpose(0, 1) if many else logits)[None], y[None], prepared)
            else:
                losses, gradient, plan.by_features = by_all(logits, plan.last_input(), y[None], prepared)
                gradient = gradient[:, :, None]
        except RuntimeError:  # of labels that are no classes, torch leaves some out, and tells of others
            return None
        torch.mul(gradient[0].transpose(0, 1) if many else gradient[0], share, out=dy)
        if plan.by_features is not None:
            plan.by_features.mul_(share)
        return losses.sum() * share

    def _differentiated(
        self, plan: Plan, loss: Any, x: Tensor, y: Tensor, shared: Any, columns: tuple[Tensor, ...]
    ) -> Tensor | None:
        """Write the gradient by the outputs and return the loss; None if it has one by something else.

        Raises:
            FedtideError: the loss gives other weights to the module, whose passes are not over.
        """
        logits, dy, features = self._logits(plan.made[-1]), self._logits(plan.dy), self._features(plan, x)
        before = [leaf._version for leaf in self.params]
        read = [leaf.detach().requires_grad_() for leaf in (logits, features) if leaf is not None]
        copies = [leaf.clone(memory_format=torch.contiguous_format) for leaf in read]  # a loss may write there
        value = loss.value(copies[0] if features is None else tuple(copies), y, shared, columns)
        if [leaf._version for leaf in self.params] != before:
            raise FedtideError("loss: your loss uses the Task that is being trained; give it a second Task")
        by_logits, *others = torch.autograd.grad(value, [*read, *self.params], allow_unused=True)
        if any(leaf is not None for leaf in others):
            return None
        dy.zero_() if by_logits is None else dy.copy_(by_logits)
        return value.detach()
