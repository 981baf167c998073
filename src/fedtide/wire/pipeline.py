"""The wire: what clients do to a vector before it is rounded and masked, and what the server does to a sum it opened.

    client: as_vector -> clip -> counts -> quantized -> masks
    server: sum of masked -> units to open -> opened -> release -> as_total

Under masks a slot, or another unit (`fedtide.wire.vector`), is opened if `fewest` clients have something in it. The sum
of fewer would be nearly one client's answer. A private server opens the slots whose noised weight can be read, because
the budget does not cover a rule that looks at exact counts.

Simulation and deployment take the same steps. All are pure functions of vectors of one form but the release, which
`Wire.receive` alone calls: it writes the ledger.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from fedtide.core.base import Algorithm
from fedtide.core.errors import refused
from fedtide.core.memory import Version
from fedtide.core.trees import Tree
from fedtide.fields.vocabulary import SHOWN
from fedtide.wire.clip import Clip
from fedtide.wire.ledger import Ledger, Safe
from fedtide.wire.scores import BOUNDS, is_score
from fedtide.wire.vector import ROOM, Form, as_total, as_vector, opened, quantized

FEWEST = 3
"""Clients below which no sum is opened, if nothing else is said."""

SLACK = 1e-3
"""By how much fixed point may move a sum of the largest weights at most."""


@dataclass(frozen=True)
class Opening:
    """The facts that the server knows of a sum that it opens.

    Args:
        question: what was asked.
        version: (round, number of the ask in it).
        slot: the slot that its clients were asked in; None if there are none.
        clients: ids of those in the sum, sorted.
        form: of its vector.
    """

    question: str
    version: Version
    slot: int | None
    clients: tuple[int, ...]
    form: Form


class ServerStep(Protocol):
    """The step of the server. It draws from what it holds itself, never from torch's global generator."""

    @property
    def ledger(self) -> Ledger | None:
        """The releases of clients so far, and who may be asked; None if nothing is released."""

    @property
    def safe(self) -> Safe | None:
        """The releases that no checkpoint holds yet; None if they are not kept."""

    def add_bounds(self, form: Form, number: int) -> Form:
        """Return the form of a sum of a round with the bounds that adapt."""

    def find_readable(self, counts: Tensor, opening: Opening) -> Tensor:
        """Return the mask (units,) of the slots that `release` will not drop, from the sums of their weights."""

    def release(self, total: Tensor, opening: Opening) -> Tensor:
        """Return the vector that the algorithm reads in place of an opened sum (size,), float64; it is on the disk by
        then.
        """


@dataclass(frozen=True)
class Wire:
    """How sums pass from clients to the server.

    Args:
        secure: whether vectors are masked on their way; a simulation adds them in the same fixed point.
        fewest: number of clients below which no sum is opened.
        clip: bounds what clients send; None bounds nothing.
        server: noises the opened sums of clipped vectors; clients have None.
        fixed_point: whether sums are added in fixed point; False adds them in floating point, see `FLOATING`.
        divisor: expected number of clients in a sum, in place of the number that came, which nobody reads: every sum is
            opened then, also one of nobody. None reads the number that came.
        sums_scores: whether scores of clients are sums, too (`fedtide.wire.scores`).
        shares: whether nodes deal shares of their secrets, so that some may vanish (`fedtide.wire.shares`).
    """

    secure: bool = True
    fewest: int = FEWEST
    clip: Clip | None = None
    server: ServerStep | None = None
    fixed_point: bool = True
    divisor: int | None = None
    sums_scores: bool = False
    shares: bool = False

    def of(self, question: str) -> "Wire":
        """Return the wire of a question: who is judged is no draw, and no secret."""
        return replace(self, divisor=None) if is_score(question) else self

    @property
    def hides(self) -> bool:
        """Whether a client that has nothing to say sends zeros, as if it had."""
        return self.clip is not None

    @property
    def ledger(self) -> Ledger | None:
        """The releases of clients so far, and who may be asked; None without noise."""
        return None if self.server is None else self.server.ledger

    @property
    def safe(self) -> Safe | None:
        """The releases that no checkpoint holds yet; None if they are not kept."""
        return None if self.server is None else self.server.safe

    def within(self, bounds: Mapping[str, float]) -> "Wire":
        """Return a client's wire whose bounds are no larger than the owner's bounds."""
        if self.clip is None or not bounds:
            return self
        return replace(self, clip=replace(self.clip, owner_bounds=bounds))

    def add_bounds(self, form: Form, number: int) -> Form:
        """Return the form of a sum of a round as the server asks for it."""
        return form if self.server is None else self.server.add_bounds(form, number)

    def send(self, form: Form, total: Tree) -> Tensor:
        """Return a client's total as it leaves the client, in fixed point.

        Raises:
            FedtideError: the total is of another form, or (`TooLarge`) one of its numbers does not fit.
        """
        vector = as_vector(form, total)
        if self.clip is not None:
            vector = self.clip.apply(vector, form)
        for place, unit in enumerate(form.units, start=form.end):
            vector[place] = vector[unit][-1] if self.clip is not None else bool(vector[unit].any())
        return quantized(vector, form.people)

    def fault(self, total: Tensor, form: Form, members: int, heaviest: float) -> str | None:
        """Return why a sum in fixed point of what clients sent cannot be; None if it can.

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
            if name in BOUNDS and (most := float(table[:, :-1].abs().max())) > BOUNDS[name] * members + SLACK:
                return f"{name}: found {most:g}, allowed: at most {BOUNDS[name] * members:g} of {members} clients"
        for count in vector[form.end :].tolist():
            if not -SLACK <= count <= members + SLACK:
                return f"total: found {count:g} clients in a slot, allowed: 0 to {members}"
        return None if self.clip is None else self.clip.fault(vector, form, members)

    def find_units(self, first: Tensor, opening: Opening, fewest: int = 1) -> list[int]:
        """Return the units of a sum that may be opened.

        Args:
            first: the sum (size,) in fixed point, zero in all units.
            opening: what is known of it.
            fewest: number of clients that the owners of those in the sum want in one, if that is larger.
        """
        counts = opened(first[opening.form.end :])
        if self.server is not None:
            return self.server.find_readable(counts, opening).nonzero()[:, 0].tolist()
        return (counts >= max(self.fewest, fewest)).nonzero()[:, 0].tolist()

    def receive(self, total: Tensor, opening: Opening, like: Tree, optional: frozenset[str] = frozenset()) -> Tree:
        """Return a sum in fixed point as the algorithm reads it; `like` and `optional` as of `as_total`.

        The server's step has an effect: its line in the ledger is on the disk before the sum is returned.
        """
        if self.server is None and self.clip is not None:
            raise RuntimeError("a private sum is read only with the noise of the server (fedtide.wire.noise)")
        vector, counts = opened(total).split([opening.form.end, len(opening.form.units)])
        if self.divisor is not None:
            for table in opening.form.tables(vector).values():
                if len(table) == 1:
                    table[0, -1] = self.divisor
        if self.server is not None:
            vector = self.server.release(vector, opening)
        else:
            for unit, count in zip(opening.form.units, counts.tolist(), strict=True):
                if count < self.fewest:
                    vector[unit] = 0.0
        return as_total(opening.form, vector, like, optional)


FLOATING = Wire(secure=False, fewest=1, fixed_point=False)
"""The wire that does nothing: sums are added in floating point, as answers come."""


def why_not(algorithm: Algorithm) -> str:
    """Return why masks would hide nothing of an algorithm; "" if they do."""
    seen = [SHOWN[name].words for name in algorithm.traits.reveals if name in SHOWN and SHOWN[name].kind == "update"]
    return algorithm.traits.unmaskable or (f"its server sees of each client {seen[0]}" if seen else "")


def check_wire(wire: Wire, algorithm: Algorithm, cohort: int, where: str) -> None:
    """Raise unless sums of an algorithm can pass over a wire.

    Args:
        wire: how sums pass.
        cohort: how many clients it asks in a round.
        where: of the method, for messages.

    Raises:
        FedtideError: masks would hide nothing, or no sum would ever be opened.
    """
    if why := wire.secure and why_not(algorithm):
        raise refused("wire.secure", True, "a method whose server sees sums alone", f"{where}: {why}")
    if algorithm.works and cohort < wire.fewest:
        allowed = f"at most {cohort}, the clients that {where} asks in a round"
        raise refused("wire.fewest", wire.fewest, allowed, "no sum would ever be opened")
    fewest = algorithm.traits.fewest
    if wire.secure and fewest is not None and fewest < wire.fewest:
        why = "opened parts, subtracted from their sum, would tell of fewer clients"
        raise refused(f"{where}.fewest", fewest, f"{wire.fewest} or more, as `wire.fewest`", why)
