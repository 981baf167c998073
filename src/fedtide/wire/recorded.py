"""The step of the wire of a replay: sums are those that were released, and what noise they have can be looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.wire.banded import inverse
from fedtide.wire.clip import bounds_in
from fedtide.wire.ledger import LEDGER, Line
from fedtide.wire.noise import deviations, groups_of
from fedtide.wire.release import Release
from fedtide.wire.safe import Safe
from fedtide.wire.steps import Opening
from fedtide.wire.vector import Form

LIKELY = 6.0
"""Standard errors by which the deviation of true noise is off at most; more is seen once in half a billion times."""


@dataclass(frozen=True)
class Noise:
    """What a released sum has beside the sum of its clients' answers.

    Args:
        round: when it was released.
        question: what was asked.
        deviation: root mean square of its numbers, each in deviations of the noise that the ledger says.
        numbers: how many.
    """

    round: int
    question: str
    deviation: float
    numbers: int

    @property
    def likely(self) -> bool:
        """Tell whether noise of the ledger's size would be so.

        >>> [Noise(0, "train", deviation, 200).likely for deviation in (0.0, 1.1, 1.3)]
        [False, True, False]
        """
        return abs(self.deviation**2 - 1) <= LIKELY * math.sqrt(2 / self.numbers)


@dataclass(eq=False)
class Recorded:
    """The server's step in a replay of a private run.

    Args:
        release: the step as it was, with all lines of its ledger.
        safe: has what was released.
        found: the noise of each release so far; it has a meaning where clients have the rows that they had.
    """

    release: Release
    safe: Safe
    found: list[Noise] = field(default_factory=list, init=False)

    def formed(self, form: Form, number: int) -> Form:
        """Return the form of a sum of a round, as it was asked for."""
        return self.release.formed(form, number)

    def sent(self, vector: Tensor, form: Form) -> Tensor:
        """Return a client's vector within the bounds."""
        return self.release.sent(vector, form)

    def fault(self, total: Tensor, form: Form, members: int) -> str | None:
        """Return None: clients of a replay send what they have to."""
        return None

    def received(self, total: Tensor, opening: Opening) -> Tensor:
        """Return the sum that was released.

        Raises:
            FedtideError: there is no such release, of these clients, or its sum is gone.
        """
        place, ledger = (*opening.version, opening.slot), self.release.ledger
        line = next((each for each in ledger.of(opening.version[0]) if each.place == place), None)
        if line is None or (line.question, line.clients) != (opening.question, opening.clients):
            said = "nothing" if line is None else f"'{line.question}' of clients {line.clients}"
            raise FedtideError(
                f"{LEDGER}: round {place[0]}, question {place[1]}: found {said}, "
                f"allowed: '{opening.question}' of clients {opening.clients}, who answered it"
            )
        released = self.safe.found(line)
        if released is None or len(released) != len(total):
            but = "without it no round after it can be played again"
            raise FedtideError(f"{self.safe.record}: the sum released in round {line.round} is gone or damaged; {but}")
        self._look(line, released, total, opening)
        return released

    def _look(self, line: Line, released: Tensor, total: Tensor, opening: Opening) -> None:
        """Note the noise of a release, of all values that can be read."""
        step, form, bands = self.release, opening.form, self.release.ledger.plan.bands
        scale = deviations(groups_of(form, bounds_in(form, step.bounds, step.adaptive)), line.z)
        banded = math.sqrt(float((inverse(bands, line.round + 1) ** 2).sum()))
        noise = _noise(form.tables(released), form.tables(total), scale)
        if len(noise):
            deviation = float(noise.square().mean().sqrt()) / banded
            self.found.append(Noise(line.round, line.question, deviation, len(noise)))


def _noise(released: Mapping[str, Tensor], sums: Mapping[str, Tensor], scale: Mapping[str, float]) -> Tensor:
    """Return what is beside the sums in all values, each in deviations; none of slots that could not be read."""
    found = [torch.empty(0, dtype=torch.float64)]
    for name, table in released.items():
        read = (table != 0).any(1)
        if table.shape[1] > 1:
            found.append(((table - sums[name])[read, :-1] / scale[name]).flatten())
    return torch.cat(found)
