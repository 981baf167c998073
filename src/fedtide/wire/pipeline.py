"""The wire: what clients do to a vector before it is rounded and masked, and what the server does to a sum it opened.

A step is a pure function on vectors of one form, the same in simulation and deployment:

    client: as_vector -> step.sent, each in order -> quantized -> masks
    server: sum of masked -> opened -> step.received, each in order -> as_total
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedtide.core.memory import Version
from fedtide.core.trees import Tree
from fedtide.wire.vector import ROOM, Form, as_total, as_vector, opened, quantized

FEWEST = 3
"""Clients below which no sum is opened, where nothing else is said."""

SLACK = 1e-3
"""By how much fixed point may move a sum of the largest weights at most."""


@dataclass(frozen=True)
class Opening:
    """What the server knows of a sum that it opens.

    Args:
        question: what was asked.
        version: (round, number of the ask in it).
        slot: the slot that its clients were asked in; None where there are none.
        clients: ids of those in the sum, sorted.
        form: of its vector.
    """

    question: str
    version: Version
    slot: int | None
    clients: tuple[int, ...]
    form: Form


class Step(Protocol):
    """A step of the wire. It draws from what it holds itself, never from torch's global generator."""

    def formed(self, form: Form, number: int) -> Form:
        """Return the form of a sum of a round as the server asks for it."""

    def sent(self, vector: Tensor, form: Form) -> Tensor:
        """Return what a client sends in place of its vector (size,), float64."""

    def fault(self, total: Tensor, form: Form, members: int) -> str | None:
        """Return why the sum (size,), float64, of what so many clients sent cannot be; None where it can."""

    def received(self, total: Tensor, opening: Opening) -> Tensor:
        """Return what the algorithm is given in place of an opened sum (size,), float64."""


@dataclass(frozen=True)
class Wire:
    """How sums pass from clients to the server.

    Args:
        secure: whether vectors are masked on their way; a simulation adds them in the same fixed point.
        fewest: clients below which no sum is opened.
        steps: in the order of the client; the server takes them in the same order.
        hides: whether a client that has nothing to say sends zeros, as if it had.
    """

    secure: bool = True
    fewest: int = FEWEST
    steps: Sequence[Step] = ()
    hides: bool = False

    def formed(self, form: Form, number: int) -> Form:
        """Return the form of a sum of a round as the server asks for it."""
        for step in self.steps:
            form = step.formed(form, number)
        return form

    def send(self, form: Form, total: Tree) -> Tensor:
        """Return what a client sends, in fixed point.

        Raises:
            FedtideError: the total is of another form, or (`TooLarge`) one of its numbers does not fit.
        """
        vector = as_vector(form, total)
        for step in self.steps:
            vector = step.sent(vector, form)
        return quantized(vector, form.people)

    def fault(self, total: Tensor, form: Form, members: int, heaviest: float) -> str | None:
        """Return why a sum in fixed point of what clients sent cannot be; None where it can.

        Args:
            total: the sum, of a single client what it sent.
            form: of the sum.
            members: how many clients are in it.
            heaviest: largest weight that a client may give to a value.

        >>> import torch
        >>> from fedtide.wire.vector import Leaf
        >>> form = Form((Leaf("delta", 1),), people=2)
        >>> Wire().fault(quantized(torch.tensor([3.0, 5.0]), 2), form, 1, heaviest=4.0)
        'delta: found weight 5, allowed: 0 to 4'
        """
        vector = opened(total)
        if len(vector) and float(vector.abs().max()) * form.people > ROOM * members:
            return f"total: found a number beyond the room of {members} in a sum of {form.people}"
        for name, table in form.tables(vector).items():
            for weight in table[:, -1].aminmax():
                if not 0 <= float(weight) <= heaviest * members + SLACK:
                    return f"{name or 'total'}: found weight {float(weight):g}, allowed: 0 to {heaviest * members:g}"
        return next((why for step in self.steps if (why := step.fault(vector, form, members))), None)

    def receive(self, total: Tensor, opening: Opening, like: Tree, optional: frozenset[str] = frozenset()) -> Tree:
        """Return a sum in fixed point as the algorithm reads it; `like` and `optional` as of `as_total`."""
        vector = opened(total)
        for step in self.steps:
            vector = step.received(vector, opening)
        return as_total(opening.form, vector, like, optional)
