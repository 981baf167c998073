"""A folder of a stranger: what its configuration names is a program, which `report` and `verify` do not start.

What else is in it is read as what it should be, or refused.
"""

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from fedtide.config import options_model
from fedtide.core import checkpoint, codec
from fedtide.core.atomic import sha256
from fedtide.core.record import whole
from helpers.mortal import changes_in, killed_at
from helpers.shell import contents, done, written
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
    if sweep:  # drawing takes long, and is the same
        monkeypatch.setattr("fedtide.report.page.pictures_of", lambda *given: [])
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


# -- what may lie in a run folder --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Path:
    """A run folder that is finished."""
    home = tmp_path_factory.mktemp("played")
    written(home / "study.toml", A, rounds=2, checkpoint_every=1)
    assert done("run", home / "study.toml", "--out", home / "x", "--workers", 1) == 0
    return home / "x"


@pytest.fixture
def run(played, tmp_path) -> Path:
    """A copy of it, and a file beside it that is nobody's but the user's."""
    shutil.copytree(played, tmp_path / "x")
    (tmp_path / "victim").write_text("precious")
    return tmp_path / "x"


def said(capsys, *arguments: object) -> str:
    """The one line with which a folder is refused, or found damaged."""
    capsys.readouterr()
    status = done(*arguments)
    out, err = capsys.readouterr()
    line = err or out  # `verify` says what it finds where it says that all is well
    assert status == (2 if err else 1), out + err
    assert line.count("\n") == 1
    return line


COMMANDS = [("verify",), ("report",), ("resume",)]


@pytest.mark.parametrize("command", [*COMMANDS, ("resume", "--seeds", "0,1")])
def test_a_link_is_refused_before_anything_is_written(run, capsys, command):
    (run / "config.toml.17.writing").symlink_to(run.parent / "victim")
    before = contents(run)
    assert "config.toml.17.writing: is a link" in said(capsys, command[0], run, *command[1:])
    assert (run.parent / "victim").read_text() == "precious"
    assert contents(run) == before


def test_a_record_with_another_name_elsewhere_is_not_played(run, capsys):
    record = run / "a" / "0" / "rounds.jsonl"
    shutil.rmtree(run / "a" / "0" / "checkpoints")
    record.unlink()
    record.hardlink_to(run.parent / "victim")
    assert "rounds.jsonl: is the same file under another name" in said(capsys, "resume", run)
    assert (run.parent / "victim").read_text() == "precious"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["a/0/rounds.jsonl", "shift/0.safetensors", "a/0/memory/x"])
def test_a_pipe_is_refused_and_not_waited_for(run, capsys, command, name):
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert f"{name}: is a pipe or a device" in said(capsys, *command, run)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_that_the_configuration_names_is_not_waited_for(run, capsys, command):
    os.mkfifo(run.parent / "pipe")
    config = run / "config.toml"
    config.write_text(
        config.read_text().replace('algorithm = "fedavg"', f'algorithm = "fedavg"\ninit_from = "{run.parent / "pipe"}"')
    )
    assert "pipe: is a pipe or a device" in said(capsys, *command, run)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_in_a_folder_that_the_configuration_names_is_not_waited_for(run, capsys, command):
    saved = run.parent / "other" / "checkpoints" / "00000001"
    saved.mkdir(parents=True)
    os.mkfifo(saved / "state.safetensors")
    config, named = run / "config.toml", f'algorithm = "fedavg"\ninit_from = "{run.parent / "other"}"'
    config.write_text(config.read_text().replace('algorithm = "fedavg"', named))
    assert "state.safetensors: is a pipe or a device" in said(capsys, *command, run)


def test_what_a_person_puts_among_checkpoints_stays(run):
    folder = run / "a" / "0" / "checkpoints"
    for name in ("writing-my-thesis", "00000001"):
        (folder / name).mkdir()
        (folder / name / "x.txt").write_text("mine")
    (folder / "writing-00000001").mkdir()
    for name in ("00000001/state.safetensors", "writing-00000001/.tmpAb12Cd"):  # as a kill leaves them
        (folder / name).touch()
    assert done("resume", run) == 0
    assert (folder / "writing-my-thesis" / "x.txt").read_text() == "mine"
    assert [path.name for path in (folder / "00000001").iterdir()] == ["x.txt"]
    assert not (folder / "writing-00000001").exists()


# -- what somebody may have written into it ----------------------------------------------------------------------------


def about_of(run: Path) -> Path:
    return next(run.glob("a/0/checkpoints/*/checkpoint.json"))


def forged(run: Path, **changes: object) -> None:
    """Change what a checkpoint says of itself, and its digest with it."""
    path = about_of(run)
    about = {**json.loads(path.read_text()), **changes}
    del about["sum"]
    path.write_text(json.dumps({**about, "sum": checkpoint._sum(about)}))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"round": float("inf")}, {"seconds": 10**400}, {"before": 10**400}, {"marks": [[float("inf"), {}]]},
        *({"marks": [[2, {name: {"length": length, "sha256": "x"}}]]} for name, length in (
            ("rounds.jsonl", float("inf")), ("rounds.jsonl", -5), ("\ud800", 1), ("../../../../../../dev/zero", 10**13),
            ("../../../victim", 8), ("../../shift/../../victim", 8), ("../../shift/..", 8),
        )),
    ],
    ids=lambda changes: repr(changes)[:60],
)  # fmt: skip
def test_a_checkpoint_that_somebody_made_is_damaged(run, capsys, command, changes):
    forged(run, **changes)
    assert "checkpoint.json: damaged" in said(capsys, *command, run)


@pytest.mark.parametrize("name", ["environment.json", "a/0/rounds.jsonl", "a/0/timings.jsonl"])
def test_a_file_without_an_end_is_damaged_for_a_report(run, capsys, name):
    (run / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000 + "\n")
    marks = {
        file: {"length": (run / "a" / "0" / file).stat().st_size, "sha256": sha256(run / "a" / "0" / file)}
        for file in ("rounds.jsonl", "timings.jsonl", "clients.csv")
    }
    forged(run, marks=[[2, marks]])
    assert f"{name}: " in said(capsys, "report", run)


@pytest.mark.parametrize(
    "change",
    [{"facts": None}, {"client_loss": {"q75": 10**30}}, {"scores": {"train_clients": {"accuracy": [[]]}}}],
    ids=repr,
)
def test_a_line_that_somebody_made_is_damaged(run, capsys, change):
    record = run / "a" / "0" / "rounds.jsonl"
    first, *rest = [json.loads(line) for line in record.read_text().splitlines()]
    record.write_text("".join(json.dumps(line) + "\n" for line in [{**first, **change}, *rest]))
    marks = {"rounds.jsonl": {"length": record.stat().st_size, "sha256": sha256(record)}}
    forged(run, marks=[[2, marks]])
    assert "rounds.jsonl: line 1: damaged" in said(capsys, "report", run)


@pytest.mark.parametrize("change", [
    {"labels": 7}, {"labels": {"counts": 7, "of": 3}}, {"labels": {"counts": None, "of": 3, "names": [5]}},
    {"group_names": 5},
], ids=repr)  # fmt: skip
def test_a_population_that_somebody_made_is_damaged(run, capsys, change):
    path = run / "shift" / "0.safetensors"
    codec.to_file(path, {**codec.from_file(path), **change})
    name = "../../shift/0.safetensors"
    marks = {**json.loads(about_of(run).read_text())["marks"][-1][1], name: dataclasses.asdict(whole(path))}
    forged(run, marks=[[2, marks]])
    assert f"0.safetensors: damaged: '{next(iter(change))}' is of another kind" in said(capsys, "report", run)


def test_an_index_of_memory_that_somebody_made_is_damaged(run, capsys):
    path = about_of(run).with_name("memory.safetensors")
    codec.to_file(path, {"groups": {}, "files": [[float("inf"), 2, 3, "x"]]})
    digests = json.loads(about_of(run).read_text())["sha256"]
    forged(run, sha256={**digests, "memory.safetensors": sha256(path)})
    for command in ("verify", "resume"):
        assert "memory.safetensors: damaged" in said(capsys, command, run)


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.toml", "a/0/rounds.jsonl", "summary.json"])
def test_a_page_does_not_take_the_place_of_a_file_of_the_run(run, capsys, name):
    before = contents(run)
    assert "allowed: a page (.html)" in said(capsys, "report", run, "--out", run / name)
    assert contents(run) == before


@pytest.mark.parametrize(("option", "name"), [
    ("--out", "thesis.txt"), ("--out", "page.html"), ("--tables", "methods.csv"), ("--tables", "methods.tex"),
    pytest.param("--figures", "accuracy-over-rounds.pdf", marks=pytest.mark.thorough),
])  # fmt: skip
def test_a_file_is_replaced_only_if_it_is_ours(run, capsys, option, name):
    file = run.parent / "elsewhere" / name
    file.parent.mkdir()
    file.write_text("precious")
    before = contents(run.parent)
    out = file if option == "--out" else file.parent
    assert f"{name}: is there already" in said(capsys, "report", run, option, out)
    assert contents(run.parent) == before
    file.unlink()
    assert [done("report", run, option, out) for _ in range(2)] == [0, 0]
    assert file.is_file()


def test_tables_that_a_kill_cut_off_are_written_anew(run):
    """The file with our mark stands before the one without."""
    tables = run.parent / "tables"
    count = changes_in("report", run, "--tables", tables)
    for change in range(count - 3, count + 1):
        shutil.rmtree(tables)
        killed_at(change, "report", run, "--tables", tables)
        assert done("report", run, "--tables", tables) == 0


def test_tables_are_not_written_through_links(run):
    tables = run.parent / "tables"
    assert done("report", run, "--tables", tables) == 0
    (name, *_) = sorted(path.name for path in tables.glob("*.csv"))
    (tables / name).unlink()
    (tables / name).symlink_to(run.parent / "victim")
    assert done("report", run, "--tables", tables) == 0
    assert (run.parent / "victim").read_text() == "precious"
    assert not (tables / name).is_symlink()
