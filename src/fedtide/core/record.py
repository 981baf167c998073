"""The record of one run: `rounds.jsonl`, `timings.jsonl` and `clients.csv`, appended line by line.

`rounds.jsonl` and `clients.csv` depend on the configuration alone; wall clock goes to `timings.jsonl`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

FILES = ("rounds.jsonl", "timings.jsonl", "clients.csv")
CLIENT_COLUMNS = ("round", "view", "client", "group", "rows", "accuracy", "loss", "slot")


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
    """

    def __init__(self, folder: Path, lengths: Mapping[str, int] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {}
        for name in FILES:
            path = folder / name
            path.touch()
            with open(path, "r+b") as file:
                file.truncate((lengths or {}).get(name, 0))
            self._files[name] = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
        if not lengths:
            self._files["clients.csv"].write(",".join(CLIENT_COLUMNS) + "\n")

    def round(self, line: Mapping[str, Any]) -> None:
        """Append one line to `rounds.jsonl`."""
        self._append("rounds.jsonl", json.dumps(plain(line)))

    def timing(self, line: Mapping[str, Any]) -> None:
        """Append one line to `timings.jsonl`."""
        self._append("timings.jsonl", json.dumps(plain(line)))

    def clients(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Append rows in the order of `CLIENT_COLUMNS` to `clients.csv`."""
        text = "\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in rows)
        if text:
            self._append("clients.csv", text)

    def _append(self, name: str, line: str) -> None:
        self._files[name].write(line + "\n")
        self._files[name].flush()

    def lengths(self) -> dict[str, int]:
        """Bytes written to each file so far, for a checkpoint."""
        for file in self._files.values():
            file.flush()
        return {name: file.tell() for name, file in self._files.items()}

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """Every whole line of a run's `rounds.jsonl`."""
    path = folder / "rounds.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.endswith("}")]
