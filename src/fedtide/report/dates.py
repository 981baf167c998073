"""Runs whose rounds are windows of wall-clock time: accuracy over dates, and by hour, weekday and month."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import matplotlib
import matplotlib.dates as mdates
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedtide.evaluate.rounds import score_in, weight_in
from fedtide.report.figures import (
    STYLE,
    Drawn,
    band,
    columns,
    from_below,
    label,
    legend_above,
    look,
    stack_runs,
    stacked,
    svg,
)
from fedtide.report.reading import ExperimentRecord, RunRecord

HOUR, DAY = 3600.0, 86400.0
NOTHING = 1e-9
"""Weight of an evaluation that has none."""


def dates_of(run: RunRecord) -> list[datetime]:
    """Return the beginning of the window that each evaluation is about, by the clocks of its zone."""
    return [datetime.fromisoformat(line["window"]["next"]) for line in run.judged if "window" in line]


def empty_windows(run: RunRecord) -> int:
    """Count the rounds in whose window no client had anything new."""
    return sum(line["window"]["came"] == 0 for line in run.lines if "window" in line)


def accuracy_over_dates(record: ExperimentRecord) -> Drawn:
    """Draw accuracy on the next window over dates, faded, and below it how many clients had something new."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 5.0))
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1))
        shown = []
        for number, method in enumerate(record.methods):
            curves = [_course(run, record.view) for run in method.runs]
            band(top, curves, label(method.name), look(number))
            shown += [values for _, values in curves]
        from_below(top, shown)
        legend_above(top)
        top.set_ylabel(f"{record.experiment.score} of {record.whose}\non the next window, %, faded")
        run = next(run for method in record.methods for run in method.runs if run.lines)
        came = [(_place(line["window"]["begin"]), line["window"]["came"]) for line in run.lines if "window" in line]
        below.fill_between(*np.array(came, dtype=np.float64).T, step="post", color="#444444", alpha=0.35, lw=0)
        below.set_ylim(bottom=0)
        below.set_ylabel("clients with\nnew rows")
        locator = mdates.AutoDateLocator(minticks=4, maxticks=9)
        below.xaxis.set_major_locator(locator)
        below.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator))
        below.set_xlabel("beginning of the window")
        return svg(figure, f"{record.experiment.score} over dates")


def _place(iso: str) -> float:
    """Return the place of a time on an axis of dates, by the clocks of its zone."""
    return float(mdates.date2num(datetime.fromisoformat(iso).replace(tzinfo=None)))


def _course(run: RunRecord, view: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the dates of the windows that were tested on, on an axis of dates, and the faded accuracy there."""
    begins = {line["round"] + 1: _place(line["window"]["next"]) for line in run.judged if "window" in line}
    rounds, values = run.course(view)
    return np.array([begins[at] for at in rounds]), values


# -- by hour, weekday, month -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cycle:
    """A way in which dates come again.

    name: of the axis. of: place of a date in it. names: of the places; () for numbers. longest: window, in seconds,
    above which nothing is told. shortest: time, in seconds, below which nothing comes again.
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
    """Return the cycles that windows are short enough for, and runs long enough."""
    told = [dates_of(run) for method in record.methods for run in method.runs]
    dates = max(told, key=len, default=[])
    if len(dates) < 4:
        return []
    places = np.array([_place(at.isoformat()) for at in dates]) * DAY
    length, span = float(np.diff(places).min()) / record.experiment.eval_every, float(np.ptp(places))
    fitting = [cycle for cycle in CYCLES if length <= cycle.longest * 1.001 and span >= cycle.shortest * 0.99]
    return [cycle for cycle in fitting if len({cycle.of(at) for at in dates}) > 1]


def by_cycle(run: RunRecord, view: str, cycle: Cycle) -> tuple[np.ndarray, np.ndarray]:
    """Return the places in a cycle that were tested in, and the accuracy, or the skill, of all rows there."""
    found: dict[int, list[tuple[float, float]]] = {}
    for line in run.judged:
        scores = line["scores"].get(view, {})
        if score_in(scores) is not None and "window" in line:
            place = cycle.of(datetime.fromisoformat(line["window"]["next"]))
            found.setdefault(place, []).append((score_in(scores), weight_in(line, view) or NOTHING))
    places = sorted(found)
    means = [np.average(values, weights=weights) for values, weights in (zip(*found[k], strict=True) for k in places)]
    return np.array(places, dtype=np.float64), np.array(means)


def accuracy_by_cycle(record: ExperimentRecord) -> Drawn | None:
    """Draw mean accuracy by hour, weekday and month; below how many rows there were. None where nothing is told."""
    cycles = cycles_of(record)
    if not cycles:
        return None
    with matplotlib.rc_context(STYLE):
        wide = 9.6 if len(cycles) > 1 else 6.4
        figure, stacks = stacked(len(cycles), widest=3, heights=[2.6, 0.9], wide=wide)
        low, high = [], []
        for (top, below), cycle in zip(stacks, cycles, strict=True):
            for number, method in enumerate(record.methods):
                curves = [by_cycle(run, record.view, cycle) for run in method.runs]
                if any(len(at) for at, _ in curves):
                    band(top, curves, label(method.name), look(number), every=1)
                    values = stack_runs([values for _, values in curves]).mean(axis=0)
                    low.append(100 * values.min())
                    high.append(100 * values.max())
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
        handles, labels = stacks[0][0].get_legend_handles_labels()
        room = figure.get_size_inches()[0] - 0.6
        figure.legend(handles, labels, loc="outside upper left", ncols=columns(labels, room), fontsize=9)
        return svg(figure, f"{record.experiment.score} by hour, weekday and month")


def _mark_places(axes: Axes, cycle: Cycle) -> None:
    if cycle.names:
        axes.set_xticks(range(len(cycle.names)), cycle.names)
        axes.set_xlim(-0.5, len(cycle.names) - 0.5)
    else:
        axes.set_xticks(range(0, 25, 6))
        axes.set_xlim(-0.8, 23.8)


def _draw_rows(axes: Axes, record: ExperimentRecord, cycle: Cycle) -> None:
    """Draw the share of the rows that were tested on in each place of a cycle, in the first run."""
    run = next(run for method in record.methods for run in method.runs if run.judged)
    counts: dict[int, float] = {}
    for line in run.judged:
        if record.view in line["scores"] and "window" in line:
            place = cycle.of(datetime.fromisoformat(line["window"]["next"]))
            counts[place] = counts.get(place, 0.0) + line["scores"][record.view]["rows"]
    places = sorted(counts)
    shares = 100 * np.array([counts[place] for place in places]) / max(sum(counts.values()), 1.0)
    axes.bar(places, shares, width=0.8, color="#444444", alpha=0.35)
    axes.set_ylim(bottom=0)


def in_words(record: ExperimentRecord) -> str:
    """Say how many windows had no rows, in the first run; "" where all had some or rounds are no windows."""
    run: Any = next((run for method in record.methods for run in method.runs if run.lines), None)
    empty = 0 if run is None else empty_windows(run)
    if not empty:
        return ""
    return f"In {empty} of {len(run.lines)} windows nothing came, and no client took part. "
