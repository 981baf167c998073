"""Every command with bad files, paths and values: one line or a result, and nothing else is touched or left behind.

Commands and their arguments are those of the parser, so that a new command is played by itself.
"""

import os
import random
import re
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtide.cli.commands import app
from fedtide.config import read
from fedtide.core.errors import FedtideError
from fedtide.laws import every
from fedtide.runs.folder import create
from fedtide.site import parity, seat
from fedtide.site.tickets import Ticket
from helpers.hospitals import STUDY, hospitals
from helpers.shell import done, written
from helpers.studies import A

from .test_changes import CHANGES, change, outcome, stop_half_way

pytest.importorskip("cryptography")

FEW, MANY = 6, 50
"""Plays of a command in a test, and those of `make faults`."""

CHECKING = {"check", "rehearse", "replay", "verify"}
"""Commands that find out something, and say it by status 1."""

QUICK = {"--budget": "1s", "--trials": "1", "--workers": "1", "--rounds": "1"}
"""Options, with values, without which a command takes long."""

CHEAP = {"workers": ("1",), "fleet": ("local", "stacked", "auto"), "trials": ("1",), "format": ("safetensors", "onnx")}
"""All right values of arguments of which others take long: they start processes, compile, or play on and on."""

FILES = (
    "study.toml", "tuning.toml", "hospitals/study.toml", "hospitals/berlin.csv", "hospitals/pilot.csv", "rows.csv",
    "rows.npz", "rows.parquet", "series.csv", "hospitals/site/tickets/berlin.ticket", "berlin/berlin.pub",
    "berlin/berlin.key", "policy.toml", "page.html", "notes.txt", "hospitals/site/roster.toml", "run/config.toml",
)  # fmt: skip
FOLDERS = ("run", "half", "hospitals/site", "berlin", "hospitals")
FITTING = {
    "experiment": ["study.toml", "tuning.toml", "hospitals/study.toml", "recipe:none"],
    "data": ["rows.csv", "rows.npz", "rows.parquet", "series.csv", "hospitals/berlin.csv", "study.toml"],
    "rows": ["rows.csv", "rows.npz", "rows.parquet"],
    "run_folder": ["run", "half", "hospitals/site/run"],
    "run_folders": ["run", "half"], "folder": ["run", "half", "hospitals/site"],
    "site": ["hospitals/site"],
    "ticket": ["hospitals/site/tickets/berlin.ticket"],
    "public_key": ["berlin/berlin.pub"],
    "node": ["berlin"],
    "algorithm": ["fedavg", "json:loads"],
    "method": ["A", "FedAvg"],
    "nodes": ["berlin,lyon,oslo", "paris"],
    "tracker": ["tensorboard", "tensorboard:board"],
    "name": ["demo", "fedavg", "mlp"],
    "key": ["data", "method.local", "shift.who.periodic"],
    "out": ["new", "new.html", "new.csv", "deep/new.html", "page.html"], "figures": ["files"], "tables": ["files"],
    "flower": ["app"], "home": ["berlin", "seat"], "study": ["mine.toml"], "policy": ["policy.toml"],
    "set": ["rounds=1", "title='a'", "eval_every=1", "method.local.lr=0.2", "model=linear"],
    "label": ["label"], "client": ["user", "0", "1", "berlin"], "time": ["time"], "features": ["a,b"],
    "without": ["user", "d"],
    "zone": ["Europe/Berlin"], "seed": ["0"], "cluster": ["0"], "seeds": ["0", "0,1"], "budget": ["1s"],
    "health": ["0"],
    "address": ["127.0.0.1:8300"], "rounds": ["1"], **CHEAP,
}  # fmt: skip
"""Values that fit arguments of a name."""

ODD_PATHS = (
    "none", "none.toml", "none.csv", "none.npz", "none.html", "none/none", "", ".", "..", "/", "pipe", "pipe.toml",
    "pipe.csv", "folder", "folder.html", "empty", "empty.toml", "empty.npz", "/dev/null", "/dev/zero", "/dev/full",
    "loop", "dangling", "socket", "unreadable", "x" * 300, "study.toml/x", "nul\0", "\udcff", "two\nlines", "-",
    "~/none",
    "~nobody/x", "\u00e9\u202e.csv", "*.csv", "[/b]", "a\x1b[31m", "run/summary.json", "run/a/0/rounds.jsonl",
)  # fmt: skip
ODD_TEXTS = (
    "", " ", ",", "x", "none", "\0", "\x1b[2J", "a\nb", "\u202e", "\ud800", "9" * 400, "-1", "nan", "inf", "1e999",
    "0x1f", "[]", "{}", "a.b.c", "..", "../x", "=1+1", "label", "time", "u", "a,b", "a:2", "a:99999999999", "0-2",
    "0,0",
    "0-99999999", "10.0.0.1:0", "localhost:1", "[::1", "\U0001f600", "Europe/Berlin", "label,label",
)  # fmt: skip
ODD_NUMBERS = ("0", "1", "-1", "2", "70000", "x", "", "nan", "1.5", "1e3", "9" * 30, "-" + "9" * 30, "0x10", "１")
SETS = (
    "rounds=1", "rounds=0", "rounds=x", "rounds=" + "9" * 30, "title=\x1b", "title='a'", "=", "a", "a.b.c=1", "=1",
    "..=1",
    "method.A.local.lr=nan", "method.local.lr=1e300", "method.local.lr=-1", "seeds=[]", "seeds=[-1]", "data=1",
    "data={}",
    "data.partition.clients=999999999", "model.hidden=[0]", "model.hidden=[1000000000000]", "model=x", "shift.who=[]",
    "fleet.threads=2000", "fleet.kind=stacked", "data.source=csv:pipe.csv", "data.source=csv:/dev/zero",
    "data.source=npz:rows.npz", "data.directory=pipe", "method.A.init_from=pipe", "method.A.init_from=run/a/0",
    "data.source=python:os:system", "track=tensorboard", "x" * 5000 + "=1", "eval_every=999999999999", "[[=1",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A command as it is typed, and the changed copies that it is given: what is copied, and the seed of the change."""

    words: list[str]
    copies: dict[str, tuple[str, int]]

    def __repr__(self) -> str:
        return f"{self.words} with {self.copies}" if self.copies else repr(self.words)


def arguments_of(command: str) -> list[Any]:
    """Return the arguments of a command, as the parser knows them."""
    return [argument for argument in app[command].assemble_argument_collection() if argument.names != ("*",)]


COMMANDS = sorted(name for name in app if not name.startswith("-"))


@st.composite
def calls(draw: st.DrawFn, command: str) -> Call:
    """A command with some of its arguments: good values, odd ones, and changed copies of good files and folders."""
    copies: dict[str, tuple[str, int]] = {}

    def copied(name: str) -> str:
        place = f"changed/{len(copies)}/{Path(name).name}"
        copies[place] = name, draw(st.integers(0, 2**32))
        return place

    faults = draw(st.sampled_from((0, 1, 1, 1, 2, 9)))

    def value(name: str, hint: Any) -> str:
        nonlocal faults
        fitting = FITTING.get(name, []) or (get_args(hint) if get_origin(hint) is Literal else ())
        if fitting and not (faults and draw(st.booleans())):
            return str(draw(st.sampled_from(fitting)))
        faults -= 1
        good = [path for path in fitting if path in (*FILES, *FOLDERS)]
        if good and draw(st.booleans()):
            return copied(draw(st.sampled_from(good)))
        if name == "set":
            return draw(st.sampled_from(SETS))
        if hint is int:
            return draw(st.sampled_from(("0", "x", "", "1e3") if name in CHEAP else ODD_NUMBERS))
        if hint is not Path and name not in ("experiment", "data"):
            return draw(st.sampled_from(ODD_TEXTS) | st.text(max_size=8))
        if draw(st.booleans()):
            return draw(st.sampled_from((*FILES, *FOLDERS)))
        return draw(st.sampled_from(ODD_PATHS) | st.text(max_size=8).filter(lambda text: not text.startswith("/")))

    words = [command]
    for argument in arguments_of(command):
        positional = not argument.names[0].startswith("--")
        needed = argument.required or (positional and draw(st.booleans()))
        if not needed and draw(st.integers(0, 3)):
            continue
        if argument.required and faults > 1 and not draw(st.integers(0, 5)):
            continue  # it is missing
        hint, name = bare(argument.hint), argument.names[0].removeprefix("--").lower().replace("-", "_")
        if hint is bool:
            words.append(draw(st.sampled_from(argument.names)))
            continue
        several = get_origin(hint) in (list, tuple)
        for _ in range(draw(st.integers(1, 3)) if several else 1):
            one = value(name, bare(get_args(hint)[0]) if several else hint)
            words += [one] if positional else [argument.names[0], one]
    names = {name for argument in arguments_of(command) for name in argument.names}
    words += [word for option, quick in QUICK.items() if option in names - {*words} for word in (option, quick)]
    words += ["--dry"] if "--dry" in names - {*words} else []  # or a server waits for its nodes, and a node for it
    return Call(words, copies)


def bare(hint: Any) -> Any:
    """Return a type without `None`."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if type(None) in get_args(hint) and len(kinds) == 1 else hint


# -- the folder in which all is played ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder with one of everything that commands read."""
    home = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        undrawn(patch)
        played = written(home / "study.toml", A, rounds=2, checkpoint_every=1)
        tune = {"trials": 1, "ranges": {"method.local.lr": {"low": 0.01, "high": 1.0}}}
        written(home / "tuning.toml", A, rounds=1, tune=tune)
        assert done("run", played, "--out", "run", "--workers", 1) == 0
        half = read(played, sets=["rounds=5"])
        create(half, home / "half")
        stop_half_way(half, home / "half")
        (home / "hospitals").mkdir()
        study = hospitals(home / "hospitals", method=STUDY["method"][:1])
        assert (
            done("deploy", study, "--method", "FedAvg", "--nodes", "berlin,lyon,oslo", "--out", "hospitals/site") == 0
        )
        ticket = home / "hospitals/site/tickets/berlin.ticket"
        seat.Seat.read(Ticket.read(ticket), [home / "hospitals/berlin.csv"], None, home / "berlin").settle()
    np.savez(home / "rows.npz", x=X, y=np.arange(len(X)) % 3)
    lines = [
        ",".join([*(f"{v:.4f}" for v in row), f"{k % 5},2024-01-{k % 28 + 1:02},{'abc'[k % 3]}"])
        for k, row in enumerate(X)
    ]
    (home / "rows.csv").write_text("\n".join(["a,b,c,d,user,time,label", *lines]) + "\n")
    series = [f"2024-01-01T{k % 24:02}:00:00,{k % 7}" for k in range(48)]
    (home / "series.csv").write_text("\n".join(["time,value", *series]) + "\n")
    parquet(home / "rows.csv", home / "rows.parquet")
    (home / "policy.toml").write_text('reveals = []\nquestions = ["train"]\n')
    (home / "page.html").write_text((home / "run" / "report.html").read_text())
    (home / "notes.txt").write_text("precious")
    odd(home)
    return home


def parquet(table: Path, out: Path) -> None:
    from pyarrow import csv
    from pyarrow.parquet import write_table

    write_table(csv.read_csv(table), out)


def odd(home: Path) -> None:
    """Put into a folder what is no file or no folder, or none that can be read."""
    for name in ("pipe", "pipe.toml", "pipe.csv"):
        os.mkfifo(home / name)
    for name in ("folder", "folder.html"):
        (home / name).mkdir()
        (home / name / "mine.txt").write_text("precious")
    for name in ("empty", "empty.toml", "empty.npz"):
        (home / name).touch()
    (home / "unreadable").touch(0)
    (home / "loop").symlink_to("loop")
    (home / "dangling").symlink_to("gone")


def undrawn(patch: pytest.MonkeyPatch) -> None:
    """Leave out what takes long and is tried elsewhere: pictures, laws, and processes of a rehearsal."""
    patch.setattr("fedtide.report.page.pictures_of", lambda *_: [])
    patch.setattr("fedtide.inspection.preview.pictures", lambda *_: [])
    patch.setattr("fedtide.inspection.finding_pictures.pictures", lambda *_: [])
    patch.setattr(every, "LAWS", every.LAWS[:1])
    patch.setattr(parity, "server_of", unrehearsed)
    patch.setattr("fedtide.site.live.follow", lambda *_: None)  # it waits for a server


def unrehearsed(*_: object) -> None:
    raise FedtideError("rehearsals are tried elsewhere")


class Box:
    """A copy of the folder that is put right after each command."""

    def __init__(self, whole: Path, place: Path) -> None:
        self.whole, self.base = whole, place
        self.here, self.scratch = place / "here", place / "scratch"
        self.scratch.mkdir()
        self.here.mkdir()
        os.chdir(self.here)
        self.renew()

    def renew(self) -> None:
        """Make everything as it was."""
        for folder in (self.here, self.scratch):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for path in self.whole.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, self.here / path.name, symlinks=True)
            elif not path.is_symlink() and path.is_file():
                shutil.copy2(path, self.here / path.name)
        for name in ("pipe", "pipe.toml", "pipe.csv"):
            os.mkfifo(self.here / name)
        for name, target in (("loop", "loop"), ("dangling", "gone")):
            (self.here / name).symlink_to(target)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("socket")
        self.right = self.state()

    def state(self) -> dict[str, tuple[int, ...]]:
        """Return everything in the folder around, with sizes and times."""
        found = {}
        for folder, folders, files in os.walk(self.base):
            for name in (*folders, *files):
                status = os.lstat(os.path.join(folder, name))
                is_file = name not in folders
                stamp = (status.st_size, status.st_mtime_ns) if is_file else ()
                found[os.path.relpath(os.path.join(folder, name), self.base)] = (status.st_mode, *stamp)
        return found

    def play(self, call: Call) -> tuple[int, str, dict[str, str]]:
        """Run a command; return its status, its error, and what it has made, changed and removed."""
        for place, (name, seed) in call.copies.items():
            copy(self.here / name, self.here / place, random.Random(seed))
        before = self.state()
        status, said = outcome(*call.words)
        after = self.state()
        shutil.rmtree(self.here / "changed", ignore_errors=True)
        names = before.keys() | after.keys()
        kinds = {
            name: "made" if name not in before else "removed" if name not in after else "changed"
            for name in names
            if before.get(name) != after.get(name)
        }
        if self.state() != self.right:
            self.renew()
        return status, said, kinds


def copy(source: Path, out: Path, draw: random.Random) -> None:
    """Copy a file or a folder, with a change."""
    out.parent.mkdir(parents=True)
    if source.is_dir():
        shutil.copytree(source, out)
        change(out, draw)
    elif source.suffix == ".npz" and draw.random() < 0.7:
        x, y = (ARRAYS[draw.choice([*ARRAYS, "rows"])] for _ in range(2))
        np.savez(
            out, **{draw.choice(["x", "x", "x", "z"]): x, "y": y if draw.random() < 0.3 else np.arange(len(X)) % 3}
        )
    else:
        out.write_bytes(draw.choice([*CHANGES, *[word] * 5])(source.read_bytes(), draw))


X = np.random.default_rng(0).normal(size=(80, 4))
ARRAYS = {
    "rows": X, "no rows": X[:0], "one row": X[:1], "narrow": X[:, :1], "no columns": X[:, :0], "flat": X[:, 0],
    "nothing": np.array(1.0), "deep": X[:, :, None, None], "nan": np.full((80, 4), np.nan), "inf": X * np.inf,
    "huge": X * 1e300,
    "half": X.astype(np.float16), "bytes": X.astype(np.uint8), "whole": X.astype(np.int64), "yes or no": X > 0,
    "complex": X * 1j, "words": X.astype(str), "objects": X.astype(object), "times": np.zeros((80, 4), "M8[s]"),
    "spans": np.zeros((80, 4), "m8[s]"), "longest": np.full((80, 4), 2**63 - 1),
    "unsigned": np.full((80, 4), 2**64 - 1, np.uint64),
}  # fmt: skip


def word(data: bytes, draw: random.Random) -> bytes:
    """A text with another word or number in a place."""
    words = list(re.finditer(rb"[\w.+-]+", data))
    if not words:
        return data
    place = draw.choice(words)
    return data[: place.start()] + draw.choice(ODD_TEXTS).encode(errors="replace") + data[place.end() :]


@pytest.fixture(scope="module")
def box(whole, tmp_path_factory) -> Iterator[Box]:
    place = tmp_path_factory.mktemp("box")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        made = Box(whole, place)
        patch.setattr(tempfile, "tempdir", str(made.scratch))
        patch.setattr(sys, "path", list(sys.path))
        patch.delenv("FEDTIDE_DATA", raising=False)
        undrawn(patch)
        yield made


# -- what may change ---------------------------------------------------------------------------------------------------

OWN = {
    "report": ("run", "half", "summary.json"), "resume": ("run", "half"), "track": ("run", "half"),
    "admit": ("hospitals/site/roster.toml",), "invite": ("hospitals/site",), "rehearse": ("hospitals/site/rehearsal",),
    "replay": ("hospitals/site/replay",), "serve": ("hospitals/site",), "rollback": ("hospitals/site",),
    "forget": ("hospitals/site",),
}  # fmt: skip
"""Folders and files that a command may change, besides changed copies of them that it is given."""

DEFAULTS = {
    "run": ("runs",), "tune": ("runs",), "recommend": ("runs",), "inspect": ("runs",), "show": ("-show.html",),
    "report": ("report.html",), "predict": ("predictions.csv",), "init": ("study.toml",), "deploy": ("site",),
    "export": (".safetensors", ".pt2", ".onnx"), "track": ("board",),
}  # fmt: skip
"""What a command makes if it is not told where; beginnings, or endings of names."""

OUTPUTS = ("--out", "--flower", "--figures", "--tables", "--home")


def may_change(call: Call, name: str, kind: str) -> bool:
    """Tell whether a command may make or change something, by its path from the folder around."""
    command, path = call.words[0], name.removeprefix("here/")
    if name == path:
        return False
    named = [word for option, word in zip(call.words, call.words[1:], strict=False) if option in OUTPUTS]
    named += call.words[1:2] if command == "init" else []
    places = [os.path.normpath(word) for word in named if word]
    if kind == "made" and any(
        path == place or path.startswith(f"{place}/") or place.startswith(f"{path}/") for place in places
    ):
        return True
    if kind == "made" and any(path.startswith(begin) or path.endswith(begin) for begin in DEFAULTS.get(command, ())):
        return True
    if kind == "made" and command == "forget" and "-without-" in path:  # beside the folder that it is given
        return True
    if kind == "changed" and path.endswith("page.html") and path in places:
        return True
    owned = [*OWN.get(command, ()), *(call.copies if command in OWN else ())]
    return any(path == place or path.startswith(f"{place}/") for place in owned)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_line_or_a_result(box, command, seed, pytestconfig, tried: Counter[str]):
    count = MANY if pytestconfig.getoption("--tries") else FEW

    @hypothesis.seed(seed)
    @settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(calls(command))
    def play(call: Call) -> None:
        status, said, kinds = box.play(call)
        tried[f"command line: {command}"] += 1
        tried["command line: refused in one line"] += status == 2
        assert status in ({0, 1, 2} if command in CHECKING else {0, 2}), said
        lines = said.splitlines()
        assert "Traceback" not in said
        if status == 2:  # with --json the progress goes there, too
            assert lines[-1].startswith("fedtide: ")
            assert len(lines) == 1 or "--json" in call.words, said
        wrong = {name: kind for name, kind in kinds.items() if not may_change(call, name, kind)}
        assert not wrong, f"{call}: status {status}, {said}: {wrong}"

    play()


test_every_command_is_one_line_or_a_result.each = MANY  # type: ignore[attr-defined]
