"""Everyone: all reachable clients."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from fedtide.cohorts.protocol import Patience, Served
from fedtide.core.config_types import ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Fleet, Moment, Reply


@ingredient
class Everyone:
    """Every client that is reachable now.

    Args:
        deadline: seconds of the simulated clock after which answers do not count, inf for none; `simulate` has its own.
    """

    deadline: Patience | None = None
    kind: Literal["everyone"] = "everyone"
    asks: ClassVar[tuple[str, ...]] = ()
    reveals: ClassVar[tuple[str, ...]] = ()

    def init(self, fleet: Fleet) -> None:
        """Return None: there is no memo."""

    def pick(
        self,
        memo: None,
        fleet: Fleet,
        rng: Rng,
        served: Served | None,
        among: Tensor | None = None,
        m: int | None = None,
    ) -> Tensor:
        """Return all clients of `among`."""
        return fleet.reachable if among is None else among

    def learn(self, memo: None, reply: Reply, moment: Moment) -> None:
        """Return None: there is no memo."""
