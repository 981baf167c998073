"""The resident worker's program: a node with its rows, which answers on a socket until it is ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtide.core.memory import MemoryStore
from fedtide.deploy.flower.worker import say, serve
from fedtide.deploy.seat import Seat
from fedtide.deploy.site import Site
from fedtide.fleets.client import ClientRows
from fedtide.fleets.node import Node
from fedtide.runs.build import host_of


def node_of(told: Mapping[str, Any]) -> Node:
    """Build a node.

    Args:
        told: paths of a seat (`ticket`, `data`, `policy`, `home`), or of a site whose rows are rehearsed with (`site`,
            `home`).
    """
    home = Path(told["home"])
    rows: ClientRows
    if "site" in told:
        site = Site.read(Path(told["site"]))
        host = host_of(site.experiment, site.method, site.seed, MemoryStore(None))
        experiment, run = site.experiment, site.digest
        algorithm, seed, rows, policy = host.algorithm, site.seed, host.population, None
    else:
        rules = None if told["policy"] is None else Path(told["policy"])
        seat = Seat.read(Path(told["ticket"]), [Path(path) for path in told["data"]], rules, home)
        experiment, run, seed = seat.ticket.experiment, seat.ticket.digest, seat.ticket.seed
        algorithm, rows, policy = seat.algorithm, seat.rows, seat.policy
    return Node(
        algorithm,
        seed,
        rows,
        home / "memory" / run,
        run=run,
        refuses=policy.refuses if policy is not None else lambda header: None,
        partial_work=experiment.timing.partial_work,
        threads=experiment.fleet.threads,
        log=say,
    )


def main(path: Path, socket: Path) -> None:
    """Answer questions on a socket, as what a file says."""
    node = node_of(json.loads(path.read_text(encoding="utf-8")))
    say("ready")
    serve(socket, node.handle, say)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
