"""Effects of known events: the fall of a curve, its recovery, and the detection by methods that re-cluster.

An event at round r changes the clients' data from round r on, so an evaluation after r rounds or fewer precedes it. The
interval of an event lasts until the next event, or until the end of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedtide.evaluate.metrics import Curve

SLACK = 0.01
"""Distance below the level before an event within which a curve counts as recovered: one percentage point."""


@dataclass(frozen=True)
class Fall:
    """Fall and recovery of a curve at an event.

    event: its round. before: the last value before it. lowest: the lowest value in its interval. rounds: number of
    rounds from the event until the curve is back within `SLACK` of `before`; 0 where it never left, the length of the
    interval where it does not recover. back: true if it recovers.
    """

    event: int
    before: float
    lowest: float
    rounds: float
    back: bool

    @property
    def depth(self) -> float:
        """Depth of the fall; negative where the curve only rose."""
        return self.before - self.lowest


def intervals(events: Sequence[int], rounds: int) -> Iterator[tuple[int, int]]:
    """Yield each distinct event after round 0 with the end of its interval.

    >>> [*intervals([0, 4, 4, 10], 12)]
    [(4, 10), (10, 12)]
    """
    return pairwise([*sorted({event for event in events if 0 < event < rounds}), rounds])


def falls(after: Curve, values: Curve, events: Sequence[int], rounds: int) -> list[Fall]:
    """Return the fall and recovery at each event that has values both before it and in its interval.

    A curve is back at the first value within `SLACK` of the one before the event, from the lowest value on.

    Args:
        after: rounds done at each value.
        values: accuracies.
        events: rounds of the events.
        rounds: number of rounds of the run.

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
    """Detection of events by a method.

    delays: for each event the rounds until the first reaction in its interval; infinity without a reaction.
    false_alarms: reactions before the first event, and those in an interval beyond the first.
    """

    delays: list[float]
    false_alarms: int

    @property
    def detected(self) -> float:
        """Share of events with a reaction; NaN without events."""
        return sum(map(math.isfinite, self.delays)) / len(self.delays) if self.delays else math.nan


def noticed(reactions: Sequence[int], events: Sequence[int], rounds: int) -> Noticed:
    """Return the detection of events by reactions, such as re-clusterings; all are given by their rounds.

    >>> noticed([1, 10, 14, 33], events=[10, 20, 30], rounds=40)
    Noticed(delays=[0, inf, 3], false_alarms=2)
    """
    delays: list[float] = []
    for event, end in intervals(events, rounds):
        met = [at for at in reactions if event <= at < end]
        delays.append(min(met) - event if met else math.inf)
    return Noticed(delays, len(reactions) - sum(map(math.isfinite, delays)))
