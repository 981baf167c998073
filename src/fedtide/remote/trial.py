"""A trial of a method: a few rounds with clients whose rows are made up, to learn beforehand what it asks and sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fedtide.core.base import Algorithm, Shard
from fedtide.core.loop import begin, play
from fedtide.core.memory import MemoryStore
from fedtide.data.build import build
from fedtide.data.groups import Split
from fedtide.data.partition import IID
from fedtide.data.rows import Rows
from fedtide.fleets.clock import SteadyClock
from fedtide.fleets.host import Host
from fedtide.fleets.local import LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.learn.target import CLASSES
from fedtide.wire.schema import ROWS, made_up
from fedtide.wire.steps import Wire

CLIENTS, ROUNDS = 8, 3
"""Clients and rounds of a trial."""


def trial(
    algorithm: Algorithm[Any], like: Shard, classes: int, clients: int = CLIENTS, wire: Wire | None = None
) -> Iterator[tuple[SimulatedFleet, Any]]:
    """Play a trial; yield the fleet, with the questions of a round, and the state, once before round 0 too.

    Args:
        algorithm: the method.
        like: rows as a model sees them, one at least.
        classes: number of classes, or of bins.
        clients: how many there are; some methods need several.
        wire: how sums pass to the server; here none is too small, and nothing is done to it.
    """
    rows = made_up(like, classes, ROWS * clients)
    y, value = (rows.y, None) if rows.bins is None else (rows.bins, rows.y)
    target = CLASSES if algorithm.task is None else algorithm.task.target
    made = Rows("made-up rows", rows.x, y, classes, value=value, target=target)
    population = build(made, IID(clients=clients), split=Split(val=0.2, test=0.2))
    plain = None if wire is None else replace(wire, fewest=1, steps=(), hides=False)
    host = Host(algorithm, population, 0, MemoryStore(None), wire=plain)
    fleet = SimulatedFleet.of(host, LocalEngine(host), SteadyClock())
    start = begin(algorithm, fleet, seed=0, rounds=ROUNDS)
    yield fleet, start.state
    for step in play(algorithm, fleet, start, seed=0, rounds=ROUNDS):
        yield fleet, step.state
