"""Accuracy of each method: late means, worst moments, groups of clients, other ways to predict."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import BY_WAY, LOWER_IS_BETTER, METRICS, OVER_CLIENTS, Clarity, worst_point
from fedtide.evaluate.references import KEYS, REFERENCES, explain_missing
from fedtide.evaluate.rounds import rows_in, weight_in
from fedtide.fleets.liars import MARKED
from fedtide.report.clusters import events_of
from fedtide.report.components import BRANCH_ACCURACY, domain_names
from fedtide.report.costs import REFUSED
from fedtide.report.formats import FORMATS, Number, difference, percent, points
from fedtide.report.periods import SWING, accuracy_over_dates, draw_references
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord, at, weigher
from fedtide.report.summary import NO_SCORES, Paired, Summary
from fedtide.report.topic import plan_picture, plan_table, table_of

SCORES = (Number("accuracy", percent, "accuracy", by_group=True), Number("skill", percent, "skill", by_group=True))
WORST_POINT = Number("worst_point", percent, "worst point")
VALIDATION = tuple(Number(f"val_{score.name}", percent, "validation rows") for score in SCORES)
MOMENTS = (Number("last", percent, "last round"), Number("at_best_val", percent, "at best validation"))
BEST = Number("best", percent, "best")
"""It is for claims and records: a best of test rows is optimistic."""

NUMBERS = (
    *SCORES,
    WORST_POINT,
    *MOMENTS,
    BEST,
    *VALIDATION,
    Number("mean_over_rounds", percent),
    Number("std_over_rounds", points),
    *(Number(name, percent) for name in REFERENCES),
    *(Number(m.name, FORMATS[m.unit], m.title, single=m in OVER_CLIENTS) for m in METRICS[1:]),
)

# -- numbers -----------------------------------------------------------------------------------------------------------


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the accuracies of one run, those of references, and the late means of all other metrics.

    A share has the weights of the accuracy, other metrics have those of rows.
    """
    score, view, window = record.experiment.score, record.view, record.window
    if not run.ends_judged(view):
        return {score: math.nan}
    (rounds, accuracy), course = run.accuracy(view), run.course(view)[1]
    ways = dict.fromkeys(way for _, scores in run.entries(view) for way in scores.get("others", {}))
    parts = {
        **{f"{score}_{group}": ("groups", group) for group in record.groups},
        **{f"{BY_WAY}{way}": ("others", way) for way in ways},
        **KEYS,
    }
    curves = {name: (run.curve(view, at(*keys)), weigher(keys)) for name, keys in parts.items()}
    late = {name: run.late(view, curve, window, weigh) for name, (curve, weigh) in curves.items() if len(curve[0])}
    validation = run.accuracy("val")
    shares = {metric.name for metric in METRICS if metric.unit == "share"}
    metrics = [*(metric.name for metric in METRICS[1:]), *record.experiment.metric_units]
    return {
        score: run.late(view, (rounds, accuracy), window),
        **{name: value for name, value in late.items() if not math.isnan(value)},
        "last": float(course[-1]),
        "best": float(course.max()),
        "worst_point": worst_point(rounds, course, window),
        "mean_over_rounds": run.late(view, (rounds, accuracy), len(run.lines)),
        "std_over_rounds": float(course.std()),
        **({f"val_{score}": run.late("val", validation, window)} if len(validation[0]) else {}),
        **at_best_val(run.course(view), run.course("val")),
        **{
            name: run.late(view, run.curve(view, at(name)), window, weight_in if name in shares else rows_in)
            for name in metrics
        },
    }


def at_best_val(course: figures.Curve, validation: figures.Curve) -> dict[str, float]:
    """Return the score after the round with the best score on validation rows, the first of equal ones.

    `best` is optimistic, because the rows that it is measured on choose the round.

    >>> rounds = np.array([10, 20, 30])
    >>> at_best_val((rounds, np.array([0.5, 0.9, 0.8])), (rounds, np.array([0.4, 0.6, 0.7])))
    {'at_best_val': 0.8}
    """
    judged = dict(zip(*course, strict=True))
    both = [(value, judged[after]) for after, value in zip(*validation, strict=True) if after in judged]
    return {"at_best_val": float(max(both, key=lambda pair: pair[0])[1])} if both else {}


# -- tables ------------------------------------------------------------------------------------------------------------

HIGHER, LOWER, SAME = "▲", "▼", "="
"""Signs of clearly higher and clearly lower accuracy than the baseline, and of the same run."""

UNCLEAR: dict[Clarity, str] = {"unclear": "≈", "too few seeds": "?"}
"""Signs of no clear difference to the baseline."""

SIGNS = {
    HIGHER: "clearly higher than {}",
    LOWER: "clearly lower",
    UNCLEAR["unclear"]: "no clear difference",
    UNCLEAR["too few seeds"]: "too few seeds to tell",
    SAME: "the same run",
}
"""Meaning of the signs."""


def sign(pair: Paired) -> str:
    """Return the sign of a difference to the baseline."""
    if pair.same_run:
        return SAME
    side = pair.difference.side()
    return (HIGHER if side > 0 else LOWER) if side else UNCLEAR[pair.difference.clarity(pair.difference.mean or 0.0)]


def difference_cell(pair: Paired) -> str:
    """Format a difference with its sign; "-" without one."""
    cell = difference(pair.difference, percent)
    return cell if cell == "-" else f"{sign(pair)} {cell}"


def methods_table(summary: Summary) -> Table:
    """Build the first table of a page, a row per method, with a sign at the difference to the baseline."""
    refused = [REFUSED] if any(any(m.measure("refused").values) for m in summary.methods) else []
    course = [WORST_POINT, SWING, *MOMENTS] if summary.rounds else []
    return _scores_table(summary, [*course, *VALIDATION, *refused])


def brief_table(summary: Summary) -> Table:
    """Build the short table for terminals."""
    metrics = [metric_column(summary, name) for name in summary.metrics]
    local = Number("local_forgetting", points, "local forgetting")
    course = [WORST_POINT, SWING] if summary.rounds else []
    return _scores_table(summary, [*course, BRANCH_ACCURACY, local, *metrics])


def explain_unknown(summary: Summary) -> str:
    """Return the meaning of the sign "?", if a difference has it."""
    mark = UNCLEAR["too few seeds"]
    return (
        f"{mark} means {SIGNS[mark]}." if any(sign(p) == mark and p.difference.values for p in summary.paired) else ""
    )


def metric_column(summary: Summary, name: str) -> Number:
    """Return a metric of the experiment as a column."""
    title = f"{name}, lower is better" if name in LOWER_IS_BETTER else name
    return Number(name, FORMATS[summary.metrics[name]], title)


def _scores_table(summary: Summary, numbers: Iterable[Number]) -> Table:
    """Build a table of the score, the paired difference to the baseline, and these numbers.

    References have rows, too.
    """
    shown = [number for number in numbers if any(number.name in m.measures for m in summary.methods)]
    pairs = {pair.name: difference_cell(pair) for pair in summary.paired}
    against = [f"against {summary.paired[0].baseline}"] if pairs else []
    rows = []
    for m in summary.methods:
        cells = [pairs.get(m.name, "-")] if pairs else []
        cells += [number.written(m.measure(number.name)) for number in shown]
        rows.append([m.name, NO_SCORES if m.withheld else percent(m.measure(summary.score)), *cells])
    words = "mean" if summary.late.startswith("over") else summary.score
    header = ["method", f"{words} {summary.late}", *against, *(number.title for number in shown)]
    judged = any(m.measure(summary.score).mean is not None for m in summary.methods)
    for reference in summary.references:
        name = reference.algorithm
        takes = REFERENCES[name].takes if reference.seeds else explain_missing(name, judged=judged)
        cells = [percent(reference.measure(summary.score)), *["-"] * (len(header) - 2)]
        rows.append([f"{reference.name} ({takes})", *cells])
    return Table(header, rows)


def about_methods(record: ExperimentRecord, summary: Summary) -> str:
    """Return the caption of the first table: errors, signs and the headline number."""
    text = "Means over seeds ± one standard error." if max(len(m.seeds) for m in summary.methods) > 1 else ""
    if record.experiment.accuracy_over == "clients":
        text += " Accuracies are means over clients."
    if summary.rounds:
        text += f" Worst point: the lowest {summary.score} {summary.late}."
    if summary.rounds and any("swing" in m.measures for m in summary.methods):
        text += f" Swing: the highest minus the lowest {summary.score} within a period."
    if record.dated:
        text += (
            " Worst point and last round are of the curve below, in which the past fades; the mean is of each window."
        )
    signs = {sign(pair) for pair in summary.paired if pair.difference.mean is not None}
    if signs:
        words = ", ".join(f"{mark} {SIGNS[mark].format(summary.paired[0].baseline)}" for mark in SIGNS if mark in signs)
        text += f" Signs, by 95 % confidence intervals of the differences at each seed: {words}."
    if noise := record.late_noise:
        size = f"{100 * noise:.2g} points on the {summary.score} of a seed"
        text += f" Scores are sums with noise: {size} (one standard deviation)."
    return f"{text}{summary.target.explained}".strip()


@plan_table("Over groups", without_rounds=True)
def groups_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of the accuracy of each group of clients, a row per method; None without groups.

    {Score} of each group of clients, {averaged}.
    """
    groups = [Number(f"{summary.score}_{group}", percent, f"{group} clients") for group in summary.groups]
    return table_of(summary, [*groups, Number("branch_accuracy", percent, "branch or model of the true group")])


@plan_table("Other ways to predict", without_rounds=True)
def ways_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of other ways to combine models, a row per method with such ways; None without such methods.

    The models of a method combined in other ways, on the same rows.
    """
    names = dict.fromkeys(name for m in summary.methods for name in m.measures)
    ways = [name for name in names if name.startswith(BY_WAY) and name != BY_WAY + MARKED]
    numbers = [Number(name, percent, name.removeprefix(BY_WAY)) for name in ways]
    return table_of(summary, [Number(summary.score, percent, "as the method predicts"), *numbers]) if ways else None


@plan_table("Backdoor", without_rounds=True)
def backdoor_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of the accuracy on rows with the mark of a backdoor, a row per method; None without liars' marks.

    {Score} on the same rows as they are, and with the mark. Little is left if a model learned the mark.
    """
    numbers = [Number(summary.score, percent, "as they are"), Number(BY_WAY + MARKED, percent, "with the mark")]
    is_marked = any(BY_WAY + MARKED in method.measures for method in summary.methods)
    return table_of(summary, numbers) if is_marked else None


@plan_table("More metrics", without_rounds=True)
def metrics_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of further metrics of the experiment, a row per method; None without any.

    Numbers over all rows, {averaged}; errors are in the units of the labels.
    """
    return table_of(summary, [metric_column(summary, name) for name in summary.metrics])


# -- pictures ----------------------------------------------------------------------------------------------------------


@plan_picture("accuracy", "{Score} over rounds", "scores, which nodes of a private study do not tell")
def accuracy_over_rounds(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw accuracy over rounds; below it the participants, their domains and drifted clients.

    {Score} on {rows} of {whose}, {every}.{band}{noise}
    """
    if record.private and not record.accuracies:
        return None
    if record.dated:
        return accuracy_over_dates(record)
    shifted = next((m for m in record.methods if m.shift.who.changes and m.runs and record.groups), None)
    blended = next((run for run in record.runs if any("domains" in line for line in run.lines)), None)
    drifting = next((run for run in record.runs if any("drifted" in line for line in run.lines)), None)
    parts: list[tuple[Callable[..., None], Any]]
    parts = [(_draw_shift, shifted), (_draw_domains, blended), (_draw_drifted, drifting)]
    parts = [(draw, content) for draw, content in parts if content is not None]
    figure, (top, *below) = figures.stack_panels([3.4, *[1.2] * len(parts)])
    for axes, (draw, content) in zip(below, parts, strict=True):
        draw(axes, record, content)
    events = [] if drifting is None else events_of(record)
    for axes in (top, *below[-1:]) if len(events) <= record.experiment.rounds / 2 else ():
        figures.mark_events(axes, events)
    figures.accuracies(top, record.accuracies, record.names, f"{record.experiment.score} of {record.whose}, %")
    figures.noise_bars(top, record.accuracies, record.noises)
    draw_references(top, record, lambda run, keys: run.curve(record.view, at(*keys)))
    figures.over_rounds([top, *below][-1], 0, record.experiment.rounds)
    return figures.svg(figure, f"{record.experiment.score} over rounds")


def _draw_shift(axes: Axes, record: ExperimentRecord, method: MethodRecord) -> None:
    """Draw the expected share of the first group, and the mean share of arrivals."""
    share = method.runs[0].every_round(lambda line: line.get("expected", [None])[0])
    first = figures.label(record.groups[0])
    others = figures.label(record.groups[1]) if len(record.groups) == 2 else "others"
    colors = figures.GROUP_COLORS
    areas = [(f"{first}, expected", colors[0], 0.45), (f"{others}, expected", colors[1], 0.25)]
    figures.draw_areas(axes, np.arange(1, len(share) + 1), np.stack([share, 1 - share], axis=1), areas)
    counts = [run.every_row(at("groups")) for run in method.runs]
    all_of = [groups.sum(axis=1) for groups in counts]
    shares = [groups[:, 0] / np.where(total > 0, total, np.nan) for groups, total in zip(counts, all_of, strict=True)]
    ends, arrived = figures.by_round(figures.mean_of_runs(shares))
    axes.plot(ends, 100 * arrived, color="#444444", lw=0.6, label=f"{first}, arrived (mean over seeds)")
    axes.set_ylabel("participants, %")
    figures.small_legend(axes, 3)


def _draw_domains(axes: Axes, record: ExperimentRecord, run: RunRecord) -> None:
    """Draw the share of each domain among the rows of the participants, stacked."""
    shares = run.every_row(at("domains"))
    areas = [(figures.label(name), figures.group_color(k), 0.4) for k, name in enumerate(domain_names(record))]
    figures.draw_areas(axes, np.arange(1, len(shares) + 1), shares, areas)
    axes.set_ylabel("rows held, %")
    figures.small_legend(axes)


def _draw_drifted(axes: Axes, record: ExperimentRecord, run: RunRecord) -> None:
    """Draw the number of clients that drifted in each round."""
    drifted = run.every_round(at("drifted"))
    axes.vlines(np.arange(len(drifted)), 0, np.nan_to_num(drifted), color="#444444", lw=1.2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("drifted\nclients")
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))


@figures.styled
def accuracy_of_all(records: Sequence[tuple[str, ExperimentRecord]]) -> figures.Drawn:
    """Draw accuracy over rounds of the methods of several run folders."""
    names = [f"{name}: {method}" for name, record in records for method in record.names]
    starts = itertools.accumulate((len(record.names) for _, record in records), initial=0)
    numbered = zip(starts, (record for _, record in records), strict=False)
    curves = {start + number: c for start, record in numbered for number, c in record.accuracies.items()}
    figure = Figure(figsize=(9.6, 4.0))
    axes = figure.subplots()
    views = {record.whose for _, record in records}
    score = " or ".join(sorted({record.experiment.score for _, record in records}))
    figures.accuracies(axes, curves, names, f"{score} of {views.pop()}, %" if len(views) == 1 else f"{score}, %")
    figures.over_rounds(axes, 0, max(record.experiment.rounds for _, record in records))
    return figures.svg(figure, f"{score} of all methods")


@figures.styled
def accuracy_of_simulation(rounds: Sequence[int], accuracy: Sequence[float]) -> figures.Drawn:
    """Draw accuracy over rounds of a simulation, which has no record."""
    figure = Figure(figsize=(6.4, 3.0))
    axes = figure.subplots()
    curve = np.array(rounds), np.array(accuracy, dtype=np.float64)
    figures.accuracies(axes, {0: [curve]}, [""], "accuracy, %")
    figures.over_rounds(axes, 0, max(rounds, default=1))
    return figures.svg(figure, "accuracy over rounds")


@plan_picture("metrics", "More metrics over rounds", "metrics = [...]")
def metrics_over_rounds(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the further metrics of the experiment over rounds, a panel each.

    Further metrics of the experiment on {rows} of {whose}.{band}
    """
    units = {name: unit for name, unit in record.experiment.metric_units.items() if not name.endswith("_bound")}
    curves = {name: record.curves(partial(RunRecord.curve, view=record.view, value=at(name))) for name in units}
    curves = {name: of_methods for name, of_methods in curves.items() if of_methods}
    if not curves:
        return None
    figure, stacks = figures.stacked(len(curves), widest=3, heights=[2.6], wide=9.6 if len(curves) > 1 else 6.4)
    for (axes,), (name, of_methods) in zip(stacks, curves.items(), strict=True):
        share = units[name] in ("share", "points")
        title = f"{name}, %" if share else f"{name}{', lower is better' * (name in LOWER_IS_BETTER)}"
        figures.bands(axes, of_methods, record.names, figures.label(title), scale=100.0 if share else 1.0)
        figures.over_rounds(axes, 0, record.experiment.rounds)
    figures.figure_legend(figure, stacks[0])
    return figures.svg(figure, "more metrics over rounds")
