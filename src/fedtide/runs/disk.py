"""What a run folder is going to need of the disk for what clients keep between rounds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from fedtide.config import Experiment, Method, points
from fedtide.core.errors import FedtideError
from fedtide.core.memory import SMALL
from fedtide.core.rng import Rng
from fedtide.core.trees import size_in_bytes
from fedtide.runs.assemble import algorithm_of, cohort_size, population_of, rows_of, task_of

WORTH_SAYING = 10**8
"""Bytes from which a person is told."""


def said_or_refused(experiment: Experiment, root: Path, where: str = "experiment") -> str:
    """What to tell before a run that fills the disk; "" where that is next to nothing.

    Raises:
        FedtideError: the disk has less than that.
    """
    needs = sorted(_needs(experiment, where), reverse=True)
    total = sum(size for size, _ in needs)
    if total < WORTH_SAYING:
        return ""
    place = next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    said = f"clients keep about {_gigabytes(total)} on disk ({needs[0][1]})"
    if total > free:
        raise FedtideError(
            f"{root}: {said}, and {place} has {_gigabytes(free)} free; allowed: fewer clients, seeds or methods, or "
            "another --out"
        )
    return f"{said}; {_gigabytes(free)} are free"


def _needs(experiment: Experiment, where: str) -> Iterator[tuple[int, str]]:
    """For each method that leaves files the bytes of all its seeds at a point, and how they come about."""
    for point in (each.experiment for each in points(experiment, where)):
        seeds = len(point.seeds)
        for method in point.method:
            size = _row(point, method)
            if size > SMALL:
                clients = _writers(point, method)
                how = f"'{method.name}': {seeds} seed{'s' * (seeds > 1)} x {clients} clients x {size / 1e6:.1f} MB"
                yield seeds * clients * size, how


def _row(experiment: Experiment, method: Method) -> int:
    """Bytes of what one client keeps."""
    task = task_of(experiment, method, rows_of(experiment, experiment.seeds[0]))
    keeps = algorithm_of(method, task).keeps
    return keeps * size_in_bytes(task.init(Rng(0)).params) if keeps else 0


def _writers(experiment: Experiment, method: Method) -> int:
    """How many clients take part at some time, at most."""
    registered = population_of(experiment, experiment.shift_of(method), experiment.seeds[0]).registered
    return min(registered, experiment.rounds * cohort_size(method, registered))


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
