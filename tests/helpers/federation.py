"""A server and nodes on the loopback, with TLS and keys, whose workers only echo."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtide.remote.grpc.grpc_carrier import GrpcCarrier
from fedtide.remote.grpc.line import Caller
from fedtide.remote.messages import Question, Response
from fedtide.site import certificates
from fedtide.site.node_process import LineSettings, node_command, write_settings

ECHO = Path(__file__).with_name("echo_worker.py")
RUN = "0123456789abcdef"


def until(check: Callable[[], Any], seconds: float) -> Any:
    """Wait for something that is true, and return it."""
    end = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.02)
    return found


class Federation:
    """What a site and its nodes are, without a study."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.authority = root / "authority"
        self.authority.mkdir()
        certificates.make_authority(self.authority, "127.0.0.1:1")
        self.keys: dict[str, str] = {}
        self.nodes: dict[str, subprocess.Popen[str]] = {}
        self.lines: dict[str, list[str]] = {}
        self.port = 0
        self.serve()
        self._number = 0

    def serve(self) -> None:
        """Start a server; another one than the last, at the same port."""
        self.carrier = GrpcCarrier("127.0.0.1", self.port, run=RUN, authority=self.authority, nodes=10)
        self.port = self.carrier.port
        self.admit()

    def admit(self) -> None:
        """Let in those whose keys are known."""
        self.carrier.admit(dict(self.keys), frozenset({"berlin", "oslo", "rome", "stranger"}))

    def line(
        self, home: str, key: Path | None = None, authority: Path | None = None, name: str = "", **more: Any
    ) -> LineSettings:
        """Return the settings of a node's stream, with a new key unless there is one."""
        folder = self.root / home
        folder.mkdir(exist_ok=True)
        own = key or folder / "key"
        if not own.exists():
            certificates.make_node_key(own, folder / "key.pub", home)
        ca = str(authority or self.authority / "ca.crt")
        settings = {"run": RUN, "with_parent": True, **more}
        return LineSettings(f"127.0.0.1:{self.port}", ca, name=name or home, key=str(own), **settings)

    def known(self, name: str, admitted: bool = True) -> Caller:
        """Return what a node knows of the server, with its key, which is let in."""
        known = self.line(name).server
        if admitted:
            self.keys[name] = certificates.read_public_key(self.root / name / "key.pub")[0]
            self.admit()
        return known

    def start(self, home: str, *, admitted: bool = True, worker: Path = ECHO, **line: Any) -> None:
        folder, settings = self.root / home, self.line(home, worker=[sys.executable, "-P", str(worker)], **line)
        if admitted:
            self.keys[home] = certificates.read_public_key(folder / "key.pub")[0]
            self.admit()
        path = write_settings(folder, {"home": str(folder)}, settings)
        process = subprocess.Popen(
            node_command(path), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.nodes[home], self.lines[home] = process, []
        threading.Thread(target=self._listen, args=(home, process), daemon=True).start()

    def _listen(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.lines[name].append(line.strip())

    def stop(self, name: str, kill: bool = False) -> None:
        """End a node as its owner would, or kill it."""
        process = self.nodes.pop(name)
        process.kill() if kill else process.terminate()
        process.wait()

    def push(
        self, node: str, header: dict[str, Any], payload: bytes = b"tree", seconds: float = 300.0, largest: int = 10**8
    ) -> None:
        self._number += 1
        self.carrier.push([Question(f"{self._number}.{node}", node, header, payload, seconds, largest)])

    def pull(self, seconds: float = 400.0) -> Response:
        (found,) = until(self.carrier.pull, seconds)
        return found

    def ask(self, node: str, header: dict[str, Any], payload: bytes = b"tree", **limits: Any) -> Response:
        """Ask a node something, and wait for the response."""
        self.push(node, header, payload, **limits)
        return self.pull()

    def close(self) -> None:
        for name in list(self.nodes):
            self.stop(name)
        self.carrier.close()
