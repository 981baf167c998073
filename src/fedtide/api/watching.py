"""A watched run while it is played: lines for windows and alarms, and a command for each alarm."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedtide.core.atomic import write_text
from fedtide.core.errors import UNREADABLE, FedtideError, printable, refused
from fedtide.report.terminal import print_table, say
from fedtide.report.watching import PAGE, WatchedRun, headline, table_of, unseen, write_page

TOLD = "watch.json"
"""File in the folder of a run that says which alarm a command was told last."""
LOOK = 1.0
"""Seconds between two looks at the record."""
LAST = 20
"""Windows that are printed, the last ones."""
PATIENCE = 60.0
"""Seconds that a command for an alarm may take."""


def tell_command(runs: Sequence[WatchedRun], command: str) -> Iterator[str]:
    """Run a command for each alarm that it was not told, with the alarm as JSON on its standard input; yield failures.

    An alarm is told if the command ends with status 0. A process that is killed in between tells the last alarm again.

    Raises:
        FedtideError: the file of what was told is damaged.
    """
    words = command_of(command)
    for one in runs:
        last, rounds = _read_told(one.run.folder), [alarm["round"] for alarm in one.alarms]
        for number, alarm in enumerate(one.alarms):
            place = alarm["round"], rounds[:number].count(alarm["round"])
            if place <= last:
                continue
            if fault := _run_command(words, json.dumps({"run": str(one.run.folder), **alarm}) + "\n"):
                yield f"--on-alarm: {words[0]} {fault}"
                break
            write_text(one.run.folder / TOLD, json.dumps(place) + "\n")


def _run_command(words: Sequence[str], line: str) -> str:
    """Run a command with a line on its standard input, and return why it failed; "" if it ended with status 0.

    Processes that it leaves in the background go on. If it takes too long, all that it started is ended.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors,
                                       start_new_session=True)  # fmt: skip
        except OSError as error:
            return f"cannot be run ({error.strerror})"
        try:
            process.communicate(line.encode(), timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return f"was ended after {PATIENCE:.0f} s"
        finally:
            if process.poll() is None:  # after Ctrl-C, too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        errors.seek(0)
        why = errors.read().decode(errors="replace").strip().splitlines()[-1:] or [""]
    return f"ended with status {process.returncode} {why[0]}".rstrip() if process.returncode else ""


def command_of(command: str) -> list[str]:
    """Return the words of a command, which no shell reads.

    Raises:
        FedtideError: it has no words, or a quotation mark without its second one.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise FedtideError(f"--on-alarm: found {command!r}, allowed: a command with arguments ({error})") from None
    if not words:
        raise FedtideError("--on-alarm: found '', allowed: a command with arguments")
    if shutil.which(words[0]) is None:
        raise refused("--on-alarm", words[0], "a program that can be run")
    return words


def _read_told(folder: Path) -> tuple[int, int]:
    """Return the round of the last alarm of a run that a command was told, and its place among those of the round."""
    path = folder / TOLD
    if not path.is_file():
        return -1, 0
    try:
        number, place = json.loads(path.read_text(encoding="utf-8"))
        return int(number), int(place)
    except UNREADABLE as error:
        raise FedtideError(f"{path}: damaged ({printable(error)}); remove it to tell all alarms again") from None


def follow_runs(root: Path, runs: Sequence[WatchedRun], screen: Any, *, command: str | None, again: bool) -> Path:
    """Print windows and alarms, run a command for each alarm, and write the page; return its path.

    Args:
        root: the folder.
        runs: those that are watched.
        screen: prints.
        command: for each alarm; None for none.
        again: whether to go on until all runs are over; then a line is printed for each window.

    Raises:
        FedtideError: a record is damaged, or the page cannot be written.
    """
    if command is not None:
        command_of(command)
    printed = {one.run.folder: 0 for one in runs}
    alarmed, page = dict(printed), root / PAGE
    if not again:
        for one in runs:
            print_table(table_of(one.lines[-LAST:]), screen, one.run.title)
            say(unseen(one.rule), screen)
    while True:
        over = all(one.is_over for one in runs)
        is_new = False
        for one in runs:
            lines, alarms = one.lines, one.alarms
            if again and (fresh := lines[printed[one.run.folder] :]):
                for number in range(len(fresh)):
                    say(f"{one.run.title}: {headline(fresh[: number + 1], alarms)}", screen)
            for alarm in alarms[alarmed[one.run.folder] :]:
                say(f"alarm: {one.run.title}: window {alarm['round'] + 1}: {alarm['text']}", screen)
            is_new |= len(lines) > printed[one.run.folder] or len(alarms) > alarmed[one.run.folder]
            printed[one.run.folder], alarmed[one.run.folder] = len(lines), len(alarms)
        if is_new or not page.is_file() or over:
            write_page(root, runs)
            later = "the next window" if again and not over else "the next call of this command"
            for line in tell_command(runs, command) if command is not None else ():
                say(f"{line}; the alarm is told again with {later}", screen)
        if over or not again or screen.quiet:
            return page
        time.sleep(LOOK)
