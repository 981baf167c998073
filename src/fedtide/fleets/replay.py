"""A deployment played again in simulation: who took part and whose answers counted is what its record says.

The record is `asks.jsonl`, a line per round as `RemoteFleet.told` makes it. Where the rows of all clients are at hand,
the simulation has the bits of the deployment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.loop import Start
from fedtide.core.trees import Tree
from fedtide.core.types import Moment
from fedtide.data.population import Population
from fedtide.fleets.ask import Ask, BlockResult
from fedtide.fleets.client import is_finite
from fedtide.fleets.host import Host
from fedtide.fleets.local import LocalEngine, threads
from fedtide.fleets.node import ABSTAINED, ANSWERED, NOT_FINITE
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.totals import Block

Lines = Mapping[int, Mapping[str, Any]]
"""Lines of a record by the number of their round."""

NEVER = 1e12
"""Seconds of an answer that has not come."""


def replayed(host: Host, lines: Iterable[Mapping[str, Any]], count: int = 1) -> SimulatedFleet:
    """Build a simulation in which those take part who took part in a deployment.

    Args:
        host: the algorithm, and the clients with their rows.
        lines: of `asks.jsonl`, in their order; where a round was played twice the later one counts.
        count: torch threads of one client's work, as many as the nodes had.
    """
    by_round = {line["round"]: line for line in lines}
    own = {part.name: getattr(host.population, part.name) for part in fields(Population)}
    population = RecordedPopulation(**own, lines=by_round)
    engine = RecordedEngine(replace(host, population=population), count, by_round)
    return SimulatedFleet(population, engine, RecordedClock(by_round), reveals=host.algorithm.reveals)


def started(start: Start[Any], lines: Iterable[Mapping[str, Any]]) -> Start[Any]:
    """Return the start of the replay, at the time of day at which the deployment began."""
    return next((replace(start, seconds=line["seconds"]) for line in lines if line["round"] == start.round), start)


@dataclass(frozen=True, repr=False)
class RecordedPopulation(Population):
    """A population of which those are there who were.

    Args:
        lines: the record.
    """

    lines: Lines = field(default_factory=dict)

    def arrivals(self, m: int, moment: Moment) -> Tensor:
        """Return the clients that were drawn."""
        drawn = _line(self.lines, moment)["arrivals"]
        if str(m) not in drawn:
            raise FedtideError(
                f"asks.jsonl: round {moment.round}: found no draw of {m} clients, allowed: its own method"
            )
        return torch.tensor(drawn[str(m)], dtype=torch.int64)

    def reachable(self, moment: Moment) -> Tensor:
        """Return the clients that could be reached."""
        return torch.tensor(_line(self.lines, moment)["reachable"], dtype=torch.int64)

    def substituted(self, m: int, moment: Moment) -> int:
        """Return 0: of real clients nobody replaces another."""
        return 0

    def answers(self, clients: Tensor, moment: Moment, ask: int, began: Tensor | None = None) -> Tensor:
        """Return the mask (clients,) of those of whom the work came in time."""
        words = _words(_asked(self.lines, moment, ask))
        heard = [words[client] in (ANSWERED, ABSTAINED, NOT_FINITE) for client in clients.tolist()]
        return torch.tensor(heard, dtype=torch.bool)

    def wait(self, moment: Moment) -> float:
        """Return the seconds until the next round began."""
        line = _line(self.lines, moment)
        after = self.lines.get(moment.round + 1)
        return float(line["elapsed"] if after is None else after["seconds"] - moment.seconds)


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
        times = [took.get(client, NEVER if words[client] == "at work" else 0.0) for client in ask.clients.tolist()]
        return torch.tensor(times, dtype=torch.float64)

    def round(self, asks: Sequence[float], server: float = 0.0) -> float:
        """Return 0: how long the round took is what the population waits."""
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
            block = Block(ask)
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
        raise FedtideError(f"asks.jsonl: found no round {moment.round}, allowed: {min(lines)} to {max(lines)}")
    return lines[moment.round]


def _asked(lines: Lines, moment: Moment, number: int) -> Mapping[str, Any]:
    asks: Sequence[Mapping[str, Any]] = _line(lines, moment)["asks"]
    if number >= len(asks):
        raise FedtideError(f"asks.jsonl: round {moment.round}: found {len(asks)} questions, allowed: its own method")
    return asks[number]


def _words(line: Mapping[str, Any]) -> dict[int, str]:
    return {int(client): word for node in line["nodes"].values() for client, word in node["clients"].items()}
