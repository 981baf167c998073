"""Shift = who, what, how: the available clients, the rows that they hold, and the meaning of these rows over time.

The three parts are independent, compose freely, and each is a pure function of (clients, moment, seed).

>>> import fedtide as ft
>>> ft.Shift(who=ft.shift.Periodic(period=8), how=ft.shift.Rotation(angles=(0, 90))).period
8.0
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fedtide.core.base import Moment
from fedtide.data.shift.arrival import Calendar, Labels, Order, Stream, Time
from fedtide.data.shift.changes import Cycle, Drawn, File, Planned
from fedtide.data.shift.concept_drift import ChangePoints, ClusterDrift, Domains, LabelBanks, LabelShares, MassEvents
from fedtide.data.shift.how import (
    Concept,
    ConceptDrift,
    DrawnConcepts,
    How,
    Identity,
    LabelSwaps,
    Permutation,
    ReadBy,
    Rotation,
)
from fedtide.data.shift.what import DomainMixture, HeldBy, Python, Rhythm, Static, read_own
from fedtide.data.shift.who import Always, Availability, AwakeBy, BlockCyclic, Data, Periodic, Replay
from fedtide.fields.types import Spelled, ingredient

__all__ = [
    "Always", "Availability", "AwakeBy", "BlockCyclic", "Calendar", "ChangePoints", "ClusterDrift", "Concept",
    "ConceptDrift", "Cycle", "Data", "DomainMixture", "Domains", "Drawn", "DrawnConcepts", "File", "HeldBy", "How",
    "Identity", "LabelBanks", "LabelShares", "LabelSwaps", "Labels", "MassEvents", "Order", "Periodic", "Permutation",
    "Planned", "Python", "ReadBy", "Replay", "Rotation", "Shift", "Static", "Stream", "Time", "What", "Who",
]  # fmt: skip

What = Annotated[
    Static | DomainMixture | Stream | Calendar | ClusterDrift | ChangePoints | Python,
    Field(discriminator="kind"),
    BeforeValidator(read_own),
]
Who = Annotated[
    Always | Data | Periodic | BlockCyclic | Availability | Replay | Python,
    Field(discriminator="kind"),
    BeforeValidator(read_own),
]


@ingredient
class Shift:
    """Settings of the change over time.

    Args:
        who: the available clients, and those that arrive in a round.
        what: the rows that a client holds.
        how: the meaning of the rows.
        clock: the unit of time of all three, "rounds" or "seconds", which needs `devices`; a mixture and a calendar
            always count rounds.
    """

    who: Annotated[Who, Spelled] = Always()
    what: Annotated[What, Spelled] = Static()
    how: Annotated[How, Spelled] = Identity()
    clock: Literal["rounds", "seconds"] = "rounds"

    def __post_init__(self) -> None:
        if self.clock == "rounds" and (period := self.who.rhythm(1).get("period", 1.0)) < 1:
            raise ValueError(f"found who.period {period:g}, allowed: 1 round or more (clock = 'rounds')")

    @property
    def period(self) -> float | None:
        """Rounds after which the arrivals repeat; None if they do not."""
        return self.rhythm(1).get("period")

    def cycle(self, rounds: int) -> float | None:
        """Return the rounds after which the rows of a client repeat, in a run of `rounds`; None if they do not."""
        return self.what.rhythm(rounds).get("cycle")

    @property
    def drifts(self) -> bool:
        """Tell whether rows or labels change at events, so that the clients that drifted are known."""
        return self.what.drifts or self.how.drifts

    def rhythm(self, rounds: int, turns: int = 2) -> Rhythm:
        """Return the rhythm that a method may know, in a run of `rounds` with a number of turns per period.

        A period in seconds says nothing about rounds.
        """
        return (self.who.rhythm(turns) if self.clock == "rounds" else {}) | self.what.rhythm(rounds, turns)

    def words(self, groups: Sequence[str], domains: Sequence[str], rounds: int) -> str:
        """Describe the change over time in sentences for a report."""
        until = rounds if self.clock == "rounds" else math.inf
        return self.what.words(domains, self.clock, until) + self.how.words(groups, self.clock)

    def time(self, moment: Moment) -> float:
        """Return the moment on the shift's clock."""
        return float(moment.round) if self.clock == "rounds" else moment.seconds
