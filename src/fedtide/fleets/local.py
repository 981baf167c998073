"""The local engine, which runs every client's work in this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fedtide.core.base import Scores, State
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import Tree
from fedtide.fleets.ask import Ask, BlockResult, Replay, Replayed, Scoring
from fedtide.fleets.host import Host

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
        """What clients keep."""
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

    def _with_threads(self, run: Callable[..., T], *given: Any) -> T:
        with threads(self.threads):
            return run(*given)


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
