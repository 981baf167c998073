"""Gate weights: the weight of each expert in predictions, where several are mixed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedtide.report.figures import MODEL_COLORS, OTHER_COLOR, OWN_COLOR, STYLE, Drawn, label, legend_above, svg
from fedtide.report.reading import ExperimentRecord
from fedtide.report.summary import Study
from fedtide.report.sweeps import share_over_sweep


@dataclass(frozen=True)
class Bar:
    """Mean gate weights of one method, on rows of all clients (group "") or of one group.

    own: weight of the clients' own experts, None without any; shared: weight of each shared model.
    """

    method: str
    group: str
    own: float | None
    shared: list[float]


def bars(record: ExperimentRecord) -> list[Bar]:
    """Return the mean gate weights of every method that mixes, over the last evaluations of its first seed.

    Not averaged over seeds, as the number of a model means another model in each seed.
    """
    since = record.experiment.rounds - record.window
    out = []
    for method in record.methods:
        for run, group in ((run, group) for run in method.runs[:1] for group in record.groups or [""]):
            after, own, shared = run.weights(record.view, group or None)
            late = after > since
            if late.any():
                mean = float(own[late].mean())
                out.append(
                    Bar(method.name, group, None if math.isnan(mean) else mean, shared[late].mean(axis=0).tolist())
                )
    return out


def gate_weights(record: ExperimentRecord) -> Drawn | None:
    """Draw a bar of gate weights for each method that mixes and each group; None without such a method."""
    drawn = bars(record)
    if not drawn:
        return None
    models = max(len(bar.shared) for bar in drawn)
    known = min(models, len(MODEL_COLORS))
    names = ["a client's own expert", *(f"model {k}" for k in range(known)), "other models"]
    colors = [OWN_COLOR, *MODEL_COLORS[:known], OTHER_COLOR]
    parts = np.array([_parts(bar, known) for bar in drawn])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 0.36 * len(drawn) + 1.3))
        axes = figure.subplots()
        left = np.zeros(len(drawn))
        for k in np.flatnonzero(parts.sum(axis=0)):
            width = parts[:, k]
            axes.barh(range(len(drawn)), width, left=left, color=colors[k], label=names[k], height=0.72)
            for place in np.flatnonzero(width >= 4).tolist():
                middle = left[place] + width[place] / 2
                axes.text(
                    middle, place, f"{width[place]:.0f}", ha="center", va="center", fontsize=8, color=_ink(colors[k])
                )
            left = left + width
        axes.set_yticks(
            range(len(drawn)),
            [label(f"{bar.method}, {bar.group} clients" if bar.group else bar.method) for bar in drawn],
        )
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("mean gate weight, %")
        axes.grid(axis="y", visible=False)
        legend_above(axes, room=7.0)
        return svg(figure, "gate weights")


def _parts(bar: Bar, known: int) -> list[float]:
    """Return the weights in percent: of the own expert, of each model that has a color, of all others."""
    shared = [*bar.shared[:known], *[0.0] * (known - len(bar.shared))]
    return [100 * share for share in (bar.own or 0.0, *shared, sum(bar.shared[known:]))]


def _ink(background: str) -> str:
    """Return black or white, whichever is readable on the background."""
    red, green, blue = matplotlib.colors.to_rgb(background)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def own_weight_over_sweep(study: Study) -> Drawn | None:
    """Draw the weight of clients' own experts along a sweep; None without own experts."""
    return share_over_sweep(study, "own_weight", "weight of a client's\nown expert, %", "gate weight over the sweep")
