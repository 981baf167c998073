"""The step of the wire that noises sums and writes them into the ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.wire.banded import Vector, coefficients, correlated
from fedtide.wire.clip import HALF, WHOLE, WITHIN, Adaptive, Clip, adapted, beyond, bounds_in, clipped, with_bounds
from fedtide.wire.ledger import Ledger, Line
from fedtide.wire.noise import noised
from fedtide.wire.safe import Safe, digest
from fedtide.wire.steps import Opening, Wire
from fedtide.wire.vector import ROOM, Form

LEAST = 1e-6
"""The smallest bound to which one adapts: fixed point has room for less, and none is of use."""

Draw = Callable[[str, int, int], Tensor]
"""Fresh standard normal numbers for (stream, round, how many), where noise has bands the same whenever asked for."""


def simulated_noise(seed: int) -> Draw:
    """Return the noise of a simulation, which follows from its seed: all who have the configuration know it."""

    def draw(stream: str, number: int, size: int) -> Tensor:
        return torch.from_numpy(Rng(seed).at("noise", stream, number).numpy().standard_normal(size))

    return draw


def with_noise(wire: Wire, ledger: Ledger, draw: Draw, safe: Safe | None = None) -> Wire:
    """Return the wire as the server knows it: what clients clip it noises."""
    steps = [
        Release(step.bounds, ledger, draw, safe, step.adaptive) if isinstance(step, Clip) else step
        for step in wire.steps
    ]
    return replace(wire, steps=steps)


def ledger_of(wire: Wire | None) -> Ledger | None:
    """Return the ledger of a server's wire; None where it adds no noise."""
    release = release_of(wire)
    return None if release is None else release.ledger


def release_of(wire: Wire | None) -> Release | None:
    """Return the step that noises sums; None where there is none."""
    steps = () if wire is None else wire.steps
    return next((step for step in steps if isinstance(step, Release)), None)


def stream_of(question: str, ask: int, slot: int | None) -> str:
    """Return the name of the noise of a question, which is correlated over rounds where it has bands."""
    return f"{question}/{ask}/{slot}"


@dataclass(eq=False)
class Release:
    """The server's step in place of the clients' `Clip`: noise on an opened sum, once.

    Args:
        bounds: C of each leaf.
        ledger: of the run, with its plan and noise multiplier.
        draw: fresh noise.
        safe: keeps what was released until a checkpoint counts on it; None where a round that is played once more comes
            to the same sum, as in a simulation.
        adaptive: of leaves whose bound is the first of several, how it adapts.
    """

    bounds: Mapping[str, float]
    ledger: Ledger
    draw: Draw
    safe: Safe | None = None
    adaptive: Mapping[str, Adaptive] = field(default_factory=dict)
    _past: dict[str, tuple[int, deque[Vector]]] = field(default_factory=dict, init=False, repr=False)

    def sent(self, vector: Tensor, form: Form) -> Tensor:
        """Return a client's vector within the bounds."""
        return clipped(vector, form, self.bounds, self.adaptive)

    def formed(self, form: Form, number: int) -> Form:
        """Return a form with the bounds of a round that adapt: what was released before decides them."""
        if not self.adaptive:
            return form
        names = [leaf.name or WHOLE for leaf in form.leaves]
        most = ROOM / max(form.people, 1) / 2
        return with_bounds(
            form, {name: min(self._bound(name, number), most) for name in self.adaptive if name in names}
        )

    def _bound(self, name: str, number: int) -> float:
        """Return the bound of a leaf in a round, from the last round before it in which clients sent one."""
        before = [line for line in self.ledger.lines if line.round < number and name in line.within]
        if not before:
            return self.bounds[name]
        last = max(line.round for line in before)
        lines = [line for line in before if line.round == last]
        share = sum(line.within[name] * len(line.clients) for line in lines) / sum(len(line.clients) for line in lines)
        how = self.adaptive[name]
        return max(adapted(lines[-1].bounds[name], share, how.quantile, how.rate), LEAST)

    def fault(self, total: Tensor, form: Form, members: int) -> str | None:
        """Return why the sum of what so many clients sent cannot be; None where it can."""
        return beyond(total, form, members, self.bounds, self.adaptive)

    def received(self, total: Tensor, opening: Opening) -> Tensor:
        """Return a sum with noise; its line is on the disk by then.

        Raises:
            FedtideError: the release is not in the budget.
        """
        number, ask = opening.version
        if number < 0:
            raise FedtideError(f"wire.privacy: '{opening.question}' is asked before round 0, allowed: rounds from 0 on")
        noise = self._noise(opening, number, len(total))
        bounds = bounds_in(opening.form, self.bounds, self.adaptive)
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
        if self.safe is not None and all(each.place != line.place for each in self.ledger.of(number)):
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
            made = correlated(self.draw(stream, t, size).numpy(), past, coefficients(bands))
            past.appendleft(made)
        self._past[stream] = number + 1, past
        return torch.from_numpy(past[0].copy())
