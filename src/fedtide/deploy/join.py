"""Taking part: the processes of a node, kept running."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import ssl
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from fedtide.config.deploy import parted
from fedtide.core.errors import FedtideError
from fedtide.deploy.flower.processes import check_installed, supernode, supervise
from fedtide.deploy.log import Log
from fedtide.deploy.seat import Seat

LONGEST = 100
"""Bytes of a socket's path: systems allow 104 to 108."""
SECONDS = 10.0
"""Seconds that a server may take to say who it is."""
TRYING = "the node goes on trying"


def join(seat: Seat, *, log: Log, health: int | None = None) -> NoReturn:
    """Run the node of a seat until it is ended; this process becomes the one that keeps the others running.

    Args:
        seat: what it needs.
        log: takes what happens.
        health: a port of this machine at which programs can ask how the node is; None opens none.

    Raises:
        FedtideError: the server is not the one of the ticket.
    """
    check_installed()
    authority = seat.home / "ca.crt"
    authority.write_text(seat.ticket.authority, encoding="ascii")
    said = check_server(seat.ticket.address, authority)
    log.say("server", said)
    told = {
        "ticket": str(seat.copy.absolute()),
        "data": [str(path.absolute()) for path in seat.data],
        "policy": None if seat.rules is None else str(seat.rules.absolute()),
        "home": str(seat.home.absolute()),
        "health": health,
    }
    processes = node_processes(
        seat.home.absolute(), told, seat.ticket.address, authority.absolute(), seat.key.absolute()
    )
    log.say("node", f"{seat.ticket.node} runs until Ctrl-C; its logs are in {seat.home / 'run'}")
    command = supervise(seat.home.absolute() / "run", processes, with_parent=False, as_json=log.lines)
    sys.stdout.flush()
    os.execv(command[0], command)  # all that was needed for the checks is given back


def node_processes(home: Path, told: Mapping[str, Any], address: str, ca: Path, key: Path) -> list[dict[str, Any]]:
    """Return what keeps a node's rows at hand, and what connects it.

    Args:
        home: the node's folder.
        told: what its worker is to hold, see `fedtide.deploy.work`.
        address: of the server.
        ca: the authority of the server's certificate.
        key: the node's private key.
    """
    (home / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
    path, at = home / "run" / "worker.json", _socket_of(home)
    path.write_text(json.dumps(dict(told)), encoding="utf-8")
    worker = {
        "name": "worker",
        "command": [sys.executable, "-P", "-m", "fedtide.deploy.work", str(path), str(at)],
        "env": dict(os.environ),
        "causes": [
            [r"fedtide\.core\.errors\.FedtideError: (.*)", r"\1"],
            ["No space left on device", "no space is left on the disk"],
            ["MemoryError|DefaultCPUAllocator: can't allocate", "this machine's memory is too small for the work"],
        ],
    }
    return [worker, supernode(address, ca, key, at, home / "flower")]


def check_server(address: str, ca: Path) -> str:
    """Return a sentence about the server at an address.

    Raises:
        FedtideError: what answers is not a server with a certificate of this authority.
    """
    host, port = parted(address)
    context = ssl.create_default_context(cafile=str(ca))
    try:
        with (
            socket.create_connection((host, port), timeout=SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as line,
        ):
            line.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            line.recv(100)
    except ssl.SSLCertVerificationError as error:
        raise FedtideError(f"server {address}: {_of_certificate(error)}") from None
    except (ssl.SSLEOFError, ConnectionResetError):  # a proxy or a container's port takes calls while its server is off
        return f"server {address} hangs up, as what stands before a server does while that is away; {TRYING}"
    except ssl.SSLError as error:
        but = "something else than 'fedtide serve' listens there; ask its owner for the address"
        raise FedtideError(f"server {address}: does not speak TLS ({error.reason}): {but}") from None
    except socket.gaierror:
        raise FedtideError(f"server {address}: this machine finds no such host; ask the server's owner") from None
    except OSError as error:
        return f"server {address} cannot be reached now ({error.strerror or error}); {TRYING}"
    return f"server {address} has a certificate of the ticket's authority"


def _of_certificate(error: ssl.SSLCertVerificationError) -> str:
    words = error.verify_message
    if error.verify_code in (9, 10):  # not yet valid, expired
        return f"its certificate is not valid now ({words}): set this machine's clock, or ask for a new one"
    if error.verify_code in (62, 64):  # host, address
        return f"its certificate is for another address ({words}): ask the server's owner for a new ticket"
    return (
        f"its certificate is of another authority than the ticket's ({words}): ask the server's owner for a new ticket"
    )


def _socket_of(home: Path) -> Path:
    """Return where the worker listens: in the node's folder, or in one of this user's where that has a long path."""
    inside = home / "run" / "worker"
    if len(os.fsencode(inside)) <= LONGEST:
        return inside
    name = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"fedtide-{os.getuid()}-{name}"
    short.mkdir(mode=0o700, exist_ok=True)
    if short.is_symlink() or short.stat().st_uid != os.getuid() or short.stat().st_mode & 0o077:
        raise FedtideError(f"{short}: belongs to another user; choose a --home with a shorter path")
    return short / "worker"
