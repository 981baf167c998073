"""Branches, models and experts: which one answers, and its weight in a mixture."""

import itertools
import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedtide.draw import figures
from fedtide.evaluate.measure import Measure
from fedtide.evaluate.metrics import branch_accuracy, matched
from fedtide.evaluate.rounds import rows_in
from fedtide.report.formats import Number, percent
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord, at
from fedtide.report.summary import Study
from fedtide.report.topic import Topic, plan_picture

BRANCH_ACCURACY = Number("branch_accuracy", percent, "right branch")
OWN_WEIGHT = Number("own_weight", percent, "weight of clients' own experts")


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the share of rows at the branch of their group, and the weight of clients' own experts."""
    view, out = record.view, {}
    if not run.ends_judged(view):
        return {}
    branches = run.curve(view, branches_of)
    weights = run.curve(view, at("weights", "own"))
    mixed = any(at("weights", "own")(scores) for line in run.judged for scores in line["scores"].values())
    if len(record.groups) > 1 and len(branches[0]) and not mixed:  # a client's own expert belongs to no group
        out["branch_accuracy"] = run.late(view, branches, record.window, rows_in)
    if len(weights[0]):
        out["own_weight"] = run.late(view, weights, record.window, rows_in)
    return out


# -- branches ----------------------------------------------------------------------------------------------------------


def branches_of(scores: dict[str, Any]) -> float | None:
    """Return the share of rows at the branch of their true group, under the best match."""
    return branch_accuracy(scores["choice"]) if "choice" in scores else None


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
    curves = record.curves(lambda run: run.curve(record.view, branches_of))
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


def gate_weights_of(run: RunRecord, view: str, group: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Return rounds done at each evaluation, and the mean gate weights (evaluations, 1 + models); own experts first.

    NaN without own experts. Averaged over the rows of a view, or of one group of clients; empty for a method that does
    not mix.
    """
    weigh = at("weights", "groups", group) if group else at("weights")
    lines = [(after, weights) for after, scores in run.entries(view) if "shared" in (weights := weigh(scores) or {})]
    wide = max((len(weights["shared"]) for _, weights in lines), default=0)
    table = np.zeros((len(lines), 1 + wide))
    for row, (_, weights) in zip(table, lines, strict=True):
        row[: 1 + len(weights["shared"])] = [weights.get("own"), *weights["shared"]]
    return np.array([after for after, _ in lines]), table


def bars(record: ExperimentRecord) -> dict[tuple[str, str], np.ndarray]:
    """Return the late mean gate weights of every method that mixes, in its first seed, by method and group.

    No mean over seeds, because the number of a model means another model in each seed.
    """
    out = {}
    for method in record.methods:
        for run, group in ((run, group) for run in method.runs[:1] for group in record.groups or [""]):
            after, weights = gate_weights_of(run, record.view, group)
            late = after > record.experiment.rounds - record.window
            if late.any():
                out[method.name, group] = weights[late].mean(axis=0)
    return out


@plan_picture("gate_weights", "Gate weights", "a method that mixes experts")
def gate_weights(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw how much of a prediction comes from which expert.

    Share of each expert in predictions for {whose}, as means over {span} in the first seed.
    """
    rows = bars(record)
    if not rows:
        return None
    colored = min(max(map(len, rows.values())) - 1, len(figures.MODEL_COLORS))
    names = ["a client's own expert", *(f"model {k}" for k in range(colored)), "other models"]
    colors = [figures.OWN_COLOR, *figures.MODEL_COLORS[:colored], figures.OTHER_COLOR]
    parts = np.zeros((len(rows), len(names)))
    for part, weights in zip(parts, rows.values(), strict=True):
        named = 100 * np.nan_to_num(weights[: 1 + colored])
        part[: len(named)] = named
        part[-1] = 100 * weights[1 + colored :].sum()
    figure = Figure(figsize=(9.6, 0.36 * len(rows) + 1.3))
    axes = figure.subplots()
    left = np.zeros(len(rows))
    for k in np.flatnonzero(parts.sum(axis=0)):
        width = parts[:, k]
        bar = axes.barh(range(len(rows)), width, left=left, color=colors[k], label=names[k], height=0.72)
        texts = [f"{value:.0f}" if value >= 4 else "" for value in width]
        axes.bar_label(bar, texts, label_type="center", fontsize=8, color=_ink(colors[k]))
        left = left + width
    titles = [figures.label(f"{name}, {group} clients" if group else name) for name, group in rows]
    axes.set_yticks(range(len(rows)), titles)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("mean gate weight, %")
    axes.grid(axis="y", visible=False)
    figures.legend_above(axes, room=7.0)
    return figures.svg(figure, "gate weights")


def _ink(background: str) -> str:
    """Return the readable one of black and white on a background."""
    red, green, blue = matplotlib.colors.to_rgb(background)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


# -- along a sweep -----------------------------------------------------------------------------------------------------


@figures.styled
def own_weight_over_sweep(study: Study) -> figures.Drawn | None:
    """Draw the weight of clients' own experts along the first swept key, with a panel for each choice of the others."""
    along = next((key for key, values in study.axes.items() if len(values) > 1), None)
    curves: dict[str, dict[str, dict[int, Measure]]] = {}
    for chosen, summary in zip(itertools.product(*study.axes.values()), study.summaries, strict=True):
        point = dict(zip(study.axes, chosen, strict=True))
        title = ", ".join(f"{k.rpartition('.')[2]} {_word(value)}" for k, value in point.items() if k != along)
        for method in summary.methods:
            if along is not None and (weight := method.measure("own_weight")).mean is not None:
                weights = curves.setdefault(title, {}).setdefault(method.name, {})
                weights[study.axes[along].index(point[along])] = weight
    if along is None or not curves:
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
