"""The connected process of a node: it keeps its stream to the server and its worker, until it is ended.

It imports no torch, because it waits most of the time; the worker has the rows and does the work. Both ends of the line
between the two are here.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any, TextIO

from fedtide.core.atomic import is_locked, lock, open_lock, write_text
from fedtide.core.bounds import HEADER
from fedtide.core.errors import FedtideError
from fedtide.fleets.this_machine import end_with_parent
from fedtide.remote.grpc.line import Answer, Caller, Failed, Line
from fedtide.site.machine import Log, read_private_key

RULES = "policy.path"
"""File in a node's folder with the place of its policy."""
STARTING = 300.0
"""Seconds that a worker may take until it has read its rows."""
OVERTIME = 2.0
"""Seconds past the deadline of a question after which its worker is killed, because the next question waits."""
ATTEMPTS = 3
"""Number of workers that may die of one question."""
SHORTEST, LONGEST, STEADY = 1.0, 15.0, 60.0
"""Seconds until a dead worker is started again, at first and at most; one that lasts longer begins at the first."""
IDLE, QUICK = 600.0, 10.0
"""Seconds without a question after which a worker rests; it rests only if it starts within the second number. It
also waits for twice as long as the last question may take: it is asked to open a sum when the last of the others has
answered, and has the secrets for that in memory alone."""
LOG = 20_000_000
"""Maximum number of bytes of the worker's log, before it begins anew and the old one is kept."""
LOOK = 0.2
"""Seconds between two looks at a worker that starts."""
RUNS_ALREADY = "another process runs this node already; end it first"
KEEP = 1.0
"""Seconds between two looks at a worker at rest."""
SUCCESSION = 15.0
"""Seconds in which the rest of a node that was killed has to end."""

JUDGED = "judged"
"""Folder in a node's folder of the models that it was judged with."""
REFUSED, REASONS = "refused: ", 20
"""Beginning of a node's word for a client whose answer is refused, and reasons of a round that are said at most."""

Handle = Callable[[dict[str, Any], bytes], tuple[Mapping[str, Any], bytes]]
"""Answers a question: header and payload in, header and payload out."""


@dataclass(frozen=True)
class LineSettings:
    """Settings of the stream between a node and its server.

    Args:
        address: HOST:PORT of the server.
        authority: file with the certificate of the site's authority.
        run: digest of the study.
        name: name of the node.
        key: file with the node's private key.
        json: whether the node writes its log as lines of JSON.
        with_parent: whether the node ends when the process ends that started it.
        worker: command of another program in place of the worker; () runs the worker.
        warned: whether its owner was warned of its rows, which the server counts.
    """

    address: str
    authority: str
    run: str
    name: str
    key: str
    json: bool = False
    with_parent: bool = False
    worker: Sequence[str] = ()
    warned: bool = False

    @property
    def server(self) -> Caller:
        """The node's knowledge of its server, with its key."""
        key = read_private_key(Path(self.key))
        return Caller(self.address, Path(self.authority).read_bytes(), self.run, self.name, key, self.warned)


def node_command(path: Path) -> list[str]:
    """Return the command that runs a node with the settings of a file."""
    return [sys.executable, "-P", "-m", "fedtide.site.node_process", str(path)]


def write_settings(folder: Path, worker: Mapping[str, Any], line: LineSettings) -> Path:
    """Write the settings of a node to a file of its folder; return the file.

    Args:
        folder: the node's folder.
        worker: settings of its worker, see `fedtide.site.seat`.
        line: settings of its stream.
    """
    (folder / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "run" / f"worker.json.{secrets.token_hex(8)}.writing"  # until the process has the folder's lock
    path.write_text(json.dumps({**worker, "line": asdict(line)}), encoding="utf-8")
    return path


def keep_settings(path: Path) -> Path:
    """Make settings those of the node's folder, whose lock this process holds; return the file."""
    text, file = path.read_text(encoding="utf-8"), path.with_name("worker.json")
    write_text(path.parents[1] / RULES, json.loads(text).get("policy") or "")
    write_text(file, text)
    path.unlink()
    return file


class Worker:
    """A worker's process, which is started again whenever it dies.

    Args:
        command: command of the process; the number of its end of the line is appended.
        log: the file of its output.
        say: takes a line for a person.
        files: numbers of open files that it inherits, such as the lock of its folder.
        rests: whether it ends after a long time without a question, to free its memory until the next one.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        say: Callable[[str], None],
        files: Sequence[int] = (),
        rests: bool = False,
    ) -> None:
        self._command, self._log, self._say, self._files = list(command), log, say, tuple(files)
        self._rests, self._resting, self._used, self._took = rests, False, time.monotonic(), 0.0
        self._needed = 0.0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pause, self._next, self._said = SHORTEST, 0.0, ""
        self._closed = self._ready = False

    def keep(self) -> None:
        """Start the worker if it has died and is due, or let it rest; this is called every now and then."""
        with contextlib.suppress(OSError):
            if self._log.stat().st_size > LOG:  # a server that asks much could fill the disk
                shutil.copyfile(self._log, self._log.with_suffix(".log.1"))
                os.truncate(self._log, 0)  # the worker goes on at its end
        if self._lock.acquire(blocking=False):
            try:
                is_quick = not self._resting and self._is_ready() and self._took < QUICK
                if self._rests and is_quick and time.monotonic() > max(self._used + IDLE, self._needed):
                    self._end()
                    self._process, self._resting = None, True
                    self._line.close()
            finally:
                self._lock.release()

    def answer(self, header: bytes, payload: bytes, seconds: float) -> tuple[bytes, bytes]:
        """Return the worker's answer to a question.

        Raises:
            Failed: three workers died of the question, or there was no answer in time.
        """
        until = time.monotonic() + seconds
        with self._lock:
            self._resting, self._needed = False, until + seconds
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

    def _wait(self, until: float) -> None:
        """Wait until the worker runs and has read its rows."""
        starting = time.monotonic() + STARTING
        while not self._is_ready():
            if self._closed:
                raise Failed("its node ends")
            if time.monotonic() > until:
                raise Failed("late: its worker did not start in time")
            if time.monotonic() > starting:
                self._end()
                starting = time.monotonic() + STARTING
            time.sleep(LOOK)

    def _is_ready(self) -> bool:
        """Tell whether the worker runs and has read its rows; start it if it is due."""
        if self._process is not None and self._process.poll() is not None:
            self._note_end()
        if self._process is None and time.monotonic() >= self._next and not self._closed:
            try:
                self._start()
            except OSError as error:  # no process, file or memory is left
                self._put_off(f"cannot be started ({error})")
        if self._process is not None and not self._ready and self._line.poll(0):
            with contextlib.suppress(EOFError, OSError):
                self._ready = self._line.recv_bytes(100) == b"ready"
                self._said, self._took = "", time.monotonic() - self._began
        return self._process is not None and self._ready

    def _start(self) -> None:
        ours, theirs = socketpair()
        try:
            with theirs, self._log.open("ab") as out:
                self._process = subprocess.Popen(
                    [*self._command, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    pass_fds=(theirs.fileno(), *self._files), start_new_session=True,
                )  # fmt: skip
        except OSError:
            ours.close()
            raise
        self._line, self._began, self._ready = Connection(ours.detach()), time.monotonic(), False

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
            self._note_end(is_said=True)
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

    def _note_end(self, is_said: bool = False) -> None:
        """Say why the worker died, unless that was said, and when it is started again."""
        assert self._process is not None
        lasted, status = time.monotonic() - self._began, self._process.wait()
        self._end()
        self._process = None
        self._line.close()
        if lasted > STEADY:
            self._pause = SHORTEST / 2
        self._put_off("" if is_said else f"ended with status {status} after {lasted:.0f} s; see {self._log}")

    def _put_off(self, line: str) -> None:
        """Say why there is no worker, unless that was said last, and try again later."""
        if line and line != self._said and not self._closed:
            self._say(f"worker: {line}")
        self._said = line
        self._pause = min(2 * self._pause, LONGEST)
        self._next = time.monotonic() + self._pause


class Refusals:
    """Says in a node's log why questions are refused, each reason once in a round.

    Args:
        answer: answers a question.
        say: takes a line for a person.
        log: the worker's log, which may say more.
    """

    def __init__(self, answer: Answer, say: Callable[[str], None], log: Path) -> None:
        self._answer, self._say, self._log = answer, say, log
        self._round, self._reasons = None, set[str]()

    def answer(self, header: bytes, payload: bytes, seconds: float) -> tuple[bytes, bytes]:
        """Answer a question, and say why it is refused."""
        answer = self._answer(header, payload, seconds)
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):  # a stranger's words
            words = {word for word in json.loads(answer[0])["clients"].values() if word.startswith(REFUSED)}
            if words:
                asked = json.loads(header)
                self._note(asked["moment"]["round"], asked["question"], words)
        return answer

    def _note(self, number: Any, question: str, words: set[str]) -> None:
        if number != self._round:
            self._round, self._reasons = number, set()
        for word in sorted(words - self._reasons)[: REASONS - len(self._reasons)]:
            self._reasons.add(word)
            more = (
                f" ({self._log} says more)" if any(end in word for end in ("cannot be read now", "says more")) else ""
            )
            self._say(f"round {number}: '{question[:100]}' is {word[:500]}{more}")


def answer_questions(line: Connection, handle: Handle, say: Callable[[str], None]) -> None:
    """Answer questions in a worker until the node's process is gone.

    Args:
        line: line to the node's process.
        handle: answers them.
        say: writes to the log.
    """
    from fedtide.remote import messages

    end_with_parent()  # its successor has a worker of its own
    line.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            content, payload = line.recv_bytes(HEADER), line.recv_bytes()
            answer: tuple[Mapping[str, Any], bytes]
            try:
                header = messages.from_json(content)
            except FedtideError as error:
                answer = {"failed": str(error)[:300]}, b""
            else:
                try:
                    answer = handle(header, payload)
                except Exception as error:  # the server gets its kind alone: a text may hold data
                    say(f"failed: {type(error).__name__}: {error}")
                    answer = {"failed": type(error).__name__}, b""
            line.send_bytes(json.dumps(answer[0]).encode())
            line.send_bytes(answer[1])


def write_log(text: str) -> None:
    """Write a line to the log; a full disk is no reason not to answer."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stdout, flush=True)


def main(path: Path) -> int:
    """Run a node with the settings of a file; return the exit status."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    line = LineSettings(**settings["line"])
    log = Log(line.json)
    if line.with_parent:
        end_with_parent()
    try:
        lock_file, alive = _lock(path.with_name("lock"), log)
        path = keep_settings(path)
    except (FedtideError, OSError) as error:
        path.unlink(missing_ok=True)
        log.say("process", f"error: {error}")
        return 2

    def say(text: str) -> None:
        log.say("process", text)

    worker = Worker(
        [*(line.worker or (sys.executable, "-P", "-m", "fedtide.site.seat")), str(path)],
        path.with_name("worker.log"),
        say,
        (lock_file.fileno(),),
        rests=settings.get("health") is None,  # a health address is one of the worker
    )
    try:
        refusals = Refusals(worker.answer, say, path.with_name("worker.log"))
        stream = Line(line.server, refusals.answer, say, path.with_name("let-in"), path.parents[1] / JUDGED)
        return asyncio.run(_run(stream, worker, alive, say))
    except (FedtideError, OSError) as error:
        log.say("process", f"error: {error}")
        return 2
    finally:
        worker.close()


async def _run(line: Line, worker: Worker, alive: TextIO, say: Callable[[str], None]) -> int:
    loop, stop, status = asyncio.get_running_loop(), asyncio.Event(), 0

    def interrupt() -> None:
        nonlocal status
        say("interrupted; the same command joins again")
        status = 130
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores one
            loop.add_signal_handler(number, interrupt if number == signal.SIGINT else stop.set)
    threading.Thread(target=_keep, args=(worker,), daemon=True).start()
    talking, stopping = asyncio.create_task(line.run()), asyncio.create_task(stop.wait())
    await asyncio.wait({talking, stopping}, return_when=asyncio.FIRST_COMPLETED)
    alive.close()
    worker.close()
    if not talking.done():
        os._exit(status)  # a thread may wait for the worker
    await talking
    return 0


def _keep(worker: Worker) -> None:
    while True:
        worker.keep()
        time.sleep(KEEP)


def _lock(path: Path, log: Log) -> tuple[TextIO, TextIO]:
    """Return the lock of a node's folder, which its worker inherits: two nodes would overwrite each other's memory.

    The second lock is held by the connected process alone, until it ends.
    """
    file, alive, until, waits = open_lock(path), path.with_name("alive"), time.monotonic() + SUCCESSION, False
    while True:
        try:
            lock(file.fileno(), wait=False)
            second = open_lock(alive)
            lock(second.fileno())  # who looks at it holds it for a moment
            return file, second
        except BlockingIOError:
            runs = is_locked(alive)
            if not runs and not waits:
                log.say("process", "waits for another process of this node to end")
            waits = True
            if runs or time.monotonic() > until:
                raise FedtideError(f"{path.parent.parent}: {RUNS_ALREADY}") from None
            time.sleep(LOOK)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
