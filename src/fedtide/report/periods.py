"""A period of the shift: swing of accuracy within it, accuracy by its hours, and the signal that the server sees."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import swing
from fedtide.evaluate.rounds import score_in
from fedtide.report.formats import Number, points
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord
from fedtide.report.summary import Summary
from fedtide.report.topic import Topic, plan_picture, plan_table, table_of

SWING = Number("swing", points, "swing", by_group=True)

FEW_POINTS = 4
"""Maximum number of evaluations in a period that are too few for a curve."""


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the swing of accuracy within a period, of all rows and of each group."""
    if not record.period or not run.ends_judged(record.view):
        return {}
    curves = {"swing": run.accuracy(record.view)}
    curves |= {f"swing_{group}": run.accuracy(record.view, group) for group in record.groups}
    return {name: swing(*curve, record.period, record.window) for name, curve in curves.items()}


@plan_table("Swings of groups")
def swings_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of the swing of each group, a row per method; None without groups or a period.

    The highest minus the lowest {score} of each group within a period.
    """
    return table_of(summary, [Number(f"swing_{group}", points, f"{group} clients") for group in summary.groups])


@plan_picture("period", "One period, hour by hour", "a whole period in which groups take turns")
def one_period(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the last rounds folded into one period, by group of clients.

    {Score} over {span}, folded into one period; the background is light if the first group takes part.
    """
    period = record.period
    methods = [m for m in record.methods if any(len(run.accuracy(record.view)[0]) for run in m.runs)]
    if not period or not record.groups or not methods or period > record.experiment.rounds:
        return None
    figure, panels = figures.grid(len(methods), high=3.3)
    low, high = [], []
    for axes, method in zip(panels, methods, strict=True):
        _shade_hours(axes, method, period)
        for k, group in enumerate(record.groups):
            curves = [_folded(record, run, period, group) for run in method.runs]
            line = figures.Look(figures.GROUP_COLORS[k % 5], figures.DASHES[k % 4], "os^D"[k % 4])
            figures.band(axes, curves, figures.label(f"{group} clients"), line, every=1)
        pooled = [_folded(record, run, period) for run in method.runs]
        figures.band(axes, pooled, "all", figures.Look("#555555", ":"))
        _note_points(axes, max(len(at) for at, _ in pooled) - 1)
        axes.set_title(figures.label(method.name), fontsize=10)
        axes.set_xlabel(figures.label(f"rounds since the peak of {record.groups[0]}"))
        axes.set_xlim(0, period)
        values = [np.asarray(curve.get_ydata()) for curve in axes.lines]
        values += [np.asarray(area.get_paths()[0].vertices)[:, 1] for area in axes.collections]
        low += [column.min() for column in values]
        high += [column.max() for column in values]
    room = 0.12 * (max(high) - min(low)) + 0.5
    bottom = min(low) - room if min(low) < 0 else max(min(low) - room, 0)  # a skill may be below 0
    panels[0].set_ylim(bottom, min(max(high) + room, 100))
    for axes in filter(figures.leftmost, panels):
        axes.set_ylabel(f"{record.experiment.score} of {record.whose}, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), fontsize=9)
    return figures.svg(figure, f"{record.experiment.score} within one period")


def _note_points(axes: Axes, points: int) -> None:
    """Note a small number of points in a period, and draw their curve thin."""
    if 0 < points <= FEW_POINTS:
        for line in axes.lines:
            line.set(linewidth=0.9, marker=line.get_marker() if line.get_marker() != "None" else ".")
        text = f"{points} point{'s' * (points > 1)} a period"
        axes.text(0.99, 0.98, text, transform=axes.transAxes, ha="right", va="top", fontsize=8, color="#555555")


def _shade_hours(axes: Axes, method: MethodRecord, period: float) -> None:
    """Shade the hours by the expected participants: darker with fewer of the first group."""
    share = method.runs[0].every_round(lambda line: line.get("expected", [None])[0])[: int(period)]
    if method.shifted and len(share):
        axes.imshow(
            1 - share[None, :], extent=(0, period, 0, 1), transform=axes.get_xaxis_transform(), aspect="auto",
            cmap=matplotlib.colors.LinearSegmentedColormap.from_list("day", ["#E69F0038", "#3B4C8A58"]), zorder=-2,
            interpolation="bilinear", vmin=0, vmax=1,
        )  # fmt: skip


def _folded(record: ExperimentRecord, run: RunRecord, period: float, group: str | None = None) -> figures.Curve:
    """Fold the late accuracy of a run into one period, averaged by place in the period."""
    rounds, values = run.accuracy(record.view, group)
    if not len(rounds):
        return rounds, values
    late, weights = rounds > rounds[-1] - record.window, run.weights_of(record.view, rounds)
    place = np.mod(rounds[late], period)
    places = np.unique(place)
    at = [late.nonzero()[0][place == p] for p in places]
    means = np.array([np.average(values[k], weights=None if weights is None else weights[k]) for k in at])
    # The end of a period is the beginning of the next one.
    return np.append(places, places[0] + period), np.append(means, means[0])


@plan_picture("participants", "What the server sees", "a method whose clients take the model as it is")
def participants(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the accuracy of the model as it was sent out, on the participants' own training rows.

    {Score} of the model as it was sent out, on the participants' training rows before they train.{band}
    """
    rounds = record.experiment.rounds
    span = int(min(4 * record.period, rounds)) if record.period else rounds
    curves = record.curves(lambda run: figures.by_round(run.every_round(lambda line: score_in(line["participants"]))))
    if not curves or span < 4:
        return None
    # The participants change from round to round: in one panel these lines would hide each other.
    figure, panels = figures.grid(len(curves), widest=2, high=1.9)
    for axes, (number, of_runs) in zip(panels, curves.items(), strict=True):
        figures.band(
            axes, [(at[-span:], values[-span:]) for at, values in of_runs], "", figures.look(number), width=1.2
        )
        axes.set_title(figures.label(record.names[number]), fontsize=10)
        figures.over_rounds(axes, rounds - span, rounds)
        if figures.leftmost(axes):
            axes.set_ylabel(f"{record.experiment.score} on the\nparticipants' rows, %")
    return figures.svg(figure, f"{record.experiment.score} on the participants")


TOPIC = Topic((SWING,), measure, (one_period, participants), (swings_table,))
