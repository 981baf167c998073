"""Trials: values of a method with their outcome, and the pruning rule."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from fedtide.core.base import Scores
from fedtide.core.errors import FedtideError
from fedtide.evaluate.metrics import mean_of_last

KNOWN = 4
"""Number of finished trials from which a median is trusted."""

WARM_UP = 0.25
"""Share of the rounds in which no trial is pruned, so that slow learners get a chance."""


Bounds = dict[int, dict[int, float]]
"""Accuracy below which a trial is pruned, by seed and by rounds done."""


@dataclass(frozen=True)
class Curve:
    """Accuracy on validation rows with one seed, by rounds done; what each counts for, where not all do the same."""

    seed: int
    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    weights: tuple[float, ...] = ()

    def then(self, done: int, scores: Scores, *, dated: bool) -> Curve:
        """Return the curve with one more evaluation; `dated`: rounds are windows of wall-clock time."""
        rows = float(scores.rows.sum()) if dated else None
        weight = [each for each in (scores.reference, rows) if each is not None][:1]
        return Curve(self.seed, (*self.rounds, done), (*self.accuracy, scores.accuracy), (*self.weights, *weight))


@dataclass(frozen=True)
class Trial:
    """Line of `trials.jsonl`.

    number: from 0, within the stage and method. values: by the keys of the file. curves: one per seed that was played.
    by_seed: late accuracy of each seed, once all are played; accuracy: their mean. reason: cause of a failure. config:
    digest of the configuration that it belongs to.
    """

    stage: str
    method: str
    number: int
    values: Mapping[str, Any]
    state: Literal["finished", "pruned", "failed"]
    curves: tuple[Curve, ...]
    by_seed: tuple[float, ...]
    accuracy: float | None
    reason: str
    config: str

    def line(self) -> str:
        """Return the trial as JSON."""
        return json.dumps(asdict(self), allow_nan=False)

    @property
    def last(self) -> float | None:
        """Accuracy at the last evaluation, for pictures; None without an evaluation."""
        values = [value for curve in self.curves for value in curve.accuracy]
        return values[-1] if values else None


def read_trial(line: Any, where: str) -> Trial:
    """Return a trial from a line of the file.

    Raises:
        FedtideError: the line has another form than this program writes.
    """
    try:
        curves = tuple(
            Curve(int(c["seed"]), tuple(c["rounds"]), tuple(c["accuracy"]), tuple(c.get("weights", ())))
            for c in line["curves"]
        )
        trial = Trial(**{**line, "curves": curves, "by_seed": tuple(line["by_seed"])})
        if trial.state not in ("finished", "pruned", "failed") or not isinstance(trial.number, int):
            raise ValueError
        if (trial.accuracy is None) is (trial.state == "finished") or not isinstance(trial.values, dict):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise FedtideError(f"{where}: damaged: not a trial") from None
    return trial


def late(curves: Iterable[Curve], window: int) -> tuple[float, ...]:
    """Return the late accuracy of each seed, the number by which a sweep chooses its points."""
    return tuple(mean_of_last(curve.rounds, curve.accuracy, window, curve.weights or None) for curve in curves)


def bounds(before: Sequence[Trial], rounds: int) -> Bounds:
    """Return for each seed and evaluation the median accuracy of the earlier finished trials.

    Args:
        before: trials of the method in this stage that were asked for earlier; never those of the same batch, as these
            may or may not be there yet.
        rounds: rounds of a whole run.

    Returns:
        Bounds by seed and by rounds done; empty where too few trials are finished.
    """
    finished = [trial for trial in before if trial.state == "finished"]
    if len(finished) < KNOWN:
        return {}
    out: Bounds = {}
    for at_seed in zip(*(trial.curves for trial in finished), strict=True):
        found = zip(at_seed[0].rounds, zip(*(curve.accuracy for curve in at_seed), strict=True), strict=True)
        out[at_seed[0].seed] = {done: median(each) for done, each in found if done > WARM_UP * rounds}
    return out


def hopeless(curve: Curve, needed: Bounds) -> bool:
    """Tell whether a curve has never been as high as the median is now: such a trial is pruned."""
    bound = needed.get(curve.seed, {}).get(curve.rounds[-1])
    return bound is not None and max(curve.accuracy) < bound


def best_of(trials: Iterable[Trial]) -> Trial | None:
    """Return the finished trial with the highest accuracy, the first at a tie; None where none is finished."""
    finished = [trial for trial in trials if trial.accuracy is not None]
    return max(finished, key=lambda trial: trial.accuracy or 0.0) if finished else None
