"""Fleets of clients whose answers are known, for tests that add them up by hand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtide.cohorts import Picking
from fedtide.core.base import Algorithm, Fleet, Moment, Prediction
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.data.shift import Shift
from fedtide.fleets.engines import Host, LocalEngine
from fedtide.fleets.simulated import SimulatedFleet


@dataclass(frozen=True)
class Stopwatch:
    """Client i answers after `seconds[i]`."""

    seconds: torch.Tensor

    def answers(self, ask, rows, down, up):
        return self.seconds[ask.clients]

    def round(self, asks, server=0.0):
        return float(sum(asks)) + server


def people(clients: int, each: int = 2, shift: Shift | None = None, held_out_clients: int = 0) -> Population:
    """Client i holds `each` rows of features i, labels 0 and 1 by turns, and one test row."""
    total = clients + held_out_clients
    owner = torch.arange(total).repeat_interleave(each + 1)
    rows = Rows("people", owner.float().unsqueeze(1), torch.arange(len(owner)) % 2, 2)
    starts = range(0, len(owner), each + 1)
    parts = {
        "train": Ragged.of([list(range(s, s + each)) if i < clients else [] for i, s in enumerate(starts)]),
        "val": Ragged.empty(total),
        "test": Ragged.of([[s + each] for s in starts]),
    }
    group = torch.zeros(total, dtype=torch.int64)
    return Population(rows, parts, group, ("all",), clients, shift or Shift())


def always_first(payload: Any, memories: Any, x: torch.Tensor, owner: torch.Tensor) -> Prediction:
    """Class 0 for everyone."""
    return Prediction(torch.tensor([[0.0, -5.0]]).expand(len(x), 2))


def fleet(
    works: Mapping[str, Callable[..., Any]],
    population: Population | None = None,
    *,
    predict: Callable[..., Any] = always_first,
    adapt: Callable[..., Any] | None = None,
    memory: MemoryStore | None = None,
    seconds: list[float] | None = None,
    engine: Callable[[Host], Any] = LocalEngine,
    seed: int = 0,
    sums_only: bool = False,
) -> SimulatedFleet:
    """A fleet in round 0 whose clients do these works."""
    population = population or people(8)
    memory = memory or MemoryStore(None)
    algorithm = Algorithm("handmade", None, works, None, lambda state, clients: (state, None), predict, adapt)
    clock = {} if seconds is None else {"clock": Stopwatch(torch.tensor(seconds, dtype=torch.float64))}
    host = Host(algorithm, population, seed, memory)
    made = SimulatedFleet(population, engine(host), reveals=() if sums_only else None, **clock)
    made.begin(Moment(0, 10, 0.0))
    return made


def client_of(shard: Any) -> int:
    """Whose rows these are."""
    return int(shard.x[0, 0])


# -- a cohort that a test writes down ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class By(Picking):
    """Clients that a function chooses: (rng, fleet) -> ids."""

    who: Callable[[Rng, Fleet], Tensor]
    asks: tuple[str, ...] = ()
    reveals: tuple[str, ...] = ()

    def pick(self, memo, fleet, rng, serve, among=None, m=None):
        return self.who(rng, fleet)
