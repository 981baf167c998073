"""The ledger of noised sums, and the safe in which a server of real clients keeps them.

A line of the ledger is on the disk before anybody reads its sum. The ledger knows the budget of a run: the clients of
each round, and so the clients that may be in the next round. A round that is played once more, after a kill, comes to
the same sum and finds its line. Another sum in its place is an error, because it would be a second release.

With real clients a killed round does not come to the same sum: other clients answer, and noise is fresh. By then the
sum may have been seen, so no second sum may be released. The round takes the released sum from the safe.

The folder of the safe is private. Its content is on the disk before the ledger has the line of the release. Once a
checkpoint counts on a round its released sums go to the record, because the budget covers them.
"""

import hashlib
import itertools
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.atomic import append, check_sha256, flush, sha256, write_bytes
from fedtide.core.errors import FedtideError, refused
from fedtide.core.memory import Version
from fedtide.core.record import ASKS, LEDGER, read_lines
from fedtide.fields.types import Strict, checked
from fedtide.wire.accounting import Plan, Spent, coefficients, total_epsilon
from fedtide.wire.scores import is_score

Place = tuple[int, int, int | None]
"""Round, number of the question in it, slot."""


class Line(Strict):
    """A release.

    Args:
        round: when.
        ask: number of the question in the round.
        question: what was asked.
        slot: the slot that its clients were asked in, if any.
        z: noise multiplier.
        bounds: C of each leaf.
        clients: ids of those in the sum.
        epsilon: spent with it by the client that was in most releases.
        sha256: digest of what was released.
        within: of leaves whose bound adapts, the noised share of clients that were within it.
    """

    round: int
    ask: int
    question: str
    slot: int | None
    z: float
    bounds: dict[str, float]
    clients: tuple[int, ...]
    epsilon: float = 0.0
    sha256: str
    within: dict[str, float] = Field(default_factory=dict)

    @property
    def place(self) -> Place:
        """The key of a release."""
        return self.round, self.ask, self.slot


class Ledger:
    """The releases of a run.

    Args:
        plan: that they have to keep.
        z: noise multiplier.
        delta: of the budget.
        path: file of the lines, which this process alone writes; None keeps them in it.
        lines: releases before those of the file.
        score_ledger: an empty ledger with the plan and the noise of evaluations, which is a part of this one; None if
            none is released.

    Raises:
        FedtideError: the file is not what this program writes.
    """

    def __init__(
        self,
        plan: Plan,
        z: float,
        delta: float,
        path: Path | None = None,
        lines: Iterable[Line] = (),
        score_ledger: "Ledger | None" = None,
    ) -> None:
        self.plan, self.z, self.delta, self.path, self.score_ledger = plan, z, delta, path, score_ledger
        self._offered: defaultdict[int, set[int]] = defaultdict(set)
        self._count_all([*lines, *([] if path is None else read(path))])

    def fresh(self, path: Path | None = None, lines: Iterable[Line] = ()) -> "Ledger":
        """Return a ledger of the same plans and noise with other lines; arguments as of the class."""
        return Ledger(self.plan, self.z, self.delta, path, lines, self.score_ledger and self.score_ledger.fresh())

    def part(self, question: str) -> "Ledger":
        """Return the part of the ledger that has the releases of a question: its plan and its noise are theirs."""
        return self.score_ledger if self.score_ledger is not None and is_score(question) else self

    def _count_all(self, lines: Iterable[Line]) -> None:
        if self.score_ledger is not None:
            self.score_ledger._count_all(())
        self._lines: dict[Place, Line] = {}
        self._rounds: defaultdict[int, set[int]] = defaultdict(set)
        self._releases: Counter[int] = Counter()
        for line in lines:
            self._count(line)

    def _count(self, line: Line) -> None:
        self._lines[line.place] = line
        if (part := self.part(line.question)) is not self:
            part._count(line)
            return
        self._releases.update(line.clients)
        for client in line.clients:
            self._rounds[client].add(line.round)

    @property
    def lines(self) -> Sequence[Line]:
        """All of them, in order."""
        return list(self._lines.values())

    def of(self, number: int, ask: int | None = None) -> list[Line]:
        """Return the releases of a round, or of one of its questions."""
        return [line for line in self._lines.values() if line.round == number and ask in (None, line.ask)]

    def rounds(self, client: int) -> list[int]:
        """Return the rounds that a client was in, sorted."""
        return sorted(self._rounds.get(client, ()))

    def released(self, client: int) -> list[int]:
        """Return the rounds with a release that a client is in, one of an evaluation included, sorted."""
        return sorted({line.round for line in self._lines.values() if client in line.clients})

    def offer(self, number: int, clients: Iterable[int]) -> bool:
        """Count that clients are asked to open a sum of a round, as their nodes do, and tell if that is new."""
        new = [client for client in clients if number not in self._offered[client]]
        for client in new:
            self._offered[client].add(number)
        return bool(new)

    def may_be_in(self, client: int, number: int) -> bool:
        """Tell whether a client may be in a round, after those before it."""
        rounds = {*self._rounds.get(client, ()), *self._offered.get(client, ())}
        before = [earlier for earlier in rounds if earlier < number]
        return len(before) < self.plan.times and number - max(before, default=-self.plan.distance) >= self.plan.distance

    def _keeps(self, client: int, number: int) -> bool:
        """Tell whether a client that is in a round, too, is in few enough, and these far enough apart."""
        rounds = sorted({*self._rounds.get(client, ()), number})
        is_apart = all(after - before >= self.plan.distance for before, after in itertools.pairwise(rounds))
        return is_apart and len(rounds) <= self.plan.times and 0 <= rounds[0] <= rounds[-1] < self.plan.rounds

    @property
    def whole(self) -> float:
        """Epsilon of the whole plan, with that of evaluations."""
        scores = 0.0 if self.score_ledger is None else self.score_ledger.whole
        return self._with_scores(self.plan.epsilon(self.z, self.delta), scores, self.plan.rounds)

    def epsilon(self, client: int | None = None, more: int = 0, judged: int = 0) -> float:
        """Return the epsilon spent so far, at most the plan's, with that of evaluations.

        Args:
            client: of this client; None is the one that was in most releases.
            more: so many further releases.
            judged: so many further releases of evaluations.
        """
        scores = 0.0 if self.score_ledger is None else self.score_ledger.epsilon(client, judged)
        return self._with_scores(self._trained(client, more), scores, self._played)

    def spent(self, number: int) -> float:
        """Return the epsilon spent up to a round, by its last line: a run that goes on may have lines beyond it."""
        return next((line.epsilon for line in reversed(self._lines.values()) if line.round <= number), 0.0)

    def _with_scores(self, trained: float, scores: float, rounds: int) -> float:
        """Return epsilon of the releases of so many rounds together with those of evaluations."""
        if not scores:
            return trained
        sampling = self.plan.sampling
        z = self.z / math.sqrt(self.plan.releases)
        return total_epsilon([Spent(trained, z, sampling, rounds if sampling else 0), Spent(scores)], self.delta)

    @property
    def _played(self) -> int:
        """How many rounds have begun, by the lines."""
        return max((line.round + 1 for line in self._lines.values()), default=0)

    def _trained(self, client: int | None, more: int) -> float:
        """Return the epsilon of all releases but those of evaluations (see `epsilon`)."""
        if self.plan.sampling is not None:
            rounds = self._played
            played = Plan(rounds, rounds, releases=self.plan.releases, sampling=self.plan.sampling)
            return played.epsilon(self.z, self.delta)
        norm = float((coefficients(self.plan.bands) ** 2).sum())
        most = max(self._releases.values(), default=0)
        releases = (most if client is None else self._releases[client]) + more
        return self.plan.spent(releases * norm, self.z, self.delta)

    def draws(self, number: int) -> dict[str, Any]:
        """Return how participants are drawn, for the record of a round; {} if their draw is not accounted for.

        Evaluations draw nobody: what they spent up to this round stands by itself.
        """
        sampling = self.plan.sampling
        if sampling is None:
            return {}
        draws: dict[str, Any] = {"sampled": {"z": self.z / math.sqrt(self.plan.releases), **asdict(sampling)}}
        if self.score_ledger is not None:
            until_now = self.score_ledger.fresh(
                lines=(line for line in self.score_ledger.lines if line.round <= number)
            )
            draws["scored"] = until_now.epsilon()
        return draws

    def objection(self, line: Line) -> str | None:
        """Return the reason why a line cannot be added; None if it can, or is there."""
        earlier, draws = self._lines.get(line.place), self.plan.sampling
        if earlier is not None:
            return None if earlier.sha256 == line.sha256 else "was released before with another sum"
        if (part := self.part(line.question)) is not self:
            return part.objection(line) or part._beyond(line)
        late = [client for client in line.clients if not self._keeps(client, line.round)]
        if draws is None and late:
            return f"has client {late[0]}, who may not be in it"
        others = [other for other in self.of(line.round) if other.question == line.question]
        if any(set(other.clients) & set(line.clients) for other in others):
            return "asks a client twice"
        if draws is not None and (others or (len(line.clients) > draws.drawn and not draws.poisson)):
            return "is not one draw from all clients"
        return None

    def _beyond(self, line: Line) -> str | None:
        """Return the reason why a client of a line is in too many sums of its round; None if it is not."""
        counts = Counter(client for other in self.of(line.round) for client in other.clients)
        is_beyond = any(counts[client] >= self.plan.releases for client in line.clients)
        return "asks a client more questions than planned" if is_beyond else None

    def add(self, line: Line) -> None:
        """Write a line to the disk, before what it stands for is released; a line that is there is not written again.

        Raises:
            FedtideError: it is not in the budget.
            OSError: it cannot be written; the ledger is as it was.
        """
        if why := self.objection(line):
            where = f"{self.path or 'wire.privacy'}: '{line.question}' of round {line.round}"
            raise FedtideError(f"{where} {why}; allowed: what the budget has")
        if line.place in self._lines:
            return
        before = self.lines
        self._count(line)
        line = line.model_copy(update={"epsilon": self.epsilon()})
        self._lines[line.place] = line
        try:
            if self.path is not None:
                append(self.path, line.model_dump_json())
        except OSError:
            self._count_all(before)
            raise


def eligible(ledger: Ledger | None, clients: Tensor, number: int) -> Tensor:
    """Tell which clients (n,) have enough left of their privacy for a round; all if there is no ledger."""
    if ledger is None or ledger.plan.sampling is not None:
        return torch.ones(len(clients), dtype=torch.bool)
    return torch.tensor([ledger.may_be_in(client, number) for client in clients.tolist()], dtype=torch.bool)


def arrivals(
    ledger: Ledger | None, draw: Callable[[int], Tensor], m: int, most: int, number: int
) -> tuple[Tensor, int]:
    """Return the first `m` of those that arrive who may be in a round, and how many arrived until then.

    Args:
        ledger: of the run; None lets all be in it.
        draw: the first so many that arrive, sorted; those of fewer are among them.
        m: how many are wanted.
        most: how many there are.
        number: of the round.
    """
    size, clients = m, draw(m)
    allowed = eligible(ledger, clients, number)
    while int(allowed.sum()) < m and len(clients) == size < most:
        size = min(size + m - int(allowed.sum()), most)
        clients = draw(size)
        allowed = eligible(ledger, clients, number)
    return clients[allowed], size


def read(path: Path) -> list[Line]:
    """Return the whole lines of a ledger, none if there is no file.

    Raises:
        FedtideError: a line is not what this program writes.
    """
    lines = enumerate(read_lines(path.parent, path.name), start=1)
    return [checked(Line, values, f"{path}: line {number}") for number, values in lines]


RELEASED = "released"
"""Name of the folders of released sums: of a site until a checkpoint counts on them, of a record from then on."""

OWN = re.compile(r"(\d+)\.\d+\.(?:asked|all|\d+)")
"""Names of files here, which begin with the round."""

OFFERED = "offered"
"""Name of the file of those who were asked to open sums, by round."""

LINES = "lines"
"""Name of the file that says how many lines the ledger has."""


def digest(released: Tensor) -> str:
    """Return the digest of what was released, as the ledger has it."""
    return hashlib.sha256(released.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Safe:
    """The releases of the rounds that no checkpoint holds yet.

    Args:
        folder: where they lie; it is made when there is something to keep.
        record: folder for those of rounds that are over; None deletes them.
    """

    folder: Path
    record: Path | None = None

    def keep(self, line: Line, released: Tensor) -> None:
        """Keep a noised sum (size,), float64, before its line is written."""
        self._write(_sum(line), released.numpy().tobytes())

    def read_sum(self, line: Line) -> Tensor | None:
        """Return the noised sum of a line; None if it is gone or damaged."""
        for folder in [self.folder, *([] if self.record is None else [self.record])]:
            path = folder / _sum(line)
            if path.is_file() and sha256(path) == line.sha256:
                return torch.from_numpy(np.fromfile(path, np.float64))
        return None

    def note(self, version: Version, asked: dict[str, Any]) -> None:
        """Keep, in plain JSON, what else a question that is asked once more needs to know."""
        self._write(_asked(version), json.dumps(asked).encode())

    def noted(self, version: Version) -> dict[str, Any] | None:
        """Return the notes of a question; None if they are gone."""
        try:
            notes = json.loads((self.folder / _asked(version)).read_bytes())
        except (OSError, ValueError):
            return None
        return notes if isinstance(notes, dict) else None

    def offer(self, number: int, clients: list[int]) -> None:
        """Keep that clients are asked to open a sum of a round: their nodes count it, whether it is opened or not."""
        self._make()
        append(self.folder / OFFERED, json.dumps([number, clients]), mode=0o600)

    def offered(self) -> list[tuple[int, list[int]]]:
        """Return the rounds in which clients were asked to open a sum, with these."""
        try:
            lines: list[Any] = read_lines(self.folder, OFFERED)
            return [(int(number), list(clients)) for number, clients in lines]
        except (ValueError, TypeError):
            raise FedtideError(f"{self.folder / OFFERED}: damaged") from None

    def settle(self, before: int, lines: Iterable[Line]) -> None:
        """Hand the sums of the rounds before one, which a checkpoint holds by now, over to the record.

        Args:
            before: the round.
            lines: of the ledger; a sum without one was seen by nobody, and goes.
        """
        released = {_sum(line): line.sha256 for line in lines}
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            match = OWN.fullmatch(path.name)
            if match is None or int(match[1]) >= before:
                continue
            if self.record is not None and path.name in released and sha256(path) == released[path.name]:
                self.record.mkdir(parents=True, exist_ok=True)
                os.replace(path, self.record / path.name)
            else:
                path.unlink(missing_ok=True)

    def count(self, lines: int) -> None:
        """Keep how many lines the ledger has, once they are on the disk."""
        self._write(LINES, str(lines).encode())

    def check(self, ledger: Ledger) -> None:
        """Raise if a ledger has fewer lines than it had: what it does not know was released all the same.

        Raises:
            FedtideError: it is an older one.
        """
        path = self.folder / LINES
        try:
            fewest = int(path.read_bytes()) if path.is_file() else 0
        except ValueError:
            raise FedtideError(f"{path}: damaged") from None
        if len(ledger.lines) < fewest:
            but = "an older ledger was put back, and what it lacks would be released a second time"
            raise refused(f"{ledger.path}: lines", len(ledger.lines), f"{fewest} or more, or a new site", but)

    def _make(self) -> None:
        """Make the folder, on the disk."""
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o700, parents=True)
            flush(self.folder.parent)

    def _write(self, name: str, content: bytes) -> None:
        self._make()
        write_bytes(self.folder / name, content, 0o600)


def safe_of(record: Path) -> Safe:
    """Return the safe of a record of real clients, which lies in the folder of a site."""
    return Safe(record.parents[2] / "private" / RELEASED, record / RELEASED)


def check_released(record: Path, before: int) -> None:
    """Raise if a sum that real clients' rounds before one were made of is not what was released.

    Args:
        record: folder of the run.
        before: the round.

    Raises:
        FedtideError: a sum is gone or damaged.
    """
    asks = {line["round"]: line["asks"] for line in read_lines(record, ASKS)}
    safe = safe_of(record)
    for line in read(record / LEDGER) if asks else ():
        if line.round >= before or is_score(line.question):  # no model is made of scores
            continue
        # A round whose sum was lost when its server was killed has no answers in the record.
        is_counted = set(line.clients) <= set(asks[line.round][line.ask]["answered"])
        if is_counted and safe.read_sum(line) is None:
            check_sha256(record / RELEASED / _sum(line), line.sha256)


def _sum(line: Line) -> str:
    """Name the file of a released sum."""
    return f"{line.round}.{line.ask}.{'all' if line.slot is None else line.slot}"


def _asked(version: Version) -> str:
    """Name the file of the notes of a question."""
    return f"{version[0]}.{version[1]}.asked"
