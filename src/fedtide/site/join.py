"""Taking part: a node is checked, and then run until it is ended."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any, NoReturn

from fedtide.core.errors import FedtideError
from fedtide.remote.grpc.line import look_at
from fedtide.remote.grpc.protocol import library
from fedtide.site.log import Log, check_port
from fedtide.site.node import LET_IN, known_of, node_command, write
from fedtide.site.seat import Seat


def join(seat: Seat, *, log: Log, health: int | None = None) -> NoReturn:
    """Run the node of a seat until it is ended; this process becomes the one that is connected.

    Args:
        seat: what it needs.
        log: takes what happens.
        health: a port of this machine at which programs can ask how the node is; None opens none.

    Raises:
        FedtideError: the server is not the one of the ticket, or the port is taken.
    """
    library()
    if health is not None:
        check_port(health)
    home = seat.home.absolute()
    (home / "ca.crt").write_text(seat.ticket.authority, encoding="ascii")
    line = {**line_of(seat), "json": log.lines}
    try:
        said = asyncio.run(look_at(known_of(line)))
    except FedtideError as error:
        if not (home / "run" / LET_IN).exists():
            raise
        said = f"{error}; the node goes on trying"
    log.say("server", said)
    told = {
        "ticket": str(seat.copy.absolute()),
        "data": [str(path.absolute()) for path in seat.data],
        "policy": None if seat.rules is None else str(seat.rules.absolute()),
        "home": str(home),
        "health": health,
    }
    command = node_command(write(home, told, line))
    work = seat.home / "run" / "worker.log"
    log.say("node", f"{seat.ticket.node} runs until the study is over, or Ctrl-C; the log of its work is {work}")
    sys.stdout.flush()
    os.execv(command[0], command)  # all that was needed for the checks is given back


def line_of(seat: Seat) -> dict[str, Any]:
    """Return what the stream of a seat's node needs, see `fedtide.site.node.write`."""
    return {
        "address": seat.ticket.address,
        "authority": str(seat.home.absolute() / "ca.crt"),
        "run": seat.ticket.digest,
        "name": seat.ticket.node,
        "key": str(seat.key.absolute()),
        "json": False,
        "with_parent": False,
    }
