"""Disk space that a run folder will need for clients' memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedtide.config import Experiment, Method, points
from fedtide.core.errors import FedtideError
from fedtide.core.memory import SMALL
from fedtide.core.rng import Rng
from fedtide.core.trees import size_in_bytes
from fedtide.runs.build import algorithm_of, cohort_size, population_of, rows_of, task_in, task_of

WORTH_SAYING = 10**8
"""Bytes from which a person is told."""


@dataclass(frozen=True)
class Need:
    """Bytes that the clients of all runs keep in the end, and how the largest part of them comes about.

    For moments there is more, `most`: what a client keeps, what it kept at the last checkpoint, and, of those who are
    asked, what replaces the one until the ask has ended.
    """

    size: int
    most: int
    how: str


def needed(experiment: Experiment, where: str = "experiment") -> Need:
    """Return the disk space that the runs of an experiment will use."""
    parts = sorted(_parts(experiment, where), reverse=True)
    return Need(sum(size for size, _, _ in parts), sum(most for _, most, _ in parts), parts[0][2] if parts else "")


def check_room(need: Need, root: Path) -> str:
    """Return a message before a run that needs much of the disk; "" if it needs little.

    Raises:
        FedtideError: the disk has too little, however little that is.
    """
    place = next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    said = f"clients keep about {_shown(need.size)} on disk, for moments up to {_shown(need.most)} ({need.how})"
    if need.most > free:
        raise FedtideError(
            f"{root}: {said}, and {place} has {_shown(free)} free; allowed: fewer clients, seeds or methods, or "
            "another --out"
        )
    return "" if need.size < WORTH_SAYING else f"{said}; {_shown(free)} are free"


def _shown(size: int) -> str:
    """Return bytes in MB or GB.

    >>> _shown(2_100_000), _shown(7_000_000_000)
    ('2.1 MB', '7.0 GB')
    """
    return f"{size / 1e6:.1f} MB" if size < 10**9 else f"{size / 1e9:.1f} GB"


def _parts(experiment: Experiment, where: str) -> Iterator[tuple[int, int, str]]:
    """Yield for each method with files the bytes of all its seeds at a point, at most, and their explanation."""
    for point in (each.experiment for each in points(experiment, where)):
        seeds = len(point.seeds)
        for method in point.method:
            size = _row(point, method)
            if size > SMALL:
                clients, asked = _writers(point, method)
                how = f"'{method.name}': {seeds} seed{'s' * (seeds > 1)} x {clients} clients x {size / 1e6:.1f} MB"
                yield seeds * clients * size, seeds * (2 * clients + asked) * size, how


def _row(experiment: Experiment, method: Method) -> int:
    """Bytes of what one client keeps."""
    seed = experiment.seeds[0]
    if experiment.data.public_samples:  # an algorithm may need them; else who holds what is not worth the wait
        task = task_in(experiment, method, population_of(experiment, experiment.shift_of(method), seed))
    else:
        task = task_of(experiment, method, rows_of(experiment, seed))
    keeps = algorithm_of(method, task, experiment.data.directory).traits.keeps
    return keeps * size_in_bytes(task.init(Rng(0)).params) if keeps else 0


def _writers(experiment: Experiment, method: Method) -> tuple[int, int]:
    """Return the numbers of clients that take part at some time, and in one round, at most."""
    registered = population_of(experiment, experiment.shift_of(method), experiment.seeds[0]).registered
    cohort = cohort_size(method, registered)
    return min(registered, experiment.rounds * cohort), cohort
