"""The summary: per method, mean and standard error over seeds of everything that is compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedtide.config import Claim, matching
from fedtide.core.atomic import replacing
from fedtide.core.errors import nearest
from fedtide.core.record import plain
from fedtide.evaluate.metrics import mean_and_error, mean_of_last, swing, time_to_accuracy, worst_point
from fedtide.report.forgetting import local_forgetting, over_time
from fedtide.report.reading import ExperimentRecord, MethodRecord, RunRecord, read_experiment
from fedtide.runs.folder import load

CLIENTS = ("client_mean", "client_variance", "q10", "q50", "q90", "worst_decile")


@dataclass(frozen=True)
class Measure:
    """A quantity over seeds: mean, standard error (None for one seed), and the value of each seed."""

    mean: float | None
    error: float | None
    values: list[float]

    @staticmethod
    def of(values: list[float]) -> Measure:
        """From the value of each seed."""
        finite = [v for v in values if math.isfinite(v)]
        mean, error = mean_and_error(finite if len(finite) == len(values) else [])
        return Measure(mean if math.isfinite(mean) else None, error if math.isfinite(error) else None, values)


@dataclass(frozen=True)
class MethodSummary:
    """One method: its measures by name."""

    name: str
    algorithm: str
    seeds: list[int]
    unfinished: int
    measures: dict[str, Measure]


@dataclass(frozen=True)
class Paired:
    """A method minus the baseline, seed by seed, in the mean of late accuracy."""

    name: str
    baseline: str
    difference: Measure


Verdict = Literal["holds", "does not hold", "not seen"]
SURE = 2.0
"""Standard errors that a number must lie beyond the bound of a claim."""


@dataclass(frozen=True)
class Judged:
    """A claim, the number that it is about (over seeds), and what follows."""

    claim: str
    measure: str
    number: Measure
    verdict: Verdict
    paired: bool


@dataclass(frozen=True)
class Summary:
    """One experiment, or one point of a sweep."""

    title: str
    point: str
    rounds: int
    view: str
    window: int
    period: float | None
    groups: list[str]
    methods: list[MethodSummary]
    paired: list[Paired] = field(default_factory=list)
    claims: list[Judged] = field(default_factory=list)

    def method(self, name: str) -> MethodSummary:
        """The summary of one method."""
        return next(m for m in self.methods if m.name == name)


@dataclass(frozen=True)
class Study:
    """A run folder: the record and the summary of each point of its sweep, and what follows from all of them.

    chosen: for each method the point with the best late validation accuracy; ties go to the first. Empty where there is
    no sweep or nobody has validation rows. claims: those about several points, or one of them.
    """

    records: list[ExperimentRecord]
    summaries: list[Summary]
    chosen: dict[str, Summary]
    claims: list[Judged]


def read_study(root: Path) -> Study:
    """Everything that a run folder says."""
    records = read_experiment(root)
    summaries = [summarise(record) for record in records]
    claims = [across(summaries, claim) for claim in load(root).claim if claim.at is not None]
    return Study(records, summaries, chosen_points(summaries), claims)


def summarise(record: ExperimentRecord) -> Summary:
    """Everything that is compared, from the record files of one experiment."""
    done = [method for method in record.methods if method.runs]
    target = _target(record)
    methods = [
        MethodSummary(
            method.name,
            method.method.algorithm,
            [run.seed for run in method.runs],
            method.unfinished,
            _measures(record, method, target),
        )
        for method in done
    ]
    experiment = record.experiment
    return Summary(
        experiment.title, record.point, experiment.rounds, record.view, record.window, record.period, record.groups,
        methods, _paired(record, methods), [judged(methods, claim) for claim in experiment.claim],
    )  # fmt: skip


def _measures(record: ExperimentRecord, method: MethodRecord, target: float) -> dict[str, Measure]:
    per_run = [
        _of_run(record, run, target) | local_forgetting(run) | (over_time(record, run) if method.shifted else {})
        for run in method.runs
    ]
    names = dict.fromkeys(name for values in per_run for name in values)
    return {name: Measure.of([values.get(name, math.nan) for values in per_run]) for name in names}


def _of_run(record: ExperimentRecord, run: RunRecord, target: float) -> dict[str, float]:
    """Every quantity of one run. Accuracies are shares (0 to 1), times seconds, costs bytes."""
    rounds, accuracy = run.accuracy(record.view)
    if not len(rounds):
        return {"accuracy": math.nan}
    window = record.window
    out = {
        "accuracy": mean_of_last(rounds, accuracy, window),
        "last": float(accuracy[-1]),
        "best": float(accuracy.max()),
        "worst_point": worst_point(rounds, accuracy, window),
        "mean_over_rounds": float(accuracy.mean()),
        "std_over_rounds": float(accuracy.std()),
    }
    if record.period:
        out["swing"] = swing(rounds, accuracy, record.period, window)
    for group in record.groups:
        at, values = run.accuracy(record.view, group)
        out[f"accuracy_{group}"] = mean_of_last(at, values, window)
        if record.period:
            out[f"swing_{group}"] = swing(at, values, record.period, window)
    for name in CLIENTS:
        at, values = run.curve(record.view, itemgetter(name))
        out[name] = mean_of_last(at, values, window)
    at, right = run.branches(record.view)
    if len(record.groups) > 1 and len(at):
        out["branch_accuracy"] = mean_of_last(at, right, window)
    at, valid = run.accuracy("valid")
    if len(at):
        out["valid_accuracy"] = mean_of_last(at, valid, window)
    out["time_to_accuracy"] = time_to_accuracy(_clock(run, rounds), accuracy, target)
    for name in ("down", "up", "refused"):
        out[name] = float(run.every_round(itemgetter(name)).sum())
    out["seconds"] = run.seconds("seconds")
    out["evaluation_seconds"] = run.seconds("evaluation")
    return out


def _clock(run: RunRecord, rounds: np.ndarray) -> list[float]:
    """The simulated clock at the end of each evaluation round."""
    seconds = run.every_round(lambda line: line["seconds"])
    return [float(seconds[r - 1]) for r in rounds]


def _target(record: ExperimentRecord) -> float:
    """Late accuracy of the baseline, which others try to reach first; NaN without a baseline."""
    base = next((m for m in record.methods if m.name == record.experiment.baseline), None)
    if base is None or not base.runs:
        return math.nan
    return float(np.mean([mean_of_last(*run.accuracy(record.view), record.window) for run in base.runs]))


def _paired(record: ExperimentRecord, methods: list[MethodSummary]) -> list[Paired]:
    base = next((m for m in methods if m.name == record.experiment.baseline), None)
    if base is None:
        return []
    out = []
    for method in methods:
        if method is base:
            continue
        both = [seed for seed in method.seeds if seed in base.seeds]
        theirs = dict(zip(base.seeds, base.measures["accuracy"].values, strict=True))
        ours = dict(zip(method.seeds, method.measures["accuracy"].values, strict=True))
        out.append(Paired(method.name, base.name, Measure.of([ours[s] - theirs[s] for s in both])))
    return out


def judged(methods: list[MethodSummary], claim: Claim) -> Judged:
    """Whether a claim holds.

    It holds where the mean over seeds lies two standard errors or more beyond the bound, does not hold where it lies
    two or more short of it, and is not seen in between, from a single seed, or where a method was not judged.
    """
    done = {method.name: method for method in methods}
    known = sorted({name for method in methods for name in method.measures})
    return _verdict(claim, list(_claimed(done, claim).values()), known)


def across(summaries: list[Summary], claim: Claim) -> Judged:
    """Whether a claim about a part of a sweep holds; every method as it is at the point of that part that it chose."""
    known = sorted({name for summary in summaries for method in summary.methods for name in method.measures})
    parts = [
        _claimed(_at_chosen([s for s in summaries if s.point in matching(part, [s.point for s in summaries])]), claim)
        for part in (claim.at, claim.beyond)
        if part is not None
    ]
    values = [parts[0][seed] - (parts[1][seed] if parts[1:] else 0.0) for seed in parts[0] if seed in parts[-1]]
    return _verdict(claim, values, known, paired=len(parts) > 1)


def _at_chosen(summaries: list[Summary]) -> dict[str, MethodSummary]:
    """Each method at the point that it chose; nobody where several points cannot be told apart."""
    if len(summaries) == 1:
        return {method.name: method for method in summaries[0].methods}
    return {name: summary.method(name) for name, summary in chosen_points(summaries).items()}


def _verdict(claim: Claim, values: list[float], known: list[str], *, paired: bool = False) -> Judged:
    number = Measure.of(values or [math.nan])
    verdict: Verdict = "not seen"
    if number.mean is not None and number.error is not None:
        beyond = (claim.by - number.mean) if claim.less else (number.mean - claim.by)
        if claim.within is not None:
            beyond = claim.within - abs(number.mean - claim.by)
        if abs(beyond) >= SURE * number.error and beyond:
            verdict = "holds" if beyond > 0 else "does not hold"
    text = claim.text if claim.measure in known or not known else f"{claim.text} [{nearest(claim.measure, known)}]"
    return Judged(text, claim.measure, number, verdict, paired or claim.than is not None)


def _claimed(done: Mapping[str, MethodSummary], claim: Claim) -> dict[int, float]:
    """The number of each seed: of the method, minus that of the other where there is one."""
    if claim.method not in done or (claim.than is not None and claim.than not in done):
        return {}
    ours = _by_seed(done[claim.method], claim.measure)
    if claim.than is None:
        return ours
    theirs = _by_seed(done[claim.than], claim.measure)
    return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}


def _by_seed(method: MethodSummary, measure: str) -> dict[int, float]:
    if measure not in method.measures:
        return {}
    return dict(zip(method.seeds, method.measures[measure].values, strict=True))


def chosen_points(summaries: list[Summary]) -> dict[str, Summary]:
    """For each method of a sweep the point with the best late validation accuracy; ties go to the first.

    Empty where there is no sweep or nobody has validation rows.
    """
    if len(summaries) < 2:
        return {}
    out: dict[str, Summary] = {}
    for name in dict.fromkeys(method.name for summary in summaries for method in summary.methods):
        scored = [(s, _valid(s, name)) for s in summaries]
        known = [(s, v) for s, v in scored if v is not None]
        if known:
            out[name] = max(known, key=lambda pair: pair[1])[0]
    return out


def _valid(summary: Summary, name: str) -> float | None:
    found = [m for m in summary.methods if m.name == name]
    measure = found[0].measures.get("valid_accuracy") if found else None
    return None if measure is None else measure.mean


def write_summary(path: Path, study: Study) -> None:
    """Write `summary.json`: the experiment, or every point of the sweep and which point each method chose."""
    if len(study.summaries) == 1:
        content: Any = asdict(study.summaries[0])
    else:
        content = {
            "title": study.summaries[0].title,
            "points": [asdict(summary) for summary in study.summaries],
            "chosen": {name: summary.point for name, summary in study.chosen.items()},
            "claims": [asdict(claim) for claim in study.claims],
        }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(plain(content), indent=1) + "\n", encoding="utf-8")
