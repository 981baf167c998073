"""The local engine, which runs every client's work in this process, and the host that it runs it with."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self, TypeVar

import torch

from fedtide.core import codec
from fedtide.core.base import Algorithm, Answer, Scores, State, with_weights
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import Tree, all_finite
from fedtide.core.weights import add_update
from fedtide.data.population import Population
from fedtide.fleets.ask import Ask, BlockResult, Replay, Replayed, Scoring
from fedtide.fleets.pool import Channel, Processes, SharedRef, own_function
from fedtide.fleets.scoring import Clients, is_finite, score
from fedtide.fleets.this_machine import keep_freed_memory
from fedtide.fleets.totals import Block, add_up, halves
from fedtide.wire.pipeline import FLOATING, Wire
from fedtide.wire.vector import TooLarge

WRITE_UPDATE = "write Answer(..., update=fitted.delta): received + update must be the model that the client trained"
"""Advice for a work whose answers have no update."""


Answers = Callable[[Ask, Tree], Iterator[tuple[int, Answer | None]]]
"""(question, payload) -> each client with its answer, whose tensors may soon be written over."""


@dataclass(frozen=True)
class Host:
    """All that a process needs to run clients: the algorithm, the population, the seed and the memory.

    Args:
        algorithm: the algorithm whose works are run.
        population: the clients and their rows.
        seed: seed of every random key.
        memory: store of the clients' memory.
        partial_work: probability that a client asked to train does only a part of its local work.
        wire: how sums pass to the server.
    """

    algorithm: Algorithm
    population: Population
    seed: int
    memory: MemoryStore
    partial_work: float = 0.0
    wire: Wire = FLOATING

    def __post_init__(self) -> None:
        keep_freed_memory()

    @cached_property
    def clients(self) -> Clients:
        """The clients, who know their own rows alone."""
        return Clients(self.algorithm, self.population, self.seed, self.memory, self.partial_work, self.wire.hides)

    def ask(self, ask: Ask, payload: Tree, answers: Answers | None = None) -> BlockResult:
        """Run one question on a block of clients, and add their answers up.

        Args:
            payload: what they receive.
            answers: yields clients with their answers, each of which is added before the next is made; None is one
                client after the other.
        """
        answers = answers or self.clients.answers
        done = self._run(ask, payload, answers, careful=False)
        # Works are pure, so a block whose sum is not finite can be run again, now looking at every answer.
        if all_finite(done.total):
            return done
        self.memory.discard(done.keepers)
        return self._run(ask, payload, answers, careful=True)

    def _run(self, ask: Ask, payload: Tree, answers: Answers, *, careful: bool) -> BlockResult:
        block = Block(ask, self.wire)
        for client, answer in answers(ask, payload):
            if answer is None:
                continue
            if not is_finite(answer, sums=careful):
                block.refuse(client)
                continue
            try:
                block.count(client, answer)
            except TooLarge:
                block.refuse(client)
                continue
            if answer.memory is not None:
                self.memory.stage(client, answer.memory)
        return block.result()

    def score(self, scoring: Scoring, payload: Tree) -> Scores:
        """Evaluate a block of clients on their own rows."""
        return score(self.clients, scoring, payload)

    def replay(self, replay: Replay, payload: Tree, state: State) -> Replayed:
        """Put a question to one client once more, and evaluate the server's state with that client's update in it.

        No memory, rows or notes are kept.
        """
        if replay.ask is not None:
            ((client, received),) = replay.ask.sent(payload)
            answer = self.clients.answer(replay.ask, client, received)
            if answer is None or answer.update is None:
                return Replayed(None, f"an answer to '{replay.ask.question}' has no update; {WRITE_UPDATE}")
            slot = None if replay.ask.slot is None else int(replay.ask.slot[0])
            try:
                state = with_weights(state, add_update(state.weights, answer.update, slot))
            except LookupError as error:
                return Replayed(None, str(error))
        judged = replay.scoring.ask
        served, slots = self.algorithm.serve(state, judged.clients)
        return Replayed(self.score(replace(replay.scoring, ask=replace(judged, slot=slots)), served))


T = TypeVar("T")


@dataclass(frozen=True)
class LocalEngine:
    """An engine that runs blocks in order in this process.

    Any engine runs blocks of clients, and yields results in the order of the blocks. A result of an ask may be the sum
    of a branch of blocks (`fedtide.fleets.totals.add_up`). The engine holds the memory of clients. The fleet that asks
    says when a version counts (`memory.commit`).

    Args:
        host: algorithm, population, memory.
        threads: torch threads for one client's work. One gives the same bits as any number of workers; two or more
            pay off for larger models and change the last bits.
    """

    host: Host
    threads: int = 1

    @property
    def memory(self) -> MemoryStore:
        """The memory of clients."""
        return self.host.memory

    def ask(self, blocks: Sequence[Ask], payload: Tree) -> Iterator[BlockResult]:
        """Run a question."""
        return (self._with_threads(self.host.ask, block, payload) for block in blocks)

    def score(self, scorings: Sequence[Scoring], payload: Tree) -> Iterator[Scores]:
        """Run a scoring."""
        return (self._with_threads(self.host.score, scoring, payload) for scoring in scorings)

    def replay(self, replays: Sequence[Replay], payload: Tree, state: State) -> Iterator[Replayed]:
        """Put a question to clients once more, one by one."""
        return (self._with_threads(self.host.replay, replay, payload, state) for replay in replays)

    def _with_threads(self, run: Callable[..., T], *arguments: Any) -> T:
        with threads(self.threads):
            return run(*arguments)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of torch threads to `count`, and put it back."""
    before = torch.get_num_threads()
    if before == count:  # setting it takes longer than looking
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- in several processes ----------------------------------------------------------------------------------------------


CALLS = 2
"""Calls for each process, at least: clients of some blocks have more work than those of others."""


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
    def of(cls, blocks: Sequence[Ask]) -> Self:
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
        # Rows of memory that travel are those of a single block, so that few of them lie in memory at once.
        processes = len(self.pool.processes) + self.pool.joined
        wanted = len(blocks) if self.pool.multi_node else CALLS * processes
        branches = [Branch.of(blocks[first:last]) for first, last in cut_branches(0, len(blocks), wanted)]
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

    def _map(self, jobs: Sequence[Job], payload: Tree) -> Iterator[tuple[Any, Tree]]:
        ref = self.pool.share("payload", payload)
        try:
            here = (lambda number: self._here(jobs[number], payload)) if self.pool.joined else None
            yield from self.pool.map("fedtide.fleets.engines:run_job", _Calls(self, jobs, ref), here)
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


Engine = LocalEngine | WorkersEngine
"""What runs the clients' work; `StackedEngine` is a local one."""


def cut_branches(first: int, last: int, wanted: int) -> list[tuple[int, int]]:
    """Cut blocks into branches of their tree, at least as many as are wanted if there are so many blocks.

    Returns:
        For each branch its first block, and the one after its last.

    >>> cut_branches(0, 10, 3)
    [(0, 3), (3, 5), (5, 8), (8, 10)]
    """
    if wanted <= 1 or last - first < 2:
        return [(first, last)]
    middle, half = first + halves(last - first)[0], -(-wanted // 2)
    return [*cut_branches(first, middle, half), *cut_branches(middle, last, half)]


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
