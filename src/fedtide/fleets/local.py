"""The local engine, which runs every client's work in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fedtide.core.trees import Tree
from fedtide.core.types import Scores, State
from fedtide.fleets.ask import BlockResult, Job, Replay, Replayed, Scoring
from fedtide.fleets.host import Host


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

    def ask(self, jobs: Sequence[Job], payload: Tree) -> Iterator[BlockResult]:
        """Run a question."""
        for job in jobs:
            yield self._ask(job, payload)

    def score(self, scorings: Sequence[Scoring], payload: Tree) -> Iterator[Scores]:
        """Run a scoring."""
        for scoring in scorings:
            with threads(self.threads):
                scores = self.host.score(scoring, payload)
            yield scores

    def replay(self, replays: Sequence[Replay], payload: Tree, state: State) -> Iterator[Replayed]:
        """Put a question to clients once more, one by one."""
        for replay in replays:
            with threads(self.threads):
                replayed = self.host.replay(replay, payload, state)
            yield replayed

    def _ask(self, job: Job, payload: Tree) -> BlockResult:
        with threads(self.threads):
            return self.host.ask(job, payload)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of torch threads to `count`, and put it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
