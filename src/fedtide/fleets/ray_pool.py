"""A pool whose processes are actors of a Ray cluster, on this machine or on many; one that dies is replaced.

It takes the same calls as `fedtide.fleets.pool.Pool`, and Ray carries them. A shared tree lies once in the memory of
each node.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import warnings
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedtide._version import installed
from fedtide.core import codec
from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree
from fedtide.fleets.pool import Batch, Member, Processes
from fedtide.fleets.ray_cluster import already_connected, connected
from fedtide.fleets.this_machine import Scratch, cores, keep_freed, search_path
from fedtide.fleets.worker import STOP, Channel, SharedRef, error_message, own_function

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


class Actor:
    """Runs calls in a process of the cluster, one at a time.

    Args:
        directory: from which relative paths of the configuration start, if the node has it.
        threads: of torch.
    """

    def __init__(self, directory: str, threads: int) -> None:
        if os.path.isdir(directory):
            os.chdir(directory)
        torch.set_num_threads(threads)
        keep_freed()
        self._channel = RayChannel()

    def about(self) -> dict[str, Any]:
        """Return the process id and the versions of this actor."""
        return {"process": os.getpid(), "fedtide": installed(), "torch": torch.__version__}

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


BEGIN_SECONDS, OWN_SECONDS = 120.0, 1800.0
"""Seconds within which an actor has to start: to be given room, and to import torch. In a cluster of our own no other
user can hold the room: a machine that is busy takes long."""

WAIT_SECONDS = 1.0
"""Seconds that the pool waits for answers before it looks for actors that never started."""


@dataclass(eq=False)
class _ActorState(Member):
    """An actor and its calls.

    Attributes:
        actor: the actor, as Ray knows it.
        starting: its first word, until that is received.
        since: when it was asked for.
        process: its process id.
        pending: its next answers, in order.
    """

    actor: Any
    starting: Any
    since: float
    process: int = 0
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
        resume: command with which a person goes on if Ray dies, and takes this process along.

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
        resume: str = "",
    ) -> None:
        self._threads, self._gpus = threads, gpus
        is_own = address is None and not already_connected()
        self._patience = OWN_SECONDS if is_own else BEGIN_SECONDS
        self._numbers = 0
        self._shared: dict[str, Any] = {}
        self.members: list[_ActorState] = []
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(Scratch())
        try:
            self._ray = self._stack.enter_context(
                connected(address, (size or min(most, max(cores() // threads, 1))) * threads, resume)
            )
            nodes = [node for node in self._ray.nodes() if node["Alive"]]
            self.multi_node = len(nodes) > 1
            self._options = self._actor_options()
            self.members = [self._start() for _ in range(self._pool_size(size, most))]
            for seat in self.members:
                self._wait_until_started(seat)
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

    def _actor_options(self) -> dict[str, Any]:
        """Return the options of every actor."""
        one = {name: str(self._threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = self._ray.get_runtime_context().get_node_id()
        return {
            "num_cpus": self._threads,
            "num_gpus": self._gpus,
            "max_restarts": 0,
            "runtime_env": {"env_vars": one | {"PYTHONPATH": search_path()}},
            # If files decide who may do the work, a node that comes later must not be given any.
            "scheduling_strategy": "SPREAD" if self.multi_node else NodeAffinitySchedulingStrategy(here, soft=False),
        }

    @property
    def processes(self) -> list[int]:
        """Process ids, each on its own node."""
        return [seat.process for seat in self.members]

    # -- shared trees -------------------------------------------------------------------------------------------------

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

    # -- calls --------------------------------------------------------------------------------------------------------

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

    def _ready(self, batch: Batch, *, wait: bool = True) -> list[_ActorState]:
        for seat in list(self.members):
            if seat.starting is not None and not self._check_started(seat, 0.0):
                self._recover(seat, batch)
        for seat in self.members:
            if seat.calls and not seat.pending:  # a long call, which is asked for its messages
                seat.pending.append(seat.actor.poll.remote(self._stopping))
        pending = {seat.pending[0]: seat for seat in self.members if seat.pending}
        ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=WAIT_SECONDS) if pending else ([], [])
        more, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0) if ready else ([], [])
        return [pending[one] for one in more]

    def _receive(self, member: _ActorState) -> list[tuple[str, Tree]] | None:
        try:
            return [(kind, unpacked(parcel)) for kind, parcel in self._ray.get(member.pending.popleft())]
        except self._ray.exceptions.RayError:
            return None

    # -- actors -------------------------------------------------------------------------------------------------------

    def _start(self) -> _ActorState:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            actor = self._ray.remote(Actor).options(**self._options).remote(os.getcwd(), self._threads)
            return _ActorState(actor, actor.about.remote(), time.monotonic())

    def _replace(self, member: _ActorState) -> None:
        self._ray.kill(member.actor)
        self.members[self.members.index(member)] = self._start()

    def _wait_until_started(self, seat: _ActorState) -> None:
        """Wait until an actor has started."""
        while seat.starting is not None:
            if not self._check_started(seat, WAIT_SECONDS):
                raise FedtideError("fleet.kind: an actor of the Ray cluster died before it could begin")

    def _check_started(self, seat: _ActorState, patience: float) -> bool:
        """Check whether an actor has started; return False if it died before.

        Raises:
            FedtideError: it cannot be made, is not given room in time, or would compute with other versions.
        """
        ready, _ = self._ray.wait([seat.starting], timeout=patience)
        if not ready:
            if time.monotonic() - seat.since > self._patience:
                free = self._ray.available_resources()
                raise FedtideError(
                    f"fleet.kind: the Ray cluster had no room for an actor within {self._patience:.0f} seconds; it "
                    f"needs {self._threads} CPUs and {self._gpus:g} GPUs, free: {free.get('CPU', 0):g} and "
                    f"{free.get('GPU', 0):g}"
                )
            return True
        try:
            about = self._ray.get(seat.starting)
        except self._ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            if any("Error: " in line for line in lines):  # its own beginning failed, as it would again
                why = next(line for line in reversed(lines) if "Error: " in line)
                raise FedtideError(f"fleet.kind: an actor of the Ray cluster cannot begin: {why}") from None
            return False
        for name, ours in (("fedtide", installed()), ("torch", torch.__version__)):
            if about[name] != ours:
                raise FedtideError(
                    f"fleet.address: a node of the Ray cluster has {name} {about[name]}, allowed: {ours}, as here; "
                    "other versions compute other bits"
                )
        seat.process, seat.starting = about["process"], None
        return True

    def close(self) -> None:
        """End the actors, and the cluster if it is our own."""
        try:
            for seat in self.members:
                self._ray.kill(seat.actor)
        finally:
            self.members, self._shared = [], {}
            self._stack.close()
