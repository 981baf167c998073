"""Columns of tables in memory: of data frames, mappings of arrays, and Parquet files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from fedtide.core.errors import refused

MARKS = frozenset(("", "na", "nan", "null"))
"""Cells in which something is missing, in lower case."""
MOSTLY = 0.9
"""Share of numbers from which a column seems to be one of numbers with mistakes."""
MISSING = MARKS | {"none", "nat", "?", "<na>"}
"""The same with what sources of a study do not know."""


class Column:
    """A column, as numbers and as texts, and where it lacks something."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.odd = False
        if values.dtype.kind in "biuf":
            self.missing = ~np.isfinite(values)
        elif values.dtype.kind == "M":
            self.missing = np.isnat(values)
        else:
            cells = values.tolist()
            marks = {cell: mark for cell in set(cells) if (mark := str(cell).strip().lower()) in MISSING}
            self.odd = not MARKS.issuperset(marks.values())
            self.missing = np.array([cell in marks for cell in cells], bool)

    def cell(self, row: int) -> Any:
        """Return a cell, for messages."""
        return self.values[row : row + 1].tolist()[0]

    @cached_property
    def numbers(self) -> np.ndarray | None:
        """Cells as numbers, NaN or infinite where missing; None if one is a text or a date."""
        if self.values.dtype.kind in "biuf":
            return self.values.astype(np.float64)
        some = self.values[~self.missing]
        if self.values.dtype.kind == "M" or not len(some) or isinstance(some[0], date):
            return None
        try:
            found = np.fromiter(map(float, some), np.float64, len(some))
        except (TypeError, ValueError):
            return None
        numbers = np.full(len(self.values), np.nan)
        numbers[~self.missing] = found
        return numbers if np.isfinite(found).all() else None

    @property
    def known(self) -> np.ndarray:
        """The numbers that are there; none of other columns."""
        return np.empty(0) if self.numbers is None else self.numbers[~self.missing]

    @cached_property
    def texts(self) -> np.ndarray:
        """Cells as texts; whole numbers without a point."""
        if self.values.dtype.kind == "f" and self.whole:
            return np.where(self.missing, 0, self.values).astype(np.int64).astype(str)
        if self.values.dtype.kind == "M":
            return np.datetime_as_string(self.values.astype("datetime64[us]"))
        return np.array([str(value).strip() for value in self.values.tolist()])

    @cached_property
    def whole(self) -> bool:
        """True if every number is whole."""
        return self.numbers is not None and bool((self.known % 1 == 0).all())

    @cached_property
    def largest(self) -> float:
        """The largest absolute number; 0 without numbers."""
        return float(np.abs(self.known).max(initial=0.0))

    @cached_property
    def distinct(self) -> int:
        """Number of different cells."""
        if self.numbers is not None:
            return len(np.unique(self.known))
        return len(set(self.texts[~self.missing].tolist()))

    @cached_property
    def stray(self) -> tuple[int, int] | None:
        """Number of cells that are numbers, and the first row that is none, where hardly any is not; None elsewhere."""
        if self.numbers is not None or self.values.dtype.kind == "M":
            return None
        rows = np.flatnonzero(~self.missing)
        some = self.values[rows].tolist()
        if sum(map(_is_number, some[:1000])) < MOSTLY * len(some[:1000]):
            return None
        read = np.fromiter(map(_is_number, some), bool, len(some))
        return (int(read.sum()), int(rows[~read][0])) if MOSTLY <= read.mean() < 1 else None

    @property
    def repeats(self) -> bool:
        """True if there are two different cells or more, and texts that come again."""
        return self.distinct >= 2 and (self.numbers is not None or self.distinct <= len(self.values) / 2)

    @cached_property
    def dated(self) -> bool:
        """True for dates, or texts that are dates."""
        if self.values.dtype.kind == "M":
            return True
        some = self.values[~self.missing][:20]
        return bool(len(some)) and self.numbers is None and all(_is_date(value) for value in some)

    @property
    def undated(self) -> str:
        """The first cell that is no date; "" where the first ones are."""
        return next((str(value) for value in self.values[~self.missing][:20] if not _is_date(value)), "")

    @property
    def days(self) -> bool:
        """True for dates without a time of the day."""
        some = self.values[~self.missing]
        if self.values.dtype.kind == "M":
            return bool((some == some.astype("datetime64[D]")).all())
        return self.dated and all(_midnight(value) for value in some[:: max(len(some) // 50, 1)])


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _midnight(value: Any) -> bool:
    if isinstance(value, date) and not isinstance(value, datetime):
        return True
    return (
        value if isinstance(value, datetime) else datetime.fromisoformat(str(value).strip())
    ).time() == datetime.min.time()


def _is_date(value: Any) -> bool:
    if isinstance(value, date):
        return True
    try:
        datetime.fromisoformat(str(value).strip())
    except ValueError:
        return False
    return True


def columns_of(frame: Any, where: str) -> dict[str, Column]:
    """Return the columns of a data frame (pandas, polars, pyarrow), or of a mapping of arrays.

    Raises:
        FedtideError: it is none, or its columns differ in length; `where` begins the message.
    """
    frame = frame.collect() if hasattr(frame, "collect") and not hasattr(frame, "to_numpy") else frame  # a lazy one
    names = getattr(frame, "column_names", None) or (
        list(frame) if isinstance(frame, Mapping) else list(getattr(frame, "columns", ()))
    )
    if not len(names):
        empty = isinstance(frame, Mapping) or hasattr(frame, "columns")
        but = "it has no columns" if empty else ""
        raise refused(f"{where}: data", type(frame).__name__, "files, a data frame, or a mapping of columns", but)
    columns = _of_index(frame, list(map(str, names))) | {str(name): _array(frame[name]) for name in names}
    for name, column in columns.items():
        if column.ndim != 1:
            raise refused(f"{where}: shape of column '{name}'", column.shape, "(rows,)")
    lengths = {name: len(column) for name, column in columns.items()}
    for (first, rows), (name, others) in pairwise(lengths.items()):
        if rows != others:
            raise refused(f"{where}: rows of column '{name}'", others, f"{rows}, as of '{first}'")
    return {name: Column(column) for name, column in columns.items()}


def _of_index(frame: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the index of a pandas frame as a column where it is of dates: it is the time of the rows."""
    index = getattr(frame, "index", None)
    if getattr(getattr(index, "dtype", None), "kind", "") != "M":
        return {}
    name = str(getattr(index, "name", None) or "index")
    return {f"{name} (index)" if name in names else name: _array(index)}


def _array(values: Any) -> np.ndarray:
    # With a zone pandas gives an object for each time, unless it is asked for dates in UTC.
    return np.asarray(values, "datetime64[us]" if getattr(getattr(values, "dtype", None), "tz", None) else None)
