"""Tables with a row per sample and columns for label, client, domain and time, in one or several files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.errors import FedtideError, nearest, refused, within
from fedtide.data.rows import Rows, find_earliest, with_fit
from fedtide.data.sources.arrays import center_and_spread, check_filled, from_arrays
from fedtide.data.sources.cells import Cells, Clock, describe_span, describe_spelling, read_cells
from fedtide.data.sources.dates import Form
from fedtide.data.sources.files import Loading, check_no_folder, find
from fedtide.data.sources.table_files import Encoding, Separator, Spelling, Units, read_names
from fedtide.data.sources.written import Decimal
from fedtide.fields.types import Different, Finite, Flag, Positive, allowing, ingredient

MOST_CATEGORIES = 100
"""Categories that a column may have: each becomes a feature."""

LABEL = "label"
"""Name of the column of the label if nobody names it."""
Missing = Literal["error", "drop", "mean"]
MISSING_HINT = "data.source.missing = 'drop' leaves such rows out, 'mean' fills features"


@ingredient
class Learned:
    """Means, scales and categories, by which features of other rows are encoded.

    Args:
        means: mean of each column of numbers, which replaces a missing one.
        centers: mean of each column that is standardized.
        spreads: their standard deviations.
        categories: those of each column of texts, in the order of their features.
    """

    means: dict[str, Finite]
    centers: dict[str, Finite] = field(default_factory=dict)
    spreads: dict[str, Positive] = field(default_factory=dict)
    categories: dict[str, Annotated[tuple[str, ...], Field(min_length=1, max_length=MOST_CATEGORIES)]] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class Features:
    """Columns of features, each with an entry for each row.

    where: name of the table, for messages. names: names of the columns. numbers: (rows, columns) those that are
    numbers, NaN if one is missing. texts: those that are categories, "" if one is missing. integers: (rows, columns) if
    all are integers, else None.
    """

    where: str
    names: tuple[str, ...]
    numbers: np.ndarray
    texts: Mapping[str, Sequence[str]]
    integers: Tensor | None = None

    @property
    def measures(self) -> list[str]:
        """Names of the columns of numbers."""
        return [name for name in self.names if name not in self.texts]

    def learn(self, positions: Tensor, *, scaled: bool) -> Learned:
        """Return means, categories and, if `scaled`, centers and spreads of the rows at some positions.

        Raises:
            FedtideError: a column has nothing there, or too many categories.
        """
        rows, means = positions.numpy(), np.zeros(self.numbers.shape[1])
        where_known = f"in the {len(rows)} rows known when training begins"
        with np.errstate(over="ignore", invalid="ignore"):  # numbers that are too large are refused later
            for place, name in enumerate(self.measures):
                values = self.numbers[rows, place]
                if np.isnan(values).all():
                    raise FedtideError(f"{self.where}: {name}: no number {where_known}")
                means[place] = values[~np.isnan(values)].mean()
            center, spread = center_and_spread(self._fill(means)[rows])
        categories = {}
        for name, column in self.texts.items():
            names = sorted({cell for cell in map(column.__getitem__, rows.tolist()) if cell})
            if not names:
                raise FedtideError(f"{self.where}: {name}: no category {where_known}")
            if len(names) > MOST_CATEGORIES:
                allowed = f"{MOST_CATEGORIES} at most, because each becomes a feature"
                raise refused(f"{self.where}: {name}", f"{len(names)} categories", allowed)
            categories[name] = tuple(names)
        finite = [np.where(np.isfinite(values), values, 1.0).tolist() for values in (means, center, spread)]
        filler, centers, spreads = (dict(zip(self.measures, values, strict=True)) for values in finite)
        return Learned(filler, centers if scaled else {}, spreads if scaled else {}, categories)

    def encode_by(self, positions: Tensor, *, scaled: bool) -> Tensor:
        """Return features (rows, width), by the rows at some positions; see `learn`."""
        return self.encode(self.learn(positions, scaled=scaled))

    def encode(self, learned: Learned) -> Tensor:
        """Return features (rows, width). A category that is missing or unknown is none of those there are.

        Raises:
            FedtideError: nothing was learned of a column.
        """
        tables = {"means": learned.means, "spreads": learned.spreads or learned.means}
        lacks = [f"{key}.{name}" for key, table in tables.items() for name in self.measures if name not in table]
        lacks += [f"categories.{name}" for name in self.texts if name not in learned.categories]
        if lacks:
            raise FedtideError(f"data.source.learned.{lacks[0]}: missing key")
        with np.errstate(over="ignore", invalid="ignore"):  # numbers that are too large are refused later
            x = self._fill(np.array([learned.means[name] for name in self.measures]))
            if learned.spreads:
                center, spread = (
                    np.array([table[name] for name in self.measures]) for table in (learned.centers, learned.spreads)
                )
                x = (x - center) / spread
            x = x.astype(np.float32)
        if not self.texts:
            return torch.from_numpy(x)
        parts, measures = [], iter(x.T)
        for name in self.names:
            if name not in self.texts:
                parts.append(next(measures)[:, None])
                continue
            place_of = {text: place for place, text in enumerate(learned.categories[name])}
            at = np.array([place_of.get(text, -1) for text in self.texts[name]])
            parts.append((at[:, None] == np.arange(len(place_of))).astype(np.float32))
        return torch.from_numpy(np.concatenate(parts, 1))

    def _fill(self, means: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(self.numbers), means, self.numbers)


@ingredient
class Every:
    """Times of rows at equal distances.

    Args:
        every: seconds from each row to the next. Each of several files begins at 0, as those of several stations do.
    """

    every: Positive


TIME = allowing("a column, a date and an hour, the columns of a date, or { every = SECONDS }")


def labels_of(cells: Cells, name: str, hint: str = "") -> np.ndarray | list[str]:
    """Return whole numbers if every label is one, and names if hardly any is; raise for what seems to be a mistake."""
    column = cells.columns[name]
    values, _ = column.parsed
    gaps, numbers = np.isnan(values), np.count_nonzero(~np.isnan(values))
    if 2 * numbers <= len(cells) or column.coded or column.boolean:
        return names_of("label", cells, name)
    where = f"{cells.where(int(gaps.argmax()))}: label"
    if gaps.any():
        but = f"{numbers} of {len(cells)} labels are numbers"
        raise refused(where, column.cell(int(gaps.argmax())), "whole numbers alone, or names", but)
    for row in np.flatnonzero((values < 0) | (values % 1 > 0))[:1].tolist():
        allowed = f"whole numbers from 0, or names{hint}"
        raise refused(f"{cells.where(row)}: label", column.cell(row), allowed)
    largest = int(values.argmax())
    check_filled(cells.where(largest), int(values[largest]), len(cells))
    return values.astype(np.int64)


def names_of(what: str, cells: Cells, name: str) -> list[str]:
    """Return a column of texts; raise for an empty one."""
    column = cells.texts(name)
    if "" in column:
        raise FedtideError(f"{cells.where(column.index(''))}: {what} is empty")
    return column


@ingredient
class CSV(Loading):
    """CSV files with a header, packed (gzip, bzip2, xz) or not, or ARFF or Parquet files.

    Args:
        path: the file, below the data directory or absolute; or several files with the same header, read as one.
        label: column of the label: numbers from 0, or names; or any numbers, if `data.target` says so. Of several
            labels at once the columns of 0 and 1.
        cuts: ascending thresholds for a numeric label; its class is the number of thresholds that it reaches.
        client: column of the natural client.
        domain: column of the domain (day or night, which site).
        time: column of the time: seconds or less since 1970, or dates (UTC without a time zone). Or the columns of a
            date in UTC: year, month, day, and optionally hour, minute, second. Or a date and an hour or
            a time of the day; or `{ every = SECONDS }`, the time from each row to the next.
        features: columns of the features, which must be numbers or categories; by default all others.
        categories: those features that are texts; each of their categories becomes a feature of 0 or 1. Categories are
            those of the training rows; if rows have a time, of the earliest tenth, because later rows are not known.
            Others are none of them.
        missing: treatment of a cell that is empty, NA and the like. "error" raises, "drop" leaves out its row. With
            "mean" the mean of the same rows replaces a number, and a missing category belongs to no category. Rows
            without a label, client, domain or time are then left out.
        scaled: standardize each number by its mean and standard deviation over the same rows.
        encoding: encoding of the text, such as "cp1252"; by default the first of UTF-8, UTF-16 and Windows-1252 that
            reads the file.
        separator: mark between cells; by default the one that divides all rows alike.
        decimal: mark before decimals if cells do not tell; the other mark divides thousands.
        time_format: how times are written; by default as the cells tell. "excel" are days since 1899-12-30, "digits"
            are 20240131 or 20240131235959.
        clock: whose hours count if times name a zone: UTC, or the clock as it is written.
        units: units of columns of numbers, such as { glucose = "mmol/l" }. A cell with another unit is an error, and
            one without a unit is right.
        learned: means, scales and categories of other rows, in place of those of its own. `fedtide deploy` writes them,
            so that all clients encode their rows alike.
    """

    path: str | tuple[str, ...]
    label: str | Annotated[tuple[str, ...], Field(min_length=1)] = LABEL
    cuts: tuple[Finite, ...] = ()
    client: str | None = None
    domain: str | None = None
    time: Annotated[str | tuple[str, ...] | Every, TIME] | None = None
    features: Annotated[tuple[str, ...], Different] | None = None
    categories: Annotated[tuple[str, ...], Different] = ()
    missing: Missing = "error"
    scaled: Flag = False
    encoding: Encoding | None = None
    separator: Separator | None = None
    decimal: Decimal | None = None
    time_format: Form | None = None
    clock: Clock = "utc"
    units: Units | None = None
    learned: Learned | None = None
    kind: Literal["csv"] = "csv"
    measures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(f"found path {self.path!r}, allowed: a file, or a list of files")
        if isinstance(self.time, tuple) and not 2 <= len(self.time) <= 6:
            allowed = "3 to 6: year, month, day, hour, minute, second; or 2: a date and an hour"
            raise ValueError(f"found {len(self.time)} columns of time, allowed: {allowed}")
        if any(after <= before for before, after in pairwise(self.cuts)):
            raise ValueError(f"found cuts {list(self.cuts)}, allowed: rising numbers")

    def load(self, directory: Path | None, seed: int, *, measured: bool = False) -> Rows:
        """Read the files."""
        if not measured and not isinstance(self.label, str):
            raise refused("data.source.label", list(self.label), "one column, or data.target = 'labels'")
        if measured and self.cuts:
            raise refused("data.source.cuts", list(self.cuts), "none, or data.target = 'classes'")
        name, cells = self._read(directory)
        return self.rows(name, cells, measured=measured)

    def encoded(self, path: Path, directory: Path | None, rows: Tensor | None = None, hint: str = "") -> Tensor:
        """Return features (rows, width) of another file, encoded by some rows of the source; None for the known ones.

        Those are all, or the earliest tenth if rows have a time. `hint` ends the error of a missing feature.
        """
        names = self.feature_names(directory)
        learned = self.learned or self._learn(directory, rows)
        missing: Missing = "mean" if self.missing == "mean" else "error"
        cells = read_cells(path, names, self.spelling_in(directory))
        return replace(self, missing=missing)._divide(path.name, cells, names, hint)[1].encode(learned)

    def write_out(self, directory: Path | None) -> "CSV":
        """Return the source with what it finds in its rows, so that it reads rows of others in the same way."""
        learned = self._learn(directory, None) if self.learns else None
        spelling = self.spelling_in(directory)
        units = dict(spelling.units) if spelling.units else None
        return replace(self, units=units, decimal=spelling.decimal, learned=self.learned or learned)

    def _learn(self, directory: Path | None, rows: Tensor | None) -> Learned:
        cells, features = self._divide(*self._read(directory), self.feature_names(directory))
        if rows is None:
            time, _ = self._times(cells)
            rows = torch.arange(len(cells)) if time is None else find_earliest(time)
        return features.learn(rows, scaled=self.scaled)

    @property
    def learns(self) -> bool:
        """Tell whether features are made by what is learned from rows."""
        return bool(self.categories) or self.scaled or self.missing == "mean"

    def feature_names(self, directory: Path | None) -> tuple[str, ...]:
        """Return the columns of the features, in order."""
        headers = [read_names(path, self.spelling) for path in self._files(directory)]
        features = [self.features or tuple(name for name in header if name not in self.taken) for header in headers]
        if len(wide := {len(names) for names in features}) > 1:
            raise refused("data.source.path: numbers of features", sorted(wide), "equally many in each file")
        if strange := [name for name in self.categories if name not in features[0]]:
            raise refused("data.source.categories", strange[0], f"some of the features: {', '.join(features[0])}")
        for name in self.units or ():
            if name not in (*features[0], *self.taken):
                raise FedtideError(f"data.source.units: no column '{name}'; {nearest(name, features[0])}")
        return features[0]

    @property
    def spelling(self) -> Spelling:
        """How its files are written, as far as a person says."""
        return Spelling(self.encoding, self.separator, self.decimal, self.time_format, self.units)

    def spelling_in(self, directory: Path | None) -> Spelling:
        """How other files are written: with the mark and the units of its own files, unless a person says others."""
        if self.learned is not None:
            return self.spelling
        cells = self._read(directory)[1]
        units = {name: one.unit for name, one in cells.columns.items() if one.numbers is not None and one.unit}
        return replace(self.spelling, units=units | (self.units or {}), decimal=cells.spelling.decimal)

    @property
    def _paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path

    def _files(self, directory: Path | None) -> list[Path]:
        paths = [find(path, directory) for path in self._paths]
        for path in paths:
            with within("data.source.path"):
                check_no_folder(path)
        return paths

    def _read(self, directory: Path | None) -> tuple[str, Cells]:
        """Return a name of the table, and its columns: first those that are no features."""
        name = Path(self._paths[0]).name if len(self._paths) == 1 else f"{len(self._paths)} files"
        columns = [*dict.fromkeys([*self.taken, *self.feature_names(directory)])]
        paths = self._files(directory)
        for path in paths:
            self._check_columns(path)
        return name, read_cells(paths, columns, self.spelling)

    def _check_columns(self, path: Path) -> None:
        """Raise if a file lacks a column that a key names."""
        header = read_names(path, self.spelling)
        roles = {"client": self.client, "domain": self.domain}
        named = {"label": self._labels, "time": self._timed, "features": self.features or ()}
        named |= {key: (column,) for key, column in roles.items() if column}
        for key, columns in named.items():
            for column in columns:
                if column not in header:
                    hint = nearest(column, header)
                    raise FedtideError(f"{path}: no column '{column}' for data.source.{key}; {hint}")

    # -- rows of a table --------------------------------------------------------------------------------------------

    @property
    def _labels(self) -> tuple[str, ...]:
        return (self.label,) if isinstance(self.label, str) else self.label

    @property
    def _timed(self) -> tuple[str, ...]:
        return self.time if isinstance(self.time, tuple) else (self.time,) if isinstance(self.time, str) else ()

    @property
    def taken(self) -> list[str]:
        """Columns that are no features unless they are named so."""
        return [*self._labels, *self._timed, *(column for column in (self.client, self.domain) if column)]

    def rows(self, name: str, cells: Cells, *, measured: bool = False) -> Rows:
        """Return the rows of a table; raise for what is no rows. Labels that are `measured` are values and no classes.

        If something is missing, rows without a label, client, domain or time are an error or left out.
        """
        names = self.features or tuple(column for column in cells.columns if column not in self.taken)
        cells, features = self._divide(name, cells, names)
        label = self._read_labels(cells, measured)
        time, unit = self._times(cells)
        roles = {"client": self.client, "domain": self.domain}
        named: dict[str, Any] = {role: cells.texts(column) for role, column in roles.items() if column}
        positions = torch.arange(len(cells)) if time is None else find_earliest(time)
        # Numbers that are too large are found here; integers stay integers for a model that embeds them.
        learned = self.learned or features.learn(positions, scaled=False)
        plain = features.encode(learned) if features.integers is None else features.integers
        rows = replace(from_arrays(name, plain, label, measured=measured, **named), time=time)
        if self.cuts:
            rows = replace(rows, classes=len(self.cuts) + 1)
        numbers = [column for column in names if column not in self.categories]
        lines = [*describe_spelling(cells, numbers, self._labels[0])]
        if time is not None and self._timed:
            lines.insert(0, f"time: {', '.join(self._timed)} ({describe_span(time.numpy(), unit)})")
        if lines:
            rows = replace(rows, said=(f"{name}: {len(rows):,} rows", *lines))
        if self.learned is not None or not (self.scaled or self.categories or np.isnan(features.numbers).any()):
            return rows
        return with_fit(rows, partial(features.encode_by, scaled=self.scaled))

    def _times(self, cells: Cells) -> tuple[Tensor | None, str]:
        """Return the times of rows in seconds, and the unit of those that are numbers."""
        if self.time is None:
            return None, ""
        every = cells.places * self.time.every if isinstance(self.time, Every) else None
        time, unit = cells.times(self._timed, self.clock) if every is None else (every, "")
        return torch.from_numpy(time), unit

    def _divide(
        self, name: str, cells: Cells, features: Sequence[str], alone: str | None = None
    ) -> tuple[Cells, Features]:
        """Return the rows in which nothing is missing that must not be, and their columns of features.

        If another file has features `alone`, nothing else is needed. Its errors name no keys of the source; `alone`
        ends that of a missing feature.

        Raises:
            FedtideError: something is missing and that is an error, or a number is none.
        """
        needed = [] if alone is not None else [column for column in self.taken if column in cells.columns]
        if not features:
            raise FedtideError(f"{name}: no feature columns besides {', '.join(needed)}")
        names = [*dict.fromkeys(needed if self.missing == "mean" else [*needed, *features])]
        whole = np.ones(len(cells), bool)
        for column in names:
            missing = cells.columns[column].missing
            if self.missing == "error" and missing.any():
                row = int(missing.argmax())
                allowed = f"a value; {MISSING_HINT}" if alone is None else f"a value{alone}"
                raise refused(f"{cells.where(row)}: {column}", cells.columns[column].cell(row), allowed)
            whole &= ~missing
        if not whole.any():
            raise FedtideError(f"{name}: something is missing in every row of {', '.join(names)}")
        cells = cells.take(np.flatnonzero(whole))
        keys = "; data.source.features can leave the column out, data.source.categories = ['%s'] reads texts"
        keys *= alone is None
        plain = [column for column in features if column not in self.categories]
        gaps = self.missing != "error"
        numbers = [cells.numbers(column, keys and keys % column, gaps=gaps) for column in plain]
        measured = np.stack(numbers, 1) if numbers else np.empty((len(cells), 0))
        columns = {name: cells.columns[name] for name in self.categories}
        texts = {name: np.where(column.missing, "", column.texts).tolist() for name, column in columns.items()}
        integers = None
        if not (self.scaled or texts or any(cells.columns[column].integers is None for column in features)):
            integers = torch.from_numpy(np.stack([cast(Any, cells.columns[column].integers) for column in features], 1))
        return cells, Features(name, tuple(features), measured, texts, integers)

    def _read_labels(self, cells: Cells, measured: bool) -> np.ndarray | list[str]:
        """Return the classes of rows, or values (rows,), of several labels at once (rows, labels)."""
        if not measured and not self.cuts:
            hint = "; data.target = 'number' takes a measured one, data.source.cuts makes classes"
            return labels_of(cells, self._labels[0], hint)
        values = [cells.numbers(label) for label in self._labels]
        if self.cuts:
            return np.searchsorted(self.cuts, values[0], side="right")
        with np.errstate(over="ignore"):  # infinite labels are refused later
            return (values[0] if isinstance(self.label, str) else np.stack(values, 1)).astype(np.float32)
