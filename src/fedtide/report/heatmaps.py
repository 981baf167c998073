"""Heatmaps: label shares of clients, local forgetting, and accuracy of groups over the rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedtide.report.figures import STYLE, Drawn, band, label, leftmost, legend_above, look, stack_runs, stacked, svg
from fedtide.report.reading import ExperimentRecord, MethodRecord

ROUNDS, WIDE = 5, 4
"""Maximum number of probed rounds drawn, and of methods side by side."""

CHANGE, LEVEL, SHARE, NOTHING = "RdBu_r", "cividis", "Blues", "#BDBDBD"
"""Color maps readable with any kind of color vision: around zero, from low to high, from none to all; unknown."""

Line = dict[str, Any]
"""A line of `forgetting.jsonl`."""

SPREAD = 0.1
"""Mean distance of clients' label shares above which they are drawn."""

NAMED = 24
"""Classes whose names have room beside a picture."""


# -- labels ------------------------------------------------------------------------------------------------------------


def label_shares(record: ExperimentRecord) -> Drawn | None:
    """Draw the share of each class in each client's training rows; None where clients are much the same."""
    counted = _counted(record)
    if counted is None or not heterogeneous(counted[0]):
        return None
    return draw_label_shares(*counted)


def draw_label_shares(counts: np.ndarray, clients: int, names: list[str]) -> Drawn | None:
    """Draw the share of each class in the rows of some clients (clients, classes), of so many; None without rows."""
    held = counts[counts.sum(axis=1) > 0]
    if not len(held):
        return None
    shares = held / held.sum(axis=1, keepdims=True)
    # Sorted by the commonest class of a client, then by its share, largest first.
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, min(max(1.4 + 0.17 * shares.shape[1], 2.2), 5.0)))
        axes = figure.subplots()
        drawn = axes.imshow(
            100 * shares[order].T, aspect="auto", cmap=SHARE, vmin=0, interpolation="nearest", origin="lower"
        )
        some = f"{len(held)} of {clients}" if clients > len(held) else f"{clients}"
        axes.set_xlabel(f"{some} clients, by the class that they have most of")
        axes.set_ylabel("class")
        axes.set_xticks([])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        if len(names) == shares.shape[1] <= NAMED:
            axes.set_yticks(range(len(names)), [label(name) for name in names])
        axes.grid(False)
        figure.colorbar(drawn, ax=axes, label="share of a client's rows, %", pad=0.01)
        return svg(figure, "who holds which labels")


def _counted(record: ExperimentRecord) -> tuple[np.ndarray, int, list[str]] | None:
    """Return the rows of each class (clients, classes) in the first run with counts, the number of clients, and the
    names of classes, none where they are numbers."""
    for run in (run for method in record.methods for run in method.runs):
        if run.labels is not None and run.labels["counts"] is not None:
            return run.labels["counts"].numpy().astype(np.float64), run.labels["of"], run.labels["names"]
    return None


def heterogeneous(counts: np.ndarray) -> bool:
    """Tell whether label shares of clients differ by more than chance, and by enough to be seen.

    More than chance: Pearson's chi-square of clients and classes is five standard deviations above that of rows dealt
    at random. Enough: clients' shares are `SPREAD` from the pooled ones, on average, in total variation.

    >>> heterogeneous(np.array([[30, 0], [0, 30]])), heterogeneous(np.array([[16, 14], [14, 16]]))
    (True, False)
    """
    held = counts[:, counts.sum(axis=0) > 0]
    held = held[held.sum(axis=1) > 0]
    if min(held.shape) < 2:
        return False
    rows, pooled = held.sum(axis=1, keepdims=True), held.sum(axis=0) / held.sum()
    free = (held.shape[0] - 1) * (held.shape[1] - 1)
    chi2 = float(((held - rows * pooled) ** 2 / (rows * pooled)).sum())
    apart = 0.5 * np.abs(held / rows - pooled).sum(axis=1).mean()
    return bool(chi2 > free + 5 * math.sqrt(2 * free) and apart > SPREAD)


# -- local forgetting --------------------------------------------------------------------------------------------------


def local_forgetting(record: ExperimentRecord) -> Drawn | None:
    """Draw F of every method in every probed round of the first seed, in one color scale; None without probes."""
    found = _probed(record)
    rounds = _some(sorted({number for lines in found.values() for number in lines}))
    maps = {(name, number): _forgotten(line) for name, lines in found.items() for number, line in lines.items()}
    largest = max((np.nanmax(np.abs(m)) for m in maps.values() if np.isfinite(m).any()), default=0.0) or 1.0
    return _grid(
        found, rounds, maps, _means_of_forgetting, "mean", Normalize(-largest, largest), CHANGE,
        "accuracy lost by local training, points", "local client forgetting", _title_of,
    )  # fmt: skip


def after_local_training(record: ExperimentRecord) -> Drawn | None:
    """Draw A, accuracy of participants' own models on all owners' rows, in the last probed round of the first seed."""
    found = _probed(record)
    rounds = sorted({number for lines in found.values() for number in lines})[-1:]
    maps = {
        (name, number): 100 * np.array(line["accuracy"]["local"], dtype=np.float64)
        for name, lines in found.items()
        for number, line in lines.items()
    }
    return _grid(
        found, rounds, maps, _levels, "received", Normalize(0, 100), LEVEL,
        "accuracy after local training, %", "accuracy after local training", lambda line: "",
    )  # fmt: skip


def _probed(record: ExperimentRecord) -> dict[str, dict[int, Line]]:
    """Return the measurements in the first seed of each method, by round."""
    found = {
        method.name: {line["round"]: line for line in method.runs[0].forgetting if line.get("models")}
        for method in record.methods
        if method.runs
    }
    return {name: lines for name, lines in found.items() if lines}


def _grid(
    found: dict[str, dict[int, Line]],
    rounds: list[int],
    maps: dict[tuple[str, int], np.ndarray],
    beside: Callable[[Line], tuple[np.ndarray, np.ndarray]],
    below: str,
    scale: Normalize,
    colors: str,
    unit: str,
    title: str,
    said: Callable[[Line], str],
) -> Drawn | None:
    """Draw a map for each method and round, in one color scale; None without a round."""
    if not rounds:
        return None
    tallest = max(len(m) for m in maps.values())
    with matplotlib.rc_context(STYLE):
        height = min(max(1.5 + 0.16 * tallest, 2.1), 3.6)
        figure, stacks = stacked(len(found), widest=WIDE, heights=[height] * len(rounds))
        for stack, (name, lines) in zip(stacks, found.items(), strict=True):
            for axes, number in zip(stack, rounds, strict=True):
                line = lines.get(number)
                if line is None:
                    _empty(axes)
                else:
                    _draw(axes, maps[name, number], beside(line), below, line, scale, colors)
                more = "nothing to compare" if line is None else said(line)
                axes.set_title(f"{label(name)}, round {number}\n{more}".strip(), fontsize=9)
                if leftmost(axes):
                    axes.set_ylabel("model of client")
            stack[-1].set_xlabel("rows of client")
        figure.colorbar(ScalarMappable(scale, colors), ax=figure.axes, label=unit, shrink=0.8)
        return svg(figure, title)


def _some(rounds: list[int]) -> list[int]:
    """Select at most `ROUNDS` of the rounds, including the first and the last."""
    if len(rounds) <= ROUNDS:
        return rounds
    return [rounds[round(k * (len(rounds) - 1) / (ROUNDS - 1))] for k in range(ROUNDS)]


def _forgotten(line: Line) -> np.ndarray:
    """Return F (models, owners) in percentage points; NaN for owners without rows."""
    received, local = (np.array(line["accuracy"][key], dtype=np.float64) for key in ("received", "local"))
    return 100 * (received - local)


def _title_of(line: Line) -> str:
    if not line["known"]:
        return "nothing to compare"
    return f"mean {100 * line['forgetting']['mean']:.1f} points"


def _means_of_forgetting(line: Line) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of F by model and by owner, own cells left out."""
    by_model, by_owner = (100 * np.array(line["forgetting"][key], dtype=np.float64) for key in ("models", "owners"))
    return by_model, by_owner


def _levels(line: Line) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean accuracy of each model, and the received model's accuracy on the rows of each owner."""
    received, local = (100 * np.array(line["accuracy"][key], dtype=np.float64) for key in ("received", "local"))
    known = np.isfinite(local)
    return np.nansum(local, axis=1) / np.maximum(known.sum(axis=1), 1), received


def _empty(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)


def _draw(
    axes: Axes,
    matrix: np.ndarray,
    beside: tuple[np.ndarray, np.ndarray],
    below: str,
    line: Line,
    scale: Normalize,
    colors: str,
) -> None:
    """Draw the matrix, a strip at the right and one below, and a dot where a model meets its own client's rows."""
    models, owners = line["models"], line["owners"]
    down, across = matrix.shape
    gap, wide, high = 0.5, max(1.0, 0.07 * across), max(1.0, 0.07 * down)
    by_model, by_owner = beside
    cmap = matplotlib.colormaps[colors].with_extremes(bad=NOTHING)
    left, bottom = across - 0.5, down - 0.5
    for values, extent in (
        (matrix, (-0.5, left, bottom, -0.5)),
        (by_model[:, None], (left + gap, left + gap + wide, bottom, -0.5)),
        (by_owner[None, :], (-0.5, left, bottom + gap + high, bottom + gap)),
    ):
        axes.imshow(values, extent=extent, cmap=cmap, norm=scale, interpolation="nearest", aspect="auto")
    axes.set_xlim(-0.5, left + gap + wide)
    axes.set_ylim(bottom + gap + high, -0.5)
    mine = [(owners.index(m), row) for row, m in enumerate(models) if m in owners]
    size = float(np.clip(40 / max(across, 1), 0.6, 4))
    axes.plot([x for x, _ in mine], [y for _, y in mine], "o", color="black", ms=size, mew=0)
    _ticks(axes.xaxis, owners, left + gap + wide / 2, "mean")
    _ticks(axes.yaxis, models, bottom + gap + high / 2, below)
    axes.tick_params(axis="x", rotation=90)
    axes.tick_params(labelsize=7, length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.grid(False)


def _ticks(axis: Any, clients: list[int], strip_at: float, strip: str) -> None:
    """Label each client by its number where there is room, and the strip by its name."""
    shown = list(enumerate(clients)) if len(clients) <= 25 else []
    axis.set_ticks([*(k for k, _ in shown), strip_at], [*(str(client) for _, client in shown), strip])


def forgetting_over_rounds(record: ExperimentRecord) -> Drawn | None:
    """Draw mean local forgetting in the probed rounds; None with a single probed round."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.2))
        axes = figure.subplots()
        several = False
        for number, method in enumerate(record.methods):
            curves = [curve for curve in map(_curve, method.runs) if len(curve[0])]
            if curves:
                shown = look(number)
                band(axes, curves, label(method.name), replace(shown, marker=shown.marker or "o"), every=1)
                several = several or len(curves[0][0]) > 1
        axes.axhline(0, color="#777777", lw=0.8)
        axes.set_xlabel("round")
        axes.set_ylabel("mean local\nforgetting, points")
        axes.margins(x=0.01)
        legend_above(axes)
        return svg(figure, "local forgetting over rounds") if several else None


def _curve(run: Any) -> tuple[np.ndarray, np.ndarray]:
    known = [line for line in run.forgetting if line.get("known")]
    return np.array([line["round"] for line in known]), np.array([line["forgetting"]["mean"] for line in known])


# -- groups over rounds ------------------------------------------------------------------------------------------------


def groups_over_rounds(record: ExperimentRecord) -> Drawn | None:
    """Draw the accuracy and turns of every group over all rounds; None where the picture of one period is enough."""
    drawn = [method for method in record.methods if method.shifted and method.runs]
    folded = record.period is not None and record.period <= record.experiment.rounds
    if len(record.groups) < 2 or not drawn or (folded and len(record.groups) == 2):
        return None
    found = [(method, _mean_matrix(record, method)) for method in drawn]
    # A method that diverged has no accuracies.
    found = [(method, (at, matrix)) for method, (at, matrix) in found if np.isfinite(matrix).any()]
    if not found:
        return None
    drawn, maps = [method for method, _ in found], [matrix for _, matrix in found]
    low, high = min(np.nanmin(m) for _, m in maps), max(np.nanmax(m) for _, m in maps)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, (0.7 + 0.32 * len(record.groups)) * len(drawn) + 0.5))
        panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False).flatten()
        for axes, method, (after, matrix) in zip(panels, drawn, maps, strict=True):
            edges = np.concatenate([[0], after])
            drawn_map = axes.pcolormesh(
                edges, np.arange(len(record.groups) + 1), 100 * matrix.T, cmap=LEVEL, vmin=100 * low, vmax=100 * high,
                rasterized=True,
            )  # fmt: skip
            transfer = method.runs[0].transfer(record.view, record.groups)
            for turn in transfer.turns if transfer is not None else ():
                axes.plot([turn.first, turn.end], [turn.which + 0.1] * 2, color="white", lw=2, solid_capstyle="butt")
            axes.set_yticks(np.arange(len(record.groups)) + 0.5, [label(group) for group in record.groups])
            axes.invert_yaxis()
            axes.set_title(label(method.name), fontsize=10, loc="left")
            axes.grid(False)
        panels[-1].set_xlabel("rounds done")
        figure.colorbar(drawn_map, ax=panels, label="accuracy, %", pad=0.01)
        return svg(figure, "accuracy of groups over rounds")


def _mean_matrix(record: ExperimentRecord, method: MethodRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return evaluation rounds and accuracy (evaluations, groups), as a mean over seeds."""
    found = [run.transfer(record.view, record.groups) for run in method.runs]
    matrices = [transfer for transfer in found if transfer is not None]
    mean = stack_runs([transfer.accuracy for transfer in matrices]).mean(axis=0)
    return np.array(matrices[0].after)[: len(mean)], mean
