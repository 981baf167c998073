"""Tables as a person has them: roles of columns, refusals, answers, the page, and a study that runs."""

import csv
import json
import re
import tomllib
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtide as ft
from fedtide.config import Experiment
from fedtide.config import read as read_experiment
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.shift import Calendar
from fedtide.inspection import findings
from fedtide.inspection.findings import CANDIDATES, PAGE, STUDY, helps, inspect_table, methods
from fedtide.inspection.table import EARLIEST, LATEST, Columns, Roles, Table, read
from fedtide.runs.build import population_of
from fedtide.runs.preflight import preflight
from helpers.planted import planted
from helpers.shell import done

HEADER = ("No", "when", "station_id", "basket", "wind", "constant", "score")
AB, N = np.array(list("ab") * 20), np.arange(40)
TWO, SEVEN = np.arange(60) % 2, np.arange(60) % 7


def checked(study) -> Experiment:
    """Read a study and build everything that it names."""
    experiment = read_experiment(study)
    preflight(experiment)
    return experiment


def table(path: Path, rows: int = 400) -> Path:
    """Write a table of 20 stations, in which a basket means other labels for two groups of stations."""
    draw, begin = np.random.default_rng(0), datetime(2026, 3, 1)
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(HEADER)
        for row in range(rows):
            station, basket = int(draw.integers(20)), int(draw.integers(10))
            label = "high" if (basket > 4) == (station < 10) else "low"
            when = (begin + timedelta(hours=int(draw.integers(240)))).isoformat()
            lines.writerow([row, when, f"s{station}", "NA" if row == 7 else basket, "NNW", 1013, label])
    return path


# -- columns -----------------------------------------------------------------------------------------------------------


def test_columns_are_guessed_by_name_and_type_and_may_be_left_out(tmp_path):
    found = read(table(tmp_path / "a.csv"))
    assert found.columns == Columns("score", "station_id", ("when",), ("basket",), missing=1, gaps=True)
    assert "400 rows, 1 left out because something is missing" in found.said[0]
    assert found.said[1].startswith(
        "label: score (2 classes, guessed by its name); client: station_id (20 values); time: when (20"
    )
    assert found.said[2] == ("left out: No (numbers the rows), wind (always the same) and constant (always the same)")
    said = read(table(tmp_path / "a.csv"), Roles(without="wind,No")).said
    assert said[1].endswith("features: basket")
    assert said[2] == "left out: constant (always the same), wind (as asked) and No (as asked)"
    found = read(table(tmp_path / "a.csv"), Roles(label="basket", features="No", without="score"))
    assert found.columns.categories == ()  # nor is a text that comes again offered as categories
    assert ft.inspect(table(tmp_path / "a.csv"), without=["wind", "No"]).table.said == said


LEFT_OUT = [
    ({"x": np.where(N == 38, "3,8", (N / 8).astype(str)), "z": N % 7, "y": N % 2},
     "x (39 of 40 are numbers, row 38 is '3,8': correct it or write NA)"),
    ({"label": np.array([f"note {n}" for n in N]), "x": N / 7, "kind": AB},
     "label (named like a label, but almost every value is unique: text)"),
    ({"x": N % 7, "label": N % 2, "when": np.array([f"week {n}" for n in N])},
     "when (named like a time, but row 0 is 'week 0': correct it, or say the form with --time-format)"),
    ({"a": N * 1e300, "b": N % 9, "y": N % 2}, "a (row 1 is '1e+300': no model computes with numbers beyond 3.4e+38)"),
    ({"a": N * 1e306, "b": N % 9, "y": N % 2}, "a (row 1 is '1e+306': no model computes with numbers beyond 3.4e+38)"),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "said"), LEFT_OUT)
def test_a_column_that_is_left_out_is_said_with_the_reason(columns, said):
    columns = dict(columns)
    roles = Roles(label=columns.pop("role", None))
    assert read(columns, roles).said[2] == f"left out: {said}"


REFUSED = [
    ({"client": np.where(N % 2, "sh\x1bop", "b"), "x": N / 7, "label": N % 2}, Roles(),
     "table: client: found 'sh\\x1bop', allowed: names without control characters"),
    ({"label": np.full(40, "a"), "x": N / 7, "kind": AB}, Roles(), "the column label has only one value; name another"),
    ({"price": np.where(N == 39, "3,8", (N / 4).astype(str)), "label": AB}, Roles(features="price"),
     "found 'price', but 39 of 40 are numbers, row 39 is '3,8'"),
    ({"a": np.full(9, "u"), "x": np.ones(9)}, Roles(), "table: no column looks like a label; allowed: --label with"),
    ({"a\x1b[2J": N, "label": N % 2}, Roles(), r"table: name of a column: found 'a\x1b[2J', allowed: names without"),
    ({"a": N * 1e300, "b": N % 9}, Roles(label="a"), "table: a: found 3.9e+301, allowed: numbers below 3.4e+38"),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "roles", "said"), REFUSED)
def test_columns_that_cannot_be_read_are_refused(columns, roles, said):
    with pytest.raises(FedtideError, match=re.escape(said)):
        read(columns, roles)


@pytest.mark.parametrize(("options", "said"), [
    ({"label": "scor"}, "shop.csv: --label: no column 'scor'; did you mean 'score'? Allowed: No, when, station_id, "
     "basket, wind, constant, score"),
    ({"zone": "Berlin"}, "--zone: found 'Berlin'"),
    ({"time": "wind"}, "shop.csv: row 2: wind: time: found 'NNW', allowed: seconds, or a date such as"),
    ({"label": "score", "client": "score"}, "shop.csv: --label: found 'score', but --client names it, too;"),
    ({"time": "", "zone": "Europe/Berlin"}, "shop.csv: --zone: found 'Europe/Berlin', but no column looks"),
    ({"label": "constant"}, "shop.csv: label: found 1013, but all rows have the same; allowed: two different"),
])  # fmt: skip
def test_a_wrong_option_is_one_line(tmp_path, options, said):
    with pytest.raises(ft.FedtideError) as raised:
        ft.inspect(table(tmp_path / "shop.csv"), **options)
    assert said in str(raised.value)


def test_a_table_of_few_rows_is_refused_because_its_study_could_not_run():
    rows = {"x": np.arange(20.0), "label": np.arange(20) % 2}
    with pytest.raises(FedtideError, match="rows: found 19, allowed: 20 or more"):
        ft.inspect({name: values[:19] for name, values in rows.items()})
    assert len(list(ft.inspect(rows))) == 8


@pytest.mark.parametrize(("text", "said"), [
    ("a,0.5,-1.25\nb,0.7,2.5\na,0.1,3.5\n", "t.csv: first row: found 'a,0.5,-1.25', allowed: a header"),
    (
        "2024-01-24 15:27:05,shop1,2.222,-0.183,red,yes\n2024-01-24 15:29:05,shop2,1.5,-0.2,red,no\n",
        "t.csv: first row: found '2024-01-24 15:27:05,shop1,2.222', allowed: a header",
    ),
])  # fmt: skip
def test_a_file_without_commas_or_without_a_header_is_one_line(tmp_path, text, said):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(FedtideError, match=re.escape(said)):
        read(tmp_path / "t.csv")
    (tmp_path / "named.csv").write_text("label,0.5\n0,1.5\n1,2.5\n0,3.5\n")  # a quantile is a name
    assert read(tmp_path / "named.csv").columns.features == ("0.5",)
    (tmp_path / "other.txt").touch()
    with pytest.raises(FedtideError, match=rf"{tmp_path}: is a folder, allowed: files, such as {tmp_path}/\*\.csv"):
        read(tmp_path)
    with pytest.raises(FedtideError, match=r"found 'named\.csv', allowed: each file once"):
        read([tmp_path / "named.csv"] * 2)


# -- times -------------------------------------------------------------------------------------------------------------


def test_a_date_in_several_columns_and_a_date_beside_an_hour():
    parts = {"year": [2026, 2026], "month": [3, 3], "day": [1, 2], "hour": [5, 6], "y": [0, 1]}
    found = read({name: np.array(column) for name, column in parts.items()})
    assert found.columns.time == ("year", "month", "day", "hour")
    assert np.diff(found.time).tolist() == [25 * 3600.0]
    found = read({"dteday": np.array(["2026-03-01", "2026-03-02"]), "hr": np.array([5, 6]), "y": np.array([0, 1])})
    assert (found.columns.time, found.columns.features, found.calendar) == (("dteday", "hr"), ("hr",), (0,))
    assert np.diff(found.time).tolist() == [25 * 3600.0]


@pytest.mark.parametrize("when", [
    np.array(["2026-07-01T12:00:00", "2026-07-02T12:00:00"]),
    np.array(["2026-07-01T12:00:00", "2026-07-02T12:00:00"], dtype="datetime64[ns]"),
    np.array([1782907200, 1782993600]),
    np.array([1782907200000, 1782993600000]),
    np.array([datetime(2026, 7, 1, 12), datetime(2026, 7, 2, 12)], dtype=object),
])  # fmt: skip
def test_times_of_any_kind_are_seconds_on_the_clocks_of_a_zone(when):
    data = {"time": when, "y": np.array([0, 1])}
    assert read(data).time.tolist() == [1782907200.0, 1782993600.0]
    assert read(data, Roles(zone="Europe/Berlin")).time.tolist() == [1782914400.0, 1783000800.0]


@pytest.mark.parametrize(("values", "said"), [
    (1700000000000 + 3600000 * np.arange(60), "as milliseconds since 1970"),
    (1700000000.0 + 3600 * np.arange(60), "as seconds since 1970"),
    (20240101 + np.arange(60), None),
    (1700000000.5 + 3600 * np.arange(60), "as seconds since 1970"),
    (np.arange(60), None),
])  # fmt: skip
def test_whole_numbers_that_are_dates_since_1970_are_the_time_if_they_are_called_so(values, said):
    found = read({"x": SEVEN, "label": TWO, "when": values})
    assert found.columns.time == (("when",) if said else ())
    assert said is None or said in found.said[1]
    assert read({"x": SEVEN, "label": TWO, "weight": values}).columns.time == ()


@pytest.mark.parametrize("zone", [None, "Asia/Tokyo", "America/New_York"])
@pytest.mark.parametrize(("first", "last"), [(-1e29, 1e28), (0, 1e30), (-1e28, 0), (float(EARLIEST), float(LATEST))])
def test_times_that_no_clock_shows_are_refused(tmp_path, first, last, zone):
    data = {"x": SEVEN, "label": TWO, "time": np.linspace(first, last, 60)}
    if last == LATEST:  # the first and the last times that all clocks show
        assert ft.inspect(data, time="time", zone=zone).write(tmp_path / "found").is_file()
        return
    with pytest.raises(ft.FedtideError, match=r"table: time: found .*, allowed: times of the years 1 to 9999"):
        ft.inspect(data, time="time", zone=zone)


@pytest.mark.parametrize(("odd", "usual", "named"), [("+02:00", "", 1), ("", "+02:00", 59)])
def test_times_in_zones_beside_times_without_are_refused(odd, usual, named):
    times = [f"2024-01-{1 + row % 28:02}T05:00{odd if row == 40 else usual}" for row in range(60)]
    said = f"row 40: when: time: found '{times[40]}', but a time zone is named in {named} and not in {60 - named}"
    with pytest.raises(ft.FedtideError, match=re.escape(said)):
        ft.inspect({"x": SEVEN, "label": TWO, "when": times})


def test_rows_of_every_third_hour_are_there_at_all_times():
    hours = np.tile(np.arange(0, 24 * 60, 3), 2)
    data = {"No": hours + 1, "time": 1.8e9 - 1.8e9 % 86400 + 3600 * hours, "x": np.sin(hours), "y": hours % 5 // 3}
    found = ft.inspect(data)
    assert found.cycles["day"].slots == 8
    assert found["presence"].said == "as many rows at all times of the day"
    assert "No (numbers the rows)" in found.table.said[2]
    night = hours % 24 < 9
    found = ft.inspect({name: column[night] for name, column in data.items()})
    assert "and no rows come at" in found["presence"].said


# -- frames ------------------------------------------------------------------------------------------------------------


class Frame:
    """A data frame as pandas and polars have it: columns, and an item for each."""

    def __init__(self, **columns: list) -> None:
        self.held, self.columns = columns, list(columns)

    def to_numpy(self) -> None:
        raise NotImplementedError

    def __getitem__(self, name: str) -> list:
        return self.held[name]


def test_a_data_frame_is_inspected_and_its_study_can_be_run(tmp_path):
    draw = np.random.default_rng(0)
    x, user = draw.integers(0, 9, 400), np.repeat(range(20), 20)
    found = ft.inspect(Frame(x=x.tolist(), user=user.tolist(), label=((x > 4) == (user < 10)).tolist()))
    assert found["groups"].found
    page = found.write(tmp_path / "made")
    assert sorted(path.name for path in page.parent.iterdir()) == [PAGE, "rows.npz", STUDY]
    assert len(checked(page.parent / STUDY).method) >= 4


@pytest.mark.parametrize(("labels", "classes"), [
    (["Ja", "Nein", "ja ", "Nein"], 3),
    (["yes", "no", "YES", "No"], 4),
    (["true", "false"], 2),
    (["1", "2", "4"], 5),
    (["a b", "ab", "A b"], 3),
    (["007", "7"], 2),
])  # fmt: skip
def test_the_classes_that_are_said_are_those_of_the_study(tmp_path, labels, classes):
    lines = [f"{row % 7},{labels[row % len(labels)]}" for row in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["x,label", *lines]))
    found = ft.inspect(tmp_path / "a.csv")
    assert f"label: label ({classes} classes" in found.table.said[1]
    source = read_experiment(found.write(tmp_path / "out").parent / STUDY).data.source
    assert source.load(None, 0).classes == classes
    apart = [line for line in found.table.said if "differ by case or blanks only" in line]
    assert [re.findall(r"'([^']*)' \(\d+\)", line) for line in apart] == {
        "Ja": [["Ja", "ja"]], "yes": [["No", "no"], ["YES", "yes"]], "a b": [["A b", "a b", "ab"]],
    }.get(labels[0], [])  # fmt: skip


GUESSES = {
    "guessed by its name": {"price": N / 7, "kind": AB, "x": N % 7},
    "because label has almost only unique values": {"label": np.array([f"n{n}" for n in N]), "x": N / 7, "kind": AB},
    "no column has a label-like name": {"a": N / 7, "b": N % 2},
    "label: y (2 classes);": {"price": N / 7, "y": N % 2},
}  # fmt: skip


@pytest.mark.parametrize("why", GUESSES)
def test_the_reason_of_a_guessed_label_is_the_true_one(why):
    assert why in read(GUESSES[why]).said[1]


SERIAL = 45000 + N / 8
SINCE = [
    (1.6e12 + 1e9 * N, "milliseconds since 1970"), (1_600_000_000 + 86_000 * N, "seconds since 1970"),
    (SERIAL, "days of a spreadsheet"), (1e12 + 1e9 * (N - 60), ""), (45000 + N * 3 % 41, ""), (N / 8, ""),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), SINCE)
def test_numbers_that_look_like_times_are_no_feature_and_a_line_says_so(values, words):
    data = {"x": N % 7, "admitted": values, "label": N % 2}
    found = read(data)
    assert found.columns.features == (("x",) if words else ("x", "admitted"))
    assert (f"admitted (looks like {words}: use --time admitted)" in found.said[2]) == bool(words)
    if words:
        assert read(data, Roles(time="admitted")).columns.time == ("admitted",)
        assert "admitted" in read(data, Roles(features="x,admitted")).columns.features  # a person decides
        dated = read({**data, "day": np.array([f"2024-01-{1 + n % 28:02}" for n in N])})
        assert (dated.columns.time, dated.columns.features) == (("day",), ("x",))
        assert read({"x": SERIAL % 3, "kind": N % 3, "admitted": values}).columns.label == "kind"


def test_without_clients_and_times_a_line_says_how_to_name_them(tmp_path):
    words, branch = "Name them with --client and --time.", [f"b{n % 4}" for n in range(120)]
    data = {"Filiale": np.array(branch), "x": np.arange(120) % 7, "label": np.arange(120) % 2}
    said = read(data).said
    assert any(words in line for line in said)
    assert any("--client Filiale" in line for line in said)
    for roles in (Roles(client="Filiale"), Roles(client="")):
        assert not any(words in line for line in read(data, roles).said)


def test_a_column_that_only_the_study_uses_is_not_said_to_be_left_out(tmp_path):
    lines = [f"{row % 7},b{row % 4},{row % 2}" for row in range(120)]
    (tmp_path / "a.csv").write_text("\n".join(["x,Filiale,label", *lines]))
    said = "\n".join(read(tmp_path / "a.csv").said)
    assert "Filiale is a text column: the study uses it as categories" in said
    assert "left out" not in said
    frame = {"x": N % 7, "Filiale": AB, "label": N % 2}
    assert "left out: Filiale (text)" in read(frame).said  # the study has rows of numbers alone


def test_a_column_with_gaps_can_be_kept_as_the_line_says():
    data = {"x": N % 7, "gaps": np.where(N % 3, N / 7, np.nan), "label": N % 2}
    found = read(data)
    assert "left out: gaps (35 % missing)" in found.said
    names = next(re.search(r"--features (\S+) to keep gaps", line)[1] for line in found.said if "to keep" in line)
    kept = read(data, Roles(features=names))
    assert (kept.columns.features, kept.columns.missing) == (("x", "gaps"), 14)


# -- units -------------------------------------------------------------------------------------------------------------


def clinics(path: Path, *cells: str) -> Path:
    """Write a table with the cells of glucose, again and again, in ten clinics."""
    rows = [f"c{row % 10},{cells[row % len(cells)]},{row % 7},{'ill' if row % 3 else 'well'}" for row in range(60)]
    path.write_text("\n".join(["clinic,glucose,age,label", *rows]))
    return path


@pytest.mark.parametrize("missing", ["error", "mean"])
@pytest.mark.parametrize(("cells", "other", "unit"), [
    (("6.1 mmol/l", "5.2 mmol/l"), "118.8 mg/dl", "mmol/l"),
    (("$6", "$7.5"), "6 EUR", "$"),
    (("6 %", "7 %"), "6 kg", "%"),
])  # fmt: skip
def test_the_unit_of_a_column_stays_in_its_study_and_another_one_is_an_error(tmp_path, cells, other, unit, missing):
    found = ft.inspect(clinics(tmp_path / "a.csv", *cells))
    source = read_experiment(found.write(tmp_path / "out").parent / STUDY).data.source
    assert source.units == {"glucose": unit}
    source = replace(source, missing=missing)
    plain = clinics(tmp_path / "plain.csv", *(re.sub(r"[^0-9.]", "", cell) for cell in cells))
    want = source.load(None, 0).x
    assert torch.equal(replace(source, path=str(plain)).load(None, 0).x, want)  # as without a unit
    mixed = clinics(tmp_path / "mixed.csv", cells[0], other)
    for read_again in (
        lambda: replace(source, path=str(mixed)).load(None, 0),
        lambda: source.encoded(mixed, None),
        lambda: replace(source, units=None).encoded(mixed, None),  # nobody named it: the source's own file tells
    ):
        said = f"row 3: glucose: found '{re.escape(other)}', allowed: .*{re.escape(unit)}"
        with pytest.raises(FedtideError, match=said):
            read_again()
    with pytest.raises(FedtideError, match=r"data\.source\.units: no column 'glukose'; .*'glucose'"):
        replace(source, units={"glukose": unit}).load(None, 0)


def test_two_units_in_a_column_are_named_and_the_column_is_left_out(tmp_path):
    table = read(clinics(tmp_path / "a.csv", "6.1 mmol/l", "118.8 mg/dl"))
    assert "glucose (numbers in mg/dl and mmol/l)" in table.said[2]
    assert table.columns.features == ("age",)


# -- answers -----------------------------------------------------------------------------------------------------------


def test_all_rows_of_a_population_are_looked_at_as_they_are_dealt():
    """Ten clients with a label of their own each: half of the rows are for testing, and all are looked at."""
    y = torch.arange(10).repeat_interleave(60)
    x = torch.randn(600, 3, generator=torch.Generator().manual_seed(0))
    people = ft.population(x, y, ft.data.LabelShards(clients=10, per_client=1), split=ft.data.Split(test=0.5))
    found = ft.inspect(people)
    assert (found["labels"].level, found["features"].level) == ("strong", "no")
    assert found.table.said[0] == "arrays: 600 rows"


def test_missing_columns_are_said():
    answers = ft.inspect({"x": N / 1.0, "label": N % 2})
    assert {answer.level for answer in answers} == {"not asked"}
    assert (answers["labels"].said, answers["mix"].said) == ("no column of clients", "no column of time")
    same = planted("nothing", 0, 200)
    one = inspect_table(replace(same, client=np.full(200, "a"), time=np.zeros(200)))
    assert (one["labels"].said, one["drift"].said) == ("one client", "all rows have the same time")
    single = inspect_table(replace(same, client=np.full(200, "a"), features=None))
    assert single["presence"].said == "as many rows at all times of the day"
    bare_rows = inspect_table(replace(same, features=None))
    assert (bare_rows["features"].level, bare_rows["matter"].level, bare_rows["labels"].level) == (
        "not asked", "not asked", "no",
    )  # fmt: skip


def test_two_clients_are_no_groups_and_one_beside_groups_is_alone():
    x, user = np.arange(600) % 7, np.arange(600) // 7 % 6
    pair = ft.inspect({"x": x, "user": user % 2, "label": (x > 3) == (user % 2 < 1)})
    assert pair["meaning"].level == "strong"
    said = "2 clients differ by their models, but not in groups of several"
    assert (pair["groups"].level, pair["groups"].said) == ("no", said)
    several = ft.inspect({"x": x, "user": user, "label": np.where(user == 5, x == 1, (x > 3) == (user < 3))})
    assert several["groups"].said.startswith("2 groups of 3 and 2 clients, 1 alone: their models")


def test_clients_of_one_label_each_have_an_alpha_below_any():
    """Three measures, each of two clients: none lies below the least, and the moments give r = 1, rounded."""
    user = np.arange(60) % 6
    found = ft.inspect({"user": user, "label": user % 3 + 0.5})
    assert found["labels"].said.endswith("as if dealt with dirichlet alpha below 0.01")
    assert 0 <= found.clients.alpha < 1e-12
    assert found.rows.label_names == ("below 1.5", "from 1.5", "from 2.5")


def test_a_feature_that_is_the_label_is_noted():
    same = planted("nothing", 0, 400)
    label = np.searchsorted(np.unique(same.label), same.label)
    features = np.concatenate([same.features, np.eye(4)[label]], 1)
    names = tuple(f"x{number}" for number in range(8))
    found = inspect_table(replace(same, features=features, columns=Columns(features=names)))
    assert any(re.search(r"features tell the label almost wholly; .*--without x4\)", note) for note in found.notes)


# -- studies -----------------------------------------------------------------------------------------------------------


def test_a_study_has_three_methods_of_a_kind_that_the_registry_says_to_help():
    assert all(helps(algorithm, given.get("loss", "")) for _, algorithm, given, _ in CANDIDATES)
    for world, names in {
        "labels 0.3": ["FedRoD", "WSM", "FlexCFL"],
        "meaning": ["IFCA, K = 2", "FedEM, K = 2", "FlexCFL", "FedPer"],
        "meaning + who": ["FedTKM, K = 2", "FedTEM, K = 2", "Min Loss, K = 2", "IFCA, K = 2"],
    }.items():
        found = methods(inspect_table(planted(world, 0)))
        assert [proposal.name for proposal in found][: len(names) + 2] == ["FedAvg", "Each alone", *names]
        if world == "meaning":
            assert found[2].why == "there are groups of clients; same inputs, different labels across clients"
    # The hours are for the server to find.
    assert found[2].options == {"prior": "learned", "branches": 2, "safe": True}


def test_a_measure_is_a_label_too(tmp_path):
    draw = np.random.default_rng(0)
    x, user = draw.normal(size=600), np.repeat([f"u{number}" for number in range(12)], 50)
    found = ft.inspect({"x": x, "user": user, "target": 3 * x * np.where(user < "u4", 1, -1) + draw.normal(size=600)})
    assert (found.table.measured, found["meaning"].level, found["labels"].found) == (True, "strong", False)
    settings = checked(found.write(tmp_path / "made").parent / STUDY)
    assert settings.data.target.kind == "number"
    algorithms = {method.algorithm for method in settings.method}
    assert {"ifca", "aem", "fedper"} < algorithms
    assert not {"fedem", "fedrod"} & algorithms  # squared errors are no likelihood, and a balanced loss counts classes


@pytest.mark.parametrize("measured", [False, True])
def test_no_candidate_is_refused_in_the_study_that_it_is_proposed_for(tmp_path, monkeypatch, measured):
    """As if each finding spoke for all: those that the label allows play a round, and are built for many rows too."""
    monkeypatch.setattr(findings, "MOST", len(CANDIDATES))
    monkeypatch.setattr(findings, "reasons", lambda *_: {"a finding": 1})
    draw = np.random.default_rng(0)
    x, user = draw.normal(size=(240, 2)), np.repeat([f"u{number}" for number in range(8)], 30)
    y = x.sum(1) + 0.1 * draw.normal(size=240)
    found = inspect_table(Table("made", y if measured else y > 0, x, user))
    few = tomllib.loads((found.write(tmp_path / "few").parent / STUDY).read_text(encoding="utf-8"))
    few |= {"rounds": 1, "seeds": [0], "method": [method for method in few["method"] if method["algorithm"] != "local"]}
    names = {method.name for method in ft.run(few, tmp_path / "run", workers=1, quiet=True).summaries[0].methods}
    for_classes = {"FedRoD", "WSM", "FedEM", "Min Loss"} if measured else set()
    assert {re.split(",| \\(", name)[0] for name in names} == {
        "FedAvg",
        *(name for name, *_ in CANDIDATES),
    } - for_classes
    monkeypatch.setattr(findings, "STEPS", 1)
    many = found.write(tmp_path / "many").parent / STUDY
    assert "local_steps = 1\n" in many.read_text(encoding="utf-8")
    checked(many)


@pytest.mark.parametrize(("gap", "rows"), [("sun", 120), ("NA", 119), ("", 119)])
def test_texts_that_come_again_are_categories_of_the_study(tmp_path, gap, rows):
    draw = np.random.default_rng(0)
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["shop", "basket", "weather", "note", "label"])
        for row in range(120):
            weather, basket = ["sun", "rain"][int(draw.integers(2))] if row != 7 else gap, int(draw.integers(10))
            lines.writerow([f"s{row % 6}", basket, weather, f"note {row}", "a" if basket > 4 else "b"])
    found = ft.inspect(tmp_path / "a.csv")
    assert found.table.columns.categories == ("weather",)
    source = read_experiment(found.write(tmp_path / "out").parent / STUDY).data.source
    assert (source.features, source.categories) == (("basket", "weather"), ("weather",))
    assert tuple(source.load(None, 0).x.shape) == (rows, 3)


def test_a_study_of_the_hour_has_rows_in_all_of_its_rounds(tmp_path):
    """Clients by day and by night, and hours at which hardly any of them are there."""
    draw = np.random.default_rng(3)
    user = np.repeat(range(24), 50)
    hour = np.where(user < 12, draw.normal(13, 1, 1200), draw.normal(2, 1, 1200)) % 24
    x, y = draw.normal(size=1200), draw.normal(size=1200)
    when = 86_400 * (20_000 + draw.integers(40, size=1200)) + 3_600 * hour
    label = np.where(user < 12, x, -x) + y > 0
    found = ft.inspect({"x": x, "y": y, "user": user, "time": when, "label": label})
    assert (found["mix"].found, found["mix"].cycle) == (True, "day")
    settings = checked(found.write(tmp_path / "made").parent / STUDY)
    shift = settings.shift
    assert (shift.who.kind, shift.what.window, settings.rounds > 100) == ("data", "6h", True)
    population = population_of(settings, shift, 0)
    assert all(int(population.there(Moment(number, settings.rounds)).sum()) for number in range(settings.rounds))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["nothing", "labels 0.3 + features", "meaning + who", "sudden", "gradual"])
def test_studies_run(tmp_path, name):
    inspect_table(planted(name, 0)).write(tmp_path / "made")
    played = ft.run(tmp_path / "made" / STUDY, tmp_path / "run", seeds=[0], sets={"rounds": 2}, workers=1, quiet=True)
    assert len(played.summaries[0].methods) >= 2


def test_the_world_of_a_study_is_inspected(tmp_path):
    """Two groups with means of their own come in turn: their looks differ, and the mix follows the period."""
    world = {
        "rounds": 64,
        "data": {"source": {"kind": "gaussians", "samples": 3000, "domains": 2, "classes": 3},
                 "groups": {"by": "domain"}, "partition": {"kind": "iid", "clients": 12}},
        "shift": {"who": {"kind": "periodic", "period": 8}}, "model": "linear",
        "method": [{"algorithm": "fedavg", "cohort": 4}],
    }  # fmt: skip
    found = ft.inspect(world)
    assert (found["features"].level, found["mix"].why) == ("strong", ("others",))
    folder = found.write(tmp_path / "made").parent
    assert [path.name for path in folder.iterdir()] == [PAGE]
    with pytest.raises(ft.FedtideError, match="--label: found 'y', allowed: with data"):
        ft.inspect(world, label="y")


def test_taking_part_is_no_drift_and_a_study_without_a_period_has_no_times():
    """Half of the clients, who hold one label of four each, take part in each round of a world that stays as it is."""
    found = ft.inspect({
        "rounds": 40,
        "data": {"source": {"kind": "gaussians", "samples": 3000, "classes": 4},
                 "partition": {"kind": "label-shards", "clients": 12, "per_client": 1}},
        "shift": {"who": "always"}, "model": "linear", "method": [{"algorithm": "fedavg", "cohort": 6}],
    })  # fmt: skip
    assert [found[name].level for name in ("labels", "drift", "matter")] == ["strong", "no", "no"]
    assert "only who takes part changes" in found["drift"].said
    assert "drift" not in found.short
    assert found["mix"].said == "a study has hours if its shift has a period, and rounds for two"


# -- the command and the page ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("days", "step", "course"), [(30, 0.0, ""), (52, 0.0, ""), (37, 0.3, "at once")])
def test_a_rhythm_of_the_week_is_no_drift_over_a_month_or_two(days, step, course):
    draw = np.random.default_rng(days)
    time = 86_400.0 * (2 + days * draw.random(60 * days))
    weekend = (time // 86_400.0 + 3) % 7 >= 5
    share = 0.3 + 0.35 * weekend + step * (time > np.quantile(time, 0.6))
    label = (draw.random(len(time)) < share).astype(np.int64)
    drift = inspect_table(Table("days", label, label[:, None] + draw.normal(size=(len(time), 2)), None, time))["drift"]
    assert (drift.level, course in drift.said) == ("mild" if step else "no", True)


def test_the_command_prints_eight_lines_and_writes_a_page_and_a_study_that_can_be_run(tmp_path, capsys):
    data = table(tmp_path / "shop.csv")
    assert done("inspect", data, "--out", tmp_path / "made", "--json") == 0
    out, err = capsys.readouterr()
    lines, found = err.splitlines(), json.loads(out)
    assert [answer["level"] for answer in found["answers"][:4]] == ["no", "no", "strong", "strong"]
    assert found["study"] == str(tmp_path / "made" / STUDY)
    assert [line[64:74].strip() for line in lines[3:11]] == ["no", "no", "strong", "strong", "no", "no", "no", "no"]
    groups = "there are groups of clients that differ strongly"
    short = f"In short: same inputs, strongly different labels across clients; {groups}."
    assert short in lines
    assert "nan" not in (tmp_path / "made" / PAGE).read_text(encoding="utf-8").split("<figure")[0]
    assert checked(tmp_path / "made" / STUDY).title == "shop.csv"
    assert done("inspect", data, "--out", tmp_path / "made") == 2
    assert capsys.readouterr().err == f"fedtide: {tmp_path / 'made'}: already exists, allowed: a new or empty folder\n"


def test_without_features_there_is_no_study(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("user,a,label\n" + "".join(f"u{row % 3},,{row % 2}\n" for row in range(60)))
    assert done("inspect", tmp_path / "a.csv", "--out", tmp_path / "made") == 0
    assert "no study: no columns of features are left" in capsys.readouterr().out
    assert not (tmp_path / "made" / STUDY).exists()


def test_a_skewed_measure_gets_a_hint_at_its_logarithm():
    draw = np.random.default_rng(0)
    columns = {
        "a": draw.normal(size=300),
        "sales": np.exp(8 + draw.normal(size=300)),
        "height": draw.normal(170, 9, 300),
    }
    hints = {name: [n for n in ft.inspect(columns, label=name).notes if "logarithm" in n or "log(" in n]
             for name in ("sales", "height")}  # fmt: skip
    assert len(hints["sales"]) == 1
    assert "sales is above 0 and skewed" in hints["sales"][0]
    assert "log(sales)" in hints["sales"][0]
    assert not hints["height"]


@pytest.mark.parametrize("seed", range(20))
def test_windows_in_a_row_that_always_have_enough_rows(seed):
    """The least count of which every run of so many windows has twenty rows; all windows if there is none."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(0, 12 + seed, 9)
    begin = datetime(2024, 1, 1).timestamp()
    seconds = np.repeat(np.arange(9), rows) * 86_400 + begin
    rows = np.histogram(seconds, Calendar("1d").edges(seconds))[0]
    counts = range(1, len(rows))
    enough = [count for count in counts if min(map(sum, sliding(rows.tolist(), count))) >= findings.LEAST_ROWS]
    assert findings._enough("1d", seconds) == (enough or [len(rows)])[0]


def sliding(values: list[int], count: int) -> list[list[int]]:
    return [values[first : first + count] for first in range(len(values) - count + 1)]
