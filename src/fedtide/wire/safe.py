"""What a server of real clients keeps of releases.

A server that is killed after a release plays the round once more. By then the sum was seen, so neither a second sum of
other clients nor the same one with fresh noise may be: the round takes the sum that was released, from here.

The folder is private, and what lies in it is on the disk before the ledger has the line of its release. Once a
checkpoint counts on a round its released sums go to the record: they are what the budget covers, and all that
models are made of.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.core.atomic import flush, naming, replacing, sha256
from fedtide.core.errors import FedtideError, refused
from fedtide.core.memory import Version
from fedtide.wire.ledger import Ledger, Line, append, whole_lines

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
