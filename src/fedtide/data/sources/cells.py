"""Columns of CSV, ARFF and Parquet files and of tables in memory, and times of any kind as seconds since 1970.

Times without a time zone are in UTC.
"""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as arrow
from pyarrow import compute, parquet
from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv

from fedtide.core.errors import FedtideError, nearest, refused
from fedtide.data.sources.files import check_unpacked, opened, reading

Where = Callable[[int], str]
"""Gives the place of a row by its position, for messages."""

CSV = "a CSV file in UTF-8"
BLOCK = 2**26
"""Bytes that are read at a time, and most bytes of a row."""
HEAD = 2**10
"""Rows by which a column seems to hold names of digits."""
NAME = re.compile(r"0[0-9]+|[0-9]{16,}")
"""Digits that are no number."""
ATTRIBUTE = re.compile(r"""\s*(?:'([^']+)'|"([^"]+)"|([^\s'"{]+))""")
"""The name of a column of an ARFF file, with quotes or without."""
GAP = re.compile(r"(^|,)\s*\?\s*(?=,|$)")
"""A missing cell of an ARFF file."""
DECIMAL_COMMA = re.compile(r"\s*[+-]?[0-9]+,[0-9]+\s*")
"""A number with a comma instead of a point."""
MARKS = frozenset(("", "na", "nan", "null"))
"""Cells in which something is missing, in lower case."""
MISSING = MARKS | {"none", "nat", "?", "<na>"}
"""The same with marks that sources of a study do not know."""
MOSTLY = 0.9
"""Share of numbers from which a column seems to be one of numbers with mistakes."""


# -- files -------------------------------------------------------------------------------------------------------------


class _Head(NamedTuple):
    """The head of a text file: names of columns, lines and rows above the data, and the data of an ARFF file as CSV."""

    names: list[str]
    lines: int
    rows: int
    data: bytes | None = None


def _read_head(path: Path) -> _Head:
    """Read the head of a CSV file, packed or not, or a whole ARFF file."""
    with reading(path, CSV), io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
        try:
            above = list[str]()
            while not above or (above[-1] and (not above[-1].strip() or above[-1].startswith("%"))):
                above.append(file.readline())  # comments may come before the relation of an ARFF file
            lines = chain(above, file)
            if above[-1].strip().lower().startswith("@relation"):
                head = _read_arff(path, lines)
            else:
                rows = csv.reader(lines)
                number, names = next(((number, row) for number, row in enumerate(rows, start=1) if row), (0, []))
                head = _Head([name.strip() for name in names], rows.line_num, number)
        except UnicodeDecodeError as error:
            raise _undecoded(path, error) from None
    if not head.names:
        raise FedtideError(f"{path}: is empty, allowed: a header, and rows below it")
    if repeated := [name for name, count in Counter(head.names).items() if count > 1]:
        raise FedtideError(f"{path}: two columns are called '{repeated[0]}'")
    if len(head.names) == 1 and re.search(r"[;\t|]", head.names[0]):
        raise refused(f"{path}: header", head.names[0], "names divided by commas, like all cells")
    return head


def _undecoded(path: Path, error: Exception) -> Exception:
    """Return an error that names the first line of a file that is not UTF-8, or else the given one."""
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as wrong:
                place = f"line {number}, byte {wrong.start + 1}, 0x{line[wrong.start]:02x}"
                return ValueError(f"{place}: {wrong.reason}; save it as UTF-8")
    return error


def _read_arff(path: Path, file: Iterator[str]) -> _Head:
    """Read an ARFF file; a missing value is a question mark.

    The reader of SciPy refuses attributes without a type, which the published file of WISDM has.
    """
    names, number, word = list[str](), 0, ""
    for number, line in enumerate(file, start=1):
        word, rest = [*line.split(None, 1), "", ""][:2]
        if word.lower() == "@data":
            break
        if word.lower() == "@attribute":
            if (name := ATTRIBUTE.match(rest)) is None:
                raise refused(f"{path}: row {number}: attribute", rest.strip(), "a name and a type")
            names.append(name[1] or name[2] or name[3])
    rows = ("\n" if line.startswith("%") else GAP.sub(r"\1", line).replace("'", '"') for line in file)
    return _Head(names if word.lower() == "@data" else [], 0, number, "".join(rows).encode())


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    with reading(path, "a Parquet file", arrow.ArrowException), parquet.ParquetFile(path) as file:
        about = file.metadata
        groups = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
        check_unpacked(path, max(groups, 8 * about.num_rows * about.num_columns))
        yield file


def is_parquet(path: Path) -> bool:
    """Tell whether a file begins as Parquet files do."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def read_names(path: Path) -> list[str]:
    """Return the names of the columns, without the space around them."""
    if is_parquet(path):
        with _parquet_file(path) as file:
            return [name.strip() for name in file.schema_arrow.names]
    return _read_head(path).names


def _read(path: Path, names: Sequence[str]) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the numbers of the rows of a file, and some columns: arrow arrays of texts, or typed arrays of Parquet."""
    if is_parquet(path):
        find_places(path, read_names(path), names)
        with _parquet_file(path) as parquet_file:
            columns = _arrays_of(parquet_file.read(columns=[*dict.fromkeys(names)]), str(path))
            if not parquet_file.metadata.num_rows:
                raise FedtideError(f"{path}: no rows")
            return np.arange(parquet_file.metadata.num_rows), columns
    head, odd = _read_head(path), list[tuple[int, int]]()
    find_places(path, head.names, names)

    def note_width(row: Any) -> str:
        """Note the number and the width, 0 if it is blank, of a row that is not as wide as the header."""
        odd.append((row.number - head.lines + head.rows, row.actual_columns if row.text.strip() else 0))
        return "skip"

    with reading(path, CSV, arrow.ArrowException), io.BytesIO(head.data) if head.data else opened(path) as source:
        try:
            table = read_csv(
                source,
                ReadOptions(use_threads=False, block_size=BLOCK, column_names=head.names, skip_rows=head.lines),
                ParseOptions(newlines_in_values=True, ignore_empty_lines=False, invalid_row_handler=note_width),
                ConvertOptions(column_types=dict.fromkeys(head.names, arrow.string()), strings_can_be_null=False),
            )
        except arrow.ArrowInvalid as error:
            raise _undecoded(path, error) from None
    for number, width in odd:
        if width:
            raise refused(f"{path}: row {number}: number of cells", width, f"{len(head.names)}, as in the header")
    numbers = np.setdiff1d(np.arange(len(table) + len(odd)) + head.rows + 1, [number for number, _ in odd])
    filled = np.any([np.asarray(compute.not_equal(column, "")) for column in table.columns], axis=0)
    if not filled.any():
        raise FedtideError(f"{path}: no rows below the header")
    table = table if filled.all() else table.filter(arrow.array(filled))  # an empty line has an empty cell everywhere
    return numbers[filled], {name: table[name] for name in names}


def find_places(path: object, header: Sequence[str], columns: Sequence[str]) -> list[int]:
    """Return the positions of columns in a header; raise for one that is not there."""
    at = {column: place for place, column in enumerate(header)}
    for column in columns:
        if column not in at:
            raise FedtideError(f"{path}: no column '{column}'; {nearest(column, header)}")
    return [at[column] for column in columns]


@dataclass(frozen=True)
class Cells:
    """Columns of equal length.

    columns: columns by name. where: gives the place of a row, for messages. places: (rows,) positions of the rows in
    their files.
    """

    columns: Mapping[str, "Column"]
    where: Where
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.places)

    def texts(self, name: str) -> list[str]:
        """Return a column of texts, without the space around cells."""
        texts: list[str] = self.columns[name].texts.tolist()
        return texts

    def numbers(self, name: str, hint: str = "", *, gaps: bool = False) -> np.ndarray:
        """Return a column of numbers; raise for a cell that is none. With `gaps` a missing number is NaN."""
        column = self.columns[name]
        values, wrong = column.parsed
        for row in np.flatnonzero(wrong if gaps else np.isnan(values))[:1].tolist():
            cell = column.cell(row)
            point = bool(DECIMAL_COMMA.fullmatch(str(cell)))
            allowed = "a finite number" + (" with a point, such as 1.5" if point else hint)
            raise refused(f"{self.where(row)}: {name}", cell, allowed)
        return values

    def times(self, names: Sequence[str]) -> tuple[np.ndarray, str]:
        """Return seconds since 1970 of a column, of a date and an hour, or of the columns of a date, and the unit.

        The unit is that of a column of numbers, "" for dates.
        """

        def where(row: int) -> str:
            return f"{self.where(row)}: {', '.join(names)}"

        if len(names) > 2:
            return _parse_each([*zip(*map(self.texts, names), strict=True)], where)
        values, wrong = self.columns[names[0]].parsed
        times, unit = seconds_of(self.columns[names[0]].cells, where) if wrong.any() else since_1970(values)
        return (times, unit) if len(names) == 1 else (times + 3600 * self.numbers(names[1]), "")

    def take(self, rows: np.ndarray) -> "Cells":
        """Return some of the rows, by position."""
        if len(rows) == len(self):
            return self
        columns = {name: column.take(rows) for name, column in self.columns.items()}
        return Cells(columns, lambda row: self.where(int(rows[row])), self.places[rows])


def read_cells(paths: Path | Sequence[Path], names: Sequence[str] | None = None) -> Cells:
    """Read columns of files, one below the other; None reads all columns.

    Raises:
        FedtideError: a file is damaged, has no rows, has no header, or has no column of such a name.
    """
    files = [paths] if isinstance(paths, Path) else [*paths]
    if names is None:
        names = read_names(files[0])
        if 2 * sum("." in name and is_number(name) for name in names) > len(names):
            raise refused(f"{files[0]}: first row", ",".join(names[:3]), "a header, the names of the columns")
    parts = [_read(file, names) for file in files]
    number = np.concatenate([numbers for numbers, _ in parts])
    file_of = np.repeat(np.arange(len(files)), [len(numbers) for numbers, _ in parts])
    columns = {name: Column(_joined([columns[name] for _, columns in parts]), MARKS) for name in names}
    places = np.concatenate([np.arange(len(numbers)) for numbers, _ in parts])
    return Cells(columns, lambda row: f"{files[file_of[row]]}: row {number[row]}", places)


def _joined(parts: Sequence[Any]) -> Any:
    if all(isinstance(part, arrow.ChunkedArray) for part in parts):
        return arrow.chunked_array([chunk for part in parts for chunk in part.chunks])
    return np.concatenate([np.asarray(part) for part in parts])


# -- cells ---


def numbers_of(cells: Any, marks: frozenset[str] = MARKS) -> tuple[np.ndarray, np.ndarray]:
    """Return cells (a list or an arrow array of texts) as numbers, NaN if there is none, and the mask of wrong ones.

    A cell is wrong if nothing is missing in it and it is no finite number.

    >>> numbers_of(["1.5", "NA", "1,5"])
    (array([1.5, nan, nan]), array([False, False,  True]))
    """
    texts = compute.utf8_trim_whitespace(arrow.array(cells, arrow.string()) if isinstance(cells, list) else cells)
    missing = compute.is_in(compute.utf8_lower(texts), arrow.array(sorted(marks)))
    try:
        values = compute.if_else(missing, None, texts).cast(arrow.float64()).to_numpy(zero_copy_only=False)
    except arrow.ArrowInvalid:  # arrow does not read all numbers that Python reads, such as +4
        values = np.array([float(text) if is_number(text) else math.nan for text in texts.to_pylist()])
    wrong = ~np.isfinite(values) & ~np.asarray(missing)
    return np.where(wrong, np.nan, values), wrong


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


# -- columns -----------------------------------------------------------------------------------------------------------


class Column:
    """A column, as numbers and as texts, with the mask of missing cells.

    Args:
        raw: an arrow array of texts of a file, or any array.
        marks: cells in which something is missing, in lower case.
    """

    def __init__(self, raw: Any, marks: frozenset[str] = MISSING) -> None:
        self.written = isinstance(raw, arrow.ChunkedArray)
        dated = not self.written and raw.dtype.kind == "M"
        self.raw, self.marks = raw.astype("datetime64[us]") if dated else raw, marks

    def __len__(self) -> int:
        return len(self.raw)

    def cell(self, row: int) -> Any:
        """Return a cell, for messages."""
        return self.raw[row].as_py() if self.written else self.raw[row : row + 1].tolist()[0]

    def take(self, rows: np.ndarray) -> "Column":
        """Return some of the rows, by position."""
        return Column(self.raw.take(arrow.array(rows)) if self.written else self.raw[rows], self.marks)

    @cached_property
    def parsed(self) -> tuple[np.ndarray, np.ndarray]:
        """Cells as numbers, NaN if one is missing or wrong, and the mask of wrong ones: texts and dates."""
        if self.written:
            return numbers_of(self.raw, self.marks)
        values = np.full(len(self), np.nan)
        if self.raw.dtype.kind != "M":
            cells = self.raw[~self.missing]
            values[~self.missing] = [_float(cell) for cell in cells]
        wrong = ~self.missing & ~np.isfinite(values)
        return np.where(wrong, np.nan, values), wrong

    @cached_property
    def missing(self) -> np.ndarray:
        """Mask of the cells in which something is missing."""
        if self.written:
            texts = compute.utf8_lower(compute.utf8_trim_whitespace(self.raw))
            return np.asarray(compute.is_in(texts, arrow.array(sorted(self.marks))))
        if self.raw.dtype.kind in "biufM":
            return ~np.isfinite(self.raw)
        cells = self.raw.tolist()
        marks = {cell for cell in set(cells) if cell is None or str(cell).strip().lower() in self.marks}
        return np.array([cell in marks for cell in cells], bool)

    @property
    def odd(self) -> bool:
        """True if something is missing by a mark that sources of a study do not know."""
        rows = np.flatnonzero(self.missing).tolist()
        return not MARKS.issuperset(str(self.cell(row)).strip().lower() for row in rows)

    @cached_property
    def numbers(self) -> np.ndarray | None:
        """Cells as numbers, NaN if one is missing; None if one is a text, a date, or a name of digits."""
        values, wrong = self.parsed
        named = self.written and any(NAME.fullmatch(cell.strip()) for cell in self.raw[:HEAD].to_pylist())
        return None if named or wrong.any() else values

    @property
    def present(self) -> np.ndarray:
        """The numbers that are there; none of other columns."""
        return np.empty(0) if self.numbers is None else self.numbers[~self.missing]

    @property
    def cells(self) -> np.ndarray:
        """The cells that are there: texts of a file, any values of other tables."""
        return (self.texts if self.written else self.raw)[~self.missing]

    @cached_property
    def texts(self) -> np.ndarray:
        """Cells as texts, without the space around them; whole numbers without a point."""
        if self.written:
            return np.array([*map(str.strip, self.raw.to_pylist())])
        if self.raw.dtype.kind == "f" and self.whole:
            texts = np.where(self.missing, 0, self.raw).astype(np.int64).astype(str)
        elif self.raw.dtype.kind == "M":
            texts = np.datetime_as_string(self.raw)
        else:
            texts = np.array([str(value).strip() for value in self.raw.tolist()])
        return np.where(self.missing, "", texts)

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
        return len(set((self.texts[~self.missing] if self.numbers is None else self.present).tolist()))

    @cached_property
    def stray(self) -> tuple[int, int] | None:
        """Number of cells that are numbers, and the first row that is none, where hardly any is not; None elsewhere."""
        _, wrong = self.parsed
        count = int((~self.missing).sum())
        numbers = count - int(wrong.sum())
        return (numbers, int(wrong.argmax())) if MOSTLY * count <= numbers < count else None

    @property
    def repeats(self) -> bool:
        """True if there are two different cells or more, and texts that come again."""
        return self.distinct >= 2 and (self.numbers is not None or self.distinct <= len(self) / 2)

    @cached_property
    def dated(self) -> bool:
        """True for dates, or texts that are dates."""
        return self.numbers is None and len(self.cells) > 0 and not self.undated

    @property
    def undated(self) -> str:
        """The first cell that is no date, among the first 20; "" if all are."""
        return next((str(value) for value in self.cells[:20].tolist() if not _is_date(value)), "")

    @property
    def days(self) -> bool:
        """True for dates without a time of the day."""
        cells = self.cells[:: max(len(self.cells) // 50, 1)].tolist()
        return self.dated and all(_is_date(value) and _date_of(value).time() == time() for value in cells)


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _date_of(value: Any) -> datetime:
    """Return a date, or a text that is one."""
    if isinstance(value, datetime):
        return value
    return datetime.combine(value, time()) if isinstance(value, date) else datetime.fromisoformat(str(value).strip())


def _is_date(value: Any) -> bool:
    try:
        return bool(_date_of(value))
    except ValueError:
        return False


def cells_of(frame: Any, where: str) -> Cells:
    """Return the cells of a data frame (pandas, polars, pyarrow), or of a mapping of arrays.

    Raises:
        FedtideError: it is none, or its columns differ in length; `where` begins the message.
    """
    columns = _arrays_of(frame, where)
    if not len(next(iter(columns.values()))):
        raise FedtideError(f"{where}: no rows")
    typed = {name: Column(column) for name, column in columns.items()}
    return Cells(typed, lambda row: f"{where}: row {row}", np.arange(len(next(iter(columns.values())))))


def _arrays_of(frame: Any, where: str) -> dict[str, np.ndarray]:
    """Return the columns of a data frame as arrays of equal length."""
    frame = frame.collect() if hasattr(frame, "collect") and not hasattr(frame, "to_numpy") else frame  # a lazy one
    named = frame if isinstance(frame, Mapping) else getattr(frame, "columns", ())
    names = getattr(frame, "column_names", None) or list(named)
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
    return columns


def _of_index(frame: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the index of a pandas frame as a column if it holds dates, which are the times of the rows."""
    index = getattr(frame, "index", None)
    if getattr(getattr(index, "dtype", None), "kind", "") != "M":
        return {}
    name = str(getattr(index, "name", None) or "index")
    return {f"{name} (index)" if name in names else name: _array(index)}


def _array(values: Any) -> np.ndarray:
    # With a zone pandas gives an object for each time, unless it is asked for dates in UTC.
    return np.asarray(values, "datetime64[us]" if getattr(getattr(values, "dtype", None), "tz", None) else None)


UNITS = ((1e17, 1e9, "nanoseconds"), (1e14, 1e6, "microseconds"), (1e11, 1e3, "milliseconds"))
"""Least size of a time that is a number, how many make a second, and the unit; smaller ones are seconds."""
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


def seconds_of(values: Any, where: Where) -> tuple[np.ndarray, str]:
    """Return texts, dates, or numbers as seconds since 1970, NaN if one is missing, and the unit of numbers.

    `where` gives the place of a time by its position, for the error message.

    >>> seconds_of(np.array(["1970-01-02"], "datetime64[D]"), str), seconds_of(["12.5"], str)
    ((array([86400.]), ''), (array([12.5]), 'seconds'))
    >>> seconds_of(["1970-01-01T01:00:00+01:00"], str)[0], seconds_of(["1700000000000"], str)[0]
    (array([0.]), array([1.7e+09]))
    """
    cells = np.asarray(values)
    if cells.dtype.kind == "M":
        return np.where(np.isnat(cells), np.nan, cells.astype("datetime64[us]").astype(np.int64) / 1e6), ""
    if cells.dtype.kind in "biuf":
        return since_1970(cells.astype(np.float64))
    return _parse_each(cells.ravel().tolist(), where)


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
        at = datetime(*[int(text if text.isascii() and "_" not in text else "") for text in cell])  # type: ignore[arg-type]
    elif isinstance(cell, date) or (isinstance(cell, str) and not is_number(cell)):
        at = _date_of(cell)
    else:
        return float(cell), None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(), at.tzinfo is not None


def _name_time(where: str) -> str:
    """Return the place of a cell, with the word "time" if the name of the column lacks it."""
    return where if where.endswith(": time") else f"{where}: time"
