"""Series over time: what was before a value is its features."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedtide.config import from_dict, resolved
from fedtide.core.errors import FedtideError
from fedtide.data.sources import Series
from fedtide.runs.build import rows_of

HOUR = 3600.0
MONDAY = 4 * 86400.0  # 5 January 1970


def table(path, *lines: str):
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def two(tmp_path):
    """Hours 0 to 5 of north, not in order and without hour 3; of south hours 0 to 2, of which 1 comes twice."""
    lines = ["when,north,south", "1970-01-05 01:00:00,11,", "1970-01-05 00:00:00,10,100", "1970-01-05 01:00:00,11,110"]
    lines += ["1970-01-05 01:00:00,11,130", "1970-01-05 02:00:00,12,120", "1970-01-05 04:00:00,14,"]
    return table(tmp_path / "two.csv", *lines, "1970-01-05 05:00:00,15,", "1970-01-05 03:00:00,NA,")


def test_features_are_the_values_before_and_clients_are_columns(two):
    """One and two hours before: north has both at hour 2 alone, as hour 3 is missing; one alone at 1, 2 and 5."""
    rows = Series(two, "when", lags=("1h", "2h")).load(None, 0, measured=True)
    assert rows.x.tolist() == [[11, 10], [120, 100]]
    assert rows.value.tolist() == [12, 120]
    assert rows.time.tolist() == [MONDAY + 2 * HOUR] * 2
    assert [rows.client_names[k] for k in rows.client.tolist()] == ["north", "south"]
    rows = Series(two, "when", lags=("1h",)).load(None, 0, measured=True)
    assert rows.x.flatten().tolist() == [10, 11, 14, 100, 120]
    assert rows.value.tolist() == [11, 12, 15, 120, 120]  # 120 is the mean of what south has at hour 1


def test_a_clock_has_a_feature_for_each_place(two):
    rows = Series(two, "when", lags=("1h",), clock=("hour", "weekday")).load(None, 0, measured=True)
    assert rows.x.shape == (5, 1 + 24 + 7)
    assert rows.x[:, 1:25].argmax(1).tolist() == [1, 2, 5, 1, 2]
    assert rows.x[:, 25:].argmax(1).tolist() == [0] * 5  # Monday
    assert rows.x[:, 1:].sum(1).tolist() == [2.0] * 5


def test_an_own_scale_is_that_of_the_earliest_tenth_of_each_series(tmp_path):
    """Of 20 values the first two are 1 and 3, mean 2 and standard deviation 1; ten times that: 10 and 30, 20 and 10."""
    values = [1.0, 3.0, *np.arange(18) ** 2.0]
    lines = [f"{k * 3600},{value},{10 * value}" for k, value in enumerate(values)]
    path = table(tmp_path / "s.csv", "time,small,large", *lines)
    rows = Series(path, lags=("1h",), own_scale=True).load(None, 0, measured=True)
    small, large = rows.value.reshape(2, -1)
    torch.testing.assert_close(small, torch.tensor(values[1:]).float() - 2)
    torch.testing.assert_close(large, small)
    torch.testing.assert_close(rows.x[:19, 0], torch.tensor(values[:-1]).float() - 2)


def test_what_is_ahead_of_a_series_goes_as_far_as_the_shortest_lag(tmp_path):
    """The run knows `a` as 1, 3, 5, ... with mean 2 and deviation 1 in the earliest tenth of 20 values.

    In the new file `a` has hours 0 to 3, of which the last has values two and three hours before, and so have the two
    hours after the end. The earliest tenth of `b`, which is new, is its first value and has no scale.
    """
    old = table(tmp_path / "old.csv", "time,a", *(f"{3600 * k},{1 + 2 * k}" for k in range(20)))
    new = table(tmp_path / "new.csv", "time,a", "0,2", "3600,3", "7200,5", "10800,4")
    source = Series(old, lags=("2h", "3h"), clock=("hour",), own_scale=True)
    (found,) = source.ahead(Path(new), None)
    assert (found.name, found.center, found.spread) == ("a", 2.0, 1.0)
    assert found.time.tolist() == [3 * HOUR, 4 * HOUR, 5 * HOUR]
    assert found.x[:, :2].tolist() == [[1, 0], [3, 1], [2, 3]]
    assert found.x[:, 2:].argmax(1).tolist() == [3, 4, 5]
    flat = table(tmp_path / "flat.csv", "time,b", "0,2", "3600,3", "7200,5", "10800,4")
    with pytest.raises(FedtideError, match=r"flat\.csv: column 'b': its earliest tenth is always 2"):
        source.ahead(Path(flat), None)
    short = table(tmp_path / "short.csv", "time,a", "0,2")
    with pytest.raises(FedtideError, match=r"short\.csv: column 'a': no time has values 2h, 3h before it"):
        source.ahead(Path(short), None)


def test_the_value_of_yesterday_is_known_of_each_series(tmp_path):
    """Every value is the one of a day ago and 1 more."""
    lines = [f"{3600 * k},{k // 24},{10 + k // 24}" for k in range(24 * 10)]
    path = table(tmp_path / "s.csv", "time,a,b", *lines)
    rows = Series(path).load(None, 0, measured=True)
    assert len(rows) == 2 * 24 * 3
    before = rows.earlier["yesterday"]
    assert (before >= 0).sum() == 2 * 24 * 2
    assert torch.equal(rows.value[before[before >= 0]], rows.value[before >= 0] - 1)
    assert torch.equal(rows.x[:, 0], rows.value - 1)
    assert torch.equal(rows.x[:, 1], rows.value - 7)


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        (["time,a", "0,1", "3600,2"], {}, "s.csv: column 'a': no time has values 1d, 7d before it"),
        (["when,a", "0,1"], {}, "s.csv: no column 'time'"),
        (["time", "0"], {}, "s.csv: no column besides time"),
        (["time,a,b", "0,1,NA", "3600,2,"], {}, "s.csv: column 'b': has no number"),
        (["time,a", "0,1", "noon,2"], {}, "s.csv: row 3: time: found 'noon'"),
        (["time,a", "0,1", "3600,x"], {}, "s.csv: row 3: a: found 'x'"),
        (["time,a", "0,1e39", "3600,2"], {}, "s.csv: row 2: a: found '1e39', allowed: -3.4e+38 to 3.4e+38"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, lines, options, said):
    with pytest.raises(FedtideError) as error:
        Series(table(tmp_path / "s.csv", *lines), **options).load(None, 0, measured=True)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_values_are_no_classes_and_a_configuration_is_read_again(two):
    data = {"source": {"kind": "series", "path": two, "time": "when", "lags": ["1h"]}, "partition": "natural"}
    study = {"data": {**data, "target": "number"}, "method": [{"algorithm": "fedavg"}]}
    experiment = from_dict(study)
    assert len(rows_of(from_dict(resolved(experiment)), 0)) == 5
    with pytest.raises(FedtideError, match=r"data.target: found 'classes', allowed: 'number', 'counts' or 'quantiles'"):
        rows_of(from_dict({**study, "data": data}), 0)
    with pytest.raises(FedtideError, match=r"data.source.lags"):
        from_dict({**study, "data": {**data, "source": {**data["source"], "lags": []}}})


def test_times_may_be_off_by_a_tenth_of_the_step(tmp_path):
    """Hours 4 and 7 are 5 minutes off, or 7: each then lacks the one before, and is lacked by the one after."""
    for minutes, before in ((5, [*range(9)]), (7, [0, 1, 2, 5, 8])):
        off = {4: 60 * minutes, 7: -60 * minutes}
        lines = [f"{3600 * k + off.get(k, 0)},{k}" for k in range(10)]
        rows = Series(table(tmp_path / "s.csv", "time,a", *lines), lags=("1h",)).load(None, 0, measured=True)
        assert rows.x.flatten().tolist() == before
    assert rows.said == ("s.csv: 1 series", "5 of 10 values lack one 1h before it and are no rows")


def test_no_value_is_its_own_past(tmp_path):
    """A lag of a minute in a series of hours: the nearest value is the row itself."""
    lines = [f"{3600 * k},{k}" for k in range(10)] + ["3660,7"]
    rows = Series(table(tmp_path / "s.csv", "time,a", *lines), lags=("1m",)).load(None, 0, measured=True)
    assert (rows.x.flatten().tolist(), rows.value.tolist()) == ([1], [7])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"lags": ["24h", "1d"]}, "data.source: found lags 24h and 1d, which are the same, allowed: each once"),
        ({"clock": ["hour", "hour"]}, "data.source.clock: found 'hour' twice, allowed: each once"),
        ({"own_scale": True}, "data.source.own_scale: found True, allowed: false, because data.target is 'counts'"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(two, source, said):
    data = {"source": {"kind": "series", "path": two, "time": "when", **source}, "target": "counts"}
    with pytest.raises(FedtideError) as error:
        from_dict({"data": data, "method": [{"algorithm": "fedavg"}]})
    assert said in str(error.value)


def test_several_files_are_series_side_by_side(tmp_path, two):
    other = table(tmp_path / "other.csv", "when,west", "1970-01-05 00:00:00,1", "1970-01-05 01:00:00,2")
    rows = Series((two, other), "when", lags=("1h",)).load(None, 0, measured=True)
    assert rows.client_names == ("north", "south", "west")
    assert (rows.name, len(rows)) == ("2 files", 6)
    with pytest.raises(FedtideError, match=r"data.source.path: column: found 'west', but two files have it; allowed"):
        Series((two, other, other), "when", lags=("1h",)).load(None, 0, measured=True)
