"""Times of any kind as seconds since 1970; times without a time zone are in UTC."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time
from typing import Any, Literal

import numpy as np
import pyarrow as arrow

from fedtide.core.errors import refused
from fedtide.data.sources.cells import is_number, numbers_of

UNITS = ((1e17, 1e9, "nanoseconds"), (1e14, 1e6, "microseconds"), (1e11, 1e3, "milliseconds"))
"""Least size of a time that is a number, how many make a second, and the unit; smaller ones are seconds."""
YEAR_1 = -62_135_596_800_000_000
"""Microseconds from the first year that Python knows to 1970."""
YEAR_1973 = 1e8
"""Seconds from which numbers are taken for a date."""
YEAR_1990, YEAR_2100 = 631152000.0, 4102444800.0


def is_epoch(numbers: np.ndarray) -> bool:
    """Tell whether numbers may be dates from 1990 to 2100 in seconds since 1970, or in thousandths of them and less.

    >>> is_epoch(np.array([1.7e12, 1.7e12 + 500])), is_epoch(np.array([20240131.0]))
    (True, False)
    """
    at = since_1970(numbers)[0]
    return len(at) > 0 and bool(at.min() >= YEAR_1990) and bool(at.max() < YEAR_2100)


def since_1970(numbers: np.ndarray) -> tuple[np.ndarray, str]:
    """Return times as seconds, and the unit that they are in by their median size.

    Dates from 1973 to 5138 in seconds, thousandths, millionths and billionths do not overlap.

    >>> since_1970(np.array([1.7e12, 1.7e12 + 500]))
    (array([1.7e+09, 1.7e+09]), 'milliseconds')
    """
    sizes = np.abs(numbers[np.isfinite(numbers)])
    size = float(np.median(sizes)) if len(sizes) else 0.0
    scale, unit = next(((scale, unit) for least, scale, unit in UNITS if size >= least), (1.0, "seconds"))
    return numbers if unit == "seconds" else numbers / scale, unit


def describe_span(time: np.ndarray, unit: str) -> str:
    """Say from when to when times are; `unit` is that of numbers, "" for dates.

    >>> describe_span(np.array([0.0, 86400.0]), ""), describe_span(np.array([0.0, 90.0]), "seconds")
    ('1970-01-01 00:00 to 1970-01-02 00:00', '0 to 90 seconds')
    """
    first, last = float(time.min()), float(time.max())
    if unit and last < YEAR_1973:
        return f"{first:g} to {last:g} {unit}"
    try:
        ends = [datetime.fromtimestamp(at, UTC).isoformat(" ", "minutes")[:16] for at in (first, last)]
    except (OverflowError, OSError, ValueError):
        return f"{first:g} to {last:g} seconds since 1970"
    return f"{ends[0]} to {ends[1]}" + (f", as {unit} since 1970" if unit else "")


def format_times(time: np.ndarray) -> list[str]:
    """Return times in seconds as ISO 8601 without a zone, or as numbers if they are no dates.

    >>> format_times(np.array([1.7e9, 1.7e9 + 0.5])), format_times(np.array([3600.0]))
    (['2023-11-14T22:13:20.000', '2023-11-14T22:13:20.500'], ['3600'])
    """
    if np.abs(time).max() < YEAR_1973:
        return [f"{at:.15g}" for at in time]
    unit: Literal["s", "ms"] = "s" if (time == np.round(time)).all() else "ms"
    texts: list[str] = np.datetime_as_string(np.round(time * 1e3).astype("datetime64[ms]"), unit=unit).tolist()
    return texts


def seconds(where: str, value: str) -> float:
    """Return a time as seconds since 1970; `where` begins the error message.

    >>> seconds("a.csv", "1970-01-01T01:00:00+01:00"), seconds("a.csv", "12.5"), seconds("a.csv", "1700000000000")
    (0.0, 12.5, 1700000000.0)
    """
    return float(_parse_each([value], lambda row: where)[0][0])


def all_seconds(texts: Sequence[str], where: Callable[[int], str]) -> tuple[np.ndarray, str]:
    """Return times as seconds since 1970, and the unit of numbers, "" of dates.

    `where` gives the place of a time by its position, for the error message.
    """
    try:
        cells = arrow.array(texts, arrow.string())
    except UnicodeEncodeError:  # half of a character of two
        return _parse_each(texts, where)
    numbers, _ = numbers_of(cells)
    if not np.isnan(numbers).any():
        return since_1970(numbers)
    try:
        dates = cells.cast(arrow.timestamp("us")).cast(arrow.int64()).to_numpy()
    except arrow.ArrowInvalid:
        return _parse_each(texts, where)
    exact = dates.min() >= YEAR_1 and np.abs(dates).max() < 2**53
    return (dates / 1e6, "") if exact else _parse_each(texts, where)


def seconds_of(values: np.ndarray, where: Callable[[int], str]) -> tuple[np.ndarray, str]:
    """Return texts, dates, or numbers as seconds since 1970, NaN if one is missing, and the unit of numbers.

    >>> seconds_of(np.array(["1970-01-02"], "datetime64[D]"), str)
    (array([86400.]), '')
    """
    if values.dtype.kind == "M":
        return np.where(np.isnat(values), np.nan, values.astype("datetime64[us]").astype(np.int64) / 1e6), ""
    if values.dtype.kind in "biuf":
        return since_1970(values.astype(np.float64))
    cells = values.ravel().tolist()
    return all_seconds(cells, where) if all(isinstance(cell, str) for cell in cells) else _parse_each(cells, where)


def dates(columns: Sequence[Sequence[str]], where: Callable[[int], str]) -> np.ndarray:
    """Return seconds since 1970 of dates in several columns: year, month, day, and optionally hour, minute, second."""
    return _parse_each(list(zip(*columns, strict=True)), where)[0]


def _parse_each(cells: Sequence[Any], where: Callable[[int], str]) -> tuple[np.ndarray, str]:
    """Return times as seconds since 1970, each parsed on its own, and the unit of numbers."""
    times: dict[Any, float] = {}
    zones: dict[Any, bool | None] = {}
    for row, cell in enumerate(cells):
        if cell not in times:
            try:
                times[cell], zones[cell] = _parse(cell)
            except (TypeError, ValueError, OverflowError):
                shown = " ".join(cell) if isinstance(cell, tuple) else cell
                allowed = "seconds or ISO 8601" if shown is cell else "year, month, day, hour, minute, second"
                raise refused(_name_time(where(row)), shown, allowed) from None
    if {True, False} <= {*zones.values()}:
        zoned, bare = ([row for row, cell in enumerate(cells) if zones[cell] is zone] for zone in (True, False))
        row = min(zoned, bare, key=len)[0]
        but = f"a time zone is named in {len(zoned):,} and not in {len(bare):,}"
        raise refused(_name_time(where(row)), str(cells[row]), "a zone in every time, or in none", but)
    seconds = np.array([times[cell] for cell in cells], np.float64)
    return since_1970(seconds) if {*zones.values()} <= {None} else (seconds, "")


def _parse(cell: Any) -> tuple[float, bool | None]:
    """Return a time as seconds since 1970, and whether it names a time zone; None for a number."""
    if cell is None or cell != cell:  # what pandas has for a missing time differs from itself
        return math.nan, None
    if isinstance(cell, tuple):
        cell = datetime(*[int(text if text.isascii() and "_" not in text else "") for text in cell])  # type: ignore[arg-type]
    elif isinstance(cell, str) and not is_number(cell):
        cell = datetime.fromisoformat(cell)
    elif isinstance(cell, date) and not isinstance(cell, datetime):
        cell = datetime.combine(cell, time())
    if isinstance(cell, datetime):
        return (cell if cell.tzinfo else cell.replace(tzinfo=UTC)).timestamp(), cell.tzinfo is not None
    return float(cell), None


def _name_time(where: str) -> str:
    """Return the place of a cell, with the word "time" if the name of the column lacks it."""
    return where if where.endswith(": time") else f"{where}: time"
