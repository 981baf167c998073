"""Tiny federations for tests: eight clients in two groups, four features, three classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from fedtide.algorithms import REGISTRY
from fedtide.config import Experiment, from_dict
from fedtide.core.loop import Start, Step, begin, play
from fedtide.core.memory import MemoryStore
from fedtide.fleets.host import Host
from fedtide.fleets.local import LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.runs.build import host_of

TOY: dict[str, Any] = {
    "rounds": 6,
    "eval_every": 2,
    "data": {
        "source": {"kind": "gaussians", "samples": 64, "dims": 4, "classes": 3, "domains": 2},
        "partition": {"kind": "iid", "clients": 8},
        "groups": {"by": "domain"},
        "split": {"val": 0.2, "test": 0.25},
        "held_out_clients": {"clients": 2},
    },
    "shift": {"who": {"kind": "periodic", "period": 4}},
    "model": {"kind": "mlp", "hidden": [5]},
}

PARTS = ("train", "val", "test")
"""Of the rows that a client holds in all."""

VARIANTS = {
    f"{algorithm} {name}".strip(): (algorithm, options)
    for algorithm, entry in REGISTRY.items()
    for name, options in entry.variants.items()
}
"""Algorithms as the laws meet them, with their options."""


def toy(algorithm: str, options: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    """The toy experiment with one method.

    Args:
        algorithm: registered name or module:function.
        options: of the method; local training and a cohort of four are given. A cohort that is a word is one of four.
        changes: top-level keys; tables are merged into the toy's.
    """
    algorithm, own = VARIANTS.get(algorithm, (algorithm, {}))
    tables = {key: value for key, value in own.items() if key in ("shift", "data")}
    values = copy.deepcopy(TOY)
    for key, value in (*tables.items(), *changes.items()):
        both = isinstance(values.get(key), dict) and isinstance(value, dict)
        values[key] = {**values[key], **value} if both else value
    options = {key: value for key, value in own.items() if key not in tables} | (options or {})
    cohort = options.get("cohort", "uniform" if algorithm == "fielding" else 4)
    if isinstance(cohort, str) and cohort != "everyone":
        cohort = {"kind": cohort, "clients_per_round": 4}
    method = {"name": "toy", "algorithm": algorithm, "local": {"lr": 0.1, "batch_size": 4}, **options, "cohort": cohort}
    return from_dict({**values, "method": [method]})


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model with BatchNorm."""
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, classes))


@dataclass
class Played:
    """What a run in this process left."""

    host: Host
    fleet: SimulatedFleet
    steps: list[Step]

    @property
    def state(self) -> Any:
        return self.steps[-1].state


def played(
    experiment: Experiment,
    *,
    rounds: int | None = None,
    engine: Callable[[Host], Any] = LocalEngine,
    fleet: Callable[[SimulatedFleet], Any] = lambda fleet: fleet,
    memory: MemoryStore | None = None,
    host: Host | None = None,
    sums_only: bool = False,
    seed: int = 0,
) -> Played:
    """Play some rounds of the experiment's only method.

    Args:
        experiment: with one method.
        rounds: how many; all by default.
        engine: makes the engine from the host.
        fleet: wraps the fleet that the algorithm sees.
        memory: of the clients; fresh by default.
        host: instead of the one the experiment describes.
        sums_only: whether the fleet refuses reveals.
        seed: of the run.
    """
    memory = memory or MemoryStore(None)
    host = host or host_of(experiment, experiment.method[0], seed, memory)
    simulated = SimulatedFleet(
        host.population, engine(host), memory, reveals=() if sums_only else host.algorithm.reveals
    )
    seen = fleet(simulated)
    start: Start = begin(host.algorithm, seen, seed=seed, rounds=experiment.rounds)
    steps = []
    for step in play(host.algorithm, seen, start, seed=seed, rounds=experiment.rounds):
        steps.append(step)
        if len(steps) == (rounds or experiment.rounds):
            break
    return Played(host, simulated, steps)


@lru_cache(maxsize=2)
def reference(name: str) -> Played:
    """The toy of a method played as it is, once for all tests of a method that only read it."""
    return played(toy(name))
