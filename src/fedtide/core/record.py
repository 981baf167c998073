"""The record of one run: `rounds.jsonl`, `timings.jsonl` and `clients.csv`, appended line by line.

A run that measures forgetting has a `forgetting.jsonl` too. All depend on the configuration alone, but for wall clock,
which goes to `timings.jsonl`.
"""

from __future__ import annotations

import csv
import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtide.core.errors import FedtideError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FILES = ("rounds.jsonl", "timings.jsonl", "clients.csv")
FORGETTING = "forgetting.jsonl"
STOPPED = "stopped"
"""What the last line of a run has that ended before its last round: the target that it reached."""
CLIENT_COLUMNS = ("round", "view", "client", "group", "rows", "accuracy", "loss", "slot", "name")
TRUTH = "truth"
"""One column more where groups drift: the number of the group that a client is in at that moment."""


def plain(value: Any) -> Any:
    """A fact as JSON takes it: tensors become numbers or lists, NaN and infinity become null.

    >>> import torch
    >>> plain({"pi": torch.tensor([0.5, float("nan")]), "n": 3})
    {'pi': [0.5, None], 'n': 3}
    """
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


class Record:
    """Appends to the record files of one run folder.

    Args:
        folder: `<method>/<seed>` in the run folder; made if missing.
        lengths: bytes of each file to keep, from a checkpoint; everything after them is cut off. None starts anew.
        forgetting: whether there is a `forgetting.jsonl`.
        truth: whether rows of `clients.csv` end with the true group at that moment.
    """

    def __init__(
        self,
        folder: Path,
        lengths: Mapping[str, int] | None = None,
        *,
        forgetting: bool = False,
        truth: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        kept = {name: (lengths or {}).get(name, 0) for name in (*FILES, *[FORGETTING] * forgetting)}
        for name, length in kept.items():
            path = folder / name
            path.touch()
            if path.stat().st_size < length:
                raise FedtideError(
                    f"{path}: {path.stat().st_size} bytes, the checkpoint counts on {length}: it was cut"
                )
        self._files = {
            name: open(folder / name, "a", encoding="utf-8", newline="")  # noqa: SIM115 - see close()
            for name in kept
        }
        for name, length in kept.items():
            os.truncate(folder / name, length)
        self._clients = csv.writer(self._files["clients.csv"], lineterminator="\n")
        if not lengths:
            self._clients.writerow((*CLIENT_COLUMNS, *[TRUTH] * truth))

    def round(self, line: Mapping[str, Any]) -> None:
        """Append one line to `rounds.jsonl`."""
        self._append("rounds.jsonl", json.dumps(plain(line)))

    def timing(self, line: Mapping[str, Any]) -> None:
        """Append one line to `timings.jsonl`."""
        self._append("timings.jsonl", json.dumps(plain(line)))

    def forgetting(self, line: Mapping[str, Any]) -> None:
        """Append one line to `forgetting.jsonl`."""
        self._append(FORGETTING, json.dumps(plain(line)))

    def clients(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Append rows in the order of `CLIENT_COLUMNS`, and with the truth where there is one, to `clients.csv`."""
        self._clients.writerows(rows)
        self._files["clients.csv"].flush()

    def _append(self, name: str, line: str) -> None:
        self._files[name].write(line + "\n")
        self._files[name].flush()

    def lengths(self) -> dict[str, int]:
        """Bytes written to each file so far, safely on the disk, for a checkpoint."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {name: file.tell() for name, file in self._files.items()}

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


@contextmanager
def run_lock(folder: Path, name: str = "rounds.jsonl") -> Iterator[None]:
    """Hold a run for this process alone, before anything of it is read or changed, by one of its files.

    Raises:
        FedtideError: another process is playing it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "a", encoding="utf-8") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise FedtideError(
                    f"{file.name}: another process is playing this run; wait for it, or stop it"
                ) from None
            # Else a file system without locks: better unprotected than not at all.
        yield


def stopped_after(folder: Path) -> int | None:
    """After how many rounds a run ended as it was good enough; None where it did not."""
    lines = read_rounds(folder)
    last = lines[-1] if lines else None
    return int(last["round"]) + 1 if isinstance(last, dict) and STOPPED in last else None


def read_rounds(folder: Path, name: str = "rounds.jsonl") -> list[dict[str, Any]]:
    """Every whole line of a run's `rounds.jsonl`, or of another file of lines; a last one without its end is left out.

    Raises:
        FedtideError: a whole line is not what this program writes.
    """
    path = folder / name
    if not path.is_file():
        return []
    *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = []
    for number, line in enumerate(whole, start=1):
        try:
            lines.append(json.loads(line))
        except ValueError:
            raise FedtideError(f"{path}: line {number} is damaged") from None
    return lines
