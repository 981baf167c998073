"""CSV tables: a row per sample, with columns for label, client, pool and time."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import numpy as np

from fedtide.core.errors import FedtideError, nearest
from fedtide.core.values import ingredient
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import from_arrays
from fedtide.data.sources.files import find

Column = list[tuple[int, str]]
"""Cells with the row that each is in."""


@ingredient
class CSV:
    """A comma-separated file with a header, gzipped or not.

    Args:
        path: the file, below the data directory or absolute.
        label: column of the label: numbers from 0, or names.
        client: column of the natural client.
        pool: column of the pool (day or night, which site).
        time: column of the time: seconds, or ISO 8601 (UTC where no zone is given).
        features: columns of the features; by default all others. They must be numbers.
    """

    path: str
    label: str = "label"
    client: str | None = None
    pool: str | None = None
    time: str | None = None
    features: tuple[str, ...] | None = None
    kind: Literal["csv"] = "csv"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the file."""
        path = find(self.path, directory)
        header, lines = read_table(path)
        named = {"label": self.label, "client": self.client, "pool": self.pool, "time": self.time}
        taken = [column for column in named.values() if column is not None]
        features = self.features or tuple(column for column in header if column not in taken)
        for column in [*taken, *features]:
            if column not in header:
                raise FedtideError(f"{path}: no column '{column}'; {nearest(column, header)}")
        if not features:
            raise FedtideError(f"{path}: no feature columns left beside {', '.join(taken)}")
        at = {column: header.index(column) for column in [*taken, *features]}
        x = np.array([_numbers(path, row, line, features, at) for row, line in lines], np.float32)
        columns = {
            key: [(row, line[at[c]].strip()) for row, line in lines] for key, c in named.items() if c is not None
        }
        return from_arrays(
            path.name,
            x,
            labels_of(path, columns["label"]),
            client=names_of(path, "client", columns.get("client")),
            pool=names_of(path, "pool", columns.get("pool")),
            time=None if self.time is None else [seconds(f"{path}: row {row}", cell) for row, cell in columns["time"]],
        )


def read_table(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and every row with its line number in the file; blank lines are left out."""
    try:
        lines = [(number, line) for number, line in enumerate(_lines(path), start=1) if line]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise FedtideError(f"{path}: damaged or not a CSV file ({error})") from None
    if len(lines) < 2:
        raise FedtideError(f"{path}: no rows below the header")
    header = [column.strip() for column in lines[0][1]]
    twice = [column for column in header if header.count(column) > 1]
    if twice:
        raise FedtideError(f"{path}: two columns are called '{twice[0]}'")
    for number, line in lines[1:]:
        if len(line) != len(header):
            raise FedtideError(f"{path}: row {number}: {len(line)} cells, the header has {len(header)}")
    return header, lines[1:]


def _lines(path: Path) -> Iterator[list[str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        yield from csv.reader(file)


def _numbers(path: Path, row: int, line: list[str], features: tuple[str, ...], at: dict[str, int]) -> list[float]:
    out = []
    for column in features:
        try:
            out.append(float(line[at[column]]))
        except ValueError:
            raise FedtideError(f"{path}: row {row}: {column} is '{line[at[column]]}', allowed: a number") from None
        if not np.isfinite(out[-1]):
            raise FedtideError(f"{path}: row {row}: {column} is '{line[at[column]]}', allowed: a finite number")
    return out


def labels_of(path: Path, column: Column) -> np.ndarray | list[str]:
    """Whole numbers where every label is one, else names."""
    names = names_of(path, "label", column) or []
    try:
        values = np.array([int(name) for name in names])
    except ValueError:
        for row, cell in column:
            if _is_number(cell) and not _is_whole(cell):
                raise FedtideError(
                    f"{path}: row {row}: label {cell}, allowed: whole numbers from 0, or names"
                ) from None
        return names
    if (values < 0).any():
        row, cell = column[int(np.flatnonzero(values < 0)[0])]
        raise FedtideError(f"{path}: row {row}: label {cell}, allowed: 0 or more")
    return values


def _is_number(cell: str) -> bool:
    try:
        return bool(np.isfinite(float(cell)))
    except ValueError:
        return False


def _is_whole(cell: str) -> bool:
    return cell.strip().lstrip("+-").isdigit()


def names_of(path: Path, what: str, column: Column | None) -> list[str] | None:
    """The cells of a column; an empty one is an error."""
    for row, cell in column or []:
        if not cell:
            raise FedtideError(f"{path}: row {row}: {what} is empty")
    return None if column is None else [cell for _, cell in column]


def seconds(where: str, value: str) -> float:
    """A time as seconds since 1970; `where` it stands begins the error line."""
    try:
        number = float(value)
    except ValueError:
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            raise FedtideError(f"{where}: time is '{value}', allowed: seconds or ISO 8601") from None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    if not np.isfinite(number):
        raise FedtideError(f"{where}: time is '{value}', allowed: seconds or ISO 8601")
    return number
