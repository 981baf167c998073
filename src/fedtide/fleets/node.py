"""A node, where clients live: it answers questions with the rows and the memory that never leave it."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

import fedtide
from fedtide.core import codec, strangers
from fedtide.core.errors import UNREADABLE, FedtideError
from fedtide.core.memory import Version
from fedtide.core.shapes import bare, fields_of
from fedtide.core.trees import Tree, detached
from fedtide.core.types import Algorithm, Memory, Moment, Scores, Weights
from fedtide.fleets.ask import Ask, Scoring
from fedtide.fleets.client import ClientRows, Clients, is_finite
from fedtide.fleets.local import threads
from fedtide.fleets.messages import AskHeader, WhoHeader, question_of
from fedtide.fleets.scoring import score

PROTOCOL = 1
"""Version of headers and payloads; a node refuses questions of another."""

ANSWERED, ABSTAINED, NOT_FINITE, REFUSED = "answered", "abstained", "not finite", "refused: "
"""Words of a reply for what became of a client; the last one goes on with the reason."""

COLUMNS = ("clients", "rows", "correct", "loss", "choice", "weights", "others", "density")
"""Columns of `Scores` that a node sends."""


class MemoryLost(FedtideError):
    """The error of a client's memory that cannot be read or kept; the server is told its words, which hold no data."""


@dataclass(frozen=True)
class NodeMemory:
    """Memory of a node's clients: a file for each question that a client answered with something to keep.

    Which of them counts is for the server to say. So a round that is played again, an answer that is lost or too late,
    and a server that goes back to its checkpoint all find what they should.

    Args:
        folder: of the files, of one run alone.
        counted: version of the answer of each client that the server counted last; None before the first.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> NodeMemory(folder, {7: None}).write(7, (0, 0), {"count": 1}, settled=None)
    >>> NodeMemory(folder, {7: None}).read(7, (1, 0)), NodeMemory(folder, {7: (0, 0)}).read(7, (1, 0))
    (None, {'count': 1})
    """

    folder: Path
    counted: Mapping[int, Version | None]

    def read(self, client: int, now: Version) -> Memory:
        """Return what the client kept at the version that the server counts.

        Raises:
            MemoryLost: there is no such file, or it is damaged.
        """
        version = self.counted[client]
        if version is None:
            return None
        self.check(client)
        try:
            return codec.from_file(self._file(client, version))["row"]
        except (OSError, *UNREADABLE, FedtideError):
            raise MemoryLost(f"its memory of round {version[0]} is damaged at the node; restore its folder") from None

    def check(self, client: int) -> None:
        """Raise if what the client kept is not there."""
        version = self.counted[client]
        if version is not None and not self._file(client, version).is_file():
            raise MemoryLost(f"its memory of round {version[0]} is gone from the node; restore its folder")

    def write(self, client: int, version: Version, row: Memory, settled: Version | None) -> None:
        """Keep a row, safely on the disk, and remove those older than the one that the last checkpoint counts.

        Raises:
            MemoryLost: it cannot be written.
        """
        try:
            self._write(self._file(client, version), row, settled)
        except (OSError, FedtideError):
            raise MemoryLost("the node cannot keep its memory; see whether its disk is full") from None

    def _write(self, file: Path, row: Memory, settled: Version | None) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        for left in file.parent.iterdir():
            found = re.fullmatch(r"(-?\d+)\.(\d+)\.safetensors", left.name)
            old = found and settled is not None and (int(found[1]), int(found[2])) < settled
            if old or re.fullmatch(rf"new|{codec.UNFINISHED}", left.name):
                left.unlink(missing_ok=True)
        partial = file.with_name("new")
        codec.to_file(partial, {"row": row})
        _flush(partial)
        partial.replace(file)
        _flush(file.parent)

    def _file(self, client: int, version: Version) -> Path:
        return self.folder / str(client) / f"{version[0]}.{version[1]}.safetensors"


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Node:
    """A node with its clients.

    Args:
        algorithm: the algorithm whose works it does.
        seed: seed of every random key.
        rows: the clients' rows.
        home: folder for their memory, of this run alone.
        run: digest of the run that it takes part in; it refuses questions of another.
        refuses: of the header of a question, the reason why its owner does not allow it; None allows it.
        partial_work: probability that a client asked to train does only a part of its local work.
        threads: torch threads of one client's work; the number changes the last bits.
        log: takes what went wrong here in full, which the server is not told.
    """

    algorithm: Algorithm
    seed: int
    rows: ClientRows
    home: Path
    run: str = ""
    refuses: Callable[[Mapping[str, Any]], str | None] = lambda header: None
    partial_work: float = 0.0
    threads: int = 1
    log: Callable[[str], None] = print

    def handle(self, header: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer a question; whatever goes wrong is part of the answer.

        Args:
            header: what is asked, of which clients; plain JSON.
            payload: a sealed tree. Where clients are in slots, a dict of what each slot receives.

        Returns:
            A header with what became of each client, and by client what it sends, sealed.
        """
        began = time.monotonic()
        try:
            with threads(self.threads):
                told, sent = self._answer(header, payload, began)
        except Exception as error:
            told, sent = {"clients": {}, "failed": self._described(error)}, None
        return {**told, "seconds": round(time.monotonic() - began, 3)}, b"" if sent is None else codec.to_bytes(sent)

    def _answer(self, header: Mapping[str, Any], payload: bytes, began: float) -> tuple[dict[str, Any], Tree]:
        asked = question_of(header)
        if isinstance(asked, WhoHeader):
            return self.about, None
        why = self._objection(asked) or self.refuses(header)
        if why is not None:
            return {"clients": dict.fromkeys(map(str, asked.clients), REFUSED + why)}, None
        received = strangers.decode(payload, self._classes)
        if asked.kind == "score":
            return self._score(asked, received)
        told: dict[str, str] = {}
        sent: dict[int, Tree] = {}
        kept: list[int] = []
        for client, given in _ask_of(asked, asked.clients).sent(received):
            if time.monotonic() - began > asked.deadline:
                told[str(client)] = REFUSED + "too late"
                continue
            try:
                told[str(client)] = self._ask(asked, given, client, sent, kept)
            except Exception as error:
                told[str(client)] = REFUSED + self._described(error)
        return {"clients": told, "kept": kept}, sent

    @cached_property
    def _classes(self) -> tuple[type, ...]:
        return (Weights, *classes_in(_state_of(self.algorithm)))

    @property
    def about(self) -> dict[str, Any]:
        """Versions of what decides the bits of an answer."""
        versions = {"fedtide": fedtide.__version__, "torch": torch.__version__, "python": platform.python_version()}
        return {"protocol": PROTOCOL, "run": self.run, "versions": versions, "machine": platform.machine()}

    def _objection(self, asked: AskHeader) -> str | None:
        if asked.protocol != PROTOCOL:
            return f"it speaks version {PROTOCOL} of the protocol, and the server version {asked.protocol}"
        if asked.run != self.run:
            return f"it takes part in run {self.run}, and the question is of run {asked.run}"
        return None

    def _described(self, error: Exception) -> str:
        """Describe an error without its text, which may hold data; the node's log has it in full."""
        if isinstance(error, MemoryLost):
            return str(error)
        self.log("".join(traceback.format_exception(error)))
        return f"{type(error).__name__} at the node, whose log says more"

    def memory_of(self, client: int, version: Version | None) -> Memory:
        """Return what a client kept at a version."""
        return NodeMemory(self.home, {client: version}).read(client, (0, 0))

    def _clients(self, memory: NodeMemory) -> Clients:
        return Clients(self.algorithm, self.rows, self.seed, memory, self.partial_work)

    def _ask(self, asked: AskHeader, received: Tree, client: int, sent: dict[int, Tree], kept: list[int]) -> str:
        """Do one client's work: put what it sends into `sent`, note whether it keeps more, return what became of it."""
        ask, memory = _ask_of(asked, [client]), _memory_of(self.home, asked)
        answer = self._clients(memory).answer(ask, client, received)
        if answer is None:
            return ABSTAINED
        if not is_finite(answer):
            return NOT_FINITE
        rows = {name: answer.rows[name].detach().clone() for name in asked.reveal}
        if answer.memory is not None:
            memory.write(client, ask.version, answer.memory, _version(asked.settled[str(client)]))
            kept.append(client)
        sent[client] = {"total": detached(answer.total), "rows": rows}
        return ANSWERED

    def _score(self, asked: AskHeader, received: Tree) -> tuple[dict[str, Any], Tree]:
        """Judge what was received on the clients' own rows; what is sent are sums over these."""
        memory, told = _memory_of(self.home, asked), dict.fromkeys(map(str, asked.clients), ANSWERED)
        whole = []
        for client in asked.clients:
            try:
                if asked.personal:
                    memory.check(client)
                whole.append(client)
            except FedtideError as error:
                told[str(client)] = REFUSED + self._described(error)
        scoring = Scoring(_ask_of(asked, whole), asked.part, asked.personal, asked.grouping, asked.other)
        return {"clients": told}, columns_of(score(self._clients(memory), scoring, received))


def classes_in(hint: Any) -> tuple[type, ...]:
    """List the dataclasses in a type and in the fields of those: all that a message may build of it.

    >>> [kind.__name__ for kind in classes_in(tuple[Ask, ...] | None)]
    ['Ask', 'Moment', 'Rng']
    """
    found: dict[type, None] = {}
    hints = [hint]
    while hints:
        kind = bare(hints.pop(0))
        hints += get_args(kind)
        if isinstance(kind, type) and is_dataclass(kind) and kind not in found:
            found[kind] = None
            hints += fields_of(kind).values()
    return tuple(found)


def _state_of(algorithm: Algorithm) -> Any:
    """Return the type of an algorithm's state, of which its payloads are made; None where `init` does not say."""
    hint = getattr(algorithm.init, "__annotations__", {}).get("return")
    return getattr(sys.modules.get(algorithm.init.__module__), hint, None) if isinstance(hint, str) else hint


def columns_of(scores: Scores) -> dict[str, Tensor | dict[str, Tensor] | None]:
    """Return the columns of scores, as plain values; `Scores(**columns)` is what they were.

    >>> one = torch.ones(1)
    >>> Scores(**columns_of(Scores(one, one, one, one))).accuracy
    1.0
    """
    return {
        name: dict(column) if name == "others" else column for name in COLUMNS for column in [getattr(scores, name)]
    }


def _version(said: Any) -> Version | None:
    return None if said is None else (int(said[0]), int(said[1]))


def _ask_of(asked: AskHeader, clients: list[int]) -> Ask:
    slot = None
    if asked.slot is not None:
        slot = torch.tensor([asked.slot[str(client)] for client in clients], dtype=torch.int64)
    moment, ids = Moment(**asked.moment.model_dump()), torch.tensor(clients, dtype=torch.int64)
    return Ask(asked.question, asked.purpose, moment, ids, slot, number=asked.version[1])


def _memory_of(home: Path, asked: AskHeader) -> NodeMemory:
    return NodeMemory(home, {client: _version(asked.counted[str(client)]) for client in asked.clients})
