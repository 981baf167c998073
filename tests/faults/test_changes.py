"""One change to one file of a run folder: it is named in one line, or the result is the right one."""

import contextlib
import io
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedtide.cli.commands import main
from fedtide.report import page
from fedtide.runs.experiment import execute
from fedtide.runs.folder import create, plan
from fedtide.runs.runner import Run
from helpers.shell import contents
from helpers.toys import toy

from .conftest import BATCH, limited

SILENT = ("environment.json", "report.html", "timings.jsonl")
"""Files from which no number of a result follows."""

METHODS = {
    "scaffold": {"model": {"kind": "mlp", "hidden": [600]}},  # whose copy in a client's memory is a file
    "fedem": {},
    "fielding": {},
    "aem": {},
    "fedavg": {"forgetting": {"rounds": [1, 3]}},
    "feddrift": {},
}


@pytest.fixture(scope="module", params=METHODS)
def played(request, tmp_path_factory) -> dict[str, Path]:
    """A run folder that is finished, and one of the same run half-way, with large memory in files."""
    home = tmp_path_factory.mktemp(request.param)
    experiment = toy(request.param, title="A toy", checkpoint_every=2, **METHODS[request.param])
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "pictures_of", lambda *_: [])
        for name in ("whole", "half"):
            made[name] = home / name
            create(experiment, made[name])
        execute(experiment, made["whole"], workers=1)
        outcome("report", made["whole"])
        stop_half_way(experiment, made["half"])
    return made


def stop_half_way(experiment, root: Path) -> None:
    for run in plan(experiment, root):
        playing = Run(run.experiment, run.method, run.seed, run.folder).play()
        for _ in range(3):
            next(playing)
        playing.close()


def outcome(*arguments: object) -> tuple[int, str]:
    """Run a command in this process: its status and what it said on stderr."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited():
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = int(end.code or 0)
    return status, err.getvalue()


# -- changes -----------------------------------------------------------------------------------------------------------


def flip(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]


def digit(data: bytes, draw: random.Random) -> bytes:
    places = [place for place, byte in enumerate(data) if byte in b"0123456789"]
    if not places:
        return flip(data, draw)
    place = draw.choice(places)
    return data[:place] + str((int(chr(data[place])) + draw.randint(1, 9)) % 10).encode() + data[place + 1 :]


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def drop(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    del lines[draw.randrange(len(lines))]
    return b"\n".join(lines)


def double(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    place = draw.randrange(len(lines))
    return b"\n".join([*lines[:place], lines[place], *lines[place:]])


def append(data: bytes, draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.randint(1, 50))


def empty(data: bytes, draw: random.Random) -> bytes:
    return b""


CHANGES: list[Callable[[bytes, random.Random], bytes]] = [flip, digit, cut, drop, double, append, empty]


def change(root: Path, draw: random.Random) -> str:
    """Change one file of a folder, remove it, or put another in its place; return what was done."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)
    path = draw.choice(files)
    name = str(path.relative_to(root))
    if draw.random() < 0.1:
        path.unlink()
        return f"{name} removed"
    if draw.random() < 0.1:
        other = draw.choice(files)
        path.write_bytes(other.read_bytes())
        return f"{name} is {other.relative_to(root)}"
    how = draw.choice(CHANGES)
    path.write_bytes(how(path.read_bytes(), draw))
    return f"{name}: {how.__name__}"


STATES = ("whole", "half")


@pytest.mark.parametrize("state", STATES)
def test_a_change_is_named_or_changes_nothing(played, state, seed, tmp_path, monkeypatch, tried: Counter[str]):
    monkeypatch.setattr(page, "pictures_of", lambda *_: [])  # all is read and counted, and only not drawn
    right = contents(played["whole"])
    for number in range(BATCH):
        draw = random.Random(f"{seed} {number} {state}")
        root = tmp_path / str(number)
        shutil.copytree(played[state], root)
        done = change(root, draw)
        command = "report" if state == "whole" and draw.random() < 0.5 else "resume"
        whole, _ = outcome("verify", root)
        status, said = outcome(command, root, *(["--workers", 1] if command == "resume" else []))
        tried["changes to a run folder"] += 1
        if status == 0:
            other = differing({**contents(root), **grown(root, right)}, right, done)
            assert not other, f"{done}, then {command}: not a word, and another {', '.join(other)}"
            tried["changes: of no consequence"] += 1
        else:
            assert status == 2, f"{done}, then {command}: status {status}, {said}"
            assert said.count("\n") == 1, f"{done}, then {command}: {said}"
            # No number follows from the line about the machine.
            assert whole in (1, 2) or done.startswith("environment.json"), (
                f"{done}: verify says that all is whole, and {command}: {said}"
            )
            tried["changes: named in one line"] += 1
        shutil.rmtree(root)


test_a_change_is_named_or_changes_nothing.each = BATCH * len(METHODS) * len(STATES)  # type: ignore[attr-defined]


def differing(found: dict[str, bytes], right: dict[str, bytes], done: str) -> list[str]:
    """Return the files of a result that differ; one of no consequence may stay as it was changed."""
    # Titles and what a report averages over may be edited, and every number of the record stays.
    ends = ("rounds.jsonl",) if done.startswith("config.toml") else ("",)
    return [
        name
        for name, data in right.items()
        if name.endswith(ends)
        and not name.endswith(("/", *SILENT))
        and not {"checkpoints", "memory"} & set(Path(name).parts)  # of a run that is over nothing follows from them
        and timeless(name, found.get(name)) != timeless(name, data)
    ]


def grown(root: Path, right: dict[str, bytes]) -> dict[str, bytes]:
    """Return the records that go on behind what was written: nobody counts on that."""
    records = {str(path.relative_to(root)): path.read_bytes() for path in root.glob("*/*/*.*")}
    return {name: right[name] for name, data in records.items() if name in right and data.startswith(right[name])}


def timeless(name: str, data: bytes | None) -> Any:
    """Return what a file holds, without the wall clock."""
    if data is None or name != "summary.json":
        return data
    summary = json.loads(data)
    for method in summary["methods"]:
        for measure in ("seconds", "evaluation_seconds", "per_second", "clustering_seconds", "clustering_longest"):
            method["measures"].pop(measure, None)
    return summary
