"""The one loop: rounds in order, a clock that adds up, and nothing that a listener could change."""

import itertools

import pytest
import torch

from fedtide.core.base import Algorithm, Moment
from fedtide.core.loop import Start, begin, play
from fedtide.core.rng import Rng


class Clockwork:
    """A fleet that only tells the time: round r takes r + 1 seconds."""

    def __init__(self):
        self.moment, self.begun, self.clients = Moment(-9, 0), [], torch.arange(3)

    def begin(self, moment):
        self.moment = moment
        self.begun.append(moment)

    def elapsed(self):
        return float(self.moment.round + 1)


def counting() -> Algorithm:
    """Its state is the list of keys that it was given."""

    def init(fleet, rng):
        return [(fleet.moment.round, rng)]

    def round(state, fleet, rng):
        return [*state, (fleet.moment.round, rng)], {"asked": fleet.moment.round}

    return Algorithm("counting", init, {}, round, serve=None, predict=None)


def test_a_run_begins_before_round_zero_with_a_key_of_its_own():
    fleet = Clockwork()
    start = begin(counting(), fleet, seed=5, rounds=8)
    assert start == Start([(-1, Rng(5).at(-1, "server"))], 0, 0.0)
    assert fleet.begun == [Moment(-1, 8, 0.0)]


def test_every_round_gets_its_moment_its_key_and_the_state_before_it():
    fleet = Clockwork()
    steps = list(play(counting(), fleet, begin(counting(), fleet, seed=5, rounds=3), seed=5, rounds=3))
    assert [step.moment for step in steps] == [Moment(0, 3, 0.0), Moment(1, 3, 1.0), Moment(2, 3, 3.0)]
    assert [step.seconds for step in steps] == [1.0, 3.0, 6.0]
    assert [step.facts for step in steps] == [{"asked": 0}, {"asked": 1}, {"asked": 2}]
    assert steps[-1].state == [(number, Rng(5).at(number, "server")) for number in (-1, 0, 1, 2)]
    for before, after in itertools.pairwise(steps):
        assert after.received is before.state


@pytest.mark.parametrize("at", range(4))
def test_going_on_from_any_round_is_as_if_one_had_never_stopped(at):
    fleet = Clockwork()
    whole = list(play(counting(), fleet, begin(counting(), fleet, seed=0, rounds=4), seed=0, rounds=4))
    if at == 0:
        start = begin(counting(), Clockwork(), seed=0, rounds=4)
    else:
        start = Start(whole[at - 1].state, at, whole[at - 1].seconds, whole[at - 1].moment.seconds)
    assert list(play(counting(), Clockwork(), start, seed=0, rounds=4)) == whole[at:]


def test_whoever_listens_may_move_the_fleet_without_changing_what_comes():
    def listened(meddle):
        fleet = Clockwork()
        out = []
        for step in play(counting(), fleet, Start([]), seed=0, rounds=4):
            out.append(step)
            if meddle:
                fleet.begin(Moment(99, 100, 1e9))
        return out

    assert listened(False) == listened(True)


@pytest.mark.parametrize(("moment", "progress"), [
    (Moment(-1, 10), 0.0), (Moment(0, 10), 0.0), (Moment(5, 10), 0.5), (Moment(10, 10), 1.0), (Moment(3, 0), 3.0),
])  # fmt: skip
def test_progress_is_the_share_of_rounds_that_is_over(moment, progress):
    assert moment.progress == progress
