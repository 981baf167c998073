"""Tuning stage by stage, batch by batch: every method by itself, all with the same number of trials."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from typing import Any, Literal

from rich.console import Console

from fedtide.config import Experiment, Tune, from_dict
from fedtide.core.base import Scores
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.record import run_lock
from fedtide.fleets.pool import Processes
from fedtide.runs.build import rows_of
from fedtide.runs.display import TerminalBars
from fedtide.runs.folder import check_entries
from fedtide.runs.parallel import Stop, in_parallel, started
from fedtide.runs.runner import evaluated, judge_of
from fedtide.tuning.search import asked, imported_optuna
from fedtide.tuning.stages import Place, Search, digest_of_tuning, seeds_of, stages, tune_of, with_values
from fedtide.tuning.trials import (
    Bounds,
    Curve,
    Trial,
    append_trial,
    best_of,
    bounds,
    hopeless,
    late,
    of_search,
    read_trials,
    write_ready,
    write_trials,
)


@dataclass(frozen=True)
class Call:
    """A trial as sent to a process.

    experiment: nested dicts with the trial's values. method: name of the tuned method. seeds: seeds to play. bounds:
    see `fedtide.tuning.trials.bounds`. folder: location for large client memory while the trial runs.
    """

    experiment: dict[str, Any]
    method: str
    seeds: tuple[int, ...]
    bounds: Bounds
    folder: str


@dataclass(frozen=True)
class Outcome:
    """Outcome of a trial, with fields as in `Trial`."""

    state: Literal["finished", "pruned", "failed"]
    curves: tuple[Curve, ...]
    reason: str = ""


def play_trial(call: Call, stop: Callable[[], bool]) -> Generator[int, None, Outcome | None]:
    """Play a trial: yield the number of rounds done over all its seeds, return the outcome.

    `stop` is asked after every round; a stopped trial has no outcome (None).
    """
    curves: list[Curve] = []
    done = 0
    try:
        experiment = from_dict(call.experiment, where="the trial")
    except FedtideError as error:
        return Outcome("failed", (), str(error))
    for seed in call.seeds:
        rows_of(experiment, seed)  # outside the try: unreadable data are no fault of a trial's values
        curve = Curve(seed, (), ())
        try:
            for rounds, scores in judged(experiment, call.method, seed, Path(call.folder)):
                done += 1
                yield done
                if stop():
                    return None
                if scores is None:
                    continue
                curve = curve.then(rounds, scores, dated=experiment.dated)
                last = rounds == experiment.rounds and seed == call.seeds[-1]
                if not last and hopeless(curve, call.bounds):
                    return Outcome("pruned", (*curves, curve))
        except FedtideError as error:
            return Outcome("failed", (*curves, curve), f"seed {seed}: {error}")
        curves.append(curve)
    return Outcome("finished", tuple(curves))


def judged(experiment: Experiment, name: str, seed: int, folder: Path) -> Iterator[tuple[int, Scores | None]]:
    """Yield after every round the rounds done and, at evaluations, the scores on validation rows.

    Raises:
        FedtideError: the values are invalid for the method, or training diverged to non-finite numbers.
    """
    method = next(method for method in experiment.method if method.name == name)
    judged_on_val = experiment.model_copy(update={"eval_splits": ("val",), "forgetting": None})
    with tempfile.TemporaryDirectory(dir=folder, prefix="memory-") as memory:
        judge = judge_of(judged_on_val, method, seed, MemoryStore(Path(memory)))
        for step, views in evaluated(judge, rounds=experiment.rounds, seed=seed, every=experiment.eval_every):
            done = step.moment.round + 1
            if any(len(query.refused) and not len(query.answered) for query in judge.fleet.queries):
                raise FedtideError(f"in round {done} no client's answer was finite")
            last = None
            for _, scores, _ in views or ():
                if not math.isfinite(float(scores.loss.sum())):
                    raise FedtideError(f"after {done} rounds the loss on validation rows is not finite")
                last = scores
            yield done, last


@dataclass(frozen=True)
class _Planned:
    """A trial that is to be played."""

    search: Search
    number: int
    values: dict[str, Any]
    before: list[Trial]


@dataclass(frozen=True)
class _Tuning:
    """Context of a tuning that is the same for all trials."""

    experiment: Experiment
    root: Path
    stages: list[list[Search]]
    tune: Tune
    config: str
    display: LiveTuning
    pool: Processes | None
    stop: Stop

    def in_order(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return trials in the order in which they are asked for, regardless of which was done first."""
        stage_of = {search.stage: number for number, stage in enumerate(self.stages) for search in stage}
        order = [(search.stage, search.method) for stage in self.stages for search in stage]

        def place(trial: Trial) -> tuple[int, int, int, int]:
            at = order.index((trial.stage, trial.method))
            return stage_of[trial.stage], trial.number // self.tune.parallel_trials, at, trial.number

        return sorted(trials, key=place)

    def batch(self, search: Search, first: int, trials: Sequence[Trial]) -> list[_Planned]:
        """Return the missing trials of a batch, for which the whole batch is asked for: later ones follow from it."""
        done = {trial.number: trial for trial in of_search(trials, search)}
        numbers = range(first, min(first + self.tune.parallel_trials, search.trials))
        missing = [number for number in numbers if number not in done]
        if not missing:
            return []
        before = [done[number] for number in range(first)]
        values = asked(search, before, self.tune, len(numbers))
        return [_Planned(search, number, values[number - first], before) for number in missing]

    def play(
        self, stage: Sequence[Search], first: int, best: Sequence[tuple[Place, Any]], trials: list[Trial]
    ) -> list[Trial]:
        """Return all trials after playing the rest of a batch of each method; not in order after a stop."""
        batch = [planned for search in stage for planned in self.batch(search, first, trials)]
        if not batch:
            return trials
        calls = [self.call(planned, best) for planned in batch]
        for message in in_parallel(play_trial, calls, self.pool, self.stop):
            if not message.final:
                self.display.advance(message.call, message.value)
            elif message.value is not None:
                planned = batch[message.call]
                trial = self.trial(planned, message.value)
                trials = [*trials, trial]
                append_trial(self.root, trial)
                leader = best_of(of_search(trials, planned.search))
                self.display.trial(message.call, planned.search.title, trial, leader)
        if self.stop.asked:
            return trials
        trials = self.in_order(trials)
        write_trials(self.root, trials)
        return trials

    def call(self, planned: _Planned, best: Sequence[tuple[Place, Any]]) -> Call:
        """Return a trial for a process, with the best values of earlier stages."""
        values = with_values(self.experiment, [*best, *planned.search.assigned(planned.values)])
        ended = bounds(planned.before, self.experiment.rounds) if self.tune.pruning else {}
        return Call(values, planned.search.method, seeds_of(self.experiment), ended, str(self.root))

    def trial(self, planned: _Planned, outcome: Outcome) -> Trial:
        """Return the line of a trial that was played."""
        state, reason, search = outcome.state, outcome.reason, planned.search
        by_seed = late(outcome.curves, self.experiment.late) if state == "finished" else ()
        if any(map(math.isnan, by_seed)):
            state, reason, by_seed = "failed", "no client was judged: there are no validation rows", ()
        accuracy = fmean(by_seed) if by_seed else None
        return Trial(
            search.stage, search.method, planned.number, planned.values, state, outcome.curves, by_seed, accuracy,
            reason, self.config,
        )  # fmt: skip


def execute(
    experiment: Experiment, root: Path, *, workers: int | None = None, display: LiveTuning | None = None
) -> bool:
    """Play the remaining trials of a tune folder and write `tuned.toml`.

    The result depends neither on the number of processes nor on stops: every trial follows from the trials of earlier
    batches alone.

    Args:
        experiment: as in the folder's config.toml.
        root: the tune folder.
        workers: number of processes; None means the experiment's `fleet.workers`, or the machine's cores.
        display: shows progress.

    Returns:
        False if a person stopped it; every finished trial is saved then.

    Raises:
        FedtideError: all trials of a method failed, or the folder's trials belong to another configuration.
    """
    imported_optuna()
    display = display or LiveTuning(Console(quiet=True))
    searches, tune = stages(experiment, str(root / "config.toml")), tune_of(experiment, str(root))
    config = digest_of_tuning(experiment)
    with run_lock(root, "config.toml"), ExitStack() as stack:
        check_entries(root, played=True)
        for memory in root.glob("memory-????????"):  # of killed trials, as tempfile names it
            rmtree(memory)
        trials = read_trials(root, searches, config)
        wanted = sum(search.trials for stage in searches for search in stage)
        display.begin(wanted, len(trials), experiment.rounds * len(seeds_of(experiment)))
        stack.callback(display.end)
        most = max(len(stage) for stage in searches) * tune.parallel_trials
        pool, stop = stack.enter_context(started(experiment, workers, most if len(trials) < wanted else 0, root))
        tuning = _Tuning(experiment, root, searches, tune, config, display, pool, stop)
        trials = tuning.in_order(trials)
        write_trials(root, trials)
        best: list[tuple[Place, Any]] = []
        for stage in searches:
            for first in range(0, max(search.trials for search in stage), tune.parallel_trials):
                trials = tuning.play(stage, first, best, trials)
                if stop.asked:
                    return False
            best += [pair for search in stage for pair in _best_values(root, search, trials)]
        write_ready(root, experiment, best)
    return True


def _best_values(root: Path, search: Search, trials: Sequence[Trial]) -> list[tuple[Place, Any]]:
    """Return the places and values of a method's best trial."""
    of_method = of_search(trials, search)
    best = best_of(of_method)
    if best is None:
        reason = f"all {len(of_method)} trials of '{search.title}' failed; the first: {of_method[0].reason}"
        raise FedtideError(f"{root}: {reason}")
    return search.assigned(best.values)


class LiveTuning(TerminalBars):
    """Display of every finished trial with the best of its method so far."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._done: dict[int, int] = {}
        self._rounds = self._finished = self._trials = 0

    def begin(self, trials: int, finished: int, rounds: int) -> None:
        """Start a tuning of `trials` trials, of which `finished` are done, with `rounds` rounds each."""
        self._trials, self._finished, self._rounds = trials, finished, rounds
        already = f", {finished} already done" if finished else ""
        self.say(f"{trials} trial{'s' * (trials != 1)}{already}")
        self.start(trials * rounds, self._count(), finished * rounds)

    def advance(self, call: int, done: int) -> None:
        """Show that a trial of the batch has done `done` rounds."""
        self.add(done - self._done.get(call, 0))
        self._done[call] = done

    def trial(self, call: int, title: str, trial: Trial, best: Trial | None) -> None:
        """Show a finished trial of the batch; the rounds that it did not play count as played."""
        self._finished += 1
        self.add(self._rounds - self._done.pop(call, 0), shown=self._count())
        self.say(f"  {title}, {outcome_of(trial)}{so_far(best)}")

    def _count(self) -> str:
        return f"{self._finished}/{self._trials} trials"


def outcome_of(trial: Trial) -> str:
    """Describe the outcome of a trial in a line."""
    values = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in trial.values.items())
    outcome = {
        "finished": f"{100 * (trial.accuracy or 0.0):.1f} %",
        "pruned": f"pruned at {100 * (trial.last or 0.0):.1f} %",
        "failed": f"failed: {trial.reason}",
    }[trial.state]
    return f"trial {trial.number + 1} ({values}): {outcome}"


def so_far(best: Trial | None) -> str:
    """Describe the best trial of a method so far."""
    return "" if best is None or best.accuracy is None else f"; best so far {100 * best.accuracy:.1f} %"
