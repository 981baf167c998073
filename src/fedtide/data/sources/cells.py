"""Cells of CSV, ARFF and Parquet files, and columns of tables in memory."""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time
from functools import cached_property
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as arrow
from pyarrow import compute, parquet
from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv

from fedtide.core.errors import FedtideError, nearest, refused
from fedtide.data.sources.files import DAMAGED, check_unpacked, opened, reading

Missing = Literal["error", "drop", "mean"]
Row = tuple[int, list[str]]
"""Number of a row in the file, from 1, and its cells."""

BLOCK = 2**26
"""Bytes that are read at a time, and most bytes of a row."""
HEAD = 2**10
"""Rows by which a column seems to hold names of digits."""
NAME = re.compile(r"0[0-9]+|[0-9]{16,}")
"""Digits that are no number."""
ATTRIBUTE = re.compile(r"""\s*(?:'([^']+)'|"([^"]+)"|([^\s'"{]+))""")
"""The name of a column of an ARFF file, with quotes or without."""
DECIMAL_COMMA = re.compile(r"\s*[+-]?[0-9]+,[0-9]+\s*")
"""A number with a comma instead of a point."""
MARKS = frozenset(("", "na", "nan", "null"))
"""Cells in which something is missing, in lower case."""
MISSING = MARKS | {"none", "nat", "?", "<na>"}
"""The same with marks that sources of a study do not know."""
MOSTLY = 0.9
"""Share of numbers from which a column seems to be one of numbers with mistakes."""


# -- files -------------------------------------------------------------------------------------------------------------


def _rows(path: Path) -> Generator[Row, None, None]:
    """Yield the names of a CSV or ARFF file, packed or not, and then the rows; blank rows are left out."""
    with reading(path, "a CSV file in UTF-8"), io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
        rows = ((number, row) for number, row in enumerate(csv.reader(file), start=1) if row)
        try:
            yield from _arff_rows(path, rows) if _is_arff(path) else rows
        except UnicodeDecodeError as error:
            raise ValueError(f"{_undecoded(path)}: {error.reason}; save it as UTF-8") from None


def _undecoded(path: Path) -> str:
    """Name the first line of a file that is not UTF-8, and the byte in it."""
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"line {number}, byte {error.start + 1}, 0x{line[error.start]:02x}"
    return "its end"


def _is_arff(path: Path) -> bool:
    """Tell whether a file begins as those of Weka do: with a relation, below comments."""
    with opened(path) as file:
        lines = (line.removeprefix(b"\xef\xbb\xbf").strip().lower() for line in file)
        first = next((line for line in lines if line and not line.startswith(b"%")), b"")
    return first.startswith(b"@relation")


def _arff_rows(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the names of an ARFF file, and the rows; a missing value is a question mark.

    The reader of SciPy refuses attributes without a type, which the published file of WISDM has.
    """
    names: list[str] = []
    for number, row in rows:
        word, rest = [*",".join(row).split(None, 1), "", ""][:2]
        if word.lower() == "@data":
            yield number, names
            break
        if word.lower() == "@attribute":
            name = ATTRIBUTE.match(rest)
            if name is None:
                raise refused(f"{path}: row {number}: attribute", rest, "a name and a type")
            names.append(name[1] or name[2] or name[3])
    for number, row in rows:
        if not row[0].startswith("%"):
            yield number, ["" if cell.strip() == "?" else cell.strip().strip("'") for cell in row]


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
    return _header(path)[1]


def _header(path: Path) -> Row:
    """Return the row of the names."""
    with closing(_rows(path)) as rows:
        number, names = next(rows, (0, list[str]()))
    if not names:
        raise FedtideError(f"{path}: is empty, allowed: a header, and rows below it")
    names = [name.strip() for name in names]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise FedtideError(f"{path}: two columns are called '{repeated[0]}'")
    if len(names) == 1 and re.search(r"[;\t|]", names[0]):
        raise refused(f"{path}: header", names[0], "names divided by commas, like all cells")
    return number, names


def _read_table(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read some columns of a file: arrow arrays of texts, or the `Column`s of a Parquet file.

    Raises:
        FedtideError: the file is damaged, has no rows, or has no column of such a name.
    """
    if is_parquet(path):
        find_places(path, read_names(path), names)
        with _parquet_file(path) as file:
            columns = columns_of(file.read(columns=[*dict.fromkeys(names)]), str(path))
        if not len(next(iter(columns.values()))):
            raise FedtideError(f"{path}: no rows")
        return dict(columns)
    number, header = _header(path)
    wanted = dict(zip(names, find_places(path, header, names), strict=True))
    table = _by_arrow(path, number, len(header), [*wanted.values()])
    table = _by_rows(path, len(header)) if table is None else table
    return {name: table[place] for name, place in wanted.items()}


def _by_arrow(path: Path, header: int, width: int, wanted: Sequence[int]) -> Mapping[int, Any] | None:
    """Read columns below the header of a CSV file; None if a row is ragged or damaged, or the file is no CSV file."""
    keys = [str(place) for place in range(width)]
    try:
        if _is_arff(path):
            return None
        with opened(path) as file:
            table = read_csv(
                file,
                ReadOptions(use_threads=False, block_size=BLOCK, column_names=keys, skip_rows_after_names=header),
                ParseOptions(newlines_in_values=True),
                ConvertOptions(
                    column_types=dict.fromkeys(keys, arrow.string()),
                    include_columns=[keys[place] for place in wanted],
                    strings_can_be_null=False,
                ),
            )
    except (*DAMAGED, arrow.ArrowException):
        return None
    if not len(table):
        raise FedtideError(f"{path}: no rows below the header")
    return {place: table[keys[place]] for place in wanted}


def _by_rows(path: Path, width: int) -> Mapping[int, Any]:
    """Read a file row by row, to name the wrong one; ARFF files, too."""
    with closing(_rows(path)) as rows:
        next(rows)
        lines = []
        for number, row in rows:
            if len(row) != width:
                raise refused(f"{path}: row {number}: number of cells", len(row), f"{width}, as in the header")
            lines.append(row)
    if not lines:
        raise FedtideError(f"{path}: no rows below the header")
    return {place: arrow.chunked_array([cells]) for place, cells in enumerate(zip(*lines, strict=True))}


def find_places(path: object, header: Sequence[str], columns: Sequence[str]) -> list[int]:
    """Return the positions of columns in a header; raise for one that is not there."""
    at = {column: place for place, column in enumerate(header)}
    for column in columns:
        if column not in at:
            raise FedtideError(f"{path}: no column '{column}'; {nearest(column, header)}")
    return [at[column] for column in columns]


@dataclass(frozen=True)
class Cells:
    """Some columns of a file.

    places: positions of the rows among all rows below the header. numbers: (rows, columns), NaN if one is missing.
    texts: other columns by name, without the space around cells.
    """

    path: Path
    places: np.ndarray
    numbers: np.ndarray
    texts: dict[str, list[str]]

    def where(self, row: int) -> str:
        """Return the place of a row, for messages; rows of Parquet files are counted from 0."""
        place = int(self.places[row])
        return f"{self.path}: row {place if is_parquet(self.path) else self._row_numbers[place]}"

    @cached_property
    def _row_numbers(self) -> list[int]:
        """Numbers of all rows in the file, without that of the header."""
        return [number for number, _ in _rows(self.path)][1:]


class NotANumber(FedtideError):
    """A cell of a column of numbers is none."""

    def __init__(self, line: str, column: str, cell: str) -> None:
        super().__init__(line)
        self.column, self.cell = column, cell


def read_cells(
    path: Path, numbers: Sequence[str], texts: Sequence[str], missing: Missing = "error", needed: Sequence[str] = ()
) -> Cells:
    """Read columns of numbers, and columns of texts.

    Args:
        path: the file.
        numbers: names of the columns whose cells are finite numbers.
        texts: names of others.
        missing: treatment of a row in which a number is missing; with "mean" it is NaN.
        needed: texts without which a row is dropped, unless `missing` is "error".

    Raises:
        FedtideError: the file is damaged, or a cell is wrong (`NotANumber`); the message names its row.
    """
    columns = _read_table(path, [*numbers, *texts] or read_names(path)[:1])
    strings = {name: _texts_in(columns[name]) for name in texts}
    parsed = [_numbers_in(columns[name]) for name in numbers]
    rows = len(next(iter(columns.values())))
    values, wrong = np.empty((rows, len(numbers))), np.empty((rows, len(numbers)), bool)
    for place, pair in enumerate(parsed):
        values[:, place], wrong[:, place] = pair
    keep = np.ones(rows, bool)
    if missing == "error":
        wrong |= np.isnan(values)
    else:
        for name in needed:
            marks = {*filter(is_missing, set(strings[name]))}
            keep &= np.array([text not in marks for text in strings[name]])
    if missing == "drop":
        keep[(np.isnan(values) & ~wrong).any(1)] = False
        wrong[~keep] = False  # the row is left out for another cell
    cells = Cells(path, np.arange(rows), values, strings)
    if wrong.any():
        row, place = np.argwhere(wrong)[0].tolist()
        raise _not_a_number(cells.where(row), numbers[place], columns[numbers[place]], row)
    if keep.all():
        return cells
    strings = {name: [*compress(column, keep)] for name, column in strings.items()}
    return replace(cells, places=np.flatnonzero(keep), numbers=values[keep], texts=strings)


def read_columns(paths: Sequence[Path]) -> dict[str, "Column"]:
    """Read the columns of files with the same header, one below the other; those of numbers as numbers.

    Raises:
        FedtideError: most of the names are numbers with a point, as if there were no header, or a file is damaged.
    """
    header = read_names(paths[0])
    if 2 * sum("." in name and is_number(name) for name in header) > len(header):
        raise refused(f"{paths[0]}: first row", ",".join(header[:3]), "a header, the names of the columns")
    tables = [_read_table(path, header) for path in paths]
    columns = {}
    for name in header:
        parts = [table[name] for table in tables]
        parsed = [_numbers_in(part) for part in parts]
        if _is_name(parts[0]) or any(wrong.any() for _, wrong in parsed):
            columns[name] = Column(np.array([text for part in parts for text in _texts_in(part)], dtype=object))
        else:
            columns[name] = Column(np.concatenate([values for values, _ in parsed]))
    return columns


# -- cells -------------------------------------------------------------------------------------------------------------


def _numbers_in(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of a column of a file, and the mask of wrong cells (see `numbers_of`)."""
    if not isinstance(column, Column):
        return numbers_of(column)
    if column.numbers is None:
        return np.full(len(column), np.nan), ~column.missing
    return column.numbers, np.isinf(column.numbers)


def _texts_in(column: Any) -> list[str]:
    """Return the texts of a column of a file."""
    if not isinstance(column, Column):
        return [*map(str.strip, column.to_pylist())]
    texts: list[str] = np.where(column.missing, "", column.texts).tolist()
    return texts


def _is_name(column: Any) -> bool:
    """Tell whether a column of texts begins with names of digits: 007, or more digits than a number holds."""
    if isinstance(column, Column):
        return False
    return any(NAME.fullmatch(cell.strip()) for cell in column[:HEAD].to_pylist())


def _not_a_number(where: str, name: str, column: Any, row: int) -> NotANumber:
    """Return the error of a cell that should be a number."""
    cell = column.cell(row) if isinstance(column, Column) else column[row].as_py()
    hint = " with a point, such as 1.5" if DECIMAL_COMMA.fullmatch(str(cell)) else ""
    line = refused(f"{where}: {name}", cell, f"a finite number{hint}")
    lacking = isinstance(column, Column) and column.missing[row]
    return NotANumber(str(line), name, "" if lacking else str(cell))


def numbers_of(cells: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return cells (a list or an arrow array of texts) as numbers, NaN if there is none, and the mask of wrong ones.

    A cell is wrong if nothing is missing in it and it is no finite number.

    >>> numbers_of(["1.5", "NA", "1,5"])
    (array([1.5, nan, nan]), array([False, False,  True]))
    """
    texts = compute.utf8_trim_whitespace(arrow.array(cells, arrow.string()) if isinstance(cells, list) else cells)
    missing = compute.is_in(compute.utf8_lower(texts), arrow.array(sorted(MARKS)))
    try:
        values = compute.if_else(missing, None, texts).cast(arrow.float64()).to_numpy(zero_copy_only=False)
    except arrow.ArrowInvalid:  # arrow does not read all numbers that Python reads, such as +4
        values = np.array([float(text) if is_number(text) else math.nan for text in texts.to_pylist()])
    wrong = ~np.isfinite(values) & ~np.asarray(missing)
    return np.where(wrong, np.nan, values), wrong


def number(where: str, column: str, cell: Any, least: float = -math.inf) -> float:
    """Return a finite number; raise for another cell, or for a number below `least`."""
    try:
        value = math.nan if isinstance(cell, bool) or not _western(cell) else float(cell)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise refused(
            f"{where}: {column}", cell, "a finite number" if least == -math.inf else f"a number of {least:g} or more"
        )
    return value


def is_missing(cell: str) -> bool:
    """Tell whether something is missing in a cell."""
    return cell.strip().lower() in MARKS


def is_number(cell: str) -> bool:
    """Tell whether a text is a finite number.

    >>> is_number("1e3"), is_number("1_000"), is_number("nan")
    (True, False, False)
    """
    try:
        return _western(cell) and math.isfinite(float(cell))
    except ValueError:
        return False


def _western(cell: Any) -> bool:
    """Tell whether a text is free of what Python alone takes for part of a number: 5_0, and digits of other scripts."""
    return not isinstance(cell, str) or (cell.isascii() and "_" not in cell)


# -- columns in memory -------------------------------------------------------------------------------------------------


class Column:
    """A column, as numbers and as texts, with the mask of missing cells."""

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

    def __len__(self) -> int:
        return len(self.values)

    def cell(self, row: int) -> Any:
        """Return a cell, for messages."""
        return self.values[row : row + 1].tolist()[0]

    @cached_property
    def numbers(self) -> np.ndarray | None:
        """Cells as numbers, NaN or infinite if missing; None if one is a text or a date."""
        if self.values.dtype.kind in "biuf":
            return self.values.astype(np.float64)
        cells = self.values[~self.missing]
        if self.values.dtype.kind == "M" or not len(cells) or isinstance(cells[0], date):
            return None
        try:
            parsed = np.fromiter(map(float, cells), np.float64, len(cells))
        except (TypeError, ValueError):
            return None
        numbers = np.full(len(self.values), np.nan)
        numbers[~self.missing] = parsed
        return numbers if np.isfinite(parsed).all() else None

    @property
    def present(self) -> np.ndarray:
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
        return self.numbers is not None and bool((self.present % 1 == 0).all())

    @cached_property
    def largest(self) -> float:
        """The largest absolute number; 0 without numbers."""
        return float(np.abs(self.present).max(initial=0.0))

    @cached_property
    def distinct(self) -> int:
        """Number of different cells."""
        if self.numbers is not None:
            return len(np.unique(self.present))
        return len(set(self.texts[~self.missing].tolist()))

    @cached_property
    def stray(self) -> tuple[int, int] | None:
        """Number of cells that are numbers, and the first row that is none, where hardly any is not; None elsewhere."""
        if self.numbers is not None or self.values.dtype.kind == "M":
            return None
        rows = np.flatnonzero(~self.missing)
        cells = self.values[rows].tolist()
        if sum(map(_is_number, cells[:1000])) < MOSTLY * len(cells[:1000]):
            return None
        read = np.fromiter(map(_is_number, cells), bool, len(cells))
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
        return self.numbers is None and not self.missing.all() and not self.undated

    @property
    def undated(self) -> str:
        """The first cell that is no date, among the first 20; "" if all are."""
        return next((str(value) for value in self.values[~self.missing][:20] if _date_of(value) is None), "")

    @property
    def days(self) -> bool:
        """True for dates without a time of the day."""
        cells = self.values[~self.missing]
        if self.values.dtype.kind == "M":
            return bool((cells == cells.astype("datetime64[D]")).all())
        dates = map(_date_of, cells[:: max(len(cells) // 50, 1)])
        return self.dated and all(at is not None and at.time() == time() for at in dates)


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _date_of(value: Any) -> datetime | None:
    """Return a date, or a text that is one; None for others."""
    if isinstance(value, datetime):
        return value
    if isinstance(value, date):
        return datetime.combine(value, time())
    try:
        return datetime.fromisoformat(str(value).strip())
    except ValueError:
        return None


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
