"""The server's clock: what a learned prior read and forecast, and when it believed in a period."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from fedtide.report.figures import GROUP_COLORS, INK, STYLE, Drawn, label, stacked, svg
from fedtide.report.reading import ExperimentRecord, RunRecord
from fedtide.report.rhythm import came_to, has_learned, listed_fact, order_of, periods_of


def server_clock(record: ExperimentRecord) -> Drawn | None:
    """Draw the share of the first group as each learned prior read and forecast it, in the first seed of each method.

    Dots: read in the round. Line: forecast before it, and that of the next period. Area: truth, where it is known.
    None without such a prior.
    """
    drawn = [(method.name, run) for method in record.methods for run in method.runs[:1] if has_learned(run)]
    if not drawn:
        return None
    with matplotlib.rc_context(STYLE):
        figure, stacks = stacked(len(drawn), widest=1, heights=[1.9], wide=9.6, sharey=True)
        for (axes,), (name, run) in zip(stacks, drawn, strict=True):
            _draw(axes, record, name, run)
        stacks[-1][0].set_xlabel("rounds done")
        handles, labels = max((axes.get_legend_handles_labels() for (axes,) in stacks), key=lambda found: len(found[1]))
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), fontsize=9)
        return svg(figure, "the server's clock")


def _draw(axes: Axes, record: ExperimentRecord, name: str, run: RunRecord) -> None:
    """Draw one run."""
    ends = np.arange(1, len(run.lines) + 1)
    read, ahead, came = listed_fact(run, "prior"), listed_fact(run, "forecast"), came_to(run)
    truth = run.every_row(lambda line: line.get("expected"))
    first = label(record.groups[0]) if record.groups else "first group"
    if truth.size:
        axes.fill_between(
            ends, 0, 100 * truth[:, 0], color=GROUP_COLORS[0], alpha=0.3, lw=0, label=f"{first}, expected"
        )
    if read.size and came.shape == read.shape:
        order = order_of(read, came)
        read, ahead = read[:, order], ahead[:, order] if ahead.size else ahead
    if read.size:
        axes.plot(ends, 100 * read[:, 0], ".", ms=3.5, color="#555555", label="read in the round")
    periods, believed = periods_of(run)
    said = "no period is believed"
    if ahead.size:
        axes.plot(ends, 100 * ahead[:, 0], color=GROUP_COLORS[1], lw=1.6, label="forecast before it")
    if believed.any():
        after, last = int(believed.argmax()) + 1, periods[believed][-1]
        axes.axvline(after, color=INK, lw=1, ls=(0, (4, 3)))
        lengths = " and ".join(f"{period:.1f}" for period in last if math.isfinite(period))
        said = f"after round {after} a period is believed; now {lengths} rounds"
        if believed[-1] and ahead.size:
            coming = _next(100 * ahead[:, 0], float(np.nanmax(last)))
            axes.plot(ends[-1] + 1 + np.arange(len(coming)), coming, color=GROUP_COLORS[1], lw=1.6, ls=(0, (2, 1.5)),
                      label="next period")  # fmt: skip
            axes.axvspan(ends[-1], ends[-1] + len(coming), color="#888888", alpha=0.08, lw=0)
    axes.set_title(f"{label(name)}: {said}", fontsize=10, loc="left")
    axes.set_xlim(0, None)
    axes.set_ylim(-3, 103)
    axes.set_ylabel(f"{first}, %")


def _next(told: np.ndarray, period: float) -> np.ndarray:
    """Return what the last forecasts say of the rounds of one more period."""
    back = np.round(len(told) + np.arange(math.ceil(period)) - period).astype(int)
    return told[np.clip(back, 0, len(told) - 1)]
