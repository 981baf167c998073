"""The beginning of a page about several run folders: all methods, and differences between folders at each seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedtide.draw.figures import look
from fedtide.draw.html import Part, Picture, swatch, to_pictures
from fedtide.draw.prose import listed
from fedtide.draw.tables import Table
from fedtide.report.accuracy import SCORES, SIGNS, WORST_POINT, accuracy_of_all, sign
from fedtide.report.costs import REFUSED
from fedtide.report.formats import Number, difference, percent
from fedtide.report.periods import SWING
from fedtide.report.run_records import ExperimentRecord
from fedtide.report.summary import MethodSummary, Paired, Summary
from fedtide.report.topics import number_of

COLUMNS = (*SCORES, WORST_POINT, SWING, Number("worst_decile", percent, "worst tenth of clients"), REFUSED)


@dataclass(frozen=True)
class Point:
    """An experiment or a point of a sweep on the page: the number of its folder, and its name on the page."""

    folder: int
    name: str
    record: ExperimentRecord
    summary: Summary


@dataclass(frozen=True)
class Comparison:
    """Methods of several folders in tables and one picture."""

    pictures: list[Picture]
    parts: list[Part]


Pair = tuple[Point, MethodSummary, Point, MethodSummary]
"""A method of a later folder, and its counterpart in the first folder."""


def compare(points: Sequence[Point]) -> Comparison:
    """Return the beginning of a page about these points of several folders."""
    settings = [point.record.experiment.model_dump() for point in points]
    keys = [k for k in ("data", "shift", "model", "rounds", "seeds") if any(s[k] != settings[0][k] for s in settings)]
    differ = f" The experiments differ in {listed(keys)}." if keys else ""
    score = " or ".join(sorted({point.summary.score for point in points}))
    picture = (
        f"{score.capitalize()} of all methods",
        f"{score.capitalize()} over rounds, means over seeds with a band of one standard error.",
        accuracy_of_all([(point.name, point.record) for point in points]),
    )
    marks = [swatch(look(number)) for number in range(sum(len(point.summary.methods) for point in points))]
    caption = f"Means ± one standard error over seeds.{differ}"
    parts = [Part("All methods", methods_of_all(points), caption, "all-methods", marks)]
    pairs = list(paired(points))
    if pairs:
        extra = [n for n in (WORST_POINT, SWING) if any(n.name in ours.measures for _, ours, *_ in pairs)]
        rows = [_row(pair, extra) for pair in pairs]
        table = Table(["method", "against", "which seeds", score, *(number.title for number in extra)], rows)
        words = ", ".join(f"{mark} {word.format('the other')}" for mark, word in SIGNS.items())
        caption = f"The later folder minus the first one at each common seed ± one standard error: {words}."
        parts.append(Part("Differences between folders", table, caption, "differences-between-folders"))
    return Comparison(to_pictures([picture]), parts)


def methods_of_all(points: Sequence[Point]) -> Table:
    """Build the table of all methods, whose late means may cover other rounds."""
    methods = [(point, method) for point in points for method in point.summary.methods]
    columns = [number for number in COLUMNS if any(number.name in method.measures for _, method in methods)]
    rows = [
        [
            f"{point.name}: {method.name}",
            point.summary.span,
            *(column.written(method.measure(column.name)) for column in columns),
        ]
        for point, method in methods
    ]
    return Table(["method", "averaged over", *(column.title for column in columns)], rows)


def paired(points: Sequence[Point]) -> Iterator[Pair]:
    """Yield each method of the later folders with its counterpart in the first folder, at the same point if any.

    The counterpart has the same name, else it is the baseline, else the first method.
    """
    first = [point for point in points if point.folder == points[0].folder]
    for point in points[len(first) :]:
        other = next((candidate for candidate in first if candidate.record.point == point.record.point), first[0])
        methods = {method.name: method for method in other.summary.methods}
        baseline = other.summary.paired[0].baseline if other.summary.paired else next(iter(methods))
        for method in point.summary.methods:
            yield point, method, other, methods.get(method.name, methods[baseline])


def _row(pair: Pair, numbers: Sequence[Number]) -> list[str]:
    later, ours, first, theirs = pair
    common = ", ".join(str(seed) for seed in ours.seeds if seed in theirs.seeds)
    gap = Paired(ours.name, theirs.name, ours.against(theirs, ours.score), ours.same_run(theirs))
    mark = f"{sign(gap)} " if gap.difference.mean is not None else ""
    cells = [difference(ours.against(theirs, n.name), n.written) for n in (number_of(ours.score), *numbers)]
    names = f"{later.name}: {ours.name}", f"{first.name}: {theirs.name}"
    return [*names, common or "none in common", mark + cells[0], *cells[1:]]
