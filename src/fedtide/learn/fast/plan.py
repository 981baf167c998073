"""Plans: the operations of a small network on rows of one shape, found once and run again and again.

Finding the operations takes Python about as long as running them. Their storage stays in place, so tensors that read or
write a part of it are made once, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor


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


class Layer(Protocol):
    """A layer of a network."""

    def output(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a row's output, given that of its input."""

    def forward(self, x: Any, plan: Plan) -> Any:
        """Note how the output is made of rows or of a layer's output, and return it."""

    def backward(self, dy: Tensor, plan: Plan) -> Tensor | None:
        """Note how the gradients are made, and return that of the input; None if no layer before asks for it."""


Purpose = Literal["outputs", "gradient", "descent"]
"""Purpose of a plan: outputs alone, gradients, or steps of plain SGD in their place."""


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
        gradient: storage of the gradient of each parameter, in the layout of its layer.
        rate: learning rate of steps in place of a gradient.
    """

    def __init__(self, layers: Sequence[Layer], rows: Input, purpose: Purpose, room: Room) -> None:
        self.rows, self.purpose, self.room, self.rate = rows, purpose, room, 0.0
        self.fills: list[Callable[[], object]] = []
        self.forward: list[Callable[[], object]] = []
        self.backward: list[Callable[[], object]] = []
        self.made: list[Any] = []
        self.dy = NOTHING
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
                back = before

    def last_input(self) -> Tensor:
        """Return the input of the last layer in the last pass."""
        value = [self.rows, *self.made][-2]
        return value.now if value is self.rows else value  # type: ignore[no-any-return]

    def once(self, function: Callable[..., object], *arguments: Any) -> None:
        """Note an operation that is not done in each pass."""
        self.fills.append(partial(function, *arguments))

    def do(self, function: Callable[..., object], *arguments: Any, **settings: Any) -> None:
        """Note an operation of a pass."""
        rows = self.rows
        if all(argument is not rows for argument in arguments):
            self._noted.append(partial(function, *arguments, **settings))
        else:
            self._noted.append(
                lambda: function(*(rows.now if argument is rows else argument for argument in arguments), **settings)
            )

    def hold(self, x: Any, name: object) -> Tensor:
        """Return the input of a layer in storage: rows are copied, once if all clients have the same."""
        if not isinstance(x, Input):
            return x  # type: ignore[no-any-return]
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
        else:
            self.do(lambda left, right: into.baddbmm_(left, right, alpha=-self.rate), left, right)

    def add_sum(self, into: Tensor, name: object, dy: Tensor) -> None:
        """Note the sum over rows that is the gradient of a bias, as of `add_product`."""
        total = into if self.purpose == "gradient" else self.room.take(name, *into.shape)
        self.do(torch.sum, dy, 1, keepdim=True, out=total)
        if total is not into:
            self.do(lambda: into.sub_(total, alpha=self.rate))


def do_all(operations: Sequence[Callable[[], object]]) -> None:
    """Do operations of a plan, in order."""
    for act in operations:
        act()
