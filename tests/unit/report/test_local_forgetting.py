"""Local forgetting: maps, curve and numbers of a small study."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from fedtide.report import local_forgetting as local
from fedtide.report.run_records import ExperimentRecord, read_experiment
from fedtide.report.study import summarize
from helpers import studies
from helpers.pages import texts
from helpers.studies import MOMENTUM, STEADY, A, study

PROX = {**A, "name": "prox", "algorithm": "fedprox"}


def finished(root: Path, *methods: dict, **changes) -> ExperimentRecord:
    return read_experiment(studies.finished(root, study(*methods, **changes)))[0]


@pytest.fixture(scope="module")
def probed(tmp_path_factory) -> ExperimentRecord:
    return finished(
        tmp_path_factory.mktemp("maps") / "run", A, PROX, MOMENTUM, {**A, "name": "$x$"}, STEADY,
        forgetting={"rounds": [0, 1, 2, 3, 4, 5]}, seeds=[0, 1],
    )  # fmt: skip


def test_every_method_and_round_has_a_map_with_its_mean(probed):
    found = texts(local.local_forgetting(probed))
    for method in probed.methods:
        for line in method.runs[0].forgetting:
            title = f"{method.name}, round {line['round']}"
            # Of six rounds five are drawn, the first and the last among them.
            assert (title in found) == (line["round"] != 3), title
            if title in found:
                mean = f"mean forgetting {100 * line['forgetting']['mean']:.1f} points"
                assert mean in found


@pytest.fixture
def scales(monkeypatch):
    """The color scale of every map that is drawn."""
    seen, draw = [], Axes.imshow

    def drawn(axes, *given, **named):
        seen.append(named["norm"])
        return draw(axes, *given, **named)

    monkeypatch.setattr(Axes, "imshow", drawn)
    return seen


def test_all_maps_have_one_scale_around_zero(probed, scales):
    local.local_forgetting(probed)
    assert len(scales) == 5 * 5 * 3  # each with two strips
    assert len({id(scale) for scale in scales}) == 1
    largest = max(
        abs(100 * (r - a))
        for m in probed.methods
        for line in m.runs[0].forgetting
        for row in line["accuracy"]["local"]
        for a, r in zip(row, line["accuracy"]["received"], strict=True)
    )
    assert (scales[0].vmin, scales[0].vmax) == pytest.approx((-largest, largest))


def test_what_is_left_after_local_training_is_drawn_for_the_last_round(probed, scales):
    found = texts(local.after_local_training(probed))
    last = max(line["round"] for line in probed.methods[0].runs[0].forgetting)
    assert all(f"{method.name}, round {last}" in found for method in probed.methods if "$" not in method.name)
    assert "received" in found
    assert {(scale.vmin, scale.vmax) for scale in scales} == {(0, 100)}
    assert len(scales) == 5 * 3


def test_what_is_drawn_is_received_minus_local_in_points():
    line = {"accuracy": {"received": [0.5, None, 1.0], "local": [[0.25, None, 1.0], [1.0, None, 0.0]]}}
    assert local.forgotten(line) == pytest.approx(np.array([[25, np.nan, 0], [-50, np.nan, 100]]), nan_ok=True)


def test_measures_are_means_over_rounds(probed):
    (run, _) = probed.methods[1].runs
    lines = run.forgetting
    numbers = local.measure(None, None, run)
    assert numbers["local_forgetting"] == pytest.approx(np.mean([line["forgetting"]["mean"] for line in lines]))
    assert numbers["local_forgetting_own"] == pytest.approx(np.mean([line["forgetting"]["own"] for line in lines]))
    assert numbers["local_loss_increase"] == pytest.approx(np.mean([line["loss_increase"]["mean"] for line in lines]))
    table = local.forgetting_table(probed, summarize(probed))
    assert table.header[:2] == ["method", "on rows of other clients"]
    assert [row[0] for row in table.rows] == ["A", "prox", "momentum", "$x$", "steady"]


def test_a_round_with_nothing_to_compare_counts_for_nothing(tmp_path):
    record = finished(tmp_path / "run", {**A, "cohort": 1}, forgetting={"rounds": [0, 1]})
    (run,) = record.methods[0].runs
    assert [line["known"] for line in run.forgetting] == [False, False]
    numbers = local.measure(None, None, run)
    assert np.isnan(numbers["local_forgetting"])
    assert np.isfinite(numbers["local_forgetting_own"])
    assert "nothing to compare" in texts(local.local_forgetting(record))
    assert local.forgetting_over_rounds(record) is None
    assert local.forgetting_table(record, summarize(record)).header == ["method", "on own rows"]


def test_the_curve_is_there_from_two_rounds_on(probed, tmp_path):
    assert 'aria-label="local forgetting over rounds"' in local.forgetting_over_rounds(probed)
    single = finished(tmp_path / "run", A, forgetting={"rounds": [2]})
    assert local.forgetting_over_rounds(single) is None
    assert local.local_forgetting(single) is not None
