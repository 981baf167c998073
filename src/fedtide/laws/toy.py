"""A tiny federation: eight clients in two groups that take turns, two held-out ones, four features, three classes."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from torch import Tensor

from fedtide.config import Experiment, from_dict, maker
from fedtide.core.loop import Start, Step, begin, play
from fedtide.core.memory import MemoryStore
from fedtide.data.ragged import Ragged
from fedtide.fleets.local_engine import Host, LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.totals import Vectors
from fedtide.runs.build import host_of
from fedtide.runs.privacy import server_wire
from fedtide.wire.release import simulated_noise

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

USUAL: dict[str, Any] = {"local": {"lr": 0.1, "batch_size": 4}, "cohort": 4}
"""Options of a method that takes them."""


def toy(
    algorithm: str, options: Mapping[str, Any] | None = None, sets: Sequence[str] = (), **changes: Any
) -> Experiment:
    """The toy experiment with one method.

    Args:
        algorithm: registered name or module:function.
        options: of the method; local training and a cohort of four are given where it takes them.
        sets: overrides `key=value` of the experiment.
        changes: top-level keys; tables are merged into the toy's.
    """
    takes = inspect.signature(maker(algorithm)).parameters
    usual = {key: value for key, value in USUAL.items() if key in takes}
    method = {"name": "toy", "algorithm": algorithm, **usual, **(options or {})}
    return from_dict({**merged(TOY, changes), "method": [method]}, where="check", sets=sets)


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge top-level keys; of a table that both have, keys of the first that the second lacks stay.

    >>> merged({"shift": {"who": "always"}, "rounds": 6}, {"shift": {"what": "own"}, "rounds": 2})
    {'shift': {'who': 'always', 'what': 'own'}, 'rounds': 2}
    """
    pairs = ((key, values.get(key), value) for key, value in changes.items())
    tables = {key: {**one, **other} for key, one, other in pairs if isinstance(one, dict) and isinstance(other, dict)}
    return {**values, **changes, **tables}


def with_rows(host: Host, lists: Iterable[Tensor], **rows: Tensor) -> Host:
    """Return a host whose clients hold other training rows.

    Args:
        host: a host.
        lists: numbers of the training rows of each client.
        rows: columns of the data set to replace, `x` or `y`.
    """
    population: Any = host.population
    parts = {**population.parts, "train": Ragged.of([numbers.numpy() for numbers in lists])}
    return replace(host, population=replace(population, parts=parts, rows=replace(population.rows, **rows)))


@dataclass
class Played:
    """A run in this process: its host, its fleet and its steps."""

    host: Host
    fleet: SimulatedFleet
    steps: list[Step[Any]]

    @property
    def state(self) -> Any:
        """The last state."""
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
    start: Start[Any] | None = None,
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
        start: a round to go on from, with the memory that clients had then; the beginning by default.
    """
    memory = memory or MemoryStore(None)
    host = replace(host or host_of(experiment, experiment.method[0], seed, memory), memory=memory)
    simulated = SimulatedFleet(
        host.population,
        engine(host),
        reveals=() if sums_only else None,
        unless_changed=host.algorithm.traits.unless_changed,
        vectors=Vectors.of(
            server_wire(experiment, experiment.method[0], host, simulated_noise(seed)),
            host.algorithm,
            host.population.few(),
        ),
    )
    seen = fleet(simulated)
    start = start or begin(host.algorithm, seen, seed=seed, rounds=experiment.rounds)
    steps = []
    for step in play(host.algorithm, seen, start, seed=seed, rounds=experiment.rounds):
        steps.append(step)
        if len(steps) == (rounds or experiment.rounds):
            break
    return Played(host, simulated, steps)


# -- variants and reductions, in TOML ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reduction:
    """Options with which an algorithm is another one.

    Args:
        options: of the algorithm.
        to: name of the other algorithm.
        its: options of the other algorithm.
        tolerance: largest relative and absolute difference of the weights; None means equal bit for bit.
    """

    options: Mapping[str, Any]
    to: str
    its: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float | None = None


@cache
def _tables(name: str) -> Mapping[str, Any]:
    return tomllib.loads(files("fedtide.laws").joinpath(name).read_text(encoding="utf-8"))


def variants_of(algorithm: str) -> Mapping[str, Mapping[str, Any]]:
    """Return options that an algorithm is tested with, by name; "" has the options that it needs for any effect.

    >>> list(variants_of("fedprox"))
    ['by-size']
    """
    variants: Mapping[str, Mapping[str, Any]] = _tables("variants.toml").get(algorithm, {})
    return variants


def reductions_of(algorithm: str) -> Sequence[Reduction]:
    """Return the options with which an algorithm is another one.

    >>> reductions_of("fedprox")
    [Reduction(options={'local': {'proximal': 0.0}}, to='fedavg', its={}, tolerance=None)]
    """
    return [Reduction(**table) for table in _tables("reductions.toml").get(algorithm, [])]
