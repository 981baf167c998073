"""Measures along a swept key, as numbers and as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from fedtide.evaluate.measure import Measure
from fedtide.report.figures import STYLE, Drawn, columns, grid, label, leftmost, look, svg
from fedtide.report.summary import Study

PANELS = 9
"""Maximum number of parts of a sweep that are drawn."""


@dataclass(frozen=True)
class Panel:
    """A measure over one swept key, the others fixed. title: the other keys; curves: (place, measure) by method."""

    title: str
    curves: dict[str, list[tuple[int, Measure]]]


@dataclass(frozen=True)
class Swept:
    """A measure over a sweep. key: swept key along the axis. values: its values."""

    key: str
    values: tuple[Any, ...]
    panels: list[Panel]

    @property
    def numbers(self) -> bool:
        """True if the values are numbers, with places of their own on an axis."""
        return _numbers(self.values)


def over_sweep(study: Study, measure: str) -> Swept | None:
    """Return a measure along the first numeric swept key, or else the first one; None without data or with one point.

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
        if len(parts) != len(order):  # a value contains commas
            parts = [f"{key.rpartition('.')[2]} {_word(value)}" for key, value in zip(order, chosen, strict=True)]
        title = ", ".join(part for key, part in zip(order, parts, strict=True) if key != along)
        places = {key: study.axes[key].index(value) for key, value in zip(order, chosen, strict=True)}
        others = tuple(place for key, place in places.items() if key != along)
        curves = panels.setdefault(others, Panel(title, {})).curves
        for method in summary.methods:
            if (found := method.measure(measure)).mean is not None:
                curves.setdefault(method.name, []).append((places[along], found))
    known = [panel for panel in panels.values() if panel.curves]
    return Swept(along.rpartition(".")[2], study.axes[along], known) if known else None


def share_over_sweep(study: Study, measure: str, said: str, title: str) -> Drawn | None:
    """Draw a measure between 0 and 1 along a sweep, in percent; None without data or with one point.

    Args:
        study: the sweep.
        measure: name of the measure in a summary.
        said: label of the axis.
        title: title of the picture.
    """
    swept = over_sweep(study, measure)
    if swept is None:
        return None
    names = list(dict.fromkeys(method.name for summary in study.summaries for method in summary.methods))
    drawn = swept.panels[:PANELS]
    found: dict[str, Any] = {}
    with matplotlib.rc_context(STYLE):
        figure, panels = grid(len(drawn), high=2.9)
        for axes, panel in zip(panels, drawn, strict=True):
            if axes is not panels[0]:
                axes.sharex(panels[0])
            for name, curve in panel.curves.items():
                _draw_curve(axes, swept, curve, label(name), names.index(name))
            axes.set_title(label(panel.title), fontsize=10)
            axes.set_ylim(0, 100)
            axes.set_xlabel(label(swept.key))
            if leftmost(axes):
                axes.set_ylabel(said)
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
                found.setdefault(name, handle)
        if not swept.numbers:
            panels[0].set_xticks(range(len(swept.values)), [label(_word(value)) for value in swept.values])
            panels[0].margins(x=0.15)
        ncols = columns(list(found), 8.4 if len(drawn) > 1 else 5.4)
        figure.legend(found.values(), found.keys(), loc="outside upper left", ncols=ncols, fontsize=9)
        return svg(figure, title)


def _draw_curve(axes: Axes, swept: Swept, curve: Sequence[tuple[int, Measure]], name: str, number: int) -> None:
    x = [swept.values[place] if swept.numbers else place for place, _ in curve]
    order = np.argsort(x, kind="stable")
    y = [100 * (curve[k][1].mean or 0.0) for k in order]
    error = [100 * (curve[k][1].error or 0.0) for k in order]
    axes.errorbar(
        [x[k] for k in order], y, error if any(error) else None, label=name, color=look(number).color,
        ls=look(number).dashes,
        marker="os^Dv"[number % 5], ms=4.5, lw=1.8, capsize=2.5, clip_on=False,
    )  # fmt: skip


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _word(value: Any) -> str:
    word = str(value.get("kind", "") if isinstance(value, dict) else value)
    return word if len(word) <= 16 else word[:13] + "..."
