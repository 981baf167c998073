"""The step of the wire that noises sums and writes them into the ledger."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.wire.banded import Vector, coefficients, correlated
from fedtide.wire.clip import Clip, clipped
from fedtide.wire.ledger import Ledger, Line
from fedtide.wire.noise import noised
from fedtide.wire.steps import Opening, Wire
from fedtide.wire.vector import Form

Draw = Callable[[str, int, int], Tensor]
"""Fresh standard normal numbers for (stream, round, how many), the same whenever they are asked for."""


def simulated_noise(seed: int) -> Draw:
    """Return the noise of a simulation, which follows from its seed: known to whoever has the configuration."""

    def draw(stream: str, number: int, size: int) -> Tensor:
        return torch.from_numpy(Rng(seed).at("noise", stream, number).numpy().standard_normal(size))

    return draw


def with_noise(wire: Wire, ledger: Ledger, draw: Draw) -> Wire:
    """Return the wire as the server knows it: what clients clip it noises."""
    steps = [Release(step.bounds, ledger, draw) if isinstance(step, Clip) else step for step in wire.steps]
    return replace(wire, steps=steps)


def ledger_of(wire: Wire | None) -> Ledger | None:
    """Return the ledger of a server's wire; None where it adds no noise."""
    steps = () if wire is None else wire.steps
    return next((step.ledger for step in steps if isinstance(step, Release)), None)


@dataclass(eq=False)
class Release:
    """The server's step in place of the clients' `Clip`: noise on an opened sum, once.

    Args:
        bounds: C of each leaf.
        ledger: of the run, with its plan and noise multiplier.
        draw: fresh noise.
    """

    bounds: Mapping[str, float]
    ledger: Ledger
    draw: Draw
    _past: dict[str, tuple[int, deque[Vector]]] = field(default_factory=dict, init=False, repr=False)

    def sent(self, vector: Tensor, form: Form) -> Tensor:
        """Return a client's vector within the bounds."""
        return clipped(vector, form, self.bounds)

    def received(self, total: Tensor, opening: Opening) -> Tensor:
        """Return a sum with noise; its line is on the disk by then.

        Raises:
            FedtideError: the release is not in the budget.
        """
        number, ask = opening.version
        if number < 0:
            raise FedtideError(f"wire.privacy: '{opening.question}' is asked before round 0, allowed: rounds from 0 on")
        noise = self._noise(opening, number, len(total))
        released = noised(total, opening.form, self.bounds, self.ledger.z, noise)
        self.ledger.add(
            Line(
                round=number,
                ask=ask,
                question=opening.question,
                slot=opening.slot,
                z=self.ledger.z,
                bounds=dict(self.bounds),
                clients=opening.clients,
                epsilon=0.0,
                sha256=hashlib.sha256(released.numpy().tobytes()).hexdigest(),
            )
        )
        return released

    def _noise(self, opening: Opening, number: int, size: int) -> Tensor:
        """Return n_t; what it needs of the rounds before is kept in this process, or made again.

        No two sums have the same noise, or their difference would have none.
        """
        stream, bands = f"{opening.question}/{opening.version[1]}/{opening.slot}", self.ledger.plan.bands
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
