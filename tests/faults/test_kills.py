"""kill -9 of a command and all of its processes at random moments: what is left in the end is the same."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from fedtide.algorithms import REGISTRY
from fedtide.config import to_toml
from fedtide.runs.experiment import execute
from fedtide.runs.folder import create, load
from helpers.shell import Shell, contents, done
from helpers.studies import SCAFFOLD, A
from helpers.toys import toy
from helpers.tunings import tunable

FEW = {("scaffold", "local"), ("fedbuff", "local"), ("fedavg", "stacked"), ("fedavg", "evaluating")}
"""Those that `make test` kills."""

PARALLEL = ("scaffold", "fedem", "fielding")
"""Algorithms that are also killed with their clients in worker processes."""

STACKED = ("fedavg", "fedadam", "fedbuff", "oracle")
EVALUATED = ("fedavg", "aem", "fielding")

KILLS = 5
"""Kills of one run."""

START_SECONDS = 3.0
"""Seconds within which two workers have begun, roughly."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("shell"))
    yield made
    made.close()


def kept(root: Path) -> dict[str, bytes]:
    """What a run leaves, but for wall clock and how it was called; an older checkpoint may lie beside the last."""
    newest = {path.name for run in root.glob("*/*/checkpoints") for path in sorted(run.iterdir())[-1:]}
    silent = ("environment.json", "timings.jsonl", "report.html", "summary.json", "config.toml", "checkpoint.json")
    return {
        name: data
        for name, data in contents(root).items()
        if not name.endswith(("/", *silent)) and ("checkpoints" not in name or newest & set(Path(name).parts))
    }


def kill_group(pid: int) -> None:
    """Kill a command with all its workers, which have groups of their own in its session."""
    group = [pid]
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid:
                group.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    for member in group:
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            continue


def killed(shell: Shell, seconds: float, command: list[Any], cwd: Path) -> bool:
    """Start a command and kill it after a while; tell whether it was still there."""
    process = shell.start(*command, cwd=cwd)
    time.sleep(seconds)
    kill_group(process.pid)
    status = process.wait()
    assert "Traceback" not in process.err
    assert status in (0, -signal.SIGKILL), process.err
    return status == -signal.SIGKILL


def timed(action: Callable[[], Any]) -> float:
    """Do something that returns a true value; how many seconds it took."""
    began = time.perf_counter()
    assert action()
    return time.perf_counter() - began


def fleets() -> list[tuple[str, str]]:
    """Every algorithm in one process; some in workers, stacked, and where most of the time is evaluation."""
    others = [*((name, "workers") for name in PARALLEL), *((name, "stacked") for name in STACKED)]
    return [*((name, "local") for name in REGISTRY), *others, *((name, "evaluating") for name in EVALUATED)]


@pytest.mark.parametrize(("name", "fleet"), fleets())
def test_killed_at_any_moment(shell, tmp_path, name, fleet, seed, tried: Counter[str], request):
    if not request.config.getoption("--tries") and (name, fleet) not in FEW:
        pytest.skip("make faults kills them")
    draw = random.Random(f"{name} {fleet} {seed}")
    changes: dict[str, Any] = {
        "local": {},
        "workers": {"fleet": {"kind": "workers", "workers": 2}},
        "stacked": {"fleet": {"kind": "stacked"}},
        "evaluating": {"eval_every": 1, "forgetting": {"rounds": list(range(6))}},
    }[fleet]
    experiment = toy(name, checkpoint_every=draw.choice([1, 2, 5]), seeds=[draw.randrange(100)], **changes)
    (tmp_path / "study.toml").write_text(to_toml(experiment))
    create(experiment, tmp_path / "whole")
    lasts = timed(lambda: execute(experiment, tmp_path / "whole", workers=1))
    lasts += START_SECONDS if fleet == "workers" else 0.1
    root = tmp_path / "killed"
    for _ in range(2 if fleet == "workers" or not request.config.getoption("--tries") else KILLS):
        command = ["resume", root] if root.exists() else ["run", tmp_path / "study.toml", "--out", root]
        tried[f"kills, {fleet}"] += killed(shell, draw.uniform(0, lasts), command, tmp_path)
    if not root.exists():
        create(experiment, root)
    assert execute(load(root), root, workers=1)
    assert kept(root) == kept(tmp_path / "whole")
    shutil.rmtree(tmp_path)


test_killed_at_any_moment.each = KILLS * len(fleets())  # type: ignore[attr-defined]


def test_killed_while_the_report_is_written(shell, tmp_path, seed, tried: Counter[str], monkeypatch, request):
    """The page is the old one, or the new one, and never a part of it."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(f"report {seed}")
    experiment, root = toy("fedavg"), tmp_path / "study"
    create(experiment, root)
    assert execute(experiment, root, workers=1)
    lasts = timed(lambda: done("report", root) == 0)
    whole = {name: (root / name).read_bytes() for name in ("report.html", "summary.json")}
    for name in whole:
        (root / name).write_bytes(b"old")
    for _ in range(KILLS if request.config.getoption("--tries") else 2):
        tried["kills, reporting"] += killed(shell, draw.uniform(0, 1.5 * lasts), ["report", root], tmp_path)
        for name, page in whole.items():
            assert (root / name).read_bytes() in (page, b"old")
    assert done("report", root) == 0
    assert {name: (root / name).read_bytes() for name in whole} == whole
    shutil.rmtree(tmp_path)


test_killed_while_the_report_is_written.each = 100  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_while_it_searches(shell, tmp_path, workers, seed, tried: Counter[str], monkeypatch, request):
    if not request.config.getoption("--tries"):
        pytest.skip("make faults kills it; tests/cli/test_killed.py has one")
    monkeypatch.chdir(tmp_path)
    draw = random.Random(f"tune {workers} {seed}")
    (tmp_path / "study.toml").write_text(tomli_w.dumps(tunable(A, SCAFFOLD, rounds=3)))
    lasts = timed(lambda: done("tune", "study.toml", "--out", "whole", "--workers", 1) == 0)
    root = tmp_path / "killed"
    for _ in range(KILLS):
        command = ["resume", root] if root.exists() else ["tune", "study.toml", "--out", root]
        seconds = draw.uniform(0, lasts) + (START_SECONDS if workers > 1 else 0)
        tried["kills, tuning"] += killed(shell, seconds, [*command, "--workers", workers], tmp_path)
    command = ["resume", root] if root.exists() else ["tune", "study.toml", "--out", root]
    assert done(*command, "--workers", 1) == 0
    for name in ("trials.jsonl", "tuned.toml"):
        assert (root / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list(root.glob("memory-*"))
    shutil.rmtree(tmp_path)


test_killed_while_it_searches.each = 200  # type: ignore[attr-defined]
