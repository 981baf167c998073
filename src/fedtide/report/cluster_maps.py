"""Maps of the cluster of each client over the evaluations, and of the sizes of clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedtide.data.shift.what import ChangePoints
from fedtide.data.shift.what.change_points import Domains
from fedtide.report.clusters import Membership, membership
from fedtide.report.figures import MODEL_COLORS, OTHER_COLOR, OWN_COLOR, STYLE, Drawn, label, leftmost, stacked, svg
from fedtide.report.reading import ExperimentRecord

DRAWN, WIDE = 200, 3
"""Maximum number of clients drawn, and of methods side by side."""

TRUE_COLORS = ("#332288", "#DDCC77", "#882255", "#999933", "#AA4499", "#117733", "#CC6677")
"""Paul Tol's muted colors, for true groups: distinct with any kind of color vision, and none the color of a model."""


def clusters_over_time(record: ExperimentRecord, names: Sequence[str]) -> Drawn | None:
    """Draw for the first seed of each method a map of clients against rounds, in the color of their cluster.

    Clients are sorted by group. Below each map stands the share of clients in each cluster. Where groups drift, a map
    of the groups comes first. None where no method has clusters.

    Args:
        record: record of the experiment.
        names: names of the methods that have clusters.
    """
    view = record.clustered
    runs = {method.name: method.runs[0] for method in record.methods if method.name in names and method.runs}
    found = {name: membership(run, view, record.groups, DRAWN) for name, run in runs.items()}
    drawn = {name: made for name, made in found.items() if made is not None}
    if not drawn:
        return None
    shown = palette([*drawn.values()])
    maps = [_of_clusters(label(name), made, shown) for name, made in drawn.items()]
    truth = next((made for made in drawn.values() if made.truth is not None), None)
    if truth is not None:
        maps.insert(0, _of_groups(truth))
    groups = group_names(record, truth)
    tallest = max(len(made.clients) for made in drawn.values())
    high = min(max(1.5 + 0.04 * tallest, 1.9), 3.7)
    with matplotlib.rc_context(STYLE):
        figure, stacks = stacked(len(maps), widest=WIDE, heights=[high, 1.2])
        for (top, below), each in zip(stacks, maps, strict=True):
            _draw_map(top, each, groups if leftmost(top) else None)
            _draw_sizes(below, each, first=leftmost(below))
            top.set_title(each.title, fontsize=10)
            for axes in (top, below):
                axes.set_xlim(0, record.experiment.rounds)
                axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
                axes.grid(False)
        figure.legend(
            handles=[_patch(n, shown) for n in _legend([*drawn.values()], shown)],
            loc="outside upper left", ncols=6, fontsize=9, columnspacing=1.2,
        )  # fmt: skip
        if truth is not None:
            patches = [Patch(color=group_color(number), label=label(groups[number])) for number in truth.shares]
            figure.legend(handles=patches, loc="outside lower left", ncols=8, fontsize=9, columnspacing=1.2,
                          title="true groups", alignment="left", title_fontsize=9)  # fmt: skip
        return svg(figure, "clusters of clients over time")


@dataclass(frozen=True)
class Map:
    """A map: `codes` (clients, evaluations) of `colors`, and the share of each code over time."""

    title: str
    made: Membership
    codes: np.ndarray
    colors: list[str]
    sizes: list[tuple[str, np.ndarray]]


def _of_clusters(title: str, made: Membership, shown: Mapping[int, str]) -> Map:
    """Build a map of clusters in the colors of a palette; clusters without a color are others."""
    numbers = [-1, *shown]
    table = np.full(made.table.shape, float(len(numbers)))  # code of the others
    for code, number in enumerate(numbers):
        table[made.table == number] = code
    table[np.isnan(made.table)] = np.nan
    colors = [*(_color(number, shown) for number in numbers), OTHER_COLOR]
    return Map(title, made, table, colors, [(_color(n, shown), made.sizes[n]) for n in sorted(made.sizes)])


def _of_groups(made: Membership) -> Map:
    """Build a map of the true groups of the same clients."""
    assert made.truth is not None
    colors = [group_color(number) for number in range(max(made.shares) + 1)]
    return Map("true groups", made, made.truth, colors, [(group_color(n), made.shares[n]) for n in made.shares])


def group_color(number: int) -> str:
    """Return the color of a true group, none of them a model's: the palette, its tints, its shades, and again.

    >>> group_color(0), group_color(7), group_color(14), group_color(21)
    ('#332288', '#9990c3', '#191144', '#332288')
    """
    turn = number // len(TRUE_COLORS) % 3
    channels = bytes.fromhex(TRUE_COLORS[number % len(TRUE_COLORS)].removeprefix("#"))
    shown = (part if turn == 0 else (part + 255) // 2 if turn == 1 else part // 2 for part in channels)
    return f"#{bytes(shown).hex()}"


def group_names(record: ExperimentRecord, truth: Membership | None) -> list[str]:
    """Return the names of the groups: those of the population, or of groups that drift."""
    if truth is None:
        return record.groups
    count = max(truth.shares) + 1
    what = record.experiment.shift.what
    domains = isinstance(what, ChangePoints) and isinstance(what.concepts, Domains)
    return (
        record.domains if domains and len(record.domains) >= count else [f"group {number}" for number in range(count)]
    )


def palette(found: Sequence[Membership]) -> dict[int, str]:
    """Return the shared models with a color of their own, in order: all, or those with most clients.

    A model has the color of its number, as in the picture of gate weights, where the palette has one.
    """
    total: dict[int, float] = {}
    for number, share in (each for made in found for each in made.sizes.items()):
        if number >= 0:
            total[number] = total.get(number, 0.0) + float(share.sum())
    shown = sorted(sorted(total, key=lambda number: -total[number])[: len(MODEL_COLORS)])
    left = [color for number, color in enumerate(MODEL_COLORS) if number not in shown]
    return {number: MODEL_COLORS[number] if number < len(MODEL_COLORS) else left.pop(0) for number in shown}


def _color(number: int | None, shown: Mapping[int, str]) -> str:
    return OWN_COLOR if number == -1 else OTHER_COLOR if number is None else shown.get(number, OTHER_COLOR)


def _patch(number: int | None, shown: Mapping[int, str]) -> Patch:
    """Return an entry of the legend, hollow for a model that no client has."""
    if number is None or number == -1:
        return Patch(color=_color(number, shown), label="another model" if number is None else "a client's own expert")
    if number in shown:
        return Patch(color=shown[number], label=f"model {number}")
    return Patch(facecolor="none", edgecolor=OTHER_COLOR, label=f"model {number}: no client's")


def _legend(drawn: Sequence[Membership], shown: Mapping[int, str]) -> list[int | None]:
    """Return the entries of the legend; models between those that clients have are listed, too."""
    numbers = {number for made in drawn for number in made.sizes}
    rest: list[int | None] = [None] if numbers - {-1, *shown} else []
    models = range(max(shown) + 1) if shown and max(shown) < len(MODEL_COLORS) and not rest else shown
    return [*([-1] if -1 in numbers else []), *models, *rest]


def _draw_map(axes: Axes, drawn: Map, groups: Sequence[str] | None) -> None:
    """Draw clients as rows, the first group on top; black lines separate the groups, named at the left."""
    made, cmap = drawn.made, ListedColormap(drawn.colors)
    edges = np.concatenate([[0], made.after])
    axes.pcolormesh(
        edges, np.arange(len(drawn.codes) + 1), drawn.codes, cmap=cmap,
        norm=BoundaryNorm(np.arange(len(drawn.colors) + 1) - 0.5, cmap.N), rasterized=True,
    )  # fmt: skip
    axes.set_ylim(len(drawn.codes), 0)
    axes.tick_params(axis="x", labelbottom=False)
    starts = np.flatnonzero(np.diff(made.group, prepend=-1))
    for start in starts[1:]:
        axes.axhline(start, color="black", lw=1.2)
    middles = (starts + np.append(starts[1:], len(drawn.codes))) / 2
    axes.set_yticks(middles, [""] * len(middles))
    axes.tick_params(axis="y", length=0)
    if groups is None:
        return
    if len(groups) > 1:
        axes.set_yticklabels([label(groups[made.group[start]]) for start in starts])
    if made.truth is not None:
        axes.tick_params(axis="y", labelsize=8)
    some = f"{len(made.clients)} of {made.of}" if made.of > len(made.clients) else f"{len(made.clients)}"
    axes.set_ylabel(f"{some} clients")


def _draw_sizes(axes: Axes, drawn: Map, *, first: bool) -> None:
    """Draw the share of all judged clients at each code, stacked."""
    edges = np.concatenate([[0], drawn.made.after])
    low = np.zeros(len(drawn.made.after))
    for color, share in drawn.sizes:
        high = low + 100 * share
        below, above = (np.concatenate([side[:1], side]) for side in (low, high))
        axes.fill_between(edges, below, above, step="pre", color=color, lw=0)
        low = high
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 50, 100])
    axes.set_xlabel("rounds done")
    if first:
        axes.set_ylabel("clients, %")
    else:
        axes.set_yticklabels([])
        axes.tick_params(axis="y", length=0)
