"""Steps of several copies of a small network by products of matrices, with rows innermost where there are pictures.

Libraries for convolutions are made for many channels, and waste most of a processor on one, six or eight. Here pictures
are (clients, channels, height, width, rows), so that lines are copied in runs of `width * rows` numbers, a pool is
three maxima, and a convolution is a product for each row of its kernel, whose sum is the next layer's input. Vectors
are (clients, rows, width), as products of few rows with a large matrix are fastest so. A plain step of SGD is added to
the weights by the product that makes the gradient, which then exists nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.core.trees import Tree, leaves, map_leaves
from fedtide.core.types import Weights
from fedtide.learn.task import Task
from fedtide.models.branched import Branched, Branches

_masked = torch.ops.aten.threshold_backward.grad_input


class Room:
    """Storage by name that grows and is used again: fresh memory costs more than a product."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._held: dict[object, Tensor] = {}
        self.grown = 0  # how often storage has been taken anew, elsewhere

    @property
    def bytes(self) -> int:
        """Bytes of all storage."""
        return sum(held.nbytes for held in self._held.values())

    def clear(self) -> None:
        """Forget all storage."""
        self._held = {}

    def take(self, name: object, *shape: int) -> Tensor:
        """Return storage of a shape; what was there under this name is lost."""
        held = self._held.get(name)
        if held is None or held.numel() < math.prod(shape):
            self._held[name] = held = self._like.new_empty(math.prod(shape))
            self.grown += 1
        return held[: math.prod(shape)].view(shape)


def side_by_side(each: Sequence[Any], made: Callable[[Any], Tree]) -> Any:
    """Return trees (clients, ...) of what is made of each client's; a view of one where all have the same.

    >>> side_by_side("aba", lambda letter: [torch.tensor(float(letter == "b"))])
    [tensor([0., 1., 0.])]
    """
    one_of = {id(one): made(one) for one in {id(one): one for one in each}.values()}
    if len(one_of) == 1:
        return map_leaves(lambda leaf: leaf.expand(len(each), *leaf.shape), one_of[id(each[0])])
    return map_leaves(lambda *same: torch.stack(same), *(one_of[id(one)] for one in each))


class Product:
    """A layer with parameters, which hold the tensors `weights` (clients, ...).

    Args:
        name: name of the layer in the model.
        layer: the module.
        first: whether nothing before it has parameters, so that no gradient goes further back.
        room: where its numbers are.
    """

    def __init__(self, name: str, layer: nn.Conv2d | nn.Linear, first: bool, room: Room) -> None:
        self.first, self.room = first, room
        self.names = [f"{name}.weight", *([] if layer.bias is None else [f"{name}.bias"])]
        self.shape, self.inputs = layer.weight.shape, layer.weight[0].numel()
        self.weights: list[Tensor] = []

    def load(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Copy parameters (clients, ...), in the layer's layout, and return the copies."""
        self.weights = [self.room.take((self, k), *each.shape).copy_(each) for k, each in enumerate(params)]
        return self.weights


class Dense(Product):
    """A linear layer on (clients, rows, inputs), or several of one input, whose outputs are side by side.

    Args:
        name: name of the layer in the model.
        layer: the module.
        first: whether nothing before it has parameters.
        room: where its numbers are.
        branches: all of the layers; None for one that is not repeated.
    """

    def __init__(self, name: str, layer: nn.Linear, first: bool, room: Room, branches: Branches | None = None) -> None:
        super().__init__(name, layer, first, room)
        self.branches = None if branches is None else len(branches.copies)
        if branches is not None:
            self.names = [f"{name}.{each}" for each, _ in branches.named_parameters()]
            self.shape = torch.Size((len(branches.copies) * self.shape[0], self.inputs))

    def layout(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return parameters as they are held: branches in one, and the bias with a dimension for the rows."""
        kinds = len(params) // (self.branches or 1)
        matrix, *bias = (
            params[k] if self.branches is None else torch.cat(list(params[k::kinds])) for k in range(kinds)
        )
        return [matrix, *(each[None] for each in bias)]

    def split(self, held: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters of several clients from what is held."""
        kinds = [held[0], *(bias[:, 0] for bias in held[1:])]
        return [
            part for parts in zip(*(each.chunk(self.branches or 1, 1) for each in kinds), strict=True) for part in parts
        ]

    def resize(self, shape: tuple[int, ...], clients: int, rows: int) -> tuple[int, ...]:
        """Make room for an input of so many clients and rows; return the shape of a row's output."""
        self.y = self.room.take((self, "y"), clients, rows, self.shape[0])
        self.dx = self.room.take((self, "dx"), clients, rows, self.inputs)
        return (self.shape[0],)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (clients, rows, outputs)."""
        self.x = x
        matrix, *bias = (each[: len(x)] for each in self.weights)
        if bias:
            return torch.baddbmm(bias[0], x, matrix.transpose(1, 2), out=self.y)
        return torch.bmm(x, matrix.transpose(1, 2), out=self.y)

    def backward(self, dy: Tensor, rate: float | None) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gradients of the input and of the weights; with a rate, take a step in place of the latter."""
        matrix, *bias = (each[: len(dy)] for each in self.weights)
        back = None if self.first else torch.bmm(dy, matrix, out=self.dx)
        of_bias = [dy.sum(1, keepdim=True) for _ in bias]
        if rate is None:
            return back, [
                torch.bmm(dy.transpose(1, 2), self.x, out=self.room.take((self, "d"), *matrix.shape)),
                *of_bias,
            ]
        matrix.baddbmm_(dy.transpose(1, 2), self.x, alpha=-rate)
        for each, gradient in zip(bias, of_bias, strict=True):
            each.sub_(gradient, alpha=rate)
        return back, []


class Convolution(Product):
    """A convolution on (clients, channels, height, width, rows): a product for each row of the kernel, and their sum.

    Each column of a kernel meets the lines of a picture shifted sideways. Of these there is one copy, as the next row
    of the kernel meets what lies a line further on; where the kernel moves down by several lines at a time, there are
    so many copies of a part of the lines. Weights are matrices (channels * columns, outputs), one for each row of the
    kernel; with the first goes the bias, which meets ones.
    """

    cropped = False  # to even sides: a pool follows that leaves out the rest

    def __init__(self, name: str, layer: nn.Conv2d, first: bool, room: Room) -> None:
        super().__init__(name, layer, first, room)
        self.stride, pad = layer.stride, layer.padding
        if isinstance(pad, str):
            pad = tuple(side // 2 for side in layer.kernel_size) if pad == "same" else (0, 0)
        self.pad: tuple[int, ...] = pad
        self.width = self.shape[1] * self.shape[3]

    def layout(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return parameters as they are held: a matrix for each row of the kernel."""
        kernel, *bias = params
        first, *others = (row.flatten(1).T for row in kernel.unbind(2))
        return [torch.cat([first, *(each[None] for each in bias)]), *others]

    def split(self, held: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters of several clients from what is held."""
        _, channels, _, wide = self.shape
        matrices = [each[:, : self.width].unflatten(1, (channels, wide)) for each in held]
        return [torch.stack(matrices, 3).permute(0, 4, 1, 3, 2), held[0][:, -1]][: len(self.names)]

    def sides(self, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Return the sides of a padded picture, and those of the output, which are below one where it does not fit."""
        padded = [side + 2 * pad for side, pad in zip(shape[1:], self.pad, strict=True)]
        steps = zip(padded, self.shape[2:], self.stride, strict=True)
        out = [(side - kernel) // step + 1 for side, kernel, step in steps]
        return padded, [side // 2 * 2 for side in out] if self.cropped else out

    def resize(self, shape: tuple[int, ...], clients: int, rows: int) -> tuple[int, ...]:
        """Make room for an input of so many clients and rows; return the shape of a row's output."""
        (outputs, channels, tall, wide), (down, right) = self.shape, self.stride
        padded, (high, across) = self.sides(shape)
        inner = tuple(slice(pad, pad + side) for pad, side in zip(self.pad, shape[1:], strict=True))
        self.inner = (slice(None), slice(None), *inner)
        self.padded = (
            self.room.take((self, "padded"), clients, channels, *padded, rows).zero_() if any(self.pad) else None
        )
        line = across * rows
        stored: list[Tensor] = []
        for step in range(min(down, tall)):
            lines, ones = high + (tall - 1 - step) // down, len(self.names) - 1 if step == 0 else 0
            stored.append(self.room.take((self, "x", step), clients, self.width + ones, lines * line))
            stored[step][:, self.width :] = 1
        self.lines = [held[:, : self.width].view(clients, channels, wide, -1, across, rows) for held in stored]
        below = [slice(i // down * line, (i // down + high) * line) for i in range(tall)]
        self.meets = [stored[i % down][:, : self.width if i else None, pixels] for i, pixels in enumerate(below)]
        self.y = self.room.take((self, "y"), clients, outputs, high * line)
        if not self.first:
            self.dx = self.room.take((self, "dx"), clients, self.width, high * line)
            self.parts = self.dx.view(clients, channels, wide, high, across, rows).unbind(2)
            self.whole = self.room.take((self, "whole"), clients, channels, *padded, rows)
            ends = [slice(j, j + (across - 1) * right + 1, right) for j in range(wide)]
            self.into = [
                [self.whole[:, :, i : i + (high - 1) * down + 1 : down, columns] for columns in ends]
                for i in range(tall)
            ]
        return (outputs, high, across)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (clients, outputs, height, width, rows)."""
        if self.padded is not None:
            self.padded[self.inner].copy_(x)
            x = self.padded
        batch, channel, high, wide, row = x.stride()
        steps = (batch, channel, wide, high * self.stride[0], wide * self.stride[1], row)
        for step, lines in enumerate(self.lines):
            lines.copy_(x.as_strided(lines.shape, steps, x.storage_offset() + step * high))
        first, *others = (each[: len(x)].transpose(1, 2) for each in self.weights)
        torch.bmm(first, self.meets[0], out=self.y)
        for matrix, met in zip(others, self.meets[1:], strict=True):
            self.y.baddbmm_(matrix, met)
        return self.y.unflatten(2, (-1, *self.lines[0].shape[-2:]))

    def backward(self, dy: Tensor, rate: float | None) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gradients of the input and of the weights; with a rate, take a step in place of the latter."""
        matrices, dy, back = [each[: len(dy)] for each in self.weights], dy.reshape(self.y.shape), None
        if not self.first:
            self.whole.zero_()
            for matrix, lines in zip(matrices, self.into, strict=True):
                torch.bmm(matrix[:, : self.width], dy, out=self.dx)
                for into, part in zip(lines, self.parts, strict=True):
                    into.add_(part)
            back = self.whole[self.inner]
        dy = dy.transpose(1, 2)
        if rate is None:
            made = [self.room.take((self, "d", i), *each.shape) for i, each in enumerate(matrices)]
            return back, [torch.bmm(met, dy, out=into) for met, into in zip(self.meets, made, strict=True)]
        for matrix, met in zip(matrices, self.meets, strict=True):
            matrix.baddbmm_(met, dy, alpha=-rate)
        return back, []


class Rectifier:
    """A ReLU, in place."""

    def resize(self, shape: tuple[int, ...], clients: int, rows: int) -> tuple[int, ...]:
        """Return the shape of the output."""
        return shape

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        self.y = torch.relu_(x)
        return self.y

    def backward(self, dy: Tensor, rate: float | None) -> tuple[Tensor, list[Tensor]]:
        """Return the gradient of the input."""
        return _masked(dy, self.y, 0, grad_input=dy), []


class Pool:
    """A maximum over squares of two by two; the first of equal numbers gets the gradient, as in torch."""

    def __init__(self, room: Room) -> None:
        self.room = room

    def resize(self, shape: tuple[int, ...], clients: int, rows: int) -> tuple[int, ...]:
        """Make room for an input (clients, *shape, rows); return the shape of the output."""
        channels, *sides = shape
        high, wide = (side // 2 for side in sides)
        self.cut = (slice(None), slice(None), slice(2 * high), slice(2 * wide))
        self.dx = self.room.take((self, "dx"), clients, *shape, rows).zero_()  # a side that is odd has no gradient
        self.pairs = self._pairs(self.dx)
        self.half, self.larger, self.more = (
            self.room.take((self, name), clients, channels, high, 2, wide, rows) for name in ("half", "larger", "more")
        )
        self.y = self.room.take((self, "y"), clients, channels, high, wide, rows)
        return (channels, high, wide)

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the left and the right of each square (clients, channels, height, 2, width, rows)."""
        x = x[self.cut]
        squares = x.unflatten(2, (x.shape[2] // 2, 2)).unflatten(4, (x.shape[3] // 2, 2))
        return squares[..., 0, :], squares[..., 1, :]

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (clients, channels, height, width, rows)."""
        self.left, self.right = self._pairs(x)
        self.over, self.under = torch.maximum(self.left, self.right, out=self.larger).unbind(3)
        return torch.maximum(self.over, self.under, out=self.y)

    def backward(self, dy: Tensor, rate: float | None) -> tuple[Tensor, list[Tensor]]:
        """Return the gradient of the input."""
        over, under = self.half.unbind(3)
        more = self.more.unbind(3)[0]
        _masked(dy, torch.sub(self.under, self.over, out=more), 0, grad_input=under)
        torch.sub(dy, under, out=over)
        left, right = self.pairs
        _masked(self.half, torch.sub(self.right, self.left, out=self.more), 0, grad_input=right)
        torch.sub(self.half, right, out=left)
        return self.dx, []


class Flat:
    """All numbers of a row one after the other, and rows outermost.

    Args:
        ready: whether rows are outermost already, as they come.
    """

    def __init__(self, ready: bool) -> None:
        self.ready = ready

    def resize(self, shape: tuple[int, ...], clients: int, rows: int) -> tuple[int, ...]:
        """Return the shape of a row's output."""
        self.shape = shape
        return (math.prod(shape),)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (clients, rows, numbers)."""
        return x.flatten(2) if self.ready else x.flatten(1, -2).transpose(1, 2).contiguous()

    def backward(self, dy: Tensor, rate: float | None) -> tuple[Tensor, list[Tensor]]:
        """Return the gradient of the input."""
        return dy.transpose(1, 2).contiguous().unflatten(1, self.shape), []


Layer = Dense | Convolution | Rectifier | Pool | Flat


def known_layers(task: Task, shape: tuple[int, ...], room: Room) -> list[Layer] | None:
    """Return the layers of a task's model for rows of a shape; None if there is one that is not known here.

    Of branches only the last layer is known.
    """
    module = task.scratch.module
    if any(map(_is_watched, module.modules())):
        return None
    made: list[Layer] = []
    of_row = shape
    for name, layer in _in_order(module):
        known = _known(name, layer, made, shape, room)
        if known is None or (made and getattr(made[-1], "branches", None) is not None):
            return None
        if isinstance(known, Flat) and len(shape) == 1:
            continue
        if isinstance(known, Pool) and made and isinstance(made[-1], Convolution):
            made[-1].cropped = True
        made.append(known)
        shape = known.resize(shape, 1, 1)
    room.clear()
    for known in made:  # now that it is clear which outputs a pool leaves out
        of_row = known.resize(of_row, 1, 1)
    names = [name for layer in made if isinstance(layer, Product) for name in layer.names]
    return made if names and len(shape) == 1 and sorted(names) == sorted(task.scratch.names) else None


def _is_watched(module: nn.Module) -> bool:
    """Tell whether a module has hooks, which only torch calls."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _in_order(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a sequence, of sequences in it, too, with their names."""
    if isinstance(module, Branched):
        name, module = "model", module.model
    if type(module) is not nn.Sequential:
        yield name, module
        return
    for inner, layer in module._modules.items():  # `named_children` leaves out one that comes twice
        assert layer is not None
        yield from _in_order(layer, f"{name}.{inner}" if name else inner)


def _known(name: str, layer: nn.Module, before: Sequence[Layer], shape: tuple[int, ...], room: Room) -> Layer | None:
    """Return what does the steps of a layer on rows of a shape, after those before it, if it is known and they fit."""
    first, branches = not any(isinstance(each, Product) for each in before), None
    if isinstance(layer, Branches) and {type(copy) for copy in layer.copies} == {nn.Linear}:
        branches, layer = layer, layer.copies[0]
    kind = type(layer)
    if isinstance(layer, nn.Linear) and kind is nn.Linear and len(shape) == 1:
        return Dense(name, layer, first, room, branches) if shape == (layer.in_features,) else None
    if isinstance(layer, nn.Conv2d) and kind is nn.Conv2d and len(shape) == 3:
        odd = all(side % 2 for side in layer.kernel_size) and layer.stride == (1, 1)
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        if not plain or (layer.padding == "same" and not odd) or layer.in_channels != shape[0]:
            return None
        made = Convolution(name, layer, first, room)
        return made if min(made.sides(shape)[1]) > 0 else None
    if isinstance(layer, nn.MaxPool2d) and kind is nn.MaxPool2d and len(shape) == 3:
        sizes = [(each, each) if isinstance(each, int) else each for each in (layer.kernel_size, layer.stride)]
        plain = (layer.padding, layer.dilation) == (0, 1) and not (layer.ceil_mode or layer.return_indices)
        return Pool(room) if plain and sizes == [(2, 2), (2, 2)] and min(shape[1:]) > 1 else None
    if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
        return Flat(not before)
    return Rectifier() if kind is nn.ReLU else None


class LayerStack:
    """Several copies of a network of known layers; what `fedtide.learn.stack.train_stacked` trains.

    Args:
        task: the model.
        layers: the layers of its model.
        room: where their numbers are.
        loss: a loss with `graded`.
    """

    moves, held, fuses = False, (), True

    def __init__(self, task: Task, layers: Sequence[Layer], room: Room, loss: Any) -> None:
        self.task, self.loss, self.device = task, loss, room.take("", 0).device
        self.layers, self.room = layers, room
        self.products = [layer for layer in layers if isinstance(layer, Product)]
        self.fitted: tuple[int, ...] = ()
        self.row_bytes = room.bytes  # of one client and one row, for which the layers were made

    def layout(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return parameters as they are held, but for the clients."""
        return [each for parts in self._by_layer(params) for each in parts]

    def _by_layer(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        named = dict(zip(self.task.scratch.names, params, strict=True))
        return [layer.layout([named[name].to(self.device) for name in layer.names]) for layer in self.products]

    def starts(self, received: Sequence[Weights]) -> list[list[Tensor]]:
        """Return what each client begins with (clients, ...), by layers, as it is held."""
        names = self.task.scratch.names
        return side_by_side(received, lambda weights: self._by_layer([weights.params[name] for name in names]))

    def load(self, starts: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """Copy what clients begin with; return the copies, and nothing else that a forward pass reads."""
        pairs = zip(self.products, starts, strict=True)
        return [held for layer, parts in pairs for held in layer.load(parts)], []

    def read(self, starts: Sequence[list[Tensor]]) -> None:
        """Take what copies begin with as it is, for passes that train nothing."""
        for layer, parts in zip(self.products, starts, strict=True):
            layer.weights = parts

    def fit(self, shape: Sequence[int]) -> None:
        """Make room for rows of a shape (clients, rows, ...), with the padding that its steps read and do not write."""
        if self.fitted == shape:
            return
        clients, rows, *inner = shape
        wide = tuple(inner)
        for layer in self.layers:
            wide = layer.resize(wide, clients, rows)
        self.fitted = tuple(shape)

    def _forward(self, x: Tensor, layers: Sequence[Layer]) -> Tensor:
        """Return what the first layers make of rows (clients, rows, ...), in storage that the next pass overwrites."""
        self.fit(x.shape)
        if x.dim() > 3 and not isinstance(self.layers[0], Flat):
            x = x.movedim(1, -1).contiguous()
        for layer in layers:
            x = layer.forward(x)
        return x

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs for rows (clients, rows, ...), in storage that the next pass overwrites."""
        return self._forward(x, self.layers)

    def features(self, params: list[Tensor], held: list[Tensor], x: Tensor) -> Tensor:
        """Return the features (clients, rows, d) of a branched task: what its last layer reads, or what it makes."""
        branches = next(part for part in self.task.scratch.module.modules() if isinstance(part, Branches))
        return self._forward(x, self.layers[:-1] if branches.feature == "shared" else self.layers).clone()

    def gradient(
        self,
        params: list[Tensor],
        held: list[Tensor],
        x: Tensor,
        y: Tensor,
        share: Tensor,
        counted: Tensor | None,
        shared: Any = None,
        /,
        *,
        rate: float | None = None,
    ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Return the gradient and the loss of every client; with a rate, take a step in place of the gradient."""
        x = self._forward(x, self.layers)
        branches = getattr(self.layers[-1], "branches", None)
        each, dy = self.loss.graded(x if branches is None else x.unflatten(-1, (branches, -1)), y, shared)
        if counted is not None:
            each, share = each.masked_fill_(~counted, 0.0), share * counted
        value = (each * share).sum(1)
        dy = dy.reshape(x.shape).mul_(share[..., None])
        gradient: list[Tensor] = []
        for layer in reversed(self.layers):
            dy, of_weights = layer.backward(dy, rate)
            gradient = of_weights + gradient
            if dy is None:
                break
        return gradient, value, []

    def difference(self, like: Weights, starts: Tree, params: list[Tensor], held: list[Tensor]) -> Weights:
        """Return new minus old (clients, ...), in place, by the names of a client's weights."""
        moved = iter([now.sub_(old) for now, old in zip(params, leaves(starts), strict=True)])
        named: dict[str, Tensor] = {}
        for layer in self.products:
            parts = layer.split([next(moved) for _ in layer.weights])
            named |= dict(zip(layer.names, parts, strict=True))
        return Weights({name: named[name] for name in like.params}, {})
