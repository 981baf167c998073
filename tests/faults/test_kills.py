"""kill -9 of a run and all of its processes at random moments: what is left in the end is the same."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedtide.algorithms import REGISTRY
from fedtide.config import to_toml
from fedtide.runs.experiment import execute
from fedtide.runs.folder import create, load
from helpers.shell import Shell, contents
from helpers.toys import toy

from .conftest import BATCH

PARALLEL = ("scaffold", "fedem", "fielding")
"""Algorithms that are also killed with their clients in worker processes."""


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
    import psutil

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


def fleets() -> list[tuple[str, str]]:
    return [*((name, "local") for name in REGISTRY), *((name, "workers") for name in PARALLEL)]


@pytest.mark.parametrize(("name", "fleet"), fleets())
def test_killed_at_any_moment(shell, tmp_path, name, fleet, seed, tried: Counter[str], request):
    if not request.config.getoption("--tries") and (fleet == "workers" or name not in ("scaffold", "fedbuff")):
        pytest.skip("make faults kills them")
    draw = random.Random(f"{name} {fleet} {seed}")
    changes = {"fleet": {"kind": fleet, "workers": 2}} if fleet == "workers" else {}
    experiment = toy(name, checkpoint_every=draw.choice([1, 2, 5]), seeds=[draw.randrange(100)], **changes)
    (tmp_path / "study.toml").write_text(to_toml(experiment))
    began = time.perf_counter()
    create(experiment, tmp_path / "whole")
    assert execute(experiment, tmp_path / "whole", workers=1)
    lasts = time.perf_counter() - began + (4.0 if fleet == "workers" else 0.2)
    wanted = max(BATCH // 5 if fleet == "local" else 1, 1)
    root = tmp_path / "killed"
    for _ in range(wanted):
        command = ["resume", root] if root.exists() else ["run", tmp_path / "study.toml", "--out", root]
        process = shell.start(*command, cwd=tmp_path)
        time.sleep(draw.uniform(0, lasts))
        kill_group(process.pid)
        tried[f"kills, {fleet}"] += process.wait() == -signal.SIGKILL
        assert "Traceback" not in process.err
    if not root.exists():
        create(experiment, root)
    assert execute(load(root), root, workers=1)
    assert kept(root) == kept(tmp_path / "whole")
    shutil.rmtree(tmp_path)
