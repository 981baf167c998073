"""Cells and columns of files and frames: the same bits by each way, times, categories, gaps, and mistakes."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as arrow
import pytest
import torch
from pyarrow import parquet

import fedtide as ft
from fedtide.core.errors import FedtideError
from fedtide.data import stack, table
from fedtide.data.rows import Rows
from fedtide.data.sources import CSV
from fedtide.data.sources.cells import Column, seconds_of
from fedtide.data.sources.table_files import read_names
from fedtide.data.sources.written import read_numbers
from helpers.same_rows import same

NUMBERS = ["1", "-2.5", " 3 ", "+4", ".5", "5.", "1e-3", "0.1234567890123456789", "-0", "1e-400", "16777217", "9e15"]
GAPS = ["", "NA", "nan", "Null", " na ", " ", " NA"]


def outcome(source: CSV) -> Rows | str:
    try:
        return source.load(None, 0)
    except FedtideError as error:
        return str(error)


def test_blank_rows_count_in_the_number_of_a_row(tmp_path):
    lines = ["x,label", *(f"{row},{row % 2}" for row in range(20))]
    lines[15] = "oops,1"
    lines.insert(3, "")
    (tmp_path / "a.csv").write_text("\n".join(lines))
    assert "a.csv: row 17: x: found 'oops', allowed: a number" in outcome(CSV(str(tmp_path / "a.csv")))
    (tmp_path / "a.csv").write_text("\n".join(lines).replace("oops,1", "15,-1"))
    assert "a.csv: row 17: label: found '-1'" in outcome(CSV(str(tmp_path / "a.csv")))


def test_numbers_are_those_that_python_reads_but_for_what_it_alone_does():
    def read(*texts: str):
        return read_numbers(arrow.array([text.strip() for text in texts]))

    assert read(*NUMBERS).values.tolist() == [float(cell) for cell in NUMBERS]
    assert np.isnan(read("1", *GAPS).values).tolist() == [False, *[True] * len(GAPS)]
    odd = ["1_0", "²", "٣", "inf", "-nan", "x", "1,5", "0x1A"]
    assert read("1", *GAPS, *odd).wrong.tolist() == [False] * (1 + len(GAPS)) + [True] * len(odd)


# -- times ------------------------------------------------------------------------------------------------------------


def test_times_are_those_that_python_reads():
    draw = random.Random(0)
    stamps = [datetime(1, 1, 1) + timedelta(microseconds=draw.randrange(10**17)) for _ in range(200)]
    for timespec in ("minutes", "seconds", "milliseconds", "microseconds"):
        texts = [stamp.isoformat(draw.choice("T "), timespec) for stamp in stamps]
        want = [datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() for text in texts]
        assert seconds_of(texts, str).tolist() == pytest.approx(want, rel=1e-14)
    for text in ("0000-01-01", "2026-02-30", "2026-03-01T25:00"):
        with pytest.raises(FedtideError, match=f"row 1: time: found '{text}', allowed: "):
            seconds_of(["2026-03-01", text], "row {}".format)


@pytest.mark.parametrize("hour", ["24", "-0.5"])
def test_an_hour_that_no_day_has_is_named(tmp_path, hour):
    (tmp_path / "a.csv").write_text(f"year,month,day,hour,x,label\n2026,3,1,5,0,0\n2026,3,1,{hour},1,1\n")
    source = CSV(str(tmp_path / "a.csv"), time=["year", "month", "day", "hour"])
    assert f"a.csv: row 3: year, month, day, hour: time: found '2026 3 1 {hour}', allowed: year" in outcome(source)


# -- categories and gaps ----------------------------------------------------------------------------------------------


def csv_of(folder: Path, *lines: str, **settings) -> CSV:
    (folder / "a.csv").write_text("\n".join(lines))
    return CSV(str(folder / "a.csv"), **settings)


def test_each_category_becomes_a_feature_in_the_place_of_its_column(tmp_path):
    lines = ("a,wind,b,label", "1,W,2,0", "3,N,4,1", "5,W,6,0")
    rows = csv_of(tmp_path, *lines, categories=("wind",)).load(None, 0)
    assert rows.x.tolist() == [[1, 0, 1, 2], [3, 1, 0, 4], [5, 0, 1, 6]]
    rows = csv_of(tmp_path, *lines, categories=("wind",), features=("wind",), scaled=True).load(None, 0)
    assert rows.x.tolist() == [[0, 1], [1, 0], [0, 1]]


def test_categories_and_means_are_those_of_the_rows_that_are_known(tmp_path):
    later = [f"{day},{'E' if day % 2 else 'N'},{'' if day == 5 else 10 * day},{day % 2}" for day in range(1, 20)]
    source = csv_of(tmp_path, "t,wind,b,label", *later, "0,N,3,1", time="t", categories=("wind",), missing="mean")
    rows = source.load(None, 0)  # the earliest tenth are days 0 and 1
    assert rows.x[4].tolist() == [1.0, 0.0, 6.5]
    source = csv_of(
        tmp_path, "t,wind,b,label", *later[1:], "0,N,3,1", "1,,4,0", time="t", categories=("wind",), missing="mean"
    )
    assert source.load(None, 0).x[-2:].tolist() == [[1.0, 3.0], [0.0, 4.0]]
    assert source.load(None, 0).x[3].tolist() == [0.0, 3.5]  # E came later, and nothing is known of it


@pytest.mark.parametrize(("lines", "settings", "said"), [
    (("a,w,label", "1,x,0", "2,,1"), {}, "row 3: w: found '', allowed: a value; data.source.missing = 'drop'"),
    (("a,w,label", "NA,x,0", "NA,y,1"), {"missing": "mean"}, "a: no number in the 2 rows known when training begins"),
    (("a,w,label", "1,,0", "2,,1"), {"missing": "mean"}, "w: no category in the 2 rows known when training begins"),
    (("a,w,label", *(f"1,{row},{row % 2}" for row in range(101))), {}, "w: found '101 categories', allowed: 100"),
    (("a,w,label", "1,x,0"), {"categories": ("wind",)}, "data.source.categories: found 'wind', allowed: some of the"),
    (("a,w,label", "1,x,0"), {"categories": ()}, r"row 2: w: found 'x', .* data.source.categories = \['w'\]"),
])  # fmt: skip
def test_what_is_wrong_with_categories_is_one_line(tmp_path, lines, settings, said):
    with pytest.raises(FedtideError, match=f"a.csv: .*{said}|^{said}"):
        csv_of(tmp_path, *lines, **{"categories": ("w",), **settings}).load(None, 0)


BERLIN = ZoneInfo("Europe/Berlin")
N = 40
SHOPS = {
    "No": list(range(N)),
    "when": [datetime(2026, 3, 1 + row // 4, row % 24, 15) for row in range(N)],
    "shop_id": [f"s{row % 4}" for row in range(N)],
    "basket": [0.25 * (row % 7) for row in range(N)],
    "wind": ["N" if row % 3 else "E" for row in range(N)],
    "country": ["at"] * N,
    "bought": ["yes" if row % 7 > 3 else "no" for row in range(N)],
}


def written(path, columns=SHOPS):
    lines = [",".join(columns), *(",".join(map(str, line)) for line in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def frame_of(library: str, columns):
    if library == "mapping":
        return {name: np.array(column) for name, column in columns.items()}
    module = pytest.importorskip(library)
    return module.table(columns) if library == "pyarrow" else module.DataFrame(columns)


LIBRARIES = ["mapping", "pandas", "polars", "pyarrow"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_rows_are_the_same_bits_from_a_frame_and_a_file(tmp_path, library, capsys):
    source = CSV(
        str(written(tmp_path / "a.csv")), label="bought", client="shop_id", time="when", features=("basket", "wind"),
        categories=("wind",), scaled=True,
    )  # fmt: skip
    rows = table(frame_of(library, SHOPS), scaled=True)
    assert same(rows, source.load(None, 0))
    assert same(table(tmp_path / "a.csv", scaled=True, quiet=True), rows)
    times = "2026-03-01 00:15 to 2026-03-10 15:15"
    assert capsys.readouterr().err.splitlines() == [
        "table: 40 rows",
        "label: bought (2 classes, guessed: no column has a label-like name); client: shop_id (4 values); "
        f"domain: none; time: when ({times}); "
        "features: basket and wind (categories)",
        "left out: No (numbers the rows) and country (always the same)",
    ]
    people = ft.population(rows)
    assert people.registered == 4


def test_a_parquet_file_is_read_as_a_csv_file_is(tmp_path):
    parquet.write_table(arrow.table(SHOPS), tmp_path / "a.parquet")
    written(tmp_path / "a.csv")
    settings = {"label": "bought", "client": "shop_id", "time": "when", "features": ("basket", "wind")}
    settings |= {"categories": ("wind",)}
    one, other = (CSV(str(tmp_path / name), **settings).load(None, 0) for name in ("a.csv", "a.parquet"))
    assert same(one, other)
    assert same(table(tmp_path / "a.parquet", quiet=True), one)
    assert ft.inspect(tmp_path / "a.parquet").table.columns == ft.inspect(tmp_path / "a.csv").table.columns
    with pytest.raises(FedtideError, match=r"a.parquet: row 0: wind: found 'E', allowed: a number; data"):
        CSV(str(tmp_path / "a.parquet"), **{**settings, "categories": ()}).load(None, 0)
    gaps = {**SHOPS, "basket": [None, *SHOPS["basket"][1:]]}
    parquet.write_table(arrow.table(gaps), tmp_path / "gaps.parquet")
    with pytest.raises(FedtideError, match=r"gaps.parquet: row 0: basket: found None, .*missing = 'drop'"):
        CSV(str(tmp_path / "gaps.parquet"), **settings).load(None, 0)
    assert len(CSV(str(tmp_path / "gaps.parquet"), **settings, missing="drop").load(None, 0)) == N - 1
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(FedtideError, match=r"cut.parquet: damaged or not a Parquet file"):
        CSV(str(tmp_path / "cut.parquet"), **settings).load(None, 0)


def spoiled(kind: str) -> arrow.Array:
    """Sixty cells of a type that are not all what the type says, or are too far away."""
    _, offsets, chars = arrow.array([b"\xff"] * 60).buffers()
    return {
        "text": arrow.StringArray.from_buffers(60, offsets, chars),
        "zone": arrow.array(range(60), arrow.timestamp("us", tz="Nowhere/Land")),
        "days": arrow.array([-(2**31)] * 60, arrow.date32()),
        "milliseconds": arrow.array([-(10**16)] * 60, arrow.date64()),
        "years": arrow.array([2**52] * 60, arrow.timestamp("s", tz="Europe/Berlin")),
        "duration": arrow.array([2**60 + 1] * 60, arrow.duration("ns")),
        "long": arrow.array([2**62] * 60, arrow.duration("s")),
        "clock": arrow.array([10**12 + 1] * 60, arrow.time64("ns")),
    }[kind]


@pytest.mark.parametrize(("kind", "said"), [
    ("text", "column 'odd': damaged (Invalid UTF8 sequence"),
    ("zone", "column 'odd': time zone: found 'Nowhere/Land', allowed: one that is known"),
    ("days", "row 0: odd: found 'a time outside of the years 1 to 9999'"),
    ("milliseconds", "row 0: odd: found 'a time outside of the years 1 to 9999'"),
    ("years", "row 0: odd: found 'a time outside of the years 1 to 9999'"),
])  # fmt: skip
def test_cells_of_a_parquet_file_that_are_not_what_its_type_says(tmp_path, kind, said):
    parquet.write_table(arrow.table({"odd": spoiled(kind), "label": ["a", "b"] * 30}), tmp_path / "a.parquet")
    assert said in outcome(CSV(str(tmp_path / "a.parquet")))


def test_lengths_of_time_in_any_unit(tmp_path):
    columns = {kind: spoiled(kind) for kind in ("duration", "long")}
    parquet.write_table(arrow.table({**columns, "label": ["a", "b"] * 30}), tmp_path / "a.parquet")
    rows = CSV(str(tmp_path / "a.parquet"), scaled=False).load(None, 0)
    assert rows.x[0].tolist() == pytest.approx([2.0**60 / 1e9, 2.0**62])
    assert Column("clock", spoiled("clock")).clock[0] == 1000.0


def test_a_line_longer_than_a_cell_may_be(tmp_path):
    names = [f"column_{number}" for number in range(12_000)]
    text = "\n".join([",".join([*names, "label"]), *(",".join(["1"] * 12_000 + [label]) for label in "ab" * 2)])
    (tmp_path / "wide.csv").write_text(text)
    assert read_names(tmp_path / "wide.csv") == [*names, "label"]
    (tmp_path / "long.csv").write_text("x" * 200_000 + ",label\n1,a\n2,b\n")
    with pytest.raises(FedtideError, match=r"long.csv: damaged or not a CSV file \(field larger than field limit"):
        read_names(tmp_path / "long.csv")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("times", [
    [datetime(2026, 3, 1, 12), datetime(2026, 3, 2, 12)],
    [datetime(2026, 3, 1, 13, tzinfo=BERLIN), datetime(2026, 3, 2, 13, tzinfo=BERLIN)],
    ["2026-03-01T12:00:00Z", "2026-03-02T13:00+01:00"],
    [1772366400, 1772452800],
    [1772366400000, 1772452800000],
])  # fmt: skip
def test_dates_of_any_kind_are_seconds(library, times):
    rows = table(frame_of(library, {"a": [1.0, 2.0], "when": times, "label": [0, 1]}), time="when", quiet=True)
    assert rows.time.tolist() == [1772366400.0, 1772452800.0]


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_gaps_are_an_error_or_left_out_or_filled(library):
    columns = {"a": [1.0, None, 3.0, 4.0], "w": ["x", "x", None, "y"], "label": ["u", "v", "u", None]}
    frame = frame_of(library, columns)
    with pytest.raises(
        FedtideError, match=r"table: row 3: label: found (None|nan), allowed: a value; missing = 'drop'"
    ):
        table(frame, features=("a", "w"), label="label")
    assert table(frame, features=("a", "w"), label="label", missing="drop", quiet=True).x.tolist() == [[1.0, 1.0]]
    filled = table(frame, features=("a", "w"), label="label", missing="mean", quiet=True)
    assert filled.x.tolist() == [[1.0, 1.0], [2.0, 1.0], [3.0, 0.0]]
    assert filled.said[0] == "table: 4 rows, 1 left out because something is missing"


def test_domains_and_cuts():
    columns = {"a": [1, 2, 3, 4], "group": ["d", "d", "n", "n"], "dust": [3.5, 40.25, 8.0, 90.0]}
    rows = table(columns, label="dust", cuts=[5, 50], quiet=True)
    assert (rows.y.tolist(), rows.classes, rows.domain_names) == ([0, 1, 1, 2], 3, ("d", "n"))
    people = ft.population(rows, partition=ft.data.IID(clients=2), groups=ft.data.ByDomain())
    assert people.group_names == ("d", "n")
    assert repr(rows).splitlines()[1].startswith("label: dust (3 classes); client: none; domain: group (2 values)")


@pytest.mark.parametrize(("data", "options", "said"), [
    ({"a": [1, 2], "b": [1, 2]}, {"label": "lable"}, "table: label: no column 'lable'; allowed: a, b"),
    ({"a": [1.5, 2], "b": [1.5, 2.25]}, {"label": "b", "target": "classes"},
     "table: label 'b': found 'a measure with 2 values', all"),
    ({"a": [1.5, 2], "b": ["x", "y"]}, {"label": "b", "cuts": [1]}, "table: label: found 'b', allowed: a column of"),
    ({"a": [1.5, 2], "b": [0, 1]}, {"label": "b", "missing": "fill"}, "missing: found 'fill', allowed: error, drop"),
    ({"a": [1.5, np.inf], "b": [0, 1]}, {"label": "b", "features": ["a"]}, "table: row 1: a: found inf, allowed: a v"),
    ({"a": [1.5, np.inf], "b": [0, 1]}, {"label": "b"}, "table: no feature columns besides b"),
    ({"a": [None, None], "b": [0, 1]}, {"label": "b", "features": ["a"], "missing": "drop"}, "table: something is"),
    ({"a": [], "b": []}, {"label": "b"}, "table: no rows"),
    (7, {}, "table: data: found 'int', allowed: files, a data frame, or a mapping of columns"),
    ("none.csv", {}, "table: no such file or folder: .*none.csv; name a CSV or Parquet file"),
    ({"a": [1.5, 2], "t": ["2026-03-01", "2026-03-02"], "b": [0, 1]}, {"label": "b", "time": "", "features": ["t"]},
     "table: features: found 't', allowed: columns of numbers, or of texts that come again"),
])  # fmt: skip
def test_what_is_wrong_is_one_line(data, options, said):
    with pytest.raises(FedtideError, match=said) as caught:
        table(data, **options)
    assert "\n" not in str(caught.value)


def test_arrays_without_labels_and_rows_with_columns_are_refused():
    rows = table({"a": [1.5, 2.0], "b": [0, 1]}, label="b", quiet=True)
    with pytest.raises(FedtideError, match=r"population: y: found None, allowed: labels; or rows alone"):
        ft.population(np.zeros((2, 2)))
    with pytest.raises(FedtideError, match=r"population: client: found 'list', allowed: none beside Rows"):
        ft.population(rows, client=[1, 2])


# -- items ------------------------------------------------------------------------------------------------------------


def test_items_of_a_data_set_are_stacked():
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(2 * 3 * 5 * 4, dtype=np.uint8).reshape(2, 5, 4, 3)
    pictures = [{"image": image.fromarray(each), "writer": f"w{k}", "label": k} for k, each in enumerate(pixels)]
    rows = stack(pictures)
    assert np.array_equal(rows.x, pixels.transpose(0, 3, 1, 2))
    assert (rows.y.tolist(), rows.client_names) == ([0, 1], ("w0", "w1"))
    assert stack(pictures, features="image", client="").client is None
    data = torch.utils.data.TensorDataset(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0]))
    assert torch.equal(stack(data).x, data.tensors[0])
    assert stack(data).y.tolist() == [0, 1, 0]
    assert ft.population(stack(data), partition=ft.data.IID(clients=1)).registered == 1


def test_a_data_set_may_return_the_same_array_again_and_again():
    class Buffered(list):
        buffer = np.zeros(2)

        def __getitem__(self, row):
            self.buffer[:] = row
            return self.buffer, row % 2

    assert stack(Buffered("abc")).x.tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize(("data", "options", "said"), [
    (iter([]), {}, "data set: found 'list_iterator', allowed: one with a length"),
    ([], {}, "list: no items"),
    ([5], {}, "list: item 0: found 'int', allowed: pairs"),
    ([([1], 0), ([1, 2], 1)], {}, r"list: item 1: shape: found \(2,\), allowed: \(1,\), as of the first"),
    ([([1], [0, 1])], {}, r"list: item 0: shape of 1: found \(2,\), allowed: one value"),
    ([{"a": 1, "b": 2, "label": 0}], {}, "list: found 'items with a, b, label', allowed: one key for the features"),
    ([{"a": 1, "label": 0}], {"features": "b"}, "list: item 0: found 'b', allowed: one of a, label"),
])  # fmt: skip
def test_items_that_are_no_rows_are_one_line(data, options, said):
    with pytest.raises(FedtideError, match=said):
        stack(data, **options)
