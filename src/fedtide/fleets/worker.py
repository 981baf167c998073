"""The worker process: takes calls over a pipe until the pipe closes."""

from __future__ import annotations

import importlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from fedtide.core import codec
from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree, size_in_bytes
from fedtide.fleets import shared

LARGE = 64 * 1024
"""Bytes from which a result goes through a file in shared memory instead of the pipe."""

FILES = 4
"""Files that a worker uses in turn: more than the calls that it may hold at once."""

STOP = "stop"
"""A file of this name in a pool's folder asks its calls to end soon."""


@dataclass(frozen=True)
class Lent:
    """The name of something large that a pool lends to its calls, so that it need not travel with each of them.

    kind: what it is for; a process keeps the last of each kind. name: where it lies, as the pool knows it.
    """

    kind: str
    name: str


class Listener(Protocol):
    """Whoever made a call, as the call sees it."""

    def send(self, value: Tree) -> None:
        """Send something small on the way."""

    def lent(self, lent: Lent) -> Tree:
        """What the pool lends under that name; nobody may write to it."""

    def stopping(self) -> bool:
        """Whether a person has asked to stop."""


class Held:
    """What was lent to this process last, one of each kind."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, Tree]] = {}

    def get(self, lent: Lent, read: Callable[[], Tree]) -> Tree:
        """What is lent, read if it is not what was lent before."""
        name, value = self._of.get(lent.kind, ("", None))
        if name != lent.name:
            value = read()
            self._of[lent.kind] = (lent.name, value)
        return value


class Line:
    """The worker's end of the pipe: a `Listener`."""

    def __init__(self, connection: Connection, folder: Path) -> None:
        self._connection = connection
        self._folder = folder
        self._results = 0
        self._held = Held()

    def lent(self, lent: Lent) -> Tree:
        """What lies in a file in shared memory."""
        return self._held.get(lent, lambda: codec.from_file(Path(lent.name)))

    def stopping(self) -> bool:
        """Whether the flag for it is up."""
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
            shared.write(Path(file), value)
            value = None
        self._connection.send_bytes(codec.to_bytes({"kind": kind, "value": value, "file": file}))


def echo(arguments: Tree, line: Listener) -> Tree:
    """Return what came: to see whether a worker is there."""
    return arguments


def own_function(name: str) -> Callable[..., Any]:
    """The function `module:function` of this package."""
    module, _, attribute = name.partition(":")
    if not module.startswith("fedtide."):
        raise ValueError(f"{name} is not a function of this package")
    return getattr(importlib.import_module(module), attribute)


def watch(parent: int, every: float = 1.0) -> None:
    """End this process, whatever it is at, when the one that started it is gone: nobody wants its results any more."""
    while os.getppid() == parent:
        time.sleep(every)
    os._exit(0)


def main(descriptor: int, folder: str) -> None:
    """Take calls until the pipe closes.

    Args:
        descriptor: file descriptor of this process's end of the pipe.
        folder: where large results are put.
    """
    torch.set_num_threads(1)
    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()
    connection = Connection(descriptor)
    line = Line(connection, Path(folder))
    while True:
        try:
            received = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            call = codec.from_bytes(received)
            line.finish(own_function(call["call"])(call["arguments"], line))
        except BrokenPipeError:
            return  # whoever started this process is gone
        except Exception as error:
            line.finish(told_of(error), "error")


def told_of(error: Exception) -> Tree:
    """What is said of an error of a call: its line where a person can mend it (`user`), else where it was.

    >>> told_of(MemoryError("Unable to allocate 18.2 TiB"))
    {'line': 'not enough memory: Unable to allocate 18.2 TiB', 'user': True}
    """
    if isinstance(error, FedtideError):
        return {"line": str(error), "user": True}
    if isinstance(error, OSError):
        return {"line": f"{error.filename or 'input/output'}: {error.strerror or error}", "user": True}
    if isinstance(error, MemoryError):
        return {"line": f"not enough memory: {str(error) or 'none is left'}", "user": True}
    return {"line": "".join(traceback.format_exception(error)), "user": False}
