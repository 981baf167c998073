"""The program of a node: it keeps its stream to the server and its worker, until it is ended.

It imports no torch, as it waits most of the time; the worker has the rows and does the work.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from fedtide.core.errors import FedtideError
from fedtide.remote.grpc.line import Known, Line
from fedtide.site.files import check_secret
from fedtide.site.log import Log
from fedtide.site.worker import Worker

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SUCCESSION = 15.0
"""Seconds that what is left of a node that was killed may take to end."""
LET_IN = "let-in"
"""File that is there once the server has let the node in: whatever answers at its address then, it goes on trying."""
LOOK = 1.0
"""Seconds between two looks at the worker."""


def node_command(path: Path) -> list[str]:
    """Return the command that runs a node, as a file written by `write` says."""
    return [sys.executable, "-P", "-m", "fedtide.site.node", str(path)]


def write(home: Path, told: dict[str, Any], line: dict[str, Any]) -> Path:
    """Write down how a node is run; return the file.

    Args:
        home: the node's folder.
        told: what its worker is to hold, see `fedtide.site.work`.
        line: `address`, `authority` (a file), `run`, `name` and `key` (a file) of its stream; `json`, whether it says
            lines of JSON; and `with_parent`, whether it ends when its input does. With `worker` that command is run in
            place of the worker's.
    """
    (home / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
    path = home / "run" / "worker.json"
    path.write_text(json.dumps({**told, "line": line}), encoding="utf-8")
    return path


def known_of(line: dict[str, Any]) -> Known:
    """Return what a node knows of its server, with its key."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    check_secret(Path(line["key"]))
    try:
        key = load_ssh_private_key(Path(line["key"]).read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise FedtideError(f"{line['key']}: damaged or not a private key of OpenSSH ({error})") from None
    return Known(line["address"], Path(line["authority"]).read_bytes(), line["run"], line["name"], key)


def main(path: Path) -> int:
    """Run a node; return the exit status."""
    told = json.loads(path.read_text(encoding="utf-8"))
    line = told["line"]
    log = Log(line["json"])
    lock = _locked(path.with_name("lock"), log)

    def say(text: str) -> None:
        log.say("process", text)

    worker = Worker(
        [*line.get("worker", [sys.executable, "-P", "-m", "fedtide.site.work"]), str(path)],
        path.with_name("worker.log"),
        say,
        () if lock is None else (lock.fileno(),),
        rests=told.get("health") is None,  # the worker is asked how it is
    )
    try:
        return asyncio.run(_run(Line(known_of(line), worker.answer, say, path.with_name(LET_IN).touch), worker, line))
    except (FedtideError, OSError) as error:
        log.say("process", f"error: {error}")
        return 2
    finally:
        worker.close()


async def _run(line: Line, worker: Worker, told: dict[str, Any]) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of nohup
            loop.add_signal_handler(number, stop.set)
    if told["with_parent"]:
        threading.Thread(target=_wait_for_parent, args=(loop, stop), daemon=True).start()
    threading.Thread(target=_keep, args=(worker,), daemon=True).start()
    talking, stopping = asyncio.create_task(line.run()), asyncio.create_task(stop.wait())
    await asyncio.wait({talking, stopping}, return_when=asyncio.FIRST_COMPLETED)
    worker.close()
    if not talking.done():
        os._exit(0)  # a thread may wait for the worker
    await talking
    return 0


def _keep(worker: Worker) -> None:
    while True:
        worker.keep()
        time.sleep(LOOK)


def _wait_for_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Wait until who started this process has gone, which closes its input."""
    while os.read(0, 1000):
        continue
    loop.call_soon_threadsafe(stop.set)


def _locked(path: Path, log: Log) -> TextIO | None:
    """Return the lock of a node's folder, which its worker holds, too: two would write over each other's memory."""
    if fcntl is None:
        return None
    lock, until, told = path.open("w"), time.monotonic() + SUCCESSION, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if not told:
                log.say("process", "waits for another process of this node to end")
                told = True
            if time.monotonic() > until:
                log.say("process", f"error: {path.parent.parent}: another process runs this node already; end it first")
                sys.exit(2)
            time.sleep(LOOK / 5)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
