"""The simulated clock in reports: duration of runs, share of asked clients that counted, accuracy over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedtide.report.figures import STYLE, Drawn, band, from_below, label, legend_above, look, stack_runs, svg
from fedtide.report.measures import count, percent, seconds
from fedtide.report.reading import ExperimentRecord, MethodRecord, RunRecord
from fedtide.report.summary import Summary
from fedtide.report.tables import Table

SCALES = ((3 * 86400.0, 86400.0, "days"), (3 * 3600.0, 3600.0, "hours"), (0.0, 1.0, "seconds"))
"""Units of time: shortest time written in it, its seconds, its name."""


def clock_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of simulated times and late clients, a row per method; None without such a clock.

    A client that was asked to train but not counted was late, was not among the first, or did not answer.
    """
    short = any(value < 1 for method in summary.methods for value in method.measure("counted").values)
    if not record.timed and not short:
        return None
    header = ["method", "simulated time", "asked to train, in a round", "counted, in a round", "counted of those asked"]
    rows = [
        [
            method.name,
            seconds(method.measure("simulated_seconds")),
            count(method.measure("asked_to_train")),
            count(method.measure("counted_in_a_round")),
            percent(method.measure("counted")),
        ]
        for method in summary.methods
    ]
    return Table(header, rows)


def accuracy_over_seconds(record: ExperimentRecord) -> Drawn | None:
    """Draw accuracy over the simulated clock, a mean over seeds; None where all rounds take equally long."""
    drawn = [(n, m) for n, m in enumerate(record.methods) if any(len(run.accuracy(record.view)[0]) for run in m.runs)]
    if not record.timed or not drawn:
        return None
    curves = {number: accuracy_against(record, method, lambda run: run.times("seconds")) for number, method in drawn}
    longest = max(float(at[-1]) for times in curves.values() for at, _ in times if len(at))
    _, unit, name = next(each for each in SCALES if longest >= each[0])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.6))
        axes: Any = figure.subplots()
        for number, method in drawn:
            scaled = [(at / unit, values) for at, values in curves[number]]
            band(axes, scaled, label(method.name), look(number))
        axes.set_xlabel(f"simulated time, {name}")
        axes.set_xlim(0, longest / unit)
        from_below(axes, [values for times in curves.values() for _, values in times])
        axes.set_ylabel(f"{record.experiment.score} of {record.whose}, %")
        legend_above(axes)
        return svg(figure, f"{record.experiment.score} over simulated time")


def accuracy_against(
    record: ExperimentRecord, method: MethodRecord, spent: Callable[[RunRecord], np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the accuracies of each seed, against what was spent after that number of rounds, averaged over seeds."""
    found = [run.accuracy(record.view) for run in method.runs]
    each = [spent(run)[after.astype(int) - 1] for run, (after, _) in zip(method.runs, found, strict=True)]
    mean = stack_runs(each).mean(axis=0)
    return [(mean, values[: len(mean)]) for _, values in found]
