"""The tune folder: its files, and `trials.jsonl`, the whole memory of a tuning.

config.toml         the whole configuration, every default written out
environment.json    versions, machine, command
trials.jsonl        a line per trial of a method: its values, its accuracy at every evaluation, its outcome
tuned.toml          the experiment with the best values, ready to run
report.html         ranges, trials and best values
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from fedtide.config import Experiment, brief, from_dict, is_own, read, to_toml
from fedtide.core.atomic import flush, replacing, write_text
from fedtide.core.base import Scores
from fedtide.core.errors import FedtideError
from fedtide.core.record import read_rounds
from fedtide.evaluate.metrics import mean_of_last
from fedtide.runs.folder import check_entries, make_folder
from fedtide.tuning.stages import Place, Search, digest_of_tuning, stages, with_values

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
        weight = [number for number in (scores.reference, rows) if number is not None][:1]
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
        before: trials of the method in this stage that were asked for earlier, never those of the same batch, which may
            be missing yet.
        rounds: rounds of a whole run.

    Returns:
        Bounds by seed and by rounds done; empty if too few trials are finished.
    """
    finished = [trial for trial in before if trial.state == "finished"]
    if len(finished) < KNOWN:
        return {}
    out: Bounds = {}
    for at_seed in zip(*(trial.curves for trial in finished), strict=True):
        by_round = zip(at_seed[0].rounds, zip(*(curve.accuracy for curve in at_seed), strict=True), strict=True)
        out[at_seed[0].seed] = {done: median(values) for done, values in by_round if done > WARM_UP * rounds}
    return out


def hopeless(curve: Curve, needed: Bounds) -> bool:
    """Tell whether a curve has never been as high as the median is now: such a trial is pruned."""
    bound = needed.get(curve.seed, {}).get(curve.rounds[-1])
    return bound is not None and max(curve.accuracy) < bound


def best_of(trials: Iterable[Trial]) -> Trial | None:
    """Return the finished trial with the highest accuracy, the first at a tie; None if none is finished."""
    finished = [trial for trial in trials if trial.accuracy is not None]
    return max(finished, key=lambda trial: trial.accuracy or 0.0) if finished else None


TRIALS = "trials.jsonl"
READY = "tuned.toml"
COMMENT = "# Written by fedtide tune, with the values that it found.\n"


def create(experiment: Experiment, root: Path) -> None:
    """Create a new tune folder.

    Raises:
        FedtideError: something exists at `root`; it is left as it is.
    """
    make_folder(root, {"config.toml": to_toml(experiment), TRIALS: ""})


def load(root: Path, *, imports: bool = True) -> Experiment:
    """Return the experiment of a tune folder, as read for tuning; see `fedtide.config.read` for `imports`.

    Raises:
        FedtideError: there is something else in it than folders and files.
    """
    check_entries(root)
    return read(root / "config.toml", timed=False, imports=imports)


def read_trials(root: Path, planned: Sequence[Sequence[Search]], config: str | None) -> list[Trial]:
    """Return the recorded trials; an incomplete last line is ignored.

    Args:
        root: the tune folder.
        planned: the searches of each stage.
        config: digest of the configuration that they have to belong to; None if it is not known.

    Raises:
        FedtideError: a line is damaged, or belongs to another configuration.
    """
    searches = {(search.stage, search.method): search for stage in planned for search in stage}
    out = []
    for number, line in enumerate(read_rounds(root, TRIALS), start=1):
        trial = read_trial(line, f"{root / TRIALS}: line {number}")
        if config not in (None, trial.config):
            raise FedtideError(
                f"{root / TRIALS}: line {number} belongs to another configuration (digest {trial.config}, config.toml "
                f"has {config}); restore config.toml or start a new tune folder"
            )
        search = searches.get((trial.stage, trial.method))
        keys = [] if search is None else [parameter.key for parameter in search.parameters]
        if search is None or not 0 <= trial.number < search.trials or sorted(trial.values) != sorted(keys):
            raise FedtideError(f"{root / TRIALS}: line {number}: damaged: no trial that config.toml asks for")
        out.append(trial)
    return out


def write_trials(root: Path, trials: Sequence[Trial]) -> None:
    """Rewrite all lines in order, without a line that a killed process left half-written."""
    with replacing(root / TRIALS) as temporary:
        temporary.write_text("".join(trial.line() + "\n" for trial in trials), encoding="utf-8")
        flush(temporary)


def append_trial(root: Path, trial: Trial) -> None:
    """Append a line and sync it to disk."""
    with open(root / TRIALS, "a", encoding="utf-8") as file:
        file.write(trial.line() + "\n")
    flush(root / TRIALS)


def write_ready(root: Path, experiment: Experiment, best: Sequence[tuple[Place, object]]) -> Path:
    """Write the experiment with the best values, without search and sweep, ready for `fedtide run`."""
    path = root / READY
    values = {key: value for key, value in with_values(experiment, best).items() if key != "sweep"}
    ready = from_dict(values, where=str(path))
    write_text(path, f"{COMMENT}{brief(ready)}\n")
    return path


@dataclass(frozen=True)
class Tuned:
    """Result of one method in one stage: search, every trial, and the best one (None if none is finished)."""

    search: Search
    trials: list[Trial]
    best: Trial | None


def read_tuning(root: Path) -> tuple[Experiment, list[list[Tuned]]]:
    """Return the experiment of a tune folder and, for each stage, the result of each method.

    Raises:
        FedtideError: the folder is not that of a tuning, or is damaged.
    """
    if not (root / TRIALS).is_file():
        raise FedtideError(f"{root}: not a tune folder (no {TRIALS} in it)")
    experiment = load(root, imports=False)
    planned = stages(experiment, str(root / "config.toml"))
    shipped = not any(is_own(method.algorithm) for method in experiment.method)
    trials = read_trials(root, planned, digest_of_tuning(experiment) if shipped else None)
    by_stage = [[(search, of_search(trials, search)) for search in stage] for stage in planned]
    return experiment, [
        [Tuned(search, of_method, best_of(of_method)) for search, of_method in stage] for stage in by_stage
    ]


def of_search(trials: Sequence[Trial], search: Search) -> list[Trial]:
    """Return the trials of a method in a stage, in order."""
    of_method = [trial for trial in trials if (trial.stage, trial.method) == (search.stage, search.method)]
    return sorted(of_method, key=lambda trial: trial.number)
