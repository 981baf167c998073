"""The server's clock in reports: measures and picture of what a learned prior found, by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedtide.report import server_clock, tables
from fedtide.report.page import write_report
from fedtide.report.reading import read_experiment
from fedtide.report.rhythm import learning
from fedtide.report.summary import summarize
from fedtide.runs import folder
from helpers.pages import Page
from helpers.studies import A, run_of, study

TOLD = {
    "name": "learned",
    "algorithm": "fedtkm",
    "cohort": 4,
    "prior": {"kind": "learned", "look_every": 4},
}


class Run:
    """What the measures read of a run."""

    def __init__(self, lines):
        self.lines = lines

    def fact(self, name):
        return np.array([line["facts"].get(name, np.nan) for line in self.lines], dtype=np.float64)

    def every_row(self, value):
        found = [value(line) or [] for line in self.lines]
        return np.array([[*each, *[np.nan] * (max(map(len, found)) - len(each))] for each in found])


def line(came, **facts):
    return {"groups": came, "facts": facts}


def test_measures_by_hand():
    """Five rounds: shares are read in the last four, numbered the other way round, a period is believed in two.

    Read of the group that came with 8, 6, 2, 0 of 10: 0.9, 0.6, 0.2, 0.1; squares of errors 0.01, 0, 0, 0.01.
    """
    run = Run([
        line([5, 5]),
        line([8, 2], prior=[0.1, 0.9], gain=1.0, chance=2.0),
        line([6, 4], prior=[0.4, 0.6]),
        line([2, 8], prior=[0.8, 0.2], periods=[31.0, 7.0], gain=90.0, chance=20.0),
        line([0, 10], prior=[0.9, 0.1], periods=[32.5]),
    ])  # fmt: skip
    found = learning(run)
    assert found == {
        "period_known": 0.4,
        "period_found": 1.0,
        "rounds_to_period": 4.0,
        "shares_known": 0.8,
        "learned_period": 32.5,
        "shares_error": pytest.approx(np.sqrt(0.02 / 4)),
    }


def test_without_a_period_the_rounds_are_those_of_the_run():
    found = learning(Run([line([5, 5], gain=0.0, chance=1.0), line([5, 5])]))
    assert found == {"period_known": 0.0, "period_found": 0.0, "rounds_to_period": 2.0, "shares_known": 0.0}


def test_other_priors_have_no_such_measures():
    assert learning(Run([line([5, 5], prior=[0.5, 0.5])])) == {}


def test_the_next_period_repeats_the_last_forecasts():
    told = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert server_clock._next(told, 4.0).tolist() == [2, 3, 4, 5]
    assert server_clock._next(told, 2.4).tolist() == [4, 5, 5]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A finished study of 12 rounds, and lines of a run in which a period is believed."""
    root = tmp_path_factory.mktemp("rhythm") / "run"
    experiment = study(TOLD, A, rounds=12, eval_every=6, shift={"who": {"kind": "block-cyclic", "period": 4}})
    folder.create(experiment, root)
    for number in range(2):
        list(run_of(experiment, root, method=number).play())
    file = root / "learned" / "0" / "rounds.jsonl"
    lines = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
    for t, each in enumerate(lines):
        share = 0.9 if t % 4 < 2 else 0.1
        each["facts"] |= {"prior": [share, 1 - share], "gain": 50.0, "chance": 10.0}
        each["facts"] |= {"periods": [4.0], "forecast": [share, 1 - share]} if t >= 8 else {}
    return root, lines


def test_the_page_has_the_clock_and_a_table(root):
    root, _ = root
    record = read_experiment(root)[0]
    table = tables.measured(summarize(record), tables.RHYTHM)
    assert table is not None
    assert [row[0] for row in table.rows] == ["learned", "A"]
    assert table.rows[1][1:] == ["-"] * (len(table.header) - 1)
    page = Page(write_report([root]).read_text(encoding="utf-8"))
    assert "The server's clock" in page.text["h2"] + page.text["h3"]
    assert "The learned rhythm" in page.text["h2"] + page.text["h3"]


def test_the_picture_says_when_a_period_is_believed(root, monkeypatch):
    root, lines = root
    record = read_experiment(root)[0]
    run = record.methods[0].runs[0]
    monkeypatch.setitem(run.__dict__, "lines", lines)
    drawn = server_clock.server_clock(record)
    assert "learned: after round 9 a period is believed; now 4.0 rounds" in drawn, drawn[-3000:]
    assert all(words in drawn for words in ("read in the round", "forecast before it", "next period", "expected"))


def test_no_picture_without_a_learned_prior(tmp_path):
    experiment = study(A)
    folder.create(experiment, tmp_path / "run")
    list(run_of(experiment, tmp_path / "run").play())
    assert server_clock.server_clock(read_experiment(tmp_path / "run")[0]) is None
