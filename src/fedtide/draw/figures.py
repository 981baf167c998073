"""Figures as SVG: labels, units, bands over seeds, legends outside the axes, Okabe-Ito colors."""

import html
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#1d2733"
"""Color of text and axes; on a dark screen the style sheet of a page replaces it and the grays below."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#882255", "#56B4E9", INK, "#8C6D31")
GROUP_COLORS = ("#E69F00", "#3B4C8A", "#117733", "#AA4499", "#999933", "#661100", "#DDCC77")
MODEL_COLORS = ("#B39DDB", "#BBCC33", "#FFAABB", "#8FDCC4", "#C4A484", "#A9DFFB", "#EE8866")
STATE_COLORS = ("#E4E9F2", "#9FAFC8", "#F0E442", "#F768A1", "#7A0177")
"""Colors of methods (lines), of groups and domains, of models (areas), and of states of a node, the best first.

A color has one meaning in a report. Most of them are of Okabe and Ito and of Paul Tol, so that they are distinct with
any kind of color vision. Black is left to the lines between groups.
"""
MARKERS = ("", "o", "s", "^", "D", "v", "X", "P")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)))
OWN_COLOR, OTHER_COLOR = "#4D4D4D", "#BDBDBD"
"""Colors of a client's own expert, and of models beyond the palette."""
CHANGE, LEVEL, SHARE = "RdBu_r", "cividis", "Blues"
"""Color maps readable with any kind of color vision: around zero, from low to high, from none to all."""
TWO_LINES = 0.5
"""Height of a legend of two lines in inches, for which figures have room."""
MOST_MARKS = 40
"""Maximum number of events that are marked."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedtide",
    "text.hinting": "none",  # else lines are measured higher than they are drawn
    "pdf.fonttype": 42,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def label(name: str) -> str:
    """Return a name for a legend, cut to 40 characters; dollar signs and a leading underscore show as written.

    >>> label("$x$"), label("_hidden")
    ('\\\\$x\\\\$', ' _hidden')
    """
    name = name if len(name) <= 40 else name[:37] + "..."
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


@dataclass(frozen=True)
class Look:
    """Color, dashes and marker ("" for none) of a line."""

    color: str
    dashes: Any
    marker: str = ""


def look(number: int) -> Look:
    """Return the look of method number `number`: neighbors differ in color and dashes, the ninth has a marker too.

    >>> len({str(look(number)) for number in range(64)}), look(8).color == look(0).color, look(8).marker
    (64, True, 'o')
    """
    turn = number // len(COLORS)
    dashes = DASHES[(number + turn) % len(DASHES)]
    return Look(COLORS[number % len(COLORS)], dashes, MARKERS[turn % len(MARKERS)])


Curve = tuple[np.ndarray, np.ndarray]
"""Places on the horizontal axis, and values."""

styled = matplotlib.rc_context(STYLE)
"""Decorator of a function that draws in the style of a report."""


def band(
    axes: Axes,
    curves: Sequence[Curve],
    name: str,
    style: Look,
    *,
    scale: float = 100.0,
    width: float = 1.8,
    every: int | None = None,
) -> None:
    """Draw the mean over seeds with a band of one standard error, if there are values.

    The curve has the places at which all seeds have a value. So it ends with the shortest run.

    Args:
        axes: panel.
        curves: a curve per seed.
        name: name in the legend, as `label` returns it.
        style: look of the line.
        scale: factor of the values; 100 for percent.
        width: width of the line.
        every: points from marker to marker; None means about eight markers.
    """
    curves = [(at, values) for at, values in curves if len(at)]
    x = reduce(np.intersect1d, (at for at, _ in curves), curves[0][0]) if curves else np.empty(0)
    if not len(x):
        return
    values = scale * np.stack([values[np.isin(at, x)] for at, values in curves])
    mean = values.mean(axis=0)
    marker = style.marker or ("o" if len(x) == 1 else "")
    axes.plot(x, mean, label=name, color=style.color, ls=style.dashes, lw=width, marker=marker, ms=4,
              markevery=every or max(len(x) // 8, 1))  # fmt: skip
    if len(values) > 1:
        error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
        axes.fill_between(x, mean - error, mean + error, color=style.color, alpha=0.2, lw=0)


def bands(
    axes: Axes, curves: Mapping[int, Sequence[Curve]], names: Sequence[str], ylabel: str = "", **options: Any
) -> None:
    """Draw the curves of methods, by the number of the method, with the options of `band`."""
    for number, of_runs in curves.items():
        band(axes, of_runs, label(names[number]), look(number), **options)
    axes.set_ylabel(ylabel)


def by_round(values: np.ndarray) -> Curve:
    """Return a value of every round as a curve; a round stands at its end."""
    return np.arange(1, len(values) + 1), values


def stack_runs(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stack a value per round of several runs (runs, rounds, ...), cut to the shortest run.

    >>> stack_runs([np.array([1.0, 2.0, 3.0]), np.array([5.0, 6.0])]).tolist()
    [[1.0, 2.0], [5.0, 6.0]]
    """
    shortest = min(len(row) for row in rows)
    return np.stack([row[:shortest] for row in rows])


def mean_of_runs(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean over runs of a value per round, up to the end of the shortest run."""
    return stack_runs(rows).mean(axis=0)


def grid(count: int, *, widest: int = 3, high: float) -> tuple[Figure, list[Axes]]:
    """Create `count` panels of equal height in inches, at most `widest` side by side, with a common scale of y."""
    wide = 9.6 if count > 1 else 6.4
    figure, stacks = stacked(count, widest=widest, heights=[high], wide=wide, sharey=True)
    return figure, [axes for (axes,) in stacks]


def stacked(
    count: int, *, widest: int, heights: Sequence[float], wide: float = 9.6, sharey: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """Create stacks of panels, at most `widest` side by side, in lines as even as possible.

    Args:
        count: number of stacks.
        widest: maximum number of stacks in a line.
        heights: heights of the panels of a stack in inches, from the top.
        wide: total width in inches; no panel is narrower than 3.1.
        sharey: true for a common scale of y.
    """
    lines = math.ceil(count / widest)
    across = math.ceil(count / lines)
    figure = Figure(figsize=(max(wide, 3.1 * across), sum(heights) * lines + 0.6))
    panels = figure.subplots(
        len(heights) * lines, across, sharey=sharey, squeeze=False, height_ratios=[*heights] * lines
    )
    stacks = panels.reshape(lines, len(heights), across).transpose(0, 2, 1).reshape(-1, len(heights)).tolist()
    for axes in (axes for stack in stacks[count:] for axes in stack):
        axes.set_visible(False)
    return figure, stacks[:count]


def stack_panels(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Create panels below each other with a common horizontal axis; heights are in inches."""
    figure = Figure(figsize=(9.6, sum(heights) + 0.6))
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    return figure, panels[:, 0].tolist()


def leftmost(axes: Axes) -> bool:
    """Tell whether a panel stands at the left."""
    place = axes.get_subplotspec()
    return place is not None and place.is_first_col()


def columns(names: Sequence[str], room: float = 8.4, most: int = 4) -> int:
    """Return the number of columns, at most `most`, of a legend with these names no wider than `room` inches.

    >>> columns(["FedAvg", "IFCA"]), columns(["a name of some length"] * 4, 5.4), columns(["x" * 40], 2)
    (2, 2, 1)
    >>> columns(["x" * 40, "x", "x", "x"], 5.4)
    3
    """
    lengths = [len(name) for name in names]
    for count in range(min(len(names), most), 1, -1):
        if sum(0.6 + 0.075 * max(part) for part in np.array_split(lengths, count)) <= room:
            return count
    return 1


def legend_above(axes: Axes, room: float = 8.4) -> None:
    """Draw the legend above the axes, where it hides nothing, at most `room` inches wide."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        ncols = columns(labels, room)
        axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=ncols, fontsize=9)


def figure_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Draw one legend above all panels, without repeated names."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(name), handle)
    ncols = columns([*handles], figure.get_size_inches()[0] - 0.6)
    figure.legend([*handles.values()], [*handles], loc="outside upper left", ncols=ncols, fontsize=9)


def small_legend(axes: Axes, most: int = 4) -> None:
    """Draw a small legend of at most so many columns above a low panel."""
    ncols = columns(axes.get_legend_handles_labels()[1], most=most)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=ncols, fontsize=8, borderaxespad=0.2)


def _make_room(figure: Figure) -> None:
    """Let a figure grow by the height of legends beyond two lines, so that no name is cut and no panel shrinks."""
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    with _without_warnings():
        heights = [legend.get_window_extent().height / figure.dpi for legend in legends]
    figure.set_figheight(figure.get_figheight() + sum(max(height - TWO_LINES, 0) for height in heights))


def draw_areas(
    axes: Axes, ends: np.ndarray, shares: np.ndarray, areas: Sequence[tuple[str, str, float]], **options: Any
) -> None:
    """Stack shares (points, areas) of 0 to 1 as areas in percent, each with its name, color and opacity."""
    low = np.zeros(len(shares))
    for column, (name, color, alpha) in zip(shares.T, areas, strict=True):
        high = low + 100 * column
        axes.fill_between(ends, low, high, color=color, alpha=alpha, lw=0, label=name, **options)
        low = high
    axes.set_ylim(0, 100)
    axes.grid(False)


def accuracies(axes: Axes, curves: Mapping[int, Sequence[Curve]], names: Sequence[str], ylabel: str) -> None:
    """Draw the accuracies of methods, by the number of the method, with a legend.

    The axis begins a little below the accuracies after the first quarter, and a note tells lower values.
    """
    bands(axes, curves, names, ylabel)
    late = [v for of_runs in curves.values() for _, values in of_runs for v in values[len(values) // 4 :]]
    lowest = 100 * min(filter(math.isfinite, late), default=0.0)
    bottom = lowest - 4 if lowest < 0 else max(lowest - 4, 0)
    lows = [np.nanmin(np.asarray(line.get_ydata())) for line in _labeled(axes)]
    if lows:
        axes.set_ylim(bottom=bottom)
    if min(lows, default=bottom) < bottom:
        text = f"\u25be below this axis: early evaluations, down to {min(lows):.1f} %"
        axes.text(0.995, 0.02, text, transform=axes.transAxes, ha="right", fontsize=8, color="#555555")
    legend_above(axes)


def noise_bars(axes: Axes, curves: Mapping[int, Sequence[Curve]], noises: Mapping[int, Sequence[Curve]]) -> None:
    """Draw the known noise on the accuracies of methods as error bars: one standard deviation of a mean over seeds.

    Args:
        axes: panel, with the curves.
        curves: accuracies of each seed, by the number of the method.
        noises: standard deviations of their noise, in the same order.
    """
    for number, of_runs in noises.items():
        x, _ = max(of_runs, key=lambda curve: len(curve[0]))
        pairs = zip(curves[number], of_runs, strict=True)
        alike = [(values, noise) for (_, values), (at, noise) in pairs if len(at) and np.array_equal(at, x[: len(at)])]
        values, noise = (stack_runs(rows) for rows in zip(*alike, strict=True))
        width = np.sqrt((noise**2).sum(axis=0)) / len(noise)
        axes.errorbar(
            x[: len(width)], 100 * values.mean(axis=0), 100 * width,
            fmt="none", ecolor=look(number).color, elinewidth=0.9, capsize=2, alpha=0.7,
        )  # fmt: skip


def fit_percent(panels: Sequence[Axes]) -> None:
    """Set the vertical axes of panels to all of their values, within 0 to 100 unless values are below 0."""
    values = [np.asarray(line.get_ydata()) for axes in panels for line in axes.lines]
    values += [np.asarray(area.get_paths()[0].vertices)[:, 1] for axes in panels for area in axes.collections]
    low, high = min(map(np.min, values)), max(map(np.max, values))
    room = 0.12 * (high - low) + 0.5
    for axes in panels:
        axes.set_ylim(low - room if low < 0 else max(low - room, 0), min(high + room, 100))


def over_rounds(axes: Axes, first: int, last: int) -> None:
    """Set the horizontal axis to a span of rounds, with ticks at whole rounds; a round stands at its end."""
    axes.set_xlabel("rounds done")
    axes.set_xlim(first, last)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def mark_events(axes: Axes, events: Sequence[int]) -> None:
    """Draw a thin vertical line before the round of each event, unless there are too many lines."""
    if len(events) <= MOST_MARKS:
        for event in events:
            axes.axvline(event, color="#555555", lw=0.9, ls=(0, (4, 3)), zorder=1)


def group_color(number: int) -> str:
    """Return the color of a group or a domain: the palette, its tints, its shades, and again.

    >>> group_color(0), group_color(7), group_color(14), group_color(21)
    ('#E69F00', '#f2cf7f', '#734f00', '#E69F00')
    """
    turn, color = number // len(GROUP_COLORS) % 3, GROUP_COLORS[number % len(GROUP_COLORS)]
    if turn == 0:
        return color
    channels = bytes.fromhex(color.removeprefix("#"))
    return f"#{bytes((part + 255) // 2 if turn == 1 else part // 2 for part in channels).hex()}"


def model_color(number: int) -> str:
    """Return the color of a model; -1 is a client's own expert."""
    colors = (*MODEL_COLORS, OTHER_COLOR)
    return OWN_COLOR if number < 0 else colors[min(number, len(colors) - 1)]


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in ("Glyph .* missing from", "constrained_layout not applied"):
            warnings.filterwarnings("ignore", message)
        yield


def save_figure(figure: Figure, to: Any, **options: Any) -> None:
    """Save a figure without warnings about missing letters and overlapping panels."""
    with _without_warnings():
        if (engine := figure.get_layout_engine()) is not None:
            # `savefig` would draw everything a second time to compute the layout.
            figure.set_dpi(72)
            engine.execute(figure)
            with matplotlib.rc_context({"figure.constrained_layout.use": False}):
                figure.set_layout_engine(None)
        figure.savefig(to, **options)


class Drawn(str):
    """An `<svg>` element that scales with the page, and its figure."""

    figure: Figure


def svg(figure: Figure, title: str) -> Drawn:
    """Return the figure as an element with a title and, for screen readers, a description in numbers."""
    _make_room(figure)
    buffer = io.StringIO()
    save_figure(figure, buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 role="img" aria-label="{title}"', text, count=1)
    about = f"<title>{title}</title><desc>{html.escape(' '.join(_describe(figure)), quote=False)}</desc>"
    drawn = Drawn(re.sub(r'(<svg[^>]*?) height="[^"]*"([^>]*>)', lambda tag: f"{tag[1]}{tag[2]}{about}", text, count=1))
    drawn.figure = figure
    return drawn


def _labeled(axes: Axes) -> list[Any]:
    """Return the lines of a panel that have values and a name in the legend."""
    named = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    return [line for line in named if np.isfinite(np.asarray(line.get_ydata(), dtype=np.float64)).any()]


def _describe(figure: Figure) -> Iterator[str]:
    """Describe each panel: first, last, lowest and highest value of a line, range of a map."""
    for axes in figure.axes:
        if not axes.get_visible() or axes.get_label() == "<colorbar>":
            continue
        parts = []
        for line in _labeled(axes):
            x, y = (np.asarray(values, dtype=np.float64) for values in line.get_data())
            x, y = x[np.isfinite(y)], y[np.isfinite(y)]
            name = f"{line.get_label()}: " if line.get_label() else ""
            parts.append(f"{name}{y[0]:.3g} at {x[0]:.3g}, {y[-1]:.3g} at {x[-1]:.3g}, lowest {y.min():.3g}, "
                         f"highest {y.max():.3g}")  # fmt: skip
        for image in (*axes.images[:1], *(mesh for mesh in axes.collections if isinstance(mesh, QuadMesh))):
            values = np.ma.masked_invalid(np.ma.asarray(image.get_array()).astype(np.float64)).compressed()
            parts += [f"a map of values from {values.min():.3g} to {values.max():.3g}"] if len(values) else []
        if parts:
            named = (axes.get_title(), axes.get_title(loc="left"), axes.get_ylabel(), axes.get_xlabel())
            text = f"{', '.join(' '.join(name.split()) for name in named if name)}. {'; '.join(parts)}."
            yield text.replace(r"\$", "$")
