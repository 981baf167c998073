"""Files of tables as arrow columns: CSV files however they are written, ARFF and Parquet."""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as arrow
from pyarrow import compute, parquet
from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv
from pydantic import AfterValidator

from fedtide.core.errors import FedtideError, nearest, refused
from fedtide.data.sources.files import check_unpacked, opened, reading
from fedtide.data.sources.written import MARKS, Decimal
from fedtide.draw.prose import counted
from fedtide.fields.types import allowing

HEAD, BLOCK = 2**18, 2**24
"""Bytes by which a file seems to be written in one way or another, and bytes that are read at a time."""
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}
"""Marks that divide cells, in words."""
BYTE_ORDER_MARKS = (
    (b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"),
)  # fmt: skip
OTHERS = {
    b"PK\x03\x04": "a ZIP archive or an Excel workbook",
    b"\xd0\xcf\x11\xe0": "an Excel workbook",
    b"SQLite": "SQLite",
    b"<!doctype html": "a web page",
    b"<html": "a web page",
}
"""Files that are no tables of text, by their first bytes."""
ENCODINGS = {"utf-8-sig": "UTF-8", "cp1252": "Windows-1252", "utf-16": "UTF-16", "utf-32": "UTF-32"}
"""Encodings that are found, and their names for people."""
COMMENTS = ("#", "//", "%")
"""Beginnings of lines above a header that are no part of the table."""
HINT = re.compile(r"""["']?sep=([,;\t|])["']?\s*""", re.IGNORECASE)
"""A first line by which spreadsheets name the mark between cells."""
ATTRIBUTE = re.compile(r"""@attribute\s+(?:'([^']+)'|"([^"]+)"|([^\s'"{]+))""", re.IGNORECASE)
"""The name of a column of an ARFF file, with quotes or without."""
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
"""Characters that no name of a column has."""


def _known_encoding(name: str) -> str:
    try:
        return codecs.lookup(name).name
    except LookupError:
        raise ValueError(f"found {name!r}, allowed: an encoding that Python knows, such as utf-8 or cp1252") from None


WIDE = re.compile(rb"[\x80-\xff]+")
"""Letters beyond ASCII in a row."""
GAP = re.compile(r"(^|,)\s*\?\s*(?=,|$)")
"""A missing cell of an ARFF file."""
TOTALS = frozenset((
    "total", "totals", "grand total", "sum", "summe", "gesamt", "gesamtsumme", "insgesamt", "somme", "suma", "somma",
    "totale", "totaal",
))  # fmt: skip
"""Words in the last row of a table that is the total of the others, in lower case."""
INDEX = re.compile(r"__index_level_[0-9]+__")
"""Name of a hidden column: the index of a frame of pandas."""
UNREAD = arrow.scalar(b"\xff", arrow.binary())
"""The cell in place of bytes that are no text. No number follows from it."""


def _is_time(kind: Any) -> bool:
    return bool(arrow.types.is_timestamp(kind) or arrow.types.is_date(kind))


Encoding = Annotated[str, AfterValidator(_known_encoding)]
Separator = Literal[",", ";", "\t", "|", " "]
Units = Annotated[dict[str, str], allowing("a table with the unit of each column")]


@dataclass(frozen=True)
class Spelling:
    """How a table is written; None is found in its cells.

    encoding: of a text file. separator: the mark between cells. decimal: the mark before decimals if cells do not tell;
    the other one divides thousands. time_format: how times are written. units: of columns of numbers, by name.
    """

    encoding: Encoding | None = None
    separator: Separator | None = None
    decimal: Decimal | None = None
    time_format: str | None = None
    units: Mapping[str, str] | None = None


@dataclass(frozen=True)
class RawTable:
    """Columns of a file before their cells are read.

    columns: arrow columns by name. numbers: (rows,) numbers of the rows in the file. separator: the mark between cells.
    said: a line on what differs from a plain file: UTF-8, divided by commas, without comments.
    """

    columns: dict[str, Any]
    numbers: np.ndarray
    separator: str = ","
    said: str = ""


@dataclass(frozen=True)
class _Header:
    """The head of a text file: its encoding, separator, names, and the lines above the rows.

    skipped: lines of comments. lines: lines of text before the rows, with those of comments. rows: rows of the header
    and above. data: the rows of an ARFF file as CSV; None if the file is a CSV file.
    """

    encoding: str
    separator: str
    names: list[str]
    skipped: int
    lines: int
    rows: int
    data: bytes | None = None


def is_text(kind: Any) -> bool:
    """Tell whether cells of an arrow type are texts."""
    return arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)


def is_bytes(kind: Any) -> bool:
    """Tell whether cells of an arrow type are bytes, which may be texts."""
    return arrow.types.is_binary(kind) or arrow.types.is_large_binary(kind)


def is_parquet(path: Path) -> bool:
    """Tell whether a file begins as Parquet files do."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    with reading(path, "a Parquet file", arrow.ArrowException), open(path, "rb") as raw:
        schema = parquet.read_schema(raw)
        # A text that comes again would else be repeated in memory.
        texts = [field.name for field in schema if is_text(field.type) or is_bytes(field.type)]
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            about = file.metadata
            groups = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
            check_unpacked(path, max(groups, 8 * about.num_rows * about.num_columns))
            yield file


def _unread(kind: Any) -> Any:
    """Return the cell to fill a column with that may be far larger than its file and is never used; None for others."""
    if arrow.types.is_struct(kind):
        return arrow.scalar({}, arrow.struct([]))
    if arrow.types.is_map(kind):
        return arrow.scalar([], arrow.map_(arrow.string(), arrow.null()))
    if arrow.types.is_nested(kind):
        return arrow.scalar([], arrow.list_(arrow.null()))
    return UNREAD if arrow.types.is_fixed_size_binary(kind) or arrow.types.is_binary_view(kind) else None


def read_names(path: Path, spelling: Spelling = Spelling()) -> list[str]:
    """Return the names of the columns, without the space around them; raise if two are the same."""
    if is_parquet(path):
        with _parquet_file(path) as file:
            return _check_names(path, _visible_names(file.schema_arrow))
    return _read_header(path, spelling).names


def _check_column(where: str, column: Any) -> None:
    """Raise for bytes that are not what the type of an arrow column says, and for a time zone that is unknown."""
    try:
        column.validate(full=True)
    except arrow.ArrowException as error:
        raise FedtideError(f"{where}: damaged ({str(error).rpartition('Invalid: ')[2]})") from None
    zone = getattr(column.type, "tz", None)
    try:
        if zone:
            compute.local_timestamp(arrow.array([0], column.type))
    except arrow.ArrowException:
        raise refused(f"{where}: time zone", zone, "one that is known, such as Europe/Berlin or +01:00") from None


def _visible_names(schema: Any) -> list[str]:
    return [name for name in schema.names if not _is_hidden(name, schema)]


def _is_hidden(name: str, schema: Any) -> bool:
    """Tell whether a column is the index of a frame of pandas, which nobody sees there, and no times."""
    return INDEX.fullmatch(name) is not None and not _is_time(schema.field(name).type)


def read_table(path: Path, names: Sequence[str], spelling: Spelling = Spelling()) -> RawTable:
    """Read some columns of a file.

    Raises:
        FedtideError: the file is damaged, has no rows, or has no column of such a name. Or a row has more or fewer
            cells than the header.
    """
    if is_parquet(path):
        header_names = read_names(path)
        find_places(path, header_names, names)
        with _parquet_file(path) as file:
            stored = dict(zip(header_names, _visible_names(file.schema_arrow), strict=True))
            schema, rows = file.schema_arrow, file.metadata.num_rows
            kinds = {name: schema.field(stored[name]).type for name in names}
            unread = {name: cell for name, kind in kinds.items() if (cell := _unread(kind)) is not None}
            table = file.read(columns=[stored[name] for name in kinds if name not in unread])
            for name in kinds:
                if name not in unread:
                    _check_column(f"{path}: column '{name}'", table[stored[name]])
            hidden = [name for name in schema.names if _is_hidden(name, schema)]
        _check_rows(path, rows)
        stand_ins = {name: arrow.chunked_array([arrow.repeat(cell, rows)]) for name, cell in unread.items()}
        note = f"index {', '.join(hidden)} left out" if hidden else ""
        read = {name: stand_ins[name] if name in unread else table[stored[name]] for name in kinds}
        return RawTable(read, np.arange(rows), said=note)
    header = _read_header(path, spelling)
    places = dict(zip(names, find_places(path, header.names, names), strict=True))
    keys = [str(place) for place in range(len(header.names))]
    blank: list[int] = []

    def note_row(row: Any) -> str:
        """Leave out a row with more or fewer cells than the header, and note it: as blank, or as wrong."""
        number = row.number - skipped + header.rows
        if row.text.strip():
            wrong.append((number, row.actual_columns))
        blank.append(number)
        return "skip"

    wrong: list[tuple[int, int]] = []
    skipped = header.lines if header.data is None else 0
    source = opened(path) if header.data is None else io.BytesIO(header.data)
    with reading(path, "a CSV file", arrow.ArrowException), source:
        table = read_csv(
            source,
            ReadOptions(use_threads=False, block_size=BLOCK, column_names=keys, skip_rows=skipped,
                        encoding=header.encoding.removesuffix("-sig")),
            ParseOptions(delimiter=header.separator, newlines_in_values=True, ignore_empty_lines=False,
                         invalid_row_handler=note_row),
            ConvertOptions(column_types=dict.fromkeys(keys, arrow.string()), strings_can_be_null=False),
        )  # fmt: skip
    if wrong:
        number, width = min(wrong)
        raise refused(f"{path}: row {number}: number of cells", width, f"{len(keys)}, as in the header")
    numbers = np.delete(np.arange(len(table) + len(blank)), np.array(blank, int) - header.rows - 1) + header.rows + 1
    empty, again = (_equal_rows(table, cells) for cells in ([""] * len(keys), header.names))
    filled = np.flatnonzero(~(empty | again))
    _check_rows(path, len(filled))
    lines = [*_describe(header, int(again.sum()))]
    if ends_in_total(table.columns, filled):
        lines.append(describe_total(int(numbers[filled[-1]])))
        filled = filled[:-1]
    columns = {name: table[str(place)] for name, place in places.items()}
    columns = columns if len(filled) == len(table) else {name: cells.take(filled) for name, cells in columns.items()}
    return RawTable(columns, numbers[filled], header.separator, ", ".join(lines))


def ends_in_total(columns: Sequence[Any], rows: np.ndarray) -> bool:
    """Tell whether the last row is the total of the others: its only texts are such words.

    Above one are dates and ids; or names that come again, if it begins the row.

    Args:
        columns: arrow columns of all cells, in order.
        rows: positions of the rows.

    >>> days = arrow.array(["2024-01-30", "2024-01-31", "Total"])
    >>> ends_in_total([days, arrow.array([1.5, 2.0, 3.5])], np.arange(3))
    True
    """
    texts = [_text_of(column[int(rows[-1])]).strip().rstrip(":").lower() for column in columns]
    filled = [place for place, text in enumerate(texts) if text not in MARKS]
    words = [place for place in filled if texts[place] in TOTALS]
    others = {texts[place] for place in filled if not _has_digit(texts[place])} - TOTALS
    if any(map(str.isalpha, "".join(others))):
        return False
    for place in words:
        above = columns[place].take(arrow.array(rows[:-1])).cast(arrow.string()).unique().drop_null().to_pylist()
        names = {text.strip().lower() for text in above} - MARKS
        again = place == filled[0] and 2 * len(names) < len(rows) and not names & TOTALS
        if names and (again or all(map(_has_digit, names))):
            return True
    return False


def _text_of(cell: Any) -> str:
    """Return a cell as text: "" if it is missing, and a digit for one of another type."""
    coded = arrow.types.is_dictionary(cell.type)
    kind = cell.type.value_type if coded else cell.type
    return str(cell.as_py()) if cell.is_valid and is_text(kind) else "0" * cell.is_valid


def _has_digit(text: str) -> bool:
    return any(map(str.isdigit, text))


def describe_total(row: int) -> str:
    """Say that the last row was left out."""
    return f"the total in row {row} left out"


def _equal_rows(table: Any, cells: Sequence[str]) -> np.ndarray:
    """Return the mask of the rows whose cells are these: blank ones, or repeated headers."""
    mask = np.ones(len(table), bool)
    for column, cell in zip(table.columns, cells, strict=True):
        if mask.any():
            mask &= np.asarray(compute.equal(column, cell))
    return mask


def _check_rows(path: Path, rows: int) -> None:
    if not rows:
        raise FedtideError(f"{path}: no rows below the header")


def find_places(path: object, header: Sequence[str], columns: Sequence[str]) -> list[int]:
    """Return the positions of columns in a header; raise for one that is not there."""
    at = {column: place for place, column in enumerate(header)}
    for column in columns:
        if column not in at:
            raise FedtideError(f"{path}: no column '{column}'; {nearest(column, header)}")
    return [at[column] for column in columns]


def _describe(header: _Header, again: int) -> Iterator[str]:
    """Say how a file is written if it is not plain."""
    if header.encoding not in ("utf-8", "utf-8-sig"):
        yield f"encoding {ENCODINGS.get(header.encoding, header.encoding.upper())}"
    if header.separator != ",":
        yield f"divided by {SEPARATORS[header.separator]}"
    if header.skipped:
        yield f"{counted(header.skipped, 'line')} above the header left out"
    if again:
        yield f"{counted(again, 'repeated header')} left out"


def _read_header(path: Path, spelling: Spelling) -> _Header:
    """Read the head of a text file, and find how it is written."""
    with reading(path, "a CSV file"), opened(path) as file:
        head = file.read(HEAD)
    encoding = spelling.encoding or _find_encoding(path, head)
    lines = io.TextIOWrapper(io.BytesIO(head), encoding=encoding, errors="replace", newline="").read()
    text = lines.splitlines(keepends=True)
    first = next((line for line in text if line.strip() and not line.startswith("%")), "")
    if first.strip().lower().startswith("@relation"):
        return _read_arff(path, encoding)
    text = text[:-1] if len(head) == HEAD and len(text) > 1 else text
    hint = HINT.fullmatch(text[0]) if text else None
    begin = int(hint is not None)
    skipped = next((place for place in range(begin, len(text)) if not text[place].startswith(COMMENTS)), len(text))
    body = [line for line in text[skipped:] if line.strip()][:200]
    separator: str = spelling.separator or (hint[1] if hint else _find_separator(body))
    _, width = _fit(body, separator)
    while width > 2 and skipped < len(text) and _width(text[skipped], separator) < 2:
        skipped += 1  # titles
    if begin < skipped < len(text) and _width(text[skipped - 1], separator) == _width(text[skipped], separator) > 1:
        skipped -= 1  # the names begin with the mark of a comment
    rows = csv.reader(text[skipped:], delimiter=separator)
    with reading(path, "a CSV file", csv.Error):
        blank, names = next(((number, row) for number, row in enumerate(rows) if any(map(str.strip, row))), (0, []))
    above = sum(bool(line.strip()) for line in text[begin:skipped])
    names = _check_names(path, names)
    return _Header(encoding, separator, names, above, skipped + rows.line_num, skipped + blank + 1)


def _check_names(path: Path, names: list[str]) -> list[str]:
    """Return the names of columns without space around them; raise if none is there, or one is no text or repeated."""
    if not names:
        raise FedtideError(f"{path}: is empty, allowed: a header, and rows below it")
    if CONTROL.search("".join(names)):
        raise FedtideError(f"{path}: damaged or not a CSV file (the name of a column has control characters)")
    names = [name.strip() or f"Unnamed: {place}" for place, name in enumerate(names)]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise FedtideError(f"{path}: two columns are called '{repeated[0]}'")
    return names


def _read_arff(path: Path, encoding: str) -> _Header:
    """Read an ARFF file; a missing value is a question mark.

    The reader of SciPy refuses attributes without a type, which the published file of WISDM has.
    """
    names, rows, number, begin = list[str](), list[str](), 0, 0
    with reading(path, "an ARFF file"), io.TextIOWrapper(opened(path), encoding=encoding) as text:
        for number, line in enumerate(text, start=1):
            word = line.strip().lower()
            if begin:
                rows.append("\n" if word.startswith("%") else GAP.sub(r"\1", line.replace("'", '"')))
            elif word.startswith("@data"):
                begin = number
            elif word.startswith("@attribute"):
                if (name := ATTRIBUTE.match(line.strip())) is None:
                    raise refused(f"{path}: row {number}: attribute", line.strip()[10:].strip(), "a name and a type")
                names.append(name[1] or name[2] or name[3])
    if not begin:
        raise FedtideError(f"{path}: is empty, allowed: a header, and rows below it")
    return _Header("utf-8", ",", _check_names(path, names), 0, begin, begin, "".join(rows).encode())


def _find_encoding(path: Path, head: bytes) -> str:
    """Return the encoding of a file that begins with `head`: by its mark, or the first that reads all of it."""
    begin = head[:1000].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if kind := next((kind for mark, kind in OTHERS.items() if head.startswith(mark) or begin.startswith(mark)), None):
        raise refused(str(path), kind, "CSV, ARFF or Parquet; save it as CSV")
    for mark, encoding in BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return encoding
    if b"\0\0\0" in head[:4]:
        return "utf-32-be" if head[:1] == b"\0" else "utf-32-le"
    if b"\0" in head[:2]:
        return "utf-16-be" if head[:1] == b"\0" else "utf-16-le"
    if _decodes(path, "utf-8-sig"):
        return "utf-8-sig"
    place, right, wrong, runs, long = "", 0, 0, 0, 0
    with reading(path, "a CSV file"), opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                right += bool(line.decode()) and not line.isascii()
            except UnicodeDecodeError as error:
                place = place or f"line {number}, byte {error.start + 1}, 0x{line[error.start]:02x}: {error.reason}"
                wrong += 1
                lengths = [len(run) for run in WIDE.findall(line)]
                runs, long = runs + len(lengths), long + sum(length > 2 for length in lengths)
    # Western words have one such letter, or two, beside letters of ASCII.
    if wrong <= right or 10 * long > runs or not _decodes(path, "cp1252"):
        hint = "save it as UTF-8, or name its encoding in data.source.encoding"
        raise FedtideError(f"{path}: damaged or not a CSV file in UTF-8 ({place}; {hint})")
    return "cp1252"


def _decodes(path: Path, encoding: str) -> bool:
    """Tell whether a whole file is text in an encoding."""
    with reading(path, "a CSV file"), opened(path) as file:
        decoder = codecs.getincrementaldecoder(encoding)()
        try:
            while block := file.read(2**20):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _width(line: str, separator: str) -> int:
    """Return the number of cells of a line; 1 if a cell is longer than the longest that csv reads."""
    try:
        return len(next(csv.reader([line], delimiter=separator), []))
    except csv.Error:
        return 1


def _find_separator(lines: list[str]) -> str:
    """Return the mark that divides lines most alike; spaces if no other mark divides any.

    Below a first line of one word spaces divide the words of texts.
    """
    *marks, space = SEPARATORS
    best = max(marks, key=lambda mark: _fit(lines, mark))
    spaced = bool(lines) and _width(lines[0].strip(), space) > 1
    return space if spaced and _fit(lines, best)[1] < 2 and _fit(lines, space)[1] > 1 else best


def _fit(lines: list[str], separator: str) -> tuple[float, int]:
    """Return the share of rows of the commonest width if a mark divides cells, and that width; (0, 1) if none does."""
    try:
        widths = Counter(len(row) for row in csv.reader(lines, delimiter=separator) if row)
    except csv.Error:
        return 0.0, 1
    width, rows = max(((width, rows) for width, rows in widths.items() if width > 1), key=itemgetter(1), default=(1, 0))
    return rows / max(widths.total(), 1), width
