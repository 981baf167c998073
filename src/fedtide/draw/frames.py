"""Results as data frames, of whichever library is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, get_args

from fedtide.core.errors import FedtideError, unknown

Library = Literal["pandas", "polars"]
"""Libraries of data frames."""


def frame(rows: Sequence[Mapping[str, Any]], library: Library | None = None) -> Any:
    """Return rows as a data frame, with a column for every key in order of appearance.

    Args:
        rows: cells by column; what a row lacks is missing.
        library: of the data frame; None means pandas, or polars where that alone is installed.

    Raises:
        FedtideError: there is no such library.
    """
    if library not in (None, *get_args(Library)):
        raise unknown("library of data frames", str(library), get_args(Library))
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    for known in get_args(Library) if library is None else (library,):
        try:
            module = import_module(known)
        except ImportError:
            continue
        return module.DataFrame(columns)
    raise FedtideError(f'a data frame needs {library or "pandas or polars"}; pip install "fedtide[frames]"')


def is_cell(value: Any) -> bool:
    """Tell whether a value of a record can stand in a table."""
    return value is None or isinstance(value, bool | int | float | str)
