"""The step of the wire that noises sums and writes them into the ledger."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.wire.accounting import Vector, coefficients, correlated, inverse
from fedtide.wire.clip import HALF, WHOLE, WITHIN, Clip, adapted, with_bounds
from fedtide.wire.ledger import LEDGER, Ledger, Line, Safe, digest
from fedtide.wire.noise import deviations, groups_of, noised
from fedtide.wire.pipeline import Opening, Wire
from fedtide.wire.vector import ROOM, Form

LEAST = 1e-6
"""The smallest bound to which one adapts: fixed point has room for less, and none is of use."""

Draw = Callable[[str, int, int], Tensor]
"""Fresh standard normal numbers for (stream, round, how many), if noise has bands the same whenever asked for."""


def simulated_noise(seed: int) -> Draw:
    """Return the noise of a simulation, which follows from its seed: all who have the configuration know it."""

    def draw(stream: str, number: int, size: int) -> Tensor:
        return torch.from_numpy(Rng(seed).at("noise", stream, number).numpy().standard_normal(size))

    return draw


def with_noise(wire: Wire, ledger: Ledger, draw: Draw, safe: Safe | None = None) -> Wire:
    """Return a private wire as the server knows it: what clients clip, the server noises."""
    assert wire.clip is not None
    return replace(wire, server=Release(wire.clip, ledger, draw, safe))


def stream_of(question: str, ask: int, slot: int | None) -> str:
    """Return the name of the noise of a question, which is correlated over rounds if it has bands."""
    return f"{question}/{ask}/{slot}"


@dataclass(eq=False)
class Release:
    """The server's step in place of the clients' `Clip`: noise on an opened sum, once.

    Args:
        clip: the clients' step.
        ledger: of the run, with its plan and noise multiplier.
        draw: fresh noise.
        safe: keeps released sums until a checkpoint counts on them. None if a round that is played once more comes to
            the same sum, as in a simulation.
    """

    clip: Clip
    ledger: Ledger
    draw: Draw
    safe: Safe | None = None
    _past: dict[str, tuple[int, deque[Vector]]] = field(default_factory=dict, init=False, repr=False)

    def add_bounds(self, form: Form, number: int) -> Form:
        """Return a form with the bounds of a round that adapt: what was released before decides them."""
        if not self.clip.adaptive:
            return form
        most = ROOM / max(form.people, 1) / 2
        names = [leaf.name or WHOLE for leaf in form.leaves if (leaf.name or WHOLE) in self.clip.adaptive]
        return with_bounds(form, {name: min(self._bound(name, number), most) for name in names})

    def _bound(self, name: str, number: int) -> float:
        """Return the bound of a leaf in a round, from the last round before it in which clients sent one."""
        before = [line for line in self.ledger.lines if line.round < number and name in line.within]
        if not before:
            return self.clip.bounds[name]
        last = max(line.round for line in before)
        lines = [line for line in before if line.round == last]
        share = sum(line.within[name] * len(line.clients) for line in lines) / sum(len(line.clients) for line in lines)
        how = self.clip.adaptive[name]
        return max(adapted(lines[-1].bounds[name], share, how.quantile, how.rate), LEAST)

    def release(self, total: Tensor, opening: Opening) -> Tensor:
        """Return a sum with noise; its line is on the disk by then.

        Raises:
            FedtideError: the release is not in the budget.
        """
        number, ask = opening.version
        if number < 0:
            raise FedtideError(f"wire.privacy: '{opening.question}' is asked before round 0, allowed: rounds from 0 on")
        noise = self._noise(opening, number, len(total))
        bounds = self.clip.bounds_of(opening.form)
        released = noised(total, opening.form, bounds, self.ledger.z, noise)
        tables = opening.form.tables(released)
        line = Line(
            round=number,
            ask=ask,
            question=opening.question,
            slot=opening.slot,
            z=self.ledger.z,
            bounds={name: bound for name, bound in bounds.items() if not name.endswith(WITHIN)},
            clients=opening.clients,
            epsilon=0.0,
            sha256=digest(released),
            within={
                name.removesuffix(WITHIN) or WHOLE: float(table[0, 0] / table[0, 1]) + HALF
                for name, table in tables.items()
                if name.endswith(WITHIN)
            },
        )
        if self.safe is not None and all(other.place != line.place for other in self.ledger.of(number)):
            self.safe.keep(line, released)
        self.ledger.add(line)
        if self.safe is not None:
            self.safe.count(len(self.ledger.lines))
        return released

    def _noise(self, opening: Opening, number: int, size: int) -> Tensor:
        """Return n_t; what it needs of the rounds before is kept in this process, or made again.

        No two sums have the same noise, or their difference would have none.
        """
        stream, bands = stream_of(opening.question, opening.version[1], opening.slot), self.ledger.plan.bands
        if bands == 1:
            return self.draw(stream, number, size)
        reached, past = self._past.get(stream, (0, deque(maxlen=bands)))
        if reached > number:
            reached, past = 0, deque(maxlen=bands)
        if past and len(past[0]) != size:
            changed = f"sums of '{opening.question}' changed their form in round {number}, which bands cannot follow"
            raise FedtideError(f'wire.privacy.noise: {changed}; allowed: "plain"')
        for t in range(reached, number + 1):
            noise = correlated(self.draw(stream, t, size).numpy(), past, coefficients(bands))
            past.appendleft(noise)
        self._past[stream] = number + 1, past
        return torch.from_numpy(past[0].copy())


LIKELY = 6.0
"""Standard errors by which the deviation of true noise is off at most; more is seen once in half a billion times."""


@dataclass(frozen=True)
class Noise:
    """The difference between a released sum and the sum of its clients' answers.

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
        step: the step as it was, with all lines of its ledger.
        sums: has what was released.
        noise: the noise of each release so far; it has a meaning if clients have the rows that they had.
    """

    step: Release
    sums: Safe
    noise: list[Noise] = field(default_factory=list, init=False)
    ledger: ClassVar[None] = None
    safe: ClassVar[None] = None

    def add_bounds(self, form: Form, number: int) -> Form:
        """Return the form of a sum of a round, as it was asked for."""
        return self.step.add_bounds(form, number)

    def release(self, total: Tensor, opening: Opening) -> Tensor:
        """Return the sum that was released.

        Raises:
            FedtideError: there is no such release, of these clients, or its sum is gone.
        """
        place, ledger = (*opening.version, opening.slot), self.step.ledger
        line = next((other for other in ledger.of(opening.version[0]) if other.place == place), None)
        if line is None or (line.question, line.clients) != (opening.question, opening.clients):
            found_release = "nothing" if line is None else f"'{line.question}' of clients {line.clients}"
            raise FedtideError(
                f"{LEDGER}: round {place[0]}, question {place[1]}: found {found_release}, "
                f"allowed: '{opening.question}' of clients {opening.clients}, who answered it"
            )
        released = self.sums.read_sum(line)
        if released is None or len(released) != len(total):
            but = "without it no round after it can be played again"
            raise FedtideError(f"{self.sums.record}: the sum released in round {line.round} is gone or damaged; {but}")
        self._look(line, released, total, opening)
        return released

    def _look(self, line: Line, released: Tensor, total: Tensor, opening: Opening) -> None:
        """Note the noise of a release, of all values that can be read."""
        form, bands = opening.form, self.step.ledger.plan.bands
        scale = deviations(groups_of(form, self.step.clip.bounds_of(form)), line.z)
        banded = math.sqrt(float((inverse(bands, line.round + 1) ** 2).sum()))
        noise = _noise(form.tables(released), form.tables(total), scale)
        if len(noise):
            deviation = float(noise.square().mean().sqrt()) / banded
            self.noise.append(Noise(line.round, line.question, deviation, len(noise)))


def _noise(released: Mapping[str, Tensor], sums: Mapping[str, Tensor], scale: Mapping[str, float]) -> Tensor:
    """Return the noise of all values, each in deviations; slots that could not be read have none."""
    parts = [torch.empty(0, dtype=torch.float64)]
    for name, table in released.items():
        read = (table != 0).any(1)
        if table.shape[1] > 1:
            parts.append(((table - sums[name])[read, :-1] / scale[name]).flatten())
    return torch.cat(parts)
