"""Play of a whole experiment: every method with every seed at every point, in processes, until a person stops it."""

import json
import platform
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedtide.config import Experiment, from_dict
from fedtide.core import checkpoint
from fedtide.core.atomic import making, replacing
from fedtide.core.errors import Damaged, FedtideError, in_shell
from fedtide.core.memory import MemoryStore
from fedtide.core.record import check_marks
from fedtide.core.trees import Tree
from fedtide.fleets.pool import STOP, Channel, Message, Pool, Processes, own_function
from fedtide.fleets.ray_pool import RayPool
from fedtide.fleets.this_machine import cores
from fedtide.fleets.totals import BLOCKS
from fedtide.runs.build import as_json
from fedtide.runs.digest import digest_of, digest_to_read
from fedtide.runs.folder import Planned, check_entries, plan, shift_file
from fedtide.runs.runner import GONE, NothingTrained, Progress, Run
from fedtide.wire.ledger import check_released

Player = Callable[[Tree, Callable[[], bool]], Generator[Tree, None, Tree]]
"""Plays a call, and ends early once the second argument is true: yields its progress, returns its result."""


WAIT_SECONDS = 5.0
"""Seconds after which a stop names the processes that it waits for."""


@dataclass
class Stop:
    """Request of a person to stop; `pool` has the processes, if there are any."""

    asked: bool = False
    pool: Processes | None = None

    def ask(self) -> None:
        """Ask all that is played to end soon."""
        self.asked = True
        if self.pool is not None:
            (self.pool.folder / STOP).touch()

    def tell(self) -> None:
        """Print the processes that the stop waits for."""
        names = [] if self.pool is None else [str(pid) for pid in self.pool.processes]
        who = f"process {' and '.join(names)}" if names else "this process"
        print(f"fedtide: waiting for {who} to end the round; Ctrl-C again stops at once", file=sys.stderr)


def processes(experiment: Experiment, workers: int | None, count: int) -> int:
    """Return the number of processes for so many runs or trials; 1 means this one."""
    if not count:
        return 1
    fleet = experiment.fleet
    room = max(cores() // fleet.threads, 1)
    if count > 1:
        wanted = min(workers or fleet.workers or room, count)
    elif fleet.kind == "stacked":
        wanted = 1  # which trains clients together, here
    else:
        wanted = workers or ((fleet.workers or room) if fleet.kind == "workers" else 1)
    # A cohort is cut into so many blocks; and each process has its own torch, so that memory runs out before cores do.
    return min(wanted, max(BLOCKS, cores()))


@contextmanager
def started(experiment: Experiment, workers: int | None, count: int) -> Iterator[tuple[Processes | None, Stop]]:
    """Start processes for so many runs or trials, None for this one alone, and the stop that Ctrl-C asks for."""
    stop = Stop()
    with ExitStack() as stack:
        stack.enter_context(_interruptible(stop))
        pool: Processes | None = None
        fleet = experiment.fleet
        if fleet.kind == "ray" and count:
            size, most = workers or fleet.workers, count if count > 1 else BLOCKS
            actors = RayPool(
                None if size is None else min(size, most),
                most=most,
                address=fleet.address,
                threads=fleet.threads,
                gpus=fleet.gpus,
            )
            pool = stack.enter_context(actors)
        elif (size := processes(experiment, workers, count)) > 1:
            pool = stack.enter_context(Pool(size, joined=count == 1))
        if pool is not None:
            stop.pool = pool
            if stop.asked:  # while the pool began
                stop.ask()
        yield pool, stop


def in_parallel(player: Player, calls: Sequence[Tree], pool: Processes | None, stop: Stop) -> Iterator[Message]:
    """Play calls, one after the other here or in processes; yield the messages of each, and last its result.

    Args:
        player: a function at the top level of a module of this package.
        calls: to be played; they travel to processes as trees.
        pool: the processes; None plays here.
        stop: no further call begins once it is asked for.
    """
    if pool is not None:
        name = f"{player.__module__}:{player.__qualname__}"
        arguments = [{"player": name, "call": call} for call in calls]
        yield from pool.run("fedtide.runs.experiment:play_in_worker", arguments)
        return
    for number, call in enumerate(calls):
        for value, final in _messages(player(call, lambda: stop.asked)):
            yield Message(number, value, final)
        if stop.asked:
            return


def _messages(playing: Generator[Tree, None, Tree]) -> Iterator[tuple[Tree, bool]]:
    """Yield the values that a player yields, and last, marked as final, its result."""
    while True:
        try:
            value = next(playing)
        except StopIteration as end:
            yield end.value, True
            return
        yield value, False


def play_in_worker(arguments: Tree, channel: Channel) -> Tree:
    """Play one call in a worker process; None if a person stopped before it began."""
    if channel.stopping():
        return None
    value = None
    for value, final in _messages(own_function(arguments["player"])(arguments["call"], channel.stopping)):
        if not final:
            channel.send(value)
    return value


@contextmanager
def _interruptible(stop: Stop) -> Iterator[None]:
    """Make the first Ctrl-C, or a batch system's SIGTERM, ask to stop and the second one interrupt."""

    waiting = threading.Timer(WAIT_SECONDS, stop.tell)
    waiting.daemon = True

    def handle(number: int, frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.ask()
        waiting.start()

    if threading.current_thread() is not threading.main_thread():  # the program around us decides about signals
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        waiting.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


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
    does not depend on how many there are. A run that is the same at several points of a sweep is played at one of them
    and copied to the others.

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
        folder, config = run.folder / "checkpoints", digest_of(run.experiment, run.method, run.seed)
        with _advised(run):
            if run.finished:  # a process killed right after its last checkpoint may have left older memory
                checkpoint.load(folder, MemoryStore(run.folder / "memory"), config=config)
            elif (about := checkpoint.check(folder, config=config)) is not None:
                checkpoint.check_files(folder, about)
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
        with started(experiment, workers, len(played)) as (pool, stop):
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
    calls = []
    for run in runs:
        root = run.folder.parent.parent
        folder = str(root) if (root / "config.toml").is_file() else None
        calls.append(RunCall(as_json(run.experiment), run.method.name, run.seed, str(run.folder), folder))
    failed = []
    for message in in_parallel(play_run, calls, pool, stop):
        if not message.final:
            yield runs[message.call], message.value
        elif message.value:
            failed.append(message.value)
    if failed:
        raise NothingTrained("; ".join(failed))


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


def play_run(call: RunCall, stop: Callable[[], bool]) -> Generator[Progress, None, str | None]:
    """Play one run, in whatever process; return the reason why no client answered, if none did."""
    if call.root is not None and not Path(call.root, "config.toml").is_file():
        on_ray = "; several runs on a Ray cluster need one that every node reaches under the same name"
        is_on_ray = json.loads(call.experiment)["fleet"]["kind"] == "ray"
        why = f"not a run folder on {platform.node()}{on_ray}" if is_on_ray else GONE
        raise FedtideError(f"{call.root}: {why}")
    experiment = from_dict(json.loads(call.experiment))
    method = next(method for method in experiment.method if method.name == call.method)
    try:
        yield from Run(experiment, method, call.seed, Path(call.folder)).play(stop)
    except NothingTrained as error:  # other runs go on
        return str(error)
    return None


def check_runs(runs: list[Planned]) -> None:
    """Raise if a configuration or a record was changed since its runs were played.

    Raises:
        FedtideError: a checkpoint belongs to another configuration, is damaged, or counts on a record that is.
    """
    for run in runs:
        folder = run.folder / "checkpoints"
        if not folder.is_dir():
            continue  # the digest of a run is that of files, too
        with _advised(run):
            if (about := checkpoint.check(folder, config=digest_to_read(run))) is not None:
                check_marks(run.folder, about.records)
                check_released(run.folder, about.round)


@contextmanager
def _advised(run: Planned) -> Iterator[None]:
    """Say of what is damaged how its run can be played anew."""
    try:
        yield
    except Damaged as error:
        raise Damaged(f"{error}; to play this run anew, remove {in_shell(run.folder)}") from None
