"""Calls of functions by several processes: handed out, and done again by another process if one dies.

A call names a function of this package, `module:function`, which a process imports and calls with (arguments, channel).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree
from fedtide.fleets.worker import SharedRef

DEATHS = 3
"""Number of processes that one call may take down before the run gives up."""


Here = Callable[[int], Any]
"""Does a call in this process, by its number, and returns its result."""


@dataclass(frozen=True)
class Message:
    """A message of a running call, or its result (`final`)."""

    call: int
    value: Tree
    final: bool


class Processes(Protocol):
    """Processes that take calls, wherever they are.

    folder: of this process, for the flag that asks calls to end soon. multi_node: whether they may be on machines that
    see none of this one's files. joined: whether this process takes short calls, too.
    """

    folder: Path
    multi_node: bool
    joined: bool

    @property
    def processes(self) -> list[int]:
        """Process ids, each on its own machine."""

    def put(self, kind: str, tree: Tree, name: str | None = None) -> SharedRef:
        """Share a tree with all calls; under a known `name` it is shared already."""

    def free(self, ref: SharedRef) -> None:
        """Free a shared tree, which no later call reads."""

    def map(self, function: str, arguments: Sequence[Tree], here: Here | None = None) -> Iterator[Tree]:
        """Call `function` with each of `arguments`, short calls; results in their order.

        Args:
            function: what is called.
            arguments: of each call.
            here: does a call in this process, by its number, where the processes are `joined`.
        """

    def run(self, function: str, arguments: Sequence[Tree]) -> Iterator[Message]:
        """Call `function` with each of `arguments`, long calls; yield all that they send, as it comes."""


class Member(Protocol):
    """A process. calls: not answered yet, the running one first."""

    calls: deque[int]


M = TypeVar("M", bound=Member)


@dataclass
class Batch:
    """Calls that are to be made.

    short: answered at once, without messages on the way. here: does a call in this process, beside the others. reach:
    how far the calls that begin may be ahead of the first one without an answer. waiting: not handed out yet. taken:
    how many results were taken, in order. deaths: how many processes each call took down.
    """

    function: str
    arguments: Sequence[Tree]
    short: bool = False
    here: Here | None = None
    reach: float = math.inf
    taken: int = 0
    waiting: deque[int] = field(default_factory=deque)
    deaths: Counter[int] = field(default_factory=Counter)


class CallLoop(ABC, Generic[M]):
    """Makes the calls of a pool by its members.

    title: of a member, in messages. reach: how many calls for each member may be ahead of the first one without an
    answer, so that few results wait for one that takes its time.
    """

    title: str
    reach: float = math.inf
    members: list[M]

    def map(self, function: str, arguments: Sequence[Tree], here: Here | None = None) -> Iterator[Tree]:
        """Call `function` with each of `arguments`, short calls; results in their order, as soon as they are known."""
        ready: dict[int, Tree] = {}
        batch = Batch(function, arguments, short=True, here=here, reach=self.reach * len(self.members))
        for message in self._made(batch):
            if message.final:
                ready[message.call] = message.value
            while batch.taken in ready:
                yield ready.pop(batch.taken)
                batch.taken += 1

    def run(self, function: str, arguments: Sequence[Tree]) -> Iterator[Message]:
        """Call `function` with each of `arguments`, long calls; everything that they send, as it comes.

        A call whose process dies is done again by another. An error of a call ends all of them.
        """
        return self._made(Batch(function, arguments))

    def _made(self, batch: Batch) -> Iterator[Message]:
        batch.waiting.extend(range(len(batch.arguments)))
        unanswered = len(batch.arguments)
        try:
            while unanswered:
                own = self._own(batch)
                self._hand_out(batch)
                if batch.here is not None and own is not None:  # the others have work meanwhile
                    unanswered -= 1
                    yield Message(own, batch.here(own), True)
                for member in self._ready(batch, wait=own is None):
                    received = self._receive(member)
                    if received is None:
                        self._recover(member, batch)
                    for kind, value in received or ():
                        final = kind != "message"
                        call = member.calls.popleft() if final else member.calls[0]
                        if kind == "error":
                            line = self._advised(value["line"])
                            raise FedtideError(line) if value["user"] else RuntimeError(line)
                        unanswered -= final
                        yield Message(call, value, final)
        finally:
            # A caller that stops early must not leave calls running.
            for member in list(self.members):
                if member.calls:
                    self._replace(member)

    def _own(self, batch: Batch) -> int | None:
        """Take the next call for this process; one that took down another is not for the one that all depends on."""
        if batch.here is None or not batch.waiting or batch.deaths[batch.waiting[0]]:
            return None
        return batch.waiting.popleft()

    def _hand_out(self, batch: Batch) -> None:
        """Hand out calls; of short ones a member holds two, so that it need not wait for the next one."""
        for depth in range(1, 3 if batch.short else 2):
            for member in self.members:
                if batch.waiting and len(member.calls) < depth and batch.waiting[0] < batch.taken + batch.reach:
                    call = batch.waiting.popleft()
                    member.calls.append(call)
                    self._send(member, batch, batch.arguments[call])

    def _recover(self, member: M, batch: Batch) -> None:
        """Replace a member that died, and put its calls back."""
        batch.waiting.extendleft(reversed(member.calls))
        if member.calls:
            batch.deaths[member.calls[0]] += 1
            if batch.deaths[member.calls[0]] >= DEATHS:
                raise FedtideError(f"{self.title} died {DEATHS} times on the same work; giving up")
        self._replace(member)

    def _advised(self, line: str) -> str:
        """Add to the line of a call's error what to do."""
        return line

    @abstractmethod
    def _send(self, member: M, batch: Batch, arguments: Tree) -> None:
        """Send the arguments of a call to a member."""

    @abstractmethod
    def _ready(self, batch: Batch, *, wait: bool = True) -> list[M]:
        """Return members that have answered, or died; wait for one."""

    @abstractmethod
    def _receive(self, member: M) -> list[tuple[str, Any]] | None:
        """Return the messages of a member ("message", "done" or "error"); None if it has died."""

    @abstractmethod
    def _replace(self, member: M) -> None:
        """Put a fresh process in the place of one."""

    @abstractmethod
    def close(self) -> None:
        """End the processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
