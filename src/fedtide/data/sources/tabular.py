"""Tables with a row per sample and columns for label, client, domain and time, in one or several files."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from fedtide.core.errors import FedtideError, refused
from fedtide.data.rows import Fit, Rows, find_earliest, find_known_rows, with_learned
from fedtide.data.sources.arrays import center_and_spread, check_filled, from_arrays
from fedtide.data.sources.cells import (
    DECIMAL_COMMA,
    Cells,
    NotANumber,
    all_seconds,
    dates,
    describe_span,
    find_places,
    is_missing,
    is_number,
    number,
    numbers_of,
    read_cells,
    read_names,
)
from fedtide.data.sources.files import Loading, find
from fedtide.fields.types import Finite, Flag, Positive, explained, ingredient

MOST_CATEGORIES = 100
"""Categories that a column may have: each becomes a feature."""


@dataclass(frozen=True)
class Encoder:
    """Encoding of columns as features, found in the rows that are known when training begins.

    names: names of the columns, in the order of their features. means: means of the columns of numbers, for missing
    cells. categories: categories of the columns of texts, in the order of their features. center, spread: constants by
    which numbers are standardized; None if numbers are not standardized.
    """

    names: tuple[str, ...]
    means: np.ndarray
    categories: Mapping[str, tuple[str, ...]]
    center: np.ndarray | None = None
    spread: np.ndarray | None = None

    @staticmethod
    def of(
        name: str,
        names: Sequence[str],
        numbers: np.ndarray,
        texts: Mapping[str, Sequence[str]],
        rows: np.ndarray,
        *,
        scaled: bool,
    ) -> "Encoder":
        """Find means and categories in the rows at some positions, and the center and spread of numbers if `scaled`.

        Raises:
            FedtideError: a column has nothing there, or too many categories.
        """
        means, categories = np.zeros(numbers.shape[1]), {}
        measures = [column for column in names if column not in texts]
        for place, column in enumerate(measures):
            values = numbers[rows, place]
            values = values[~np.isnan(values)]
            if not len(values):
                raise FedtideError(f"{name}: {column}: no number in the {len(rows)} rows known when training begins")
            means[place] = values.mean()
        for column, cells in texts.items():
            categories[column] = tuple(sorted({cell for cell in map(cells.__getitem__, rows) if not is_missing(cell)}))
            if not categories[column]:
                raise FedtideError(f"{name}: {column}: no category in the {len(rows)} rows known when training begins")
            if (count := len(categories[column])) > MOST_CATEGORIES:
                allowed = f"{MOST_CATEGORIES} at most, because each becomes a feature"
                raise refused(f"{name}: {column}", f"{count} categories", allowed)
        encoder = Encoder(tuple(names), means, categories)
        if not scaled:
            return encoder
        center, spread = center_and_spread(encoder._filled(numbers)[rows].astype(np.float64))
        return replace(encoder, center=center, spread=spread)

    def __call__(self, numbers: np.ndarray, texts: Mapping[str, Sequence[str]]) -> np.ndarray:
        """Return features (rows, width); a category that is missing or unknown is none of those there are."""
        x = self._filled(numbers)
        if self.center is not None:
            x = ((x - self.center) / self.spread).astype(np.float32)
        if not self.categories:
            return x
        parts, measures = [], iter(x.T)
        for name in self.names:
            if name not in self.categories:
                parts.append(next(measures)[:, None])
                continue
            place = {text: at for at, text in enumerate(self.categories[name])}
            at = np.array([place.get(text, -1) for text in texts[name]])
            parts.append((at[:, None] == np.arange(len(place))).astype(np.float32))
        return np.concatenate(parts, 1)

    def _filled(self, numbers: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # numbers that are too large become infinite, and are refused later
            return np.where(np.isnan(numbers), self.means, numbers).astype(np.float32)


WHOLE = re.compile(r"\+?[0-9]+|-0+")
"""A label that is a whole number from 0."""

Where = Callable[[int], str]
"""Gives the place of a row by its position, for messages."""


@ingredient
class Every:
    """Times of rows at equal distances.

    Args:
        every: seconds from each row to the next.
    """

    every: Positive


TIME = explained("a column, a date and an hour, the columns of a date, or { every = SECONDS }")


@dataclass(frozen=True)
class Columns:
    """Columns of a table by what they are for, each with an entry for each row.

    names: names of the features. numbers: (rows, columns) features that are numbers, NaN if one is missing. texts:
    features that are categories. unit: unit of times that are numbers, "" for dates. timed: columns of the time.
    """

    names: tuple[str, ...]
    numbers: np.ndarray
    texts: Mapping[str, Sequence[str]]
    label: np.ndarray | list[str]
    client: list[str] | None = None
    domain: list[str] | None = None
    time: np.ndarray | None = None
    unit: str = ""
    timed: tuple[str, ...] = ()

    def encoder(self, name: str, *, scaled: bool, rows: np.ndarray | None = None) -> Encoder:
        """Return the encoder of the columns.

        Args:
            name: name of the table, for messages.
            scaled: standardize numbers.
            rows: positions of the rows that decide; None for all, or the earliest tenth where rows have a time.
        """
        if rows is None:
            rows = (
                np.arange(len(self.label)) if self.time is None else find_earliest(torch.from_numpy(self.time)).numpy()
            )
        return Encoder.of(name, self.names, self.numbers, self.texts, rows, scaled=scaled)

    def describe(self, name: str) -> tuple[str, ...]:
        """Return the number of rows and the span of their times, in words."""
        if self.time is None or not self.timed:
            return ()
        return (
            f"{name}: {len(self.time):,} rows",
            f"time: {', '.join(self.timed)} ({describe_span(self.time, self.unit)})",
        )

    def rows(self, name: str, *, scaled: bool, measured: bool = False) -> Rows:
        """Return the rows; raise for what is no rows. Labels that are `measured` are values and no classes."""
        with np.errstate(over="ignore", invalid="ignore"):  # of numbers that are too large, which are refused below
            encoder = self.encoder(name, scaled=scaled)
        plain = replace(encoder, center=None, spread=None)(self.numbers, self.texts)
        rows = from_arrays(name, plain, self.label, self.client, self.domain, measured=measured)
        rows = replace(
            rows, time=None if self.time is None else torch.from_numpy(self.time).double(), said=self.describe(name)
        )
        if scaled or self.texts or np.isnan(self.numbers).any():
            x = torch.from_numpy(encoder(self.numbers, self.texts)) if scaled else rows.x
            bare = Columns(self.names, self.numbers, self.texts, label=[])
            fit = Fit(partial(_features, bare, name, scaled), x, torch.arange(len(x))) if self.time is None else None
            rows = with_learned(replace(rows, x=x, fit=fit), find_known_rows(rows))
        return rows


def _features(columns: Columns, name: str, scaled: bool, positions: torch.Tensor) -> torch.Tensor:
    """Return features (rows, width) by the rows at some positions."""
    encoder = columns.encoder(name, scaled=scaled, rows=positions.numpy())
    return torch.from_numpy(encoder(columns.numbers, columns.texts))


@ingredient
class CSV(Loading):
    """Comma-separated files with a header, packed (gzip, bzip2, xz) or not, or ARFF or Parquet files.

    Args:
        path: the file, below the data directory or absolute; or several files with the same header, read as one.
        label: column of the label: numbers from 0, or names; or any numbers, if `data.target` says so. Of several
            labels at once the columns of 0 and 1.
        cuts: ascending thresholds for a numeric label; its class is the number of thresholds that it reaches.
        client: column of the natural client.
        domain: column of the domain (day or night, which site).
        time: column of the time: seconds, or ISO 8601 (UTC without a time zone). Or the columns of a date in UTC: year,
            month, day, and optionally hour, minute, second. Or a date and an hour; or `{ every = SECONDS }`, the time
            from each row to the next.
        features: columns of the features, which must be numbers or categories; by default all others.
        categories: those features that are texts; each of their categories becomes a feature of 0 or 1. Categories are
            those of the training rows; if rows have a time, of the earliest tenth, because later rows are not known.
            Others are none of them.
        missing: treatment of an empty cell, or of NA, NaN, null. "error" raises, "drop" leaves out rows with one. With
            "mean" the mean of the same rows replaces a number, and a missing category belongs to no category. Rows
            without a label or a time are then left out.
        scaled: standardize each number by its mean and standard deviation over the same rows.
    """

    path: str | tuple[str, ...]
    label: str | Annotated[tuple[str, ...], Field(min_length=1)] = "label"
    cuts: tuple[Finite, ...] = ()
    client: str | None = None
    domain: str | None = None
    time: Annotated[str | tuple[str, ...] | Every, TIME] | None = None
    features: tuple[str, ...] | None = None
    categories: tuple[str, ...] = ()
    missing: Literal["error", "drop", "mean"] = "error"
    scaled: Flag = False
    kind: Literal["csv"] = "csv"

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(f"found path {self.path!r}, allowed: a file, or a list of files")
        if isinstance(self.time, tuple) and not 2 <= len(self.time) <= 6:
            raise ValueError(
                f"found {len(self.time)} columns of time, allowed: 3 to 6: year, month, day, hour, minute, second; or "
                "2: a date and an hour"
            )
        if any(after <= before for before, after in pairwise(self.cuts)):
            raise ValueError(f"found cuts {list(self.cuts)}, allowed: rising numbers")

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the files."""
        if not isinstance(self.label, str):
            raise refused("data.source.label", list(self.label), "one column, or data.target = 'labels'")
        rows = self._joined(directory).rows(self._name, scaled=self.scaled)
        return replace(rows, classes=len(self.cuts) + 1) if self.cuts else rows

    def load_values(self, directory: Path | None, seed: int) -> Rows:
        """Read the files, whose label is no class."""
        if self.cuts:
            raise refused("data.source.cuts", list(self.cuts), "none, or data.target = 'classes'")
        return self._joined(directory, measured=True).rows(self._name, scaled=self.scaled, measured=True)

    def feature_names(self, directory: Path | None) -> tuple[str, ...]:
        """Return the columns of the features, in order."""
        return self._features(read_names(find(self._paths[0], directory)))

    def encoded(self, path: Path, directory: Path | None, rows: np.ndarray | None = None) -> np.ndarray:
        """Return features (rows, width) of another file, encoded by some rows of the source (see `encoder`)."""
        numbers, texts = self._divided(self.feature_names(directory))
        cells = read_cells(path, numbers, texts, "mean" if self.missing == "mean" else "error")
        encoder = self._joined(directory).encoder(self._name, scaled=self.scaled, rows=rows)
        return encoder(cells.numbers, cells.texts)

    @property
    def learns(self) -> bool:
        """Tell whether features are made by what is learned from rows."""
        return bool(self.categories) or self.scaled or self.missing == "mean"

    @property
    def _paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def _name(self) -> str:
        return Path(self._paths[0]).name if len(self._paths) == 1 else f"{len(self._paths)} files"

    def _features(self, header: list[str]) -> tuple[str, ...]:
        return self.features or tuple(column for column in header if column not in self._taken)

    def _divided(self, features: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the features that are numbers, and those that are categories."""
        if strange := [name for name in self.categories if name not in features]:
            raise refused("data.source.categories", strange[0], f"some of the features: {', '.join(features)}")
        return [name for name in features if name not in self.categories], [*self.categories]

    def named(self, header: list[str]) -> list[str]:
        """Return the columns that are read of a file; others are left alone."""
        return [*self._taken, *self._features(header)]

    @property
    def _times(self) -> tuple[str, ...]:
        return self.time if isinstance(self.time, tuple) else (self.time,) if isinstance(self.time, str) else ()

    @property
    def _taken(self) -> list[str]:
        """Columns that are no features unless they are named so."""
        return [*self._label, *self._times, *(column for column in (self.client, self.domain) if column is not None)]

    @property
    def _label(self) -> tuple[str, ...]:
        return (self.label,) if isinstance(self.label, str) else self.label

    def _joined(self, directory: Path | None, *, measured: bool = False) -> Columns:
        """Read the files, one below the other."""
        parts = [self._columns(find(path, directory), measured) for path in self._paths]
        wide = {len(columns.names) for columns in parts}
        if len(wide) > 1:
            raise refused("data.source.path: numbers of features", sorted(wide), "equally many in each file")
        every = lambda key: [cell for columns in parts for cell in getattr(columns, key)]  # noqa: E731
        named = any(isinstance(columns.label, list) for columns in parts)
        return replace(
            parts[0],
            numbers=np.concatenate([columns.numbers for columns in parts]),
            texts={name: [cell for columns in parts for cell in columns.texts[name]] for name in self.categories},
            label=[str(label) for label in every("label")] if named else np.concatenate([f.label for f in parts]),
            client=None if self.client is None else every("client"),
            domain=None if self.domain is None else every("domain"),
            time=None if self.time is None else np.concatenate([columns.time for columns in parts]),
            unit=" and ".join(dict.fromkeys(columns.unit for columns in parts if columns.unit)),
        )

    def _columns(self, path: Path, measured: bool) -> Columns:
        """Read a file."""
        header, taken, times = read_names(path), self._taken, self._times
        features = self._features(header)
        find_places(path, header, [*taken, *features])
        if not features:
            raise FedtideError(f"{path}: no feature columns besides {', '.join(taken)}")
        numbers, categories = self._divided(features)
        needed = (*self._label, *times, *(categories if self.missing == "drop" else ()))
        try:
            cells = read_cells(path, numbers, [*dict.fromkeys([*taken, *categories])], self.missing, needed)
        except NotANumber as error:
            raise FedtideError(f"{error}{_hint(error)}") from None
        if not len(cells.places):
            raise FedtideError(f"{path}: something is missing in every row")
        texts, time, unit = cells.texts, None, ""
        if self.missing == "error":
            for name in categories:
                _check_there(name, texts[name], cells.where)
        if len(times) == 1:
            time, unit = all_seconds(texts[times[0]], cells.where)
        elif len(times) == 2:
            date, hour = times
            time = all_seconds(texts[date], cells.where)[0] + 3600 * _measured(cells, hour)
        elif times:
            time = dates([texts[name] for name in times], cells.where)
        elif isinstance(self.time, Every):
            time = cells.places * self.time.every
        return Columns(
            features,
            cells.numbers,
            {name: texts[name] for name in categories},
            self._values(cells) if measured else self._labels(cells),
            client=None if self.client is None else names_of("client", texts[self.client], cells.where),
            domain=None if self.domain is None else names_of("domain", texts[self.domain], cells.where),
            time=time,
            unit=unit,
            timed=times,
        )

    def _labels(self, cells: Cells) -> np.ndarray | list[str]:
        (label, *_), hint = self._label, "; data.target = 'number' takes a measured one, data.source.cuts makes classes"
        if not self.cuts:
            return labels_of(cells.texts[label], cells.where, hint)
        return np.searchsorted(self.cuts, _measured(cells, label), side="right")

    def _values(self, cells: Cells) -> np.ndarray:
        values = [_measured(cells, label) for label in self._label]
        with np.errstate(over="ignore"):  # infinite labels are refused later
            return (
                values[0].astype(np.float32) if isinstance(self.label, str) else np.stack(values, 1).astype(np.float32)
            )


def _measured(cells: Cells, label: str) -> np.ndarray:
    """Return a column of numbers; raise for a cell that is none."""
    values, _ = numbers_of(cells.texts[label])
    for row in np.flatnonzero(np.isnan(values))[:1].tolist():
        number(cells.where(row), label, cells.texts[label][row])
    return values


def _hint(error: NotANumber) -> str:
    if is_missing(error.cell):
        return "; data.source.missing = 'drop' leaves such rows out, 'mean' fills them"
    if DECIMAL_COMMA.fullmatch(error.cell):
        return ""
    return f"; data.source.features names the columns, data.source.categories = ['{error.column}'] takes texts"


def _check_there(name: str, column: Sequence[str], where: Where) -> None:
    for cell in dict.fromkeys(column):
        if is_missing(cell):
            hint = "; data.source.missing = 'drop' leaves such rows out, with 'mean' they are of no category"
            raise refused(f"{where(column.index(cell))}: {name}", cell, f"a category{hint}")


def labels_of(column: Sequence[str], where: Where, hint: str = "") -> np.ndarray | list[str]:
    """Return whole numbers if every label is one, and names if hardly any is; raise for what seems to be a mistake."""
    names = names_of("label", column, where)
    counts = Counter(names)
    numeric = {name for name in counts if is_number(name)}
    for name in counts:
        if name in numeric and not WHOLE.fullmatch(name):
            raise refused(f"{where(names.index(name))}: label", name, f"whole numbers from 0, or names{hint}")
    words = [name for name in counts if name not in numeric]
    spoken = sum(counts[word] for word in words)
    if 2 * spoken >= len(names):
        return names
    if words:
        but = f"{len(names) - spoken} of {len(names)} labels are numbers"
        raise refused(f"{where(names.index(words[0]))}: label", words[0], "whole numbers alone, or names", but)
    numbers = {name: int(name) for name in counts}
    for name, label in numbers.items():
        if label >= len(names):
            check_filled(f"{where(names.index(name))}", label, len(names))
    return np.array([numbers[name] for name in names])


def names_of(what: str, column: Sequence[str], where: Where) -> list[str]:
    """Return the cells of a column; raise for an empty one."""
    if "" in column:
        raise FedtideError(f"{where(column.index(''))}: {what} is empty")
    return [*column]
