"""Copies of any network, trained side by side by `torch.func`: reusable storage, and steps that are recorded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.graph import CodeGen, Graph

from fedtide.core.base import Weights
from fedtide.core.errors import FedtideError
from fedtide.core.trees import leaves, map_leaves
from fedtide.learn.fast.layer_stack import side_by_side
from fedtide.learn.task import Task

TRACED_AFTER = 10
"""Steps of one shape before it is recorded: recording costs as much as some hundred steps gain."""
TRACES = 64
"""Largest number of recorded shapes."""

LARGE = 2**18
"""Elements from which a product reuses the storage of the last one: fresh memory costs more than the product."""

LOOPED = "There is a performance drop because we have not yet implemented the batching rule"
"""What torch says of layers that it takes model by model, such as an LSTM: that is for its own authors."""


class FuncStack:
    """Stacked models of several clients of one task; what `fedtide.learn.fast.stack.train_stacked` trains.

    Args:
        task: model and loss.
        device: device of the models.
        loss: the loss, or one that is alike; None for that of the task.
    """

    fuses, row_bytes = False, 0

    def __init__(self, task: Task, device: torch.device, loss: Any = None) -> None:
        self.task = task
        self.device = device
        self.loss = loss or task.loss
        module = task.scratch.module
        self.names = task.scratch.names
        # Frozen parameters, running statistics and step counters: everything else that a forward pass reads or changes.
        self.held = [name for name, _ in module.named_parameters() if name not in set(self.names)]
        self.held += [name for name, _ in module.named_buffers()]
        self.counters = task.scratch.counters
        self.moves = any(True for _ in module.buffers())  # such steps are not recorded, as they change their inputs
        self.store: dict[str, Tensor] = {}
        self.seen: dict[Any, int] = {}
        self.traced: dict[Any, Callable[..., Any]] = {}
        self.products: dict[int, Tensor] = {}

    def starts(self, received: Sequence[Weights]) -> list[Tensor]:
        """Return what each client begins with (clients, ...): the params, and all else that a forward pass reads."""
        return side_by_side(received, self._read)

    def _read(self, weights: Weights) -> list[Tensor]:
        known = {**self.counters, **weights.buffers, **weights.params}
        names = [*self.names, *self.held]
        lost = next((name for name in names if known.get(name) is None), None)
        if lost is not None:  # a buffer that is not part of the model's weights
            raise FedtideError(f"model: '{lost}' is not among its weights")
        return [known[name].to(self.device) for name in names]

    def load(self, starts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Copy what clients begin with; return the params, and all else that a forward pass reads."""
        loaded = []
        for name, each in zip((*self.names, *self.held), starts, strict=True):
            held = self.store.get(name)
            if held is None or len(held) < len(each):
                self.store[name] = held = torch.empty(each.shape, dtype=each.dtype, device=self.device)
            loaded.append(held[: len(each)].copy_(each))
        return loaded[: len(self.names)], loaded[len(self.names) :]

    def layout(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return parameters as they are held, but for the clients."""
        return [each.to(self.device) for each in params]

    def difference(self, like: Weights, starts: list[Tensor], params: list[Tensor], held: list[Tensor]) -> Weights:
        """Return new minus old (clients, ...), in place, by the names of a client's weights."""
        named, old = _named(self, params, held), dict(zip((*self.names, *self.held), starts, strict=True))
        moved = [{name: named[name].sub_(old[name]) for name in part} for part in (like.params, like.buffers)]
        return Weights(*moved)

    def features(self, params: list[Tensor], held: list[Tensor], x: Tensor) -> Tensor:
        """Return the features (clients, rows, d) of a branched task, in evaluation mode."""
        self.task.scratch.set_mode(False)

        def of_one(params: list[Tensor], held: list[Tensor], x: Tensor) -> Tensor:
            _, z = functional_call(self.task.scratch.module, _named(self, params, held), (x,))
            return z  # type: ignore[no-any-return]

        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", LOOPED)
            return vmap(of_one)(params, held, x)  # type: ignore[no-any-return]

    def gradient(
        self, params: list[Tensor], held: list[Tensor], *rows: Any, rate: float | None = None
    ) -> tuple[Any, Any, Any]:
        """Return the gradient and the loss of every client, and the buffers that the forward pass changed."""
        flat_rows = leaves(rows)
        key = (len(params[0]), tuple(None if each is None else (each.shape, each.dtype) for each in flat_rows))
        if key in self.traced:
            made = self.traced[key](*params, *held, *flat_rows)
            return made[: len(params)], made[len(params)], made[len(params) + 1 :]
        self.seen[key] = self.seen.get(key, 0) + 1
        in_dims = (0, 0, *map_leaves(lambda each: None if each is None else 0, rows))
        step = vmap(grad_and_value(partial(_loss, self), has_aux=True), in_dims=in_dims)

        def flat(*given: Any) -> tuple[Any, Any, Any]:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", LOOPED)
                gradient, (value, moved) = step(*given)
            return list(gradient), value, list(moved)

        if not self.moves and self.seen[key] >= TRACED_AFTER and len(self.traced) < TRACES:
            # The same operations in the same order, so the same bits, without tracing them again every time.
            from torch.fx.experimental.proxy_tensor import make_fx

            made = make_fx(flat)(params, held, *rows)
            trim_graph(made.graph)
            products = [node for node in made.graph.nodes if node.target == torch.ops.aten.bmm.default]
            for number, node in enumerate(node for node in products if node.meta["val"].numel() >= LARGE):
                node.target = self._product(number)
            made.recompile()
            self.traced[key] = made
        return flat(params, held, *rows)

    def _product(self, number: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a batched matrix product that writes to storage which the next step overwrites."""

        def product(left: Tensor, right: Tensor) -> Tensor:
            shape = (len(left), left.shape[1], right.shape[2])
            held = self.products.get(number)
            if held is None or held.numel() < math.prod(shape):
                self.products[number] = held = left.new_empty(math.prod(shape))
            return torch.bmm(left, right, out=held[: math.prod(shape)].view(shape))

        return product


def trim_graph(graph: Graph) -> None:
    """Remove no-ops from a graph, in place, and flatten its arguments and results."""
    aten = torch.ops.aten
    same = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
    for node in list(graph.nodes):
        keeps = node.target in same and node.meta["val"].shape == node.args[0].meta["val"].shape
        if keeps or (node.target == aten.mul.Scalar and node.args[1] == 1):
            node.replace_all_uses_with(node.args[0])
        elif node.target == getattr(node.args[0] if node.args else None, "target", None) == aten.transpose.int and set(
            node.args[1:]
        ) == set(node.args[0].args[1:]):  # there and back
            node.replace_all_uses_with(node.args[0].args[0])
    graph.eliminate_dead_code()
    graph.set_codegen(CodeGen())


def _named(stack: FuncStack, params: list[Tensor], held: list[Tensor]) -> dict[str, Tensor]:
    """Return all that a forward pass reads, by name."""
    return {**dict(zip(stack.names, params, strict=True)), **dict(zip(stack.held, held, strict=True))}


def _loss(
    stack: FuncStack,
    params: list[Tensor],
    held: list[Tensor],
    x: Tensor,
    y: Tensor,
    share: Tensor,
    counted: Tensor | None,
    shared: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Return the mean loss of one client's batch, and its running statistics after the pass."""
    outputs = functional_call(stack.task.scratch.module, _named(stack, params, held), (x,))
    each = stack.loss.each(outputs, y, shared)
    if counted is not None:  # multiplying by the share is not enough: an uncounted label may have an infinite loss
        each = each.masked_fill(~counted, 0.0)
    return (each * share).sum(), held
