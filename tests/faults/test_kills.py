"""kill -9 of a command and all of its processes at random moments: what is left in the end is the same.

Commands are forked from a process that has loaded everything, and most of them fork their workers: a moment within the
second in which an interpreter starts would find nothing. Kills of commands whose workers are started as users start
them are in tests/cli/test_killed.py.
"""

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedtide.algorithms import REGISTRY
from fedtide.config import Experiment, to_toml
from fedtide.fleets.pool import MEND
from fedtide.runs.experiment import execute
from fedtide.runs.folder import create, plan
from helpers.shell import Command, contents, done
from helpers.toys import toy

from .conftest import limited

FLEETS: dict[str, dict[str, Any]] = {
    "local": {},
    "workers": {"fleet": {"kind": "workers", "workers": 2}},
    "stacked": {"fleet": {"kind": "stacked"}},
    "evaluating": {"eval_every": 1, "forgetting": {"rounds": list(range(6))}},  # where most of the time is evaluation
}

STACKED = ("fedavg", "fedadam", "fedbuff", "oracle")
EVALUATED = ("fedavg", "scaffold", "aem", "fielding", "feddrift")

PAIRS = [
    *((name, fleet) for name in REGISTRY for fleet in ("local", "workers")),
    *((name, "stacked") for name in STACKED),
    *((name, "evaluating") for name in EVALUATED),
]

FEW = {("scaffold", "local"), ("fedem", "workers"), ("fedbuff", "local"), ("fedavg", "stacked"), ("aem", "evaluating")}
"""Those that `make test` kills."""

KILLS = 8
"""Kills of one experiment, whose undisturbed run they share; fewer in `make test`."""

DEATHS = 5
"""Deaths of workers in one experiment."""


@pytest.fixture
def many(request: pytest.FixtureRequest) -> bool:
    """Whether this is `make faults`."""
    return bool(request.config.getoption("--tries"))


def kept(root: Path) -> dict[str, bytes]:
    """What a run leaves, but for wall clock and how it was called; an older checkpoint may lie beside the last."""
    newest = {path.name for run in root.glob("*/*/checkpoints") for path in sorted(run.iterdir())[-1:]}
    silent = ("environment.json", "timings.jsonl", "report.html", "summary.json", "config.toml", "checkpoint.json")
    return {
        name: data
        for name, data in contents(root).items()
        if not name.endswith(("/", ".writing", *silent))
        and not Path(name).name.startswith(".tmp")  # what was written when it was killed
        and ("checkpoints" not in name or newest & set(Path(name).parts))
    }


def members(session: int) -> list[int]:
    """The processes of a session that are not over, which a command's workers are in whatever their groups."""
    found = []
    for process in psutil.pids():
        try:
            if os.getsid(process) == session and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def kill(processes: list[int]) -> None:
    for process in processes:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


def killed(process: Command) -> bool:
    """Kill a command with all its processes; tell whether it was still there."""
    kill([process.pid, *members(process.pid)])
    status = process.wait()
    kill(members(process.pid))  # what a process started while it was found
    assert "Traceback" not in process.err
    assert status in (0, -signal.SIGKILL), process.err
    return status == -signal.SIGKILL


def until(condition: Callable[[], bool], process: Command) -> float:
    """Wait until something holds, or the command is over; how many seconds it took."""
    began = time.perf_counter()
    with limited():
        while not condition() and not process.err:
            time.sleep(0.002)
    return time.perf_counter() - began


def finished(experiment: Experiment, root: Path) -> bool:
    """Whether the last round of an experiment's only run has a checkpoint."""
    return all(run.finished for run in plan(experiment, root))


def undisturbed(experiment: Experiment, folder: Path) -> Path:
    """A study in a folder, and its run in this process without any trouble."""
    (folder / "study.toml").write_text(to_toml(experiment))
    create(experiment, folder / "whole")
    assert execute(experiment, folder / "whole", workers=1)
    return folder / "whole"


def command(root: Path) -> list[Any]:
    """The command that begins a study, or goes on."""
    return ["resume", root] if root.exists() else ["run", root.parent / "study.toml", "--out", root]


def gone_on_with(experiment: Experiment, root: Path) -> dict[str, bytes]:
    """What is left of a run once the rest is played, in this process."""
    if not root.exists():  # it was killed before it had a folder
        create(experiment, root)
    assert execute(experiment, root, workers=1)
    return kept(root)


@pytest.mark.parametrize(("name", "fleet"), PAIRS)
def test_killed_at_any_moment(shell, tmp_path, name, fleet, seed, tried: Counter[str], many):
    if not many and (name, fleet) not in FEW:
        pytest.skip("make faults kills them")
    draw = random.Random(f"{name} {fleet} {seed}")
    every = draw.choice([1, 2, 5])
    experiment = toy(name, checkpoint_every=every, seeds=[draw.randrange(100)], **FLEETS[fleet])
    whole = undisturbed(experiment, tmp_path)
    # How long it lasts is seen by one that is killed as soon as its last checkpoint is there.
    root = tmp_path / "0"
    process = shell.start(*command(root), cwd=tmp_path, forks=True)
    lasts = until(lambda: finished(experiment, root), process)
    tried[f"kills, {fleet}"] += killed(process)
    for number in range(1, KILLS if many else 3):
        if finished(experiment, root):
            assert gone_on_with(experiment, root) == kept(whole)
            root = tmp_path / str(number)
        process = shell.start(*command(root), cwd=tmp_path, forks=True)
        time.sleep(draw.uniform(0, lasts))
        tried[f"kills, {fleet}"] += killed(process)
    assert gone_on_with(experiment, root) == kept(whole)
    shutil.rmtree(tmp_path)


test_killed_at_any_moment.each = KILLS * len(PAIRS)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", REGISTRY)
def test_workers_killed_at_any_moment(shell, tmp_path, name, seed, tried: Counter[str], many):
    """The command goes on by itself, or says in one line that it gives up and is gone on with."""
    if not many and name != "scaffold":
        pytest.skip("make faults kills them")
    draw = random.Random(f"workers {name} {seed}")
    experiment = toy(name, checkpoint_every=2, seeds=[draw.randrange(100)], rounds=20, **FLEETS["workers"])
    whole = undisturbed(experiment, tmp_path)
    root = tmp_path / "killed"
    process = shell.start(*command(root), cwd=tmp_path, forks=True)

    def workers() -> list[int]:
        return sorted(set(members(process.pid)) - {process.pid})

    for _ in range(DEATHS if many else 3):
        until(lambda: bool(workers()) or finished(experiment, root), process)
        time.sleep(draw.uniform(0, 0.1))
        if now := workers():
            kill([draw.choice(now)])
            tried["kills of a worker"] += 1
    with limited():
        while not finished(experiment, root) and not process.err:
            time.sleep(0.005)
        if finished(experiment, root):
            killed(process)
        else:
            assert process.wait() == 2
            assert process.err == f"fedtide: a worker process died 3 times on the same work; {MEND}\n"
            tried["kills of a worker: given up in one line"] += 1
    assert gone_on_with(experiment, root) == kept(whole)
    shutil.rmtree(tmp_path)


test_workers_killed_at_any_moment.each = 4 * DEATHS * len(REGISTRY)  # type: ignore[attr-defined]


def test_killed_while_the_report_is_written(shell, tmp_path, seed, tried: Counter[str], monkeypatch, many):
    """The page is the old one, or the new one, and never a part of it."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(f"report {seed}")
    experiment, root = toy("fedavg"), tmp_path / "study"
    create(experiment, root)
    assert execute(experiment, root, workers=1)
    assert done("report", root) == 0
    whole = {name: (root / name).read_bytes() for name in ("report.html", "summary.json")}
    for name in whole:
        (root / name).write_bytes(b"old")
    process = shell.start("report", root, cwd=tmp_path)
    lasts = until(lambda: all((root / name).read_bytes() != b"old" for name in whole), process)
    process.wait()
    for name in whole:
        (root / name).write_bytes(b"old")
    for _ in range(KILLS if many else 2):
        process = shell.start("report", root, cwd=tmp_path)
        time.sleep(draw.uniform(0, 1.1 * lasts))
        tried["kills, reporting"] += killed(process)
        for name, page in whole.items():
            assert (root / name).read_bytes() in (page, b"old")
    assert done("report", root) == 0
    assert {name: (root / name).read_bytes() for name in whole} == whole
    shutil.rmtree(tmp_path)


test_killed_while_the_report_is_written.each = 10 * KILLS  # type: ignore[attr-defined]
