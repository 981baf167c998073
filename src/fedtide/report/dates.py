"""Rounds that are windows of wall-clock time: accuracy over dates, and by hour, weekday and month."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import matplotlib.dates as mdates
import numpy as np
from matplotlib.axes import Axes

from fedtide.draw import figures
from fedtide.evaluate.rounds import score_in, weight_in
from fedtide.report.run_records import ExperimentRecord, RunRecord
from fedtide.report.topic import Topic, plan_picture

DAY = 86400.0
NOTHING = 1e-9
"""Weight of an evaluation that has none."""


def dates_of(run: RunRecord) -> list[datetime]:
    """Return the beginning of the window that each evaluation is about, by the clocks of its zone."""
    return [datetime.fromisoformat(line["window"]["next"]) for line in run.judged if "window" in line]


@figures.styled
def accuracy_over_dates(record: ExperimentRecord) -> figures.Drawn:
    """Draw accuracy on the next window over dates, faded, and below it the number of clients with new rows."""
    figure, (top, below) = figures.stack_panels([3.4, 1.0])
    curves = record.curves(lambda run: _course(run, record.view))
    figures.bands(
        top, curves, record.names, f"{record.experiment.score} of {record.whose}\non the next window, %, faded"
    )
    figures.from_below(top, [values for of_runs in curves.values() for _, values in of_runs])
    figures.legend_above(top)
    run = next(run for run in record.runs if run.lines)
    clients = [(_place(line["window"]["begin"]), line["window"]["came"]) for line in run.lines if "window" in line]
    at, counts = np.array(clients, dtype=np.float64).T
    below.fill_between(at, counts, step="post", color="#444444", alpha=0.35, lw=0)
    below.set_ylim(bottom=0)
    below.set_ylabel("clients with\nnew rows")
    locator = mdates.AutoDateLocator(minticks=4, maxticks=9)
    below.xaxis.set_major_locator(locator)
    below.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator))
    below.set_xlabel("beginning of the window")
    return figures.svg(figure, f"{record.experiment.score} over dates")


def _place(iso: str) -> float:
    """Return the place of a time on an axis of dates, by the clocks of its zone."""
    return float(mdates.date2num(datetime.fromisoformat(iso).replace(tzinfo=None)))


def _course(run: RunRecord, view: str) -> figures.Curve:
    """Return the dates of the windows that were tested on, on an axis of dates, and the faded accuracy there."""
    begins = {line["round"] + 1: _place(line["window"]["next"]) for line in run.judged if "window" in line}
    rounds, values = run.course(view)
    return np.array([begins[at] for at in rounds]), values


# -- by hour, weekday, month -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cycle:
    """A cycle of dates.

    Args:
        name: title of the axis.
        of: place of a date in the cycle.
        names: names of the places; () for numbers.
        longest: maximum length of a window, in seconds.
        shortest: minimum length of a run, in seconds.
    """

    name: str
    of: Callable[[datetime], int]
    names: tuple[str, ...] = ()
    longest: float = DAY
    shortest: float = 14 * DAY


CYCLES = (
    Cycle("hour of the day", lambda at: at.hour, longest=DAY / 2, shortest=2 * DAY),
    Cycle("weekday", lambda at: at.weekday(), ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")),
    Cycle("month", lambda at: at.month - 1, ("J", "F", "M", "A", "M", "J", "J", "A", "S", "O", "N", "D"),
          longest=31 * DAY, shortest=365 * DAY),
)  # fmt: skip


def cycles_of(record: ExperimentRecord) -> list[Cycle]:
    """Return the cycles with short enough windows and long enough runs."""
    dates = max((dates_of(run) for run in record.runs), key=len, default=[])
    if len(dates) < 4:
        return []
    places = np.array([_place(at.isoformat()) for at in dates]) * DAY
    length, span = float(np.diff(places).min()) / record.experiment.eval_every, float(np.ptp(places))
    fitting = [cycle for cycle in CYCLES if length <= cycle.longest * 1.001 and span >= cycle.shortest * 0.99]
    return [cycle for cycle in fitting if len({cycle.of(at) for at in dates}) > 1]


def _entries(run: RunRecord, view: str, cycle: Cycle) -> list[tuple[int, dict[str, Any]]]:
    """Return the place in a cycle of each evaluation, and its line."""
    lines = (line for line in run.judged if view in line["scores"] and "window" in line)
    return [(cycle.of(datetime.fromisoformat(line["window"]["next"])), line) for line in lines]


def by_cycle(view: str, cycle: Cycle, run: RunRecord) -> figures.Curve:
    """Return the tested places in a cycle, and the accuracy, or the skill, of all rows there."""
    scores: dict[int, list[tuple[float, float]]] = {}
    for place, line in _entries(run, view, cycle):
        score = score_in(line["scores"][view])
        if score is not None:
            scores.setdefault(place, []).append((score, weight_in(line, view) or NOTHING))
    places = sorted(scores)
    means = [np.average(values, weights=weights) for values, weights in (zip(*scores[k], strict=True) for k in places)]
    return np.array(places, dtype=np.float64), np.array(means)


@plan_picture("by_hour", "By hour, weekday and month", 'shift.what = "calendar", with short windows and a long run')
def accuracy_by_cycle(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw accuracy by hour, weekday and month, if rounds are windows of wall-clock time.

    {Score} of {whose} on the next window, by its local time. Below: share of the rows.{band}
    """
    cycles = cycles_of(record)
    if not cycles:
        return None
    wide = 9.6 if len(cycles) > 1 else 6.4
    figure, stacks = figures.stacked(len(cycles), widest=3, heights=[2.6, 0.9], wide=wide)
    low, high = [], []
    for (top, below), cycle in zip(stacks, cycles, strict=True):
        curves = record.curves(partial(by_cycle, record.view, cycle))
        figures.bands(top, curves, record.names, every=1)
        means = [
            100 * figures.stack_runs([values for _, values in of_runs]).mean(axis=0) for of_runs in curves.values()
        ]
        low += [mean.min() for mean in means]
        high += [mean.max() for mean in means]
        _draw_rows(below, record, cycle)
        below.set_xlabel(cycle.name)
        top.tick_params(labelbottom=False)
        for axes in (top, below):
            _mark_places(axes, cycle)
    room = 0.08 * (max(high) - min(low)) + 1
    for top, _ in stacks:
        top.set_ylim(max(min(low) - room, 0) if min(low) >= 0 else min(low) - room, min(max(high) + room, 100))
    stacks[0][0].set_ylabel(f"{record.experiment.score} of {record.whose}\non the next window, %")
    stacks[0][1].set_ylabel("rows, %")
    figures.figure_legend(figure, stacks[0])
    return figures.svg(figure, f"{record.experiment.score} by hour, weekday and month")


def _mark_places(axes: Axes, cycle: Cycle) -> None:
    if cycle.names:
        axes.set_xticks(range(len(cycle.names)), cycle.names)
        axes.set_xlim(-0.5, len(cycle.names) - 0.5)
    else:
        axes.set_xticks(range(0, 25, 6))
        axes.set_xlim(-0.8, 23.8)


def _draw_rows(axes: Axes, record: ExperimentRecord, cycle: Cycle) -> None:
    """Draw the share of the tested rows in each place of a cycle, in the first run."""
    run = next(run for run in record.runs if run.judged)
    counts: dict[int, float] = {}
    for place, line in _entries(run, record.view, cycle):
        counts[place] = counts.get(place, 0.0) + line["scores"][record.view]["rows"]
    places = sorted(counts)
    shares = 100 * np.array([counts[place] for place in places]) / max(sum(counts.values()), 1.0)
    axes.bar(places, shares, width=0.8, color="#444444", alpha=0.35)
    axes.set_ylim(bottom=0)


TOPIC = Topic(pictures=(accuracy_by_cycle,))
