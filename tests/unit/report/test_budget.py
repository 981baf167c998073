"""The privacy budget in reports."""

from __future__ import annotations

import pytest

from fedtide.report.budget import epsilon_and_accuracy, spent
from fedtide.report.page import write_report
from fedtide.report.reading import read_experiment
from fedtide.runs import folder
from helpers.pages import Page
from helpers.studies import A, lines_of, run_of, study

PRIVACY = {"epsilon": 4.0, "clip": {"delta": 1.0, "loss": 1.0}, "noise": "banded", "distance": 2}


def played(root, **changes):
    experiment = study(A, eval_every=2, **changes)
    folder.create(experiment, root)
    list(run_of(experiment, root).play())
    return read_experiment(root)[0]


def test_a_private_run_shows_its_budget(tmp_path):
    record = played(tmp_path / "run", wire={"secure": False, "fewest": 1, "privacy": PRIVACY})
    (run,) = record.methods[0].runs
    found = spent(run).tolist()
    assert found == [line["epsilon"] for line in lines_of(run.folder)]
    assert found == sorted(found)
    assert 0 < found[-1] <= 4.0
    drawn = epsilon_and_accuracy(record)
    assert "epsilon spent" in drawn
    page = Page(write_report([tmp_path / "run"]).read_text(encoding="utf-8"))
    assert "Privacy budget" in page.text["h2"] + page.text["h3"]


@pytest.mark.parametrize("wire", [{}, {"wire": {"secure": False, "fewest": 1}}])
def test_a_run_without_noise_has_none(tmp_path, wire):
    record = played(tmp_path / "run", **wire)
    assert epsilon_and_accuracy(record) is None
