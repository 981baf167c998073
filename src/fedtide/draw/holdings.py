"""Pictures of the rows and classes of each client."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from fedtide.draw.figures import SHARE, Drawn, label, legend_above, look, styled, svg

UNEVEN = 20
"""Ratio of the largest to the smallest client from which rows are drawn on a logarithmic scale."""

SPREAD = 0.1
"""Mean distance of clients' label shares above which they are drawn."""

NAMED = 24
"""Maximum number of classes with names beside a picture."""


@styled
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


def map_shares(axes: Axes, shares: np.ndarray, names: Sequence[str], first: float = 0.0, last: float = 0.0) -> Any:
    """Draw shares of classes (columns, classes) as a map, and return the image.

    Args:
        axes: panel.
        shares: of each column.
        names: names of the classes; empty if classes are numbers.
        first: place of the first column.
        last: place of the last column; 0 for places 1 apart.
    """
    room = 0.5 * (last - first) / (len(shares) - 1) if last > first else 0.5
    extent = (first - room, (last or first + len(shares) - 1) + room, -0.5, shares.shape[1] - 0.5)
    image = axes.imshow(
        100 * shares.T, aspect="auto", cmap=SHARE, vmin=0, interpolation="nearest", origin="lower", extent=extent
    )
    axes.set_ylabel("class")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if len(names) == shares.shape[1] <= NAMED:
        axes.set_yticks(range(len(names)), [label(name) for name in names])
    axes.grid(False)
    return image


@styled
def draw_label_shares(counts: np.ndarray, clients: int, names: Sequence[str]) -> Drawn | None:
    """Draw the share of each class in the rows of clients; None without rows.

    Args:
        counts: (clients, classes) rows of the drawn clients.
        names: names of the classes; empty if classes are numbers.
    """
    counts = counts[counts.sum(axis=1) > 0]
    if not len(counts):
        return None
    shares = counts / counts.sum(axis=1, keepdims=True)
    # Sorted by the commonest class of a client, then by its share, largest first.
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    figure = Figure(figsize=(9.6, min(max(1.4 + 0.17 * shares.shape[1], 2.2), 5.0)))
    axes = figure.subplots()
    image = map_shares(axes, shares[order], names)
    count = f"{len(counts)} of {clients}" if clients > len(counts) else f"{clients}"
    axes.set_xlabel(f"{count} clients, by the class that they have most of")
    axes.set_xticks([])
    figure.colorbar(image, ax=axes, label="share of a client's rows, %", pad=0.01)
    return svg(figure, "who holds which labels")


def heterogeneous(counts: np.ndarray) -> bool:
    """Tell whether label shares of clients (clients, classes) differ by more than chance, and visibly.

    More than chance: Pearson's chi-square is five standard deviations above the one of random rows. Visibly: the mean
    total variation from the pooled shares is above `SPREAD`.

    >>> heterogeneous(np.array([[30, 0], [0, 30]])), heterogeneous(np.array([[16, 14], [14, 16]]))
    (True, False)
    """
    counts = counts[:, counts.sum(axis=0) > 0]
    counts = counts[counts.sum(axis=1) > 0]
    if min(counts.shape) < 2:
        return False
    rows, pooled = counts.sum(axis=1, keepdims=True), counts.sum(axis=0) / counts.sum()
    free = (counts.shape[0] - 1) * (counts.shape[1] - 1)
    chi2 = float(((counts - rows * pooled) ** 2 / (rows * pooled)).sum())
    distance = 0.5 * np.abs(counts / rows - pooled).sum(axis=1).mean()
    return bool(chi2 > free + 5 * math.sqrt(2 * free) and distance > SPREAD)
