"""Rhythm of learned priors: numbers and picture by hand."""

import numpy as np
import pytest

from fedtide.report import periods
from fedtide.report.periods import measure_rhythm
from fedtide.report.run_records import read_experiment
from helpers import studies
from helpers.records import run_of_lines


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
    assert measure_rhythm(run) == {
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
    assert measure_rhythm(run) == unknown
    assert measure_rhythm(run_of_lines(tmp_path, line([5, 5], prior=[0.5, 0.5]))) == {}


@pytest.mark.parametrize("rounds", [16, 17])
def test_one_period_has_no_point_for_an_end_between_two_evaluations(tmp_path, rounds):
    """Every fourth round is evaluated, and the last one: after round 17 it is one after the beginning of a period."""
    made = studies.study(rounds=rounds, eval_every=4, average_last=12, shift={"who": {"kind": "periodic", "period": 8}})
    record = read_experiment(studies.finished(tmp_path / "run", made))[0]
    assert periods._folded(record, record.methods[0].runs[0], 8)[0].tolist() == [0, 4, 8]
