"""Values of a summary: measures over seeds of every method, differences, judged claims."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedtide.data.targets import TARGET_WORDS, TargetWords
from fedtide.evaluate.metrics import UNKNOWN, Measure, Unit
from fedtide.report.lead import gap
from fedtide.report.run_records import Clock, ExperimentRecord, span_of

OF_A_RUN = ("accuracy", "skill", "last", "best", "worst_point", "mean_over_rounds", "std_over_rounds", "loss")
"""Measures of predictions, equal at a seed only where all evaluations are."""


NO_SCORES = "no scores: the study is private"
"""What a report says in place of accuracies that nodes of a private study do not tell."""


@dataclass(frozen=True)
class MethodSummary:
    """Measures of one method, by name.

    federation: the method that trained its models, if this is another use of them. untrained: true if nobody trained
    the models of the judged clients. refusals: of real clients, the number of refused answers by reason.
    rows_judged: of real clients, the rows of each evaluation.
    """

    name: str
    algorithm: str
    seeds: list[int]
    unfinished: int
    measures: dict[str, Measure]
    federation: str = ""
    untrained: bool = False
    refusals: dict[str, int] = field(default_factory=dict)
    rows_judged: tuple[int, ...] = ()

    def measure(self, name: str) -> Measure:
        """Return a measure, or an unknown one."""
        return self.measures.get(name, UNKNOWN)

    def by_seed(self, name: str) -> dict[int, float]:
        """Return the values of a measure by seed; empty if it was not measured."""
        return dict(zip(self.seeds, self.measures[name].values, strict=True)) if name in self.measures else {}

    def minus(self, other: "MethodSummary", name: str, reached: str = "") -> dict[int, float]:
        """Return the measure minus the one of another method, seed by seed.

        Args:
            name: name of the measure.
            reached: of a time until a target, the measure that is 1 if the seed arrives. Both times are cut at the end
                of a run that never arrives, so that the difference is a lower bound.
        """
        ours, theirs = self.by_seed(name), other.by_seed(name)
        seeds = [seed for seed in ours if seed in theirs]
        for seed in seeds if reached else ():
            runs = ((self, ours), (other, theirs))
            ends = [times[seed] for run, times in runs if not run.by_seed(reached)[seed]]
            ours[seed], theirs[seed] = (min([times[seed], *ends]) for times in (ours, theirs))
        return {seed: ours[seed] - theirs[seed] for seed in seeds}

    def against(self, other: "MethodSummary", name: str) -> Measure:
        """Return the difference to the measure of another method over the seeds of both."""
        return gap(self.by_seed(name), other.by_seed(name))

    @property
    def score(self) -> str:
        """Name of its headline measure: accuracy, or skill if rows are labeled with numbers."""
        return "skill" if "skill" in self.measures else "accuracy"

    @property
    def withheld(self) -> bool:
        """True if it has no scores and the study is private, so that nodes do not tell them."""
        unknown = self.measure(self.score).mean is None and not any(self.measure("diverged").values)
        return "epsilon" in self.measures and unknown

    @property
    def no_better(self) -> bool:
        """True if accuracy is not clearly above the one of always answering the commonest class.

        With fewer than three seeds the mean decides. False for a method that is judged untrained.
        """
        return not self.untrained and gap(self.by_seed(self.score), self.by_seed("commonest_class")).level

    def same_run(self, other: "MethodSummary") -> bool:
        """Tell whether two methods are the same run: their predictions are equal at every seed of both."""
        seeds = set(self.seeds) & set(other.seeds)
        mine, others = ({name: m.by_seed(name) for name in OF_A_RUN if name in m.measures} for m in (self, other))
        return (
            bool(seeds) and self.score in mine and mine.keys() == others.keys()
            and all(mine[name][seed] == others[name][seed] for name in mine for seed in seeds)
        )  # fmt: skip


@dataclass(frozen=True)
class Paired:
    """Difference of late accuracy to the baseline, seed by seed; `same_run` if the two are the same run."""

    name: str
    baseline: str
    difference: Measure
    same_run: bool = False


Verdict = Literal["holds", "does not hold", "not seen", "too few seeds", "the same run", ""]
"""Verdict on a claim; "" at the scale nano, whose numbers mean nothing."""


@dataclass(frozen=True)
class Judged:
    """A claim with its number (over seeds) and its verdict.

    Args:
        claim: text of the claim.
        measure: name of the measure.
        number: its number over seeds.
        verdict: its verdict.
        paired: true for a difference of two methods.
        unit: unit of an own metric or of a time; None if the name of the measure determines it.
        reached: for a time until a target, the number of seeds of each method that arrive; empty if all arrive.
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

    metrics: further metrics of the experiment, with their units. clock: unit of times. target: words for the labels.
    references: answers without a federation, whose `algorithm` is the name of their measure.
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
    references: list[MethodSummary] = field(default_factory=list)

    @property
    def units(self) -> dict[str, Unit]:
        """Units of measures whose name does not determine them."""
        return {**self.metrics, "time_to_accuracy": self.clock, "time_to_target": self.clock}

    @property
    def score(self) -> str:
        """Name of the headline measure."""
        return self.target.score

    @property
    def span(self) -> str:
        """Rounds of the late means in words."""
        stops = any("rounds_to_target" in method.measures for method in self.methods)
        return span_of(self.window, self.rounds, stops=stops)

    @property
    def late(self) -> str:
        """Rounds of the late numbers with a preposition: "over" several, or "in" the last one alone."""
        return f"{'over' if self.window > 1 else 'in'} {self.span}"

    def references_of(self, method: MethodSummary) -> dict[str, dict[int, float]]:
        """Return the scores of references by their words and seed, on the rows of a method if it has them itself."""
        return {m.name: method.by_seed(m.algorithm) or m.by_seed(self.score) for m in self.references}

    def method(self, name: str) -> MethodSummary:
        """Return the summary of one method."""
        return next(m for m in self.methods if m.name == name)


@dataclass(frozen=True)
class Study:
    """Content of a run folder: record and summary of each point of its sweep, and conclusions from all of them.

    Args:
        records: record of each point.
        summaries: summary of each point.
        chosen: point of each method with the best late validation accuracy; empty without a sweep of methods' keys.
        claims: claims about parts of the sweep.
        swept: true for a sweep.
        axes: swept keys and their values; points are their product, in order.
        nano: true at the scale whose numbers mean nothing.
        root: the folder.
        choice: true for a sweep of methods' keys alone, in which each method has a point that is its best.
    """

    records: list[ExperimentRecord]
    summaries: list[Summary]
    chosen: dict[str, Summary]
    claims: list[Judged]
    swept: bool
    axes: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    nano: bool = False
    root: Path = Path()
    choice: bool = False

    @property
    def unchosen(self) -> str:
        """The reason why no method chose a point; "" if one did, or if there is nothing to choose."""
        lack = "no point was chosen, because no method has a score on validation rows (data.split.val, eval_splits)"
        return lack if self.choice and len(self.summaries) > 1 and not self.chosen else ""
