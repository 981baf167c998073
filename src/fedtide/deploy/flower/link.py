"""A server's side of Flower: its SuperLink, the gate before it, the nodes it knows, and the run that is our relay."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fedtide.core.atomic import replacing
from fedtide.core.errors import UNREADABLE, FedtideError, refused
from fedtide.deploy.flower.carrier import FlowerCarrier
from fedtide.deploy.flower.processes import (
    APP,
    HOST,
    LOCAL,
    PORT,
    at_socket,
    binary,
    environment,
    gate,
    reachable,
    superlink,
    supervise,
)

CONNECTION = "site"
"""The name of our SuperLink in Flower's own configuration."""
FORMAT = 1
"""Version of the file that says what Flower knows of keys."""
START = 180.0
"""Seconds that a command of Flower's may take."""
RELAY = 60.0
"""Seconds that our relay may take from when Flower is told to run it; then Flower is told so again."""
PATIENCE = 600.0
"""Seconds that all of it may take until nodes are let in."""
LOOK = 1.0
"""Seconds between two looks at who is admitted."""
DAY = 86_400.0
"""Seconds between two looks at the server's certificate."""


@dataclass(frozen=True)
class Known:
    """What Flower knows of keys.

    Args:
        registered: its number of each key, which it says once; None until it is heard.
        removed: keys that were let in once, and never are again: Flower takes no key twice.
    """

    registered: dict[str, int | None]
    removed: list[str]

    def write(self, file: Path) -> None:
        """Write it in place of what was written before."""
        with replacing(file) as temporary:
            temporary.write_text(json.dumps({"format": FORMAT, **vars(self)}, indent=1), encoding="utf-8")

    @staticmethod
    def read(file: Path) -> Known:
        """Return what was written; nothing where nothing was.

        Raises:
            FedtideError: it is damaged, or another version of this package wrote it.
        """
        if not file.is_file():
            return Known({}, [])
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            if (found := told.pop("format")) == FORMAT:
                return Known(**told)
        except UNREADABLE as error:
            found = f"damaged: {type(error).__name__}"
        mend = f"install the version of fedtide that wrote it, or stop the server and remove {file.parent}"
        raise refused(f"{file}: format", found, f"{FORMAT}; {mend}")


class Link:
    """Keeps Flower running for a carrier, and starts our relay again whenever it is gone.

    Args:
        carrier: whose relay it is.
        folder: for Flower's files, logs and what it knows of nodes.
        host: address on which nodes are let in.
        port: its port.
        ca: the authority of the certificate.
        certificate: of the server, for 127.0.0.1 too.
        key: of the certificate.
        keys: says the public key of each node that is admitted now, as OpenSSH writes it.
        renew: has the certificate made anew if it ends soon; it is called once a day.
        say: is told what a person should know.
    """

    def __init__(
        self,
        carrier: FlowerCarrier,
        folder: Path,
        *,
        host: str,
        port: int,
        ca: Path,
        certificate: Path,
        key: Path,
        keys: Callable[[], Mapping[str, str]],
        renew: Callable[[], object],
        say: Callable[[str], None] = print,
    ) -> None:
        self._carrier, self._keys, self._renew, self._say = carrier, keys, renew, say
        self._folder, self._home = folder, folder / "flower"
        self._ca = ca
        self._local = carrier.socket.with_name(LOCAL)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._counted: dict[str, str] | None = None
        self._admitted: dict[str, str] | None = None
        self._write_app()
        processes = [
            superlink(self._local, ca, certificate, key, folder / "flower.db", carrier.socket, self._home),
            gate(host, port, self._local, ca, certificate, key, self._home),
        ]
        self._command = supervise(folder / "server", processes, with_parent=True)
        self._starting = threading.Lock()
        self._start()
        for work in (self._look, self._keep):
            threading.Thread(target=work, daemon=True).start()

    def _start(self) -> None:
        """Start what keeps Flower running."""
        self._keeper = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        threading.Thread(target=self._listen, args=(self._keeper,), daemon=True).start()

    def wait(self, seconds: float = PATIENCE) -> None:
        """Wait until the relay is there and nodes are let in."""
        end = time.monotonic() + seconds
        while not (self._carrier.connected and self._admitted is not None):
            if self._keeper.poll() is not None:
                raise FedtideError(f"{self._folder}: Flower could not be started; see the lines above")
            if time.monotonic() > end:
                raise FedtideError(f"Flower did not start within {seconds:.0f} s; see {self._folder / 'server'}/*.log")
            time.sleep(0.1)

    def close(self) -> None:
        """End Flower's processes."""
        with self._starting:
            self._closing.set()
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        try:
            self._keeper.wait(20)
        except subprocess.TimeoutExpired:
            self._keeper.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _write_app(self) -> None:
        for name, text in APP.items():
            path = self._home / "app" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        connection = {"address": f"{HOST}:{PORT}", "root-certificates": str(self._ca.absolute())}
        lines = [f"{name} = {json.dumps(value)}" for name, value in connection.items()]
        told = ["[superlink]", f'default = "{CONNECTION}"', "", f"[superlink.{CONNECTION}]", *lines, ""]
        (self._home / "config.toml").write_text("\n".join(told), encoding="utf-8")

    def _listen(self, keeper: subprocess.Popen[str]) -> None:
        """Pass on what the supervisor says."""
        assert keeper.stdout is not None
        with keeper.stdout as lines:
            for line in lines:
                self._say(line.strip().partition(" ")[2])  # without its time

    def _look(self) -> None:
        """Count no key that was removed, whatever Flower is at, and look after the certificate."""
        looked = time.time()
        while not self._closing.wait(LOOK):
            self._count()
            if time.time() - looked > DAY:
                looked = time.time()
                try:
                    self._renew()
                except (OSError, FedtideError) as error:
                    self._say(str(error))

    def _count(self) -> dict[str, str]:
        """Return the keys that are admitted now, from when on no others count."""
        with self._lock:
            wanted = dict(self._keys())
            if wanted != self._counted:
                self._carrier.admit({name: pem_of(key) for name, key in wanted.items()})
                self._counted = wanted
            return wanted

    def _keep(self) -> None:
        """Admit nodes, and start the relay where there is none."""
        while not self._closing.wait(LOOK):
            with self._starting:
                if self._admitted is not None and self._keeper.poll() is not None and not self._closing.is_set():
                    status = self._keeper.returncode
                    self._say(f"what keeps Flower running ended (status {status}); it is started again")
                    assert self._keeper.stdin is not None
                    self._keeper.stdin.close()
                    self._start()
            if not reachable(self._local):
                continue
            try:
                if not self._carrier.connected:
                    self._flwr("run", str(self._home / "app"), CONNECTION)
                    end = time.monotonic() + RELAY
                    while not (self._carrier.connected or self._closing.is_set() or time.monotonic() > end):
                        time.sleep(0.1)
                self._admit()
            except (OSError, subprocess.SubprocessError, FedtideError) as error:
                if not self._closing.is_set():
                    self._say(f"Flower: {error}; tries again")

    def _admit(self) -> None:
        """Let the nodes in whose keys are admitted, and no others; what fails for one node stays its own trouble."""
        wanted = self._count()
        if wanted == self._admitted:
            return
        file, failed = self._folder / "flower.json", None
        known = Known.read(file)
        known.removed.extend(set(known.registered) - set(wanted.values()) - set(known.removed))
        known.write(file)
        for key in set(known.removed) & set(known.registered):
            try:
                if (number := known.registered[key]) is not None:
                    self._flwr("supernode", "unregister", str(number), CONNECTION)
                del known.registered[key]
            except FedtideError as error:  # such as one that is unregistered: the server was killed before it noted it
                self._say(f"Flower: {error}; its answers do not count")
            known.write(file)
        for name, key in wanted.items():
            if key in known.removed:
                self._say(f"{name}: its key was removed before and is not let in again; it needs a new one")
            elif key not in known.registered:
                try:
                    known.registered[key] = self._register(name, key)
                except FedtideError as error:
                    failed = error
                known.write(file)
        if failed is not None:
            raise failed
        self._admitted = wanted

    def _register(self, name: str, key: str) -> int | None:
        """Return Flower's number of a new key; None if Flower knew it, as when a server was killed at this place."""
        path = self._home / "admitted.pub"
        path.write_text(key, encoding="utf-8")
        try:
            return int(self._flwr("supernode", "register", str(path), CONNECTION, "--name", name)["node-id"])
        except FedtideError as error:
            if "already in use" not in str(error):
                raise
            return None

    def _flwr(self, *words: str) -> dict[str, Any]:
        """Run a command of Flower; return what it says."""
        command = [*at_socket(self._local, binary("flwr")), *words, "--format", "json"]
        done = subprocess.run(
            command,
            env=environment(self._home, "server_app", self._local, self._carrier.socket),
            capture_output=True,
            text=True,
            timeout=START,
            check=False,
        )
        try:
            told = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            lines = [
                line for line in (done.stdout + done.stderr).splitlines() if line.strip() and "https://" not in line
            ]
            told = {"success": False, "error-message": " ".join(lines[-2:])}
        if not isinstance(told, dict) or not told.get("success"):
            raise FedtideError(f"'flwr {' '.join(words)}' failed: {told.get('error-message')}")
        return told


def pem_of(key: str) -> str:
    """Return a public key that OpenSSH wrote as Flower writes it."""
    public = load_ssh_public_key(key.encode())
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
