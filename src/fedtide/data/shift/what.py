"""What a client holds: which of its rows are there at a moment."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.rng import Rng
from fedtide.core.types import Moment
from fedtide.core.values import Count, Positive, Whole, ingredient


@ingredient
class All:
    """Every row of the client, always."""

    kind: Literal["all"] = "all"

    def hold(self, rows: Tensor, pool: Tensor, part: str, moment: Moment, rng: Rng) -> Tensor:
        """The rows held at `moment`, of those that are the client's."""
        return rows

    def counts(self, counts: Tensor, part: str) -> Tensor:
        """How many rows each client holds, given how many are its own."""
        return counts


@ingredient
class Mixture:
    """A blend of two pools on a schedule (pFedEM): `round(rho * rows)` rows of the second, the rest of the first.

    With T = rounds/cycles and s = r mod T: linear rho = 1 - |2s/T - 1|, cosine rho = (1 - cos(2 pi s/T))/2; both start
    at 0 and peak at T/2; the schedule counts rounds, whatever the shift's clock. Rows are redrawn in every round, with
    replacement, from the client's own two pools.

    Args:
        curve: "linear" or "cosine".
        cycles: periods over the whole run.
        rows: rows a client holds in a round.
        jitter: largest shift of a client's phase, in rounds, drawn once per client.
        test: test rows follow the "mixture" of the round, are "balanced" (half from each pool, drawn once), or "all".
    """

    curve: Literal["linear", "cosine"] = "linear"
    cycles: Positive = 1
    rows: Count = 100
    jitter: Whole = 0
    test: Literal["mixture", "balanced", "all"] = "balanced"
    kind: Literal["mixture"] = "mixture"

    def share(self, moment: Moment, phase: float = 0.0) -> float:
        """rho: the share of the second pool at a moment.

        >>> [Mixture(cycles=2).share(Moment(r, 40)) for r in (0, 5, 10, 20)]
        [0.0, 0.5, 1.0, 0.0]
        """
        period = moment.rounds / self.cycles
        s = math.fmod(max(moment.round, 0) + phase, period)
        s += period if s < 0 else 0.0
        if self.curve == "linear":
            return 1 - abs(2 * s / period - 1)
        return (1 - math.cos(2 * math.pi * s / period)) / 2

    def hold(self, rows: Tensor, pool: Tensor, part: str, moment: Moment, rng: Rng) -> Tensor:
        """The rows held at `moment`, of those that are the client's; `pool` says from which pool each is.

        A client without rows of one pool (among its few validation rows, say) fills up from the other.
        """
        if (part == "test" and self.test == "all") or not len(rows):
            return rows
        phase = float(rng.at("phase").numpy().uniform(-self.jitter, self.jitter)) if self.jitter else 0.0
        balanced = part == "test" and self.test == "balanced"
        rho = 0.5 if balanced else self.share(moment, phase)
        first, second = rows[pool == 0], rows[pool == 1]
        wanted = 0 if not len(second) else self.rows if not len(first) else round(rho * self.rows)
        # The balanced test rows stay the same, so that accuracy moves with the model only.
        draw = rng.at("hold", part, "balanced" if balanced else moment.round).numpy()
        picked = [_with_replacement(first, self.rows - wanted, draw), _with_replacement(second, wanted, draw)]
        return torch.cat(picked).sort().values

    def counts(self, counts: Tensor, part: str) -> Tensor:
        """How many rows each client holds, given how many are its own."""
        return counts if part == "test" and self.test == "all" else self.rows * (counts > 0)


What = Annotated[All | Mixture, Field(discriminator="kind")]


def _with_replacement(rows: Tensor, wanted: int, draw: np.random.Generator) -> Tensor:
    picks = draw.integers(0, max(len(rows), 1), wanted)
    return rows[torch.from_numpy(picks)] if len(rows) else rows[:0]
