"""Pictures of a report, as SVG: labels, units, bands over seeds, legends outside the axes, Okabe-Ito colors."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedtide.data.rows import BASELINES
from fedtide.data.targets import TARGET_WORDS
from fedtide.evaluate.metrics import LOWER_IS_BETTER, cumulative
from fedtide.evaluate.rounds import score_in
from fedtide.report.drift import marks
from fedtide.report.reading import ExperimentRecord, MethodRecord, RunRecord

INK = "#1d2733"
"""Color of text and axes; the page's style sheet exchanges it, and the grays below, on a dark screen."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK, "#8C6D31")
MARKERS = ("", "o", "s", "^", "D", "v", "X", "P")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)))
GROUP_COLORS = ("#E69F00", "#3B4C8A", "#009E73", "#CC79A7", "#56B4E9")
MODEL_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe and Ito's colors, distinct with any kind of color vision; black is left to the lines between groups."""
OWN_COLOR, OTHER_COLOR = "#4D4D4D", "#BDBDBD"
"""Colors of a client's own expert, and of models beyond the palette."""
MOST_MARKS = 40
"""Maximum number of events that are marked."""
FEW_POINTS = 4
"""Maximum number of evaluations in a period that are too few for a curve."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedtide",
    "pdf.fonttype": 42,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def label(name: str) -> str:
    """Return a name for a legend, cut to 40 characters; dollar signs and a leading underscore show as written.

    >>> label("$x$"), label("_hidden")
    ('\\\\$x\\\\$', ' _hidden')
    """
    name = name if len(name) <= 40 else name[:37] + "..."
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


@dataclass(frozen=True)
class Look:
    """Color, dashes and marker ("" for none) of a line."""

    color: str
    dashes: Any
    marker: str = ""


def look(number: int) -> Look:
    """Return the look of method number `number`: neighbors differ in color and dashes, the ninth has a marker too.

    >>> len({str(look(number)) for number in range(64)}), look(8).color == look(0).color, look(8).marker
    (64, True, 'o')
    """
    turn = number // len(COLORS)
    dashes = DASHES[(number + turn) % len(DASHES)]
    return Look(COLORS[number % len(COLORS)], dashes, MARKERS[turn % len(MARKERS)])


def accuracy_over_rounds(record: ExperimentRecord, floor: str | None = None) -> Drawn:
    """Draw accuracy over rounds with a band over seeds, and below it participants, domains and drift.

    Accuracy: also of the commonest class among the rows on which method `floor` is judged; None draws none.

    Participants: expected share of each group and the arrivals. Domains: share of each, where domains are blended.
    Drift: number of drifted clients in each round, with vertical lines at known events through both panels.
    """
    shifted = next((m for m in record.methods if m.shifted and m.runs and record.groups), None)
    blended = next(
        (run for m in record.methods for run in m.runs if any("domains" in line for line in run.lines)), None
    )
    drifting = next((r for m in record.methods for r in m.runs if any("drifted" in line for line in r.lines)), None)
    with matplotlib.rc_context(STYLE):
        count = sum(each is not None for each in (shifted, blended, drifting))
        figure = Figure(figsize=(9.6, 4.0 + 1.2 * count))
        top, *below = figure.subplots(1 + count, 1, sharex=True, height_ratios=(3.4, *[1] * count), squeeze=False)[:, 0]
        if shifted is not None:
            _draw_shift(below[0], record, shifted)
        if blended is not None:
            _draw_domains(below[shifted is not None], record, blended)
        if drifting is not None:
            _draw_drifted(below[-1], drifting)
            events = marks(drifting)
            for axes in (top, below[-1]) if len(events) <= record.experiment.rounds / 2 else ():
                mark_events(axes, events)
        _draw_accuracies(top, [(method.name, _accuracies(record, method)) for method in record.methods])
        for method in record.methods:
            if method.name == floor:
                curves = [run.commonest(record.view) for run in method.runs]
                floor_line = f"{TARGET_WORDS[record.experiment.data.target.kind].floor}, without training"
                band(top, curves, floor_line, Look("#666666", ":"))
                legend_above(top)
        for dashes, (name, (_, words)) in zip(("--", "-."), BASELINES.items(), strict=True):
            curves = [run.baseline(record.view, name) for method in record.methods[:1] for run in method.runs]
            if any(len(at) and 100 * values[-1] > top.get_ylim()[0] for at, values in curves):
                band(top, curves, words, Look("#666666", dashes))
                legend_above(top)
        top.set_ylabel(f"{record.experiment.score} of {record.whose}, %")
        over_rounds([top, *below][-1], 0, record.experiment.rounds)
        return svg(figure, f"{record.experiment.score} over rounds")


Curve = tuple[np.ndarray, np.ndarray]
"""Places on the horizontal axis, and values."""


def accuracy_of_all(records: Sequence[tuple[str, ExperimentRecord]]) -> Drawn:
    """Draw accuracy over rounds of the methods of several experiments, each named by its experiment too."""
    with matplotlib.rc_context(STYLE):
        named = [(f"{name}: {method.name}", _accuracies(record, method)) for name, record in records
                 for method in record.methods if method.runs]  # fmt: skip
        figure = Figure(figsize=(9.6, 3.6 + 0.1 * len(named)))
        axes = figure.subplots()
        _draw_accuracies(axes, named)
        views, scores = {record.whose for _, record in records}, sorted({r.experiment.score for _, r in records})
        score = " or ".join(scores)
        axes.set_ylabel(f"{score} of {views.pop()}, %" if len(views) == 1 else f"{score}, %")
        over_rounds(axes, 0, max(record.experiment.rounds for _, record in records))
        return svg(figure, f"{score} of all methods")


def metrics_over_rounds(record: ExperimentRecord) -> Drawn | None:
    """Draw what the experiment asks for beside accuracy over rounds, a panel each; None where it asks for nothing.

    A metric is recorded with the bound of its error where it has one, which a curve need not show.
    """
    units = {name: unit for name, unit in record.experiment.metric_units.items() if not name.endswith("_bound")}
    found = {
        name: [
            (n, m, [run.curve(record.view, itemgetter(name)) for run in m.runs]) for n, m in enumerate(record.methods)
        ]
        for name in units
    }
    drawn = {name: curves for name, curves in found.items() if any(len(at) for _, _, own in curves for at, _ in own)}
    if not drawn:
        return None
    with matplotlib.rc_context(STYLE):
        figure, stacks = stacked(len(drawn), widest=3, heights=[2.6], wide=9.6 if len(drawn) > 1 else 6.4)
        for (axes,), (name, methods) in zip(stacks, drawn.items(), strict=True):
            share = units[name] in ("share", "points")
            for number, method, curves in methods:
                if any(len(at) for at, _ in curves):
                    band(axes, curves, label(method.name), look(number), scale=100.0 if share else 1.0)
            better = ", lower is better" * (name in LOWER_IS_BETTER)
            axes.set_ylabel(label(f"{name}, %" if share else f"{name}{better}"))
            over_rounds(axes, 0, record.experiment.rounds)
        handles, labels = stacks[0][0].get_legend_handles_labels()
        wide = figure.get_size_inches()[0] - 0.6
        figure.legend(handles, labels, loc="outside upper left", ncols=columns(labels, wide), fontsize=9)
        return svg(figure, "more metrics over rounds")


def accuracy_of_simulation(rounds: Sequence[int], accuracy: Sequence[float]) -> Drawn:
    """Draw accuracy over rounds of a simulation, which has no record."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.0))
        axes = figure.subplots()
        _draw_accuracies(axes, [("", [(np.array(rounds), np.array(accuracy, dtype=np.float64))])])
        axes.set_ylabel("accuracy, %")
        over_rounds(axes, 0, max(rounds, default=1))
        return svg(figure, "accuracy over rounds")


def _accuracies(record: ExperimentRecord, method: MethodRecord) -> list[Curve]:
    return [run.accuracy(record.view) for run in method.runs]


def _draw_accuracies(axes: Axes, named: Sequence[tuple[str, Sequence[Curve]]]) -> None:
    """Draw the accuracies of methods, which follow each other in number, with a legend."""
    for number, (name, curves) in enumerate(named):
        if any(len(at) for at, _ in curves):
            band(axes, curves, label(name), look(number))
    from_below(axes, [values for _, curves in named for _, values in curves])
    legend_above(axes)


def from_below(axes: Axes, accuracies: Sequence[np.ndarray]) -> None:
    """Let the axis begin a little below the accuracies after the first quarter, and say what lies below it."""
    late = [value for values in accuracies for value in values[len(values) // 4 :] if math.isfinite(value)]
    bottom = max(100 * min(late, default=0.0) - 4, 0)
    drawn = [np.nanmin(np.asarray(line.get_ydata())) for line in _labeled(axes)]
    if drawn:
        axes.set_ylim(bottom=bottom)
    if min(drawn, default=bottom) < bottom:
        said = f"\u25be below this axis: early evaluations, down to {min(drawn):.1f} %"
        axes.text(0.995, 0.02, said, transform=axes.transAxes, ha="right", fontsize=8, color="#555555")


def over_rounds(axes: Axes, first: int, last: int) -> None:
    """Set the horizontal axis to a span of rounds, with ticks at whole rounds: what a round did stands at its end."""
    axes.set_xlabel("rounds done")
    axes.set_xlim(first, last)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_shift(axes: Axes, record: ExperimentRecord, method: MethodRecord) -> None:
    run = method.runs[0]
    share = run.every_round(lambda line: line.get("expected", [None])[0])
    rounds = np.arange(1, len(share) + 1)
    names = record.groups or ["first group", "others"]
    first, others = label(names[0]), label(names[1] if len(names) == 2 else "others")
    axes.fill_between(rounds, 0, 100 * share, color=GROUP_COLORS[0], alpha=0.45, lw=0, label=f"{first}, expected")
    axes.fill_between(rounds, 100 * share, 100, color=GROUP_COLORS[1], alpha=0.25, lw=0, label=f"{others}, expected")
    came = stack_runs([_came_of_first(r) for r in method.runs]).mean(axis=0)
    axes.plot(rounds[: len(came)], 100 * came, color="#444444", lw=0.6, label=f"{first}, arrived (mean over seeds)")
    axes.set_ylim(0, 100)
    axes.set_ylabel("participants, %")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8, borderaxespad=0.2)
    axes.grid(False)


def _draw_domains(axes: Axes, record: ExperimentRecord, run: RunRecord) -> None:
    """Draw the share of each domain among the participants' rows, stacked."""
    shares = 100 * run.every_row(lambda line: line.get("domains"))
    rounds, low = np.arange(1, len(shares) + 1), np.zeros(len(shares))
    for k, name in enumerate(domain_names(record)):
        high = low + shares[:, k]
        axes.fill_between(rounds, low, high, color=domain_color(k), alpha=0.4, lw=0, label=label(name))
        low = high
    axes.set_ylim(0, 100)
    axes.set_ylabel("rows held, %")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, fontsize=8, borderaxespad=0.2)
    axes.grid(False)


def _draw_drifted(axes: Axes, run: RunRecord) -> None:
    """Draw the number of clients that drifted in each round."""
    count = run.every_round(lambda line: line.get("drifted"))
    axes.vlines(np.arange(len(count)), 0, np.nan_to_num(count), color="#444444", lw=1.2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("clients that\ndrifted")
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))


def mark_events(axes: Axes, events: Sequence[int]) -> None:
    """Draw a thin vertical line at each known event, unless there are too many to see anything else.

    An event precedes its round: the number of rounds done by then equals the number of its round.
    """
    if len(events) <= MOST_MARKS:
        for event in events:
            axes.axvline(event, color="#555555", lw=0.9, ls=(0, (4, 3)), zorder=1)


def domain_color(number: int) -> str:
    """Return the color of domain number `number`."""
    return GROUP_COLORS[number % len(GROUP_COLORS)]


def domain_names(record: ExperimentRecord) -> list[str]:
    """Return the names of the domains whose shares rounds report, or numbers from 1 where names were not saved."""
    lines = (line for method in record.methods for run in method.runs for line in run.lines)
    count = max((len(line.get("domains", ())) for line in lines), default=0)
    return record.domains if len(record.domains) == count else [f"domain {k}" for k in range(1, count + 1)]


def _came_of_first(run: Any) -> np.ndarray:
    return run.every_round(lambda line: line["groups"][0] / max(sum(line["groups"]), 1) if "groups" in line else None)


def one_period(record: ExperimentRecord) -> Drawn | None:
    """Draw the last periods folded into one: accuracy of each group against the hour; None without a period."""
    period = record.period
    drawn = [m for m in record.methods if any(len(run.accuracy(record.view)[0]) for run in m.runs)]
    if not period or not record.groups or not drawn or period > record.experiment.rounds:
        return None
    with matplotlib.rc_context(STYLE):
        figure, panels = grid(len(drawn), high=3.3)
        low, high = [], []
        for axes, method in zip(panels, drawn, strict=True):
            _background(axes, method, period)
            for k, group in enumerate(record.groups):
                folded = [_folded(record, run, period, group) for run in method.runs]
                line = Look(GROUP_COLORS[k % 5], DASHES[k % 4], "os^D"[k % 4])
                band(axes, folded, label(f"{group} clients"), line, every=1)
            pooled = [_folded(record, run, period) for run in method.runs]
            band(axes, pooled, "all", Look("#555555", ":"))
            _say_points(axes, max(len(at) for at, _ in pooled) - 1)
            axes.set_title(label(method.name), fontsize=10)
            axes.set_xlabel(label(f"rounds since the peak of {record.groups[0]}"))
            axes.set_xlim(0, period)
            shown = [np.asarray(curve.get_ydata()) for curve in axes.lines]
            shown += [np.asarray(area.get_paths()[0].vertices)[:, 1] for area in axes.collections]
            low += [values.min() for values in shown]
            high += [values.max() for values in shown]
        room = 0.12 * (max(high) - min(low)) + 0.5
        bottom = min(low) - room if min(low) < 0 else max(min(low) - room, 0)  # a skill may be below 0
        panels[0].set_ylim(bottom, min(max(high) + room, 100))
        for axes in filter(leftmost, panels):
            axes.set_ylabel(f"{record.experiment.score} of {record.whose}, %")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), fontsize=9)
        return svg(figure, f"{record.experiment.score} within one period")


def _say_points(axes: Axes, points: int) -> None:
    """Say so where a curve has too few points to show a course, and draw it thin."""
    if 0 < points <= FEW_POINTS:
        for line in axes.lines:
            line.set(linewidth=0.9, marker=line.get_marker() if line.get_marker() != "None" else ".")
        said = f"{points} point{'s' * (points > 1)} a period"
        axes.text(0.99, 0.98, said, transform=axes.transAxes, ha="right", va="top", fontsize=8, color="#555555")


def _background(axes: Axes, method: MethodRecord, period: float) -> None:
    """Shade the hours by the expected participants: the darker, the fewer of the first group."""
    share = method.runs[0].every_round(lambda line: line.get("expected", [None])[0])[: int(period)]
    if method.shifted and len(share):
        axes.imshow(
            1 - share[None, :], extent=(0, period, 0, 1), transform=axes.get_xaxis_transform(), aspect="auto",
            cmap=matplotlib.colors.LinearSegmentedColormap.from_list("day", ["#E69F0038", "#3B4C8A58"]), zorder=-2,
            interpolation="bilinear", vmin=0, vmax=1,
        )  # fmt: skip


def _folded(record: ExperimentRecord, run: RunRecord, period: float, group: str | None = None) -> Curve:
    """Fold the late accuracy of a run into one period, averaged by place in the period."""
    rounds, values = run.accuracy(record.view, group)
    if not len(rounds):
        return rounds, values
    late, weights = rounds > rounds[-1] - record.window, run.counts_for(record.view, rounds)
    place = np.mod(rounds[late], period)
    places = np.unique(place)
    at = [late.nonzero()[0][place == p] for p in places]
    means = np.array([np.average(values[k], weights=None if weights is None else weights[k]) for k in at])
    # The end of a period is the beginning of the next one.
    return np.append(places, places[0] + period), np.append(means, means[0])


def branches(record: ExperimentRecord) -> Drawn | None:
    """Draw the share of rows at the branch of their true group, and that of participants at the first group's.

    The latter is drawn against the expected share q(t).
    """
    drawn = [(n, m) for n, m in enumerate(record.methods) if any(len(run.branches(record.view)[0]) for run in m.runs)]
    if len(record.groups) < 2 or not drawn:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 5.2))
        top, below = figure.subplots(2, 1, height_ratios=(1.4, 1.1))
        for number, method in drawn:
            curves = [run.branches(record.view) for run in method.runs]
            band(top, curves, label(method.name), look(number))
        largest = largest_group(drawn[0][1].runs[0], record.view)
        top.axhline(100 * largest, color="#777777", lw=1.2, ls=(0, (1, 1.5)), label="chance: one for all", zorder=1.5)
        top.set_ylabel("rows with the branch or\nmodel of their group, %")
        over_rounds(top, 0, record.experiment.rounds)
        top.set_xlabel("")
        top.set_ylim(top=101)
        legend_above(top)
        first = max(record.experiment.rounds - record.window, 0)
        expected = drawn[0][1].runs[0].every_round(lambda line: line.get("expected", [None])[0])
        rounds = np.arange(1, len(expected) + 1)
        if np.isfinite(expected).any():
            told = f"{label(record.groups[0])}, expected"
            below.fill_between(rounds, 0, 100 * expected, color=GROUP_COLORS[0], alpha=0.4, lw=0, label=told)
        for number, method in drawn:
            shares = [run.share_of_first(record.window) for run in method.runs]
            curves = [(np.arange(1, len(share) + 1), share) for share in shares]
            if all(np.isfinite(share).any() for _, share in curves):
                band(below, curves, "", look(number))
        over_rounds(below, first, record.experiment.rounds)
        below.set_ylim(-2, 102)
        below.set_ylabel(f"participants at {label(record.groups[0])}'s\nbranch or model, %")
        if np.isfinite(expected).any():
            below.legend(loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8, borderaxespad=0.2)
        return svg(figure, "which branch")


def largest_group(run: RunRecord, view: str) -> float:
    """Return the share of rows that is right where one branch answers for all: that of the largest group."""
    choice = next(line["scores"][view]["choice"] for line in run.judged if "choice" in line["scores"].get(view, {}))
    rows = np.array(choice, dtype=np.float64).sum(axis=1)
    return float(rows.max() / rows.sum()) if rows.any() else math.nan


def seen_rounds(record: ExperimentRecord) -> int:
    """Return the number of rounds in the picture of what the server sees: four periods, or all without a period."""
    rounds = record.experiment.rounds
    return int(min(4 * record.period, rounds)) if record.period else rounds


def participants(record: ExperimentRecord) -> Drawn | None:
    """Draw the received model's accuracy on the participants' own rows in the last rounds, as a server sees it."""
    span = seen_rounds(record)
    found = {number: [_received(run, span) for run in method.runs] for number, method in enumerate(record.methods)}
    told = {number: curves for number, curves in found.items()
            if curves and all(np.isfinite(values).any() for _, values in curves)}  # fmt: skip
    if not told or span < 4:
        return None
    with matplotlib.rc_context(STYLE):
        # The participants change from round to round: in one panel these lines would hide each other.
        figure, panels = grid(len(told), widest=2, high=1.9)
        for axes, (number, curves) in zip(panels, told.items(), strict=True):
            band(axes, curves, "", look(number), width=1.2)
            axes.set_title(label(record.methods[number].name), fontsize=10)
            over_rounds(axes, record.experiment.rounds - span, record.experiment.rounds)
            if leftmost(axes):
                axes.set_ylabel(f"{record.experiment.score} on the\nparticipants' rows, %")
        return svg(figure, f"{record.experiment.score} on the participants")


def _received(run: RunRecord, span: int) -> Curve:
    values = run.every_round(lambda line: score_in(line["participants"]))
    return np.arange(1, len(values) + 1)[-span:], values[-span:]


def client_distribution(record: ExperimentRecord) -> Drawn | None:
    """Draw the share of clients with at most a given accuracy, over the last evaluations."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.9))
        axes = figure.subplots()
        found = False
        for number, method in enumerate(record.methods):
            accuracies = _client_means(record, method)
            if len(accuracies):
                values, below = cumulative(np.round(accuracies, 6))
                steps = 100 * np.array([values[0], *values, 1.0]), 100 * np.array([0.0, *below, 1.0])
                shown, every = look(number), max(len(steps[0]) // 6, 1)
                axes.step(*steps, where="post", label=label(method.name), color=shown.color, ls=shown.dashes,
                          marker=shown.marker, markevery=every, ms=4, lw=1.8)  # fmt: skip
                found = True
        axes.set_xlabel(f"{record.experiment.score} of a client, % (mean over {record.span})")
        axes.set_ylabel("clients with at most that, %")
        axes.set_ylim(0, 100)
        legend_above(axes, room=5.4)
        return svg(figure, f"{record.experiment.score} over clients") if found else None


def _client_means(record: ExperimentRecord, method: MethodRecord) -> np.ndarray:
    means = []
    for run in method.runs:
        told = run.columns(record.view)
        known = (told.round >= len(run.lines) - record.window) & ~np.isnan(told.accuracy)
        at, _ = run.accuracy(record.view)
        weight, counts = np.ones(len(known)), run.counts_for(record.view, at)
        if counts is not None:  # a client's part of that is by its rows
            known &= np.isin(told.round + 1, at)
            _, evaluation = np.unique(told.round[known], return_inverse=True)
            rows = told.rows[known]
            part = rows / np.bincount(evaluation, rows)[evaluation]
            weight[known] = part * counts[np.searchsorted(at, told.round[known] + 1)]
        _, place = np.unique(told.client[known], return_inverse=True)
        means.append(np.bincount(place, weight[known] * told.accuracy[known]) / np.bincount(place, weight[known]))
    return np.concatenate(means) if means else np.empty(0)


def band(
    axes: Axes,
    curves: Sequence[Curve],
    name: str,
    shown: Look,
    *,
    scale: float = 100.0,
    width: float = 1.8,
    every: int | None = None,
) -> None:
    """Draw the mean over seeds times `scale` (percent), with a band of one standard error, if there is data.

    Where runs end at different rounds, the curve goes as far as all of them.

    Args:
        axes: panel.
        curves: of each seed.
        name: in the legend, as `label` returns it.
        shown: look of the line.
        scale: factor of the values.
        width: of the line.
        every: points from marker to marker; None means about eight markers.
    """
    x = max((at for at, _ in curves), key=len)
    if not len(x):
        return
    alike = [v for at, v in curves if len(v) == len(x) or (len(v) and np.array_equal(at, x[: len(at)]))]
    values = scale * stack_runs(alike)
    x = x[: values.shape[1]]
    mean = values.mean(axis=0)
    marker = shown.marker or ("o" if len(x) == 1 else "")
    axes.plot(x, mean, label=name, color=shown.color, ls=shown.dashes, lw=width, marker=marker, ms=4,
              markevery=every or max(len(x) // 8, 1))  # fmt: skip
    if len(values) > 1:
        error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
        axes.fill_between(x, mean - error, mean + error, color=shown.color, alpha=0.2, lw=0)


def stack_runs(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stack a value per round of several runs (runs, rounds, ...), cut to the shortest run.

    >>> stack_runs([np.array([1.0, 2.0, 3.0]), np.array([5.0, 6.0])]).tolist()
    [[1.0, 2.0], [5.0, 6.0]]
    """
    played = min(len(row) for row in rows)
    return np.stack([row[:played] for row in rows])


def grid(count: int, *, widest: int = 3, high: float) -> tuple[Figure, list[Axes]]:
    """Create `count` panels of equal height in inches, at most `widest` side by side, with a common scale of y."""
    wide = 9.6 if count > 1 else 6.4
    figure, stacks = stacked(count, widest=widest, heights=[high], wide=wide, sharey=True)
    return figure, [axes for (axes,) in stacks]


def stacked(
    count: int, *, widest: int, heights: Sequence[float], wide: float = 9.6, sharey: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """Create stacks of panels, at most `widest` side by side, in lines as even as possible.

    Args:
        count: number of stacks.
        widest: maximum number of stacks in a line.
        heights: heights of the panels of a stack in inches, from the top.
        wide: total width in inches, provided that no panel gets narrower than 3.1.
        sharey: true for a common scale of y.
    """
    lines = math.ceil(count / widest)
    across = math.ceil(count / lines)
    figure = Figure(figsize=(max(wide, 3.1 * across), sum(heights) * lines + 0.6))
    panels = figure.subplots(
        len(heights) * lines, across, sharey=sharey, squeeze=False, height_ratios=[*heights] * lines
    )
    stacks = panels.reshape(lines, len(heights), across).transpose(0, 2, 1).reshape(-1, len(heights)).tolist()
    for axes in (axes for stack in stacks[count:] for axes in stack):
        axes.set_visible(False)
    return figure, stacks[:count]


def leftmost(axes: Axes) -> bool:
    """Tell whether a panel stands at the left."""
    place = axes.get_subplotspec()
    return place is not None and place.is_first_col()


def columns(names: Sequence[str], room: float) -> int:
    """Return the number of columns, at most four, of a legend with these names no wider than `room` inches.

    >>> columns(["FedAvg", "IFCA"], 8.4), columns(["a name of some length"] * 4, 5.4), columns(["x" * 40], 2)
    (2, 2, 1)
    """
    wide = 0.6 + 0.075 * max(map(len, names))
    return max(min(len(names), 4, int(room / wide)), 1)


def legend_above(axes: Axes, room: float = 8.4) -> None:
    """Draw the legend above the axes, where it hides nothing, at most `room` inches wide."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        ncols = columns(labels, room)
        axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=ncols, fontsize=9)


def save_figure(figure: Figure, to: Any, **options: Any) -> None:
    """Save a figure, in silence about what a reader sees anyway.

    A letter that the font here lacks is in the reader's, and panels without room for many names overlap.
    """
    with warnings.catch_warnings():
        for message in ("Glyph .* missing from", "constrained_layout not applied"):
            warnings.filterwarnings("ignore", message)
        if (engine := figure.get_layout_engine()) is not None:
            # Left to `savefig`, the layout costs a second drawing of everything, for each format.
            figure.set_dpi(72)
            engine.execute(figure)
            with matplotlib.rc_context({"figure.constrained_layout.use": False}):
                figure.set_layout_engine(None)
        figure.savefig(to, **options)


class Drawn(str):
    """An `<svg>` element that scales with the page, and the figure that it was made of."""

    figure: Figure


def svg(figure: Figure, title: str) -> Drawn:
    """Return the figure as an element with a title, and a description in numbers for those who do not see it."""
    buffer = io.StringIO()
    save_figure(figure, buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 role="img" aria-label="{title}"', text, count=1)
    told = f"<title>{title}</title><desc>{html.escape(' '.join(_said(figure)), quote=False)}</desc>"
    made = Drawn(
        re.sub(r'(<svg[^>]*?) height="[^"]*"([^>]*>)', lambda found: f"{found[1]}{found[2]}{told}", text, count=1)
    )
    made.figure = figure
    return made


def _labeled(axes: Axes) -> list[Any]:
    """Return the lines of a panel that show something and have a name in the legend."""
    found = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    return [line for line in found if np.isfinite(np.asarray(line.get_ydata(), dtype=np.float64)).any()]


def _said(figure: Figure) -> Iterator[str]:
    """Describe each panel: of a line its first, last, lowest and highest value, of a map its range."""
    for axes in figure.axes:
        if not axes.get_visible() or axes.get_label() == "<colorbar>":
            continue
        named = (axes.get_title(), axes.get_title(loc="left"), axes.get_ylabel(), axes.get_xlabel())
        parts = []
        for line in _labeled(axes):
            x, y = (np.asarray(values, dtype=np.float64) for values in line.get_data())
            x, y = x[np.isfinite(y)], y[np.isfinite(y)]
            name = f"{line.get_label()}: " if line.get_label() else ""
            if len(y) > 2 or len(set(y)) > 1:
                parts.append(f"{name}{y[0]:.3g} at {x[0]:.3g}, {y[-1]:.3g} at {x[-1]:.3g}, lowest {y.min():.3g}, "
                             f"highest {y.max():.3g}")  # fmt: skip
            else:
                parts.append(f"{name}{y[0]:.3g}")
        for drawn in (*axes.images[:1], *(each for each in axes.collections if isinstance(each, QuadMesh))):
            values = np.ma.masked_invalid(np.ma.asarray(drawn.get_array()).astype(np.float64)).compressed()
            if len(values):
                parts.append(f"a map of values from {values.min():.3g} to {values.max():.3g}, mean {values.mean():.3g}")
        for bars in axes.containers:
            widths = ", ".join(f"{bar.get_width():.0f}" for bar in getattr(bars, "patches", ()))
            parts += [f"{bars.get_label()}: {widths}"] if widths else []
        if parts:
            yield f"{', '.join(' '.join(name.split()) for name in named if name)}. {'; '.join(parts)}.".replace(
                r"\$", "$"
            )
