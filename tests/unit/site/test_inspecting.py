"""An inspection of a site: its nodes answer, and a command says what their sums mean."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("cryptography")

from fedtide.inspection.answers import QUESTIONS
from fedtide.inspection.by_sums import STAGES
from fedtide.site.parity import replay
from helpers.hospitals import hospitals
from helpers.near_sites import site_of
from helpers.shell import done, refused
from helpers.shops import NAMES, made, play, shops


def test_a_site_is_inspected_while_it_is_served_and_after_and_its_simulation_has_the_same_bits(tmp_path, capsys):
    site = made(shops(tmp_path), tmp_path / "site")
    assert "0 of 9 questions were asked; answers follow the last" in refused(capsys, tmp_path, "inspect", site.root)
    play(site, 4)
    assert "5 of 9 questions were asked" in refused(capsys, tmp_path, "inspect", site.root)
    play(site, len(STAGES))  # server and nodes of another process go on
    assert done("inspect", site.root, "--json") == 0
    answers = {one["question"]: one["level"] for one in json.loads(capsys.readouterr().out)["answers"]}
    assert set(answers) == set(QUESTIONS)
    assert answers["labels"] == answers["mix"] == answers["drift"] == "no"
    line = refused(capsys, tmp_path, "inspect", site.root, "--out", "out")
    assert line == "--out: found 'out', but sums make no page; allowed: none with a site"
    assert "--label: found 'y'" in refused(capsys, tmp_path, "inspect", site.root, "--label", "y")
    again = replay(site.run, [tmp_path / f"{name}.csv" for name in NAMES])
    assert (again.rounds, again.equal) == (len(STAGES), True)


def test_a_site_that_trains_has_no_answers(tmp_path, capsys):
    site = site_of(tmp_path)
    line = refused(capsys, tmp_path, "inspect", site.root)
    assert "method 'FedAvg'.algorithm: found 'fedavg', allowed: 'inspection', in a site made for it" in line


def test_noise_is_refused_because_sums_of_an_inspection_have_no_bounds(tmp_path, capsys):
    privacy = {"epsilon": 4.0, "delta": 1e-3, "clip": {"sums": 1.0}}
    study = hospitals(tmp_path, method=[{"name": "questions", "algorithm": "inspection"}], wire={"privacy": privacy})
    assert "its sums have no bounds" in refused(capsys, tmp_path, "run", study, "--out", tmp_path / "run")
