"""A program and its machine: files that strangers may have written, a log, a health address.

Nothing here imports torch, because a node's connected process has none.
"""

import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TextIO

from fedtide.core.errors import FedtideError, printable, refused
from fedtide.core.files import read_bytes
from fedtide.wire.keys import is_node_key, library

SECRET, PUBLIC = 0o600, 0o644
KIND = "ecdsa-sha2-nistp384"
"""The kind of key that nodes have."""


def check_own(path: Path) -> None:
    """Raise if another user owns a folder, may look into it or may replace it; a missing folder is fine."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise FedtideError(f"{path}: {error.strerror}") from None
    if stat.S_ISLNK(status.st_mode):
        raise FedtideError(f"{path}: is a link, allowed: a folder")
    if os.name == "posix" and status.st_uid != os.getuid():
        raise refused(f"{path}: owner", f"user {status.st_uid}", f"user {os.getuid()}, who runs this command")
    _check_mode(path, status.st_mode, "0700", "700")


def check_secret(path: Path) -> None:
    """Raise if other users may read a secret file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise FedtideError(f"{path}: {error.strerror}") from None
    _check_mode(path, mode, "0600", "600")


def read_private_key(path: Path) -> Any:
    """Return the private key of a node.

    Raises:
        FedtideError: the key is damaged, of another kind, or other users may read it.
    """
    check_secret(path)
    try:
        key = library().hazmat.primitives.serialization.load_ssh_private_key(read_bytes(path, 20_000), None)
    except (ValueError, TypeError, library().exceptions.UnsupportedAlgorithm) as error:
        raise FedtideError(f"{path}: damaged or not a private key of OpenSSH ({error})") from None
    if not is_node_key(key):
        raise FedtideError(f"{path}: is a key of another kind, allowed: {KIND}")
    return key


def _check_mode(path: Path, mode: int, allowed: str, chmod: str) -> None:
    if os.name == "posix" and mode & 0o077:
        raise refused(f"{path}: mode", f"{mode & 0o777:04o}", f"{allowed}; mend it with: chmod {chmod} {path}")


@dataclass(frozen=True)
class Log:
    """A log, which several threads may write to.

    Args:
        lines: write each line as JSON, with time, event, text and facts; else the time and the text.
        file: the output; None is the standard output.
    """

    lines: bool = False
    file: TextIO | None = None
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def say(self, event: str, text: str, **facts: Any) -> None:
        """Write that something happened.

        Args:
            event: one word for programs, such as "round", "answered", "refused".
            text: a sentence for people.
            facts: numbers and names in plain JSON, for programs alone.
        """
        now = datetime.now(UTC)
        line = f"{now.astimezone():%H:%M:%S} {printable(' '.join(text.split()))}"
        if self.lines:
            head = {"at": now.isoformat(timespec="milliseconds"), "event": event, "text": text}
            if facts:
                from fedtide.core.record import plain  # and torch

                facts = plain(facts)
            line = json.dumps(head | facts)
        with self._lock, suppress(OSError, ValueError):  # the reader is gone, or the disk is full
            print(line, file=self.file or sys.stdout, flush=True)


class Health:
    """Health address on this machine: on the loopback GET /health returns JSON for programs, and GET / a page.

    The status code of /health is 200 if all is well, and 503 if `status` has a "problem".

    Args:
        port: port of 127.0.0.1; 0 takes a free one.
        status: returns the answer, in plain JSON; it is called in another thread.
        page: returns a page of HTML for people, likewise; None has none.
    """

    def __init__(self, port: int, status: Callable[[], dict[str, Any]], page: Callable[[], str] | None = None) -> None:
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(status, page))
        except (OSError, OverflowError) as error:
            raise FedtideError(f"--health {port}: {error}; allowed: a free port of this machine") from None
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()

    @property
    def address(self) -> str:
        """The address that it listens at."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/health"

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()


SAFE = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Headers by which a browser runs no script of a page, and loads nothing for it."""


def _handler(status: Callable[[], dict[str, Any]], page: Callable[[], str] | None) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            # A page in a browser may ask for any address, under a host name of its own.
            is_near = host in ("127.0.0.1", "localhost")
            if is_near and self.path == "/" and page is not None:
                self._send(200, "text/html; charset=utf-8", page())
                return
            allowed = is_near and self.path == "/health"
            answer = status() if allowed else {"problem": "allowed: GET /health"}
            code = 404 if not allowed else 503 if answer.get("problem") else 200
            self._send(code, "application/json", json.dumps(answer))

        def _send(self, code: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **SAFE}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Write nothing: the log is for events of the federation."""

    return Handler
