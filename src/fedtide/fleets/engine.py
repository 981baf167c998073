"""The protocol of engines, which run the work of clients for a fleet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fedtide.core.base import Scores, State
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import Tree
from fedtide.fleets.ask import Ask, BlockResult, Replay, Replayed, Scoring


class Engine(Protocol):
    """An engine runs blocks of clients in any process and yields results in the order of the blocks.

    Of an ask a result may be the sum of a branch of blocks (`fedtide.fleets.totals.add_up`). What clients keep stays
    with it: the fleet that asks says when a version counts (`memory.commit`).
    """

    @property
    def memory(self) -> MemoryStore:
        """What clients keep."""

    def ask(self, blocks: Sequence[Ask], payload: Tree) -> Iterator[BlockResult]:
        """Run a question."""

    def score(self, scorings: Sequence[Scoring], payload: Tree) -> Iterator[Scores]:
        """Run a scoring."""

    def replay(self, replays: Sequence[Replay], payload: Tree, state: State) -> Iterator[Replayed]:
        """Put a question to clients once more, one by one, and evaluate the resulting models."""
