"""Nodes with rows in files, all the way: asked, recorded, and played again in simulation with the same bits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedtide.cli.commands import main
from fedtide.config import read
from fedtide.core.atomic import sha256
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.evaluate.judge import Judge, views
from fedtide.remote.fleet import RemoteFleet
from fedtide.remote.node import Node
from fedtide.remote.offline import NearCarrier
from fedtide.remote.schedule import Present
from fedtide.report.page import write_report
from fedtide.runs import folder
from fedtide.runs.runner import Run
from fedtide.site.accounts import forget
from fedtide.site.client_rows import FileRows, algorithm_without_rows
from fedtide.site.deploying import make_site
from fedtide.site.parity import replay
from fedtide.site.seat import Seat
from fedtide.site.site import Roster, Site, invite
from fedtide.wire.ledger import LEDGER
from helpers.carriers import Lossy
from helpers.hospitals import NAMES, hospitals
from helpers.near_sites import fleet_at, host_at, nodes_of
from helpers.shell import done, refused

pytest.importorskip("cryptography")


def made(place: Path, method: str, **changes: Any) -> Site:
    """A site, and a file of rows for each of its nodes."""
    study = read(hospitals(place, rows=90, **changes))
    return make_site(study, method, Roster.of(",".join(NAMES)), place / "site", None, "study.toml")


def played(place: Path, method: str, carrier=NearCarrier) -> Site:
    """A site whose nodes are in this process, with files of rows, after its last round."""
    site = made(place, method)
    folder.create(site.experiment, site.run)
    assert play(site, place, carrier) == site.experiment.rounds
    return site


def play(site: Site, place: Path, carrier=NearCarrier, stop=lambda: False) -> int:
    """Play what is left of a site; the number of rounds that are over."""
    nodes, names = {}, [node.name for node in site.roster.node]
    for name in names:
        ticket = site.root / "tickets" / f"{name}.ticket"
        seat = Seat.read(ticket, [place / f"{name}.csv"], home=place / name)
        seat.settle()
        nodes[name] = Node(seat.algorithm, seat.ticket.seed, seat.rows, seat.home, run=seat.ticket.digest)
    algorithm = algorithm_without_rows(site.experiment, site.about.rows)
    roster = {node.name: node.clients for node in site.roster.node}
    fleet = RemoteFleet(
        carrier(nodes), roster, Present(site.seed), run=site.digest, reveals=algorithm.traits.reveals, patience=5.0
    )
    run = Run(site.experiment, site.method, site.seed, site.record)
    judge = Judge(algorithm, fleet, views(rows_of(site, place).population()), site.method.decide_per)
    return [step.round for step in run.play(stop, lambda _: judge)][-1]


def served(place: Path, method: str, **changes: Any) -> Site:
    """A site whose sums pass over a wire, after its last round."""
    site = made(place, method, **changes)
    folder.create(site.experiment, site.run)
    host = host_at(site)
    fleet = fleet_at(site, nodes_of(place, site, lambda name: ""), host)
    judge = Judge(host.algorithm, fleet, views(rows_of(site, place).population()), site.method.decide_per)
    list(Run(site.experiment, site.method, site.seed, site.record).play(judge_of=lambda _: judge))
    forget(site)
    return site


def rows_of(site: Site, place: Path) -> FileRows:
    files = [place / f"{node.name}.csv" for node in site.roster.node]
    return FileRows.read(files, range(len(files)), site.about.rows, site.experiment.data.split)


@pytest.mark.parametrize("method", ["FedAvg", "SCAFFOLD"])
def test_nodes_with_files_are_played_again_with_the_same_bits(tmp_path, method):
    site = played(tmp_path, method)
    found = replay(site.run, [tmp_path / f"{name}.csv" for name in NAMES])
    assert (found.rounds, found.equal, found.differs) == (site.experiment.rounds, True, None)
    other = replay(site.run, [tmp_path / f"{name}.csv" for name in NAMES[::-1]], tmp_path / "other")
    assert not other.equal


def test_masked_sums_are_played_again_with_the_same_bits(tmp_path):
    site = served(tmp_path, "SCAFFOLD", wire={"secure": True})
    found = replay(site.run, [tmp_path / f"{name}.csv" for name in NAMES])
    assert (found.rounds, found.equal, found.differs) == (site.experiment.rounds, True, None)


@pytest.fixture(scope="module")
def private(tmp_path_factory) -> tuple[Path, Site]:
    place, clip = tmp_path_factory.mktemp("private"), {"delta": 1.0, "loss": 5.0}
    privacy = {"multiplier": 0.001, "clip": clip, "adapt": {"delta": {}}, "noise": "banded", "distance": 2}
    return place, served(place, "FedAvg", wire={"secure": True, "privacy": privacy})


def test_the_models_of_a_private_run_are_made_of_what_was_released(private, tmp_path, capsys):
    """Whatever rows are at hand, none with them."""
    _, site = private
    found = replay(site.run, out=tmp_path / "replay")
    assert (found.rounds, found.equal, found.differs, found.noise) == (4, True, None, ())
    assert done("replay", site.run, "--out", tmp_path / "again") == 0
    assert "after 4 rounds the weights are those of the deployment, bit for bit" in capsys.readouterr().out


def test_what_was_released_has_the_noise_that_the_ledger_says(private, tmp_path, capsys):
    place, site = private
    rows = [place / f"{name}.csv" for name in NAMES]
    found = replay(site.run, rows, tmp_path / "replay")
    assert (found.equal, found.differs) == (True, None)
    assert [each.round for each in found.noise] == [0, 2]
    assert all(each.likely and each.numbers == 40 for each in found.noise)
    other = ["--data", place / "pilot.csv"] * 3
    assert done("replay", site.run, *other, "--out", tmp_path / "other") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the sum released in round 0 is not what these rows' clients answer with the ledger's noise" in said


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"round": 1}, "'train' of round 1 has client 0, who may not be in it; allowed: what the budget has"),
        ({"z": 0.0005}, "round 2: z: found 0.0005, allowed: 0.001, by the study"),
    ],
    ids=["too early", "less noise"],
)
def test_a_ledger_beyond_the_budget_is_not_played_again(private, tmp_path, changed, words):
    _, site = private
    shutil.copytree(site.root, tmp_path / "site")
    ledger = tmp_path / "site" / site.record.relative_to(site.root) / LEDGER
    first, last = ledger.read_text(encoding="utf-8").splitlines()
    ledger.write_text(f"{first}\n{json.dumps(json.loads(last) | changed)}\n", encoding="utf-8")
    with pytest.raises(FedtideError, match=re.escape(words)):
        replay(tmp_path / "site" / "run")


def test_a_release_that_is_gone_is_said(private, tmp_path):
    _, site = private
    shutil.copytree(site.root, tmp_path / "site")
    (sums,) = (tmp_path / "site").glob("run/*/*/released/2.0.all")
    sums.write_bytes(bytes(sums.stat().st_size))
    with pytest.raises(FedtideError, match=r"released: the sum released in round 2 is gone or damaged; without it"):
        replay(tmp_path / "site" / "run")


def test_what_was_lost_is_lost_again(tmp_path, monkeypatch, capsys):
    site = played(tmp_path, "SCAFFOLD", lambda nodes: Lossy(nodes, seed=1, lost=0.3, held=0.0))
    files = [str(tmp_path / f"{name}.csv") for name in NAMES]
    with pytest.raises(SystemExit) as left:
        main(["replay", str(site.run), *(word for file in files for word in ("--data", file))])
    assert left.value.code == 0
    assert "bit for bit" in capsys.readouterr().out
    state = f"checkpoints/{site.experiment.rounds:08d}/state.safetensors"
    place = site.record.relative_to(site.run)
    assert sha256(site.run / place / state) == sha256(site.root / "replay" / place / state)


def test_a_deployment_is_not_gone_on_with_in_simulation(tmp_path, capsys):
    site = made(tmp_path, "FedAvg")
    folder.create(site.experiment, site.run)
    play(site, tmp_path, stop=lambda: True)
    assert "its clients are real; go on with: fedtide serve SITE" in refused(capsys, site.run, "resume", site.run)


def test_a_simulation_is_no_deployment(tmp_path):
    study = read(hospitals(tmp_path), sets=["rounds=1"])
    folder.create(study, tmp_path / "run")
    with pytest.raises(FedtideError, match="its clients were simulated"):
        replay(tmp_path / "run")


def test_files_are_a_population_with_the_rows_of_the_nodes(tmp_path):
    files = rows_of(made(tmp_path, "FedAvg"), tmp_path)
    people = files.population()
    for client in range(3):
        for part in ("train", "val", "test"):
            here, there = (rows.shard(client, Moment(0, 4), part) for rows in (files, people))
            assert here.x.tolist() == there.x.tolist()
            assert here.y.tolist() == there.y.tolist()


def test_a_record_that_was_changed_is_not_played_again(tmp_path):
    site = played(tmp_path, "FedAvg")
    path = site.record / "asks.jsonl"
    path.write_text(path.read_text().replace("answered", "late", 1))
    with pytest.raises(FedtideError, match=r"asks\.jsonl: damaged"):
        replay(site.run, [tmp_path / f"{name}.csv" for name in NAMES])
    assert not (site.root / "replay").exists()


def test_an_evaluation_that_nobody_answered_is_left_out_of_the_report(tmp_path):
    site = played(tmp_path, "FedAvg", lambda nodes: Lossy(nodes, seed=0, lost=1.0, held=0.0))
    assert "What became of each node" in write_report([site.run]).read_text()


def test_a_node_that_is_invited_later_is_played_again_too(tmp_path):
    site = made(tmp_path, "SCAFFOLD")
    folder.create(site.experiment, site.run)
    assert play(site, tmp_path, stop=lambda: True) == 1
    invite(site.root, "paris")
    (tmp_path / "paris.csv").write_bytes((tmp_path / "pilot.csv").read_bytes())
    assert play(Site.read(site.root), tmp_path) == site.experiment.rounds
    found = replay(site.run, [tmp_path / f"{name}.csv" for name in (*NAMES, "paris")])
    assert (found.equal, found.differs) == (True, None)
