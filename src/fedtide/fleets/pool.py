"""A pool of worker processes, and messages to and from them. Nothing is pickled; a process that dies is replaced.

A call names a function of this package, `module:function`, which the worker imports and calls with (arguments, send).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Protocol

from fedtide.core import codec
from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree
from fedtide.core.user_code import current_folder
from fedtide.fleets import shared
from fedtide.fleets.scratch import Scratch
from fedtide.fleets.worker import SharedRef

START = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # before anything slow: the process that started this one decides
import os, sys
from fedtide.fleets.worker import main
os.dup2(int(sys.argv[3]), 2)  # what went wrong until here is in a file, and one line of it is told
main(int(sys.argv[1]), sys.argv[2])
"""

DEATHS = 3
"""Number of processes that one call may take down before the run gives up."""


@dataclass
class _Worker:
    """A process. calls: not answered yet, the running one first. began: where it says why it could not start."""

    process: subprocess.Popen[bytes]
    connection: Connection
    began: Path
    calls: deque[int] = field(default_factory=deque)


@dataclass(frozen=True)
class Message:
    """A message of a running call, or its result (`final`)."""

    call: int
    value: Tree
    final: bool


class Processes(Protocol):
    """Processes that take calls, wherever they are.

    folder: of this process, for the flag that asks calls to end soon. multi_node: whether they may be on machines that
    see none of this one's files.
    """

    folder: Path
    multi_node: bool

    @property
    def processes(self) -> list[int]:
        """Process ids, each on its own machine."""

    def put(self, kind: str, tree: Tree, name: str | None = None) -> SharedRef:
        """Share a tree with all calls; under a known `name` it is shared already."""

    def free(self, ref: SharedRef) -> None:
        """Free a shared tree, which no later call reads."""

    def map(self, function: str, arguments: Sequence[Tree]) -> Iterator[Tree]:
        """Call `function` with each of `arguments`, short calls; results in their order."""

    def run(self, function: str, arguments: Sequence[Tree]) -> Iterator[Message]:
        """Call `function` with each of `arguments`, long calls; yield all that they send, as it comes."""


class Pool:
    """Persistent worker processes with one torch thread each.

    Args:
        size: how many.

    >>> with Pool(1) as pool:
    ...     list(pool.map("fedtide.fleets.worker:echo", [{"x": 1}, {"x": 2}]))
    [{'x': 1}, {'x': 2}]
    """

    multi_node = False

    def __init__(self, size: int) -> None:
        if os.name != "posix":
            raise FedtideError("fleet: worker processes need Linux or macOS; allowed here: one worker")
        shared = Path("/dev/shm")
        roomy = shared.is_dir() and os.access(shared, os.W_OK)
        self._scratch = Scratch(shared if roomy else None)
        self.folder = self._scratch.path
        self._numbers = self._started = 0
        self._workers: list[_Worker] = []
        try:
            while len(self._workers) < size:
                self._workers.append(self._start())
        except BaseException:
            self.close()
            raise

    def put(self, kind: str, tree: Tree, name: str | None = None) -> SharedRef:
        """Write a tree into shared memory, where all calls can read it.

        Args:
            kind: purpose of the tree.
            tree: tree to share.
            name: name under which it is known; a known tree is not written again. None makes a new name.
        """
        self._numbers += name is None
        path = self.folder / f"{kind}-{name or self._numbers}"
        if not path.exists():
            try:
                codec.to_file(path, tree)
            except FedtideError as error:
                raise FedtideError(self._advised(str(error))) from None
        return SharedRef(kind, str(path))

    def _advised(self, line: str) -> str:
        """Add to the line of an error what to do where shared memory is full."""
        full = "No space left" in line and str(self.folder) in line
        advice = f"; allowed: fewer workers (--workers), or a larger {self.folder.parent}"
        return line + advice if full else line

    def free(self, ref: SharedRef) -> None:
        """Remove it from shared memory."""
        Path(ref.name).unlink(missing_ok=True)

    # -- calls --------------------------------------------------------------------------------------------------------

    def map(self, function: str, arguments: Sequence[Tree]) -> Iterator[Tree]:
        """Call `function` with each of `arguments`, short calls; results in their order, as soon as they are known."""
        ready: dict[int, Tree] = {}
        following = 0
        for message in self.run(function, arguments, ahead=2):
            if message.final:
                ready[message.call] = message.value
            while following in ready:
                yield ready.pop(following)
                following += 1

    def run(self, function: str, arguments: Sequence[Tree], *, ahead: int = 1) -> Iterator[Message]:
        """Call `function` with each of `arguments`; everything the calls send, as it comes.

        A call whose process dies is done again by another. An error of a call ends all of them.

        Args:
            function: `module:function` of this package.
            arguments: one entry per call.
            ahead: how many calls a worker may hold (1 or 2), so that it need not wait for the next one.
        """
        waiting = deque(range(len(arguments)))
        deaths = [0] * len(arguments)
        unanswered = len(arguments)
        try:
            while unanswered:
                self._hand_out(function, arguments, waiting, ahead)
                for worker in self._ready():
                    received = self._receive(worker)
                    if received is None:
                        self._recover(worker, waiting, deaths)
                        continue
                    kind, value = received
                    if kind == "error":
                        worker.calls.popleft()
                        line = self._advised(value["line"])
                        raise FedtideError(line) if value["user"] else RuntimeError(line)
                    final = kind == "done"
                    call = worker.calls.popleft() if final else worker.calls[0]
                    unanswered -= final
                    yield Message(call, value, final)
        finally:
            # A caller that stops early must not leave calls running.
            for worker in self._workers:
                if worker.calls:
                    self._replace(worker)

    def _hand_out(self, function: str, arguments: Sequence[Tree], waiting: deque[int], ahead: int) -> None:
        for depth in range(1, ahead + 1):
            for worker in self._workers:
                if waiting and len(worker.calls) < depth:
                    call = waiting.popleft()
                    worker.calls.append(call)
                    # A worker that died in the meantime is found out when it is listened to.
                    with contextlib.suppress(OSError):
                        worker.connection.send_bytes(codec.to_bytes({"call": function, "arguments": arguments[call]}))

    def _recover(self, worker: _Worker, waiting: deque[int], deaths: list[int]) -> None:
        """Replace a worker that died, and put its calls back."""
        said = worker.began.read_text(errors="replace").split("\n") if worker.began.exists() else []
        if why := next((line.strip() for line in reversed(said) if line.strip()), ""):
            raise FedtideError(f"fleet.workers: a worker process could not start: {why}")
        waiting.extendleft(reversed(worker.calls))
        if worker.calls:
            deaths[worker.calls[0]] += 1
            if deaths[worker.calls[0]] >= DEATHS:
                raise FedtideError(f"a worker process died {DEATHS} times on the same work; giving up")
        self._replace(worker)

    @property
    def processes(self) -> list[int]:
        """Process ids."""
        return [worker.process.pid for worker in self._workers]

    # -- processes ----------------------------------------------------------------------------------------------------

    def _start(self) -> _Worker:
        ours, theirs = Pipe()
        self._started += 1
        began = self.folder / f"start-{self._started}"
        environment = os.environ | {"PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        terminal = os.dup(2)
        with open(began, "wb") as errors:
            process = subprocess.Popen(
                # -P: the current folder is not looked through for modules.
                [sys.executable, "-P", "-c", START, str(theirs.fileno()), str(self.folder), str(terminal)],
                pass_fds=[theirs.fileno(), terminal],
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=errors,
                cwd=None if current_folder() else "/",  # where the current folder was removed libraries end at once
                process_group=0,  # Ctrl-C in a terminal is for this process, which decides when to stop
            )
        os.close(terminal)
        theirs.close()
        return _Worker(process, ours, began)

    def _replace(self, worker: _Worker) -> None:
        worker.connection.close()
        worker.process.kill()
        worker.process.wait()
        fresh = self._start()
        worker.process, worker.connection, worker.began = fresh.process, fresh.connection, fresh.began
        worker.calls = fresh.calls

    def _ready(self) -> list[_Worker]:
        ready = wait([worker.connection for worker in self._workers if worker.calls])
        return [worker for worker in self._workers if worker.connection in ready]

    def _receive(self, worker: _Worker) -> tuple[str, Tree] | None:
        """The next message of a worker; None if it has died."""
        try:
            message = codec.from_bytes(worker.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        if message["file"] is None:
            return message["kind"], message["value"]
        return message["kind"], shared.read(Path(message["file"]))

    def close(self) -> None:
        """End the processes and remove what they shared."""
        try:
            for worker in self._workers:
                worker.connection.close()
            for worker in self._workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(timeout=1.0)
        finally:  # also where a person is in a hurry
            with uninterrupted():
                for worker in self._workers:
                    worker.process.kill()
                for worker in self._workers:
                    worker.process.wait()
                self._scratch.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until the block is over, as far as this thread receives them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def search_path() -> str:
    """Return where another process finds modules: as this one does, but never in the current folder.

    What a configuration names is looked for there last of all (`fedtide.core.user_code`).
    """
    here = current_folder()
    package = str(Path(__file__).resolve().parents[2])
    paths = [path for path in sys.path if path and path != here]
    return os.pathsep.join(paths if package in paths else [*paths, package])
