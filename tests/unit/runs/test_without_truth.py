"""A fleet that knows no truth, as one of real clients: what follows from truth is absent, the rest is as ever."""

import csv
from dataclasses import replace

import pytest

from fedtide.core.errors import FedtideError
from fedtide.laws.every import Growing
from fedtide.report.page import write_report
from fedtide.report.run_records import read_experiment
from fedtide.report.study import summarize
from fedtide.runs import folder
from helpers.studies import A, lines_of, record_of, run_of, study

IFCA = {**A, "name": "IFCA", "algorithm": "ifca", "clusters": 2}
OF_TRUTH = {"substituted", "groups", "expected", "drifted", "events", "heterogeneity"}


class Real:
    """A fleet of a simulation that shows no truth."""

    truth = substituted = None

    def __init__(self, fleet):
        self._fleet = fleet

    def __getattr__(self, name):
        if name == "population":
            raise AttributeError(name)
        return getattr(self._fleet, name)


def real(run):
    judge = run.simulated()
    return replace(judge, fleet=Real(judge.fleet))


@pytest.mark.parametrize("method", [A, IFCA], ids=["fedavg", "ifca"])
def test_lines_of_truth_are_absent_and_the_rest_is_the_same(tmp_path, method):
    changes = {"shift": {"who": {"kind": "periodic", "period": 4}, "how": "label-swaps"}}
    there, here = (run_of(study(method, **changes), tmp_path / name) for name in ("simulated", "real"))
    list(there.play())
    list(here.play(judge_of=real))
    for known, unknown in zip(lines_of(there.folder), lines_of(here.folder), strict=True):
        assert OF_TRUTH & set(known)
        assert not OF_TRUTH & set(unknown)
        assert not unknown["participants"]
        for key in unknown.keys() - {"participants", "scores", "branches"}:
            assert unknown[key] == known[key]
        if "branches" in known:
            assert unknown["branches"] == [[sum(column) for column in zip(*known["branches"], strict=True)]]
        for view, scores in unknown.get("scores", {}).items():
            assert not {"groups", "commonest"} & set(scores)
            assert scores["accuracy"] == known["scores"][view]["accuracy"]
    with open(there.folder / "clients.csv", newline="") as one, open(here.folder / "clients.csv", newline="") as other:
        for known, unknown in zip(csv.DictReader(one), csv.DictReader(other), strict=True):
            assert unknown == {key: value for key, value in known.items() if key != "truth"} | {"group": ""}
    assert not list((tmp_path / "real").rglob("shift/*"))


def test_it_is_resumed_and_reported(tmp_path):
    """With models of clusters, whose pictures are of clients without a group."""
    settings = study(A, IFCA, seeds=[0], baseline="A")
    folder.create(settings, tmp_path)
    for number, planned in enumerate(folder.plan(settings, tmp_path)):
        run = replace(run_of(settings, tmp_path, method=number), folder=planned.folder)
        list(run.play(stop=lambda: True, judge_of=real))
        assert len(lines_of(run.folder)) == 1
        list(run.play(judge_of=real))
        assert len(lines_of(run.folder)) == 6
    summary = summarize(*read_experiment(tmp_path))
    assert summary.groups == []
    assert write_report([tmp_path]).is_file()


def test_forgetting_needs_a_simulation(tmp_path):
    run = run_of(study(forgetting={"rounds": [1]}), tmp_path)
    with pytest.raises(FedtideError, match=r"^forgetting: .* only a simulation can"):
        list(run.play(judge_of=real))


@pytest.mark.parametrize("method", ["scaffold", "fielding", "cfl", "feddrift"])
def test_a_run_that_is_resumed_with_a_longer_roster_is_as_one_in_which_clients_joined(tmp_path, method):
    """A server that is started again knows more clients than before; all else it goes on with."""

    def growing(run):
        judge = run.simulated()
        return replace(judge, fleet=Growing(judge.fleet, registered=False))

    settings = study({**A, "algorithm": method}, rounds=4)
    whole, parts = (run_of(settings, tmp_path / name) for name in ("whole", "parts"))
    list(whole.play(judge_of=growing))
    numbers = iter(range(1, 5))
    list(parts.play(stop=lambda: next(numbers) == Growing.JOIN, judge_of=growing))
    list(parts.play(judge_of=growing))
    assert record_of(whole.folder) == record_of(parts.folder)
