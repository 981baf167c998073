"""What a fleet asks of whatever runs the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fedtide.core.trees import Tree
from fedtide.core.types import Scores, State
from fedtide.fleets.host import Again, Done, Job, Judged


class Engine(Protocol):
    """Runs the blocks of an ask, in whatever process, and yields results in the order of the jobs."""

    def ask(self, jobs: Sequence[Job], payload: Tree) -> Iterator[Done]:
        """Run a question."""

    def score(self, jobs: Sequence[Job], payload: Tree) -> Iterator[Scores]:
        """Run a scoring."""

    def again(self, jobs: Sequence[Again], payload: Tree, state: State) -> Iterator[Judged]:
        """Put a question again, client by client, and judge the models that come of it."""
