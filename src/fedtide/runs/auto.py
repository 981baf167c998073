"""Choice of the fastest fleet for `fleet.kind = "auto"`, measured before round 0 and written down."""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from fedtide.config import Experiment, FleetSettings, Local, Workers
from fedtide.core.base import Moment
from fedtide.core.loop import begin
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.fleets.ask import Engine
from fedtide.fleets.local_engine import LocalEngine
from fedtide.fleets.pool import Pool
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.worker_engine import WorkersEngine
from fedtide.runs.build import built, spec_of
from fedtide.runs.folder import plan
from fedtide.runs.parallel import processes

ROUNDS = 3
"""Number of timed rounds for each fleet, after one that is not."""
SECONDS = 10.0
"""Seconds after which no more rounds of a fleet are timed; one is always."""
SHORT = 10.0
"""Seconds of a run that is played as it is, as measuring would take as long."""
CLEARLY = 0.95
"""Share of one process's time below which another fleet is chosen."""
CALM = 0.8
"""Share of its time that each thread has a core, below which others use the machine. Threads would wait for each other
there, and spin: two of them took 16 times as long as one."""
SPIN = 0.2
"""Seconds for which threads compute to see whether there is a core for each."""


@dataclass(frozen=True)
class Measured:
    """A fleet and the seconds that it needs for a round.

    Args:
        settings: of the fleet.
        seconds: of a round.
        computing: the processor seconds of this process in them.
        cores: what `shares` says of its threads, where it has several.
    """

    settings: FleetSettings
    seconds: float
    computing: float
    cores: float = 1.0

    @property
    def name(self) -> str:
        """Name in messages."""
        if self.settings.kind == "workers":
            return f"workers x {self.settings.workers}"
        return "local" if self.settings.threads == 1 else f"local, {self.settings.threads} threads"


@dataclass(frozen=True)
class Choice:
    """An experiment whose fleet is known, the number of processes if one was given, and a line about it."""

    experiment: Experiment
    workers: int | None = None
    message: str = ""


def resolve_auto(experiment: Experiment, *, workers: int | None = None) -> Choice:
    """Return the experiment with the fleet that "auto" stands for; any other as it is.

    One process, worker processes and more threads are tried: on the first cohort, from the first state, and nothing is
    kept. Threads are not taken on a machine that others use. Processes give the same bits as one; threads change the
    last ones, which is why the choice is made once, before round 0, and written down. Several runs are played side by
    side, one process each, and nothing is measured.

    Args:
        experiment: as it was asked for.
        workers: how many processes; None means `fleet.workers`, or the machine's cores.
    """
    fleet = experiment.fleet
    if fleet.kind != "auto":
        return Choice(experiment, workers)
    runs = len(plan(experiment, Path()))
    if runs > 1:
        local = Local(workers=fleet.workers, channels_last=fleet.channels_last, device=fleet.device)
        return Choice(_with(experiment, local), workers, f"fleet: local, {runs} runs side by side")
    times = measured(experiment, workers)
    one_process = times[0]
    had = min(one_process.computing / one_process.seconds, *(fleet_time.cores for fleet_time in times))
    calm = had >= CALM
    best = min(
        (fleet_time for fleet_time in times if calm or fleet_time.settings.threads == 1),
        key=lambda fleet_time: fleet_time.seconds,
    )
    if best.seconds > CLEARLY * one_process.seconds:
        best = one_process
    others = "".join(
        f"; {fleet_time.name} {_in_units(fleet_time.seconds)}" for fleet_time in times if fleet_time is not best
    )
    busy = "" if calm else f"; others use this machine, {1 - had:.0%} of the time was waiting"
    message = f"fleet: {best.name}, {_in_units(best.seconds)} a round{others}{busy}"
    return Choice(_with(experiment, best.settings), None, message)  # how many processes is part of the choice


def _with(experiment: Experiment, fleet: FleetSettings) -> Experiment:
    return experiment.model_copy(update={"fleet": fleet})


def _in_units(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def measured(experiment: Experiment, workers: int | None) -> list[Measured]:
    """Measure the time of a round on each fleet, one process first, and only that one if the whole run is short.

    Args:
        experiment: of a single run.
        workers: as for `resolve_auto`.
    """
    (run,) = plan(experiment, Path())
    fleet = experiment.fleet
    local = Local(channels_last=fleet.channels_last, device=fleet.device)
    several = Workers(workers=fleet.workers, channels_last=fleet.channels_last, device=fleet.device)
    size = processes(_with(experiment, several), workers, 1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedtide-auto-")))
        memory = MemoryStore(folder)
        method = built(run.experiment, run.method, run.seed, memory)
        host, clock = method.host, method.clock
        wire = replace(host.wire, clip=None)  # the sums are only timed
        starting = SimulatedFleet.of(host, LocalEngine(host), clock, wire=wire)
        first = begin(host.algorithm, starting, seed=run.seed, rounds=experiment.rounds).state
        memory.settle((0, 0))

        def round_on(engine: Engine) -> Callable[[], None]:
            fleet = SimulatedFleet.of(host, engine, clock, wire=wire)

            def once() -> None:
                fleet.begin(Moment(0, experiment.rounds, 0.0))
                host.algorithm.round(first, fleet, Rng(run.seed).at(0, "server"))

            return once

        times = [Measured(local, *timed(round_on(LocalEngine(host))))]
        if size < 2 or times[0].seconds * experiment.rounds < SHORT:
            return times
        pool = stack.enter_context(Pool(size, joined=True))
        engine = WorkersEngine(host, pool, spec_of(run.experiment, run.method, run.seed, folder))
        times.append(Measured(replace(several, workers=size), *timed(round_on(engine))))
        # One thread has a core although another program has the second: only as many threads as there will be tell.
        times.append(Measured(replace(local, threads=size), *timed(round_on(LocalEngine(host, size))), shares(size)))
        return times


def shares(threads: int) -> float:
    """Return the least share of its time that one of several threads has a core, while all of them compute."""
    block = bytes(2**20)  # so much is hashed without Python's lock

    def spin(_: int) -> float:
        began, busy = time.perf_counter(), time.thread_time()
        while time.perf_counter() < began + SPIN:
            hashlib.blake2b(block)
        return (time.thread_time() - busy) / (time.perf_counter() - began)

    with ThreadPoolExecutor(threads) as pool:
        return min(pool.map(spin, range(threads)))


def timed(once: Callable[[], None]) -> tuple[float, float]:
    """Return the median seconds of something done a few times, and the median of this process's processor seconds.

    It is done once before, which does not count unless it took long.
    """
    spent: list[float] = []
    computing: list[float] = []
    while len(spent) <= ROUNDS and (not spent or sum(spent) < SECONDS):
        began, busy = time.perf_counter(), time.process_time()
        once()
        spent.append(time.perf_counter() - began)
        computing.append(time.process_time() - busy)
    return statistics.median(spent[1:] or spent), statistics.median(computing[1:] or computing)
