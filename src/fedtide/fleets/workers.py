"""The workers engine: blocks of clients in parallel processes, with the same bits as in one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from fedtide.core import codec
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import Tree
from fedtide.core.types import Scores, State
from fedtide.fleets.ask import Done, Job, Replay, Replayed, Scoring
from fedtide.fleets.host import Host
from fedtide.fleets.pool import Processes
from fedtide.fleets.worker import Lent, Listener, own_function

Block = Job | Scoring | Replay


@dataclass(frozen=True)
class WorkersEngine:
    """Hands blocks to whichever process is free, of whatever pool.

    The payload lies once in shared memory for all processes of a machine. A process that is killed is replaced and its
    block done again; works are pure and sums are added in the order of the blocks, so the result does not change.

    Args:
        pool: the processes.
        spec: from what a process makes the host: "make" names the function of this package that does it (see
            `fedtide.runs.build.spec_of`).
        travels: the clients' memory, where processes cannot reach its files: rows go along with the calls, come back
            with the answers and are put into files here. None leaves large rows where they lie.
    """

    pool: Processes
    spec: Mapping[str, Any]
    travels: MemoryStore | None = None

    @cached_property
    def _spec(self) -> Lent:
        """The spec lies beside the pool's processes, so that it need not travel with every block."""
        text = json.dumps(dict(self.spec), sort_keys=True)
        return self.pool.lend("spec", text, hashlib.sha256(text.encode()).hexdigest()[:16])

    def ask(self, jobs: Sequence[Job], payload: Tree) -> Iterator[Done]:
        """Run a question."""
        for done in self._map("fedtide.fleets.workers:ask", jobs, payload):
            yield self._settled(done)

    def score(self, scorings: Sequence[Scoring], payload: Tree) -> Iterator[Scores]:
        """Run a scoring."""
        return self._map("fedtide.fleets.workers:score", scorings, payload)

    def replay(self, replays: Sequence[Replay], payload: Tree, state: State) -> Iterator[Replayed]:
        """Put a question to clients once more, one by one."""
        return self._map("fedtide.fleets.workers:replay", replays, {"payload": payload, "state": state})

    def _map(self, function: str, blocks: Sequence[Block], payload: Tree) -> Iterator[Any]:
        with self._shared(payload) as lent:
            yield from self.pool.map(function, _Calls(self._spec, blocks, lent, self._packed))

    @contextmanager
    def _shared(self, payload: Tree) -> Iterator[Lent]:
        lent = self.pool.lend("payload", payload)
        try:
            yield lent
        finally:
            self.pool.take_back(lent)

    def _packed(self, block: Block) -> Block:
        """A block with the memory that it needs, where that travels."""
        if self.travels is None:
            return block
        if not isinstance(block, Replay):
            return replace(block, memory=[self.travels.load(row) for row in block.memory])
        memory = [] if block.job is None else [self.travels.load(row) for row in block.job.memory]
        return replace(block, job=None if block.job is None else replace(block.job, memory=memory))

    def _settled(self, done: Done) -> Done:
        """What a block gave, with large rows of memory put into files here, where they traveled."""
        if self.travels is None:
            return done
        rows = {client: self.travels.stage(client, row) for client, row in done.memory.items()}
        return replace(done, memory=rows)


@dataclass(frozen=True)
class _Calls(Sequence[Tree]):
    """The arguments of calls, each made when it is handed out: rows of memory may travel with them."""

    spec: Lent
    blocks: Sequence[Block]
    payload: Lent
    packed: Callable[[Block], Block]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, place: Any) -> Tree:
        return {"spec": self.spec, "block": codec.sealed(self.packed(self.blocks[place])), "payload": self.payload}


@lru_cache(maxsize=4)
def _host_of(spec: str) -> Host:
    """The host that a spec describes; made once per process."""
    made = json.loads(spec)
    return own_function(made["make"])(made, name=str(os.getpid()))


def _host(arguments: Tree, line: Listener) -> Host:
    return _host_of(line.lent(arguments["spec"]))


def ask(arguments: Tree, line: Listener) -> Done:
    """In a worker: run one block of a question."""
    host = _host(arguments, line)  # first: it loads the classes that block and payload may hold
    return host.ask(codec.opened(arguments["block"]), line.lent(arguments["payload"]))


def score(arguments: Tree, line: Listener) -> Scores:
    """In a worker: run one block of a scoring."""
    host = _host(arguments, line)
    return host.score(codec.opened(arguments["block"]), line.lent(arguments["payload"]))


def replay(arguments: Tree, line: Listener) -> Replayed:
    """In a worker: put a question to one client once more."""
    host = _host(arguments, line)
    both = line.lent(arguments["payload"])
    return host.replay(codec.opened(arguments["block"]), both["payload"], both["state"])
