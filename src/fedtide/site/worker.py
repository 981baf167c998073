"""The two ends between a node's process, which is connected, and its worker, which has the rows and does the work."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any

from fedtide.core.errors import FedtideError
from fedtide.remote.grpc.line import Failed

STARTING = 300.0
"""Seconds that a worker may take until it has read its rows."""
OVERTIME = 2.0
"""Seconds past its deadline after which a question that is still at work takes the worker down: nothing else would stop
it, and the next question waits behind it."""
ATTEMPTS = 3
"""Workers that one question may take down."""
SHORTEST, LONGEST, STEADY = 1.0, 15.0, 60.0
"""Seconds until a worker that died is started again, at first and at most; and after which one has lasted."""
IDLE, QUICK = 600.0, 10.0
"""Seconds without a question after which a worker rests, and within which it has to have started to do so."""
LOG = 20_000_000
"""Bytes of the worker's log from which on it begins anew; what was in it is kept beside it."""
LOOK = 0.2

CAUSES = (
    (r"fedtide\.core\.errors\.FedtideError: (.*)", r"\1"),
    ("No space left on device", "no space is left on the disk"),
    ("MemoryError|DefaultCPUAllocator: can't allocate", "this machine's memory is too small for the work"),
)
"""What a worker writes when it ends, and what it means."""

Handle = Callable[[dict[str, Any], bytes], tuple[Mapping[str, Any], bytes]]
"""Answers a question: header and payload in, header and payload out."""


class Worker:
    """A worker's process, which is started again whenever it dies.

    Args:
        command: of the process; the number of its end of the line is put behind it.
        log: the file that its output goes to.
        say: is told in a line what a person should know.
        kept: open files that it takes along, such as the lock of its folder.
        rests: whether it ends when it has had nothing to do for long, until the next question; the machine of a node
            has its memory then.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        say: Callable[[str], None],
        kept: Sequence[int] = (),
        rests: bool = False,
    ) -> None:
        self._command, self._log, self._say, self._kept = list(command), log, say, tuple(kept)
        self._rests, self._resting, self._used, self._took = rests, False, time.monotonic(), 0.0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pause, self._next, self._said = SHORTEST, 0.0, ""
        self._closed = False

    def keep(self) -> None:
        """Start the worker if it has died and is due, or let it rest; it is called every now and then."""
        self._cut_log()
        if self._lock.acquire(blocking=False):
            try:
                if not self._resting and self._there() and self._ready() and self._is_idle():
                    self._rest()
            finally:
                self._lock.release()

    def answer(self, header: bytes, payload: bytes, seconds: float) -> tuple[bytes, bytes]:
        """Have a question answered.

        Raises:
            Failed: it took three workers down, or there was no answer in time.
        """
        until = time.monotonic() + seconds
        with self._lock:
            self._resting = False
            for _ in range(ATTEMPTS):
                self._wait(until)
                try:
                    return self._exchange(header, payload, until)
                except (EOFError, OSError):
                    self._end()
                finally:
                    self._used = time.monotonic()
            raise Failed(f"its worker died {ATTEMPTS} times on this question")

    def close(self) -> None:
        """End the worker."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
            process.wait()

    def _is_idle(self) -> bool:
        """Tell whether the worker had nothing to do for long, and is there again soon enough when it has."""
        return self._rests and self._took < QUICK and time.monotonic() - self._used > IDLE

    def _rest(self) -> None:
        self._end()
        self._process, self._resting = None, True
        self._line.close()

    def _wait(self, until: float) -> None:
        """Wait until the worker is there and has read its rows."""
        starting = time.monotonic() + STARTING
        while not (self._there() and self._ready()):
            if self._closed:
                raise Failed("its node ends")
            if time.monotonic() > until:
                raise Failed("late: its worker did not start in time")
            if time.monotonic() > starting:
                self._end()
                starting = time.monotonic() + STARTING
            time.sleep(LOOK)

    def _there(self) -> bool:
        """Tell whether the worker's process runs; start it where it is due."""
        if self._process is not None and self._process.poll() is None:
            return True
        if self._process is not None:
            self._note_end()
        if time.monotonic() >= self._next and not self._closed:
            try:
                self._start()
            except OSError as error:  # no process, file or memory is left
                self._put_off(f"cannot be started ({error})")
        return self._process is not None

    def _start(self) -> None:
        here, there = socketpair()
        try:
            with there, self._log.open("ab") as out:
                self._from = out.tell()
                self._process = subprocess.Popen(
                    [*self._command, str(there.fileno())], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    pass_fds=(there.fileno(), *self._kept), start_new_session=True,
                )  # fmt: skip
        except OSError:
            here.close()
            raise
        self._line, self._began, self._is_ready = Connection(here.detach()), time.monotonic(), False

    def _ready(self) -> bool:
        if not self._is_ready and self._line.poll(0):
            with contextlib.suppress(EOFError, OSError):
                self._is_ready = self._line.recv_bytes(100) == b"ready"
                self._said, self._took = "", time.monotonic() - self._began
        return self._is_ready

    def _exchange(self, header: bytes, payload: bytes, until: float) -> tuple[bytes, bytes]:
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._end()

        watch = threading.Timer(max(until - time.monotonic(), 0.0) + OVERTIME, stop)
        watch.start()
        try:
            self._line.send_bytes(header)
            self._line.send_bytes(payload)
            return self._line.recv_bytes(), self._line.recv_bytes()
        except (EOFError, OSError):
            if not late.is_set():
                raise
            self._say("a question took longer than it may; the worker starts again")
            self._note_end(known=True)
            self._next = 0.0
            raise Failed("late: no answer in time") from None
        finally:
            watch.cancel()

    def _end(self) -> None:
        """Kill the worker if it is not dead yet."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _note_end(self, known: bool = False) -> None:
        """Say why the worker died, if that is not known, and when it is started again."""
        assert self._process is not None
        lasted, status = time.monotonic() - self._began, self._process.wait()
        self._end()
        self._process = None
        self._line.close()
        line = self._cause() or f"ended with status {status} after {lasted:.0f} s; see {self._log}"
        if lasted > STEADY:
            self._pause = SHORTEST / 2
        self._put_off("" if known else line)

    def _put_off(self, line: str) -> None:
        """Say why there is no worker, if that was not said last, and try again later."""
        if line and line != self._said and not self._closed:
            self._say(f"worker: {line}")
        self._said = line
        self._pause = min(2 * self._pause, LONGEST)
        self._next = time.monotonic() + self._pause

    def _cause(self) -> str:
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._from)
            text = file.read(1_000_000).decode(errors="replace")
            found = ((re.search(pattern, text), line) for pattern, line in CAUSES)
            return next((match.expand(line) for match, line in found if match), "")
        return ""

    def _cut_log(self) -> None:
        """Begin the log anew where it is too long: who asks much could fill the disk."""
        with contextlib.suppress(OSError):
            if self._log.stat().st_size > LOG:
                shutil.copyfile(self._log, self._log.with_suffix(".log.1"))
                os.truncate(self._log, 0)  # the worker goes on at its end
                self._from = 0


def serve(line: Connection, handle: Handle, say: Callable[[str], None]) -> None:
    """Answer questions until the other end is gone.

    Args:
        line: to the node's process.
        handle: answers them.
        say: writes to the log.
    """
    from fedtide.remote import messages

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    line.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            header, payload = line.recv_bytes(messages.HEADER), line.recv_bytes()
            told: Mapping[str, Any]
            try:
                asked = messages.from_json(header)
            except FedtideError as error:
                told, answer = {"failed": str(error)[:300]}, b""
            else:
                try:
                    told, answer = handle(asked, payload)
                except Exception as error:  # the server gets its kind alone: a text may hold data
                    say(f"failed: {type(error).__name__}: {error}")
                    told, answer = {"failed": type(error).__name__}, b""
            line.send_bytes(json.dumps(told).encode())
            line.send_bytes(answer)


def _end_with(parent: int) -> None:
    """End at once when the node's process is gone, whatever is worked on: its successor has a worker of its own."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def write_log(text: str) -> None:
    """Write a line to the log; where its disk is full, that is no reason not to answer."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stdout, flush=True)
