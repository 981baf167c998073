"""Studies with real processes in which disks are full, nodes are slow or new, and the server of private sums dies."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from fedtide.core import checkpoint
from fedtide.remote.node_memory import JudgedModels
from fedtide.site.parity import Replayed, replay
from fedtide.wire.ledger import LEDGER, read
from helpers import slow_worker
from helpers.federation import until
from helpers.hospitals import NAMES
from helpers.serving import WAIT, Command, Serving

pytestmark = [pytest.mark.thorough, pytest.mark.deploy, pytest.mark.slow, pytest.mark.xdist_group("deploy")]


def method(name: str, **options: Any) -> list[dict[str, Any]]:
    plain = {"name": name, "algorithm": name.lower(), "cohort": "everyone", "local": {"lr": 0.1, "batch_size": 20}}
    return [plain | options]


@contextmanager
def served(
    folder: Path, nodes: str, name: str, deploy: dict[str, Any], **changes: Any
) -> Iterator[tuple[Any, Command]]:
    """A site that is served, and its server; all ends with the block."""
    serving = Serving(folder, nodes, name, deploy, **changes)
    try:
        server = serving.serve()
        server.wait_for("nodes are let in")
        yield serving, server
    finally:
        serving.close()


def replay_files(serving: Serving, names: tuple[str, ...], out: Path | None = None) -> Replayed:
    """Play a run again with the rows of its nodes; the weights have to be the same."""
    again = replay(serving.site.run, [serving.folder / f"{name}.csv" for name in names], out)
    assert (again.equal, again.differs) == (True, None)
    return again


# -- full disks --------------------------------------------------------------------------------------------------------


@contextmanager
def disk(folder: Path, megabytes: int) -> Iterator[None]:
    """Mount a small disk."""
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "none", str(folder)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room; return the file that takes it."""
    path = folder / "filler"
    with path.open("wb") as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    os.write(file.fileno(), bytes(size))
            except OSError:
                continue
    return path


@pytest.mark.skipif(os.geteuid() != 0, reason="disks can be mounted by root alone")
def test_a_full_disk_is_said_nothing_is_lost_and_it_goes_on_when_there_is_room(tmp_path):
    rounds, folders = 16, {"site": tmp_path / "server" / "site", "lyon": tmp_path / "node"}
    changes = {"rounds": rounds, "eval_every": rounds, "method": method("SCAFFOLD"), "folders": folders}
    with disk(tmp_path / "node", 50), disk(tmp_path / "server", 50):
        with served(tmp_path, "berlin,lyon", "SCAFFOLD", {"deadline": "3m", "every": "5s"}, **changes) as (
            site,
            server,
        ):
            site.join("berlin")
            site.join("lyon")
            until(lambda: ["answered"] in site.words(1).values(), WAIT)

            filler = fill(tmp_path / "node")
            server.wait_for("lyon, client 1, 'train': refused: the node cannot keep its memory; see whether its disk")
            full = len(site.asks())
            filler.unlink()
            until(lambda: ["answered"] in [site.words(1)[n] for n in range(full, len(site.asks()))], WAIT)

            filler = fill(tmp_path / "server")
            assert server.process.wait(WAIT) == 2
            assert "No space left on device" in server.lines[-1]
            assert "make room" in server.lines[-1]
            filler.unlink()
            site.serve().wait_for("report: ")
        assert len(site.asks()) == rounds
        replay_files(site, ("berlin", "lyon"))


# -- slow and new nodes ------------------------------------------------------------------------------------------------


def test_a_slow_client_is_asked_after_in_later_rounds(tmp_path):
    """It trains on while rounds of FedBuff go by, and its answer counts when it comes."""
    changes = {"rounds": 8, "eval_every": 4, "method": method("FedBuff", buffer=2, cohort=3)}
    with served(tmp_path, ",".join(NAMES), "FedBuff", {"deadline": "10m", "fewest": 3}, **changes) as (site, server):
        for name in NAMES:
            site.join(name, worker=Path(slow_worker.__file__))
        server.wait_for("report: ")
    words = site.words(2)
    assert ["at work"] in words.values()
    assert ["answered"] in words.values()
    assert all(len(line["asks"][0]["answered"]) == 2 for line in site.asks())
    replay_files(site, NAMES)


def test_nodes_have_the_best_model_of_a_study_whose_server_counts_those_with_other_rows(tmp_path):
    """The server says with its last word which was best; a node whose file disagrees leaves nothing but a count."""
    source = {"kind": "csv", "path": str(tmp_path / "pilot.csv"), "client": "hospital"}
    changes = {"rounds": 4, "eval_every": 1, "method": method("FedAvg"), "keep": {"best": 1}}
    changes |= {"data": {"source": source, "split": {"val": 0.3}}}
    with served(tmp_path, ",".join(NAMES), "FedAvg", {"deadline": "3m", "fewest": 2}, **changes) as (site, server):
        (tmp_path / "puls.csv").write_text((tmp_path / "oslo.csv").read_text().replace("pulse", "puls"))
        ticket = site.site.root / "tickets" / "oslo.ticket"
        oslo = site.fedtide("join", str(ticket), "--data", str(tmp_path / "puls.csv"), "--home", str(tmp_path / "oslo"))
        assert oslo.process.wait(WAIT) == 2
        assert not (tmp_path / "oslo").exists()
        server.wait_for("1 node cannot take part: its rows do not agree with the study")
        status = site.fedtide("status", str(site.site.root))
        assert status.process.wait(WAIT) == 0
        assert "rows: 1 node cannot take part" in " ".join(status.lines)
        assert "puls" not in " ".join(server.lines + status.lines)
        nodes = [site.join(name) for name in ("berlin", "lyon")]
        server.wait_for("report: ")
        assert [node.process.wait(WAIT) for node in nodes] == [0, 0]
    (best,) = checkpoint.check(site.site.record / "checkpoints", config=None).kept
    for name in ("berlin", "lyon"):
        models = JudgedModels(tmp_path / f"{name}-folder" / "judged")
        assert (models.folder / "best").read_text() == str(best)
        assert (models.read("best").rounds, models.read().rounds) == (best, 4)


def test_a_node_that_is_invited_while_rounds_are_played_takes_part(tmp_path):
    rounds, deploy = 10, {"deadline": "3m", "fewest": 2, "every": "10s"}
    with served(tmp_path, "berlin,lyon", "SCAFFOLD", deploy, rounds=rounds, method=method("SCAFFOLD")) as (
        site,
        server,
    ):
        shutil.copy(tmp_path / "pilot.csv", tmp_path / "paris.csv")
        site.join("berlin")
        site.join("lyon")
        server.wait_for("round 2 of")
        assert site.fedtide("invite", str(site.site.root), "paris").process.wait(WAIT) == 0
        site.join("paris")
        server.wait_for("paris is connected")
        first = len(site.asks()) + 1
        server.wait_for("report: ")
    assert [site.words(2)[number] for number in range(first, rounds)] == [["answered"]] * (rounds - first)
    clients = [line["clients"] for line in site.asks()]
    assert (clients[0], clients) == (2, sorted(clients))
    replay_files(site, ("berlin", "lyon", "paris"))


# -- private sums ------------------------------------------------------------------------------------------------------


def test_each_round_is_released_once_whenever_the_server_dies(tmp_path):
    clip, adapt = {"delta": 1.0, "loss": 5.0}, {"delta": {"quantile": 0.5}}
    privacy = {"epsilon": 8.0, "clip": clip, "adapt": adapt, "noise": "banded", "distance": 1}
    wire = {"secure": True, "fewest": 3, "privacy": privacy}
    with served(tmp_path, ",".join(NAMES), "FedAvg", {"deadline": "10m", "fewest": 3}, wire=wire) as (site, server):
        ledger = site.site.record / LEDGER
        for name in NAMES:
            site.join(name)
        for number in (1, 3):
            until(lambda number=number: len(read(ledger)) >= number, WAIT)
            server.process.kill()
            server.process.wait()
            server = site.serve()
            server.wait_for("nodes are let in")
        server.wait_for("report:")
        assert server.process.wait(WAIT) == 0
    lines = read(ledger)
    assert [line.place for line in lines] == [(number, 0, None) for number in range(4)]
    assert all(line.clients == (0, 1, 2) for line in lines)
    assert lines[-1].epsilon == pytest.approx(8.0)
    for client, name in enumerate(NAMES):
        own = read(tmp_path / f"{name}-folder" / "privacy" / f"{client}.jsonl")
        assert [(line.round, line.epsilon) for line in own] == [(line.round, line.epsilon) for line in lines]
    # Noise decides whether a bound rises or falls, so that it may come back to one before the last.
    assert all(one.bounds["delta"] != next_.bounds["delta"] for one, next_ in pairwise(lines))
    assert not site.site.private.exists()
    assert replay(site.site.run, out=tmp_path / "replay").equal
    noise = replay_files(site, NAMES, tmp_path / "with-rows").noise
    assert (len(noise), all(release.likely for release in noise)) == (4, True)
    assert "Privacy budget" in (site.site.run / "report.html").read_text(encoding="utf-8")
