"""The record of the questions to real clients: `asks.jsonl`, a line for each round."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, Field
from torch import Tensor

from fedtide.core.base import Moment, Reply
from fedtide.core.record import ASKS, read_lines
from fedtide.fields.types import HIDDEN, Fraction, NonNegative, Strict, Text
from fedtide.fleets.ask import ABSTAINED, NOT_FINITE, Ask
from fedtide.remote.messages import LINES

ANSWERED, REFUSED = "answered", "refused: "
"""More words of a node for what became of a client; the last one goes on with the reason."""

LATE, AT_WORK, LOST = "late", "at work", "lost: "
"""Words of the server for a client whose answer is not in time, that is asked after again, or of which nothing came,
with the reason."""

TOO_FEW = f"{LOST}too few others answered"
"""Word for a client that answered, if fewer clients did than a sum needs."""

UNOPENED = f"{LOST}its sum was not opened: too few answered, or some vanished meanwhile"
"""Word for a client in whose sum there is no fault of its own."""

UNSIGNED = f"{REFUSED}its key for masks is not one of its own, signed by its registered key"
"""Word for a client whose node is not asked for masked answers, because all others would refuse to answer."""

TOO_LARGE = f"{REFUSED}a number of its answer is too large for the sum"
"""Word of a node for a client whose answer does not fit a sum in fixed point."""

WORDS = (ANSWERED, ABSTAINED, AT_WORK, LATE, "refused")
"""What becomes of an answer, the best first."""


REASONS, OTHER = 20, "other reasons"
"""Reasons that are told apart of a node, which may word each of them anew, and what the others are called."""


@dataclass
class AskRecord:
    """The rounds that a server has not written yet: who was present, what was asked and what came of it.

    Attributes:
        asks: the questions of this round.
        arrivals: by the number that was wanted, the clients that were drawn in this round.
        scored: by node, the bytes of the evaluations in this round.
    """

    asks: list[dict[str, Any]] = field(default_factory=list)
    arrivals: dict[str, list[int]] = field(default_factory=dict)
    scored: dict[str, dict[str, int]] = field(default_factory=dict)
    _lines: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> None:
        """Begin a round."""
        self.asks, self.arrivals, self.scored = [], {}, {}

    def add(self, ask: Ask, sent: Tensor | None, reply: Reply, nodes: Mapping[str, Any]) -> None:
        """Add a question: enough to play it again, and to tell each node what was asked."""
        line = {
            "question": ask.question,
            "purpose": ask.purpose,
            "reveal": list(ask.reveal),
            "clients": ask.clients.tolist(),
            "sent": None if sent is None else ask.clients[sent].tolist(),
            "answered": reply.clients.tolist(),
            "seconds": reply.seconds.tolist(),
            "nodes": nodes,
        }
        self.asks.append(line)

    def score(self, nodes: Mapping[str, Any]) -> None:
        """Add the bytes of an evaluation, of which no answers are recorded."""
        for name, node in nodes.items():
            before = self.scored.get(name, {"down": 0, "up": 0})
            self.scored[name] = {way: before[way] + node[way] for way in before}

    def end_round(self, moment: Moment, elapsed: float, clients: int, present: list[str], reachable: list[int]) -> None:
        """Add the line of a round that is over."""
        line = {
            "round": moment.round,
            "seconds": moment.seconds,
            "elapsed": elapsed,
            "clients": clients,
            "present": present,
            "reachable": reachable,
            "arrivals": self.arrivals,
            "asks": self.asks,
            "scored": self.scored,
        }
        self._lines.append(line)

    def take(self) -> list[dict[str, Any]]:
        """Return the lines since the last call."""
        lines, self._lines = self._lines, []
        return lines


def find_failed(nodes: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return by reason the clients whose answers to a question are late, lost or refused.

    >>> find_failed({"lyon": {"clients": {"0": "late", "1": "abstained", "2": "refused: weight 1e30"}}})
    {'late': [0], 'refused: weight 1e30': [2]}
    """
    failed: dict[str, list[int]] = {}
    for node in nodes.values():
        for client, word in node["clients"].items():
            if word not in (ANSWERED, ABSTAINED, AT_WORK, UNOPENED):
                failed.setdefault(word, []).append(int(client))
    return failed


@dataclass
class NodeRecord:
    """The record of a node.

    Args:
        name: its name in the roster.
        clients: ids of the clients that were asked.
        rounds: in how many it was connected.
        words: how many answers of clients became what: "answered", "late", "refused", ...
        reasons: why answers were refused or lost.
        shown: names of what the server was shown of each of its clients.
        down: bytes that it received, with those of evaluations.
        up: bytes that it sent, with those of evaluations.
        seconds: from each question to its answer.
    """

    name: str
    clients: set[str] = field(default_factory=set)
    rounds: int = 0
    words: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    shown: set[str] = field(default_factory=set)
    down: int = 0
    up: int = 0
    seconds: list[float] = field(default_factory=list)

    def hear(self, ask: Mapping[str, Any], line: Mapping[str, Any]) -> None:
        """Add what became of it in one question."""
        self.clients |= line["clients"].keys()
        self.down, self.up = self.down + line["down"], self.up + line["up"]
        states = [state_of(word) for word in line["clients"].values()]
        self.words.update(states)
        for word in line["clients"].values():
            if ": " in word or word == NOT_FINITE:
                is_known = word in self.reasons or len(self.reasons) < REASONS
                self.reasons[word if is_known else OTHER] += 1
        if "answered" in states:
            self.shown.update(ask["reveal"])
            if line.get("seconds") is not None:
                self.seconds.append(line["seconds"])

    @property
    def asked(self) -> int:
        """Number of answers that were asked for."""
        return sum(self.words.values())


def state_of(word: str) -> str:
    """Return which of `WORDS` a word of the record means; one that is not known counts as refused.

    >>> state_of("refused: a number is missing"), state_of("lost: it died"), state_of("not finite")
    ('refused', 'late', 'refused')
    """
    begin = word.partition(":")[0]
    other = {NOT_FINITE: "refused", "lost": "late"}
    return other.get(begin, begin if begin in WORDS else "refused")


Short = Annotated[Text, Field(max_length=200)]


class LastAnswer(Strict):
    """The last answer of a node, or the reason why there is none.

    Args:
        node: the node's name in the roster.
        at: time at which it came, or was given up.
        seconds: from the question to then.
        word: what became of it; of several clients the worst word.
        load: processes that run or wait at its machine, for each processor; None if its owner does not tell it.
        memory: share of memory in use there; None likewise.
        log: last lines of its log that its owner lets out.
    """

    node: Short
    at: AwareDatetime
    seconds: NonNegative
    word: Short
    load: NonNegative | None = None
    memory: Fraction | None = None
    log: Annotated[tuple[Short, ...], Field(max_length=LINES)] = ()

    @staticmethod
    def of(node: str, seconds: float, words: Iterable[str], facts: Mapping[str, Any] | None = None) -> "LastAnswer":
        """Return the answer that came now.

        Args:
            node: the node's name.
            seconds: since the question.
            words: what became of its clients, which the node may have written.
            facts: of its machine (`fedtide.remote.machine_facts.read_facts`).

        >>> LastAnswer.of("lyon", 0.5, ["answered", "refused: too\\ufffdlate"]).word
        'refused: too?late'
        """
        worst = max(words, key=lambda word: WORDS.index(state_of(word)))
        visible = HIDDEN.sub("?", " ".join(worst.split()))[:200]
        values = {"seconds": max(round(seconds, 3), 0.0), "word": visible, **(facts or {})}
        return LastAnswer(node=node, at=datetime.now(UTC), **values)


@dataclass(frozen=True)
class FewChose:
    """A part of a masked sum that stayed closed, because too few clients had something in it.

    Args:
        name: its name, such as "cluster 0".
        times: number of questions in which it stayed closed.
        most: largest number of clients in it then.
        needed: number of clients that it needed then.
    """

    name: str
    times: int
    most: int
    needed: int


def read_asks(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `asks.jsonl` in the folder of a run; raise if one is not what this program writes."""

    def check(line: dict[str, Any]) -> dict[str, Any]:
        """Return the line; counting it raises if it has another shape."""
        nodes_of([line])
        closed_in([line])
        int(line["round"])
        return line

    return read_lines(folder, ASKS, check)


def closed_in(lines: Sequence[Mapping[str, Any]]) -> list[FewChose]:
    """Return the parts of masked sums that stayed closed, by the lines of a run's `asks.jsonl`.

    >>> closed_in([{"asks": [{"few": {"cluster 0": [2, 4]}}]}, {"asks": [{"few": {"cluster 0": [3, 4]}}, {}]}])
    [FewChose(name='cluster 0', times=2, most=3, needed=4)]
    """
    counts: dict[str, list[tuple[int, int]]] = {}
    for line in lines:
        for ask in line["asks"]:
            for name, (count, needed) in ask.get("few", {}).items():
                counts.setdefault(name, []).append((count, needed))
    return [FewChose(name, len(pairs), *max(pairs)) for name, pairs in sorted(counts.items())]


def refusals_of(lines: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Count the refused answers in the lines of a run's `asks.jsonl` by their reason."""
    reasons = sum((node.reasons for node in nodes_of(lines)), Counter[str]())
    return Counter({word: count for word, count in reasons.items() if state_of(word) == "refused"})


def nodes_of(lines: Sequence[Mapping[str, Any]]) -> list[NodeRecord]:
    """Return the record of each node, by name, from the lines of a run's `asks.jsonl`."""
    records: dict[str, NodeRecord] = {}
    for line in lines:
        for name in line["present"]:
            records.setdefault(name, NodeRecord(name)).rounds += 1
        for ask in line["asks"]:
            for name, node in ask["nodes"].items():
                records.setdefault(name, NodeRecord(name)).hear(ask, node)
        for name, node in line.get("scored", {}).items():
            record = records.setdefault(name, NodeRecord(name))
            record.down, record.up = record.down + node["down"], record.up + node["up"]
    return [records[name] for name in sorted(records)]
