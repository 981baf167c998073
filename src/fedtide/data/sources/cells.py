"""Cells of CSV and ARFF files, read row by row, of large ones by pyarrow where it is installed; and of Parquet files.

Both readers of CSV give the same bits. What pyarrow cannot read is read by rows, which names the cell that is wrong.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, compress, islice, product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedtide.core.errors import FedtideError, nearest, refused
from fedtide.data.sources import parquet
from fedtide.data.sources.column import MARKS
from fedtide.data.sources.files import DAMAGED, opened, reading

Missing = Literal["error", "drop", "mean"]
Lines = list[tuple[int, list[str]]]
"""Rows with their numbers in the file."""

BLOCK = 2**10
"""Rows that are read at a time: texts take many times the memory of numbers, and few stay in a processor's cache."""
LARGE = 2**22
"""Bytes of a file for which it pays to import pyarrow."""
NAME = re.compile(r"0[0-9]+|[0-9]{16,}")
"""Digits that are no number."""
ATTRIBUTE = re.compile(r"""\s*(?:'([^']+)'|"([^"]+)"|([^\s'"{]+))""")
"""The name of a column of an ARFF file, with quotes or without."""
DECIMAL_COMMA = re.compile(r"\s*[+-]?[0-9]+,[0-9]+\s*")
"""A number with a comma where a point is wanted."""


@contextmanager
def _lines(path: Path) -> Iterator[Iterator[tuple[int, list[str]]]]:
    """Open a file, packed or not, as rows with their numbers; blank ones are left out."""
    with reading(path, "a CSV file in UTF-8"), io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
        lines = ((row, line) for row, line in enumerate(csv.reader(file), start=1) if line)
        ahead: list[tuple[int, list[str]]] = []
        try:
            for at in lines:
                ahead.append(at)
                if (first := "".join(at[1]).strip().lower()) and not first.startswith("%"):
                    break
            weka = ahead and first.startswith("@relation")
            yield _of_arff(path, lines) if weka else chain(ahead, lines)
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


def _of_arff(path: Path, lines: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    """Yield the names of an ARFF file, as Weka writes them, and its rows; what is missing there is a question mark."""
    names: list[str] = []
    for row, line in lines:
        word, rest = [*",".join(line).split(None, 1), "", ""][:2]
        if word.lower() == "@data":
            yield row, names
            break
        if word.lower() == "@attribute":
            said = ATTRIBUTE.match(rest)
            if said is None:
                raise refused(f"{path}: row {row}: attribute", rest, "a name and a type")
            names.append(said[1] or said[2] or said[3])
    for row, line in lines:
        if not line[0].startswith("%"):
            yield row, ["" if cell.strip() == "?" else cell.strip().strip("'") for cell in line]


def read_header(path: Path) -> list[str]:
    """Return the names of the columns as they are written; they differ in more than the space around them."""
    if parquet.is_parquet(path):
        return parquet.names_of(path)
    with _lines(path) as lines:
        _, header = next(lines, (0, list[str]()))
    if not header:
        raise FedtideError(f"{path}: is empty, allowed: a header, and rows below it")
    twice = [column for column, count in Counter(map(str.strip, header)).items() if count > 1]
    if twice:
        raise FedtideError(f"{path}: two columns are called '{twice[0]}'")
    if len(header) == 1 and re.search(r"[;\t|]", header[0]):
        raise refused(f"{path}: header", header[0], "names divided by commas, as all cells are")
    return header


def _blocks(path: Path, width: int) -> Generator[Lines, None, None]:
    """Yield the rows below the header."""
    with _lines(path) as lines:
        next(lines, None)
        block = list(islice(lines, BLOCK))
        if not block:
            raise FedtideError(f"{path}: no rows below the header")
        while block:
            for row, line in block:
                if len(line) != width:
                    raise refused(f"{path}: row {row}: number of cells", len(line), f"{width}, as in the header")
            yield block
            block = list(islice(lines, BLOCK))


def read_table(path: Path) -> tuple[list[str], Lines]:
    """Read the header, and every row with its number in the file; blank lines are left out."""
    header = [column.strip() for column in read_header(path)]
    return header, [line for block in _blocks(path, len(header)) for line in block]


def places(path: object, header: Sequence[str], columns: Sequence[str]) -> list[int]:
    """Return the positions of columns in a header; raise for one that is not there."""
    at = {column: place for place, column in enumerate(header)}
    for column in columns:
        if column not in at:
            raise FedtideError(f"{path}: no column '{column}'; {nearest(column, header)}")
    return [at[column] for column in columns]


# -- columns -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cells:
    """Some columns of a file.

    places: positions of the rows among all below the header. numbers: (rows, columns), NaN where one is missing. texts:
    other columns by name, without the space around cells.
    """

    path: Path
    places: np.ndarray
    numbers: np.ndarray
    texts: dict[str, list[str]]

    def where(self, row: int) -> str:
        """Return the place of a row, for messages; rows of Parquet files are counted from 0."""
        if parquet.is_parquet(self.path):
            return f"{self.path}: row {self.places[row]}"
        with _lines(self.path) as lines:
            number, _ = next(islice(lines, int(self.places[row]) + 1, None))
        return f"{self.path}: row {number}"


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
    header = read_header(path)
    at = places(path, [column.strip() for column in header], [*numbers, *texts])
    at_needed = [place for place, name in zip(at, [*numbers, *texts], strict=True) if name in {*numbers, *needed}]
    raw = [header[place] for place in at]
    if parquet.is_parquet(path):
        return _kept(path, _of_parquet(path, numbers, texts, missing), texts, missing, needed)
    fast = _by_arrow(path, raw[: len(numbers)], raw[len(numbers) :]) if path.stat().st_size >= LARGE else None
    if fast is not None and not (missing == "error" and np.isnan(fast[0]).any()):
        parts = [fast]
    else:
        wide, own = len(header), dict(zip(numbers, at, strict=False))
        parts = [_of_block(path, b, own, at[len(numbers) :], missing, at_needed) for b in _blocks(path, wide)]
    joined = [[text for _, part in parts for text in part[place]] for place in range(len(texts))]
    return _kept(path, (np.concatenate([part for part, _ in parts]), joined), texts, missing, needed)


Found = tuple[np.ndarray, list[list[str]]]
"""Numbers (rows, columns), and columns of texts."""


def _kept(path: Path, whole: Found, texts: Sequence[str], missing: Missing, needed: Sequence[str]) -> Cells:
    """Leave out the rows that are to be dropped."""
    found, columns = whole[0], dict(zip(texts, whole[1], strict=True))
    if missing == "error":
        return Cells(path, np.arange(len(found)), found, columns)
    keep = np.ones(len(found), bool)
    if missing == "drop":
        keep[np.isnan(found).any(1)] = False
    for name in needed:
        if marks := {*filter(lacks, set(columns[name]))}:
            keep &= np.array([text not in marks for text in columns[name]])
    columns = {name: [*compress(column, keep)] for name, column in columns.items()}
    return Cells(path, np.flatnonzero(keep), found[keep], columns)


def _of_block(
    path: Path,
    block: Lines,
    numbers: dict[str, int],
    texts: Sequence[int],
    missing: Missing,
    needed: Sequence[int],
) -> Found:
    """Read some rows, given the places of their columns."""
    columns = list(zip(*(line for _, line in block), strict=True))
    strings = [[*map(str.strip, columns[place])] for place in texts]
    read = [numbers_of(columns[place]) for place in numbers.values()]
    sound = [each for each in read if each is not None]
    if len(sound) == len(read) and not (missing == "error" and np.isnan(sound).any()):
        return np.ascontiguousarray(np.reshape(sound, (len(sound), len(block))).T), strings
    # A cell is wrong, unless its row is left out for another one.
    found = [
        [math.nan] * len(numbers)
        if missing == "drop" and any(lacks(line[place]) for place in needed)
        else [_cell(f"{path}: row {row}", name, line[place], missing) for name, place in numbers.items()]
        for row, line in block
    ]
    return np.array(found), strings


def _of_parquet(path: Path, numbers: Sequence[str], texts: Sequence[str], missing: Missing) -> Found:
    columns = parquet.read_columns(path, [*dict.fromkeys([*numbers, *texts])])
    rows = len(next(iter(columns.values())).values)
    if not rows:
        raise FedtideError(f"{path}: no rows")
    found = np.empty((rows, len(numbers)))
    for place, name in enumerate(numbers):
        column = columns[name]
        wrong = ~column.missing if column.numbers is None else np.isinf(column.numbers)
        wrong |= column.missing & (missing == "error")
        for row in np.flatnonzero(wrong)[:1].tolist():
            cell = column.cell(row)
            line = refused(f"{path}: row {row}: {name}", cell, "a finite number")
            raise NotANumber(str(line), name, "" if column.missing[row] and cell == cell else str(cell))
        found[:, place] = column.numbers
    return found, [np.where(columns[name].missing, "", columns[name].texts).tolist() for name in texts]


def numeric_columns(path: Path) -> tuple[list[str], list[str]]:
    """Return the names of the columns that seem to hold numbers, by the first rows, and those of all."""
    header = [column.strip() for column in read_header(path)]
    if parquet.is_parquet(path):
        columns = parquet.read_columns(path, header)
        return [name for name in header if columns[name].numbers is not None], header
    with closing(_blocks(path, len(header))) as blocks:
        cells = list(zip(*(line for _, line in next(blocks)), strict=True))
    # What is written 007, or has more digits than a number holds, is a name.
    named = lambda column: any(NAME.fullmatch(cell.strip()) for cell in column)  # noqa: E731
    able = [numbers_of(column) is not None and not named(column) for column in cells]
    return [*compress(header, able)], header


def _by_arrow(path: Path, numbers: Sequence[str], texts: Sequence[str]) -> Found | None:
    """Read a file with pyarrow; None where it is not installed, or a cell is none that it reads as we do."""
    try:
        import pyarrow as arrow
        from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv
    except ImportError:
        return None
    spelled = ["".join(letters) for mark in MARKS for letters in product(*({each, each.upper()} for each in mark))]
    convert = ConvertOptions(
        column_types=dict.fromkeys(numbers, arrow.float64()) | dict.fromkeys(texts, arrow.string()),
        include_columns=[*dict.fromkeys([*numbers, *texts])],
        null_values=[blank + each for blank in ("", " ") for each in spelled],  # numbers may have blanks, marks not
        strings_can_be_null=False,
    )
    try:
        with opened(path) as file:
            table = read_csv(
                file,
                read_options=ReadOptions(use_threads=False),
                parse_options=ParseOptions(newlines_in_values=True),
                convert_options=convert,
            )
    except (*DAMAGED, arrow.ArrowException):
        return None
    strings = {name: [*map(str.strip, table[name].to_pylist())] for name in texts}
    found = np.empty((len(table), len(numbers)))
    for place, name in enumerate(numbers):
        read = numbers_of(strings[name]) if name in strings else table[name].to_numpy()
        if read is None or (name not in strings and np.isfinite(read).sum() != len(read) - table[name].null_count):
            return None
        found[:, place] = read
    return (found, [strings[name] for name in texts]) if len(found) else None


# -- cells -------------------------------------------------------------------------------------------------------------


def numbers_of(cells: Sequence[str]) -> np.ndarray | None:
    """Return cells as numbers, NaN where one is missing; None if a cell is neither missing nor a finite number.

    >>> numbers_of(["1.5", "NA"]), numbers_of(["1,5"])
    (array([1.5, nan]), None)
    """
    try:
        found = np.fromiter(map(float, cells), np.float64, len(cells))
    except ValueError:
        try:
            found = np.array([math.nan if lacks(cell) else float(cell) for cell in cells])
        except ValueError:
            return None
    odd = np.flatnonzero(~np.isfinite(found)).tolist()
    return found if _western("".join(cells)) and all(lacks(cells[place]) for place in odd) else None


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


def _cell(where: str, column: str, cell: str, missing: Missing) -> float:
    """Return a number of a table of numbers, NaN where it is missing and may be."""
    if missing == "mean" and lacks(cell):
        return math.nan
    try:
        return number(where, column, cell, hint=" with a point, such as 1.5" if DECIMAL_COMMA.fullmatch(cell) else "")
    except FedtideError as error:
        raise NotANumber(str(error), column, cell) from None


def lacks(cell: str) -> bool:
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
