"""The one loop."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol

from fedtide.core.base import Algorithm, Facts, Moment, S, Simulation
from fedtide.core.rng import Rng
from fedtide.core.trees import grown


class Playable(Simulation, Protocol):
    """A simulation that the loop can move through time."""

    def begin(self, moment: Moment) -> None:
        """Enter a moment: a new round, with its own arrivals, data and keys."""

    def elapsed(self) -> float:
        """Seconds from the beginning of the round to that of the next one, on the simulated or real clock."""


@dataclass(frozen=True)
class Step(Generic[S]):
    """Result of one round: the state it received, the state it made, its facts, and the clock when it ended.

    before: the clock when the round before began.
    """

    moment: Moment
    received: S
    state: S
    facts: Facts
    seconds: float
    before: float = 0.0


@dataclass(frozen=True)
class Start(Generic[S]):
    """Starting point: the first state, the round to play next, and the clock, now and when the round before began."""

    state: S
    round: int = 0
    seconds: float = 0.0
    before: float = 0.0


def begin(algorithm: Algorithm[S], fleet: Playable, *, seed: int, rounds: int) -> Start[S]:
    """The start of a run: the algorithm's first state (it may ask), and what it collects before round 0."""
    fleet.begin(Moment(-1 - algorithm.traits.before, rounds, 0.0))
    # The key does not depend on `before`: all methods of a seed begin with the same weights.
    state = algorithm.init(fleet, Rng(seed).at(-1, "server"))
    for number in range(-algorithm.traits.before, 0):
        fleet.begin(Moment(number, rounds, 0.0))
        state, _ = algorithm.round(grown(state, len(fleet.clients)), fleet, Rng(seed).at(number, "before"))
    return Start(state, 0, fleet.moment.seconds + fleet.elapsed())


def play(algorithm: Algorithm[S], fleet: Playable, start: Start[S], *, seed: int, rounds: int) -> Iterator[Step[S]]:
    """Play the rounds from `start` on, one Step at a time.

    The caller records, evaluates, saves and stops as it likes; nothing it does can change what comes next.
    """
    state, seconds, before = start.state, start.seconds, start.before
    for number in range(start.round, rounds):
        moment = Moment(number, rounds, seconds)
        fleet.begin(moment)
        received = grown(state, len(fleet.clients))
        state, facts = algorithm.round(received, fleet, Rng(seed).at(number, "server"))
        seconds = fleet.moment.seconds + fleet.elapsed()  # a real clock may have begun the round later
        yield Step(moment, received, state, facts, seconds, before)
        before = moment.seconds
