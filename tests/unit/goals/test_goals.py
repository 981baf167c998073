"""Goals: recipes about what a command finds in worlds whose answers are known."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from fedtide.config import to_toml
from fedtide.goals import goal, inspecting, recommending
from fedtide.goals.inspecting import Inspect
from fedtide.goals.planted import FOUND
from fedtide.goals.recommending import Recommend, cost_of
from fedtide.runs.request import goals
from helpers.shell import done, refused
from helpers.studies import MOMENTUM, A, study

PLANTED = ("run", "recipe:inspect-planted", "--scale", "nano")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", goals(), ids=lambda path: path.stem)
def test_every_scale_of_a_goal_is_sound(path):
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    assert {"nano", "cpu"} == set(content["scale"])
    for scale in content["scale"]:
        root = goal.begin(f"recipe:{path.stem}", goal.Request(Path(scale), scale))
        assert goal.load(root).goal.worlds


def test_what_was_planted_is_tried_and_a_stopped_goal_goes_on(here, monkeypatch, capsys):
    assert done(*PLANTED, "--out", "whole") == 0
    assert "goal folder: whole" in capsys.readouterr().out
    tried, seen = inspecting.found_in, []

    def stopped(table):
        seen.append(table)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return tried(table)

    monkeypatch.setattr(inspecting, "found_in", stopped)
    assert done(*PLANTED, "--out", "cut") == 130
    with open(here / "cut" / goal.FOUND, "a") as file:
        file.write('{"world": "labels 0.3", "se')  # as a killed process leaves it
    assert done("resume", "cut") == 0
    assert len(seen) == 4
    for name in (goal.GOAL, goal.FOUND, "summary.json"):
        assert (here / "cut" / name).read_bytes() == (here / "whole" / name).read_bytes()
    summary = json.loads((here / "cut" / "summary.json").read_text())
    assert [row[1] for row in summary["results"]["rows"]] == ["1 of 1"] * 3
    assert {row[-1] for row in summary["claims"]["rows"]} == {"not judged at nano"}
    assert "What is planted is found" in (here / "cut" / "report.html").read_text()


def test_claims_about_what_was_planted_count_what_was_missed_and_what_was_found_beside_it():
    asked = Inspect(worlds=("nothing", "labels 1"))
    lines = [
        {"world": world, "seed": seed, "missed": ["labels"] if (world, seed) == ("labels 1", 0) else [], "beside": []}
        for world in asked.worlds
        for seed in range(4)
    ]
    lines[0]["beside"] = ["drift"]
    assert asked.results(lines).rows == [
        ["nothing", "3 of 4", "", "drift (1)"],
        ["labels 1", "3 of 4", "labels (1)", ""],
    ]
    empty = 4 * len(inspecting.ALL) + 4 * len(inspecting.ALL - FOUND["labels 1"])
    (_, whole, first), (_, alarms, second) = asked.claims(lines).rows
    assert (whole, first) == ("75 % in the worst world; 3 of 4 findings in all", "does not hold")
    assert alarms.startswith(f"1 of {empty}, the interval ends at ")
    assert second == "does not hold"


def test_a_tournament_is_compared_with_what_the_whole_study_shows(here, monkeypatch):
    """Two worlds of two methods; the study is a file of this test."""
    slow = {**A, "name": "slow", "local": {"lr": 1e-6, "batch_size": 4}}
    kept = {"data": {"split": {"val": 0.3}}, "sweep": {"title": ["one", "two"]}}
    made = study(A, MOMENTUM, slow, rounds=8, eval_every=2, seeds=[0, 1], **kept)
    (here / "toy.toml").write_text(to_toml(made) + "[scale.nano]\n[scale.cpu]\n")
    monkeypatch.setattr(recommending, "recipe", lambda name: here / f"{name}.toml")
    monkeypatch.setattr(goal, "_path", lambda name: here / name)
    monkeypatch.setattr("fedtide.api.recipe", lambda name: here / f"{name}.toml")
    text = 'title = "t"\ndescription = "d"\nseeds = [7, 9]\n[goal]\nkind = "recommend"\nstudy = "toy"\nshare = 50.0\n'
    (here / "goal.toml").write_text(text + "[scale.nano]\n[scale.cpu]\n")
    assert done("run", "goal.toml", "--out", "r", "--workers", 1, "--quiet") == 0
    lines = [json.loads(line) for line in (here / "r" / goal.FOUND).read_text().splitlines()]
    assert [(line["world"], line["seed"]) for line in lines] == [("one", 7), ("one", 9), ("two", 7), ("two", 9)]
    assert not (here / "r" / "tournament").exists()
    for line in lines:
        assert line["named"] in ("A", "momentum")
        assert line["best"] in ("A", "momentum")
        assert 0 <= line["behind"] < 0.2
    assert len({line["cost"] for line in lines}) == 2
    assert cost_of(made) > 0
    verdicts = [row[-1] for row in json.loads((here / "r" / "summary.json").read_text())["claims"]["rows"]]
    assert set(verdicts) <= {"holds", "does not hold"}


def test_claims_about_tournaments_count_those_that_are_near_and_what_they_took():
    line = {"world": "w", "best": "A", "candidates": 9, "entered": 4, "named": "A", "behind": 0.0, "share": 0.09}
    lines = [line] * 8 + [{**line, "named": "B", "behind": 0.011, "share": 0.104}] * 2
    asked = Recommend(study="never-worse")
    near, spent = asked.claims(lines).rows
    assert near[1:] == ["8 of 10", "does not hold"]
    assert spent[1:] == ["9 % in the mean, at most 10 %", "holds"]
    assert (
        asked.claims(lines[1:8])[1]
        if False
        else asked.claims(lines[:9] + lines[:1]).rows[0][1:] == ["9 of 10", "holds"]
    )


def test_worlds_that_are_not_asked_for_any_more_do_not_count(here):
    assert done(*PLANTED, "--out", "r", "--quiet") == 0
    config = here / "r" / goal.GOAL
    config.write_text(config.read_text().replace('"labels 0.3",', ""))
    assert done("resume", "r", "--quiet") == 0
    assert len(json.loads((here / "r" / "summary.json").read_text())["results"]["rows"]) == 2


def test_what_cannot_be_tried_is_one_line(here, capsys):
    for more, said in (
        (("--set", "goal.rows=0"), "goal.rows: found 0, allowed: 1 or more"),
        (("--set", 'goal.worlds=["labls 1"]'), "did you mean 'labels 1'?"),
        (("--set", "goal.kind=x"), "goal"),
        (("--fleet", "ray"), "--fleet: recipe:inspect-planted is a goal"),
        (("--seeds", "x"), "--seeds"),
    ):
        assert said in refused(capsys, here, *PLANTED, "--out", "r", *more)
    for more, said in (
        (("--seeds", "1"), "seeds: found 1, allowed: more than 1, the last one that never-worse plays"),
        (("--set", "goal.study=demo"), "goal.study: demo: data.split.val: found 0"),
        (("--set", "goal.study=recommend"), "goal: found 'a table'"),
        (("--set", "goal.study=none"), "none"),
    ):
        assert said in refused(capsys, here, "run", "recipe:recommend", "--scale", "nano", "--out", "r", *more)
    assert "fedtide run plays goals" in refused(capsys, here, "recommend", "recipe:inspect-planted")
    (here / "g.toml").write_text('goal = 3\ntitle = "t"\n')
    assert "g.toml: " in refused(capsys, here, "run", "g.toml")
    assert done(*PLANTED, "--out", "r") == 0
    assert "goes on as it began" in refused(capsys, here, "resume", "r", "--seeds", "0,1")
    assert "already exists" in refused(capsys, here, *PLANTED, "--out", "r")
