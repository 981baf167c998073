"""Tables as people have them: the planted table comes back from each export, and oddities are said."""

import tracemalloc
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as arrow
import pytest
import torch
from pyarrow import parquet

import fedtide as ft
from fedtide.data.sources import CSV
from fedtide.data.sources.cells import seconds_of
from fedtide.data.sources.table_files import read_names, read_table
from fedtide.inspection.findings import inspect_table
from fedtide.inspection.table import Roles, Table, read
from helpers.exports import ROWS, Export, every, planted, write

PLANTED = planted()
WHEN = [f"2018-{1 + day // 28:02d}-{1 + day % 28:02d}" for day in range(0, 200, 5)]
DAYS = np.array(WHEN, "datetime64[s]").astype(np.int64)
AT = pd.to_datetime(WHEN)


def codes(values: np.ndarray) -> list[int]:
    """Number different values in the order in which they appear."""
    places: dict[str, int] = {}
    return [places.setdefault(str(value), len(places)) for value in values.tolist()]


@pytest.mark.parametrize("how", every(100), ids=str)
def test_the_planted_table_comes_back(tmp_path, how: Export):
    table = read(write(PLANTED, how, tmp_path))
    rows = np.arange(ROWS) % 40 != 7 if how.date == "sentinels" else np.ones(ROWS, bool)
    want = PLANTED[rows].assign(date=PLANTED["date"].dt.floor("D" if how.date == "days as numbers" else "s"))
    assert table.label.astype(str).tolist() == want["load_type"].tolist()
    assert table.client is not None
    assert codes(table.client) == codes(want["site"].to_numpy())
    assert table.features[:, :2] == pytest.approx(want[["a", "b"]].to_numpy(), abs=0.006)
    assert set(table.columns.features[2:]) <= {"flag"}
    assert table.time == pytest.approx(want["date"].astype("datetime64[s]").astype(np.int64).to_numpy(), abs=1)


def answers(how: Export, folder: Path) -> list[tuple[str, str]]:
    return [(answer.question, answer.level) for answer in ft.inspect(write(PLANTED, how, folder))]


@pytest.fixture(scope="module")
def plain_answers(tmp_path_factory) -> list[tuple[str, str]]:
    return answers(Export("ISO", "names", "plain", "CSV"), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("how", every(100)[::12], ids=str)
def test_the_eight_answers_are_the_same(tmp_path, plain_answers, how: Export):
    assert answers(how, tmp_path) == plain_answers


def test_a_study_reads_other_files_as_the_first(tmp_path):
    how = Export("day first", "codes", "continental", "semicolons")
    path = write(PLANTED, how, tmp_path)
    ft.inspect(path).write(tmp_path / "out")
    source = ft.config.read(next((tmp_path / "out").glob("*.toml"))).data.source
    assert (source.decimal, source.time_format) == (",", "day-month-year")
    path.write_text("date;site;a;b;load_type\n02/01/2018;00001;1.234,5;2,5;low\n03/01/2018;00001;7;1;mid\n")
    rows = CSV(**{**vars(source), "scaled": False}).load(None, 0)
    assert rows.x.tolist() == [[1234.5, 2.5], [7.0, 1.0]]
    assert rows.time.tolist() == [1514851200.0, 1514937600.0]
    assert rows.client_names == ("00001",)


def frame(**columns) -> pd.DataFrame:
    return pd.DataFrame({"x": np.arange(40.0) % 7, "label": np.arange(40) % 2, **columns})


def said(**columns) -> str:
    return "\n".join(read(frame(**columns)).said)


@pytest.mark.parametrize(("columns", "words"), [
    ({"tags": [[1, 2]] * 40}, "left out: tags (lists)"),
    ({"geo": [{"lat": 1.5}] * 40}, "left out: geo (structs)"),
    ({"copy": np.arange(40.0) % 7}, "left out: copy (a copy of x)"),
    ({"label": ["Max", "max"] * 20}, "'Max' (20) and 'max' (20) differ by case or blanks only"),
    ({"label": ["max", "max ", "min", "min"] * 10}, "label: blanks around 'max ' are left out"),
    ({"power": ["1.5 kWh", "2.5 MWh"] * 20}, "power (numbers in MWh and kWh)"),
    ({"power": ["1.5 kWh", "2.5 kWh"] * 20}, "read: power in kWh"),
    ({"sales": ["1,500", "22,500"] * 20}, "read: commas divide thousands in sales, guessed"),
    ({"sales": ["1.500,5", "22.500"] * 20}, "read: decimal commas in sales"),
    ({"when": [f"0{1 + row % 4}/0{1 + row * 7 % 9}/2024" for row in range(40)]},
     "when (dates of which no cell tells whether the day or the month comes first: use --time-format day-month-year"),
    ({"when": ["1900-01-01"] * 4 + [f"2024-01-{1 + row % 28:02}" for row in range(36)]},
     "time: when (2024-01-01 00:00 to 2024-01-28 00:00, without 4 rows of 1900-01-01)"),
])  # fmt: skip
def test_what_is_odd_is_said(columns, words):
    assert words in said(**columns)


def test_columns_that_a_small_file_can_make_huge_are_not_read(tmp_path):
    """Eight cells of 400,000 equal numbers, of 800,000 bytes, or of a text: each of them a file of some kB."""
    numbers = arrow.array([np.zeros(400_000, np.int64)] * 8)
    table = arrow.table({
        "x": np.arange(8.0),
        "label": ["a", "b"] * 4,
        "tags": numbers,
        "geo": arrow.StructArray.from_arrays([numbers], ["lat"]),
        "raw": arrow.array([b"\xff" * 800_000] * 8),
        "fixed": arrow.array([b"\xff" * 800_000] * 8, arrow.binary(800_000)),
        "text": arrow.array(["x" * 800_000] * 8, arrow.string_view()),
    })  # fmt: skip
    parquet.write_table(table, tmp_path / "t.parquet", compression="zstd")
    assert (tmp_path / "t.parquet").stat().st_size < 100_000
    before = arrow.total_allocated_bytes()
    columns = read_table(tmp_path / "t.parquet", table.column_names).columns
    assert arrow.total_allocated_bytes() - before < 6_000_000  # the reader's threads free theirs a moment later
    assert [str(column.type).partition("<")[0] for column in columns.values()] == [
        "double", "dictionary", "list", "struct", "dictionary", "binary", "dictionary",
    ]  # fmt: skip
    assert "left out: tags (lists), geo (structs), raw (bytes), fixed (bytes)" in "".join(
        read(tmp_path / "t.parquet").said
    )


def test_features_of_all_types_are_numbers():
    columns = {
        "flag": pd.array([True, False] * 19 + [None, True], "boolean"),
        "spelled": ["Yes", "no"] * 20,
        "price": [Decimal("1.50"), Decimal("2.25")] * 20,
        "lasted": pd.to_timedelta([60, 90] * 20, unit="s"),
    }
    table = read(frame(**columns), Roles(label="label"))
    assert table.columns.features == ("x", "flag", "spelled", "price", "lasted")
    assert table.features[:2, 1:].tolist() == [[1, 1, 1.5, 60], [0, 0, 2.25, 90]]


@pytest.mark.parametrize("ids", [
    arrow.array([Decimal(2**60 + row % 4) for row in range(40)], arrow.decimal128(20, 0)),
    arrow.array([Decimal(2**66 + row % 4) for row in range(40)], arrow.decimal128(25, 0)),
    arrow.array([2**63 + row % 4 for row in range(40)], arrow.uint64()),
    arrow.array([2**60 + row % 4 if row != 7 else None for row in range(40)]),
    arrow.array([f"{row % 4}".encode() for row in range(40)]),
    arrow.DictionaryArray.from_arrays(np.arange(40, dtype=np.uint8) % 4, ["a", "b", "c", "d"]),
])  # fmt: skip
def test_ids_of_databases_keep_every_digit(ids):
    table = read(arrow.table({"user": ids, "x": np.arange(40) % 7, "label": np.arange(40) % 2}))
    want = [key.decode() if isinstance(key, bytes) else str(key) for key in ids.to_pylist() if key is not None]
    assert table.client.tolist() == want


def test_the_levels_of_an_index_that_have_names_are_columns():
    data = frame(user=[f"u{row % 4}" for row in range(40)], when=AT, z=np.arange(40) % 5)
    table = read(data.set_index(["user", "when"]))
    assert (table.columns.client, table.columns.time, table.columns.features) == ("user", ("when",), ("x", "z"))
    assert read(data.sample(frac=1, random_state=0)).columns.features == ("x", "z")


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_ids_and_codes_keep_every_digit(tmp_path, kind):
    ids = [2**60 + row % 4 for row in range(40)]
    codes = [f"{row % 5:03d}" for row in range(40)]
    data = frame(user=ids, label=codes)
    if kind == "csv":
        data.to_csv(tmp_path / "t.csv", index=False)
    elif kind == "parquet":
        data.to_parquet(tmp_path / "t.parquet")
    rows = ft.data.table(data if kind == "frame" else tmp_path / f"t.{kind}", quiet=True)
    assert rows.client_names == tuple(str(2**60 + place) for place in range(4))
    assert rows.label_names == ("000", "001", "002", "003", "004")


def test_clocks_of_zones_count_as_written_or_in_utc(tmp_path):
    path = tmp_path / "t.parquet"
    when = pd.date_range("2024-03-30", periods=40, freq="h", tz="Europe/Berlin")
    parquet.write_table(arrow.Table.from_pandas(frame(when=when)), path)
    written = read(path).time
    assert written is not None
    assert (written[0] / 3600 % 24, written[30] / 3600 % 24) == (0.0, 7.0)  # an hour was left out
    assert CSV(str(path), time="when", features=("x",)).load(None, 0).time[0].item() / 3600 % 24 == 23.0
    assert "+01:00 and +02:00" in read(path).said[1]


def test_a_time_format_that_a_person_says_is_taken(tmp_path):
    (tmp_path / "t.csv").write_text("t,x,label\n01/02/2024,1,0\n02/01/2024,2,1\n")
    days = {
        form: CSV(str(tmp_path / "t.csv"), time="t", time_format=form).load(None, 0).time.tolist()
        for form in ("day-month-year", "month-day-year")
    }
    assert (
        days["day-month-year"] == days["month-day-year"][::-1] == seconds_of(["2024-02-01", "2024-01-02"], str).tolist()
    )
    with pytest.raises(ft.FedtideError, match=r"t.csv: t: time: found '01/02/2024', allowed: 'day-month-year' or"):
        CSV(str(tmp_path / "t.csv"), time="t").load(None, 0)


def test_long_cells_take_no_more_memory_than_the_file(tmp_path: Path):
    """A text of a million letters stands in the dictionary of a small file once, and in memory once."""
    texts = pd.Categorical.from_codes(np.zeros(6000, int), ["a" * 10**6])
    data = pd.DataFrame({"note": texts, "x": np.arange(6000) % 7, "label": np.arange(6000) % 2})
    data.to_parquet(tmp_path / "t.parquet")
    table: Table = read(tmp_path / "t.parquet")
    assert table.columns.features == ("x",)


# -- forms of other countries and tools --------------------------------------------------------------------------------

GERMAN = ("Januar", "Februar", "März", "April", "Mai", "Juni", "Juli", "August")
FRENCH = ("janv.", "févr.", "mars", "avr.", "mai", "juin", "juil.", "août")
SPANISH = ("enero", "febrero", "marzo", "abril", "mayo", "junio", "julio", "agosto")


@pytest.mark.parametrize("written", [
    [f"{at.day}. {GERMAN[at.month - 1]} {at.year}" for at in AT],
    [f"{at.day:02d} {FRENCH[at.month - 1]} {at.year}" for at in AT],
    [f"{at.day} de {SPANISH[at.month - 1]} de {at.year}" for at in AT],
    [f"{at.year}年{at.month}月{at.day}日" for at in AT],
    [f"{at.year}. {at.month}. {at.day}." for at in AT],
    [f"{at.year}/{at.month}/{at.day}" for at in AT],
    AT.strftime("%d%b%Y:%H:%M:%S").str.upper().tolist(),
    AT.strftime("%d/%b/%Y:%H:%M:%S +0000").tolist(),
    AT.strftime("%a %b %d %H:%M:%S %Y").tolist(),
    AT.strftime("%a, %d %b %Y %H:%M:%S GMT").tolist(),
    AT.strftime("%G-W%V-%u").tolist(),
    AT.strftime("%Y%m%dT%H%M%SZ").tolist(),
    AT.strftime("%d-%m-%y %Hh%M").tolist(),
    AT.strftime("%m/%d/%Y, %I:%M %p").tolist(),
    [f"{at:%Y-%m-%dT%H:%M:%S}+00:00[Europe/London]" for at in AT],
    pd.PeriodIndex(AT, freq="D"),
    pd.Categorical(AT),
    AT.tz_localize("Asia/Kolkata"),
])  # fmt: skip
def test_dates_of_other_countries_and_tools_are_times(written):
    table = read(frame(when=written), Roles(label="label"))
    assert table.columns.time == ("when",)
    assert "when" not in table.columns.features
    assert table.time.tolist() == DAYS.tolist()


@pytest.mark.parametrize(("form", "since", "unit"), [
    ("days since 1960", "1960-01-01", "D"), ("seconds since 1960", "1960-01-01", "s"),
    ("milliseconds since 1960", "1960-01-01", "ms"), ("days", "1970-01-01", "D"), ("excel", "1899-12-30", "D"),
])  # fmt: skip
def test_numbers_since_a_day_are_times_in_a_form_that_a_person_says(form, since, unit):
    numbers = ((np.array(WHEN, "datetime64[ms]") - np.datetime64(since)) / np.timedelta64(1, unit)).tolist()
    assert read(frame(date=numbers), Roles(label="label", time_format=form)).time.tolist() == DAYS.tolist()
    assert "date" not in read(frame(date=numbers), Roles(label="label")).columns.features


@pytest.mark.parametrize("written", [
    ["2018Q1", "2018Q2"] * 20, [21185 + row for row in range(40)], ["2018-01-01 EST"] * 39 + ["2018-01-02 EST"],
    [*WHEN[:38], "Total", WHEN[39]],
])  # fmt: skip
def test_a_column_called_date_that_is_none_is_left_out_with_a_reason(written):
    assert "date (named like a time, but row " in said(date=written)


def test_dates_that_nobody_can_read_are_no_categories():
    """The first of each month, which may be days of January; and one among dates that is none."""
    months = [f"01/{1 + row % 12:02}/2023" for row in range(40)]
    for name, written in (("visit", months), ("date", ["2018Q1", "2018Q2"] * 20)):
        columns = read(frame(**{name: written}), Roles(label="label")).columns
        assert (columns.time, name in columns.features, columns.categories) == ((), False, ())
    assert read(frame(part=["morning", "evening"] * 20), Roles(label="label")).columns.categories == ("part",)


def test_a_cell_in_another_form_than_a_person_says_is_named():
    """One among dates in the form, and dates that are none in it at all."""
    days = [f"{at:%d/%m/%Y}" for at in AT]
    for form, written, row in (
        ("day-month-year", [*days[:30], "2018-02-01", *days[31:]], 30), ("day-month-year", WHEN, 0),
        ("year-month-day", [*WHEN[:30], "01/02/2018", *WHEN[31:]], 30), ("month names", WHEN, 0), ("weeks", days, 0),
        ("excel", [43101.5, *days[1:]], 1),
    ):  # fmt: skip
        with pytest.raises(ft.FedtideError, match=rf"row {row}: when: time: found .*, allowed: a time as '{form}'"):
            read(frame(when=written), Roles(label="label", time="when", time_format=form))
    found = read(frame(date=[*days[:30], "2018-02-01", *days[31:]]), Roles(label="label", time_format="day-month-year"))
    assert "date (named like a time, but row 30 is '2018-02-01': not 'day-month-year')" in "".join(found.said)


@pytest.mark.parametrize("name", ["period", "date"])
@pytest.mark.parametrize("end", ["", "Z"])
def test_texts_of_eight_digits_are_times_by_any_name(tmp_path, name, end):
    written = [f"{at:%Y%m%d}{end}" for at in AT]
    frame(**{name: written}).to_csv(tmp_path / "t.csv", index=False)
    for data in (tmp_path / "t.csv", frame(**{name: written})):
        table = read(data, Roles(label="label"))
        assert (table.columns.time, table.time.tolist()) == ((name,), DAYS.tolist())
        assert ft.data.table(data, label="label", quiet=True).time.tolist() == DAYS.tolist()
    frame(**{name: written[:4] * 10}).to_csv(tmp_path / "few.csv", index=False)
    assert read(tmp_path / "few.csv", Roles(label="label")).columns.time == (("date",) if name == "date" else ())


def test_measures_with_a_point_are_no_clocks(tmp_path):
    measure = [f"{row % 24}.{row % 60:02d}" for row in range(40)]
    frame(day=WHEN, measure=measure).to_csv(tmp_path / "t.csv", index=False)
    table = read(tmp_path / "t.csv", Roles(label="label"))
    assert (table.columns.time, table.columns.features) == (("day",), ("x", "measure"))


@pytest.mark.parametrize("clock", ["%H:%M", "%I:%M %p", "%H.%M.%S", "%Hh%M"])
def test_a_date_and_a_time_of_the_day_are_one_time(clock):
    at = pd.date_range("2018-01-30 01:30", periods=40, freq="7h")
    table = read(frame(Datum=at.strftime("%d.%m.%Y"), Uhrzeit=at.strftime(clock)), Roles(label="label"))
    assert table.time.tolist() == at.astype("datetime64[s]").astype(np.int64).tolist()
    assert "Uhrzeit (times of the day, without a date)" in said(Uhrzeit=at.strftime(clock))
    times = frame(day=at.normalize(), clock=[moment.time() for moment in at])
    assert read(times, Roles(label="label")).time.tolist() == table.time.tolist()


@pytest.mark.parametrize(("written", "value"), [
    ("12,34,567.5", 1234567.5), ("1.234.567,5", 1234567.5), ("1 234 567,5", 1234567.5), ("1’234’567.5", 1234567.5),
    ("−1234.5", -1234.5), ("(1,234.5)", -1234.5), ("1,234.5-", -1234.5), ("EUR 5.5", 5.5), ("R$ 5,50", 5.5),
    ("₹5.5", 5.5), ("5.5 %", 5.5), ("5.5 km/h", 5.5), ("5,5E+02", 550.0), ("21.5°C", 21.5),
])  # fmt: skip
def test_numbers_of_other_countries_are_numbers(written, value):
    table = read(frame(value=[written, written.replace("5", "6")] * 20), Roles(label="label"))
    assert table.columns.features == ("x", "value")
    assert table.features[0, 1] == value


@pytest.mark.parametrize(
    "pair", ["true false", "TRUE FALSE", "Yes no", "Y N", "ja nein", "oui non", "sí no", "wahr falsch"]
)
def test_spellings_of_true_and_false_are_numbers(pair):
    table = read(frame(flag=pair.split() * 20), Roles(label="label"))
    assert table.features[:2, 1].tolist() == [1.0, 0.0]
    rows = ft.data.table(frame(flag=pair.split() * 20), label="flag", quiet=True)
    assert set(rows.label_names) == set(pair.split())


@pytest.mark.parametrize(
    "mark", ["NA", "N/A", "#N/A", "-", "?", "null", "nan", "#DIV/0!", "inf", "-Infinity", " ", "–"]
)
def test_marks_of_missing_numbers_are_left_out_and_counted(mark):
    written = ["1.5", "2.5", mark, "3.5", "4.5", "5.5", "6.5", "7.5"] * 5
    table = read(frame(value=written), Roles(label="label"))
    assert "value" in table.columns.features
    assert "40 rows, 5 left out because something is missing" in table.said[0]
    assert ("5 infinite cells of value left out" in table.said[-1]) == ("inf" in mark.lower())


PLAIN = "when,shop,x,y,label\n" + "".join(
    f"2018-01-{1 + row % 28:02d},s{row % 4},{row % 7}.5,{row % 5},{'ab'[row % 2]}\n" for row in range(40)
)


@pytest.mark.parametrize(("text", "words"), [
    ("sep=;\n" + PLAIN.replace(",", ";"), "read: divided by semicolons"),
    (PLAIN.replace(",", " "), "read: divided by spaces"),
    ("Sales of 2018\n\n" + PLAIN, "read: 1 line above the header left out"),
    ("# by hand\n# again\n" + PLAIN, "read: 2 lines above the header left out"),
    ("#" + PLAIN, ""),
    (PLAIN + PLAIN[: PLAIN.index("\n") + 1] * 2, "read: 2 repeated headers left out"),
    (PLAIN + "Total,,120,80,\n", "read: the total in row 42 left out"),
    (PLAIN + ",Gesamt:,120 kg,80,\n\n", "read: the total in row 42 left out"),
    (PLAIN.replace("\n2018", "\n" + PLAIN[: PLAIN.index("\n") + 1] + "2018", 1) + "Sum,-,120,80,NA\n",
     "read: 1 repeated header left out, the total in row 43 left out"),
    (PLAIN.replace("\n", ",,\n"), "left out: Unnamed: 5 (100 % missing) and Unnamed: 6 (100 % missing)"),
    ("\n".join(f'"{row or ""}",{line}' for row, line in enumerate(PLAIN.splitlines())), "Unnamed: 0 (numbers the"),
    (PLAIN.replace(",s1,", ',"s1\n""old"", 2",'), ""),
    (PLAIN.replace("\n", "\r\n") + "\r\n\r\n", ""),
    (PLAIN.replace("\n", "\r"), ""),
])  # fmt: skip
def test_files_of_spreadsheets_and_other_tools_are_read(tmp_path, text, words):
    (tmp_path / "t.csv").write_bytes(text.encode())
    table = read(tmp_path / "t.csv")
    assert words in "\n".join(table.said)
    assert (len(table.label), len(set(table.client)), table.columns.features[-2:]) == (40, 4, ("x", "y"))
    assert table.features[:3, -2:].tolist() == [[0.5, 0.0], [1.5, 1.0], [2.5, 2.0]]
    assert table.time[1] - table.time[0] == 86400.0


@pytest.mark.parametrize(("content", "words"), [
    (PLAIN.encode() + b"Source: an office\n", "t.csv: row 42: number of cells: found 1, allowed: 5"),
    (b"\n <!DOCTYPE html><html>", "t.csv: found 'a web page', allowed: CSV, ARFF or Parquet"),
    (b"PK\x03\x04\x14\x00", "t.csv: found 'a ZIP archive or an Excel workbook', allowed: CSV, ARFF or Parquet"),
    (PLAIN.split("\n", 1)[1].replace(",s", " 10:00,1.5,2.5,s").encode(), "first row: found .*, allowed: a header"),
    (PLAIN.replace(",x,y,", ",x, x,").encode(), "t.csv: two columns are called 'x'"),
    pytest.param(b"\x00" * 100, r"not a CSV file \(the name of a column has control characters\)", id="zeros"),
    (PLAIN.replace("s1", "город").encode("cp1251"), r"\(line 3, byte 12, 0xe3: .*; save it as UTF-8, .*e.encoding"),
    (PLAIN.replace("s1", "Zürich").encode().replace("ü".encode(), b"\xfc", 1), r"in UTF-8 \(line 3, byte 13, 0xfc"),
])  # fmt: skip
def test_what_cannot_be_read_is_one_line(tmp_path, content, words):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ft.FedtideError, match=words):
        read(tmp_path / "t.csv")


def test_a_name_that_only_looks_like_a_date_is_none():
    columns = {"set": ["set 3", "set 4"] * 20, "version": ["1.2.3", "10.11.2"] * 20, "pressure": [1013.5, 1012.1] * 20}
    columns |= {"pressed": ["1012.1", "1013.5"] * 20}
    table = read(frame(**columns), Roles(label="label"))
    assert (table.columns.time, table.columns.features) == ((), ("x", "pressure", "pressed"))


def test_a_last_row_of_totals_is_none_of_the_study(tmp_path):
    """However few columns are read; a word that is no total stays."""
    (tmp_path / "t.csv").write_text(PLAIN + "Total,,120,80,\n")
    ft.inspect(tmp_path / "t.csv").write(tmp_path / "out")
    source = ft.config.read(tmp_path / "out" / "study.toml").data.source
    assert len(source.load(None, 0)) == len(CSV(str(tmp_path / "t.csv"), features=("y",)).load(None, 0)) == 40
    names = ["north", "south", "east"]
    shops = {"shop": names * 13 + ["Total"], "x": np.arange(40) % 7, "label": np.arange(40) % 2}
    assert ft.data.table(shops, quiet=True).client_names == tuple(sorted(names))
    assert len(read({"x": shops["x"], "kind": shops["shop"]}).label) == 40  # a label of words
    assert len(read({**shops, "note": ["good", "bad"] * 20}).label) == 40  # with other texts
    assert len(read({**shops, "shop": names * 13 + ["total"], "y": ["b"] * 40}).label) == 40
    assert (
        len(read({**shops, "shop": [f"word{'abcdefgh'[row % 8] * (row + 1)}" for row in range(39)] + ["sum"]}).label)
        == 40
    )


@pytest.mark.parametrize("names", [("x", "x"), ("x", " x")])
def test_two_columns_of_one_name_are_refused_in_parquet_and_frames(tmp_path, names):
    table = arrow.table([[1.0, 2.0], [3.0, 5.0], [0, 1]], names=[*names, "label"])
    parquet.write_table(table, tmp_path / "t.parquet")
    for data in (tmp_path / "t.parquet", *([table, table.to_pandas()] if names[0] == names[1] else [])):
        with pytest.raises(ft.FedtideError, match=r"two columns are called 'x'"):
            ft.data.table(data, quiet=True)


def test_a_column_without_a_name_is_called_by_its_place(tmp_path):
    for kind, write_file in (("csv", lambda data, path: data.to_csv(path, index=False)),
                             ("parquet", lambda data, path: data.to_parquet(path))):  # fmt: skip
        write_file(pd.DataFrame({"": np.arange(40.0) % 7, "label": np.arange(40) % 2}), tmp_path / f"t.{kind}")
        assert read(tmp_path / f"t.{kind}").columns.features == ("Unnamed: 0",)


@pytest.mark.parametrize(("text", "mark"), [
    ('x,y,label\n' + '"1,5","1,234",0\n"2,5","2,345",1\n' * 20, ","),
    ("x;y;label\n" + "1.5;1,234;0\n2.5;2,345;1\n" * 20, "."),
    ("x,y,label\n" + "1.5,1234,0\n2.5,2345,1\n" * 20, None),
])  # fmt: skip
def test_a_study_has_the_decimal_mark_that_other_columns_proved(tmp_path, text, mark):
    (tmp_path / "t.csv").write_text(text)
    table = read(tmp_path / "t.csv")
    ft.inspect(tmp_path / "t.csv").write(tmp_path / "out")
    source = ft.config.read(tmp_path / "out" / "study.toml").data.source
    assert source.decimal == mark
    few = CSV(str(tmp_path / "t.csv"), features=("y",), decimal=source.decimal).load(None, 0)
    assert few.x[:, 0].tolist() == pytest.approx(table.features[:, 1].tolist())


# -- roles -------------------------------------------------------------------------------------------------------------


def test_indices_keys_and_parts_of_clocks_are_no_labels():
    draw, at = np.random.default_rng(0), pd.date_range("2013-01-01", periods=800, freq="17min")
    carrier = draw.integers(0, 6, 800)
    late = np.round(5.0 * carrier + draw.normal(0, 4, 800))
    flights = pd.DataFrame({
        "year": at.year, "month": at.month, "dep_time": 100 * at.hour + at.minute,
        "air_time": draw.integers(60, 99, 800), "operated_by": [f"C{number}" for number in carrier], "late": late,
        "hour": at.hour, "minute": at.minute,
        "record_id": draw.permutation(800), "time_hour": at.floor("h"),
    })  # fmt: skip
    table = read(flights)
    assert (table.columns.label, table.columns.time) == ("operated_by", ("time_hour",))
    table = read(flights, Roles(label="late"))
    assert "record_id (numbers the rows)" in table.said[2]
    assert "rows differ by operated_by (6 values): --client operated_by" in table.said[3]
    assert read(flights.rename(columns={"operated_by": "carrier"})).columns.client == "carrier"
    assert read(flights.rename(columns={"late": "arr_delay"})).columns.label == "arr_delay"


def test_features_that_are_parts_of_dates_alone_are_said():
    ratings = pd.DataFrame({
        "user": np.arange(400) % 8, "year": 1990 + np.arange(400) % 7, "rating": np.arange(400) % 5,
        "when": pd.date_range("2020-01-01", periods=400, freq="D"),
    })  # fmt: skip
    found = ft.inspect(ratings)
    assert found.table.columns.features == ("year",)
    assert found["features"].said == "no columns of features, except parts of dates"


# -- tokens ------------------------------------------------------------------------------------------------------------


class Tokens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(x).mean(1))


@pytest.mark.parametrize("kind", ["array", "table"])
def test_tokens_stay_integers_for_an_embedding_and_are_floats_for_other_models(kind):
    tokens, y = np.random.default_rng(0).integers(0, 9, (80, 3)), np.arange(80) % 2
    if kind == "array":
        people = ft.population(tokens, y, client=np.arange(80) % 4)
    else:
        columns = {f"t{place}": tokens[:, place] for place in range(3)}
        people = ft.population(ft.data.table({**columns, "user": np.arange(80) % 4, "label": y}, quiet=True))
    assert people.rows.x.dtype == torch.int64
    for build in (Tokens, lambda: torch.nn.Linear(3, 2)):
        done = ft.simulate(ft.algorithms.fedavg(ft.Task(build), cohort=2), people, rounds=2, eval_every=1)
        assert len(done.accuracy) == 2
    floats = ft.population(tokens.astype(np.float32), y, client=np.arange(80) % 4)
    with pytest.raises(ft.FedtideError, match=r"nn.Embedding takes whole numbers; allowed: integers"):
        ft.simulate(ft.algorithms.fedavg(ft.Task(Tokens), cohort=2), floats, rounds=1)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_one_long_cell_takes_no_memory_in_other_rows(tmp_path):
    rows = [f"{row % 7},{row},{'long ' * 20_000 if row == 5 else 'short'},{'ab'[row % 2]}" for row in range(50_000)]
    (tmp_path / "t.csv").write_text("a,b,note,label\n" + "\n".join(rows) + "\n")
    for label in ("label", "note"):
        for traced in (False, True):  # what is imported at first does not count
            if traced:
                tracemalloc.start()
            read(tmp_path / "t.csv", Roles(label=label))
            ft.data.table(tmp_path / "t.csv", label=label, features=["a", "b"], quiet=True)
        assert tracemalloc.get_traced_memory()[1] < 30e6
        tracemalloc.stop()


def test_parts_of_a_clock_are_no_label():
    """Of departures the delay is, though the minute comes last, and carriers are clients."""
    rows = np.arange(300)
    at = pd.Timestamp("2013-01-01 05:00") + pd.to_timedelta(rows * 37, unit="min")
    delay = (rows * 7919 % 113) / 3
    table = read(pd.DataFrame({
        "year": at.year, "month": at.month, "day": at.day, "arr_delay": delay,
        "carrier": np.array(["AA", "B6", "UA"])[rows % 3], "distance": 200 + rows * 31 % 997, "hour": at.hour,
        "minute": at.minute,
    }))  # fmt: skip
    assert table.columns.label == "arr_delay"
    assert table.columns.client == "carrier"


def test_files_whose_columns_have_different_types_are_joined(tmp_path):
    ids = np.arange(40) % 4 + 2**53
    for name, user in (("a", ids), ("b", (ids - 2**53).astype(float)), ("c", ids.astype(str))):
        frame(user=user).to_parquet(tmp_path / f"{name}.parquet")
    names = {str(key) for key in range(4)} | {str(key + 2**53) for key in range(4)}
    assert set(read([tmp_path / "a.parquet", tmp_path / "b.parquet"]).client) == names
    assert set(read([tmp_path / "a.parquet", tmp_path / "c.parquet"]).client) == {str(key + 2**53) for key in range(4)}


@pytest.mark.parametrize("also", ["", "flag last", "long notes"])
@pytest.mark.parametrize("date", ["day first with points", "spreadsheet", "zones", "sentinels"])
def test_the_study_of_an_export_reads_the_same_rows(tmp_path, date, also):
    path = write(PLANTED, Export(date, "codes", "continental", "semicolons", also), tmp_path)
    table = read(path)
    found = inspect_table(table)
    source = ft.config.read(found.write(tmp_path / "out").parent / "study.toml").data.source
    rows = source.load(None, 0)
    assert [rows.client_names[number] for number in rows.client.tolist()] == table.client.tolist()
    assert rows.time.tolist() == table.time.tolist()
    assert [rows.label_names[number] for number in rows.y.tolist()] == table.label.tolist()


def test_a_line_that_names_the_separator_is_no_header_of_two_columns(tmp_path):
    (tmp_path / "t.csv").write_text("sep=;\nwhen;label\n2018-01-01;2\n2018-01-02;3\n")
    assert read_names(tmp_path / "t.csv") == ["when", "label"]
