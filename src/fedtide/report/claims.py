"""Claims of an experiment: the number of each seed, the verdict, and their table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedtide.config import Claim, matching
from fedtide.draw.prose import listed
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import Measure, Unit
from fedtide.report.formats import difference
from fedtide.report.summary import Judged, MethodSummary, Summary, Verdict
from fedtide.report.topics import number_of


@dataclass(frozen=True)
class _Evidence:
    """Evidence for a claim.

    Args:
        by_seed: the number of each seed.
        paired: true for a difference of two methods.
        same_run: true if these methods are the same run.
        reached: number of seeds of each method that arrive, if some do not.
        lower: true if the number may be lower than it seems, because a run ended too early.
        higher: true if it may be higher.
    """

    by_seed: dict[int, float]
    paired: bool
    same_run: bool = False
    reached: Sequence[int] = ()
    lower: bool = False
    higher: bool = False


def judge(methods: Sequence[MethodSummary], claim: Claim, units: Mapping[str, Unit] | None = None) -> Judged:
    """Return the verdict on a claim.

    A claim holds if the 95 % confidence interval of the mean over seeds (Student's t) lies beyond the bound. It does
    not hold if the interval lies short of the bound. Else, or if a method was not judged, it is not seen. It is not
    seen either if a run that ended before it arrived may change the verdict. Seeds may be too few to tell
    (`Measure.clarity`), and two methods may be the same run.
    """
    return _verdict(claim, _evidence({method.name: method for method in methods}, claim), units)


def judge_sweep(summaries: Sequence[Summary], claim: Claim) -> Judged:
    """Return the verdict on a claim about a part of a sweep, with every method at its chosen point of that part."""
    names = [summary.point for summary in summaries]
    points = [matching(part, names) for part in (claim.at, claim.beyond) if part is not None]
    parts = [[summary for summary in summaries if summary.point in part] for part in points]
    evidence, *others = (_evidence(_at_chosen(part), claim) for part in parts)
    if len({s.units.get(claim.measured) for part in parts for s in part} - {None}) > 1:
        evidence = _Evidence({}, evidence.paired or bool(others))  # seconds and rounds have no difference and no mean
    elif others:
        beyond = others[0]
        gaps = {s: value - beyond.by_seed[s] for s, value in evidence.by_seed.items() if s in beyond.by_seed}
        reached = [*evidence.reached, *beyond.reached]
        # The difference is lower where its second side is higher.
        lower, higher = evidence.lower or beyond.higher, evidence.higher or beyond.lower
        evidence = _Evidence(gaps, True, evidence.same_run and beyond.same_run, reached, lower, higher)
    return _verdict(claim, evidence, parts[0][0].units)


def _at_chosen(summaries: list[Summary]) -> dict[str, MethodSummary]:
    """Return each method at its chosen point; empty for several points without a choice."""
    if len(summaries) == 1:
        return {method.name: method for method in summaries[0].methods}
    return {name: summary.method(name) for name, summary in chosen_points(summaries).items()}


def chosen_points(summaries: Sequence[Summary]) -> dict[str, Summary]:
    """Return for each method of a sweep the point with the best late validation accuracy; ties go to the first.

    Other uses of a method's models are at the point of that method. Empty without a sweep or validation rows.
    """
    if len(summaries) < 2:
        return {}
    out: dict[str, Summary] = {}
    for name in dict.fromkeys(method.name for summary in summaries for method in summary.methods):
        trained = [(s, s.method(m.federation or name)) for s in summaries for m in s.methods if m.name == name]
        scores = [(s, m.measure(f"val_{m.score}").mean) for s, m in trained]
        finite = [(s, score) for s, score in scores if score is not None]
        if finite:
            out[name] = max(finite, key=lambda pair: pair[1])[0]
    return out


def _verdict(claim: Claim, evidence: _Evidence, units: Mapping[str, Unit] | None) -> Judged:
    measure = Measure.of(list(evidence.by_seed.values()) or [math.nan])
    unit, reached = (units or {}).get(claim.measured), list(evidence.reached)
    return Judged(claim.text, claim.measured, measure, _judge(claim, measure, evidence), evidence.paired, unit, reached)


def _judge(claim: Claim, measure: Measure, evidence: _Evidence) -> Verdict:
    if measure.mean is None:
        return "not seen"
    gap = claim.gap(measure.mean)
    clarity = measure.clarity(gap)
    # A number that can move only away from the bound keeps its verdict; one `within` can move out on either side.
    open_ = evidence.lower if measure.mean > claim.bound else evidence.higher
    if claim.within is not None and gap > 0:
        open_ = evidence.lower or evidence.higher
    if clarity == "clear" and gap > 0 and not open_:
        return "holds"
    if evidence.same_run:
        return "the same run"
    if clarity == "clear" and not open_:
        return "does not hold"
    return "too few seeds" if clarity == "too few seeds" else "not seen"


def _evidence(methods: Mapping[str, MethodSummary], claim: Claim) -> _Evidence:
    """Return the number of each seed: the value of the method, minus the one of the other method if there is one.

    A seed that does not arrive is no evidence of a short time. Without a second method, a claim of a short time has no
    number for this seed.
    """
    name, reached_by = claim.measured, number_of(claim.measured).reached
    rivals = [methods[rival] for rival in claim.rivals if rival in methods]
    paired = bool(claim.rivals)
    compared = [methods[claim.method], *_best(rivals, claim)] if claim.method in methods else []
    if len(compared) < 1 + paired or len(rivals) < len(claim.rivals):
        return _Evidence({}, paired)
    arrived = [m.by_seed(reached_by) for m in compared] if reached_by else []
    late = any(not all(seeds.values()) for seeds in arrived)
    reached = [sum(value == 1 for value in seeds.values()) for seeds in arrived] if late else []
    ours = compared[0]
    if paired:
        theirs = compared[1]
        open_ = _find_open(claim, ours, theirs, reached_by) if late else (False, False)
        return _Evidence(ours.minus(theirs, name, reached_by), True, ours.same_run(theirs), reached, *open_)
    by_seed = ours.by_seed(name)
    if late and (claim.below or claim.within is not None):
        by_seed = {seed: value if arrived[0][seed] else math.inf for seed, value in by_seed.items()}
    return _Evidence(by_seed, False, False, reached, higher=late)


def _find_open(claim: Claim, ours: MethodSummary, theirs: MethodSummary, reached: str) -> tuple[bool, bool]:
    """Tell whether the difference of two times may be lower, and whether it may be higher, than it seems.

    A run that arrives after the end of the other one has not arrived when times are cut there. A seed at which neither
    has arrived by then is a tie if the claim only says who is sooner.
    """
    (time, arrived), (rival, other) = ((m.by_seed(claim.measured), m.by_seed(reached)) for m in (ours, theirs))
    lower, higher = False, False
    for seed in arrived.keys() & other.keys():
        is_higher = not arrived[seed] or (not other[seed] and time[seed] > rival[seed])
        is_lower = not other[seed] or (not arrived[seed] and rival[seed] > time[seed])
        is_tie = is_lower and is_higher and claim.bound == 0 and claim.within is None and claim.beyond is None
        lower, higher = lower or (is_lower and not is_tie), higher or (is_higher and not is_tie)
    return lower, higher


def _best(rivals: list[MethodSummary], claim: Claim) -> list[MethodSummary]:
    """Return a list of the rival with the best mean, the first one of equal or unknown means; empty without rivals."""
    judged = [rival for rival in rivals if rival.measure(claim.measured).mean is not None]
    sign = -1.0 if claim.below else 1.0
    return sorted(judged, key=lambda rival: -sign * (rival.measures[claim.measured].mean or 0.0))[:1] or rivals[:1]


# -- tables ------------------------------------------------------------------------------------------------------------

CAPTION = (
    "A claim holds, or does not, if the 95 % confidence interval over seeds (Student's t) lies beyond the bound, or "
    "short of it; else it is not seen. Each claim is judged by itself."
)
OURS = {
    "our form": "a variant that no paper has",
    "our question": "a comparison that no paper makes",
    "our world": "data that no paper has",
}
"""Marks in claims that are ours, and their meaning."""
LATE = " A time ends with the run if the method never arrives."


def claims_table(claims: Sequence[Judged]) -> Table:
    """Build the table of claims with numbers and, but at the scale nano, verdicts."""
    shown = any(claim.verdict for claim in claims)
    rows = [[claim.claim, format_claim(claim), *([claim.verdict] if shown else [])] for claim in claims]
    return Table(["claim", "found", *(["verdict"] if shown else [])], rows)


def claims_by_point(summaries: Sequence[Summary]) -> Table:
    """Build the table of claims at several points of a sweep."""
    points = [summary.point for summary in summaries for _ in summary.claims]
    table = claims_table([claim for summary in summaries for claim in summary.claims])
    return Table(["point", *table.header], [[point, *row] for point, row in zip(points, table.rows, strict=True)])


def about_claims(claims: Sequence[Judged]) -> str:
    """Return the caption of a table of claims."""
    if not any(claim.verdict for claim in claims):
        return ""
    marks = [mark for mark in OURS if any(mark in claim.claim for claim in claims)]
    ours = [f' "{mark.capitalize()}" is {OURS[mark]}.' for mark in marks]
    return "".join([CAPTION, *ours, LATE * any(claim.reached for claim in claims)])


def format_claim(claim: Judged) -> str:
    """Format the number of a claim, and the number of seeds that arrive if some never do."""
    seeds = len(claim.number.values)
    arrive = f"{listed([str(count) for count in claim.reached])} of {seeds} seeds arrive" if claim.reached else ""
    if claim.number.mean is None:
        return arrive or "-"
    number = number_of(claim.measure, claim.unit)
    text = difference(claim.number, number.written) if claim.paired else number.written(claim.number)
    text = f"{text} {number.word}".rstrip()
    return f"{text}; {arrive}" if arrive else text
