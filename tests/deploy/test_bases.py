"""Real processes with a pretrained base of their own give the adapters of a simulation, bit for bit, kills or not."""

import io
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("grpc")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from fedtide.core.record import read_lines
from fedtide.site.machine import Log
from fedtide.site.parity import free_port, rehearse, replay
from fedtide.site.seat import Seat
from fedtide.site.site import admit
from fedtide.site.tickets import Ticket
from helpers.language import save
from helpers.offices import NAMES, site_of
from helpers.processes import children
from helpers.serving import WAIT, Command

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.xdist_group("deploy")]

MASKED: dict[str, Any] = {"wire": {"secure": True, "fewest": 3}}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("played", "head", "changes"), [("FedAvg", "classification", {}), ("FedTEM", "next-token", MASKED)]
)
def test_adapters_are_those_of_the_simulation_with_a_node_and_the_server_killed(tmp_path, played, head, changes):
    site, log = site_of(tmp_path, played, head, **changes), Log(file=io.StringIO())
    assert rehearse(site, rounds=3, log=log) == 0, log.file.getvalue()
    assert "killing the server" in log.file.getvalue()
    assert "deployed = simulated, bit for bit" in log.file.getvalue()


def fedtide(*words: object) -> Command:
    return Command(sys.executable, "-P", "-m", "fedtide", *map(str, words))


def test_nodes_join_with_bases_of_their_own_and_one_is_killed_in_the_midst_of_a_round(tmp_path):
    """One has the wrong base first, which ends it with a line and status 2, and the server hears nothing of it."""
    deploy = {"address": f"127.0.0.1:{free_port()}", "deadline": "5m", "fewest": 3}
    site = site_of(tmp_path, "FedTEM", rounds=4, eval_every=4, deploy=deploy, texts=60)
    tickets, commands = site.root / "tickets", [fedtide("serve", site.root)]
    server = commands[0]

    def join(name: str, base: Path) -> Command:
        ticket, home = tickets / f"{name}.ticket", tmp_path / f"{name}-home"
        words = ("join", ticket, "--data", tmp_path / f"{name}.jsonl", "--home", home, "--base", base)
        commands.append(fedtide(*words))
        return commands[-1]

    try:
        server.wait_for("nodes are let in")
        other = save(tmp_path / "other", "llama")
        wrong = join("oslo", other)
        assert wrong.process.wait(WAIT) == 2
        assert "config.json is another file" in wrong.lines[-1]
        assert not (tmp_path / "oslo-home").exists()
        copy = shutil.copytree(tmp_path / "model", tmp_path / "copy")
        for name in NAMES:
            ticket, home = tickets / f"{name}.ticket", tmp_path / f"{name}-home"
            seat = Seat.read(Ticket.read(ticket), [tmp_path / f"{name}.jsonl"], None, home, str(copy))
            seat.settle()
            admit(site.root, name, seat.public)
            node = join(name, copy)
        server.wait_for("round 1 of")
        for worker in children(node.process.pid):
            os.kill(worker, signal.SIGKILL)
        node.process.kill()
        join("oslo", copy)
        server.wait_for("report: ")
    finally:
        for command in reversed(commands):
            command.end()
    assert "cannot take part" not in " ".join(server.lines)
    assert len(read_lines(site.record)) == 4
    again = replay(site.run, [tmp_path / f"{name}.jsonl" for name in NAMES])
    assert (again.equal, again.differs) == (True, None)
