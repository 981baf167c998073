"""The pool: calls in worker processes, which may die; nothing is lost, nothing is left."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from fedtide.core.errors import FedtideError
from fedtide.core.trees import same
from fedtide.fleets import pool as pools
from fedtide.fleets.pool import LARGE, MEND, Pool
from fedtide.fleets.this_machine import Scratch, end_with_parent, remove_left_behind
from fedtide.runs.build import as_json
from fedtide.runs.experiment import RunCall
from helpers.toys import toy

ECHO = "fedtide.fleets.pool:echo"
PLAY = "fedtide.runs.experiment:play_in_worker"


def play(tmp_path, algorithm: str, options: dict | None = None, **changes) -> dict:
    """The arguments of a call that plays a run."""
    experiment = toy(algorithm, options, **changes)
    folder = tmp_path / "toy" / "0"
    call = RunCall(as_json(experiment), "toy", 0, str(folder))
    return {"player": "fedtide.runs.experiment:play_run", "call": call, "stop": str(tmp_path / "stop")}


def left_in(pool: Pool) -> set[str]:
    """What lies in shared memory."""
    return {path.name for path in pool.folder.iterdir()}


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 20])
def test_results_come_in_the_order_of_the_arguments(pool, count):
    arguments = [{"i": i, "x": torch.full((3,), float(i))} for i in range(count)]
    assert same(list(pool.map(ECHO, arguments)), arguments)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 40])
def test_this_process_takes_calls_beside_the_others(pool, count):
    arguments, mine = [{"i": i} for i in range(count)], []

    def here(number):
        mine.append(number)
        return arguments[number]

    assert list(pool.map(ECHO, arguments, here)) == arguments
    assert mine[:1] == [0][:count]
    if count in (2, 3):
        assert mine == [0]  # the others hold two calls each
    assert len(mine) < max(count, 2)


def test_large_results_travel_through_shared_memory_which_does_not_fill_up(pool):
    large = [{"x": torch.arange(LARGE / 4 + i), "y": [torch.zeros(0), torch.tensor(i)]} for i in range(12)]
    assert same(list(pool.map(ECHO, large)), large)
    assert same(list(pool.map(ECHO, large)), large)
    before = left_in(pool)
    assert same(list(pool.map(ECHO, large[::-1])), large[::-1])
    assert same(list(pool.map(ECHO, large * 2)), large * 2)
    assert len(left_in(pool)) <= max(len(before), 8)


def test_calls_send_messages_on_their_way_and_then_their_result(pool, tmp_path):
    messages = list(pool.run(PLAY, [play(tmp_path, "fedavg")]))
    assert [message.value.round for message in messages[:-1]] == [1, 2, 3, 4, 5, 6]
    assert [message.final for message in messages] == [False] * 6 + [True]
    assert messages[-1].value is None


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_error_that_a_person_can_mend_comes_back_as_its_line(pool):
    with pytest.raises(FedtideError, match=r"^.*found 'no name', allowed: module:function$"):
        list(pool.map("fedtide.fields.user_code:imported", ["no name"]))
    assert list(pool.map(ECHO, [1])) == [1]


def test_a_fault_of_the_program_comes_back_with_its_traceback(pool):
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*no_such_function"):
        list(pool.map("fedtide.fleets.pool:no_such_function", [1]))
    assert list(pool.map(ECHO, [1])) == [1]


@pytest.mark.parametrize("name", ["os:system", "subprocess:run", "fedtide:run", "builtins:eval"])
def test_only_functions_of_this_package_can_be_called(pool, name):
    with pytest.raises(RuntimeError, match="is not a function of this package"):
        list(pool.map(name, ["true"]))


def test_a_full_disk_in_a_worker_is_one_clear_line(pool, tmp_path):
    """Here the folder cannot be made, as there is a file in its place."""
    (tmp_path / "toy").write_text("in the way")
    with pytest.raises((FedtideError, OSError), match="toy") as error:
        list(pool.run(PLAY, [play(tmp_path, "fedavg")]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", ["{}/1-2: No space left on device", "{}/x: cannot be written (No space left on dev"])
def test_shared_memory_that_is_full_says_what_to_do(pool, line):
    said = pool._advised(line.format(pool.folder))
    assert said.endswith(f"; allowed: fewer workers (--workers), or a larger {pool.folder.parent}")
    assert pool._advised("/mnt/x: No space left on device") == "/mnt/x: No space left on device"


def test_whoever_stops_listening_leaves_no_call_running(pool, tmp_path):
    running = pool.run(PLAY, [play(tmp_path, "fedavg", rounds=3000)])
    next(running)
    running.close()
    written = (tmp_path / "toy" / "0" / "rounds.jsonl").stat().st_size
    assert list(pool.map(ECHO, range(5))) == list(range(5))
    time.sleep(0.1)
    assert (tmp_path / "toy" / "0" / "rounds.jsonl").stat().st_size == written


# -- processes that die ------------------------------------------------------------------------------------------------


def flags(folder: Path, deaths: int) -> str:
    folder.mkdir()
    for number in range(deaths):
        (folder / str(number)).touch()
    return str(folder)


def test_a_call_whose_process_dies_is_done_again(pool, tmp_path):
    before = pool.processes
    options = {"flags": flags(tmp_path / "flags", 1), "at": 3}
    messages = list(pool.run(PLAY, [play(tmp_path, "helpers.deadly:dying", options)]))
    assert messages[-1].final
    assert messages[-2].value.round == 6
    assert len(set(pool.processes) & set(before)) == 1
    whole = tmp_path / "whole"
    list(pool.run(PLAY, [play(whole, "helpers.deadly:dying", options)]))
    assert (tmp_path / "toy/0/rounds.jsonl").read_bytes() == (whole / "toy/0/rounds.jsonl").read_bytes()


def test_a_call_that_takes_its_process_down_again_and_again_is_one_clear_line(pool, tmp_path, monkeypatch):
    """Three times in earnest; processes take long to start, so that two have to do here."""
    assert pools.DEATHS == 3
    monkeypatch.setattr(pools, "DEATHS", 2)
    options = {"flags": flags(tmp_path / "flags", 9)}
    with pytest.raises(FedtideError, match=rf"^a worker process died 2 times on the same work; {MEND}$"):
        list(pool.run(PLAY, [play(tmp_path, "helpers.deadly:dying", options)]))
    assert len(list((tmp_path / "flags").iterdir())) == 7
    assert list(pool.map(ECHO, range(5))) == list(range(5))


def test_a_process_that_dies_between_calls_is_replaced(pool):
    list(pool.map(ECHO, range(4)))
    victim = pool.processes[0]
    os.kill(victim, signal.SIGKILL)
    assert list(pool.map(ECHO, range(20))) == list(range(20))
    assert victim not in pool.processes


# -- the end -----------------------------------------------------------------------------------------------------------


def test_closing_leaves_no_process_and_no_file_and_nothing_was_said(capfd):
    """Even where a process hangs. A warning of every process would stand in the middle of the progress."""
    with Pool(2) as pool:
        processes, folder = [psutil.Process(pid) for pid in pool.processes], pool.folder
        list(pool.map(ECHO, [{"x": torch.zeros(LARGE)}] * 4))
        (folder / "stop").touch()
        processes[0].suspend()
    assert not any(process.is_running() for process in processes)
    assert not folder.exists()
    assert capfd.readouterr() == ("", "")


HOLDING = """
import os, signal
from fedtide.fleets.this_machine import Scratch
folder = Scratch()
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_program_left_is_removed_by_the_next_and_nothing_else_is(tmp_path):
    """A name proves nothing: another machine's processes have the same numbers, and a person any names."""
    made = subprocess.run([sys.executable, "-c", HOLDING], capture_output=True, text=True)
    left = Path(made.stdout.strip())
    assert left.is_dir()
    mine = left.parent / "fedtide-99999999-results"
    begun, young = (Path(tempfile.mkdtemp(prefix="fedtide-", dir=left.parent)) for _ in range(2))
    for folder in (begun, young):  # killed before it had its lock
        (folder / "lock.making").touch()
    os.utime(begun, (0, 0))
    linked = left.parent / f"fedtide-linked-{os.getpid()}"
    try:
        mine.mkdir()
        linked.symlink_to(tmp_path)
        (tmp_path / "lock").touch()
        with Scratch() as first, Scratch() as second:
            assert not left.exists()
            assert not begun.exists()
            assert all(folder.is_dir() for folder in (first, second, mine, young, tmp_path))
            assert first.stat().st_mode & 0o077 == 0
    finally:
        mine.rmdir()
        linked.unlink()
        shutil.rmtree(young)


@pytest.mark.parametrize("folder", [False, True])
def test_what_a_killed_cleaner_leaves_is_removed_by_the_next(tmp_path, monkeypatch, folder):
    left = left_behind(tmp_path, folder)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_left_behind(tmp_path)
    assert (left / "lock").exists()
    remove_left_behind(tmp_path)
    assert not left.exists()


def left_behind(place: Path, folder: bool) -> Path:
    left = place / "fedtide-00000000"
    (left / "session").mkdir(parents=True) if folder else left.mkdir()
    (left / "file").touch()
    (left / "lock").touch()
    return left


def test_what_cannot_be_removed_yet_keeps_its_lock(tmp_path, monkeypatch):
    left = left_behind(tmp_path, True)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if a late process wrote meanwhile
        remove_left_behind(tmp_path)
    assert sorted(entry.name for entry in left.iterdir()) == ["lock", "session"]
    remove_left_behind(tmp_path)
    assert not left.exists()


def test_workers_do_not_run_the_files_of_the_current_folder(tmp_path, monkeypatch):
    for name in ("random", "signal", "ast", "queue", "torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('run by a worker')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Pool(1) as pool:
        assert list(pool.map(ECHO, [{"x": 1}])) == [{"x": 1}]


def test_a_worker_that_cannot_start_says_why_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "START", "raise OSError('the disk is on fire')")
    with Pool(1) as pool, pytest.raises(FedtideError) as told:
        list(pool.map(ECHO, [{"x": 1}]))
    assert str(told.value) == "fleet.workers: a worker process could not start: OSError: the disk is on fire"


def test_a_worker_that_starts_with_a_harmless_line_is_replaced_if_it_dies(monkeypatch):
    monkeypatch.setattr(pools, "START", "import sys; print('ignored', file=sys.stderr, flush=True)" + pools.START)
    with Pool(1) as pool:
        assert list(pool.map(ECHO, [{"x": 1}])) == [{"x": 1}]
        os.kill(pool.processes[0], signal.SIGKILL)
        assert list(pool.map(ECHO, [{"x": 2}])) == [{"x": 2}]


def test_worker_processes_are_refused_where_there_are_none(monkeypatch):
    monkeypatch.setattr(pools.os, "name", "nt")
    with pytest.raises(FedtideError, match="need Linux or macOS"):
        Pool(1)


# -- the other end of the line -----------------------------------------------------------------------------------------


def test_a_worker_whose_program_is_gone_ends_whatever_it_is_at(monkeypatch):
    parents, ended = iter([7, 7, 1]), []
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "_exit", ended.append)
    end_with_parent(every=0.0).join()
    assert ended == [0]
