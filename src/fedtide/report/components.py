"""Mixtures: components against the domains of rows, losses over clients, branches, and gate weights of experts.

Components have no names. The best matching over all rounds gives the component of each domain. A new matching every
round would flatter a split that changes over time.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import Measure, branch_accuracy, matched, mean_of_known
from fedtide.evaluate.rounds import rows_in
from fedtide.report.formats import Number, percent, points, signed_points
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord, at
from fedtide.report.summary import Study, Summary
from fedtide.report.topic import plan_picture, plan_table, table_of

COLLAPSED = 0.95
"""Share of training rows above which a single component counts as having taken them all."""

FINE = 1_000_000
"""Steps of a share, because the matching counts in whole numbers."""

MANY = 4
"""Number of cycles above which a panel takes the whole width of the page."""

QUARTILES = ("q25", "q50", "q75")

TRUE_DASHES = (0, (4, 2))
"""Dashes of true values, drawn beside learned ones."""

BLEND = (
    Number("split_purity", percent, "rows at the component of their domain"),
    Number("share_error", points, "error of learned shares"),
    Number("share_correlation", title="correlation with the true share", word="correlation"),
    Number("fullest_component", percent, "rows at the fullest component"),
    Number("posterior_entropy", title="entropy of posteriors", word="nats"),
    Number("log_likelihood", title="log-likelihood (each of its own)", word="nats"),
)

OTHERS = (
    Number("loss_spread", single=True),
    Number("peak_gain", signed_points),
    Number("trough_gain", signed_points),
    Number("training_loss"),
)

BRANCH_ACCURACY = Number("branch_accuracy", percent, "right branch")
OWN_WEIGHT = Number("own_weight", percent, "weight of clients' own experts")

NUMBERS = (*BLEND, *OTHERS, BRANCH_ACCURACY, OWN_WEIGHT)

# -- numbers -----------------------------------------------------------------------------------------------------------


def true_shares(run: RunRecord) -> np.ndarray:
    """Return the share of each domain among the participants' rows (rounds, domains); (rounds, 0) without domains."""
    return run.every_row(at("domains"))


def split_counts(run: RunRecord) -> np.ndarray:
    """Count the rows of each domain at each component (rounds, domains, K); 0 in rounds without a split."""
    tables = [np.array(line.get("split") or np.zeros((0, 0)), dtype=np.float64) for line in run.lines]
    domains, wide = (max((table.shape[axis] for table in tables), default=0) for axis in (0, 1))
    out = np.zeros((len(tables), domains, wide))
    for row, counts in zip(out, tables, strict=True):
        row[: counts.shape[0], : counts.shape[1]] = counts
    return out


def components(run: RunRecord) -> tuple[int, ...]:
    """Return the component of each domain; K or more for a domain without one, () if unknown.

    Matched by the split of rows, over all rounds together, or else by the distance of `pi` to the true shares.
    """
    counts = split_counts(run).sum(axis=0)
    if counts.any():
        return matched(counts.astype(np.int64))
    pi, true = run.listed_fact("pi"), true_shares(run)
    both = np.isfinite(pi).all(axis=1) & np.isfinite(true).all(axis=1)
    if not pi.shape[1] or not true.shape[1] or not both.any():
        return ()
    near = 1 - np.abs(true[both, :, None] - pi[both, None, :])
    return matched(np.round(FINE * near.sum(axis=0)).clip(0).astype(np.int64))


def shares_by_domain(run: RunRecord) -> np.ndarray:
    """Return `pi` of the component of each domain (rounds, domains); NaN without a component or `pi`."""
    matches = np.array(components(run), dtype=np.int64)
    return np.pad(run.listed_fact("pi"), ((0, 0), (0, len(matches))), constant_values=np.nan)[:, matches]


def purities(run: RunRecord) -> np.ndarray:
    """Return the share of training rows at the component of their domain (rounds,); NaN in rounds without a split."""
    right, total = _matched_rows(run)
    return np.divide(right, total, out=np.full(len(total), np.nan), where=total > 0)


def trivial_purities(run: RunRecord) -> np.ndarray:
    """Return the purity of a split with a single component (rounds,): the share of the largest domain."""
    return _shares(split_counts(run).sum(axis=2)).max(axis=1)


def _matched_rows(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Count in each round the rows at the component of their domain, and all rows."""
    table = split_counts(run)
    matches = np.array(components(run) if table.any() else (), dtype=np.int64)
    padded = np.pad(table, ((0, 0), (0, 0), (0, len(matches))))
    return padded[:, np.arange(len(matches)), matches].sum(axis=1), table.sum(axis=(1, 2))


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the numbers of a blend that the run has data for.

    Late means cover the late window; purity and the error of shares cover the second half of the run, and their
    correlation all of it.
    """
    half, window = len(run.lines) // 2, record.window
    out = _fullest(run, half) | gains(run, record.view, method.cycles)
    right, total = (column[half:].sum() for column in _matched_rows(run))
    if total:
        out["split_purity"] = float(right / total)
    pi, true = shares_by_domain(run), true_shares(run)
    if pi.shape[1] and pi.shape == true.shape:
        out["share_error"] = mean_of_known(np.abs(pi - true)[half:].ravel())
        out["share_correlation"] = correlation(pi[:, 0], true[:, 0])
    values = {
        "posterior_entropy": run.fact("entropy"),
        "log_likelihood": run.fact("log_likelihood"),
        "training_loss": run.fact("loss"),
        "loss_spread": loss(run, "q75") - loss(run, "q25"),
    }
    out |= {name: mean_of_known(of[-window:]) for name, of in values.items() if np.isfinite(of).any()}
    return out | measure_experts(record, run)


def measure_experts(record: ExperimentRecord, run: RunRecord) -> dict[str, float]:
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


def loss(run: RunRecord, quantile: str) -> np.ndarray:
    """Return a quantile of the participants' training losses (rounds,): "min", "q25", "q50", "q75" or "max"."""
    return run.every_round(at("client_loss", quantile))


def _fullest(run: RunRecord, half: int) -> dict[str, float]:
    """Return the mean share of the fullest component from round `half` on; empty if one domain has all rows."""
    table = split_counts(run)[half:]
    rows, domains = table.sum(axis=1), true_shares(run)[half:]
    if not domains.shape[1]:
        domains = _shares(table.sum(axis=2))
    shares = _shares(rows) if rows.any() else run.listed_fact("pi")[half:]
    if shares.shape[1] < 2 or not _columns(domains).size or _columns(domains).max() > COLLAPSED:
        return {}
    means = _columns(shares)
    return {"fullest_component": float(means.max())} if means.size else {}


def _shares(counts: np.ndarray) -> np.ndarray:
    """Return counts (rounds, K) as shares; NaN in rounds without any."""
    total = counts.sum(axis=1, keepdims=True)
    return np.divide(counts, total, out=np.full(counts.shape, np.nan), where=total > 0)


def _columns(table: np.ndarray) -> np.ndarray:
    """Return the mean of each column over the rounds that have all of them; () without such rounds."""
    complete = table[np.isfinite(table).all(axis=1)]
    return complete.mean(axis=0) if complete.size else np.zeros(0)


def correlation(left: np.ndarray, right: np.ndarray) -> float:
    """Return Pearson's correlation over the rounds in which both are known; NaN if one of them is constant.

    >>> correlation(np.array([0.0, 0.5, 1.0]), np.array([1.0, 2.0, 3.0])), correlation(np.ones(3), np.arange(3.0))
    (1.0, nan)
    """
    both = np.isfinite(left) & np.isfinite(right)
    left, right = left[both], right[both]
    if not both.any() or np.ptp(left) < 1e-12 or np.ptp(right) < 1e-12:
        return math.nan
    return float(np.corrcoef(left, right)[0, 1])


def extremes(run: RunRecord, view: str, cycles: float | None) -> np.ndarray:
    """Return lowest and highest accuracy in each whole cycle (cycles, 2); NaN without an evaluation.

    A cycle that the end of the run cuts off is left out, as its peak may be yet to come.

    Args:
        view: evaluated view.
        cycles: number of cycles over the run; None gives none.
    """
    after, values = run.accuracy(view)
    out = np.full((int(cycles or 0), 2), np.nan)
    # An evaluation belongs to the round before it: of 200 rounds in two cycles the first has 1 to 100.
    place = np.floor((after - 1) * (cycles or 0) / max(run.rounds, 1))
    for cycle in range(len(out)):
        inside = values[place == cycle]
        if len(inside) and (cycle + 1) * run.rounds <= len(run.lines) * (cycles or 0):
            out[cycle] = inside.min(), inside.max()
    return out


def gains(run: RunRecord, view: str, cycles: float | None) -> dict[str, float]:
    """Return the gain of the last cycle's peak and trough over the second cycle; empty with fewer than three cycles.

    The first cycle is no reference: every method learns most in it.
    """
    ranges = extremes(run, view, cycles)
    if len(ranges) < 3:
        return {}
    trough, peak = (ranges[-1] - ranges[1]).tolist()
    return {"peak_gain": peak, "trough_gain": trough}


def domain_names(record: ExperimentRecord) -> list[str]:
    """Return the names of the domains whose shares rounds report, or numbers from 1 if names were not saved."""
    count = max((len(line.get("domains", ())) for run in record.runs for line in run.lines), default=0)
    return record.domains if len(record.domains) == count else [f"domain {k}" for k in range(1, count + 1)]


# -- tables ------------------------------------------------------------------------------------------------------------


@plan_table("Components and domains")
def blend_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of components against domains, a row per method; None without components.

    Shares of rows over the second half of the run; entropy (0 is certain) and likelihood in nats.
    """
    return table_of(summary, BLEND)


# -- pictures ----------------------------------------------------------------------------------------------------------


@plan_picture("blend", "The blend that was learned", "a method with components, and clients with a blend of domains")
def blend_learned(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw how large a method takes each component to be, and how large its domain is.

    Learned share of each component (lines), and true share of its domain (dashes of the same color).{band}
    """
    runs = {m.name: [r for r in m.runs if true_shares(r).shape == shares_by_domain(r).shape] for m in record.methods}
    runs = {n: of for n, of in runs.items() if any(np.isfinite(shares_by_domain(run)).any() for run in of)}
    if not runs:
        return None
    names = domain_names(record)
    crowded = any((method.cycles or 0) > MANY for method in record.methods)
    figure, panels = figures.grid(len(runs), widest=1 if crowded else 3, high=2.0 if crowded else 2.6)
    for axes, (name, of_method) in zip(panels, runs.items(), strict=True):
        _draw_blend(axes, of_method, len(names))
        axes.set_title(figures.label(name), fontsize=10)
        figures.over_rounds(axes, 0, record.experiment.rounds)
        axes.xaxis.set_major_locator(MaxNLocator(10 if crowded else 5, integer=True))
        axes.set_ylim(-2, 102)
        if figures.leftmost(axes):
            axes.set_ylabel("training rows, %")
    lines = [
        *((figures.group_color(k), "-", figures.label(name)) for k, name in enumerate(names)),
        (figures.OTHER_COLOR, "-", "other components"),
        ("#444444", "-", "as learned"),
        ("#444444", TRUE_DASHES, "as it was"),
    ]
    handles = [Line2D([], [], color=color, ls=dashes, lw=2, label=name) for color, dashes, name in lines]
    ncols = figures.columns([name for *_, name in lines], figure.get_figwidth() - 0.6, 6)
    figure.legend(handles=handles, loc="outside upper left", ncols=ncols, fontsize=9)
    return figures.svg(figure, "the blend that was learned")


def _draw_blend(axes: Axes, runs: list[RunRecord], domains: int) -> None:
    """Draw learned shares as lines with bands, and true ones as dashes."""
    rest = [run.listed_fact("pi").sum(axis=1) - np.nansum(shares_by_domain(run), axis=1) for run in runs]
    if np.nanmax(np.abs(np.concatenate(rest)), initial=0.0) > 1e-6:
        figures.band(axes, [figures.by_round(values) for values in rest], "", figures.Look(figures.OTHER_COLOR, "-"))
    for domain in range(domains):
        true = figures.mean_of_runs([true_shares(run)[:, domain] for run in runs])
        # With fewer components than domains, seeds may differ in which domains have one.
        learned = [shares_by_domain(run)[:, domain] for run in runs]
        curves = [figures.by_round(values) for values in learned if np.isfinite(values).any()]
        if curves:
            figures.band(axes, curves, "", figures.Look(figures.group_color(domain), "-"))
        axes.plot(np.arange(1, len(true) + 1), 100 * true, color=figures.group_color(domain), lw=1.3, ls=TRUE_DASHES)


@plan_picture("split_purity", "How pure the split is", "a method that splits rows, and clients with a blend of domains")
def split_purity(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw how many rows were given to the component of their domain, and how sure methods were.

    Above: training rows at the component of their domain. Below: entropy of the posteriors, 0 if certain.{band}
    """
    split = record.curves(lambda run: figures.by_round(purities(run)))
    entropy = record.curves(lambda run: figures.by_round(run.fact("entropy"))) if split or record.blended else {}
    if not split and not entropy:
        return None
    figure, panels = figures.stack_panels([2.6] * (bool(split) + bool(entropy)))
    if split:
        figures.bands(panels[0], split, record.names, "rows at the component\nof their domain, %")
        runs = record.methods[next(iter(split))].runs
        ends, largest = figures.by_round(figures.mean_of_runs([trivial_purities(run) for run in runs]))
        style: dict[str, Any] = {"color": "#8A8A8A", "lw": 1.2, "ls": TRUE_DASHES, "zorder": 1.5}
        panels[0].plot(ends, 100 * largest, label="all in one component", **style)
        panels[0].set_ylim(top=101)
    if entropy:
        figures.bands(panels[-1], entropy, record.names, "entropy of\nposteriors, nats", scale=1.0)
        panels[-1].set_ylim(bottom=-0.04 * panels[-1].get_ylim()[1])  # keeps a line at zero visible
    figures.over_rounds(panels[-1], 0, record.experiment.rounds)
    figures.figure_legend(figure, panels)
    return figures.svg(figure, "how pure the split is")


@plan_picture("client_losses", "Training loss over clients", "a blend of domains", single=True)
def client_losses(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw the training loss over the participants of each round.

    Above: median and middle half of the participants. Below: quartiles and extremes in the last cycle.
    """
    medians = record.curves(lambda run: figures.by_round(loss(run, "q50"))) if record.blended else {}
    if not medians:
        return None
    figure = Figure(figsize=(9.6, 3.9 + 0.34 * len(medians)))
    top, below = figure.subplots(2, 1, height_ratios=(2.6, 0.5 + 0.34 * len(medians)))
    for place, number in enumerate(medians):
        method, style = record.methods[number], figures.look(number)
        low, middle, high = (figures.mean_of_runs([loss(run, q) for run in method.runs]) for q in QUARTILES)
        figures.band(top, [figures.by_round(middle)], figures.label(method.name), style, scale=1.0, width=1.6)
        top.fill_between(np.arange(1, len(low) + 1), low, high, color=style.color, alpha=0.18, lw=0)
        _draw_box(below, place, loss_box(method.runs, last_rounds(record, method)), style.color)
    figures.over_rounds(top, 0, record.experiment.rounds)
    top.set_ylabel("training loss of a client")
    figures.legend_above(top)
    below.set_yticks(range(len(medians)), [figures.label(record.names[number]) for number in medians])
    below.invert_yaxis()
    below.grid(axis="y", visible=False)
    below.set_xlabel("training loss of a client in the last cycle")
    return figures.svg(figure, "training loss over clients")


def last_rounds(record: ExperimentRecord, method: MethodRecord) -> int:
    """Return the number of rounds of the last cycle; without cycles, of the late means."""
    return record.window if method.cycles is None else max(round(record.experiment.rounds / method.cycles), 1)


def loss_box(runs: Sequence[RunRecord], last: int) -> dict[str, float]:
    """Return quantiles of the losses in the last rounds, averaged over these rounds and over seeds."""
    names = ("min", *QUARTILES, "max")
    return {name: mean_of_known(np.concatenate([loss(run, name)[-last:] for run in runs]).tolist()) for name in names}


def _draw_box(axes: Axes, place: int, box: dict[str, float], color: str) -> None:
    """Draw a box from quartile to quartile with the median in it, and a line between the extremes."""
    pale = tuple(1 - 0.6 * (1 - part) for part in matplotlib.colors.to_rgb(color))
    axes.hlines(place, box["min"], box["max"], color="#444444", lw=1.0)
    axes.barh(place, box["q75"] - box["q25"], left=box["q25"], height=0.6, color=pale, edgecolor="#444444", lw=1.0)
    axes.vlines(box["q50"], place - 0.3, place + 0.3, color="black", lw=1.8)


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

    Above: rows of {whose} that the branch or model of their group answers. Below, over {span} alone: participants that
    train the branch of the first group.{band}
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
    figures.over_rounds(below, max(record.played - record.window, 0), record.played)
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
            late = after > (run.end or 0) - record.window
            if late.any():
                out[method.name, group] = weights[late].mean(axis=0)
    return out


@plan_picture("gate_weights", "Gate weights", "a method that mixes experts")
def gate_weights(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw how much of a prediction comes from which expert.

    Share of each expert in predictions for {whose}, {averaged} in the first seed.
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
