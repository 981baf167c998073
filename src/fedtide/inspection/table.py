"""Tables of users: files (CSV, Parquet, NPZ), frames, arrays or series, with columns read by name and type."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedtide.config import Experiment
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows, check_names
from fedtide.data.sources import frames
from fedtide.data.sources.arrays import NPZ
from fedtide.data.sources.cells import Cells, Clock, Column, cells_of, describe_span, describe_spelling, read_cells
from fedtide.data.sources.files import find
from fedtide.data.sources.frames import Roles, local
from fedtide.data.sources.series import Series
from fedtide.data.sources.table_files import Spelling, read_names
from fedtide.draw.prose import listed
from fedtide.fields.types import DAY, LARGEST, OBEYED, seconds_of
from fedtide.runs.build import cohort_size, population_of

ROWS, ROWS_OF_CLIENT = 20_000, 20
"""Rows of a study that are inspected, and those of a client in a round."""
EARLIEST, LATEST = -62_135_542_800, 253_402_246_800
"""Seconds since 1970 of the times that clocks of all zones show: 15 hours within the years 1 to 9999."""
MOST_CATEGORIES = 30
"""Different texts up to which a column is offered as categories: each becomes a feature."""
LAGS = "1d", "2d", "7d"
"""Lags of the values of a series that are features of a row: a forecast is of a day ahead."""
CLOCK: tuple[Literal["hour", "weekday"], ...] = "hour", "weekday"
"""Other features of a row of a series."""


@dataclass(frozen=True)
class Columns:
    """Names of columns by their roles.

    missing: rows that are left out because something is missing. gaps: whether a study has to leave out any.
    categories: texts that a study may use. spelling: settings of a source that reads other files in the same way.
    """

    label: str = ""
    client: str | None = None
    time: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    missing: int = 0
    gaps: bool = False
    categories: tuple[str, ...] = ()
    spelling: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Table:
    """Columns of a table.

    Args:
        name: in words for people.
        label: (rows,) names, whole numbers, or a measure (floats).
        features: (rows, ...) numbers; None without any.
        client: (rows,) names.
        time: (rows,) seconds since 1970, on the clock of `zone`.
        said: the roles of columns, for people.
        columns: their names, for a study.
        source: the files that a study reads; () if it reads none.
        calendar: positions of features that follow from the time.
        zone: of the clocks, None for UTC.
        series: source of rows of series.
        simulated: whether rows are of a study, so that no study is made of them.
    """

    name: str
    label: np.ndarray
    features: np.ndarray | None = None
    client: np.ndarray | None = None
    time: np.ndarray | None = None
    said: tuple[str, ...] = ()
    columns: Columns = Columns()
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

    `asked` is the command of a person, for messages.

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
        files = tuple(find(str(path), None, asked, hint=hint).resolve() for path in paths)
        if twice := [path for path in files if files.count(path) > 1]:
            raise refused(asked, twice[0].name, "each file once")
        name = files[0].name if len(files) == 1 else f"{len(files)} files"
        if files[0].suffix == ".npz":
            if len(files) > 1:
                raise refused(asked, len(files), "one NPZ file, or CSV files with the same header")
            return replace(of_rows(NPZ(str(files[0])).load(None, 0), roles), name=name, source=files)
        if (series := series_in(files, roles)) is not None:
            return of_series(name, series, files, roles.zone)
        return of_columns(name, read_cells(files, spelling=Spelling(time_format=roles.time_format)), roles, files)
    return of_columns("table", cells_of(data, asked, Spelling(time_format=roles.time_format)), roles)


def of_columns(name: str, cells: Cells, roles: Roles, source: tuple[Path, ...] = ()) -> Table:
    """Guess the roles of columns, and read them; rows in which something is missing are left out."""
    rows, columns = len(cells), cells.columns
    guess = frames.assign(name, cells, roles)
    names = (*guess.features, *guess.time, *([guess.client] if guess.client else []), guess.label)
    check_names(f"{name}: name of a column", names, OBEYED)  # or nobody could run the study
    seen = [columns[column] for column in names]
    whole = ~np.any([column.missing for column in seen], axis=0)
    if not whole.any():
        raise FedtideError(f"{name}: something is missing in every row of {', '.join(names)}")
    for column in (*guess.features, guess.label):
        if (worst := columns[column].largest) > LARGEST:
            raise refused(f"{name}: {column}", worst, f"numbers below {LARGEST:.2g}; divide them")
    if guess.client:
        check_names(f"{name}: {guess.client}", columns[guess.client].texts[whole])
    if columns[guess.label].numbers is None:
        check_names(f"{name}: {guess.label}", columns[guess.label].texts[whole], OBEYED)
    numbered = [numbers[whole] for feature in guess.features if (numbers := columns[feature].numbers) is not None]
    clock: Clock = "utc" if roles.zone else "written"
    when, unit = None, ""
    if guess.time:  # rows that it has of no date are said
        others = [columns[column].missing for column in names if column not in guess.time]
        timed = ~np.any(others, axis=0)
        when, unit = cells.take(np.flatnonzero(timed)).times(guess.time, clock)
        when = when[whole[timed]]
    categories = categories_of(columns, guess.left)
    missing = int(rows - whole.sum())
    gaps = missing > 0 or any(columns[column].missing.any() for column in categories)
    calendar = [at for at, feature in enumerate(guess.features) if set(frames.words_of(feature)) & frames.CALENDAR]
    table = Table(
        name,
        _label(columns[guess.label], whole),
        np.stack(numbered, 1) if numbered else None,
        columns[guess.client].texts[whole] if guess.client else None,
        None if when is None else _on_clock(f"{name}: {', '.join(guess.time)}", when, roles.zone),
        columns=Columns(guess.label, guess.client, guess.time, guess.features, missing, gaps, categories,
                        _spelling(cells, guess.time, clock, (*guess.features, guess.label))),
        source=source,
        calendar=tuple(calendar) if guess.time else (),
        zone=roles.zone,
    )  # fmt: skip
    used = categories if source and numbered else ()
    left = {name: why for name, why in guess.left.items() if name not in used}
    table = _described(table, rows, left, unit, guessed=guess.guessed)
    measures = [name for name in (*guess.features, guess.label) if columns[name].numbers is not None]
    groups = frames.find_groups(columns, guess.left, measures) if roles.client is None and guess.client is None else ()
    lines = (
        *_describe_used(used, guess, columns),
        *_propose(columns, guess, groups if roles.client is None else None),
        *describe_spelling(cells, guess.features, guess.label),
    )
    return replace(table, said=(*table.said, *lines))


def _describe_used(categories: Sequence[str], guess: frames.Assigned, columns: Mapping[str, Column]) -> Iterator[str]:
    """Yield a line on columns that only the study uses, and one on columns with gaps that a person can keep."""
    if categories:
        are, them = ("is a text column", "it") if len(categories) == 1 else ("are text columns", "them")
        yield f"{listed(categories)} {are}: the study uses {them} as categories, the inspection does not look at {them}"
    gaps = [name for name, why in guess.left.items() if why.endswith(frames.MISSING) and name not in categories]
    if gaps := [name for name in gaps if columns[name].numbers is not None]:
        names = ",".join([*guess.features, *gaps])
        yield f"use --features {names} to keep {listed(gaps)}, without the rows that lack a cell"


def _propose(columns: Mapping[str, Column], guess: frames.Assigned, groups: Sequence[str] | None) -> Iterator[str]:
    """Yield lines on columns that may be the client, and on a lack of clients and times.

    `groups` are columns between which rows differ; None if a person says that there are no clients.
    """
    if guess.client is None and not guess.time and groups is not None:
        yield "No column of clients or times was found. Name them with --client and --time."
        texts = {name: columns[name] for name in guess.left if columns[name].numbers is None}
        may = [name for name, column in texts.items()
               if not column.dated and 2 <= column.distinct <= len(column) / frames.MEMBERS]  # fmt: skip
        if may and not groups:
            yield f"{may[0]} ({columns[may[0]].distinct:,} values) may be a column of clients: --client {may[0]}"
    if groups:
        more = [f"{len(groups) - 3} more"] if len(groups) > 3 else []
        counts = listed([*(f"{name} ({columns[name].distinct:,} values)" for name in groups[:3]), *more])
        yield f"no column is named like a client, but rows differ by {counts}: --client {groups[0]}"


def _spelling(cells: Cells, time: Sequence[str], clock: Clock, numbers: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """Return the settings of a source by which rows of another file are read in the same way.

    `numbers` are the columns of numbers that are read.
    """
    times = cells.columns[time[0]].read_times(cells.spelling.time_format) if len(time) in (1, 2) else None
    marks = {cells.spelling.decimal, *(column.decimal for column in cells.columns.values())}
    guessed = "," in marks or cells.spelling.separator == ";"
    settings: list[tuple[str, Any]] = [("decimal", str(cells.spelling.decimal))] if guessed else []
    if units := {name: unit for name in numbers if (unit := cells.columns[name].unit)}:
        settings.append(("units", units))
    if times is not None and times.form not in ("year-month-day", "month names"):
        settings.append(("time_format", times.form))
    if times is not None and clock == "written" and not np.isnan(times.zone).all():
        settings.append(("clock", clock))
    return tuple(settings)


def categories_of(columns: Mapping[str, Column], left: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns that were left out because they are texts, and that can be categories of a study.

    Dates are none, if nobody knows which part of them is the day, or one of them is wrong.
    """
    texts = {name: columns[name] for name, why in left.items() if why != frames.ASKED}
    return tuple(
        name
        for name, column in texts.items()
        if column.numbers is None and not (column.dated or column.unclear or frames.DATES & {*frames.words_of(name)})
        and not column.unit and column.stray is None and column.repeats
        and 2 <= column.distinct <= MOST_CATEGORIES and column.missing.mean() <= frames.MOST_MISSING
    )  # fmt: skip


def of_rows(rows: Rows, roles: Roles = Roles()) -> Table:
    """Return the table of rows of a source."""
    for role in ("label", "client", "time", "features", "without", "time_format"):
        if (column := getattr(roles, role)) is not None:
            raise refused(
                f"{rows.name}: --{role.replace('_', '-')}",
                column,
                "tables with columns (CSV, data frames)",
                "it has none",
            )
    if roles.zone is not None and rows.time is None:
        raise refused(f"{rows.name}: --zone", roles.zone, "rows with times", "these have none")
    if rows.steps is not None:
        raise refused(f"{rows.name}: labels", "sequences", "one label for each row")
    label = np.array(rows.label_names, object)[rows.y.numpy()] if rows.label_names else rows.y.numpy()
    client = None if rows.client is None else np.array(rows.client_names, object)[rows.client.numpy()]
    time = None if rows.time is None else _on_clock(f"{rows.name}: time", rows.time.numpy(), roles.zone)
    features = rows.x.reshape(len(rows), -1).float().numpy()
    columns = Columns("y", None if client is None else "client", () if time is None else ("time",), ("x",))
    return _described(Table(rows.name, label, features, client, time, columns=columns, zone=roles.zone), len(rows), {})


def of_population(people: Population, roles: Roles, asked: str) -> Table:
    """Return the table of all rows of all clients, as they are dealt, before any shift."""
    lists = [part for part in people.parts.values() if isinstance(part, Ragged)]
    if not lists or not isinstance(people.rows, Rows):
        raise refused(f"{asked}: data", "rows that are made when they are needed", "a population of rows")
    clients, rows = torch.cat([part.owner for part in lists]), torch.cat([part.rows.long() for part in lists])
    names = people.names or tuple(f"client {number}" for number in range(len(people.group)))
    return of_rows(replace(people.rows.pick(rows), client=clients, client_names=names), roles)


def of_study(experiment: Experiment, where: str) -> Table:
    """Return the table of the rows that clients of a study bring over its rounds, with its first seed.

    A period of the shift counts as a day. A row is looked at once, in one of the rounds in which its client takes part.
    """
    method, rounds, seed = experiment.method[0], experiment.rounds, experiment.seeds[0]
    people = population_of(experiment, experiment.shift, seed)
    if people.rows.steps is not None or not isinstance(people.rows, Rows):
        raise refused(f"{where}: inspect", "sequences", "rows with a label each")
    cohort, draw = cohort_size(method, people.registered), Rng(seed).at("inspected").numpy()
    day = DAY * rounds / max(rounds - 1, 1) / (experiment.period or rounds)  # a period of a study counts as one
    drawn: set[int] = set()
    pairs, owners, times = [], list[str](), list[float]()
    for number in draw.permutation(rounds).tolist():
        moment = Moment(number, rounds, float(number))
        for client in people.arrivals(cohort, moment).tolist():
            fresh = [row for row in people.held(client, moment, "train").tolist() if row not in drawn]
            rows = draw.permutation(fresh)[: min(ROWS_OF_CLIENT, ROWS - len(drawn))].astype(np.int64)
            drawn.update(rows.tolist())
            if len(rows):
                pairs.append(people.fetch(torch.from_numpy(rows), client, moment))
            owners += [f"client {client}"] * len(rows)
            times += [number * day] * len(rows)
    if not pairs:
        raise refused(f"{where}: inspect", "no rows", "clients with rows")
    x, y = (torch.cat([pair[part] for pair in pairs]) for part in (0, 1))
    features = x.reshape(len(x), -1).float().numpy()
    return Table("the study", y.numpy(), features, np.array(owners), np.array(times), simulated=True)


def of_series(name: str, source: Series, paths: tuple[Path, ...], zone: str | None) -> Table:
    """Return the table of the rows that a source makes of files of series, which are what a study forecasts."""
    rows = source.load(None, 0, measured=True)
    assert rows.time is not None
    assert rows.client is not None
    assert rows.value is not None
    time = _on_clock(f"{name}: {source.time}", rows.time.numpy(), zone)
    lines = (
        *rows.said[:2],
        f"label: the value, in deviations of the earliest tenth of its series; client: the series "
        f"({len(rows.client_names)}); time: {source.time} ({describe_span(time, '')}); features: the values "
        f"{', '.join(source.lags)} before, {' and '.join(source.clock)}",
    )
    columns = Columns("value", "series", (source.time,), source.lags)
    client = np.array(rows.client_names)[rows.client.numpy()]
    clocks = tuple(range(len(source.lags), rows.x.shape[1]))
    return Table(
        name, rows.value.double().numpy(), rows.x.numpy(), client, time, lines, columns, paths, clocks, zone, source
    )


def series_in(paths: Sequence[Path], roles: Roles) -> Series | None:
    """Return files as series if each has a column of times, a day or less apart, and one of numbers; else None.

    Args:
        paths: CSV, ARFF or Parquet files.
        roles: of their columns, by a person; a label, clients, features or a column that is left out mean a table.
    """
    if any(column is not None for column in (roles.label, roles.client, roles.features, roles.without)):
        return None
    if any(path.suffix == ".npz" or path.is_dir() or len(read_names(path)) != 2 for path in paths):
        return None
    files = [read_cells([path], spelling=Spelling(time_format=roles.time_format)) for path in paths]
    times = {frames.guess_time(cells.columns) if roles.time is None else (roles.time,) for cells in files}
    first = times.pop()
    if times or len(first) != 1 or not all(_is_series(cells, first[0]) for cells in files):
        return None
    spelling: dict[str, Any] = {}
    for cells in files:
        for key, value in _spelling(cells, first, "utc", [name for name in cells.columns if name not in first]):
            spelling[key] = spelling.get(key, {}) | value if key == "units" else value
    return Series(tuple(map(str, paths)), first[0], LAGS, CLOCK, own_scale=True, **spelling)


def _is_series(cells: Cells, time: str) -> bool:
    """Tell whether one column has numbers, and the other times a day or less apart."""
    others = [column for name, column in cells.columns.items() if name != time]
    if time not in cells.columns or others[0].numbers is None or cells.columns[time].missing.any():
        return False
    at = np.unique(cells.times([time])[0])
    return len(at) > 1 and bool(np.median(np.diff(at)) <= seconds_of(LAGS[0]))


def _on_clock(name: str, seconds: np.ndarray, zone: str | None) -> np.ndarray:
    """Return times on the clock of a zone; raise for times that no clock shows."""
    for worst in seconds[~((seconds >= EARLIEST) & (seconds <= LATEST))][:1]:
        raise refused(name, f"{worst:g} s since 1970", "times of the years 1 to 9999")
    return local(seconds, zone)


def _label(column: Column, rows: np.ndarray) -> np.ndarray:
    """Return labels: texts, whole numbers of few classes, or a measure (floats)."""
    if column.numbers is None or column.boolean:  # a study takes the spellings of true and false for names
        return column.texts[rows]
    few = column.whole and column.distinct <= frames.MOST_CLASSES
    return column.numbers[rows].astype(np.int64) if few else column.numbers[rows]


def _count_classes(label: np.ndarray) -> str:
    """Say how many classes a study trains: those of whole numbers are all from 0 to the largest."""
    seen = len(np.unique(label))
    trained = seen if label.dtype.kind not in "iu" or label.min() < 0 else int(label.max()) + 1
    return f"{trained} classes" + (f", {seen} of them with rows" if seen < trained else "")


def _described(table: Table, rows: int, left: Mapping[str, str], unit: str = "", *, guessed: str = "") -> Table:
    """Return a table with the lines on its columns.

    Args:
        table: of the rows in which nothing is missing.
        left: names of columns that were left out, with the reasons.
        unit: of times.
        guessed: remark on a label that was guessed.
    """
    columns, features = table.columns, table.columns.features
    clients = "none" if table.client is None else f"{columns.client} ({len(np.unique(table.client)):,} values)"
    names = listed([*features[:4], f"{len(features) - 4} more"]) if len(features) > 5 else listed(features or ("none",))
    time = "none"
    if table.time is not None:
        clocks = f", clocks of {table.zone}" if table.zone else ""
        time = f"{', '.join(columns.time)} ({describe_span(table.time, unit)}{clocks})"
    kind = "a measure" if table.measured else _count_classes(table.label)
    kind += guessed
    lack = f", {columns.missing:,} left out because something is missing" if columns.missing else ""
    lines = [
        f"{table.name}: {rows:,} rows{lack}",
        f"label: {columns.label} ({kind}); client: {clients}; time: {time}; features: {names}",
    ]
    if left:
        lines.append(f"left out: {listed([f'{name} ({why})' for name, why in left.items()])}")
    return replace(table, said=tuple(lines))
