"""The schedule of real clients: who takes part, when rounds begin, and until when answers count."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

import torch
from torch import Tensor

from fedtide.cohorts.selection import draw_clients
from fedtide.core.base import Moment
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.data.population import Population
from fedtide.fields.types import zone_of
from fedtide.remote.messages import Carrier


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
        """Return the clients that the simulation could reach."""
        return self.population.reachable(moment)

    def arrivals(self, m: int, present: Tensor, moment: Moment) -> Tensor:
        """Draw as the simulation does."""
        return self.population.arrivals(m, moment)

    def answers(self, clients: Tensor, moment: Moment, number: int) -> Tensor:
        """Return the mask of the clients that do not drop out in the simulation."""
        return self.population.answers(clients, moment, number)


Who = Present | Rehearsed
"""Which of the clients that are present take part."""


@dataclass(eq=False)
class Attendance:
    """The clients of a roster that are present in a round, and those of them that may take part.

    Args:
        carrier: the way to the nodes.
        roster: ids of the clients of each node, by its name; in all 0 to n-1.
        who: draws who takes part.

    Attributes:
        present: ids of the clients whose nodes are present, sorted.
        willing: ids of those that are not left out.
    """

    carrier: Carrier
    roster: Mapping[str, Sequence[int]]
    who: Who

    def __post_init__(self) -> None:
        self.enroll()
        self.present = self.willing = torch.empty(0, dtype=torch.int64)

    def enroll(self) -> None:
        """Read the roster, which may have grown.

        Raises:
            FedtideError: its ids are not 0 to n-1, each at one node.
        """
        ids = sorted(client for clients in self.roster.values() for client in clients)
        if ids != list(range(len(ids))):
            raise refused("roster", ids, "client ids from 0 on, each at one node")
        self.node_of = {client: name for name, clients in self.roster.items() for client in clients}

    def look(self) -> int:
        """Note who is present now, and return how many clients that are."""
        ids = sorted(client for name in self.carrier.present() for client in self.roster.get(name, ()))
        self.present = self.willing = torch.tensor(ids, dtype=torch.int64)
        return len(ids)

    def leave_out(self, clients: set[int], fewest: int) -> None:
        """Leave some clients out, if enough others are present."""
        others = [client for client in self.present.tolist() if client not in clients]
        if len(others) >= fewest:
            self.willing = torch.tensor(others, dtype=torch.int64)

    @property
    def clients(self) -> int:
        """Number of clients in the roster."""
        return len(self.node_of)


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

    So a time of the day is the same number on every day, also with daylight saving. A period of a day is 86,400
    seconds. If clocks are set back, the run's clock stands still.

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
        """Wait for the time of the round; if that is long over, since the server was away, return the time now.

        A clock that was set back makes it wait for one round's length at most.
        """
        waited, most = 0.0, self.every or 0.0
        while moment.round >= 0 and (left := min(moment.seconds - self.seconds(), most - waited)) > 0:
            self.sleep(min(left, 60.0))  # clocks may be set meanwhile
            waited += min(left, 60.0)
        return max(moment.seconds, self.seconds())

    def elapsed(self, moment: Moment) -> float:
        """Return the seconds until the next round begins; those before round 0 take none."""
        now = self.seconds()
        if moment.round < 0 or now < moment.seconds:  # the clock was set back, and stands still
            return 0.0
        if self.every is not None:
            now = self.every * max(math.ceil(now / self.every), math.floor(moment.seconds / self.every) + 1)
        return now - moment.seconds

    def answered(self, seconds: float) -> float:
        """Return the seconds that it took."""
        return seconds


RealClock = RoundClock | WallClock
"""The clock of a run on real clients."""
