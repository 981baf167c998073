"""Costs: bytes, wall clock, simulated clock, time to a target, and the privacy budget."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import time_to_accuracy
from fedtide.evaluate.rounds import score_in
from fedtide.report.formats import FORMATS, Number, arrival, count, percent, rounds, seconds, size
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord
from fedtide.report.summary import MethodSummary, Summary
from fedtide.report.topic import Topic, plan_picture, plan_table, table_of

SCALES = ((3 * 86400.0, 86400.0, "days"), (3 * 3600.0, 3600.0, "hours"), (0.0, 1.0, "seconds"))
"""Units of time: shortest time written in it, its seconds, its name."""

REFUSED = Number("refused", count, "refused answers")

COSTS = (
    Number("down", size, "to clients"),
    Number("up", size, "from clients"),
    Number("seconds", seconds, "training"),
    Number("evaluation_seconds", seconds, "evaluation"),
    REFUSED,
)

TIMES = (
    Number("time_to_accuracy", seconds, "{} to the final {} of {}", reached="reached_accuracy"),
    Number("rounds_to_target", rounds, "rounds to the target", reached="reached_target"),
    Number("time_to_target", seconds, "simulated time to the target", reached="reached_target"),
)

CLOCK = (
    Number("simulated_seconds", seconds, "simulated time"),
    Number("asked_to_train", count, "asked to train, in a round"),
    Number("counted_in_a_round", count, "counted, in a round"),
    Number("counted", percent, "counted of those asked"),
)

OTHERS = (
    Number("reached_accuracy", percent),
    Number("reached_target", percent),
    Number("answered", count),
    Number("diverged", count),
    Number("first_loss"),
    Number("peak_loss"),
)


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the costs of one run, in bytes and seconds, and signs of a training that went wrong."""
    out = {name: run.total(name) for name in ("down", "up", "answered", "refused")}
    out["diverged"] = float(sum(score_in(scores) is None for _, scores in run.entries(record.view)))
    out |= {"seconds": run.seconds("seconds"), "evaluation_seconds": run.seconds("evaluation")}
    if record.clock == "seconds":
        out["simulated_seconds"] = float(run.lines[-1]["seconds"])
    trained = [line["trained"] for line in run.lines if "trained" in line]
    asked, counted = (sum(column) for column in zip(*trained, strict=True)) if trained else (0, 0)
    if asked:
        out |= {"asked_to_train": asked / len(trained), "counted_in_a_round": counted / len(trained)}
        out["counted"] = counted / asked
    losses = [line["client_loss"]["q50"] for line in run.lines if "client_loss" in line]
    losses = [loss for loss in losses if loss is not None]
    if losses:
        out |= {"first_loss": losses[0], "peak_loss": max(losses)}
    return out | (_times(record, run) if run.ends_judged(record.view) else {})


def _times(record: ExperimentRecord, run: RunRecord) -> dict[str, float]:
    """Return times until the final accuracy of the baseline and until the target of the experiment.

    A run that never arrives counts with its end. If the target needs several evaluations in a row, the first counts.
    """
    out = {}
    after, times = run.accuracy(record.view)[0], run.times(record.clock)
    if run.seed in record.targets:
        first = time_to_accuracy(times[after - 1], run.course(record.view)[1], record.targets[run.seed])
        out = {"time_to_accuracy": min(first, times[-1]), "reached_accuracy": float(math.isfinite(first))}
    if record.experiment.stop_at is not None:
        end = len(run.lines) if run.target is None else int(after[len(after) - run.target[1]])
        out |= {"rounds_to_target": float(end), "time_to_target": float(times[end - 1])}
        out["reached_target"] = float(run.target is not None)
    return out


# -- tables ------------------------------------------------------------------------------------------------------------


@plan_table("Cost")
def cost_table(record: ExperimentRecord, summary: Summary) -> Table:
    """Build the table of bytes sent, wall clock, refused answers, and times to a target.

    Bytes and wall-clock seconds of one run; a seed that never reaches a target and stays there counts with its end (≥).
    """
    clock = "rounds" if summary.clock == "rounds" else "simulated time"
    times = [
        (time, time.title.format(clock, summary.score, summary.paired[0].baseline if summary.paired else ""))
        for time in TIMES
        if any(time.name in m.measures for m in summary.methods)
        and (summary.paired or time.name != "time_to_accuracy")
        and (summary.clock == "seconds" or time.name != "time_to_target")
    ]

    rows = [
        [
            m.name,
            *(number.written(m.measure(number.name)) for number in COSTS),
            *(_arrival(summary, m, time) for time, _ in times),
        ]
        for m in summary.methods
    ]
    return Table(["method", *(number.title for number in COSTS), *(title for _, title in times)], rows)


def _arrival(summary: Summary, method: MethodSummary, time: Number) -> str:
    written = FORMATS[summary.units[time.name]] if time.name in summary.units else time.written
    return arrival(method.measure(time.name), method.measure(time.reached), written)


@plan_table("The simulated clock")
def clock_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of simulated times and late clients, a row per method; None without such a clock.

    Means over rounds; a client that was asked and does not count was late or never answered.
    """
    short = any(value < 1 for method in summary.methods for value in method.measure("counted").values)
    return table_of(summary, CLOCK) if record.timed or short else None


# -- pictures ----------------------------------------------------------------------------------------------------------


@plan_picture("accuracy_over_time", "{Score} over simulated time", "rounds of different lengths")
def accuracy_over_seconds(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw accuracy over the simulated clock.

    The same against the clock of the simulation: the time in which clients compute and send.{band}
    """
    curves = _accuracy_against(record, lambda run: run.times("seconds")) if record.timed else {}
    if not curves:
        return None
    longest = max(float(at[-1]) for of_runs in curves.values() for at, _ in of_runs if len(at))
    _, unit, name = next(scale for scale in SCALES if longest >= scale[0])
    figure, (axes,) = figures.stack_panels([3.0])
    _draw_accuracies(axes, record, {n: [(at / unit, values) for at, values in c] for n, c in curves.items()})
    axes.set_xlabel(f"simulated time, {name}")
    axes.set_xlim(0, longest / unit)
    figures.legend_above(axes)
    return figures.svg(figure, f"{record.experiment.score} over simulated time")


@plan_picture("budget_spent", "Privacy budget", "[wire] privacy")
def epsilon_and_accuracy(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the privacy loss of any one client over rounds, and the accuracy at which it was spent.

    Left: epsilon for any one client over rounds. Right: {score} against epsilon.{band}
    """
    curves = record.curves(lambda run: figures.by_round(_epsilon(run)))
    if not curves:
        return None
    figure = Figure(figsize=(9.6, 3.6))
    left, right = figure.subplots(1, 2)
    figures.bands(left, curves, record.names, "epsilon spent", scale=1.0)
    left.set_ylim(bottom=0)
    figures.over_rounds(left, 0, record.experiment.rounds)
    bought = _accuracy_against(record, _epsilon)
    _draw_accuracies(right, record, {number: bought[number] for number in curves if number in bought})
    right.set_xlabel("epsilon spent")
    figures.legend_above(left)
    return figures.svg(figure, "privacy budget")


def _draw_accuracies(axes: Axes, record: ExperimentRecord, curves: dict[int, list[figures.Curve]]) -> None:
    figures.bands(axes, curves, record.names, f"{record.experiment.score} of {record.whose}, %")
    figures.from_below(axes, [values for of_runs in curves.values() for _, values in of_runs])


def _accuracy_against(
    record: ExperimentRecord, spent: Callable[[RunRecord], np.ndarray]
) -> dict[int, list[figures.Curve]]:
    """Return the accuracies of each seed against the mean over seeds of what was spent by then."""
    curves = {}
    for number, of_runs in record.accuracies.items():
        runs = record.methods[number].runs
        costs = [spent(run)[after.astype(int) - 1] for run, (after, _) in zip(runs, of_runs, strict=True)]
        mean = figures.stack_runs(costs).mean(axis=0)
        curves[number] = [(mean, values[: len(mean)]) for _, values in of_runs]
    return curves


def _epsilon(run: RunRecord) -> np.ndarray:
    """Return epsilon after each round (rounds,); NaN if sums are not private."""
    return run.every_round(lambda line: line.get("epsilon"))


TOPIC = Topic(
    (*COSTS, *TIMES, *CLOCK, *OTHERS),
    measure,
    (accuracy_over_seconds, epsilon_and_accuracy),
    (clock_table, cost_table),
)
