"""Drift of clients: heterogeneity within clusters, reactions of methods, effects of known events.

An event at round r changes the clients' data from round r on, so an evaluation after r rounds or fewer precedes it. The
interval of an event lasts until the next event, or until the end of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import Curve, mean_of_known
from fedtide.report.formats import Number, count, percent, points, rounds_count
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord
from fedtide.report.summary import Summary
from fedtide.report.topic import Topic, plan_picture, plan_table, table_of

SLACK = 0.01
"""Distance below the level before an event within which a curve counts as recovered: one percentage point."""

MARKED = {"mass": "mass events", "change": "change points", "swap": "label swaps"}
"""Events with a known round in which many clients change at once, in words; other events happen all the time."""

COUNTS = ("clusters", "models")
"""Names of the facts in which algorithms report the number of their clusters."""

DRIFT = (
    Number("heterogeneity", title="distance within clusters", word="L1 distance"),
    Number("heterogeneity_all", title="of all clients", word="L1 distance"),
    Number("embedding_heterogeneity", title="of embeddings within clusters", word="between embeddings"),
    Number("embedding_heterogeneity_all", title="of embeddings of all clients", word="between embeddings"),
    Number("spread", title="by its own measure", word="of its own distance"),
    Number("silhouette", title="silhouette", word="mean silhouette"),
    Number("reclusterings", count, "re-clusterings"),
    Number("moves", count, "moves"),
    Number("clusters", count),
    Number("clusters_last", count, "clusters at the end"),
    Number("ari_over_rounds", title="Rand index, whole run", word="adjusted Rand index"),
)

EVENTS = (
    Number("event_fall", points, "fall"),
    Number("events_recovered", percent, "events recovered from"),
    Number("event_recovery", rounds_count, "rounds to recover"),
    Number("events_detected", percent, "events noticed"),
    Number("detection_delay", rounds_count, "rounds to notice"),
    Number("false_alarms", count, "false alarms"),
    Number("events_known", count),
)

# -- events on a curve -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fall:
    """Fall and recovery of a curve at an event.

    Args:
        event: its round.
        before: the last value before it.
        lowest: the lowest value in its interval.
        rounds: rounds until the curve is back within `SLACK` of `before`: 0 if it never left, the length of the
            interval if it never comes back.
        back: true if it recovers.
    """

    event: int
    before: float
    lowest: float
    rounds: float
    back: bool

    @property
    def depth(self) -> float:
        """Depth of the fall; negative if the curve only rose."""
        return self.before - self.lowest


def intervals(events: Sequence[int], rounds: int) -> Iterator[tuple[int, int]]:
    """Yield each distinct event after round 0 with the end of its interval.

    >>> [*intervals([0, 4, 4, 10], 12)]
    [(4, 10), (10, 12)]
    """
    return pairwise([*sorted({event for event in events if 0 < event < rounds}), rounds])


def falls(after: Curve, values: Curve, events: Sequence[int], rounds: int) -> list[Fall]:
    """Return the fall and recovery at each event that has values both before it and in its interval.

    A curve is back at the first value within `SLACK` of the one before the event, from the lowest value on.

    Args:
        after: rounds done at each value.
        values: accuracies.
        events: rounds of the events.
        rounds: number of rounds of the run.

    >>> falls([2, 4, 6, 8], [0.8, 0.5, 0.6, 0.795], events=[3], rounds=8)
    [Fall(event=3, before=0.8, lowest=0.5, rounds=5, back=True)]
    """
    out = []
    points = list(zip((int(at) for at in after), (float(value) for value in values), strict=True))
    for event, end in intervals(events, rounds):
        earlier = [value for at, value in points if at <= event]
        inside = [(at, value) for at, value in points if event < at <= end]
        if not earlier or not inside:
            continue
        before, lowest = earlier[-1], min(value for _, value in inside)
        bottom = next(at for at, value in inside if value == lowest)
        back = [at for at, value in inside if at >= bottom and value >= before - SLACK]
        lasted = end - event if not back else 0 if back[0] == bottom else back[0] - event
        out.append(Fall(event, before, lowest, lasted, bool(back)))
    return out


def notice(reactions: Sequence[int], events: Sequence[int], rounds: int) -> tuple[list[float], int]:
    """Return the delay of the first reaction to each event, infinity without one, and the number of false alarms.

    Reactions, such as re-clusterings, and events are rounds. False alarms are reactions before the first event, and
    those in an interval beyond the first.

    >>> notice([1, 10, 14, 33], events=[10, 20, 30], rounds=40)
    ([0, inf, 3], 2)
    """
    delays: list[float] = []
    for event, end in intervals(events, rounds):
        inside = [at for at in reactions if event <= at < end]
        delays.append(min(inside) - event if inside else math.inf)
    return delays, len(reactions) - sum(map(math.isfinite, delays))


# -- numbers -----------------------------------------------------------------------------------------------------------


def heterogeneity(run: RunRecord, by: str = "heterogeneity") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rounds done at each evaluation with heterogeneity, of labels or of "embedding", and its two curves.

    The first curve is within clusters, NaN if no client is in one, the second over all clients together.
    """
    lines = [(line["round"] + 1, line[by]) for line in run.judged if by in line]
    within, everyone = (
        np.array([np.nan if spread[name] is None else spread[name] for _, spread in lines], dtype=np.float64)
        for name in ("within", "all")
    )
    return np.array([at for at, _ in lines]), within, everyone


def marks(run: RunRecord) -> list[int]:
    """Return the rounds of the known events; an event in round 0 changes nothing."""
    return [line["round"] for line in run.lines if line["round"] > 0 and MARKED.keys() & {*line.get("events", ())}]


def events_of(record: ExperimentRecord) -> list[int]:
    """Return the known events of the first method with any, in its first seed."""
    return next((events for method in record.methods for run in method.runs[:1] if (events := marks(run))), [])


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the numbers of drift and of the method's reactions; empty if the record is not about drift."""
    reacts = {"moved", "reclustered"}
    if not len(heterogeneity(run)[0]) and not any(
        "drifted" in line or reacts & line.get("facts", {}).keys() for line in run.lines
    ):
        return {}
    out: dict[str, float] = {}
    for by, name in (("heterogeneity", "heterogeneity"), ("embedding", "embedding_heterogeneity")):
        within, everyone = heterogeneity(run, by)[1:]
        if len(within):
            out |= {name: mean_of_known(within), f"{name}_all": mean_of_known(everyone)}
    for name, fact in (("spread", "spread"), ("silhouette", "silhouette"), ("moves", "moved")):
        if (values := run.fact(fact)).size and np.isfinite(values).any():
            out[name] = float(np.nansum(values) if name == "moves" else np.nanmean(values))
    if len(counts := cluster_counts(run)[1]):
        out |= {"clusters": mean_of_known(counts), "clusters_last": float(counts[-1])}
    reclustered, reactions, events = reclusterings(run), reclusterings(run, merges=False), marks(run)
    if reclustered is not None:
        out["reclusterings"] = float(len(reclustered))
    if events:
        drops = falls(*run.accuracy(record.view), events, len(run.lines))
        out |= {
            "events_known": float(len(drops)),
            "event_fall": mean_of_known(fall.depth for fall in drops),
            "event_recovery": mean_of_known(fall.rounds for fall in drops),
            "events_recovered": mean_of_known(fall.back for fall in drops),
        }
    if events and reactions is not None:
        delays, false_alarms = notice(reactions, events, len(run.lines))
        out |= {
            "detection_delay": mean_of_known(delay for delay in delays if math.isfinite(delay)),
            "events_detected": mean_of_known(math.isfinite(delay) for delay in delays),
            "false_alarms": float(false_alarms),
        }
    return out


def reclusterings(run: RunRecord, *, merges: bool = True) -> list[int] | None:
    """Return the rounds in which a method re-clustered all or some clients; None if it never reports.

    Fielding re-clusters all clients (`reclustered`); FedDrift adds models (`new`) and merges them (`merged`).

    Args:
        run: record of the run.
        merges: true to count rounds that only merge models. A merge is no reaction to an event: FedDrift merges a step
            after it added models.
    """
    signs = ("reclustered", "new", *(("merged",) if merges else ()))
    lines = [line for line in run.lines if {"reclustered", "new"} & line.get("facts", {}).keys()]
    rounds = [line["round"] for line in lines if any(_as_number(line["facts"].get(sign)) > 0 for sign in signs)]
    return rounds if lines else None


def cluster_counts(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounds that report a number of clusters, and these numbers; empty clusters count.

    If no fact has the number, it is the number of models whose `members` are reported.
    """
    counts = []
    for line in run.lines:
        facts = line.get("facts", {})
        members = facts.get("members")
        count = next((_as_number(facts[name]) for name in COUNTS if name in facts), math.nan)
        if math.isnan(count) and isinstance(members, list):
            count = float(len(members))
        if not math.isnan(count):
            counts.append((line["round"], count))
    return np.array([at for at, _ in counts]), np.array([count for _, count in counts], dtype=np.float64)


def _as_number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


@plan_table("Known events")
def events_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of the effects of known events, a row per method; None without events.

    Means over known events; recovered is back within a point, noticed is the first re-clustering after the event.
    """
    return table_of(summary, EVENTS)


@plan_table("Following drift")
def drift_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of drift and methods' reactions, a row per method; None without either.

    Distance between clients of a cluster by their labels, as means over all evaluations.
    """
    about_drift = any({"heterogeneity", "moves", "reclusterings"} & m.measures.keys() for m in summary.methods)
    return table_of(summary, DRIFT) if about_drift else None


# -- pictures ----------------------------------------------------------------------------------------------------------


@plan_picture("drift", "Drift, round by round", "clients that drift")
def drift_over_rounds(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw how unlike clients of a cluster are, how many clusters there are, and how many clients moved.

    Distance between clients of a cluster by their labels, number of clusters, and moved clients; triangles are
    re-clusterings, dashed lines known events.{band}
    """
    distances = record.curves(lambda run: heterogeneity(run)[:2])
    counts = record.curves(lambda run: (cluster_counts(run)[0] + 1, cluster_counts(run)[1]))
    counts = {number: of_runs for number, of_runs in counts.items() if record.methods[number].drifts}
    moves = {n: [(at, np.nan_to_num(c)) for at, c in of_runs] for n, of_runs in record.curves(_moved).items()}
    curves = {
        "distance of label\nshares (L1, 0 to 2)": distances,
        "clusters": counts,
        "clients moved\nin a round": moves,
    }
    curves = {title: of_methods for title, of_methods in curves.items() if of_methods}
    if not curves:
        return None
    figure, panels = figures.stack_panels([2.0] * len(curves))
    for axes, (title, of_methods) in zip(panels, curves.items(), strict=True):
        if of_methods is distances:
            everyone = [heterogeneity(run)[2] for run in record.methods[next(iter(distances))].runs]
            figures.band(axes, [(of_methods[next(iter(distances))][0][0], figures.stack_runs(everyone).mean(axis=0))],
                 "all clients, one cluster", figures.Look(figures.OTHER_COLOR, "-"), scale=1.0, width=4)  # fmt: skip
        figures.bands(axes, of_methods, record.names, title, scale=1.0)
        if of_methods is counts:
            _mark_reclusterings(axes, record, of_methods)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=of_methods is not distances))
        figures.mark_events(axes, events_of(record))
    figures.over_rounds(panels[-1], 0, record.experiment.rounds)
    figures.figure_legend(figure, panels)
    return figures.svg(figure, "drift over rounds")


def _moved(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    return figures.by_round(run.fact("moved"))


def _mark_reclusterings(axes: Axes, record: ExperimentRecord, numbers: Iterable[int]) -> None:
    """Draw triangles at rounds in which a method re-clustered in any seed."""
    for number, line in zip(numbers, list(axes.lines), strict=True):
        x, y = (np.asarray(values) for values in line.get_data())
        ends = {at + 1 for run in record.methods[number].runs for at in reclusterings(run) or ()}
        marked = np.isin(x, list(ends))
        if marked.any():  # a layout fails without any points
            color = figures.look(number).color
            axes.plot(x[marked], y[marked], ls="", marker="^", ms=7, mfc=color, mec="white", mew=0.8, clip_on=False)


TOPIC = Topic((*DRIFT, *EVENTS), measure, (drift_over_rounds,), (events_table, drift_table))
