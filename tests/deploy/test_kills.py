"""One run, many kills: whatever dies, and whenever, the weights at the end are those of the simulation."""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack

import pytest

pytest.importorskip("cryptography")

from fedtide.config import read
from fedtide.core.record import ASKS, read_lines
from fedtide.site.deploying import make_site
from fedtide.site.machine import Log
from fedtide.site.parity import (
    Process,
    compare_with_simulation,
    look_at_server,
    make_rehearsal,
    node_of_rehearsal,
    replay,
    server_of,
    wait_for_server,
    watch_rounds,
)
from fedtide.site.site import Roster, Site
from helpers.hospitals import hospitals
from helpers.processes import children

pytestmark = [pytest.mark.thorough, pytest.mark.deploy, pytest.mark.slow, pytest.mark.xdist_group("deploy")]

KINDS = ("server", "node", "worker")
MOMENT = 3.0
"""Seconds after the beginning of a round, or after the kill before, within which the next one is."""
DEADLINE = "30m"
"""Nobody is late: what is killed is back within minutes."""


def test_a_run_of_kills_is_the_simulation(tmp_path, request, record_property, capsys):
    kills, seed = (request.config.getoption(name) for name in ("--kills", "--kills-seed"))
    site = make_site(
        read(hospitals(tmp_path, rounds=kills + 4)),
        "SCAFFOLD", Roster.of("berlin,lyon,oslo:3"), tmp_path / "site", None, "study.toml",
    )  # fmt: skip
    there = make_rehearsal(site, kills + 4, DEADLINE)
    done, began = Counter(), time.monotonic()
    with (tmp_path / "said").open("w", encoding="utf-8") as said:
        log = Log(file=said)
        with ExitStack() as stack:
            server = stack.enter_context(server_of(there, log))
            wait_for_server(there, server)
            nodes = {
                node.name: stack.enter_context(node_of_rehearsal(there, node.name, log, range(kills + 4)))
                for node in there.roster.node
            }
            draw, reached = random.Random(seed), 0
            kinds = [*KINDS, *draw.choices(KINDS, k=kills)][:kills]
            draw.shuffle(kinds)
            for kind in kinds:
                if draw.random() < 2 / 3:  # else in the midst of what comes of the kill before
                    reached = _next_round(there, server, reached)
                time.sleep(draw.uniform(0, MOMENT))
                assert server.process.poll() is None, "all rounds were over before all kills were done"
                name = draw.choice(list(nodes))
                log.say("kill", f"killing {kind} {'' if kind == 'server' else name}")
                _kill(kind, server, nodes[name])
                done[kind] += 1
            watch_rounds(there, server, (), nodes, log)
        lines = read_lines(there.record, ASKS)
        words = Counter(
            word
            for line in lines
            for ask in line["asks"]
            for node in ask["nodes"].values()
            for word in node["clients"].values()
        )
        differs = list(compare_with_simulation(there))
        again = replay(there.run)
        took = time.monotonic() - began
        with capsys.disabled():
            print(f"\n{sum(done.values())} kills, {len(lines)} rounds, {took:.0f} s, {dict(done)}, {dict(words)}")
        assert again.equal
        assert again.differs is None
        assert set(words) - {"answered"} or not differs, differs


def _next_round(site: Site, server: Process, reached: int) -> int:
    """Wait until more rounds are over than were before; return how many."""
    began = time.monotonic()
    while (
        (status := look_at_server(site, server, began)) is None or status.round <= reached or status.phase != "playing"
    ):
        continue
    return status.round


def _kill(kind: str, server: Process, node: Process) -> None:
    """Kill a part of a node or the server; what nobody keeps running is started again."""
    if kind == "server":
        server.restart()
    elif kind == "node":
        node.restart()
    else:
        for number in children(node.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
