"""Shift = who, what, how: which clients are there, which rows they hold, and what the rows mean at a moment.

Three independent parts, each a pure function of (clients, moment, seed), that compose freely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from fedtide.core.config_types import Spelled, ingredient
from fedtide.core.types import Moment
from fedtide.data.shift.how import How, Identity
from fedtide.data.shift.what import Rhythm, Static, What
from fedtide.data.shift.who import Always, Who


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
    what: Annotated[What, Spelled] = Static()
    how: Annotated[How, Spelled] = Identity()
    clock: Literal["rounds", "seconds"] = "rounds"

    @property
    def period(self) -> float | None:
        """Rounds after which the arrivals repeat; None where they do not."""
        return self.rhythm(1).get("period")

    def cycle(self, rounds: int) -> float | None:
        """Rounds after which what a client holds repeats, in a run of so many; None where it does not."""
        return self.what.rhythm(rounds).get("cycle")

    @property
    def drifts(self) -> bool:
        """Whether what clients hold, or what it means, changes at events, so that it can be said who drifted."""
        return self.what.drifts or self.how.drifts

    def rhythm(self, rounds: int, turns: int = 2) -> Rhythm:
        """What a method could know of the rhythm, in a run of so many rounds, with so many turns in a period.

        A period in seconds says nothing about rounds.
        """
        return (self.who.rhythm(turns) if self.clock == "rounds" else {}) | self.what.rhythm(rounds)

    def words(self, groups: Sequence[str], domains: Sequence[str], rounds: int) -> str:
        """What changes with time, as sentences for a report."""
        until = rounds if self.clock == "rounds" else math.inf
        return self.what.words(domains, self.clock, until) + self.how.words(groups, self.clock)

    def time(self, moment: Moment) -> float:
        """The moment on the shift's clock."""
        return float(moment.round) if self.clock == "rounds" else moment.seconds
