"""The worker's program: a node with its rows, which answers until the process that is connected has gone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedtide.core.memory import MemoryStore
from fedtide.fleets.client import ClientRows
from fedtide.remote.node import REFUSED, Node, NoRules, Rules
from fedtide.runs.build import host_of
from fedtide.site import certificates
from fedtide.site.budget import OWN, Budget, ledger_for
from fedtide.site.log import Health
from fedtide.site.peers import Peers
from fedtide.site.policy import Owner
from fedtide.site.seat import RECORD, Seat
from fedtide.site.site import Site
from fedtide.site.worker import Handle, serve
from fedtide.site.worker import write_log as say
from fedtide.wire.clip import clip_of
from fedtide.wire.masks import Masker


def node_of(told: Mapping[str, Any]) -> Node:
    """Build a node.

    Args:
        told: paths of a seat (`ticket`, `data`, `policy`, `home`), or of a site whose rows are rehearsed with (`site`,
            `home`).
    """
    home = Path(told["home"])
    rows: ClientRows
    rules: Rules = NoRules()
    trusts: Callable[[str, str], str | None]
    if "site" in told:
        site = Site.read(Path(told["site"]))
        host = host_of(site.experiment, site.method, site.seed, MemoryStore(None))
        experiment, run = site.experiment, site.digest
        algorithm, seed, rows = host.algorithm, site.seed, host.population
        name, key = home.name, home / "key"
        clients = frozenset(client for node in site.roster.node if node.name == name for client in node.clients)
        keys = {node.name: node.key for node in site.roster.node}
        trusts = lambda node, line: None if keys.get(node) == line else "its key is not that of the roster"  # noqa: E731
    else:
        policy = None if told["policy"] is None else Path(told["policy"])
        seat = Seat.read(Path(told["ticket"]), [Path(path) for path in told["data"]], policy, home)
        experiment, run, seed = seat.ticket.experiment, seat.ticket.digest, seat.ticket.seed
        algorithm, rows = seat.algorithm, seat.rows
        study = ledger_for(experiment, algorithm)
        clip = None if experiment.wire is None else clip_of(experiment.wire.build())
        budget = None if study is None or clip is None else Budget(study, clip, home / OWN)
        rules = owner = Owner(policy, home / "judged.jsonl", experiment.rounds, say, budget)
        name, key, clients = seat.ticket.node, seat.key, frozenset(seat.ticket.clients)
        trusts = Peers(home / "peers.json", lambda: owner.policy, say).trusts
    wire = None if experiment.wire is None else experiment.wire.build()
    secure = wire is not None and wire.secure
    return Node(
        algorithm,
        seed,
        rows,
        home / "memory" / run,
        run=run,
        rules=rules,
        partial_work=experiment.timing.partial_work,
        threads=experiment.fleet.threads,
        log=say,
        judged=home / "judged" if "site" not in told else None,
        wire=wire,
        masker=Masker(run, name, certificates.read_private_key(key), trusts, home / "opened") if secure else None,
        clients=clients,
    )


REFUSALS, REFUSED_OF = 100, 100
"""Refused questions of a minute that are written down, and clients and names in each: who asks much could fill the
disk. What is answered is written down whole."""


@dataclass
class Watch:
    """What a node says of itself to programs of its machine.

    Args:
        node: answers.
        since: when it was ready.
        record: file with a line for each question: what was asked, what became of it, and how much was sent.
        answered: how many questions it has answered since.
        last: the last one, and when its answer was ready.
    """

    node: Node
    since: datetime
    record: Path
    answered: int = 0
    last: dict[str, Any] | None = None
    _refused: dict[int, int] = field(default_factory=dict)

    def handle(self, header: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer a question; nothing is sent of a client that is not written down."""
        told, sent = self.node.handle(header, payload)
        if told.get("clients"):
            try:
                self._note(header, told, len(payload), len(sent))
            except OSError:
                but = f"{REFUSED}the node cannot write down what it sends; see whether its disk is full"
                words = {client: w if w.startswith(REFUSED) else but for client, w in told["clients"].items()}
                told, sent = {**told, "clients": words, "kept": []}, b""
        asked = {key: str(header.get(key))[:100] for key in ("kind", "question")}
        self.last = {"at": datetime.now(UTC).isoformat(), "seconds": told["seconds"], **asked}
        self.answered += 1
        return told, sent

    def _note(self, header: Mapping[str, Any], told: Mapping[str, Any], received: int, sent: int) -> None:
        """Write down a question and what is sent to the server."""
        refused = all(word.startswith(REFUSED) for word in told["clients"].values())
        minute = int(time.time() // 60)
        if refused and self._refused.get(minute, 0) >= REFUSALS:
            self._refused[minute] += 1
            return
        skipped = sum(max(count - REFUSALS, 0) for then, count in self._refused.items() if then != minute)
        self._refused = {minute: self._refused.get(minute, 0) + refused}
        line = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "round": header["moment"]["round"],
            **{key: header[key] for key in ("kind", "question")},
            "reveal": [name[:100] for name in header["reveal"][:REFUSED_OF]] if refused else header["reveal"],
            "members": header.get("members", 0),
            "clients": dict(list(told["clients"].items())[: REFUSED_OF if refused else None]),
            "received": received,
            "sent": sent,
        }
        if skipped:
            line["not noted"] = skipped
        if header["kind"] == "unmask" and not refused:
            line["opened"] = header["mask"]["alive"]
        self.record.parent.mkdir(parents=True, exist_ok=True)
        with open(self.record, "a", encoding="utf-8") as file:
            torn = _torn(self.record)  # a kill may have left half a line
            file.write(("\n" if torn else "") + json.dumps(line) + "\n")

    def status(self) -> dict[str, Any]:
        """Return how the node is, in plain JSON."""
        return {"run": self.node.run, "since": self.since.isoformat(), "answered": self.answered, "last": self.last}


def _torn(path: Path) -> bool:
    """Tell whether a file does not end with the end of a line."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 1, 0))
        return file.read() not in (b"", b"\n")


def _slowed(handle: Handle, told: Mapping[str, Any]) -> Handle:
    """Take time for questions of some rounds, in which a rehearsal kills somebody."""
    if "slow" not in told:
        return handle

    def slowly(header: dict[str, Any], payload: bytes) -> tuple[Mapping[str, Any], bytes]:
        if header.get("moment", {}).get("round") in told["slow"]["rounds"]:
            time.sleep(told["slow"]["seconds"])
        return handle(header, payload)

    return slowly


def main(path: Path, line: int) -> None:
    """Answer questions on a line to the node's process, as what a file says."""
    told = json.loads(path.read_text(encoding="utf-8"))
    watch = Watch(node_of(told), datetime.now(UTC), Path(told["home"]) / RECORD)
    with ExitStack() as stack:
        if (port := told.get("health")) is not None:
            say(f"health: {stack.enter_context(Health(port, watch.status)).address}")
        say("ready")
        serve(Connection(line), _slowed(watch.handle, told), say)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
