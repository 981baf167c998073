"""The workers engine, which runs blocks of clients in parallel processes, with the same bits as in one.

A call does all blocks of a branch of the tree along which blocks are added (`fedtide.fleets.totals.add_up`), and
returns their sum. To carry a sum from process to process takes about as long as a client's work on a small model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from fedtide.core import codec
from fedtide.core.base import Scores, State
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import Tree
from fedtide.fleets.ask import Ask, BlockResult, Replay, Replayed, Scoring
from fedtide.fleets.local_engine import Host, threads
from fedtide.fleets.pool import Processes
from fedtide.fleets.totals import add_up, halves
from fedtide.fleets.worker import Channel, SharedRef, own_function

EVEN = 1.1
"""How much longer than in the most even way to share the work the last process may take, so that calls are few."""


@dataclass(frozen=True)
class Branch:
    """Blocks of an ask that are added up in one call.

    Args:
        ask: the question to all of their clients.
        sizes: how many clients each block has.
    """

    ask: Ask
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, blocks: Sequence[Ask]) -> Branch:
        """Return the branch of some blocks that stand side by side."""
        return cls(Ask.joined(blocks), tuple(len(block.clients) for block in blocks))

    def blocks(self) -> list[Ask]:
        """Return its blocks, in order."""
        places = torch.arange(len(self.ask.clients))
        return [self.ask.of(block) for block in places.split(list(self.sizes))]


Job = Branch | Scoring | Replay
"""What a process does in one call."""


@dataclass(frozen=True)
class WorkersEngine:
    """An engine that hands blocks to free processes of a pool, and does some itself if they are on this machine.

    The payload lies once in shared memory for all processes of a machine. A process that is killed is replaced and its
    blocks are done again. Works are pure and sums are added along one tree, so the result does not change.

    Args:
        host: of this process, which knows the clients' rows and keeps what they keep.
        pool: the processes. On this machine they read and write the files of `host.memory`. If they cannot reach these
            files, rows travel with the calls and come back with the answers.
        spec: description from which a process makes its host; "make" names the function of this package that does it
            (see `fedtide.runs.build.spec_of`).
        threads: torch threads of one client's work in this process, as many as the spec gives to the others.
    """

    host: Host
    pool: Processes
    spec: Mapping[str, Any]
    threads: int = 1

    @property
    def memory(self) -> MemoryStore:
        """The memory of clients."""
        return self.host.memory

    @cached_property
    def spec_ref(self) -> SharedRef:
        """Shared spec, so that it need not travel with every block."""
        text = json.dumps(dict(self.spec), sort_keys=True)
        return self.pool.share("spec", text, hashlib.sha256(text.encode()).hexdigest()[:16])

    def ask(self, blocks: Sequence[Ask], payload: Tree) -> Iterator[BlockResult]:
        """Run a question."""
        if not any(len(block.clients) for block in blocks):
            yield from (self.host.ask(block, payload) for block in blocks)
            return
        branches = [Branch.of(blocks[first:last]) for first, last in self._cut(blocks)]
        for result, aside in self._map(branches, payload):
            for client, row in aside.items():
                self.memory.stage(client, row)
            yield result
            del result

    def score(self, scorings: Sequence[Scoring], payload: Tree) -> Iterator[Scores]:
        """Run a scoring."""
        return (scores for scores, _ in self._map(scorings, payload))

    def replay(self, replays: Sequence[Replay], payload: Tree, state: State) -> Iterator[Replayed]:
        """Put a question to clients once more, one by one."""
        return (replayed for replayed, _ in self._map(replays, {"payload": payload, "state": state}))

    def _cut(self, blocks: Sequence[Ask]) -> list[tuple[int, int]]:
        """Cut blocks into branches: first block, and the one after the last.

        Rows of memory that travel are those of a single block, so that few of them lie in memory at once.
        """
        if self.pool.multi_node:
            return [(at, at + 1) for at in range(len(blocks))]
        clients = torch.cat([block.clients for block in blocks])
        rows = self.host.population.counts(clients, "train", blocks[0].moment)
        work = [int(part.sum()) for part in rows.split([len(block.clients) for block in blocks])]
        return cut_evenly(work, len(self.pool.processes) + self.pool.joined)

    def _map(self, jobs: Sequence[Job], payload: Tree) -> Iterator[tuple[Any, Tree]]:
        ref = self.pool.share("payload", payload)
        try:
            here = (lambda number: self._here(jobs[number], payload)) if self.pool.joined else None
            yield from self.pool.map("fedtide.fleets.worker_engine:run_job", _Calls(self, jobs, ref), here)
        finally:
            self.pool.free(ref)

    def _here(self, job: Job, payload: Tree) -> tuple[Any, Tree]:
        """Do a job in this process, as a worker does it; what its clients would keep is where it belongs."""
        with threads(self.threads):
            return do_job(self.host, job, payload), {}

    def lend(self, job: Job) -> Tree:
        """Return the memory that the clients of a job need, as it travels to a process."""
        if job.ask is None or (isinstance(job, Scoring) and not job.personal):
            return {}
        return self.memory.lend(job.ask.clients.tolist(), job.ask.version, whole=self.pool.multi_node)


def cut_evenly(work: Sequence[int], processes: int) -> list[tuple[int, int]]:
    """Cut blocks into branches of their tree: as few as let so many processes be done nearly as soon as they can.

    Args:
        work: of each block.
        processes: which take one branch after the other, in order.

    Returns:
        For each branch its first block, and the one after its last.

    >>> cut_evenly([10] * 10, 2), cut_evenly([40, 10, 10, 10, 10, 10], 2)
    ([(0, 5), (5, 10)], [(0, 2), (2, 3), (3, 6)])
    """
    branches, ways = [(0, len(work))], []
    while True:
        takes = [sum(work[first:last]) for first, last in branches]
        ways.append((_last_done(takes, processes), branches))
        several = [place for place, (first, last) in enumerate(branches) if last - first > 1]
        if ways[-1][0] <= EVEN * sum(work) / processes or not several:
            break
        place = max(several, key=takes.__getitem__)
        (first, last) = branches[place]
        middle = first + halves(last - first)[0]
        branches = [*branches[:place], (first, middle), (middle, last), *branches[place + 1 :]]
    soonest = min(when for when, _ in ways)
    return next(branches for when, branches in ways if when <= EVEN * soonest)


def _last_done(takes: Sequence[int], processes: int) -> int:
    """Return when the last process is done, if each takes the next of some jobs as soon as it is free."""
    free = [0] * processes
    for job in takes:
        free[free.index(min(free))] += job
    return max(free)


@dataclass(frozen=True)
class _Calls(Sequence[Tree]):
    """Arguments of calls, each made when it is handed out, as memory may travel with it."""

    engine: WorkersEngine
    jobs: Sequence[Job]
    payload: SharedRef

    def __len__(self) -> int:
        return len(self.jobs)

    def __getitem__(self, place: Any) -> Tree:
        job = self.jobs[place]
        sealed = codec.sealed({"job": job, "memory": self.engine.lend(job)})
        return {"spec": self.engine.spec_ref, "job": sealed, "payload": self.payload}


@lru_cache(maxsize=4)
def _host_of(spec: str) -> Host:
    """Make the host that a spec describes, once per process."""
    settings = json.loads(spec)
    return own_function(settings["make"])(settings, name=str(os.getpid()))


def run_job(arguments: Tree, channel: Channel) -> tuple[BlockResult | Scores | Replayed, Tree]:
    """Do one job of an engine, in a worker; return what its clients would keep as well."""
    host = _host_of(channel.get(arguments["spec"]))  # first: it loads the classes that job and payload may hold
    sent = codec.opened(arguments["job"])
    job: Job = sent["job"]
    payload = channel.get(arguments["payload"])
    host.memory.borrow(sent["memory"])
    return do_job(host, job, payload), host.memory.hand_over()


def do_job(host: Host, job: Job, payload: Tree) -> BlockResult | Scores | Replayed:
    """Do a job, in the process of a host."""
    if isinstance(job, Branch):
        blocks = job.blocks()
        return add_up((host.ask(block, payload) for block in blocks), len(blocks))
    if isinstance(job, Scoring):
        return host.score(job, payload)
    return host.replay(job, payload["payload"], payload["state"])
