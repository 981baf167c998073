"""Which column of a table is what: by its name and type, or as a person says."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedtide.core.errors import FedtideError, nearest, refused, shown, unknown
from fedtide.data.rows import Rows, with_target
from fedtide.data.sources.arrays import from_arrays
from fedtide.data.sources.cells import CLOCKS, Cells, Column, cells_of, describe_spelling, read_cells, words_of
from fedtide.data.sources.dates import FORMS
from fedtide.data.sources.files import find
from fedtide.data.sources.table_files import Spelling
from fedtide.data.sources.tabular import CSV, Missing
from fedtide.data.targets import Number, Setting
from fedtide.draw.prose import listed
from fedtide.fields.types import LARGEST, Spelled, Strict, as_written, zone_of
from fedtide.learn.target import CLASSES

MOST_CLASSES = 100
"""Different whole numbers up to which a label is a class; more are a measure."""
MEMBERS, DIFFERENT = 20, 0.02
"""Rows of a category, on average, and the explained share of a variance, from which it may be a client."""
MOST_MISSING = 0.2
"""Share of the rows that a feature may lack; others are left out."""
MISSING = "% missing"
"""Why such a column is left out, behind the percentage."""

LABELS = "label labels y target targets class classes category outcome response species activity gesture diagnosis word"
OUTCOMES = (
    "kind type status result quality grade rating score delay price sales demand cnt count churn default fraud "
    "survived income"
)
CLIENTS = (
    "client user subject person device station writer speaker author household house home patient hospital site shop "
    "store customer member participant node sensor account machine turbine vehicle driver rider phone owner "
    "owneruserid carrier airline operator company branch bank clinic ward school region country city who"
)
TIMES = "time timestamp datetime date when created creationdate dteday ts recorded observed"
DATES = {"date", "datetime", "timestamp"}
"""Words in the names of columns that are times, and never features."""
DOMAINS = "domain group"
HOURS = "hour hours hr"
"""Names of a column with the hour, beside one with the date."""
CALENDAR = frozenset((
    "year", "yr", "month", "mnth", "mo", "day", "weekday", "dow", "hour",
    "hr", "minute", "second", "week", "season", "holiday", "workingday", "weekend", "quarter",
))  # fmt: skip
"""Words in the names of columns that repeat the time."""
DATE = ("year", "month", "day", "hour", "minute", "second")
ORDERS = "index idx instant no nr num row rownum rowid number record id key uuid unnamed"
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
    divided by commas. time_format: how times are written. option: prefix of the name of a role in messages.
    """

    label: str | None = None
    client: str | None = None
    time: str | None = None
    features: str | None = None
    zone: str | None = None
    domain: str | None = ""
    without: str | None = None
    time_format: str | None = None
    option: str = "--"


@dataclass(frozen=True)
class Assigned:
    """Columns by role.

    left: other columns, and why they are no features. guessed: remark on a label that no person named, and whose name
    is not label-like.
    """

    label: str
    client: str | None
    domain: str | None
    time: tuple[str, ...]
    features: tuple[str, ...]
    left: Mapping[str, str]
    guessed: str = ""


def assign(name: str, cells: Cells, roles: Roles, *, categories: bool = False) -> Assigned:
    """Assign a role to each column.

    Args:
        name: name of the table, for messages.
        cells: all columns.
        roles: the columns that a person names.
        categories: whether texts that repeat are features, too.

    Raises:
        FedtideError: a named column does not exist or has two roles, or no column looks like a label.
    """

    def option(role: str) -> str:
        return f"{name}: {roles.option}{role}"

    columns = cells.columns
    named = {role: _named(columns, text, option(role)) for role in ROLES if (text := getattr(roles, role)) is not None}
    for one, other in combinations(named, 2):
        both = [column for column in named[other] if column in named[one]]
        if both and (one, other) != ("time", "features"):  # an hour is both
            raise refused(option(other), both[0], "another column", f"{roles.option}{one} names it, too")
    without = named.pop("without", ())
    cells = replace(cells, columns={name: column for name, column in columns.items() if name not in without})
    columns = cells.columns
    chosen: dict[str, tuple[str, ...]] = {role: named.get(role, ()) for role in ROLES[:-1]}

    def free(*assigned: str) -> Cells:
        taken = {column for role in assigned for column in chosen[role]}
        return replace(cells, columns={name: column for name, column in columns.items() if name not in taken})

    for role, guess in GUESSES.items():
        if role not in named:  # an hour is part of a time and a feature
            others = [other for other in chosen if other != role and (role, other) != ("time", "features")]
            chosen[role] = guess(free(*others).columns)
    if roles.zone is not None and not chosen["time"]:
        allowed = f"with a column of the time ({roles.option}time)"
        raise refused(option("zone"), roles.zone, allowed, "no column looks like one")
    constant = [column for column in columns if column.strip().lower() == "label" and columns[column].distinct < 2]
    if "label" not in named and constant:
        other = f"name another label with {roles.option}label"
        raise FedtideError(f"{name}: the column {constant[0]} has only one value; {other}")
    if len(chosen["label"]) != 1:
        allowed = f"{roles.option}label with one of {', '.join(columns)}"
        raise FedtideError(f"{name}: no column looks like a label; allowed: {allowed}")
    time, label, left = chosen["time"], chosen["label"], dict[str, str]()
    if "features" not in named:
        hint = "" if time else ": use --time "
        features, left = guess_features(free("time", "client", "domain", "label"), hint, categories=categories)
        # Hours and months of a time in several columns tell something of the label, too.
        hours = tuple(
            column for column in time[1:]
            if column.strip().lower() in (*HOURS.split(), "month") and columns[column].numbers is not None
        )  # fmt: skip
        chosen["features"] = features + hours
    guessed = ""
    if "label" not in named:
        unique = [column for column in left if column.strip().lower() in LABELS.split()
                  and columns[column].distinct >= 2 and not columns[column].repeats]  # fmt: skip
        left |= {name: f"named like a label, but almost every value is unique: {left[name]}" for name in unique}
        if not match_names(label, LABELS):
            guessed = ", guessed by its name" if match_names(label, OUTCOMES) else GUESSED
            guessed = f", guessed because {unique[0]} has almost only unique values" if unique else guessed
    left |= dict.fromkeys(without, ASKED)
    for feature in chosen["features"]:
        if columns[feature].dated or (columns[feature].numbers is None and not categories):
            kind = "numbers, or of texts that come again" if categories else "numbers"
            why = "" if columns[feature].stray is None else _explain_text(feature, cells)
            raise refused(option("features"), feature, f"columns of {kind}", why)
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
        exact = [name for name in match_names(columns, HOURS) if name.strip().lower() in HOURS.split()]
        hours = [name for name in exact if columns[name].whole] or [
            name for name in columns if columns[name].clock is not None and columns[name].numbers is None
        ]
        return (first, *hours[:1]) if columns[first].days else (first,)
    at = {name.strip().lower(): name for name in columns}
    if all(part in at and columns[at[part]].whole for part in DATE[:3]):
        rest = [part for part in DATE[3:] if part in at and columns[at[part]].whole]
        return tuple(at[part] for part in (*DATE[:3], *rest))
    numbers = [name for name in match_names(columns, "time timestamp ts datetime") if columns[name].numbers is not None]
    return tuple(numbers[:1])


def guess_client(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the column of the client: one with such a name, whose values come twice or more often on average."""
    named = ((name, columns[name]) for name in match_names(columns, CLIENTS))
    able = (name for name, column in named
            if (column.numbers is None or column.whole) and column.missing.mean() <= 0.5)  # fmt: skip
    return tuple(name for name in able if 2 <= columns[name].distinct <= len(columns[name]) / 2)[:1]


def find_groups(columns: Mapping[str, Column], names: Iterable[str], measured: Sequence[str]) -> list[str]:
    """Return the columns of categories between which rows differ: each may be the column of the client.

    Args:
        names: those that may be one.
        measured: columns of numbers, in which rows may differ.
    """
    groups_of_rows = []
    for name in names:
        column = columns[name]
        if column.numbers is not None or column.dated or not 3 <= column.distinct <= len(column) / MEMBERS:
            continue
        _, group = np.unique(column.texts, return_inverse=True)
        if any(_explained(columns[measure].parsed[0], group) > DIFFERENT for measure in measured):
            groups_of_rows.append(name)
    return groups_of_rows


def _explained(values: np.ndarray, group: np.ndarray) -> float:
    """Return the share of the variance that groups explain, less what they explain by chance."""
    present = ~np.isnan(values)
    values, group = values[present] - values[present].mean(), group[present]
    rows, total = np.bincount(group), float((values**2).sum())
    groups = np.count_nonzero(rows)
    if not total or len(values) <= groups:
        return 0.0
    between = float((np.bincount(group, values) ** 2 / np.maximum(rows, 1)).sum())
    return 1 - (1 - between / total) * (len(values) - 1) / (len(values) - groups)


def guess_domain(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the column of the domain: one that is called so, with few values."""
    named = (name for name in columns if name.strip().lower() in DOMAINS.split())
    return tuple(name for name in named if 2 <= columns[name].distinct <= MOST_CLASSES)[:1]


def guess_label(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the column of the label: one with such a name, or else the last one of texts, classes or numbers.

    A label comes again, and is no time, part of a date, identifier, number of the row or copy of another column.
    """
    copies = find_copies(columns)
    able = [
        name
        for name, column in columns.items()
        if column.repeats and not (column.other or column.dated or column.unclear or counts_rows(name, column))
        and not (CALENDAR | DATES | {"id"}) & {*words_of(name)} and not is_key(name, column)
        and name not in copies
    ]  # fmt: skip
    others = [name for name in able if not columns[name].counted_since]
    few = [name for name in others if columns[name].distinct <= MOST_CLASSES]
    return tuple(
        match_names(able, LABELS)[:1]
        or [name for name in able if name in match_names(able, OUTCOMES)][-1:]
        or [name for name in few if columns[name].numbers is None or columns[name].boolean][-1:]
        or [name for name in few if columns[name].whole][-1:]
        or others[-1:]
    )


def is_key(name: str, column: Column) -> bool:
    """Tell whether a column names each row, in any order."""
    return bool(set(words_of(name)) & set(ORDERS.split())) and column.whole and column.distinct == len(column)


def find_copies(columns: Mapping[str, Column]) -> dict[str, str]:
    """Return the columns that repeat another one, with the name of the first such column."""
    first = dict[bytes, str]()
    origins = {name: first.setdefault(column.digest, name) for name, column in columns.items() if column.distinct > 1}
    return {name: origin for name, origin in origins.items() if origin != name}


def counts_rows(name: str, column: Column) -> bool:
    """Tell whether a column numbers the rows: it would tell the time, or the file, and nothing else."""
    if not column.whole or not set(words_of(name) or ["unnamed"]) & set(ORDERS.split()):
        return False
    # One by one, or in equal steps, as rows were left out; and anew in every file.
    steps = np.diff(column.parsed[0])
    return len(steps) > 0 and bool(steps[0] > 0) and bool((steps == steps[0]).mean() > 0.95)


def guess_features(cells: Cells, hint: str = "", *, categories: bool = False) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the columns of features, and why others are left out; `hint` ends with the option of the time."""
    left, copies = {}, find_copies(cells.columns)
    for name, column in cells.columns.items():
        few = categories and column.repeats and column.distinct <= MOST_CLASSES
        if column.other:
            left[name] = column.other
        elif column.dated or column.unclear or DATES & {*words_of(name)}:
            left[name] = "dates" if column.dated else _explain_text(name, cells)
        elif column.missing.mean() > MOST_MISSING:
            left[name] = f"{100 * column.missing.mean():.0f} {MISSING}"
        elif column.distinct < 2:
            left[name] = "always the same"
        elif column.numbers is None and not few:
            left[name] = _explain_text(name, cells)
        elif counts_rows(name, column) or is_key(name, column):
            left[name] = "numbers the rows"
        elif name in copies:
            left[name] = f"a copy of {copies[name]}"
        elif column.whole and "id" in words_of(name):
            left[name] = "an identifier by its name"
        elif column.counted_since:
            left[name] = f"looks like {column.counted_since}{hint and hint + name}"
        elif column.largest > LARGEST:
            left[name] = _explain_large(name, cells)
    return tuple(name for name in cells.columns if name not in left), left


GUESSES = {"time": guess_time, "client": guess_client, "domain": guess_domain, "label": guess_label}
"""Functions that guess the column of each role, in the order of asking."""


def _explain_text(name: str, cells: Cells) -> str:
    """Say that a column is of texts, or which of its cells makes it one."""
    column = cells.columns[name]
    if column.stray is None:
        if column.clock is not None:
            return CLOCKS
        if column.unit:
            return f"numbers in {column.unit}"
        if column.unclear:
            unclear = "dates of which no cell tells whether the day or the month comes first"
            return f"{unclear}: use --time-format day-month-year or month-day-year"
        if DATES & {*words_of(name)} or (column.named_as_time and column.numbers is None):
            row = column.first_wrong_time()
            row = int((~column.missing).argmax()) if row is None else row
            cell, place = shown(str(column.cell(row))), cells.where(row).rpartition(": ")[2]
            but = "correct it, or say the form with --time-format" if column.form is None else f"not '{column.form}'"
            return f"named like a time, but {place} is {cell}: {but}"
        return column.other or "text"
    numbers, row = column.stray
    cell, count, place = shown(str(column.cell(row))), len(column.cells), cells.where(row).rpartition(": ")[2]
    return f"{numbers:,} of {count:,} are numbers, {place} is {cell}: correct it or write NA"


def _explain_large(name: str, cells: Cells) -> str:
    """Say which cell of a column is the first that is too large for a model."""
    column = cells.columns[name]
    assert column.numbers is not None
    row = int((np.abs(column.numbers) > LARGEST).argmax())
    cell, place = shown(str(column.cell(row))), cells.where(row).rpartition(": ")[2]
    return f"{place} is {cell}: no model computes with numbers beyond {LARGEST:.2g}"


def _named(columns: Iterable[str], text: str, option: str) -> tuple[str, ...]:
    """Return the columns that a person names; `option` begins messages."""
    names = tuple(part.strip() for part in text.split(",") if part.strip()) if text not in columns else (text,)
    for name in names:
        if name not in columns:
            raise FedtideError(f"{option}: no column '{name}'; {nearest(name, list(columns))}")
    if option.endswith(("client", "label", "domain")) and len(names) > 1:
        raise refused(option, text, "one column")
    return tuple(dict.fromkeys(names))


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


def table(
    data: Any,
    *,
    label: str | None = None,
    client: str | None = None,
    domain: str | None = None,
    time: str | Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    target: Any = None,
    cuts: Sequence[float] = (),
    missing: Missing = "error",
    scaled: bool = False,
    time_format: str | None = None,
    quiet: bool = False,
) -> Rows:
    """Return the rows of a table. Columns that are not named are guessed by name and type, and printed.

    Args:
        data: a data frame (pandas, polars, pyarrow), a mapping of columns, or a CSV or Parquet file, or several.
        label: column of the label: whole numbers from 0, or names; by default one with a label-like name, else the last
            one that may be a label.
        client: column of the natural client; by default one with a name like user or station; "" for none.
        domain: column of the domain; by default one that is called domain or group; "" for none.
        time: column of the time, or those of a date; by default the one with dates; "" for none. Dates of any kind,
            seconds, or ISO 8601; without a time zone they are in UTC.
        features: columns of the features; by default all other numbers, and texts that come again. Each category of a
            text becomes a feature of 0 or 1.
        target: "classes", "number", "quantiles" or "counts", or one of `fedtide.data` such as `Number(loss="huber")`.
            By default it is "number" if the label is a measure with many values, else "classes".
        cuts: ascending thresholds for a label that is a measure; its class is the number of thresholds that it reaches.
        missing: "error" raises for a missing cell, "drop" leaves such rows out. With "mean" the mean of the known rows
            replaces a number, and a missing category belongs to no category. Rows without one of the other columns are
            left out.
        scaled: standardize each number by its mean and standard deviation over the known rows. If rows have a time, the
            earliest tenth is known, else all rows, and in a population its training rows.
        time_format: how times are written, such as "day-month-year"; by default as the cells tell.
        quiet: print nothing; `rows.said` has the same lines.

    >>> import numpy as np
    >>> x, user = np.arange(40.0) % 7, np.repeat(["ann", "bob"], 20)
    >>> rows = table({"x": x, "wind": ["N", "E"] * 20, "user": user, "label": x > 3}, quiet=True)
    >>> print(*rows.said, sep="\\n")
    table: 40 rows
    label: label (2 classes); client: user (2 values); domain: none; time: none; features: x and wind (categories)
    """
    if time_format not in (None, *FORMS):
        raise unknown("time_format", str(time_format), FORMS)
    name, cells = _read(data, Spelling(time_format=time_format))
    columns = cells.columns
    label, client, time, features, domain = map(join_columns, (label, client, time, features, domain))
    roles = assign(name, cells, Roles(label, client, time, features, domain=domain, option=""), categories=True)
    if not roles.features:
        raise FedtideError(f"{name}: no feature columns besides {roles.label}")
    categories = tuple(column for column in roles.features if columns[column].numbers is None)
    setting = _target(name, target, roles.label, columns[roles.label], cuts)
    times = roles.time[0] if len(roles.time) == 1 else roles.time or None
    settings = (tuple(cuts), roles.client, roles.domain, times, roles.features, categories, missing, scaled)
    try:
        rows = CSV("table", roles.label, *settings).rows(name, cells, measured=setting != CLASSES)
    except FedtideError as error:
        raise FedtideError(str(error).replace("data.source.", "")) from None
    rows = rows if cuts else with_target(rows, setting)
    numbers = [column for column in roles.features if column not in categories]
    lines = (*_describe(rows, len(cells), roles, categories), *describe_spelling(cells, numbers, roles.label))
    rows = replace(rows, said=lines)
    if not quiet and None in (label, client, domain, time):
        print(*rows.said, sep="\n", file=sys.stderr)
    return rows


def _read(data: Any, spelling: Spelling) -> tuple[str, Cells]:
    """Return a name for messages, and the columns."""
    paths = [data] if isinstance(data, str | Path) else data
    if isinstance(paths, Sequence) and paths and all(isinstance(path, str | Path) for path in paths):
        files = [find(str(path), None, "table", hint="name a CSV or Parquet file") for path in paths]
        return files[0].name if len(files) == 1 else f"{len(files)} files", read_cells(files, spelling=spelling)
    return "table", cells_of(data, "table", spelling)


class _Options(Strict):
    """Arguments of `table` that are read as in a file."""

    target: Annotated[Setting, Field(discriminator="kind"), Spelled] = CLASSES


def _target(name: str, target: Any, label: str, column: Column, cuts: Sequence[float]) -> Setting:
    """Return the named target, or the one that fits the values of the label; raise for a label that does not fit."""
    if cuts and target not in (None, "classes"):
        raise refused("table: cuts", list(cuts), "none with a target, because cuts make classes")
    measure = column.numbers is not None and (not column.whole or column.distinct > max(MOST_CLASSES, len(column) // 2))
    setting: Setting = Number() if measure and not cuts else CLASSES
    if target is not None:
        setting = as_written("table", _Options, {"target": target})["target"]
    if column.numbers is None and (cuts or setting != CLASSES):
        allowed = "a column of numbers, because cuts make classes of numbers" if cuts else "a column of numbers"
        raise refused(f"{name}: label", label, allowed)
    if measure and not cuts and setting == CLASSES:
        many = f"a measure with {column.distinct:,} values"
        raise refused(f"{name}: label '{label}'", many, "classes; cuts=[...] makes classes of a measure")
    return setting


def _describe(rows: Rows, total: int, roles: Assigned, categories: Sequence[str]) -> Iterator[str]:
    """Say which column is what."""
    client = f"{roles.client} ({len(rows.client_names):,} values)" if roles.client else "none"
    domain = f"{roles.domain} ({len(rows.domain_names):,} values)" if roles.domain else "none"
    names = [f"{name} (categories)" if name in categories else name for name in roles.features]
    shown = listed([*names[:4], f"{len(names) - 4} more"]) if len(names) > 5 else listed(names)
    time = next((line.removeprefix("time: ") for line in rows.said if line.startswith("time: ")), "none")
    lack = total - len(rows)
    yield f"{rows.name}: {total:,} rows" + (f", {lack:,} left out because something is missing" if lack else "")
    kind = rows.labeled
    if rows.value is not None:
        kind = f"{kind} from {float(rows.value.min()):g} to {float(rows.value.max()):g}"
    label = f"{roles.label} ({kind}{roles.guessed})"
    yield f"label: {label}; client: {client}; domain: {domain}; time: {time}; features: {shown}"
    if roles.left:
        yield f"left out: {listed([f'{name} ({why})' for name, why in roles.left.items()])}"


ALLOWED = "pairs (features, label), or mappings with a label"


def stack(data: Any, *, features: str | None = None, label: str | None = None, client: str | None = None) -> Rows:
    """Return the rows of a data set with a length and an item for each number, such as a map-style data set of torch.

    Items are pairs of features and a label, or mappings, as those of Hugging Face. Pictures of Pillow are taken as
    bytes (channels, height, width). Every item is read once and kept.

    Args:
        data: the data set.
        features: key of the features in mappings; by default the only one that is neither label nor client.
        label: key of the label; by default one with a label-like name.
        client: key of the natural client; by default one with a name like user or writer, "" for none.

    >>> stack([([0.5, 1.0], 0), ([1.5, 2.0], 1)]).x.tolist()
    [[0.5, 1.0], [1.5, 2.0]]
    """
    name = type(data).__name__
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise refused("data set", name, "one with a length, and an item for each number")
    if not len(data):
        raise FedtideError(f"{name}: no items")
    keys: tuple[Any, ...] = (0, 1)
    first = data[0]
    if isinstance(first, Mapping):
        keys = _keys(name, [str(key) for key in first], features, label, client)
    elif not (isinstance(first, tuple | list) and len(first) == 2):
        raise refused(f"{name}: item 0", type(first).__name__, ALLOWED)
    like, others = _features(first[keys[0]]), [list[Any]() for _ in keys[1:]]
    x = np.empty((len(data), *like.shape), like.dtype)
    for row in range(len(data)):
        item = first if not row else data[row]
        features_of = _features(item[keys[0]])
        if features_of.shape != like.shape:
            raise refused(f"{name}: item {row}: shape", features_of.shape, f"{like.shape}, as of the first")
        x[row] = features_of  # a copy: a data set may return the same array again and again
        for column, key in zip(others, keys[1:], strict=True):
            value = np.asarray(item[key])
            if value.ndim:
                raise refused(f"{name}: item {row}: shape of {key!r}", value.shape, "one value")
            column.append(value.item())
    y, *clients = others
    return from_arrays(name, x, y, client=clients[0] if clients else None)


def _keys(name: str, keys: list[str], features: str | None, label: str | None, client: str | None) -> tuple[str, ...]:
    """Return the keys of features and label, and of the client if there is one."""
    for key in (features, label, client):
        if key and key not in keys:
            raise refused(f"{name}: item 0", key, f"one of {', '.join(keys)}")
    free = [key for key in keys if key not in (features, label, client)]
    label = label or next(iter(match_names(free, LABELS)), None)
    free = [key for key in free if key != label]
    client = next(iter(match_names(free, CLIENTS)), None) if client is None else client
    free = [features] if features else [key for key in free if key != client]
    if label is None or len(free) != 1:
        shown = f"items with {', '.join(keys)}"
        allowed = "one key for the features and one for the label; features= and label= name them"
        raise refused(name, shown, allowed)
    return (free[0], label, *([client] if client else []))


def _features(value: Any) -> np.ndarray:
    array = np.atleast_1d(np.asarray(value))
    # Pictures of Pillow have their channels last.
    return array.transpose(2, 0, 1) if array.ndim == 3 and hasattr(value, "getbands") else array
