"""Which column of a table is what: by its name and type, or as a person says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations
from typing import Any

import numpy as np

from fedtide.core.errors import FedtideError, nearest, refused, shown
from fedtide.data.sources.cells import Column
from fedtide.data.sources.when import is_epoch, seconds_of
from fedtide.fields.types import LARGEST, zone_of

MOST_CLASSES = 100
"""Different whole numbers up to which a label is a class; more are a measure."""
MOST_MISSING = 0.2
"""Share of the rows that a feature may lack; others are left out."""

LABELS = "label labels y target targets class classes category outcome response species activity gesture diagnosis word"
CLIENTS = (
    "client user subject person device station writer speaker author household house home patient hospital site shop "
    "store customer member participant node sensor account machine turbine vehicle driver rider phone owner "
    "owneruserid who"
)
TIMES = "time timestamp datetime date when created creationdate dteday ts recorded observed"
DOMAINS = "domain group"
HOURS = "hour hours hr"
"""Names of a column with the hour, beside one with the date."""
CALENDAR = frozenset((
    "year", "yr", "month", "mnth", "mo", "day", "weekday", "dow", "hour",
    "hr", "minute", "second", "week", "season", "holiday", "workingday", "weekend", "quarter",
))  # fmt: skip
"""Words in the names of columns that repeat the time."""
DATE = ("year", "month", "day", "hour", "minute", "second")
ORDERS = "index instant no nr row rownum number id unnamed"
"""Words in the names of columns."""
GUESSED = ", guessed: no column has a label-like name"
"""Remark on a label that is only the last column that may be one."""
ASKED = "as asked"
"""Why a column is left out if a person asks for that."""
ROLES = ("time", "client", "domain", "label", "features", "without")


@dataclass(frozen=True)
class Roles:
    """Columns as a person names them; None is guessed, "" for none.

    time: a column, or the columns of a date, divided by commas. features: columns divided by commas. zone: time zone in
    which hours and days are counted; times without a zone are not converted. without: columns that are left out,
    divided by commas. option: prefix of the name of a role in messages.
    """

    label: str | None = None
    client: str | None = None
    time: str | None = None
    features: str | None = None
    zone: str | None = None
    domain: str | None = ""
    without: str | None = None
    option: str = "--"


@dataclass(frozen=True)
class Assigned:
    """Columns by role.

    left: other columns, and why they are no features. guessed: true if no column has a label-like name. The label is
    then the last column that may be one.
    """

    label: str
    client: str | None
    domain: str | None
    time: tuple[str, ...]
    features: tuple[str, ...]
    left: Mapping[str, str]
    guessed: bool = False


def assign(
    name: str, columns: Mapping[str, Column], roles: Roles, *, categories: bool = False, first: int = 0
) -> Assigned:
    """Assign a role to each column.

    Args:
        name: name of the table, for messages.
        columns: all columns.
        roles: the columns that a person names.
        categories: whether texts that repeat are features, too.
        first: number of the first row, for messages.

    Raises:
        FedtideError: a named column does not exist or has two roles, or no column looks like a label.
    """

    def option(role: str) -> str:
        return f"{name}: {roles.option}{role}"

    named = {role: _named(columns, text, option(role)) for role in ROLES if (text := getattr(roles, role)) is not None}
    if named.get("label") == ():
        raise refused(option("label"), roles.label, "the name of a column")
    for one, other in combinations(named, 2):
        both = [column for column in named[other] if column in named[one]]
        if both and (one, other) != ("time", "features"):  # an hour is both
            raise refused(option(other), both[0], "another column", f"{roles.option}{one} names it, too")
    without = named.pop("without", ())
    columns = {column: cells for column, cells in columns.items() if column not in without}
    chosen: dict[str, tuple[str, ...]] = {role: named.get(role, ()) for role in ROLES[:-1]}

    def free(*assigned: str) -> dict[str, Column]:
        taken = {column for role in assigned for column in chosen[role]}
        return {column: cells for column, cells in columns.items() if column not in taken}

    if "time" not in named:
        chosen["time"] = guess_time(free("client", "domain", "label"))
    if roles.zone is not None and not chosen["time"]:
        allowed = f"with a column of the time ({roles.option}time)"
        raise refused(option("zone"), roles.zone, allowed, "no column looks like one")
    if "client" not in named:
        chosen["client"] = guess_client(free("time", "domain", "label", "features"))
    if "domain" not in named:
        chosen["domain"] = guess_domain(free("time", "client", "label", "features"))
    if "label" not in named:
        chosen["label"] = guess_label(free("time", "client", "domain", "features"))
        constant = [column for column in columns if column.strip().lower() == "label" and columns[column].distinct < 2]
        if constant:
            raise refused(option("label"), constant[0], "a column with two different values or more", "this has one")
    if len(chosen["label"]) != 1:
        allowed = f"{roles.option}label with one of {', '.join(columns)}"
        raise FedtideError(f"{name}: no column looks like a label; allowed: {allowed}")
    time, label, left = chosen["time"], chosen["label"], dict[str, str]()
    if "features" not in named:
        features, left = guess_features(free("time", "client", "domain", "label"), categories=categories, first=first)
        # Hours and months of a time in several columns tell something of the label, too.
        hours = tuple(column for column in time[1:] if column.strip().lower() in (*HOURS.split(), "month"))
        chosen["features"] = features + hours
    if "label" not in named:
        for column in left:
            if column.strip().lower() in LABELS.split() and columns[column].distinct >= 2:
                left[column] = f"named like a label, but almost every value is unique: {left[column]}"
    left |= dict.fromkeys(without, ASKED)
    for feature in chosen["features"]:
        if columns[feature].dated or (columns[feature].numbers is None and not categories):
            kind = "numbers, or of texts that come again" if categories else "numbers"
            why = "" if columns[feature].stray is None else _explain_text(feature, columns[feature], first)
            raise refused(option("features"), feature, f"columns of {kind}", why)
    for part in time[1:] if len(time) == 2 else time if len(time) > 2 else ():
        if columns[part].numbers is None:
            raise refused(option("time"), part, "numbers for the parts of a date")
    guessed = "label" not in named and not match_names(label, LABELS)
    client, domain = (next(iter(chosen[role]), None) for role in ("client", "domain"))
    return Assigned(label[0], client, domain, time, chosen["features"], left, guessed)


def join_columns(names: Any) -> str | None:
    """Return columns as text, several divided by commas; None stays: names in a data frame may be numbers.

    >>> join_columns(4), join_columns(["year", "month"])
    ('4', 'year,month')
    """
    if names is None or isinstance(names, str):
        return names
    return ",".join(map(str, names)) if isinstance(names, Iterable) else str(names)


def words_of(name: str) -> list[str]:
    """Return the words of a column's name.

    >>> words_of("OwnerUserId"), words_of("station_id"), words_of("PM2.5")
    (['owner', 'user', 'id'], ['station', 'id'], ['pm2', '5'])
    """
    return re.findall(r"[a-z]+[0-9]*|[0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def match_names(names: Iterable[str], vocabulary: str) -> list[str]:
    """Return the names that are a word of a vocabulary, then those that contain one.

    >>> match_names(["shop_id", "user", "basket"], "user shop")
    ['user', 'shop_id']
    """
    words, names = vocabulary.split(), list(names)
    exact = [name for word in words for name in names if name.strip().lower() == word]
    return [*exact, *(name for name in names if name not in exact and set(words_of(name)) & set(words))]


def guess_time(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the column of the time, or those of a date; () if none looks like it."""
    named = [name for name in match_names(columns, TIMES) if columns[name].dated]
    dated = [name for name in columns if columns[name].dated]
    if named or dated:
        first = (named or dated)[0]
        hours = [
            name
            for name in match_names(columns, HOURS)
            if name.strip().lower() in HOURS.split() and columns[name].whole
        ]
        return (first, *hours[:1]) if columns[first].days else (first,)
    at = {name.strip().lower(): name for name in columns}
    if all(part in at and columns[at[part]].whole for part in DATE[:3]):
        rest = [part for part in DATE[3:] if part in at and columns[at[part]].whole]
        return tuple(at[part] for part in (*DATE[:3], *rest))
    numbers = [name for name in match_names(columns, "time timestamp ts datetime") if columns[name].numbers is not None]
    epochs = [name for name in match_names(columns, TIMES) if columns[name].whole and is_epoch(columns[name].present)]
    return (*epochs, *numbers)[:1]


def guess_client(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the column of the client: one with such a name, whose values come twice or more often on average."""
    for name in match_names(columns, CLIENTS):
        column = columns[name]
        if 2 <= column.distinct <= len(column.values) / 2 and (column.numbers is None or column.whole):
            return (name,)
    return ()


def guess_domain(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the column of the domain: one that is called so, with few values."""
    named = (name for name in columns if name.strip().lower() in DOMAINS.split())
    return tuple(name for name in named if 2 <= columns[name].distinct <= MOST_CLASSES)[:1]


def guess_label(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the column of the label: one with such a name, or else the last whose texts come again."""
    able = [name for name in columns if columns[name].repeats and not counts_rows(name, columns[name])]
    return tuple(match_names(able, LABELS) or able[-1:])[:1]


def counts_rows(name: str, column: Column) -> bool:
    """Tell whether a column numbers the rows: it would tell the time, or the file, and nothing else."""
    if not column.whole or column.numbers is None or not set(words_of(name) or ["unnamed"]) & set(ORDERS.split()):
        return False
    # One by one, or in equal steps, as rows were left out; and anew in every file.
    steps = np.diff(column.numbers)
    return len(steps) > 0 and bool(steps[0] > 0) and bool((steps == steps[0]).mean() > 0.95)


def guess_features(
    columns: Mapping[str, Column], *, categories: bool = False, first: int = 0
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the columns of features, and why others are left out."""
    left = {}
    for name, column in columns.items():
        few = categories and column.repeats and column.distinct <= MOST_CLASSES
        if column.missing.mean() > MOST_MISSING:
            left[name] = f"{100 * column.missing.mean():.0f} % missing"
        elif column.distinct < 2:
            left[name] = "always the same"
        elif column.numbers is None and (column.dated or not few):
            left[name] = "dates" if column.dated else _explain_text(name, column, first)
        elif counts_rows(name, column):
            left[name] = "numbers the rows"
        elif column.whole and "id" in words_of(name):
            left[name] = "an identifier by its name"
        elif column.largest > LARGEST:
            left[name] = f"numbers beyond {LARGEST:.2g}, with which no model computes"
    return tuple(name for name in columns if name not in left), left


def _explain_text(name: str, column: Column, first: int) -> str:
    """Say that a column is of texts, or which of its cells makes it one."""
    if column.stray is None:
        cell = column.undated
        if match_names([name], TIMES) and any(map(str.isdigit, cell)):
            return f"text; named like a time, but {shown(cell)} is not ISO 8601, such as 2024-01-29T13:00, nor seconds"
        return "text"
    numbers, row = column.stray
    cell, count = shown(str(column.cell(row))), int((~column.missing).sum())
    return f"{numbers:,} of {count:,} are numbers, row {first + row} is {cell}: correct it or write NA"


def _named(columns: Iterable[str], text: str, option: str) -> tuple[str, ...]:
    """Return the columns that a person names; `option` begins messages."""
    names = tuple(part.strip() for part in text.split(",") if part.strip()) if text not in columns else (text,)
    for name in names:
        if name not in columns:
            raise FedtideError(f"{option}: no column '{name}'; {nearest(name, list(columns))}")
    if option.endswith(("client", "label", "domain")) and len(names) > 1:
        raise refused(option, text, "one column")
    return tuple(dict.fromkeys(names))


def when_of(name: str, rows: np.ndarray, columns: Mapping[str, np.ndarray], zone: str | None) -> tuple[np.ndarray, str]:
    """Return seconds since 1970 of one column, or of the columns of a date, and the unit of a column of numbers.

    `rows` are numbers for messages.
    """
    if len(columns) == 2:  # a date and an hour
        date, hour = columns.items()
        return when_of(name, rows, dict([date]), zone)[0] + 3600.0 * np.array([float(value) for value in hour[1]]), ""
    if len(columns) > 2:
        parts = [np.array([int(float(value)) for value in column]) for column in columns.values()]
        year, month, day, *rest = parts
        since = np.array(year - 1970, "datetime64[Y]").astype("datetime64[M]") + (month - 1)
        times = (since.astype("datetime64[D]") + (day - 1)).astype("datetime64[s]").astype(np.float64)
        return local(times + sum(part * unit for part, unit in zip(rest, (3600, 60, 1), strict=False)), zone), ""
    column, values = next(iter(columns.items()))
    if values.dtype.kind in "OU" and isinstance(values[0], str):
        values = np.array([str(value).strip() for value in values.tolist()])
    times, unit = seconds_of(values, lambda row: f"{name}: row {rows[row]}: {column}")
    return local(times, zone), unit


def local(utc: np.ndarray, zone: str | None) -> np.ndarray:
    """Return seconds as the clocks of a zone have them; None leaves them.

    >>> (local(np.array([0.0]), "Europe/Berlin") / 3600).tolist()
    [1.0]
    """
    if zone is None:
        return utc.astype(np.float64)
    try:
        timezone = zone_of(zone)
    except ValueError as error:
        raise FedtideError(f"--zone: {error}") from None
    hours, place = np.unique(np.floor(utc / 3600), return_inverse=True)
    shifts = [datetime.fromtimestamp(hour * 3600, UTC).astimezone(timezone).utcoffset() for hour in hours]
    return utc + np.array([shift.total_seconds() if shift else 0.0 for shift in shifts])[place]
