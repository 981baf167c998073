"""A deployment played again in simulation: who took part and whose answers counted is what its record says.

The record is `asks.jsonl`, a line per round as `RemoteFleet.told` makes it. Where the rows of all clients are at hand,
the simulation has the bits of the deployment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError, refused
from fedtide.core.trees import Tree
from fedtide.fleets.ask import Ask, BlockResult
from fedtide.fleets.client import is_finite
from fedtide.fleets.host import Host
from fedtide.fleets.local import LocalEngine, threads
from fedtide.fleets.simulated import Race, SimulatedFleet
from fedtide.fleets.totals import Block
from fedtide.fleets.vectors import Vectors
from fedtide.remote.fleet import AT_WORK
from fedtide.remote.node import ABSTAINED, ANSWERED, NOT_FINITE
from fedtide.wire.steps import Wire

Lines = Mapping[int, Mapping[str, Any]]
"""Lines of a record by the number of their round."""

NEVER = 1e12
"""Seconds of an answer that has not come."""


def replayed(host: Host, lines: Iterable[Mapping[str, Any]], count: int = 1, wire: Wire | None = None) -> RecordedFleet:
    """Build a simulation in which those take part who took part in a deployment.

    Args:
        host: the algorithm, and the clients with their rows.
        lines: of `asks.jsonl`, in their order; where a round was played twice the later one counts.
        count: torch threads of one client's work, as many as the nodes had.
        wire: as the server knows it; None as clients do.
    """
    by_round = {line["round"]: line for line in lines}
    engine = RecordedEngine(host, count, by_round)
    reveals, adapts = host.algorithm.traits.reveals, host.algorithm.adapt is not None
    return RecordedFleet(
        host.population,
        engine,
        RecordedClock(by_round),
        reveals=reveals,
        adapts=adapts,
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

    def _race(self, ask: Ask, down: int, began: Tensor | None, first: int | None, deadline: float | None) -> Race:
        """Return that those count whose work came in time, and that the server waited for no other."""
        words = _words(_asked(self.lines, ask.moment, ask.number))
        heard = [words[client] in (ANSWERED, ABSTAINED, NOT_FINITE) for client in ask.clients.tolist()]
        none, each = torch.zeros(len(ask.clients), dtype=torch.float64), down // max(len(ask.clients), 1)
        sent = None if began is None else began.isinf()
        down = down if sent is None else each * int(sent.sum())
        return Race(torch.tensor(heard, dtype=torch.bool), sent, none, none, each, down, 0, None)


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
            if _asked(self.lines, ask.moment, ask.number)["sent"] is None:
                yield from super().ask([ask], payload)
                continue
            block = Block(ask, self.host.wire)
            for place, (client, received) in enumerate(ask.sent(payload)):
                then = self._when_asked(ask.of(torch.tensor([place])))
                with threads(self.threads):
                    answer = self.host.clients.answer(then, client, received)
                if answer is not None and is_finite(answer):
                    block.count(client, answer)
                    if answer.memory is not None:
                        self.memory.stage(client, answer.memory)
                elif answer is not None:
                    block.refuse(client)
            yield block.result()

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
