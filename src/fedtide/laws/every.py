"""The laws of algorithms: functions of a `Case` that raise `Broken` if a law does not hold; and their check."""

import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fedtide.algorithms import REGISTRY
from fedtide.config import Experiment
from fedtide.core import codec, sums
from fedtide.core.base import Answer, Memory, Moment, Payload, Reply, Scores, Shard, Slot, Sum, Weights, Work
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, all_finite, detached, leaves, same, size_in_bytes
from fedtide.core.weights import shapes_of
from fedtide.data.ragged import Ragged
from fedtide.evaluate.probe import QUESTION as TRAIN
from fedtide.fleets import scoring
from fedtide.fleets import stacked_engine as stacked
from fedtide.fleets.ask import Ask, BlockResult
from fedtide.fleets.engines import Host, LocalEngine, WorkersEngine
from fedtide.fleets.pool import Pool
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.totals import join
from fedtide.laws.case import Broken, Case, NotApplicable, Played, Watched, alike, hold, judged, near, played, toy
from fedtide.learn.layers import pick_layers
from fedtide.learn.local import Fitted, LocalTrainer
from fedtide.models.branched import branch_of
from fedtide.remote.fleet import SIMULATION_ONLY
from fedtide.remote.messages import Response
from fedtide.remote.node import Node
from fedtide.remote.offline import NearCarrier, memory_at, near_fleet, replayed
from fedtide.remote.schedule import RoundClock
from fedtide.runs.build import host_of, spec_of
from fedtide.runs.privacy import server_wire, sums_of
from fedtide.runs.runner import Run
from fedtide.transforms.transform import models_in
from fedtide.wire.clip import WHOLE
from fedtide.wire.keys import library
from fedtide.wire.noise import Draw
from fedtide.wire.pipeline import Opening, ServerStep
from fedtide.wire.vector import BITS, Form

PACKAGE = Path(__file__).parents[1]
"""Folder of this package."""

ODD = ("no sample", "one sample", "one class", "constant features", "infinite loss")
"""Oddities that the rows of a client may have."""

ALONE = tuple((kind,) for kind in ODD)
"""One odd client at a time."""

WIDE, FAINT = 1e3, 1e-3
"""Bounds that cut nothing of a toy, and a noise multiplier at which no slot of it counts as empty."""


# -- other fleets and engines ------------------------------------------------------------------------------------------


class Growing:
    """A fleet whose last `LATE` clients join at round `JOIN`.

    Args:
        fleet: all of them.
        registered: whether they are registered from the start, and cannot be reached until then.
    """

    JOIN, LATE = 2, 2

    def __init__(self, fleet: SimulatedFleet, registered: bool) -> None:
        self._fleet, self._registered = fleet, registered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def _joined(self, clients: Tensor) -> Tensor:
        early = self._fleet.moment.round < self.JOIN
        return clients[clients < len(self._fleet.clients) - self.LATE] if early else clients

    @property
    def clients(self) -> Tensor:
        """Registered ids."""
        return self._fleet.clients if self._registered else self._joined(self._fleet.clients)

    @property
    def reachable(self) -> Tensor:
        """Ids that could answer now."""
        return self._joined(self._fleet.reachable)

    def arrivals(self, m: int) -> Tensor:
        """Draw `m` clients; those who have not joined are left out."""
        return self._joined(self._fleet.arrivals(m))


@dataclass(frozen=True)
class InAnyOrder(LocalEngine):
    """An engine that runs blocks in reverse and yields results in order, as a pool of processes may."""

    def ask(self, blocks: Sequence[Ask], payload: Tree) -> Iterator[BlockResult]:
        """Run a question."""
        yield from reversed([self.host.ask(block, payload) for block in reversed(blocks)])


@dataclass(frozen=True)
class InBoth(LocalEngine):
    """An engine that adds in fixed point, and puts the sums of floating point into `plain`."""

    plain: list[BlockResult] = field(default_factory=list)

    def ask(self, blocks: Sequence[Ask], payload: Tree) -> Iterator[BlockResult]:
        """Run a question twice."""
        self.plain.append(join((self.host.ask(replace(block, forms=None), payload) for block in blocks), len(blocks)))
        yield from super().ask(blocks, payload)


@dataclass(frozen=True)
class ByWire(LocalEngine):
    """An engine that sends everything through bytes."""

    def ask(self, blocks: Sequence[Ask], payload: Tree) -> Iterator[BlockResult]:
        """Run a question."""
        for block in blocks:
            arrived = codec.from_bytes(codec.to_bytes({"ask": block, "payload": payload}))
            yield codec.from_bytes(codec.to_bytes(self.host.ask(arrived["ask"], arrived["payload"])))


@dataclass
class Time:
    """A clock that nothing but sleeping moves."""

    now: float = 0.0

    def __call__(self) -> float:
        """Return the seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class Losing(NearCarrier):
    """A carrier on which every fourth answer is lost, and every fifth comes too late."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        super().__init__(nodes)
        self._came, self._late = 0, list[Response]()

    def pull(self) -> list[Response]:
        """Let a node answer a question; a late answer comes with the answer after the next."""
        arrived = []
        for response in super().pull():
            self._came += 1
            if self._came % 4 == 0:
                arrived.append(replace(response, header={}, payload=b"", error="it was lost"))
            elif self._came % 5 == 0:
                self._late.append(response)
            else:
                arrived.append(response)
        if len(self._late) > 1:
            arrived.append(self._late.pop(0))
        return arrived


# -- laws --------------------------------------------------------------------------------------------------------------


def plays(case: Case) -> None:
    """It plays all rounds, and every client can be judged."""
    sound(case.reference, "in the last round")


def sound(run: Played, where: str) -> Scores:
    """Raise `Broken` unless the last state is finite and every client is judged; return the scores."""
    hold(all_finite(run.state), f"{where} a number of the state is not finite")
    *_, scores = judged(run)
    hold(bool((scores.rows > 0).all()), f"{where} a client that holds test rows is not judged")
    return scores


def frozen_state(case: Case) -> None:
    """The state is a frozen dataclass at the top level of its module."""
    kind = type(case.reference.state)
    parameters: Any = getattr(kind, "__dataclass_params__", None)
    frozen = parameters is not None and bool(parameters.frozen)
    hold(frozen, f"`init` and `round` return {kind.__name__}, allowed: a frozen dataclass")
    at_top = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
    hold(at_top, f"{kind.__qualname__} is not at the top level of {kind.__module__}, so no other process finds it")


def same_seed(case: Case) -> None:
    """One seed gives one result, and another seed another."""
    alike(case.reference.state, played(case.experiment).state, "two runs with one seed end differently")
    other = played(case.experiment, seed=1, rounds=1).state
    differs = not same(case.reference.steps[0].state, other)
    hold(differs, "two runs with different seeds end alike: nothing comes from `rng`")


def cohort_order(case: Case) -> None:
    """The order in which clients are named in an ask changes nothing."""
    run, _ = case.watched(change=shuffled)
    alike(case.reference.state, run.state, "the state depends on the order of the clients that are asked")


def shuffled(clients: Tensor, slot: Slot | None) -> tuple[Tensor, Slot | None]:
    """Return clients and their slots in another order."""
    order = torch.from_numpy(np.random.default_rng(len(clients)).permutation(len(clients)))
    return clients[order], None if slot is None else slot[order]


def global_randomness(case: Case) -> None:
    """The global generators of torch, NumPy and Python are neither used nor disturbed."""
    with untouched(1):
        one = played(case.experiment, rounds=2).state
    with untouched(2):
        other = played(case.experiment, rounds=2).state
    alike(one, other, "the state follows a global generator; draw from `rng`")


@contextmanager
def untouched(seed: int) -> Iterator[None]:
    """Seed the global generators for a while, restore their states, and raise `Broken` if any was drawn from."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = _generators()
        yield
        for name, state in _generators().items():
            hold(before[name] == state, f"it draws from {name}'s global generator; draw from `rng`")
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


def _generators() -> dict[str, Any]:
    """Return the states of the global generators."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    return {"torch": torch.get_rng_state().tolist(), "NumPy": numpy[1].tolist(), "Python": random.getstate()}


def pure_works(case: Case) -> None:
    """A work changes none of its inputs."""
    judged(case.watched(host=guarded(case.host()))[0], every=False)


def guarded(host: Host) -> Host:
    """Return a host whose works raise `Broken` if they change their inputs."""

    def watched(question: str, work: Work) -> Work:
        def run(payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
            inputs = {"payload": payload, "memory": memory, "rows": (shard.x, shard.y, shard.ids)}
            before = detached(inputs)
            answer = work(payload, memory, shard, moment, rng)
            for name, value in inputs.items():
                alike(before[name], value, f"'{question}' changes its {name} in place")
            return answer

        return run

    algorithm = host.algorithm
    works = {question: watched(question, work) for question, work in algorithm.works.items()}
    adapt = None if algorithm.adapt is None else watched("adapt", algorithm.adapt)
    return replace(host, algorithm=replace(algorithm, works=works, adapt=adapt))


def whole_update(case: Case) -> None:
    """The update that a client's answer names, for measuring forgetting, is the change by its local training."""
    host = case.host()
    if TRAIN not in host.algorithm.works:
        raise NotApplicable(f"it has no question '{TRAIN}'")
    with updates_compared(host) as (watched, compared):
        case.watched(host=watched)
    if not compared:
        raise NotApplicable("its clients do not train by LocalTrainer alone")


@contextmanager
def updates_compared(host: Host) -> Iterator[tuple[Host, list[Weights]]]:
    """Give a host that compares the update of an answer with the change by local training, and the compared updates."""
    trained, compared = list[Weights](), list[Weights]()
    work, usual = host.algorithm.works[TRAIN], LocalTrainer.__call__

    def record(*inputs: Any, **named: Any) -> Fitted:
        fitted = usual(*inputs, **named)
        if fitted.steps:
            trained.append(detached(fitted.delta))
        return fitted

    def run(payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        trained.clear()
        answer = work(payload, memory, shard, moment, rng)
        if answer is None:
            return None
        if (named := answer.update) is None:
            raise NotApplicable(f"answers to '{TRAIN}' have no update, so forgetting is not measured")
        received = {name for model in models_in(payload) for name in (*model.params, *model.buffers)}
        for part in named.values() if isinstance(named, Mapping) else (named,):
            like = [update for update in trained if shapes_of(update) == shapes_of(part)]
            compared.extend(like)
            # Layers at home are not received: they change from what the server last saw of them, its own first ones.
            part = pick_layers(part, received.__contains__) if received else part
            like = [pick_layers(update, received.__contains__) if received else update for update in like]
            hold(
                not like or any(same(update, part) for update in like),
                f"the update of an answer to '{TRAIN}' is not what its local training did; write update=fitted.delta",
            )
        return answer

    with patch.object(LocalTrainer, "__call__", record):
        yield replace(host, algorithm=replace(host.algorithm, works={**host.algorithm.works, TRAIN: run})), compared


def pure_round(case: Case) -> None:
    """A round leaves the state that it received as it was."""
    run = played(case.experiment, rounds=1)
    before = detached(run.state)
    run.fleet.begin(Moment(1, case.experiment.rounds, 1.0))
    run.host.algorithm.round(run.state, run.fleet, Rng(0).at(1, "server"))
    alike(before, run.state, "`round` changes the state that it received in place")


def declared_reveals(case: Case) -> None:
    """The algorithm declares all values of single clients that the server sees, and no others."""
    all_declared(*case.watched())


def all_declared(run: Played, fleet: Watched) -> None:
    """Raise `Broken` if a run saw other values of single clients than are declared."""
    declared = set(run.host.algorithm.traits.reveals)
    for name in sorted(fleet.revealed - declared):
        raise Broken(f"the server sees '{name}' of single clients, and `reveals` of the Algorithm does not name it")
    for name in sorted(declared - fleet.revealed):
        raise Broken(f"`reveals` of the Algorithm names '{name}', which no ask of six rounds wants")


def sums_only(case: Case) -> None:
    """An algorithm that reveals nothing runs on a fleet that gives sums only."""
    if not case.reference.host.algorithm.traits.reveals:
        alike(played(case.experiment, sums_only=True).state, case.reference.state, "a fleet of sums ends differently")
        return
    try:
        played(case.experiment, sums_only=True)
    except FedtideError as error:
        hold("sums only" in str(error), f"a fleet of sums refuses it otherwise: {error}")
    else:
        raise Broken("it reveals something and runs on a fleet of sums")


def halves_add_up(case: Case) -> None:
    """The sums of two halves of a cohort add up to the sums of the whole."""
    run, fleet = case.watched(rounds=1)
    if not fleet.asks:
        raise NotApplicable("it asks nothing in the first round")
    ask = fleet.asks[-1]
    if any(before.question == ask.question for before in fleet.asks[:-1]):
        raise NotApplicable("the question is asked twice: its keys differ")
    named = {key: value for key, value in ask.named.items() if key not in ("first", "began")}
    parts = []
    for half in (slice(0, 2), slice(2, None), slice(None)):
        run.fleet.begin(Moment(0, case.experiment.rounds, 0.0))
        run.fleet.engine.memory.clear()
        slot = None if ask.slot is None else ask.slot[half]
        parts.append(run.fleet.ask(ask.question, ask.clients[half], ask.payload, slot=slot, **named).total)
    first, second, whole = parts
    near(whole, sums.merge(first, second), "the sums of two halves are not those of the whole", 1e-6, 1e-9)


def kept_memory(case: Case) -> None:
    """No client keeps more models than `keeps` says, or anything else unless `remembers` is true."""
    run = played(case.make(model={"kind": "mlp", "hidden": [300]}), rounds=3)
    algorithm = run.host.algorithm
    served, weights = algorithm.serve(run.state, torch.tensor([0]))[0], getattr(algorithm.task, "scratch", None)
    model = max(size_in_bytes(served), 0 if weights is None else size_in_bytes(weights.weights))
    most = max(size_in_bytes(run.fleet.engine.memory.read(client, (99, 0))) for client in run.fleet.clients.tolist())
    keeps = algorithm.traits.keeps
    words = f"a client keeps {most} bytes, and `keeps` of the Algorithm says {keeps} models of {model}"
    hold(most <= keeps * model + 2048, words)
    declared = bool(keeps) or algorithm.traits.remembers or bool(algorithm.traits.reveals)
    hold(not most or declared, "a client keeps something, and `remembers` of the Algorithm is False")


def one_slot_each(case: Case) -> None:
    """Every client belongs to exactly one slot."""
    run = case.reference
    population = run.host.population
    clients = torch.cat([population.clients, population.held_out_clients])
    for step in run.steps:
        payload, slot = run.host.algorithm.serve(step.state, clients)
        if slot is not None:
            hold(slot.shape == clients.shape, f"`serve` gives {len(slot)} slots for {len(clients)} clients")
            inside = bool(((slot >= 0) & (slot < len(payload))).all())
            hold(inside, f"`serve` gives a slot that is not among the {len(payload)} of its payload")
    *_, scores = judged(run)
    if scores.choice is not None:
        hold(torch.equal(scores.choice.sum(1), scores.rows), "`predict` does not name the model of every row")


def row_order(case: Case) -> None:
    """The order of a client's stored rows changes nothing."""
    run = played(case.experiment, host=with_permuted_rows(case.host()))
    alike(case.reference.state, run.state, "the state depends on the order of rows")


def with_permuted_rows(host: Host) -> Host:
    """Return a host whose clients hold their rows in another order."""
    draw = np.random.default_rng(0)
    return with_parts(host, lambda part: [draw.permutation(part[i].numpy()) for i in range(len(part))])


def with_parts(host: Host, rows_of: Callable[[Any], list[np.ndarray]]) -> Host:
    """Return a host whose clients hold other rows of each part, which `rows_of` returns for all clients."""
    parts = {name: Ragged.of(rows_of(part)) for name, part in host.population.parts.items()}
    return replace(host, population=replace(host.population, parts=parts))


def dropouts(case: Case, seeds: int = 2) -> None:
    """Any of the clients may be absent, and all of them."""

    def absent(rate: float, seed: int = 0) -> Played:
        who = {"who": {"kind": "always", "dropout_rate": rate}}
        return played(case.make(case.everyone, shift=who), seed=seed, rounds=4)

    for seed in range(seeds):
        for step in absent(0.5, seed).steps:
            hold(all_finite(step.state), "with half of the clients absent a number of the state is not finite")
    run = absent(0.999999)
    hold(all_finite(run.state), "with all clients absent a number of the state is not finite")
    hold(all(not len(query.answered) for query in run.fleet.queries), "an absent client answered")
    first, last = (getattr(state, "weights", None) for state in (run.steps[0].received, run.state))
    alike(first, last, "the weights change in a round in which no client answers")
    # Awaited clients are noted at once, and nothing else.
    alike(run.steps[0].state, run.state, "the state goes on changing while no client answers")


def with_rows(host: Host, lists: Iterable[Tensor], **rows: Tensor) -> Host:
    """Return a host whose clients hold other training rows.

    Args:
        lists: numbers of the training rows of each client.
        rows: columns of the data set to replace, `x` or `y`.
    """
    population: Any = host.population
    parts = {**population.parts, "train": Ragged.of([numbers.numpy() for numbers in lists])}
    return replace(host, population=replace(population, parts=parts, rows=replace(population.rows, **rows)))


def degenerate(case: Case, plays: tuple[tuple[str, ...], ...] = ALONE) -> None:
    """Rows of a client may be none, one, of one class, constant or huge: all stays finite."""
    for kinds in plays:
        _odd(case, kinds)


def _odd(case: Case, kinds: tuple[str, ...]) -> None:
    """Play with odd clients: the first ones, one of each kind."""
    host: Any = case.host(case.steady)
    train, rows = host.population.parts["train"], host.population.rows
    lists, x, y = [train[i] for i in range(len(train))], rows.x.clone(), rows.y.clone()
    for client, kind in enumerate(kinds):
        numbers = lists[client]
        if kind == "one class":
            y[numbers] = 0
        elif kind == "one sample":
            lists[client] = numbers[:1]
        elif kind == "no sample":
            lists[client] = numbers[:0]
        else:
            x[numbers] = 1.0 if kind == "constant features" else 3e38
    where = f"if the rows of one client are odd: {', '.join(kinds)}"
    try:
        run, fleet = case.watched(case.steady, host=with_rows(host, lists, x=x, y=y), rounds=4)
    except Exception as error:
        error.add_note(where)
        raise
    hold(all_finite([step.state for step in run.steps]), f"{where}, a number of the state is not finite")
    for ask in fleet.asks:
        hold(all_finite(dict(ask.reply.rows)), f"{where}, '{ask.question}' reveals a number that is not finite")
        hold(all_finite(ask.reply.total), f"{where}, a sum of '{ask.question}' is not finite")
    # Of several models the client may have chosen one that has a loss.
    weights = getattr(run.state, "weights", ())
    several = isinstance(weights, tuple) or None not in map(branch_of, weights.params)
    if "infinite loss" in kinds and not several:
        refused = any(kinds.index("infinite loss") in ask.reply.refused.tolist() for ask in fleet.asks)
        hold(refused, f"{where}, its answer is counted: a number that is not finite is hidden from the fleet")
    *_, scores = judged(run, every=False)
    hold(bool((scores.rows > 0).all()), f"{where}, a client is not judged")


def left(case: Case) -> None:
    """Nothing depends on the rows of a client that has left, and rounds before its first work are as they were."""
    first_work = case.reference.fleet.first_work
    last = max(first_work, key=first_work.__getitem__, default=0)
    experiment = case.make(data={"without_clients": [str(last)]})
    host = case.host(experiment)
    population: Any = host.population
    rows = torch.cat([part[last] for part in population.parts.values()]).long()
    x, y = population.rows.x.clone(), population.rows.y.clone()
    x[rows], y[rows] = x[(rows + 1) % len(x)], (y[rows] + 1) % population.rows.classes
    other = replace(host, population=replace(population, rows=replace(population.rows, x=x, y=y)))
    ours, theirs = played(experiment, host=host), played(experiment, host=other)
    for one, another in zip(ours.steps, theirs.steps, strict=True):
        alike(one.state, another.state, "the state depends on rows of a client that has left")
        alike(dict(one.facts), dict(another.facts), "facts depend on rows of a client that has left")
    for one, before in list(zip(ours.steps, case.reference.steps, strict=True))[: max(first_work.get(last, 0), 0)]:
        alike(one.state, before.state, "a client that leaves changes rounds before it worked")
    hold(last not in ours.fleet.first_work, "a client that has left works")
    for run in (ours, theirs):
        memory = run.host.memory.read(last, (99, 0))
        hold(memory is None, "a client that has left keeps something")
    clients = population.judged(population.clients, "test", ours.fleet.moment)
    hold(last not in clients.tolist(), "a client that has left is judged")
    payload, slot = host.algorithm.serve(ours.state, clients)
    scores = [run.fleet.score(payload, clients, slot=slot) for run in (ours, theirs)]
    alike(scores[0], scores[1], "others are judged by rows of a client that has left")


def no_rows(case: Case, rounds: int = 4) -> None:
    """A client without rows changes the state no more than a client that is not asked, to rounding."""

    def others(clients: Tensor, slot: Slot | None) -> tuple[Tensor, Slot | None]:
        return clients[clients != 3], None if slot is None else slot[clients != 3]

    host = case.host(case.steady)
    train = host.population.parts["train"]
    emptied = with_rows(host, (train[i][: 0 if i == 3 else None] for i in range(len(train))))
    asked, fleet = case.watched(case.steady, host=emptied, rounds=rounds)
    if any("began" in ask.named for ask in fleet.asks):
        raise NotApplicable("clients at work that are not asked yet are part of its state")
    if not any(3 in ask.clients for ask in fleet.asks):
        raise NotApplicable("it does not ask the client without rows")
    left_out, _ = case.watched(case.steady, host=emptied, change=others, rounds=rounds)
    # Blocks are cut from the clients that were asked: with one more the same answers may be added in another order.
    words = "a client without rows changes the state; a work returns None for it"
    near(asked.state, left_out.state, words, 1e-6, 1e-9)


def clients_join(case: Case, rounds: int | None = None) -> None:
    """Clients may join while it is played: they are asked, and the server's state has room for them."""
    try:
        run = played(case.experiment, fleet=partial(Growing, registered=False), rounds=rounds)
    except Exception as error:
        error.add_note("when clients join; is a field of the state with an entry for each client `per_client`?")
        raise
    sound(run, "if clients join")


def join_as_new(case: Case) -> None:
    """A client that joins is as one that was registered from the start and has not answered yet."""
    late, silent = (played(case.experiment, fleet=partial(Growing, registered=early)) for early in (False, True))
    alike(late.state, silent.state, "clients that join are not as those who were silent until then")


def stops(case: Case) -> None:
    """A run that is stopped and goes on ends as one that never stopped."""
    rounds = case.experiment.rounds
    experiment = case.make(eval_every=rounds // 2)
    with TemporaryDirectory() as folder:
        whole, halves = (
            Run(experiment, experiment.method[0], 0, Path(folder, part, "m", "0")) for part in ("whole", "halves")
        )
        list(whole.play())
        numbers = iter(range(1, rounds + 1))
        list(halves.play(stop=lambda: next(numbers) == rounds // 2))
        list(halves.play())
        for name in ("state", "memory"):
            path = f"checkpoints/{rounds:08}/{name}.safetensors"
            ours, theirs = (codec.from_file(run.folder / path) for run in (whole, halves))
            alike(ours, theirs, f"after a stop the {name} is another: something is kept outside of the state")
        for name in ("rounds.jsonl", "clients.csv"):
            equal = (whole.folder / name).read_bytes() == (halves.folder / name).read_bytes()
            hold(equal, f"after a stop {name} is another: something is kept outside of the state")


def round_again(case: Case) -> None:
    """A round that is begun twice gives the same bits."""
    results = []
    with TemporaryDirectory() as folder:
        memory = MemoryStore(Path(folder), small=0)
        run = played(case.experiment, rounds=3, memory=memory)
        memory.settle((3, 0))  # a checkpoint before round 3
        for _ in range(2):
            run.fleet.begin(Moment(3, case.experiment.rounds, 3.0))
            results.append(run.host.algorithm.round(run.state, run.fleet, Rng(0).at(3, "server"))[0])
    alike(results[0], results[1], "a round begun twice ends differently: something is kept outside of the state")
    alike(results[0], case.reference.steps[3].state, "a round begun twice ends differently")


def wire(case: Case) -> None:
    """Payloads, answers, memory and state survive as bytes."""
    with TemporaryDirectory() as folder:
        run = played(case.experiment, engine=ByWire, memory=MemoryStore(Path(folder), small=0), rounds=4)
    alike(run.state, case.reference.steps[3].state, "sent as bytes the result is another")
    alike(codec.from_bytes(codec.to_bytes(run.state)), run.state, "the state does not survive as bytes")


def block_order(case: Case) -> None:
    """The order in which blocks of clients finish changes nothing."""
    run = played(case.experiment, engine=InAnyOrder)
    alike(case.reference.state, run.state, "the order of blocks changes the state")


def workers(case: Case) -> None:
    """Worker processes give the bits of one process."""
    with TemporaryDirectory() as folder:
        spec = spec_of(case.experiment, case.experiment.method[0], 0, Path(folder))

        def engine(host: Host) -> WorkersEngine:
            return WorkersEngine(host, case.pool(), spec)

        one, fleet = case.watched(rounds=3)
        many, workers = case.watched(rounds=3, memory=MemoryStore(Path(folder), small=0), engine=engine)
        alike(fleet.totals, workers.totals, "worker processes give other sums")
        alike(one.state, many.state, "worker processes give another state")
        alike(judged(one, every=False)[-1], judged(many, every=False)[-1], "worker processes judge otherwise")


def deployed(case: Case, nodes: int = 3) -> None:
    """Clients at their own nodes, with questions and answers in bytes, give the bits of a simulation."""
    _deployable(case)
    local = case.reference
    if any(query.sent is not None and len(query.answered) < len(query.ask.clients) for query in local.fleet.queries):
        raise NotApplicable("nobody knows beforehand which real clients answer first")
    with TemporaryDirectory() as folder:
        fleet = near_fleet(local.host, nodes, Path(folder))
        remote = played(case.experiment, fleet=lambda _: fleet)
        for ours, theirs in zip(local.steps, remote.steps, strict=True):
            alike(ours.state, theirs.state, "clients at nodes give another state")
            alike(dict(ours.facts), dict(theirs.facts), "clients at nodes give other facts")
        for client in fleet.clients.tolist():
            memory = local.host.memory.read(client, (99, 0))
            alike(memory, memory_at(fleet, client), "a client at a node keeps something else")
        payload, slot = local.host.algorithm.serve(local.state, fleet.clients)
        whole, parts = (judge.score(payload, fleet.clients, slot=slot, record=True) for judge in (local.fleet, fleet))
    alike(whole.by_sum, parts.by_sum, "clients at nodes judge otherwise")
    if whole.summed:
        _check_sum_of_scores(whole, slot, local.host.wire.fewest)
    else:
        alike([whole.rows, whole.correct], [parts.rows, parts.correct], "clients at nodes judge otherwise")
        near(whole.loss, parts.loss, "clients at nodes judge otherwise", 1e-6, 1e-6)


def _check_sum_of_scores(scores: Scores, slot: Slot | None, fewest: int) -> None:
    """The sums of scores tell the mean of the clients that are judged together with enough others."""
    slots = torch.zeros_like(scores.clients) if slot is None else slot
    counts = ((slots[:, None] == slots).sum(1) >= fewest) & (scores.rows > 0)
    hold((scores.by_sum is None) == (not counts.any()), "sums tell nothing, or of too few clients")
    if scores.by_sum is not None:
        mean = float((scores.correct[counts] / scores.rows[counts]).double().mean())
        near(mean, scores.by_sum.accuracy, "sums tell another accuracy", 1e-6, 1e-6)


def deployed_again(case: Case) -> None:
    """A deployment in which answers are lost or late is played again in simulation with the same bits."""
    _deployable(case)
    host, time = case.host(), Time()
    with TemporaryDirectory() as folder:
        clock = RoundClock(monotonic=time, sleep=time.sleep)
        fleet = near_fleet(host, 5, Path(folder), Losing, clock=clock, patience=1.0)
        remote = played(case.experiment, fleet=lambda _: fleet)
    again = replayed(case.host(), fleet.record_lines())
    words = "a deployment that is played again from its record ends differently"
    alike(remote.state, played(case.experiment, fleet=lambda _: again).state, words)


def masked(case: Case) -> None:
    """Masked sums of clients at their own nodes have the bits of a simulation in fixed point."""
    deployed(_secure(case), case.reference.host.population.registered)


def masked_again(case: Case) -> None:
    """Masked sums open without answers that are lost or late, and the record plays them again."""
    deployed_again(_secure(case))


def _secure(case: Case) -> Case:
    """Return the case with masked sums."""
    secure = replace(case, make=partial(case.make, wire={"secure": True}))
    try:
        library()
        secure.host()
    except FedtideError as error:
        raise NotApplicable(str(error)) from None
    return secure


def _deployable(case: Case) -> None:
    needs = [name for name in case.reference.host.algorithm.traits.reveals if name in SIMULATION_ONLY]
    if needs:
        raise NotApplicable(f"it needs {needs[0]}, which only a simulation knows")


def fixed_point(case: Case, rounds: int | None = None) -> None:
    """Sums in fixed point are the sums of floating point to the resolution, also if clients leave out values."""
    experiment, plain = case.make(wire={"secure": False, "fewest": 1}), list[BlockResult]()

    def compare(question: str, reply: Reply) -> None:
        floating = plain.pop()
        if len(floating.clients) == len(reply.clients):  # else a number was too large
            ours, theirs = _weighed(reply.total), _weighed(floating.total)
            words = f"sums of '{question}' in fixed point are others"
            hold(len(leaves(ours)) == len(leaves(theirs)), words)
            near(ours, theirs, words, 1e-12, len(reply.clients) * 2.0**-BITS)

    case.watched(experiment, engine=lambda host: InBoth(host, plain=plain), look=compare, rounds=rounds)


def _weighed(total: Tree) -> Tree:
    """Return a finished total without values of no weight."""
    if isinstance(total, dict):
        return {key: _weighed(total[key]) for key in sorted(total) if _weighed(total[key]) is not None}
    if isinstance(total, Sum):
        return total if total.weight else None
    return [_weighed(part) for part in total] if isinstance(total, list) else total


def stacks(case: Case) -> None:
    """Clients that are trained together give the same results, to rounding."""
    experiment = case.make(precision="fp64")
    host = case.host(experiment)
    if why := stacked.why_alone(host):
        raise NotApplicable(why)
    one, fleet = case.watched(experiment, host=host, rounds=3)
    many, engine = case.watched(experiment, host=host, rounds=3, engine=stacked.StackedEngine)
    words = "clients that are trained together give another result"
    near([fleet.totals, one.state], [engine.totals, many.state], words, 1e-9, 1e-9)


def pooled(case: Case) -> None:
    """Predicting rows of many clients at once equals predicting client by client."""
    run = case.reference
    payload, slot, clients, whole = judged(run)
    for i in range(len(clients)):
        one = run.fleet.score(payload, clients[i : i + 1], slot=None if slot is None else slot[i : i + 1])
        ours, theirs = ([scores.correct, scores.loss] for scores in (one, whole.pick(torch.tensor([i]))))
        near(ours, theirs, f"`predict` mixes rows: client {int(clients[i])} alone is predicted otherwise", 1e-6, 1e-6)


def batch_size(case: Case) -> None:
    """The number of rows that are predicted at once changes nothing."""
    payload, slot, clients, whole = judged(case.reference)
    with patch.object(scoring, "ROWS", 7):
        parts = case.reference.fleet.score(payload, clients, slot=slot)
    words = "`predict` mixes rows: fewer at a time are predicted otherwise"
    alike([whole.rows, whole.correct, whole.choice], [parts.rows, parts.correct, parts.choice], words)
    near([whole.loss, whole.weights], [parts.loss, parts.weights], words, 1e-6, 1e-6)
    if whole.weights is not None and whole.choice is not None:
        near(whole.weights.sum(1), whole.choice.sum(1), "the weights of a row's experts do not sum to one", 1e-6, 1e-6)


def no_memory(case: Case) -> None:
    """The server's payload can be judged without the memory of clients."""
    run = case.reference
    payload, slot, clients, _ = judged(run, every=False)
    scores = run.fleet.score(payload, clients, slot=slot, personal=False)
    hold(all_finite(scores), "without memory a number of a prediction is not finite")


def numbers(case: Case) -> None:
    """It trains on numbers too, mixtures with a likelihood, or the registry says that it needs classes."""
    if case.experiment.method[0].algorithm not in REGISTRY:
        raise NotApplicable("it may be for classes alone")
    options = {} if "loss" not in case.experiment.method[0].model_fields_set else {"loss": "cross-entropy"}

    def play(target: Mapping[str, str]) -> Played:
        return played(case.make(options, data={"target": target}, shift={"how": {"kind": "identity"}}), rounds=2)

    try:
        run = play({"kind": "number"})
    except FedtideError as error:
        hold("data.target" in str(error), f"it refuses numbers without a word on data.target: {error}")
        run = play({"kind": "number", "loss": "gaussian"})
    hold("reference" in sound(run, "of numbers").sums, "clients were not judged by their numbers")


# -- private sums ------------------------------------------------------------------------------------------------------


def private(case: Case) -> None:
    """A private run is the run without privacy but for bounds and noise, and all released sums have noise."""
    experiment = _private(case)
    plain = case.make(wire={"secure": False, "fewest": 1})
    usual = played(plain, host=_even(case.host(plain)), rounds=3)
    quiet, _ = _released(experiment, 3, lambda stream, number, size: torch.zeros(size, dtype=torch.float64))
    # Sums of a state over rounds may count samples, and here count clients: served payloads do not depend on them.
    ours, theirs = (run.host.algorithm.serve(run.state, run.host.population.clients)[0] for run in (quiet, usual))
    near(ours, theirs, "bounds that cut nothing and noise of zero change what is served", 1e-4, 1e-5)
    _, sums = _released(experiment, 1, lambda stream, number, size: torch.ones(size, dtype=torch.float64))
    for form, total, released in sums:
        before, after = form.tables(total), form.tables(released)
        for name, table in after.items():
            seen = table != 0
            bare = seen & (table == before[name])
            bare[:, -1] &= len(table) > 1  # of a leaf without slots it is the number of clients
            hold(not bool(bare.any()), f"'{name or WHOLE}' is released without noise")


@dataclass(frozen=True)
class _Recorded:
    """The server's step that records its sums, before and after they are released."""

    step: ServerStep
    sums: list[tuple[Form, Tensor, Tensor]]
    safe: ClassVar[None] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def release(self, total: Tensor, opening: Opening) -> Tensor:
        released = self.step.release(total.clone(), opening)
        self.sums.append((opening.form, total, released.clone()))
        return released


def _private(case: Case) -> Experiment:
    """Return the toy experiment with privacy, and a bound for each value that is summed."""

    def bounded(clip: dict[str, float]) -> Experiment:
        privacy = {"multiplier": FAINT, "distance": 1, "clip": clip}
        return case.make(wire={"secure": False, "fewest": 1, "privacy": privacy})

    try:
        whole = bounded({WHOLE: WIDE})
        forms = sums_of(whole.method[0], case.host(whole))
        names = sorted({leaf.name or WHOLE for form in forms for leaf in form.leaves})
        if not names:
            raise NotApplicable("it sums nothing")
        experiment = bounded(dict.fromkeys(names, WIDE))
        case.host(experiment)
    except FedtideError as why:
        raise NotApplicable(str(why)) from None
    return experiment


def _even(host: Host) -> Host:
    """Return a host whose clients hold equally many rows of each part: in private sums each client counts once."""

    def even(part: Any) -> list[np.ndarray]:
        fewest = int(part.counts[part.counts > 0].min()) if len(part.rows) else 0
        return [part[client][:fewest].numpy() for client in range(len(part))]

    return with_parts(host, even)


def _released(experiment: Experiment, rounds: int, draw: Draw) -> tuple[Played, list[tuple[Form, Tensor, Tensor]]]:
    """Play rounds of a private run with some noise; return it, and each sum with its form, before and after."""
    host = _even(host_of(experiment, experiment.method[0], 0))
    wire, sums = server_wire(experiment, experiment.method[0], host, draw), list[tuple[Form, Tensor, Tensor]]()
    assert wire.server is not None
    server: Any = _Recorded(wire.server, sums)

    def watch(fleet: SimulatedFleet) -> Watched:
        fleet.vectors = replace(fleet.vectors, wire=replace(wire, server=server))
        return Watched(fleet, look=look)

    asked = 0

    def look(question: str, reply: Reply) -> None:
        nonlocal asked
        hold(len(sums) > asked or not leaves(reply.total), f"the sum of '{question}' is read before it is released")
        asked = len(sums)

    return played(experiment, host=host, fleet=watch, rounds=rounds), sums


# -- all laws ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """A law: the name by which an exemption is declared, and its function, whose docstring states it."""

    name: str
    check: Callable[[Case], None]

    @property
    def says(self) -> str:
        """Statement of the law."""
        return (self.check.__doc__ or "").partition("\n")[0].rstrip(".")


CHECKS: dict[str, list[Callable[[Case], None]]] = {
    "play": [plays],
    "state": [frozen_state],
    "determinism": [same_seed, cohort_order, global_randomness],
    "purity": [pure_works, pure_round],
    "update": [whole_update],
    "sums": [declared_reveals, sums_only, halves_add_up],
    "memory": [kept_memory],
    "cover": [one_slot_each],
    "alignment": [row_order],
    "dropouts": [dropouts],
    "degenerate": [degenerate, no_rows],
    "join": [clients_join],
    "left": [left],
    "newcomers": [join_as_new],
    "resume": [stops, round_again],
    "wire": [wire],
    "parity": [block_order, workers, stacks],
    "fixed point": [fixed_point],
    "deployed": [deployed, deployed_again],
    "masks": [masked, masked_again],
    "private": [private],
    "pooled": [pooled, batch_size, no_memory],
    "numbers": [numbers],
}
LAWS = tuple(Law(name, check) for name, checks in CHECKS.items() for check in checks)
"""All laws, in the order in which they are checked: the first failure explains most."""


# -- check -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The result of a law.

    Args:
        law: the law.
        broken: the reason if it does not hold; None if it holds.
        silent: reason why it does not apply to the algorithm, or is not checked; None if it was checked.
    """

    law: Law
    broken: str | None = None
    silent: str | None = None


def check(algorithm: str, sets: Sequence[str] = ()) -> Iterator[Verdict]:
    """Check every law on an algorithm, one after the other.

    A law is left out if the registry declares an exemption. If the algorithm cannot be played, nothing else is
    checked.

    Args:
        algorithm: `module:function`, `python:module:function`, or a registered name.
        sets: overrides `key=value` of the toy experiment, "method.mu=0.1" for an option.

    Raises:
        FedtideError: there is no such algorithm, or it does not take the options.
    """
    name = algorithm.removeprefix("python:")
    make = partial(toy, name, sets=sets)
    make()
    entry = REGISTRY.get(name)
    with ExitStack() as stack:
        case = Case(make, cache(lambda: stack.enter_context(Pool(3, joined=True))))
        for law in LAWS:
            why = None if entry is None else entry.exempt.get(law.name)
            verdict = Verdict(law, silent=why) if why else _verdict(law, case)
            yield verdict
            if law is LAWS[0] and verdict.broken is not None:
                return


def _verdict(law: Law, case: Case) -> Verdict:
    try:
        law.check(case)
    except NotApplicable as why:
        return Verdict(law, silent=str(why))
    except Broken as why:
        return Verdict(law, broken=str(why))
    except Exception as error:  # of the person's code
        return Verdict(law, broken=described(error))
    return Verdict(law)


def described(error: Exception) -> str:
    """Describe an error in one line, with the last line of the person's own code in its traceback."""
    line = f"{type(error).__name__}: {error}" if not isinstance(error, FedtideError) else str(error)
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    frames = [(Path(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
    places = [
        f" ({path.name}, line {frame.lineno}, in {frame.name})"
        for path, frame in frames
        if path.suffix == ".py" and PACKAGE not in path.parents and "/lib/python" not in str(path)
    ]
    where = places[-1] if places else ""
    return shorten(f"{line}{notes}{where}", 400, placeholder=" ...")
