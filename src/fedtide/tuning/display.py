"""Live progress of a tuning or a tournament: a bar in a terminal, and a plain line per trial or rung."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from fedtide.tuning import tournament
from fedtide.tuning.trials import Trial
from fedtide.tuning.tune import TrialsDisplay


class LiveTuning(TrialsDisplay):
    """Display that shows every finished trial with the best of its method so far.

    Args:
        console: output; a terminal also gets a bar.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars: Bars | None = None
        self._rounds = 0
        self._done: dict[int, int] = {}
        self._finished = self._trials = 0

    def begin(self, trials: int, finished: int, rounds: int) -> None:
        """Start a tuning of `trials` trials, of which `finished` are done, with `rounds` rounds each."""
        self._trials, self._finished, self._rounds = trials, finished, rounds
        already = f", {finished} already done" if finished else ""
        self.console.print(f"{trials} trial{'s' * (trials != 1)}{already}", highlight=False)
        if not self.console.is_terminal or finished == trials:
            return
        self._bars = Bars(
            TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(compact=True), console=self.console,
        )  # fmt: skip
        self._total = self._bars.add_task(
            "all", total=trials * rounds, completed=finished * rounds, shown=self._count()
        )
        self._bars.start()

    def going(self, call: int, done: int) -> None:
        """Show that a trial of the batch has done `done` rounds."""
        if self._bars is not None:
            self._bars.update(self._total, advance=done - self._done.get(call, 0))
        self._done[call] = done

    def trial(self, call: int, title: str, trial: Trial, best: Trial | None) -> None:
        """Show a finished trial of the batch; the rounds that it did not play count as played."""
        self._finished += 1
        if self._bars is not None:
            left = self._rounds - self._done.get(call, 0)
            self._bars.update(self._total, advance=left, shown=self._count())
        self._done.pop(call, None)
        self.console.print(f"  {title}, {said(trial)}{so_far(best)}", highlight=False, markup=False, soft_wrap=True)

    def _count(self) -> str:
        return f"{self._finished}/{self._trials} trials"

    def end(self) -> None:
        """Stop the bar."""
        if self._bars is not None:
            self._bars.stop()


class LiveTournament(tournament.RungsDisplay):
    """Display that shows every rung with a bar, and who leads after it.

    Args:
        console: output; a terminal also gets a bar.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars: Bars | None = None

    def begin(self, title: str, rounds: int) -> None:
        """Start a rung with so many rounds to play in all."""
        self.end()
        self.console.print(title, highlight=False, markup=False, soft_wrap=True)
        if self.console.is_terminal:
            self._bars = Bars(BarColumn(bar_width=30), TimeRemainingColumn(compact=True), console=self.console)
            self._task = self._bars.add_task("rounds", total=rounds)
            self._bars.start()

    def going(self, rounds: int) -> None:
        """Show that so many rounds more are played."""
        if self._bars is not None:
            self._bars.update(self._task, advance=rounds)

    def said(self, line: str) -> None:
        """Show a line."""
        self.end()
        self.console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def said(trial: Trial) -> str:
    """Describe the outcome of a trial in a line."""
    values = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in trial.values.items())
    what = {
        "finished": f"{100 * (trial.accuracy or 0.0):.1f} %",
        "pruned": f"pruned at {100 * (trial.last or 0.0):.1f} %",
        "failed": f"failed: {trial.reason}",
    }[trial.state]
    return f"trial {trial.number + 1} ({values}): {what}"


def so_far(best: Trial | None) -> str:
    """Describe the best trial of a method so far."""
    return "" if best is None or best.accuracy is None else f"; best so far {100 * best.accuracy:.1f} %"
