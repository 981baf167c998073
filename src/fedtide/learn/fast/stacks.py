"""Copies of a network that are trained or evaluated side by side: by its layers, or any network by `torch.func`."""

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedtide.core.base import Weights
from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree, leaves, map_leaves
from fedtide.learn.device import Scratch
from fedtide.learn.fast.layers import (
    NOTHING,
    Input,
    Layer,
    Linear,
    Plan,
    Product,
    Purpose,
    Room,
    branch_count,
    do_all,
    has_wide,
    known_layers,
    turned,
)
from fedtide.learn.losses import known_part
from fedtide.models.base import BaseParameter
from fedtide.models.branched import Branched, Branches, Feature

T = TypeVar("T")

COPY = "model.copies.{}."
"""Start of the names in a copy of a model that is repeated as a whole."""

PLANS = 64
"""Largest number of plans of a network: one for each shape of rows."""


def feature_of(scratch: Scratch) -> Feature:
    """Return the source of the features of a branched task."""
    return next(part.feature for part in scratch.module.modules() if isinstance(part, Branches))


def stack_trees(values: Sequence[Any], tree_of: Callable[[Any], Tree]) -> Any:
    """Return the stacked trees (clients, ...) of the clients' values; a view of one tree if all have the same object.

    >>> stack_trees("aba", lambda letter: [torch.tensor(float(letter == "b"))])
    [tensor([0., 1., 0.])]
    """
    trees = {key: tree_of(value) for key, value in {id(value): value for value in values}.items()}
    if len(trees) == 1:
        return map_leaves(lambda leaf: leaf.expand(len(values), *leaf.shape), trees[id(values[0])])
    return map_leaves(lambda *leaves: torch.stack(leaves), *(trees[id(value)] for value in values))


def known_copies(scratch: Scratch, shape: tuple[int, ...]) -> tuple[tuple[list[Layer], Room] | None, int]:
    """Return `known_layers` of a model, and how often it is repeated as a whole; 0 if it is not."""
    model, copies = getattr(scratch.module, "model", None), 0
    if isinstance(scratch.module, Branched) and isinstance(model, Branches):
        copies = 0 if isinstance(model.copies[0], nn.Linear) else len(model.copies)
    return known_layers(scratch, shape, COPY.format(0)[:-1] if copies else ""), copies


def in_copy(name: str, copy: int) -> str:
    """Return a name of the first copy of a model, as it is in another copy.

    >>> in_copy("model.copies.0.head.bias", 2)
    'model.copies.2.head.bias'
    """
    return COPY.format(copy) + name.removeprefix(COPY.format(0))


class LayerStack:
    """Several copies of a network of known layers; `fedtide.learn.stack.train_stacked` trains them.

    Args:
        scratch: the module of the model.
        layers: the layers of its model.
        room: storage of their numbers.
        loss: a loss with `graded`, or of one branch with `graded_by_features`.
        copies: how often a client's model is repeated as a whole; 0 if it is not. Tensors are (clients, copies, ...).
    """

    moves, fuses = False, True

    def __init__(self, scratch: Scratch, layers: Sequence[Layer], room: Room, loss: Any, copies: int = 0) -> None:
        self.scratch, self.loss, self.device, self.copies = scratch, loss, room.device, copies
        self.layers, self.room, self.branches = layers, room, copies or branch_count(layers)
        products = [layer for layer in layers if isinstance(layer, Product)]
        self.products = sorted(products, key=lambda layer: layer.frozen)  # those that are trained come first
        self.feature = None if self.branches is None else feature_of(scratch)
        self.by_row = not all(isinstance(layer, Linear) for layer in products)  # squares need a copy for each row
        self.row_bytes = room.bytes * (copies or 1)  # of one client and one row, for which the layers were made
        self.plans: dict[Hashable, Plan] = {}
        self.fitted: Plan | None = None
        self.busy = False  # in a pass, whose storage no other may use
        self.planned = room.grown  # how often storage had been taken anew

    def graded_by_features(self, loss: Any) -> Any:
        """Return the gradient of a loss by logits and features; None without it, or without features of one branch."""
        graded = known_part(loss, "graded_by_features") if self.branches == 1 and not self.copies else None
        return graded if self.feature == "shared" else None

    def layout(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return one client's parameters in the layout of the stack."""
        named = dict(zip(self.scratch.names, params, strict=True))
        trained = [layer for layer in self.products if not layer.frozen]
        return [part for parts in self._by_layer(named, trained) for part in parts]

    def _by_layer(self, named: Mapping[str, Tensor], layers: Sequence[Product]) -> list[list[Tensor]]:
        def laid(layer: Product, copy: int) -> list[Tensor]:
            names = [in_copy(name, copy) for name in layer.names] if self.copies else layer.names
            return layer.layout([named[name].to(self.device) for name in names])

        if not self.copies:
            return [laid(layer, 0) for layer in layers]
        by_layer = ([laid(layer, k) for k in range(self.copies)] for layer in layers)
        return [[torch.stack(parts) for parts in zip(*models, strict=True)] for models in by_layer]

    def starts(self, received: Sequence[Weights]) -> list[list[Tensor]]:
        """Return the initial parameters of each client (clients, ...), by layers, in the layout of the stack."""
        return stack_trees(received, lambda weights: self._by_layer(weights.buffers | weights.params, self.products))

    def load(self, starts: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """Copy initial parameters; return the copies of those that are trained, and nothing else."""
        copies = [(layer, layer.load(parts, self.room)) for layer, parts in zip(self.products, starts, strict=True)]
        return [part for layer, parts in copies if not layer.frozen for part in parts], []

    def load_each(self, received: Sequence[Weights]) -> None:
        """Copy parameters that each client has for itself, for passes that train nothing."""
        for layer in self.products:
            named = [weights.buffers | weights.params for weights in received]
            parts = zip(*(layer.layout([values[name] for name in layer.names]) for values in named), strict=True)
            storage = layer.storage("weights", len(received), self.room)
            layer.weights = [torch.stack(part, out=into) for part, into in zip(parts, storage, strict=True)]

    def read(self, starts: Sequence[list[Tensor]]) -> None:
        """Use initial parameters without a copy, for passes that train nothing."""
        self.plans = {}
        for layer, parts in zip(self.products, starts, strict=True):
            layer.weights = parts

    def fit(self, x: Tensor, purpose: Purpose) -> Plan:
        """Return the plan for rows (clients, rows, ...), ready for its next pass."""
        alike = x.shape[0] > 1 and x.stride(0) == 0
        key = x.shape, alike, purpose
        plan = self.plans.get(key) if self.room.grown == self.planned else None
        if plan is None:
            plan = Plan(self.layers, Input(turned(self.layers, x).shape, alike), purpose, self.room)
            if self.room.grown != self.planned or len(self.plans) >= PLANS:
                self.plans, self.planned = {}, self.room.grown
            self.plans[key] = plan
        if plan is not self.fitted:
            self.fitted = None  # until all are done
            do_all(plan.fills)
            self.fitted = plan
        return plan

    def run(self, x: Tensor, purpose: Purpose, judge: Callable[[Plan], T]) -> T:
        """Pass rows (clients, rows, ...) forward, and back for a gradient or a step.

        Args:
            purpose: what the passes are for.
            judge: reads the outputs, in storage that the next pass overwrites, and writes the gradient by the outputs
                to `plan.dy`. Its result is returned; after None there is no pass back.
        """
        if self.copies:
            x = x.repeat_interleave(self.copies, 0)
        plan = self.fit(x, purpose)
        plan.rows.now, self.busy = turned(self.layers, x), True
        try:
            do_all(plan.forward)
            judged = judge(plan)
            if judged is not None:
                do_all(plan.backward)
            return judged
        finally:
            plan.rows.now, self.busy = NOTHING, False

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs for rows (clients, rows, ...), in storage that the next pass overwrites."""
        return self.run(x, "outputs", lambda plan: plan.made[-1])

    def features(self, params: list[Tensor], others: list[Tensor], x: Tensor) -> Tensor:
        """Return the features (clients, rows, d) of a branched task: inputs or outputs of its last layer."""
        if self.feature != "shared":
            return self.run(x, "outputs", lambda plan: self._logits(plan.made[-1]).flatten(2).clone())
        return x if self.copies else self.run(x, "outputs", lambda plan: plan.last_input().clone())

    def gradient(
        self,
        params: list[Tensor],
        others: list[Tensor],
        x: Tensor,
        y: Tensor,
        share: Tensor,
        counted: Tensor | None,
        shared: Any = None,
        /,
        *,
        rate: float | None = None,
        squares: bool = False,
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Return the gradient and the loss of every client; with a rate, take a step in place of the gradient.

        The gradient is in storage that the next pass overwrites. With `squares` it is the sum over rows of the squares
        of their gradients, of linear layers alone.
        """

        def judge(plan: Plan) -> tuple[Plan, Tensor]:
            outputs, into, weight = plan.made[-1], plan.dy, share
            if (by_all := self.graded_by_features(self.loss)) is not None:
                losses, dy, plan.by_features = by_all(outputs, plan.last_input(), y, shared)
            else:
                into = self._logits(into)
                losses, dy = self.loss.graded(self._logits(outputs), y, shared)
            if counted is not None:
                losses, weight = losses.masked_fill_(~counted, 0.0), share * counted
            torch.mul(dy, weight.reshape(*weight.shape, *(1,) * (dy.dim() - weight.dim())), out=into)
            if plan.by_features is not None:
                plan.by_features.mul_(weight[..., None])
            plan.rate = rate or 0.0
            return plan, (losses * weight).sum(1)

        purpose: Purpose = "gradient" if rate is None else "descent"
        plan, value = self.run(x, "squares" if squares else purpose, judge)
        gradient = [leaf.unflatten(0, (-1, self.copies)) for leaf in plan.gradient] if self.copies else plan.gradient
        return gradient, value, []

    def _logits(self, outputs: Tensor) -> Tensor:
        """Return a view of outputs as a loss reads them: (clients, rows, outputs), of K branches (..., K, outputs)."""
        if self.copies:
            return outputs.unflatten(0, (-1, self.copies)).transpose(1, 2)
        return outputs if self.branches is None else outputs.unflatten(-1, (self.branches, -1))

    def squares(self, weights: Weights, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the sum over rows of the square of the gradient of each row's loss.

        The square of a product of two vectors is the product of their squares, so linear layers need one pass. With a
        convolution each row has a copy of the model.
        """
        by_row = self.by_row
        starts = self.starts([weights] * (len(x) if by_row else 1))
        if by_row:
            self.read(starts)
        else:
            self.load(starts)
        x, y = (value.unsqueeze(int(by_row)) for value in (x, y))
        share = torch.ones(y.shape, dtype=self.scratch.dtype, device=self.device)
        parts = self.named(self.gradient([], [], x, y, share, None, squares=not by_row)[0])
        return {name: (part.square_().sum(0) if by_row else part[0]) for name, part in parts.items()}

    def difference(self, like: Weights, starts: Tree, params: list[Tensor], others: list[Tensor]) -> Weights:
        """Return new minus old (clients, ...), in place, by the names of a client's weights."""
        named = self.named([now.sub_(old) for now, old in zip(params, leaves(starts), strict=False)])
        zeros = {name: value.new_zeros(len(params[0]), *value.shape) for name, value in like.buffers.items()}
        return Weights({name: named[name] for name in like.params}, zeros)

    def named(self, stored: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the parameters of all layers that are trained (clients, ...) by their names."""
        left = iter(stored)
        named: dict[str, Tensor] = {}
        for layer in (product for product in self.products if not product.frozen):
            tensors = [next(left) for _ in layer.weights]
            if not self.copies:
                named |= dict(zip(layer.names, layer.split(tensors), strict=True))
                continue
            for name, part in zip(layer.names, layer.split([leaf.flatten(0, 1) for leaf in tensors]), strict=True):
                models = part.unflatten(0, (-1, self.copies)).unbind(1)
                named |= {in_copy(name, k): model for k, model in enumerate(models)}
        return named


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
        # Frozen parameters, running statistics and step counters: everything else that a forward pass reads or changes,
        # but for the base of a model with adapters, which all copies read in the module.
        buffers = [name for name, _ in scratch.module.named_buffers() if name not in scratch.fixed]
        frozen = [name for name, param in scratch.module.named_parameters() if not isinstance(param, BaseParameter)]
        self.held = [name for name in (*frozen, *buffers) if name not in set(self.names)]
        self.moves = bool(buffers)
        self.store: dict[str, Tensor] = {}

    def starts(self, received: Sequence[Weights]) -> list[Tensor]:
        """Return the initial values (clients, ...) of the parameters, and of all else that a forward pass reads."""
        return stack_trees(received, self._read)

    def _read(self, weights: Weights) -> list[Tensor]:
        values = {**self.scratch.constants, **weights.buffers, **weights.params}
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
            return features

        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", LOOPED)
            return vmap(features_of)(params, others, x)

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


Copies = FuncStack | LayerStack
"""Several copies of a model that are trained at once."""


def stack_copies(scratch: Scratch, loss: Any, shape: tuple[int, ...]) -> Copies:
    """Return several copies of a model for training on rows of a shape by a loss."""
    network, copies = known_copies(scratch, shape)
    if network is not None:
        stack = LayerStack(scratch, *network, loss, copies)
        if stack.graded_by_features(loss) or known_part(loss, "graded"):  # layers need the gradient of the loss
            return stack
    return FuncStack(scratch, loss)


def stack_models(scratch: Scratch, shape: tuple[int, ...]) -> LayerStack | None:
    """Return several models for forward passes on rows of a shape; None if a loop over the models is as fast."""
    network = known_layers(scratch, shape)
    if network is None or has_wide(network[0]) or getattr(network[0][-1], "copies", None) is not None:
        return None
    return LayerStack(scratch, *network, None)
