"""What a fleet asks of whatever runs the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fedtide.core.trees import Tree
from fedtide.core.types import Scores, State
from fedtide.fleets.ask import Done, Job, Replay, Replayed, Scoring


class Engine(Protocol):
    """Runs the blocks of an ask, in whatever process, and yields results in the order of what it is given."""

    def ask(self, jobs: Sequence[Job], payload: Tree) -> Iterator[Done]:
        """Run a question."""

    def score(self, scorings: Sequence[Scoring], payload: Tree) -> Iterator[Scores]:
        """Run a scoring."""

    def replay(self, replays: Sequence[Replay], payload: Tree, state: State) -> Iterator[Replayed]:
        """Put a question to clients once more, one by one, and judge the models that come of it."""
