"""Begin of a page about several run folders: all of their methods, and differences between folders, seed by seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedtide.draw.prose import listed
from fedtide.report import figures, tables
from fedtide.report.measures import difference
from fedtide.report.reading import ExperimentRecord
from fedtide.report.render import Part, Picture, swatch, to_pictures
from fedtide.report.summary import MethodSummary, Paired, Summary
from fedtide.report.tables import Table

DIFFERENCES = {"worst point": "worst_point", "swing": "swing"}
"""Further columns of differences between folders, and their measures."""


@dataclass(frozen=True)
class Shown:
    """An experiment or a point of a sweep on the page: the number of its folder, and what the page calls it."""

    folder: int
    name: str
    record: ExperimentRecord
    summary: Summary


@dataclass(frozen=True)
class Together:
    """Begin of a page about several folders: their methods in tables and one picture."""

    pictures: list[Picture]
    parts: list[Part]


def together(shown: Sequence[Shown]) -> Together:
    """Return the begin of a page about these."""
    numbers = range(sum(len(each.summary.methods) for each in shown))
    about = "Means over the evaluations of the rounds that the second column names, ± one standard error over seeds."
    said = [each.record.experiment.model_dump() for each in shown]
    apart = [key for key in ("data", "shift", "model", "rounds", "seeds") if any(e[key] != said[0][key] for e in said)]
    about += f" The experiments differ in {listed(apart)}: what is equal can be compared." if apart else ""
    table = tables.methods_of_all([(each.name, each.summary) for each in shown])
    score = " or ".join(sorted({each.summary.score for each in shown}))
    picture = (
        f"{score.capitalize()} of all methods",
        f"{score.capitalize()} over rounds, means over seeds with a band of one standard error.",
        figures.accuracy_of_all([(each.name, each.record) for each in shown]),
    )  # fmt: skip
    marks = [swatch(figures.look(number)) for number in numbers]
    parts = [Part("All methods", table, about, "all-methods", marks)]
    pairs = list(paired(shown))
    if pairs:
        known = [name for name in DIFFERENCES if any(DIFFERENCES[name] in ours.measures for _, ours, *_ in pairs)]
        rows = [_row(pair, [DIFFERENCES[name] for name in known]) for pair in pairs]
        table = Table(["method", "against", "which seeds", score, *known], rows)
        parts.append(
            Part("Differences between folders", table, ABOUT.format(score=score), "differences-between-folders")
        )
    return Together(to_pictures([picture]), parts)


ABOUT = (
    "The later folder minus the first one, over the seeds that both have, seed by seed ± one standard error: a method "
    "against the one of its name, else against the baseline of the first folder, or its first method. ▲ and ▼ are "
    "clearly higher and lower {score}, by 95 % confidence intervals (Student's t), ≈ is no clear difference, ? too "
    "few seeds to tell, = the same run, to the last digit. Seeds deal rows and draw arrivals alike where data and "
    "shift are equal; else a pair is two runs like any others."
)


Pair = tuple[Shown, MethodSummary, Shown, MethodSummary]
"""A method of a later folder, and what it is compared with in the first."""


def paired(shown: Sequence[Shown]) -> Iterator[Pair]:
    """Yield each method of the later folders with what it is compared with in the first: at the same point, if any."""
    first = [each for each in shown if each.folder == shown[0].folder]
    for each in shown[len(first) :]:
        same = next((one for one in first if one.record.point == each.record.point), first[0])
        known = {method.name: method for method in same.summary.methods}
        baseline = same.summary.paired[0].baseline if same.summary.paired else next(iter(known))
        for method in each.summary.methods:
            yield each, method, same, known.get(method.name, known[baseline])


def _row(pair: Pair, measures: Sequence[str]) -> list[str]:
    later, ours, first, theirs = pair
    common = ", ".join(str(seed) for seed in ours.seeds if seed in theirs.seeds)
    found = Paired(ours.name, theirs.name, ours.against(theirs, ours.score), ours.same_run(theirs))
    by_measure = (
        difference(name, ours.against(theirs, name), tables.format_of(name)) for name in (ours.score, *measures)
    )
    sign = f"{tables.sign(found)} " if found.difference.mean is not None else ""
    names = f"{later.name}: {ours.name}", f"{first.name}: {theirs.name}"
    return [*names, common or "none in common", sign + next(by_measure), *by_measure]
