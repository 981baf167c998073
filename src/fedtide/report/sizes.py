"""The picture of how many rows each client has."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from fedtide.report.figures import Drawn, legend_above, look, svg

UNEVEN = 20
"""Ratio of the largest to the smallest client from which rows are drawn on a logarithmic scale."""


def draw_rows(counts: np.ndarray) -> Drawn:
    """Draw the number of rows of each client (clients,), from most to fewest."""
    rows = np.sort(counts)[::-1]
    figure = Figure(figsize=(6.4, 3.2))
    axes = figure.subplots()
    axes.step(np.arange(1, len(rows) + 1), rows, where="mid", color=look(0).color, lw=1.8, label="rows")
    axes.axhline(
        float(np.median(rows)), color="#777777", lw=1.2, ls=(0, (1, 1.5)), label=f"median, {np.median(rows):,.0f}"
    )
    if rows.max() > UNEVEN * rows.min() > 0:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, rows.max() * 1.1)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if len(rows) > 1000:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(axes.xaxis.get_major_locator() if len(rows) > 1000 else MaxNLocator(integer=True))
    axes.set_xlabel("clients, by their rows")
    axes.set_ylabel("rows")
    legend_above(axes, room=5.4)
    return svg(figure, "rows of each client")
