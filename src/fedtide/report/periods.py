"""Periods of the shift: swing of accuracy, accuracy by hours and dates, and the rhythm of a learned prior."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import matplotlib
import matplotlib.dates as mdates
import numpy as np
from matplotlib.axes import Axes

from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import swing
from fedtide.evaluate.references import KEYS, reference_words
from fedtide.evaluate.rounds import score_in, weight_in
from fedtide.fields.types import DAY
from fedtide.mixtures.rhythm import order_like
from fedtide.report.formats import Number, percent, points, rounds
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord, at
from fedtide.report.summary import Summary
from fedtide.report.topic import plan_picture, plan_table, table_of

SWING = Number("swing", points, "swing", by_group=True)

RHYTHM = (
    Number("rounds_to_period", rounds, "rounds until a period was believed", reached="period_found"),
    Number("learned_period", rounds, "period at the end"),
    Number("period_known", percent, "rounds with a period"),
    Number("shares_known", percent, "rounds with shares"),
    Number("shares_error", points, "error of the shares"),
    Number("period_found", percent),
)

NUMBERS = (SWING, *RHYTHM)

NOTHING = 1e-9
"""Weight of an evaluation that has none."""


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the swing of accuracy within a period, of all rows and of each group, and numbers of a learned prior."""
    out = {}
    if record.experiment.period and run.ends_judged(record.view) and (run.end or 0) >= record.experiment.period:
        curves = {"swing": run.accuracy(record.view)}
        curves |= {f"swing_{group}": run.accuracy(record.view, group) for group in record.groups}
        period, window = record.experiment.period, record.window
        out = {name: swing(*curve, period, window, run.end) for name, curve in curves.items()}
    return out | measure_rhythm(run)


def measure_rhythm(run: RunRecord) -> dict[str, float]:
    """Return the numbers of a learned prior; empty without one.

    A period that is never believed counts with the end of the run.
    """
    if not has_learned(run):
        return {}
    (periods, believed), (read, true) = periods_of(run), shares_of(run)
    out = {
        "period_known": float(believed.mean()),
        "period_found": float(believed.any()),
        "rounds_to_period": float(believed.argmax() + 1 if believed.any() else len(believed)),
        "shares_known": float(np.isfinite(read[:, 0]).mean()) if read.size else 0.0,
    }
    if believed.any():
        out["learned_period"] = float(periods[believed][-1, 0])
    both = np.isfinite(read).all(axis=1) & np.isfinite(true).all(axis=1)
    if read.size and true.shape == read.shape and both.sum() > 1:
        out["shares_error"] = float(np.sqrt(((read[both] - true[both]) ** 2).mean()))
    return out


def has_learned(run: RunRecord) -> bool:
    """Tell whether the run has a learned prior, which reports the chance of a period."""
    return bool(np.isfinite(run.fact("chance")).any())


def periods_of(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return the periods of every round (rounds, longest), NaN without one, and whether one is believed."""
    periods = run.listed_fact("periods")
    return periods, np.isfinite(periods[:, 0]) if periods.size else np.zeros(len(run.lines), dtype=bool)


def shares_of(run: RunRecord, fact: str = "prior") -> tuple[np.ndarray, np.ndarray]:
    """Return the shares in a fact, and the true ones of groups among the participants (rounds, groups); NaN if unknown.

    A server has no names for groups: read shares are put in the order of the true ones.
    """
    counts, values, read = run.every_row(at("groups")), run.listed_fact(fact), run.listed_fact("prior")
    total = counts.sum(1, keepdims=True) if counts.size else counts
    true = counts / np.where(total > 0, total, np.nan)
    if not values.size or true.shape != read.shape:
        return values, true
    both = np.isfinite(read[:, 0]) & np.isfinite(true[:, 0])
    return values[:, order_like(read[both], true[both])] if both.sum() > 1 else values, true


# -- tables ------------------------------------------------------------------------------------------------------------


@plan_table("Swings of groups")
def swings_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of the swing of each group, a row per method; None without groups or a period.

    The highest minus the lowest {score} of each group within a period.
    """
    return table_of(summary, [Number(f"swing_{group}", points, f"{group} clients") for group in summary.groups])


@plan_table("The learned rhythm")
def rhythm_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of learned priors, a row per method; None without one.

    Rounds and shares that learned priors read from sums; a period never believed counts with the end.
    """
    return table_of(summary, RHYTHM)


# -- one period --------------------------------------------------------------------------------------------------------


@plan_picture("period", "One period, round by round", "a whole period in which groups take turns")
def one_period(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the last rounds folded into one period, by group of clients.

    {Score} over {span}, folded into one period; the background is light if the first group takes part.
    """
    period = record.experiment.period
    methods = [m for m in record.methods if any(len(run.accuracy(record.view)[0]) for run in m.runs)]
    if not period or not record.groups or not methods or period > record.experiment.rounds:
        return None
    folded = [_folded(record, run, period)[0] for m in methods for run in m.runs]
    if all(len(places) <= 2 for places in folded):  # a single place, and its end
        return None
    figure, panels = figures.grid(len(methods), high=3.3)
    for axes, method in zip(panels, methods, strict=True):
        _shade_hours(axes, method, period)
        for k, group in enumerate(record.groups):
            curves = [_folded(record, run, period, group) for run in method.runs]
            line = figures.Look(figures.group_color(k), figures.DASHES[k % 4], "os^D"[k % 4])
            figures.band(axes, curves, figures.label(f"{group} clients"), line, every=1)
        pooled = [_folded(record, run, period) for run in method.runs]
        figures.band(axes, pooled, "all", figures.Look("#555555", ":"))
        axes.set_title(figures.label(method.name), fontsize=10)
        axes.set_xlabel("rounds within the period")
        axes.set_xlim(0, period)
        if figures.leftmost(axes):
            axes.set_ylabel(f"{record.experiment.score} of {record.whose}, %")
    figures.fit_percent(panels)
    figures.figure_legend(figure, panels)
    return figures.svg(figure, f"{record.experiment.score} within one period")


def _shade_hours(axes: Axes, method: MethodRecord, period: float) -> None:
    """Shade the hours by the expected participants: darker with fewer of the first group."""
    share = method.runs[0].every_round(lambda line: line.get("expected", [None])[0])[: int(period)]
    if method.shift.who.changes and len(share):
        axes.imshow(
            1 - share[None, :], extent=(0, period, 0, 1), transform=axes.get_xaxis_transform(), aspect="auto",
            cmap=matplotlib.colors.LinearSegmentedColormap.from_list("day", ["#E69F0038", "#3B4C8A58"]), zorder=-2,
            interpolation="bilinear", vmin=0, vmax=1,
        )  # fmt: skip


def _folded(record: ExperimentRecord, run: RunRecord, period: float, group: str | None = None) -> figures.Curve:
    """Fold the late accuracy of a run into one period, averaged by place in the period."""
    rounds, values = run.accuracy(record.view, group)
    if not len(rounds):
        return rounds, values
    late, weights = rounds > rounds[-1] - record.window, run.weights_of(record.view, rounds)
    if late.sum() > 1 and rounds[-1] % record.experiment.eval_every:  # the end of the run, between two evaluations
        late[-1] = False
    place = np.mod(rounds[late], period)
    places = np.unique(place)
    at = [late.nonzero()[0][place == p] for p in places]
    means = np.array([np.average(values[k], weights=None if weights is None else weights[k]) for k in at])
    # The end of a period is the beginning of the next one.
    return np.append(places, places[0] + period), np.append(means, means[0])


@plan_picture("participants", "What the server sees", "a model that clients take as it is", single=True)
def participants(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the accuracy of the model as it was sent out, on the participants' own training rows.

    {Score} of the model as it was sent out, on the participants' training rows before they train.{band}
    """
    rounds = record.played
    span = int(min(4 * record.experiment.period, rounds)) if record.experiment.period else rounds
    curves = record.curves(lambda run: figures.by_round(run.every_round(lambda line: score_in(line["participants"]))))
    if not curves or span < 4:
        return None
    late = {number: [(ends[-span:], values[-span:]) for ends, values in runs] for number, runs in curves.items()}
    groups = {number: only_group(record.methods[number].runs) for number in late}
    of_one = {number: k for number, k in groups.items() if k is not None}
    of_one = of_one if len(of_one) < len(late) else {}
    # The participants change from round to round: in one panel these lines would hide each other.
    figure, panels = figures.grid(len(late) - len(of_one), widest=2, high=1.9)
    for axes, number in zip(panels, [number for number in late if number not in of_one], strict=True):
        for other, k in of_one.items():  # of its own participants, who are of one group
            line = figures.Look(figures.group_color(k), figures.DASHES[k % 4])
            figures.band(axes, late[other], figures.label(record.names[other]), line, width=1.0)
        figures.band(axes, late[number], "", figures.look(number), width=1.2)
        axes.set_title(figures.label(record.names[number]), fontsize=10)
        figures.over_rounds(axes, rounds - span, rounds)
        if figures.leftmost(axes):
            axes.set_ylabel(f"{record.experiment.score} on the\nparticipants' rows, %")
    if of_one:
        figures.figure_legend(figure, panels)
    return figures.svg(figure, f"{record.experiment.score} on the participants")


def only_group(runs: Sequence[RunRecord]) -> int | None:
    """Return the group that all participants of all rounds are from; None if several groups or none take part."""
    counts = [run.every_row(at("groups")) for run in runs]
    present = {int(k) for table in counts for k in np.flatnonzero(np.nansum(table, axis=0))}
    return present.pop() if len(present) == 1 and all(table.shape[1] > 1 for table in counts) else None


# -- dates -------------------------------------------------------------------------------------------------------------


def draw_references(
    axes: Axes, record: ExperimentRecord, curve_of: Callable[[RunRecord, Sequence[str]], figures.Curve]
) -> None:
    """Draw the scores of references, unless they end below the axis; `curve_of` a run and keys of its entries."""
    runs, bottom = record.methods[0].runs, axes.get_ylim()[0]
    for (name, keys), dashes in zip(KEYS.items(), (":", "--", "-.", (0, (1, 3)), (0, (8, 3))), strict=True):
        curves = [curve_of(run, keys) for run in runs]
        if any(len(values) and 100 * values[-1] > bottom for _, values in curves):
            figures.band(axes, curves, reference_words(name, record.target), figures.Look("#666666", dashes))
            figures.legend_above(axes)
            axes.autoscale(axis="y")
            axes.set_ylim(bottom=bottom)


@figures.styled
def accuracy_over_dates(record: ExperimentRecord) -> figures.Drawn:
    """Draw accuracy on the next window over dates, faded, and below it the number of clients with new rows."""
    figure, (top, below) = figures.stack_panels([3.4, 1.0])
    curves = record.curves(partial(course, record.view))
    ylabel = f"{record.experiment.score} of {record.whose}\non the next window, %, faded"
    figures.accuracies(top, curves, record.names, ylabel)
    draw_references(top, record, partial(course, record.view))
    run = next(run for run in record.runs if run.lines)
    clients = [(_place(line["window"]["begin"]), line["window"]["came"]) for line in run.lines if "window" in line]
    begins, counts = np.array(clients, dtype=np.float64).T
    below.fill_between(begins, counts, step="post", color="#444444", alpha=0.35, lw=0)
    below.set_ylim(bottom=0)
    below.set_ylabel("clients with\nnew rows")
    locator = mdates.AutoDateLocator(minticks=4, maxticks=9)
    below.xaxis.set_major_locator(locator)
    below.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator))
    below.set_xlabel("beginning of the window")
    return figures.svg(figure, f"{record.experiment.score} over dates")


def _place(iso: str) -> float:
    """Return the place of a time on an axis of dates, by the clocks of its zone."""
    return float(mdates.date2num(datetime.fromisoformat(iso).replace(tzinfo=None)))


def course(view: str, run: RunRecord, keys: Sequence[str] = ()) -> figures.Curve:
    """Return the dates of the windows that were tested on, on an axis of dates, and the faded accuracy there.

    With `keys` it is another score in the entries of evaluations.
    """
    begins = {line["round"] + 1: _place(line["window"]["next"]) for line in run.judged if "window" in line}
    rounds, values = run.course(view, keys)
    return np.array([begins[after] for after in rounds]), values


# -- by hour, weekday, month -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cycle:
    """A cycle of dates.

    Args:
        name: title of the axis.
        of: place of a date in the cycle.
        names: names of the places; () for numbers.
        longest: maximum length of a window, in seconds.
        shortest: minimum length of a run, in seconds.
    """

    name: str
    of: Callable[[datetime], int]
    names: tuple[str, ...] = ()
    longest: float = DAY
    shortest: float = 14 * DAY


CYCLES = (
    Cycle("hour of the day", lambda date: date.hour, longest=DAY / 2, shortest=2 * DAY),
    Cycle("weekday", lambda date: date.weekday(), ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")),
    Cycle("month", lambda date: date.month - 1, ("J", "F", "M", "A", "M", "J", "J", "A", "S", "O", "N", "D"),
          longest=31 * DAY, shortest=365 * DAY),
)  # fmt: skip


def cycles_of(record: ExperimentRecord) -> list[Cycle]:
    """Return the cycles with short enough windows and long enough runs."""
    lines = max(([line for line in run.judged if "window" in line] for run in record.runs), key=len, default=[])
    if len(lines) < 4:
        return []
    places = np.array([_place(line["window"]["next"]) for line in lines]) * DAY
    length, span = float(np.diff(places).min()) / record.experiment.eval_every, float(np.ptp(places))
    fitting = [cycle for cycle in CYCLES if length <= cycle.longest * 1.001 and span >= cycle.shortest * 0.99]
    return [cycle for cycle in fitting if len({_place_in(cycle, line) for line in lines}) > 1]


def _place_in(cycle: Cycle, line: dict[str, Any]) -> int:
    """Return the place in a cycle of the beginning of the window that an evaluation is about."""
    return cycle.of(datetime.fromisoformat(line["window"]["next"]))


def by_cycle(view: str, cycle: Cycle, run: RunRecord) -> figures.Curve:
    """Return the tested places in a cycle, and the accuracy, or the skill, of all rows there."""
    lines = [line for line in run.judged if "window" in line and score_in(line["scores"].get(view, {})) is not None]
    place = np.array([_place_in(cycle, line) for line in lines], dtype=np.float64)
    scores = np.array([score_in(line["scores"][view]) for line in lines])
    weights = np.array([weight_in(line, view) or NOTHING for line in lines])
    places = np.unique(place)
    return places, np.array([np.average(scores[place == k], weights=weights[place == k]) for k in places])


@plan_picture("by_hour", "By hour, weekday and month", 'shift.what = "calendar", with short windows and a long run')
def accuracy_by_cycle(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw accuracy by hour, weekday and month, if rounds are windows of wall-clock time.

    {Score} of {whose} on the next window, by its local time. Below: share of the rows.{band}
    """
    cycles = cycles_of(record)
    if not cycles:
        return None
    wide = 9.6 if len(cycles) > 1 else 6.4
    figure, stacks = figures.stacked(len(cycles), widest=3, heights=[2.6, 0.9], wide=wide)
    for (top, below), cycle in zip(stacks, cycles, strict=True):
        curves = record.curves(partial(by_cycle, record.view, cycle))
        figures.bands(top, curves, record.names, every=1)
        top.tick_params(labelbottom=False)
        _draw_rows(below, record, cycle)
        below.set_xlabel(cycle.name)
        ticks = range(len(cycle.names)) if cycle.names else range(0, 25, 6)
        for axes in (top, below):
            axes.set_xticks(ticks, cycle.names or None)
            axes.set_xlim(-0.5, len(cycle.names or range(24)) - 0.5)
    figures.fit_percent([top for top, _ in stacks])
    stacks[0][0].set_ylabel(f"{record.experiment.score} of {record.whose}\non the next window, %")
    stacks[0][1].set_ylabel("rows, %")
    figures.figure_legend(figure, stacks[0])
    return figures.svg(figure, f"{record.experiment.score} by hour, weekday and month")


def _draw_rows(axes: Axes, record: ExperimentRecord, cycle: Cycle) -> None:
    """Draw the share of the tested rows in each place of a cycle, in the first run."""
    run = next(run for run in record.runs if run.judged)
    lines = [line for line in run.judged if "window" in line and record.view in line["scores"]]
    rows = [line["scores"][record.view]["rows"] for line in lines]
    counts = np.bincount([_place_in(cycle, line) for line in lines], rows)
    axes.bar(np.arange(len(counts)), 100 * counts / max(counts.sum(), 1.0), width=0.8, color="#444444", alpha=0.35)
    axes.set_ylim(bottom=0)


# -- the rhythm of a learned prior -------------------------------------------------------------------------------------


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
    read, ahead = shares_of(run)[0], shares_of(run, "forecast")[0]
    expected = run.every_row(at("expected"))
    first = figures.label(record.groups[0]) if record.groups else "first group"
    if expected.size:
        share, name_of = 100 * expected[:, 0], f"{first}, expected"
        axes.fill_between(ends, 0, share, color=figures.GROUP_COLORS[0], alpha=0.3, lw=0, label=name_of)
    if read.size:
        axes.plot(ends, 100 * read[:, 0], ".", ms=3.5, color="#555555", label="read in the round")
    periods, believed = periods_of(run)
    text, forecast = "no period is believed", figures.look(record.names.index(name)).color
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
    axes.set_title(f"{figures.label(name)}:\n{text}", fontsize=10, loc="left")
    axes.set_xlim(0, None)
    axes.set_ylim(-3, 103)
    axes.set_ylabel(f"{first}, %")


def _next_period(forecasts: np.ndarray, period: float) -> np.ndarray:
    """Return the last forecasts as those of the rounds of one more period."""
    back = np.round(len(forecasts) + np.arange(math.ceil(period)) - period).astype(int)
    return forecasts[np.clip(back, 0, len(forecasts) - 1)]
