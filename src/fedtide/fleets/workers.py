"""The workers engine, which runs blocks of clients in parallel processes, with the same bits as in one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from fedtide.core import codec
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import Tree
from fedtide.core.types import Scores, State
from fedtide.fleets.ask import Ask, BlockResult, Replay, Replayed, Scoring
from fedtide.fleets.calls import Processes
from fedtide.fleets.host import Host
from fedtide.fleets.worker import Channel, SharedRef, own_function

Block = Ask | Scoring | Replay


@dataclass(frozen=True)
class WorkersEngine:
    """An engine that hands blocks to free processes of a pool.

    The payload lies once in shared memory for all processes of a machine. A process that is killed is replaced and its
    block done again; works are pure and sums are added in the order of the blocks, so the result does not change.

    Args:
        pool: the processes.
        spec: description from which a process makes its host; "make" names the function of this package that does it
            (see `fedtide.runs.build.spec_of`).
        memory: what clients keep. Processes on this machine read and write its files; where they cannot reach these,
            rows travel with the calls and come back with the answers.
    """

    pool: Processes
    spec: Mapping[str, Any]
    memory: MemoryStore

    @cached_property
    def spec_ref(self) -> SharedRef:
        """Shared spec, so that it need not travel with every block."""
        text = json.dumps(dict(self.spec), sort_keys=True)
        return self.pool.put("spec", text, hashlib.sha256(text.encode()).hexdigest()[:16])

    def ask(self, blocks: Sequence[Ask], payload: Tree) -> Iterator[BlockResult]:
        """Run a question."""
        for done, aside in self._map(blocks, payload):
            for client, row in aside.items():
                self.memory.stage(client, row)
            yield done
            del done

    def score(self, scorings: Sequence[Scoring], payload: Tree) -> Iterator[Scores]:
        """Run a scoring."""
        return self._map(scorings, payload)

    def replay(self, replays: Sequence[Replay], payload: Tree, state: State) -> Iterator[Replayed]:
        """Put a question to clients once more, one by one."""
        return self._map(replays, {"payload": payload, "state": state})

    def _map(self, blocks: Sequence[Block], payload: Tree) -> Iterator[Any]:
        ref = self.pool.put("payload", payload)
        try:
            yield from self.pool.map("fedtide.fleets.workers:run_block", _Calls(self, blocks, ref))
        finally:
            self.pool.free(ref)

    def lend(self, block: Block) -> Tree:
        """Return what the clients of a block keep, as a process needs it."""
        ask = block if isinstance(block, Ask) else block.ask
        if ask is None or (isinstance(block, Scoring) and not block.personal):
            return {}
        return self.memory.lend(ask.clients.tolist(), ask.version, whole=self.pool.multi_node)


@dataclass(frozen=True)
class _Calls(Sequence[Tree]):
    """Arguments of calls, each made when it is handed out, as memory may travel with it."""

    engine: WorkersEngine
    blocks: Sequence[Block]
    payload: SharedRef

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, place: Any) -> Tree:
        block = self.blocks[place]
        sealed = codec.sealed({"block": block, "memory": self.engine.lend(block)})
        return {"spec": self.engine.spec_ref, "block": sealed, "payload": self.payload}


@lru_cache(maxsize=4)
def _host_of(spec: str) -> Host:
    """Make the host that a spec describes, once per process."""
    made = json.loads(spec)
    return own_function(made["make"])(made, name=str(os.getpid()))


def run_block(arguments: Tree, channel: Channel) -> tuple[BlockResult, Tree] | Scores | Replayed:
    """Run one block of an engine's work, in a worker; of an ask, return what its clients would keep as well."""
    host = _host_of(channel.get(arguments["spec"]))  # first: it loads the classes that block and payload may hold
    sent = codec.opened(arguments["block"])
    block: Block = sent["block"]
    payload = channel.get(arguments["payload"])
    host.memory.borrow(sent["memory"])
    if isinstance(block, Ask):
        return host.ask(block, payload), host.memory.hand_over()
    if isinstance(block, Scoring):
        return host.score(block, payload)
    return host.replay(block, payload["payload"], payload["state"])
