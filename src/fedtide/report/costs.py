"""Costs: bytes, wall clock, simulated clock, time to a target, and the privacy budget."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import numpy as np
from matplotlib.figure import Figure

from fedtide.core.record import STOPPED, not_undone
from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import time_to_accuracy
from fedtide.evaluate.rounds import score_in
from fedtide.report.formats import (
    FORMATS,
    Format,
    Number,
    arrival,
    brief_seconds,
    count,
    percent,
    rounds,
    rounds_count,
    seconds,
    size,
)
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord, at
from fedtide.report.summary import Summary
from fedtide.report.topic import plan_picture, plan_table, table_of

SCALES = ((3 * 86400.0, 86400.0, "days"), (3 * 3600.0, 3600.0, "hours"), (0.0, 1.0, "seconds"))
"""Units of time: shortest time written in it, its seconds, its name."""

SAME = 3
"""Smallest number of evaluations of which it is said that all are the same."""

REFUSED = Number("refused", count, "refused answers")

COSTS = (
    Number("down", size, "to clients"),
    Number("up", size, "from clients"),
    Number("seconds", seconds, "training"),
    Number("evaluation_seconds", seconds, "evaluation"),
    REFUSED,
)

CLUSTERING = (
    Number("clustering_down", size, "to clients"),
    Number("clustering_up", size, "from clients"),
    Number("clustering_seconds", brief_seconds, "on the server"),
    Number("clustering_longest", brief_seconds, "its longest round"),
)

ROUNDS_TRAINED = Number("rounds_trained", rounds_count, "rounds with training")

WORK = (
    Number("samples", Format("million", 1e-6), "samples"),
    Number("per_million_samples", Format(scale=100.0), "points per million samples"),
    Number("per_second", Format(scale=100.0), "points per second of training"),
)
"""Work of clients, and the mean accuracy over rounds for it."""

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
    Number("one_answer", count),
    Number("first_loss", single=True),
    Number("peak_loss", single=True),
    Number("epsilon"),
)

NUMBERS = (*COSTS, *CLUSTERING, ROUNDS_TRAINED, *WORK, *TIMES, *CLOCK, *OTHERS)


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the costs of one run, in bytes and seconds, and signs of a training that went wrong."""
    out = {name: float(np.nansum(run.every_round(at(name)))) for name in ("down", "up", "answered", "refused")}
    out["diverged"] = float(sum(score_in(scores) is None for _, scores in run.entries(record.view)))
    out |= {"seconds": run.seconds("seconds"), "evaluation_seconds": run.seconds("evaluation")}
    ways = {way: run.every_round(at("clustering", way)) for way in ("down", "up")}
    out |= {f"clustering_{way}": float(np.nansum(sent)) for way, sent in ways.items() if np.isfinite(sent).any()}
    if took := run.clustering():
        out |= {"clustering_seconds": sum(took), "clustering_longest": max(took)}
    if record.clock == "seconds":
        out["simulated_seconds"] = float(run.lines[-1]["seconds"])
    asked, counted = np.nansum(run.every_row(at("trained")), axis=0).tolist() or (0.0, 0.0)
    rounds = sum("trained" in line for line in run.lines)
    if asked:
        out |= {"asked_to_train": asked / rounds, "counted_in_a_round": counted / rounds, "counted": counted / asked}
    if "epsilon" in run.lines[-1]:
        out["epsilon"] = float(run.lines[-1]["epsilon"])
    out["one_answer"] = float(record.real and _answers_one_class(run, record.view))
    losses = run.every_round(at("client_loss", "q50"))
    if record.real:  # a server sees no loss of a client
        losses = run.fact("loss")
    losses = losses[np.isfinite(losses)]
    if len(losses):
        out |= {"first_loss": float(losses[0]), "peak_loss": float(losses.max())}
    out["rounds_trained"] = float(sum(line["trained"][0] > 0 for line in run.lines if "trained" in line))
    out |= _work(record, run, out["seconds"])
    return out | (_times(record, run) if run.ends_judged(record.view) else {})


def _work(record: ExperimentRecord, run: RunRecord, seconds: float) -> dict[str, float]:
    """Return the samples that clients computed with, and the mean accuracy over rounds for them and for the seconds."""
    samples = run.every_round(at("samples"))
    out = {"samples": float(samples.sum())} if np.isfinite(samples).all() else {}
    if run.ends_judged(record.view):
        mean = run.late(record.view, run.accuracy(record.view), len(run.lines))
        spent = {"per_million_samples": out.get("samples", 0.0) / 1e6, "per_second": seconds}
        out |= {name: mean / cost for name, cost in spent.items() if cost > 0}
    return out


def _answers_one_class(run: RunRecord, view: str) -> bool:
    """Tell whether the model of a run seems to answer one class, by what real clients tell of evaluations.

    Its hits are then the same in all of them. Its loss is never below the entropy of hits and misses, because that of
    any constant answer is not.
    """
    pairs = [(score_in(scores), scores.get("loss")) for _, scores in run.entries(view)]
    first = pairs[0][0] if pairs else None
    if len(pairs) < SAME or first is None or not 0.0 < first < 1.0:
        return False
    entropy = -first * math.log(first) - (1.0 - first) * math.log(1.0 - first)
    return all(score == first and loss is not None and loss >= entropy for score, loss in pairs)


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
        stopped = run.lines[-1].get(STOPPED)
        counted = {line["round"] + 1 for line in not_undone(run.lines)}
        judged = [int(done) for done in after if done in counted]
        end = judged[-stopped["evaluations"]] if stopped else len(run.lines)
        out |= {"rounds_to_target": float(end), "time_to_target": float(times[end - 1])}
        out["reached_target"] = float(bool(stopped))
    return out


# -- tables ------------------------------------------------------------------------------------------------------------


@plan_table("The simulated clock")
def clock_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of simulated times and late clients, a row per method; None without such a clock.

    Means over rounds; a client that was asked and does not count was late or never answered.
    """
    short = any(value < 1 for method in summary.methods for value in method.measure("counted").values)
    return table_of(summary, CLOCK) if record.timed or (short and not record.real) else None


@plan_table("Cost")
def cost_table(record: ExperimentRecord, summary: Summary) -> Table:
    """Build the table of bytes sent, wall clock, refused answers, work and what it brings, and times to a target.

    Bytes, wall-clock seconds and samples of one run; a pass without gradients counts as a third of a sample. Points are
    the mean {score} over all rounds. A seed that never reaches a target and stays there counts with its end (≥).
    """
    clock = "rounds" if summary.clock == "rounds" else "simulated time"
    baseline = summary.paired[0].baseline if summary.paired else ""
    without = {"time_to_accuracy"} if not summary.paired else set()
    without |= {"time_to_target"} if summary.clock == "rounds" else set()
    times = [t for t in TIMES if t.name not in without and any(t.name in m.measures for m in summary.methods)]
    finite = {name for m in summary.methods for name in m.measures if m.measure(name).mean is not None}
    pauses = any(value < summary.rounds for m in summary.methods for value in m.measure("rounds_trained").values)
    costs = (*COSTS, *[ROUNDS_TRAINED] * pauses, *(number for number in WORK if number.name in finite))
    header = ["method", *(number.title.format(clock, summary.score, baseline) for number in (*costs, *times))]
    rows = []
    for m in summary.methods:
        cells = [number.written(m.measure(number.name)) for number in costs]
        for time in times:
            written = FORMATS[summary.units[time.name]] if time.name in summary.units else time.written
            cells.append(arrival(m.measure(time.name), m.measure(time.reached), written))
        rows.append([m.name, *cells])
    return Table(header, rows)


@plan_table("Cost of clusters")
def clustering_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of the bytes and seconds of methods whose server groups clients; None without such a method.

    Bytes of the questions beside training by whose answers clients are grouped, and wall-clock seconds of the server's
    own work on clusters, of one run. Both are in the table above, too. Methods that group clients by what they train
    send nothing more for it; "-" is not measured.
    """
    names = {number.name for number in CLUSTERING}
    methods = [method for method in summary.methods if names & method.measures.keys()]
    training = next(number for number in COSTS if number.name == "seconds")
    return table_of(replace(summary, methods=methods), (*CLUSTERING, training)) if methods else None


# -- pictures ----------------------------------------------------------------------------------------------------------


@plan_picture("accuracy_over_time", "{Score} over simulated time", "rounds of different lengths")
def accuracy_over_seconds(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw accuracy over the simulated clock.

    The same against the clock of the simulation: the time in which clients compute and send.{band}
    """
    curves = accuracy_against(record, lambda run: run.times("seconds")) if record.timed else {}
    if not curves:
        return None
    longest = max(float(times[-1]) for of_runs in curves.values() for times, _ in of_runs if len(times))
    _, unit, name = next(scale for scale in SCALES if longest >= scale[0])
    curves = {number: [(times / unit, values) for times, values in of_runs] for number, of_runs in curves.items()}
    figure, (axes,) = figures.stack_panels([3.0])
    figures.accuracies(axes, curves, record.names, f"{record.experiment.score} of {record.whose}, %")
    axes.set_xlabel(f"simulated time, {name}")
    axes.set_xlim(0, longest / unit)
    return figures.svg(figure, f"{record.experiment.score} over simulated time")


@plan_picture("budget_spent", "Privacy budget", "[wire] privacy")
def epsilon_and_accuracy(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the privacy loss of any one client over rounds, and the accuracy at which it was spent.

    Epsilon for any one client over rounds, and {score} against it if there are scores. {budget}{band}
    """
    curves = record.curves(lambda run: figures.by_round(_epsilon(run)))
    if not curves:
        return None
    bought = {number: of_runs for number, of_runs in accuracy_against(record, _epsilon).items() if number in curves}
    figure = Figure(figsize=(9.6 if bought else 6.4, 3.6))
    left, *others = figure.subplots(1, 1 + bool(bought), squeeze=False)[0]
    figures.bands(left, curves, record.names, "epsilon spent", scale=1.0)
    left.set_ylim(bottom=0)
    figures.over_rounds(left, 0, record.experiment.rounds)
    for right in others:
        figures.accuracies(right, bought, record.names, f"{record.experiment.score} of {record.whose}, %")
        right.set_xlabel("epsilon spent")
    return figures.svg(figure, "privacy budget")


def accuracy_against(
    record: ExperimentRecord, spent: Callable[[RunRecord], np.ndarray]
) -> dict[int, list[figures.Curve]]:
    """Return the accuracies of each seed against the mean over seeds of what was spent by then.

    Evaluations that all seeds have count, and of several at one cost the last.
    """
    curves = {}
    for number, of_runs in record.accuracies.items():
        runs = record.methods[number].runs
        judged = [(run, curve) for run, curve in zip(runs, of_runs, strict=True) if len(curve[0])]
        common = reduce(np.intersect1d, (after for _, (after, _) in judged)) if judged else np.empty(0)
        if len(common):
            mean = np.mean([spent(run)[common.astype(int) - 1] for run, _ in judged], axis=0)
            last = np.append(np.diff(mean) > 0, True)
            curves[number] = [(mean[last], values[np.isin(after, common)][last]) for _, (after, values) in judged]
    return curves


def _epsilon(run: RunRecord) -> np.ndarray:
    """Return epsilon after each round (rounds,); NaN if sums are not private."""
    return run.every_round(at("epsilon"))
