"""The record of one run: `rounds.jsonl`, `timings.jsonl` and `clients.csv`, appended line by line.

A run that measures forgetting has a `forgetting.jsonl` too. In a simulation all depend on the configuration
alone, but for wall clock, which goes to `timings.jsonl`. Records of real clients have the real clock.
"""

import csv
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtide.core.atomic import check_sha256, lock, naming, sha256
from fedtide.core.errors import UNREADABLE, Damaged, FedtideError

CLIENTS = "clients.csv"
FILES = ("rounds.jsonl", "timings.jsonl", CLIENTS)
FORGETTING = "forgetting.jsonl"
ASKS = "asks.jsonl"
"""What real clients were asked and what came of it, a line for each round."""
LEDGER = "ledger.jsonl"
"""Releases of a private run, a line each, which `fedtide.wire.ledger` writes."""
ROLLBACKS = "rollbacks.jsonl"
"""Returns to a kept model, a line each: `after` so many rounds, `to` the model after so many."""
ALARMS = "alarms.jsonl"
"""Alarms of a run that is watched, a line each, with the number of the round."""
SOME = (FORGETTING, ASKS, LEDGER, ROLLBACKS, ALARMS)
"""Files that not every record has."""
STOPPED = "stopped"
"""Key in the last line of a run that ended before its last round: the target that it reached."""
OTHERS = "others"
"""Key in a line with an evaluation: entries of each other use of the state, by its name and by view."""
CLIENT_COLUMNS = ("round", "view", "client", "group", "rows", "accuracy", "loss", "slot", "name")
TRUTH = "truth"
"""One column more if groups drift: the number of the group that a client is in at that moment."""


def view_of(view: str, other: str) -> str:
    """Return the name in `clients.csv` of a view under another use of the state; "" is the method's own use.

    >>> view_of("val", ""), view_of("val", "stacking")
    ('val', 'val: stacking')
    """
    return f"{view}: {other}" if other else view


def plain(value: Any) -> Any:
    """Convert a fact to what JSON takes: tensors become numbers or lists, NaN and infinity become null.

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


@dataclass(frozen=True)
class Mark:
    """Length of a file when a checkpoint was written, and the digest of these bytes."""

    length: int
    sha256: str


def read_marks(read: Mapping[str, Any]) -> dict[str, Mark]:
    """Return marks from JSON.

    Raises:
        ValueError: one is of a file that no run counts on; with it any file of the machine could be read.
    """
    marks = {name: Mark(int(mark["length"]), str(mark["sha256"])) for name, mark in read.items()}
    for name, mark in marks.items():
        if name not in (*FILES, *SOME) and not re.fullmatch(r"\.\./\.\./shift/[^/]+\.safetensors", name):
            raise ValueError(f"{name!a} is no file of a record")
        if mark.length < 0:
            raise ValueError(f"a length of {mark.length}")
    return marks


NOTHING = Mark(0, hashlib.sha256().hexdigest())


def whole(path: Path) -> Mark:
    """Return the mark of a whole file."""
    return Mark(path.stat().st_size, sha256(path))


def check_marks(folder: Path, marks: Mapping[str, Mark], *, finished: bool = False) -> None:
    """Raise Damaged if a file of a run folder does not begin with what its checkpoint counts on.

    A file beside the record, and the record of a run that is `finished`, must end there, too.
    """
    for name, mark in marks.items():
        path = Path(os.path.normpath(folder / name))
        check_sha256(path, mark.sha256, mark.length)
        more = path.stat().st_size - mark.length
        if more and (finished or name not in (*FILES, *SOME)):
            raise Damaged(f"{path}: damaged (it is {more} bytes longer than what was written)")


class Record:
    """Appends to the record files of one run folder.

    A ledger is written elsewhere. It is never cut, because what it has was released. Nor are rollbacks, which a person
    asked for.

    Args:
        folder: `<method>/<seed>` in the run folder; made if missing.
        marks: what to keep of each file, from a checkpoint; everything after it is cut off. None starts anew.
        forgetting: whether there is a `forgetting.jsonl`.
        asks: whether there is an `asks.jsonl`.
        alarms: whether there is an `alarms.jsonl`.
        truth: whether rows of `clients.csv` end with the true group at that moment.
        beside: a file that was written before the run and does not change; its mark goes with those of the record.
    """

    def __init__(
        self,
        folder: Path,
        marks: Mapping[str, Mark] | None = None,
        *,
        forgetting: bool = False,
        asks: bool = False,
        alarms: bool = False,
        truth: bool = False,
        beside: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = (*FILES, *[FORGETTING] * forgetting, *[ASKS] * asks, *[ALARMS] * alarms)
        files = {name: (marks or {}).get(name, NOTHING) for name in names}
        for name in files:
            (folder / name).touch()
        check_marks(folder, {**(marks or {}), **files})
        self._folder = folder
        self._beside = {} if beside is None else {os.path.relpath(beside, folder): whole(beside)}
        self._files = {
            name: open(folder / name, "a", encoding="utf-8", newline="")  # noqa: SIM115 - see close()
            for name in files
        }
        for name, mark in files.items():
            os.truncate(folder / name, mark.length)
        self._clients = csv.writer(self._files["clients.csv"], lineterminator="\n")
        if not marks:
            self._clients.writerow((*CLIENT_COLUMNS, *[TRUTH] * truth))

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append one line to one of the files of lines, such as `rounds.jsonl`."""
        with naming(Path(self._files[name].name)):
            self._files[name].write(json.dumps(plain(line)) + "\n")
            self._files[name].flush()

    def clients(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Append rows in the order of `CLIENT_COLUMNS`, and with the truth if there is one, to `clients.csv`."""
        with naming(Path(self._files["clients.csv"].name)):
            self._clients.writerows(rows)
            self._files["clients.csv"].flush()

    def marks(self) -> dict[str, Mark]:
        """Return how far each file is written, safely on the disk, for a checkpoint."""
        for file in self._files.values():
            with naming(Path(file.name)):
                file.flush()
                os.fsync(file.fileno())
        written = {name: whole(Path(file.name)) for name, file in self._files.items()}
        others = {name: self._folder / name for name in (LEDGER, ROLLBACKS)}
        return self._beside | written | {name: whole(path) for name, path in others.items() if path.is_file()}

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
            lock(file.fileno(), wait=False)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise FedtideError(
                    f"{file.name}: another process is playing this run; wait for it, or stop it"
                ) from None
            # Else a file system without locks: better unprotected than not at all.
        yield


def stopped_after(folder: Path) -> int | None:
    """After how many rounds a run ended as it was good enough; None if it did not."""
    lines = read_lines(folder)
    last = lines[-1] if lines else None
    return int(last["round"]) + 1 if isinstance(last, dict) and STOPPED in last else None


def rolled_back(folder: Path) -> dict[int, int]:
    """Return by rounds done the rounds of the model to which a run was rolled back then, the last time.

    Raises:
        FedtideError: the file of rollbacks is damaged.
    """
    try:
        return {int(line["after"]): int(line["to"]) for line in read_lines(folder, ROLLBACKS)}
    except UNREADABLE as error:
        raise FedtideError(f"{folder / ROLLBACKS}: damaged ({error})") from None


def read_lines(
    folder: Path, name: str = "rounds.jsonl", read: Callable[[Any], Any] = lambda line: line
) -> list[dict[str, Any]]:
    """Every whole line of a run's `rounds.jsonl`, or of another file of lines; a last one without its end is left out.

    Args:
        folder: of the run.
        name: of the file.
        read: makes of a line what is needed, and raises a ValueError or the like if it cannot.

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
            lines.append(read(json.loads(line)))
        except UNREADABLE:
            raise Damaged(f"{path}: line {number} is damaged") from None
    return lines


def first_work_in(lines: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return the round in which each client worked first, of those that worked in the rounds of a record.

    >>> first_work_in([{"round": 0, "first_work": [4, 7]}, {"round": 1, "first_work": [5]}])
    {4: 0, 7: 0, 5: 1}
    """
    return {client: line["round"] for line in lines for client in line.get("first_work", ())}


def not_undone(lines: Iterable[Mapping[str, Any]], to: int | None = None) -> list[Mapping[str, Any]]:
    """Return the lines of the rounds of which a model is made: rollbacks undo others.

    Args:
        lines: of a record.
        to: rounds of the model with which the next round begins; None if it is the last one.

    >>> lines = [{"round": 0}, {"round": 1}, {"round": 2, "rolled_back_to": 1}, {"round": 3}]
    >>> [[line["round"] for line in not_undone(lines, to)] for to in (None, 3, 1)]
    [[0, 2, 3], [0, 2], [0]]
    """
    counted: list[Mapping[str, Any]] = []
    for line in lines:
        if (back := line.get("rolled_back_to")) is not None:
            counted = [other for other in counted if other["round"] < back]
        counted.append(line)
    return counted if to is None else [line for line in counted if line["round"] < to]
