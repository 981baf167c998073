"""Clients whose rows change from round to round, by hand: a population for each round, one memory for all."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.core.base import Algorithm, Facts, Moment
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.fleets.engines import Host, LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task

Held = Sequence[tuple[Tensor, Tensor]]
"""x and y of each client."""


def holding(clients: Held, *, classes: int, before: int = 0, registered: int | None = None) -> Population:
    """Clients with these rows; `before` is the number of the first sample, so that other rows have other ids."""
    before = max(before, 1)  # some row there must be
    x, y = (torch.cat([client[part] for client in clients]) for part in (0, 1))
    x, y = (torch.cat([torch.zeros(before, *part.shape[1:], dtype=part.dtype), part]) for part in (x, y))
    starts = [before]
    for own, _ in clients:
        starts.append(starts[-1] + len(own))
    lists = Ragged.of([list(range(a, b)) for a, b in pairwise(starts)])
    nothing, group = Ragged.empty(len(clients)), torch.zeros(len(clients), dtype=torch.int64)
    parts = {"train": lists, "val": nothing, "test": nothing}
    return Population(Rows("stages", x, y, classes=classes), parts, group, ("all",), registered or len(clients))


def begun(algorithm: Algorithm, first: Population) -> tuple[Any, MemoryStore, SimulatedFleet]:
    """The first state, with what clients keep and the fleet that was asked."""
    memory = MemoryStore(None)
    fleet = SimulatedFleet(first, LocalEngine(Host(algorithm, first, 0, memory)), reveals=algorithm.traits.reveals)
    fleet.begin(Moment(-1, 1, 0.0))
    return algorithm.init(fleet, Rng(0).at(-1, "server")), memory, fleet


def rounds(algorithm: Algorithm, stages: Sequence[Population]) -> Iterator[tuple[Any, Facts, SimulatedFleet]]:
    """The state, the facts and the fleet after each round, of which each has a population of its own."""
    state, memory, _ = begun(algorithm, stages[0])
    for number, who in enumerate(stages):
        engine = LocalEngine(Host(algorithm, who, 0, memory))
        fleet = SimulatedFleet(who, engine, reveals=algorithm.traits.reveals)
        fleet.begin(Moment(number, len(stages), 0.0))
        state, facts = algorithm.round(state, fleet, Rng(0).at(number, "server"))
        yield state, facts, fleet


# -- two concepts of two rows, at 1 and -1, whose labels B swaps; a model that turns to either in a round --------------


def zero() -> nn.Module:
    """Both weights 0, whatever the key."""
    module = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(module.weight)
    return module


TASK = Task(zero, dtype=torch.float64)
TURN = LocalTrainer(lr=4.0, epochs=10, batch_size=0)
X = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
A, B = torch.tensor([1, 0]), torch.tensor([0, 1])


def concepts(names: str, before: int = 0):
    """A client for each letter: A, B, or a dot for one without rows."""
    held = [(X[:0], A[:0]) if name == "." else (X, A if name == "A" else B) for name in names]
    return holding(held, classes=2, before=before)
