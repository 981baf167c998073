"""Play of a whole experiment: every method with every seed at every point, in parallel."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedtide.config import Experiment, from_dict
from fedtide.core import checkpoint
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.record import check_marks
from fedtide.fleets.calls import Processes
from fedtide.runs.build import as_json
from fedtide.runs.digest import digest_of, digest_to_read
from fedtide.runs.folder import Planned, check_entries, plan
from fedtide.runs.parallel import Stop, in_parallel, started
from fedtide.runs.runner import Progress, Run


class RunsDisplay:
    """Display of the progress of runs; this one shows nothing."""

    def begin(self, runs: list[Planned], finished: int) -> None:
        """Start with the runs that are left, and the number of those that were finished before."""

    def progress(self, run: int, progress: Progress) -> None:
        """Show that run number `run` has played another round."""

    def end(self) -> None:
        """End the display."""


@dataclass(frozen=True)
class RunCall:
    """One run as it travels to a process; `root` is its run folder, if that has a config.toml."""

    experiment: str
    method: str
    seed: int
    folder: str
    root: str | None = None


def execute(
    experiment: Experiment, root: Path, *, workers: int | None = None, display: RunsDisplay | None = None
) -> bool:
    """Play all runs of a run folder that are not finished.

    Several runs go to as many processes, one thread each; a single run uses the processes for its clients. The result
    does not depend on how many there are.

    Args:
        experiment: as in the folder's config.toml.
        root: the run folder.
        workers: processes; None means the experiment's `fleet.workers`, or the machine's cores.
        display: shows progress.

    Returns:
        False if a person stopped it; everything is saved then.
    """
    display = display or RunsDisplay()
    check_entries(root, played=True)
    runs = plan(experiment, root)
    check_runs(runs)
    left = [run for run in runs if not run.finished]
    for run in runs:
        if run.finished:  # a process killed right after its last checkpoint may have left older memory
            checkpoint.load(
                run.folder / "checkpoints",
                MemoryStore(run.folder / "memory"),
                config=digest_of(run.experiment, run.method, run.seed),
            )
    display.begin(left, len(runs) - len(left))
    try:
        with started(experiment, workers, len(left), root) as (pool, stop):
            for number, progress in _played(left, pool, stop):
                display.progress(number, progress)
    finally:
        display.end()
    return not stop.asked


def _played(runs: list[Planned], pool: Processes | None, stop: Stop) -> Iterator[tuple[int, Progress]]:
    """Play all runs; yield the number of a run with its progress."""
    if len(runs) == 1:  # its clients go to the processes
        run = runs[0]
        for progress in Run(run.experiment, run.method, run.seed, run.folder, pool).play(lambda: stop.asked):
            yield 0, progress
        return
    calls = [_call(run) for run in runs]
    for message in in_parallel(play_run, calls, pool, stop):
        if not message.final:
            yield message.call, message.value


def _call(run: Planned) -> RunCall:
    root = run.folder.parent.parent
    known = str(root) if (root / "config.toml").is_file() else None
    return RunCall(as_json(run.experiment), run.method.name, run.seed, str(run.folder), known)


def play_run(call: RunCall, stop: Callable[[], bool]) -> Generator[Progress, None, None]:
    """Play one run, in whatever process."""
    if call.root is not None and not Path(call.root, "config.toml").is_file():
        raise FedtideError(
            f"{call.root}: not a run folder on {platform.node()}; several runs on a Ray cluster need one that every "
            "node reaches under the same name"
        )
    experiment = from_dict(json.loads(call.experiment))
    method = next(method for method in experiment.method if method.name == call.method)
    yield from Run(experiment, method, call.seed, Path(call.folder)).play(stop)


def check_runs(runs: list[Planned]) -> None:
    """Raise if a configuration or a record was changed since its runs were played.

    Raises:
        FedtideError: a checkpoint belongs to another configuration, is damaged, or counts on a record that is.
    """
    for run in runs:
        folder = run.folder / "checkpoints"
        if not folder.is_dir():
            continue  # the digest of a run is that of files, too
        if (about := checkpoint.check(folder, config=digest_to_read(run))) is not None:
            check_marks(run.folder, about.records)
