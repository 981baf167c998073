"""Nodes with rows in files, all the way: asked, recorded, and played again in simulation with the same bits."""

import html
import io
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

import fedtide as ft
from fedtide.cli.commands import main
from fedtide.config import read
from fedtide.core.errors import FedtideError
from fedtide.core.record import read_lines
from fedtide.evaluate.judge import Judge, views
from fedtide.fleets.totals import Vectors
from fedtide.remote.asks import nodes_of as told_of
from fedtide.remote.fleet import RemoteFleet
from fedtide.remote.node import Node
from fedtide.remote.offline import NearCarrier, near_fleet
from fedtide.remote.schedule import Present
from fedtide.report import plot
from fedtide.report.page import write_report
from fedtide.runs import folder
from fedtide.runs.runner import Run
from fedtide.site.accounts import forget
from fedtide.site.client_rows import FileRows, algorithm_without_rows
from fedtide.site.machine import Log
from fedtide.site.parity import Process, differences, replay, watch_rounds
from fedtide.site.seat import Seat
from fedtide.site.site import Site, invite
from fedtide.site.tickets import Ticket
from fedtide.wire.ledger import LEDGER
from fedtide.wire.pipeline import FLOATING
from helpers.carriers import Lossy
from helpers.hospitals import NAMES, hospitals
from helpers.near_sites import fleet_at, host_at, nodes_of, site_of
from helpers.shell import contents, done, refused


def made(place: Path, method: str, **changes: Any) -> Site:
    """A site with its run folder, and a file of rows for each of its nodes."""
    site = site_of(place, played=method, rows=90, **changes)
    folder.create(site.experiment, site.run)
    return site


def rows_of(site: Site) -> FileRows:
    files = [site.root.parent / f"{node.name}.csv" for node in site.roster.node]
    return FileRows.read(files, range(len(files)), site.about.rows, site.experiment.data.split)


def files(site: Site, names: tuple[str, ...] = NAMES) -> list[Path]:
    return [site.root.parent / f"{name}.csv" for name in names]


def play(site: Site, carrier=NearCarrier, stop=lambda: False) -> int:
    """Play what is left of a site with nodes in this process; the number of rounds that are over."""
    place, nodes = site.root.parent, {}
    for name in (node.name for node in site.roster.node):
        seat = Seat.read(
            Ticket.read(site.root / "tickets" / f"{name}.ticket"), [place / f"{name}.csv"], home=place / name
        )
        seat.settle()
        nodes[name] = Node(seat.algorithm, seat.ticket.seed, seat.rows, seat.home, run=seat.ticket.digest)
    algorithm = algorithm_without_rows(site.experiment, site.about.rows)
    roster = {node.name: node.clients for node in site.roster.node}
    vectors = Vectors.of(FLOATING, algorithm, rows_of(site).people.few())
    fleet = RemoteFleet(
        carrier(nodes), roster, Present(site.seed), run=site.digest, traits=algorithm.traits, patience=5.0,
        vectors=vectors,
    )  # fmt: skip
    run = Run(site.experiment, site.method, site.seed, site.record)
    judge = Judge(algorithm, fleet, views(rows_of(site).people), site.method.decide_per)
    return [step.round for step in run.play(stop, lambda _: judge)][-1]


def served(
    place: Path,
    method: str,
    rules: Callable[[str], str] = lambda name: "",
    waits: Callable[[int], bool] = lambda present: False,
    **changes: Any,
) -> Site:
    """A site whose sums pass over a wire, after its last round."""
    site = made(place, method, **changes)
    host = host_at(site)
    fleet = fleet_at(site, nodes_of(place, site, rules), host)
    fleet.waits = waits
    judge = Judge(host.algorithm, fleet, views(rows_of(site).people), site.method.decide_per)
    list(Run(site.experiment, site.method, site.seed, site.record).play(judge_of=lambda _: judge))
    forget(site)
    return site


@pytest.mark.parametrize("method", ["FedAvg", "SCAFFOLD"])
def test_nodes_with_files_are_played_again_with_the_same_bits(tmp_path, method):
    site = made(tmp_path, method)
    assert play(site) == site.experiment.rounds
    again = replay(site.run, files(site))
    assert (again.rounds, again.equal, again.differs) == (site.experiment.rounds, True, None)
    assert not replay(site.run, files(site)[::-1], tmp_path / "other").equal
    with pytest.raises(FedtideError, match="'1 files', allowed: 3, one for each client of the roster"):
        replay(site.run, files(site)[:1], tmp_path / "few")
    path = site.record / "asks.jsonl"
    path.write_text(path.read_text().replace("answered", "late", 1))
    with pytest.raises(FedtideError, match=r"asks\.jsonl: damaged"):
        replay(site.run, files(site), tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


def test_all_that_differs_in_a_round_is_named(tmp_path):
    site = made(tmp_path, "FedAvg")
    play(site)
    other = shutil.copytree(site.record, tmp_path / "other")
    assert list(differences(site.record, other)) == []
    lines = read_lines(other)
    lines[1] |= {"asked": 99, "answered": 98, "seconds": int(lines[1]["seconds"])}
    (other / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines[:-1]))
    found = list(differences(site.record, other))
    assert [line.split(": ")[:2] for line in found[1:]] == [["round 1", "asked"], ["round 1", "answered"]]
    assert found[0] == f"rounds: {len(lines)}, and {len(lines) - 1} in simulation"


def test_a_real_run_reports_refusals_by_their_reason_and_neither_waiting_nor_a_simulated_clock(tmp_path, monkeypatch):
    now, waited = time.perf_counter, [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now() + waited[0])

    def waits(present: int) -> bool:
        waited[0] += 1e6
        return waited[0] % 2e6 > 0

    site = served(tmp_path, "FedAvg", lambda name: 'questions = ["score"]' * (name == "oslo"), waits)
    page = write_report([site.run]).read_text()
    why = "its owner does not allow the question 'train'; allowed: score (4)"
    assert f"FedAvg: 4 of 12 answers of clients were refused, as the table of nodes says: {why}" in html.unescape(page)
    assert "not finite" not in page
    assert "imulated" not in page
    assert sum(line["seconds"] for line in read_lines(site.record, "timings.jsonl")) < 1e6
    for node in told_of(read_lines(site.record, "asks.jsonl")):  # what the server counts, the node counts too
        asked = [json.loads(line) for line in (tmp_path / node.name / "asked.jsonl").read_text().splitlines()]
        assert node.down == sum(line["received"] for line in asked)
        assert node.up == sum(line["sent"] for line in asked)


def test_lost_answers_are_lost_again(tmp_path, capsys):
    site = made(tmp_path, "SCAFFOLD")
    play(site, lambda nodes: Lossy(nodes, seed=1, lost=0.3, held=0.0))
    with pytest.raises(SystemExit) as left:
        main(["replay", str(site.run), *(word for file in files(site) for word in ("--data", str(file)))])
    assert left.value.code == 0
    assert "bit for bit" in capsys.readouterr().out


def test_a_node_that_is_invited_later_is_played_again_too(tmp_path):
    site = made(tmp_path, "SCAFFOLD")
    assert play(site, stop=lambda: True) == 1
    invite(site.root, "paris")
    (tmp_path / "paris.csv").write_bytes((tmp_path / "pilot.csv").read_bytes())
    assert play(Site.read(site.root)) == site.experiment.rounds
    again = replay(site.run, files(site, (*NAMES, "paris")))
    assert (again.equal, again.differs) == (True, None)


def test_real_and_simulated_clients_are_not_mixed_up(tmp_path, capsys):
    site = made(tmp_path, "FedAvg")
    play(site, stop=lambda: True)
    assert "its clients are real; go on with: fedtide serve SITE" in refused(capsys, site.run, "resume", site.run)
    folder.create(read(hospitals(tmp_path), sets=["rounds=1"]), tmp_path / "run")
    with pytest.raises(FedtideError, match="its clients were simulated"):
        replay(tmp_path / "run")


# -- masked and private sums -------------------------------------------------------------------------------------------


def test_masked_sums_are_played_again_with_the_same_bits(tmp_path):
    site = served(tmp_path, "SCAFFOLD", wire={"secure": True})
    again = replay(site.run, files(site))
    assert (again.rounds, again.equal, again.differs) == (site.experiment.rounds, True, None)


@pytest.fixture(scope="module")
def private(tmp_path_factory) -> Site:
    clip = {"delta": 1.0, "loss": 5.0}
    privacy = {"multiplier": 0.001, "clip": clip, "adapt": {"delta": {}}, "noise": "banded", "distance": 2}
    return served(tmp_path_factory.mktemp("private"), "FedAvg", wire={"secure": True, "privacy": privacy})


def stopped(path: Path) -> str:
    raise KeyboardInterrupt


def test_a_replay_that_is_interrupted_leaves_nothing_behind(tmp_path, monkeypatch):
    site = made(tmp_path, "FedAvg")
    with pytest.raises(FedtideError, match="no round is saved yet; allowed: a run with a checkpoint"):
        replay(site.run, files(site))
    assert play(site) == site.experiment.rounds
    before = contents(site.root)
    with monkeypatch.context() as patch:
        patch.setattr("fedtide.site.parity.sha256", stopped)
        with pytest.raises(KeyboardInterrupt):
            replay(site.run, files(site))
    assert contents(site.root) == before
    assert replay(site.run, files(site)).equal
    assert "serve" in folder.go_on(site.run)
    assert "resume" in folder.go_on(site.root / "replay")


@pytest.fixture
def copy(private, tmp_path) -> tuple[Path, Path]:
    """A run that may be changed, and its record."""
    shutil.copytree(private.root, tmp_path / "site")
    return tmp_path / "site" / "run", tmp_path / "site" / private.record.relative_to(private.root)


def test_the_models_of_a_private_run_are_made_of_released_sums(private, tmp_path, capsys):
    """Whatever rows are at hand, none with them."""
    again = replay(private.run, out=tmp_path / "replay")
    assert (again.rounds, again.equal, again.differs, again.noise) == (4, True, None, ())
    assert done("replay", private.run, "--out", tmp_path / "again") == 0
    assert "after 4 rounds the weights are those of the deployment, bit for bit" in capsys.readouterr().out


def test_a_private_record_of_real_clients_has_no_numbers_of_single_ones(private):
    lines = read_lines(private.record)
    assert len((private.record / "clients.csv").read_text().splitlines()) == 1
    assert not any(entry for line in lines for entry in line.get("scores", {}).values())
    assert not any("client_loss" in line or line["participants"] for line in lines)


def test_the_report_of_a_private_study_of_real_clients_says_why_it_has_no_scores(copy):
    run, _ = copy
    page = write_report([run]).read_text()
    assert "no scores: the study is private" in page
    assert "numbers of single clients are left out" in page
    assert "known from its seed" not in page
    assert "Accuracy over rounds" not in page
    assert "Privacy budget" in page
    with pytest.raises(FedtideError, match="no such picture; needed: scores"):
        plot.accuracy(run)


def test_released_sums_have_the_noise_that_the_ledger_says(private, tmp_path, capsys):
    again = replay(private.run, files(private), tmp_path / "replay")
    assert (again.equal, again.differs) == (True, None)
    assert [noise.round for noise in again.noise] == [0, 2]
    assert all(noise.likely and noise.numbers == 40 for noise in again.noise)
    other = ["--data", private.root.parent / "pilot.csv"] * 3
    assert done("replay", private.run, *other, "--out", tmp_path / "other") == 1
    line = "the sum released in round 0 is not that of the clients of these rows"
    assert line in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"round": 1}, "'train' of round 1 has client 0, who may not be in it; allowed: what the budget has"),
        ({"z": 0.0005}, "round 2: z: found 0.0005, allowed: 0.001, by the study"),
    ],
    ids=["too early", "less noise"],
)
def test_a_ledger_beyond_the_budget_is_not_played_again(copy, changed, words, monkeypatch):
    """Whoever writes it may write digests, too."""
    run, record = copy
    monkeypatch.setattr("fedtide.site.parity.verify_runs", lambda runs: [])
    first, last = (record / LEDGER).read_text(encoding="utf-8").splitlines()
    (record / LEDGER).write_text(f"{first}\n{json.dumps(json.loads(last) | changed)}\n", encoding="utf-8")
    with pytest.raises(FedtideError, match=re.escape(words)):
        replay(run)


def test_a_release_that_is_gone_is_said(copy):
    run, record = copy
    (sums,) = record.glob("released/2.0.all")
    sums.write_bytes(bytes(sums.stat().st_size))
    with pytest.raises(FedtideError, match=r"released/2.0.all: damaged"):
        replay(run)


@pytest.mark.parametrize("name", ["ledger.jsonl", "released/0.0.all", "released/2.0.all"])
@pytest.mark.parametrize("change", ["gone", "changed"])
def test_a_ledger_or_a_release_that_is_not_whole_is_found_and_not_gone_on_from(copy, private, name, change):
    run, record = copy
    assert [verdict.wrong for verdict in ft.verify(run)] == [None]
    file = record / name
    content = file.read_bytes()
    file.unlink()
    if change == "changed":
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    (wrong,) = (verdict.wrong for verdict in ft.verify(run))
    assert wrong.startswith(f"{file}: {'missing' if change == 'gone' else 'damaged'}")
    with pytest.raises(FedtideError, match=re.escape(str(file))):
        list(Run(private.experiment, private.method, private.seed, record).play(judge_of=lambda _: judge_at(copy)))


def judge_at(copy: tuple[Path, Path]) -> Judge:
    site = Site.read(copy[0].parent)
    host = host_at(site)
    fleet = fleet_at(site, {}, host) if (copy[1] / LEDGER).is_file() else near_fleet(host, 1, copy[0] / "nodes")
    return Judge(host.algorithm, fleet, [], site.method.decide_per)


def test_a_node_that_ends_in_failure_ends_a_rehearsal_at_once(tmp_path):
    """The server would wait for it until the rehearsal is given up."""
    log, site = Log(file=io.StringIO()), made(tmp_path, "FedAvg")

    def process(name: str, code: str) -> Process:
        return Process(name, lambda: [sys.executable, "-c", code], log)

    with (
        process("server", "import time; time.sleep(60)") as server,
        process("lyon", "raise SystemExit(2)") as lyon,
        pytest.raises(FedtideError, match="node lyon ended with status 2; see the lines above"),
    ):
        watch_rounds(site, server, [], {"lyon": lyon}, log)
