"""A pool whose processes are actors of a Ray cluster, on this machine or on many; one that dies is replaced.

It takes the same calls as `fedtide.fleets.pool.Pool`, and Ray carries them. A shared tree lies once in the memory of
each node.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

import fedtide
from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree
from fedtide.fleets.pool import DEATHS, Message, search_path
from fedtide.fleets.ray_actor import Actor, PackedMessage, packed, unpacked
from fedtide.fleets.ray_cluster import already_connected, connected
from fedtide.fleets.scratch import Scratch
from fedtide.fleets.worker import STOP, SharedRef

BEGIN_SECONDS, OWN_SECONDS = 120.0, 1800.0
"""Seconds within which an actor has to start: to be given room, and to import torch. In a cluster of our own no other
user can hold the room: a machine that is busy takes long."""

WAIT_SECONDS = 1.0
"""Seconds that the pool waits for answers before it looks for actors that never started."""


@dataclass
class _ActorState:
    """An actor and its calls.

    calls: that it has not answered yet, the running one first. pending: what it will answer next, in order. starting:
    its first word, until that is heard. since: when it was asked for.
    """

    actor: Any
    starting: Any
    since: float
    process: int = 0
    calls: deque[int] = field(default_factory=deque)
    pending: deque[Any] = field(default_factory=deque)


@dataclass(frozen=True)
class _Work:
    """Calls that are to be made.

    short: answered at once, without messages on the way. ahead: how many an actor may hold. room: whether a call may
    begin yet.
    """

    function: str
    arguments: Sequence[Tree]
    short: bool
    ahead: int
    room: Callable[[int], bool]


class RayPool:
    """Actors of a Ray cluster.

    Args:
        size: how many; None takes as many as the cluster has room for.
        most: at most so many, where `size` does not say.
        address: of a cluster that runs already, HOST:PORT or "auto"; None starts one on this machine, which ends with
            this process.
        threads: of torch, and CPUs of the cluster, of each actor.
        gpus: share of a GPU that each actor has to itself.
        resume: command with which a person goes on if Ray dies, and takes this process along.

    Raises:
        FedtideError: no cluster answers, or it is too small, or its nodes have other versions.
    """

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
        own = address is None and not already_connected()
        self._patience = OWN_SECONDS if own else BEGIN_SECONDS
        self._numbers = 0
        self._shared: dict[str, Any] = {}
        self._seats: list[_ActorState] = []
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(Scratch())
        try:
            self._ray = self._stack.enter_context(
                connected(address, (size or min(most, max(_cores() // threads, 1))) * threads, resume)
            )
            nodes = [node for node in self._ray.nodes() if node["Alive"]]
            self.multi_node = len(nodes) > 1
            self._options = self._actor_options()
            self._seats = [self._start() for _ in range(self._pool_size(size, most))]
            for seat in self._seats:
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
            each = f"{self._threads} CPUs" if scarce == "CPUs" else f"{self._gpus:g} of a GPU"
            raise FedtideError(
                f"fleet.workers: found {size or 1} with {each} each, allowed: at most {room[scarce]}, for which the "
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
            # Where files decide who may do the work, a node that comes later must not be given any.
            "scheduling_strategy": "SPREAD" if self.multi_node else NodeAffinitySchedulingStrategy(here, soft=False),
        }

    @property
    def processes(self) -> list[int]:
        """Process ids, each on its own node."""
        return [seat.process for seat in self._seats]

    # -- shared trees -------------------------------------------------------------------------------------------------

    def put(self, kind: str, tree: Tree, name: str | None = None) -> SharedRef:
        """Put a tree into the object store, from which each node that needs it takes one copy.

        Args:
            kind: purpose of the tree.
            tree: tree to share.
            name: name under which it is known; a known tree is not put again. None makes a new name.
        """
        self._numbers += name is None
        known = f"{kind}-{name or self._numbers}"
        if known not in self._shared:
            self._shared[known] = self._ray.put(packed(tree))
        return SharedRef(kind, known)

    def free(self, ref: SharedRef) -> None:
        """Free a shared tree as soon as the last call that reads it is over."""
        self._shared.pop(ref.name, None)

    # -- calls --------------------------------------------------------------------------------------------------------

    def map(self, function: str, arguments: Sequence[Tree]) -> Iterator[Tree]:
        """Call `function` with each of `arguments`, short calls; results in their order, as soon as they are known.

        No call begins long before its turn, so that few results wait for one that takes its time.
        """
        ready: dict[int, Tree] = {}
        following = 0
        reach = 4 * len(self._seats)
        work = _Work(function, arguments, short=True, ahead=2, room=lambda call: call < following + reach)
        for message in self._run(work):
            ready[message.call] = message.value
            while following in ready:
                yield ready.pop(following)
                following += 1

    def run(self, function: str, arguments: Sequence[Tree]) -> Iterator[Message]:
        """Call `function` with each of `arguments`; everything the calls send, as it comes.

        A call whose actor dies is done again by another. An error of a call ends all of them.
        """
        yield from self._run(_Work(function, arguments, short=False, ahead=1, room=lambda call: True))

    def _run(self, work: _Work) -> Iterator[Message]:
        waiting = deque(range(len(work.arguments)))
        deaths = [0] * len(work.arguments)
        unanswered = len(work.arguments)
        try:
            while unanswered:
                self._hand_out(work, waiting)
                for seat in self._ready(waiting, deaths):
                    said = self._receive(seat)
                    if said is None:
                        self._recover(seat, waiting, deaths)
                        continue
                    for kind, parcel in said:
                        value = unpacked(parcel)
                        if kind == "error":
                            seat.calls.popleft()
                            raise FedtideError(value["line"]) if value["user"] else RuntimeError(value["line"])
                        final = kind == "done"
                        call = seat.calls.popleft() if final else seat.calls[0]
                        unanswered -= final
                        yield Message(call, value, final)
                    if seat.calls and not seat.pending:
                        self._listen(seat)
        finally:
            # A caller that stops early must not leave calls running.
            for number, seat in enumerate(self._seats):
                if seat.calls:
                    self._replace(number)

    def _hand_out(self, work: _Work, waiting: deque[int]) -> None:
        for depth in range(1, work.ahead + 1):
            for seat in self._seats:
                if not waiting or len(seat.calls) >= depth or not work.room(waiting[0]):
                    continue
                call = waiting.popleft()
                seat.calls.append(call)
                given = work.arguments[call]
                if work.short:
                    parts = given.values() if isinstance(given, dict) else ()
                    names = [part.name for part in parts if isinstance(part, SharedRef)]
                    shared = [self._shared[name] for name in names]
                    seat.pending.append(seat.actor.call.remote(work.function, packed(given), names, *shared))
                else:
                    seat.actor.start.remote(work.function, packed(given), (self.folder / STOP).exists())
                    self._listen(seat)

    def _listen(self, seat: _ActorState) -> None:
        """Ask for the messages of a long call."""
        seat.pending.append(seat.actor.poll.remote((self.folder / STOP).exists()))

    def _ready(self, waiting: deque[int], deaths: list[int]) -> list[_ActorState]:
        """The actors that have answered, or died."""
        for seat in self._seats:
            if seat.starting is not None and not self._check_started(seat, 0.0):
                self._recover(seat, waiting, deaths)
        pending = {seat.pending[0]: seat for seat in self._seats if seat.pending}
        ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=WAIT_SECONDS) if pending else ([], [])
        more, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0) if ready else ([], [])
        return [pending[one] for one in more]

    def _receive(self, seat: _ActorState) -> list[PackedMessage] | None:
        """Return the messages of an actor; None if it has died."""
        try:
            answer: list[PackedMessage] = self._ray.get(seat.pending.popleft())
        except self._ray.exceptions.RayError:
            return None
        return answer

    def _recover(self, seat: _ActorState, waiting: deque[int], deaths: list[int]) -> None:
        """Replace an actor that died, and put its calls back."""
        waiting.extendleft(reversed(seat.calls))
        if seat.calls:
            deaths[seat.calls[0]] += 1
            if deaths[seat.calls[0]] >= DEATHS:
                raise FedtideError(f"an actor died {DEATHS} times on the same work; giving up")
        self._replace(self._seats.index(seat))

    # -- actors -------------------------------------------------------------------------------------------------------

    def _start(self) -> _ActorState:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            actor = self._ray.remote(Actor).options(**self._options).remote(os.getcwd(), self._threads)
            return _ActorState(actor, actor.about.remote(), time.monotonic())

    def _replace(self, number: int) -> None:
        self._ray.kill(self._seats[number].actor)
        self._seats[number] = self._start()

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
        for name, ours in (("fedtide", fedtide.__version__), ("torch", torch.__version__)):
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
            for seat in self._seats:
                self._ray.kill(seat.actor)
        finally:
            self._seats, self._shared = [], {}
            self._stack.close()

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
