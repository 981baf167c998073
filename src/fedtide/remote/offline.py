"""Deployments without a network: nodes in this process, a trial of a method, and a recorded deployment played again.

The record is `asks.jsonl`, a line for each round (`RemoteFleet.record_lines`). With the rows of all clients the
simulation has the bits of the deployment.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtide.core.base import Algorithm, Answer, Memory, Moment, Shard
from fedtide.core.errors import FedtideError, refused
from fedtide.core.loop import begin, play
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import Tree
from fedtide.data.partition import IID, Split
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.fleets.ask import ABSTAINED, NOT_FINITE, Ask, BlockResult
from fedtide.fleets.devices import SteadyClock
from fedtide.fleets.engines import Host, LocalEngine
from fedtide.fleets.simulated import Race, SimulatedFleet
from fedtide.fleets.totals import Vectors
from fedtide.learn.target import CLASSES
from fedtide.remote.asks import ANSWERED, AT_WORK
from fedtide.remote.fleet import RemoteFleet
from fedtide.remote.messages import Carrier, OpenQuestion, Question, Response
from fedtide.remote.node import Node
from fedtide.remote.node_memory import NodeMemory
from fedtide.remote.schedule import Rehearsed
from fedtide.wire.answer_schema import ROWS, made_up
from fedtide.wire.masks import Masker
from fedtide.wire.pipeline import FLOATING, Wire


class NearCarrier:
    """A carrier to nodes in this process, which answer when they are asked after, in the order of the questions.

    Args:
        nodes: by name.
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = nodes
        self._questions: deque[OpenQuestion] = deque()

    def removed(self) -> frozenset[str]:
        """Return no name."""
        return frozenset()

    def present(self) -> frozenset[str]:
        """Return the names of all nodes."""
        return frozenset(self.nodes)

    def push(self, questions: Sequence[Question]) -> None:
        """Take questions."""
        self._questions.extend(map(OpenQuestion, questions))

    def drop(self, questions: Sequence[str]) -> None:
        """Do nothing: nodes answer all that they are asked."""

    def pull(self) -> list[Response]:
        """Let a node answer one question."""
        if not self._questions:
            return []
        waiting = self._questions.popleft()
        question = waiting.question
        header, payload = self.nodes[question.node].handle(json.loads(json.dumps(question.header)), question.payload)
        return [waiting.respond(json.loads(json.dumps(header)), payload)]


def near_fleet(
    host: Host,
    nodes: int,
    folder: Path,
    carry: Callable[[Mapping[str, Node]], Carrier] = NearCarrier,
    wire: Wire | None = None,
    **options: Any,
) -> RemoteFleet:
    """Build a fleet of nodes in this process, which share the clients of a simulation.

    Args:
        host: the algorithm, and the clients with their rows.
        nodes: how many; the first ones have a client more.
        folder: folder of theirs, in which each keeps what its clients keep.
        carry: makes the carrier from the nodes by name.
        wire: as the server knows it; None as clients do.
        options: further arguments of `RemoteFleet`.
    """
    population, algorithm = host.population, host.algorithm
    roster = {f"node-{k}": ids.tolist() for k, ids in enumerate(population.clients.tensor_split(nodes))}
    at = {
        name: Node(
            algorithm,
            host.seed,
            population,
            folder / name,
            partial_work=host.partial_work,
            wire=host.wire,
            masker=Masker("", name) if host.wire.secure else None,
            clients=frozenset(roster[name]),
        )
        for name in roster
    }
    return RemoteFleet(
        carry(at),
        roster,
        **{"who": Rehearsed(population)} | options,
        traits=algorithm.traits,
        vectors=Vectors.of(wire or host.wire, algorithm, population.few()),
    )


def memory_at(fleet: RemoteFleet, client: int) -> Memory:
    """Return the memory of a client at a node in this process, at the version that counts."""
    assert isinstance(fleet.carrier, NearCarrier)
    (name,) = (name for name, clients in fleet.roster.items() if client in clients)
    counted = {client: fleet.counted(client)}
    return NodeMemory(fleet.carrier.nodes[name].folder, counted).read(client, (0, 0))


CLIENTS, ROUNDS = 8, 3
"""Clients and rounds of a trial."""


def trial(
    algorithm: Algorithm[Any], like: Shard, classes: int, clients: int = CLIENTS, wire: Wire = FLOATING
) -> Iterator[tuple[SimulatedFleet, Any]]:
    """Play a trial; yield the fleet, with the questions of a round and what was sent, and the state.

    Args:
        like: rows as a model sees them, one at least.
        classes: number of classes, or of bins.
        clients: how many there are; some methods need several.
        wire: how sums pass to the server; here none is too small, and nothing is done to it.
    """
    rows = made_up(like, classes, ROWS * clients)
    y, value = (rows.y, None) if rows.bins is None else (rows.bins, rows.y)
    target = CLASSES if algorithm.task is None else algorithm.task.target
    source = Rows("made-up rows", rows.x, y, classes, value=value, target=target)
    population = build(source, IID(clients=clients), split=Split(val=0.2, test=0.2))
    plain = replace(wire, fewest=1, clip=None, server=None)
    host = Host(algorithm, population, 0, MemoryStore(None), wire=plain)
    fleet = SimulatedFleet.of(host, LocalEngine(host), SteadyClock(), range(-1 - algorithm.traits.before, ROUNDS))
    start = begin(algorithm, fleet, seed=0, rounds=ROUNDS)
    yield fleet, start.state
    for step in play(algorithm, fleet, start, seed=0, rounds=ROUNDS):
        yield fleet, step.state


Lines = Mapping[int, Mapping[str, Any]]
"""Lines of a record by the number of their round."""

NEVER = 1e12
"""Seconds of an answer that has not come."""


def replayed(
    host: Host, lines: Iterable[Mapping[str, Any]], count: int = 1, wire: Wire | None = None
) -> "RecordedFleet":
    """Build a simulation in which those take part who took part in a deployment.

    Args:
        host: the algorithm, and the clients with their rows.
        lines: of `asks.jsonl`, in their order; if a round was played twice the later one counts.
        count: torch threads of one client's work, as many as the nodes had.
        wire: as the server knows it; None as clients do.
    """
    by_round = {line["round"]: line for line in lines}
    engine = RecordedEngine(host, count, by_round)
    return RecordedFleet(
        host.population,
        engine,
        RecordedClock(by_round),
        reveals=host.algorithm.traits.reveals,
        adapts=host.algorithm.adapt is not None,
        vectors=Vectors.of(host.wire if wire is None else wire, host.algorithm, host.population.few()),
        lines=by_round,
    )


@dataclass(eq=False)
class RecordedFleet(SimulatedFleet):
    """A simulated fleet in which those are there, are drawn and answer who did.

    Args:
        lines: the record.
    """

    lines: Lines = field(default_factory=dict)

    def begin(self, moment: Moment) -> None:
        """Enter a moment, at the time at which it was entered."""
        super().begin(replace(moment, seconds=_line(self.lines, moment)["seconds"]))

    def elapsed(self) -> float:
        """Return the seconds until the next round began."""
        return float(_line(self.lines, self.moment)["elapsed"])

    @property
    def clients(self) -> Tensor:
        """The roster of the round."""
        return torch.arange(_line(self.lines, self.moment)["clients"])

    @property
    def reachable(self) -> Tensor:
        """The clients that could be reached."""
        return torch.tensor(_line(self.lines, self.moment)["reachable"], dtype=torch.int64)

    def arrivals(self, m: int) -> Tensor:
        """Return the clients that were drawn."""
        drawn = _line(self.lines, self.moment)["arrivals"]
        if str(m) not in drawn:
            where = f"asks.jsonl: round {self.moment.round}: arrivals"
            raise refused(where, f"those of {', '.join(drawn) or 'no draw'}", f"a draw of {m} clients")
        return torch.tensor(drawn[str(m)], dtype=torch.int64)

    def _closed(self, ask: Ask) -> Mapping[int, list[int]]:
        """Return by slot the units that were not opened, also because of who the owners are and what they want."""
        closed = _asked(self.lines, ask.moment, ask.number).get("closed", {})
        return {int(slot): units for slot, units in closed.items()}

    def _race(self, ask: Ask, down: int, began: Tensor | None, first: int | None, deadline: float | None) -> Race:
        """Count the clients whose work came in time, and let the server wait for no other."""
        words = _words(_asked(self.lines, ask.moment, ask.number))
        counts = [words[client] in (ANSWERED, ABSTAINED, NOT_FINITE) for client in ask.clients.tolist()]
        none, size = torch.zeros(len(ask.clients), dtype=torch.float64), down // max(len(ask.clients), 1)
        sent = None if began is None else began.isinf()
        down = down if sent is None else size * int(sent.sum())
        counted = torch.tensor(counts, dtype=torch.bool)  # the clock knows who was still at work
        return Race(counted, torch.zeros_like(counted), sent, none, none, size, down, 0, None)


@dataclass(frozen=True)
class RecordedClock:
    """A clock on which every answer takes as long as it took.

    Args:
        lines: the record.
    """

    lines: Lines

    def answers(self, ask: Ask, rows: Tensor, down: int, up: int) -> Tensor:
        """Return the seconds until each client answered (clients,)."""
        line = _asked(self.lines, ask.moment, ask.number)
        took, words = dict(zip(line["answered"], line["seconds"], strict=True)), _words(line)
        times = [took.get(client, NEVER if words[client] == AT_WORK else 0.0) for client in ask.clients.tolist()]
        return torch.tensor(times, dtype=torch.float64)

    def round(self, asks: Sequence[float], server: float = 0.0) -> float:
        """Return 0: the record says how long the round took."""
        return 0.0


@dataclass(frozen=True)
class RecordedEngine(LocalEngine):
    """An engine whose clients work with the key and at the moment of the round in which they were asked.

    Args:
        lines: the record.
    """

    lines: Lines = field(default_factory=dict)

    def ask(self, blocks: Sequence[Ask], payload: Tree) -> Iterator[BlockResult]:
        """Run a question."""
        for ask in blocks:
            anew = _asked(self.lines, ask.moment, ask.number)["sent"] is None
            yield self._with_threads(self.host.ask, ask, payload, None if anew else self._answers)

    def _answers(self, ask: Ask, payload: Tree) -> Iterator[tuple[int, Answer | None]]:
        """Yield each client with its answer to the question as it was sent."""
        for place, (client, received) in enumerate(ask.sent(payload)):
            sent = self._when_asked(ask.of(torch.tensor([place])))
            yield client, self.host.clients.answer(sent, client, received)

    def _when_asked(self, ask: Ask) -> Ask:
        """Return the question to one client as it was sent."""
        (client,) = ask.clients.tolist()
        for number in range(ask.moment.round, min(self.lines) - 1, -1):
            for place, line in reversed(list(enumerate(self.lines[number]["asks"]))):
                if line["question"] == ask.question and client in (line["sent"] or ()):
                    moment = Moment(number, ask.moment.rounds, self.lines[number]["seconds"])
                    return replace(ask, moment=moment, purpose=line["purpose"], number=place)
        raise FedtideError(f"asks.jsonl: client {client} answers '{ask.question}', and was never asked")


def _line(lines: Lines, moment: Moment) -> Mapping[str, Any]:
    if moment.round not in lines:
        raise refused("asks.jsonl: rounds", f"{min(lines, default=0)} to {max(lines, default=0)}", f"{moment.round}")
    return lines[moment.round]


def _asked(lines: Lines, moment: Moment, number: int) -> Mapping[str, Any]:
    asks: Sequence[Mapping[str, Any]] = _line(lines, moment)["asks"]
    if number >= len(asks):
        raise refused(f"asks.jsonl: round {moment.round}", f"{len(asks)} questions", "those of the same method")
    return asks[number]


def _words(line: Mapping[str, Any]) -> dict[int, str]:
    return {int(client): word for node in line["nodes"].values() for client, word in node["clients"].items()}
