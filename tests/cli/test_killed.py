"""Processes that are killed or interrupted at any moment: `fedtide resume` leaves what an undisturbed run leaves."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cli.shell import Command, Shell, contents, done, written
from unit.run.studies import SCAFFOLD, A, record_of

REMEMBERING = {**A, "name": "remembering", "algorithm": "unit.fleets.deadly:remembering"}
LARGE = {"kind": "mlp", "hidden": [600]}
"""A model whose copy in a client's memory is a file."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("shell"))
    yield made
    made.close()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
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
    return {name: content for name, content in record_of(root).items() if name != "config.toml"}


# -- kill -9 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, None], ids=["a checkpoint a round", "the default"])
@pytest.mark.parametrize("method", [SCAFFOLD, REMEMBERING], ids=["memory in RAM", "memory in files"])
def test_killed_at_any_moment_and_gone_on_with(shell, tmp_path, monkeypatch, method, every):
    changes = {"model": LARGE} if method is REMEMBERING else {}
    written(tmp_path / "study.toml", method, rounds=30, evaluate_every=3, checkpoint_every=every, **changes) if every else written(
        tmp_path / "study.toml", method, rounds=30, evaluate_every=3, **changes
    )
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    assert done("run", "study.toml", "--out", "whole") == 0
    lasts = time.monotonic() - began
    draw = random.Random(f"{method['name']} {every}")
    command = ["run", tmp_path / "study.toml", "--out", "x"]
    killed = 0
    for _ in range(6):
        process = shell.start(*command, cwd=tmp_path)
        until((tmp_path / "x" / "environment.json").is_file)
        time.sleep(draw.uniform(0, 0.7 * lasts))
        os.kill(process.pid, signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        command = ["resume", tmp_path / "x"]
    assert killed >= 3
    assert done("resume", "x") == 0
    assert kept(tmp_path / "x") == kept(tmp_path / "whole")
    assert not list((tmp_path / "x").rglob("writing-*"))


def test_killed_between_any_two_writes_of_a_checkpoint(tmp_path, monkeypatch):
    """The same, exhaustively: the process ends right before or after each thing that a checkpoint does."""
    from fedtide.core import checkpoint, codec
    from fedtide.core.memory import MemoryStore

    written(tmp_path / "study.toml", REMEMBERING, rounds=4, checkpoint_every=1, model=LARGE)
    monkeypatch.chdir(tmp_path)
    assert done("run", "study.toml", "--out", "whole") == 0

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
        patch.setattr(checkpoint, "_flush", counted(checkpoint._flush))
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(Path, "replace", counted(Path.replace))
        patch.setattr(MemoryStore, "settle", counted(MemoryStore.settle))
        patch.setattr(checkpoint.shutil, "rmtree", counted(checkpoint.shutil.rmtree))

    number, died = 0, 0
    while number < 60:
        folder = f"x{number}"
        with monkeypatch.context() as patch:
            dying_at(number, patch)
            try:
                done("run", "study.toml", "--out", folder, "--set", "title=x")
            except Killed:
                died += 1
            else:
                break
        assert done("resume", folder) == 0
        assert kept(tmp_path / folder) == kept(tmp_path / "whole")
        number += 7
    assert died >= 5


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------------

LONG = {"rounds": 400, "evaluate_every": 50}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Two methods, 400 rounds, undisturbed."""
    root = tmp_path_factory.mktemp("whole")
    written(root / "study.toml", A, SCAFFOLD, **LONG)
    assert done("run", root / "study.toml", "--out", root / "run", "--workers", 1) == 0
    return root / "run"


def interrupted(process: Command, root: Path, workers: int) -> None:
    """Presses Ctrl-C, which the whole group of processes feels, in the middle of a run."""
    until(lambda: recorded(root / "a" / "0") > 5)
    group = members(process)
    assert len(group) == (1 if workers == 1 else 1 + workers)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130
    until(lambda: not any(member.is_running() for member in group), 10)


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


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_finishes_the_round_saves_and_says_how_to_go_on(shell, tmp_path, whole, workers):
    written(tmp_path / "study.toml", A, SCAFFOLD, **LONG)
    process = shell.start("run", "study.toml", "--out", "x", "--workers", workers, cwd=tmp_path)
    interrupted(process, tmp_path / "x", workers)
    assert process.err == ""
    assert process.out.endswith("stopped and saved; go on with: fedtide resume x\n")
    assert not (tmp_path / "x" / "report.html").exists()
    begun = [tmp_path / "x" / name / "0" for name in ("a", "scaffold") if (tmp_path / "x" / name / "0").exists()]
    for folder in begun:
        rounds = recorded(folder)
        assert 0 < rounds < 400
        assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"{rounds:08d}"]
    assert done("resume", tmp_path / "x", "--workers", 1) == 0
    assert kept(tmp_path / "x") == kept(whole)
    assert (tmp_path / "x" / "report.html").is_file()


def test_a_program_that_is_killed_takes_its_workers_along(shell, tmp_path, whole):
    written(tmp_path / "study.toml", A, SCAFFOLD, **LONG)
    process = shell.start("run", "study.toml", "--out", "x", "--workers", 2, cwd=tmp_path)
    until(lambda: recorded(tmp_path / "x" / "a" / "0") > 5)
    group = members(process)
    assert len(group) == 3
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    until(lambda: not any(member.is_running() for member in group), 10)
    assert done("resume", tmp_path / "x", "--workers", 1) == 0
    assert kept(tmp_path / "x") == kept(whole)


# -- a disk that is really full -----------------------------------------------------------------------------------------------

SIZES = {"the configuration": 500, "the record": 6_000, "the state": 12_000}


@pytest.mark.parametrize("what", SIZES)
def test_a_disk_that_fills_up_is_one_clear_line_and_the_run_goes_on_when_there_is_room(shell, tmp_path, monkeypatch, what):
    """No file may grow beyond so many bytes, whoever writes it: a limit of the operating system."""
    changes = {"rounds": 3, "evaluate_every": 1} | ({"model": LARGE, "evaluate_every": 9} if what == "the state" else {"rounds": 30})
    written(tmp_path / "study.toml", A, **changes)
    process = shell.start("run", "study.toml", "--out", "x", cwd=tmp_path, largest=SIZES[what])
    assert process.wait() == 2
    assert re.fullmatch(r"fedtide: .+\n", process.err)
    monkeypatch.chdir(tmp_path)
    assert done("run", "study.toml", "--out", "whole") == 0
    if what == "the configuration":
        assert not contents(tmp_path).keys() & {"x/config.toml"} or done("run", "study.toml", "--out", "x") == 0
    else:
        assert done("resume", "x") == 0
    assert kept(tmp_path / "x") == kept(tmp_path / "whole")
