"""Chains of events: the same states in any order of asking, few of them kept, no more events than can be drawn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.shift import Shift
from fedtide.data.shift.chain import KEPT, MOST, Chain, check_events
from fedtide.data.shift.how import LabelSwaps
from fedtide.data.shift.what import ChangePoints, ClusterDrift
from fedtide.data.shift.what.cluster_drift import ClusterDriftPlan
from fedtide.runs.build import population_of
from helpers.studies import A, study


@given(st.lists(st.integers(0, 60), max_size=40))
def test_a_state_does_not_depend_on_what_was_asked_before(numbers):
    chain = Chain(lambda: (), lambda state, number: (*state, number), "every")
    assert [chain[number] for number in numbers] == [tuple(range(1, number + 1)) for number in numbers]
    assert len(chain._kept) <= KEPT


def test_rounds_in_order_draw_every_event_once():
    drawn = []
    chain = Chain(lambda: 0, lambda state, number: drawn.append(number) or state + 1, "every")
    for number in range(50):
        assert (chain[number], chain[max(number - 1, 0)]) == (number, max(number - 1, 0))
    assert drawn == [*range(1, 50)]


@pytest.mark.parametrize("number", [MOST + 1, float("inf"), float("nan")])
def test_too_many_events_are_one_line(number):
    with pytest.raises(FedtideError, match=r"shift.what.every: it makes .* events, allowed: at most 100000"):
        check_events(number, "shift.what.every")


SHIFTS = [
    Shift(what=ChangePoints(when={"kind": "drawn", "every": 2})),
    Shift(what=ClusterDrift(groups=2, labels=1, every=2, events=(3, 8))),
    Shift(how=LabelSwaps(every=2)),
    Shift(how=LabelSwaps(every=2, concepts=2)),
]


@pytest.mark.parametrize("shift", SHIFTS, ids=["changes", "drift", "private swaps", "shared swaps"])
def test_what_a_run_keeps_of_its_shift_does_not_grow_with_events(shift):
    """Law 12: memory is flat over rounds."""
    experiment = study(A, data={"groups": {"by": "none"}}, shift={"who": "always"})
    population = population_of(experiment, shift, 0)
    chain = {
        "change-points": lambda: population.plan._drawn,
        "cluster-drift": lambda: population.plan._states,
        "static": lambda: getattr(population.row_transform, "_tables", None) or population.row_transform._groups,
    }[shift.what.kind]
    for number in range(1, 60):
        now, before = Moment(number, 60), Moment(number - 1, 60)
        population.changed(now, before)
        population.group_at(now)
    assert 1 < len(chain()._kept) <= KEPT


@given(st.lists(st.floats(0.5, 20), max_size=4, unique=True), st.sampled_from([0.7, 2, 3.0]))
def test_events_of_a_drift_are_numbered_in_the_order_of_their_times(events, every):
    trace = ClusterDriftPlan(ClusterDrift(groups=2, labels=1, every=every, events=tuple(events)), None)
    assert [trace._when(n) for n in range(1, trace.number(20.0) + 1)] == trace._events(20.0)
