"""Layers of small networks as products of matrices, of several copies at once, with rows innermost in pictures.

Libraries for convolutions are made for many channels, and waste most of a processor on one, six or eight. Here pictures
are (clients, channels, height, width, rows): lines are copied in runs of `width * rows` numbers. A pool is three
maxima. A convolution is a product for each row of its kernel; their sum is the next layer's input. Vectors are
(clients, rows, width), because products of few rows with a large matrix are fastest so. A plain step of SGD is added to
the weights by the product that makes the gradient; the gradient then exists nowhere.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedtide.learn.device import Scratch
from fedtide.models.branched import Averaged, Branched, Branches
from fedtide.models.two_headed import Noting, TwoHeaded


class Room:
    """Storage by name that grows and is used again: fresh memory costs more than a product."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._held: dict[object, Tensor] = {}
        self.grown = 0  # how often storage has been taken anew, elsewhere

    @property
    def bytes(self) -> int:
        """Bytes of all storage."""
        return sum(tensor.nbytes for tensor in self._held.values())

    def take(self, name: object, *shape: int) -> Tensor:
        """Return storage of a shape; the old content of this name is lost."""
        tensor = self._held.get(name)
        if tensor is None or tensor.numel() < math.prod(shape):
            with torch.inference_mode(False):  # storage may be written in another mode than it is taken in
                self._held[name] = tensor = self._like.new_empty(math.prod(shape))
            self.grown += 1
        return tensor[: math.prod(shape)].view(shape)


NOTHING = torch.empty(0)


class Input:
    """Rows as they come, which stand for a tensor among the operations of a plan.

    Args:
        shape: (clients, rows, width), or (clients, channels, height, width, rows).
        alike: whether all clients have the same rows.

    Attributes:
        now: the rows, during a pass alone: what they are a part of may be large.
    """

    def __init__(self, shape: Sequence[int], alike: bool) -> None:
        self.shape, self.alike = torch.Size(shape), alike
        self.now = NOTHING


def copies_of(x: Any) -> int:
    """Return how many clients have rows, or a layer's output, of their own."""
    return 1 if isinstance(x, Input) and x.alike else int(x.shape[0])


Purpose = Literal["outputs", "gradient", "descent", "squares"]
"""Purpose of a plan: outputs alone, gradients, steps of plain SGD in their place, or sums of squares over rows."""


class Plan:
    """The operations of a network on rows of one shape, on storage that stays in place.

    Args:
        layers: which have their weights.
        rows: what comes.
        purpose: what it is for.
        room: storage of its numbers.

    Attributes:
        fills: write numbers that no pass writes; repeated after another plan.
        forward: the forward pass.
        backward: the backward pass.
        made: the output of each layer.
        dy: storage of the gradient by the outputs; empty for outputs alone.
        by_features: gradient of the loss by the input of branches, beside that through the outputs; None for none.
        gradient: storage of the gradient of each parameter, in the layout of its layer.
        rate: learning rate of steps in place of a gradient.
    """

    def __init__(self, layers: Sequence["Layer"], rows: Input, purpose: Purpose, room: Room) -> None:
        self.rows, self.purpose, self.room, self.rate = rows, purpose, room, 0.0
        self.fills: list[Callable[[], object]] = []
        self.forward: list[Callable[[], object]] = []
        self.backward: list[Callable[[], object]] = []
        self.made: list[Any] = []
        self.dy = NOTHING
        self.by_features: Tensor | None = None
        self.gradient: list[Tensor] = []
        self._noted = self.forward
        x: Any = rows
        for layer in layers:
            x = layer.forward(x, self)
            self.made.append(x)
        if purpose != "outputs":
            self._noted = self.backward
            self.dy = back = room.take("dy", *x.shape)
            for layer in reversed(layers):
                before = layer.backward(back, self)
                if before is None:
                    break
                if layer is layers[-1] and branch_count(layers) is not None:
                    self.do(self._add_by_features, before)
                back = before

    def _add_by_features(self, back: Tensor) -> None:
        if self.by_features is not None:
            back.add_(self.by_features)

    def last_input(self) -> Tensor:
        """Return the input of the last layer in the last pass."""
        value = [self.rows, *self.made][-2]
        return value.now if value is self.rows else value

    def once(self, function: Callable[..., object], *arguments: Any) -> None:
        """Note an operation that is not done in each pass."""
        self.fills.append(partial(function, *arguments))

    def do(self, function: Callable[..., object], *arguments: Any, **settings: Any) -> None:
        """Note an operation of a pass."""
        rows = self.rows
        place = next((k for k, argument in enumerate(arguments) if argument is rows), None)
        if place is None:
            self._noted.append(partial(function, *arguments, **settings))
        else:
            call, after = partial(function, *arguments[:place], **settings), arguments[place + 1 :]
            self._noted.append(lambda: call(rows.now, *after))

    def hold(self, x: Any, name: object) -> Tensor:
        """Return the input of a layer in storage: rows are copied, once if all clients have the same."""
        if not isinstance(x, Input):
            return x
        into = self.room.take(name, copies_of(x), *x.shape[1:])
        self.copy(into, x)
        return into.expand(x.shape)

    def copy(self, into: Tensor, x: Any) -> None:
        """Note a copy of a layer's input; of rows that all clients have, the copy of one."""
        if isinstance(x, Input):
            self.do(lambda now: into.copy_(now[: len(into)]), x)
        else:
            self.do(into.copy_, x)

    def add_product(self, into: Tensor, left: Any, right: Any) -> None:
        """Note the product that is the gradient of weights: it goes to `into`, or these are the weights, for a step."""
        if self.purpose == "gradient":
            self.do(torch.bmm, left, right, out=into)
        elif self.purpose == "squares":
            self.do(lambda left, right: torch.bmm(left.square(), right.square(), out=into), left, right)
        else:
            self.do(lambda left, right: into.baddbmm_(left, right, alpha=-self.rate), left, right)

    def add_sum(self, into: Tensor, name: object, dy: Tensor) -> None:
        """Note the sum over rows that is the gradient of a bias, as of `add_product`."""
        if self.purpose == "squares":
            self.do(lambda: torch.sum(dy.square(), 1, keepdim=True, out=into))
            return
        total = into if self.purpose == "gradient" else self.room.take(name, *into.shape)
        self.do(torch.sum, dy, 1, keepdim=True, out=total)
        if total is not into:
            self.do(lambda: into.sub_(total, alpha=self.rate))


def do_all(operations: Sequence[Callable[[], object]]) -> None:
    """Do operations of a plan, in order."""
    for act in operations:
        act()


# -- layers ------------------------------------------------------------------------------------------------------------


_masked = torch.ops.aten.threshold_backward.grad_input


class Product(ABC):
    """A layer with parameters, which hold the tensors `weights` (clients, ...).

    Args:
        name: name of the layer in the model.
        layer: the module.
        first: whether nothing before it is trained, so that no gradient goes further back.
    """

    sizes: list[tuple[int, ...]]  # of what is held of a client
    frozen = False  # with weights that no step changes
    bound = False  # to parameters of a module

    def __init__(self, name: str, layer: nn.Conv2d | nn.Linear, first: bool) -> None:
        self.first = first
        self.names = [f"{name}.weight", *([] if layer.bias is None else [f"{name}.bias"])]
        self.shape, self.inputs = layer.weight.shape, layer.weight[0].numel()
        self.weights: list[Tensor] = []

    @abstractmethod
    def layout(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return a client's parameters as they are held."""

    @abstractmethod
    def split(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters of several clients from what is held."""

    def storage(self, name: str, clients: int, room: Room) -> list[Tensor]:
        """Return storage for what is held of several clients; of one that is bound it stands one after another."""
        if not self.bound:
            return [room.take((self, name, k), clients, *size) for k, size in enumerate(self.sizes)]
        numbers = [math.prod(size) for size in self.sizes]
        parts = room.take((self, name), clients, sum(numbers)).split(numbers, 1)
        return [part.unflatten(1, size) for part, size in zip(parts, self.sizes, strict=True)]

    def load(self, params: Sequence[Tensor], room: Room) -> list[Tensor]:
        """Copy parameters (clients, ...) or (clients, models, ...), in the layer's layout, and return the copies."""
        self.weights = self.storage("weights", params[0].numel() // math.prod(self.sizes[0]), room)
        return [into.view(param.shape).copy_(param) for into, param in zip(self.weights, params, strict=True)]

    def bind(self, copies: Sequence[Sequence[Tensor]], room: Room) -> list[tuple[Tensor, Tensor]]:
        """Take the weights of each copy from parameters that stay where they are; return what to copy anew."""
        self.bound = True
        self.weights = self.storage("weights", len(copies), room)
        views = self.split(self.weights)
        return [(into[k], param) for k, copy in enumerate(copies) for into, param in zip(views, copy, strict=True)]

    def _now(self, clients: int) -> list[Tensor]:
        """Return the weights of the first clients."""
        return [weight[:clients] for weight in self.weights]

    def _target(self, plan: Plan, clients: int) -> list[Tensor]:
        """Return the target of the gradient: storage of its own, or the weights for a step."""
        if plan.purpose == "descent":
            return self._now(clients)
        gradient = self.storage("gradient", clients, plan.room)
        plan.gradient[:0] = gradient
        return gradient


class Linear(Product):
    """A linear layer on (clients, rows, inputs), or several of one input, whose outputs are side by side.

    Args:
        name: name of the layer in the model.
        layer: the module.
        first: whether nothing before it is trained.
        branches: all of the layers; None for one that is not repeated.
    """

    def __init__(self, name: str, layer: nn.Linear, first: bool, branches: Branches | None = None) -> None:
        super().__init__(name, layer, first)
        self.branches = self.copies = None if branches is None else len(branches.copies)
        if branches is not None:
            self.names = [f"{name}.{param}" for param, _ in branches.named_parameters()]
            self.shape = torch.Size((len(branches.copies) * self.shape[0], self.inputs))
        self.passing = self.shape[0]  # outputs whose gradient goes back to the input: the first ones
        self.sizes = [tuple(self.shape), *([] if layer.bias is None else [(1, self.shape[0])])]

    def bind(self, copies: Sequence[Sequence[Tensor]], room: Room) -> list[tuple[Tensor, Tensor]]:
        """Take the weights of each copy from parameters that stay where they are; those of one layer are read there."""
        if self.copies is not None or len(copies) > 1:
            return super().bind(copies, room)
        self.bound, self.weights = True, [param[None] for param in self.layout(copies[0])]
        return []

    def layout(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return parameters as they are held: branches in one, and the bias with a dimension for the rows."""
        kinds = len(params) // (self.copies or 1)
        matrix, *bias = (params[k] if self.copies is None else torch.cat(list(params[k::kinds])) for k in range(kinds))
        return [matrix, *(vector[None] for vector in bias)]

    def split(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters of several clients from what is held, as views."""
        kinds = [stored[0], *(bias[:, 0] for bias in stored[1:])]
        return [
            part for parts in zip(*(leaf.chunk(self.copies or 1, 1) for leaf in kinds), strict=True) for part in parts
        ]

    def output(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a row's output."""
        return (self.shape[0],)

    def forward(self, x: Any, plan: Plan) -> Tensor:
        """Note how the output (clients, rows, outputs) is made, and return it."""
        self.x = x
        clients, rows, _ = x.shape
        matrix, *bias = self._now(clients)
        y = plan.room.take((self, "y"), clients, rows, self.shape[0])
        if bias:
            plan.do(torch.baddbmm, bias[0], x, matrix.transpose(1, 2), out=y)
        else:
            plan.do(torch.bmm, x, matrix.transpose(1, 2), out=y)
        return y

    def backward(self, dy: Tensor, plan: Plan) -> Tensor | None:
        """Note how the gradients are made, and return that of the input."""
        clients, rows, _ = dy.shape
        back = None
        if not self.first:
            back = plan.room.take((self, "dx"), clients, rows, self.inputs)
            plan.do(torch.bmm, dy[..., : self.passing], self._now(clients)[0][:, : self.passing], out=back)
        if self.frozen:
            return back
        matrix, *bias = self._target(plan, clients)
        plan.add_product(matrix, dy.transpose(1, 2), self.x)
        for vector in bias:
            plan.add_sum(vector, (self, "sum"), dy)
        return back


class Heads(Linear):
    """The two heads of a network, whose outputs are side by side; the second one's loss does not reach the input.

    Args:
        name: name of the first head in the model.
        layer: the first head.
        first: whether nothing before it is trained.
    """

    def __init__(self, name: str, layer: nn.Linear, first: bool) -> None:
        super().__init__(f"{name}.layer", layer, first)
        self.names += [f"own.{param.rpartition('.')[2]}" for param in self.names]
        self.shape, self.copies = torch.Size((2 * self.shape[0], self.inputs)), 2
        self.sizes = [tuple(self.shape), *([] if layer.bias is None else [(1, self.shape[0])])]


class Conv2d(Product):
    """A convolution on (clients, channels, height, width, rows): a product for each row of the kernel, and their sum.

    Each column of a kernel meets the lines of a picture shifted sideways. One copy of these lines is enough: the next
    row of the kernel meets the next line. If the kernel moves down by several lines at a time, there are as many
    copies of a part of the lines. Weights are matrices (channels * columns, outputs), one for each row of the kernel;
    before the first is the bias, which meets ones.
    """

    cropped = False  # to even sides: a pool follows that leaves out the rest

    def __init__(self, name: str, layer: nn.Conv2d, first: bool) -> None:
        super().__init__(name, layer, first)
        self.stride, pad = layer.stride, layer.padding
        if isinstance(pad, str):
            pad = tuple(side // 2 for side in layer.kernel_size) if pad == "same" else (0, 0)
        self.pad: tuple[int, ...] = pad
        outputs, channels, tall, wide = self.shape
        self.width, self.ones = channels * wide, len(self.names) - 1
        self.sizes = [(self.ones + self.width, outputs), *[(self.width, outputs)] * (tall - 1)]

    def layout(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return parameters as they are held: a matrix for each row of the kernel."""
        kernel, *bias = params
        first, *others = (row.flatten(1).T for row in kernel.unbind(2))
        return [torch.cat([*(vector[None] for vector in bias), first]), *others]

    def split(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters of several clients from what is held; what is bound are views."""
        outputs, channels, _, wide = self.shape
        bias = [stored[0][:, 0]] * self.ones
        if self.bound:  # its matrices stand one after another
            steps = (stored[0].stride(0), 1, wide * outputs, self.width * outputs, outputs)
            start = stored[0].storage_offset() + self.ones * outputs
            return [stored[0].as_strided((len(stored[0]), *self.shape), steps, start), *bias]
        matrices = [matrix.unflatten(1, (channels, wide)) for matrix in (stored[0][:, self.ones :], *stored[1:])]
        return [torch.stack(matrices, 3).permute(0, 4, 1, 3, 2), *bias]

    def sides(self, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Return the sides of a padded picture, and those of the output, which are below one if it does not fit."""
        padded = [side + 2 * pad for side, pad in zip(shape[1:], self.pad, strict=True)]
        steps = zip(padded, self.shape[2:], self.stride, strict=True)
        out = [(side - kernel) // step + 1 for side, kernel, step in steps]
        return padded, [side // 2 * 2 for side in out] if self.cropped else out

    def output(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a row's output."""
        return (self.shape[0], *self.sides(shape)[1])

    def _padded(self, x: Any, plan: Plan) -> Tensor:
        """Return the input amid zeros, in fixed storage."""
        clients, channels, *inner, rows = x.shape
        if not any(self.pad):
            return plan.hold(x, (self, "padded"))
        sides, _ = self.sides(x.shape[1:4])
        padded = plan.room.take((self, "padded"), copies_of(x), channels, *sides, rows)
        plan.once(padded.zero_)
        into = padded[self._inner(inner)]
        plan.copy(into, x)
        return padded.expand(clients, *padded.shape[1:])

    def _inner(self, sides: Sequence[int]) -> tuple[slice, ...]:
        """Return the place of the picture in a padded picture."""
        return slice(None), slice(None), *(slice(pad, pad + n) for pad, n in zip(self.pad, sides, strict=True))

    def forward(self, x: Any, plan: Plan) -> Tensor:
        """Note how the output (clients, outputs, height, width, rows) is made, and return it."""
        (outputs, channels, tall, wide), (down, right) = self.shape, self.stride
        self.came, (_, (high, across)), copies = x.shape, self.sides(x.shape[1:4]), copies_of(x)
        x = self._padded(x, plan)
        clients, rows = len(x), x.shape[-1]
        batch, channel, height, width, row = x.stride()
        steps = (batch, channel, width, height * down, width * right, row)
        line = across * rows
        stored: list[Tensor] = []
        for step in range(min(down, tall)):
            lines, ones = high + (tall - 1 - step) // down, self.ones if step == 0 else 0
            whole = plan.room.take((self, "x", step), copies, ones + self.width, lines * line)
            plan.once(whole[:, :ones].fill_, 1.0)
            into = whole[:, ones:].view(copies, channels, wide, lines, across, rows)
            plan.do(into.copy_, x.as_strided(into.shape, steps, x.storage_offset() + step * height))
            stored.append(whole.expand(clients, -1, -1))
        below = [slice(i // down * line, (i // down + high) * line) for i in range(tall)]
        self.meets = [
            stored[i % down][:, self.ones if i and i % down == 0 else 0 :, pixels] for i, pixels in enumerate(below)
        ]
        y = plan.room.take((self, "y"), clients, outputs, high * line)
        first, *others = (part.transpose(1, 2) for part in self._now(clients))
        plan.do(torch.bmm, first, self.meets[0], out=y)
        for matrix, met in zip(others, self.meets[1:], strict=True):
            plan.do(y.baddbmm_, matrix, met)
        return y.unflatten(2, (high, across, rows))

    def backward(self, dy: Tensor, plan: Plan) -> Tensor | None:
        """Note how the gradients are made, and return that of the input."""
        clients, outputs, high, across, _ = dy.shape
        if not dy.is_contiguous():  # as what a convolution with padding passes on
            dense = plan.room.take((self, "dy"), *dy.shape)
            plan.do(dense.copy_, dy)
            dy = dense
        flat, back = dy.view(clients, outputs, -1), None
        if not self.first:
            back = self._back(flat, high, across, plan)
        if self.frozen:
            return back
        flat = flat.transpose(1, 2)
        for into, met in zip(self._target(plan, clients), self.meets, strict=True):
            plan.add_product(into, met, flat)
        return back

    def _back(self, dy: Tensor, high: int, across: int, plan: Plan) -> Tensor:
        """Note how the gradient of the input is made, and return it."""
        clients, channels, *inner, rows = self.came
        (_, _, _, wide), (down, right) = self.shape, self.stride
        product = plan.room.take((self, "dx"), clients, self.width, dy.shape[2])
        parts = product.view(clients, channels, wide, high, across, rows).unbind(2)
        whole = plan.room.take((self, "whole"), clients, channels, *self.sides(self.came[1:4])[0], rows)
        plan.do(whole.zero_)
        first, *others = self._now(clients)
        for i, matrix in enumerate([first[:, self.ones :], *others]):
            plan.do(torch.bmm, matrix, dy, out=product)
            for j, part in enumerate(parts):
                lines, columns = (
                    slice(start, start + (count - 1) * step + 1, step)
                    for start, count, step in ((i, high, down), (j, across, right))
                )
                plan.do(whole[:, :, lines, columns].add_, part)
        return whole[self._inner(inner)]


class ReLU:
    """A ReLU, in place."""

    def output(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a row's output."""
        return shape

    def forward(self, x: Any, plan: Plan) -> Tensor:
        """Note how the output is made, and return it."""
        if isinstance(x, Input):  # rows are left as they are
            self.y = plan.room.take((self, "y"), *x.shape)
            plan.do(torch.clamp_min, x, 0, out=self.y)
        else:
            self.y = x
            plan.do(torch.relu_, x)
        return self.y

    def backward(self, dy: Tensor, plan: Plan) -> Tensor:
        """Note how the gradient of the input is made, and return it."""
        plan.do(_masked, dy, self.y, 0, grad_input=dy)
        return dy


class MaxPool2d:
    """A maximum over squares of two by two; the first of equal numbers gets the gradient, as in torch."""

    def output(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a row's output."""
        channels, *sides = shape
        return (channels, *(side // 2 for side in sides))

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the left and the right of each square (clients, channels, height, 2, width, rows)."""
        high, wide = (side // 2 for side in x.shape[2:4])
        squares = x[:, :, : 2 * high, : 2 * wide].unflatten(2, (high, 2)).unflatten(4, (wide, 2))
        return squares[..., 0, :], squares[..., 1, :]

    def forward(self, x: Any, plan: Plan) -> Tensor:
        """Note how the output (clients, channels, height, width, rows) is made, and return it."""
        x = plan.hold(x, (self, "x"))
        self.came, (self.left, self.right) = x.shape, self._pairs(x)
        larger = plan.room.take((self, "larger"), *self.left.shape)
        self.over, self.under = larger.unbind(3)
        plan.do(torch.maximum, self.left, self.right, out=larger)
        y = plan.room.take((self, "y"), *self.over.shape)
        plan.do(torch.maximum, self.over, self.under, out=y)
        return y

    def backward(self, dy: Tensor, plan: Plan) -> Tensor:
        """Note how the gradient of the input is made, and return it."""
        dx, half, more = (
            plan.room.take((self, name), *shape)
            for name, shape in (("dx", self.came), ("half", self.left.shape), ("more", self.left.shape))
        )
        plan.once(dx.zero_)  # a side that is odd has no gradient
        (over, under), first, (left, right) = half.unbind(3), more.unbind(3)[0], self._pairs(dx)
        plan.do(torch.sub, self.under, self.over, out=first)
        plan.do(_masked, dy, first, 0, grad_input=under)
        plan.do(torch.sub, dy, under, out=over)
        plan.do(torch.sub, self.right, self.left, out=more)
        plan.do(_masked, half, more, 0, grad_input=right)
        plan.do(torch.sub, half, right, out=left)
        return dx


class Flatten:
    """All numbers of a row one after the other, and rows outermost.

    Args:
        ready: whether rows are outermost already, as they come.
    """

    def __init__(self, ready: bool) -> None:
        self.ready = ready

    def output(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a row's output."""
        return (math.prod(shape),)

    def forward(self, x: Any, plan: Plan) -> Any:
        """Note how the output (clients, rows, numbers) is made, and return it."""
        if self.ready:
            return x
        self.came = x.shape
        turned = plan.hold(x, (self, "x")).flatten(1, -2).transpose(1, 2)
        y = plan.room.take((self, "y"), *turned.shape)
        plan.do(y.copy_, turned)
        return y

    def backward(self, dy: Tensor, plan: Plan) -> Tensor:
        """Note how the gradient of the input is made, and return it."""
        dx = plan.room.take((self, "dx"), *self.came)
        plan.do(dx.flatten(1, -2).copy_, dy.transpose(1, 2))
        return dx


class Mean:
    """The mean of the outputs of branches.

    Args:
        count: how many branches.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def output(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a row's output."""
        return (shape[0] // self.count,)

    def forward(self, x: Any, plan: Plan) -> Tensor:
        """Note how the output (clients, rows, outputs) is made, and return it."""
        clients, rows, wide = x.shape
        y = plan.room.take((self, "y"), clients, rows, wide // self.count)
        plan.do(torch.mean, x.unflatten(2, (self.count, -1)), 2, out=y)
        return y

    def backward(self, dy: Tensor, plan: Plan) -> Tensor:
        """Note how the gradient of the input is made, and return it."""
        clients, rows, outputs = dy.shape
        dx = plan.room.take((self, "dx"), clients, rows, self.count * outputs)
        parts = dx.unflatten(2, (self.count, -1))
        plan.do(torch.div, dy[:, :, None].expand(parts.shape), self.count, out=parts)
        return dx


Layer = Linear | Conv2d | ReLU | MaxPool2d | Flatten | Mean
"""A layer: the shape of a row's `output`, and what its passes `forward` and `backward` note in a plan."""


# -- recognition -------------------------------------------------------------------------------------------------------

FEW_CHANNELS = 16
"""Outputs of a convolution up to which products of matrices are mostly faster than a library for convolutions."""


def known_layers(scratch: Scratch, shape: tuple[int, ...], within: str = "") -> tuple[list[Layer], Room] | None:
    """Return the layers of a model for rows of a shape, and their storage; None if a layer is not in this file.

    Branches are allowed in the last layer only. The storage is that of one client and one row.

    Args:
        scratch: the module of the model.
        shape: of a row.
        within: name of a part of the model, for the layers of that part.
    """
    module = scratch.module.get_submodule(within)
    if torch.nn.modules.module._has_any_global_hook() or any(map(_is_watched, scratch.module.modules())):
        return None
    layers: list[Layer] = []
    row_shape = shape
    for name, layer in _in_order(module, within):
        step = _layer_for(name, layer, layers, shape)
        if step is None or (branch_count(layers) is not None and not isinstance(step, Mean)):
            return None
        if isinstance(step, Flatten) and len(shape) == 1:
            continue
        if isinstance(step, Product):
            step.frozen = not {*step.names} & {*scratch.names}
        if isinstance(step, MaxPool2d) and layers and isinstance(layers[-1], Conv2d):
            layers[-1].cropped = True
        layers.append(step)
        shape = step.output(shape)
    products = [layer for layer in layers if isinstance(layer, Product)]
    if any(name not in scratch.weights.buffers for layer in products if layer.frozen for name in layer.names):
        return None
    names = [name for layer in products if not layer.frozen for name in layer.names]
    if not names or len(shape) != 1 or sorted(names) != sorted(n for n in scratch.names if n.startswith(within)):
        return None
    for product in products:
        product.weights = [torch.empty(1, *size, device="meta") for size in product.sizes]
    room = Room(scratch.dtype, torch.device(scratch.device))
    Plan(layers, Input(turned(layers, torch.empty(1, 1, *row_shape, device="meta")).shape, False), "descent", room)
    return layers, room


def turned(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """Return rows (clients, rows, ...) as the first layer reads them: those of pictures innermost."""
    flat = x.dim() == 3 or (isinstance(layers[0], Flatten) and layers[0].ready)
    return x.flatten(2) if flat else x.movedim(1, -1)


def branch_count(layers: Sequence[Layer]) -> int | None:
    """Return how often the last layer is repeated; None if it is not."""
    return getattr(layers[-1], "branches", None) if layers else None


def has_wide(layers: Sequence[Layer]) -> bool:
    """Tell whether a convolution has so many outputs that a library for convolutions is faster."""
    return any(isinstance(layer, Conv2d) and layer.shape[0] > FEW_CHANNELS for layer in layers)


def _is_watched(module: nn.Module) -> bool:
    """Tell whether something is called at a module's passes, or in place of its own, which only torch calls."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    params = module.parameters(recurse=False)
    return any(hooks) or "forward" in vars(module) or any(param._backward_hooks for param in params)


def _in_order(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a sequence, of sequences in it, too, with their names."""
    inside = f"{name}.model" if name else "model"
    if type(module) is Averaged:
        yield from _in_order(module.model, inside)
        yield name, module
        return
    if type(module) is TwoHeaded and not name:
        for part, layer in _in_order(module.model, inside):
            yield part, module if type(layer) is Noting else layer
        return
    if type(module) is Branched:
        name, module = inside, module.model
    if type(module) is not nn.Sequential:
        yield name, module
        return
    for inner, layer in module.named_modules(remove_duplicate=False):
        if inner and "." not in inner:  # `named_children` leaves out one that comes twice
            yield from _in_order(layer, f"{name}.{inner}" if name else inner)


def _layer_for(name: str, layer: nn.Module, before: Sequence[Layer], shape: tuple[int, ...]) -> Layer | None:
    """Return the layer of this file for a module on rows of a shape, after those before it; None without one."""
    first, branches = not any(isinstance(size, Product) and not size.frozen for size in before), None
    if type(layer) is Branches and {type(copy) for copy in layer.copies} == {nn.Linear}:
        branches, layer = layer, layer.copies[0]
    kind = type(layer)
    if isinstance(layer, TwoHeaded):
        pair = layer.own
        return Heads(name, pair, first) if type(pair) is nn.Linear and shape == (pair.in_features,) else None
    if kind is Averaged:
        count = branch_count(before)
        return None if count is None else Mean(count)
    if isinstance(layer, nn.Linear) and kind is nn.Linear and len(shape) == 1:
        return Linear(name, layer, first, branches) if shape == (layer.in_features,) else None
    if isinstance(layer, nn.Conv2d) and kind is nn.Conv2d and len(shape) == 3:
        odd = all(side % 2 for side in layer.kernel_size) and layer.stride == (1, 1)
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        if not plain or (layer.padding == "same" and not odd) or layer.in_channels != shape[0]:
            return None
        convolution = Conv2d(name, layer, first)
        return convolution if min(convolution.sides(shape)[1]) > 0 else None
    if isinstance(layer, nn.MaxPool2d) and kind is nn.MaxPool2d and len(shape) == 3:
        sizes = [(size, size) if isinstance(size, int) else size for size in (layer.kernel_size, layer.stride)]
        plain = (layer.padding, layer.dilation) == (0, 1) and not (layer.ceil_mode or layer.return_indices)
        return MaxPool2d() if plain and sizes == [(2, 2), (2, 2)] and min(shape[1:]) > 1 else None
    if isinstance(layer, nn.Flatten) and kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return Flatten(not before)
    return ReLU() if kind is nn.ReLU else None
