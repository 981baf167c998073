"""Pictures of a population before a run."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedtide.inspection.preview import Preview
from fedtide.report.figures import GROUP_COLORS, STYLE, Drawn, domain_color, label, over_rounds, svg
from fedtide.report.heatmaps import NAMED, SHARE, draw_label_shares
from fedtide.report.pictures import Pictured
from fedtide.report.sizes import draw_rows


def pictures(preview: Preview) -> list[Pictured]:
    """Return titles, captions and figures; None where there is nothing to show."""
    population, span = preview.population, f"{preview.looked_at[:1].upper()}{preview.looked_at[1:]}"
    with matplotlib.rc_context(STYLE):
        return [
            ("Rows of each client", "Rows to train on, from the client with most to the one with fewest.",
             draw_rows(preview.rows) if preview.rows.min() < preview.rows.max() else None),
            ("Who holds which labels",
             "A column is a client: the darker a cell, the more of its training rows belong to that class, at the "
             "first round.",
             draw_label_shares(preview.labels, population.registered, _classes(preview)) if preview.labeled else None),
            ("Who is there",
             f"{span}: the share of each group that is expected among those who arrive (areas), and that of the first "
             "group among those who do (line); where some cannot be reached, how many can.",
             presence(preview)),
            ("How the mix moves",
             f"{span}: the share of each class among the rows of those who arrive. Below, where clients drift, how "
             "many hold other rows, or rows with other labels, than at the round before.",
             mix(preview)),
            ("Which domains",
             f"{span}: the share of each domain among the rows of those who arrive.",
             domains(preview)),
        ]  # fmt: skip


def _classes(preview: Preview) -> list[str]:
    names = list(getattr(preview.population.rows, "label_names", ()))
    return names if len(names) == preview.population.rows.classes else []


def _rounds(preview: Preview) -> np.ndarray:
    return np.array([moment.round + 1 for moment in preview.moments])


def _areas(axes: Axes, rounds: np.ndarray, shares: np.ndarray, names: list[str], colors: list[str]) -> None:
    """Draw shares as areas, one on the other."""
    low = np.zeros(len(rounds))
    for k, name in enumerate(names):
        high = low + 100 * shares[:, k]
        axes.fill_between(rounds, low, high, color=colors[k], alpha=0.4, lw=0, label=label(name))
        low = high
    axes.set_ylim(0, 100)
    axes.grid(False)


def presence(preview: Preview) -> Drawn | None:
    """Draw who arrives and how many can be reached; None where it is always all of one group."""
    names, rounds = list(preview.population.group_names), _rounds(preview)
    limited = bool(preview.reachable.min() < preview.population.registered)
    grouped = len(names) > 1
    if not (limited or grouped):
        return None
    figure = Figure(figsize=(9.6, 1.2 + 1.7 * (limited + grouped)))
    panels = list(figure.subplots(limited + grouped, 1, sharex=True, squeeze=False)[:, 0])
    if grouped:
        colors = [GROUP_COLORS[k % len(GROUP_COLORS)] for k in range(len(names))]
        _areas(panels[0], rounds, preview.expected, names, colors)
        panels[0].plot(rounds, 100 * preview.came[:, 0], color="#444444", lw=0.9, label=label(f"{names[0]}, arrived"))
        panels[0].set_ylabel("of those who\narrive, %")
        panels[0].legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=5, fontsize=8, borderaxespad=0.2)
    if limited:
        panels[-1].plot(rounds, preview.reachable, color="#0072B2", lw=1.4)
        panels[-1].set_ylim(bottom=0)
        panels[-1].set_ylabel("clients that can\nbe reached")
        panels[-1].yaxis.set_major_locator(MaxNLocator(4, integer=True))
    over_rounds(panels[-1], int(rounds[0]), max(int(rounds[-1]), 2))
    return svg(figure, "who is there")


def mix(preview: Preview) -> Drawn | None:
    """Draw the label mix of those who arrive, and how many clients changed; None of sequences and many classes."""
    if not preview.labeled:
        return None
    rounds, drifting = _rounds(preview), preview.changed is not None
    names, classes = _classes(preview), preview.mix.shape[1]
    high = min(max(1.2 + 0.17 * classes, 2.0), 4.5)
    figure = Figure(figsize=(9.6, high + 1.3 * drifting + 0.4))
    heights = [high, 1.1] if drifting else [high]
    axes, *below = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    edges = np.append(rounds - 0.5 * np.gradient(rounds.astype(float)) if len(rounds) > 1 else [0.5], rounds[-1] + 0.5)
    drawn = axes.pcolormesh(edges, np.arange(classes + 1) - 0.5, 100 * preview.mix.T, cmap=SHARE, vmin=0)
    axes.set_ylabel("class")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if names and classes <= NAMED:
        axes.set_yticks(range(classes), [label(name) for name in names])
    axes.grid(False)
    figure.colorbar(drawn, ax=[axes, *below], label="share of the rows that arrive, %", pad=0.01)
    if preview.changed is not None:
        below[0].vlines(rounds, 0, preview.changed, color="#444444", lw=1.2)
        below[0].set_ylim(bottom=0)
        below[0].set_ylabel("clients that\nchanged")
        below[0].yaxis.set_major_locator(MaxNLocator(3, integer=True))
    last = [axes, *below][-1]
    last.set_xlabel("rounds done")
    last.set_xlim(edges[0], edges[-1])
    last.xaxis.set_major_locator(MaxNLocator(integer=True))
    return svg(figure, "how the mix moves")


def domains(preview: Preview) -> Drawn | None:
    """Draw the shares of domains among the rows of those who arrive; None where there is one domain."""
    names, rounds = list(preview.population.rows.domain_names), _rounds(preview)
    if preview.domains is None or names == list(preview.population.group_names):  # as who is there says
        return None
    figure = Figure(figsize=(9.6, 2.6))
    axes = figure.subplots()
    _areas(axes, rounds, preview.domains, names, [domain_color(k) for k in range(len(names))])
    axes.set_ylabel("of the rows, %")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=5, fontsize=8, borderaxespad=0.2)
    over_rounds(axes, int(rounds[0]), max(int(rounds[-1]), 2))
    return svg(figure, "which domains")
