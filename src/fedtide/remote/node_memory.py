"""Files of a node between rounds: the memory of its clients by version, and what they were evaluated with."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtide.core import codec
from fedtide.core.atomic import flush, write_text
from fedtide.core.base import Memory
from fedtide.core.errors import UNREADABLE, FedtideError, refused
from fedtide.core.memory import Version
from fedtide.remote.grpc.line import BEST

MOST = 16
"""Files of a client that no checkpoint of the server counts yet; a server that never counts one fills no disk."""


KEPT, LEFT = re.compile(r"(-?\d+)\.(\d+)"), "new"
"""Pattern of the names of a client's files, and the name of what was not finished."""


class MemoryLost(FedtideError):
    """The error of a client's memory that cannot be read or kept; the server is told its words, which hold no data."""


@dataclass(frozen=True)
class NodeMemory:
    """Memory of a node's clients: a file for each question that a client answered with something to keep.

    The server says which of them counts. So a round that is played again finds its memory. The same holds for an answer
    that is lost or too late, and for a server that goes back to its checkpoint.

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
        """Return the memory of a client at the version that the server counts.

        Raises:
            MemoryLost: there is no such file, or it is damaged.
        """
        version = self.counted[client]
        if version is None:
            return None
        self.check(client)
        return row_in(self.file(client, version), version)

    def check(self, client: int) -> None:
        """Raise if what the client kept is not there."""
        version = self.counted[client]
        if version is not None and not os.path.isfile(self.file(client, version)):
            raise MemoryLost(f"its memory of round {version[0]} is gone from the node; restore its folder")

    def write(self, client: int, version: Version, row: Memory, settled: Version | None) -> None:
        """Keep a row, safely on the disk, and remove those older than the one that the last checkpoint counts.

        Raises:
            MemoryLost: it cannot be written.
        """
        try:
            self._write(self.file(client, version), row, settled, self.counted[client])
        except OSError as error:
            raise MemoryLost("the node cannot keep its memory; see whether its disk is full") from error

    def _write(self, file: Path, row: Memory, settled: Version | None, counted: Version | None) -> None:
        folder = os.path.dirname(file)  # words in place of paths: a round writes a file for each client
        os.makedirs(folder, exist_ok=True)
        versions = [(int(match[1]), int(match[2])) for match in map(KEPT.fullmatch, os.listdir(folder)) if match]
        stale = [other for other in versions if settled is not None and other < settled]
        others = sorted(set(versions) - {*stale, counted})
        for number, ask in (*stale, *others[: max(len(others) - MOST, 0)]):
            os.unlink(os.path.join(folder, f"{number}.{ask}"))
        partial = os.path.join(folder, LEFT)
        with open(partial, "wb") as new:
            new.writelines(codec.pieces({"row": row}))
            new.flush()
            os.fsync(new.fileno())
        os.replace(partial, file)
        flush(file.parent)

    def file(self, client: int, version: Version) -> Path:
        """Return the place of what a client kept."""
        return self.folder / str(client) / f"{version[0]}.{version[1]}"


def row_in(path: Path, version: Version) -> Memory:
    """Read a client's memory from its file.

    Raises:
        MemoryLost: it is damaged.
    """
    try:
        return codec.from_bytes(path.read_bytes())["row"]
    except (OSError, *UNREADABLE, FedtideError) as error:
        raise MemoryLost(f"its memory of round {version[0]} is damaged at the node; restore its folder") from error


@dataclass(frozen=True)
class Judged:
    """An evaluation of a node's clients: with what it was done a node predicts rows of its own.

    Args:
        header: the question, as plain JSON.
        payload: what was sent with it.
        memory: what clients kept then.
    """

    header: Mapping[str, Any]
    payload: bytes
    memory: NodeMemory

    @property
    def rounds(self) -> int:
        """Number of rounds of the model."""
        return int(self.header["moment"]["round"]) + 1

    def write(self, folder: Path) -> None:
        """Keep it in a new folder; what clients kept is linked, as it lies beside and soon goes."""
        folder.mkdir(parents=True)
        (folder / "question.json").write_text(json.dumps(dict(self.header)), encoding="utf-8")
        (folder / "payload").write_bytes(self.payload)
        for client, version in self.memory.counted.items():
            if version is not None and (file := self.memory.file(client, version)).is_file():
                linked = NodeMemory(folder, {}).file(client, version)
                linked.parent.mkdir()
                os.link(file, linked)

    @staticmethod
    def read(folder: Path) -> "Judged":
        """Read an evaluation.

        Raises:
            FedtideError: it is damaged.
        """
        try:
            header = json.loads((folder / "question.json").read_text(encoding="utf-8"))
            counted = {int(client): pair and (pair[0], pair[1]) for client, pair in header["counted"].items()}
            return Judged(header, (folder / "payload").read_bytes(), NodeMemory(folder, counted))
        except (OSError, *UNREADABLE) as error:
            raise FedtideError(f"{folder}: damaged ({error}); it is made anew with the next evaluation") from None


@dataclass(frozen=True)
class JudgedModels:
    """Evaluations that a node keeps: the last, and the one whose model is best, as its server says.

    The server says so after the evaluation. So the last is kept until the next one, and then stays if it was best.

    Args:
        folder: has a folder for each, "COUNT.ROUNDS", and the file "best". A later one has a larger count: a round may
            be played again, and a study may begin anew.
    """

    folder: Path

    def write(self, judged: Judged) -> None:
        """Keep an evaluation, and of those before only the best.

        Raises:
            OSError: it cannot be written; those before stay.
        """
        before, new = self._found(), self.folder / LEFT
        shutil.rmtree(new, ignore_errors=True)
        judged.write(new)
        new.rename(self.folder / f"{max(before, default=0) + 1}.{judged.rounds}")
        for count, rounds in before.items():
            if rounds != self._best() or rounds >= judged.rounds:  # a later one is of a study that began anew
                shutil.rmtree(self.folder / f"{count}.{rounds}", ignore_errors=True)

    def note_best(self, rounds: int) -> None:
        """Note the rounds of the best model.

        Raises:
            OSError: it cannot be written.
        """
        if rounds != self._best():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / BEST, str(rounds))

    def read(self, model: str | None = None) -> Judged:
        """Read an evaluation.

        Args:
            model: "last", "best", or the number of rounds; None means the last.

        Raises:
            FedtideError: the node was not evaluated with that model, or the evaluation is damaged.
        """
        rounds_by_count, best = self._found(), self._best()
        if not rounds_by_count:
            raise FedtideError(f"{self.folder}: not there yet; a model comes with the first evaluation")
        counts = {str(rounds): count for count, rounds in rounds_by_count.items()}
        counts["last"] = max(rounds_by_count)
        if str(best) in counts:
            counts["best"] = counts[str(best)]
        if model is not None and model not in counts:
            but = "the server keeps no models, or has not said which is best" if best is None else (
                f"the best is that after {best} rounds, with which this node was not evaluated"
            )  # fmt: skip
            raise refused("--model", model, ", ".join(counts), but if model == "best" else "")
        count = counts[model or "last"]
        return Judged.read(self.folder / f"{count}.{rounds_by_count[count]}")

    def _found(self) -> dict[int, int]:
        """Return by count the rounds of what is there, the earliest first."""
        matches = map(KEPT.fullmatch, os.listdir(self.folder) if self.folder.is_dir() else ())
        return dict(sorted((int(match[1]), int(match[2])) for match in matches if match))

    def _best(self) -> int | None:
        """Return the rounds of the best model; None if the server did not say it."""
        try:
            return int((self.folder / BEST).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
