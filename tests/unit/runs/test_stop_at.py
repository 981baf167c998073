"""Runs that end once they are good enough: what is recorded, resumed and reported."""

import math

import numpy as np
import pytest

from fedtide import simulate
from fedtide.algorithms import fedavg
from fedtide.config import StopAt, from_dict, resolved
from fedtide.report.page import write_report
from fedtide.report.study import read_study
from fedtide.runs.build import host_of, task_of
from fedtide.runs.digest import digest_of
from fedtide.runs.experiment import execute
from fedtide.runs.folder import create, plan
from fedtide.runs.runner import Run, reached
from helpers.studies import MOMENTUM, A, lines_of, raw, record_of, run_of, study

TARGET = {"accuracy": 0.4, "evaluations": 2}
LONG = {"rounds": 16, "eval_every": 2}


def accuracies(folder) -> dict[int, float]:
    """By rounds done, the headline: that of held-out clients."""
    return {l["round"] + 1: l["scores"]["held_out_clients"]["accuracy"] for l in lines_of(folder) if "scores" in l}  # noqa: E741


def test_the_first_evaluation_that_is_good_enough_ends_a_run(tmp_path):
    whole, ended = (run_of(study(MOMENTUM, **LONG, **more), tmp_path / name) for name, more in (
        ("whole", {}), ("ended", {"stop_at": 0.6})))  # fmt: skip
    list(whole.play())
    told = list(ended.play())
    first = next(after for after, accuracy in accuracies(whole.folder).items() if accuracy >= 0.6)
    assert first < 16
    assert [line["round"] for line in lines_of(ended.folder)] == list(range(first))
    *before, last = lines_of(ended.folder)
    assert last["stopped"] == {"accuracy": 0.6, "evaluations": 1}
    assert not any("stopped" in line for line in before)
    assert (told[-1].round, told[-1].rounds) == (first, first)
    # Until then it is the run that goes on, byte for byte.
    same = [line for line in lines_of(whole.folder) if line["round"] < first]
    assert [{k: v for k, v in line.items() if k != "stopped"} for line in lines_of(ended.folder)] == same
    assert (whole.folder / "checkpoints" / "00000016").is_dir()
    assert (ended.folder / "checkpoints" / f"{first:08d}").is_dir()


@pytest.mark.parametrize(("known", "evaluations", "ends"), [
    ([], 1, False), ([0.5], 1, True), ([0.49], 1, False), ([0.9, 0.4], 1, False), ([0.5], 2, False),
    ([0.5, 0.5], 2, True), ([0.6, 0.4, 0.6], 2, False), ([0.6, 0.4, 0.6, 0.6], 2, True), ([0.6, None], 1, False),
    ([0.6, math.nan, 0.6], 2, False),
])  # fmt: skip
def test_so_many_in_a_row(known, evaluations, ends):
    assert reached(StopAt(accuracy=0.5, evaluations=evaluations), known) is ends
    assert not reached(None, known)


def test_resuming_a_run_that_has_ended_does_nothing(tmp_path):
    experiment = study(A, MOMENTUM, **LONG, stop_at=TARGET, seeds=[0, 1])
    create(experiment, tmp_path / "run")
    assert execute(experiment, tmp_path / "run", workers=1)
    runs = plan(experiment, tmp_path / "run")
    assert all(run.finished for run in runs)
    before = record_of(tmp_path / "run")
    for run in runs:
        assert list(Run(run.experiment, run.method, run.seed, run.folder).play()) == []
    assert execute(experiment, tmp_path / "run", workers=1)
    assert record_of(tmp_path / "run") == before


def test_a_run_that_was_killed_between_its_last_line_and_its_last_checkpoint_is_not_finished(tmp_path, monkeypatch):
    experiment = study(A, **LONG, stop_at=TARGET, checkpoint_every=1)
    create(experiment, tmp_path / "run")
    save, kept = __import__("fedtide.core.checkpoint", fromlist=["save"]).save, []

    def killed(folder, start, *given, **named):
        if (ended := "stopped" in lines_of(folder.parent)[-1]) and not kept:
            kept.append(ended)
            raise KeyboardInterrupt
        save(folder, start, *given, **named)

    monkeypatch.setattr("fedtide.core.checkpoint.save", killed)
    (run,) = plan(experiment, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        list(Run(experiment, run.method, 0, run.folder).play())
    assert not run.finished
    list(Run(experiment, run.method, 0, run.folder).play())
    assert run.finished
    assert "stopped" in lines_of(run.folder)[-1]


def test_a_report_copes_with_runs_of_unequal_length(tmp_path):
    experiment = study(A, MOMENTUM, **LONG, stop_at=TARGET, seeds=[0, 1, 2], baseline="A", devices="steady")
    create(experiment, tmp_path / "run")
    execute(experiment, tmp_path / "run", workers=1)
    lengths = {len(lines_of(run.folder)) for run in plan(experiment, tmp_path / "run") if run.method.name == "A"}
    assert len(lengths) > 1
    page = write_report([tmp_path / "run"])
    assert "rounds to the target" in page.read_text()
    for method in read_study(tmp_path / "run").summaries[0].methods:
        for place, seed in enumerate(method.seeds):
            run = next(r for r in plan(experiment, tmp_path / "run") if (r.method.name, r.seed) == (method.name, seed))
            # The first of the two evaluations in a row; a round is a second.
            first = list(accuracies(run.folder))[-2]
            assert method.measures["rounds_to_target"].values[place] == first
            assert method.measures["time_to_target"].values[place] == float(first)
            last = accuracies(run.folder)
            late = [v for r, v in last.items() if r > max(last) - 8]
            assert method.measures["accuracy"].values[place] == pytest.approx(np.mean(late))


def test_who_never_gets_there_plays_on_and_is_said_not_to(tmp_path):
    experiment = study(A, rounds=4, stop_at=1.0, seeds=[0, 1])
    create(experiment, tmp_path / "run")
    execute(experiment, tmp_path / "run", workers=1)
    assert all(len(lines_of(run.folder)) == 4 for run in plan(experiment, tmp_path / "run"))
    page = write_report([tmp_path / "run"])
    measures = read_study(tmp_path / "run").summaries[0].methods[0].measures
    assert measures["time_to_target"].values == [4.0, 4.0]  # the end of the run
    assert measures["reached_target"].values == [0.0, 0.0]
    assert "not reached" in page.read_text()


def test_a_target_is_part_of_the_digest_and_of_what_is_written():
    plain, short, table = (study(A, **more) for more in ({}, {"stop_at": 0.8}, {"stop_at": {"accuracy": 0.8}}))
    assert short == table
    assert short.stop_at == StopAt(accuracy=0.8)
    assert from_dict(resolved(short)).stop_at == short.stop_at
    assert digest_of(plain, plain.method[0], 0) != digest_of(short, short.method[0], 0)
    assert from_dict(raw(A, stop_at=0.8), sets=["stop_at.evaluations=3"]).stop_at == StopAt(accuracy=0.8, evaluations=3)


def test_from_python():
    experiment = study(A)
    population = host_of(experiment, experiment.method[0], 0, None).population
    task = task_of(experiment, experiment.method[0], population.rows)

    def ended(stop_at):
        return simulate(fedavg(task, cohort=4), population, rounds=16, eval_every=2, stop_at=stop_at).rounds[-1]

    assert ended(0.3) == ended(StopAt(accuracy=0.3)) < 16
    assert ended(1.0) == 16
