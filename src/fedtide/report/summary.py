"""The summary: for each method, mean and standard error over seeds of every measure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedtide.config import Claim, Experiment, axes, matching
from fedtide.core.atomic import replacing
from fedtide.core.record import plain
from fedtide.evaluate.metrics import METRICS, Unit, mean_of_last, swing, time_to_accuracy, worst_point
from fedtide.report.blends import blending, gains
from fedtide.report.clusters import clustering
from fedtide.report.drift import following
from fedtide.report.environment import is_nano
from fedtide.report.forgetting import local_forgetting, over_time
from fedtide.report.measures import BY_WAY, Measure
from fedtide.report.reading import ExperimentRecord, MethodRecord, RunRecord, read_experiment, span_of
from fedtide.runs.folder import load


@dataclass(frozen=True)
class MethodSummary:
    """Measures of one method, by name."""

    name: str
    algorithm: str
    seeds: list[int]
    unfinished: int
    measures: dict[str, Measure]

    def by_seed(self, name: str) -> dict[int, float]:
        """Return a measure of every seed; empty where it was not measured."""
        measure = self.measures.get(name)
        return {} if measure is None else dict(zip(self.seeds, measure.values, strict=True))

    def minus(self, other: MethodSummary, name: str) -> dict[int, float]:
        """Return the measure minus that of another method, seed by seed."""
        ours, theirs = self.by_seed(name), other.by_seed(name)
        return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}


@dataclass(frozen=True)
class Paired:
    """Difference of a method's late accuracy to the baseline's, seed by seed."""

    name: str
    baseline: str
    difference: Measure


Verdict = Literal["holds", "does not hold", "not seen"]


@dataclass(frozen=True)
class Judged:
    """A claim with its number (over seeds) and its verdict; the unit of a person's own metric."""

    claim: str
    measure: str
    number: Measure
    verdict: Verdict
    paired: bool
    unit: Unit | None = None


@dataclass(frozen=True)
class Summary:
    """Summary of one experiment, or of one point of a sweep; `metrics` are the person's own, with their units."""

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
    metrics: dict[str, Unit] = field(default_factory=dict)

    @property
    def span(self) -> str:
        """What late means are averaged over, in words."""
        stops = any("rounds_to_target" in method.measures for method in self.methods)
        return span_of(self.window, self.rounds, stops=stops)

    def method(self, name: str) -> MethodSummary:
        """Return the summary of one method."""
        return next(m for m in self.methods if m.name == name)


@dataclass(frozen=True)
class Study:
    """Content of a run folder: record and summary of each point of its sweep, and conclusions from all of them.

    chosen: for each method the point with the best late validation accuracy; ties go to the first. Empty without a
    sweep or without validation rows. claims: those about several points, or one of them. axes: the swept keys and their
    values; the points are their product, in order. nano: true for the scale at which numbers mean nothing.
    """

    records: list[ExperimentRecord]
    summaries: list[Summary]
    chosen: dict[str, Summary]
    claims: list[Judged]
    swept: bool
    axes: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    nano: bool = False


def read_study(root: Path) -> Study:
    """Read a run folder and summarize all of it."""
    records = read_experiment(root)
    summaries = [summarize(record) for record in records]
    experiment = load(root, imports=False)
    swept = bool(experiment.sweep)
    units = own_units(experiment)
    claims = [across(summaries, claim, units) for claim in experiment.claim if swept and claim.at is not None]
    return Study(records, summaries, chosen_points(summaries), claims, swept, axes(experiment), is_nano(root))


def summarize(record: ExperimentRecord) -> Summary:
    """Compute the summary of one experiment from its record files."""
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
    experiment, units = record.experiment, own_units(record.experiment)
    return Summary(
        experiment.title, record.point, experiment.rounds, record.view, record.window, record.period, record.groups,
        methods, _paired(record, methods), [judged(methods, claim, units) for claim in experiment.claim],
        units,
    )  # fmt: skip


def own_units(experiment: Experiment) -> dict[str, Unit]:
    """Return the person's own metrics with their units."""
    return {metric.key: metric.unit for metric in experiment.metrics}


def _measures(record: ExperimentRecord, method: MethodRecord, target: float) -> dict[str, Measure]:
    per_run = [
        _of_run(record, run, target)
        | local_forgetting(run)
        | (over_time(record, run) if method.shifted else {})
        | blending(run, record.window)
        | gains(run, record.view, method.cycles)
        | following(run, record.view)
        for run in method.runs
    ]
    names = dict.fromkeys(name for values in per_run for name in values)
    return {name: Measure.of([values.get(name, math.nan) for values in per_run]) for name in names}


def _of_run(record: ExperimentRecord, run: RunRecord, target: float) -> dict[str, float]:
    """Return every measure of one run. Accuracies are shares (0 to 1), times seconds, costs bytes."""
    rounds, accuracy = run.accuracy(record.view)
    scored = [line["scores"][record.view] for line in run.judged if record.view in line["scores"]]
    without = [scores.get("accuracy") is None for scores in scored]
    costs = {name: run.total(name) for name in ("down", "up", "answered", "refused")}
    costs |= {"diverged": float(sum(without)), **on_the_clock(run)}
    costs |= {"seconds": run.seconds("seconds"), "evaluation_seconds": run.seconds("evaluation")}
    if not without or without[-1]:  # a mean over the evaluations before would be that of another model
        return {"accuracy": math.nan, **costs}
    window = record.window
    out = costs | {
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
    for name in (*(metric.name for metric in METRICS), *(metric.key for metric in record.experiment.metrics)):
        out[name] = mean_of_last(*run.curve(record.view, itemgetter(name)), window)
    at, variance = run.curve(record.view, itemgetter("client_variance"))
    out["client_std"] = mean_of_last(at, np.sqrt(variance), window)
    at, right = run.branches(record.view)
    mixed = any(scores.get("weights", {}).get("own") for line in run.judged for scores in line["scores"].values())
    if len(record.groups) > 1 and len(at) and not mixed:  # a client's own expert belongs to no group
        out["branch_accuracy"] = mean_of_last(at, right, window)
    at, own = run.curve(record.view, lambda scores: scores.get("weights", {}).get("own"))
    if len(at):
        out["own_weight"] = mean_of_last(at, own, window)
    for way in ways(run, record.view):
        out[f"{BY_WAY}{way}"] = mean_of_last(*run.other_way(record.view, way), window)
    out |= clustering(run, record.clustered, record.groups, len(run.lines) - window)
    at, val = run.accuracy("val")
    if len(at):
        out["val_accuracy"] = mean_of_last(at, val, window)
    out["time_to_accuracy"] = time_to_accuracy(_clock(run, rounds), accuracy, target)
    out |= _to_target(record, run, rounds)
    return out


def on_the_clock(run: RunRecord) -> dict[str, float]:
    """Return the simulated duration, and the clients asked to train and counted in a round."""
    out = {"simulated_seconds": float(run.lines[-1]["seconds"])}
    told = [line["trained"] for line in run.lines if "trained" in line]
    asked, counted = (sum(each) for each in zip(*told, strict=True)) if told else (0, 0)
    if asked:
        out |= {"asked_to_train": asked / len(told), "counted_in_a_round": counted / len(told)}
        out["counted"] = counted / asked
    return out


def _to_target(record: ExperimentRecord, run: RunRecord, rounds: np.ndarray) -> dict[str, float]:
    """Return rounds and simulated seconds until the target; infinity if not reached, empty without a target.

    Where the target needs several evaluations in a row, the first of them counts.
    """
    if record.experiment.stop_at is None:
        return {}
    if run.target is None:
        return {"rounds_to_target": math.inf, "time_to_target": math.inf}
    first = len(rounds) - run.target[1]
    return {"rounds_to_target": float(rounds[first]), "time_to_target": _clock(run, rounds)[first]}


def ways(run: RunRecord, view: str) -> list[str]:
    """Return the other ways to combine a method's models that were judged, in order of appearance."""
    found = (line["scores"].get(view, {}).get("others", {}) for line in run.judged)
    return list(dict.fromkeys(way for others in found for way in others))


def _clock(run: RunRecord, rounds: np.ndarray) -> list[float]:
    """Return the simulated clock at the end of each evaluation round."""
    seconds = run.every_round(lambda line: line["seconds"])
    return [float(seconds[r - 1]) for r in rounds]


def _target(record: ExperimentRecord) -> float:
    """Return the late accuracy of the baseline, the target of the other methods; NaN without a baseline."""
    base = next((m for m in record.methods if m.name == record.experiment.baseline), None)
    if base is None or not base.runs:
        return math.nan
    return float(np.mean([mean_of_last(*run.accuracy(record.view), record.window) for run in base.runs]))


def _paired(record: ExperimentRecord, methods: list[MethodSummary]) -> list[Paired]:
    base = next((m for m in methods if m.name == record.experiment.baseline), None)
    if base is None:
        return []
    others = [method for method in methods if method is not base]
    return [Paired(m.name, base.name, Measure.of(list(m.minus(base, "accuracy").values()))) for m in others]


def judged(methods: list[MethodSummary], claim: Claim, units: Mapping[str, Unit] | None = None) -> Judged:
    """Return the verdict on a claim.

    It holds where the mean over seeds lies two standard errors or more beyond the bound, does not hold where it lies
    two or more short of it, and is not seen in between, from a single seed, or where a method was not judged.
    """
    by_seed = _claimed({method.name: method for method in methods}, claim)
    return _verdict(claim, by_seed, claim.versus is not None, units)


def across(summaries: list[Summary], claim: Claim, units: Mapping[str, Unit] | None = None) -> Judged:
    """Return the verdict on a claim about a part of a sweep, with every method at its chosen point of that part."""
    names = [summary.point for summary in summaries]
    found = []
    for part in (claim.at, claim.beyond):
        if part is not None:
            meant = set(matching(part, names))
            found.append(_claimed(_at_chosen([s for s in summaries if s.point in meant]), claim))
    if claim.beyond is None:
        return _verdict(claim, found[0], claim.versus is not None, units)
    here, there = found
    return _verdict(claim, {seed: here[seed] - there[seed] for seed in here if seed in there}, True, units)


def _at_chosen(summaries: list[Summary]) -> dict[str, MethodSummary]:
    """Return each method at its chosen point; empty for several points without a choice."""
    if len(summaries) == 1:
        return {method.name: method for method in summaries[0].methods}
    return {name: summary.method(name) for name, summary in chosen_points(summaries).items()}


def _verdict(claim: Claim, by_seed: Mapping[int, float], paired: bool, units: Mapping[str, Unit] | None) -> Judged:
    number = Measure.of(list(by_seed.values()) or [math.nan])
    side = -number.side(claim.bound) if claim.less else number.side(claim.bound)
    if claim.within is not None and number.mean is not None and number.error is not None:
        side = Measure(abs(number.mean - claim.bound), number.error, []).side(claim.within) * -1
    verdict: Verdict = "holds" if side > 0 else "does not hold" if side < 0 else "not seen"
    return Judged(claim.text, claim.measure, number, verdict, paired, (units or {}).get(claim.measure))


def _claimed(done: Mapping[str, MethodSummary], claim: Claim) -> dict[int, float]:
    """Return the number of each seed: the method's value, minus the other method's where the claim names one."""
    if claim.method not in done or (claim.versus is not None and claim.versus not in done):
        return {}
    ours = done[claim.method]
    return ours.by_seed(claim.measure) if claim.versus is None else ours.minus(done[claim.versus], claim.measure)


def chosen_points(summaries: list[Summary]) -> dict[str, Summary]:
    """Return for each method of a sweep the point with the best late validation accuracy; ties go to the first.

    Empty without a sweep or without validation rows.
    """
    if len(summaries) < 2:
        return {}
    out: dict[str, Summary] = {}
    for name in dict.fromkeys(method.name for summary in summaries for method in summary.methods):
        scored = [(s, _val(s, name)) for s in summaries]
        known = [(s, v) for s, v in scored if v is not None]
        if known:
            out[name] = max(known, key=lambda pair: pair[1])[0]
    return out


def _val(summary: Summary, name: str) -> float | None:
    found = [m for m in summary.methods if m.name == name]
    measure = found[0].measures.get("val_accuracy") if found else None
    return None if measure is None else measure.mean


def write_summary(path: Path, study: Study) -> None:
    """Write `summary.json`: the experiment, or every point of the sweep and the point chosen by each method."""
    if not study.swept:
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
