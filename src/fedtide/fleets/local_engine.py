"""The local engine, which runs every client's work in this process, and the host that it runs it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from fedtide.core.base import Algorithm, Answer, Scores, State, with_weights
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import Tree, all_finite
from fedtide.core.weights import add_update
from fedtide.data.population import Population
from fedtide.fleets.ask import Ask, BlockResult, Replay, Replayed, Scoring
from fedtide.fleets.client import Clients, is_finite
from fedtide.fleets.scoring import score
from fedtide.fleets.totals import Block
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

    @cached_property
    def clients(self) -> Clients:
        """The clients, who know their own rows alone."""
        return Clients(self.algorithm, self.population, self.seed, self.memory, self.partial_work, self.wire.hides)

    def ask(self, ask: Ask, payload: Tree, answers: Answers | None = None) -> BlockResult:
        """Run one question on a block of clients, and add their answers up.

        Args:
            ask: the question.
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
