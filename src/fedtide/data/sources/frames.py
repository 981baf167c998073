"""Rows of data frames, tables and data sets in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.data.rows import Rows, with_target
from fedtide.data.sources.arrays import from_arrays
from fedtide.data.sources.cells import Column, columns_of, read_columns
from fedtide.data.sources.files import find
from fedtide.data.sources.guesses import (
    CLIENTS,
    GUESSED,
    LABELS,
    MOST_CLASSES,
    Assigned,
    Roles,
    assign,
    join_columns,
    match_names,
    when_of,
)
from fedtide.data.sources.tabular import Columns
from fedtide.data.sources.when import describe_span
from fedtide.data.targets import Number, Setting
from fedtide.draw.prose import listed
from fedtide.fields.types import Spelled, ingredient
from fedtide.learn.target import CLASSES

MISSING = ("error", "drop", "mean")


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
    missing: str = "error",
    scaled: bool = False,
    quiet: bool = False,
) -> Rows:
    """Return the rows of a table. Columns that are not named are guessed by name and type, and printed.

    Args:
        data: a data frame (pandas, polars, pyarrow), a mapping of columns, or a CSV or Parquet file, or several.
        label: column of the label: whole numbers from 0, or names; by default one with a label-like name, or the last.
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
        quiet: print nothing; `rows.said` has the same lines.

    >>> import numpy as np
    >>> x, user = np.arange(40.0) % 7, np.repeat(["ann", "bob"], 20)
    >>> rows = table({"x": x, "wind": ["N", "E"] * 20, "user": user, "label": x > 3}, quiet=True)
    >>> print(*rows.said, sep="\\n")
    table: 40 rows
    label: label (2 classes); client: user (2 values); domain: none; time: none; features: x and wind (categories)
    """
    if missing not in MISSING:
        raise unknown("missing", missing, MISSING)
    name, columns = _read(data)
    rows = len(next(iter(columns.values())).values)
    if not rows:
        raise FedtideError(f"{name}: no rows")
    label, client, time, features, domain = map(join_columns, (label, client, time, features, domain))
    roles = Roles(label, client, time, features, domain=domain, option="")
    assigned = assign(name, columns, roles, categories=True)
    if not assigned.features:
        raise FedtideError(f"{name}: no feature columns besides {assigned.label}")
    keep = _keep(name, columns, assigned, missing)
    taken = [column for column in (assigned.client, assigned.domain) if column]
    texts = {column: columns[column].texts[keep].tolist() for column in taken}
    times = {column: columns[column].values[keep] for column in assigned.time}
    numbers = [column for column in assigned.features if columns[column].numbers is not None]
    categories = [column for column in assigned.features if column not in numbers]
    measures = [np.asarray(columns[column].numbers)[keep] for column in numbers]
    measured = np.stack(measures, 1) if measures else np.empty((len(keep), 0))
    when, unit = when_of(name, keep, times, None) if times else (None, "")
    setting = _target(target, columns[assigned.label], len(keep), cuts)
    result = Columns(
        assigned.features,
        np.where(np.isfinite(measured), measured, np.nan),
        {column: np.where(columns[column].missing, "", columns[column].texts)[keep].tolist() for column in categories},
        _label(name, assigned.label, columns[assigned.label], keep, cuts, measured=setting != CLASSES),
        client=texts[assigned.client] if assigned.client else None,
        domain=texts[assigned.domain] if assigned.domain else None,
        time=when,
    ).rows(name, scaled=scaled, measured=setting != CLASSES)
    result = replace(result, classes=len(cuts) + 1) if cuts else with_target(result, setting)
    result = replace(result, said=tuple(_describe(result, rows, assigned, categories, unit)))
    if not quiet and None in (label, client, domain, time):
        print(*result.said, sep="\n", file=sys.stderr)
    return result


def _read(data: Any) -> tuple[str, dict[str, Column]]:
    """Return a name for messages, and the columns."""
    paths = [data] if isinstance(data, str | Path) else data
    if isinstance(paths, Sequence) and paths and all(isinstance(path, str | Path) for path in paths):
        files = [find(str(path), None, "table", hint="name a CSV or Parquet file") for path in paths]
        return files[0].name if len(files) == 1 else f"{len(files)} files", read_columns(files)
    return "table", columns_of(data, "table")


def _keep(name: str, columns: dict[str, Column], roles: Assigned, missing: str) -> np.ndarray:
    """Return positions of the rows that are kept; raise if something is missing that must not be."""
    needed = [
        name_of_column for name_of_column in (roles.label, roles.client, roles.domain, *roles.time) if name_of_column
    ]
    seen = needed if missing == "mean" else [*needed, *roles.features]
    keep = np.ones(len(columns[needed[0]].values), bool)
    for column in seen:
        gaps = columns[column].missing
        if missing == "error" and gaps.any():
            row = int(gaps.argmax())
            raise refused(
                f"{name}: row {row}: {column}",
                columns[column].cell(row),
                "a value; missing='drop' leaves such rows out, 'mean' fills features",
            )
        keep &= ~gaps
    if not keep.any():
        raise FedtideError(f"{name}: something is missing in every row of {', '.join(seen)}")
    return np.flatnonzero(keep)


@ingredient
class _Target:
    """The target that a person names."""

    target: Annotated[Setting, Field(discriminator="kind"), Spelled] = CLASSES


def _target(target: Any, column: Column, rows: int, cuts: Sequence[float]) -> Setting:
    """Return the named target, or the one that fits the values of the label."""
    if target is not None:
        if cuts and target != "classes":
            raise refused("table: cuts", list(cuts), "none with a target, because cuts make classes")
        return _Target(target).target
    return Number() if not cuts and column.numbers is not None and _is_measure(column, rows) else CLASSES


def _is_measure(column: Column, rows: int) -> bool:
    return not column.whole or column.distinct > max(MOST_CLASSES, rows // 2)


def _label(name: str, label: str, column: Column, keep: np.ndarray, cuts: Sequence[float], *, measured: bool) -> Any:
    """Return the classes of the rows that are kept, or the values of a label that is measured."""
    if measured:
        if column.numbers is None:
            raise refused(f"{name}: label", label, "a column of numbers, or target='classes'")
        with np.errstate(over="ignore"):  # infinite labels are refused later
            return column.numbers[keep].astype(np.float32)
    if cuts:
        if column.numbers is None:
            raise refused(f"{name}: label", label, "a column of numbers, because cuts make classes of numbers")
        return np.searchsorted(np.asarray(cuts, np.float64), column.numbers[keep], side="right")
    if column.numbers is None:
        return column.texts[keep].tolist()
    if _is_measure(column, len(keep)):
        many = f"a measure with {column.distinct:,} values"
        raise refused(f"{name}: label '{label}'", many, "classes; cuts=[...] makes classes of a measure")
    return column.numbers[keep].astype(np.int64)


def _describe(rows: Rows, total: int, roles: Assigned, categories: Sequence[str], unit: str) -> Iterator[str]:
    """Say which column is what."""
    client = f"{roles.client} ({len(rows.client_names):,} values)" if roles.client else "none"
    domain = f"{roles.domain} ({len(rows.domain_names):,} values)" if roles.domain else "none"
    names = [f"{name} (categories)" if name in categories else name for name in roles.features]
    shown = listed([*names[:4], f"{len(names) - 4} more"]) if len(names) > 5 else listed(names)
    time = "none" if rows.time is None else f"{', '.join(roles.time)} ({describe_span(rows.time.numpy(), unit)})"
    lack = total - len(rows)
    yield f"{rows.name}: {total:,} rows" + (f", {lack:,} left out because something is missing" if lack else "")
    kind = rows.labeled
    if rows.value is not None:
        kind = f"{kind} from {float(rows.value.min()):g} to {float(rows.value.max()):g}"
    label = f"{roles.label} ({kind}{GUESSED if roles.guessed else ''})"
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
    x, others = [], [list[Any]() for _ in keys[1:]]
    for row in range(len(data)):
        item = first if not row else data[row]
        x.append(_features(item[keys[0]]))
        if x[row].shape != x[0].shape:
            raise refused(f"{name}: item {row}: shape", x[row].shape, f"{x[0].shape}, as of the first")
        for column, key in zip(others, keys[1:], strict=True):
            value = np.asarray(item[key])
            if value.ndim:
                raise refused(f"{name}: item {row}: shape of {key!r}", value.shape, "one value")
            column.append(value.item())
    return from_arrays(name, np.stack(x).astype(x[0].dtype), *others)


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
        raise refused(
            f"{name}", shown, "one key for the features and one for the label; features= and label= name them"
        )
    return (free[0], label, *([client] if client else []))


def _features(value: Any) -> np.ndarray:
    array = np.atleast_1d(np.asarray(value))
    # Pictures of Pillow have their channels last.
    return array.transpose(2, 0, 1) if array.ndim == 3 and hasattr(value, "getbands") else array
