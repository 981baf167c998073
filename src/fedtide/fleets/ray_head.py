"""Run as a script beside the program: starts a Ray cluster that ends with it, or probes one.

It knows nothing of the rest of the package, so that it starts fast. What it finds is one line of JSON behind `MARK`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from typing import Any, NoReturn

MARK = "fedtide-ray "


def options() -> dict[str, Any]:
    """Return the arguments of every `ray.init`, which print nothing."""
    return {"log_to_driver": False, "logging_level": logging.CRITICAL}


def report(**found: Any) -> None:
    """Report to the process that started this one."""
    print(MARK + json.dumps(found), flush=True)


def start(cpus: int, folder: str, terminal: int, hint: str) -> None:
    """Start a cluster on this machine, say where it is, and end it when standard input closes.

    Ray ends most of its processes with the one that started it, but its agents live on; so this process is the one that
    starts them, in a group of their own, and takes the group with it. `folder` is removed in the end.

    If one of Ray's own processes dies, Ray ends the program in the middle, without a word. So a process that Ray does
    not know writes `hint` to the file descriptor `terminal` then.
    """
    cluster = os.fork()
    if not cluster:
        hold(cpus, folder)
    _, status = os.waitpid(cluster, 0)
    if status and hint:
        os.write(terminal, f"{hint}\n".encode(errors="replace"))
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def hold(cpus: int, folder: str) -> NoReturn:
    """Start a cluster and hold it until standard input closes; exit status 0 unless Ray ended before."""
    import ray

    ended = False
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            _temp_dir=os.path.join(folder, "r"),  # Ray opens it to all users; `folder` above it is ours alone
            **options(),
        )
        report(address=ray.get_runtime_context().gcs_address)
        ended = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        done = sys.stdin.buffer.read()  # empty where the program did not come to its end
        node: Any = ray._private.worker._global_node
        ended = not done and bool(node.dead_processes())
        ray.shutdown()
    except BaseException as error:
        report(error=root_cause(error))  # read while it starts, and told there
    os._exit(ended)


def probe(address: str) -> None:
    """Join a cluster and leave it again."""
    import ray

    try:
        ray.init(address=address, **options())
        report(address=ray.get_runtime_context().gcs_address)
    except BaseException as error:  # whatever Ray raises, SystemExit among it
        report(error=root_cause(error))
    os._exit(0)


def root_cause(error: BaseException) -> str:
    """Return the message of an error's first cause."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return str(error) or type(error).__name__


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        probe(sys.argv[2])
