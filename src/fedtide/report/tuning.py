"""The report of a tuning: what was tried, what was found, and where a range was too narrow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedtide.config import Experiment, Range, to_toml
from fedtide.core.atomic import replacing
from fedtide.core.errors import FedtideError
from fedtide.report.figures import STYLE, colour, label, svg
from fedtide.report.page import Picture, environment_line
from fedtide.report.render import rendered
from fedtide.report.tables import Table
from fedtide.tuning.folder import READY, Tuned, read_tuning
from fedtide.tuning.plan import Parameter, at_edge, seeds_of, tune_of
from fedtide.tuning.trials import Trial

PRUNED = "#777777"
FAILED = "#B00020"
WIDE = 3
"""Panels beside each other."""


@dataclass(frozen=True)
class Stage:
    """One stage on the page."""

    heading: str
    pictures: list[Picture]
    failed: Table | None


def write_tuning(root: Path, out: Path | None = None) -> Path:
    """Write the page about a tune folder.

    Args:
        root: the tune folder.
        out: where the page goes; by default `report.html` in the folder.

    Raises:
        FedtideError: the folder is not that of a tuning, or no trial of it is finished.
    """
    experiment, stages = read_tuning(root)
    if not any(tuned.best for stage in stages for tuned in stage):
        raise FedtideError(f"{root}: no trial is finished yet; go on with: fedtide resume {root}")
    ready = root / READY
    path = out or root / "report.html"
    text = rendered(
        "tuning.html",
        title=f"Tuning: {experiment.title or root.resolve().name}",
        about=experiment.about,
        headline=headline(stages),
        setting=setting(experiment, stages),
        found=found_table(stages),
        window=experiment.late,
        budgets=budget_table(stages),
        stages=[_stage(stage) for stage in stages if any(tuned.trials for tuned in stage)],
        ready=ready.read_text(encoding="utf-8") if ready.is_file() else "not finished yet",
        config=to_toml(experiment),
        environments=[environment_line(root, root.resolve().name)],
    )
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


# -- words and tables --------------------------------------------------------------------------------------------------


def headline(stages: Sequence[Sequence[Tuned]]) -> str:
    """What is to be done now."""
    tuned = [each for stage in stages for each in stage]
    left = sum(each.search.trials - len(each.trials) for each in tuned)
    if left:
        return f"So far: {left} trial{'s are' if left > 1 else ' is'} not played yet."
    edges = [
        f"{each.search.title}: {parameter.name}"
        for each in tuned
        if each.best is not None
        for parameter in each.search.parameters
        if at_edge(parameter.range, each.best.values[parameter.key])
    ]
    if not edges:
        return "Every value that was found lies inside its range."
    many = "values lie at an edge of their ranges" if len(edges) > 1 else "value lies at an edge of its range"
    return f"{len(edges)} {many}, and better ones may lie beyond: {'; '.join(edges)}."


def setting(experiment: Experiment, stages: Sequence[Sequence[Tuned]]) -> str:
    """How it was searched."""
    tune, seeds = tune_of(experiment, "the configuration"), seeds_of(experiment)
    how = (
        f"at random for {tune.startup_trials} trials and then with a tree-structured Parzen estimator (TPE)"
        if tune.sampler == "tpe"
        else "at random"
    )
    pruned = " Trials below the median of earlier ones were pruned." if tune.pruning else ""
    each = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    equal = "; in a stage every method gets as many" if any(len(stage) > 1 for stage in stages) else ""
    return (
        f"Values were searched {how}, {tune.batch} at a time. A trial plays {experiment.rounds} rounds with "
        f"{each}{equal}.{pruned}"
    )


def found_table(stages: Sequence[Sequence[Tuned]]) -> Table:
    """What each method found, a row per value."""
    staged = any(tuned.search.stage for stage in stages for tuned in stage)
    rows = []
    for tuned in (tuned for stage in stages for tuned in stage):
        best = tuned.best
        for parameter in tuned.search.parameters:
            value = None if best is None else best.values[parameter.key]
            rows.append(
                [
                    tuned.search.method,
                    *([tuned.search.stage] if staged else []),
                    parameter.name,
                    "-" if best is None else written(value),
                    range_of(parameter),
                    "" if best is None else advice(parameter, value),
                    "-" if best is None or best.accuracy is None else f"{100 * best.accuracy:.1f} %",
                ]
            )
    header = ["method", *(["stage"] if staged else []), "value", "found", "searched", "edge", "validation accuracy"]
    return Table(header, rows)


def budget_table(stages: Sequence[Sequence[Tuned]]) -> Table:
    """How many trials each method had, and what came of them."""
    rows = []
    for tuned in (tuned for stage in stages for tuned in stage):
        states = [trial.state for trial in tuned.trials]
        counts = [str(states.count(state)) for state in ("finished", "pruned", "failed")]
        rows.append([tuned.search.title, f"{len(states)} of {tuned.search.trials}", *counts])
    return Table(["method", "trials", "finished", "pruned", "failed"], rows)


def advice(parameter: Parameter, value: Any) -> str:
    """Where a range was too narrow."""
    edge = at_edge(parameter.range, value)
    return f"at the {edge} edge of its range: widen it" if edge else ""


def range_of(parameter: Parameter) -> str:
    """A range in words."""
    range_ = parameter.range
    if range_.choices is not None:
        return "among " + ", ".join(map(written, range_.choices))
    marks = [" (log)"] if range_.log else []
    marks += [f" in steps of {range_.step:g}"] if range_.step else []
    return f"{range_.low:g} to {range_.high:g}{''.join(marks)}"


def written(value: Any) -> str:
    """A value as a table shows it; a table by its kind where it has one."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ", ".join(f"{key} {written(inner)}" for key, inner in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- pictures ----------------------------------------------------------------------------------------------------------


def _stage(stage: Sequence[Tuned]) -> Stage:
    drawn = [
        ("Trial after trial",
         "Accuracy on validation rows of each trial, and the best so far. Hollow squares were pruned and stand at "
         "their last evaluation; crosses failed.",
         over_trials(stage)),
        *((f"{tuned.search.method}: each value against accuracy",
           "A dot is a trial, the star the best one; hollow squares were pruned. Dashed lines are the ends of the "
           "range: a star beside one says that the range should be wider.",
           over_values(tuned)) for tuned in stage),
    ]  # fmt: skip
    failed = [
        [tuned.search.method, str(trial.number + 1), ", ".join(f"{k} {written(v)}" for k, v in trial.values.items()),
         trial.reason]
        for tuned in stage
        for trial in tuned.trials
        if trial.state == "failed"
    ]  # fmt: skip
    table = Table(["method", "trial", "values", "why"], failed) if failed else None
    pictures = [Picture(title, caption, Markup(drawing)) for title, caption, drawing in drawn if drawing]
    return Stage(stage[0].search.stage, pictures, table)


def over_trials(stage: Sequence[Tuned]) -> str:
    """Accuracy over trials with the best so far, a panel per method."""
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(len(stage), sharey=True)
        for number, (axes, tuned) in enumerate(zip(panels, stage, strict=True)):
            _trials(axes, tuned.trials, colour(number), lambda trial: trial.number + 1)
            done = [trial for trial in tuned.trials if trial.accuracy is not None]
            if done:
                at = [trial.number + 1 for trial in done]
                best = np.maximum.accumulate([100 * (trial.accuracy or 0.0) for trial in done])
                axes.step([*at, max(len(tuned.trials), at[-1])], [*best, best[-1]], where="post", color=colour(number))
            axes.set_title(label(tuned.search.method), fontsize=10)
            axes.set_xlabel("trial")
            axes.set_xlim(0.5, max(tuned.search.trials, 2) + 0.5)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, best=True)
        return svg(figure, "accuracy over trials")


def over_values(tuned: Tuned) -> str:
    """Accuracy against each value, a panel per parameter; nothing where no trial was ever judged."""
    seen = [trial for trial in tuned.trials if trial.last is not None]
    if not seen:
        return ""
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(len(tuned.search.parameters), sharey=True)
        for axes, parameter in zip(panels, tuned.search.parameters, strict=True):
            _against(axes, seen, tuned.best, parameter)
        _legend(figure, star=True)
        return svg(figure, "values and accuracy")


def _against(axes: Axes, trials: Sequence[Trial], best: Trial | None, parameter: Parameter) -> None:
    range_, key = parameter.range, parameter.key
    if range_.choices is not None:
        choices = range_.choices

        def place(trial: Trial) -> float:
            return float(choices.index(trial.values[key]))

        axes.set_xticks(range(len(choices)), [label(written(value)) for value in choices])
        axes.margins(x=0.15)
    else:

        def place(trial: Trial) -> float:
            return float(trial.values[key])

        _axis(axes, range_)
    _trials(axes, [trial for trial in trials if trial.state != "failed"], colour(0), place)
    if best is not None and best.accuracy is not None:
        axes.plot(place(best), 100 * best.accuracy, marker="*", ms=15, color=colour(1), mec="black", mew=0.6, ls="")
    axes.set_xlabel(label(parameter.name))


def _axis(axes: Axes, range_: Range) -> None:
    """The axis of a range between two numbers, with a line at each end and some room beyond."""
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


def _trials(axes: Axes, trials: Sequence[Trial], colour: str, place: Any) -> None:
    """Each trial where its state puts it; no two states differ by colour alone."""
    marks: list[tuple[str, dict[str, Any]]] = [
        ("finished", {"marker": "o", "color": colour, "ms": 5}),
        ("pruned", {"marker": "s", "color": PRUNED, "mfc": "none", "ms": 5}),
    ]
    for state, style in marks:
        # A trial without a loss that is finite never got as far as to be judged.
        points = [(place(t), 100 * _height(t)) for t in trials if t.state == state and not math.isnan(_height(t))]
        axes.plot([x for x, _ in points], [y for _, y in points], ls="", **style)
    for trial in trials:
        if trial.state == "failed":
            axes.plot(place(trial), 0.03, marker="x", color=FAILED, ms=6, ls="", transform=axes.get_xaxis_transform())


def _height(trial: Trial) -> float:
    value = trial.accuracy if trial.accuracy is not None else trial.last
    return math.nan if value is None else value


def _panels(count: int, *, sharey: bool) -> tuple[Figure, list[Axes]]:
    wide = min(count, WIDE)
    high = math.ceil(count / wide)
    figure = Figure(figsize=(9.6 if wide > 1 else 6.4, 3.0 * high + 0.4))
    grid = figure.subplots(high, wide, sharey=sharey, squeeze=False)
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy on\nvalidation rows, %")
    panels = list(grid.flatten())
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]


def _legend(figure: Figure, *, best: bool = False, star: bool = False) -> None:
    handles = [
        Line2D([], [], ls="", marker="o", color="#333333", ms=5, label="finished"),
        Line2D([], [], ls="", marker="s", color=PRUNED, mfc="none", ms=5, label="pruned"),
    ]
    if best:
        handles.append(Line2D([], [], ls="", marker="x", color=FAILED, ms=6, label="failed"))
        handles.append(Line2D([], [], color="#333333", label="best so far"))
    if star:
        handles.append(Line2D([], [], ls="", marker="*", color=colour(1), mec="black", mew=0.6, ms=12, label="best"))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=9)
