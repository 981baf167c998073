"""Pictures of a tuning: accuracy over trials, and accuracy against each value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedtide.config import Range
from fedtide.report.figures import STYLE, Drawn, grid, label, leftmost, look, svg
from fedtide.report.tables import format_value
from fedtide.tuning.folder import Tuned
from fedtide.tuning.plan import Parameter
from fedtide.tuning.trials import Trial

PRUNED = "#777777"
FAILED = "#B00020"


def over_trials(stage: Sequence[Tuned], score: str) -> Drawn:
    """Draw accuracy over trials with the best so far, a panel per method."""
    with matplotlib.rc_context(STYLE):
        figure, panels = grid(len(stage), high=3.0)
        for number, (axes, tuned) in enumerate(zip(panels, stage, strict=True)):
            _trials(axes, tuned.trials, look(number).color, lambda trial: trial.number + 1)
            done = [trial for trial in tuned.trials if trial.accuracy is not None]
            if done:
                at = [trial.number + 1 for trial in done]
                best = np.maximum.accumulate([100 * (trial.accuracy or 0.0) for trial in done])
                axes.step(
                    [*at, max(len(tuned.trials), at[-1])], [*best, best[-1]], where="post", color=look(number).color
                )
            axes.set_title(label(tuned.search.method), fontsize=10)
            axes.set_xlabel("trial")
            axes.set_xlim(0.5, max(tuned.search.trials, 2) + 0.5)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(figure, panels, score, best=True)
        return svg(figure, f"{score} over trials")


def over_values(tuned: Tuned, score: str) -> Drawn | None:
    """Draw accuracy against each value, a panel per parameter; None where no trial was judged."""
    seen = [trial for trial in tuned.trials if trial.last is not None]
    if not seen:
        return None
    with matplotlib.rc_context(STYLE):
        figure, panels = grid(len(tuned.search.parameters), high=3.0)
        for axes, parameter in zip(panels, tuned.search.parameters, strict=True):
            _against(axes, seen, tuned.best, parameter)
        _finish(figure, panels, score, star=True)
        return svg(figure, f"values and {score}")


def _against(axes: Axes, trials: Sequence[Trial], best: Trial | None, parameter: Parameter) -> None:
    range_, key = parameter.range, parameter.key
    if range_.choices is not None:
        choices = range_.choices

        def place(trial: Trial) -> float:
            return float(choices.index(trial.values[key]))

        axes.set_xticks(range(len(choices)), [label(format_value(value)) for value in choices])
        axes.margins(x=0.15)
    else:

        def place(trial: Trial) -> float:
            return float(trial.values[key])

        _axis(axes, range_)
    _trials(axes, [trial for trial in trials if trial.state != "failed"], look(0).color, place)
    if best is not None and best.accuracy is not None:
        axes.plot(place(best), 100 * best.accuracy, marker="*", ms=15, color=look(1).color, mec="black", mew=0.6, ls="")
    axes.set_xlabel(label(parameter.name))


def _axis(axes: Axes, range_: Range) -> None:
    """Set the axis to a numeric range, with a line at each end and some room beyond."""
    low, high = float(range_.low or 0.0), float(range_.high or 0.0)
    if range_.log:
        axes.set_xscale("log")
        room = (high / low) ** 0.06 if high > low else 1.1
        axes.set_xlim(low / room, high * room)
    else:
        room = 0.06 * (high - low) or 0.5
        axes.set_xlim(low - room, high + room)
        if range_.whole:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for end in {low, high}:
        axes.axvline(end, color="#999999", lw=1, ls=(0, (4, 3)))


def _trials(axes: Axes, trials: Sequence[Trial], color: str, place: Any) -> None:
    """Draw each trial with a marker for its state; no two states differ by color alone."""
    marks: list[tuple[str, dict[str, Any]]] = [
        ("finished", {"marker": "o", "color": color, "ms": 5}),
        ("pruned", {"marker": "s", "color": PRUNED, "mfc": "none", "ms": 5}),
    ]
    for state, style in marks:
        # A trial without a finite loss has no evaluation.
        points = [(place(t), 100 * _height(t)) for t in trials if t.state == state and not math.isnan(_height(t))]
        axes.plot([x for x, _ in points], [y for _, y in points], ls="", **style)
    for trial in trials:
        if trial.state == "failed":
            axes.plot(place(trial), 0.03, marker="x", color=FAILED, ms=6, ls="", transform=axes.get_xaxis_transform())


def _height(trial: Trial) -> float:
    value = trial.accuracy if trial.accuracy is not None else trial.last
    return math.nan if value is None else value


def _finish(figure: Figure, panels: Sequence[Axes], score: str, *, best: bool = False, star: bool = False) -> None:
    """Add the unit of the axes and the legend of the markers."""
    for axes in filter(leftmost, panels):
        axes.set_ylabel(f"{score} on\nvalidation rows, %")
    handles = [
        Line2D([], [], ls="", marker="o", color="#333333", ms=5, label="finished"),
        Line2D([], [], ls="", marker="s", color=PRUNED, mfc="none", ms=5, label="pruned"),
    ]
    if best:
        handles.append(Line2D([], [], ls="", marker="x", color=FAILED, ms=6, label="failed"))
        handles.append(Line2D([], [], color="#333333", label="best so far"))
    if star:
        handles.append(
            Line2D([], [], ls="", marker="*", color=look(1).color, mec="black", mew=0.6, ms=12, label="best")
        )
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=9)
