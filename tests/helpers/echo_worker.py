"""A worker that sends back what it is asked, or does what its header tells it to."""

import contextlib
import os
import socket as socketlib
import subprocess
import sys
import time
from pathlib import Path

from fedtide.deploy.flower.worker import serve


def handle(header, payload):
    time.sleep(header.get("sleep", 0.0))
    if header.get("die"):
        os._exit(9)
    if header.get("raise"):
        raise ValueError("a secret of the clients")
    return {"echo": header, "pid": os.getpid()}, payload * header.get("times", 1)


@contextlib.contextmanager
def started(socket):
    """Give a process of this module that listens on `socket`; its file is there a moment before somebody listens."""
    running = subprocess.Popen([sys.executable, __file__, str(socket)], stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 120.0  # it imports torch
        while not _listens(socket):
            assert running.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        yield running
    finally:
        running.kill()
        running.communicate()


def _listens(socket):
    with socketlib.socket(socketlib.AF_UNIX) as line:
        return line.connect_ex(str(socket)) == 0


if __name__ == "__main__":
    serve(Path(sys.argv[1]), handle)
