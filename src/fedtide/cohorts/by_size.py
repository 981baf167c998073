"""By size: clients with many rows more often."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from fedtide.cohorts.draw import Known, by_size, chosen, sizes
from fedtide.cohorts.protocol import Patience, Served, asked
from fedtide.core.config_types import AtLeastOne, Count, ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Fleet, Moment, Reply


@ingredient
class BySize:
    """With probability proportional to the rows that a client said it has, without replacement.

    A client that said nothing is taken to have as many as the others on average.

    Args:
        clients_per_round: how many count.
        over_selection: ask so many times more to train, and count the first `clients_per_round` that answer; `simulate`
            has `first` for that.
        deadline: count only those who answer within so many seconds of the simulated clock, inf for all;
            `simulate` has its own.
    """

    clients_per_round: Count = 10
    over_selection: AtLeastOne = 1.0
    deadline: Patience | None = None
    kind: Literal["by-size"] = "by-size"
    asks: ClassVar[tuple[str, ...]] = ("count",)
    reveals: ClassVar[tuple[str, ...]] = ()

    def init(self, fleet: Fleet) -> Known:
        """How many rows those clients have that are reachable before round 0."""
        return sizes(fleet)

    def pick(
        self,
        memo: Known,
        fleet: Fleet,
        rng: Rng,
        served: Served | None,
        among: Tensor | None = None,
        m: int | None = None,
    ) -> Tensor:
        """`m` clients of `among`, sorted; all of them where there are no more."""
        among = fleet.reachable if among is None else among
        return chosen(among, by_size(memo, among), asked(self) if m is None else m, rng.at("select"))

    def learn(self, memo: Known, reply: Reply, moment: Moment) -> Known:
        """Return the memo as it is: nothing is learned."""
        return memo
