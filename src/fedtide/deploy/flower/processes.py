"""Flower's processes: how they are started, and what their ends mean. Nothing here imports Flower."""

from __future__ import annotations

import json
import os
import shlex
import socket as socketlib
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedtide.core.errors import FedtideError

HERE = Path(__file__).parent
HOST, PORT = "127.0.0.1", 9
"""Where Flower's processes of one machine are told that the others are; local.py has a socket in its place."""

PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedtide-relay"
version = "1.0.0"
description = "Names Fedtide's relay; the programs of both ends are those that are installed there"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41,<1.43"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedtide"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "fedtide_relay:server"
clientapp = "fedtide_relay:client"

[tool.flwr.app.config]
"""
LOCAL = "flower.socket"
"""Where Flower's processes of one machine find each other, in a folder that is its owner's alone."""

APP = {
    "pyproject.toml": PROJECT,
    "LICENSE": "Apache-2.0\n",
    "fedtide_relay/__init__.py": '"""Nothing: neither end runs what it was sent."""\n\nserver = client = None\n',
}
"""The files of the Flower app, which `flwr run` wants; what runs is server_app.py here and client_app.py at a node."""

TAKEN = (
    *("HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
"""What Flower's processes and the gate are told of the environment: no settings of Flower, of Python or of TLS."""

PROGRAMS = {"client_app": "FEDTIDE_WORKER", "server_app": "FEDTIDE_RELAY"}
"""Our programs, which stand for Flower's SuperExec, and where they read the name of their socket."""

CAUSES = (
    (
        r"\[code: 200[14]\]|Failed to activate",
        "the server does not let this node in: its key is not admitted there (its owner runs 'fedtide admit'), or a "
        "node with the same key is connected, maybe this one before it died, given up there after a minute; it "
        "tries again",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED.*(expired|not yet valid)",
        "the server's certificate is not valid now: set this machine's clock, or ask the server's owner for a new one",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED.*(mismatch|not valid for)",
        "the server's certificate is for another address than this one: ask the server's owner for a new ticket",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate is of another authority than this node's ca.crt: ask its owner for a new ticket",
    ),
    (
        "WRONG_VERSION_NUMBER|record layer failure",
        "the server speaks plain HTTP and this node TLS: something else than 'fedtide serve' listens at its address",
    ),
    (
        r"Flower listens on port \d+",
        "this version of flwr opens a port to others: install fedtide with the extra 'deploy'",
    ),
    ("[Aa]ddress already in use", "its port is taken by another program: end that one, or choose another port"),
    ("No space left on device", "no space is left on the disk"),
    (
        "No module named|flwr is not known here",
        "a package is missing or of another version: install fedtide with the extra 'deploy'",
    ),
    (
        "Connection refused|ConnectError|All connection attempts failed|UNEXPECTED_EOF_WHILE_READING",
        "the server cannot be reached: is it up, and is its address right? It tries again",
    ),
)
"""What Flower's processes write, and what it means."""


def check_installed() -> None:
    """Refuse to go on without the extra `deploy`."""
    missing = [name for name in ("flwr", "cryptography") if find_spec(name) is None]
    if missing:
        raise FedtideError(f"{' and '.join(missing)} not installed: pip install 'fedtide[deploy]'")


def at_socket(local: Path, program: str) -> list[str]:
    """Return the command of a program of Flower's that serves at a socket, or asks there, in place of a port."""
    return [sys.executable, "-P", str(HERE / "local.py"), str(local), f"{HOST}:{PORT}", program]


def environment(home: Path, program: str, local: Path, socket: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: a home of their own, and nothing that asks the network.

    Flower finds its own programs by name. Here it finds ours in place of what would run an app that was sent.

    Args:
        home: for Flower's own files.
        program: what runs a task, client_app or server_app.
        local: the socket at which Flower's processes find each other.
        socket: where the program finds the worker, or the serving process.
    """
    bins = home / "bin"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    bins.mkdir(exist_ok=True)
    script = bins / "flower-superexec"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(at_socket(local, str(HERE / f"{program}.py")))} "$@"\n')
    script.chmod(0o700)
    around = os.environ.get("NO_PROXY", os.environ.get("no_proxy", ""))
    direct = ",".join(filter(None, [around, "127.0.0.1", "localhost"]))
    return {
        **_around(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
        PROGRAMS[program]: str(socket),
        "PATH": str(bins),
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def supernode(address: str, ca: Path, key: Path, socket: Path, home: Path) -> dict[str, Any]:
    """Return what the supervisor of a node starts for Flower.

    Args:
        address: of the server, host:port.
        ca: the authority of the server's certificate.
        key: the node's private key.
        socket: of its worker, in a folder of its owner's alone, where Flower's processes find each other, too.
        home: for Flower's own files.
    """
    local = socket.with_name(LOCAL)
    command = [
        *at_socket(local, binary("flower-supernode")),
        "--root-certificates", str(ca),
        "--superlink", address,
        "--host", HOST, "--port", str(PORT),
        "--auth-supernode-private-key", str(key),
    ]  # fmt: skip
    made = _process("supernode", command, environment(home, "client_app", local, socket))
    return made | {"up": [r"SuperNode ID: \d", f"connected to the server at {address}"]}


def superlink(
    local: Path, ca: Path, certificate: Path, key: Path, database: Path, socket: Path, home: Path
) -> dict[str, Any]:
    """Return what the supervisor of a server starts for Flower, for its owner alone: a gate lets nodes in.

    Args:
        local: the socket at which it is served.
        ca: the authority of the certificate.
        certificate: of the server, for 127.0.0.1 too.
        key: of the certificate.
        database: where Flower keeps what it knows of nodes.
        socket: of the serving process.
        home: for Flower's own files.
    """
    command = [
        *at_socket(local, binary("flower-superlink")),
        "--ssl-ca-certfile", str(ca), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key),
        "--enable-supernode-auth", "--disable-runtime-dependency-installation",
        "--host", HOST, "--port", str(PORT),
        "--database", str(database),
    ]  # fmt: skip
    made = _process("superlink", command, environment(home, "server_app", local, socket))
    return made | {"follows": str(certificate)}


def gate(host: str, port: int, behind: Path, ca: Path, certificate: Path, key: Path, home: Path) -> dict[str, Any]:
    """Return what the supervisor of a server starts at its address: nodes' way to `behind`, Flower's own socket."""
    told = {
        "host": host, "port": port, "behind": str(behind), "name": f"https://{HOST}:{PORT}",
        "ca": str(ca), "certificate": str(certificate), "key": str(key),
    }  # fmt: skip
    home.mkdir(parents=True, exist_ok=True)
    path = home / "gate.json"
    path.write_text(json.dumps(told, indent=1), encoding="utf-8")
    made = _process("gate", [sys.executable, "-P", str(HERE / "gate.py"), str(path)], _around(home))
    return made | {"follows": str(certificate)}


def _around(home: Path) -> dict[str, str]:
    quiet = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return {name: os.environ[name] for name in TAKEN if name in os.environ} | quiet


def _process(name: str, command: list[str], env: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "command": command, "env": env, "causes": list(map(list, CAUSES))}


def supervise(
    folder: Path, processes: Sequence[Mapping[str, Any]], *, with_parent: bool, as_json: bool = False
) -> list[str]:
    """Write down what to keep running; return the command that does so.

    Args:
        folder: for logs and numbers of processes.
        processes: name, command, environment and known causes of each.
        with_parent: end with the process that holds the other end of the command's input.
        as_json: say what happens in lines of JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "folder": str(folder),
        "with_parent": with_parent,
        "json": as_json,
        "processes": [dict(process) for process in processes],
    }
    path = folder / "processes.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # environments may hold secrets
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(told, file, indent=1)
    return [sys.executable, "-P", str(HERE / "supervise.py"), str(path)]


def reachable(local: Path) -> bool:
    """Whether something is served at a socket."""
    with socketlib.socket(socketlib.AF_UNIX) as line:
        line.settimeout(1.0)
        try:
            line.connect(str(local))
            return True
        except OSError:
            return False


def free_port() -> int:
    """Return a port of the loopback that is free now."""
    with socketlib.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def binary(name: str) -> str:
    """Return the path of one of Flower's programs, beside this Python."""
    return str(Path(sys.executable).parent / name)
