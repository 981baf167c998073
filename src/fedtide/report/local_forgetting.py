"""Local forgetting: accuracy on the rows of other clients that a client's training costs, within a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import mean_of_known
from fedtide.report.formats import Number, points
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord
from fedtide.report.summary import Summary
from fedtide.report.topic import Topic, plan_picture, plan_table, table_of

ROUNDS, WIDE = 5, 4
"""Maximum number of probed rounds drawn, and of methods side by side."""

Line = dict[str, Any]
"""A line of `forgetting.jsonl`."""

NUMBERS = (
    Number("local_forgetting", points, "on rows of other clients"),
    Number("local_forgetting_apart", points, "on rows of clients without a common class"),
    Number("local_forgetting_own", points, "on own rows"),
    Number("local_loss_increase", title="increase of the loss, other clients"),
)


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the local forgetting of a run, averaged over the measured rounds; empty without such rounds.

    A round with nothing to compare, such as a single participant on its own rows, is left out.
    """
    lines = [line for line in run.forgetting if "skipped" not in line]
    if not lines:
        return {}
    comparable = [line for line in lines if line["known"]]
    return {
        "local_forgetting": mean_of_known(line["forgetting"]["mean"] for line in comparable),
        "local_forgetting_own": mean_of_known(line["forgetting"]["own"] for line in lines),
        "local_forgetting_apart": mean_of_known(line["forgetting"].get("apart") for line in comparable),
        "local_loss_increase": mean_of_known(line["loss_increase"]["mean"] for line in comparable),
    }


# -- maps --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """A kind of map (models, owners) of a line of `forgetting.jsonl`.

    strips: values beside it, by model and by owner. below: name of the strip below.
    """

    title: str
    unit: str
    colors: str
    below: str
    matrix: Callable[[Line], np.ndarray]
    strips: Callable[[Line], tuple[np.ndarray, np.ndarray]]


@plan_picture("forgetting", "Local client forgetting", "[forgetting]")
def local_forgetting(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the cost of each participant's training on the rows of others, in each probed round.

    {Score} of the received model minus that of each client's own model, in the first seed. Red is forgotten, blue is
    gained; a dot marks a client's own rows.
    """
    probes = _probes(record)
    rounds = sorted({number for lines in probes.values() for number in lines})
    if len(rounds) > ROUNDS:  # the first and the last, and others evenly between them
        rounds = [rounds[round(k * (len(rounds) - 1) / (ROUNDS - 1))] for k in range(ROUNDS)]
    maps = [forgotten(line) for lines in probes.values() for line in lines.values()]
    largest = max((np.nanmax(np.abs(m)) for m in maps if np.isfinite(m).any()), default=0.0) or 1.0
    title, unit = "local client forgetting", "accuracy lost by local training, points"
    kind = Map(title, unit, figures.CHANGE, "mean", forgotten, _means_of_forgetting)
    return _draw_maps(probes, rounds, kind, Normalize(-largest, largest))


@plan_picture("local_models", "After local training", "[forgetting]")
def after_local_training(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the accuracy of each participant's own model on the rows of all clients, in the last probed round.

    {Score} of each participant's own model on the rows of every client, in the first seed; below, the received model.
    """
    probes = _probes(record)
    last = sorted({number for lines in probes.values() for number in lines})[-1:]
    title, unit = "accuracy after local training", "accuracy after local training, %"
    kind = Map(title, unit, figures.LEVEL, "received", lambda line: _percent(line, "accuracy", "local"), _levels)
    return _draw_maps(probes, last, kind, Normalize(0, 100))


def _probes(record: ExperimentRecord) -> dict[str, dict[int, Line]]:
    """Return the measurements in the first seed of each method, by round."""
    probes = {
        method.name: {line["round"]: line for line in method.runs[0].forgetting if line.get("models")}
        for _, method in record.numbered
    }
    return {name: lines for name, lines in probes.items() if lines}


def _percent(line: Line, name: str, key: str) -> np.ndarray:
    return 100 * np.array(line[name][key], dtype=np.float64)


def forgotten(line: Line) -> np.ndarray:
    """Return F (models, owners) in percentage points; NaN for owners without rows."""
    return _percent(line, "accuracy", "received") - _percent(line, "accuracy", "local")


def _means_of_forgetting(line: Line) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of F by model and by owner, without the cells of a model on its own client."""
    return _percent(line, "forgetting", "models"), _percent(line, "forgetting", "owners")


def _levels(line: Line) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean accuracy of each model, and the received model's accuracy on the rows of each owner."""
    local = _percent(line, "accuracy", "local")
    means = np.nansum(local, axis=1) / np.maximum(np.isfinite(local).sum(axis=1), 1)
    return means, _percent(line, "accuracy", "received")


def _draw_maps(
    probes: dict[str, dict[int, Line]], rounds: list[int], kind: Map, scale: Normalize
) -> figures.Drawn | None:
    """Draw a map for each method and round, in one color scale; None without a round."""
    if not rounds:
        return None
    tallest = max(len(line["models"]) for lines in probes.values() for line in lines.values())
    height = min(max(1.5 + 0.16 * tallest, 2.1), 3.6)
    figure, stacks = figures.stacked(len(probes), widest=WIDE, heights=[height] * len(rounds))
    for stack, (name, lines) in zip(stacks, probes.items(), strict=True):
        for axes, number in zip(stack, rounds, strict=True):
            line = lines.get(number, {})
            mean = "nothing to compare"
            if line.get("known"):
                mean = f"mean forgetting {100 * line['forgetting']['mean']:.1f} points"
            axes.set_title(f"{figures.label(name)}, round {number}\n{mean}", fontsize=9)
            axes.grid(False)
            axes.set(xticks=[], yticks=[])
            if line:
                _draw_map(axes, line, kind, scale)
            if figures.leftmost(axes):
                axes.set_ylabel("model of client")
        stack[-1].set_xlabel("rows of client")
    figure.colorbar(ScalarMappable(scale, kind.colors), ax=figure.axes, label=kind.unit, shrink=0.8)
    return figures.svg(figure, kind.title)


def _draw_map(axes: Axes, line: Line, kind: Map, scale: Normalize) -> None:
    """Draw the matrix, strips at the right and below, and a dot for each model on the rows of its client."""
    models, owners, matrix = line["models"], line["owners"], kind.matrix(line)
    down, across = matrix.shape
    gap, wide, high = 0.5, max(1.0, 0.07 * across), max(1.0, 0.07 * down)
    by_model, by_owner = kind.strips(line)
    cmap = matplotlib.colormaps[kind.colors].with_extremes(bad=figures.OTHER_COLOR)
    left, bottom = across - 0.5, down - 0.5
    for values, extent in (
        (matrix, (-0.5, left, bottom, -0.5)),
        (by_model[:, None], (left + gap, left + gap + wide, bottom, -0.5)),
        (by_owner[None, :], (-0.5, left, bottom + gap + high, bottom + gap)),
    ):
        axes.imshow(values, extent=extent, cmap=cmap, norm=scale, interpolation="nearest", aspect="auto")
    axes.set_xlim(-0.5, left + gap + wide)
    axes.set_ylim(bottom + gap + high, -0.5)
    dots = [(owners.index(model), row) for row, model in enumerate(models) if model in owners]
    size = float(np.clip(40 / max(across, 1), 0.6, 4))
    axes.plot([x for x, _ in dots], [y for _, y in dots], "o", color="black", ms=size, mew=0)
    _label_ticks(axes.xaxis, owners, left + gap + wide / 2, "mean")
    _label_ticks(axes.yaxis, models, bottom + gap + high / 2, kind.below)
    axes.tick_params(axis="x", rotation=90)
    axes.tick_params(labelsize=7, length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _label_ticks(axis: Any, clients: list[int], strip_at: float, strip: str) -> None:
    """Label each client by its number if there is room, and the strip by its name."""
    numbers = clients if len(clients) <= 25 else []
    axis.set_ticks([*range(len(numbers)), strip_at], [*map(str, numbers), strip])


@plan_picture("forgetting_over_rounds", "Local forgetting over rounds", "[forgetting] of several rounds")
def forgetting_over_rounds(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the mean of local forgetting over the probed rounds.

    Mean local forgetting over all models and the rows of other clients.{band}
    """
    curves = record.curves(_curve)
    if not any(len(of_runs[0][0]) > 1 for of_runs in curves.values()):
        return None
    figure, (axes,) = figures.stack_panels([2.6])
    figures.bands(axes, curves, record.names, "mean local\nforgetting, points", every=1)
    axes.axhline(0, color="#777777", lw=0.8)
    figures.over_rounds(axes, 0, record.experiment.rounds)
    figures.legend_above(axes)
    return figures.svg(figure, "local forgetting over rounds")


def _curve(run: RunRecord) -> figures.Curve:
    lines = [line for line in run.forgetting if line.get("known")]
    return np.array([line["round"] for line in lines]), np.array([line["forgetting"]["mean"] for line in lines])


@plan_table("Forgetting within a round")
def forgetting_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of local forgetting, a row per method; None without probes.

    {Score} that a client's training costs, as means over the measured rounds; below zero it gains.
    """
    return table_of(summary, NUMBERS)


TOPIC = Topic(NUMBERS, measure, (local_forgetting, after_local_training, forgetting_over_rounds), (forgetting_table,))
