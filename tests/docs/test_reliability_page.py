"""The page on reliability: its table of commands that run code which a configuration names."""

import shutil
import sys
from pathlib import Path

import pytest

from fedtide.cli.commands import RUNS_CODE, app
from fedtide.config import options_model
from helpers.shell import done

STUDY = """
rounds = 2
[data]
source = "gaussians"
partition = { kind = "iid", clients = 3 }
[model]
kind = "linear"
[[method]]
name = "A"
algorithm = "fedavg"
cohort = 1
[deploy]
fewest = 1
"""
OWN = """
rounds = 1
metrics = ["strangers_code:error"]
[data]
source = "python:strangers_code:load"
partition = "python:strangers_code:dealt"
[shift]
who = "python:strangers_code:awake"
what = "python:strangers_code:held"
how = "python:strangers_code:read"
[model]
kind = "python"
function = "strangers_code:net"
[[method]]
name = "A"
algorithm = "strangers_code:fitting"
cohort = "python:strangers_code:picked"
loss = "strangers_code:loss"
[deploy]
fewest = 1
"""
"""A study that names code wherever a study can."""

EVIL = """
from pathlib import Path
import torch
from fedtide.cohorts import PickedBy
from fedtide.data.partition import DealtBy
from fedtide.data.shift import AwakeBy, HeldBy, ReadBy
from helpers.unprobed import fitting

Path("executed").touch()

def load():
    return torch.eye(3).repeat(20, 1), torch.arange(60) % 3

def dealt():
    return DealtBy(lambda y, classes, clients, rng: torch.arange(len(y)) % 3, 3)

def awake():
    return AwakeBy(lambda clients, time: clients >= 0)

def held():
    return HeldBy(lambda rows, part, moment, rng: rows)

def read():
    return ReadBy(lambda x, y, group, time: (x, y))

def net():
    return torch.nn.Linear(3, 3)

def picked():
    return PickedBy(lambda there, m, moment, rng: there[:m], 1)

def loss(outputs, y):
    return torch.nn.functional.cross_entropy(outputs, y)

def error(scores):
    return 1 - scores.accuracy

def refused(unknown): ...
"""
WORDS = {
    "run": ["study.toml"], "tune": ["study.toml"], "check": ["strangers_code:fitting"], "show": ["study.toml"],
    "inspect": ["study.toml"], "recommend": ["study.toml"], "deploy": ["study.toml", "--method", "A", "--nodes", "a"],
    "resume": ["folder"], "forget": ["folder", "0"], "export": ["folder", "--format", "safetensors"],
    "predict": ["folder", "x.csv"],
    "replay": ["folder"], "report": ["folder"], "watch": ["folder"],
    "verify": ["folder"], "track": ["folder", "tensorboard"],
    "rehearse": ["site"], "serve": ["site"], "admit": ["site", "a", "a.pub"], "invite": ["site", "b"],
    "status": ["site"], "rollback": ["site", "1"],
    "join": ["site/tickets/a.ticket", "--data", "x.csv"], "init": ["new.toml"], "recipes": [],
    "algorithms": [], "keys": [], "models": [],
}  # fmt: skip
NONE = [
    *((name, *words) for name, words in WORDS.items() if name not in RUNS_CODE), ("serve", "site", "--dry"),
    ("join", *WORDS["join"], "--dry"), ("inspect", "x.csv"), ("predict", "site/tickets", "x.csv"),
    ("export", "site/tickets", "--format", "safetensors"),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a study, a run folder and a site, all of which name code, and rows."""
    pytest.importorskip("cryptography")
    from fedtide.site.certificates import make_node_key
    from fedtide.site.tickets import Ticket

    home = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        Path("plain.toml").write_text(STUDY)
        Path("x.csv").write_text("a,b,label\n1,2,x\n2,1,y\n" * 20)
        assert done("deploy", "plain.toml", "--method", "A", "--nodes", "a") == 0
        make_node_key(Path("a.key"), Path("a.pub"), "a")
        ticket = Ticket.read(Path("site/tickets/a.ticket"))
        ticket.study["method"][0]["algorithm"] = "strangers_code:fitting"
        Path("site/tickets/a.ticket").write_text(ticket.to_toml())
        Path("strangers_code.py").write_text(EVIL)
        Path("study.toml").write_text(OWN)
        assert done("run", "study.toml", "--out", "folder", "--workers", 1) == 0
        Path("site/study.toml").write_text(Path("folder/config.toml").read_text())
    return home


@pytest.fixture
def executed(made, tmp_path, monkeypatch) -> Path:
    """A file that is there once code was run, in a copy of that folder."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delitem(sys.modules, "strangers_code", raising=False)
    options_model.cache_clear()
    Path("executed").unlink()
    return tmp_path / "here" / "executed"


def test_every_command_is_played():
    assert WORDS.keys() == {name for name in app if not name.startswith("-")}


@pytest.mark.parametrize("name", RUNS_CODE)
def test_commands_that_say_so_run_code(executed, name):
    for path in ("study.toml", "folder/config.toml", "site/study.toml"):  # refused once the code says what it takes
        if name != "replay":  # it compares digests first
            Path(path).write_text(Path(path).read_text().replace("strangers_code:fitting", "strangers_code:refused"))
    assert done(name, *(word.replace("fitting", "refused") for word in WORDS[name])) == 2
    assert executed.exists()


@pytest.mark.parametrize("words", NONE, ids=" ".join)
def test_other_commands_run_none(executed, words):
    done(*words)
    assert not executed.exists()
    assert "strangers_code" not in sys.modules
