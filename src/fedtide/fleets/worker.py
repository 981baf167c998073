"""The worker process: takes calls over a pipe until the pipe closes."""

from __future__ import annotations

import importlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedtide.core import codec
from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree, size_in_bytes
from fedtide.fleets import shared

LARGE = 64 * 1024
"""Bytes from which a result goes through a file in shared memory instead of the pipe."""

FILES = 4
"""Files that a worker uses in turn: more than the calls that it may hold at once."""


class Line:
    """The worker's end of the pipe, as a call sees it."""

    def __init__(self, connection: Connection, folder: Path) -> None:
        self._connection = connection
        self._folder = folder
        self._results = 0

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


def echo(arguments: Tree, line: Line) -> Tree:
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
        except FedtideError as error:
            line.finish({"line": str(error), "user": True}, "error")
        except BrokenPipeError:
            return  # whoever started this process is gone
        except OSError as error:
            line.finish(
                {"line": f"{error.filename or 'input/output'}: {error.strerror or error}", "user": True}, "error"
            )
        except MemoryError as error:
            line.finish({"line": f"not enough memory: {str(error) or 'none is left'}", "user": True}, "error")
        except Exception:
            line.finish({"line": traceback.format_exc(), "user": False}, "error")
