"""Nodes of real clients in a record: what each was asked, and what came of it."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from fedtide.core.errors import printable
from fedtide.evaluate.measure import Measure
from fedtide.remote.asks import RoundLine, nodes_of, read_asks, state_of
from fedtide.report.figures import STYLE, Drawn, legend_above, svg
from fedtide.report.measures import bytes_of, seconds
from fedtide.report.reading import ExperimentRecord
from fedtide.report.tables import Table

STATES = {
    "answered": ("answered", "#0072B2"),
    "abstained": ("had nothing to say", "#56B4E9"),
    "at work": ("still at work", "#F0E442"),
    "late": ("late, or lost on the way", "#E69F00"),
    "refused": ("refused", "#D55E00"),
    "idle": ("there, not asked", "#DDDDDD"),
    "away": ("not connected", "#FFFFFF"),
}
"""What becomes of a node in a round, the best first, in words and in colors for any kind of color vision."""

DRAWN = 60
"""Nodes in a picture at most."""


def _lines(record: ExperimentRecord) -> list[RoundLine]:
    """Return the lines of all rounds, and of what was asked before round 0, if anything was."""
    lines = [line for method in record.methods for run in method.runs for line in read_asks(run.folder)]
    return [line for line in lines if line.round >= 0 or line.asks]


def are_real(record: ExperimentRecord) -> bool:
    """Tell whether clients were real, and not simulated."""
    return bool(_lines(record))


def nodes_table(record: ExperimentRecord) -> Table | None:
    """Return a table of the nodes; None where clients were simulated."""
    lines = _lines(record)
    if not lines:
        return None
    header = ["node", "clients", "rounds connected", "asked", "answered", "late or lost", "refused",
              "most often because", "shown by client", "received", "sent", "median wait"]  # fmt: skip
    rows = []
    for node in nodes_of(lines):
        often = node.reasons.most_common(1)
        why = f"{_short(often[0][0])} ({often[0][1]})" if often else "-"
        counts = [node.words[word] for word in ("answered", "late", "refused")]
        wait = seconds(Measure(float(np.median(node.seconds)), None, [])) if node.seconds else "-"
        rows.append([printable(node.name), str(len(node.clients)), f"{node.rounds} of {len(lines)}", str(node.asked),
                     *map(str, counts), why, ", ".join(sorted(node.shown)) or "nothing", bytes_of(node.down),
                     bytes_of(node.up), wait])  # fmt: skip
    return Table(header, rows)


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def nodes_over_rounds(record: ExperimentRecord) -> Drawn | None:
    """Draw what became of each node in each round; None where clients were simulated."""
    lines = _lines(record)
    names = [node.name for node in nodes_of(lines)][:DRAWN]
    if not lines or not names:
        return None
    order = list(STATES)
    cells = np.full((len(names), len(lines)), order.index("away"))
    for column, line in enumerate(lines):
        heard: dict[str, list[int]] = {name: [] for name in names}
        for ask in line.asks:
            for name, node in ask.nodes.items():
                if name in heard:
                    heard[name] += [order.index(state_of(word)) for word in node.clients.values()]
        for row, name in enumerate(names):
            # The worst that happened, as that is what a person has to look at.
            here = "idle" if name in line.present else "away"
            cells[row, column] = max(heard[name], default=order.index(here))
    with matplotlib.rc_context(STYLE):
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
        legend_above(axes)
        return svg(figure, "what became of each node in each round")
