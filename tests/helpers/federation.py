"""A server and nodes of Flower on the loopback, with TLS and keys, whose workers only echo."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedtide.deploy import certificates
from fedtide.deploy.flower.carrier import FlowerCarrier
from fedtide.deploy.flower.link import Link
from fedtide.deploy.flower.processes import free_port, supernode, supervise
from fedtide.fleets.carrier import Question, Response

ECHO = Path(__file__).with_name("echo_worker.py")


def until(check: Callable[[], Any], seconds: float) -> Any:
    """Wait for something that is true, and return it."""
    end = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.1)
    return found


class Federation:
    """What a site and its nodes are, without a study."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[str] = []
        self.authority = root / "authority"
        self.authority.mkdir()
        self.port = free_port()
        certificates.make_authority(self.authority, f"127.0.0.1:{self.port}")
        self.keys: dict[str, str] = {}
        self.nodes: dict[str, subprocess.Popen[str]] = {}
        self.lines: dict[str, list[str]] = {}
        self.carrier = FlowerCarrier()
        self.link = self._link()
        self._number = 0

    def _link(self) -> Link:
        return Link(
            self.carrier,
            self.root / "flower",
            host="127.0.0.1",
            port=self.port,
            ca=self.authority / "ca.crt",
            certificate=self.authority / "server.crt",
            key=self.authority / "server.key",
            keys=lambda: dict(self.keys),
            renew=lambda: False,
            say=self.said.append,
        )

    def start(self, name: str, *, admitted: bool = True, key: Path | None = None, ca: Path | None = None) -> None:
        """Start a node, with a new key unless there is one."""
        home = self.root / name
        home.mkdir(exist_ok=True)
        own = key or home / "key"
        if not own.exists():
            certificates.make_node_key(own, home / "key.pub", name)
        if admitted:
            self.keys[name] = certificates.read_public_key(home / "key.pub")[0]
        worker = {
            "name": "worker",
            "command": [sys.executable, "-P", str(ECHO), str(home / "w")],
            "env": dict(os.environ),
            "causes": [],
        }
        there = f"127.0.0.1:{self.port}"
        flower = supernode(there, ca or self.authority / "ca.crt", own, home / "w", home / "flower")
        command = supervise(home / "run", [worker, flower], with_parent=True)
        self.nodes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines[name] = []
        threading.Thread(target=self._listen, args=(name,), daemon=True).start()

    def _listen(self, name: str) -> None:
        stdout = self.nodes[name].stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                self.lines[name].append(line.strip())

    def number(self, name: str, process: str) -> int:
        """Return the process id of a part of a node, or of the server (""); 0 while it is started again."""
        folder = self.root / name / "run" if name else self.root / "flower" / "server"
        with suppress(FileNotFoundError):
            return int((folder / f"{process}.pid").read_text() or 0)
        return 0

    def stop(self, name: str) -> None:
        """End a node as its owner would."""
        stdin = self.nodes[name].stdin
        assert stdin is not None
        stdin.close()
        self.nodes.pop(name).wait()

    def push(
        self, node: str, header: dict[str, Any], payload: bytes = b"tree", seconds: float = 300.0, largest: int = 10**8
    ) -> None:
        """Ask a node something."""
        self._number += 1
        self.carrier.push([Question(f"{self._number}.{node}", node, header, payload, seconds, largest)])

    def pull(self, seconds: float = 400.0) -> Response:
        """Wait for a response."""
        (found,) = until(self.carrier.pull, seconds)
        return found

    def ask(self, node: str, header: dict[str, Any], payload: bytes = b"tree", **limits: Any) -> Response:
        """Ask a node something, and wait for the response."""
        self.push(node, header, payload, **limits)
        return self.pull()

    def close(self) -> None:
        """End everything."""
        for name in list(self.nodes):
            self.stop(name)
        self.carrier.close()
        self.link.close()
