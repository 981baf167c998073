"""The worker process, which takes calls over a pipe until the pipe closes, and large trees through shared memory.

A sender writes its files in shared memory again and again. A fresh file would cost a page fault for every 4 kB, five
times as much as the copy itself.
"""

from __future__ import annotations

import importlib
import mmap
import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedtide.core import codec
from fedtide.core.atomic import naming
from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree, size_in_bytes
from fedtide.fleets.this_machine import keep_freed


def write_shared(path: Path, tree: Tree) -> None:
    """Write a tree into a file, over its former content."""
    parts = codec.pieces(tree)
    with naming(path), open(path, "r+b" if path.exists() else "wb") as file:
        file.writelines(parts)
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
"""Files that a worker uses in turn: more than the calls that it may hold at once."""

STOP = "stop"
"""A file of this name in a pool's folder asks its calls to end soon."""


@dataclass(frozen=True)
class SharedRef:
    """The name of a large tree that a pool shares with its calls, so that it need not travel with each of them.

    Args:
        kind: purpose; a process keeps the last tree of each kind.
        name: its place in the pool.
        number: how many were shared before, because another tree may take its place later.
    """

    kind: str
    name: str
    number: int = 0


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


def watch(parent: int, every: float = 1.0) -> None:
    """End this process as soon as the one that started it is gone."""
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
    keep_freed()
    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()
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
