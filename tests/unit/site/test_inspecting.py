"""An inspection of a site: its nodes answer, and a command says what their sums mean."""

from __future__ import annotations

import csv
import json
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import tomli_w

pytest.importorskip("cryptography")

from fedtide.config import read
from fedtide.evaluate.judge import Judge
from fedtide.fleets.totals import Vectors
from fedtide.inspection.answers import QUESTIONS
from fedtide.inspection.by_sums import STAGES
from fedtide.inspection.table import Table
from fedtide.remote.fleet import RemoteFleet
from fedtide.remote.node import Node
from fedtide.remote.offline import NearCarrier
from fedtide.remote.schedule import Present
from fedtide.runs import folder
from fedtide.runs.runner import Run
from fedtide.site.client_rows import algorithm_without_rows
from fedtide.site.deploying import make_site
from fedtide.site.parity import replay
from fedtide.site.seat import Seat
from fedtide.site.site import Roster, Site
from fedtide.wire.pipeline import FLOATING
from helpers.hospitals import hospitals
from helpers.mortal import changes_in
from helpers.near_sites import site_of
from helpers.planted import planted
from helpers.shell import done, refused

CLIENTS = 6
NAMES = [f"shop-{number}" for number in range(CLIENTS)]


def write_rows(path: Path, table: Table, rows: np.ndarray) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["when", "a", "b", "c", "d", "label", "shop"])
        for row in np.flatnonzero(rows):
            when = datetime(2026, 3, 2) + timedelta(seconds=round(float(table.time[row])))
            values = [round(float(value), 4) for value in table.features[row]]
            lines.writerow([when.isoformat(), *values, table.label[row], table.client[row]])


def made(place: Path) -> Site:
    """A site of six shops that asks the questions, and a file of rows for each."""
    table = planted("meaning", 0)
    owner = np.array([int(name.split()[1]) for name in table.client])
    write_rows(place / "pilot.csv", table, owner < CLIENTS)
    for number, name in enumerate(NAMES):
        write_rows(place / f"{name}.csv", table, owner == number)
    source = {"kind": "csv", "path": str(place / "pilot.csv"), "label": "label", "client": "shop", "time": "when"}
    study = {
        "rounds": len(STAGES), "eval_every": len(STAGES), "data": {"source": source, "split": {"test": 0.0}},
        "model": {"kind": "linear"}, "method": [{"name": "questions", "algorithm": "inspection"}],
    }  # fmt: skip
    (place / "study.toml").write_text(tomli_w.dumps(study), encoding="utf-8")
    site = make_site(read(place / "study.toml"), None, Roster.of(",".join(NAMES)), place / "site", None, "study.toml")
    folder.create(site.experiment, site.run)
    return site


def play(site: Site, rounds: int) -> None:
    """Play until so many rounds are over, with nodes in this process that begin anew."""
    place, nodes = site.root.parent, {}
    for name in NAMES:
        seat = Seat.read(site.root / "tickets" / f"{name}.ticket", [place / f"{name}.csv"], home=place / name)
        seat.settle()
        nodes[name] = Node(seat.algorithm, seat.ticket.seed, seat.rows, seat.home, run=seat.ticket.digest)
        few = seat.rows.people.few()
    algorithm = algorithm_without_rows(site.experiment, site.about.rows)
    fleet = RemoteFleet(
        NearCarrier(nodes), {node.name: node.clients for node in site.roster.node}, Present(site.seed),
        run=site.digest, traits=algorithm.traits, patience=5.0, vectors=Vectors.of(FLOATING, algorithm, few),
    )  # fmt: skip
    run, over = Run(site.experiment, site.method, site.seed, site.record), [0]
    for step in run.play(lambda: over[-1] >= rounds, lambda _: Judge(algorithm, fleet, (), site.method.decide_per)):
        over.append(step.round)


def test_a_site_is_inspected_while_it_is_served_and_after_and_its_simulation_has_the_same_bits(tmp_path, capsys):
    site = made(tmp_path)
    assert "0 of 9 questions were asked; answers follow the last" in refused(capsys, tmp_path, "inspect", site.root)
    play(site, 4)
    assert "5 of 9 questions were asked" in refused(capsys, tmp_path, "inspect", site.root)
    play(site, len(STAGES))  # server and nodes of another process go on
    assert done("inspect", site.root, "--json") == 0
    answers = {one["question"]: one["level"] for one in json.loads(capsys.readouterr().out)["answers"]}
    assert set(answers) == set(QUESTIONS)
    assert answers["labels"] == answers["mix"] == answers["drift"] == "no"
    assert changes_in("inspect", site.root) == 0, "it changes no file, so a kill leaves all as it was"
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
