"""Calls of functions by several processes, and the pool of worker processes on this machine.

A call names a function of this package, `module:function`, which a process imports and calls with (arguments, channel).
If a process dies another one does its calls again. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from fedtide.core import codec
from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree
from fedtide.fields.user_code import current_folder
from fedtide.fleets.this_machine import Scratch, search_path
from fedtide.fleets.worker import SharedRef, read_shared, write_shared

DEATHS = 3
"""Number of processes that one call may take down before the run gives up."""


Here = Callable[[int], Any]
"""Does a call in this process, by its number, and returns its result."""


@dataclass(frozen=True)
class Message:
    """A message of a running call, or its result (`final`)."""

    call: int
    value: Tree
    final: bool


@dataclass(eq=False)
class Member:
    """A process of a pool; `calls` are those that it has not answered yet, the running one first."""

    calls: deque[int] = field(default_factory=deque, kw_only=True)


M = TypeVar("M", bound=Member)


@dataclass
class Batch:
    """Calls that are to be made.

    Attributes:
        function: name of the function.
        arguments: of each call.
        short: whether calls are answered at once, without messages on the way.
        here: does a call in this process, beside the others.
        reach: how far the next calls may be ahead of the first one without an answer.
        taken: number of results that were taken, in order.
        waiting: calls that are not handed out yet.
        deaths: number of processes that each call took down.
    """

    function: str
    arguments: Sequence[Tree]
    short: bool = False
    here: Here | None = None
    reach: float = math.inf
    taken: int = 0
    waiting: deque[int] = field(default_factory=deque)
    deaths: Counter[int] = field(default_factory=Counter)


class Processes(ABC, Generic[M]):
    """Processes that take calls, wherever they are.

    Attributes:
        title: of a member, in messages.
        reach: number of calls for each member that may be ahead of the first open one, so that few results wait for a
            slow call.
        members: the processes.
        folder: of this process, for the flag that asks calls to end soon.
        multi_node: whether members may be on machines that see none of this one's files.
        joined: whether this process takes short calls, too.
    """

    title: str
    reach: float = math.inf
    members: list[M]
    folder: Path
    multi_node: bool
    joined: bool = False

    def map(self, function: str, arguments: Sequence[Tree], here: Here | None = None) -> Iterator[Tree]:
        """Call `function` with each of `arguments`, short calls; yield results in order, as soon as they are known.

        Args:
            function: what is called.
            arguments: of each call.
            here: does a call in this process, by its number, if the processes are `joined`.
        """
        ready: dict[int, Tree] = {}
        batch = Batch(function, arguments, short=True, here=here, reach=self.reach * len(self.members))
        for message in self._call(batch):
            if message.final:
                ready[message.call] = message.value
            while batch.taken in ready:
                yield ready.pop(batch.taken)
                batch.taken += 1

    def run(self, function: str, arguments: Sequence[Tree]) -> Iterator[Message]:
        """Call `function` with each of `arguments`, long calls; yield everything that they send, as it comes.

        A call whose process dies is done again by another. An error of a call ends all of them.
        """
        return self._call(Batch(function, arguments))

    def _call(self, batch: Batch) -> Iterator[Message]:
        batch.waiting.extend(range(len(batch.arguments)))
        unanswered = len(batch.arguments)
        try:
            while unanswered:
                own_call = self._take_own_call(batch)
                self._hand_out(batch)
                if batch.here is not None and own_call is not None:  # the others have work meanwhile
                    unanswered -= 1
                    yield Message(own_call, batch.here(own_call), True)
                for member in self._ready(batch, wait=own_call is None):
                    received = self._receive(member)
                    if received is None:
                        self._recover(member, batch)
                    for kind, value in received or ():
                        final = kind != "message"
                        call = member.calls.popleft() if final else member.calls[0]
                        if kind == "error":
                            line = self._advised(value["line"])
                            raise FedtideError(line) if value["user"] else RuntimeError(line)
                        unanswered -= final
                        yield Message(call, value, final)
        finally:
            # A caller that stops early must not leave calls running.
            for member in list(self.members):
                if member.calls:
                    self._replace(member)

    def _take_own_call(self, batch: Batch) -> int | None:
        """Take the next call for this process; one that took down another is not for the one that all depends on."""
        if batch.here is None or not batch.waiting or batch.deaths[batch.waiting[0]]:
            return None
        return batch.waiting.popleft()

    def _hand_out(self, batch: Batch) -> None:
        """Hand out calls; of short ones a member holds two, so that it need not wait for the next one."""
        for depth in range(1, 3 if batch.short else 2):
            for member in self.members:
                if batch.waiting and len(member.calls) < depth and batch.waiting[0] < batch.taken + batch.reach:
                    call = batch.waiting.popleft()
                    member.calls.append(call)
                    self._send(member, batch, batch.arguments[call])

    def _recover(self, member: M, batch: Batch) -> None:
        """Replace a member that died, and put its calls back."""
        batch.waiting.extendleft(reversed(member.calls))
        if member.calls:
            batch.deaths[member.calls[0]] += 1
            if batch.deaths[member.calls[0]] >= DEATHS:
                raise FedtideError(f"{self.title} died {DEATHS} times on the same work; giving up")
        self._replace(member)

    def _advised(self, line: str) -> str:
        """Add to the line of a call's error what to do."""
        return line

    @property
    @abstractmethod
    def processes(self) -> list[int]:
        """Process ids, each on its own machine."""

    @abstractmethod
    def share(self, kind: str, tree: Tree, name: str | None = None) -> SharedRef:
        """Share a tree with all calls.

        Args:
            kind: purpose of the tree.
            tree: tree to share.
            name: name under which it is known; a known tree is not shared again. None makes a new name.
        """

    @abstractmethod
    def free(self, ref: SharedRef) -> None:
        """Free a shared tree, which no later call reads."""

    @abstractmethod
    def _send(self, member: M, batch: Batch, arguments: Tree) -> None:
        """Send the arguments of a call to a member."""

    @abstractmethod
    def _ready(self, batch: Batch, *, wait: bool = True) -> list[M]:
        """Return members that have answered, or died; wait for one."""

    @abstractmethod
    def _receive(self, member: M) -> list[tuple[str, Any]] | None:
        """Return the messages of a member ("message", "done" or "error"); None if it has died."""

    @abstractmethod
    def _replace(self, member: M) -> None:
        """Put a fresh process in the place of one."""

    @abstractmethod
    def close(self) -> None:
        """End the processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


START = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # before anything slow: the process that started this one decides
import os, sys
from fedtide.fleets.worker import main
os.dup2(int(sys.argv[3]), 2)  # what went wrong until here is in a file, and one line of it is told
main(int(sys.argv[1]), sys.argv[2])
"""


@dataclass(eq=False)
class _Worker(Member):
    """A worker process; `began` is the file that says why it could not start."""

    process: subprocess.Popen[bytes]
    connection: Connection
    began: Path


class Pool(Processes[_Worker]):
    """Persistent worker processes with one torch thread each.

    Args:
        size: how many work.
        joined: whether this process is one of them, and takes short calls, too.

    >>> with Pool(1) as pool:
    ...     list(pool.map("fedtide.fleets.worker:echo", [{"x": 1}, {"x": 2}]))
    [{'x': 1}, {'x': 2}]
    """

    title = "a worker process"
    multi_node = False

    def __init__(self, size: int, *, joined: bool = False) -> None:
        if os.name != "posix":
            raise FedtideError("fleet: worker processes need Linux or macOS; allowed here: one worker")
        self.joined = joined
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and os.access(memory, os.W_OK)
        self._scratch = Scratch(memory if roomy else None)
        self.folder = self._scratch.path
        self._numbers = self._started = 0
        self._spare: dict[str, Path] = {}  # of each kind a file that holds nothing that anyone reads
        self.members: list[_Worker] = []
        try:
            while len(self.members) < size - joined:
                self.members.append(self._start())
        except BaseException:
            self.close()
            raise

    def share(self, kind: str, tree: Tree, name: str | None = None) -> SharedRef:
        """Write a tree into shared memory, where all calls can read it."""
        if name is not None:
            path = self.folder / f"{kind}-{name}"
            if not path.exists():
                self._write(path, tree)
            return SharedRef(kind, str(path))
        self._numbers += 1
        path = self._spare.pop(kind, self.folder / f"{kind}-{self._numbers}")
        self._write(path, tree)
        return SharedRef(kind, str(path), self._numbers)

    def _write(self, path: Path, tree: Tree) -> None:
        try:
            write_shared(path, tree)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            raise FedtideError(self._advised(f"{path}: {error.strerror}")) from None

    def _advised(self, line: str) -> str:
        """Add to the line of an error what to do if shared memory is full."""
        full = "No space left" in line and str(self.folder) in line
        advice = f"; allowed: fewer workers (--workers), or a larger {self.folder.parent}"
        return line + advice if full else line

    def free(self, ref: SharedRef) -> None:
        """Let the next tree of the kind take its place."""
        if ref.kind in self._spare:
            Path(ref.name).unlink(missing_ok=True)
        else:
            self._spare[ref.kind] = Path(ref.name)

    @property
    def processes(self) -> list[int]:
        """Process ids."""
        return [worker.process.pid for worker in self.members]

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
                cwd=None if current_folder() else "/",  # if the current folder was removed libraries end at once
                process_group=0,  # Ctrl-C in a terminal is for this process, which decides when to stop
            )
        os.close(terminal)
        theirs.close()
        return _Worker(process, ours, began)

    def _replace(self, member: _Worker) -> None:
        member.connection.close()
        member.process.kill()
        member.process.wait()
        self.members[self.members.index(member)] = self._start()

    def _send(self, member: _Worker, batch: Batch, arguments: Tree) -> None:
        # A worker that died in the meantime is found out when it is listened to.
        with contextlib.suppress(OSError):
            member.connection.send_bytes(codec.to_bytes({"call": batch.function, "arguments": arguments}))

    def _ready(self, batch: Batch, *, wait: bool = True) -> list[_Worker]:
        ready = connection.wait([worker.connection for worker in self.members if worker.calls], None if wait else 0)
        return [worker for worker in self.members if worker.connection in ready]

    def _receive(self, member: _Worker) -> list[tuple[str, Tree]] | None:
        try:
            message = codec.from_bytes(member.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        file = message["file"]
        return [(message["kind"], message["value"] if file is None else read_shared(Path(file)))]

    def _recover(self, member: _Worker, batch: Batch) -> None:
        lines = member.began.read_text(errors="replace").split("\n") if member.began.exists() else []
        if why := next((line.strip() for line in reversed(lines) if line.strip()), ""):
            raise FedtideError(f"fleet.workers: a worker process could not start: {why}")
        super()._recover(member, batch)

    def close(self) -> None:
        """End the processes and remove what they shared."""
        try:
            for worker in self.members:
                worker.connection.close()
            for worker in self.members:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(timeout=1.0)
        finally:  # also if a person is in a hurry
            with uninterrupted():
                for worker in self.members:
                    worker.process.kill()
                for worker in self.members:
                    worker.process.wait()
                self._scratch.close()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until the block is over, as far as this thread receives them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
