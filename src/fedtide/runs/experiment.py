"""Running a whole experiment: every method with every seed at every point, in parallel, and its report."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedtide.config import Experiment, from_dict
from fedtide.core import checkpoint
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import Tree
from fedtide.fleets.pool import Pool
from fedtide.fleets.simulated import BLOCKS
from fedtide.fleets.worker import Line
from fedtide.runs.assemble import as_json, digest_of
from fedtide.runs.folder import Planned, plan
from fedtide.runs.job import Progress, Run


class Display(Protocol):
    """Shows how far the runs are."""

    def begin(self, runs: list[Planned], finished: int) -> None:
        """These are left to do, and so many were done before."""

    def progress(self, run: int, progress: Progress) -> None:
        """Run number `run` has played another round."""

    def end(self) -> None:
        """No more."""


class Silent:
    """Shows nothing."""

    def begin(self, runs: list[Planned], finished: int) -> None:
        """Nothing."""

    def progress(self, run: int, progress: Progress) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


@dataclass
class Stop:
    """Whether a person has asked to stop."""

    asked: bool = False
    flag: Path | None = None

    def ask(self) -> None:
        """Ask all runs to save after their round and end."""
        self.asked = True
        if self.flag is not None:
            self.flag.touch()


def execute(experiment: Experiment, root: Path, *, workers: int | None = None, display: Display | None = None) -> bool:
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
    display = display or Silent()
    runs = plan(experiment, root)
    verify(runs)
    left = [run for run in runs if not run.finished]
    for run in runs:
        if run.finished:  # a process killed right after its last checkpoint may have left older memory
            checkpoint.load(
                run.folder / "checkpoints",
                MemoryStore(run.folder / "memory"),
                config=digest_of(run.experiment, run.method, run.seed),
            )
    display.begin(left, len(runs) - len(left))
    stop = Stop()
    try:
        with interruptible(stop):
            _play_all(left, processes(experiment, workers, len(left)), display, stop)
    finally:
        display.end()
    return not stop.asked


def verify(runs: list[Planned]) -> None:
    """Find out a configuration that was edited since its runs were played.

    Raises:
        FedtideError: a checkpoint belongs to another configuration, or is damaged.
    """
    for run in runs:
        checkpoint.check(run.folder / "checkpoints", config=digest_of(run.experiment, run.method, run.seed))


def processes(experiment: Experiment, workers: int | None, runs: int) -> int:
    """How many processes to use for so many runs; 1 means this one."""
    fleet = experiment.fleet
    wanted = workers or fleet.workers
    if runs <= 1:
        wanted = wanted or (_cores() if fleet.kind == "workers" else 1)
    else:
        wanted = min(wanted or max(_cores() // fleet.threads, 1), runs)
    # A cohort is cut into so many blocks; and each process has its own torch, so that memory runs out before cores do.
    return min(wanted, max(BLOCKS, _cores()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _play_all(runs: list[Planned], size: int, display: Display, stop: Stop) -> None:
    if size == 1:
        for number, planned in enumerate(runs):
            for progress in _run(planned, None).play(lambda: stop.asked):
                display.progress(number, progress)
            if stop.asked:
                return
        return
    with Pool(size) as pool:
        stop.flag = pool.folder / "stop"
        if len(runs) == 1:
            for progress in _run(runs[0], pool).play(lambda: stop.asked):
                display.progress(0, progress)
            return
        arguments = [
            {"experiment": as_json(r.experiment), "method": r.method.name, "seed": r.seed, "folder": str(r.folder),
             "stop": str(stop.flag)}
            for r in runs
        ]  # fmt: skip
        for message in pool.run("fedtide.runs.experiment:play_in_worker", arguments):
            if not message.final:
                display.progress(message.call, Progress(**message.value))


def _run(planned: Planned, pool: Pool | None) -> Run:
    return Run(planned.experiment, planned.method, planned.seed, planned.folder, pool)


def play_in_worker(arguments: Tree, line: Line) -> None:
    """In a worker process: play one run."""
    flag = Path(arguments["stop"])
    if flag.exists():
        return
    experiment = from_dict(json.loads(arguments["experiment"]))
    method = next(method for method in experiment.method if method.name == arguments["method"])

    def stop() -> bool:
        return flag.exists()

    for progress in Run(experiment, method, arguments["seed"], Path(arguments["folder"])).play(stop):
        line.send(vars(progress))


@contextmanager
def interruptible(stop: Stop) -> Iterator[None]:
    """The first Ctrl-C asks to stop, the second one interrupts."""

    def handle(number: int, frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.ask()

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread: whoever runs us decides about signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
