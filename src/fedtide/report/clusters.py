"""Clusters of clients under drift: agreement with true groups, churn, heterogeneity, effects of known events, maps.

An event at round r changes the clients' data from round r on, so an evaluation after r rounds or fewer precedes it. The
interval of an event lasts until the next event, or until the end of the run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedtide.core.record import TRUTH
from fedtide.data.shift import ChangePoints
from fedtide.data.shift.concept_drift import Domains
from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import Curve, mean_of_known
from fedtide.report.components import OWN_WEIGHT
from fedtide.report.formats import Number, count, percent, points, rounds_count
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord, at
from fedtide.report.summary import Summary
from fedtide.report.topic import plan_picture, plan_table, table_of

SLACK = 0.01
"""Distance below the level before an event within which a curve counts as recovered: one percentage point."""

MARKED = {"mass": "mass events", "change": "change points", "swap": "label swaps"}
"""Events with a known round in which many clients change at once, in words; other events happen all the time."""

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

CLUSTERS = (
    Number("ari", title="adjusted Rand index", word="adjusted Rand index"),
    Number("nmi", title="mutual information", word="mutual information"),
    Number("purity", percent, "purity"),
    Number("evenness", title="evenness of sizes", word="evenness"),
    Number("churn", percent, "change of cluster, per evaluation"),
)

OTHERS = (Number("fullest_cluster", percent), Number("ari_last", word="adjusted Rand index"))

NUMBERS = (*DRIFT, *EVENTS, *CLUSTERS, *OTHERS)

# -- events on a curve -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fall:
    """Fall and recovery of a curve at an event.

    Args:
        before: the last value before it.
        lowest: the lowest value in its interval.
        rounds: rounds until the curve is back within `SLACK` of `before`: 0 if it never left, the length of the
            interval if it never comes back.
        back: true if it recovers.
    """

    before: float
    lowest: float
    rounds: float
    back: bool


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
    [Fall(before=0.8, lowest=0.5, rounds=5, back=True)]
    """
    out = []
    points = [(int(place), float(value)) for place, value in zip(after, values, strict=True)]
    for event, end in intervals(events, rounds):
        earlier = [value for place, value in points if place <= event]
        inside = [(place, value) for place, value in points if event < place <= end]
        if not earlier or not inside:
            continue
        before, lowest = earlier[-1], min(value for _, value in inside)
        bottom = next(place for place, value in inside if value == lowest)
        back = [place for place, value in inside if place >= bottom and value >= before - SLACK]
        lasted = end - event if not back else 0 if back[0] == bottom else back[0] - event
        out.append(Fall(before, lowest, lasted, bool(back)))
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
        delays.append(min((place - event for place in reactions if event <= place < end), default=math.inf))
    return delays, len(reactions) - sum(map(math.isfinite, delays))


# -- facts of a run ----------------------------------------------------------------------------------------------------


def heterogeneity(run: RunRecord, by: str = "heterogeneity") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rounds done at each evaluation with heterogeneity, of labels or of "embedding", and its two curves.

    The first curve is within clusters, NaN if no client is in one, the second over all clients together.
    """
    lines = [line for line in run.judged if by in line]
    within, everyone = (np.array([line[by][name] for line in lines], np.float64) for name in ("within", "all"))
    return np.array([line["round"] + 1 for line in lines]), within, everyone


def marks(run: RunRecord) -> list[int]:
    """Return the rounds of the known events; an event in round 0 changes nothing."""
    return [line["round"] for line in run.lines if line["round"] > 0 and MARKED.keys() & {*line.get("events", ())}]


def events_of(record: ExperimentRecord) -> list[int]:
    """Return the known events of the first method with any, in its first seed."""
    return next((events for method in record.methods for run in method.runs[:1] if (events := marks(run))), [])


def reclusterings(run: RunRecord, *, merges: bool = True) -> list[int] | None:
    """Return the rounds in which a method re-clustered all or some clients; None if it never reports.

    Fielding re-clusters all clients (`reclustered`); FedDrift adds models (`new`) and merges them (`merged`).

    Args:
        merges: true to count rounds that only merge models. A merge is no reaction to an event: FedDrift merges a step
            after it added models.
    """
    if not any({"reclustered", "new"} & line.get("facts", {}).keys() for line in run.lines):
        return None
    signs = [run.fact(name) > 0 for name in ("reclustered", "new", *(["merged"] if merges else []))]
    return [line["round"] for line, *signs_of in zip(run.lines, *signs, strict=True) if any(signs_of)]


def cluster_counts(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounds that report a number of clusters, and these numbers; empty clusters count.

    If no fact has the number, it is the number of models whose `members` are reported.
    """
    members = map(at("facts", "members"), run.lines)
    counts = np.array([len(sizes) if isinstance(sizes, list) else np.nan for sizes in members])
    for name in ("models", "clusters"):
        counts = np.where(np.isfinite(run.fact(name)), run.fact(name), counts)
    finite = np.isfinite(counts)
    return np.array([line["round"] for line in run.lines])[finite], counts[finite]


# -- numbers of a labeling ---------------------------------------------------------------------------------------------


def contingency(groups: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Return the contingency table of two labelings (groups, clusters): clients of each group in each cluster.

    >>> contingency(np.array([0, 0, 1]), np.array([2, 2, 0])).tolist()
    [[0, 0, 2], [1, 0, 0]]
    """
    table = np.zeros((int(groups.max()) + 1, int(clusters.max()) + 1), dtype=np.int64)
    np.add.at(table, (groups, clusters), 1)
    return table


def purity(table: np.ndarray) -> float:
    """Return the share of clients that belong to the commonest group of their cluster.

    At least the share of the largest group.

    >>> purity(np.array([[3, 1], [0, 4]]))
    0.875
    """
    return float(table.max(axis=0).sum() / table.sum())


def ari(table: np.ndarray) -> float:
    """Return the adjusted Rand index: 1 if clusters equal groups, about 0 for random clusters.

    Hubert and Arabie 1985. 1 by definition if both are a single cluster, or all singletons.

    >>> ari(np.array([[4, 0], [0, 4]])), ari(np.array([[8, 0], [8, 0]]))
    (1.0, 0.0)
    """
    counted = (table, table.sum(axis=1), table.sum(axis=0), table.sum())
    both, rows, columns, pairs = (float((counts * (counts - 1) // 2).sum()) for counts in counted)
    expected = rows * columns / max(pairs, 1.0)
    largest = (rows + columns) / 2
    return 1.0 if largest == expected else (both - expected) / (largest - expected)


def nmi(table: np.ndarray) -> float:
    """Return the mutual information over the mean of both entropies: 1 for equal labelings, 0 for independent ones.

    1 by definition if both are a single cluster.

    >>> nmi(np.array([[4, 0], [0, 4]])), nmi(np.array([[2, 2], [2, 2]]))
    (1.0, 0.0)
    """
    share = table / table.sum()
    rows, columns = entropy(share.sum(axis=1)), entropy(share.sum(axis=0))
    mean = (rows + columns) / 2
    return 1.0 if mean == 0 else max(rows + columns - entropy(share.flatten()), 0.0) / mean


def churn(before: np.ndarray, after: np.ndarray) -> float:
    """Return the share of clients in both clusterings (clients,) that changed their cluster; NaN without any.

    A re-clustering numbers clusters anew, so new clusters are matched to old ones with the fewest changes. NaN is the
    cluster of a client without one.

    >>> churn(np.array([0, 0, 1]), np.array([np.nan, 0, 0])), churn(np.array([0, 0, 1]), np.array([5, 5, 0]))
    (0.5, 0.0)
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    both = np.isfinite(before) & np.isfinite(after)
    if not both.any():
        return math.nan
    old, new = (np.unique(clusters[both], return_inverse=True)[1] for clusters in (before, after))
    table = contingency(old, new)
    stayed = int(table[linear_sum_assignment(table, maximize=True)].sum())
    return (len(old) - stayed) / len(old)


def evenness(sizes: np.ndarray) -> float:
    """Return the normalized entropy of cluster sizes: 0 if all clients are in one cluster, 1 if sizes are equal.

    >>> evenness(np.array([8, 0])), evenness(np.array([4, 4]))
    (0.0, 1.0)
    """
    return entropy(sizes / sizes.sum()) / math.log(len(sizes)) if len(sizes) > 1 else 0.0


def entropy(shares: np.ndarray) -> float:
    """Return the entropy of shares that sum to one, in nats.

    >>> round(entropy(np.array([0.5, 0.5, 0.0])), 4)
    0.6931
    """
    positive = shares[shares > 0]
    return abs(float((positive * np.log(positive)).sum()))


# -- numbers of a run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Membership:
    """Clusters of clients at each evaluation.

    Args:
        after: (evaluations,) rounds done.
        clients: (clients,) ids.
        slots: (clients, evaluations) cluster of each client, -1 for its own expert; NaN if unknown.
        groups: (clients, evaluations) number of the true group at each evaluation; NaN if the cluster is unknown.
        drifting: true if groups drift.
    """

    after: np.ndarray
    clients: np.ndarray
    slots: np.ndarray
    groups: np.ndarray
    drifting: bool = False

    def select(self, at_most: int) -> "Membership":
        """Return at most `at_most` clients, drawn evenly, by their last group and then by id.

        If groups drift, clients of a last group are sorted by their earlier groups.
        """
        past = [row[np.isfinite(row)][::-1].tolist() for row in self.groups]
        rows = draw_evenly({row: groups[0] for row, groups in enumerate(past)}, at_most)
        if self.drifting:
            rows.sort(key=lambda row: (past[row], row))
        return replace(self, clients=self.clients[rows], slots=self.slots[rows], groups=self.groups[rows])


def membership(run: RunRecord, view: str, groups: Sequence[str]) -> Membership:
    """Return the clusters of the clients of a view that have one; groups are numbered as they are named here."""
    table = run.clients(view).filter(run.clients(view)["slot"].is_valid())
    clients, row = np.unique(table["client"].to_numpy(), return_inverse=True)
    rounds, column = np.unique(table["round"].to_numpy(), return_inverse=True)
    slots, numbers = np.full((2, len(clients), len(rounds)), np.nan)
    slots[row, column] = table["slot"]
    places = {name: number for number, name in enumerate(groups)}
    names = table["group"].to_pylist()
    numbers[row, column] = table[TRUTH] if run.regrouped else [places.get(name, 0) for name in names]
    return Membership(rounds + 1, clients, slots, numbers, run.regrouped)


def agreement(run: RunRecord, view: str, groups: Sequence[str], since: int) -> dict[str, float]:
    """Return agreement of clusters with groups from round `since` on, their evenness and largest cluster, and churn.

    If groups drift, clusters are compared with the groups of that moment. A client at its own expert is in no cluster.
    Empty if no client is in a cluster. With a single group there is no agreement.
    """
    members = membership(run, view, groups)
    clusters = np.where(members.slots >= 0, members.slots, np.nan)
    if not np.isfinite(clusters).any():
        return {}
    # Models without clients count as empty clusters; unused slots for models do not.
    counts = dict(zip(*cluster_counts(run), strict=True))
    largest = int(np.nanmax(clusters)) + 1
    sizes, late, every = [], [], []
    for after, cluster, group in zip(members.after, clusters.T, members.groups.T, strict=True):
        counted = np.isfinite(cluster)
        if not counted.any():
            continue
        every.append(contingency(group[counted].astype(int), cluster[counted].astype(int)))
        if after > since:
            size = every[-1].sum(axis=0)
            size = size[size > 0]
            sizes.append(np.pad(size, (0, max(int(counts.get(after - 1, largest)) - len(size), 0))))
            late.append(every[-1])
    out = {
        "evenness": mean_of_known(map(evenness, sizes)),
        "fullest_cluster": mean_of_known(float(size.max() / size.sum()) for size in sizes),
        "churn": mean_of_known(churn(*pair) for pair in pairwise(clusters.T)),
    }
    if len(np.unique(members.groups[np.isfinite(clusters)]) if members.drifting else groups) > 1:
        out |= {name: mean_of_known(map(of, late)) for name, of in (("ari", ari), ("nmi", nmi), ("purity", purity))}
        indices = [*map(ari, every)]
        out |= {"ari_over_rounds": mean_of_known(indices), "ari_last": indices[-1]}
    return out


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the numbers of drift and of the method's reactions, and those of `agreement` for the late rounds."""
    out = measure_drift(run, record)
    if run.ends_judged(record.view):
        out |= agreement(run, record.clustered, record.groups, (run.end or 0) - record.window)
    return out


def measure_drift(run: RunRecord, record: ExperimentRecord) -> dict[str, float]:
    """Return the numbers of drift and of the method's reactions; empty if the record is not about drift."""
    spreads = {
        name: heterogeneity(run, by)[1:]
        for name, by in (("heterogeneity", "heterogeneity"), ("embedding_heterogeneity", "embedding"))
    }
    reacts = {"moved", "reclustered"}
    if not len(spreads["heterogeneity"][0]) and not any(
        "drifted" in line or reacts & line.get("facts", {}).keys() for line in run.lines
    ):
        return {}
    out: dict[str, float] = {}
    for name, (within, everyone) in spreads.items():
        if len(within):
            out |= {name: mean_of_known(within), f"{name}_all": mean_of_known(everyone)}
    for name, fact, of in (("spread", "spread", np.nanmean), ("silhouette", "silhouette", np.nanmean),
                           ("moves", "moved", np.nansum)):  # fmt: skip
        if np.isfinite(values := run.fact(fact)).any():
            out[name] = float(of(values))
    if len(counts := cluster_counts(run)[1]):
        out |= {"clusters": mean_of_known(counts), "clusters_last": float(counts[-1])}
    reclustered, reactions, events = reclusterings(run), reclusterings(run, merges=False), marks(run)
    if reclustered is not None:
        out["reclusterings"] = float(len(reclustered))
    if events:
        drops = falls(*run.accuracy(record.view), events, len(run.lines))
        out |= {
            "events_known": float(len(drops)),
            "event_fall": mean_of_known(fall.before - fall.lowest for fall in drops),
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


# -- tables ------------------------------------------------------------------------------------------------------------


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


@plan_table("Clusters", without_rounds=True)
def clusters_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of the agreement of clusters with groups, a row per method; None without clusters.

    Clusters {averaged}; the adjusted Rand index is 1 if clusters are the true groups, and about 0 by chance.
    """
    return table_of(summary, [*CLUSTERS, OWN_WEIGHT])


# -- drift over rounds -------------------------------------------------------------------------------------------------


@plan_picture("drift", "Drift, round by round", "clients that drift")
def drift_over_rounds(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw how unlike clients of a cluster are, how many clusters there are, and how many clients moved.

    Distance between clients of a cluster by their labels, number of clusters, and moved clients; triangles are
    re-clusterings, dashed lines known events.{band}
    """
    distances = record.curves(lambda run: heterogeneity(run)[:2])
    counts = record.curves(lambda run: (cluster_counts(run)[0] + 1, cluster_counts(run)[1]))
    drifting = {number for number, method in enumerate(record.methods) if method.shift.drifts}
    counts = {number: of_runs for number, of_runs in counts.items() if number in drifting}
    moves = record.curves(lambda run: figures.by_round(run.fact("moved")))
    moves = {number: [(ends, np.nan_to_num(moved)) for ends, moved in of_runs] for number, of_runs in moves.items()}
    moving = {number for number, of_runs in moves.items() if any(moved.any() for _, moved in of_runs)}
    moves = {number: of_runs for number, of_runs in moves.items() if number in drifting | moving}
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
            first = next(iter(distances))
            everyone = [heterogeneity(run)[2] for run in record.methods[first].runs]
            curve = distances[first][0][0], figures.mean_of_runs(everyone)
            style = figures.Look(figures.OTHER_COLOR, "-")
            figures.band(axes, [curve], "all clients, one cluster", style, scale=1.0, width=4)
        figures.bands(axes, of_methods, record.names, title, scale=1.0)
        if of_methods is counts:
            _mark_reclusterings(axes, record, [*counts])
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=of_methods is not distances))
        figures.mark_events(axes, events_of(record))
    figures.over_rounds(panels[-1], 0, record.experiment.rounds)
    figures.figure_legend(figure, panels)
    return figures.svg(figure, "drift over rounds")


def _mark_reclusterings(axes: Axes, record: ExperimentRecord, numbers: Sequence[int]) -> None:
    """Draw triangles at rounds in which a method re-clustered in any seed."""
    for number, line in zip(numbers, list(axes.lines), strict=True):
        x, y = (np.asarray(values) for values in line.get_data())
        ends = {place + 1 for run in record.methods[number].runs for place in reclusterings(run) or ()}
        marked = np.isin(x, list(ends))
        if marked.any():  # a layout fails without any points
            color = figures.look(number).color
            axes.plot(x[marked], y[marked], ls="", marker="^", ms=7, mfc=color, mec="white", mew=0.8, clip_on=False)


# -- maps of clusters --------------------------------------------------------------------------------------------------

DRAWN, WIDE = 200, 3
"""Maximum number of clients drawn, and of methods side by side."""


@plan_picture("clusters", "Clusters over time", "clusters of clients", single=True)
def clusters_over_time(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw which model or branch answers for each client over time.

    Rows are clients of the first seed, by true group; the color is the model or branch of most of a client's rows.
    Below: share of the clients at each model. Numbers of models have no meaning. Methods that never had clients at
    more than one model are left out.
    """
    members = {m.name: membership(m.runs[0], record.clustered, record.groups) for _, m in record.numbered}
    members = {name: clusters for name, clusters in members.items() if len(_numbers(clusters.slots)) > 1}
    if not members:
        return None
    maps = [(figures.label(name), clusters, "slots", figures.model_color) for name, clusters in members.items()]
    truth = next((clusters for clusters in members.values() if clusters.drifting), None)
    if truth is not None:
        maps.insert(0, ("true groups", truth, "groups", figures.group_color))
    groups = group_names(record, truth)
    tallest = min(max(len(clusters.clients) for clusters in members.values()), DRAWN)
    figure, stacks = figures.stacked(len(maps), widest=WIDE, heights=[min(max(1.5 + 0.04 * tallest, 1.9), 3.7), 1.2])
    for (top, below), (title, clusters, table, color_of) in zip(stacks, maps, strict=True):
        _draw_map(top, clusters, table, color_of, groups)
        _draw_sizes(below, clusters.after, getattr(clusters, table), color_of)
        top.set_title(title, fontsize=10)
        for axes in (top, below):
            axes.set_xlim(0, record.experiment.rounds)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.grid(False)
    other = len(figures.MODEL_COLORS)
    names = {-1: "a client's own expert", other: "another model"}
    numbers = sorted({min(number, other) for clusters in members.values() for number in _numbers(clusters.slots)})
    patches = [
        Patch(color=figures.model_color(number), label=names.get(number, f"model {number}")) for number in numbers
    ]
    figure.legend(handles=patches, loc="outside upper left", ncols=6, fontsize=9, columnspacing=1.2)
    if truth is not None:
        patches = [Patch(color=figures.group_color(n), label=figures.label(groups[n])) for n in _numbers(truth.groups)]
        ncols = figures.columns([str(patch.get_label()) for patch in patches], most=8)
        figure.legend(handles=patches, loc="outside lower left", ncols=ncols, fontsize=9, columnspacing=1.2,
                      title="true groups", alignment="left", title_fontsize=9)  # fmt: skip
    return figures.svg(figure, "clusters of clients over time")


def _numbers(table: np.ndarray) -> list[int]:
    """Return the distinct numbers of clusters or groups in a table."""
    return np.unique(table[np.isfinite(table)]).astype(int).tolist()


def draw_evenly(group_of: dict[int, int], at_most: int) -> list[int]:
    """Select at most `at_most` clients by group and id: of each group its share, at least one, evenly spaced.

    >>> draw_evenly({5: 1, 0: 0, 1: 0, 2: 0, 3: 0, 4: 0}, at_most=3)
    [0, 4, 5]
    """
    chosen: list[int] = []
    for group in sorted(set(group_of.values())):
        members = sorted(client for client, number in group_of.items() if number == group)
        count = len(members)
        if len(group_of) > at_most:
            count = max(int(at_most * len(members) / len(group_of)), 1)
        chosen += [members[k] for k in np.linspace(0, len(members) - 1, count).round().astype(int)]
    return chosen


def group_names(record: ExperimentRecord, truth: Membership | None) -> list[str]:
    """Return the names of the groups: those of the population, or of groups that drift."""
    if truth is None:
        return record.groups
    count = int(np.nanmax(truth.groups)) + 1
    what = record.experiment.shift.what
    domains = isinstance(what, ChangePoints) and isinstance(what.concepts, Domains)
    return record.domains if domains and len(record.domains) >= count else [f"group {k}" for k in range(count)]


def _draw_map(
    axes: Axes, members: Membership, table: str, color_of: Callable[[int], str], groups: Sequence[str]
) -> None:
    """Draw clients as rows, the first group on top; black lines separate the groups, named at the left."""
    drawn = members.select(DRAWN)
    codes, height = getattr(drawn, table), len(drawn.clients)
    cmap = ListedColormap([color_of(number) for number in range(-1, int(np.nanmax(codes)) + 1)])
    axes.pcolormesh(
        np.concatenate([[0], drawn.after]), np.arange(height + 1), codes, cmap=cmap, rasterized=True,
        norm=BoundaryNorm(np.arange(cmap.N + 1) - 1.5, cmap.N),
    )  # fmt: skip
    axes.set_ylim(height, 0)
    axes.tick_params(axis="x", labelbottom=False)
    last = np.array([row[np.isfinite(row)][-1] for row in drawn.groups], dtype=int)
    starts = np.flatnonzero(np.diff(last, prepend=-1))
    for start in starts[1:]:
        axes.axhline(start, color="black", lw=1.2)
    middles = (starts + np.append(starts[1:], height)) / 2
    axes.set_yticks(middles, [""] * len(middles))
    axes.tick_params(axis="y", length=0)
    if not figures.leftmost(axes):
        return
    if len(groups) > 1:
        axes.set_yticklabels([figures.label(groups[last[start]]) for start in starts])
    if drawn.drifting:
        axes.tick_params(axis="y", labelsize=8)
    clients = len(members.clients)
    axes.set_ylabel(f"{height} of {clients} clients" if clients > height else f"{height} clients")


def _draw_sizes(axes: Axes, after: np.ndarray, table: np.ndarray, color_of: Callable[[int], str]) -> None:
    """Draw the share of all judged clients in each cluster or group, stacked."""
    numbers = _numbers(table)
    shares = np.stack([(table == number).sum(axis=0) for number in numbers], axis=1)
    shares = shares / shares.sum(axis=1, keepdims=True)
    areas = [("", color_of(number), 1.0) for number in numbers]
    ends, shares = np.concatenate([[0], after]), np.concatenate([shares[:1], shares])
    figures.draw_areas(axes, ends, shares, areas, step="pre")
    axes.set_yticks([0, 50, 100])
    axes.set_xlabel("rounds done")
    if figures.leftmost(axes):
        axes.set_ylabel("clients, %")
    else:
        axes.tick_params(axis="y", labelleft=False, length=0)
