"""Keeper of processes: starts each again when it dies, and says in one line why.

It runs as a program of its own and imports neither Fedtide nor torch: a node at rest is to be small. Its argument is a
JSON file: {"folder", "with_parent", "json", "processes": [{"name", "command", "env", "causes": [[pattern, line]],
"up": [pattern, line], "follows": path}]}: what a process writes when it ends, and when it is up, and what that means,
and the file with which it starts anew when that is replaced.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

LONGEST = 15.0
"""Seconds between two attempts, at most."""
STEADY = 60.0
"""Seconds after which a process that dies is started at once again."""
GRACE = 10.0
"""Seconds in which a process that is asked to end may do so."""
LOG = 20_000_000
"""Bytes of a log from which on it begins anew; what was in it is kept beside it."""

SUCCESSION = 30.0
"""Seconds that the keeper of a server that died may take to end what it kept."""

_saying = threading.Lock()


def say(line: str, as_json: bool) -> None:
    """Print a line with the time."""
    now = datetime.now(UTC)
    text = f"{now.astimezone():%H:%M:%S} {line}"
    if as_json:
        text = json.dumps({"at": now.isoformat(timespec="milliseconds"), "event": "process", "text": line})
    with _saying, contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


def main(told: dict[str, Any]) -> int:
    """Keep the processes until asked to end; return the exit status."""
    folder = Path(told["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    until = time.monotonic() + (SUCCESSION if told["with_parent"] else 0)
    while not _locked(lock):
        if time.monotonic() > until:
            say(f"{folder}: another process keeps this one running already; end it first", told["json"])
            return 2
        time.sleep(0.2)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    if told["with_parent"]:
        threading.Thread(target=_wait_for_parent, args=(stop,), daemon=True).start()
    keepers = [
        threading.Thread(target=_keep, args=(folder, process, stop, told["json"])) for process in told["processes"]
    ]
    for keeper in keepers:
        keeper.start()
    for keeper in keepers:
        while keeper.is_alive():  # a join without a limit would hold signals up
            keeper.join(0.5)
    return 0


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_parent(stop: threading.Event) -> None:
    """Stop when the process that started this program is gone: it holds the other end of the input."""
    while os.read(0, 1):
        pass
    stop.set()


def _keep(folder: Path, process: dict[str, Any], stop: threading.Event, as_json: bool) -> None:
    name, log, pause, said = process["name"], folder / f"{process['name']}.log", 1.0, ""
    _end_leftover(folder / f"{name}.pid", process["command"])
    while not stop.is_set():
        began, start, followed = time.monotonic(), _size(log), _stamp(process)
        try:
            with log.open("ab") as out:
                child = subprocess.Popen(
                    process["command"], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=process["env"],
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            if said != (said := f"{name}: cannot be started ({error}); it is tried again"):
                say(said, as_json)
            stop.wait(LONGEST)
            continue
        with contextlib.suppress(OSError):  # a full disk: the number is for a successor of a keeper that was killed
            (folder / f"{name}.pid").write_text(str(child.pid))
        up, anew = process.get("up"), False
        while child.poll() is None and not anew and not stop.wait(0.2):
            anew = _stamp(process) not in (followed, None)
            if _size(log) > LOG:
                with contextlib.suppress(OSError):  # a full disk, which is a reason more to cut it
                    shutil.copyfile(log, log.with_suffix(".log.1"))
                os.truncate(log, 0)  # it goes on being written at its end
                start = 0
            if up and (line := _cause(log, start, [up])):
                say(f"{name}: {line}", as_json)
                up, said = None, ""
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
        _kill_group(child.pid)
        with contextlib.suppress(OSError):
            (folder / f"{name}.pid").unlink()
        if stop.is_set():
            return
        if anew:
            say(f"{name}: starts again with its new {Path(process['follows']).name}", as_json)
            continue
        lasted = time.monotonic() - began
        line = (
            _cause(log, start, process["causes"]) or f"ended with status {child.wait()} after {lasted:.0f} s; see {log}"
        )
        if line != said or lasted > STEADY:
            say(f"{name}: {line}", as_json)
            said = line
        pause = 1.0 if lasted > STEADY else min(2 * pause, LONGEST)
        stop.wait(pause)


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _stamp(process: dict[str, Any]) -> int | None:
    """Return when the file was written that a process follows; None without one."""
    try:
        return os.stat(process["follows"]).st_mtime_ns
    except (KeyError, OSError):
        return None


def _cause(log: Path, start: int, causes: list[list[str]]) -> str:
    """Return the line for the first known pattern in what a process wrote."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read(1_000_000).decode(errors="replace")
    found = ((re.search(pattern, text), line) for pattern, line in causes)
    return next((match.expand(line) for match, line in found if match), "")


def _kill_group(leader: int) -> None:
    """End what a process has left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _end_leftover(file: Path, command: list[str]) -> None:
    """End a process that an earlier keeper, which was killed, could not end."""
    try:
        number = int(file.read_text())
        shown = subprocess.run(
            ["ps", "-ww", "-o", "command=", "-p", str(number)], capture_output=True, text=True, check=False
        )
    except (OSError, ValueError):
        return
    if command[-1] in shown.stdout:
        _kill_group(number)


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
