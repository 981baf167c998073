"""Files of series: what is inspected are the rows that a study forecasts."""

import math
import re
import tomllib

import numpy as np
import pytest

import fedtide as ft
from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.inspection.table import read
from fedtide.runs.build import rows_of
from fedtide.tuning.tournament import _candidates


def hourly(path, name: str, days: int, begin: int = 0, header: str = "when"):
    """Write a series that is a sine of the day and grows a little, and return its file."""
    lines = [
        f"{np.datetime64('2024-01-01T00') + begin * 24 + k},{10 + 3 * math.sin(k / 24 * 2 * math.pi) + k / 1000:.4f}"
        for k in range(24 * days)
    ]
    path.write_text("\n".join([f"{header},{name}", *lines]) + "\n")
    return path


def test_files_of_series_are_clients_that_forecast_themselves(tmp_path):
    """North has 60 days, south those from the 20th to the 70th: 53 and 43 have the week before."""
    files = [hourly(tmp_path / "north.csv", "north", 60), hourly(tmp_path / "south.csv", "south", 50, begin=20)]
    table = read(files)
    assert (len(table.label), table.features.shape[1]) == (24 * (53 + 43), 3 + 24 + 7)
    assert sorted(set(table.client.tolist())) == ["north", "south"]
    assert table.said[0] == "2 files: 2 series"
    assert "client: the series (2); time: when (2024-01-08 00:00 to 2024-03-10 23:00)" in table.said[2]
    found = ft.inspect(files)
    assert found["mix"].found
    page = found.write(tmp_path / "made")
    text = (page.parent / "study.toml").read_text()
    study = from_dict(tomllib.loads(text))
    # South begins on the 21st of January, so the earliest tenth of its rows ends after the 28th and 4.3 days.
    assert 'begin = "2024-02-02"' in text
    assert len(rows_of(study, 0)) == len(table.label)
    assert study.method[0].algorithm == "fedavg"


@pytest.mark.parametrize(
    "lines", [["when,y", "2024-01-01,1", "2024-03-01,2", "2024-06-01,3"], ["a,y", "0.5,1", "1.5,2"]]
)
def test_other_files_are_tables(tmp_path, lines):
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    assert read(tmp_path / "t.csv").series is None


def test_large_series_bound_the_training_of_each_alone(tmp_path, monkeypatch):
    """It begins anew in every window; in tournaments it comes last, with half and twice its own rate."""
    monkeypatch.setattr("fedtide.inspection.findings.STEPS", 5)
    found = ft.inspect(hourly(tmp_path / "north.csv", "north", 120))
    path = found.write(tmp_path / "made").parent / "study.toml"
    solver = tomllib.loads(path.read_text())["method"][1]["solver"]
    assert solver == {"lr": 0.001, "optimizer": "adamw", "local_steps": 1000}
    entered, candidates = _candidates(found, path)
    entries = [each.entry for each in candidates]
    assert entries[:2] == ["FedAvg, lr 0.005", "FedAvg, lr 0.02"]
    assert entries[-2:] == ["Each alone, lr 0.0005", "Each alone, lr 0.002"]
    assert [method.name for method in entered.method] == entries


def test_the_unit_of_a_series_is_kept_in_its_study(tmp_path):
    north = hourly(tmp_path / "north.csv", "north", 60)
    north.write_text(re.sub(r"(\d)\n", r"\1 MW\n", north.read_text()))
    source = read([north]).series
    assert source.units == {"north": "MW"}
    north.write_text(north.read_text().replace(" MW", " kW"))
    with pytest.raises(FedtideError, match=r"row 2: north: found '.* kW', allowed: .* in MW"):
        source.load(None, 0, measured=True)
