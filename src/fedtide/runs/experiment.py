"""Play of a whole experiment: every method with every seed at every point, in parallel."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedtide.config import Experiment, from_dict
from fedtide.core import checkpoint
from fedtide.core.atomic import making, replacing
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.record import check_marks
from fedtide.fleets.pool import Processes
from fedtide.runs.build import as_json
from fedtide.runs.digest import digest_of, digest_to_read
from fedtide.runs.folder import Planned, check_entries, plan, shift_file
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
    does not depend on how many there are. A run that is the same at several points of a
    sweep is played at one of them and copied to the others.

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
    twins = _twins(runs)
    copies = {run.folder for same in twins.values() for run in same}
    played = [run for run in left if run.folder not in copies]
    numbers = {run.folder: number for number, run in enumerate(left)}
    display.begin(left, len(runs) - len(left))

    def copy(run: Planned, progress: Progress) -> None:
        for other in twins.get(run.folder, ()):
            _copy(run, other)
            display.progress(numbers[other.folder], progress)

    try:
        for run in runs:
            if run.finished:
                copy(run, Progress(run.experiment.rounds, run.experiment.rounds, None, 0.0))
        with started(experiment, workers, len(played), root) as (pool, stop):
            for run, progress in _played(played, pool, stop):
                display.progress(numbers[run.folder], progress)
                if progress.round == progress.rounds:
                    copy(run, progress)
    finally:
        display.end()
    return not stop.asked


def _played(runs: list[Planned], pool: Processes | None, stop: Stop) -> Iterator[tuple[Planned, Progress]]:
    """Play all runs; yield a run with its progress."""
    if len(runs) == 1:  # its clients go to the processes
        run = runs[0]
        for progress in Run(run.experiment, run.method, run.seed, run.folder, pool).play(lambda: stop.asked):
            yield run, progress
        return
    calls = [_call(run) for run in runs]
    for message in in_parallel(play_run, calls, pool, stop):
        if not message.final:
            yield runs[message.call], message.value


def _twins(runs: list[Planned]) -> dict[Path, list[Planned]]:
    """Return for the folder of a run those that have its settings at other points of a sweep and have not begun.

    It is one that is finished, or else one that has begun, or else the first.
    """
    alike: dict[str, list[Planned]] = {}
    for run in runs:
        if run.point:  # of a sweep
            alike.setdefault(digest_of(run.experiment, run.method, run.seed), []).append(run)
    firsts = [(max(same, key=lambda run: (run.finished, run.folder.exists())), same) for same in alike.values()]
    return {
        first.folder: [run for run in same if run is not first and not run.folder.exists()] for first, same in firsts
    }


def _copy(twin: Planned, run: Planned) -> None:
    """Copy a run that is finished to a folder of another point, with the population that it met there."""
    source, target = (
        shift_file(run_of_point.folder.parent.parent, run_of_point.method, run_of_point.seed)
        for run_of_point in (twin, run)
    )
    if source.exists() and not target.exists():
        target.parent.mkdir(exist_ok=True)
        with replacing(target) as temporary:
            shutil.copyfile(source, temporary)
    with making(run.folder) as temporary:
        shutil.copytree(twin.folder, temporary, dirs_exist_ok=True)


def _call(run: Planned) -> RunCall:
    root = run.folder.parent.parent
    folder = str(root) if (root / "config.toml").is_file() else None
    return RunCall(as_json(run.experiment), run.method.name, run.seed, str(run.folder), folder)


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
