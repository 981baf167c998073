"""Previews of an experiment: pictures of a population before a run, lines and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedtide.core.atomic import write_text
from fedtide.core.errors import FedtideError
from fedtide.draw.figures import GROUP_COLORS, SHARE, STYLE, Drawn, domain_color, label, over_rounds, svg
from fedtide.draw.holdings import NAMED, draw_label_shares, draw_rows
from fedtide.draw.html import Pictured, anchor, render, to_pictures
from fedtide.inspection.preview import Preview


@dataclass(frozen=True, repr=False)
class Shown:
    """Previews of an experiment, one for each shift that its methods meet: printed they are lines.

    Args:
        name: of the experiment.
        previews: of its populations.
    """

    name: str
    previews: Sequence[Preview]

    def __repr__(self) -> str:
        titled = ([*([f"{preview.title}:"] if preview.title else []), *preview.lines()] for preview in self.previews)
        return "\n".join(line for lines in titled for line in lines)

    def _repr_html_(self) -> str:
        sections = [(preview.title, "", preview.lines(), to_pictures(pictures(preview))) for preview in self.previews]
        return render("shown.html", sections=sections)

    def write(self, page: str | Path) -> Path:
        """Write a page with pictures, which opens offline, and return its path.

        Raises:
            FedtideError: it is not called .html.
        """
        page = Path(page)
        if page.suffix != ".html":
            raise FedtideError(f"{page}: not the name of a page; allowed: one that ends in .html")
        sections = []
        for preview in self.previews:
            place = anchor(preview.title) if preview.title else ""
            sections.append((preview.title, place, preview.lines(), to_pictures(pictures(preview), preview.title)))
        write_text(page, render("preview.html", title=self.name, about="", sections=sections, environments=[]))
        return page


def pictures(preview: Preview) -> list[Pictured]:
    """Return titles, captions and figures; None for a figure with nothing to show."""
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
             "group among those who do (line); the number of clients that can be reached, if not all can.",
             _presence(preview)),
            ("How the mix moves",
             f"{span}: the share of each class among the rows of those who arrive. Below, if clients drift, the number "
             "of clients with other rows, or rows with other labels, than at the round before.",
             _mix(preview)),
            ("Which domains",
             f"{span}: the share of each domain among the rows of those who arrive.",
             _domains(preview)),
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


def _presence(preview: Preview) -> Drawn | None:
    """Draw who arrives and how many can be reached; None if it is always all of one group."""
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
        panels[0].plot(
            rounds, 100 * preview.arrived[:, 0], color="#444444", lw=0.9, label=label(f"{names[0]}, arrived")
        )
        panels[0].set_ylabel("of those who\narrive, %")
        panels[0].legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=5, fontsize=8, borderaxespad=0.2)
    if limited:
        panels[-1].plot(rounds, preview.reachable, color="#0072B2", lw=1.4)
        panels[-1].set_ylim(bottom=0)
        panels[-1].set_ylabel("clients that can\nbe reached")
        panels[-1].yaxis.set_major_locator(MaxNLocator(4, integer=True))
    over_rounds(panels[-1], int(rounds[0]), max(int(rounds[-1]), 2))
    return svg(figure, "who is there")


def _mix(preview: Preview) -> Drawn | None:
    """Draw the label mix of those who arrive, and how many clients changed; None of sequences and many classes."""
    if not preview.labeled:
        return None
    rounds, changed, names, classes = _rounds(preview), preview.changed, _classes(preview), preview.mix.shape[1]
    high = min(max(1.2 + 0.17 * classes, 2.0), 4.5)
    heights = [high] if changed is None else [high, 1.1]
    figure = Figure(figsize=(9.6, high + 0.4 + (0 if changed is None else 1.3)))
    axes, *below = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    edges = np.append(rounds - 0.5 * np.gradient(rounds.astype(float)) if len(rounds) > 1 else [0.5], rounds[-1] + 0.5)
    image = axes.pcolormesh(edges, np.arange(classes + 1) - 0.5, 100 * preview.mix.T, cmap=SHARE, vmin=0)
    axes.set_ylabel("class")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if names and classes <= NAMED:
        axes.set_yticks(range(classes), [label(name) for name in names])
    axes.grid(False)
    figure.colorbar(image, ax=[axes, *below], label="share of the rows that arrive, %", pad=0.01)
    if changed is not None:
        below[0].vlines(rounds, 0, changed, color="#444444", lw=1.2)
        below[0].set_ylim(bottom=0)
        below[0].set_ylabel("clients that\nchanged")
        below[0].yaxis.set_major_locator(MaxNLocator(3, integer=True))
    last = [axes, *below][-1]
    last.set_xlabel("rounds done")
    last.set_xlim(edges[0], edges[-1])
    last.xaxis.set_major_locator(MaxNLocator(integer=True))
    return svg(figure, "how the mix moves")


def _domains(preview: Preview) -> Drawn | None:
    """Draw the shares of domains among the rows of those who arrive; None if there is one domain."""
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
