"""What a server or a node says while it runs: lines for people, or lines of JSON."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TextIO

from fedtide.core.errors import FedtideError, printable


@dataclass(frozen=True)
class Log:
    """A log, which several threads may write to.

    Args:
        lines: write each line as JSON, with its time, event, text and facts; else the text alone with its time.
        file: where it goes; None is the standard output.
    """

    lines: bool = False
    file: TextIO | None = None
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def say(self, event: str, text: str, **facts: Any) -> None:
        """Write that something happened.

        Args:
            event: one word for programs, such as "round", "answered", "refused".
            text: a sentence for people.
            facts: numbers and names, in plain JSON; only programs are told them.
        """
        now = datetime.now(UTC)
        line = f"{now.astimezone():%H:%M:%S} {printable(' '.join(text.split()))}"
        if self.lines:
            line = json.dumps(
                {"at": now.isoformat(timespec="milliseconds"), "event": event, "text": text} | _plain(facts)
            )
        with self._lock:
            try:
                print(line, file=self.file or sys.stdout, flush=True)
            except (OSError, ValueError):  # no reader is left, or the disk is full
                return


class Health:
    """Tell programs on this machine how a server is: GET /health on the loopback returns JSON.

    Status 200 where all is well, 503 where `status` has a "problem".

    Args:
        port: of 127.0.0.1; 0 takes one that is free.
        status: what to tell, in plain JSON; it is called in another thread.
    """

    def __init__(self, port: int, status: Callable[[], dict[str, Any]]) -> None:
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(status))
        except (OSError, OverflowError) as error:
            raise FedtideError(f"--health {port}: {error}; allowed: a free port of this machine") from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/health"

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.shutdown()
        self.close()

    def close(self) -> None:
        """Listen no longer."""
        self._server.server_close()


def check_port(port: int) -> None:
    """Raise for a port at which `Health` could not listen now."""
    Health(port, dict).close()


def _handler(status: Callable[[], dict[str, Any]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            # A page that a person opens in a browser may ask for any address by a name of its own.
            known = self.path == "/health" and host in ("127.0.0.1", "localhost")
            said = _plain(status()) if known else {"problem": "allowed: GET /health"}
            body = json.dumps(said).encode()
            self.send_response(404 if not known else 503 if said.get("problem") else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given: Any) -> None:
            """Say nothing: the log is for what happens in the federation."""

    return Handler


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Return facts as JSON takes them; a process that has none needs no torch for it."""
    if not facts:
        return {}
    from fedtide.core.record import plain

    made: dict[str, Any] = plain(facts)
    return made
