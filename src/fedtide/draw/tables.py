"""Tables of text, as CSV, LaTeX or HTML, and data frames."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import Any, Literal, get_args

from fedtide.core.errors import uninstalled, unknown


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column is a name."""

    header: list[str]
    rows: list[list[str]]

    @property
    def words(self) -> list[bool]:
        """Tell for each column if it is aligned to the left: the first one, and those with words and no number."""
        columns = [[row[k] for row in self.rows if row[k] not in ("", "-")] for k in range(len(self.header))]
        return [not k or (bool(cells) and not any(map(CELL.match, cells))) for k, cells in enumerate(columns)]

    def csv(self) -> str:
        """Return the table as CSV: plain numbers, with units in the header and errors in columns of their own."""
        columns = [
            column
            for k, name in enumerate(self.header)
            for column in _plain_columns(name, [row[k] for row in self.rows], split=bool(k))
        ]
        out = io.StringIO()
        rows = ([escape_formula(cell) for cell in row] for row in zip(*columns, strict=True))
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue()

    def latex(self) -> str:
        """Return the table as a LaTeX `tabular` with the lines of the package booktabs."""
        lines = [" & ".join(map(_escaped, row)) + r" \\" for row in (self.header, *self.rows)]
        columns = "".join("l" if words else "r" for words in self.words)
        return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:],
                          r"\bottomrule", r"\end{tabular}", ""])  # fmt: skip


CELL = re.compile(r"(?:([▲▼≈?=≥]) )?([+-]?[\d.]+)(?: ± ([\d.]+))?(?: (%|points|rounds|s))?")
"""Number with its mark, error and unit."""

LATEX = str.maketrans({
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$", "≈": r"$\approx$", "≥": r"$\geq$",
    "←": r"$\leftarrow$", "→": r"$\rightarrow$", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
})  # fmt: skip
"""Characters that LaTeX does not print as they are."""


def _escaped(cell: str) -> str:
    return "--" if cell == "-" else cell.translate(LATEX)


def escape_formula(cell: str) -> str:
    """Return a cell of CSV with an apostrophe before text that a spreadsheet would compute.

    >>> escape_formula("=SUM(A1)"), escape_formula("-0.5 %"), escape_formula("-")
    ("'=SUM(A1)", '-0.5 %', '-')
    """
    is_formula = cell.startswith(("=", "+", "-", "@", "\t", "\r")) and cell != "-" and not CELL.fullmatch(cell)
    return f"'{cell}" if is_formula else cell


def _plain_columns(name: str, cells: Sequence[str], *, split: bool) -> list[list[str]]:
    """Return a column as columns of plain numbers if all cells are numbers of one unit, else unchanged."""
    matches = [CELL.fullmatch(cell) for cell in cells]
    numbers = [match for match in matches if match]
    units = {match[4] or "" for match in numbers}
    words = any(not match and cell != "-" for match, cell in zip(matches, cells, strict=True))
    if not split or len(units) != 1 or words:
        return [[name, *cells]]
    (unit,) = units
    columns = [[f"{name}, {unit}" if unit else name, *(match[2] if match else "" for match in matches)]]
    if any(match[3] for match in numbers):
        errors = ((match[3] or "") if match else "" for match in matches)
        columns.append([f"{name}, standard error", *errors])
    return columns


def format_value(value: Any) -> str:
    """Format a value for a table; a dict as its keys and values."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(inner)}" for key, inner in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


Library = Literal["pandas", "polars"]
"""Libraries of data frames."""


def frame(rows: Sequence[Mapping[str, Any]], library: Library | None = None) -> Any:
    """Return rows as a data frame, with a column for every key in order of appearance.

    Args:
        rows: cells by column; a row may lack columns.
        library: library of the data frame; None means pandas, or polars if only polars is installed.

    Raises:
        FedtideError: there is no such library.
    """
    if library not in (None, *get_args(Library)):
        raise unknown("library of data frames", str(library), get_args(Library))
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    for candidate in get_args(Library) if library is None else (library,):
        try:
            module = import_module(candidate)
        except ImportError:
            continue
        return module.DataFrame(columns)
    raise uninstalled(f"a data frame needs {library or 'pandas or polars'}", "frames")


def is_cell(value: Any) -> bool:
    """Tell whether a value of a record can stand in a table."""
    return value is None or isinstance(value, bool | int | float | str)


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and their descriptions as a table for a notebook.

    >>> html_table([("clients", "5 < 6")])
    '<table><tr><th>clients</th><td>5 &lt; 6</td></tr></table>'
    """
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"<table>{''.join(cells)}</table>"
