"""A folder of a stranger: what its configuration names is a program, which `report` and `verify` do not start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedtide.config import options_model
from helpers.shell import done, written
from helpers.studies import A

EVIL = """
from pathlib import Path
Path("executed").touch()
import torch
from fedtide.cohorts import Arrivals
from helpers.unprobed import fitting

def load():
    y = torch.arange(60) % 3
    return torch.eye(3)[y] + torch.arange(60)[:, None] / 100, y

def picked(clients):
    return Arrivals(clients_per_round=clients)

def error(scores):
    return 1 - scores.accuracy
"""

OWN = {**A, "name": "own", "algorithm": "evil:fitting", "cohort": {"kind": "python", "function": "evil:picked"}}
OWN["cohort"]["options"] = {"clients": 3}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    (tmp_path / "evil.py").write_text(EVIL)
    return tmp_path


def forget(here: Path, monkeypatch) -> Path:
    """Let all that was imported be imported again; return the file that says that it was."""
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    options_model.cache_clear()
    (here / "executed").unlink(missing_ok=True)
    return here / "executed"


@pytest.mark.parametrize("sweep", [{}, {"method.local.lr": [1, 0.1], "method.local": [{"lr": 1}, {"epochs": 2}]}])
def test_report_and_verify_import_nothing_that_a_configuration_names(here, monkeypatch, sweep):
    data = {"source": "python:evil:load", "partition": {"kind": "iid", "clients": 6}, "groups": {"by": "none"}}
    changes = {"data": {**data, "held_out_clients": {}}, "shift": {"who": "always"}, "metrics": ["evil:error"]}
    for number, (key, values) in enumerate(sweep.items() or [("", ())]):
        root = here / f"out{number}"
        study = written(here / "study.toml", OWN, A, rounds=2, sweep={key: values} if key else {}, **changes)
        executed = forget(here, monkeypatch)
        assert done("run", study, "--out", root, "--workers", 1) == 0
        assert executed.exists()
        page = (root / "report.html").read_bytes()
        executed = forget(here, monkeypatch)
        assert done("verify", root) == 0
        assert done("report", root, "--out", here / "page.html") == 0
        assert not executed.exists()
        assert (here / "page.html").read_bytes() == page
        assert done("resume", root) == 0
        assert executed.exists()


def test_a_configuration_that_was_changed_since_is_told_without_importing(here, monkeypatch, capsys):
    study, root = written(here / "study.toml", {**OWN, "cohort": 3}, rounds=2), here / "out"
    assert done("run", study, "--out", root) == 0
    executed = forget(here, monkeypatch)
    config = root / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1", "lr = 0.2"))
    assert done("report", root) == 2
    assert "belongs to another configuration" in capsys.readouterr().err
    assert not executed.exists()
