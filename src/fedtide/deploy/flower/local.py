"""Runs one of Flower's programs such that it is served, and reached, at a socket in place of a port of this machine.

Every user of a machine reaches its ports, and Flower asks nobody on the loopback for a key. The socket lies in a folder
that is its owner's alone, and the system keeps others out. This is a program of its own that imports neither Fedtide
nor Flower. Its arguments are the socket, the address HOST:PORT that stands for it, and a program with its arguments.
"""

import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpcore
import uvicorn

LOOK = 1.0
"""Seconds between two looks for ports."""


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
    configure = uvicorn.Config.__init__
    here = {"uds": socket, "proxy_headers": False, "ws": "none", "access_log": False}

    def configures(config: Any, *args: Any, **options: Any) -> None:
        threading.Thread(target=_end_with_ports, daemon=True).start()
        configure(config, *args, **options | here)

    uvicorn.Config.__init__ = configures  # type: ignore[method-assign]


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
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
