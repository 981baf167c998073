"""Calls of functions by several processes, and the pool of worker processes on this machine.

A call names a function of this package, `module:function`, which a process imports and calls with (arguments, channel).
If a process dies another one does its calls again. Nothing is pickled.
"""

import contextlib
import importlib
import math
import mmap
import os
import signal
import subprocess
import sys
import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch

from fedtide.core import codec
from fedtide.core.atomic import naming
from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree, size_in_bytes
from fedtide.fields.user_code import current_folder
from fedtide.fleets.this_machine import Scratch, end_with_parent, search_path


def write_shared(path: Path, tree: Tree) -> None:
    """Write a tree into a file, over its former content: new pages of memory would take longer than the copy."""
    with naming(path), open(path, "r+b" if path.exists() else "wb") as file:
        file.writelines(codec.pieces(tree))
        file.truncate()


def read_shared(path: Path) -> Tree:
    """Read the tree in a file, as a copy."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as data,
    ):
        return codec.from_bytes(data)


LARGE = 64 * 1024
"""Bytes from which a result goes through a file in shared memory instead of the pipe."""
FILES = 4
"""Files that a worker writes its results to in turn: more than the calls that it may hold at once."""

STOP = "stop"
"""A file of this name in a pool's folder asks its calls to end soon."""


@dataclass(frozen=True)
class SharedRef:
    """The name of a large tree that a pool shares with its calls, so that it need not travel with each of them.

    Args:
        kind: purpose; a process keeps the last tree of each kind.
        name: its place in the pool.
    """

    kind: str
    name: str


class Channel(ABC):
    """The connection of a call to its caller. It keeps the shared trees that were read last, one of each kind."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[SharedRef, Tree]] = {}

    def get(self, ref: SharedRef) -> Tree:
        """Return a shared tree, which must not be written to."""
        if ref.kind not in self._last or self._last[ref.kind][0] != ref:
            self._last[ref.kind] = ref, self._read(ref)
        return self._last[ref.kind][1]

    @abstractmethod
    def _read(self, ref: SharedRef) -> Tree:
        """Read a shared tree."""

    @abstractmethod
    def send(self, value: Tree) -> None:
        """Send something small on the way."""

    @abstractmethod
    def stopping(self) -> bool:
        """Tell whether a person has asked to stop."""


class PipeChannel(Channel):
    """The channel over a worker's end of the pipe."""

    def __init__(self, connection: Connection, folder: Path) -> None:
        super().__init__()
        self._connection, self._folder, self._results = connection, folder, 0

    def _read(self, ref: SharedRef) -> Tree:
        return read_shared(Path(ref.name))

    def stopping(self) -> bool:
        """Tell whether the file `STOP` is there."""
        return (self._folder / STOP).exists()

    def send(self, value: Tree) -> None:
        """Send something small on the way."""
        self._connection.send_bytes(codec.to_bytes({"kind": "message", "value": value, "file": None}))

    def finish(self, value: Tree, kind: str = "done") -> None:
        """Send what a call returned."""
        file = None
        if size_in_bytes(value) >= LARGE:
            self._results += 1
            file = str(self._folder / f"{os.getpid()}-{self._results % FILES}")
            write_shared(Path(file), value)
            value = None
        self._connection.send_bytes(codec.to_bytes({"kind": kind, "value": value, "file": file}))


def echo(arguments: Tree, channel: Channel) -> Tree:
    """Return the arguments, to see whether a worker is there."""
    return arguments


def own_function(name: str) -> Callable[..., Any]:
    """Import a function `module:function` of this package."""
    module, _, attribute = name.partition(":")
    if not module.startswith("fedtide."):
        raise ValueError(f"{name} is not a function of this package")
    return getattr(importlib.import_module(module), attribute)


def main(descriptor: int, folder: str) -> None:
    """Take calls until the pipe closes.

    Args:
        descriptor: file descriptor of this process's end of the pipe.
        folder: where large results are put.
    """
    torch.set_num_threads(1)
    end_with_parent()
    connection = Connection(descriptor)
    channel = PipeChannel(connection, Path(folder))
    while True:
        try:
            received = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            call = codec.from_bytes(received)
            channel.finish(own_function(call["call"])(call["arguments"], channel))
        except BrokenPipeError:
            return  # the process that started this one is gone
        except Exception as error:
            channel.finish(error_message(error), "error")


def error_message(error: Exception) -> Tree:
    """Describe an error of a call: its line if a person can mend it (`user`), else its traceback.

    >>> error_message(MemoryError("Unable to allocate 18.2 TiB"))
    {'line': 'not enough memory: Unable to allocate 18.2 TiB', 'user': True}
    """
    if isinstance(error, FedtideError):
        return {"line": str(error), "user": True}
    if isinstance(error, OSError):
        return {"line": f"{error.filename or 'input/output'}: {error.strerror or error}", "user": True}
    if isinstance(error, MemoryError):
        return {"line": f"not enough memory: {str(error) or 'none is left'}", "user": True}
    return {"line": "".join(traceback.format_exception(error)), "user": False}


# -- the pool ----------------------------------------------------------------------------------------------------------


DEATHS = 3
"""Number of processes that one call may take down before the run gives up."""
MEND = "allowed: fedtide resume, with fewer workers if memory was short"
"""What a person may do then."""


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
                for member in self._ready(wait=own_call is None):
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
                raise FedtideError(f"{self.title} died {DEATHS} times on the same work; {MEND}")
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
    def _ready(self, *, wait: bool = True) -> list[M]:
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
from fedtide.fleets.pool import main
os.ftruncate(2, 0)  # a file keeps what goes wrong until here; from here on nothing of it is told
os.dup2(int(sys.argv[3]), 2)
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
    ...     list(pool.map("fedtide.fleets.pool:echo", [{"x": 1}, {"x": 2}]))
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
        self.members: list[_Worker] = []
        try:
            while len(self.members) < size - joined:
                self.members.append(self._start())
        except BaseException:
            self.close()
            raise

    def share(self, kind: str, tree: Tree, name: str | None = None) -> SharedRef:
        """Write a tree into shared memory, where all calls can read it."""
        self._numbers += name is None
        path = self.folder / f"{kind}-{name or self._numbers}"
        if not path.exists():
            try:
                write_shared(path, tree)
            except BaseException as error:
                path.unlink(missing_ok=True)
                if not isinstance(error, OSError):
                    raise
                raise FedtideError(self._advised(f"{path}: {error.strerror}")) from None
        return SharedRef(kind, str(path))

    def _advised(self, line: str) -> str:
        """Add to the line of an error what to do if shared memory is full."""
        full = "No space left" in line and str(self.folder) in line
        advice = f"; allowed: fewer workers (--workers), or a larger {self.folder.parent}"
        return line + advice if full else line

    def free(self, ref: SharedRef) -> None:
        """Remove the file of a shared tree."""
        Path(ref.name).unlink(missing_ok=True)

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

    def _ready(self, *, wait: bool = True) -> list[_Worker]:
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
