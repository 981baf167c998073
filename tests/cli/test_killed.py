"""Processes that are killed or interrupted at any moment: `fedtide resume` leaves what an undisturbed run leaves."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fedtide.config import read
from fedtide.core import checkpoint, codec
from fedtide.core.memory import MemoryStore
from fedtide.runs.experiment import execute
from fedtide.runs.folder import create, load
from helpers.shell import Command, done, written
from helpers.studies import SCAFFOLD, A, record_of

REMEMBERING = {**A, "name": "remembering", "algorithm": "helpers.deadly:remembering"}
LARGE = {"kind": "mlp", "hidden": [600]}
"""A model whose copy in a client's memory is a file."""


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.002)


def recorded(folder: Path) -> int:
    """How many whole lines a run has written."""
    path = folder / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def kept(root: Path) -> dict[str, bytes]:
    """The record and the newest checkpoint; a kill may leave the one before beside it."""
    newest = {path.name for run in root.glob("*/*/checkpoints") for path in sorted(run.iterdir())[-1:]}
    return {
        name: content
        for name, content in record_of(root).items()
        if name != "config.toml" and ("checkpoints" not in name or newest & set(Path(name).parts))
    }


def undisturbed(folder: Path) -> Path:
    """The study of a folder, played without any trouble."""
    experiment = read(folder / "study.toml")
    create(experiment, folder / "whole")
    assert execute(experiment, folder / "whole", workers=1)
    return folder / "whole"


def gone_on_with(root: Path) -> None:
    """What `fedtide resume` does, but for the report."""
    assert execute(load(root), root, workers=1)


# -- kill -9 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "every"),
    [
        pytest.param(SCAFFOLD, 1, id="a checkpoint a round", marks=pytest.mark.thorough),
        pytest.param(SCAFFOLD, None, id="the default"),
        pytest.param(REMEMBERING, 1, id="memory in files"),
    ],
)
def test_killed_at_any_moment_and_gone_on_with(shell, tmp_path, monkeypatch, method, every):
    changes = {"model": LARGE} if method is REMEMBERING else {}
    changes |= {} if every is None else {"checkpoint_every": every}
    written(tmp_path / "study.toml", method, rounds=16, eval_every=3, **changes)
    monkeypatch.chdir(tmp_path)
    undisturbed(tmp_path)
    timings = (tmp_path / "whole" / method["name"] / "0" / "timings.jsonl").read_text().splitlines()
    lasts = sum(line["seconds"] + line["evaluation"] for line in map(json.loads, timings)) + 0.05
    draw = random.Random(f"{method['name']} {every}")
    command = ["run", tmp_path / "study.toml", "--out", "x"]
    tries, killed = 4, 0
    for _ in range(tries):
        process = shell.start(*command, cwd=tmp_path)
        until((tmp_path / "x" / "environment.json").is_file)
        time.sleep(draw.uniform(0, lasts / tries))  # what it does in between stays
        os.kill(process.pid, signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        command = ["resume", tmp_path / "x"]
    assert killed >= 2
    gone_on_with(tmp_path / "x")
    assert kept(tmp_path / "x") == kept(tmp_path / "whole")
    assert not list((tmp_path / "x").rglob("writing-*"))


def test_killed_between_any_two_writes_of_a_checkpoint(tmp_path, monkeypatch):
    """The same, exhaustively: the process ends right before or after each thing that a checkpoint does."""
    written(tmp_path / "study.toml", REMEMBERING, rounds=4, checkpoint_every=1, model=LARGE)
    monkeypatch.chdir(tmp_path)
    undisturbed(tmp_path)

    class Killed(BaseException):
        pass

    def dying_at(number: int, patch: pytest.MonkeyPatch) -> None:
        steps = iter(range(10_000))

        def counted(function):
            def run(*given, **named):
                if next(steps) == number:
                    raise Killed
                return function(*given, **named)

            return run

        patch.setattr(codec, "to_file", counted(codec.to_file))
        patch.setattr(checkpoint, "flush", counted(checkpoint.flush))
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(Path, "replace", counted(Path.replace))
        patch.setattr(MemoryStore, "settle", counted(MemoryStore.settle))
        patch.setattr(checkpoint, "_remove", counted(checkpoint._remove))

    died = 0
    for number in range(0, 400, 11):
        with monkeypatch.context() as patch:
            dying_at(number, patch)
            try:
                done("run", "study.toml", "--out", str(number))
            except Killed:
                died += 1
            else:
                break
        if not (tmp_path / str(number)).exists():
            continue  # it died before there was a run folder
        gone_on_with(tmp_path / str(number))
        assert kept(tmp_path / str(number)) == kept(tmp_path / "whole")
    assert died >= 5


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------

LONG = {"rounds": 100, "eval_every": 50}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Two methods, undisturbed."""
    root = tmp_path_factory.mktemp("whole")
    written(root / "study.toml", A, SCAFFOLD, **LONG)
    return undisturbed(root)


def members(process: Command) -> list[psutil.Process]:
    """The processes of a command's session."""
    found = []
    for candidate in psutil.process_iter():
        try:
            if os.getsid(candidate.pid) == process.pid and candidate.status() != psutil.STATUS_ZOMBIE:
                found.append(candidate)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def ended(group: list[psutil.Process]) -> bool:
    return not any(member.is_running() for member in group)


WAITING = r"(fedtide: waiting for .*process.* to end the round; Ctrl-C again stops at once\n)?"


@pytest.mark.parametrize(
    ("workers", "when"),
    [
        (1, "in a round"),
        pytest.param(2, "in a round", marks=pytest.mark.thorough),  # below one of two workers is stopped, too
        (2, "while workers start"),
    ],
)
def test_ctrl_c_finishes_the_round_saves_and_says_how_to_go_on(shell, tmp_path, whole, workers, when):
    """A terminal interrupts the whole group of processes."""
    written(tmp_path / "study.toml", A, SCAFFOLD, **LONG)
    forks = when == "in a round"
    process = shell.start("run", "study.toml", "--out", "x", "--workers", workers, cwd=tmp_path, forks=forks)
    folders = [tmp_path / "x" / name / "0" for name in ("a", "scaffold")]
    if when == "in a round":
        until(lambda: all(recorded(folder) > 5 for folder in folders[:workers]))
    else:
        until(lambda: len(members(process)) == 3)
        time.sleep(0.5)
    group = members(process)
    assert len(group) == (1 if workers == 1 else 3)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130
    until(lambda: ended(group), 10)
    assert process.out.endswith("stopped and saved; go on with: fedtide resume x\n")
    assert not (tmp_path / "x" / "report.html").exists()
    for folder in folders:
        saved = [path.name for path in (folder / "checkpoints").glob("*")]
        assert saved == ([f"{recorded(folder):08d}"] if recorded(folder) else [])
    assert re.fullmatch(WAITING, process.err)  # on a machine that is busy a worker takes its time
    if when == "in a round":
        gone_on_with(tmp_path / "x")
        assert kept(tmp_path / "x") == kept(whole)


def test_what_ctrl_c_waits_for_is_said_where_a_worker_is_stopped(shell, tmp_path, whole):
    written(tmp_path / "study.toml", A, SCAFFOLD, **LONG)
    process = shell.start("run", "study.toml", "--out", "x", "--workers", 2, cwd=tmp_path, forks=True, waits=0.5)
    until(lambda: all(recorded(tmp_path / "x" / name / "0") > 5 for name in ("a", "scaffold")))
    stopped = next(member for member in members(process) if member.pid != process.pid)
    stopped.suspend()
    os.kill(process.pid, signal.SIGINT)
    until(lambda: bool(process.err), 60)
    assert re.fullmatch(WAITING, process.err)
    assert str(stopped.pid) in process.err
    stopped.resume()
    assert process.wait() == 130
    gone_on_with(tmp_path / "x")
    assert kept(tmp_path / "x") == kept(whole)


def test_ctrl_c_again_leaves_no_worker(shell, tmp_path):
    written(tmp_path / "study.toml", A, SCAFFOLD, **LONG)
    process = shell.start("run", "study.toml", "--out", "x", "--workers", 2, cwd=tmp_path, forks=True)
    until(lambda: all(recorded(tmp_path / "x" / name / "0") > 5 for name in ("a", "scaffold")))
    group = members(process)
    for member in group:
        if member.pid != process.pid:
            member.suspend()
    for _ in range(3):  # the last while the processes are ended
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.2)
    assert process.wait() == 130
    assert ended(group)


def test_a_program_that_is_killed_takes_its_workers_along(shell, tmp_path, whole, monkeypatch, undrawn):
    """And what they had written until then is the beginning of what they would have written.

    The next command that plays anything removes its temporary folder.
    """
    written(tmp_path / "study.toml", A, SCAFFOLD, **LONG)
    process = shell.start("run", "study.toml", "--out", "x", "--workers", 2, cwd=tmp_path, forks=True)
    until(lambda: recorded(tmp_path / "x" / "a" / "0") > 5)
    group = members(process)
    assert len(group) == 3
    locks = [Path(file.path) for file in psutil.Process(process.pid).open_files() if file.path.endswith("/lock")]
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    until(lambda: ended(group), 10)
    assert len(locks) == 1
    monkeypatch.chdir(tmp_path)
    assert done("run", "study.toml", "--out", "y", "--set", "rounds=1", "--workers", 1) == 0
    assert not locks[0].parent.exists()
    for path in (tmp_path / "x").glob("*/0/rounds.jsonl"):
        assert (whole / path.relative_to(tmp_path / "x")).read_bytes().startswith(path.read_bytes())


# -- a disk that is really full ----------------------------------------------------------------------------------------

SIZES = {"the configuration": 500, "the record": 6_000, "the state": 12_000}


@pytest.mark.parametrize("what", SIZES)
def test_a_disk_that_fills_up_is_one_clear_line_and_the_run_goes_on_when_there_is_room(
    shell, tmp_path, undrawn, monkeypatch, what
):
    """No file may grow beyond so many bytes, whoever writes it: a limit of the operating system."""
    changes = {"rounds": 3, "model": LARGE} if what == "the state" else {"rounds": 16, "eval_every": 1}
    written(tmp_path / "study.toml", A, **changes)
    process = shell.start("run", "study.toml", "--out", "x", cwd=tmp_path, largest=SIZES[what])
    assert process.wait() == 2
    assert re.fullmatch(r"fedtide: .+\n", process.err)
    monkeypatch.chdir(tmp_path)
    undisturbed(tmp_path)
    again = ["run", "study.toml", "--out", "x"] if what == "the configuration" else ["resume", "x"]
    assert done(*again) == 0
    assert kept(tmp_path / "x") == kept(tmp_path / "whole")


# -- tuning ------------------------------------------------------------------------------------------------------------


def test_a_tuning_that_is_killed_with_its_workers_finds_the_same(shell, tmp_path, monkeypatch):
    tune = {
        "trials": 6,
        "parallel_trials": 2,
        "startup_trials": 2,
        "ranges": {"method.local.lr": {"low": 0.01, "high": 1.0}},
    }
    written(tmp_path / "study.toml", A, SCAFFOLD, tune=tune)
    monkeypatch.chdir(tmp_path)
    assert done("tune", "study.toml", "--out", "whole", "--workers", 1) == 0
    process = shell.start("tune", "study.toml", "--out", "x", "--workers", 2, cwd=tmp_path, forks=True)
    lines = tmp_path / "x" / "trials.jsonl"
    until(lambda: lines.is_file() and lines.read_bytes().count(b"\n") >= 3, 60)
    group = members(process)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    until(lambda: ended(group), 10)
    assert lines.read_bytes().count(b"\n") < 12
    assert done("resume", "x", "--workers", 1) == 0
    for name in ("trials.jsonl", "tuned.toml"):
        assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "x").glob("memory-*"))
