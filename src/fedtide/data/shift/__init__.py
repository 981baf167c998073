"""Shift = who, what, how: which clients are there, which rows they hold, and what the rows mean at a moment.

Three independent parts, each a pure function of (clients, moment, seed), that compose freely.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fedtide.core.config_types import Spelled, ingredient
from fedtide.core.types import Moment
from fedtide.data.shift.how import How, Identity, Swaps
from fedtide.data.shift.what import All, Mixture, Stream, What
from fedtide.data.shift.who import Always, Periodic, Who


@ingredient
class Shift:
    """What changes with time.

    Args:
        who: which clients are there, and who arrives in a round.
        what: which of its rows a client holds.
        how: what the rows mean.
        clock: whether all three read "rounds" or "seconds"; a mixture counts rounds in any case.
    """

    who: Annotated[Who, Spelled] = Always()
    what: Annotated[What, Spelled] = All()
    how: Annotated[How, Spelled] = Identity()
    clock: Literal["rounds", "seconds"] = "rounds"

    @property
    def period(self) -> float | None:
        """Rounds after which the arrivals repeat; None where they do not."""
        return self.who.period if isinstance(self.who, Periodic) and self.clock == "rounds" else None

    def cycle(self, rounds: int) -> float | None:
        """Rounds after which what a client holds repeats, in a run of so many; None where it does not."""
        return self.what.cycle(rounds) if isinstance(self.what, Mixture) else None

    @property
    def drifts(self) -> bool:
        """Whether what clients hold, or what it means, changes at events, so that it can be said who drifted."""
        still = isinstance(self.what, Stream) and self.what.static
        return (self.what.kind not in ("all", "mixture") and not still) or isinstance(self.how, Swaps)

    def time(self, moment: Moment) -> float:
        """The moment on the shift's clock."""
        return float(moment.round) if self.clock == "rounds" else moment.seconds
