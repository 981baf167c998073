"""Methods that one group alone trains, beside the others in the picture of training accuracy."""

import pytest

from fedtide.report.periods import only_group
from fedtide.report.run_records import read_experiment
from fedtide.report.topics import PICTURES
from helpers.records import run_of_lines
from helpers.studies import A, finished, study

LONG = {"kind": "block-cyclic", "period": 1000}


@pytest.mark.parametrize(
    ("rounds", "group"),
    [
        ([[3, 0], [2, 0]], 0),
        ([[0, 0], [0, 4]], 1),
        ([[3, 0], [2, 1]], None),
        ([[0, 0], [0, 0]], None),
        ([[3], [3]], None),
        ([None, None], None),
    ],
)
def test_the_only_group_by_hand(tmp_path, rounds, group):
    lines = [{} if counts is None else {"groups": counts} for counts in rounds]
    assert only_group([run_of_lines(tmp_path, *lines)]) == group


def test_two_seeds_of_different_groups_are_not_alone(tmp_path):
    runs = []
    for seed, counts in enumerate(([1, 0], [0, 1])):
        (tmp_path / str(seed)).mkdir()
        runs.append(run_of_lines(tmp_path / str(seed), {"groups": counts}))
    assert only_group(runs) is None


def test_methods_of_one_group_have_no_panel_and_are_in_all_others(tmp_path):
    day, night = (
        {**A, "name": name, "shift": {"who": {**LONG, "phase": phase}}} for name, phase in (("D", 0), ("N", -500))
    )
    shift = {"who": {"kind": "block-cyclic", "period": 4}}
    experiment = study(A, {**A, "name": "B"}, day, night, rounds=8, shift=shift)
    (record,) = read_experiment(finished(tmp_path / "run", experiment))
    figure = PICTURES["participants"](record).figure
    assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == ["A", "B"]
    for axes in figure.axes:
        drawn = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        for name, line in drawn.items():
            (run,) = next(method for method in record.methods if method.name == name).runs[:1]
            accuracy = [100 * line["participants"]["accuracy"] for line in run.lines]
            assert line.get_ydata().tolist() == pytest.approx(accuracy)
        assert {*drawn} == {"D", "N"}
