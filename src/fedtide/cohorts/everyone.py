"""Everyone: all reachable clients."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fedtide.cohorts.protocol import Patience, Picking, Serve
from fedtide.core.base import Fleet
from fedtide.core.rng import Rng
from fedtide.fields.types import ingredient


@ingredient
class Everyone(Picking):
    """All clients that are reachable now."""

    deadline: Patience | None = None
    kind: Literal["everyone"] = "everyone"

    def pick(
        self, memo: None, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor | None = None, m: int | None = None
    ) -> Tensor:
        """Return all clients of `among`."""
        return fleet.reachable if among is None else among
