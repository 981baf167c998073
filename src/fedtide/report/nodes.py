"""Nodes of real clients: questions to each of them, and their answers."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from fedtide.core.errors import printable
from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.measure import Measure
from fedtide.remote.asks import RoundLine, nodes_of, read_asks, state_of
from fedtide.report.formats import bytes_of, seconds
from fedtide.report.run_records import ExperimentRecord
from fedtide.report.summary import Summary
from fedtide.report.topic import Topic, plan_picture, plan_table

STATES = {
    "answered": ("answered", "#0072B2"),
    "abstained": ("had nothing to say", "#56B4E9"),
    "at work": ("still at work", "#F0E442"),
    "late": ("late, or lost on the way", "#E69F00"),
    "refused": ("refused", "#D55E00"),
    "idle": ("there, not asked", "#DDDDDD"),
    "away": ("not connected", "#FFFFFF"),
}
"""States of a node in a round, the best first, with words and colors for any kind of color vision."""

DRAWN = 60
"""Maximum number of nodes in a picture."""


def _lines(record: ExperimentRecord) -> list[RoundLine]:
    """Return the lines of all rounds, and of questions before round 0, if any."""
    lines = [line for run in record.runs for line in read_asks(run.folder)]
    return [line for line in lines if line.round >= 0 or line.asks]


def are_real(record: ExperimentRecord) -> bool:
    """Tell whether clients were real, and not simulated."""
    return bool(_lines(record))


@plan_table("Nodes")
def nodes_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of the nodes; None if clients were simulated.

    Answers of clients, not rounds; the server sees facts shown by client of each client, all else as sums.
    """
    lines = _lines(record)
    if not lines:
        return None
    header = ["node", "clients", "rounds connected", "asked", "answered", "late or lost", "refused",
              "commonest reason", "shown by client", "received", "sent", "median wait"]  # fmt: skip
    rows = []
    for node in nodes_of(lines):
        commonest = node.reasons.most_common(1)
        reason = f"{_short(commonest[0][0])} ({commonest[0][1]})" if commonest else "-"
        counts = [node.words[word] for word in ("answered", "late", "refused")]
        wait = seconds(Measure(float(np.median(node.seconds)), None, [])) if node.seconds else "-"
        rows.append([printable(node.name), str(len(node.clients)), f"{node.rounds} of {len(lines)}", str(node.asked),
                     *map(str, counts), reason, ", ".join(sorted(node.shown)) or "nothing", bytes_of(node.down),
                     bytes_of(node.up), wait])  # fmt: skip
    return Table(header, rows)


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


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
    cells = np.full((len(names), len(lines)), order.index("away"))
    for column, line in enumerate(lines):
        states: dict[str, list[int]] = {name: [] for name in names}
        for ask in line.asks:
            for name, node in ask.nodes.items():
                if name in states:
                    states[name] += [order.index(state_of(word)) for word in node.clients.values()]
        for row, name in enumerate(names):
            # The worst state, because a person has to look at it.
            silent = "idle" if name in line.present else "away"
            cells[row, column] = max(states[name], default=order.index(silent))
    figure = Figure(figsize=(9.6, min(1.2 + 0.22 * len(names), 9.0)))
    axes = figure.subplots()
    colors = ListedColormap([color for _, color in STATES.values()])
    first = lines[0].round - 0.5
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


TOPIC = Topic(pictures=(nodes_over_rounds,), tables=(nodes_table,))
