"""Falls and recoveries at known events, delays and false alarms, by hand."""

from __future__ import annotations

import math

import pytest

from fedtide.evaluate.events import Fall, Noticed, falls, intervals, noticed

AFTER = [2, 4, 6, 8, 10, 12]


def test_an_interval_lasts_until_the_next_event_or_the_end():
    assert [*intervals([8, 3, 3], 12)] == [(3, 8), (8, 12)]
    # What begins at round 0 was never otherwise, and what comes after the end never happens.
    assert [*intervals([0, 12, 20], 12)] == []


def test_falls_by_hand():
    """Event 4: what was judged after four rounds is from before it. It falls by 0.3, and is back at 8, four later.

    Event 9: 0.795 before it, 0.7 at the lowest, and never back in the three rounds that are left.
    """
    values = [0.7, 0.8, 0.5, 0.795, 0.7, 0.75]
    first, second = falls(AFTER, values, [4, 9], 12)
    assert first == Fall(4, 0.8, 0.5, 4, True)
    assert first.depth == pytest.approx(0.3)
    assert second == Fall(9, 0.795, 0.7, 3, False)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, 0.5, 0.6, 0.7, 0.8, 0.9], Fall(5, 0.5, 0.6, 0, True)),  # only rises
        ([0.5, 0.5, 0.495, 0.6, 0.6, 0.6], Fall(5, 0.5, 0.495, 0, True)),  # within a point all the time
        ([0.5, 0.5, 0.5, 0.4, 0.3, 0.5], Fall(5, 0.5, 0.3, 7, True)),  # falls slowly: back from the lowest on
        ([0.5, 0.5, 0.3, 0.5, 0.3, 0.4], Fall(5, 0.5, 0.3, 3, True)),  # of two lowest the first
    ],
)
def test_the_shapes_of_a_fall(values, expected):
    assert falls(AFTER, values, [5], 12) == [expected]


def test_an_event_that_was_not_judged_on_both_sides_is_left_out():
    assert falls([4, 8], [0.5, 0.4], [2], 8) == []  # nothing before
    assert [fall.event for fall in falls([4, 8], [0.5, 0.4], [5, 6], 8)] == [6]  # nothing between 5 and 6
    assert falls([], [], [5], 8) == []


def test_delays_and_false_alarms_by_hand():
    """Reactions at 1 (before any event), 10 (at once), 14 (a second one), 33 (three late); nobody noticed event 20."""
    met = noticed([1, 10, 14, 33], [10, 20, 30], 40)
    assert met == Noticed([0, math.inf, 3], 2)
    assert met.detected == pytest.approx(2 / 3)


def test_without_reactions_or_events():
    assert noticed([], [10], 40) == Noticed([math.inf], 0)
    assert noticed([3], [], 40).false_alarms == 1
    assert math.isnan(noticed([3], [], 40).detected)
