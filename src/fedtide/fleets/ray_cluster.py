"""Reaching a Ray cluster: one that runs already, or one of our own that ends with this process.

Ray itself tries to reach a dead address for two minutes and then ends the process that asks. So everything that can
hang or die is tried by a process beside this one first, with a deadline.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from fedtide.core.errors import FedtideError, refused
from fedtide.fleets.this_machine import Scratch, search_path

MARK = "fedtide-ray "


def options() -> dict[str, Any]:
    """Return the arguments of every `ray.init`, which print nothing."""
    return {"log_to_driver": False, "logging_level": logging.CRITICAL}


def report(**values: Any) -> None:
    """Report to the process that started this one."""
    print(MARK + json.dumps(values), flush=True)


def start(cpus: int, folder: str, terminal: int, hint: str) -> None:
    """Start a cluster on this machine, say where it is, and end it when standard input closes.

    Ray ends most of its processes with the one that started it, but its agents live on. So this process starts them, in
    a group of their own, and ends the group. `folder` is removed in the end.

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
        done = sys.stdin.buffer.read()  # empty if the program did not come to its end
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


MISSING = 'fleet.kind: "ray" needs Ray; pip install "fedtide[ray]"'

SOCKET_SECONDS = 5.0
"""Seconds within which an address has to accept a connection."""

JOIN_SECONDS = 45.0
"""Seconds within which a cluster has to let a process in, or to start on this machine."""

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # any line at all: it tells of every actor that died, which we mend
}
"""Settings with which Ray sends nothing home and prints nothing into our progress."""


LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Setting with which Ray knows of no other machine, and all of its sockets listen on this one alone."""


def imported_ray() -> Any:
    """Import Ray.

    Raises:
        FedtideError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
    except ImportError:
        raise FedtideError(MISSING) from None
    return ray


def check(address: str | None) -> None:
    """Raise unless Ray is there and, if an address is given, something listens at it."""
    if find_spec("ray") is None:
        raise FedtideError(MISSING)
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise refused("fleet.address", address, "HOST:PORT of a head node, or 'auto'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SOCKET_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise FedtideError(
            f"fleet.address: nothing answers at {address} ({getattr(error, 'strerror', None) or error}); allowed: the "
            "address of a Ray head node, as `ray start --head` prints it"
        ) from None


def already_connected() -> bool:
    """Tell whether this program has joined a cluster by itself."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


@contextmanager
def connected(address: str | None, cpus: int, resume: str = "") -> Iterator[Any]:
    """Connect Ray to a cluster: the one at an address, or one of our own on this machine.

    A program that is connected already stays so.

    Args:
        address: HOST:PORT, or "auto" for the one that Ray finds on this machine; None starts one.
        cpus: of our own.
        resume: command with which a person goes on if Ray dies, and takes this process along.

    Raises:
        FedtideError: no cluster answers in time, or not to this version of Ray or Python.
    """
    check(address)
    if already_connected():
        yield imported_ray()
        return
    terminated = signal.getsignal(signal.SIGTERM)
    with _environment(QUIET | (_secret() | LOOPBACK if address is None else {})):
        ray = imported_ray()
        _environment_read_again(loopback=address is None)
        with _cluster(address, cpus, resume) as cluster:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(address=cluster, **options())
            # Ray's own handler prints where every thread was.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminated)
            try:
                yield ray
            finally:
                ray.shutdown()


@cache
def _secret() -> dict[str, str]:
    """Make the settings that keep other processes out of our clusters; once, as Ray keeps the token."""
    if "RAY_AUTH_MODE" in os.environ:
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _environment_read_again(*, loopback: bool) -> None:
    """Let Ray read its environment again, as it may have been imported before."""
    with suppress(Exception):
        import_module("ray._raylet").Config.initialize("")
    with suppress(Exception):
        constants: Any = import_module("ray._private.ray_constants")
        constants.ENABLE_RAY_CLUSTER = not loopback


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _cluster(address: str | None, cpus: int, resume: str) -> Iterator[str]:
    """Yield the address of a running cluster, or of a new one, which ends with the block or with this process."""
    command: tuple[str, ...]
    with ExitStack() as stack:
        if address is not None:
            command, hint, trouble = ("look", address), "", f"fleet.address: no Ray cluster answers at {address}"
        else:
            short = Path("/tmp")  # sockets lie in it, whose names must be short
            folder = stack.enter_context(Scratch(short if short.is_dir() else None))
            command, trouble = ("start", str(cpus), str(folder)), "fleet.kind: Ray does not start on this machine"
            hint = f"fedtide: a process of Ray's died, and Ray ended this one; go on with: {resume}" if resume else ""
        process = stack.enter_context(_helper_process(*command, hint=hint))
        yield _read_address(process, trouble)


@contextmanager
def _helper_process(*arguments: str, hint: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Run this file in a process with a group of its own; `hint` is what it says if Ray dies."""
    terminal = os.dup(2)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "fedtide.fleets.ray_cluster", *arguments, str(terminal), hint],
        pass_fds=[terminal],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
        env=os.environ | {"PYTHONPATH": search_path()},
    )
    os.close(terminal)
    try:
        yield process
        with suppress(OSError):
            process.stdin.write(b"done")  # type: ignore[union-attr]
    finally:
        with suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            process.wait(timeout=15.0)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def _read_address(process: subprocess.Popen[bytes], trouble: str) -> str:
    """Read the address that the helper process prints; raise with its error, or when it prints nothing."""
    lines: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            text = line.decode(errors="replace")
            if text.startswith(MARK):
                lines.append(text.removeprefix(MARK))
                return

    reader = threading.Thread(target=read, daemon=True)
    began = time.monotonic()
    reader.start()
    reader.join(JOIN_SECONDS)
    if not lines:
        ended = process.poll() is not None
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        reader.join()
        why = f"ended after {time.monotonic() - began:.0f} seconds" if ended else f"{JOIN_SECONDS:.0f} seconds"
        raise FedtideError(f"{trouble} ({why})")
    report = json.loads(lines[0])
    if "error" in report:
        raise FedtideError(f"{trouble}: {report['error']}")
    return str(report["address"])


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        probe(sys.argv[2])
