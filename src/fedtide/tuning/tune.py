"""Tuning stage by stage, batch by batch: every method by itself, all with the same number of trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from typing import Any

from fedtide.config import Experiment, Tune
from fedtide.core.errors import FedtideError
from fedtide.core.record import run_lock
from fedtide.fleets.pool import Processes
from fedtide.runs.folder import check_entries
from fedtide.runs.parallel import Stop, in_parallel, started
from fedtide.tuning.folder import append_trial, of_search, read_trials, write_ready, write_trials
from fedtide.tuning.plan import Place, Search, digest_of_tuning, seeds_of, stages, tune_of, with_values
from fedtide.tuning.play import Call, Outcome, tried
from fedtide.tuning.search import asked, imported_optuna
from fedtide.tuning.trials import Trial, best_of, bounds, late


class TrialsDisplay:
    """Display of the progress of a tuning; this one shows nothing."""

    def begin(self, trials: int, finished: int, rounds: int) -> None:
        """Start a tuning of `trials` trials, of which `finished` are done, with `rounds` rounds each."""

    def going(self, call: int, done: int) -> None:
        """Show that a trial of the batch has done `done` rounds."""

    def trial(self, call: int, title: str, trial: Trial, best: Trial | None) -> None:
        """Show a finished trial of the batch."""

    def end(self) -> None:
        """Close the display."""


@dataclass(frozen=True)
class _Asked:
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
    planned: list[list[Search]]
    tune: Tune
    config: str
    display: TrialsDisplay
    pool: Processes | None
    stop: Stop


def execute(
    experiment: Experiment, root: Path, *, workers: int | None = None, display: TrialsDisplay | None = None
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
    display = display or TrialsDisplay()
    planned, tune = stages(experiment, str(root / "config.toml")), tune_of(experiment, str(root))
    config = digest_of_tuning(experiment)
    with run_lock(root, "config.toml"), ExitStack() as stack:
        check_entries(root, played=True)
        for left in root.glob("memory-????????"):  # memory of killed trials, as tempfile names it
            rmtree(left)
        trials = _in_order(read_trials(root, planned, config), planned, tune.parallel_trials)
        write_trials(root, trials)
        wanted = sum(search.trials for stage in planned for search in stage)
        display.begin(wanted, len(trials), experiment.rounds * len(seeds_of(experiment)))
        stack.callback(display.end)
        most = max(len(stage) for stage in planned) * tune.parallel_trials
        pool, stop = stack.enter_context(started(experiment, workers, most if len(trials) < wanted else 0, root))
        tuning = _Tuning(experiment, root, planned, tune, config, display, pool, stop)
        found: list[tuple[Place, Any]] = []
        for stage in planned:
            for first in range(0, max(search.trials for search in stage), tune.parallel_trials):
                trials = _played(tuning, stage, first, found, trials)
                if stop.asked:
                    return False
            found += [pair for search in stage for pair in _found(root, search, trials)]
        write_ready(root, experiment, found)
    return True


def _in_order(trials: Sequence[Trial], planned: Sequence[Sequence[Search]], batch: int) -> list[Trial]:
    """Return trials in the order in which they are asked for, regardless of which was done first."""
    stage_of = {search.stage: number for number, stage in enumerate(planned) for search in stage}
    order = [(search.stage, search.method) for stage in planned for search in stage]

    def place(trial: Trial) -> tuple[int, int, int, int]:
        at = order.index((trial.stage, trial.method))
        return stage_of[trial.stage], trial.number // batch, at, trial.number

    return sorted(trials, key=place)


def _found(root: Path, search: Search, trials: Sequence[Trial]) -> list[tuple[Place, Any]]:
    """Return the places and values of a method's best trial."""
    own = of_search(trials, search)
    best = best_of(own)
    if best is None:
        raise FedtideError(f"{root}: all {len(own)} trials of '{search.title}' failed; the first: {own[0].reason}")
    return search.assigned(best.values)


def _played(
    tuning: _Tuning, stage: Sequence[Search], first: int, found: Sequence[tuple[Place, Any]], trials: list[Trial]
) -> list[Trial]:
    """Return all trials after playing the rest of a batch of each method; not in order after a stop."""
    batch = [each for search in stage for each in _batch(search, first, trials, tuning.tune)]
    if not batch:
        return trials
    calls = [_call(tuning, each, found) for each in batch]
    for message in in_parallel(tried, calls, tuning.pool, tuning.stop):
        if not message.final:
            tuning.display.going(message.call, message.value)
        elif message.value is not None:
            each = batch[message.call]
            trial = _trial(tuning, each, message.value)
            trials = [*trials, trial]
            append_trial(tuning.root, trial)
            best = best_of(of_search(trials, each.search))
            tuning.display.trial(message.call, each.search.title, trial, best)
    if tuning.stop.asked:
        return trials
    trials = _in_order(trials, tuning.planned, tuning.tune.parallel_trials)
    write_trials(tuning.root, trials)
    return trials


def _batch(search: Search, first: int, trials: Sequence[Trial], tune: Tune) -> list[_Asked]:
    """Return the missing trials of a batch. The whole batch is asked for again: later trials depend on earlier ones."""
    own = {trial.number: trial for trial in of_search(trials, search)}
    numbers = range(first, min(first + tune.parallel_trials, search.trials))
    left = [number for number in numbers if number not in own]
    if not left:
        return []
    before = [own[number] for number in range(first)]
    values = asked(search, before, tune, len(numbers))
    return [_Asked(search, number, values[number - first], before) for number in left]


def _call(tuning: _Tuning, each: _Asked, found: Sequence[tuple[Place, Any]]) -> Call:
    experiment = tuning.experiment
    values = with_values(experiment, [*found, *each.search.assigned(each.values)])
    ended = bounds(each.before, experiment.rounds) if tuning.tune.pruning else {}
    return Call(values, each.search.method, seeds_of(experiment), ended, str(tuning.root))


def _trial(tuning: _Tuning, each: _Asked, outcome: Outcome) -> Trial:
    state, reason = outcome.state, outcome.reason
    by_seed = late(outcome.curves, tuning.experiment.late) if state == "finished" else ()
    if any(map(math.isnan, by_seed)):
        state, reason, by_seed = "failed", "no client was judged: there are no validation rows", ()
    return Trial(
        each.search.stage, each.search.method, each.number, each.values, state, outcome.curves, by_seed,
        fmean(by_seed) if by_seed else None, reason, tuning.config,
    )  # fmt: skip
