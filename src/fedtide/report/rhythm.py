"""Rhythm of a learned prior: shares of groups read from sums, forecasts, and believed periods."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes

from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.mixtures.rhythm import order_like
from fedtide.report.formats import Number, percent, points, rounds
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord
from fedtide.report.summary import Summary
from fedtide.report.topic import Topic, plan_picture, plan_table, table_of

NUMBERS = (
    Number("rounds_to_period", rounds, "rounds until a period was believed", reached="period_found"),
    Number("learned_period", rounds, "period at the end"),
    Number("period_known", percent, "rounds with a period"),
    Number("shares_known", percent, "rounds with shares"),
    Number("shares_error", points, "error of the shares"),
    Number("period_found", percent),
)


def has_learned(run: RunRecord) -> bool:
    """Tell whether the run has a learned prior, which reports the chance of a period."""
    return bool(np.isfinite(run.fact("chance")).any())


def periods_of(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return the periods of every round (rounds, longest), NaN without one, and whether one is believed."""
    periods = run.listed_fact("periods")
    return periods, np.isfinite(periods[:, 0]) if periods.size else np.zeros(len(run.lines), dtype=bool)


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the numbers of a learned prior; empty without one.

    A period that is never believed counts with the end of the run.
    """
    if not has_learned(run):
        return {}
    (periods, believed), read = periods_of(run), run.listed_fact("prior")
    out = {
        "period_known": float(believed.mean()),
        "period_found": float(believed.any()),
        "rounds_to_period": float(believed.argmax() + 1 if believed.any() else len(believed)),
        "shares_known": float(np.isfinite(read[:, 0]).mean()) if read.size else 0.0,
    }
    if believed.any():
        out["learned_period"] = float(periods[believed][-1, 0])
    true = _true_shares(run)
    if read.size and true.shape == read.shape:
        both = np.isfinite(read[:, 0]) & np.isfinite(true[:, 0])
        if both.sum() > 1:
            out["shares_error"] = float(np.sqrt(((read[both][:, _order(read, true)] - true[both]) ** 2).mean()))
    return out


def _true_shares(run: RunRecord) -> np.ndarray:
    """Return the shares of groups among the participants (rounds, groups); NaN if unknown."""
    counts = run.every_row(lambda line: line.get("groups"))
    total = counts.sum(1, keepdims=True) if counts.size else counts
    return counts / np.where(total > 0, total, np.nan)


def _order(read: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return which read share (rounds, K) belongs to which group: a server has no names for groups."""
    both = np.isfinite(read[:, 0]) & np.isfinite(true[:, 0])
    return order_like(read[both], true[both]) if both.sum() > 1 else np.arange(read.shape[1])


@plan_picture("rhythm", "The server's clock", 'a method with prior = "learned"')
def server_clock(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the rhythm that a learned prior found, and the true one.

    Share of the first group among the participants in the first seed: read from sums (dots), forecast (line), and true
    (area).
    """
    drawn = [(method.name, run) for method in record.methods for run in method.runs[:1] if has_learned(run)]
    if not drawn:
        return None
    figure, panels = figures.grid(len(drawn), widest=1, high=1.9)
    for axes, (name, run) in zip(panels, drawn, strict=True):
        _draw(axes, record, name, run)
    panels[-1].set_xlabel("rounds done")
    figures.figure_legend(figure, panels)
    return figures.svg(figure, "the server's clock")


def _draw(axes: Axes, record: ExperimentRecord, name: str, run: RunRecord) -> None:
    """Draw one run."""
    ends = np.arange(1, len(run.lines) + 1)
    read, ahead, true = run.listed_fact("prior"), run.listed_fact("forecast"), _true_shares(run)
    expected = run.every_row(lambda line: line.get("expected"))
    first = figures.label(record.groups[0]) if record.groups else "first group"
    if expected.size:
        share, name_of = 100 * expected[:, 0], f"{first}, expected"
        axes.fill_between(ends, 0, share, color=figures.GROUP_COLORS[0], alpha=0.3, lw=0, label=name_of)
    if read.size and true.shape == read.shape:
        order = _order(read, true)
        read, ahead = read[:, order], ahead[:, order] if ahead.size else ahead
    if read.size:
        axes.plot(ends, 100 * read[:, 0], ".", ms=3.5, color="#555555", label="read in the round")
    periods, believed = periods_of(run)
    text, forecast = "no period is believed", figures.GROUP_COLORS[1]
    if ahead.size:
        axes.plot(ends, 100 * ahead[:, 0], color=forecast, lw=1.6, label="forecast before it")
    if believed.any():
        after, last = int(believed.argmax()) + 1, periods[believed][-1]
        axes.axvline(after, color=figures.INK, lw=1, ls=(0, (4, 3)))
        lengths = " and ".join(f"{period:.1f}" for period in last if math.isfinite(period))
        text = f"after round {after} a period is believed; now {lengths} rounds"
        if believed[-1] and ahead.size:
            coming = _next_period(100 * ahead[:, 0], float(np.nanmax(last)))
            after_end = ends[-1] + 1 + np.arange(len(coming))
            axes.plot(after_end, coming, color=forecast, lw=1.6, ls=(0, (2, 1.5)), label="next period")
            axes.axvspan(ends[-1], ends[-1] + len(coming), color="#888888", alpha=0.08, lw=0)
    axes.set_title(f"{figures.label(name)}: {text}", fontsize=10, loc="left")
    axes.set_xlim(0, None)
    axes.set_ylim(-3, 103)
    axes.set_ylabel(f"{first}, %")


def _next_period(forecasts: np.ndarray, period: float) -> np.ndarray:
    """Return the last forecasts as those of the rounds of one more period."""
    back = np.round(len(forecasts) + np.arange(math.ceil(period)) - period).astype(int)
    return forecasts[np.clip(back, 0, len(forecasts) - 1)]


@plan_table("The learned rhythm")
def rhythm_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of learned priors, a row per method; None without one.

    Rounds and shares that learned priors read from sums; a period never believed counts with the end.
    """
    return table_of(summary, NUMBERS)


TOPIC = Topic(NUMBERS, measure, (server_clock,), (rhythm_table,))
