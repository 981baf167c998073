"""Branches and experts: gate weights in a run and along a sweep."""

import shutil

import numpy as np
import pytest

from fedtide.report.components import bars, gate_weights, gate_weights_of
from fedtide.report.run_records import read_experiment
from fedtide.report.study import summarize
from helpers.pages import MIXTURE, STEADY, texts
from helpers.records import change_lines
from helpers.studies import A, finished, lines_of, study

FEDEM = {**A, "name": "FedEM", "algorithm": "fedem", "components": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    experiment = study(A, MIXTURE, FEDEM, **STEADY, seeds=[0, 1], average_last=6)
    return finished(tmp_path_factory.mktemp("experts") / "run", experiment)


def test_own_weight_is_the_mean_over_the_last_evaluations(root):
    record = read_experiment(root)[0]
    summary = summarize(record)
    values = []
    for seed in (0, 1):
        judged = [line for line in lines_of(root / "aem" / str(seed)) if line.get("scores")]
        values.append(np.mean([line["scores"]["held_out_clients"]["weights"]["own"] for line in judged]))
        weights = judged[-1]["scores"]["train_clients"]["weights"]
        assert sum([weights["own"], *weights["shared"]]) == pytest.approx(1)
        assert set(weights["groups"]) == {"day", "night"}
    assert summary.method("AEM").measures["own_weight"].values == pytest.approx(values)
    # The mixtures of FedEM have shared branches alone.
    assert all("own_weight" not in summary.method(name).measures for name in ("A", "FedEM"))
    _, weights = gate_weights_of(record.methods[2].runs[0], "train_clients")
    assert np.isnan(weights[:, 0]).all()
    assert weights.shape == (2, 3)
    assert [part.shape for part in gate_weights_of(record.methods[0].runs[0], "train_clients")] == [(0,), (0, 1)]


def test_bars_are_means_over_the_last_evaluations_of_the_first_seed(root, tmp_path):
    copied, own = shutil.copytree(root, tmp_path / "run"), iter((0.2, 0.6))

    def change(line):
        if line.get("scores"):
            first = next(own)
            day = {"own": first, "shared": [1 - first, 0.0]}
            groups = {"day": day, "night": {"own": 0.5, "shared": [0.5]}}
            line["scores"]["held_out_clients"]["weights"] = {**day, "groups": groups}

    change_lines(copied / "aem" / "0" / "rounds.jsonl", change)
    record = read_experiment(copied)[0]
    weights = bars(record)
    assert [*weights] == [("AEM", "day"), ("AEM", "night"), ("FedEM", "day"), ("FedEM", "night")]
    assert weights["AEM", "day"].tolist() == pytest.approx([0.4, 0.6, 0.0])
    assert weights["AEM", "night"].tolist() == pytest.approx([0.5, 0.5])
    assert len(weights["FedEM", "day"]) == 3
    words = texts(gate_weights(record))
    assert {"AEM, day clients", "AEM, night clients", "FedEM, day clients", "40", "60", "50"} <= set(words)
