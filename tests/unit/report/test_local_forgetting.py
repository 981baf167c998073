"""Local forgetting: maps, curve and numbers of a small study."""

from pathlib import Path

import numpy as np
import pytest

from fedtide.report import forgetting as local
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


def test_what_is_drawn_is_received_minus_local_in_points():
    line = {"accuracy": {"received": [0.5, None, 1.0], "local": [[0.25, None, 1.0], [1.0, None, 0.0]]}}
    line |= {"forgetting": {"models": [], "owners": []}}
    assert local.forgotten(line)[0] == pytest.approx(np.array([[25, np.nan, 0], [-50, np.nan, 100]]), nan_ok=True)


def test_measures_are_means_over_rounds(probed):
    (run, _) = probed.methods[1].runs
    lines = run.forgetting
    numbers = local.measure_local(run)
    assert numbers["local_forgetting"] == pytest.approx(np.mean([line["forgetting"]["mean"] for line in lines]))
    assert numbers["local_forgetting_own"] == pytest.approx(np.mean([line["forgetting"]["own"] for line in lines]))
    assert numbers["local_loss_increase"] == pytest.approx(np.mean([line["loss_increase"]["mean"] for line in lines]))


def test_a_round_with_nothing_to_compare_counts_for_nothing(tmp_path):
    record = finished(tmp_path / "run", {**A, "cohort": 1}, forgetting={"rounds": [0, 1]})
    (run,) = record.methods[0].runs
    assert [line["known"] for line in run.forgetting] == [False, False]
    numbers = local.measure_local(run)
    assert np.isnan(numbers["local_forgetting"])
    assert np.isfinite(numbers["local_forgetting_own"])
    assert "nothing to compare" in texts(local.local_forgetting(record))
    assert local.forgetting_over_rounds(record) is None
    assert local.forgetting_table(record, summarize(record)).header == ["method", "on own rows"]
