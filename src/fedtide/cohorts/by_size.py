"""By size: clients with many samples are selected more often."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from fedtide.cohorts.draw import Known, ask_sizes, by_size, draw_clients
from fedtide.cohorts.protocol import Memoless, Patience, Serve, asked
from fedtide.core.config_types import AtLeastOne, Count, ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Fleet


@ingredient
class BySize(Memoless):
    """Selection with probability proportional to the reported number of samples, without replacement.

    A client that reported nothing counts as having the mean of the others.

    Args:
        clients_per_round: number of clients whose answers count.
        over_selection: factor on the clients asked to train; the first `clients_per_round` answers count; `simulate`
            has `first` for that.
        deadline: seconds of the simulated clock after which answers do not count, inf for none; `simulate` has its own.
    """

    clients_per_round: Count = 10
    over_selection: AtLeastOne = 1.0
    deadline: Patience | None = None
    kind: Literal["by-size"] = "by-size"
    asks: ClassVar[tuple[str, ...]] = ("count",)

    def init(self, fleet: Fleet) -> Known:
        """Ask the clients that are reachable before round 0 for their number of samples."""
        return ask_sizes(fleet)

    def pick(
        self,
        memo: Known,
        fleet: Fleet,
        rng: Rng,
        serve: Serve,
        among: Tensor | None = None,
        m: int | None = None,
    ) -> Tensor:
        """Return `m` clients of `among`, sorted; all if there are no more."""
        among = fleet.reachable if among is None else among
        return draw_clients(among, by_size(memo, among), asked(self) if m is None else m, rng.at("select"))
