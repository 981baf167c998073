"""Columns of tables, of files or in memory, as numbers, texts and times."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as arrow
from pyarrow import compute

from fedtide.core.errors import FedtideError, refused
from fedtide.data.sources import dates
from fedtide.data.sources.dates import Times, Unclear, find_sentinels, read_clocks, read_dates, read_numbers_as_dates
from fedtide.data.sources.table_files import (
    UNREAD,
    Spelling,
    describe_total,
    ends_in_total,
    is_bytes,
    is_text,
    read_names,
    read_table,
)
from fedtide.data.sources.written import MARKS, Decimal, Numbers, find_decimal, find_missing, read_numbers
from fedtide.draw.prose import counted, listed
from fedtide.fields.types import DAY, LARGEST

Clock = Literal["utc", "written"]
Where = Callable[[int], str]
"""Gives the place of a row by its position, for messages."""

INFINITE = frozenset(("inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"))
MISSING = MARKS | INFINITE | {"none", "nat", "?", "-", "--", "\u2013", "\u2014", "."}
"""Cells in which something is missing in columns of numbers and times, in lower case."""
BOOLEANS = {
    "true": "false", "t": "f", "yes": "no", "y": "n", "on": "off", "wahr": "falsch", "ja": "nein", "j": "n",
    "vrai": "faux", "oui": "non", "o": "n", "verdadero": "falso", "s\u00ed": "no", "si": "no", "vero": "falso",
    "sim": "n\u00e3o", "da": "nu",
}  # fmt: skip
"""Spellings of true and the one of false beside it, in lower case."""
DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
"""A number with a comma instead of a point."""
CLOCKS = "times of the day, without a date"
WORDS = 1000
"""Different texts that are looked at one by one."""
MOSTLY = 0.9
"""Share of numbers from which a column seems to be one of numbers with mistakes."""
YEAR_1973 = 1e8
"""Seconds from which numbers are taken for a date."""
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Arrow's units of time."""
FARTHEST = 253_402_300_800
"""Seconds since 1970 at the end of the year 9999; as many before it there is no date either."""
FORM_WORDS = {
    "day-month-year": "day-month-year", "month-day-year": "month-day-year", "excel": "days of a spreadsheet",
    "digits": "digits", "weeks": "ISO weeks",
}  # fmt: skip
"""Forms of times that a person should hear of, in words."""
KINDS = {"list": "lists", "struct": "structs", "map": "maps", "binary": "bytes", "time32": CLOCKS, "time64": CLOCKS}
"""Types of columns that are left out, in words."""
NAMES_OF_TIMES = {
    "time", "timestamp", "datetime", "date", "when", "creationdate", "dteday", "ts", "datum", "zeitpunkt",
    "zeitstempel", "zeit", "fecha", "horodatage",
}  # fmt: skip
"""Words in the names of columns whose numbers may be times."""


@dataclass(frozen=True)
class Cells:
    """Columns of equal length.

    columns: columns by name. where: gives the place of a row, for messages. places: (rows,) positions of the rows in
    their files. said: how the files are written, a line each. spelling: how they were read.
    """

    columns: Mapping[str, "Column"]
    where: Where
    places: np.ndarray
    said: tuple[str, ...] = ()
    spelling: Spelling = Spelling()

    def __len__(self) -> int:
        return len(self.places)

    def texts(self, name: str) -> list[str]:
        """Return a column of texts, without the space around cells."""
        return self.columns[name].texts.tolist()

    def numbers(self, name: str, hint: str = "", *, gaps: bool = False) -> np.ndarray:
        """Return a column of numbers; raise for a cell that is none. With `gaps` a missing number is NaN.

        `hint` is advice on a column of which most cells are no numbers.
        """
        column = self.columns[name]
        values, wrong = column.parsed
        for row in np.flatnonzero(wrong if gaps else np.isnan(values))[:1].tolist():
            cell, allowed = column.cell(row), "a number or NA" if gaps else "a number"
            if DECIMAL_COMMA.fullmatch(str(cell)):
                allowed += " with a point, such as 1.5"
            elif column.known:
                allowed += f" in {column.known} or without a unit"
            elif column.unit:
                allowed += f", in one unit: the column has {column.unit}"
                allowed += "; data.source.units can name it" if hint else ""
            elif 2 * wrong.sum() > (~column.missing).sum():
                allowed += hint
            raise refused(f"{self.where(row)}: {name}", cell, allowed)
        for row in np.flatnonzero(np.abs(values) > LARGEST)[:1].tolist():
            raise refused(f"{self.where(row)}: {name}", column.cell(row), f"-{LARGEST:.2g} to {LARGEST:.2g}")
        return values

    def times(self, names: Sequence[str], clock: Clock = "utc") -> tuple[np.ndarray, str]:
        """Return times as seconds since 1970, and how they are written.

        Args:
            names: one column, a date and an hour, or year, month, day and so on.
            clock: whose hours count if times name a zone: UTC, or the clock as it is written.

        Raises:
            FedtideError: a cell is no time; or nothing tells whether the day or the month comes first.
        """
        if len(names) > 2:
            parts = [self.numbers(name) for name in names]
            whole, rest = [np.floor(part) for part in parts], parts[-1] - np.floor(parts[-1])
            at = []
            for row, cells in enumerate(zip(*whole, strict=True)):
                try:
                    at.append(datetime(*map(int, cells), tzinfo=UTC).timestamp())  # type: ignore[misc, arg-type]
                except (ValueError, OverflowError):
                    shown = " ".join(f"{part[row]:g}" for part in parts)
                    allowed = "year, month, day, hour, minute, second"
                    raise refused(f"{self.where(row)}: {', '.join(names)}: time", shown, allowed) from None
            unit = (DAY, 3600.0, 60.0, 1.0)[min(len(names), 6) - 3]  # seconds of the last column
            return np.array(at) + unit * rest, ""
        seconds, words = self._times(names[0], clock)
        if len(names) == 1:
            return seconds, words
        of_day = self.columns[names[1]].clock
        return seconds + (3600 * self.numbers(names[1]) if of_day is None else of_day), words

    def _times(self, name: str, clock: str) -> tuple[np.ndarray, str]:
        """Return the seconds of one column, NaN if one is missing."""
        column = self.columns[name]
        where = f"{name}: time" if name.strip().lower() != "time" else name
        try:
            times = column.read_times(self.spelling.time_format)
        except Unclear:
            shown = column.cell(int((~column.missing).argmax()))
            allowed = "'day-month-year' or 'month-day-year' (--time-format, data.source.time_format)"
            raise refused(f"{self.where(0).rpartition(': ')[0]}: {where}", shown, allowed) from None
        if times is None or times.wrong.any():
            values, wrong = column.parsed
            if times is None and self.spelling.time_format is None and not wrong.any():
                return values, "seconds"
            form = self.spelling.time_format if times is None else times.form
            if times is not None:
                bad = int(times.wrong.argmax())
            elif form is None:
                bad = column.first_wrong_time() or 0
            else:  # no cell is in that form
                bad = int((wrong if wrong.any() else ~column.missing).argmax())
            allowed = "seconds, or a date such as 2024-01-31 13:00" if form is None else f"a time as '{form}'"
            raise refused(f"{self.where(bad)}: {where}", column.cell(bad), allowed)
        zoned, dated = ~np.isnan(times.zone), ~np.isnat(times.at)
        if zoned.any() and (dated & ~zoned).any():
            few = zoned if 2 * zoned.sum() < dated.sum() else dated & ~zoned
            but = f"a time zone is named in {int(zoned.sum()):,} and not in {int((dated & ~zoned).sum()):,}"
            row = int(few.argmax())
            raise refused(f"{self.where(row)}: {where}", column.cell(row), "a zone in every time, or in none", but)
        seconds = np.where(dated, times.at.astype(np.int64) / 1e6, np.nan)
        return (seconds if clock == "written" else times.utc), describe_form(times, clock)

    def take(self, rows: np.ndarray) -> "Cells":
        """Return some of the rows, by position."""
        if len(rows) == len(self):
            return self
        columns = {name: column.take(rows) for name, column in self.columns.items()}
        return replace(self, columns=columns, where=lambda row: self.where(int(rows[row])), places=self.places[rows])


def describe_form(times: Times, clock: str = "utc") -> str:
    """Say how times are written; "" for year, month and day without a zone."""
    parts = [f"as {times.form} since 1970"] if times.form in dates.EPOCHS else []
    parts += [f"as {times.form}"] if times.form in dates.SINCE_1960 else []
    parts += [f"written as {FORM_WORDS[times.form]}"] if times.form in FORM_WORDS else []
    parts += [times.why] if times.why else []
    zones = sorted({*times.zone[~np.isnan(times.zone)].tolist()})
    if any(zones):
        named = [
            f"{'+' if zone >= 0 else '-'}{abs(zone) // 3600:02.0f}:{abs(zone) % 3600 // 60:02.0f}" for zone in zones
        ]
        parts += [f"{'clocks as written, in' if clock == 'written' else 'in UTC, from'} {' and '.join(named)}"]
    return ", ".join(parts)


def read_cells(
    paths: Path | Sequence[Path], names: Sequence[str] | None = None, spelling: Spelling = Spelling()
) -> Cells:
    """Read columns of files, one below the other; None reads all columns.

    Raises:
        FedtideError: a file is damaged, has no rows, has no header, or has no column of such a name.
    """
    files = [paths] if isinstance(paths, Path) else [*paths]
    if names is None:
        names = read_names(files[0], spelling)
        form, first = "year-month-day", np.zeros(1, np.int64)
        times = any(":" in name and read_dates(arrow.array([name]), first, form) for name in names)
        numbers = sum("." in name and is_number(name) for name in names)
        if (times and numbers) or 2 * (times + numbers) > len(names):
            raise refused(f"{files[0]}: first row", ",".join(names[:3]), "a header, the names of the columns")
    parts = [read_table(file, names, spelling) for file in files]
    number = np.concatenate([part.numbers for part in parts])
    file_of = np.repeat(np.arange(len(files)), [len(part.numbers) for part in parts])
    places = np.concatenate([np.arange(len(part.numbers)) for part in parts])
    raw = {name: _joined([part.columns[name] for part in parts]) for name in names}
    lines = tuple(dict.fromkeys(part.said for part in parts if part.said))
    default: Decimal = "," if parts[0].separator == ";" else "."
    spelling = replace(spelling, separator=cast(Any, parts[0].separator))
    return _cells_of(raw, lambda row: f"{files[file_of[row]]}: row {number[row]}", places, lines, spelling, default)


def cells_of(frame: Any, where: str, spelling: Spelling = Spelling()) -> Cells:
    """Return the cells of a data frame (pandas, polars, pyarrow), or of a mapping of arrays.

    Raises:
        FedtideError: it is none, or its columns differ in length; `where` begins the message.
    """
    columns = _columns_of(frame, where)
    if not (rows := len(next(iter(columns.values())))):
        raise FedtideError(f"{where}: no rows")
    lines: tuple[str, ...] = ()
    if ends_in_total([*columns.values()], np.arange(rows)):
        rows -= 1
        columns, lines = {name: column[:rows] for name, column in columns.items()}, (describe_total(rows),)
    return _cells_of(columns, lambda row: f"{where}: row {row}", np.arange(rows), lines, spelling, ".")


def _cells_of(
    raw: Mapping[str, Any],
    where: Where,
    places: np.ndarray,
    lines: tuple[str, ...],
    spelling: Spelling,
    default: Decimal,
) -> Cells:
    """Return cells with the decimal mark that a column proves, else the one that a person says or others prove."""
    units = spelling.units or {}
    columns = {
        name: Column(name, _decoded(array), form=spelling.time_format, known=units.get(name))
        for name, array in raw.items()
    }
    decimal = spelling.decimal or find_decimal(
        (column.words for column in columns.values() if column.words is not None), default
    )
    for name, column in columns.items():
        if (mark := decimal if column.words is None else find_decimal([column.words], decimal)) != column.decimal:
            columns[name] = replace(column, decimal=mark)
    return Cells(columns, where, places, lines, replace(spelling, decimal=decimal))


KEPT_APART = "differ by case or blanks only and are kept apart: correct them to join them"
"""End of the line on labels that may be the same."""


def describe_spelling(cells: Cells, names: Sequence[str], label: str) -> Iterator[str]:
    """Yield a line on what was guessed of how a table is written, and one on labels that may be the same.

    Args:
        cells: all columns.
        names: names of the columns that are read as numbers.
        label: name of the column of labels.
    """
    units = [*_describe_marks({name: cells.columns[name] for name in names})]
    units += [f"{name} in {unit}" for name in names if (unit := cells.columns[name].unit)]
    units += [f"{counted(many, 'infinite cell')} of {name} left out"
              for name in names if (many := cells.columns[name].infinite)]  # fmt: skip
    if lines := [*cells.said, *units]:
        yield f"read: {', '.join(lines)}"
    alike = dict[str, list[str]]()
    column = cells.columns[label]
    if column.words is not None and column.distinct <= 1000:
        for text, rows in sorted(Counter(column.cells.tolist()).items()):
            alike.setdefault("".join(text.lower().split()), []).append(f"{text!r} ({rows})")
    raw = column.raw.unique().to_pylist() if column.words is not None and column.distinct <= 1000 else []
    if padded := [text for text in raw if text and text != text.strip() and text.strip() in raw]:
        yield f"label: blanks around {listed([*map(repr, padded[:3])])} are left out"
    for texts in alike.values():
        if len(texts) > 1:
            yield f"label: {listed(texts)} {KEPT_APART}"


def _describe_marks(columns: Mapping[str, "Column"]) -> Iterator[str]:
    """Say which marks divide thousands, or come before decimals if these are no points, in columns of numbers."""
    names, guessed = dict[str, list[str]](), set[str]()
    for name, column in columns.items():
        if column.words is None or column.boolean:
            continue
        comma, point = (bool(compute.any(compute.match_substring_regex(column.words, f"[0-9][{mark}][0-9]")).as_py())
                        for mark in ",.")  # fmt: skip
        if comma or (point and column.decimal == ","):
            words = f"{'commas' if comma else 'points'} divide thousands"
            words = "decimal commas" if comma and column.decimal == "," else words
            names.setdefault(words, []).append(name)
            if find_decimal([column.words], ".") != find_decimal([column.words], ","):
                guessed.add(words)
    for words, where in names.items():
        yield f"{words} in {listed(where[:3])}{' and others' * (len(where) > 3)}{', guessed' * (words in guessed)}"


def _decoded(column: Any) -> Any:
    """Return categories that are no texts as numbers or dates, and bytes as texts if they are UTF-8."""
    kind = column.type
    if arrow.types.is_dictionary(kind):
        if is_bytes(kind.value_type):
            return _decoded_bytes(column)
        return column if is_text(kind.value_type) else column.cast(kind.value_type)
    if arrow.types.is_decimal(kind) and kind.scale == 0:  # ids of databases
        with suppress(arrow.ArrowInvalid):
            return column.cast(arrow.int64())
        return column.cast(arrow.string())
    if is_bytes(kind):
        with suppress(arrow.ArrowInvalid):
            return column.cast(arrow.string())
    return column


def _decoded_bytes(column: Any) -> Any:
    """Return different bytes as different texts if they are UTF-8, and else a short cell for each row."""
    parts = getattr(column, "chunks", [column])
    try:
        texts = [arrow.DictionaryArray.from_arrays(c.indices, c.dictionary.cast(arrow.string())) for c in parts]
    except arrow.ArrowInvalid:
        return arrow.chunked_array([arrow.repeat(UNREAD, len(column))])
    return arrow.chunked_array(texts)


def _joined(parts: Sequence[Any]) -> Any:
    """Put arrow columns of several files one below the other: as integers, numbers or texts if their types differ."""
    kinds = {part.type for part in parts}
    if len(kinds) > 1:
        numeric = all(arrow.types.is_integer(kind) or arrow.types.is_floating(kind) for kind in kinds)
        for kind in (arrow.int64(), arrow.float64(), arrow.string()) if numeric else (arrow.string(),):
            with suppress(arrow.ArrowInvalid):
                parts = [part.cast(kind) for part in parts]
                break
    return arrow.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)


def _columns_of(frame: Any, where: str) -> dict[str, Any]:
    """Return the columns of a data frame as arrow columns of equal length."""
    frame = frame.collect() if hasattr(frame, "collect") and not hasattr(frame, "to_numpy") else frame  # a lazy one
    names = getattr(frame, "column_names", None) or (
        list(frame) if isinstance(frame, Mapping) else list(getattr(frame, "columns", ()))
    )
    if not len(names):
        empty = isinstance(frame, Mapping) or hasattr(frame, "columns")
        but = "it has no columns" if empty else ""
        raise refused(f"{where}: data", type(frame).__name__, "files, a data frame, or a mapping of columns", but)
    if repeated := [name for name, count in Counter(map(str, names)).items() if count > 1]:
        raise FedtideError(f"{where}: two columns are called '{repeated[0]}'")
    values = _of_index(frame, list(map(str, names))) | {str(name): frame[name] for name in names}
    columns = {}
    for name, column in values.items():
        if (shape := np.shape(column))[1:]:
            raise refused(f"{where}: shape of column '{name}'", shape, "(rows,)")
        columns[name] = _as_arrow(column)
    lengths = {name: len(column) for name, column in columns.items()}
    for (first, rows), (name, others) in pairwise(lengths.items()):
        if rows != others:
            raise refused(f"{where}: rows of column '{name}'", others, f"{rows}, as of '{first}'")
    return columns


def _of_index(frame: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the levels of the index of a pandas frame that have a name, or dates, as columns."""
    index: Any = getattr(frame, "index", None)
    if not hasattr(index, "get_level_values"):
        return {}
    return {
        f"{level.name or 'index'}{' (index)' * (str(level.name or 'index') in names)}": level
        for level in map(index.get_level_values, range(index.nlevels))
        if level.name is not None or getattr(level.dtype, "kind", "") == "M"
    }


def _as_arrow(column: Any) -> Any:
    """Return a column of any library as an arrow column; objects of several types become texts."""
    if isinstance(column, arrow.ChunkedArray | arrow.Array):
        return column
    if hasattr(column, "to_arrow"):
        return column.to_arrow()
    try:
        array = _array_of(column)
    except UnicodeError:  # half of a character, which arrow does not hold
        array = _array_of(column := [in_full(value) for value in column])
    if array is not None and not isinstance(array.type, arrow.BaseExtensionType):  # such as periods of pandas
        return array
    texts = [None if value is None or value != value else str(value) for value in np.asarray(column).tolist()]
    return arrow.array(texts, arrow.string())


def _array_of(column: Any) -> Any:
    """Return an arrow array; None if its values are of several types."""
    try:
        return arrow.array(column, from_pandas=True)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError, arrow.ArrowNotImplementedError, OverflowError):
        return None


def in_full(value: Any) -> Any:
    """Return a text, or a list or dict of texts, without half of a character of two, which nothing can write.

    Other values stay.

    >>> in_full({"a": ["b\\ud800", 7]})
    {'a': ['b?', 7]}
    """
    if isinstance(value, list | tuple):
        return [in_full(one) for one in value]
    if isinstance(value, dict):
        return {in_full(name): in_full(one) for name, one in value.items()}
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


# -- columns -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column, as numbers, as texts and as times.

    Args:
        name: name of the column, which tells whether numbers may be times.
        raw: an arrow column.
        decimal: the mark before decimals in texts.
        form: how times are written, if a person says that.
        known: the unit of its numbers, if a person says that.
    """

    name: str
    raw: Any = field(repr=False)
    decimal: Decimal = "."
    form: str | None = None
    known: str | None = None

    def __len__(self) -> int:
        return len(self.raw)

    def cell(self, row: int) -> Any:
        """Return a cell, for messages."""
        try:
            return self.raw[row].as_py()
        except (OverflowError, ValueError):  # a time that Python has no object for
            return "a time outside of the years 1 to 9999"

    def take(self, rows: np.ndarray) -> "Column":
        """Return some of the rows, by position."""
        return replace(self, raw=self.raw.take(arrow.array(rows)))

    @cached_property
    def _encoded(self) -> tuple[Any, np.ndarray] | None:
        """Different texts without space around them, and the place of each row's, -1 for none; None without texts."""
        raw = self.raw
        if arrow.types.is_null(raw.type):
            return arrow.array([], arrow.string()), np.full(len(raw), -1)
        coded = arrow.types.is_dictionary(raw.type)
        if not (coded or is_text(raw.type)):
            return None
        encoded = raw if coded else raw.dictionary_encode()
        if isinstance(encoded, arrow.ChunkedArray):
            encoded = encoded.unify_dictionaries().combine_chunks()
        words = compute.utf8_trim_whitespace(encoded.dictionary.cast(arrow.string())).dictionary_encode()
        codes = encoded.indices.cast(arrow.int64()).fill_null(-1).to_numpy()
        return words.dictionary, np.append(words.indices.to_numpy().astype(np.int64), -1)[codes]

    @property
    def words(self) -> Any:
        """The different texts; None if the column has none."""
        return None if self._encoded is None else self._encoded[0]

    def _spread(self, of_words: np.ndarray, gap: Any) -> np.ndarray:
        """Return values of the different texts as values of the rows."""
        assert self._encoded is not None
        return np.append(of_words, np.array([gap], of_words.dtype))[self._encoded[1]]

    @cached_property
    def other(self) -> str:
        """The type of a column that has neither numbers, texts nor times, in words; "" for others."""
        kind = self.raw.type
        if self._encoded is not None or self._typed is not None or self._stored is not None:
            return ""
        word = re.split(r"\W", str(kind))[0]
        return KINDS.get(word.removeprefix("large_").removeprefix("fixed_size_"), f"cells of type {word}")

    @cached_property
    def _typed(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Numbers that are stored as such, and the mask of missing ones; None for other columns."""
        raw, kind = self.raw, self.raw.type
        if self._encoded is not None:
            return None
        if arrow.types.is_duration(kind):
            raw = compute.divide(
                raw.cast(arrow.int64()).cast(arrow.float64(), safe=False), float(PER_SECOND[kind.unit])
            )
        elif arrow.types.is_decimal(kind):
            raw = raw.cast(arrow.float64())
        elif arrow.types.is_boolean(kind):
            raw = raw.cast(arrow.int8())
        elif not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind)):
            return None
        missing = np.asarray(raw.is_null())
        values = np.asarray(raw.fill_null(0))
        return values, missing | ~np.isfinite(values)

    @cached_property
    def _stored(self) -> Times | None:
        """Times that are stored as such; None for other columns. The clock is that of the column's time zone."""
        raw, kind = self.raw, self.raw.type
        if arrow.types.is_date(kind):
            raw = raw.cast(arrow.timestamp("s" if arrow.types.is_date32(kind) else "ms"))
        elif not arrow.types.is_timestamp(kind):
            return None
        ticks = np.asarray(raw.cast(arrow.int64()).fill_null(0))
        wrong = np.abs(ticks / PER_SECOND[raw.type.unit]) > FARTHEST
        if wrong.any():
            raw = compute.if_else(arrow.array(wrong), arrow.scalar(None, raw.type), raw)
        at = raw.cast(arrow.timestamp("us", raw.type.tz), safe=False)
        zone = np.full(len(self), np.nan)
        if getattr(kind, "tz", None):
            local = compute.local_timestamp(at)
            ahead = np.asarray(local.cast(arrow.int64()).fill_null(0)) - np.asarray(at.cast(arrow.int64()).fill_null(0))
            zone, at = np.where(np.asarray(at.is_null()), np.nan, ahead / 1e6), local
        return Times(np.asarray(at).astype("datetime64[us]"), wrong, zone, "year-month-day")

    @cached_property
    def _numbers(self) -> Numbers:
        """The numbers of the rows."""
        if self._typed is not None:
            values, missing = self._typed
            plain = values if not missing.any() else np.where(missing, np.nan, values)
            return Numbers(plain, np.zeros(len(self), bool))
        if self._encoded is None:
            return Numbers(np.full(len(self), np.nan), np.ones(len(self), bool))
        words = self._encoded[0]
        texts = [word.lower() for word in words.to_pylist()] if len(words) <= len(MARKS) + 6 else []
        spellings = {*texts} - MARKS
        for true, false in BOOLEANS.items():
            if spellings and spellings <= {true, false}:
                truth = np.array([{true: 1.0, false: 0.0}.get(text, math.nan) for text in texts])
                return Numbers(self._spread(truth, math.nan), np.zeros(len(self), bool))
        numbers = read_numbers(words, self.decimal, MISSING, self.known)
        if numbers.wrong.any():
            numbers = read_numbers(words, self.decimal, MARKS, self.known)
        values = numbers.values if len(words) and (self._encoded[1] >= 0).all() else numbers.values.astype(np.float64)
        return Numbers(
            self._spread(values, math.nan if values.dtype.kind == "f" else 0),
            self._spread(numbers.wrong, False),
            numbers.unit,
        )

    @cached_property
    def parsed(self) -> tuple[np.ndarray, np.ndarray]:
        """Cells as numbers, NaN if one is missing or wrong, and the mask of wrong ones: texts and dates."""
        return self._numbers.values.astype(np.float64), self._numbers.wrong

    @property
    def integers(self) -> np.ndarray | None:
        """Integers (rows,) of 64 bits if every cell is one, else None."""
        values, missing = self._numbers.values, self.missing
        if values.dtype.kind not in "iu" or missing.any() or self.numbers is None or self.boolean:
            return None
        return None if len(values) and values.max() >= 2**63 else values.astype(np.int64)

    @cached_property
    def missing(self) -> np.ndarray:
        """Mask of the cells in which something is missing; of times also those that stand for no date."""
        if self._typed is not None:
            return self._typed[1]
        if self.dated:
            times = self.read_times()
            assert times is not None
            return np.isnat(times.at)
        if self._encoded is None:
            return np.asarray(self.raw.is_null())
        marks = MARKS if self.numbers is None else MISSING
        return self._spread(find_missing(self._encoded[0], marks), True)

    @cached_property
    def numbers(self) -> np.ndarray | None:
        """Cells as numbers, NaN if one is missing; None if one is a text, a date, or a code such as 007."""
        values, wrong = self.parsed
        return None if wrong.any() or ((not len(self) or np.isnan(values).all()) and self._typed is None) else values

    @cached_property
    def coded(self) -> bool:
        """True for texts of digits that are no numbers, such as 007 and what has more than 19 digits."""
        words = [] if self.words is None else [word for word in self.words.to_pylist() if word.lower() not in MARKS]
        digits = [word for word in words if word.isdecimal()]
        return len(digits) == len(words) and any(len(word) > 19 or word[0] == "0" != word for word in digits)

    @property
    def boolean(self) -> bool:
        """True if cells are spellings of true and false, which are numbers, too."""
        is_coded = self.numbers is not None and self._encoded is not None
        return is_coded and not any(any(map(str.isdigit, word)) for word in self.words[:20].to_pylist())

    @property
    def infinite(self) -> int:
        """Number of cells that are infinite, and count as missing."""
        if self._typed is not None:
            return int(np.isinf(self._typed[0]).sum())
        return 0 if self._encoded is None else int(self._spread(find_missing(self._encoded[0], INFINITE), False).sum())

    @property
    def unit(self) -> str:
        """The unit of a column of texts, such as "%", which stands beside every number; "" if there is none."""
        return self._numbers.unit

    @property
    def present(self) -> np.ndarray:
        """The numbers that are there; none of other columns."""
        return np.empty(0) if self.numbers is None else self.numbers[~self.missing]

    @property
    def cells(self) -> np.ndarray:
        """The texts that are there."""
        return self.texts[~self.missing]

    @cached_property
    def texts(self) -> np.ndarray:
        """Cells as texts (rows,) of objects, without the space around them; whole numbers without a point."""
        if self._encoded is not None:
            return self._spread(np.array([*self._encoded[0].to_pylist(), ""], object)[:-1], "")
        if self._typed is not None:
            values, missing = self._typed
            if values.dtype.kind == "f" and bool((values[~missing] % 1 == 0).all()) and self.largest < 2**63:
                values = np.where(missing, 0, values).astype(np.int64)
            texts = [str(value) for value in values.tolist()]
        elif self._stored is not None:
            texts, missing = np.datetime_as_string(self._stored.at).tolist(), np.isnat(self._stored.at)
        else:
            texts, missing = [str(value) for value in self.raw.to_pylist()], np.asarray(self.raw.is_null())
        return np.where(missing, "", np.array(texts, object))

    @cached_property
    def whole(self) -> bool:
        """True if every number is whole."""
        return self.numbers is not None and bool((self.present % 1 == 0).all())

    @cached_property
    def largest(self) -> float:
        """The largest absolute number; 0 without numbers."""
        return float(np.abs(self.present).max(initial=0.0))

    @cached_property
    def distinct(self) -> int:
        """Number of different cells."""
        if self._typed is not None:
            return len(np.unique(self._typed[0][~self.missing]))
        return len(set(self.cells.tolist()) if self._encoded is None else np.unique(self._encoded[1][~self.missing]))

    @cached_property
    def digest(self) -> bytes:
        """Digest of the cells, which is the same for columns with the same numbers, or the same texts."""
        texts: Any = self.texts if self._encoded is None else self._encoded[0].to_pylist()
        digest = hashlib.blake2b(b"" if self.numbers is not None else "\0".join(texts).encode(), digest_size=16)
        numbers = self.numbers if self._encoded is None or self.numbers is not None else self._encoded[1]
        digest.update(b"" if numbers is None else np.ascontiguousarray(numbers).tobytes())
        return digest.digest()

    @cached_property
    def stray(self) -> tuple[int, int] | None:
        """Number of cells that are numbers, and the first row that has none; None unless nearly all rows have one."""
        if self.coded:
            return None
        _, wrong = self.parsed
        count = int((~self.missing).sum())
        numbers = count - int(wrong.sum())
        return (numbers, int(wrong.argmax())) if MOSTLY * count <= numbers < count else None

    @property
    def repeats(self) -> bool:
        """True if there are two different cells or more, and texts that come again."""
        return self.distinct >= 2 and (self.numbers is not None or self.distinct <= len(self) / 2)

    # -- times ---------------------------------------------------------------------------------------------------------

    def read_times(self, form: str | None = None) -> Times | None:
        """Return the cells as times, without those that stand for no date; None if they are none.

        Args:
            form: how times are written, if a person says that.

        Raises:
            Unclear: nothing tells whether the day or the month comes first.
        """
        times = self._read_times(form) if form is not None and self._stored is None else self._guessed_times
        if times is None:
            return None
        sentinels = find_sentinels(times.at)
        if not sentinels.any():
            return times
        day = np.datetime_as_string(times.at[sentinels][0], unit="D")
        why = [times.why] if times.why else []
        at = np.where(sentinels, np.datetime64("NaT"), times.at)
        return replace(times, at=at, why=", ".join([*why, f"without {int(sentinels.sum()):,} rows of {day}"]))

    @cached_property
    def _guessed_times(self) -> Times | None:
        """Times that are stored as such, in the form that a person says, or in the one that the cells tell."""
        if self._stored is not None:
            return self._stored
        if self.form is not None and (self.named_as_time or self.words is not None):
            times = self._read_times(self.form)
            if times is not None and not times.wrong.any() and (self.named_as_time or self.numbers is None):
                return times
        return self._read_times(None)

    def _read_times(self, form: str | None) -> Times | None:
        if self._encoded is not None:
            words, codes = self._encoded
            gone = self._spread(find_missing(words, MISSING), True)
            times = read_dates(words, codes[~gone], form) if not gone.all() else None
            if times is not None:
                at, wrong, zone = (self._spread(part, gap) for part, gap in (
                    (times.at, np.datetime64("NaT")), (times.wrong, False), (times.zone, math.nan)))  # fmt: skip
                return Times(at, wrong & ~gone, zone, times.form, times.why)
        values, wrong = self.parsed
        return None if wrong.any() or self.boolean else read_numbers_as_dates(values, form)

    @cached_property
    def clock(self) -> np.ndarray | None:
        """Times of the day in seconds since midnight, NaN if one is missing; None for other columns."""
        if arrow.types.is_time(self.raw.type):
            day = self.raw.cast(arrow.time64("us"), safe=False).cast(arrow.int64()).cast(arrow.float64())
            return np.asarray(day.fill_null(math.nan)) / 1e6
        if self._encoded is None:
            return None
        words, _ = self._encoded
        gone = find_missing(words, MISSING)
        seconds = read_clocks(words.filter(arrow.array(~gone)))
        if seconds is None:
            return None
        values = np.full(len(words), math.nan)
        values[~gone] = seconds
        return self._spread(values, math.nan)

    @property
    def named_as_time(self) -> bool:
        """True if the column is called like a time."""
        return bool(NAMES_OF_TIMES & {*words_of(self.name)})

    @cached_property
    def unclear(self) -> bool:
        """True for dates of which nothing tells whether the day or the month comes first."""
        try:
            _ = self._guessed_times
        except Unclear:
            return self.named_as_time or any(len(text) >= 8 for text in self.texts[:20].tolist())
        return False

    @cached_property
    def dated(self) -> bool:
        """True for times: dates, and numbers that are if the column is called so."""
        if self._stored is not None or self.unclear:
            return self._stored is not None
        times = self._guessed_times
        if times is None or self.named_as_time:
            return times is not None
        if times.form == "digits":
            return len(np.unique(times.at[~np.isnat(times.at)])) >= 20
        return times.form not in ("excel", *dates.EPOCHS, "seconds or less")

    @cached_property
    def counted_since(self) -> str:
        """How numbers may be times from 2000 to 2035, in words; "" if they hardly are, or if the name says so."""
        values = self.present
        if self.named_as_time or self.boolean or self.unit or not len(values):
            return ""
        for unit in ("seconds", "milliseconds", "microseconds", "nanoseconds"):
            if (dates.within_2000_to_2035(values / dates.EPOCHS[unit])).all():
                return f"{unit} since 1970"
        with np.errstate(over="ignore"):
            seconds = (values - dates.EXCEL_1970) * DAY
        spreadsheet = dates.within_2000_to_2035(seconds).all() and (values % 1).any()
        return "days of a spreadsheet" if spreadsheet else ""

    @property
    def days(self) -> bool:
        """True for dates without a time of the day."""
        times = self.read_times() if self.dated else None
        at = None if times is None else times.at[~np.isnat(times.at)]
        return at is not None and bool((at == at.astype("datetime64[D]")).all())

    def first_wrong_time(self) -> int | None:
        """Return the first row whose cell is no time in the form that a person says, or in any; None without one."""
        times = self._read_times(self.form) if self.form is not None else None
        if times is not None and times.wrong.any():
            return int(times.wrong.argmax())
        words, codes = self._encoded or (arrow.array([]), np.empty(0))
        for place, word in enumerate(words[:WORDS].to_pylist()):
            with suppress(Unclear):
                other = word.lower() in MISSING or is_number(word)
                if not other and read_dates(arrow.array([word]), np.zeros(1, np.int64)) is None:
                    return int((codes == place).argmax())
        return None


# -- single cells -----------------------------------------------------------------------------------------------------


def number(where: str, column: str, cell: Any, least: float = -math.inf) -> float:
    """Return a finite number; raise for another cell, or for a number below `least`."""
    try:
        unread = isinstance(cell, bool) or (isinstance(cell, str) and not is_number(cell))
        value = math.nan if unread else float(cell)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        allowed = "a finite number" if least == -math.inf else f"a number of {least:g} or more"
        raise refused(f"{where}: {column}", cell, allowed)
    return value


def is_number(cell: str) -> bool:
    """Tell whether a text is a finite number.

    >>> is_number("1e3"), is_number("1_000"), is_number("nan")
    (True, False, False)
    """
    try:
        # Python alone reads 5_0, and digits of other scripts.
        return cell.isascii() and "_" not in cell and math.isfinite(float(cell))
    except ValueError:
        return False


def words_of(name: str) -> list[str]:
    """Return the words of a column's name.

    >>> words_of("OwnerUserId"), words_of("station_id"), words_of("PM2.5")
    (['owner', 'user', 'id'], ['station', 'id'], ['pm2', '5'])
    """
    return re.findall(r"[a-z]+[0-9]*|[0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def describe_span(time: np.ndarray, words: str) -> str:
    """Say from when to when times are; `words` say how they are written, "seconds" for numbers that are no dates.

    >>> describe_span(np.array([0.0, 86400.0]), ""), describe_span(np.array([0.0, 90.0]), "seconds")
    ('1970-01-01 00:00 to 1970-01-02 00:00', '0 to 90 seconds')
    """
    first, last = float(time.min()), float(time.max())
    if words == "seconds":
        return f"{first:g} to {last:g} seconds"
    try:
        ends = [datetime.fromtimestamp(at, UTC).isoformat(" ", "minutes")[:16] for at in (first, last)]
    except (OverflowError, OSError, ValueError):
        return f"{first:g} to {last:g} seconds since 1970"
    return f"{ends[0]} to {ends[1]}" + (f", {words}" if words else "")


def format_times(time: np.ndarray) -> list[str]:
    """Return times in seconds as ISO 8601 without a zone, or as numbers if they are no dates.

    >>> format_times(np.array([1.7e9, 1.7e9 + 0.5])), format_times(np.array([3600.0]))
    (['2023-11-14T22:13:20.000', '2023-11-14T22:13:20.500'], ['3600'])
    """
    if np.abs(time).max() < YEAR_1973:
        return [f"{at:.15g}" for at in time]
    unit: Literal["s", "ms"] = "s" if (time == np.round(time)).all() else "ms"
    return np.datetime_as_string(np.round(time * 1e3).astype("datetime64[ms]"), unit=unit).tolist()


def parse_time(where: str, cell: str) -> float:
    """Return the time in one cell as seconds since 1970: a number of seconds or less, or ISO 8601.

    >>> parse_time("a.json", "1970-01-01T01:00:00+01:00"), parse_time("a.json", "1700000000000")
    (0.0, 1700000000.0)
    """
    if is_number(cell):
        return float(cell) / float(dates.scale_of(np.array(float(cell))))
    try:
        at = datetime.fromisoformat(cell.strip())
    except ValueError:
        raise refused(f"{where}: time", cell, "seconds, or a date such as 2024-01-31 13:00") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def seconds_of(values: Any, where: Where) -> np.ndarray:
    """Return texts, dates, or numbers as seconds since 1970, NaN if one is missing.

    `where` gives the place of a time by its position, for the error message.

    >>> seconds_of(np.array(["1970-01-02"], "datetime64[D]"), str), seconds_of(["12.5"], str)
    (array([86400.]), array([12.5]))
    >>> seconds_of(["1970-01-01T01:00:00+01:00"], str), seconds_of(["1700000000000"], str)
    (array([0.]), array([1.7e+09]))
    """
    column = Column("time", _as_arrow(values))
    return Cells({"time": column}, where, np.arange(len(column))).times(["time"])[0]
