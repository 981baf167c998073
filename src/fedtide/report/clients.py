"""Single clients: how accuracy is spread over them, and their labels."""

from __future__ import annotations

from operator import itemgetter

import numpy as np
from matplotlib.figure import Figure

from fedtide.draw import figures
from fedtide.draw.holdings import draw_label_shares, heterogeneous
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import METRICS, cumulative
from fedtide.evaluate.rounds import rows_in
from fedtide.report.formats import FORMATS, Number, points
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord
from fedtide.report.summary import Summary
from fedtide.report.topic import Topic, plan_picture, plan_table, table_of

SPREAD = Number("client_std", points, "standard deviation")


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the standard deviation of accuracy over clients; other metrics are in the topic of accuracy."""
    if not run.ends_judged(record.view):
        return {}
    at, variance = run.curve(record.view, itemgetter("client_variance"))
    return {"client_std": run.late(record.view, (at, np.sqrt(variance)), record.window, rows_in)}


@plan_table("Over clients")
def clients_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of the spread of accuracy over clients, a row per method; None without evaluations.

    Every client counts the same, as means over {span}; the worst tenth is chosen anew at each evaluation.
    """
    mean, *others = [Number(m.name, FORMATS[m.unit], m.title) for m in METRICS if m.title]
    return table_of(summary, [mean, SPREAD, *others])


@plan_picture("clients", "Clients", "evaluations of clients")
def client_distribution(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the share of clients with at most a given accuracy.

    Spread of {score} over clients: a curve further right is better, a steeper one is more even.
    """
    means = {number: _client_means(record, method) for number, method in record.numbered}
    means = {number: accuracies for number, accuracies in means.items() if len(accuracies)}
    if not means:
        return None
    figure = Figure(figsize=(6.4, 3.9))
    axes = figure.subplots()
    for number, accuracies in means.items():
        values, below = cumulative(np.round(accuracies, 6))
        steps = 100 * np.array([values[0], *values, 1.0]), 100 * np.array([0.0, *below, 1.0])
        style, every = figures.look(number), max(len(steps[0]) // 6, 1)
        axes.step(*steps, where="post", label=figures.label(record.names[number]), color=style.color, ls=style.dashes,
                  marker=style.marker, markevery=every, ms=4, lw=1.8)  # fmt: skip
    axes.set_xlabel(f"{record.experiment.score} of a client, % (mean over {record.span})")
    axes.set_ylabel("clients with at most that, %")
    axes.set_ylim(0, 100)
    figures.legend_above(axes, room=5.4)
    return figures.svg(figure, f"{record.experiment.score} over clients")


def _client_means(record: ExperimentRecord, method: MethodRecord) -> np.ndarray:
    """Return the late accuracy of each client at each seed."""
    means = []
    for run in method.runs:
        columns = run.columns(record.view)
        counted = (columns.round >= len(run.lines) - record.window) & ~np.isnan(columns.accuracy)
        at, _ = run.accuracy(record.view)
        weight, counts = np.ones(len(counted)), run.weights_of(record.view, at)
        if counts is not None:  # a client has a part of the weight, by its rows
            counted &= np.isin(columns.round + 1, at)
            _, evaluation = np.unique(columns.round[counted], return_inverse=True)
            rows = columns.rows[counted]
            part = rows / np.bincount(evaluation, rows)[evaluation]
            weight[counted] = part * counts[np.searchsorted(at, columns.round[counted] + 1)]
        _, place = np.unique(columns.client[counted], return_inverse=True)
        weights = weight[counted]
        means.append(np.bincount(place, weights * columns.accuracy[counted]) / np.bincount(place, weights))
    return np.concatenate(means) if means else np.empty(0)


@plan_picture("labels", "Who holds which labels", "labels that differ between clients")
def label_shares(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the share of each class in each client's training rows.

    A column is a client: the darker a cell, the more of its training rows belong to that class.
    """
    labels = (run.labels for run in record.runs if run.labels is not None and run.labels["counts"] is not None)
    for first in labels:
        counts = first["counts"].numpy().astype(np.float64)
        return draw_label_shares(counts, first["of"], first["names"]) if heterogeneous(counts) else None
    return None


TOPIC = Topic((SPREAD,), measure, (label_shares, client_distribution), (clients_table,))
