"""Rhythm of learned priors: numbers and picture by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedtide.report.page import write_report
from fedtide.report.rhythm import measure, rhythm_table, server_clock
from fedtide.report.run_records import read_experiment
from fedtide.report.study import summarize
from helpers.pages import Page
from helpers.records import run_of_lines
from helpers.studies import A, finished, study

LEARNED = {
    "name": "learned",
    "algorithm": "fedtkm",
    "cohort": 4,
    "prior": {"kind": "learned", "look_every": 4},
}


def line(arrived, **facts):
    return {"groups": arrived, "facts": facts}


def test_numbers_by_hand(tmp_path):
    """Five rounds: shares are read in the last four, numbered the other way round, a period is believed in two.

    Read of the group that came with 8, 6, 2, 0 of 10: 0.9, 0.6, 0.2, 0.1; squares of errors 0.01, 0, 0, 0.01.
    """
    run = run_of_lines(
        tmp_path,
        line([5, 5]),
        line([8, 2], prior=[0.1, 0.9], gain=1.0, chance=2.0),
        line([6, 4], prior=[0.4, 0.6]),
        line([2, 8], prior=[0.8, 0.2], periods=[31.0, 7.0], gain=90.0, chance=20.0),
        line([0, 10], prior=[0.9, 0.1], periods=[32.5]),
    )  # fmt: skip
    assert measure(None, None, run) == {
        "period_known": 0.4,
        "period_found": 1.0,
        "rounds_to_period": 4.0,
        "shares_known": 0.8,
        "learned_period": 32.5,
        "shares_error": pytest.approx(np.sqrt(0.02 / 4)),
    }


def test_without_a_period_the_rounds_are_those_of_the_run(tmp_path):
    run = run_of_lines(tmp_path, line([5, 5], gain=0.0, chance=1.0), line([5, 5]))
    unknown = {"period_known": 0.0, "period_found": 0.0, "rounds_to_period": 2.0, "shares_known": 0.0}
    assert measure(None, None, run) == unknown
    assert measure(None, None, run_of_lines(tmp_path, line([5, 5], prior=[0.5, 0.5]))) == {}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    shift = {"who": {"kind": "block-cyclic", "period": 4}}
    experiment = study(LEARNED, A, rounds=12, eval_every=6, shift=shift)
    return finished(tmp_path_factory.mktemp("rhythm") / "run", experiment)


def test_the_page_has_the_clock_and_a_table(root):
    record = read_experiment(root)[0]
    table = rhythm_table(record, summarize(record))
    assert [row[0] for row in table.rows] == ["learned", "A"]
    assert table.rows[1][1:] == ["-"] * (len(table.header) - 1)
    page = Page(write_report([root]).read_text(encoding="utf-8"))
    assert "The server's clock" in page.text["h3"]
    assert "The learned rhythm" in page.text["h2"]


def test_the_picture_notes_the_round_in_which_a_period_is_believed(root, monkeypatch):
    record = read_experiment(root)[0]
    run = record.methods[0].runs[0]
    lines = [json.loads(text) for text in (run.folder / "rounds.jsonl").read_text().splitlines()]
    for number, each in enumerate(lines):
        share = 0.9 if number % 4 < 2 else 0.1
        each["facts"] |= {"prior": [share, 1 - share], "gain": 50.0, "chance": 10.0}
        each["facts"] |= {"periods": [4.0], "forecast": [share, 1 - share]} if number >= 8 else {}
    monkeypatch.setitem(run.__dict__, "lines", lines)
    drawn = server_clock(record)
    assert "learned: after round 9 a period is believed; now 4.0 rounds" in drawn
    assert all(words in drawn for words in ("read in the round", "forecast before it", "next period", "expected"))
