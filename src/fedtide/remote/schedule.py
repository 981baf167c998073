"""Clocks of runs on real clients: when rounds begin, and until when answers count."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fedtide.cohorts.sampling import draw_clients
from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.data.population import Population
from fedtide.fields.types import zone_of


class Who(Protocol):
    """Which of the clients that are present take part."""

    def reachable(self, present: Tensor, moment: Moment) -> Tensor:
        """Return the clients that could answer now, sorted."""

    def arrivals(self, m: int, present: Tensor, moment: Moment) -> Tensor:
        """Draw `m` of them, sorted."""

    def answers(self, clients: Tensor, moment: Moment, number: int) -> Tensor:
        """Return the mask (clients,) of those that are sent question `number` of the round at all."""


@dataclass(frozen=True)
class Present:
    """All clients whose nodes are there; arrivals are drawn among them uniformly, from (seed, round)."""

    seed: int

    def reachable(self, present: Tensor, moment: Moment) -> Tensor:
        """Return all who are present."""
        return present

    def arrivals(self, m: int, present: Tensor, moment: Moment) -> Tensor:
        """Draw `m` of them; all if there are no more."""
        return draw_clients(present, torch.zeros(len(present)), m, Rng(self.seed).at(moment.round, "arrivals"))

    def answers(self, clients: Tensor, moment: Moment, number: int) -> Tensor:
        """Return a mask of all."""
        return torch.ones(len(clients), dtype=torch.bool)


@dataclass(frozen=True)
class Rehearsed:
    """The clients that a simulation draws from (seed, round), present or not."""

    population: Population

    def reachable(self, present: Tensor, moment: Moment) -> Tensor:
        """Return those that the simulation could reach."""
        return self.population.reachable(moment)

    def arrivals(self, m: int, present: Tensor, moment: Moment) -> Tensor:
        """Draw as the simulation does."""
        return self.population.arrivals(m, moment)

    def answers(self, clients: Tensor, moment: Moment, number: int) -> Tensor:
        """Return those that do not drop out in the simulation."""
        return self.population.answers(clients, moment, number)


class RealClock(Protocol):
    """The clock of a run on real clients."""

    def monotonic(self) -> float:
        """Return seconds on a clock that is never set, for deadlines."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""

    def begin(self, moment: Moment) -> float:
        """Wait until a round may begin; return the time at which it does."""

    def elapsed(self, moment: Moment) -> float:
        """Return the seconds from a moment until the round after it may begin."""

    def answered(self, seconds: float) -> float:
        """Return what the record says of an answer that took so many seconds."""


@dataclass(frozen=True)
class RoundClock:
    """A clock whose rounds all take equally long, as the simulation's: what a rehearsal is compared by."""

    seconds: float = 1.0
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def begin(self, moment: Moment) -> float:
        """Return the time that it should be."""
        return moment.seconds

    def elapsed(self, moment: Moment) -> float:
        """Return the seconds of a round; 0 before round 0."""
        return self.seconds if moment.round >= 0 else 0.0

    def answered(self, seconds: float) -> float:
        """Return the seconds of a round."""
        return self.seconds


@dataclass(frozen=True)
class WallClock:
    """A clock of the day in a time zone: seconds of a run are counted from a midnight there.

    So a time of the day is the same number on every day, daylight saving or not, and a period of a day is one of
    86,400 seconds. Where clocks are set back, the run's clock stands still.

    Args:
        since: seconds since the epoch of the moment at which the run was set up; it counts from the midnight before.
        zone: name of the time zone, such as "Europe/Berlin".
        every: seconds between the beginnings of rounds, at multiples counted from midnight. A round that takes longer,
            or a server that was away, leaves some out. None begins each round when the one before is over.
        now: returns seconds since the epoch.
    """

    since: float
    zone: str = "UTC"
    every: float | None = None
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @cached_property
    def _midnight(self) -> datetime:
        return self._local(self.since).replace(hour=0, minute=0, second=0, microsecond=0)

    def _local(self, seconds: float) -> datetime:
        return datetime.fromtimestamp(seconds, zone_of(self.zone)).replace(tzinfo=None)

    def seconds(self) -> float:
        """Return the seconds since the run's midnight, by the clocks of the zone."""
        return (self._local(self.now()) - self._midnight) / timedelta(seconds=1)

    def begin(self, moment: Moment) -> float:
        """Wait for the time of the round; where that is long over, since the server was away, return the time now."""
        while moment.round >= 0 and (left := moment.seconds - self.seconds()) > 0:
            self.sleep(min(left, 60.0))  # clocks may be set meanwhile
        return max(moment.seconds, self.seconds())

    def elapsed(self, moment: Moment) -> float:
        """Return the seconds until the next round begins; those before round 0 take none."""
        if moment.round < 0:
            return 0.0
        now = max(self.seconds(), moment.seconds)
        if self.every is not None:
            now = self.every * max(math.ceil(now / self.every), math.floor(moment.seconds / self.every) + 1)
        return now - moment.seconds

    def answered(self, seconds: float) -> float:
        """Return the seconds that it took."""
        return seconds
