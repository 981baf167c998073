"""`fedtide tune` as a person types it."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w

import fedtide
from fedtide.config import read
from fedtide.runs import experiment as playing
from fedtide.tuning.tune import LiveTuning
from helpers.shell import done, refused
from helpers.studies import PROX, RATE, A, tunable

pytestmark = pytest.mark.usefixtures("here", "undrawn")


def written(*methods, **changes) -> Path:
    path = Path("study.toml")
    path.write_text(tomli_w.dumps(tunable(*methods, **changes)), encoding="utf-8")
    return path


def test_from_a_file_to_a_tuned_run(here, capsys):
    written(A, PROX, rounds=2, tune={"trials": 3})
    assert done("tune", "study.toml", "--workers", 1) == 0
    assert re.search(r"^prox +local.lr +0\.\d+ +0.01 to 1 \(log\)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(path.name for path in (here / "runs" / "study-tune").iterdir()) == [
        "config.toml", "environment.json", "report.html", "trials.jsonl", "tuned.toml",
    ]  # fmt: skip
    assert done("run", "runs/study-tune/tuned.toml", "--workers", 1) == 0
    found = read("runs/study-tune/tuned.toml")
    assert read("runs/tuned/config.toml") == found


def test_options(here, capsys):
    stage = [{"name": "s", "trials": 9, "ranges": {"method.local.lr": RATE}}]
    written(tune={"stage": stage})
    options = ["--trials", 2, "--seeds", "3,4", "--set", "tune.sampler=random", "--set", "rounds=2", "--workers", 1]
    assert done("tune", "study.toml", "--out", "x", *options, "--json", "--quiet") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["tuned"] == "x/tuned.toml"
    assert len(json.loads(out)["stages"][0][0]["trials"]) == 2
    lines = [json.loads(line) for line in Path("x/trials.jsonl").read_text().splitlines()]
    assert [[curve["seed"] for curve in line["curves"]] for line in lines] == [[3, 4]] * 2
    config = read("x/config.toml")
    assert (config.tune.trials, config.tune.sampler, config.rounds) == (2, "random", 2)
    assert read("x/tuned.toml").seeds == (0,)


def test_resume_goes_on_and_report_makes_the_page_again(here, capsys, monkeypatch):
    written(rounds=2, tune={"trials": 4})
    assert done("tune", "study.toml", "--out", "whole", "--workers", 1) == 0
    stops, stop = [], playing.Stop
    monkeypatch.setattr(playing, "Stop", lambda: stops.append(stop()) or stops[-1])
    shown = LiveTuning.trial
    monkeypatch.setattr(LiveTuning, "trial", lambda *given: (stops[-1].ask(), shown(*given)))
    assert done("tune", "study.toml", "--out", "x", "--workers", 1) == 130
    assert "stopped and saved; go on with: " in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert done("resume", "x", "--workers", 1) == 0
    assert "4 trials, 1 already done" in capsys.readouterr().out
    for name in ("tuned.toml", "trials.jsonl"):
        assert Path("x", name).read_bytes() == Path("whole", name).read_bytes()
    page = Path("x/report.html").read_bytes()
    Path("x/report.html").unlink()
    assert done("report", "x") == 0
    assert Path("x/report.html").read_bytes() == page
    assert "x: is a tune folder, which has a page by itself" in refused(capsys, here, "report", "x", "whole")
    assert "--tables: found 'tables', but x is a tune folder" in refused(
        capsys, here, "report", "x", "--tables", "tables"
    )
    assert "--seeds: x is a tune folder" in refused(capsys, here, "resume", "x", "--seeds", "0,1")


def test_a_run_ignores_the_search(here):
    written(rounds=2)
    assert done("run", "study.toml", "--out", "with", "--workers", 1) == 0
    Path("study.toml").write_text(tomli_w.dumps({k: v for k, v in tunable(rounds=2).items() if k != "tune"}))
    assert done("run", "study.toml", "--out", "without", "--workers", 1) == 0
    first, second = (
        (
            Path(root, "a/0/rounds.jsonl").read_bytes(),
            json.loads(Path(root, "a/0/checkpoints/00000002/checkpoint.json").read_text())["config"],
        )
        for root in ("with", "without")
    )
    assert first == second


def test_from_python(here, monkeypatch):
    finished = fedtide.tune(tunable(rounds=2, tune={"trials": 2}), "x", workers=1)
    assert (finished.folder, finished.tuned, finished.report) == (
        Path("x"),
        Path("x/tuned.toml"),
        Path("x/report.html"),
    )
    assert finished.stages[0][0].best.accuracy is not None
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    assert finished.frame()["number"] == list(range(len(finished.stages[0][0].trials)))


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({"data": {"split": {"val": 0.0}}}, [], "data.split.val: found 0.0, but .*; allowed: more than 0 with .tune."),
        ({"tune": {"ranges": {"method.local.rat": RATE}}}, [], "local.rat = 0.01: method 'A'.local.rat: unknown key"),
        ({"tune": None}, [], "study.toml: tune: missing; allowed: a table"),
        ({}, ["--trials", 0], "--trials: found 0, allowed: 1 or more"),
        ({}, ["--out", "taken"], "taken: already exists"),
        ({"model": "cnn"}, [], "needs pictures"),
    ],
)  # fmt: skip
def test_what_a_person_may_get_wrong(here, capsys, changes, arguments, said):
    Path("taken").mkdir()
    Path("taken/file").touch()
    written(**{key: value for key, value in changes.items() if value is not None})
    if changes.get("tune", True) is None:
        Path("study.toml").write_text(tomli_w.dumps({k: v for k, v in tunable().items() if k != "tune"}))
    assert re.search(said, refused(capsys, here, "tune", "study.toml", *arguments))
