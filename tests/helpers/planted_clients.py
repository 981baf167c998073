"""Planted tables, with each client's rows at the client."""

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
from fedtide.inspection.bounded import VALUES, bounded_answers, bounded_inspection, noise_on
from fedtide.inspection.by_sums import STAGES, State, answers, inspection
from fedtide.inspection.table import Table
from fedtide.learn.task import Task
from fedtide.wire.accounting import Plan
from fedtide.wire.clip import Clip
from fedtide.wire.ledger import Ledger
from fedtide.wire.noise import simulated_noise, with_noise
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


BOUNDS = dict.fromkeys(VALUES, 1.0)
"""Bounds of the values of a bounded inspection."""
DELTA = 1e-4


def bounded_sums(table: Table, epsilon: float, seed: int = 0):
    """The sums of a bounded inspection of the clients of a table, and the deviations of the noise on them."""
    people = population(table)
    task = Task(lambda: nn.Linear(people.rows.x.shape[1], CLASSES), example=people.few()[0].x[:1])
    wire = Wire(secure=False, clip=Clip(BOUNDS))
    one = Host(bounded_inspection(task, SEED), people, 0, MemoryStore(None), wire=wire)
    plan = Plan(2, 2)
    ledger = Ledger(plan, plan.noise(epsilon, DELTA), DELTA)
    noisy = with_noise(wire, ledger, simulated_noise(seed))
    vectors = Vectors.of(noisy, one.algorithm, people.few())
    fleet = SimulatedFleet(people, LocalEngine(one), vectors=vectors)
    start = begin(one.algorithm, fleet, seed=0, rounds=2)
    *_, step = play(one.algorithm, fleet, start, seed=0, rounds=2)
    return step.state, noise_on(step.state, BOUNDS, ledger.z)


def answered_with_noise(table: Table, epsilon: float, seed: int = 0):
    """The answers between the clients of a table, by sums with noise."""
    return bounded_answers(*bounded_sums(table, epsilon, seed), epsilon=epsilon)
