"""Rows of nodes: read as the ticket says, and divide_rows by what is in them."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtide.config import from_dict
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.partition import Split
from fedtide.data.transforms import Standardize
from fedtide.site.client_rows import FileRows, describe_columns, divide_rows, read_rows
from fedtide.site.deploying import choose, describe_rows
from fedtide.site.far_rows import far_from_study
from fedtide.site.tickets import RowsAbout
from helpers.hospitals import CLASSES, COLUMNS, NAMES, hospitals

NOW = Moment(0, 4)
ABOUT = RowsAbout(
    shape=(3,), dtype="float32", classes=3, labels=CLASSES, columns=COLUMNS, source={"kind": "csv", "label": "label"}
)
PICTURES = RowsAbout(shape=(1, 4, 4), dtype="uint8", classes=3, source={"kind": "npz"})


def pictures(path: Path, rows: int = 30, classes: int = 3, **more: np.ndarray) -> Path:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (rows, 4, 4), dtype=np.uint8)
    np.savez(path, x=x, y=np.arange(rows) % classes, **more)
    return path


def lines(path: Path) -> list[list[str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def rewrite(path: Path, content: list[list[str]]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(content)
    return path


@pytest.fixture
def berlin(tmp_path) -> Path:
    hospitals(tmp_path)
    return tmp_path / "berlin.csv"


def test_classes_are_numbered_as_in_the_study_and_columns_may_stand_in_any_order(berlin, tmp_path):
    content = lines(berlin)
    well = rewrite(tmp_path / "well.csv", [content[0], *(line for line in content if line[3] == "well")])
    rows = read_rows(well, ABOUT)
    assert (rows.classes, rows.y.unique().tolist()) == (3, [2])
    turned = rewrite(tmp_path / "turned.csv", [line[::-1] for line in content])
    assert torch.equal(read_rows(turned, ABOUT).x, read_rows(berlin, ABOUT).x)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("pulse", "puls", "no column 'pulse'; the study reads: pulse, age, weight, label"),
        ("label", "diagnosis", "no column 'label'"),
        ("well", "dead", "berlin.csv: row 4: label: found 'dead', allowed: calm, ill, well"),
        ("calm", "", "row 2: label: found '', allowed: a value"),
    ],
)
def test_rows_that_are_not_those_of_the_study_are_refused(berlin, old, new, said):
    berlin.write_text(berlin.read_text().replace(old, new))
    with pytest.raises(FedtideError, match=said):
        read_rows(berlin, ABOUT)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('1.5,2,3,calm\n"2,5",2,3,calm', r"row 3: pulse: found '2,5', allowed: a number with a point"),
        ("x,2,3,calm", "row 2: pulse: found 'x', allowed: a number$"),  # and no keys of the study
        (",2,3,calm", "row 2: pulse: found '', allowed: a value$"),
        (b"1,2,3,m\x81de", r"berlin\.csv: damaged or not a CSV file in UTF-8"),
    ],
)
def test_a_mistake_in_a_row_is_named(tmp_path, row, said):
    path = tmp_path / "berlin.csv"
    path.write_bytes(b"pulse,age,weight,label\n" + (row if isinstance(row, bytes) else row.encode()) + b"\n")
    with pytest.raises(FedtideError, match=said):
        read_rows(path, ABOUT)


def about_site(source: dict[str, Any]) -> RowsAbout:
    """What tickets of a study say of rows."""
    experiment = from_dict(
        {"data": {"source": {"kind": "csv", **source}}, "method": [{"algorithm": "fedavg", "cohort": 3}]}
    )
    study = choose(experiment, "fedavg", 3, None, "study")
    return describe_rows(study, study.data.source.load(None, 0), None)


def test_all_nodes_scale_fill_and_encode_by_the_rows_of_the_study(tmp_path):
    """By hand: pulse has mean 72 and deviation 2, and a missing one is 72; the categories are a and b."""
    (tmp_path / "study.csv").write_text("pulse,ward,label\n70,a,calm\n74,b,ill\n70,a,well\n74,b,calm\n")
    source = {"path": str(tmp_path / "study.csv"), "categories": ["ward"], "missing": "mean", "scaled": True}
    about = about_site(source)
    assert about.source["learned"] == {
        "means": {"pulse": 72.0}, "centers": {"pulse": 72.0}, "spreads": {"pulse": 2.0},
        "categories": {"ward": ["a", "b"]},
    }  # fmt: skip
    (tmp_path / "berlin.csv").write_text("ward,pulse,label\nb,90,ill\na,,calm\nc,71,calm\n")
    rows = read_rows(tmp_path / "berlin.csv", about)
    assert rows.x.tolist() == [[9.0, 0.0, 1.0], [0.0, 1.0, 0.0], [-0.5, 0.0, 0.0]]
    assert about.source_at(tmp_path / "berlin.csv").encoded(tmp_path / "berlin.csv", None).equal(rows.x)
    lacks = about.model_copy(update={"source": about.source | {"learned": {"means": {"pulse": 72.0}}}})
    with pytest.raises(FedtideError, match=r"learned\.categories\.ward: missing key"):
        read_rows(tmp_path / "berlin.csv", lacks)


def test_a_unit_other_than_that_of_the_study_is_refused(tmp_path):
    files = {"study": "70 bpm", "plain": "70", "other": "1.2 Hz"}
    for name, cell in files.items():
        rows = "".join(f"{cell},2,3,{label}\n" for label in CLASSES)
        (tmp_path / f"{name}.csv").write_text(f"pulse,age,weight,label\n{rows}")
    about = about_site({"path": str(tmp_path / "study.csv")})
    assert about.source["units"] == {"pulse": "bpm"}  # found, because nobody named it
    assert read_rows(tmp_path / "plain.csv", about).x[0].tolist() == [70.0, 2.0, 3.0]
    with pytest.raises(FedtideError, match=r"row 2: pulse: found '1\.2 Hz', allowed: a number in bpm"):
        read_rows(tmp_path / "other.csv", about)


def doubts(path: Path, about: RowsAbout) -> list[tuple[str, bool]]:
    return [(doubt.text.removeprefix(f"{path}: "), doubt.is_common) for doubt in far_from_study(path, about)]


def test_rows_far_from_those_of_the_study_are_named_to_their_owner(tmp_path):
    """By hand: pulse has mean 72 and deviation 2, so 66 to 78 is near; always, which never changes, says nothing.

    The server counts a node if more than half of a column is far, and never for a few rows of it.
    """
    (tmp_path / "study.csv").write_text("pulse,ward,always,label\n70,a,5,calm\n74,b,5,ill\n70,a,5,well\n74,b,5,calm\n")
    source = {"path": str(tmp_path / "study.csv"), "categories": ["ward"], "missing": "mean", "scaled": True}
    about, path = about_site(source), tmp_path / "berlin.csv"

    def found(*rows: str) -> list[tuple[str, bool]]:
        path.write_text("\n".join(["label,pulse,ward,always", *(f"ill,{row},50" for row in rows)]) + "\n")
        return doubts(path, about)

    assert found("66,a", "78,b", ",") == []
    assert found("1.2,a", "78,a") == []  # half is not most
    mean = "the study's mean (here 24.87, there 72 with deviation 2)"
    assert found("1.2,a", "1.4,a", ",a", "72,a") == [
        (f"pulse: 2 of 3 values are more than 3 deviations from {mean}: is it another unit?", True)
    ]
    few = "ward: 1 of 2 cells have categories that the study does not know, such as 'ICU'"
    assert found("72,ICU", "72,a") == [(few, False)]
    assert found("72,ICU", "72,") == [(few.replace("1 of 2 cells", "1 of 1 cell"), True)]
    (tmp_path / "plain.csv").write_text("pulse,age,weight,label\n1,2,3,calm\n")
    assert doubts(tmp_path / "plain.csv", ABOUT) == []


def test_times_far_from_those_of_the_study_are_named_to_their_owner(tmp_path):
    """By hand: the study's days are 2024-01-01 to 2024-01-03, and a year around them is near."""
    cells = "".join(f"{day}.5,2024-01-0{day} 12:00,{label}\n" for day, label in ((1, "calm"), (2, "ill"), (2, "well")))
    (tmp_path / "study.csv").write_text(f"pulse,day,label\n{cells}")
    about, path = about_site({"path": str(tmp_path / "study.csv"), "time": "day"}), tmp_path / "berlin.csv"
    assert about.times == (1704067200.0, 1704240000.0)

    def found(*days: str) -> list[tuple[str, bool]]:
        path.write_text("label,pulse,day\n" + "".join(f"ill,72,{day}\n" for day in days))
        return doubts(path, about)

    assert found("2025-01-02 12:00", "2023-01-01") == []
    assert found("1970-01-20", "2024-01-01") == []
    assert found("1970-01-20", "1970-01-21", "2024-01-01") == [
        (
            "time: 1970-01-20 00:00 to 2024-01-01 00:00, and the study's are 2024-01-01 00:00 to 2024-01-03 00:00: "
            "is a clock or a format another one?",
            True,
        )
    ]


def test_times_that_are_no_dates_are_no_calendar(tmp_path):
    (tmp_path / "study.csv").write_text("pulse,at,label\n70.5,0,calm\n74.5,90,ill\n70.5,95,well\n")
    assert about_site({"path": str(tmp_path / "study.csv"), "time": "at"}).times == ()


def test_a_node_reads_its_file_as_the_study_says(tmp_path):
    source = {**ABOUT.source, "decimal": ",", "time": "day", "time_format": "day-month-year", "separator": ";"}
    about = ABOUT.model_copy(update={"source": source})
    cells = "1.234;40;70;calm;01.02.2018\n99;41;71;ill;02.02.2018\n"
    (tmp_path / "berlin.csv").write_text("pulse;age;weight;label;day\n" + cells)
    rows = read_rows(tmp_path / "berlin.csv", about)
    assert rows.x.tolist() == [[1234.0, 40.0, 70.0], [99.0, 41.0, 71.0]]  # integers of this file alone
    assert rows.time.tolist() == [1517443200.0, 1517529600.0]
    assert "reads label, day, pulse" in str(describe_columns(tmp_path / "berlin.csv", about))
    (tmp_path / "odd.csv").write_text("pulse;age;weight;label;day\n1;40;70;dead;01.02.2018\n")
    with pytest.raises(FedtideError, match=r"odd.csv: row 2: label: found 'dead'"):
        read_rows(tmp_path / "odd.csv", about)


def test_pictures_come_as_arrays(tmp_path):
    path = pictures(tmp_path / "berlin.npz")
    assert read_rows(path, PICTURES).shape == (1, 4, 4)
    np.savez(tmp_path / "named.npz", x=np.zeros((3, 4, 4), np.uint8), y=["a", "b", "c"])
    for file, changes, said in (
        (pictures(tmp_path / "more.npz", classes=5), {}, "label: found 4, allowed: 0 to 2, as in the study"),
        (path, {"shape": (1, 5, 5)}, r"shape of a row: found \(1, 4, 4\), allowed: \(1, 5, 5\)"),
        (path, {"dtype": "float32"}, r"type of features: found 'torch\.uint8', allowed: torch\.float32"),
        (tmp_path / "named.npz", {}, "label: found 'a', allowed: numbers from 0 to 2"),
        (tmp_path / "none.npz", {}, "no such file"),
    ):
        with pytest.raises(FedtideError, match=said):
            read_rows(file, PICTURES.model_copy(update=changes))
    rows = FileRows.read([path], [0], PICTURES, Split())
    x = rows.shard(0, NOW).x
    assert x.dtype == torch.float32
    assert 0 <= x.min() <= x.max() <= 1
    assert not torch.equal(replace(rows, people=replace(rows.people, transforms=(Standardize(),))).shard(0, NOW).x, x)


def test_rows_keep_their_part_when_others_are_added(tmp_path):
    hospitals(tmp_path, rows=200)
    rows = read_rows(tmp_path / "berlin.csv", ABOUT)
    ids, parts = divide_rows(rows, Split(val=0.2, test=0.25))
    fewer = rows.pick(torch.arange(0, 200, 3))
    some_ids, some = divide_rows(fewer, Split(val=0.2, test=0.25))
    for part, where in parts.items():
        assert set(some_ids[some[part]].tolist()) <= set(ids[where].tolist())
        assert ids[where].tolist() == sorted(ids[where].tolist())
    sizes = {part: len(where) for part, where in parts.items()}
    assert sum(sizes.values()) == 200
    assert 30 < sizes["test"] < 70
    assert 15 < sizes["val"] < 45


def test_equal_rows_are_never_on_both_sides(tmp_path):
    hospitals(tmp_path)
    rows = read_rows(tmp_path / "berlin.csv", ABOUT)
    twice = rows.pick(torch.arange(60).repeat(2))
    ids, parts = divide_rows(twice, Split(val=0.2, test=0.25))
    assert len(ids.unique()) == 120
    for where in parts.values():
        assert sorted(where[where < 60].tolist()) == sorted((where[where >= 60] - 60).tolist())


def test_a_given_test_set_stays_one(tmp_path):
    path = pictures(tmp_path / "berlin.npz", held_out=np.arange(30) < 10)
    own = FileRows.read([path], [4], PICTURES, Split())
    assert own.count(4, "test") == 10


def test_a_client_is_given_its_rows(tmp_path):
    hospitals(tmp_path)
    about, split = ABOUT, Split(val=0.2, test=0.25)
    own = FileRows.read([tmp_path / f"{name}.csv" for name in NAMES[:2]], [5, 3], about, split)
    alone = FileRows.read([tmp_path / "lyon.csv"], [0], about, split)
    assert torch.equal(own.shard(3, NOW).x, alone.shard(0, NOW).x)
    assert len(own.shard(5, NOW).val) == own.count(5, "val")
    clients = torch.tensor([3, 5])
    assert own.sizes(clients, "test", NOW).tolist() == [own.count(c, "test") for c in (3, 5)]
    pooled, owner = own.pool(clients, NOW, "test")
    assert torch.equal(pooled.x[owner == 1], own.shard(5, NOW, "test").x)
    assert own.shard(3, NOW).ids.tolist() == sorted(own.shard(3, NOW).ids.tolist())


def test_a_file_for_each_client(tmp_path):
    hospitals(tmp_path)
    with pytest.raises(FedtideError, match="--data: found '1 files', allowed: 2, one for each client"):
        FileRows.read([tmp_path / "berlin.csv"], [0, 1], ABOUT, Split())
    header, first, *_ = lines(tmp_path / "berlin.csv")
    one = rewrite(tmp_path / "one.csv", [header, first])
    with pytest.raises(FedtideError, match="none of its 1 rows is left for training"):
        FileRows.read([one], [0], ABOUT, Split(test=0.9999))
