"""Live progress: a bar per run in a terminal, plain lines with the time left elsewhere."""

import math
import time
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column

from fedtide.runs.experiment import RunsDisplay
from fedtide.runs.folder import Planned
from fedtide.runs.runner import Progress

SECONDS = 10.0
"""Least time between two plain lines of one run."""


class TerminalBars:
    """Plain lines, and a bar of all rounds in a terminal.

    Args:
        console: output; a terminal also gets bars.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars: Bars | None = None

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def start(self, total: int, shown: str = "", completed: int = 0, counted: bool = False) -> None:
        """Start the bar of all rounds in a terminal, if any are left; `counted` shows the rounds of each bar."""
        if self.console.is_terminal and completed < total:
            name = max(self.console.width - 55, 10)  # numbers are told in full, names if there is room
            self._bars = Bars(
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=name)),
                BarColumn(bar_width=30),
                *([MofNCompleteColumn()] if counted else []),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
            )
            self._all = self._bars.add_task("all", total=total, completed=completed, shown=shown)
            self._bars.start()

    def add(self, rounds: int, **fields: Any) -> None:
        """Add rounds to the bar of all."""
        if self._bars is not None:
            self._bars.update(self._all, advance=rounds, **fields)

    def end(self) -> None:
        """Remove the bars."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


class Live(TerminalBars, RunsDisplay):
    """Display of round, accuracy, rate and time left: bars in a terminal, plain lines elsewhere.

    Args:
        console: output.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._runs: list[Planned] = []
        self._tasks: dict[int, Any] = {}
        self._said: dict[int, float] = {}
        self._accuracy: dict[int, tuple[float, float | None]] = {}
        self._windows: dict[int, list[float]] = {}  # accuracy of each window of a calendar, which may have few rows
        self._left: dict[int, int] = {}  # rounds of each run
        self._played = 0
        self._since: float | None = None  # the first round, as processes take a while to start

    def begin(self, runs: list[Planned], finished: int) -> None:
        """Start with the runs that are left, and the number of those that were finished before."""
        self._runs = runs
        self._left = {number: run.experiment.rounds for number, run in enumerate(runs)}
        already = f", {finished} already finished" if finished else ""
        self.say(f"{len(runs)} run{'s' * (len(runs) != 1)}{already}")
        self.start(sum(self._left.values()), "rounds", counted=True)

    def progress(self, run: int, progress: Progress) -> None:
        """Show that run number `run` has played another round."""
        if progress.accuracy is not None and self._runs[run].experiment.dated:
            self._windows.setdefault(run, []).append(progress.accuracy)
            self._accuracy[run] = fmean(self._windows[run]), None
        elif progress.accuracy is not None:
            self._accuracy[run] = progress.accuracy, progress.noise
        if self._since is None:
            self._since = time.monotonic()
        else:
            self._played += 1
        self._left[run] = progress.rounds - progress.round
        if self._bars is None:
            self._line(run, progress)
            return
        shown = f"{self._shown(run)}  {paced(progress.rate)}"
        if run not in self._tasks:
            title = self._runs[run].title
            self._tasks[run] = self._bars.add_task(title, total=progress.rounds, completed=progress.round, shown=shown)
            self.add(progress.round)
        else:
            self._bars.update(self._tasks[run], completed=progress.round, shown=shown)
            self.add(1)
        if progress.round == progress.rounds:
            self._bars.remove_task(self._tasks[run])
            self.say(f"  done  {self._runs[run].title}  {self._shown(run)}")

    def _shown(self, run: int) -> str:
        score = self._runs[run].experiment.score
        score = f"mean {score}" if run in self._windows else score
        return scored(score, *self._accuracy[run]) if run in self._accuracy else f"{score}     -  "

    def _line(self, run: int, progress: Progress) -> None:
        now, last = time.monotonic(), progress.round == progress.rounds
        if not last and now - self._said.setdefault(run, now) < SECONDS:
            return
        self._said[run] = now
        left = (progress.rounds - progress.round) / progress.rate if progress.rate else 0.0
        when = "done" if last else f"{spoken(left)} left"
        self.say(
            f"{self._runs[run].title}: round {progress.round}/{progress.rounds}, {self._shown(run).strip()}, "
            f"{paced(progress.rate)}, {when}{self._overall(left)}"
        )

    def _overall(self, seconds: float) -> str:
        """Say how many of several runs are done, and the time that the others need at the rate so far.

        It is at least the time that this run needs by its own rate, because methods differ.
        """
        if len(self._runs) < 2:
            return ""
        done, left = sum(not rounds for rounds in self._left.values()), sum(self._left.values())
        message = f"; {done} of {len(self._runs)} runs done"
        if not left or self._since is None or not self._played:
            return message
        in_all = left * (time.monotonic() - self._since) / self._played
        return f"{message}, {spoken(max(seconds, in_all))} left in all"


def scored(score: str, value: float, noise: float | None = None) -> str:
    """An accuracy or skill, as wide as any, with the standard deviation of its noise.

    >>> scored("skill", 0.5), scored("accuracy", math.nan), scored("accuracy", 0.5, 0.021)
    ('skill  50.0 %', 'no accuracy, NaN', 'accuracy  50.0 ± 2.1 %')
    """
    blur = "" if noise is None else f" ± {100 * noise:.1f}"
    return f"no {score}, NaN" if math.isnan(value) else f"{score} {100 * value:5.1f}{blur} %"


def paced(rate: float) -> str:
    """Return a rate in rounds per second, below one a second in seconds for each round.

    >>> paced(12.3), paced(1 / 36)
    ('12.3 rounds/s', '36 s a round')
    """
    if not 0 < rate < 1:
        return f"{rate:.1f} rounds/s"
    return f"{1 / rate:.1f} s a round" if rate > 0.1 else f"{spoken(1 / rate)} a round"


def spoken(seconds: float) -> str:
    """A time in seconds, minutes or hours.

    >>> spoken(41.3), spoken(540), spoken(9000)
    ('41 s', '9 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
