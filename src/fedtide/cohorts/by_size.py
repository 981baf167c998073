"""By size: clients with many samples are selected more often."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from fedtide.cohorts.draw import Known, ask_sizes, by_size, draw_clients
from fedtide.cohorts.protocol import Serve, Sized
from fedtide.core.base import Fleet
from fedtide.core.rng import Rng
from fedtide.fields.types import ingredient


@ingredient
class BySize(Sized):
    """Selection with probability proportional to the reported number of samples, without replacement.

    A client that reported nothing counts as having the mean of the others.
    """

    kind: Literal["by-size"] = "by-size"
    asks: ClassVar[tuple[str, ...]] = ("count",)

    def init(self, fleet: Fleet) -> Known:
        """Ask the clients that are reachable before round 0 for their number of samples."""
        return ask_sizes(fleet)

    def pick(
        self, memo: Known, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor | None = None, m: int | None = None
    ) -> Tensor:
        """Return `m` clients of `among`, sorted; all if there are no more."""
        among = fleet.reachable if among is None else among
        return draw_clients(among, by_size(memo, among), self.asked() if m is None else m, rng.at("select"))
