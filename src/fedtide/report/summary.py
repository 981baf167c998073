"""The summary: for each method, mean and standard error over seeds of every measure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedtide.config import Claim, axes, matching
from fedtide.core.atomic import write_text
from fedtide.core.errors import FedtideError
from fedtide.core.record import plain
from fedtide.data.rows import BASELINES
from fedtide.data.targets import TARGET_WORDS, TargetWords
from fedtide.evaluate.measure import UNKNOWN, Measure
from fedtide.evaluate.metrics import METRICS, Unit, mean_of_last, swing, time_to_accuracy, worst_point
from fedtide.evaluate.rounds import rows_in, score_in, weight_in
from fedtide.report.blends import blending, gains
from fedtide.report.clusters import clustering
from fedtide.report.drift import following
from fedtide.report.environment import is_nano
from fedtide.report.forgetting import local_forgetting, over_time
from fedtide.report.measures import ARRIVALS, BY_WAY
from fedtide.report.reading import Clock, ExperimentRecord, MethodRecord, RunRecord, Weigh, read_experiment, span_of
from fedtide.report.rhythm import learning
from fedtide.runs.folder import go_on, load

ALONE = "local"
"""Algorithm whose clients have no model but their own."""

OF_A_RUN = ("accuracy", "skill", "last", "best", "worst_point", "mean_over_rounds", "std_over_rounds", "loss")
"""Measures of predictions, equal at a seed only where all evaluations are."""


@dataclass(frozen=True)
class MethodSummary:
    """Measures of one method, by name.

    federation: the method whose models these are another use of, if they are. untrained: whether those on whom it is
    judged have a model that nobody has trained.
    """

    name: str
    algorithm: str
    seeds: list[int]
    unfinished: int
    measures: dict[str, Measure]
    federation: str = ""
    untrained: bool = False

    def measure(self, name: str) -> Measure:
        """Return a measure; one that is unknown where it was not measured."""
        return self.measures.get(name, UNKNOWN)

    def by_seed(self, name: str) -> dict[int, float]:
        """Return a measure of every seed; empty where it was not measured."""
        return dict(zip(self.seeds, self.measures[name].values, strict=True)) if name in self.measures else {}

    def minus(self, other: MethodSummary, name: str) -> dict[int, float]:
        """Return the measure minus that of another method, seed by seed.

        Of times until a target, nothing is known of a seed beyond the end of a run that never arrived: both times are
        cut there, so that the difference is at least what is returned.
        """
        ours, theirs = self.by_seed(name), other.by_seed(name)
        seeds = [seed for seed in ours if seed in theirs]
        if name in ARRIVALS:
            for seed in seeds:
                runs = ((self, ours), (other, theirs))
                ends = [times[seed] for run, times in runs if not run.by_seed(ARRIVALS[name])[seed]]
                ours[seed], theirs[seed] = (min([times[seed], *ends]) for times in (ours, theirs))
        return {seed: ours[seed] - theirs[seed] for seed in seeds}

    def against(self, other: MethodSummary, name: str) -> Measure:
        """Return the difference to the measure of another method over the seeds that both have."""
        return Measure.of(list(self.minus(other, name).values()))

    @property
    def score(self) -> str:
        """Name of its headline measure: the accuracy, or of numbers the skill."""
        return "skill" if "skill" in self.measures else "accuracy"

    @property
    def no_better(self) -> bool:
        """True if accuracy is not clearly above that of always answering the commonest class, which needs no training.

        From fewer than three seeds the mean decides. Of a method that is judged untrained it says nothing.
        """
        return not self.untrained and self.no_better_than("commonest_class")

    def no_better_than(self, name: str) -> bool:
        """Tell whether its score is not clearly above what another measure says that is had without training."""
        ours, floor = self.by_seed(self.score), self.by_seed(name)
        lead = Measure.of([ours[seed] - floor[seed] for seed in floor if seed in ours])
        return lead.mean is not None and (lead.mean <= 0 or lead.clarity(lead.mean) == "unclear")

    @property
    def known(self) -> dict[str, str]:
        """Names of the measures that say what baselines of time series get on the same rows, in words."""
        return {name: words for name, (_, words) in BASELINES.items() if name in self.measures}

    def same_run(self, other: MethodSummary) -> bool:
        """Tell whether two methods are one: what they predict is equal to the last digit at every seed of both."""
        seeds = set(self.seeds) & set(other.seeds)
        mine, others = ({name: m.by_seed(name) for name in OF_A_RUN if name in m.measures} for m in (self, other))
        return (
            bool(seeds) and self.score in mine and mine.keys() == others.keys()
            and all(mine[name][seed] == others[name][seed] for name in mine for seed in seeds)
        )  # fmt: skip


@dataclass(frozen=True)
class Paired:
    """Difference of a method's late accuracy to the baseline's, seed by seed; `same_run` where the two are one."""

    name: str
    baseline: str
    difference: Measure
    same_run: bool = False


Verdict = Literal["holds", "does not hold", "not seen", "too few seeds", "the same run"]


@dataclass(frozen=True)
class Judged:
    """A claim with its number (over seeds) and its verdict.

    unit: that of a person's own metric, or of a time; None where the name of the measure says it. reached: where it is
    a time that some seed never reaches, the seeds that do, of each method.
    """

    claim: str
    measure: str
    number: Measure
    verdict: Verdict
    paired: bool
    unit: Unit | None = None
    reached: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """Summary of one experiment, or of one point of a sweep.

    metrics: what is measured beside, with their units. clock: what times are in. target: words for what rows
    are labeled with.
    """

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
    clock: Clock = "seconds"
    target: TargetWords = TARGET_WORDS["classes"]

    @property
    def units(self) -> dict[str, Unit]:
        """Units of measures whose name does not say them."""
        return {**self.metrics, "time_to_accuracy": self.clock, "time_to_target": self.clock}

    @property
    def score(self) -> str:
        """Name of the headline measure."""
        return self.target.score

    @property
    def span(self) -> str:
        """Rounds over which late means are taken, in words."""
        stops = any("rounds_to_target" in method.measures for method in self.methods)
        return span_of(self.window, self.rounds, stops=stops)

    @property
    def at_floor(self) -> str | None:
        """Name of the first method that is no better than always answering the commonest class; None where all are."""
        return next((method.name for method in self.methods if method.no_better), None)

    @property
    def floor(self) -> Measure | None:
        """Accuracy of always answering the commonest class, where a method is no better; None where all are."""
        return None if self.at_floor is None else self.method(self.at_floor).measures["commonest_class"]

    @property
    def clustered(self) -> list[str]:
        """Names of the methods that have clusters of clients."""
        return [method.name for method in self.methods if "churn" in method.measures]

    def method(self, name: str) -> MethodSummary:
        """Return the summary of one method."""
        return next(m for m in self.methods if m.name == name)


@dataclass(frozen=True)
class Study:
    """Content of a run folder: record and summary of each point of its sweep, and conclusions from all of them.

    chosen: for each method the point with the best late validation accuracy; ties go to the first. Empty without a
    sweep or without validation rows. claims: those about several points, or one of them. axes: the swept keys and their
    values; the points are their product, in order. nano: true for the scale at which numbers mean nothing. root: the
    folder.
    """

    records: list[ExperimentRecord]
    summaries: list[Summary]
    chosen: dict[str, Summary]
    claims: list[Judged]
    swept: bool
    axes: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    nano: bool = False
    root: Path = Path()


def names_of(roots: Sequence[Path]) -> list[str]:
    """Return what folders are called; those of one name by the folder that they are in, too.

    >>> names_of([Path("/a/study"), Path("/b/study"), Path("/b/other")])
    ['a/study', 'b/study', 'other']
    """
    whole = [root.resolve() for root in roots]
    names = [root.name for root in whole]
    return [f"{root.parent.name}/{root.name}" if names.count(root.name) > 1 else root.name for root in whole]


def read_study(root: Path) -> Study:
    """Read a run folder and summarize all of it."""
    records = read_experiment(root)
    experiment = load(root, imports=False)
    title = experiment.title or root.resolve().name
    summaries = [replace(summarize(record), title=title) for record in records]
    swept = bool(experiment.sweep)
    claims = [across(summaries, claim) for claim in experiment.claim if swept and claim.at is not None]
    return Study(records, summaries, chosen_points(summaries), claims, swept, axes(experiment), is_nano(root), root)


def read_finished(root: Path) -> Study:
    """Read a run folder in which a run is finished.

    Raises:
        FedtideError: none is.
    """
    study = read_study(root)
    if not any(summary.methods for summary in study.summaries):
        raise FedtideError(f"{root}: no run is finished yet; go on with: {go_on(root)}")
    return study


def summarize(record: ExperimentRecord) -> Summary:
    """Compute the summary of one experiment from its record files."""
    done = [method for method in record.methods if method.runs]
    targets, new = _targets(record), record.view == "held_out_clients"
    methods = [
        MethodSummary(
            method.name,
            method.method.algorithm,
            [run.seed for run in method.runs],
            method.unfinished,
            _measures(record, method, targets),
            method.federation,
            method.method.algorithm == ALONE and new and not record.experiment.data.held_out_clients.labeled,
        )
        for method in done
    ]
    experiment, own = record.experiment, record.experiment.metric_units
    made = Summary(
        experiment.title, record.point, experiment.rounds, record.view, record.window, record.period, record.groups,
        methods, _paired(record, methods), metrics=own, clock=record.clock,
        target=TARGET_WORDS[experiment.data.target.kind],
    )  # fmt: skip
    return replace(made, claims=[judged(methods, claim, made.units) for claim in experiment.claim])


def _measures(record: ExperimentRecord, method: MethodRecord, targets: Mapping[int, float]) -> dict[str, Measure]:
    per_run = [
        _of_run(record, run, targets.get(run.seed, math.nan))
        | local_forgetting(run)
        | (over_time(record, run) if method.shifted else {})
        | blending(run, record.window)
        | gains(run, record.view, method.cycles)
        | following(run, record.view)
        | learning(run)
        for run in method.runs
    ]
    names = dict.fromkeys(name for values in per_run for name in values)
    return {name: Measure.of([values.get(name, math.nan) for values in per_run]) for name in names}


def _of_run(record: ExperimentRecord, run: RunRecord, target: float) -> dict[str, float]:
    """Return every measure of one run. Accuracies are shares (0 to 1), times seconds, costs bytes."""
    score, (rounds, accuracy) = record.experiment.score, run.accuracy(record.view)
    scored = [line["scores"][record.view] for line in run.judged if record.view in line["scores"]]
    without = [score_in(scores) is None for scores in scored]
    costs = {name: run.total(name) for name in ("down", "up", "answered", "refused")}
    costs |= {"diverged": float(sum(without)), **on_the_clock(record, run), **_losses(run)}
    costs |= {"seconds": run.seconds("seconds"), "evaluation_seconds": run.seconds("evaluation")}
    if not without or without[-1]:  # a mean over the evaluations before would be that of another model
        return {score: math.nan, **costs}
    window = record.window

    def late(curve: tuple[np.ndarray, np.ndarray], view: str = record.view, weigh: Weigh = weight_in) -> float:
        return mean_of_last(*curve, window, run.counts_for(view, curve[0], weigh))

    course = run.course(record.view)[1]
    out = costs | {
        score: late((rounds, accuracy)),
        "last": float(course[-1]),
        "best": float(course.max()),
        "worst_point": worst_point(rounds, course, window),
        "mean_over_rounds": mean_of_last(rounds, accuracy, len(run.lines), run.counts_for(record.view, rounds)),
        "std_over_rounds": float(course.std()),
    }
    if record.period:
        out["swing"] = swing(rounds, accuracy, record.period, window)
    for group in record.groups:
        at, values = run.accuracy(record.view, group)
        out[f"{score}_{group}"] = late((at, values))
        if record.period:
            out[f"swing_{group}"] = swing(at, values, record.period, window)
    for metric in METRICS[1:]:
        curve = run.curve(record.view, itemgetter(metric.name))
        out[metric.name] = late(curve, weigh=weight_in if metric.unit == "share" else rows_in)
    for name in record.experiment.metric_units:
        out[name] = late(run.curve(record.view, itemgetter(name)), weigh=rows_in)
    at, variance = run.curve(record.view, itemgetter("client_variance"))
    out["client_std"] = late((at, np.sqrt(variance)), weigh=rows_in)
    at, right = run.branches(record.view)
    mixed = any(scores.get("weights", {}).get("own") for line in run.judged for scores in line["scores"].values())
    if len(record.groups) > 1 and len(at) and not mixed:  # a client's own expert belongs to no group
        out["branch_accuracy"] = late((at, right), weigh=rows_in)
    commonest = run.commonest(record.view)
    if len(commonest[0]):
        out["commonest_class"] = late(commonest)
    for name in BASELINES:
        known = run.baseline(record.view, name)
        if len(known[0]):
            out[name] = late(known)
    own = run.curve(record.view, lambda scores: scores.get("weights", {}).get("own"))
    if len(own[0]):
        out["own_weight"] = late(own, weigh=rows_in)
    for way in ways(run, record.view):
        out[f"{BY_WAY}{way}"] = late(run.other_way(record.view, way))
    out |= clustering(run, record.clustered, record.groups, len(run.lines) - window)
    val = run.accuracy("val")
    if len(val[0]):
        out[f"val_{score}"] = late(val, "val")
    times = run.times(record.clock)
    if not math.isnan(target):
        first = time_to_accuracy(times[rounds - 1], course, target)
        out |= {"time_to_accuracy": min(first, times[-1]), "reached_accuracy": float(math.isfinite(first))}
    out |= _to_target(record, run, rounds)
    return out


def _losses(run: RunRecord) -> dict[str, float]:
    """Return the first and the highest training loss of a round's median participant; {} where none is told."""
    told = [line["client_loss"]["q50"] for line in run.lines if "client_loss" in line]
    known = [loss for loss in told if loss is not None]
    return {"first_loss": known[0], "peak_loss": max(known)} if known else {}


def on_the_clock(record: ExperimentRecord, run: RunRecord) -> dict[str, float]:
    """Return the simulated duration where there is a clock, and the clients asked to train and counted in a round."""
    out = {"simulated_seconds": float(run.lines[-1]["seconds"])} if record.clock == "seconds" else {}
    told = [line["trained"] for line in run.lines if "trained" in line]
    asked, counted = (sum(each) for each in zip(*told, strict=True)) if told else (0, 0)
    if asked:
        out |= {"asked_to_train": asked / len(told), "counted_in_a_round": counted / len(told)}
        out["counted"] = counted / asked
    return out


def _to_target(record: ExperimentRecord, run: RunRecord, rounds: np.ndarray) -> dict[str, float]:
    """Return rounds and time until the target, the end of a run that never reaches it; empty without a target.

    Where the target needs several evaluations in a row, the first of them counts.
    """
    if record.experiment.stop_at is None:
        return {}
    end = len(run.lines) if run.target is None else int(rounds[len(rounds) - run.target[1]])
    time = float(run.times(record.clock)[end - 1])
    return {"rounds_to_target": float(end), "time_to_target": time, "reached_target": float(run.target is not None)}


def ways(run: RunRecord, view: str) -> list[str]:
    """Return the other ways to combine a method's models that were judged, in order of appearance."""
    found = (line["scores"].get(view, {}).get("others", {}) for line in run.judged)
    return list(dict.fromkeys(way for others in found for way in others))


def _targets(record: ExperimentRecord) -> dict[int, float]:
    """Return for each seed the accuracy at which the baseline ends, the target of all methods; empty without one."""
    base = next((m for m in record.methods if m.name == record.experiment.baseline), None)
    curves = {} if base is None else {run.seed: run.course(record.view)[1] for run in base.runs}
    return {seed: float(course[-1]) for seed, course in curves.items() if len(course)}


def _paired(record: ExperimentRecord, methods: list[MethodSummary]) -> list[Paired]:
    base = next((m for m in methods if m.name == record.experiment.baseline), None)
    if base is None:
        return []
    others = [method for method in methods if method is not base]
    return [Paired(m.name, base.name, m.against(base, m.score), m.same_run(base)) for m in others]


def judged(methods: list[MethodSummary], claim: Claim, units: Mapping[str, Unit] | None = None) -> Judged:
    """Return the verdict on a claim.

    It holds where the 95 % confidence interval of the mean over seeds (Student's t) lies beyond the bound, does not
    hold where it lies short of it, and is not seen in between or where a method was not judged. Seeds may be too few to
    tell (`Measure.clarity`), and two methods may be the same run.
    """
    return _verdict(claim, _claimed({method.name: method for method in methods}, claim), units)


def across(summaries: list[Summary], claim: Claim) -> Judged:
    """Return the verdict on a claim about a part of a sweep, with every method at its chosen point of that part."""
    names = [summary.point for summary in summaries]
    found = []
    for part in (claim.at, claim.beyond):
        if part is not None:
            meant = set(matching(part, names))
            found.append(_claimed(_at_chosen([s for s in summaries if s.point in meant]), claim))
    here, *there = found
    if there:
        beyond = there[0]
        difference = {
            seed: here.by_seed[seed] - beyond.by_seed[seed] for seed in here.by_seed if seed in beyond.by_seed
        }
        reached = [*here.reached, *beyond.reached]
        here = _Claimed(difference, True, here.same_run and beyond.same_run, reached, here.open or beyond.open)
    return _verdict(claim, here, summaries[0].units)


def _at_chosen(summaries: list[Summary]) -> dict[str, MethodSummary]:
    """Return each method at its chosen point; empty for several points without a choice."""
    if len(summaries) == 1:
        return {method.name: method for method in summaries[0].methods}
    return {name: summary.method(name) for name, summary in chosen_points(summaries).items()}


@dataclass(frozen=True)
class _Claimed:
    """What a claim is about: the number of each seed, whether it is a difference, and of two methods that are one.

    open: tells that a seed, of a run that ended too early, may speak against the claim by more than its number.
    """

    by_seed: dict[int, float]
    paired: bool
    same_run: bool
    reached: list[int]
    open: bool = False


def _verdict(claim: Claim, found: _Claimed, units: Mapping[str, Unit] | None) -> Judged:
    number = Measure.of(list(found.by_seed.values()) or [math.nan])
    unit = (units or {}).get(claim.measured)
    return Judged(claim.text, claim.measured, number, _said(claim, number, found), found.paired, unit, found.reached)


def _said(claim: Claim, number: Measure, found: _Claimed) -> Verdict:
    if number.mean is None:
        return "not seen"
    gap = claim.gap(number.mean)
    clarity = number.clarity(gap)
    if found.same_run and not (clarity == "clear" and gap > 0):
        return "the same run"
    if clarity == "clear" and gap > 0:
        return "not seen" if found.open else "holds"
    if clarity == "clear":
        return "does not hold"
    return "not seen" if clarity == "unclear" else clarity


def _claimed(done: Mapping[str, MethodSummary], claim: Claim) -> _Claimed:
    """Return the number of each seed: the method's value, minus the other method's where the claim names one.

    A time that a seed did not reach in its run is no evidence that it is short: without a second method, a claim that
    it is has no number for this seed.
    """
    rivals = [done[name] for name in claim.rivals if name in done]
    paired = bool(claim.rivals)
    methods = [done[claim.method], *_best(rivals, claim)] if claim.method in done else []
    if len(methods) < 1 + paired or len(rivals) < len(claim.rivals):
        return _Claimed({}, paired, False, [])
    arrived = [m.by_seed(ARRIVALS[claim.measured]) for m in methods] if claim.measured in ARRIVALS else []
    short = any(not all(seeds.values()) for seeds in arrived)
    reached = [int(sum(seeds.values())) for seeds in arrived] if short else []
    ours = methods[0]
    if paired:
        by_seed, same = ours.minus(methods[1], claim.measured), ours.same_run(methods[1])
        return _Claimed(by_seed, True, same, reached, short and _is_open(claim, *arrived))
    by_seed = ours.by_seed(claim.measured)
    if short and (claim.below or claim.within is not None):
        by_seed = {seed: value if arrived[0][seed] else math.inf for seed, value in by_seed.items()}
    return _Claimed(by_seed, False, False, reached)


def _is_open(claim: Claim, ours: Mapping[int, float], theirs: Mapping[int, float]) -> bool:
    """Tell whether at some seed only that method arrived which by the claim arrives later."""
    if claim.within is not None:
        return any(ours[seed] != theirs[seed] for seed in ours if seed in theirs)
    sooner, later = (ours, theirs) if claim.below else (theirs, ours)
    return any(later[seed] and not sooner[seed] for seed in later if seed in sooner)


def _best(rivals: list[MethodSummary], claim: Claim) -> list[MethodSummary]:
    """Return a list of the rival of highest mean, or of the lowest; the first of equal ones, none of unknown means."""
    known = [rival for rival in rivals if rival.measure(claim.measured).mean is not None]
    sign = -1.0 if claim.below else 1.0
    return [max(known, key=lambda rival: sign * (rival.measures[claim.measured].mean or 0.0))] if known else rivals[:1]


def chosen_points(summaries: list[Summary]) -> dict[str, Summary]:
    """Return for each method of a sweep the point with the best late validation accuracy; ties go to the first.

    Other uses of a method's models are at its point, as they are of one federation. Empty without a sweep or without
    validation rows.
    """
    if len(summaries) < 2:
        return {}
    out: dict[str, Summary] = {}
    for name in dict.fromkeys(method.name for summary in summaries for method in summary.methods):
        trained = [(s, s.method(m.federation or name)) for s in summaries for m in s.methods if m.name == name]
        scored = [(s, m.measure(f"val_{m.score}").mean) for s, m in trained]
        known = [(s, v) for s, v in scored if v is not None]
        if known:
            out[name] = max(known, key=lambda pair: pair[1])[0]
    return out


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
    write_text(path, json.dumps(plain(content), indent=1) + "\n")
