"""A process that has loaded everything and forks for each command, and what such a command forks for its workers."""

import atexit
import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from typing import IO, Any, NoReturn

import fedtide.api
import fedtide.api.jobs
import fedtide.cli.commands
import fedtide.runs.display
import fedtide.tuning.pages
from fedtide.fleets import pool
from fedtide.runs import experiment as playing


def serve() -> None:
    """Import what the command line names, then take orders, one a line of standard input, until it closes."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # else each fork copies what it never changes
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        child = os.fork()
        if not child:
            _obey(order)
        print(child, flush=True)


def _obey(order: dict[str, Any]) -> NoReturn:
    """Run a command in a session of its own."""
    os.setsid()
    os.chdir(order["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if order["largest"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["largest"], order["largest"]))
    playing.WAIT_SECONDS = order["waits"]
    if order["forks"]:
        names = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
        pool.subprocess = type("subprocess", (), names | {"Popen": Forked})  # type: ignore[assignment]
    sys.argv = ["fedtide", *order["argv"]]
    _end_with(lambda: fedtide.cli.commands.main(order["argv"]))


def _end_with(action: Any) -> NoReturn:
    """End this process with what an action ends with; an interpreter that was forked takes a second to end."""
    status = 1
    try:
        action()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Forked:
    """A worker process as `subprocess.Popen` starts it, but forked: no interpreter starts and nothing is imported."""

    def __init__(
        self, command: list[str], *, pass_fds: list[int], stderr: IO[bytes], process_group: int, **_: Any
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        os.setpgid(0, process_group)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(stderr.fileno(), 2)
        kept = sorted(pass_fds)
        for low, high in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        sys.argv = command[command.index("-c") :][:1] + command[command.index("-c") + 2 :]
        source = command[command.index("-c") + 1]
        _end_with(lambda: exec(source, {"__name__": "__main__"}))

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
