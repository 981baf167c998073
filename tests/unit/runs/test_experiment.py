"""Whole experiments: any number of processes, stopped by hand, swept, replayed."""

import contextlib
import os
import shutil
import signal
import threading

import pytest

from fedtide.config import from_dict, read
from fedtide.core.errors import FedtideError
from fedtide.runs import experiment as playing
from fedtide.runs import folder
from fedtide.runs.build import as_json
from fedtide.runs.experiment import RunCall, RunsDisplay, execute, play_run
from fedtide.runs.preflight import preflight
from fedtide.runs.runner import Run
from helpers.studies import SCAFFOLD, STEADY, A, lines_of, raw, record_of, run_of, study


class Watching(RunsDisplay):
    """Keeps what it is shown, and does something after a round."""

    def __init__(self, then=lambda run, progress: None):
        self.begun, self.seen, self.ended, self.then = None, [], 0, then

    def begin(self, runs, finished):
        self.begun = [run.title for run in runs], finished

    def progress(self, run, progress):
        self.seen.append((run, progress.round))
        self.then(run, progress)

    def end(self):
        self.ended += 1


@pytest.fixture
def borrowed(pool, monkeypatch):
    """Worker processes are those of the session: nobody has to wait for new ones."""
    asked = []

    @contextlib.contextmanager
    def lent(size, joined):
        asked.append((size, joined))
        try:
            yield pool
        finally:
            (pool.folder / "stop").unlink(missing_ok=True)

    monkeypatch.setattr(playing, "Pool", lent)
    return asked


FOUR = study(A, SCAFFOLD, seeds=[0, 1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two methods with two seeds, undisturbed, in this process."""
    root = tmp_path_factory.mktemp("whole") / "run"
    folder.create(FOUR, root)
    assert execute(FOUR, root, workers=1)
    return record_of(root)


def test_every_run_is_played_and_shown(tmp_path):
    display = Watching()
    assert execute(FOUR, tmp_path / "run", workers=1, display=display)
    assert display.begun == (["A · seed 0", "scaffold · seed 0", "A · seed 1", "scaffold · seed 1"], 0)
    assert display.seen == [(run, round) for run in range(4) for round in range(1, 7)]
    assert display.ended == 1


def test_two_processes_leave_the_same_bytes_as_one(tmp_path, whole, borrowed):
    root = tmp_path / "run"
    folder.create(FOUR, root)
    display = Watching()
    assert execute(FOUR, root, workers=2, display=display)
    assert borrowed == [(2, False)]
    assert sorted(display.seen) == [(run, round) for run in range(4) for round in range(1, 7)]
    assert record_of(root) == whole


def test_two_processes_for_the_clients_of_one_run_leave_the_same_bytes(tmp_path, borrowed):
    one = study(SCAFFOLD)
    for workers in (1, 2):
        folder.create(one, tmp_path / str(workers))
        assert execute(one, tmp_path / str(workers), workers=workers)
    assert borrowed == [(2, True)]  # this process is one of them
    assert record_of(tmp_path / "1") == record_of(tmp_path / "2")


@pytest.mark.parametrize(
    ("runs", "asked", "settings", "cores", "used"),
    [
        (1, None, {}, 4, 1),
        (1, 3, {}, 4, 3),
        (1, None, {"kind": "workers"}, 4, 4),
        (1, None, {"kind": "workers", "workers": 2}, 4, 2),
        (1, None, {"kind": "workers", "threads": 2}, 4, 2),
        (1, None, {"workers": 3}, 4, 1),
        (1, 3, {"kind": "stacked"}, 4, 1),
        (5, None, {}, 4, 4),
        (3, None, {}, 4, 3),
        (5, 2, {}, 4, 2),
        (5, None, {"workers": 3}, 4, 3),
        (5, 2, {"workers": 3}, 4, 2),
        (5, None, {"threads": 2}, 4, 2),
        (5, None, {"threads": 9}, 4, 1),
        (2, 9, {}, 4, 2),
        (0, None, {}, 4, 1),
    ],
)
def test_how_many_processes_are_used(monkeypatch, runs, asked, settings, cores, used):
    monkeypatch.setattr(playing, "cores", lambda: cores)
    assert playing.processes(study(fleet=settings), asked, runs) == used


def bytes_of(root):
    """Every file below a folder."""
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_finished_runs_are_counted_and_left_alone(tmp_path, whole):
    root = tmp_path / "run"
    folder.create(FOUR, root)
    finished = run_of(FOUR, root, seed=1, method=0)
    list(finished.play())
    list(run_of(FOUR, root, seed=0, method=1).play(lambda: True))
    before = bytes_of(finished.folder)
    display = Watching()
    assert execute(FOUR, root, workers=1, display=display)
    assert display.begun == (["A · seed 0", "scaffold · seed 0", "scaffold · seed 1"], 1)
    assert display.seen == [(run, round) for run, first in enumerate((1, 2, 1)) for round in range(first, 7)]
    assert bytes_of(finished.folder) == before
    assert record_of(root) == whole
    execute(FOUR, root, workers=1, display=(again := Watching()))
    assert (again.begun, again.seen) == (([], 4), [])


# -- stopping ----------------------------------------------------------------------------------------------------------


def interrupt(at: int, number: int = signal.SIGINT):
    """Presses Ctrl-C, or sends another signal, after the `at`-th shown round."""
    shown = []

    def then(run, progress):
        shown.append(progress.round)
        if len(shown) == at:
            signal.raise_signal(number)

    return then


@pytest.mark.parametrize(("at", "number"), [(1, signal.SIGINT), (4, signal.SIGTERM), (9, signal.SIGINT)])
def test_ctrl_c_finishes_the_round_saves_and_ends(tmp_path, whole, at, number):
    """So does the SIGTERM of a batch system."""
    root, before = tmp_path / "run", signal.getsignal(number)
    folder.create(FOUR, root)
    display = Watching(interrupt(at, number))
    assert not execute(FOUR, root, workers=1, display=display)
    # The round that was shown is over; the one being played is finished and saved.
    assert len(display.seen) == at + 1
    assert display.ended == 1
    last, played = display.seen[-1]
    run = folder.plan(FOUR, root)[last]
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == [f"{played:08d}"]
    assert len(lines_of(run.folder)) == played
    assert signal.getsignal(number) is before
    assert execute(FOUR, root, workers=1)
    assert record_of(root) == whole


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    def twice(run, progress):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    display, before = Watching(twice), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        execute(FOUR, tmp_path / "run", workers=1, display=display)
    assert display.ended == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_signals_are_left_to_whoever_owns_them(tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(execute(study(rounds=2), tmp_path / "run", workers=1)))
    thread.start()
    thread.join()
    assert done == [True]


def test_a_stop_that_came_while_processes_began_is_not_forgotten(tmp_path, monkeypatch):
    class Slow:
        """Somebody presses Ctrl-C before the pool is there."""

        def __init__(self, size, joined):
            self.folder = tmp_path
            os.kill(os.getpid(), signal.SIGINT)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(playing, "Pool", Slow)
    with playing.started(study(), 2, 2) as (_, stop):
        assert stop.asked
        assert (tmp_path / playing.STOP).exists()


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_a_sweep_has_a_folder_per_point_with_its_own_configuration(tmp_path):
    swept = study(A, STEADY, sweep={"method.local.lr": [0.1, 0.5], "rounds": [2, 3]}, seeds=[0, 1])
    root = tmp_path / "run"
    folder.create(swept, root)
    assert execute(swept, root, workers=1)
    points = ["lr-0.1-rounds-2", "lr-0.1-rounds-3", "lr-0.5-rounds-2", "lr-0.5-rounds-3"]
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == points
    assert read(root / "config.toml") == swept
    for point in points:
        own = read(root / point / "config.toml")
        assert own.sweep == {}
        assert own.method[0].settings()["local"].lr == float(point[3:6])
        for method in ("a", "steady"):
            for seed in "01":
                assert len(lines_of(root / point / method / seed)) == int(point[-1])
        assert (root / point / "shift" / "0.safetensors").is_file()
    alone = study(A, STEADY, rounds=3, sweep={}, seeds=[0, 1])
    execute(alone, tmp_path / "alone", workers=1)
    here = {name: content for name, content in record_of(root / points[1]).items() if name != "config.toml"}
    assert here == record_of(tmp_path / "alone")


def test_a_run_whose_settings_are_not_swept_is_played_once(tmp_path, monkeypatch):
    faster = {**A, "name": "faster"}
    swept = study(A, faster, rounds=2, sweep={"method.faster.local.lr": [0.2, 0.3, 0.1]}, seeds=[0, 1])
    root = tmp_path / "run"
    folder.create(swept, root)
    played = []
    monkeypatch.setattr("fedtide.runs.experiment.Run", lambda *asked: (played.append(asked[3]), Run(*asked))[1])
    shown = Watching()
    assert execute(swept, root, workers=1, display=shown)
    assert sorted(str(path.relative_to(root)) for path in played) == sorted(
        [f"lr-0.{k}/faster/{seed}" for k in (1, 2, 3) for seed in "01"] + [f"lr-0.2/a/{seed}" for seed in "01"]
    )
    assert shown.begun == ([run.title for run in folder.plan(swept, root)], 0)
    assert {run for run, rounds in shown.seen if rounds == 2} == set(range(12))
    alone = study(A, rounds=2, seeds=[0, 1])
    execute(alone, tmp_path / "alone", workers=1)
    here = {name: content for name, content in record_of(root / "lr-0.3").items() if name.startswith(("a/", "shift"))}
    assert here == record_of(tmp_path / "alone")  # a folder without a configuration
    shutil.rmtree(root / "lr-0.1" / "a" / "1")  # as a kill before it was copied leaves it
    played.clear()
    assert execute(swept, root, workers=1)
    assert not played
    assert (root / "lr-0.1" / "a" / "1" / "rounds.jsonl").is_file()


# -- replay ------------------------------------------------------------------------------------------------------------


def replayed(tmp_path, method, **changes):
    """The record of an experiment, and of another that replays who held what and who arrived when."""
    first = study(method, **changes)
    folder.create(first, tmp_path / "first")
    assert execute(first, tmp_path / "first", workers=1)
    saved = str(tmp_path / "first" / "shift" / "0.safetensors")
    values = raw(method, **changes)
    values["data"] = {"source": values["data"]["source"], "partition": {"kind": "saved", "path": saved}}
    values["shift"] = {"who": {"kind": "replay", "path": saved}}
    second = from_dict(values)
    preflight(second)
    assert execute(second, tmp_path / "second", workers=1)
    name = method["name"].lower()
    return [
        {n: (tmp_path / part / name / "0" / n).read_bytes() for n in ("rounds.jsonl", "clients.csv")}
        for part in ("first", "second")
    ]


COSINE = {"kind": "periodic", "curve": "cosine", "period": 3, "exponent": 0.5, "phase": 1.5}


@pytest.mark.parametrize(("method", "changes"), [
    (A, {}), (SCAFFOLD, {}), ({**A, "cohort": 1}, {}), ({**A, "cohort": 6}, {}), ({**A, "cohort": "everyone"}, {}),
    ({**A, "cohort": {"kind": "uniform", "clients_per_round": 3}}, {}),
    (A, {"shift": {"who": "always"}}), (A, {"shift": {"who": COSINE}}),
    (A, {"data": {"partition": {"kind": "dirichlet", "clients": 8, "alpha": 0.5}}}),
    (A, {"data": {"held_out_clients": {"clients": 0}, "split": {"val": 0.0, "test": 0.2}}}),
])  # fmt: skip
def test_a_saved_shift_is_replayed_byte_for_byte(tmp_path, method, changes):
    first, second = replayed(tmp_path, method, **changes)
    assert first == second


def test_a_replay_that_is_too_short_or_too_small_is_told_before_it_begins(tmp_path):
    replayed(tmp_path, A)
    saved = str(tmp_path / "first" / "shift" / "0.safetensors")
    values = {**raw(A), "shift": {"who": {"kind": "replay", "path": saved}}}
    preflight(from_dict(values))
    with pytest.raises(FedtideError, match="ends after 6 rounds; allowed: at most 6"):
        preflight(from_dict({**values, "rounds": 7}))
    with pytest.raises(FedtideError, match="has 4 arrivals a round among 8 clients; 5 among 8 are asked for"):
        preflight(from_dict(values, sets=["method.cohort=5"]))
    with pytest.raises(FedtideError, match="no such file"):
        preflight(from_dict(values, sets=["shift.who.path=nowhere.safetensors"]))
    values["data"] = {"source": {"kind": "gaussians", "samples": 9}, "partition": {"kind": "saved", "path": saved}}
    with pytest.raises(FedtideError, match="deals 128 rows of gaussians, gaussians has 18"):
        preflight(from_dict(values))


@pytest.mark.parametrize(
    ("fleet", "line"), [("workers", "gone: was moved or removed while"), ("ray", "gone: not a run folder on .* Ray")]
)
def test_a_run_whose_folder_is_gone_says_so(tmp_path, fleet, line):
    text = as_json(from_dict(raw(A) | {"fleet": {"kind": fleet}}))
    call = RunCall(text, "A", 0, str(tmp_path / "gone" / "a" / "0"), str(tmp_path / "gone"))
    with pytest.raises(FedtideError, match=line):
        list(play_run(call, lambda: False))
