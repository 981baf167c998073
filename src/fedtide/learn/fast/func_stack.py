"""Copies of any network, trained at once by `torch.func`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fedtide.core.base import Weights
from fedtide.core.errors import FedtideError
from fedtide.core.trees import map_leaves
from fedtide.learn.fast.layer_stack import stack_trees
from fedtide.learn.scratch import Scratch

LOOPED = "There is a performance drop because we have not yet implemented the batching rule"
"""Warning of torch, meant for its authors, about layers that it runs model by model, such as an LSTM."""


class FuncStack:
    """Several copies of a network; `fedtide.learn.stack.train_stacked` trains them.

    Args:
        scratch: the module of the model.
        loss: the loss, or one of the same kind.
    """

    fuses, row_bytes = False, 0

    def __init__(self, scratch: Scratch, loss: Any) -> None:
        self.scratch, self.loss, self.device = scratch, loss, torch.device(scratch.device)
        self.names = scratch.names
        # Frozen parameters, running statistics and step counters: everything else that a forward pass reads or changes.
        self.held = [name for name, _ in scratch.module.named_parameters() if name not in set(self.names)]
        self.held += [name for name, _ in scratch.module.named_buffers()]
        self.moves = any(True for _ in scratch.module.buffers())
        self.store: dict[str, Tensor] = {}

    def starts(self, received: Sequence[Weights]) -> list[Tensor]:
        """Return the initial values (clients, ...) of the parameters, and of all else that a forward pass reads."""
        return stack_trees(received, self._read)

    def _read(self, weights: Weights) -> list[Tensor]:
        values = {**self.scratch.counters, **weights.buffers, **weights.params}
        names = [*self.names, *self.held]
        lost = next((name for name in names if values.get(name) is None), None)
        if lost is not None:  # a buffer that is not part of the model's weights
            raise FedtideError(f"model: '{lost}' is not among its weights")
        return [values[name].to(self.device) for name in names]

    def load(self, starts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Copy initial values; return the parameters, and all else that a forward pass reads."""
        loaded = []
        for name, start in zip((*self.names, *self.held), starts, strict=True):
            stored = self.store.get(name)
            if stored is None or len(stored) < len(start):
                self.store[name] = stored = torch.empty(start.shape, dtype=start.dtype, device=self.device)
            loaded.append(stored[: len(start)].copy_(start))
        return loaded[: len(self.names)], loaded[len(self.names) :]

    def layout(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return one client's parameters in the layout of the stack."""
        return [param.to(self.device) for param in params]

    def difference(self, like: Weights, starts: list[Tensor], params: list[Tensor], others: list[Tensor]) -> Weights:
        """Return new minus old (clients, ...), in place, by the names of a client's weights."""
        new, old = self._named(params, others), dict(zip((*self.names, *self.held), starts, strict=True))
        return Weights(*({name: new[name].sub_(old[name]) for name in part} for part in (like.params, like.buffers)))

    def features(self, params: list[Tensor], others: list[Tensor], x: Tensor) -> Tensor:
        """Return the features (clients, rows, d) of a branched task, in evaluation mode."""
        self.scratch.set_mode(False)

        def features_of(params: list[Tensor], others: list[Tensor], x: Tensor) -> Tensor:
            _, features = functional_call(self.scratch.module, self._named(params, others), (x,))
            return features  # type: ignore[no-any-return]

        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", LOOPED)
            return vmap(features_of)(params, others, x)  # type: ignore[no-any-return]

    def gradient(
        self, params: list[Tensor], others: list[Tensor], *rows: Any, rate: float | None = None
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Return the gradient and the loss of every client, and the buffers that the forward pass changed."""
        in_dims = (0, 0, *map_leaves(lambda leaf: None if leaf is None else 0, rows))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", LOOPED)
            gradient, (value, moved) = vmap(grad_and_value(self._loss, has_aux=True), in_dims=in_dims)(
                params, others, *rows
            )
        return list(gradient), value, list(moved)

    def _named(self, params: list[Tensor], others: list[Tensor]) -> dict[str, Tensor]:
        """Return all that a forward pass reads, by name."""
        return dict(zip((*self.names, *self.held), (*params, *others), strict=True))

    def _loss(
        self,
        params: list[Tensor],
        others: list[Tensor],
        x: Tensor,
        y: Tensor,
        share: Tensor,
        counted: Tensor | None,
        shared: Any,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the mean loss of one client's batch, and its running statistics after the pass."""
        outputs = functional_call(self.scratch.module, self._named(params, others), (x,))
        losses = self.loss.each(outputs, y, shared)
        if counted is not None:  # multiplying by the share is not enough: an uncounted label may have an infinite loss
            losses = losses.masked_fill(~counted, 0.0)
        return (losses * share).sum(), others
