"""Which cluster each client is in, evaluation by evaluation, and how large the clusters are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedtide.report.clusters import Membership, membership
from fedtide.report.figures import MODEL_COLOURS, OTHER_COLOUR, OWN_COLOUR, STYLE, label, leftmost, stacked, svg
from fedtide.report.reading import ExperimentRecord

DRAWN, WIDE = 200, 3
"""At most so many clients are drawn, and at most so many methods side by side."""


def clusters_over_time(record: ExperimentRecord, names: Sequence[str]) -> str | None:
    """A map for each method, of its first seed: clients by their group, against rounds, in the colour of their cluster.

    Below each map the share of clients in each cluster. None where no method has clusters.

    Args:
        record: of the experiment.
        names: of the methods that have clusters.
    """
    view = record.clustered
    runs = {method.name: method.runs[0] for method in record.methods if method.name in names and method.runs}
    found = {name: membership(run, view, record.groups, DRAWN) for name, run in runs.items()}
    drawn = {name: made for name, made in found.items() if made is not None}
    if not drawn:
        return None
    shown = palette([*drawn.values()])
    tallest = max(len(made.clients) for made in drawn.values())
    high = min(max(1.5 + 0.04 * tallest, 1.9), 3.7)
    with matplotlib.rc_context(STYLE):
        figure, stacks = stacked(len(drawn), widest=WIDE, heights=[high, 1.2])
        for (top, below), (name, made) in zip(stacks, drawn.items(), strict=True):
            _draw_map(top, made, shown, record.groups if leftmost(top) else None)
            _draw_sizes(below, made, shown, first=leftmost(below))
            top.set_title(label(name), fontsize=10)
            for axes in (top, below):
                axes.set_xlim(0, record.experiment.rounds)
                axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
                axes.grid(False)
        figure.legend(
            handles=[Patch(color=_colour(n, shown), label=_said(n)) for n in _legend([*drawn.values()], shown)],
            loc="outside upper left", ncols=len(MODEL_COLOURS) + 2, fontsize=9, columnspacing=1.2,
        )  # fmt: skip
        return svg(figure, "clusters of clients over time")


def palette(found: Sequence[Membership]) -> dict[int, str]:
    """The shared models that have a colour of their own, in order: all, or those that most clients are in.

    A model has the colour of its number, as in the picture of gate weights, where the palette has one.
    """
    total: dict[int, float] = {}
    for number, share in (each for made in found for each in made.sizes.items()):
        if number >= 0:
            total[number] = total.get(number, 0.0) + float(share.sum())
    shown = sorted(sorted(total, key=lambda number: -total[number])[: len(MODEL_COLOURS)])
    left = [colour for number, colour in enumerate(MODEL_COLOURS) if number not in shown]
    return {number: MODEL_COLOURS[number] if number < len(MODEL_COLOURS) else left.pop(0) for number in shown}


def _colour(number: int | None, shown: Mapping[int, str]) -> str:
    return OWN_COLOUR if number == -1 else OTHER_COLOUR if number is None else shown.get(number, OTHER_COLOUR)


def _said(number: int | None) -> str:
    return "another model" if number is None else "a client's own expert" if number == -1 else f"model {number}"


def _legend(drawn: Sequence[Membership], shown: Mapping[int, str]) -> list[int | None]:
    numbers = {number for made in drawn for number in made.sizes}
    rest: list[int | None] = [None] if numbers - {-1, *shown} else []
    return [*([-1] if -1 in numbers else []), *shown, *rest]


def _draw_map(axes: Axes, made: Membership, shown: Mapping[int, str], groups: Sequence[str] | None) -> None:
    """Rows are clients, the first group on top; black lines part the groups, whose names stand at the left."""
    codes = [-1, *shown]
    table = np.full(made.table.shape, float(len(codes)))  # others
    for code, number in enumerate(codes):
        table[made.table == number] = code
    table[np.isnan(made.table)] = np.nan
    cmap = ListedColormap([*(_colour(number, shown) for number in codes), OTHER_COLOUR])
    edges = np.concatenate([[0], made.after])
    axes.pcolormesh(
        edges, np.arange(len(table) + 1), table, cmap=cmap, norm=BoundaryNorm(np.arange(len(codes) + 2) - 0.5, cmap.N),
        rasterized=True,
    )  # fmt: skip
    axes.set_ylim(len(table), 0)
    axes.tick_params(axis="x", labelbottom=False)
    starts = np.flatnonzero(np.diff(made.group, prepend=-1))
    for start in starts[1:]:
        axes.axhline(start, color="black", lw=1.2)
    middles = (starts + np.append(starts[1:], len(table))) / 2
    axes.set_yticks(middles, [""] * len(middles))
    axes.tick_params(axis="y", length=0)
    if groups is None:
        return
    if len(groups) > 1:
        axes.set_yticklabels([label(groups[made.group[start]]) for start in starts])
    some = f"{len(table)} of {made.of}" if made.of > len(table) else f"{len(table)}"
    axes.set_ylabel(f"{some} clients")


def _draw_sizes(axes: Axes, made: Membership, shown: Mapping[int, str], *, first: bool) -> None:
    """The share of all judged clients in each cluster, one on the other."""
    edges = np.concatenate([[0], made.after])
    low = np.zeros(len(made.after))
    for number in sorted(made.sizes):
        high = low + 100 * made.sizes[number]
        below, above = (np.concatenate([side[:1], side]) for side in (low, high))
        axes.fill_between(edges, below, above, step="pre", color=_colour(number, shown), lw=0)
        low = high
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 50, 100])
    axes.set_xlabel("round")
    if first:
        axes.set_ylabel("clients, %")
    else:
        axes.set_yticklabels([])
        axes.tick_params(axis="y", length=0)
