"""Execution of one trial: training as in a run, evaluation on validation rows alone, no record on disk."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedtide.config import Experiment, from_dict
from fedtide.core.base import Scores
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.runs.build import rows_of
from fedtide.runs.runner import evaluated, judge_of
from fedtide.tuning.trials import Bounds, Curve, hopeless


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


def tried(call: Call, stop: Callable[[], bool]) -> Generator[int, None, Outcome | None]:
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
    alone = experiment.model_copy(update={"eval_splits": ("val",), "forgetting": None})
    with tempfile.TemporaryDirectory(dir=folder, prefix="memory-") as kept:
        judge = judge_of(alone, method, seed, MemoryStore(Path(kept)))
        for step, scored in evaluated(judge, rounds=experiment.rounds, seed=seed, every=experiment.eval_every):
            done = step.moment.round + 1
            if any(len(query.refused) and not len(query.answered) for query in judge.fleet.queries):
                raise FedtideError(f"in round {done} no client's answer was finite")
            found = None
            for _, scores, _ in scored or ():
                if not math.isfinite(float(scores.loss.sum())):
                    raise FedtideError(f"after {done} rounds the loss on validation rows is not finite")
                found = scores
            yield done, found
