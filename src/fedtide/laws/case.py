"""Toy federations, and the case of a law: an algorithm played once, and again under other conditions.

The federation has eight clients in two groups that take turns, two held-out ones, four features and three classes.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from fedtide.config import Experiment, from_dict, maker
from fedtide.core.base import Payload, Reply, Scores, Slot
from fedtide.core.loop import Start, Step, begin, play
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import Tree, children, is_node, leaves, same
from fedtide.fleets.engines import Host, LocalEngine
from fedtide.fleets.pool import Processes
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.totals import Vectors
from fedtide.learn.layers import NORM
from fedtide.runs.build import host_of
from fedtide.runs.privacy import server_wire
from fedtide.wire.noise import simulated_noise

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
        options: of the method; local training and a cohort of four are defaults if it takes them.
        sets: overrides `key=value` of the experiment.
        changes: top-level keys; tables are merged into the toy's.
    """
    takes = inspect.signature(maker(algorithm)).parameters
    usual = {key: value for key, value in USUAL.items() if key in takes}
    if "home" in takes and takes["home"].default == (NORM,):
        usual["home"] = ["dense1"]  # the toy's model has no layers that normalize
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


@dataclass
class Played:
    """A run in this process: its host, its fleet, its steps, and the fleet that its algorithm saw."""

    host: Host
    fleet: SimulatedFleet
    steps: list[Step[Any]]
    seen: Any

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
    wire = server_wire(experiment, experiment.method[0], host, simulated_noise(seed))
    simulated = SimulatedFleet(
        host.population,
        engine(host),
        reveals=() if sums_only else None,
        unless_changed=host.algorithm.traits.unless_changed,
        vectors=Vectors.of(wire, host.algorithm, host.population.few()),
    )
    seen = fleet(simulated)
    start = start or begin(host.algorithm, seen, seed=seed, rounds=experiment.rounds)
    steps = islice(play(host.algorithm, seen, start, seed=seed, rounds=experiment.rounds), rounds)
    return Played(host, simulated, list(steps), seen)


# -- laws and their case -----------------------------------------------------------------------------------------------


class Broken(Exception):
    """An error for a law that does not hold, with the reason."""


class NotApplicable(Exception):
    """An error for a law that does not apply to an algorithm, with the reason."""


def hold(condition: bool, words: str) -> None:
    """Raise `Broken` unless a condition holds."""
    if not condition:
        raise Broken(words)


def alike(one: Tree, other: Tree, words: str) -> None:
    """Raise `Broken` unless two trees are equal bit for bit, with the place of the first difference."""
    if not same(one, other):
        raise Broken(f"{words}: {difference(one, other)}")


def difference(one: Tree, other: Tree, at: str = "") -> str:
    """Describe the first difference of two trees.

    >>> difference({"w": [1.0, 2.0]}, {"w": [1.0, 3.0]})
    'w.1 is 2.0 and 3.0'
    """
    where = at or "it"
    if is_node(one) and type(one) is type(other):
        ours, theirs = dict(children(one)), dict(children(other))
        if list(ours) != list(theirs):
            return f"{where} has {list(map(str, ours))} and {list(map(str, theirs))}"
        key = next(key for key in ours if not same(ours[key], theirs[key]))
        return difference(ours[key], theirs[key], f"{at}.{key}" if at else str(key))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return f"{where} has other numbers" if one.shape == other.shape else f"{where} has another shape"
    return f"{where} is {one!r:.60} and {other!r:.60}"


def near(ours: Any, theirs: Any, words: str, rtol: float, atol: float) -> None:
    """Raise `Broken` unless two trees are equal within tolerances."""
    for one, other in zip(leaves(ours), leaves(theirs), strict=True):
        if isinstance(one, Tensor | float):
            try:
                torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
            except AssertionError as error:
                raise Broken(f"{words}: {shorten(str(error), 200, placeholder=' ...')}") from None
        else:
            hold(one == other, f"{words}: {one!r} and {other!r}")


@dataclass(frozen=True)
class Case:
    """An algorithm in a toy federation.

    Args:
        make: (options of the method, changes of the experiment) -> the experiment, whose only method it is.
        pool: () -> two processes for its clients, the same ones each time.
    """

    make: Callable[..., Experiment]
    pool: Callable[[], Processes]

    @cached_property
    def experiment(self) -> Experiment:
        """The toy experiment."""
        return self.make()

    @cached_property
    def reference(self) -> Played:
        """A run of all rounds in this process."""
        return played(self.experiment)

    @cached_property
    def everyone(self) -> dict[str, Any]:
        """Option that asks all clients, for an algorithm with a cohort."""
        return {"cohort": {"kind": "everyone"}} if "cohort" in self.experiment.method[0].settings() else {}

    @cached_property
    def steady(self) -> Experiment:
        """The toy experiment with all clients in every round."""
        return self.make(self.everyone, shift={"who": {"kind": "always"}})

    def host(self, experiment: Experiment | None = None) -> Host:
        """Make a host whose clients keep nothing yet."""
        experiment = experiment or self.experiment
        return host_of(experiment, experiment.method[0], 0)

    def watched(
        self, experiment: Experiment | None = None, *, change: Any = None, look: Any = None, **how: Any
    ) -> "tuple[Played, Watched]":
        """Play rounds on a fleet that shows only attributes of the protocol; return the run and that fleet."""
        run = played(experiment or self.experiment, fleet=lambda fleet: Watched(fleet, change, look), **how)
        return run, run.seen


def judged(run: Played, *, every: bool = True) -> tuple[Payload, Slot | None, Tensor, Scores]:
    """Evaluate the last state of a run on all clients, held-out ones included: payload, slots, clients and scores."""
    population = run.host.population
    clients = torch.cat([population.clients, population.held_out_clients]) if every else population.clients
    payload, slot = run.host.algorithm.serve(run.state, clients)
    return payload, slot, clients, run.fleet.score(payload, clients, slot=slot)


@dataclass(frozen=True)
class Question:
    """An ask of the algorithm, and its reply."""

    question: str
    clients: Tensor
    payload: Payload
    slot: Slot | None
    named: dict[str, Any]
    reply: Reply


SHOWN = (
    "moment", "clients", "reachable", "arrivals", "begin", "elapsed", "score", "clustering",
)  # fmt: skip
"""Attributes of a fleet that the protocol names, besides `ask`, `true_groups` and `all_rows`."""


class Watched:
    """A fleet that shows only attributes of the protocol, and keeps questions and answers.

    Args:
        fleet: that answers.
        change: returns other clients and slots, which are asked instead.
        look: is given each question and its reply before the algorithm may write into it.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        change: Callable[[Tensor, Slot | None], tuple[Tensor, Slot | None]] | None = None,
        look: Callable[[str, Reply], None] | None = None,
    ) -> None:
        self._fleet, self._change, self._look = fleet, change, look
        self.asks: list[Question] = []
        self.revealed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name in ("true_groups", "all_rows"):
            self.revealed.add(name)
        elif name not in SHOWN:
            raise AttributeError(f"a fleet has no '{name}'")
        return getattr(self._fleet, name)

    @property
    def totals(self) -> list[Tree]:
        """Sums of all asks."""
        return [ask.reply.total for ask in self.asks]

    def ask(self, question: str, clients: Tensor, payload: Payload, *, slot: Slot | None = None, **named: Any) -> Reply:
        """Put a question, and keep it and its answer."""
        if self._change is not None:
            before = clients.tolist()
            clients, slot = self._change(clients, slot)
            if named.get("began") is not None:  # goes with the clients
                named["began"] = named["began"][[before.index(client) for client in clients.tolist()]]
        reply = self._fleet.ask(question, clients, payload, slot=slot, **named)
        if self._look is not None:
            self._look(question, reply)
        self.asks.append(Question(question, clients, payload, slot, named, reply))
        self.revealed |= set(named.get("reveal", ()))
        return reply
