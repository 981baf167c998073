"""Runs one of Flower's programs such that it is served, and reached, at a socket in place of a port of this machine.

Every user of a machine reaches its ports, and on the loopback Flower asks for no key. The socket lies in a folder
that is its owner's alone, and the system keeps others out. This is a program of its own that imports neither Fedtide
nor Flower. Its arguments are the socket, the address HOST:PORT that stands for it, and a program with its arguments.
"""

import os
import runpy
import sqlite3.dbapi2
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpcore
import uvicorn

LOOK = 1.0
"""Seconds between two looks for ports, and at what was started."""
GRACE = 5.0
"""Seconds that Flower may take to end."""


def reach(socket: str, address: str) -> None:
    """Let this process find at the socket what it looks for at the address."""
    connect = httpcore.SyncBackend.connect_tcp

    def connects(backend: Any, host: str, port: int, timeout: float | None = None, *args: Any, **options: Any) -> Any:
        if f"{host}:{port}" == address:
            return backend.connect_unix_socket(socket, timeout)
        return connect(backend, host, port, timeout, *args, **options)

    httpcore.SyncBackend.connect_tcp = connects  # type: ignore[method-assign]


def serve(socket: str) -> None:
    """Let what this process serves be served at the socket, and end the process if it opens a port all the same."""
    configure, start = uvicorn.Config.__init__, subprocess.Popen.__init__
    started: list[subprocess.Popen[bytes]] = []
    here = {"uds": socket, "proxy_headers": False, "ws": "none", "access_log": False}

    def configures(config: Any, *args: Any, **options: Any) -> None:
        for work in (_end_with_ports, partial(_end_without, started)):
            threading.Thread(target=work, daemon=True).start()
        configure(config, *args, **options | here)

    def starts(process: Any, command: Any, *args: Any, **options: Any) -> None:
        start(process, command, *args, **options)
        if "flower-superexec" in command:
            started.append(process)

    uvicorn.Config.__init__ = configures  # type: ignore[method-assign]
    subprocess.Popen.__init__ = starts  # type: ignore[assignment, method-assign]


def wipe() -> None:
    """Have what this process deletes from databases overwritten, as messages may have what opens a masked sum."""
    connect = sqlite3.dbapi2.connect

    def connects(*args: Any, **options: Any) -> Any:
        made = connect(*args, **options)
        made.execute("PRAGMA secure_delete = ON")
        made.execute("PRAGMA journal_size_limit = 0")  # the journal is cut off once it is in the database
        return made

    sqlite3.dbapi2.connect = connects


def watch_threads() -> None:
    """End this process where one of its threads ends by an error, so that its keeper starts it again.

    A SuperNode whose heartbeat ends, as when the server's disk is full, would go on and count as away for ever.
    """
    tell = threading.excepthook

    def ends(told: Any) -> None:
        if told.exc_type is SystemExit:
            return
        tell(told)
        print(f"a thread of Flower ended by {told.exc_type.__name__}; it is started again", file=sys.stderr, flush=True)
        os._exit(6)

    threading.excepthook = ends


def _end_without(started: list[subprocess.Popen[bytes]]) -> None:
    """End once what hands out tasks is gone, which Flower starts but once: both are started again together."""
    while all(child.poll() is None for child in started):
        time.sleep(LOOK)
    time.sleep(GRACE)  # this process may be ending, and have ended it
    print("what hands out Flower's tasks has ended; all of it is started again", file=sys.stderr, flush=True)
    os._exit(5)


def _end_with_ports() -> None:
    while not (found := ports()):
        time.sleep(LOOK)
    print(f"Flower listens on port {found[0]}, which others reach; it is ended", file=sys.stderr, flush=True)
    os._exit(4)


def ports() -> list[int]:
    """Return the ports on which this process listens; none where the system does not tell, as outside Linux."""
    if not Path("/proc/self/net/tcp").exists():
        return []
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # closed meanwhile
            continue
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        if (file := Path(f"/proc/self/net/{table}")).exists()
        for line in file.read_text(encoding="ascii").splitlines()[1:]
    ]
    return [int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]


def main() -> None:
    """Run the program."""
    socket, address, *sys.argv = sys.argv[1:]
    reach(socket, address)
    serve(socket)
    wipe()
    watch_threads()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
