"""The page on reliability: its table says of every command whether it runs code that a configuration names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fedtide.cli.commands import app
from fedtide.config import options_model
from helpers.shell import done

PAGE = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `fedtide (.+?) \| (yes|no)\b", PAGE, re.MULTILINE)
NAMED = [(name, says) for commands, says in ROWS for name in re.findall(r"(?:^|`)([a-z]+)`", commands)]
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
WORDS = {
    "run": ["study.toml"], "tune": ["study.toml"], "check": ["evil:made"], "show": ["study.toml"],
    "inspect": ["study.toml"], "recommend": ["study.toml"], "deploy": ["study.toml", "--method", "A", "--nodes", "a"],
    "resume": ["folder"], "export": ["folder", "--format", "safetensors"], "predict": ["folder", "x.csv"],
    "replay": ["folder"], "report": ["folder"], "verify": ["folder"], "track": ["folder", "tensorboard"],
    "rehearse": ["site"], "serve": ["site"], "admit": ["site", "a", "a.pub"], "invite": ["site", "b"],
    "status": ["site"], "join": ["site/tickets/a.ticket", "--data", "x.csv"],
}  # fmt: skip


@pytest.fixture
def executed(tmp_path, monkeypatch) -> Path:
    """A file that is there once code of the study was run; the study is a file, in a run folder and in a site."""
    pytest.importorskip("cryptography")
    from fedtide.site.certificates import make_node_key
    from fedtide.site.tickets import Ticket

    monkeypatch.chdir(tmp_path)
    for name in ("study.toml", "x.csv"):
        Path(name).write_text(STUDY)
    assert done("deploy", "study.toml", "--method", "A", "--nodes", "a") == 0
    make_node_key(Path("a.key"), Path("a.pub"), "a")
    ticket = Ticket.read(Path("site/tickets/a.ticket"))
    ticket.study["method"][0]["algorithm"] = "evil:made"
    Path("site/tickets/a.ticket").write_text(ticket.to_toml())
    Path("folder").mkdir()
    for path, text in (("study.toml", STUDY), ("folder/config.toml", STUDY), ("site/study.toml", "")):
        text = text or Path(path).read_text()
        assert 'algorithm = "fedavg"' in text
        Path(path).write_text(text.replace('algorithm = "fedavg"', 'algorithm = "evil:made"'))
    Path("evil.py").write_text("from pathlib import Path\nPath('executed').touch()\ndef made(unknown): ...\n")
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    options_model.cache_clear()
    return tmp_path / "executed"


def test_every_command_is_in_the_table():
    commands = {name for name in app if not name.startswith("-")}
    assert commands == {name for name, _ in NAMED}


@pytest.mark.parametrize("name", WORDS)
def test_the_table_says_whether_a_command_runs_code(executed, name):
    done(name, *WORDS[name])  # the study is refused, once its code was asked what it takes
    says = next(says for known, says in NAMED if known == name)
    assert executed.exists() == (says == "yes")
