"""Several calls in parallel: the number of processes, their messages, and the stop that a person asks for."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedtide.config import Experiment
from fedtide.core.trees import Tree
from fedtide.fleets.pool import Message, Pool, Processes
from fedtide.fleets.ray_pool import RayPool
from fedtide.fleets.this_machine import cores
from fedtide.fleets.totals import BLOCKS
from fedtide.fleets.worker import STOP, Channel, own_function

Player = Callable[[Tree, Callable[[], bool]], Generator[Tree, None, Tree]]
"""Plays a call, and ends early once the second argument is true: yields its progress, returns its result."""


WAIT_SECONDS = 5.0
"""Seconds after which a stop names the processes that it waits for."""


@dataclass
class Stop:
    """Request of a person to stop; `flag` and `pool` are of the processes, if there are any."""

    asked: bool = False
    flag: Path | None = None
    pool: Processes | None = None

    def ask(self) -> None:
        """Ask all that is played to end soon."""
        self.asked = True
        if self.flag is not None:
            self.flag.touch()

    def tell(self) -> None:
        """Print the processes that the stop waits for."""
        pids = [] if self.pool is None else self.pool.processes
        here = self.pool is not None and not self.pool.multi_node
        names = [f"{pid} (stopped)" if here and _is_stopped(pid) else str(pid) for pid in pids]
        who = f"process {' and '.join(names)}" if names else "this process"
        print(f"fedtide: waiting for {who} to end the round; Ctrl-C again stops at once", file=sys.stderr)


def _is_stopped(process: int) -> bool:
    """Tell whether a process of this machine is stopped, where the system says so (Linux)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except OSError:
        return False


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
def started(
    experiment: Experiment, workers: int | None, count: int, root: Path
) -> Iterator[tuple[Processes | None, Stop]]:
    """Start processes for so many runs or trials, None for this one alone, and the stop that Ctrl-C asks for.

    `root` is the folder with which a person goes on.
    """
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
            stop.pool, stop.flag = pool, pool.folder / STOP
            if stop.asked:  # while the pool began
                stop.flag.touch()
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
        yield from pool.run("fedtide.runs.parallel:play_in_worker", arguments)
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
