"""Cells of CSV files: the same bits by either reader, and a wrong one is named; times, categories, gaps."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtide.core.errors import FedtideError
from fedtide.data.rows import Rows
from fedtide.data.sources import CSV, cells
from fedtide.data.sources.cells import numbers_of
from fedtide.data.sources.when import all_seconds, seconds_of
from helpers.same_rows import same

NUMBERS = ["1", "-2.5", " 3 ", "+4", ".5", "5.", "1e-3", "0.1234567890123456789", "-0", "1e-400", "16777217", "9e15"]
GAPS = ["", "NA", "nan", "Null", " na ", " ", " NA"]
WORDS = ["dog", "cat", '"a, b"', '"say ""no"""', 'a"b', "Zürich", " spaced "]
DAYS = [
    "2026-03-01T09:15:00",
    "2026-03-01 09:15:01",
    "2026-03-01",
    "12.5",
    "2026-03-01T10:15:00+01:00",
    "20260301T0915",
]


def outcome(source: CSV) -> Rows | str:
    try:
        return source.load(None, 0)
    except FedtideError as error:
        return str(error)


WRONG = [
    "1_0,2,a,0,b,c", "1,inf,a,0,b,c", "1,2,a,soon,b,c", "1,2,a", "1,2,,0,b,c", "٣,1,a,0,b,c", "", "1,NA,a,0,,c"
]  # fmt: skip


def drawn(path: Path, draw: random.Random, missing: str) -> CSV:
    """A table of a few rows with every kind of cell; half of them have a line that is wrong."""
    end = draw.choice(["\n", "\r\n"])
    times = draw.choice([DAYS[:1], DAYS[:2], DAYS])
    lines = ["x , y,who,when,kind,label"]
    for _ in range(draw.randint(1, 9)):
        x, y = draw.choice(NUMBERS), draw.choice(NUMBERS + GAPS * (missing != "error"))
        lines.append(",".join([x, y, draw.choice(WORDS), draw.choice(times), draw.choice(WORDS), draw.choice(WORDS)]))
    if draw.random() < 0.5:
        lines.insert(draw.randint(1, len(lines)), draw.choice(WRONG))
    path.write_text(draw.choice(["", "\ufeff"]) + end.join(lines) + end, encoding="utf-8")
    return CSV(str(path), client="who", time="when", categories=("kind",), missing=missing)


@pytest.mark.parametrize("missing", ["error", "drop", "mean"])
def test_both_readers_agree_to_the_bit_and_in_errors(tmp_path, monkeypatch, missing):
    """A file that arrow does not read is read row by row; an ARFF file always is."""
    draw, sound = random.Random(missing), 0
    for number in range(30):
        source = drawn(tmp_path / f"{number}.csv", draw, missing)
        by_arrow = outcome(source)
        with monkeypatch.context() as patch:
            patch.setattr(cells, "_by_arrow", lambda *_: None)
            by_rows = outcome(source)
        if isinstance(by_rows, str) or isinstance(by_arrow, str):
            assert by_rows == by_arrow
        else:
            assert same(by_rows, by_arrow)
            sound += 1
    assert 8 < sound < 30


def test_blank_rows_count_in_the_number_of_a_row(tmp_path):
    lines = ["x,label", *(f"{row},{row % 2}" for row in range(20))]
    lines[15] = "oops,1"
    lines.insert(3, "")
    (tmp_path / "a.csv").write_text("\n".join(lines))
    assert "a.csv: row 17: x: found 'oops', allowed: a finite number" in outcome(CSV(str(tmp_path / "a.csv")))
    (tmp_path / "a.csv").write_text("\n".join(lines).replace("oops,1", "15,-1"))
    assert "a.csv: row 17: label: found '-1'" in outcome(CSV(str(tmp_path / "a.csv")))


def test_numbers_are_those_that_python_reads_but_for_what_it_alone_does():
    assert numbers_of(NUMBERS)[0].tolist() == [float(cell) for cell in NUMBERS]
    assert np.isnan(numbers_of(["1", *GAPS])[0]).tolist() == [False, *[True] * len(GAPS)]
    odd = ["1_0", "²", "٣", "inf", "-nan", "x", "1,5", "0x1A"]
    assert numbers_of(["1", *GAPS, *odd])[1].tolist() == [False] * (1 + len(GAPS)) + [True] * len(odd)


# -- times ------------------------------------------------------------------------------------------------------------


def test_times_that_are_written_alike_are_read_as_each_by_itself():
    draw = random.Random(0)
    odd = ["0000-01-01", "2026-02-30", "2026-03-01T24:00", "9999-12-31T23:59:59.999999", "2026-03-01T00:00:00.001"]
    for text in [*DAYS[:4], *odd]:
        alike, each = (outcome_of(texts) for texts in ([text], [text, " 0"]))
        assert alike == (each[:1] if isinstance(each, list) else each)
    stamps = [datetime(1, 1, 1) + timedelta(microseconds=draw.randrange(10**17)) for _ in range(200)]
    for timespec in ("minutes", "seconds", "milliseconds", "microseconds"):
        texts = [stamp.isoformat(draw.choice("T "), timespec) for stamp in stamps]
        want = [datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() for text in texts]
        assert all_seconds(texts, str)[0].tolist() == want


def outcome_of(texts: list[str]) -> list[float] | str:
    try:
        return all_seconds(texts, "row {}".format)[0].tolist()
    except FedtideError as error:
        return str(error)


@pytest.mark.parametrize("values", [
    np.array(["1970-01-02", "1970-01-03"]),
    np.array([date(1970, 1, 2), date(1970, 1, 3)], dtype=object),
    np.array([datetime(1970, 1, 2, 2, tzinfo=timezone(timedelta(hours=2))), "1970-01-03T00:00Z"], dtype=object),
    np.array(["1970-01-02", "1970-01-03"], "datetime64[s]"),
    np.array([86400, 172800]),
])  # fmt: skip
def test_times_of_any_kind_are_seconds(values):
    assert seconds_of(values, str)[0].tolist() == [86400.0, 172800.0]


# -- categories and gaps ----------------------------------------------------------------------------------------------


def table(folder: Path, *lines: str, **settings) -> CSV:
    (folder / "a.csv").write_text("\n".join(lines))
    return CSV(str(folder / "a.csv"), **settings)


def test_each_category_becomes_a_feature_in_the_place_of_its_column(tmp_path):
    lines = ("a,wind,b,label", "1,W,2,0", "3,N,4,1", "5,W,6,0")
    rows = table(tmp_path, *lines, categories=("wind",)).load(None, 0)
    assert rows.x.tolist() == [[1, 0, 1, 2], [3, 1, 0, 4], [5, 0, 1, 6]]
    rows = table(tmp_path, *lines, categories=("wind",), features=("wind",), scaled=True).load(None, 0)
    assert rows.x.tolist() == [[0, 1], [1, 0], [0, 1]]


def test_categories_and_means_are_those_of_the_rows_that_are_known(tmp_path):
    later = [f"{day},{'E' if day % 2 else 'N'},{'' if day == 5 else 10 * day},{day % 2}" for day in range(1, 20)]
    source = table(tmp_path, "t,wind,b,label", *later, "0,N,3,1", time="t", categories=("wind",), missing="mean")
    rows = source.load(None, 0)  # the earliest tenth are days 0 and 1
    assert rows.x[4].tolist() == [1.0, 0.0, 6.5]
    source = table(
        tmp_path, "t,wind,b,label", *later[1:], "0,N,3,1", "1,,4,0", time="t", categories=("wind",), missing="mean"
    )
    assert source.load(None, 0).x[-2:].tolist() == [[1.0, 3.0], [0.0, 4.0]]
    assert source.load(None, 0).x[3].tolist() == [0.0, 3.5]  # E came later, and nothing is known of it


@pytest.mark.parametrize(("lines", "settings", "said"), [
    (("a,w,label", "1,x,0", "2,,1"), {}, "row 3: w: found '', allowed: a category; data.source.missing = 'drop'"),
    (("a,w,label", "NA,x,0", "NA,y,1"), {"missing": "mean"}, "a: no number in the 2 rows known when training begins"),
    (("a,w,label", "1,,0", "2,,1"), {"missing": "mean"}, "w: no category in the 2 rows known when training begins"),
    (("a,w,label", *(f"1,{row},{row % 2}" for row in range(101))), {}, "w: found '101 categories', allowed: 100"),
    (("a,w,label", "1,x,0"), {"categories": ("wind",)}, "data.source.categories: found 'wind', allowed: some of the"),
    (("a,w,label", "1,x,0"), {"categories": ()}, r"row 2: w: found 'x', .* data.source.categories = \['w'\]"),
])  # fmt: skip
def test_what_is_wrong_with_categories_is_one_line(tmp_path, lines, settings, said):
    with pytest.raises(FedtideError, match=f"a.csv: .*{said}|^{said}"):
        table(tmp_path, *lines, **{"categories": ("w",), **settings}).load(None, 0)


def test_rows_of_another_file_become_features_as_those_of_the_first_did(tmp_path):
    source = table(tmp_path, "a,w,label", "1,x,0", "3,y,1", "NA,x,1", categories=("w",), missing="mean", scaled=True)
    (tmp_path / "b.csv").write_text("w,a\ny,2\nz,\nx,3\n")
    assert source.load(None, 0).x[2].tolist() == [0.0, 1.0, 0.0]
    assert len(table(tmp_path, "a,label", "1,0", ",1", "3,", missing="mean").load(None, 0)) == 2
    source = table(tmp_path, "a,w,label", "1,x,0", "3,y,1", "NA,x,1", categories=("w",), missing="mean", scaled=True)
    found = torch.from_numpy(source.encoded(tmp_path / "b.csv", None))
    assert torch.allclose(found, torch.tensor([[0, 0, 1], [0, 0, 0], [1.5**0.5, 1, 0]]))
