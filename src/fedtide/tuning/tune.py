"""Tuning: stage after stage, batch after batch, every method by itself and all with the same number of trials."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, Protocol

from fedtide.config import Experiment
from fedtide.core.errors import FedtideError
from fedtide.core.record import alone
from fedtide.fleets.pool import Pool
from fedtide.runs.experiment import Stop, interruptible, processes
from fedtide.tuning.folder import (
    append_trial,
    digest_of_tuning,
    of_search,
    read_trials,
    seeds_of,
    write_ready,
    write_trials,
)
from fedtide.tuning.plan import Place, Search, stages, tune_of, with_values
from fedtide.tuning.play import Going, Outcome, tried
from fedtide.tuning.search import asked, needed
from fedtide.tuning.trials import Trial, best_of, bounds, late, mean_of


class Display(Protocol):
    """Shows how far a tuning is."""

    def begin(self, trials: int, finished: int, rounds: int) -> None:
        """So many trials in all, of which some are done already; rounds of each."""

    def going(self, call: int, done: int) -> None:
        """A trial of the batch has played so many rounds."""

    def trial(self, call: int, title: str, trial: Trial, best: Trial | None) -> None:
        """A trial of the batch is done."""

    def end(self) -> None:
        """No more."""


class Silent:
    """Shows nothing."""

    def begin(self, trials: int, finished: int, rounds: int) -> None:
        """Nothing."""

    def going(self, call: int, done: int) -> None:
        """Nothing."""

    def trial(self, call: int, title: str, trial: Trial, best: Trial | None) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class _Asked:
    """A trial that is to be played."""

    search: Search
    number: int
    values: dict[str, Any]
    before: list[Trial]


def execute(experiment: Experiment, root: Path, *, workers: int | None = None, display: Display | None = None) -> bool:
    """Play what is left of a tune folder's trials and write `tuned.toml`.

    Neither the number of processes nor a stop changes what is found: every trial follows from the trials of earlier
    batches alone.

    Args:
        experiment: as in the folder's config.toml.
        root: the tune folder.
        workers: processes; None means the experiment's `fleet.workers`, or the machine's cores.
        display: shows progress.

    Returns:
        False if a person stopped it; every finished trial is saved then.

    Raises:
        FedtideError: all trials of a method failed, or the folder's trials belong to another configuration.
    """
    needed()
    display = display or Silent()
    planned = stages(experiment, str(root / "config.toml"))
    with alone(root, "config.toml"), ExitStack() as stack:
        for left in root.glob("memory-*"):  # of trials that were killed
            rmtree(left)
        tuning = _Tuning(experiment, root, planned, display)
        tuning.tidy()
        tune = tune_of(experiment, str(root))
        side_by_side = max(len(stage) for stage in planned) * tune.together
        wanted = sum(search.trials for stage in planned for search in stage)
        display.begin(wanted, len(tuning.trials), experiment.rounds * len(seeds_of(experiment)))
        stack.callback(display.end)
        stop = Stop()
        stack.enter_context(interruptible(stop))
        size = processes(experiment, workers, side_by_side) if len(tuning.trials) < wanted else 1
        pool = stack.enter_context(Pool(size)) if size > 1 else None
        if pool is not None:
            stop.flag = pool.folder / "stop"
        found: list[tuple[Place, Any]] = []
        for stage in planned:
            if not tuning.stage(stage, found, pool, stop):
                return False
            found += [pair for search in stage for pair in tuning.found(search)]
        write_ready(root, experiment, found)
    return True


class _Tuning:
    """The trials of a tune folder, those that are there and those that come."""

    def __init__(self, experiment: Experiment, root: Path, planned: list[list[Search]], display: Display) -> None:
        self.experiment, self.root, self.display = experiment, root, display
        self.tune, self.seeds = tune_of(experiment, str(root)), seeds_of(experiment)
        self.config = digest_of_tuning(experiment)
        self.order = [(search.stage, search.method) for stage in planned for search in stage]
        self.trials = read_trials(root, planned, self.config)

    def tidy(self) -> None:
        """Put the file in the order in which trials are asked for, whichever was done first."""
        stage_of = list(dict.fromkeys(stage for stage, _ in self.order))

        def place(trial: Trial) -> tuple[int, int, int, int]:
            batch = trial.number // self.tune.together
            return stage_of.index(trial.stage), batch, self.order.index((trial.stage, trial.method)), trial.number

        self.trials.sort(key=place)
        write_trials(self.root, self.trials)

    def found(self, search: Search) -> list[tuple[Place, Any]]:
        """The best values of a method, and where they go."""
        own = of_search(self.trials, search)
        best = best_of(own)
        if best is None:
            raise FedtideError(
                f"{self.root}: all {len(own)} trials of '{search.title}' failed; the first: {own[0].reason}"
            )
        return search.assigned(best.values)

    def stage(
        self, searches: Sequence[Search], found: Sequence[tuple[Place, Any]], pool: Pool | None, stop: Stop
    ) -> bool:
        """Play what is left of a stage; False if a person stopped it."""
        for first in range(0, max(search.trials for search in searches), self.tune.together):
            batch = [each for search in searches for each in self._batch(search, first)]
            if batch and not self._play(batch, found, pool, stop):
                return False
        return True

    def _batch(self, search: Search, first: int) -> list[_Asked]:
        """The trials of a batch that are not there yet. All are asked for anew: a later one depends on those before."""
        own = {trial.number: trial for trial in of_search(self.trials, search)}
        numbers = range(first, min(first + self.tune.together, search.trials))
        left = [number for number in numbers if number not in own]
        if not left:
            return []
        before = [own[number] for number in range(first)]
        values = asked(search, before, self.tune, len(numbers))
        return [_Asked(search, number, values[number - first], before) for number in left]

    def _play(self, batch: Sequence[_Asked], found: Sequence[tuple[Place, Any]], pool: Pool | None, stop: Stop) -> bool:
        for call, said in _played([self._call(each, found) for each in batch], pool, stop):
            if isinstance(said, Going):
                self.display.going(call, said.done)
            elif said.state != "stopped":
                each = batch[call]
                trial = self._trial(each, said)
                self.trials.append(trial)
                append_trial(self.root, trial)
                best = best_of(of_search(self.trials, each.search))
                self.display.trial(call, each.search.title, trial, best)
        if stop.asked:
            return False
        self.tidy()
        return True

    def _call(self, each: _Asked, found: Sequence[tuple[Place, Any]]) -> dict[str, Any]:
        values = with_values(self.experiment, [*found, *each.search.assigned(each.values)])
        pruning = self.tune.pruning
        return {
            "experiment": json.dumps(values),
            "method": each.search.method,
            "seeds": list(self.seeds),
            "bounds": bounds(each.before, self.experiment.rounds) if pruning else {},
            "folder": str(self.root),
        }

    def _trial(self, each: _Asked, outcome: Outcome) -> Trial:
        by_seed = late(outcome.curves, self.experiment.late) if outcome.state == "finished" else ()
        state: Any = outcome.state
        reason = outcome.reason
        if any(map(math.isnan, by_seed)):
            state, reason, by_seed = "failed", "nobody was judged: there are no validation rows", ()
        search = each.search
        return Trial(
            search.stage, search.method, each.number, each.values, state, outcome.curves, by_seed,
            mean_of(by_seed) if by_seed else None, reason, self.config,
        )  # fmt: skip


def _played(calls: Sequence[dict[str, Any]], pool: Pool | None, stop: Stop) -> Iterator[tuple[int, Going | Outcome]]:
    """Play trials here or in processes; everything that they say, with the number of the trial."""
    if pool is None:
        for number, call in enumerate(calls):
            for said in tried(call, lambda: stop.asked):
                yield number, said
            if stop.asked:
                return
        return
    arguments = [call | {"stop": str(pool.folder / "stop")} for call in calls]
    for message in pool.run("fedtide.tuning.play:play_in_worker", arguments):
        yield message.call, message.value
