"""Series of numbers over time: a row is a value, and its features are values before it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from fedtide.core.errors import FedtideError, refused
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import center_and_spread, from_arrays
from fedtide.data.sources.cells import read_cells
from fedtide.data.sources.dates import Form
from fedtide.data.sources.files import Loading, find
from fedtide.data.sources.table_files import Encoding, Separator, Spelling, Units, read_names
from fedtide.data.sources.written import Decimal
from fedtide.fields.types import Different, Distinct, Duration, Flag, ingredient, seconds_of

CLOCKS: Mapping[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "hour": (24, lambda at: at // 3600 % 24), "weekday": (7, lambda at: (at // 86400 + 3) % 7),
}  # fmt: skip
"""Places of a clock, and the one of a time; 1 January 1970 was a Thursday, and Monday is 0."""

UNITS = 0.0, 1.0
"""Center and spread of a series in the units of its file."""


@ingredient
class Series(Loading):
    """Files with a column of times, each other column of which is the series of a client with that name.

    A row is a value, which `data.target` reads as a number or a count. Its features are the values of the same series
    some time before; rows without one of these are left out, and their number is printed. A tenth of the usual step is
    close enough, and a tenth of the lag. CSV files, packed or not, ARFF and Parquet, as `csv` reads them. A cell
    without a number is no value, and several at one time (clocks that are set back) are their mean.

    Args:
        path: the file, below the data directory or absolute; or several files.
        time: column of the time: seconds, or dates (UTC without a time zone).
        lags: how long before a row the values are that are its features. The shortest is how far ahead is forecast.
        clock: further features, 0 or 1 for each "hour" or "weekday", as the times are written (UTC if they name a
            zone).
        own_scale: each series less the mean of its earliest tenth, in standard deviations there. So series of different
            size are alike, and values to come decide nothing. Errors are on that scale, too. The two numbers of each
            series are printed with the rows, and `fedtide predict` converts values back.
        encoding: encoding of the text, as `csv` has it.
        separator: mark between cells, as `csv` has it.
        decimal: mark before decimals, as `csv` has it.
        time_format: how times are written, as `csv` has it.
        units: units of columns, as `csv` has them.
    """

    path: str | tuple[str, ...]
    time: str = "time"
    lags: Annotated[tuple[Duration, ...], Distinct, Field(min_length=1, max_length=1000)] = ("1d", "7d")
    clock: Annotated[tuple[Literal["hour", "weekday"], ...], Different] = ()
    own_scale: Flag = False
    encoding: Encoding | None = None
    separator: Separator | None = None
    decimal: Decimal | None = None
    time_format: Form | None = None
    units: Units | None = None
    kind: Literal["series"] = "series"
    measures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(f"found path {self.path!r}, allowed: a file, or a list of files")
        lags = [seconds_of(lag) for lag in self.lags]
        if twice := [name for name, lag in zip(self.lags, lags, strict=True) if lags.count(lag) > 1]:
            raise ValueError(f"found lags {' and '.join(twice)}, which are the same, allowed: each once")

    def load(self, directory: Path | None, seed: int, *, measured: bool = False) -> Rows:
        """Read the files, whose values are no classes."""
        if not measured:
            raise refused("data.target", "classes", "'number', 'counts' or 'quantiles', which a series is of")
        paths = (self.path,) if isinstance(self.path, str) else self.path
        all_series = [series for path in paths for series in self._read(find(path, directory))]
        if twice := [name for name, count in Counter(series.name for series in all_series).items() if count > 1]:
            raise refused("data.source.path: column", twice[0], "a name for each series alone", "two files have it")
        name = Path(paths[0]).name if len(paths) == 1 else f"{len(paths)} files"
        scales = {series.name: series.scale(name) for series in all_series} if self.own_scale else {}
        scaled = [series.on(*scales.get(series.name, UNITS)) for series in all_series]
        whole, before = zip(*(self._lagged(name, series, series.time) for series in scaled), strict=True)
        every, rows_of = sum(len(series.values) for series in all_series), [int(present.sum()) for present in whole]
        lines = [
            f"{name}: {len(all_series)} series",
            f"{every - sum(rows_of):,} of {every:,} values lack one {', '.join(self.lags)} before it and are no rows",
            *(f"{of}: a prediction p is {center:.9g} + {spread:.9g} p in the units of the file"
              for of, (center, spread) in scales.items()),
        ]  # fmt: skip
        at = np.concatenate([series.time[present] for series, present in zip(scaled, whole, strict=True)])
        client = np.repeat([series.name for series in all_series], rows_of)
        with np.errstate(over="ignore"):  # of numbers that are too large, which are refused below
            features = self._features(np.concatenate(before), at)
            values = [series.values[present] for series, present in zip(scaled, whole, strict=True)]
            label = np.concatenate(values).astype(np.float32)
        rows = from_arrays(name, features, label, client=client, measured=True)
        return replace(rows, time=torch.from_numpy(at), said=tuple(lines))

    def ahead(self, path: Path, directory: Path | None) -> list["Ahead"]:
        """Return the possible forecasts of the series in a file: at its times, and after its end as far as lags go.

        With `own_scale` a series that this source has, too, keeps the scale from there. Another series has the scale of
        its own earliest tenth.

        Raises:
            FedtideError: a series has no time of which all lags are known.
        """
        paths = (self.path,) if isinstance(self.path, str) else self.path
        files = [find(file, directory) for file in paths] if self.own_scale else []
        scales = {series.name: series.scale(file.name) for file in files for series in self._read(file)}
        forecasts = []
        for series in self._read(path):
            new = series.scale(path.name) if self.own_scale and series.name not in scales else UNITS
            center, spread = scales.get(series.name, new)
            time = np.concatenate([series.time, series.after(min(map(seconds_of, self.lags)))])
            whole, x = self._lagged(str(path), series.on(center, spread), time)
            forecasts.append(Ahead(series.name, time[whole], self._features(x, time[whole]), center, spread))
        return forecasts

    def _lagged(self, file: str, series: "_Series", at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of some times have all values before them, and these (rows, lags); raise if none has."""
        whole, before = series.before(at, [seconds_of(lag) for lag in self.lags])
        if not whole.any():
            allowed = "other lags, or times at even steps"
            line = f"no time has values {', '.join(self.lags)} before it, allowed: {allowed}"
            raise FedtideError(f"{file}: column '{series.name}': {line}")
        return whole, before

    def _features(self, before: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Return values before (rows, lags) and the places of clocks at times (rows,) beside each other."""
        clocks = [np.eye(many)[place(at).astype(int)] for many, place in (CLOCKS[clock] for clock in self.clock)]
        return np.concatenate([before, *clocks], 1).astype(np.float32)

    def _read(self, path: Path) -> Iterator["_Series"]:
        spelling = Spelling(self.encoding, self.separator, self.decimal, self.time_format, self.units)
        header = read_names(path, spelling)
        names = [column for column in header if column != self.time]
        cells = read_cells(path, [self.time, *names], spelling)
        if not names:
            raise FedtideError(f"{path}: no column besides {self.time}")
        cells = cells.take(np.flatnonzero(~cells.columns[self.time].missing))
        time, _ = cells.times([self.time])
        for name in names:
            values = cells.numbers(name, gaps=True)
            present = ~np.isnan(values)
            if not present.any():
                raise FedtideError(f"{path}: column '{name}': has no number, allowed: a series with values")
            at, place = np.unique(time[present], return_inverse=True)
            yield _Series(name, at, np.bincount(place, values[present]) / np.bincount(place))


@dataclass(frozen=True)
class Ahead:
    """Possible forecasts of a series: times (rows,) in seconds and features (rows, ...).

    A value v that is predicted is center + spread * v in the units of the file.
    """

    name: str
    time: np.ndarray
    x: np.ndarray
    center: float
    spread: float


@dataclass(frozen=True)
class _Series:
    """Values (values,) at rising times in seconds."""

    name: str
    time: np.ndarray
    values: np.ndarray

    @property
    def step(self) -> float:
        """The usual time between values."""
        return float(np.median(np.diff(self.time))) if len(self.time) > 1 else 0.0

    def scale(self, file: str) -> tuple[float, float]:
        """Return mean and standard deviation of its earliest tenth."""
        earliest = self.values[: ceil(len(self.values) / 10), None]
        if not np.ptp(earliest):
            line = f"its earliest tenth is always {earliest[0, 0]:g}, allowed: values that differ, or own_scale = false"
            raise FedtideError(f"{file}: column '{self.name}': {line}")
        center, spread = center_and_spread(earliest)
        return float(center[0]), float(spread[0])

    def on(self, center: float, spread: float) -> "_Series":
        """Return the series on another scale."""
        return replace(self, values=(self.values - center) / spread)

    def after(self, ahead: float) -> np.ndarray:
        """Return the times that follow its last one at even steps, up to so many seconds."""
        count = int(ahead / self.step + 0.1) if self.step else 0
        return self.time[-1] + self.step * np.arange(1, count + 1)

    def before(self, at: np.ndarray, lags: list[float]) -> tuple[np.ndarray, np.ndarray]:
        """Return which of some times (times,) have values before them, and these (rows, lags)."""
        wanted = at[:, None] - np.array(lags)
        place = np.searchsorted((self.time[1:] + self.time[:-1]) / 2, wanted)  # of the nearest
        near = np.minimum(self.step, lags) / 10
        whole = (np.abs(self.time[place] - wanted) <= near).all(1)
        return whole, self.values[place[whole]]
