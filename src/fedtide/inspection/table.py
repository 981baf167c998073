"""Tables of a person's own: CSV or NPZ files, a data frame or arrays, whose columns are found by name and type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedtide.core.durations import zone_of
from fedtide.core.errors import FedtideError, nearest, refused
from fedtide.core.prose import listed
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import NPZ
from fedtide.data.sources.cells import places, read_table
from fedtide.data.sources.files import find
from fedtide.data.sources.when import seconds as since_1970

PLAIN = frozenset(("", "na", "nan", "null"))
MISSING = PLAIN | {"none", "nat", "?", "<na>"}
"""Cells that hold nothing, in lower case; the source of a study knows the plain ones alone."""
MOST_CLASSES = 100
"""Different whole numbers up to which a label is a class; more are a measure."""
MOST_MISSING = 0.2
"""Share of the rows that a feature may lack; others are left out."""

LABELS = "label labels y target targets class classes category outcome response species activity gesture diagnosis word"
CLIENTS = (
    "client user subject person device station writer speaker author household house home patient hospital site shop "
    "store customer member participant node sensor account machine turbine vehicle driver rider phone owner owneruserid"
)
TIMES = "time timestamp datetime date when created creationdate dteday ts recorded observed"
HOURS = "hour hours hr"
"""Names of a column with the hour, beside one with the date."""
CALENDAR = frozenset((
    "year", "yr", "month", "mnth", "mo", "day", "weekday", "dow", "hour",
    "hr", "minute", "second", "week", "season", "holiday", "workingday", "weekend", "quarter",
))  # fmt: skip
"""Words in the names of columns that say no more than the time does."""
DATE = ("year", "month", "day", "hour", "minute", "second")
ORDERS = "index instant no nr row rownum number id unnamed"
"""Words in the names of columns."""


@dataclass(frozen=True)
class Table:
    """Columns of a table.

    features: (rows, ...) numbers; None without any. label: (rows,) names, whole numbers, or a measure (floats). client:
    (rows,) names. time: (rows,) seconds since 1970, on the clock of `zone`. said: which column is what, for people.
    columns: the same for a study, by role. source: the files that a study reads; () for what it cannot. calendar:
    positions of features that the time tells.
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

    @property
    def measured(self) -> bool:
        """True if the label is a measure and no class."""
        return self.label.dtype.kind == "f"


@dataclass(frozen=True)
class Roles:
    """Columns as a person names them; None is guessed, "" for none.

    time: a column, or those of a date, divided by commas. features: divided by commas. zone: the time zone in which
    hours and days are counted; times that name no zone are taken as they are.
    """

    label: str | None = None
    client: str | None = None
    time: str | None = None
    features: str | None = None
    zone: str | None = None


def read(data: Any, roles: Roles = Roles()) -> Table:
    """Return the table of one or several files, of a data frame, a mapping of arrays, or of rows.

    Raises:
        FedtideError: a file is missing or damaged, or a column is not there.
    """
    if isinstance(data, Rows):
        return of_rows(data, roles)
    paths = [Path(data)] if isinstance(data, str | Path) else data
    if isinstance(paths, Sequence) and paths and all(isinstance(path, str | Path) for path in paths):
        found = tuple(find(str(path), None, "inspect", hint="name a CSV or NPZ file").resolve() for path in paths)
        name = found[0].name if len(found) == 1 else f"{len(found)} files"
        if found[0].suffix == ".npz":
            if len(found) > 1:
                raise refused("inspect", len(found), "one NPZ file, or CSV files with the same header")
            return replace(of_rows(NPZ(str(found[0])).load(None, 0), roles), name=name, source=found)
        return of_columns(name, _joined(found), roles, found)
    return of_columns("table", _columns(data), roles)


def _joined(paths: Sequence[Path]) -> dict[str, np.ndarray]:
    """Read the columns of files with the same header, one below the other."""
    header: list[str] = []
    lines: list[list[str]] = []
    for path in paths:
        names, rows = read_table(path)
        header = header or names
        order = places(path, names, header)
        lines += [[line[at] for at in order] for _, line in rows]
    return {name: np.array(cells, dtype=object) for name, cells in zip(header, zip(*lines, strict=True), strict=True)}


def _columns(frame: Any) -> dict[str, np.ndarray]:
    """Return the columns of a data frame (pandas, polars, pyarrow), or of a mapping of arrays."""
    frame = frame.collect() if hasattr(frame, "collect") and not hasattr(frame, "to_numpy") else frame  # a lazy one
    names = getattr(frame, "column_names", None) or (
        list(frame) if isinstance(frame, Mapping) else list(getattr(frame, "columns", ()))
    )
    if not len(names):
        raise refused("inspect: data", type(frame).__name__, "files, a data frame, or a mapping of columns")
    columns = {str(name): np.asarray(frame[name]) for name in names}
    for name, column in columns.items():
        if column.ndim != 1:
            raise refused(f"inspect: shape of column '{name}'", column.shape, "(rows,)")
    lengths = {name: len(column) for name, column in columns.items()}
    for (first, rows), (name, others) in pairwise(lengths.items()):
        if rows != others:
            raise refused(f"inspect: rows of column '{name}'", others, f"{rows}, as of '{first}'")
    return columns


def of_columns(name: str, columns: Mapping[str, np.ndarray], roles: Roles, source: tuple[Path, ...] = ()) -> Table:
    """Find out which column is what, and read them; rows in which something is missing are left out."""
    rows = len(next(iter(columns.values())))
    if not rows:
        raise FedtideError(f"{name}: no rows")
    read = {column: Column(values) for column, values in columns.items()}
    when, client, label, features, left = _parts(name, read, roles)
    seen = [read[column] for column in (*features, label, *client, *when)]
    whole = ~np.any([column.missing for column in seen], axis=0)
    if not whole.any():
        raise FedtideError(
            f"{name}: something is missing in every row of {', '.join((*features, *when, *client, label))}"
        )
    places = np.flatnonzero(whole) + 2 * bool(source)  # the header of a file is its first row
    seconds = _when(name, places, {column: columns[column][whole] for column in when}, roles.zone) if when else None
    numbered = [numbers for feature in features if (numbers := read[feature].numbers) is not None]
    labels, measured = _label(read[label], whole)
    table = Table(
        name,
        labels,
        np.stack([numbers[whole] for numbers in numbered], 1) if numbered else None,
        None if not client else read[client[0]].texts[whole],
        seconds,
        columns={"label": label, "client": client[0] if client else None, "time": when, "features": features,
                 "missing": int(rows - whole.sum())},
        source=() if any(column.odd for column in seen) else source,
        calendar=tuple(at for at, feature in enumerate(features) if when and set(words_of(feature)) & CALENDAR),
    )  # fmt: skip
    return replace(table, said=tuple(_said(table, rows, measured, left, roles.zone)))


def _parts(
    name: str, read: Mapping[str, Column], roles: Roles
) -> tuple[tuple[str, ...], tuple[str, ...], str, tuple[str, ...], dict[str, str]]:
    """Return the columns of the time, the client, the label and the features, and why others are left out."""
    given = {"time": roles.time, "client": roles.client, "label": roles.label or None, "features": roles.features}
    named = {role: _named(name, read, said, f"--{role}") for role, said in given.items() if said is not None}
    for one, other in combinations(named, 2):
        both = [column for column in named[other] if column in named[one]]
        if both and (one, other) != ("time", "features"):  # an hour is both
            raise refused(f"{name}: --{other}", both[0], "another column", f"--{one} names it, too")

    def free(*parts: Sequence[str]) -> dict[str, Column]:
        return {column: read[column] for column in read if not any(column in part for part in parts)}

    when, client, label, features = (named.get(role, ()) for role in given)
    if "time" not in named:
        when = guess_time(free(client, label))
    if roles.zone is not None and not when:
        raise refused(f"{name}: --zone", roles.zone, "with a column of the time (--time)", "no column looks like one")
    if "client" not in named:
        client = guess_client(free(when, label, features))
    label = label or guess_label(free(when, client, features))
    if len(label) != 1:
        raise FedtideError(f"{name}: no column looks like a label; allowed: --label with one of {', '.join(read)}")
    if "features" in named:
        for feature in features:
            if read[feature].numbers is None:
                raise refused(f"{name}: --features", feature, "columns of numbers")
        return when, client, label[0], features, {}
    features, left = guess_features(free(when, client, label))
    # Hours and months of a time in several columns tell something of the label, too.
    features += tuple(column for column in when[1:] if column.strip().lower() in (*HOURS.split(), "month"))
    return when, client, label[0], features, left


def of_rows(rows: Rows, roles: Roles = Roles()) -> Table:
    """Return the table of rows of a source."""
    given = {"label": roles.label, "client": roles.client, "time": roles.time, "features": roles.features}
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
    table = Table(rows.name, label, features, client, time)
    columns = {"label": "y", "client": "client" if client is not None else None,
               "time": ("time",) if time is not None else (), "features": ("x",), "missing": 0}  # fmt: skip
    table = replace(table, columns=columns)
    return replace(table, said=tuple(_said(table, len(rows), False, {}, roles.zone)))


# -- columns -----------------------------------------------------------------------------------------------------------


class Column:
    """A column, as numbers and as texts, and where it lacks something."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.numbers: np.ndarray | None = None
        self.odd = False
        if values.dtype.kind in "biuf":
            self.numbers = values.astype(np.float64)
            self.missing = ~np.isfinite(self.numbers)
        elif values.dtype.kind == "M":
            self.missing = np.isnat(values)
        else:
            self.missing = np.array([value is None or str(value).strip().lower() in MISSING for value in values])
            self.odd = any(str(value).strip().lower() not in PLAIN for value in values[self.missing])
            if not isinstance(first := next((v for v in values[~self.missing]), None), datetime):
                self.numbers = _numbers(values, self.missing) if first is not None else None

    @property
    def texts(self) -> np.ndarray:
        """Cells as texts; whole numbers without a point."""
        if self.values.dtype.kind == "f" and self.whole:
            return np.where(self.missing, 0, self.values).astype(np.int64).astype(str)
        return np.array([str(value).strip() for value in self.values])

    @property
    def whole(self) -> bool:
        """True if every number is whole."""
        return self.numbers is not None and bool((self.numbers[~self.missing] % 1 == 0).all())

    @property
    def distinct(self) -> int:
        """Number of different cells."""
        return len(np.unique(self.texts[~self.missing])) if self.numbers is None else len(
            np.unique(self.numbers[~self.missing]))  # fmt: skip

    @property
    def repeats(self) -> bool:
        """True if there are two different cells or more, and texts that come again."""
        return self.distinct >= 2 and (self.numbers is not None or self.distinct <= len(self.values) / 2)

    @property
    def dated(self) -> bool:
        """True for dates, or texts that are dates."""
        if self.values.dtype.kind == "M":
            return True
        some = self.values[~self.missing][:20]
        return bool(len(some)) and self.numbers is None and all(_is_date(value) for value in some)

    @property
    def days(self) -> bool:
        """True for dates without a time of the day."""
        some = self.values[~self.missing]
        if self.values.dtype.kind == "M":
            return bool((some == some.astype("datetime64[D]")).all())
        return self.dated and all(_midnight(value) for value in some[:: max(len(some) // 50, 1)])


def _midnight(value: Any) -> bool:
    return (
        value if isinstance(value, datetime) else datetime.fromisoformat(str(value).strip())
    ).time() == datetime.min.time()


def _numbers(values: np.ndarray, missing: np.ndarray) -> np.ndarray | None:
    """Return cells as numbers, NaN where missing; None if one is a text."""
    try:
        found = np.array([np.nan if lacks else float(value) for value, lacks in zip(values, missing, strict=True)])
    except (TypeError, ValueError):
        return None
    return found if np.isfinite(found[~missing]).all() else None


def _is_date(value: Any) -> bool:
    if isinstance(value, datetime):
        return True
    try:
        datetime.fromisoformat(str(value).strip())
    except ValueError:
        return False
    return True


def words_of(name: str) -> list[str]:
    """Return the words of a column's name.

    >>> words_of("OwnerUserId"), words_of("station_id"), words_of("PM2.5")
    (['owner', 'user', 'id'], ['station', 'id'], ['pm2', '5'])
    """
    return re.findall(r"[a-z]+[0-9]*|[0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def called(names: Iterable[str], known: str) -> list[str]:
    """Return the names that are one of the known words, then those with one of them among their words.

    >>> called(["shop_id", "user", "basket"], "user shop")
    ['user', 'shop_id']
    """
    words, names = known.split(), list(names)
    exact = [name for word in words for name in names if name.strip().lower() == word]
    return [*exact, *(name for name in names if name not in exact and set(words_of(name)) & set(words))]


def guess_time(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the column of the time, or those of a date; () if none looks like it."""
    named = [name for name in called(columns, TIMES) if columns[name].dated]
    dated = [name for name in columns if columns[name].dated]
    if named or dated:
        first = (named or dated)[0]
        hours = [
            name for name in called(columns, HOURS) if name.strip().lower() in HOURS.split() and columns[name].whole
        ]
        return (first, *hours[:1]) if columns[first].days else (first,)
    at = {name.strip().lower(): name for name in columns}
    if all(part in at and columns[at[part]].whole for part in DATE[:3]):
        rest = [part for part in DATE[3:] if part in at and columns[at[part]].whole]
        return tuple(at[part] for part in (*DATE[:3], *rest))
    return tuple(name for name in called(columns, "time timestamp ts datetime") if columns[name].numbers is not None)[
        :1
    ]


def guess_client(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the column of the client: one with such a name, whose values come twice or more often on average."""
    for name in called(columns, CLIENTS):
        column = columns[name]
        if 2 <= column.distinct <= len(column.values) / 2 and (column.numbers is None or column.whole):
            return (name,)
    return ()


def guess_label(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the column of the label: one with such a name, or else the last whose texts come again."""
    able = [name for name in columns if columns[name].repeats and not counts_rows(name, columns[name])]
    return tuple(called(able, LABELS) or able[-1:])[:1]


def counts_rows(name: str, column: Column) -> bool:
    """Tell whether a column numbers the rows: it would tell the time, or the file, and nothing else."""
    if not column.whole or column.numbers is None or not set(words_of(name) or ["unnamed"]) & set(ORDERS.split()):
        return False
    # One by one, or from 1 again in every file.
    return len(column.numbers) > 1 and bool((np.diff(column.numbers) == 1).mean() > 0.95)


def guess_features(columns: Mapping[str, Column]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the columns of features, and why others are left out."""
    left = {}
    for name, column in columns.items():
        if column.missing.mean() > MOST_MISSING:
            left[name] = f"{100 * column.missing.mean():.0f} % missing"
        elif column.numbers is None:
            left[name] = "dates" if column.dated else "text"
        elif column.distinct < 2:
            left[name] = "always the same"
        elif counts_rows(name, column):
            left[name] = "numbers the rows"
    return tuple(name for name in columns if name not in left), left


def _named(table: str, columns: Iterable[str], given: str, option: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in given.split(",") if part.strip()) if given not in columns else (given,)
    for name in names:
        if name not in columns:
            raise FedtideError(f"{table}: {option}: no column '{name}'; {nearest(name, list(columns))}")
    if option in ("--client", "--label") and len(names) > 1:
        raise refused(f"{table}: {option}", given, "one column")
    return tuple(dict.fromkeys(names))


def _label(column: Column, rows: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return labels, and whether they are a measure."""
    if column.numbers is None:
        return column.texts[rows], False
    if column.whole and column.distinct <= MOST_CLASSES:
        return column.numbers[rows].astype(np.int64), False
    return column.numbers[rows], True


def _when(name: str, rows: np.ndarray, columns: Mapping[str, np.ndarray], zone: str | None) -> np.ndarray:
    """Return seconds since 1970 of one column, or of the columns of a date; `rows` are numbers for messages."""
    if len(columns) == 2:  # a date and an hour
        date, hour = columns.items()
        return _when(name, rows, dict([date]), zone) + 3600.0 * np.array([float(value) for value in hour[1]])
    if len(columns) > 2:
        parts = [np.array([int(float(value)) for value in column]) for column in columns.values()]
        year, month, day, *rest = parts
        since = np.array(year - 1970, "datetime64[Y]").astype("datetime64[M]") + (month - 1)
        found = (since.astype("datetime64[D]") + (day - 1)).astype("datetime64[s]").astype(np.float64)
        return local(found + sum(part * unit for part, unit in zip(rest, (3600, 60, 1), strict=False)), zone)
    column, values = next(iter(columns.items()))
    if values.dtype.kind == "M":
        return local(values.astype("datetime64[us]").astype(np.int64) / 1e6, zone)
    texts, first, place = np.unique(values.astype(str), return_index=True, return_inverse=True)
    if values.dtype.kind in "biuf":
        found = values.astype(np.float64)
    else:
        wheres = [f"{name}: row {rows[at]}: {column}" for at in first]
        found = np.array([since_1970(where, text.strip()) for where, text in zip(wheres, texts, strict=True)])[place]
    # Milliseconds, microseconds and nanoseconds since 1970 lie far apart.
    size = float(np.median(np.abs(found)))
    return local(found / (1e9 if size > 1e17 else 1e6 if size > 1e14 else 1e3 if size > 1e11 else 1.0), zone)


def local(utc: np.ndarray, zone: str | None) -> np.ndarray:
    """Return seconds as the clocks of a zone have them; None leaves them.

    >>> (local(np.array([0.0]), "Europe/Berlin") / 3600).tolist()
    [1.0]
    """
    if zone is None:
        return utc.astype(np.float64)
    try:
        there = zone_of(zone)
    except ValueError as error:
        raise FedtideError(f"--zone: {error}") from None
    hours, place = np.unique(np.floor(utc / 3600), return_inverse=True)
    shifts = [datetime.fromtimestamp(hour * 3600, UTC).astimezone(there).utcoffset() for hour in hours]
    return utc + np.array([shift.total_seconds() if shift else 0.0 for shift in shifts])[place]


def _said(table: Table, rows: int, measured: bool, left: Mapping[str, str], zone: str | None) -> Iterable[str]:
    columns = table.columns
    clients = "none" if table.client is None else f"{columns['client']} ({len(np.unique(table.client)):,} values)"
    features = columns["features"]
    shown = listed([*features[:4], f"{len(features) - 4} more"]) if len(features) > 5 else listed(features or ("none",))
    time = "none"
    if table.time is not None:
        first, last = (
            datetime.fromtimestamp(at, UTC).isoformat(" ", "minutes")[:16]
            for at in (table.time.min(), table.time.max())
        )
        time = f"{', '.join(columns['time'])} ({first} to {last}{f', clocks of {zone}' if zone else ''})"
    kind = "a measure" if measured else f"{len(np.unique(table.label))} classes"
    lack = f", {columns['missing']:,} left out as something is missing" if columns["missing"] else ""
    yield f"{table.name}: {rows:,} rows{lack}"
    yield f"label: {columns['label']} ({kind}); client: {clients}; time: {time}; features: {shown}"
    if left:
        yield f"left out: {listed([f'{name} ({why})' for name, why in left.items()])}"
