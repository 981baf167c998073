"""A pool of worker processes, and messages to and from them. Nothing is pickled; a process that dies is replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from fedtide.core import codec
from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree
from fedtide.fields.user_code import current_folder
from fedtide.fleets import shared
from fedtide.fleets.calls import Batch, CallLoop
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


@dataclass(eq=False)
class _Worker:
    """A process. calls: not answered yet, the running one first. began: where it says why it could not start."""

    process: subprocess.Popen[bytes]
    connection: Connection
    began: Path
    calls: deque[int] = field(default_factory=deque)


class Pool(CallLoop[_Worker]):
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

    def put(self, kind: str, tree: Tree, name: str | None = None) -> SharedRef:
        """Write a tree into shared memory, where all calls can read it.

        Args:
            kind: purpose of the tree.
            tree: tree to share.
            name: name under which it is known; a known tree is not written again. None makes a new name.
        """
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
            shared.write(path, tree)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            raise FedtideError(self._advised(f"{path}: {error.strerror}")) from None

    def _advised(self, line: str) -> str:
        """Add to the line of an error what to do where shared memory is full."""
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
                cwd=None if current_folder() else "/",  # where the current folder was removed libraries end at once
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
        return [(message["kind"], message["value"] if file is None else shared.read(Path(file)))]

    def _recover(self, member: _Worker, batch: Batch) -> None:
        said = member.began.read_text(errors="replace").split("\n") if member.began.exists() else []
        if why := next((line.strip() for line in reversed(said) if line.strip()), ""):
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
        finally:  # also where a person is in a hurry
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


def search_path() -> str:
    """Return where another process finds modules: as this one does, but never in the current folder.

    What a configuration names is looked for there last of all (`fedtide.fields.user_code`).
    """
    here = current_folder()
    package = str(Path(__file__).resolve().parents[2])
    paths = [path for path in sys.path if path and path != here]
    return os.pathsep.join(paths if package in paths else [*paths, package])


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
