"""Files that are nothing but series, a column of times and one of numbers: what is inspected is what is forecast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedtide.data.sources.cells import Column, read_columns, read_names
from fedtide.data.sources.guesses import Roles, guess_time, when_of
from fedtide.data.sources.series import Series
from fedtide.fields.types import seconds_of

LAGS = "1d", "2d", "7d"
"""How long before a row the values are that are its features: a forecast is of a day ahead."""
CLOCK: tuple[Literal["hour", "weekday"], ...] = "hour", "weekday"
"""What else a row is told."""


def series_in(paths: Sequence[Path], roles: Roles) -> Series | None:
    """Return files as series, where each is one with steps of a day or less; None where they are others.

    Args:
        paths: CSV, ARFF or Parquet files.
        roles: what a person says of their columns; who names a label, clients, features or what is left
            out means a table.
    """
    if any(said is not None for said in (roles.label, roles.client, roles.features, roles.without)):
        return None
    if any(path.suffix == ".npz" or path.is_dir() or len(read_names(path)) != 2 for path in paths):
        return None
    columns = [read_columns([path]) for path in paths]
    times = {guess_time(each) if roles.time is None else (roles.time,) for each in columns}
    first = times.pop()
    if times or len(first) != 1 or not all(_is_series(each, first[0]) for each in columns):
        return None
    return Series(tuple(map(str, paths)), first[0], LAGS, CLOCK, own_scale=True)


def _is_series(columns: Mapping[str, Column], time: str) -> bool:
    """Tell whether one column of numbers stands beside one of times, a day or less from one to the next."""
    others = [column for name, column in columns.items() if name != time]
    if time not in columns or others[0].numbers is None or columns[time].missing.any():
        return False
    values = columns[time].values
    at = np.unique(when_of(time, np.arange(len(values)) + 2, {time: values}, None)[0])
    return len(at) > 1 and bool(np.median(np.diff(at)) <= seconds_of(LAGS[0]))
