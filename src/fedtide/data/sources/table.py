"""CSV tables with a row per sample and columns for label, client, domain and time, in one or several files."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from fedtide.core.config_types import Finite, Flag, Positive, explained, ingredient
from fedtide.core.errors import FedtideError, nearest, refused
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import check_filled, from_arrays
from fedtide.data.sources.files import Loading, find, opened, reading

WHOLE = re.compile(r"\+?[0-9]+|-0+")
"""A label that is a whole number from 0."""

DECIMAL_COMMA = re.compile(r"\s*[+-]?[0-9]+,[0-9]+\s*")
"""A number with a comma where a point is wanted."""

Column = list[tuple[int, str]]
"""Cells of a column, each with its row number."""


@ingredient
class Every:
    """Times of rows at equal distances.

    Args:
        every: seconds from each row to the next.
    """

    every: Positive


TIME = explained("a column, the columns of a date, or { every = SECONDS }")


@ingredient
class CSV(Loading):
    """Comma-separated files with a header, packed (gzip, bzip2, xz) or not.

    Args:
        path: the file, below the data directory or absolute; or several files with the same header, read as one.
        label: column of the label: numbers from 0, or names.
        cuts: ascending thresholds for a numeric label; its class is the number of thresholds that it reaches.
        client: column of the natural client.
        domain: column of the domain (day or night, which site).
        time: column of the time: seconds, or ISO 8601 (UTC without a time zone); or the columns of a date in UTC: year,
            month, day, and optionally hour, minute, second; or `{ every = SECONDS }`, the time from each row to the
            next.
        features: columns of the features, which must be numbers; by default all others.
        missing: treatment of a row with a missing number, an empty cell or one of NA, NaN, null: "error" raises, "drop"
            leaves the row out.
        scaled: standardize each feature by its mean and standard deviation over all rows; where they have a time,
            over the earliest tenth, as what is to come is not known.
    """

    path: str | tuple[str, ...]
    label: str = "label"
    cuts: tuple[Finite, ...] = ()
    client: str | None = None
    domain: str | None = None
    time: Annotated[str | tuple[str, ...] | Every, TIME] | None = None
    features: tuple[str, ...] | None = None
    missing: Literal["error", "drop"] = "error"
    scaled: Flag = False
    kind: Literal["csv"] = "csv"

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(f"found path {self.path!r}, allowed: a file, or a list of files")
        if isinstance(self.time, tuple) and not 3 <= len(self.time) <= 6:
            raise ValueError(
                f"found {len(self.time)} columns of time, allowed: 3 to 6: year, month, day, hour, minute, second"
            )
        if any(after <= before for before, after in pairwise(self.cuts)):
            raise ValueError(f"found cuts {list(self.cuts)}, allowed: rising numbers")

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the files."""
        paths = (self.path,) if isinstance(self.path, str) else self.path
        found = [self._columns(find(path, directory)) for path in paths]
        wide = {len(columns["x"][0]) for columns in found}
        if len(wide) > 1:
            raise refused("data.source.path: numbers of features", sorted(wide), "equally many in each file")
        joined: dict[str, Any] = {key: [cell for columns in found for cell in columns[key]] for key in found[0]}
        named = any(isinstance(label, str) for label in joined["label"])
        y = [str(label) for label in joined["label"]] if named else np.array(joined["label"])
        with np.errstate(over="ignore"):  # numbers that are too large become infinite, and are refused below
            x = np.array(joined["x"], np.float32)
        rows = from_arrays(
            Path(paths[0]).name if len(paths) == 1 else f"{len(paths)} files",
            x,
            y,
            **{key: joined[key] for key in ("client", "domain", "time") if key in joined},
            scaled=self.scaled,
        )
        return replace(rows, classes=len(self.cuts) + 1) if self.cuts else rows

    def feature_names(self, directory: Path | None) -> tuple[str, ...]:
        """Return the columns of the features, in order."""
        first = self.path if isinstance(self.path, str) else self.path[0]
        return self._features(read_table(find(first, directory))[0])

    def _features(self, header: list[str]) -> tuple[str, ...]:
        return self.features or tuple(column for column in header if column not in self._taken)

    def named(self, header: list[str]) -> list[str]:
        """Return the columns that are read of a file; others are left alone."""
        return [*self._taken, *self._features(header)]

    @property
    def _times(self) -> tuple[str, ...]:
        return self.time if isinstance(self.time, tuple) else (self.time,) if isinstance(self.time, str) else ()

    @property
    def _taken(self) -> list[str]:
        """Columns that are no features unless they are named so."""
        return [self.label, *self._times, *(column for column in (self.client, self.domain) if column is not None)]

    def _columns(self, path: Path) -> dict[str, list[Any]]:
        """Read the values of a file by row: numbers of "x", "label", and if present "client", "domain", "time"."""
        header, lines = read_table(path)
        times, taken, features = self._times, self._taken, self._features(header)
        named = self.named(header)
        at = dict(zip(named, places(path, header, named), strict=True))
        if not features:
            raise FedtideError(f"{path}: no feature columns left beside {', '.join(taken)}")
        numbered = list(enumerate(lines))
        if self.missing == "drop":
            needed = [at[column] for column in (self.label, *times, *features)]
            numbered = [entry for entry in numbered if not any(_lacks(entry[1][1][place]) for place in needed)]
        if not numbered:
            raise FedtideError(f"{path}: something is missing in every row")
        lines = [line for _, line in numbered]
        columns: dict[str, list[Any]] = {
            "x": [[_feature(f"{path}: row {row}", name, line[at[name]]) for name in features] for row, line in lines],
            "label": self._labels(path, [(row, line[at[self.label]].strip()) for row, line in lines]),
        }
        for key, column in (("client", self.client), ("domain", self.domain)):
            if column is not None:
                columns[key] = names_of(path, key, [(row, line[at[column]].strip()) for row, line in lines]) or []
        if times:
            cells = [(row, [line[at[column]].strip() for column in times]) for row, line in lines]
            columns["time"] = [_when(f"{path}: row {row}", texts) for row, texts in cells]
        if isinstance(self.time, Every):
            columns["time"] = [place * self.time.every for place, _ in numbered]
        return columns

    def _labels(self, path: Path, column: list[tuple[int, str]]) -> list[Any]:
        if not self.cuts:
            return list(labels_of(path, column, "; data.source.cuts makes classes of a measured number"))
        numbers = [number(f"{path}: row {row}", self.label, cell) for row, cell in column]
        return np.searchsorted(self.cuts, numbers, side="right").tolist()


def read_table(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Read the header, and every row with its line number in the file; blank lines are left out."""
    with reading(path, "a CSV file in UTF-8"), io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
        lines = [(row, line) for row, line in enumerate(csv.reader(file), start=1) if line]
    if not lines:
        raise FedtideError(f"{path}: is empty, allowed: a header, and rows below it")
    if len(lines) < 2:
        raise FedtideError(f"{path}: no rows below the header")
    header = [column.strip() for column in lines[0][1]]
    twice = [column for column, count in Counter(header).items() if count > 1]
    if twice:
        raise FedtideError(f"{path}: two columns are called '{twice[0]}'")
    for row, line in lines[1:]:
        if len(line) != len(header):
            raise refused(f"{path}: row {row}: number of cells", len(line), f"{len(header)}, as in the header")
    return header, lines[1:]


def places(path: object, header: list[str], columns: Sequence[str]) -> list[int]:
    """Return the positions of columns in a header; raise for one that is not there."""
    at = {column: place for place, column in enumerate(header)}
    for column in columns:
        if column not in at:
            if len(header) == 1 and re.search(r"[;\t|]", header[0]):
                raise refused(f"{path}: header", header[0], "names divided by commas, as all cells are")
            raise FedtideError(f"{path}: no column '{column}'; {nearest(column, header)}")
    return [at[column] for column in columns]


def number(where: str, column: str, cell: Any, least: float = -math.inf, hint: str = "") -> float:
    """Return a finite number; raise for another cell, or for a number below `least`, with a hint of what would help."""
    try:
        found = math.nan if isinstance(cell, bool) or not _western(cell) else float(cell)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not (math.isfinite(found) and found >= least):
        allowed = "a finite number" if least == -math.inf else f"a number of {least:g} or more"
        raise refused(f"{where}: {column}", cell, allowed + hint)
    return found


def _western(cell: Any) -> bool:
    """Tell whether a text is free of what Python alone takes for part of a number: 5_0, and digits of other scripts."""
    return not isinstance(cell, str) or (cell.isascii() and "_" not in cell)


def _feature(where: str, column: str, cell: str) -> float:
    if _lacks(cell):
        hint = "; data.source.missing = 'drop' leaves such rows out"
    elif DECIMAL_COMMA.fullmatch(cell):
        hint = " with a point, such as 1.5"
    else:
        hint = "; data.source.features names the columns"
    return number(where, column, cell, hint=hint)


def labels_of(path: Path, column: Column, hint: str = "") -> np.ndarray | list[str]:
    """Return whole numbers if every label is one, and names if hardly any is; raise for what seems to be a mistake."""
    names = names_of(path, "label", column) or []
    numbers = [_is_number(name) for name in names]
    for (row, cell), numeric in zip(column, numbers, strict=True):
        if numeric and not WHOLE.fullmatch(cell):
            raise refused(f"{path}: row {row}: label", cell, f"whole numbers from 0, or names{hint}")
    words = [entry for entry, numeric in zip(column, numbers, strict=True) if not numeric]
    if 2 * len(words) >= len(names):
        return names
    if words:
        but = f"{len(names) - len(words)} of {len(names)} labels are numbers"
        raise refused(f"{path}: row {words[0][0]}: label", words[0][1], "whole numbers alone, or names", but)
    for row, cell in column:
        check_filled(f"{path}: row {row}", int(cell), len(names))
    return np.array([int(name) for name in names])


def _is_number(cell: str) -> bool:
    try:
        return _western(cell) and math.isfinite(float(cell))
    except ValueError:
        return False


def names_of(path: Path, what: str, column: Column | None) -> list[str] | None:
    """Return the cells of a column; raise for an empty one."""
    for row, cell in column or []:
        if not cell:
            raise FedtideError(f"{path}: row {row}: {what} is empty")
    return None if column is None else [cell for _, cell in column]


def _lacks(cell: str) -> bool:
    return cell.strip().lower() in ("", "na", "nan", "null")


def _when(where: str, texts: list[str]) -> float:
    """Return the seconds of a time in one column, or of a date with an optional time of day in several."""
    if len(texts) == 1:
        return seconds(where, texts[0])
    try:
        year, month, day, *rest = (int(text if _western(text) else "") for text in texts)
        hour, minute, second = [*rest, 0, 0, 0][:3]
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError:
        raise refused(f"{where}: time", " ".join(texts), "year, month, day, hour, minute, second") from None


def seconds(where: str, value: str) -> float:
    """Return a time as seconds since 1970; `where` begins the error message."""
    if _is_number(value):
        return float(value)
    try:
        when = datetime.fromisoformat(value)
    except ValueError:
        raise refused(f"{where}: time", value, "seconds or ISO 8601") from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
