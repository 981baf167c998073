"""One page about several run folders: differences between them, seed by seed."""

from dataclasses import replace

import pytest

from fedtide.data.targets import TARGET_WORDS
from fedtide.evaluate.metrics import Measure
from fedtide.report.page import Point, compare, paired
from fedtide.report.run_records import ExperimentRecord
from fedtide.report.summary import MethodSummary, Paired, Summary
from helpers.studies import A, study


def method(name, accuracy, seeds=(0, 1, 2)):
    measures = {"accuracy": Measure.of(list(accuracy)), "worst_point": Measure.of([a - 0.1 for a in accuracy])}
    return MethodSummary(name, "fedavg", list(seeds), 0, measures)


def shown(folder, *methods, point="", baseline=None):
    against = [Paired(m.name, baseline, Measure.of([0.0])) for m in methods if baseline and m.name != baseline]
    summary = Summary("", point, 8, "val", 2, None, [], list(methods), against)
    return Point(folder, f"run {folder}", ExperimentRecord(point, study(A, rounds=8), []), summary)


@pytest.fixture
def table(monkeypatch):
    """The rows of the table of differences."""
    monkeypatch.setattr("fedtide.report.page.accuracy_of_all", lambda points: None)

    return lambda *points: compare(points).parts[1].table.rows


def test_methods_of_one_name_are_compared_where_seeds_match(table):
    first = shown(0, method("A", [0.5, 0.6, 0.7]), method("B", [0.5, 0.5, 0.5]))
    later = shown(1, method("A", [0.8, 0.62, 0.52], seeds=(2, 1, 0)), method("B", [0.9, 0.9], seeds=(7, 8)))
    assert table(first, later) == [
        ["run 1: A", "run 0: A", "2, 1, 0", "≈ +4.7 ± 2.7 points", "+4.7 ± 2.7 points"],
        ["run 1: B", "run 0: B", "none in common", "-", "-"],
    ]


def test_what_is_equal_and_what_is_clear_is_marked(table):
    first = shown(0, method("A", [0.5, 0.6, 0.7]), method("B", [0.5, 0.6, 0.7]))
    later = shown(1, method("A", [0.5, 0.6, 0.7]), method("B", [0.6, 0.7, 0.8001]))
    marks = [row[3] for row in table(first, later)]
    assert marks == ["= +0.0 points", "▲ +10.0 ± 0.0 points"]


def test_skills_are_compared_as_accuracies_are(table):
    def of_numbers(folder, *values):
        made = shown(folder, replace(method("A", values), measures={"skill": Measure.of(list(values))}))
        return replace(made, summary=replace(made.summary, target=TARGET_WORDS["number"]))

    first, later = of_numbers(0, 0.5, 0.6, 0.7), of_numbers(1, 0.6, 0.7, 0.8001)
    assert table(first, later) == [["run 1: A", "run 0: A", "0, 1, 2", "▲ +10.0 ± 0.0 points"]]
    assert compare([first, later]).parts[1].table.header == ["method", "against", "which seeds", "skill"]


def test_a_method_without_a_namesake_is_compared_with_the_baseline():
    first = shown(0, method("A", [0.5]), method("B", [0.6]), baseline="B")
    later = shown(1, method("C", [0.5]), method("A", [0.5]))
    assert [(ours.name, theirs.name) for _, ours, _, theirs in paired([first, later])] == [("C", "B"), ("A", "A")]
    alone = replace(first, summary=replace(first.summary, paired=[]))
    assert [theirs.name for *_, theirs in paired([alone, later])] == ["A", "A"]


def test_points_of_sweeps_are_compared_with_their_like():
    first = [shown(0, method("A", [0.5]), point=point) for point in ("lr 0.1", "lr 0.2")]
    later = [shown(1, method("A", [0.5]), point=point) for point in ("lr 0.2", "lr 0.3")]
    points = [(ours.record.point, theirs.record.point) for ours, _, theirs, _ in paired([*first, *later])]
    assert points == [("lr 0.2", "lr 0.2"), ("lr 0.3", "lr 0.1")]
