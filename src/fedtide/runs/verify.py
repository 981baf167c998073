"""Looking whether a run folder is what was written, without changing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedtide.core import checkpoint
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.record import check_marks
from fedtide.runs.digest import digest_to_read
from fedtide.runs.folder import Planned, load, plan


@dataclass(frozen=True)
class Verdict:
    """Findings about one run.

    rounds: how many rounds, from the first on, its records have as they were written, as far as a checkpoint says.
    wrong: the first thing that is not what was written; None if there is none.
    """

    run: Planned
    rounds: int
    wrong: str | None = None


def verify(root: Path) -> Iterator[Verdict]:
    """Check every file that the checkpoints of a run folder count on, and yield what was found run by run.

    Raises:
        FedtideError: it is no run folder, or its configuration cannot be read.
    """
    yield from verify_runs(plan(load(root, imports=False), root))


def verify_runs(runs: Iterable[Planned]) -> Iterator[Verdict]:
    """Check every file that the checkpoints of runs count on, and yield what was found run by run."""
    for run in runs:
        folder = run.folder / "checkpoints"
        try:
            about = checkpoint.check(folder, config=digest_to_read(run))
        except FedtideError as error:
            yield Verdict(run, 0, str(error))
            continue
        if about is None:
            yield Verdict(run, 0)
            continue
        try:
            memory = MemoryStore(run.folder / "memory")
            memory.read_index(checkpoint.check_files(folder, about) / "memory.safetensors")
            memory.check_files()
            check_marks(run.folder, about.records, finished=run.finished)
        except FedtideError as error:
            yield Verdict(run, checkpoint.whole_until(folder, about), str(error))
        else:
            yield Verdict(run, about.round)
