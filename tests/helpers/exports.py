"""Exports of one planted table, as spreadsheets and databases write them."""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

ROWS, SITES = 600, 12
Cells = Callable[[np.ndarray], list[Any]]


@dataclass(frozen=True)
class Export:
    """How the planted table is written.

    date, site, number: names of spellings (`DATES`, `IDS`, `NUMBERS`). file: name of a container (`FILES`). also: what
    else is odd (`ODDITIES`).
    """

    date: str
    site: str
    number: str
    file: str
    also: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, vars(self).values()))


def planted() -> pd.DataFrame:
    """Make a table: a row each 5.75 hours of 2018, 12 sites whose features differ, 3 kinds of load."""
    draw = np.random.default_rng(7)
    site = draw.integers(0, SITES, ROWS)
    a = np.round(draw.normal(2 * site / SITES, 1.0) * 1000 + 4000, 1)
    b = np.round(draw.normal(5.0, 2.0, ROWS), 2)
    kind = np.digitize(a / 1000 + 0.3 * b + draw.normal(0, 0.5, ROWS), [5.3, 6.4])
    date = pd.Timestamp("2018-01-01") + pd.to_timedelta(np.arange(ROWS) * 345, unit="min")
    return pd.DataFrame(
        {"date": date, "site": site, "a": a, "b": b, "load_type": np.array(["low", "mid", "high"])[kind]}
    )


def _form(pattern: str) -> Callable[[pd.Series], list[Any]]:
    return lambda date: date.dt.strftime(pattern).tolist()


def _seconds(date: pd.Series) -> np.ndarray:
    return date.astype("datetime64[ns]").astype(np.int64).to_numpy() // 10**9


def _mixed(date: pd.Series) -> list[int]:
    return [at * 1000 if row % 3 == 0 else at for row, at in enumerate(_seconds(date).tolist())]


def _zoned(date: pd.Series) -> list[str]:
    summer = date.dt.month.between(4, 10)
    return [f"{at:%Y-%m-%dT%H:%M:%S}{'+02:00' if late else '+01:00'}" for at, late in zip(date, summer, strict=True)]


def _sentinels(date: pd.Series) -> list[str]:
    return ["1900-01-01 00:00" if row % 40 == 7 else f"{at:%Y-%m-%d %H:%M}" for row, at in enumerate(date)]


DATES: dict[str, Callable[[pd.Series], list[Any]]] = {
    "ISO": _form("%Y-%m-%d %H:%M:%S"),
    "day first": _form("%d/%m/%Y %H:%M"),
    "day first with points": _form("%d.%m.%Y %H:%M:%S"),
    "month first": _form("%m/%d/%Y %I:%M:%S %p"),
    "month first, short": _form("%m/%d/%y %H:%M"),
    "month names": _form("%d %b %Y %H:%M"),
    "month names first": _form("%B %d, %Y %I:%M %p"),
    "digits": _form("%Y%m%d%H%M%S"),
    "days as numbers": lambda date: date.dt.strftime("%Y%m%d").astype(int).tolist(),
    "slashes": _form("%Y/%m/%d %H:%M"),
    "spreadsheet": lambda date: np.round(_seconds(date) / 86400 + 25569, 6).tolist(),
    "seconds": lambda date: _seconds(date).tolist(),
    "milliseconds": lambda date: (_seconds(date) * 1000).tolist(),
    "seconds and milliseconds": _mixed,
    "zones": _zoned,
    "sentinels": _sentinels,
}
IDS: dict[str, Cells] = {
    "names": lambda site: [f"site-{number}" for number in site],
    "long numbers": lambda site: [2**60 + int(number) for number in site],
    "floats": lambda site: site.astype(float),
    "codes": lambda site: [f"{number:05d}" for number in site],
    "numbers": lambda site: [int(number) for number in site],
}


def _written(mark: str, thousands: str, around: str = "{}") -> Cells:
    def write(values: np.ndarray) -> list[str]:
        texts = (f"{value:,.2f}" for value in values)
        return [around.format(t.replace(",", "_").replace(".", mark).replace("_", thousands)) for t in texts]

    return write


NUMBERS: dict[str, Cells] = {
    "plain": lambda values: values.tolist(),
    "decimal comma": _written(",", ""),
    "thousands": _written(".", ","),
    "continental": _written(",", "."),
    "spaces": _written(",", "\u00a0"),
    "apostrophes": _written(".", "\u2019"),
    "currency": _written(".", ",", "${}"),
    "euros": _written(",", ".", "{} \u20ac"),
    "percent": _written(".", "", "{}%"),
    "unit": _written(".", "", "{} kWh"),
}


def text_of(frame: pd.DataFrame, separator: str, *, head: str = "") -> str:
    """Return a frame as the text of a CSV file."""
    return head + frame.to_csv(index=False, sep=separator)


def _file(name: str, encoding: str, separator: str, head: str = "") -> Callable[[pd.DataFrame, Path], Any]:
    def write(frame: pd.DataFrame, folder: Path) -> Path:
        path = folder / name
        path.write_bytes(text_of(frame, separator, head=head).encode(encoding))
        return path

    return write


def _parquet(frame: pd.DataFrame, folder: Path) -> Path:
    frame.to_parquet(folder / "table.parquet")
    return folder / "table.parquet"


def _shuffled_parquet(frame: pd.DataFrame, folder: Path) -> Path:
    """Write a frame with an index, which becomes a hidden column."""
    frame = frame.set_index(pd.Index(np.random.default_rng(1).permutation(len(frame))))
    return _parquet(frame, folder)


FILES: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    "CSV": _file("table.csv", "utf-8", ","),
    "CSV with a mark": _file("table.csv", "utf-8-sig", ","),
    "semicolons": _file("table.csv", "cp1252", ";"),
    "tabs in UTF-16": _file("table.txt", "utf-16", "\t"),
    "bars": _file("table.csv", "utf-8", "|"),
    "comments": _file("table.csv", "utf-8", ",", "# exported 2020\n# by hand\n"),
    "Parquet": _parquet,
    "Parquet with an index": _shuffled_parquet,
    "frame": lambda frame, folder: frame,
}
ODDITIES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "": lambda frame: frame,
    "copy of a feature last": lambda frame: frame.assign(amount=frame["a"]),
    "decimals last": lambda frame: frame.assign(
        amount=[Decimal(row) / 4 if row % 4 else None for row in range(len(frame))]
    ),
    "flag last": lambda frame: frame.assign(flag=pd.array([row % 3 > 0 for row in range(len(frame))], "boolean")),
    "lists and structs": lambda frame: frame.assign(tags=[[1, 2]] * len(frame), geo=[{"lat": 1.5}] * len(frame)),
    "constant": lambda frame: frame.assign(version=3),
    "row number": lambda frame: frame.assign(**{"Unnamed: 0": np.arange(len(frame))}),
    "gaps": lambda frame: frame.assign(note=[None if row % 2 else "x" for row in range(len(frame))]),
    "long notes": lambda frame: frame.assign(
        note=["long " * (200 if row == 5 else 1) + str(row) for row in range(len(frame))]
    ),
}


def write(table: pd.DataFrame, how: Export, folder: Path) -> Any:
    """Write the planted table in one way; a path, or a frame in memory."""
    frame = pd.DataFrame(
        {
            "date": DATES[how.date](table["date"]),
            "site": IDS[how.site](table["site"].to_numpy()),
            "a": NUMBERS[how.number](table["a"].to_numpy()),
            "b": NUMBERS[how.number](table["b"].to_numpy()),
            "load_type": table["load_type"],
        }
    )
    return FILES[how.file](ODDITIES[how.also](frame), folder)


def every(count: int) -> list[Export]:
    """Draw as many ways to write the table: each spelling comes in turn, beside spellings of the others at random."""
    draw = np.random.default_rng(3)
    kinds = (DATES, IDS, NUMBERS, FILES, ODDITIES)
    columns = [np.resize(draw.permutation(len(kind)), count) for kind in kinds]
    for column in columns:
        draw.shuffle(column)
    return [
        Export(*(list(kind)[place] for kind, place in zip(kinds, row, strict=True)))
        for row in zip(*columns, strict=True)
    ]
