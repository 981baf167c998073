"""The ledger: a line for each noised sum, on the disk before anybody reads the sum.

It is what a run knows of its budget: who was in which round, and so who may be in the next. A round that is played once
more, after a kill, comes to the same sum and finds its line; another sum in its place is an error, as it would be a
second release.

What a server of real clients keeps of releases.

A server that is killed after a release plays the round once more. By then the sum was seen, so neither a second sum of
other clients nor the same one with fresh noise may be: the round takes the sum that was released, from here.

The folder is private, and what lies in it is on the disk before the ledger has the line of its release. Once a
checkpoint counts on a round its released sums go to the record: they are what the budget covers, and all that
models are made of.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedtide.core.atomic import flush, naming, replacing, sha256
from fedtide.core.errors import FedtideError, refused
from fedtide.core.memory import Version
from fedtide.fields.types import checked
from fedtide.wire.accounting import Plan, coefficients

LEDGER = "ledger.jsonl"


class Line(BaseModel):
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

    model_config = ConfigDict(frozen=True, extra="forbid")
    round: int
    ask: int
    question: str
    slot: int | None
    z: float
    bounds: dict[str, float]
    clients: tuple[int, ...]
    epsilon: float
    sha256: str
    within: dict[str, float] = {}

    @property
    def place(self) -> tuple[int, int, int | None]:
        """What no other release has."""
        return self.round, self.ask, self.slot


class Ledger:
    """The releases of a run.

    Args:
        plan: that they have to keep.
        z: noise multiplier.
        delta: of the budget.
        path: file of the lines, which this process alone writes; None keeps them in it.
        lines: releases before those of the file.

    Raises:
        FedtideError: the file is not what this program writes.
    """

    def __init__(
        self, plan: Plan, z: float, delta: float, path: Path | None = None, lines: Iterable[Line] = ()
    ) -> None:
        self.plan, self.z, self.delta, self.path = plan, z, delta, path
        self._offered: dict[int, set[int]] = {}
        self._count_all([*lines, *([] if path is None else _mended(path))])

    def _count_all(self, lines: Iterable[Line]) -> None:
        self._lines: dict[tuple[int, int, int | None], Line] = {}
        self._rounds: dict[int, list[int]] = {}
        self._asked: set[tuple[str, int, int]] = set()
        self._sampled: set[tuple[str, int]] = set()
        self._releases: Counter[int] = Counter()
        self._most = self._after = 0
        for line in lines:
            self._count(line)

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

    def offer(self, number: int, clients: Iterable[int]) -> bool:
        """Count that clients are asked to open a sum of a round, as their nodes do, and tell if that is new."""
        new = [client for client in clients if number not in self._offered.get(client, ())]
        for client in new:
            self._offered.setdefault(client, set()).add(number)
        return bool(new)

    def eligible(self, clients: Tensor, number: int) -> Tensor:
        """Tell which clients (n,) may be in a round, after those before it: bool (n,)."""
        if self.plan.sampling is not None:
            return torch.ones(len(clients), dtype=torch.bool)
        return torch.tensor([self._may(client, number) for client in clients.tolist()], dtype=torch.bool)

    def _may(self, client: int, number: int) -> bool:
        before = [held for held in {*self._rounds.get(client, ()), *self._offered.get(client, ())} if held < number]
        return len(before) < self.plan.times and number - max(before, default=-self.plan.distance) >= self.plan.distance

    def _keeps(self, client: int, number: int) -> bool:
        """Tell whether a client that is in a round, too, is in few enough, and these far enough apart."""
        rounds = sorted({*self._rounds.get(client, ()), number})
        apart = all(after - before >= self.plan.distance for before, after in itertools.pairwise(rounds))
        return apart and len(rounds) <= self.plan.times and 0 <= rounds[0] <= rounds[-1] < self.plan.rounds

    def epsilon(self, client: int | None = None, more: int = 0) -> float:
        """Return what was spent so far, at most the plan's.

        Args:
            client: of this client; None is the one that was in most releases.
            more: so many further releases.
        """
        if self.plan.sampling is not None:
            return Plan(self._after, self._after, releases=self.plan.releases, sampling=self.plan.sampling).epsilon(
                self.z, self.delta
            )
        norm = float((coefficients(self.plan.bands) ** 2).sum())
        releases = (self._most if client is None else self._releases[client]) + more
        return self.plan.spent(releases * norm, self.z, self.delta)

    def add(self, line: Line) -> None:
        """Write a line to the disk, before what it stands for is released; a line that is there is not written again.

        Raises:
            FedtideError: it is not in the budget.
            OSError: it cannot be written; the ledger is as it was.
        """
        known = self._lines.get(line.place)
        if known is not None:
            if known.sha256 != line.sha256:
                raise self._refused(line, "was released before with another sum")
            return
        late = [client for client in line.clients if not self._keeps(client, line.round)]
        if self.plan.sampling is None and late:
            raise self._refused(line, f"has client {late[0]}, who may not be in it")
        if any((line.question, line.round, client) in self._asked for client in line.clients):
            raise self._refused(line, "asks a client twice")
        draws = self.plan.sampling
        if draws is not None and ((line.question, line.round) in self._sampled or len(line.clients) > draws.drawn):
            raise self._refused(line, "is not one draw from all clients")
        before = self.lines
        self._count(line)
        line = line.model_copy(update={"epsilon": self.epsilon()})
        self._lines[line.place] = line
        if self.path is None:
            return
        try:
            append(self.path, line.model_dump_json())
        except OSError:
            self._count_all(before)
            raise

    def _count(self, line: Line) -> None:
        self._lines[line.place] = line
        self._after = max(self._after, line.round + 1)
        self._sampled.add((line.question, line.round))
        for client in line.clients:
            rounds = self._rounds.setdefault(client, [])
            if line.round not in rounds:
                rounds.append(line.round)
            self._asked.add((line.question, line.round, client))
            self._releases[client] += 1
            self._most = max(self._most, self._releases[client])

    def _refused(self, line: Line, why: str) -> FedtideError:
        where = f"'{line.question}' of round {line.round}"
        return FedtideError(f"{self.path or 'wire.privacy'}: {where} {why}; allowed: what the budget has")


def eligible(ledger: Ledger | None, clients: Tensor, number: int) -> Tensor:
    """Tell which clients (n,) have enough left of their privacy for a round; all where there is no ledger."""
    return torch.ones(len(clients), dtype=torch.bool) if ledger is None else ledger.eligible(clients, number)


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
    size, came = m, draw(m)
    there = eligible(ledger, came, number)
    while int(there.sum()) < m and len(came) == size < most:
        size = min(size + m - int(there.sum()), most)
        came = draw(size)
        there = eligible(ledger, came, number)
    return came[there], size


def append(path: Path, line: str, mode: int = 0o666) -> None:
    """Write a line at the end of a file, and return when it is on the disk; after an error the file is as it was.

    Args:
        path: the file, which is made where there is none.
        line: without its end.
        mode: who may read a file that is made.
    """
    size = path.stat().st_size if path.exists() else None
    try:
        with naming(path), open(path, "a", encoding="utf-8", opener=partial(os.open, mode=mode)) as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        if size is None:
            flush(path.parent)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size or 0)
        raise


def _mended(path: Path) -> list[Line]:
    """Return the lines of a ledger, and cut off what a kill left of one: it was never released."""
    whole_lines(path)
    return read(path)


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that this process alone writes, and cut off what a kill left of one."""
    if not path.exists():
        return []
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    if size < len(content):
        os.truncate(path, size)
    return content[:size].decode("utf-8", errors="replace").split("\n")[:-1]


def read(path: Path) -> list[Line]:
    """Return the whole lines of a ledger, which may be written meanwhile; none where there is no file.

    Raises:
        FedtideError: a line is not what this program writes.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    lines = []
    for number, each in enumerate(whole.split("\n") if whole else [], start=1):
        try:
            said = json.loads(each)
        except ValueError:
            raise FedtideError(f"{path}: line {number}: damaged") from None
        lines.append(checked(Line, said, f"{path}: line {number}"))
    return lines


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
        self._write(self._sum(line), released.numpy().tobytes())

    def found(self, line: Line) -> Tensor | None:
        """Return the noised sum of a line; None where it is gone or damaged."""
        for folder in [self.folder, *([] if self.record is None else [self.record])]:
            path = folder / self._sum(line).name
            if path.is_file() and sha256(path) == line.sha256:
                return torch.from_numpy(np.fromfile(path, np.float64))
        return None

    def note(self, version: Version, asked: dict[str, Any]) -> None:
        """Keep, in plain JSON, what else a question that is asked once more needs to know."""
        self._write(self._asked(version), json.dumps(asked).encode())

    def noted(self, version: Version) -> dict[str, Any] | None:
        """Return what was noted of a question; None where that is gone."""
        try:
            said = json.loads(self._asked(version).read_bytes())
        except (OSError, ValueError):
            return None
        return said if isinstance(said, dict) else None

    def offer(self, number: int, clients: list[int]) -> None:
        """Keep that clients are asked to open a sum of a round: their nodes count it, whether it is opened or not."""
        self._make()
        append(self.folder / OFFERED, json.dumps([number, clients]), mode=0o600)

    def offered(self) -> list[tuple[int, list[int]]]:
        """Return the rounds in which clients were asked to open a sum, with these."""
        path = self.folder / OFFERED
        try:
            return [(int(number), list(clients)) for number, clients in map(json.loads, whole_lines(path))]
        except (ValueError, TypeError):
            raise FedtideError(f"{path}: damaged") from None

    def settle(self, before: int, lines: Iterable[Line]) -> None:
        """Hand the sums of the rounds before one, which a checkpoint holds by now, over to the record.

        Args:
            before: the round.
            lines: of the ledger; a sum without one was seen by nobody, and goes.
        """
        released = {self._sum(line).name: line.sha256 for line in lines}
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            own = OWN.fullmatch(path.name)
            if own is None or int(own[1]) >= before:
                continue
            if self.record is not None and path.name in released and sha256(path) == released[path.name]:
                self.record.mkdir(parents=True, exist_ok=True)
                os.replace(path, self.record / path.name)
            else:
                path.unlink(missing_ok=True)

    def count(self, lines: int) -> None:
        """Keep how many lines the ledger has, once they are on the disk."""
        self._write(self.folder / LINES, str(lines).encode())

    def check(self, ledger: Ledger) -> None:
        """Raise where a ledger has fewer lines than it had: what it does not know was released all the same.

        Raises:
            FedtideError: it is an older one.
        """
        path = self.folder / LINES
        known = int(path.read_bytes()) if path.is_file() else 0
        if len(ledger.lines) < known:
            but = "an older ledger was put back, and what it lacks would be released a second time"
            raise refused(f"{ledger.path}: lines", len(ledger.lines), f"{known} or more, or a new site", but)

    def _sum(self, line: Line) -> Path:
        return self.folder / f"{line.round}.{line.ask}.{'all' if line.slot is None else line.slot}"

    def _asked(self, version: Version) -> Path:
        return self.folder / f"{version[0]}.{version[1]}.asked"

    def _make(self) -> None:
        """Make the folder, on the disk."""
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o700, parents=True)
            flush(self.folder.parent)

    def _write(self, path: Path, content: bytes) -> None:
        self._make()
        with replacing(path) as temporary, naming(path):
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        flush(self.folder)
