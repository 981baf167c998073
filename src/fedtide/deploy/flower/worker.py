"""The resident worker of a node: answers one question after the other on a Unix socket."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from fedtide.core.errors import FedtideError
from fedtide.fleets import messages

Handle = Callable[[dict[str, Any], bytes], tuple[Mapping[str, Any], bytes]]
"""Answers a question: header and payload in, header and payload out."""

HEADER = 1000
"""Bytes of what says how long a question may take."""

LONGEST = 1e6
"""Seconds that a question may take."""

OVERTIME = 2.0
"""Seconds past its deadline after which a question that is still at work takes the process down: nothing else would
stop it, and the next question waits behind it."""


def say(text: str) -> None:
    """Write a line to the log; where its disk is full, that is no reason not to answer."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def serve(socket: Path, handle: Handle, say: Callable[[str], None] = say) -> None:
    """Answer questions for ever, on a socket that only this user can open."""
    socket.unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        listener = Listener(str(socket), "AF_UNIX", backlog=8)
    finally:
        os.umask(mask)
    with listener:
        while True:
            try:
                with listener.accept() as line:
                    allowed = _seconds(messages.from_json(line.recv_bytes(HEADER)).get("seconds"))
                    header, payload = messages.from_json(line.recv_bytes(messages.HEADER)), line.recv_bytes()
                    told, answer = _answer_in_time(handle, header, payload, allowed, say)
                    line.send_bytes(json.dumps(told).encode())
                    line.send_bytes(answer)
            except (EOFError, OSError, FedtideError):  # who asked has gone, or is not who should ask
                continue


def _seconds(said: Any) -> float:
    """Return how long a question may take."""
    if not isinstance(said, int | float) or not -LONGEST <= said <= LONGEST:  # it may be late already
        raise FedtideError(f"seconds: found {said!r:.60}, allowed: at most {LONGEST:g}")
    return max(float(said), 0.0)


def _answer_in_time(
    handle: Handle, header: dict[str, Any], payload: bytes, seconds: float, say: Callable[[str], None]
) -> tuple[dict[str, Any], bytes]:
    def give_up() -> None:
        say(f"a question took longer than its {seconds:.0f} s; the worker starts again")
        os._exit(3)

    began = time.monotonic()
    watch = threading.Timer(seconds + OVERTIME, give_up)
    watch.daemon = True
    watch.start()
    try:
        told, answer = handle(header, payload)
        return dict(told) | {"seconds": time.monotonic() - began}, answer
    except Exception as error:  # the server gets its kind alone: a text may hold data
        say(f"failed: {type(error).__name__}: {error}")
        return {"failed": type(error).__name__}, b""
    finally:
        watch.cancel()
