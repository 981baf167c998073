"""Planted tables, with each client's rows at the client."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fedtide.core.loop import begin, play
from fedtide.core.memory import MemoryStore
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.fleets.engines import Host, LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.totals import Vectors
from fedtide.inspection.by_sums import STAGES, State, answers, inspection
from fedtide.inspection.table import Table
from fedtide.learn.task import Task
from fedtide.wire.pipeline import FLOATING, Wire

CLASSES, FEWEST, SEED = 4, 3, 1


def population(table: Table, clients: int | None = None) -> Population:
    """The clients of a table, who hold all of their rows to train on."""
    names, owner = np.unique(table.client, return_inverse=True)
    labels = np.unique(table.label, return_inverse=True)[1]
    features = torch.from_numpy(table.features).float()
    time = None if table.time is None else torch.from_numpy(table.time)
    rows = Rows(table.name, features, torch.from_numpy(labels), CLASSES, time=time)
    held = Ragged.from_owner(owner, len(names))
    parts = {"train": held, "val": Ragged.empty(len(names)), "test": Ragged.empty(len(names))}
    return Population(rows, parts, torch.zeros(len(names), dtype=torch.int64), ("all",), len(names))


def host(table: Table, wire: Wire = FLOATING) -> Host:
    """The inspection of the clients of a table."""
    people = population(table)
    task = Task(lambda: nn.Linear(people.rows.x.shape[1], CLASSES), example=people.few()[0].x[:1])
    return Host(inspection(task, FEWEST, SEED), people, 0, MemoryStore(None), wire=wire)


def simulated(one: Host, engine=LocalEngine) -> SimulatedFleet:
    """A simulated fleet of these clients."""
    vectors = Vectors.of(one.wire, one.algorithm, one.population.few())
    return SimulatedFleet(one.population, engine(one), vectors=vectors)


def last_state(one: Host, fleet: SimulatedFleet) -> State:
    """The sums after the last question."""
    start = begin(one.algorithm, fleet, seed=0, rounds=len(STAGES))
    *_, step = play(one.algorithm, fleet, start, seed=0, rounds=len(STAGES))
    return step.state


def answered(table: Table, wire: Wire = FLOATING):
    """The answers between the clients of a table."""
    one = host(table, wire)
    return answers(last_state(one, simulated(one)))
