"""NPZ and CSV files: columns, and one line for what is missing, damaged or no number."""

import gzip
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtide import data
from fedtide.core.errors import FedtideError
from fedtide.data.partition import IID, Split
from fedtide.data.population_builder import build
from fedtide.data.sources import CSV, NPZ, Domains, GasSensors, Python
from fedtide.data.sources.arrays import from_arrays
from fedtide.data.sources.frames import Roles
from fedtide.inspection.table import read

# -- NPZ --------------------------------------------------------------------------------------------------------------


def npz(folder: Path, **arrays) -> NPZ:
    np.savez(folder / "data.npz", **arrays)
    return NPZ(str(folder / "data.npz"))


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-32", "utf-8-sig"])
def test_the_encoding_of_a_file_is_found(tmp_path, encoding):
    file = tmp_path / "data.csv"
    file.write_bytes("x,label\n1,a\n2,ü\n".encode(encoding))
    assert CSV(str(file)).load(None, 0).label_names == ("a", "ü")


def test_npz_columns_come_back(tmp_path):
    x = np.random.default_rng(0).random((4, 3))
    rows = npz(
        tmp_path,
        x=x,
        y=[0, 2, 1, 2],
        client=["eve", "bob", "eve", "al"],
        domain=[1, 0, 1, 0],
        time=[5, 6, 7, 8],
        held_out=[0, 0, 1, 0],
    ).load(None, 0)
    np.testing.assert_allclose(rows.x.numpy(), x, rtol=1e-6)
    assert (rows.y.tolist(), rows.classes) == ([0, 2, 1, 2], 3)
    assert (rows.client.tolist(), rows.client_names) == ([2, 1, 2, 0], ("al", "bob", "eve"))
    assert (rows.domain.tolist(), rows.domain_names) == ([1, 0, 1, 0], ("0", "1"))
    assert rows.time.tolist() == [5.0, 6.0, 7.0, 8.0]
    assert rows.held_out.tolist() == [False, False, True, False]


@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.float32, bool])
def test_npz_features_that_are_no_pictures_become_float32_or_stay_integers(tmp_path, kind):
    rows = npz(tmp_path, x=np.array([[3, 200], [0, 1]]).astype(kind), y=[0, 1]).load(None, 0)
    assert rows.x.dtype == (torch.int64 if np.dtype(kind).kind in "iu" else torch.float32)
    assert rows.x.tolist() == np.array([[3, 200], [0, 1]]).astype(kind).astype(float).tolist()


def test_a_missing_array_is_one_line(tmp_path):
    source = npz(tmp_path, images=np.zeros((2, 3)), y=[1, 0])
    with pytest.raises(FedtideError, match=r"data.npz: no array 'x'; allowed: images, y"):
        source.load(None, 0)


def test_pickled_objects_are_refused(tmp_path):
    for column in ("x", "y", "client"):
        arrays = {"x": np.zeros((2, 3)), "y": np.array([0, 1]), column: np.array([{}, []], dtype=object)}
        with pytest.raises(FedtideError, match=r"data.npz: .*pickled objects"):
            npz(tmp_path, **arrays).load(None, 0)


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x03\x04 cut"])
def test_a_file_that_is_no_npz_is_one_line(tmp_path, content):
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(FedtideError, match=r"data.npz: damaged or not an npz file"):
        NPZ("data.npz").load(tmp_path, 0)


@pytest.mark.parametrize(("columns", "line"), [
    ({"x": np.zeros((2, 3), complex)}, "type of x: found 'torch.complex128', allowed: real numbers"),
    ({"x": [[1.0, 2.0], [np.nan, 1.0]]}, "row 1, counted from 0: a feature is NaN"),
    ({"x": [["a", "b"], ["c", "d"]]}, "x: not an array of numbers"),
    ({"y": [0, -1]}, "row 1: label: found -1"),
    ({"y": [0, math.nan]}, "row 1: .*nan"),
    ({"x": np.zeros((2, 0))}, r"shape of x: found \(2, 0\), allowed: one number or more in a row"),
    ({"y": np.array([0, 1j])}, "type of labels: found 'complex128', allowed: whole numbers from 0, or names"),
    ({"y": [0, 900_000]}, "row 1: label: found 900000, but 2 rows are too few for so many classes; allowed: 0 to 999"),
    ({"y": np.array([0, 2**64 - 1], np.uint64)}, "row 1: label: found 18446744073709551615, allowed: whole numbers"),
    ({"y": [0, 9.6]}, "row 1: label: found 9.6, .*target = 'number' takes measures"),
    ({"y": np.array([b"\xff", b"a"])}, "label: damaged or not names"),
    ({"client": [1.0, math.nan]}, "row 1: client: found nan, allowed: a number or a name"),
    ({"domain": [math.nan, 1.0]}, "row 0: domain: found nan, allowed: a number or a name"),
    ({"client": [[1, 2], [3, 4]]}, "rows of client: found 4, allowed: 2, as in x"),
    ({"time": [0.0, math.inf]}, "row 1: time: found inf, allowed: a finite number"),
    ({"time": [[0.0], [1.0]]}, r"shape of time: found \(2, 1\), allowed: \(rows,\)"),
    ({"time": np.array(["2026-01-01", "NaT"], "datetime64[D]")}, "row 1: time: found nan, allowed: a finite number"),
    ({"held_out": [0, 2]}, "row 1: held_out: found 2, allowed: true, false"),
])  # fmt: skip
def test_arrays_that_are_no_rows_name_the_row_and_the_column(tmp_path, columns, line):
    with pytest.raises(FedtideError, match=rf"data.npz: {line}"):
        npz(tmp_path, **{"x": np.zeros((2, 3)), "y": [0, 1], **columns}).load(None, 0)


# -- CSV --------------------------------------------------------------------------------------------------------------


def table(folder: Path, text: str, name: str = "data.csv", **columns) -> CSV:
    data = text.encode()
    (folder / name).write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    return CSV(str(folder / name), **columns)


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte-order-mark"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("name", ["data.csv", "data.csv.gz"])
def test_csv_columns_come_back(tmp_path, name, end, mark):
    text = mark + end.join(["when,label,a,station,b", "0,2,1.5,Zürich,-1", "60,0,2,Bern,1e3", "7,1,3,Zürich,0", ""])
    rows = table(tmp_path, text, name, client="station", time="when").load(None, 0)
    assert rows.x.tolist() == [[1.5, -1.0], [2.0, 1000.0], [3.0, 0.0]]
    assert rows.x.dtype == torch.float32
    assert (rows.y.tolist(), rows.classes) == ([2, 0, 1], 3)
    assert (rows.client.tolist(), rows.client_names) == ([1, 0, 1], ("Bern", "Zürich"))
    assert rows.time.tolist() == [0.0, 60.0, 7.0]
    assert rows.domain is None


def test_csv_times_are_seconds_or_iso_8601(tmp_path):
    stamps = ["1970-01-01T00:01:00Z", "1970-01-01 00:02:00+00:00", "1970-01-01T01:00:00+01:00"]
    text = "t,a,label\n" + "".join(f"{stamp},1,0\n" for stamp in stamps)
    assert table(tmp_path, text, time="t").load(None, 0).time.tolist() == [60.0, 120.0, 0.0]
    with pytest.raises(
        FedtideError, match=r"row 2: t: time: found '1970-01-01T00:01:00', but a time zone is named in 2 and not in 1"
    ):
        table(tmp_path, text.replace("Z", ""), time="t").load(None, 0)


@pytest.mark.parametrize(("scale", "unit"), [
    (1, "seconds"), (10**3, "milliseconds"), (10**6, "microseconds"), (10**9, "nanoseconds"),
])  # fmt: skip
def test_the_unit_of_times_is_guessed_in_one_way_and_said(tmp_path, scale, unit):
    """1 and 3 January 2026 begin 1,767,225,600 and 1,767,398,400 seconds after 1970."""
    want = [1_767_225_600.0, 1_767_398_400.0] * 2
    times = [int(second) * scale for second in want]
    path = tmp_path / "log.csv"
    path.write_text("t,a,label\n" + "".join(f"{time},{row % 3},{row % 2}\n" for row, time in enumerate(times)))
    rows = CSV(str(path), time="t").load(None, 0)
    frame = {"t": np.array(times), "a": np.arange(4.0) % 3, "label": np.arange(4) % 2}
    stored = npz(tmp_path, x=frame["a"][:, None], y=frame["label"], time=frame["t"]).load(None, 0)
    named = data.table(frame, time="t", quiet=True)
    assert [each.time.tolist() for each in (rows, stored, named)] == [want] * 3
    assert read(path, Roles(time="t")).time.tolist() == want
    assert rows.said[1] == f"time: t (2026-01-01 00:00 to 2026-01-03 00:00, as {unit} since 1970)"
    assert f"time: t (2026-01-01 00:00 to 2026-01-03 00:00, as {unit} since 1970)" in named.said[1]


def test_times_at_equal_distances_are_never_taken_for_other_units(tmp_path):
    rows = table(tmp_path, "a,label\n" + "1,0\n2,1\n" * 20, time={"every": 1e11}).load(None, 0)
    assert rows.time.tolist() == [1e11 * row for row in range(40)]


WRONG = {
    "short-line": ("a,b,label\n1,2,0\n1,2\n", {}, "row 3: number of cells: found 2, allowed: 3, as in the header"),
    "large": ("a,b,label\n1,2,0\n1,1e300,0\n", {}, "row 3: b: found '1e300', allowed: -3.4e\\+38 to 3.4e\\+38"),
    "word": ("a,b,label\n1,2,0\n1,x,0\n", {}, "row 3: b: found 'x', allowed: a number"),
    "empty-cell": ("a,b,label\n1,,0\n1,2,0\n", {}, "row 2: b: found '', allowed: a value"),
    "infinite": ("a,b,label\n1,2,0\n1,-inf,0\n", {}, "row 3: b: found '-inf', allowed: a value"),
    "misspelt": (
        "a,b,labels\n1,2,0\n",
        {},
        r"no column 'label' for data\.source\.label; did you mean 'labels'\? Allowed: a, b, labels",
    ),
    "no-feature": ("a,b,label\n1,2,0\n", {"features": ("a", "c")}, "no column 'c'"),
    "label-only": ("label\n0\n", {}, "no feature columns besides label"),
    "header-only": ("a,b,label\n", {}, "no rows below the header"),
    "empty": ("", {}, "is empty, allowed: a header, and rows below it"),
    "negative-label": ("a,b,label\n1,2,0\n1,2,-1\n", {}, "row 3: label: found '-1'"),
    "no-time": (
        "t,a,label\nmonday,1,0\n",
        {"time": "t"},
        "row 2: t: time: found 'monday', allowed: seconds, or a date such as",
    ),
    "empty-label": ("a,label\n1,0\n2,\n3,1\n", {}, "row 3"),
    "one-word": ("a,label\n1,0\n2,1\n3,cat\n", {}, "row 4: label: found 'cat', but 2 of 3 labels are numbers"),
    "underscored-number": ("a,label\n1_0,0\n", {}, "row 2: a: found '1_0', allowed: a number"),
    "measured-label": (
        "a,label\n1,9.6\n",
        {},
        "row 2: label: found '9.6', .*or names; data.target = 'number' takes a measured one",
    ),
    "huge-label": ("a,label\n1,0\n2,900000\n", {}, "row 3: label: found 900000, but 2 rows are too few"),
    "named-feature": (
        "a,b,label\n1,NNW,0\n",
        {},
        "row 2: b: found 'NNW', .*; data.source.features can leave the column out",
    ),
    "na": ("a,b,label\n1,NA,0\n", {}, "row 2: b: found 'NA', .*; data.source.missing = 'drop' leaves such rows out"),
    "twin-columns": ("a,a,label\n1,2,0\n", {}, "'a'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_cell_or_column_is_one_line(tmp_path, name):
    text, columns, line = WRONG[name]
    with pytest.raises(FedtideError, match=rf"data.csv: .*{line}"):
        table(tmp_path, text, **columns).load(None, 0)


# -- several files, dates in columns, missing numbers ------------------------------------------------------------------

STATIONS = {
    "north.csv": "No,year,month,day,hour,dust,warm,station\n1,2013,3,1,0,6,1.5,N\n2,2013,3,1,1,NA,2.5,N\n"
    "3,2013,3,1,2,80,3.5,N\n",
    "south.csv": "No,year,month,day,hour,dust,warm,station\n1,2013,3,1,0,35,7.5,S\n2,2014,12,31,23,200,,S\n",
}


def stations(folder: Path, **settings) -> CSV:
    for name, text in STATIONS.items():
        (folder / name).write_text(text)
    paths = tuple(str(folder / name) for name in STATIONS)
    columns = {"label": "dust", "cuts": (35.0, 75.0), "client": "station", "features": ("warm",), "missing": "drop"}
    return CSV(**{"path": paths, "time": ("year", "month", "day", "hour"), **columns, **settings})


def test_several_files_are_one_table(tmp_path):
    rows = stations(tmp_path).load(None, 0)
    assert rows.x.tolist() == [[1.5], [3.5], [7.5]]
    assert (rows.y.tolist(), rows.classes) == ([0, 2, 1], 3)
    assert (rows.client.tolist(), rows.client_names) == ([0, 0, 1], ("N", "S"))
    march = 1362096000.0
    assert rows.time.tolist() == [march, march + 7200, march]
    assert rows.name == "2 files"


def test_a_date_and_an_hour_are_a_time(tmp_path):
    (tmp_path / "a.csv").write_text("day,hr,a,label\n1970-01-02,3,0.5,0\n1970-01-01,0,0.25,1\n")
    rows = CSV(str(tmp_path / "a.csv"), time=("day", "hr"), features=("a",)).load(None, 0)
    assert rows.time.tolist() == [97200.0, 0.0]
    (tmp_path / "a.csv").write_text("day,hr,a,label\n1970-01-02,three,0.5,0\n")
    with pytest.raises(FedtideError, match="row 2: hr: found 'three', allowed: a number"):
        CSV(str(tmp_path / "a.csv"), time=("day", "hr")).load(None, 0)


def test_a_step_is_the_time_from_row_to_row_dropped_ones_included(tmp_path):
    rows = stations(tmp_path, time={"every": 1800.0}).load(None, 0)
    assert rows.time.tolist() == [0.0, 3600.0, 0.0]


def test_classes_that_no_row_reaches_are_there(tmp_path):
    assert stations(tmp_path, cuts=(35.0, 75.0, 500.0)).load(None, 0).classes == 4


def test_labels_that_are_names_in_one_file_are_names_in_all(tmp_path):
    a = table(tmp_path, "x,label\n1,2\n2,0\n", "a.csv").path
    b = table(tmp_path, "x,label\n3,two\n4,two\n", "b.csv").path
    assert CSV(path=(a, b)).load(None, 0).y.tolist() == [1, 0, 2, 2]
    assert CSV(path=(a, a)).load(None, 0).y.tolist() == [2, 0, 2, 0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"missing": "error"}, r"north\.csv: row 3: dust: found 'NA', allowed: a value"),
        (
            {"time": ("year", "month", "dust"), "label": "warm"},
            r"row 4: year, month, dust: time: found '2013 3 80', allowed: year",
        ),
        ({"time": ("year", "month", "date")}, r"no column 'date'"),
        ({"features": None, "client": None}, r"north\.csv: row 2: station: found 'N', allowed: a number"),
    ],
)
def test_what_is_wrong_in_one_of_several_files_is_one_line(tmp_path, settings, said):
    with pytest.raises(FedtideError, match=said):
        stations(tmp_path, **settings).load(None, 0)


def test_files_must_be_alike(tmp_path):
    a = table(tmp_path, "x,label\n1,2\n", "a.csv").path
    b = table(tmp_path, "x,z,label\n3,4,1\n", "b.csv").path
    with pytest.raises(FedtideError, match=r"numbers of features: found .1, 2., allowed: equally many"):
        CSV(path=(a, b)).load(None, 0)


def test_a_file_in_which_every_row_lacks_something_is_one_line(tmp_path):
    with pytest.raises(FedtideError, match="something is missing in every row"):
        CSV(path=table(tmp_path, "x,label\nNA,2\n,1\n").path, missing="drop").load(None, 0)


# -- scaling ----------------------------------------------------------------------------------------------------------


def test_features_are_scaled_by_all_rows_of_a_table_without_times(tmp_path):
    rows = replace(table(tmp_path, "a,b,label\n1,7,0\n3,7,1\n5,7,0\n"), scaled=True).load(None, 0)
    assert torch.allclose(rows.x[:, 0], torch.tensor([-1.5, 0.0, 1.5]) * (2 / 3) ** 0.5)
    assert rows.x[:, 1].tolist() == [0, 0, 0]
    assert rows.x.dtype == torch.float32


def test_features_are_scaled_by_the_earliest_tenth_where_rows_have_times(tmp_path):
    lines = "".join(f"{1000 * second + second % 2},{100 - second},{second % 2}\n" for second in range(40))
    rows = replace(table(tmp_path, f"a,when,label\n{lines}"), time="when", scaled=True).load(None, 0)
    last = np.array([[36_000], [37_001], [38_000], [39_001]])  # the earliest stand last
    assert np.allclose(rows.x[36:], (last - last.mean()) / last.std())


def test_features_are_scaled_without_the_rows_for_testing(tmp_path):
    x = np.array([[1.0], [3.0], [100.0]])
    rows = replace(npz(tmp_path, x=x, y=[0, 1, 0], held_out=[0, 0, 1]), scaled=True).load(None, 0)
    assert rows.x[:, 0].tolist() == [-1, 1, 98]
    assert rows.x.dtype == torch.float64


# -- gas sensors ------------------------------------------------------------------------------------------------------


def gas(folder: Path, **batches: str) -> GasSensors:
    for name, text in batches.items():
        (folder / f"{name}.dat").write_text(text)
    return GasSensors(path=str(folder))


def sample(first: str, value: float, by: str) -> str:
    numbers = [f"{value + place:g}" for place in range(128)]
    if by == "commas":
        return ",".join([first, "10.0", *numbers]) + "\n"
    return " ".join([first, *(f"{place}:{number}" for place, number in enumerate(numbers, start=1))]) + "\n"


def test_batches_are_read_in_order_whatever_they_are_written_as(tmp_path):
    first = sample("Ethanol", 1, "commas") + sample("Acetone", 3, "commas")
    source = gas(tmp_path, batch10=sample("6", 5, "pairs"), batch2=sample("2;50.0", 7, "pairs"), batch1=first)
    rows = replace(source, scaled=False).load(None, 0)
    assert rows.y.tolist() == [0, 4, 1, 5]
    assert rows.time.tolist() == [1, 1, 2, 10]
    assert rows.classes == 6
    assert rows.x[:, 0].tolist() == [1, 3, 7, 5]
    assert rows.x[2].tolist() == [7.0 + place for place in range(128)]
    # Of the first batch the mean is 2 and the deviation 1.
    assert source.load(None, 0).x[:, 5].tolist() == [-1, 1, 5, 3]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (sample("Methane", 1, "commas"), "row 2: gas: found 'Methane', .*llowed: ethanol, ethylene"),
        (sample("7", 1, "pairs"), "row 2: gas: found '7'"),
        ("Ethanol,10.0,1,2,3\n", "row 2: number of features: found 3, allowed: 128"),
        (sample("Ethanol", 1, "commas").replace(",5,", ",five,"), "row 2: feature 5: found 'five', allowed: a finite"),
        (sample("Ethanol", 1, "commas").replace(",5,", ",nan,"), "row 2: feature 5: found 'nan', allowed: a finite"),
        (sample("1", 1, "pairs").replace(" 5:", " 6:", 1), "row 2: feature 5: found '6:"),
    ],
)
def test_a_wrong_line_of_a_batch_names_file_and_row(tmp_path, line, said):
    with pytest.raises(FedtideError, match=said) as error:
        gas(tmp_path, batch3=sample("Ethanol", 1, "commas") + line).load(None, 0)
    assert "batch3.dat" in str(error.value)


def test_a_folder_without_batches_is_one_line(tmp_path):
    with pytest.raises(FedtideError, match=r"no file called batch1\.dat"):
        gas(tmp_path).load(None, 0)
    with pytest.raises(FedtideError, match="no rows"):
        gas(tmp_path, batch1="\n").load(None, 0)


ARFF = """% Activities
@relation walks

@attribute 'a mean' numeric
@attribute "B" REAL
@attribute user {33, 20}
@attribute class {Walking, 'Standing still'}

@data
0.5,2,33,Walking
% a comment
1.5,?,20,'Standing still'
2.5,4,20,Walking
"""


def test_an_arff_file_is_read_as_a_table(tmp_path):
    (tmp_path / "walks.arff").write_text(ARFF)
    source = CSV(str(tmp_path / "walks.arff"), label="class", client="user", missing="mean")
    rows = source.load(None, 0)
    assert rows.x.tolist() == [[0.5, 2.0], [1.5, 3.0], [2.5, 4.0]]
    assert (rows.label_names, rows.y.tolist()) == (("Standing still", "Walking"), [1, 0, 1])
    assert (rows.client_names, rows.client.tolist()) == (("20", "33"), [1, 0, 0])
    assert source.feature_names(None) == ("a mean", "B")
    with pytest.raises(FedtideError, match=r"walks.arff: row 12: B: found '', allowed: a value"):
        replace(source, missing="error").load(None, 0)

    other = "%\n \n" + ARFF.replace("@relation ", "@RELATION\t").replace("@attribute ", "@Attribute\t")
    (tmp_path / "walks.arff").write_text(other.replace("' numeric", "'\tnumeric").replace("user {", "user\t{"))
    assert torch.equal(source.load(None, 0).x, rows.x)
    assert source.feature_names(None) == ("a mean", "B")


@pytest.mark.parametrize("header", ["% fat", "%"])
def test_a_csv_file_may_begin_with_a_percent_sign(tmp_path, header):
    (tmp_path / "milk.csv").write_text(f"{header},label\n1.5,a\n3.5,b\n")
    source = CSV(str(tmp_path / "milk.csv"), label="label")
    assert source.load(None, 0).x.tolist() == [[1.5], [3.5]]
    assert source.feature_names(None) == (header,)


@pytest.mark.parametrize(("text", "line"), [
    ("@relation a\n@attribute x numeric\n@attribute z real\n@data\n1,2,3\n", "number of cells: found 3, allowed: 2"),
    ("@relation a\n@attribute x numeric\n", "is empty, allowed: a header, and rows below it"),
    ("@relation a\n@attribute\n@data\n1\n", "row 2: attribute: found '', allowed: a name and a type"),
    ("@relation a\n@attribute x numeric\n@attribute x numeric\n@data\n1,2\n", "two columns are called 'x'"),
])  # fmt: skip
def test_a_damaged_arff_file_is_one_line(tmp_path, text, line):
    (tmp_path / "a.arff").write_text(text)
    with pytest.raises(FedtideError, match=re.escape(line)):
        CSV(str(tmp_path / "a.arff"), label="x").load(None, 0)


def test_a_date_in_several_columns_keeps_the_fraction_of_the_last(tmp_path):
    text = "year,month,day,hour,a,label\n1970,1,1,7.5,1,0\n1970,1,2,8,2,1\n"
    rows = table(tmp_path, text, time=("year", "month", "day", "hour"), features=("a",)).load(None, 0)
    assert rows.time.tolist() == [27000.0, 115200.0]


def test_large_whole_numbers_are_scaled_before_they_are_rounded(tmp_path):
    """Float32 tells eight numbers beyond a hundred million no more apart."""
    text = "a,label\n" + "".join(f"{100_000_000 + n},{n % 2}\n" for n in range(8))
    x = table(tmp_path, text, scaled=True).load(None, 0).x[:, 0]
    scaled = (torch.arange(8.0) - 3.5) / 5.25**0.5
    torch.testing.assert_close(x, scaled)
    made = from_arrays("a", torch.arange(8)[:, None] + 100_000_000, torch.arange(8) % 2, scaled=True).x
    torch.testing.assert_close(made[:, 0], scaled)


def named_by_numbers():
    """Labels as folders of pictures may be called."""
    return np.zeros((4, 1), np.float32), ["0", "1", "1", "0"]


def test_the_same_name_is_the_same_label_in_several_sources(tmp_path):
    cats = table(tmp_path, "x,label\n1,cat\n2,dog\n", "a.csv")
    birds = table(tmp_path, "x,label\n3,bird\n4,cat\n", "b.csv")
    rows = Domains(("a", "b"), (cats, birds), "shared").load(None, 0)
    assert [rows.label_names[y] for y in rows.y.tolist()] == ["cat", "dog", "bird", "cat"]
    assert Domains(("a", "b"), (cats, birds)).load(None, 0).classes == 4
    numbers = table(tmp_path, "x,label\n3,0\n4,1\n", "c.csv")
    with pytest.raises(FedtideError, match=r"data.source.labels: 'c' has numbers, allowed: names, as in 'a'"):
        Domains(("a", "c"), (cats, numbers), "shared").load(None, 0)
    written = Python("unit.data.test_tables:named_by_numbers")
    assert Domains(("c", "d"), (numbers, written), "shared").load(None, 0).classes == 2
    more = table(tmp_path, "x,label\n3,0\n4,2\n", "e.csv")
    assert Domains(("d", "e"), (written, more), "shared").load(None, 0).label_names == ()
    sorts = replace(table(tmp_path, "x,kind,label\n1,u,0\n2,v,1\n", "d.csv"), categories=("kind",))
    with pytest.raises(FedtideError, match=r"data.source.sources: 'd' has categories, allowed: none"):
        Domains(("d", "e"), (sorts, sorts)).load(None, 0)


def test_several_sources_are_scaled_by_their_own_training_rows(tmp_path):
    parts = [
        table(tmp_path, "a,label\n" + "".join(f"{n * n + far},{n % 2}\n" for n in range(60)), name, scaled=True)
        for name, far in (("a.csv", 0), ("b.csv", 1000))
    ]
    people = build(Domains(("a", "b"), parts).load(None, 0), IID(clients=4), split=Split(val=0.2, test=0.2))
    trained = people.trained_on.long().unique()
    for domain in (0, 1):
        own = trained[people.rows.domain[trained] == domain]
        assert float(people.rows.x[own].double().mean()) == pytest.approx(0.0, abs=1e-6)
