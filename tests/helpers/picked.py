"""A cohort that a test writes down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedtide.cohorts import Picking
from fedtide.core.base import Fleet
from fedtide.core.rng import Rng


@dataclass(frozen=True)
class By(Picking):
    """Clients that a function chooses: (rng, fleet) -> ids."""

    who: Callable[[Rng, Fleet], Tensor]
    asks: tuple[str, ...] = ()
    reveals: tuple[str, ...] = ()

    def pick(self, memo, fleet, rng, serve, among=None, m=None):
        return self.who(rng, fleet)
