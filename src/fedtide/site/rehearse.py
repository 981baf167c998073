"""A rehearsal: server and nodes of a site on this machine, with TLS and keys, over the rows of the study.

One node and the server are killed on the way; then what came out is compared with the simulation, bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedtide.config import from_dict, resolved, to_toml
from fedtide.config.settings import Deploy
from fedtide.core import checkpoint, codec
from fedtide.core.errors import FedtideError, refused
from fedtide.core.record import read_rounds
from fedtide.core.trees import Tree, children, is_node, same
from fedtide.runs.digest import digest_of
from fedtide.runs.runner import Run
from fedtide.site import certificates
from fedtide.site.log import Log
from fedtide.site.node import node_command, write
from fedtide.site.serve import serve
from fedtide.site.site import Roster, Site, write_roster
from fedtide.site.status import Status
from fedtide.wire.masks import library

DEADLINE = "5m"
"""For the answers to one question: a killed node is back within seconds, or a minute on a busy machine."""
STALLED = 900.0
"""Seconds without a round after which a rehearsal is given up."""
LOOK = 0.2
"""Seconds between two looks at how the server is."""
MIDST, SLOW = 1.0, 2.5
"""Seconds after the beginning of a round at which a process is killed, and that each question of that round takes."""
COPIED = ("ca.crt", "ca.key", "server.crt", "server.key")
COMPARED = ("asked", "answered", "refused", "trained", "seconds", "epsilon", "facts")
"""What a record says of a round that has to be the same; how clients are judged is compared by accuracy."""


def rehearse(site: Site, *, rounds: int = 3, kills: bool = True, log: Log) -> int:
    """Play a few rounds of a site here, compare them with the simulation, and return the exit status.

    Args:
        site: its folder; what happens is in its subfolder `rehearsal`, which is made anew.
        rounds: how many.
        kills: kill a node in its second round, and the server in its third.
        log: takes what happens.

    Raises:
        FedtideError: it cannot be rehearsed, or what came out is not what the simulation gives.
    """
    library()
    if rounds < 1:
        raise refused("--rounds", rounds, "1 or more")
    there = prepared(site, rounds)
    log.say(
        "rehearsal", f"{len(there.roster.node)} nodes and their server at {there.address}; logs are in {there.root}"
    )
    if there.experiment.wire is not None and there.experiment.wire.privacy is not None:
        log.say("noise", "noise follows from the seed here, as in the simulation; a served site has the system's")
    began = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(Server(there, log))
        server.wait()  # nodes that come before would say that they are not let in
        plan = _plan(there, kills)
        slow = [kill.after for kill in plan]
        nodes = {node.name: stack.enter_context(Running(there, node.name, log, slow)) for node in there.roster.node}
        server.watch(plan, nodes)
    log.say("played", f"{rounds} rounds in {time.monotonic() - began:.0f} s; the simulation plays them now")
    differs = list(compared(there))
    for line in differs[:5]:
        log.say("differs", line)
    if differs:
        log.say("result", "deployed and simulated differ: the lines above say where first")
        return 1
    log.say("result", f"deployed = simulated, bit for bit: {rounds} rounds of {there.method.name}")
    return 0


def prepared(site: Site, rounds: int, deadline: str = DEADLINE) -> Site:
    """Make the site of a rehearsal: that of the study with other rounds, keys of its own, and a port that is free."""
    root = site.root / "rehearsal"
    shutil.rmtree(root, ignore_errors=True)
    (root / "authority").mkdir(mode=0o700, parents=True)
    for name in COPIED:
        if (site.authority / name).exists():  # its owner may have taken ca.key away
            shutil.copy2(site.authority / name, root / "authority" / name)
    deploy = Deploy(address=f"127.0.0.1:{free_port()}", deadline=deadline)
    changed = site.experiment.model_copy(update={"rounds": rounds, "deploy": deploy, "eval_every": rounds})
    experiment = from_dict(resolved(changed), where=str(root), timed=False)
    digest = digest_of(experiment, experiment.method[0], experiment.seeds[0])
    nodes = []
    for node in site.roster.node:
        home = home_of(root, node.name)
        home.mkdir(mode=0o700, parents=True)
        certificates.make_node_key(home / "key", home / "key.pub", node.name)
        nodes.append(node.model_copy(update={"key": certificates.read_public_key(home / "key.pub")[0]}))
    about = site.about.model_copy(update={"digest": digest})
    made = Site(root, experiment, about, Roster(node=tuple(nodes)))
    (root / "study.toml").write_text(to_toml(experiment), encoding="utf-8")
    (root / "site.toml").write_text(tomli_w.dumps(about.model_dump(mode="json")), encoding="utf-8")
    write_roster(root, made.roster)
    return Site.read(root)


def home_of(root: Path, name: str) -> Path:
    """Return the folder of a node in a rehearsal."""
    return root / "nodes" / name


def compared(site: Site) -> Iterator[str]:
    """Play the simulation of a site whose rehearsal is over; say where the two differ."""
    folder = site.root / "simulated"
    experiment = site.experiment.model_copy(update={"checkpoint_every": 1})
    list(Run(experiment, site.method, site.seed, folder).play())
    yield from differences(site.record, folder)


@dataclass(frozen=True)
class Kill:
    """A kill: of a node, or of the server (""), once so many rounds are over."""

    after: int
    node: str


def _plan(site: Site, kills: bool) -> list[Kill]:
    if not kills:
        return []
    last = site.experiment.rounds - 1
    return [Kill(min(1, last), site.roster.node[0].name), Kill(min(2, last), "")]


class Running:
    """A node, which is kept running meanwhile, as a service would be."""

    def __init__(self, site: Site, name: str, log: Log, slow: Sequence[int] = ()) -> None:
        home = home_of(site.root, name).absolute()
        told: dict[str, Any] = {"site": str(site.root.absolute()), "home": str(home)}
        if slow:
            told["slow"] = {"rounds": list(slow), "seconds": SLOW}
        line = {
            "address": site.address,
            "authority": str(site.root.absolute() / "authority" / "ca.crt"),
            "run": site.digest,
            "name": name,
            "key": str(home / "key"),
            "json": False,
            "with_parent": True,
        }
        self._command = node_command(write(home, told, line))
        self._name, self._log = name, log

    def start(self) -> None:
        """Start it."""
        self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=_pass_on, args=(self.process, self._name, self._log), daemon=True).start()

    def restart(self) -> None:
        """Kill it, and start it again."""
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.start()

    def __enter__(self) -> Running:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _pass_on(process: subprocess.Popen[str], name: str, log: Log) -> None:
    """Say what a process says."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            words = line.strip().partition(" ")[2]  # without its time
            log.say("said", f"{name}: {words}")


class Server:
    """The server, in a process of its own, as it is to be killed."""

    def __init__(self, site: Site, log: Log) -> None:
        self._site, self._log = site, log
        self._command = [sys.executable, "-P", "-m", "fedtide.site.rehearse", str(site.root.absolute())]

    def start(self) -> None:
        """Start it."""
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=_pass_on, args=(self.process, "server", self._log), daemon=True).start()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.terminate()
        self._wait()

    def _wait(self) -> None:
        assert self.process.stdin is not None
        self.process.wait()
        self.process.stdin.close()

    def look(self, since: float) -> Status | None:
        """Return how the server is.

        Raises:
            FedtideError: it has failed, or nothing has happened since for too long.
        """
        time.sleep(LOOK)
        self._check()
        if time.monotonic() - since > STALLED:
            raise FedtideError(f"nothing happened for {STALLED:.0f} s; see the logs in {self._site.root}")
        return Status.read(self._site.status)

    def wait(self) -> None:
        """Wait until nodes are let in."""
        began = time.monotonic()
        while (status := self.look(began)) is None or status.phase == "starting":
            continue

    def watch(self, plan: Sequence[Kill], nodes: Mapping[str, Running]) -> None:
        """Wait until all rounds are over, and kill on the way."""
        rounds, moved, left = -1, time.monotonic(), list(plan)
        while self.process.poll() is None:
            status = self.look(moved)
            if status is None:
                continue
            if status.round != rounds:
                rounds, moved = status.round, time.monotonic()
            if left and rounds >= left[0].after and status.phase == "playing":
                time.sleep(MIDST)
                self._kill(left.pop(0).node, rounds + 1, nodes)
                moved = time.monotonic()
        self._check()

    def _check(self) -> None:
        if self.process.poll():
            raise FedtideError(f"the server ended with status {self.process.returncode}; see the lines above")

    def _kill(self, node: str, number: int, nodes: Mapping[str, Running]) -> None:
        self._log.say("kill", f"killing {f'node {node}' if node else 'the server'} in round {number}")
        (nodes[node] if node else self).restart()

    def restart(self) -> None:
        """Kill it, and start it again."""
        self.process.kill()
        self._wait()
        self.start()


def free_port() -> int:
    """Return a port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def differences(deployed: Path, simulated: Path) -> Iterator[str]:
    """Say where two records of one study differ: the round first, then the leaf of the last state.

    Args:
        deployed: folder of the run on nodes.
        simulated: folder of the run in simulation.
    """
    ours, theirs = read_rounds(deployed), read_rounds(simulated)
    if len(ours) != len(theirs):
        yield f"deployed has {len(ours)} rounds, and simulated {len(theirs)}"
    for one, other in zip(ours, theirs, strict=False):
        said = [{key: line.get(key) for key in COMPARED} | _accuracies(line) for line in (one, other)]
        for key in said[0].keys() | said[1].keys():
            mine, yours = (each.get(key) for each in said)
            if mine != yours:
                yield f"round {one['round']}: {key}: deployed {_short(mine)}, simulated {_short(yours)}"
    (one_state, one_round), (other_state, other_round) = (_last(path) for path in (deployed, simulated))
    if one_round != other_round:
        yield f"the last checkpoint is of round {one_round}, and of {other_round} in simulation"
        return
    for leaf, (mine, yours) in _leaves(one_state, other_state, "state"):
        if not same(mine, yours):
            yield f"after round {one_round - 1}: {leaf} differs"


def _accuracies(line: Mapping[str, Any]) -> dict[str, Any]:
    return {f"accuracy of {view}": scores["accuracy"] for view, scores in line.get("scores", {}).items()}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _last(path: Path) -> tuple[Tree, int]:
    """Return the state of the last checkpoint, and the round that would be played next."""
    newest = checkpoint.newest_state(path / "checkpoints")
    return codec.from_file(newest), int(newest.parent.name)


def _leaves(one: Tree, other: Tree, name: str) -> Iterator[tuple[str, tuple[Tree, Tree]]]:
    """Yield the parts of two trees side by side, by their place."""
    mine, yours = (dict(children(each)) if is_node(each) else None for each in (one, other))
    if mine is None or yours is None or mine.keys() != yours.keys():
        yield name, (one, other)
        return
    for key in mine:
        yield from _leaves(mine[key], yours[key], f"{name}.{key}")


def _end_with_parent() -> None:
    """End at once when the rehearsal is gone, which closes the input."""
    while os.read(0, 1000):
        continue
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        sys.exit(serve(Site.read(Path(sys.argv[1])), log=Log(), rehearsed=True))
    except FedtideError as mistake:
        sys.exit(f"error: {mistake}")
