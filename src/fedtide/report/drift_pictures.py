"""Pictures of drift over rounds: heterogeneity within clusters, number of clusters, moves of clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedtide.report.drift import cluster_counts, marks, reclusterings
from fedtide.report.figures import STYLE, Drawn, band, columns, label, look, mark_events, over_rounds, svg
from fedtide.report.reading import ExperimentRecord, MethodRecord, RunRecord

Numbered = tuple[int, MethodRecord]
"""A method with its number, which determines its color."""

Drawing = Callable[[Axes, list[Numbered]], None]


def panels(record: ExperimentRecord) -> dict[str, list[Numbered]]:
    """Return the methods of each panel that there is: "apart", "counts" and "moves"."""
    drawn = [(n, m) for n, m in enumerate(record.methods) if m.runs]
    found = {
        "apart": [(n, m) for n, m in drawn if all(len(run.apart()[0]) for run in m.runs)],
        "counts": [(n, m) for n, m in drawn if m.drifts and any(len(cluster_counts(r)[0]) for r in m.runs)],
        "moves": [(n, m) for n, m in drawn if any(np.isfinite(r.fact("moved")).any() for r in m.runs)],
    }
    return {name: methods for name, methods in found.items() if methods}


def following_over_rounds(record: ExperimentRecord) -> Drawn | None:
    """Draw stacked panels: heterogeneity within clusters, number of clusters, moves; None without data.

    Vertical lines are known events. Triangles on a line are rounds in which the method re-clustered, in any seed. All
    panels count the rounds done: what a round did or found stands at its end.
    """
    drawings: dict[str, tuple[float, Drawing]] = {
        "apart": (2.4, _draw_apart), "counts": (2.0, _draw_counts), "moves": (1.4, _draw_moves)
    }  # fmt: skip
    shown = [(*drawings[name], methods) for name, methods in panels(record).items()]
    if not shown:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, sum(high for high, _, _ in shown) + 0.7))
        stack = figure.subplots(
            len(shown), 1, sharex=True, height_ratios=[high for high, _, _ in shown], squeeze=False
        )[:, 0]
        for axes, (_, draw, methods) in zip(stack, shown, strict=True):
            draw(axes, methods)
            mark_events(axes, events_of(record))
        over_rounds(stack[-1], 0, record.experiment.rounds)
        _legend(figure, stack)
        return svg(figure, "drift over rounds")


def events_of(record: ExperimentRecord) -> list[int]:
    """Return the known events of the first method that meets any, in its first seed."""
    return next((found for method in record.methods for run in method.runs[:1] if (found := marks(run))), [])


def _draw_apart(axes: Axes, methods: list[Numbered]) -> None:
    found = [run.apart() for run in methods[0][1].runs]
    everyone = np.mean([alone for _, _, alone in found if len(alone) == len(found[0][2])], axis=0)
    axes.plot(found[0][0], everyone, color="#777777", lw=4, alpha=0.35, label="all clients, one cluster")
    for number, method in methods:
        curves = [run.apart()[:2] for run in method.runs]
        band(axes, curves, label(method.name), look(number), scale=1.0)
    axes.set_ylabel("distance of label\nshares (L1, 0 to 2)")
    axes.set_ylim(bottom=0)


def _draw_counts(axes: Axes, methods: list[Numbered]) -> None:
    for number, method in methods:
        curves = [(at + 1, counts) for at, counts in map(cluster_counts, method.runs)]
        band(axes, curves, label(method.name), look(number), scale=1.0)
        anew = {at + 1 for run in method.runs for at in reclusterings(run) or ()}
        x, y = (np.asarray(values) for values in axes.lines[-1].get_data())
        there = np.isin(x, list(anew))
        if there.any():  # of no points at all a layout cannot be made
            shown: dict[str, Any] = {"ms": 7, "mfc": look(number).color, "mec": "white", "mew": 0.8, "clip_on": False}
            axes.plot(x[there], y[there], ls="", marker="^", **shown)
    axes.set_ylabel("clusters")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))


def _draw_moves(axes: Axes, methods: list[Numbered]) -> None:
    for number, method in methods:
        curves = [_moves(run) for run in method.runs]
        band(axes, curves, label(method.name), look(number), scale=1.0)
    axes.set_ylabel("clients moved\nin a round")
    axes.set_ylim(bottom=0)


def _moves(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    told = run.fact("moved")
    return np.arange(1, len(told) + 1), np.nan_to_num(told)


def _legend(figure: Figure, stack: Iterable[Axes]) -> None:
    """Draw one legend above all panels."""
    found: dict[str, Artist] = {}
    for axes in stack:
        handles, labels = axes.get_legend_handles_labels()
        for handle, name in zip(handles, labels, strict=True):
            found.setdefault(str(name), handle)
    names = [*found]
    figure.legend([*found.values()], names, loc="outside upper left", ncols=columns(names, 9.0), fontsize=9)
