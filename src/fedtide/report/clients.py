"""Single clients: how accuracy is spread over them, their labels, and nodes of real clients with their answers."""

from itertools import product
from textwrap import shorten
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fedtide.core.errors import printable
from fedtide.draw import figures
from fedtide.draw.holdings import draw_label_shares, heterogeneous
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import METRICS, Measure
from fedtide.evaluate.rounds import size_in
from fedtide.remote.asks import closed_in, nodes_of, read_asks, state_of
from fedtide.report.formats import FORMATS, Number, bytes_of, points, seconds
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord, at
from fedtide.report.summary import Summary
from fedtide.report.topic import plan_picture, plan_table, table_of

SPREAD = Number("client_std", points, "standard deviation", single=True)

NUMBERS = (SPREAD,)


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the standard deviation of accuracy over clients; other metrics are in the topic of accuracy."""
    if not run.ends_judged(record.view):
        return {}
    after, variance = run.curve(record.view, at("client_variance"))
    return {"client_std": run.late(record.view, (after, np.sqrt(variance)), record.window, size_in)}


@plan_table("Over clients", single=True, without_rounds=True)
def clients_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of the spread of accuracy over clients, a row per method; None without evaluations.

    Every client counts the same, {averaged}; the worst tenth is chosen anew at each evaluation.
    """
    mean, *others = [Number(m.name, FORMATS[m.unit], m.title) for m in METRICS if m.title]
    return table_of(summary, [mean, SPREAD, *others])


@plan_picture("labels", "Who holds which labels", "labels that differ between clients", single=True)
def label_shares(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the share of each class in each client's training rows.

    A column is a client: the darker a cell, the more of its training rows belong to that class.
    """
    labels = next((run.labels for run in record.runs if run.labels and run.labels["counts"] is not None), None)
    counts = np.zeros((0, 0)) if labels is None else labels["counts"].numpy().astype(np.float64)
    return draw_label_shares(counts, labels["of"], labels["names"]) if labels and heterogeneous(counts) else None


@plan_picture("clients", "Clients", "evaluations of clients", single=True)
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
        style, every = figures.look(number), max(len(accuracies) // 6, 1)
        axes.ecdf(100 * np.round(accuracies, 6), label=figures.label(record.names[number]), color=style.color,
                  ls=style.dashes, marker=style.marker, markevery=every, ms=4, lw=1.8)  # fmt: skip
    axes.set_xlabel(f"{record.experiment.score} of a client, % ({record.averaged.removeprefix('as ')})")
    axes.set_ylabel("clients with at most that, %")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    figures.legend_above(axes, room=5.4)
    return figures.svg(figure, f"{record.experiment.score} over clients")


def _client_means(record: ExperimentRecord, method: MethodRecord) -> np.ndarray:
    """Return the late accuracy of each client at each seed."""
    means = []
    for run in method.runs:
        table = run.clients(record.view)
        names = ("round", "client", "rows", "accuracy")
        rounds, clients, rows, accuracies = (table[name].to_numpy() for name in names)
        counted = (rounds >= len(run.lines) - record.window) & np.isfinite(accuracies)
        after, _ = run.accuracy(record.view)
        counts = run.weights_of(record.view, after)
        weights = np.ones(len(counted))
        if counts is not None:  # a client has a part of the weight, by its rows
            counted &= np.isin(rounds + 1, after)
            _, evaluation = np.unique(rounds[counted], return_inverse=True)
            part = rows[counted] / np.bincount(evaluation, rows[counted])[evaluation]
            weights[counted] = part * counts[np.searchsorted(after, rounds[counted] + 1)]
        _, place = np.unique(clients[counted], return_inverse=True)
        means.append(np.bincount(place, (weights * accuracies)[counted]) / np.bincount(place, weights[counted]))
    return np.concatenate(means) if means else np.empty(0)


# -- nodes of real clients ---------------------------------------------------------------------------------------------

STATES = {
    "answered": ("answered", figures.STATE_COLORS[0]),
    "abstained": ("had nothing to say", figures.STATE_COLORS[1]),
    "at work": ("still at work", figures.STATE_COLORS[2]),
    "late": ("late, or lost on the way", figures.STATE_COLORS[3]),
    "refused": ("refused", figures.STATE_COLORS[4]),
    "idle": ("connected, not asked", "#DDDDDD"),
    "away": ("not connected", "#FFFFFF"),
}
"""States of a node in a round, the best first, with words and colors for any kind of color vision."""

DRAWN = 60
"""Maximum number of nodes in a picture."""


def _lines(record: ExperimentRecord) -> list[dict[str, Any]]:
    """Return the lines of all rounds, and of questions before round 0, if any."""
    lines = [line for run in record.runs for line in read_asks(run.folder)]
    return [line for line in lines if line["round"] >= 0 or line["asks"]]


@plan_table("Nodes")
def nodes_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of the nodes; None if clients were simulated.

    Counts are of answers of clients. The server sees the values "shown beside scores" of each client by itself.
    """
    lines = _lines(record)
    if not lines:
        return None
    header = ["node", "clients", "rounds connected", "asked", "answered", "late or lost", "refused",
              "most frequent reason", "shown beside scores", "received", "sent", "median wait"]  # fmt: skip
    rows = []
    for node in nodes_of(lines):
        commonest = node.reasons.most_common(1)
        words = shorten(printable(commonest[0][0]), 80, placeholder=" ...") if commonest else ""
        reason = f"{words} ({commonest[0][1]})" if commonest else "-"
        counts = [node.words[word] for word in ("answered", "late", "refused")]
        wait = seconds(Measure(float(np.median(node.seconds)), None, [])) if node.seconds else "-"
        rows.append([printable(node.name), str(len(node.clients)), f"{node.rounds} of {len(lines)}", str(node.asked),
                     *map(str, counts), reason, ", ".join(sorted(node.shown)) or "nothing", bytes_of(node.down),
                     bytes_of(node.up), wait])  # fmt: skip
    return Table(header, rows)


@plan_table("Sums that stayed masked")
def closed_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of what was never opened, because too few clients chose it; None if all was.

    A model whose sum stays masked is not trained in that round, and clients may choose it all the same.
    """
    rows = [[few.name, str(few.times), str(few.most), str(few.needed)] for few in closed_in(_lines(record))]
    return Table(["sum", "times", "clients at most", "clients needed"], rows) if rows else None


@plan_picture("nodes_over_rounds", "State of each node", "real clients")
def nodes_over_rounds(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the state of each node of real clients in each round.

    The worst state of the node's clients in each round.
    """
    lines = _lines(record)
    names = [node.name for node in nodes_of(lines)][:DRAWN]
    if not lines or not names:
        return None
    order = list(STATES)
    cells = np.zeros((len(names), len(lines)), dtype=np.int64)
    for (row, name), (column, line) in product(enumerate(names), enumerate(lines)):
        answers = [ask["nodes"][name]["clients"].values() for ask in line["asks"] if name in ask["nodes"]]
        states = [order.index(state_of(word)) for words in answers for word in words]
        # The worst state, because a person has to look at it.
        cells[row, column] = max(states, default=order.index("idle" if name in line["present"] else "away"))
    figure = Figure(figsize=(9.6, min(1.2 + 0.22 * len(names), 9.0)))
    axes = figure.subplots()
    colors = ListedColormap([color for _, color in STATES.values()])
    first = lines[0]["round"] - 0.5
    axes.imshow(
        cells, aspect="auto", cmap=colors, vmin=-0.5, vmax=len(order) - 0.5, interpolation="nearest",
        extent=(first, first + len(lines), len(names) - 0.5, -0.5),
    )  # fmt: skip
    axes.set_yticks(range(len(names)), [printable(name) for name in names])
    axes.set_xlabel("round")
    axes.grid(False)
    used = [state for number, state in enumerate(order) if (cells == number).any()]
    for state in used:
        word, color = STATES[state]
        axes.scatter([], [], marker="s", color=color, edgecolors="#999999", label=word)
    figures.legend_above(axes)
    return figures.svg(figure, "what became of each node in each round")
