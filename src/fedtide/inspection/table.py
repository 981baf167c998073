"""Tables of a person's own: files (CSV, Parquet, NPZ), frames or arrays, whose columns are found by name and type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtide.core.errors import FedtideError, refused
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import NPZ
from fedtide.data.sources.cells import Column, columns_of, read_columns
from fedtide.data.sources.files import find
from fedtide.data.sources.guesses import (
    ASKED,
    CALENDAR,
    GUESSED,
    MOST_CLASSES,
    MOST_MISSING,
    Roles,
    assign,
    local,
    when_of,
    words_of,
)
from fedtide.data.sources.series import Series
from fedtide.data.sources.when import spanned
from fedtide.draw.prose import listed
from fedtide.fields.types import LARGEST
from fedtide.inspection.series import series_in

MOST_CATEGORIES = 30
"""Different texts up to which a column is offered as categories: each becomes a feature."""


@dataclass(frozen=True)
class Table:
    """Columns of a table.

    features: (rows, ...) numbers; None without any. label: (rows,) names, whole numbers, or a measure (floats). client:
    (rows,) names. time: (rows,) seconds since 1970, on the clock of `zone`. said: which column is what, for people.
    columns: the same for a study, by role. source: the files that a study reads; () for what it cannot. calendar:
    positions of features that the time tells. zone: whose clocks, None for UTC. series: the source that they are of.
    simulated: whether rows are those of a study, of which none is made.
    """

    name: str
    label: np.ndarray
    features: np.ndarray | None = None
    client: np.ndarray | None = None
    time: np.ndarray | None = None
    said: tuple[str, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: tuple[Path, ...] = ()
    calendar: tuple[int, ...] = ()
    zone: str | None = None
    series: Series | None = None
    simulated: bool = False

    @property
    def measured(self) -> bool:
        """True if the label is a measure and no class."""
        return self.label.dtype.kind == "f"


def read(data: Any, roles: Roles = Roles(), asked: str = "inspect") -> Table:
    """Return the table of one or several files, of a data frame, a mapping of arrays, of rows, or of a population.

    `asked` is what a person asked for, for messages.

    Raises:
        FedtideError: a file is missing or damaged, or a column is not there.
    """
    if isinstance(data, Population):
        return of_population(data, roles, asked)
    if isinstance(data, Rows):
        return of_rows(data, roles)
    paths = [Path(data)] if isinstance(data, str | Path) else data
    if isinstance(paths, Sequence) and paths and all(isinstance(path, str | Path) for path in paths):
        hint = "name a CSV, ARFF, Parquet or NPZ file"
        found = tuple(find(str(path), None, asked, hint=hint).resolve() for path in paths)
        if twice := [path for path in found if found.count(path) > 1]:
            raise refused(asked, twice[0].name, "each file once")
        name = found[0].name if len(found) == 1 else f"{len(found)} files"
        if found[0].suffix == ".npz":
            if len(found) > 1:
                raise refused(asked, len(found), "one NPZ file, or CSV files with the same header")
            return replace(of_rows(NPZ(str(found[0])).load(None, 0), roles), name=name, source=found)
        if (series := series_in(found, roles)) is not None:
            return of_series(name, series, found, roles.zone)
        return of_columns(name, read_columns(found), roles, found)
    return of_columns("table", columns_of(data, asked), roles)


def of_columns(name: str, columns: Mapping[str, Column], roles: Roles, source: tuple[Path, ...] = ()) -> Table:
    """Find out which column is what, and read them; rows in which something is missing are left out."""
    rows = len(next(iter(columns.values())).values)
    if not rows:
        raise FedtideError(f"{name}: no rows")
    begin = 2 * bool(source)  # the header of a file is its first row
    found = assign(name, columns, roles, first=begin)
    taken = (*found.time, *([found.client] if found.client else []), found.label)
    seen = [columns[column] for column in (*found.features, *taken)]
    whole = ~np.any([column.missing for column in seen], axis=0)
    if not whole.any():
        raise FedtideError(f"{name}: something is missing in every row of {', '.join((*found.features, *taken))}")
    places = np.flatnonzero(whole) + begin
    for column in (*found.features, found.label):
        if (worst := columns[column].largest) > LARGEST:
            raise refused(f"{name}: {column}", worst, f"numbers below {LARGEST:.2g}; divide them")
    times = {column: columns[column].values[whole] for column in found.time}
    numbered = [numbers for feature in found.features if (numbers := columns[feature].numbers) is not None]
    labels, measured = _label(columns[found.label], whole)
    when, unit = when_of(name, places, times, roles.zone) if times else (None, "")
    categories = categories_of(columns, found.left)
    gaps = not whole.all() or any(columns[column].missing.any() for column in categories)
    table = Table(
        name,
        labels,
        np.stack([numbers[whole] for numbers in numbered], 1) if numbered else None,
        columns[found.client].texts[whole] if found.client else None,
        when,
        columns={"label": found.label, "client": found.client, "time": found.time, "features": found.features,
                 "missing": int(rows - whole.sum()), "gaps": gaps, "categories": categories},
        source=() if any(column.odd for column in seen) else source,
        calendar=tuple(at for at, feature in enumerate(found.features) if times and set(words_of(feature)) & CALENDAR),
        zone=roles.zone,
    )  # fmt: skip
    return replace(table, said=tuple(_said(table, rows, measured, found.left, roles.zone, unit, guessed=found.guessed)))


def categories_of(columns: Mapping[str, Column], left: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns that were left out as texts, and that a study can take for categories."""
    texts = {name: columns[name] for name, why in left.items() if why != ASKED}
    return tuple(
        name
        for name, column in texts.items()
        if column.numbers is None and not column.dated and column.stray is None and column.repeats
        and 2 <= column.distinct <= MOST_CATEGORIES and column.missing.mean() <= MOST_MISSING
    )  # fmt: skip


def of_rows(rows: Rows, roles: Roles = Roles()) -> Table:
    """Return the table of rows of a source."""
    given = {"label": roles.label, "client": roles.client, "time": roles.time, "features": roles.features,
             "without": roles.without}  # fmt: skip
    for role, said in given.items():
        if said is not None:
            raise refused(f"{rows.name}: --{role}", said, "tables with columns (CSV, data frames)", "it has none")
    if roles.zone is not None and rows.time is None:
        raise refused(f"{rows.name}: --zone", roles.zone, "rows with times", "these have none")
    if rows.steps is not None:
        raise refused(f"{rows.name}: labels", "sequences", "one label for each row")
    label = np.array(rows.label_names)[rows.y.numpy()] if rows.label_names else rows.y.numpy()
    client = None if rows.client is None else np.array(rows.client_names)[rows.client.numpy()]
    time = None if rows.time is None else local(rows.time.numpy(), roles.zone)
    features = rows.x.reshape(len(rows), -1).float().numpy()
    table = Table(rows.name, label, features, client, time, zone=roles.zone)
    columns = {"label": "y", "client": "client" if client is not None else None,
               "time": ("time",) if time is not None else (), "features": ("x",), "missing": 0, "gaps": False,
               "categories": ()}  # fmt: skip
    table = replace(table, columns=columns)
    return replace(table, said=tuple(_said(table, len(rows), False, {}, roles.zone)))


def of_population(people: Population, roles: Roles, asked: str) -> Table:
    """Return the table of all rows of all clients, as they are dealt; what a shift makes of them is left out."""
    lists = [part for part in people.parts.values() if isinstance(part, Ragged)]
    if not lists or not isinstance(people.rows, Rows):
        raise refused(f"{asked}: data", "rows that are made when they are needed", "a population of rows")
    clients, rows = torch.cat([part.owner for part in lists]), torch.cat([part.rows.long() for part in lists])
    names = people.names or tuple(f"client {number}" for number in range(len(people.group)))
    return of_rows(replace(people.rows.pick(rows), client=clients, client_names=names), roles)


def of_series(name: str, source: Series, paths: tuple[Path, ...], zone: str | None) -> Table:
    """Return the table of the rows that a source makes of files of series."""
    rows = source.load_values(None, 0)
    assert rows.time is not None
    assert rows.client is not None
    assert rows.value is not None
    time = local(rows.time.numpy(), zone)
    said = (
        *rows.said[:2],
        f"label: the value, in deviations of the earliest tenth of its series; client: the series "
        f"({len(rows.client_names)}); time: {source.time} ({spanned(time, '')}); features: the values "
        f"{', '.join(source.lags)} before, {' and '.join(source.clock)}",
    )
    columns = {"label": "value", "client": "series", "time": (source.time,), "features": source.lags, "missing": 0,
               "gaps": False, "categories": ()}  # fmt: skip
    client = np.array(rows.client_names)[rows.client.numpy()]
    clocks = tuple(range(len(source.lags), rows.x.shape[1]))
    return Table(
        name, rows.value.double().numpy(), rows.x.numpy(), client, time, said, columns, paths, clocks, zone, source
    )


def _label(column: Column, rows: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return labels, and whether they are a measure."""
    if column.numbers is None:
        return column.texts[rows], False
    if column.whole and column.distinct <= MOST_CLASSES:
        return column.numbers[rows].astype(np.int64), False
    return column.numbers[rows], True


def _said(
    table: Table,
    rows: int,
    measured: bool,
    left: Mapping[str, str],
    zone: str | None,
    unit: str = "",
    *,
    guessed: bool = False,
) -> Iterable[str]:
    columns = table.columns
    clients = "none" if table.client is None else f"{columns['client']} ({len(np.unique(table.client)):,} values)"
    features = columns["features"]
    shown = listed([*features[:4], f"{len(features) - 4} more"]) if len(features) > 5 else listed(features or ("none",))
    time = "none"
    if table.time is not None:
        clocks = f", clocks of {zone}" if zone else ""
        time = f"{', '.join(columns['time'])} ({spanned(table.time, unit)}{clocks})"
    kind = "a measure" if measured else f"{len(np.unique(table.label))} classes"
    kind += GUESSED if guessed else ""
    lack = f", {columns['missing']:,} left out as something is missing" if columns["missing"] else ""
    yield f"{table.name}: {rows:,} rows{lack}"
    yield f"label: {columns['label']} ({kind}); client: {clients}; time: {time}; features: {shown}"
    if left:
        yield f"left out: {listed([f'{name} ({why})' for name, why in left.items()])}"
