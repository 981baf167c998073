"""A command in a process of its own that is killed right before it changes a file, whichever that is."""

import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from fedtide.cli.commands import main

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
ELSEWHERE = re.compile(r"/dev/(null|tty)|/proc/|.*/__pycache__(/|$)")
"""What a command also opens or makes, and not each time: modules are compiled once."""


def changes_in(*words: object) -> int:
    """Count the changes of files that a command makes, which has to end well."""
    status, count = _command(words, 0, False)
    assert status == 0
    return count


def killed_at(change: int, *words: object, torn: bool = False) -> None:
    """Kill a command right before one of its changes, from 1.

    Args:
        change: number of the change.
        words: of the command.
        torn: whether a file that is made or cut by then has the beginning of a line.
    """
    status, _ = _command(words, change, torn)
    assert status == -signal.SIGKILL


def _command(words: tuple[object, ...], change: int, torn: bool) -> tuple[int | None, int]:
    """Return the exit status of a command, and how many changes it has come to."""
    processes = multiprocessing.get_context("fork")
    count = processes.Value("i", 0)
    process = processes.Process(target=_live, args=([str(word) for word in words], change, torn, count))
    process.start()
    process.join(300)
    return process.exitcode, count.value


def _live(words: list[str], change: int, torn: bool, count: Any) -> None:
    hidden = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(hidden, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    with patch("fedtide.api.jobs.remove_left_behind"):  # what other tests left is gone after the first command
        sys.addaudithook(_hook(change, torn, count))
        main(words)


def _hook(change: int, torn: bool, count: Any) -> Callable[[str, tuple[Any, ...]], None]:
    def watch(event: str, about: tuple[Any, ...]) -> None:
        if event not in ("open", *CHANGES):
            return
        path, flags = about[0], about[2] if event == "open" else WRITES
        if not flags & WRITES or (event == "open" and isinstance(path, int)):
            return
        if not isinstance(path, int) and ELSEWHERE.match(os.fsdecode(path)):
            return
        count.value += 1
        if count.value == change:
            if torn and event == "open" and (flags & os.O_TRUNC or not os.path.exists(path)):
                os.write(os.open(path, flags & ~os.O_EXCL, 0o600), b'{"hal')
            os.kill(os.getpid(), signal.SIGKILL)

    return watch
