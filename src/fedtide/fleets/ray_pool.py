"""A pool whose processes are actors of a Ray cluster, on this machine or on many; one that dies is replaced.

It takes the same calls as `fedtide.fleets.pool.Pool`, and Ray carries them. A shared tree lies once in the memory of
each node.
"""

import logging
import os
import queue
import secrets
import signal
import socket
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtide._version import installed
from fedtide.core import codec
from fedtide.core.errors import FedtideError, refused, uninstalled
from fedtide.core.trees import Tree
from fedtide.fleets.pool import STOP, Batch, Channel, Member, Processes, SharedRef, error_message, own_function
from fedtide.fleets.this_machine import Scratch, cores, search_path

SOCKET_SECONDS = 5.0
"""Seconds within which an address has to accept a connection."""

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # any line at all: it tells of every actor that died, which we mend
}
"""Settings with which Ray sends nothing home and prints nothing into our progress."""


def check_address(address: str | None) -> None:
    """Raise unless Ray is there and, if an address is given, something listens at it.

    Ray itself tries to reach a dead address for two minutes, and then ends the process that asks.
    """
    if find_spec("ray") is None:
        raise uninstalled('fleet.kind: "ray" needs Ray', "ray")
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


@contextmanager
def connected(address: str | None, cpus: int) -> Iterator[Any]:
    """Connect Ray to a cluster: the one at an address, or one of our own on this machine, which ends with the block.

    A program that is connected already stays so. Other users of the machine cannot reach our own cluster: it listens on
    the loopback interface, has a token, and its files lie in a folder that only this user can read.

    Args:
        address: HOST:PORT, or "auto" for the cluster that Ray finds on this machine; None starts one.
        cpus: of our own.

    Raises:
        FedtideError: no cluster answers, or not to this version of Ray or Python.
    """
    check_address(address)
    os.environ |= QUIET
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"address": address}
        if address is None:
            short = Path("/tmp")  # sockets lie in the folder, whose names must be short
            folder = stack.enter_context(Scratch(short if short.is_dir() else None))
            options = {"address": "local", "num_cpus": cpus, "include_dashboard": False, "_temp_dir": str(folder / "r")}
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # it listens on the loopback interface alone
            if "RAY_AUTH_MODE" not in os.environ:
                os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        import ray

        if ray.is_initialized():
            yield ray
            return
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **options)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise FedtideError(
                f"fleet.address: no Ray cluster answers at {address or 'this machine'}: {error}"
            ) from None
        stack.callback(ray.shutdown)
        if threading.current_thread() is threading.main_thread():  # Ray's own handler prints where every thread was
            signal.signal(signal.SIGTERM, terminated)
        yield ray


Packed = np.ndarray[Any, np.dtype[np.uint8]]
"""A tree for Ray, as bytes, which Ray lays once into the shared memory of each node."""

PackedMessage = tuple[str, Packed]
"""Kind ("message", "done" or "error") and content of a message."""

POLL_SECONDS = 0.5
"""Seconds that an actor waits for a message before it returns none."""


def packed(tree: Tree) -> Packed:
    """Pack a tree for Ray.

    >>> unpacked(packed({"w": torch.ones(2), "n": (3, None)}))
    {'w': tensor([1., 1.]), 'n': (3, None)}
    """
    return np.frombuffer(codec.to_bytes(tree), np.uint8)


def unpacked(parcel: Packed) -> Tree:
    """Unpack a tree, as a copy."""
    return codec.from_bytes(parcel.data)


class RayChannel(Channel):
    """The channel between a call and the pool that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox: queue.SimpleQueue[PackedMessage] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.shared: dict[str, Packed] = {}

    def _read(self, ref: SharedRef) -> Tree:
        return unpacked(self.shared[ref.name])

    def send(self, value: Tree) -> None:
        """Send something small on the way."""
        self.outbox.put(("message", packed(value)))

    def stopping(self) -> bool:
        """Tell whether a person has asked to stop."""
        return self.stop.is_set()


def run_call(function: str, arguments: Packed, channel: Channel) -> PackedMessage:
    """Run a call and return its result or error."""
    try:
        return "done", packed(own_function(function)(unpacked(arguments), channel))
    except Exception as error:
        return "error", packed(error_message(error))


def versions_here() -> dict[str, str]:
    """Return the versions that all nodes must have in common."""
    return {"fedtide": installed(), "torch": torch.__version__}


class Actor:
    """Runs calls in a process of the cluster, one at a time.

    Args:
        directory: from which relative paths of the configuration start, if the node has it.
        threads: of torch.
        versions: of the program that starts it.

    Raises:
        FedtideError: its node has other versions.
    """

    def __init__(self, directory: str, threads: int, versions: dict[str, str]) -> None:
        for name, ours in versions_here().items():
            if ours != versions[name]:
                raise FedtideError(
                    f"fleet.address: a node of the Ray cluster has {name} {ours}, allowed: {versions[name]}, as here; "
                    "other versions compute other bits"
                )
        if os.path.isdir(directory):
            os.chdir(directory)
        torch.set_num_threads(threads)
        self._channel = RayChannel()

    def process(self) -> int:
        """Return the process id of this actor."""
        return os.getpid()

    def call(self, function: str, arguments: Packed, names: list[str], *lent: Packed) -> list[PackedMessage]:
        """Run a short call to its end."""
        self._channel.shared = dict(zip(names, lent, strict=True))
        return [run_call(function, arguments, self._channel)]

    def start(self, function: str, arguments: Packed, stop: bool) -> None:
        """Start a long call, which may be asked at once to end."""
        channel = self._channel = RayChannel()
        if stop:
            channel.stop.set()
        threading.Thread(target=lambda: channel.outbox.put(run_call(function, arguments, channel)), daemon=True).start()

    def poll(self, stop: bool) -> list[PackedMessage]:
        """Return the messages of the long call since the last poll; wait a while for one.

        Args:
            stop: whether it should end soon.
        """
        if stop:
            self._channel.stop.set()
        messages: list[PackedMessage] = []
        try:
            messages.append(self._channel.outbox.get(timeout=POLL_SECONDS))
            while True:
                messages.append(self._channel.outbox.get_nowait())
        except queue.Empty:
            return messages


BEGIN_SECONDS = 300.0
"""Seconds within which actors have to start: to be given room, and to import torch."""


@dataclass(eq=False)
class _ActorState(Member):
    """An actor, its process id once it has started, and its next answers, in order."""

    actor: Any
    process: Any
    pending: deque[Any] = field(default_factory=deque)


class RayPool(Processes[_ActorState]):
    """Actors of a Ray cluster.

    Args:
        size: how many; None takes as many as the cluster has room for.
        most: at most so many, if `size` does not say.
        address: of a cluster that runs already, HOST:PORT or "auto"; None starts one on this machine, which ends with
            this process.
        threads: of torch, and CPUs of the cluster, of each actor.
        gpus: share of a GPU that each actor has to itself.

    Raises:
        FedtideError: no cluster answers, or it is too small, or its nodes have other versions.
    """

    title = "an actor"
    reach = 4

    def __init__(
        self,
        size: int | None = None,
        *,
        most: int = 16,
        address: str | None = None,
        threads: int = 1,
        gpus: float = 0.0,
    ) -> None:
        self._threads, self._gpus = threads, gpus
        self._numbers = 0
        self._shared: dict[str, Any] = {}
        self.members: list[_ActorState] = []
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(Scratch())
        try:
            processors = (size or min(most, max(cores() // threads, 1))) * threads
            self._ray = self._stack.enter_context(connected(address, processors))
            self.multi_node = sum(node["Alive"] for node in self._ray.nodes()) > 1
            self.members = [self._start() for _ in range(self._pool_size(size, most))]
            self._wait_until_started()
        except BaseException:
            self.close()
            raise

    def _pool_size(self, size: int | None, most: int) -> int:
        """Return the number of actors.

        Raises:
            FedtideError: the cluster has no room for as many.
        """
        has = self._ray.cluster_resources()
        room = {"CPUs": int(has.get("CPU", 0) // self._threads)}
        if self._gpus:
            room["GPUs"] = int(has.get("GPU", 0) / self._gpus + 1e-9)
        scarce = min(room, key=lambda name: room[name])
        if (size or 1) > room[scarce]:
            share = f"{self._threads} CPUs" if scarce == "CPUs" else f"{self._gpus:g} of a GPU"
            raise FedtideError(
                f"fleet.workers: found {size or 1} with {share} each, allowed: at most {room[scarce]}, for which the "
                f"Ray cluster has {scarce} ({has.get(scarce[:-1], 0):g})"
            )
        return size or min(most, room[scarce])

    @property
    def processes(self) -> list[int]:
        """Process ids, each on its own node."""
        return self._ray.get([seat.process for seat in self.members], timeout=BEGIN_SECONDS)

    def share(self, kind: str, tree: Tree, name: str | None = None) -> SharedRef:
        """Put a tree into the object store, from which each node that needs it takes one copy."""
        self._numbers += name is None
        key = f"{kind}-{name or self._numbers}"
        if key not in self._shared:
            self._shared[key] = self._ray.put(packed(tree))
        return SharedRef(kind, key)

    def free(self, ref: SharedRef) -> None:
        """Free a shared tree as soon as the last call that reads it is over."""
        self._shared.pop(ref.name, None)

    def _send(self, member: _ActorState, batch: Batch, arguments: Tree) -> None:
        if batch.short:
            parts = arguments.values() if isinstance(arguments, dict) else ()
            names = [part.name for part in parts if isinstance(part, SharedRef)]
            lent = [self._shared[name] for name in names]
            member.pending.append(member.actor.call.remote(batch.function, packed(arguments), names, *lent))
        else:
            member.actor.start.remote(batch.function, packed(arguments), self._stopping)

    @property
    def _stopping(self) -> bool:
        return (self.folder / STOP).exists()

    def _ready(self, *, wait: bool = True) -> list[_ActorState]:
        for seat in self.members:
            if seat.calls and not seat.pending:  # a long call, which is asked for its messages
                seat.pending.append(seat.actor.poll.remote(self._stopping))
        pending = {seat.pending[0]: seat for seat in self.members if seat.pending}
        self._ray.wait(list(pending), num_returns=1)
        ready, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0)
        return [pending[one] for one in ready]

    def _receive(self, member: _ActorState) -> list[tuple[str, Tree]] | None:
        try:
            return [(kind, unpacked(parcel)) for kind, parcel in self._ray.get(member.pending.popleft())]
        except self._ray.exceptions.RayError:
            return None

    def _start(self) -> _ActorState:
        """Start an actor, which is not waited for."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        single = {name: str(self._threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        here = self._ray.get_runtime_context().get_node_id()
        options = {
            "num_cpus": self._threads,
            "num_gpus": self._gpus,
            "max_restarts": 0,
            "runtime_env": {"env_vars": single | {"PYTHONPATH": search_path()}},
            # If files decide who may do the work, a node that comes later must not be given any.
            "scheduling_strategy": "SPREAD" if self.multi_node else NodeAffinitySchedulingStrategy(here, soft=False),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            actor = self._ray.remote(Actor).options(**options).remote(os.getcwd(), self._threads, versions_here())
        return _ActorState(actor, actor.process.remote())

    def _wait_until_started(self) -> None:
        """Wait until all actors have started.

        Raises:
            FedtideError: they cannot begin, are not given room in time, or would compute with other versions.
        """
        try:
            self._ray.get([seat.process for seat in self.members], timeout=BEGIN_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            free = self._ray.available_resources()
            raise FedtideError(
                f"fleet.kind: the Ray cluster had no room for an actor within {BEGIN_SECONDS:.0f} seconds; it needs "
                f"{self._threads} CPUs and {self._gpus:g} GPUs, free: {free.get('CPU', 0):g} and {free.get('GPU', 0):g}"
            ) from None
        except self._ray.exceptions.RayError as error:
            why = str(error).strip().rpartition("Error: ")[2]
            raise FedtideError(f"fleet.kind: an actor of the Ray cluster cannot begin: {why}") from None

    def _replace(self, member: _ActorState) -> None:
        self._ray.kill(member.actor)
        self.members[self.members.index(member)] = self._start()

    def close(self) -> None:
        """End the actors, and the cluster if it is our own."""
        try:
            for seat in self.members:
                self._ray.kill(seat.actor)
        finally:
            self.members, self._shared = [], {}
            self._stack.close()
