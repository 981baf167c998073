"""What known events do to a curve, and whether a method that clusters anew notices them.

An event at round r changes what clients hold from round r on, so what was judged after r rounds or fewer is from before
it. The interval of an event lasts until the next one, or until the end of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedtide.evaluate.metrics import Curve

SLACK = 0.01
"""How far below the level before an event a curve may stay and yet be back: a point."""


@dataclass(frozen=True)
class Fall:
    """What became of a curve at an event.

    event: its round. before: the last value before it. lowest: the lowest in its interval. rounds: from the event until
    the curve is back within `SLACK` of before, 0 where it never left; the length of the interval where it does not come
    back. back: whether it does.
    """

    event: int
    before: float
    lowest: float
    rounds: float
    back: bool

    @property
    def depth(self) -> float:
        """How far it fell; below zero where it only rose."""
        return self.before - self.lowest


def intervals(events: Sequence[int], rounds: int) -> Iterator[tuple[int, int]]:
    """Each event after round 0, once, with the end of its interval.

    >>> [*intervals([0, 4, 4, 10], 12)]
    [(4, 10), (10, 12)]
    """
    return pairwise([*sorted({event for event in events if 0 < event < rounds}), rounds])


def falls(after: Curve, values: Curve, events: Sequence[int], rounds: int) -> list[Fall]:
    """The fall and the recovery at each event; events without a value before and one in their interval are left out.

    A curve is back at the first value within `SLACK` of that before the event, from the lowest one on.

    Args:
        after: rounds done at each value.
        values: of accuracy.
        events: rounds of the events.
        rounds: how many the run has.

    >>> falls([2, 4, 6, 8], [0.8, 0.5, 0.6, 0.795], events=[3], rounds=8)
    [Fall(event=3, before=0.8, lowest=0.5, rounds=5, back=True)]
    """
    found = []
    points = list(zip((int(at) for at in after), (float(value) for value in values), strict=True))
    for event, end in intervals(events, rounds):
        earlier = [value for at, value in points if at <= event]
        inside = [(at, value) for at, value in points if event < at <= end]
        if not earlier or not inside:
            continue
        before, lowest = earlier[-1], min(value for _, value in inside)
        bottom = next(at for at, value in inside if value == lowest)
        back = [at for at, value in inside if at >= bottom and value >= before - SLACK]
        lasted = end - event if not back else 0 if back[0] == bottom else back[0] - event
        found.append(Fall(event, before, lowest, lasted, bool(back)))
    return found


@dataclass(frozen=True)
class Noticed:
    """How events were met.

    delays: for each event the rounds until the first reaction in its interval; infinity where there was none.
    false_alarms: reactions before the first event, and those in an interval beyond the first.
    """

    delays: list[float]
    false_alarms: int

    @property
    def detected(self) -> float:
        """The share of events that were met at all; NaN without events."""
        return sum(map(math.isfinite, self.delays)) / len(self.delays) if self.delays else math.nan


def noticed(reactions: Sequence[int], events: Sequence[int], rounds: int) -> Noticed:
    """How events were met by reactions, such as re-clusterings, all given by their rounds.

    >>> noticed([1, 10, 14, 33], events=[10, 20, 30], rounds=40)
    Noticed(delays=[0, inf, 3], false_alarms=2)
    """
    delays: list[float] = []
    for event, end in intervals(events, rounds):
        met = [at for at in reactions if event <= at < end]
        delays.append(min(met) - event if met else math.inf)
    return Noticed(delays, len(reactions) - sum(map(math.isfinite, delays)))
