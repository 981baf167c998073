"""Whole tunings: any number of processes, stopped, killed, staged; validation rows alone."""

import contextlib
import json

import pytest
from rich.console import Console

from fedtide.config import from_dict, read
from fedtide.core.errors import FedtideError
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.report.study import read_study
from fedtide.runs import experiment as playing
from fedtide.runs.experiment import execute as run
from fedtide.runs.folder import create
from fedtide.runs.preflight import preflight
from fedtide.tuning import tune as tunes
from fedtide.tuning.tune import READY, TRIALS, LiveTuning, execute, load, read_tuning
from helpers.studies import PROX, RATE, A, made, result_of, tunable, tuning

MU = {"low": 0.01, "high": 1.0, "log": True}
STAGES = {
    "stage": [
        {"name": "rates", "ranges": {"method.A.local.lr": {**RATE, "also": ["method.prox.local.lr"]}}},
        {"name": "pull", "trials": 3, "ranges": {"method.prox.local.proximal": MU}},
    ]
}


class Killed(BaseException):
    pass


class Watching(LiveTuning):
    """Keeps what it is shown, and does something after a trial."""

    def __init__(self, then=lambda count: None):
        super().__init__(Console(quiet=True))
        self.begun, self.trials, self.then = None, [], then

    def begin(self, trials, finished):
        self.begun = trials, finished

    def trial(self, trial, tuned):
        self.trials.append((tuned.search.title, trial.number, trial.state))
        self.then(len(self.trials))


@pytest.fixture
def borrowed(pool, monkeypatch):
    """Worker processes are those of the session: nobody has to wait for new ones."""

    @contextlib.contextmanager
    def lent(size, joined):
        try:
            yield pool
        finally:
            (pool.folder / "stop").unlink(missing_ok=True)

    monkeypatch.setattr(playing, "Pool", lent)


WIDE = {"method.local.lr": {"low": 1e-4, "high": 1.0, "log": True}}
TWO = tuning(
    A,
    PROX,
    tune={"trials": 8, "startup_trials": 3, "parallel_trials": 2, "seeds": [0, 1], "ranges": WIDE},
    eval_every=1,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two methods with eight trials each, undisturbed, in this process."""
    root = made(TWO, tmp_path_factory.mktemp("whole") / "tune")
    assert execute(TWO, root, workers=1)
    return root


def lines(root):
    return [json.loads(line) for line in (root / TRIALS).read_text().splitlines()]


# -- the same result ---------------------------------------------------------------------------------------------------


def test_some_trials_are_pruned_and_every_method_has_as_many(whole):
    found = lines(whole)
    assert {line["state"] for line in found} == {"finished", "pruned"}
    for name in ("A", "prox"):
        assert [line["number"] for line in found if line["method"] == name] == list(range(8))


def test_two_processes_leave_the_same_bytes_as_one(tmp_path, whole, borrowed):
    root = made(TWO, tmp_path / "tune")
    assert execute(TWO, root, workers=2)
    assert result_of(root) == result_of(whole)
    assert not list(root.glob("memory-*"))


@pytest.mark.parametrize("after", [*(pytest.param(after, marks=pytest.mark.thorough) for after in (1, 4, 9)), 16])
def test_killed_after_any_trial_and_gone_on_with(tmp_path, whole, after):
    root = made(TWO, tmp_path / "tune")

    def then(count):
        if count == after:
            raise Killed

    with pytest.raises(Killed):
        execute(TWO, root, workers=1, display=Watching(then))
    with open(root / TRIALS, "a", encoding="utf-8") as file:
        file.write('{"stage": "", "meth')  # and the next line was being written
    (root / "memory-a1b2c3d4").mkdir()
    watching = Watching()
    assert execute(load(root), root, workers=1, display=watching)
    assert watching.begun == (16, after)
    assert len(watching.trials) == 16 - after
    assert result_of(root) == result_of(whole)
    assert not list(root.glob("memory-*"))


def test_stopped_by_hand_and_gone_on_with(tmp_path, whole, monkeypatch):
    root, stops = made(TWO, tmp_path / "tune"), []

    def stop(*given):
        stops.append(players_stop())
        return stops[-1]

    players_stop = playing.Stop
    monkeypatch.setattr(playing, "Stop", stop)
    watching = Watching(lambda count: stops[-1].ask() if count == 2 else None)
    assert not execute(TWO, root, workers=1, display=watching)
    assert not (root / READY).exists()
    assert len(lines(root)) == 2
    monkeypatch.setattr(playing, "Stop", players_stop)
    assert execute(TWO, root, workers=1)
    assert result_of(root) == result_of(whole)


def test_nothing_is_played_again_when_all_is_done(tmp_path, whole):
    before, watching = result_of(whole), Watching()
    (whole / READY).unlink()
    assert execute(load(whole), whole, display=watching)
    assert (watching.begun, watching.trials) == ((16, 16), [])
    assert result_of(whole) == before


# -- what is judged ----------------------------------------------------------------------------------------------------


def test_no_row_of_a_test_part_is_ever_scored(tmp_path, monkeypatch):
    scored, score = [], SimulatedFleet.score

    def watched(self, *given, part="test", **named):
        scored.append((part, named.get("personal", True)))
        return score(self, *given, part=part, **named)

    monkeypatch.setattr(SimulatedFleet, "score", watched)
    experiment = tuning(tune={"trials": 2})
    assert execute(experiment, made(experiment, tmp_path / "tune"), workers=1)
    assert set(scored) == {("val", True)}
    assert len(scored) == 2 * 3


def test_a_trial_is_what_a_run_with_its_values_says_of_validation_rows(tmp_path, whole):
    """To the last bit, and its accuracy is that by which a sweep chooses."""
    trial = next(line for line in lines(whole) if line["method"] == "prox" and line["state"] == "finished")
    rate = trial["values"]["method.local.lr"]
    experiment = read(whole / "config.toml", sets=[f"method.local.lr={rate}", "seeds=[0, 1]"])
    create(experiment, tmp_path / "run")
    assert run(experiment, tmp_path / "run", workers=1)
    (summary,) = read_study(tmp_path / "run").summaries
    measure = summary.method("prox").measures["val_accuracy"]
    assert measure.values == trial["by_seed"]
    assert measure.mean == pytest.approx(trial["accuracy"], abs=1e-15)
    assert [curve["seed"] for curve in trial["curves"]] == [0, 1]


def test_sizes_of_the_network_are_chosen_by_validation_rows_and_stay_for_later_stages(tmp_path):
    """Each size is worth what a run of this size is worth, and the best one is the network of the tuned experiment."""
    sizes = {"name": "sizes", "methods": ["A"], "ranges": {"model.hidden.0": {"choices": [1, 8]}}}
    rates = {"name": "rates", "ranges": {"method.prox.local.lr": {"choices": [0.1]}}}
    search = {"sampler": "grid", "pruning": False, "stage": [sizes, rates], "trials": None}
    experiment = tuning(A, PROX, model={"kind": "mlp", "hidden": [4]}, tune=search)
    root = made(experiment, tmp_path / "tune")
    assert execute(experiment, root, workers=1)
    by_size = {line["values"]["model.hidden.0"]: line["by_seed"] for line in lines(root) if line["stage"] == "sizes"}
    (later,) = [line for line in lines(root) if line["stage"] == "rates"]
    best = max(by_size, key=by_size.get)
    assert read(root / READY).model.hidden == (best,)
    for size, method, by_seed in [*((size, "A", by_size[size]) for size in by_size), (best, "prox", later["by_seed"])]:
        played = read(root / "config.toml", sets=[f"model.hidden=[{size}]", "seeds=[0]"])
        folder = tmp_path / f"{method}-{size}"
        create(played, folder)
        assert run(played, folder, workers=1)
        (summary,) = read_study(folder).summaries
        assert summary.method(method).measures["val_accuracy"].values == by_seed


def test_over_a_sweep_a_trial_is_the_mean_over_all_points(tmp_path):
    rates = {"method.local.lr": {"choices": [0.1]}}
    search = {"trials": 1, "seeds": [0, 1], "over_sweep": True, "ranges": rates}
    experiment = tuning(sweep={"model.hidden": [[4], [6]]}, tune=search, seeds=[0, 1])
    root = made(experiment, tmp_path / "tune")
    assert execute(experiment, root, workers=1)
    (trial,) = lines(root)
    ready = read(root / READY)
    assert ready.sweep == experiment.sweep
    create(ready, tmp_path / "run")
    assert run(ready, tmp_path / "run", workers=1)
    values = [summary.methods[0].measures["val_accuracy"].values for summary in read_study(tmp_path / "run").summaries]
    assert trial["by_seed"] == pytest.approx([sum(seed) / 2 for seed in zip(*values, strict=True)], abs=1e-15)
    assert [curve["seed"] for curve in trial["curves"]] == [0, 0, 1, 1]


def test_without_pruning_all_trials_are_played_to_the_end(tmp_path):
    experiment = tuning(tune={"pruning": False, "trials": 8}, eval_every=1)
    root = made(experiment, tmp_path / "tune")
    assert execute(experiment, root, workers=1)
    assert {line["state"] for line in lines(root)} == {"finished"}
    assert all(len(line["curves"][0]["rounds"]) == 6 for line in lines(root))


# -- trials that fail --------------------------------------------------------------------------------------------------


def test_values_that_make_no_method_or_blow_up_are_failures_with_a_reason(tmp_path):
    ranges = {
        "method.local.momentum": {"choices": [0.0, 0.5]},
        "method.local.optimizer": {"choices": ["sgd", "adam"]},
        "method.local.lr": {"choices": [0.1, 1e30]},
    }
    experiment = tuning(tune={"ranges": ranges, "trials": 16, "sampler": "random", "parallel_trials": 8})
    root = made(experiment, tmp_path / "tune")
    assert execute(experiment, root, workers=1)
    for line in lines(root):
        values = [line["values"][f"method.local.{key}"] for key in ("momentum", "optimizer", "lr")]
        if values[:2] == [0.5, "adam"]:
            assert line["state"] == "failed"
            assert "momentum belongs to optimizer = 'sgd'" in line["reason"]
        elif values[1:] == ["sgd", 1e30]:
            assert line["state"] == "failed"
            assert "finite" in line["reason"]
        elif values[2] == 0.1:
            assert line["state"] in ("finished", "pruned")
    assert len({line["reason"] for line in lines(root)}) >= 3


def test_where_every_trial_fails_the_error_says_why(tmp_path):
    experiment = tuning(tune={"trials": 2, "ranges": {"method.local.lr": {"choices": [1e30, 1e31]}}})
    root = made(experiment, tmp_path / "tune")
    with pytest.raises(FedtideError, match=r"tune: all 2 trials of 'A' failed; the first: seed 0: .*finite"):
        execute(experiment, root, workers=1)
    assert len(lines(root)) == 2
    assert not (root / READY).exists()


# -- stages ------------------------------------------------------------------------------------------------------------


def test_a_stage_takes_what_the_one_before_has_found(tmp_path, monkeypatch):
    experiment = tuning(A, PROX, tune={**STAGES, "trials": 4})
    root, calls, played = made(experiment, tmp_path / "tune"), [], tunes.in_parallel

    def watched(player, batch, *given):
        calls.extend((call.trial.method, call.experiment["method"]) for call in batch)
        return played(player, batch, *given)

    monkeypatch.setattr(tunes, "in_parallel", watched)
    assert execute(experiment, root, workers=1)
    assert [(line["stage"], line["method"]) for line in lines(root)] == [("rates", "A")] * 4 + [("pull", "prox")] * 3
    _, ((first,), (second,)) = read_tuning(root)
    found = first.best.values["method.A.local.lr"]
    assert [name for name, _ in calls] == ["A"] * 4 + ["prox"] * 3
    assert all(methods[1]["local"]["lr"] == methods[0]["local"]["lr"] == found for _, methods in calls[4:])
    ready = read(root / READY)
    assert ready.method[0].options["local"]["lr"] == ready.method[1].options["local"]["lr"] == found
    assert ready.method[1].options["local"]["proximal"] == second.best.values["method.prox.local.proximal"]


def test_what_is_written_is_the_experiment_with_the_values_in_it_and_can_be_run(whole):
    ready = read(whole / READY)
    preflight(ready)
    _, ((first, second),) = read_tuning(whole)
    for tuned, method in zip((first, second), ready.method, strict=True):
        assert method.options["local"]["lr"] == tuned.best.values["method.local.lr"]
        assert tuned.best.accuracy == max(t.accuracy for t in tuned.trials if t.accuracy is not None)
    assert (ready.tune, ready.sweep, ready.seeds) == (None, {}, TWO.seeds)


# -- what a folder holds -----------------------------------------------------------------------------------------------


def test_trials_of_another_configuration_are_refused(tmp_path):
    experiment = tuning(tune={"trials": 2})
    root = made(experiment, tmp_path / "tune")
    assert execute(experiment, root, workers=1)
    text = (root / "config.toml").read_text()
    (root / "config.toml").write_text(text.replace("rounds = 6", "rounds = 7"))
    with pytest.raises(FedtideError, match=r"trials.jsonl: line 1 belongs to another configuration"):
        execute(load(root), root, workers=1)
    (root / "config.toml").write_text(text.replace('title = ""', 'title = "Another"'))
    assert execute(load(root), root, workers=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "B"}, "no trial that config.toml asks for"),
        ({"number": 9}, "no trial that config.toml asks for"),
        ({"values": {"method.mu": 1}}, "no trial that config.toml asks for"),
        ({"values": [1]}, "not a trial"),
        ({"state": "running"}, "not a trial"),
        ({"curves": [{"seed": 0}]}, "not a trial"),
    ],
)
def test_a_trial_that_nobody_asked_for_is_refused(tmp_path, changes, said):
    experiment = tuning(tune={"trials": 2})
    root = made(experiment, tmp_path / "tune")
    assert execute(experiment, root, workers=1)
    first, second = lines(root)
    (root / TRIALS).write_text(json.dumps(first) + "\n" + json.dumps(second | changes) + "\n")
    with pytest.raises(FedtideError, match=f"trials.jsonl: line 2: damaged: {said}"):
        execute(experiment, root, workers=1)


def test_memory_of_clients_is_gone_after_a_trial(tmp_path):
    experiment = tuning({**A, "algorithm": "scaffold"}, tune={"trials": 2}, model={"kind": "mlp", "hidden": [600]})
    root = made(experiment, tmp_path / "tune")
    assert execute(experiment, root, workers=1)
    assert sorted(path.name for path in root.iterdir()) == ["config.toml", "environment.json", TRIALS, READY]


def test_windows_in_which_nobody_holds_rows_count_for_no_trial(tmp_path):
    """A calendar has a gap of sixteen days, in which there is nobody to judge."""
    days = [*range(1, 9), *range(25, 32)]
    rows = [f"u{n % 4},2024-01-{days[n // 16]:02d},{n % 5},{n % 3},k{n % 2}" for n in range(16 * len(days))]
    (tmp_path / "gap.csv").write_text("\n".join(["user,time,a,b,label", *rows]) + "\n")
    names = {"label": "label", "client": "user", "time": "time", "features": ["a", "b"]}
    raw = tunable(tune={"trials": 4, "seeds": [0]}, rounds=7, eval_every=1)
    raw["data"] = {
        "source": {"kind": "csv", "path": str(tmp_path / "gap.csv"), **names},
        "partition": {"kind": "natural"},
        "split": {"val": 0.3},
    }
    raw["shift"] = {"what": {"kind": "calendar", "window": "4d"}}
    experiment = from_dict(raw, timed=False)
    root = made(experiment, tmp_path / "tune")
    assert execute(experiment, root, workers=1)
    trials = lines(root)
    assert {trial["state"] for trial in trials} <= {"finished", "pruned"}
    finished = [trial for trial in trials if trial["state"] == "finished"]
    assert {len(trial["curves"][0]["rounds"]) for trial in finished} == {len(days) // 4 + 1}
