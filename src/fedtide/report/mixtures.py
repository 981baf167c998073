"""Pictures of mixtures: learned blend of domains, purity of the split of rows, losses over clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedtide.evaluate.metrics import mean_of_known
from fedtide.report.blends import learned_shares, loss, purities, shares_by_domain, trivial_purities, true_shares
from fedtide.report.figures import (
    OTHER_COLOR,
    STYLE,
    Drawn,
    Look,
    band,
    domain_color,
    domain_names,
    grid,
    label,
    leftmost,
    legend_above,
    look,
    over_rounds,
    stack_runs,
    svg,
)
from fedtide.report.reading import ExperimentRecord, MethodRecord, RunRecord

MANY = 4
"""Number of cycles above which a panel takes the whole width of the page."""

TRUE_DASHES = (0, (4, 2))
"""Dashes of true values, drawn beside learned ones."""


def blend_learned(record: ExperimentRecord) -> Drawn | None:
    """Draw the share of each domain's component over rounds against the true share, a panel per method.

    None without such a method.
    """
    found = {
        method.name: [
            run for run in _telling(method, shares_by_domain) if true_shares(run).shape == shares_by_domain(run).shape
        ]
        for method in record.methods
    }
    drawn = {name: runs for name, runs in found.items() if runs}
    if not drawn:
        return None
    names = domain_names(record)
    with matplotlib.rc_context(STYLE):
        crowded = any((method.cycles or 0) > MANY for method in record.methods)
        figure, panels = grid(len(drawn), widest=1 if crowded else 3, high=2.0 if crowded else 2.6)
        left_over = False
        for axes, (name, runs) in zip(panels, drawn.items(), strict=True):
            left_over |= _draw_blend(axes, runs, len(names))
            axes.set_title(label(name), fontsize=10)
            over_rounds(axes, 0, record.experiment.rounds)
            axes.xaxis.set_major_locator(MaxNLocator(10 if crowded else 5, integer=True))
            axes.set_ylim(-2, 102)
            if leftmost(axes):
                axes.set_ylabel("training rows, %")
        handles = [Line2D([], [], color=domain_color(k), lw=3, label=label(name)) for k, name in enumerate(names)]
        handles += [Line2D([], [], color=OTHER_COLOR, lw=3, label="components of no domain")] * left_over
        handles += [
            Line2D([], [], color="#444444", lw=1.8, label="as learned"),
            Line2D([], [], color="#444444", lw=1.3, ls=TRUE_DASHES, label="as it was"),
        ]
        ncols = min(len(handles), 6 if len(drawn) > 1 else 3)
        figure.legend(handles=handles, loc="outside upper left", ncols=ncols, fontsize=9)
        return svg(figure, "the blend that was learned")


def _telling(method: MethodRecord, of: Callable[[RunRecord], np.ndarray]) -> list[RunRecord]:
    """Return the runs of a method that have a finite value in any round."""
    return [run for run in method.runs if np.isfinite(of(run)).any()]


def _draw_blend(axes: Axes, runs: list[RunRecord], domains: int) -> bool:
    """Draw learned shares as lines with bands, true ones as dashes; tell whether components without a domain exist."""
    rest = [learned_shares(run).sum(axis=1) - np.nansum(shares_by_domain(run), axis=1) for run in runs]
    left_over = bool(np.nanmax(np.abs(np.concatenate(rest)), initial=0.0) > 1e-6)
    if left_over:
        band(axes, [(np.arange(1, len(values) + 1), values) for values in rest], "", Look(OTHER_COLOR, "-"))
    for domain in range(domains):
        true = stack_runs([true_shares(run)[:, domain] for run in runs]).mean(axis=0)
        # With fewer components than domains, seeds may differ in which domains have one.
        curves = [
            (np.arange(1, len(values) + 1), values)
            for run in runs
            if np.isfinite(values := shares_by_domain(run)[:, domain]).any()
        ]
        if curves:
            band(axes, curves, "", Look(domain_color(domain), "-"))
        axes.plot(np.arange(1, len(true) + 1), 100 * true, color=domain_color(domain), lw=1.3, ls=TRUE_DASHES)
    return left_over


def split_purity(record: ExperimentRecord) -> Drawn | None:
    """Draw the purity of the split in each round and, below it, the entropy of posteriors; None without either."""
    split = _numbered(record, purities)
    undecided = _numbered(record, _entropy) if split or record.blended else []
    kinds = [kind for kind, drawn in (("split", split), ("entropy", undecided)) if drawn]
    if not kinds:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 2.6 * len(kinds) + 0.6))
        panels = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
        for axes, kind in zip(panels, kinds, strict=True):
            if kind == "split":
                _draw_curves(axes, split, purities, 100.0)
                _draw_trivial(axes, split[0].runs)
                axes.set_ylabel("rows at the component\nof their domain, %")
                axes.set_ylim(top=101)
            else:
                _draw_curves(axes, undecided, _entropy, 1.0)
                axes.set_ylabel("entropy of\nposteriors, nats")
                axes.set_ylim(bottom=-0.04 * axes.get_ylim()[1])  # keeps a line at zero visible
        over_rounds(panels[-1], 0, record.experiment.rounds)
        for axes in panels if {m.name for m in undecided} - {m.name for m in split} else panels[:1]:
            legend_above(axes)
        return svg(figure, "how pure the split is")


@dataclass(frozen=True)
class _Drawn:
    """A method to draw, with the runs that have values. number: determines its color."""

    number: int
    name: str
    runs: list[RunRecord]


def _numbered(record: ExperimentRecord, of: Callable[[RunRecord], np.ndarray]) -> list[_Drawn]:
    found = [_Drawn(n, method.name, _telling(method, of)) for n, method in enumerate(record.methods)]
    return [drawn for drawn in found if drawn.runs]


def _draw_curves(axes: Axes, drawn: list[_Drawn], of: Callable[[RunRecord], np.ndarray], scale: float) -> None:
    for method in drawn:
        curves = [(np.arange(1, len(run.lines) + 1), of(run)) for run in method.runs]
        band(axes, curves, label(method.name), look(method.number), scale=scale)


def _entropy(run: RunRecord) -> np.ndarray:
    return run.fact("entropy")


def _draw_trivial(axes: Axes, runs: list[RunRecord]) -> None:
    largest = stack_runs([trivial_purities(run) for run in runs]).mean(axis=0)
    rounds = np.arange(1, len(largest) + 1)
    axes.plot(rounds, 100 * largest, color="#8A8A8A", lw=1.2, ls=TRUE_DASHES, label="all in one component", zorder=1.5)


def client_losses(record: ExperimentRecord) -> Drawn | None:
    """Draw participants' training losses over rounds and in the last cycle; None without blended domains."""
    drawn = _numbered(record, lambda run: loss(run, "q50")) if record.blended else []
    if not drawn:
        return None
    last = {method.name: last_rounds(record, method) for method in record.methods}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.9 + 0.34 * len(drawn)))
        top, below = figure.subplots(2, 1, height_ratios=(2.6, 0.5 + 0.34 * len(drawn)))
        for method in drawn:
            _draw_losses(top, method)
        over_rounds(top, 0, record.experiment.rounds)
        top.set_ylabel("training loss of a client")
        legend_above(top)
        for place, method in enumerate(drawn):
            _draw_box(below, place, box(method.runs, last[method.name]), look(method.number).color)
        below.set_yticks(range(len(drawn)), [label(method.name) for method in drawn])
        below.invert_yaxis()
        below.grid(axis="y", visible=False)
        below.set_xlabel("training loss of a client in the last cycle")
        return svg(figure, "training loss over clients")


def last_rounds(record: ExperimentRecord, method: MethodRecord) -> int:
    """Return the number of rounds of the last cycle; without cycles that of the late means."""
    return record.window if method.cycles is None else max(round(record.experiment.rounds / method.cycles), 1)


def _draw_losses(axes: Axes, method: _Drawn) -> None:
    """Draw the median as a line and the middle half of the clients as a band, both averaged over seeds."""
    low, middle, high = (stack_runs([loss(run, q) for run in method.runs]).mean(axis=0) for q in ("q25", "q50", "q75"))
    rounds, shown = np.arange(1, len(middle) + 1), look(method.number)
    axes.plot(rounds, middle, color=shown.color, ls=shown.dashes, lw=1.6, label=label(method.name),
              marker=shown.marker, markevery=max(len(rounds) // 8, 1), ms=4)  # fmt: skip
    axes.fill_between(rounds, low, high, color=shown.color, alpha=0.18, lw=0)


def box(runs: Sequence[RunRecord], last: int) -> dict[str, float]:
    """Return quantiles of the losses in the last rounds, each averaged over these rounds and over seeds."""
    names = ("min", "q25", "q50", "q75", "max")
    return {name: mean_of_known(np.concatenate([loss(run, name)[-last:] for run in runs]).tolist()) for name in names}


def _draw_box(axes: Axes, place: int, found: dict[str, float], shown: str) -> None:
    """Draw a box from quartile to quartile with the median in it, and whiskers to the extremes."""
    axes.hlines(place, found["min"], found["max"], color="#444444", lw=1.0)
    axes.vlines([found["min"], found["max"]], place - 0.14, place + 0.14, color="#444444", lw=1.0)
    width = found["q75"] - found["q25"]
    pale = tuple(1 - 0.6 * (1 - part) for part in matplotlib.colors.to_rgb(shown))
    axes.barh(place, width, left=found["q25"], height=0.6, color=pale, edgecolor="#444444", lw=1.0)
    axes.vlines(found["q50"], place - 0.3, place + 0.3, color="black", lw=1.8)
