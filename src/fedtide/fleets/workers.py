"""The workers engine, which runs blocks of clients in parallel processes, with the same bits as in one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from fedtide.core import codec
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import Tree
from fedtide.core.types import Scores, State
from fedtide.fleets.ask import BlockResult, Job, Replay, Replayed, Scoring
from fedtide.fleets.calls import Processes
from fedtide.fleets.host import Host
from fedtide.fleets.worker import Channel, SharedRef, own_function

Block = Job | Scoring | Replay


@dataclass(frozen=True)
class WorkersEngine:
    """An engine that hands blocks to free processes of a pool.

    The payload lies once in shared memory for all processes of a machine. A process that is killed is replaced and its
    block done again; works are pure and sums are added in the order of the blocks, so the result does not change.

    Args:
        pool: the processes.
        spec: description from which a process makes its host; "make" names the function of this package that does it
            (see `fedtide.runs.build.spec_of`).
        shipped_memory: store of the clients' memory, where processes cannot reach its files: rows go along with the
            calls, come back with the answers and are put into files here. None leaves large rows where they lie.
    """

    pool: Processes
    spec: Mapping[str, Any]
    shipped_memory: MemoryStore | None = None

    @cached_property
    def _spec(self) -> SharedRef:
        """Shared spec, so that it need not travel with every block."""
        text = json.dumps(dict(self.spec), sort_keys=True)
        return self.pool.put("spec", text, hashlib.sha256(text.encode()).hexdigest()[:16])

    def ask(self, jobs: Sequence[Job], payload: Tree) -> Iterator[BlockResult]:
        """Run a question."""
        for done in self._map(jobs, payload):
            yield self._stored(done)

    def score(self, scorings: Sequence[Scoring], payload: Tree) -> Iterator[Scores]:
        """Run a scoring."""
        return self._map(scorings, payload)

    def replay(self, replays: Sequence[Replay], payload: Tree, state: State) -> Iterator[Replayed]:
        """Put a question to clients once more, one by one."""
        return self._map(replays, {"payload": payload, "state": state})

    def _map(self, blocks: Sequence[Block], payload: Tree) -> Iterator[Any]:
        ref = self.pool.put("payload", payload)
        try:
            yield from self.pool.map(
                "fedtide.fleets.workers:run_block", _Calls(self._spec, blocks, ref, self._with_memory)
            )
        finally:
            self.pool.free(ref)

    def _with_memory(self, block: Block) -> Block:
        """Add the clients' memory to a block, where memory is shipped."""
        if self.shipped_memory is None:
            return block
        if not isinstance(block, Replay):
            return replace(block, memory=[self.shipped_memory.load(row) for row in block.memory])
        memory = [] if block.job is None else [self.shipped_memory.load(row) for row in block.job.memory]
        return replace(block, job=None if block.job is None else replace(block.job, memory=memory))

    def _stored(self, done: BlockResult) -> BlockResult:
        """Put shipped memory of a result into files."""
        if self.shipped_memory is None:
            return done
        rows = {client: self.shipped_memory.stage(client, row) for client, row in done.memory.items()}
        return replace(done, memory=rows)


@dataclass(frozen=True)
class _Calls(Sequence[Tree]):
    """Arguments of calls, each made when it is handed out, as memory may travel with it."""

    spec: SharedRef
    blocks: Sequence[Block]
    payload: SharedRef
    with_memory: Callable[[Block], Block]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, place: Any) -> Tree:
        return {"spec": self.spec, "block": codec.sealed(self.with_memory(self.blocks[place])), "payload": self.payload}


@lru_cache(maxsize=4)
def _host_of(spec: str) -> Host:
    """Make the host that a spec describes, once per process."""
    made = json.loads(spec)
    return own_function(made["make"])(made, name=str(os.getpid()))


def run_block(arguments: Tree, channel: Channel) -> BlockResult | Scores | Replayed:
    """Run one block of an engine's work, in a worker."""
    host = _host_of(channel.get(arguments["spec"]))  # first: it loads the classes that block and payload may hold
    block: Block = codec.opened(arguments["block"])
    payload = channel.get(arguments["payload"])
    if isinstance(block, Job):
        return host.ask(block, payload)
    if isinstance(block, Scoring):
        return host.score(block, payload)
    return host.replay(block, payload["payload"], payload["state"])
