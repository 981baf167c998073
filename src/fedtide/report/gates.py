"""How much predictions lean on which expert, where several are mixed: gate weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedtide.report.figures import STYLE, colour, columns, dashes, label, legend_above, svg
from fedtide.report.measures import Measure
from fedtide.report.members import MODEL_COLOURS, OTHER_COLOUR, OWN_COLOUR
from fedtide.report.reading import ExperimentRecord
from fedtide.report.summary import Study

WIDE, PANELS = 3, 9
"""At most so many parts of a sweep side by side, and in all."""


@dataclass(frozen=True)
class Bar:
    """Mean gate weights of one method, on rows of everyone (group "") or of one group.

    own: of the clients' own experts, None where there are none; shared: of each shared model.
    """

    method: str
    group: str
    own: float | None
    shared: list[float]


def bars(record: ExperimentRecord) -> list[Bar]:
    """The mean gate weights of every method that mixes, over the last evaluations of its first seed.

    Not over seeds: which model is number 0 is another one in each of them.
    """
    since = record.experiment.rounds - record.window
    out = []
    for method in record.methods:
        for run, group in ((run, group) for run in method.runs[:1] for group in record.groups or [""]):
            after, values = run.weights(record.view, group or None)
            late = values[after > since] if len(after) else values
            if not len(late):
                continue
            first, *others = weights = late.mean(axis=0).tolist()
            own = run.own_expert(record.view)
            out.append(Bar(method.name, group, first if own else None, others if own else weights))
    return out


def gate_weights(record: ExperimentRecord) -> str | None:
    """A bar for each method that mixes and each group: whose weight is how large; None where nobody mixes."""
    drawn = bars(record)
    if not drawn:
        return None
    models = max(len(bar.shared) for bar in drawn)
    known = min(models, len(MODEL_COLOURS))
    names = ["a client's own expert", *(f"model {k}" for k in range(known)), "other models"]
    colours = [OWN_COLOUR, *MODEL_COLOURS[:known], OTHER_COLOUR]
    parts = np.array([_parts(bar, known) for bar in drawn])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 0.36 * len(drawn) + 1.3))
        axes = figure.subplots()
        left = np.zeros(len(drawn))
        for k in np.flatnonzero(parts.sum(axis=0)):
            width = parts[:, k]
            axes.barh(range(len(drawn)), width, left=left, color=colours[k], label=names[k], height=0.72)
            for place in np.flatnonzero(width >= 4).tolist():
                middle = left[place] + width[place] / 2
                axes.text(
                    middle, place, f"{width[place]:.0f}", ha="center", va="center", fontsize=8, color=_ink(colours[k])
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
    """In percent: of the own expert, of each model that has a colour, of all others."""
    shared = [*bar.shared[:known], *[0.0] * (known - len(bar.shared))]
    return [100 * share for share in (bar.own or 0.0, *shared, sum(bar.shared[known:]))]


def _ink(background: str) -> str:
    """Black or white, whichever can be read on it."""
    red, green, blue = matplotlib.colors.to_rgb(background)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


# -- over a sweep ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """A measure over one swept key, the others fixed. title: the others; curves: by method (place, what was found)."""

    title: str
    curves: dict[str, list[tuple[int, Measure]]]


@dataclass(frozen=True)
class Swept:
    """A measure over a sweep. key: what is swept along the axis, values: its values there."""

    key: str
    values: tuple[Any, ...]
    panels: list[Panel]

    @property
    def numbers(self) -> bool:
        """Whether the values have places of their own on an axis."""
        return _numbers(self.values)


def over_sweep(study: Study, measure: str) -> Swept | None:
    """A measure along the first swept key that is a number, or else the first; None where nobody has it, or one point.

    Every choice of the other keys is a panel.
    """
    several = [key for key, values in study.axes.items() if len(values) > 1]
    if not several:
        return None
    along = next((key for key in several if _numbers(study.axes[key])), several[0])
    order = list(study.axes)
    panels: dict[tuple[int, ...], Panel] = {}
    for chosen, summary in zip(itertools.product(*study.axes.values()), study.summaries, strict=True):
        parts = summary.point.split(", ")
        if len(parts) != len(order):  # a value with commas in it
            parts = [f"{key.rpartition('.')[2]} {_word(value)}" for key, value in zip(order, chosen, strict=True)]
        title = ", ".join(part for key, part in zip(order, parts, strict=True) if key != along)
        places = {key: study.axes[key].index(value) for key, value in zip(order, chosen, strict=True)}
        others = tuple(place for key, place in places.items() if key != along)
        curves = panels.setdefault(others, Panel(title, {})).curves
        for method in summary.methods:
            found = method.measures.get(measure)
            if found is not None and found.mean is not None:
                curves.setdefault(method.name, []).append((places[along], found))
    known = [panel for panel in panels.values() if panel.curves]
    return Swept(along.rpartition(".")[2], study.axes[along], known) if known else None


def own_weight_over_sweep(study: Study) -> str | None:
    """The weight of clients' own experts along a sweep; None where nobody has experts of their own."""
    swept = over_sweep(study, "own_weight")
    if swept is None:
        return None
    names = list(dict.fromkeys(method.name for summary in study.summaries for method in summary.methods))
    panels = swept.panels[:PANELS]
    lines, wide = math.ceil(len(panels) / WIDE), min(len(panels), WIDE)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6 if wide > 1 else 6.4, 2.9 * lines + 0.6))
        grid = figure.subplots(lines, wide, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flatten()[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.flatten(), panels, strict=False):
            for name, curve in panel.curves.items():
                _draw_curve(axes, swept, curve, label(name), names.index(name))
            axes.set_title(label(panel.title), fontsize=10)
            axes.set_ylim(0, 100)
            axes.set_xlabel(label(swept.key))
        if not swept.numbers:
            grid[0][0].set_xticks(range(len(swept.values)), [label(_word(value)) for value in swept.values])
            grid[0][0].margins(x=0.15)
        for axes in grid[:, 0]:
            axes.set_ylabel("weight of a client's\nown expert, %")
        found: dict[str, Any] = {}
        for axes in grid.flatten()[: len(panels)]:
            for handle, said in zip(*axes.get_legend_handles_labels(), strict=True):
                found.setdefault(said, handle)
        ncols = columns(list(found), 8.4 if wide > 1 else 5.4)
        figure.legend(found.values(), found.keys(), loc="outside upper left", ncols=ncols, fontsize=9)
        return svg(figure, "gate weight over the sweep")


def _draw_curve(axes: Axes, swept: Swept, curve: Sequence[tuple[int, Measure]], name: str, number: int) -> None:
    x = [swept.values[place] if swept.numbers else place for place, _ in curve]
    order = np.argsort(x, kind="stable")
    y = [100 * (curve[k][1].mean or 0.0) for k in order]
    error = [100 * (curve[k][1].error or 0.0) for k in order]
    axes.errorbar(
        [x[k] for k in order], y, error if any(error) else None, label=name, color=colour(number), ls=dashes(number),
        marker="os^Dv"[number % 5], ms=4.5, lw=1.8, capsize=2.5, clip_on=False,
    )  # fmt: skip


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _word(value: Any) -> str:
    word = str(value.get("kind", "") if isinstance(value, dict) else value)
    return word if len(word) <= 16 else word[:13] + "..."
