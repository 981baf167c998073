"""Branches, models and experts: which one answers, and its weight in a mixture."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedtide.draw import figures
from fedtide.evaluate.measure import Measure
from fedtide.evaluate.metrics import branch_accuracy, matched
from fedtide.evaluate.rounds import rows_in
from fedtide.report.formats import Number, percent
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord
from fedtide.report.summary import Study
from fedtide.report.topic import Topic, plan_picture

BRANCH_ACCURACY = Number("branch_accuracy", percent, "right branch")
OWN_WEIGHT = Number("own_weight", percent, "weight of clients' own experts")


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the share of rows at the branch of their group, and the weight of clients' own experts."""
    view, window, out = record.view, record.window, {}
    if not run.ends_judged(view):
        return {}
    branches = _branch_accuracies(run, view)
    mixed = any(scores.get("weights", {}).get("own") for line in run.judged for scores in line["scores"].values())
    if len(record.groups) > 1 and len(branches[0]) and not mixed:  # a client's own expert belongs to no group
        out["branch_accuracy"] = run.late(view, branches, window, rows_in)
    weights = run.curve(view, lambda scores: scores.get("weights", {}).get("own"))
    if len(weights[0]):
        out["own_weight"] = run.late(view, weights, window, rows_in)
    return out


# -- branches ----------------------------------------------------------------------------------------------------------


def _branch_accuracies(run: RunRecord, view: str) -> figures.Curve:
    """Return the curve of the share of rows at the branch of their true group, under the best match."""
    return run.curve(view, lambda scores: branch_accuracy(scores["choice"]) if "choice" in scores else None)


def share_of_first(run: RunRecord, window: int) -> np.ndarray:
    """Return for each round the share of participants that trained the branch of the first group."""
    tables = [line.get("branches") for line in run.lines]
    late = [table for table in tables[-window:] if table]
    if not late:
        return np.full(len(tables), np.nan)
    wide = max(len(table[0]) for table in tables if table)
    branch = matched(np.sum([np.pad(table, ((0, 0), (0, wide - len(table[0])))) for table in late], axis=0))[0]
    shares = [np.nan if not table else np.array(table)[:, branch].sum() / np.sum(table)
              if branch < len(table[0]) else 0.0 for table in tables]  # fmt: skip
    return np.array(shares, dtype=np.float64)


def largest_group(run: RunRecord, view: str) -> float:
    """Return the share of the largest group among the rows: the accuracy of one branch for all."""
    choice = next(scores["choice"] for _, scores in run.entries(view) if "choice" in scores)
    rows = np.array(choice, dtype=np.float64).sum(axis=1)
    return float(rows.max() / rows.sum()) if rows.any() else math.nan


@plan_picture("branches", "Which branch or model", "groups of clients, and a method with branches or models")
def branches(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw how many rows the branch or model of their true group answers, and who trains the one of the first group.

    Above: rows of {whose} that the branch or model of their group answers. Below: participants that train the branch of
    the first group.{band}
    """
    curves = record.curves(lambda run: _branch_accuracies(run, record.view))
    if len(record.groups) < 2 or not curves:
        return None
    run, rounds = record.methods[next(iter(curves))].runs[0], record.experiment.rounds
    first = figures.label(record.groups[0])
    figure = Figure(figsize=(9.6, 5.2))
    top, below = figure.subplots(2, 1, height_ratios=(1.4, 1.1))
    figures.bands(top, curves, record.names, "rows with the branch or\nmodel of their group, %")
    largest = largest_group(run, record.view)
    top.axhline(100 * largest, color="#777777", lw=1.2, ls=(0, (1, 1.5)), label="one branch for all", zorder=1.5)
    figures.over_rounds(top, 0, rounds)
    top.set_xlabel("")
    top.set_ylim(top=101)
    figures.legend_above(top)
    ends, expected = figures.by_round(run.every_round(lambda line: line.get("expected", [None])[0]))
    if np.isfinite(expected).any():
        name = f"{first}, expected"
        below.fill_between(ends, 0, 100 * expected, color=figures.GROUP_COLORS[0], alpha=0.4, lw=0, label=name)
        figures.small_legend(below)
    shares = record.curves(lambda run: figures.by_round(share_of_first(run, record.window)))
    figures.bands(below, {number: shares[number] for number in curves if number in shares}, [""] * len(record.names))
    figures.over_rounds(below, max(rounds - record.window, 0), rounds)
    below.set_ylim(-2, 102)
    below.set_ylabel(f"participants at {first}'s\nbranch or model, %")
    return figures.svg(figure, "which branch")


# -- gate weights ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """Mean gate weights of one method, on rows of all clients (group "") or of one group.

    own: weight of the clients' own experts, None without any; shared: weight of each shared model.
    """

    method: str
    group: str
    own: float | None
    shared: list[float]


def gate_weights_of(run: RunRecord, view: str, group: str = "") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rounds done at each evaluation, and the mean gate weights of own and of shared experts.

    Own experts (evaluations,), NaN without any; shared experts (evaluations, models). Averaged over the rows of a view,
    or of one group of clients; empty for a method that does not mix.
    """
    lines = []
    for after, scores in run.entries(view):
        weights = scores.get("weights", {})
        weights = weights.get("groups", {}).get(group, {}) if group else weights
        if "shared" in weights:
            lines.append((after, weights.get("own", np.nan), weights["shared"]))
    wide = max((len(shared) for _, _, shared in lines), default=0)
    table = [[*shared, *[0.0] * (wide - len(shared))] for _, _, shared in lines]
    rounds, own_weights = np.array([r for r, _, _ in lines]), np.array([w for _, w, _ in lines], dtype=np.float64)
    return rounds, own_weights, np.array(table, dtype=np.float64).reshape(len(lines), wide)


def bars(record: ExperimentRecord) -> list[Bar]:
    """Return the late mean gate weights of every method that mixes, in its first seed.

    No mean over seeds, because the number of a model means another model in each seed.
    """
    out = []
    for method in record.methods:
        for run, group in ((run, group) for run in method.runs[:1] for group in record.groups or [""]):
            after, own_weights, shared = gate_weights_of(run, record.view, group)
            late = after > record.experiment.rounds - record.window
            if late.any():
                mean = float(own_weights[late].mean())
                weights = shared[late].mean(axis=0).tolist()
                out.append(Bar(method.name, group, None if math.isnan(mean) else mean, weights))
    return out


@plan_picture("gate_weights", "Gate weights", "a method that mixes experts")
def gate_weights(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw how much of a prediction comes from which expert.

    Share of each expert in predictions for {whose}, as means over {span} in the first seed.
    """
    rows = bars(record)
    if not rows:
        return None
    models = max(len(bar.shared) for bar in rows)
    colored = min(models, len(figures.MODEL_COLORS))
    names = ["a client's own expert", *(f"model {k}" for k in range(colored)), "other models"]
    colors = [figures.OWN_COLOR, *figures.MODEL_COLORS[:colored], figures.OTHER_COLOR]
    parts = np.array([_parts(bar, colored) for bar in rows])
    figure = Figure(figsize=(9.6, 0.36 * len(rows) + 1.3))
    axes = figure.subplots()
    left = np.zeros(len(rows))
    for k in np.flatnonzero(parts.sum(axis=0)):
        width = parts[:, k]
        axes.barh(range(len(rows)), width, left=left, color=colors[k], label=names[k], height=0.72)
        for place in np.flatnonzero(width >= 4).tolist():
            middle, text = left[place] + width[place] / 2, f"{width[place]:.0f}"
            axes.text(middle, place, text, ha="center", va="center", fontsize=8, color=_ink(colors[k]))
        left = left + width
    titles = [figures.label(f"{bar.method}, {bar.group} clients" if bar.group else bar.method) for bar in rows]
    axes.set_yticks(range(len(rows)), titles)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("mean gate weight, %")
    axes.grid(axis="y", visible=False)
    figures.legend_above(axes, room=7.0)
    return figures.svg(figure, "gate weights")


def _parts(bar: Bar, colored: int) -> list[float]:
    """Return the weights in percent: of the own expert, of each model with a color, of all others."""
    shared = [*bar.shared[:colored], *[0.0] * (colored - len(bar.shared))]
    return [100 * share for share in (bar.own or 0.0, *shared, sum(bar.shared[colored:]))]


def _ink(background: str) -> str:
    """Return the readable one of black and white on a background."""
    red, green, blue = matplotlib.colors.to_rgb(background)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


# -- along a sweep -----------------------------------------------------------------------------------------------------


@figures.styled
def own_weight_over_sweep(study: Study) -> figures.Drawn | None:
    """Draw the weight of clients' own experts along the first swept key, with a panel for each choice of the others."""
    along = next((key for key, values in study.axes.items() if len(values) > 1), None)
    if along is None:
        return None
    curves: dict[str, dict[str, dict[int, Measure]]] = {}
    for chosen, summary in zip(itertools.product(*study.axes.values()), study.summaries, strict=True):
        point = dict(zip(study.axes, chosen, strict=True))
        title = ", ".join(f"{k.rpartition('.')[2]} {_word(value)}" for k, value in point.items() if k != along)
        for method in summary.methods:
            if (weight := method.measure("own_weight")).mean is not None:
                weights = curves.setdefault(title, {}).setdefault(method.name, {})
                weights[study.axes[along].index(point[along])] = weight
    if not curves:
        return None
    names = list(dict.fromkeys(method.name for summary in study.summaries for method in summary.methods))
    figure, panels = figures.grid(len(curves), high=2.9)
    for axes, (title, methods) in zip(panels, curves.items(), strict=True):
        for name, weights in methods.items():
            style, number = figures.look(names.index(name)), names.index(name)
            means, errors = ([100 * (getattr(w, of) or 0.0) for w in weights.values()] for of in ("mean", "error"))
            axes.errorbar(
                [*weights], means, errors if any(errors) else None, label=figures.label(name), color=style.color,
                ls=style.dashes, marker="os^Dv"[number % 5], ms=4.5, lw=1.8, capsize=2.5,
            )  # fmt: skip
        axes.set_title(figures.label(title), fontsize=10)
        axes.set_ylim(0, 100)
        axes.set_xlabel(figures.label(along.rpartition(".")[2]))
        axes.set_xticks(range(len(study.axes[along])), [figures.label(_word(value)) for value in study.axes[along]])
        if figures.leftmost(axes):
            axes.set_ylabel("weight of a client's\nown expert, %")
    figures.figure_legend(figure, panels)
    return figures.svg(figure, "gate weight over the sweep")


def _word(value: Any) -> str:
    word = str(value.get("kind", "") if isinstance(value, dict) else value)
    return word if len(word) <= 16 else word[:13] + "..."


TOPIC = Topic((BRANCH_ACCURACY, OWN_WEIGHT), measure, (branches, gate_weights))
