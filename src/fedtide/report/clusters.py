"""Clusters of clients: agreement with the true groups, evenness, churn, and maps over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedtide.data.shift import ChangePoints
from fedtide.data.shift.change_points import Domains
from fedtide.draw import figures
from fedtide.draw.tables import Table
from fedtide.evaluate.metrics import mean_of_known
from fedtide.report.drift import cluster_counts
from fedtide.report.experts import OWN_WEIGHT
from fedtide.report.formats import Number, percent
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord
from fedtide.report.summary import Summary
from fedtide.report.topic import Topic, plan_picture, plan_table, table_of

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
    both, rows, columns = (float(_pairs(counts)) for counts in (table, table.sum(axis=1), table.sum(axis=0)))
    expected = rows * columns / max(float(_pairs(table.sum())), 1.0)
    largest = (rows + columns) / 2
    return 1.0 if largest == expected else (both - expected) / (largest - expected)


def nmi(table: np.ndarray) -> float:
    """Return the mutual information over the mean of both entropies: 1 for equal labelings, 0 for independent ones.

    1 by definition if both are a single cluster.

    >>> nmi(np.array([[4, 0], [0, 4]])), nmi(np.array([[2, 2], [2, 2]]))
    (1.0, 0.0)
    """
    share = table / table.sum()
    rows, columns = share.sum(axis=1), share.sum(axis=0)
    mean = (entropy(rows) + entropy(columns)) / 2
    return 1.0 if mean == 0 else max(entropy(rows) + entropy(columns) - entropy(share.flatten()), 0.0) / mean


def churn(before: dict[int, int], after: dict[int, int]) -> float:
    """Return the share of clients in both clusterings that changed their cluster; NaN without any.

    A re-clustering numbers clusters anew, so new clusters are matched to old ones with the fewest changes.

    >>> churn({1: 0, 2: 0, 3: 1}, {2: 0, 3: 0}), churn({1: 0, 2: 0, 3: 1}, {1: 5, 2: 5, 3: 0})
    (0.5, 0.0)
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    both = [client for client in after if client in before]
    if not both:
        return math.nan
    old, new = (np.unique([members[k] for k in both], return_inverse=True)[1] for members in (before, after))
    table = contingency(old, new)
    stayed = int(table[linear_sum_assignment(table, maximize=True)].sum())
    return (len(both) - stayed) / len(both)


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


def _pairs(counts: np.ndarray) -> np.ndarray:
    return (counts * (counts - 1) // 2).sum()


# -- numbers of a run --------------------------------------------------------------------------------------------------

CLUSTERS = (
    Number("ari", title="adjusted Rand index", word="adjusted Rand index"),
    Number("nmi", title="mutual information", word="mutual information"),
    Number("purity", percent, "purity"),
    Number("evenness", title="evenness of sizes", word="evenness"),
    Number("churn", percent, "change of cluster, per evaluation"),
    OWN_WEIGHT,
)

OTHERS = (Number("fullest_cluster", percent), Number("ari_last", word="adjusted Rand index"))

Members = dict[int, tuple[str, int]]
"""Group and cluster of each client."""


def measure(record: ExperimentRecord, method: MethodRecord, run: RunRecord) -> dict[str, float]:
    """Return the numbers of `agreement` for the late rounds."""
    judged = run.ends_judged(record.view)
    return agreement(run, record.clustered, record.groups, len(run.lines) - record.window) if judged else {}


def agreement(run: RunRecord, view: str, groups: Sequence[str], since: int) -> dict[str, float]:
    """Return agreement of clusters with groups from round `since` on, their evenness and largest cluster, and churn.

    If groups drift, clusters are compared with the groups of that moment. A client at its own expert is in no cluster.
    Empty if no client is in a cluster. With a single group there is no agreement.
    """
    rounds = {
        number: {client: (group, cluster) for client, (group, cluster) in members.items() if cluster >= 0}
        for number, members in run.clusters(view).items()
    }
    used = {cluster for members in rounds.values() for _, cluster in members.values()}
    if not used:
        return {}
    late = {number: members for number, members in rounds.items() if number >= since and members}
    # Models without clients count as empty clusters; unused slots for models do not.
    counts = {int(number): int(count) for number, count in zip(*cluster_counts(run), strict=True)}
    sizes = [_sizes(members, counts.get(number, max(used) + 1)) for number, members in late.items()]
    labels = [{client: cluster for client, (_, cluster) in members.items()} for members in rounds.values()]
    out = {
        "evenness": mean_of_known(map(evenness, sizes)),
        "fullest_cluster": mean_of_known(float(size.max() / size.sum()) for size in sizes),
        "churn": mean_of_known(churn(*pair) for pair in pairwise(labels)),
    }
    names = groups_in(rounds) if run.regrouped else groups
    if len(names) > 1:
        tables = [_table(members, names) for members in late.values()]
        out |= {name: mean_of_known(map(of, tables)) for name, of in (("ari", ari), ("nmi", nmi), ("purity", purity))}
        every = [ari(_table(members, names)) for members in rounds.values() if members]
        out |= {"ari_over_rounds": mean_of_known(every), "ari_last": every[-1]}
    return out


def groups_in(rounds: Mapping[int, Members]) -> list[str]:
    """Return the groups of all clients, sorted by number if groups drift."""
    groups = {group for members in rounds.values() for group, _ in members.values()}
    return sorted(groups, key=lambda group: (int(group) if group.isdecimal() else 0, group))


def _sizes(members: Members, count: int) -> np.ndarray:
    """Count the clients of each of `count` clusters, empty clusters last."""
    sizes = np.unique([cluster for _, cluster in members.values()], return_counts=True)[1]
    return np.concatenate([sizes, np.zeros(max(count - len(sizes), 0), dtype=sizes.dtype)])


def _table(members: Members, groups: Sequence[str]) -> np.ndarray:
    return contingency(
        np.array([groups.index(group) for group, _ in members.values()]),
        np.unique([cluster for _, cluster in members.values()], return_inverse=True)[1],
    )


# -- maps --------------------------------------------------------------------------------------------------------------

DRAWN, WIDE = 200, 3
"""Maximum number of clients drawn, and of methods side by side."""

TRUE_COLORS = ("#332288", "#DDCC77", "#882255", "#999933", "#AA4499", "#117733", "#CC6677")
"""Paul Tol's muted colors, for true groups: distinct with any kind of color vision, and none the color of a model."""


@dataclass(frozen=True)
class Membership:
    """Clusters of clients at each evaluation.

    Args:
        after: (evaluations,) rounds done.
        clients: (clients,) ids of the selected clients, by group and then by id.
        group: (clients,) number of each client's true group, the last known one where groups drift.
        table: (clients, evaluations) cluster of each client, -1 for its own expert; NaN if unknown.
        sizes: share of each cluster among all clients with a cluster, at each evaluation.
        of: number of clients with a cluster at any evaluation.
        truth: (clients, evaluations) number of the true group at each evaluation, NaN if the cluster is unknown; None
            if groups do not drift.
        shares: if groups drift, share of each true group among all clients at each evaluation.
    """

    after: np.ndarray
    clients: np.ndarray
    group: np.ndarray
    table: np.ndarray
    sizes: dict[int, np.ndarray]
    of: int
    truth: np.ndarray | None = None
    shares: dict[int, np.ndarray] = field(default_factory=dict)


def membership(run: RunRecord, view: str, groups: Sequence[str], at_most: int) -> Membership | None:
    """Return the clusters of at most `at_most` clients, drawn evenly; None if clients have no cluster.

    If groups drift, clients are sorted by their last group, and within it by their earlier groups.
    """
    rounds = run.clusters(view)
    if not any(cluster >= 0 for members in rounds.values() for _, cluster in members.values()):
        return None
    past: dict[int, list[int]] = {}
    for members in rounds.values():
        for client, (group, _) in members.items():
            number = int(group) if run.regrouped else groups.index(group) if groups else 0
            past.setdefault(client, []).append(number)
    last = {client: numbers[-1] for client, numbers in past.items()}
    clients = draw_evenly(last, at_most)
    if run.regrouped:
        clients.sort(key=lambda client: (past[client][::-1], client))
    table, truth = np.full((2, len(clients), len(rounds)), np.nan)
    for column, members in enumerate(rounds.values()):
        for row, client in enumerate(clients):
            if client in members:
                table[row, column] = members[client][1]
                truth[row, column] = past[client].pop(0)
    groups_of = np.array([last[client] for client in clients])
    sizes = _shares([[cluster for _, cluster in members.values()] for members in rounds.values()])
    out = Membership(np.array(list(rounds)) + 1, np.array(clients), groups_of, table, sizes, len(last))
    if not run.regrouped:
        return out
    shares = _shares([[int(group) for group, _ in members.values()] for members in rounds.values()])
    return replace(out, truth=truth, shares=shares)


def _shares(numbers: Sequence[Sequence[int]]) -> dict[int, np.ndarray]:
    """Return the share of each number at each evaluation."""
    distinct = sorted({number for row in numbers for number in row})
    return {number: np.array([row.count(number) / len(row) for row in numbers]) for number in distinct}


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


@plan_table("Clusters")
def clusters_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of the agreement of clusters with groups, a row per method; None without clusters.

    Means over {span}; the adjusted Rand index is 1 if clusters are the true groups, and about 0 by chance.
    """
    return table_of(summary, CLUSTERS)


@plan_picture("clusters", "Clusters over time", "clusters of clients")
def clusters_over_time(record: ExperimentRecord) -> figures.Drawn | None:
    """Draw which model or branch answers for each client over time.

    Rows are clients of the first seed, by true group; the color is the model or branch of most of a client's rows.
    Below: share of the clients at each model. Numbers of models have no meaning.
    """
    members = {m.name: membership(m.runs[0], record.clustered, record.groups, DRAWN) for _, m in record.numbered}
    shown = {name: clusters for name, clusters in members.items() if clusters is not None}
    if not shown:
        return None
    maps = [_of_clusters(figures.label(name), clusters) for name, clusters in shown.items()]
    truth = next((clusters for clusters in shown.values() if clusters.truth is not None), None)
    if truth is not None:
        maps.insert(0, _of_groups(truth))
    groups = group_names(record, truth)
    tallest = max(len(clusters.clients) for clusters in shown.values())
    figure, stacks = figures.stacked(len(maps), widest=WIDE, heights=[min(max(1.5 + 0.04 * tallest, 1.9), 3.7), 1.2])
    for (top, below), panel in zip(stacks, maps, strict=True):
        _draw_map(top, panel, groups if figures.leftmost(top) else None)
        _draw_sizes(below, panel, first=figures.leftmost(below))
        top.set_title(panel.title, fontsize=10)
        for axes in (top, below):
            axes.set_xlim(0, record.experiment.rounds)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.grid(False)
    numbers = sorted(
        {min(number, len(figures.MODEL_COLORS)) for clusters in shown.values() for number in clusters.sizes}
    )
    names = {-1: "a client's own expert", len(figures.MODEL_COLORS): "another model"}
    patches = [Patch(color=model_color(n), label=names.get(n, f"model {n}")) for n in numbers]
    figure.legend(handles=patches, loc="outside upper left", ncols=6, fontsize=9, columnspacing=1.2)
    if truth is not None:
        patches = [Patch(color=group_color(number), label=figures.label(groups[number])) for number in truth.shares]
        figure.legend(handles=patches, loc="outside lower left", ncols=8, fontsize=9, columnspacing=1.2,
                      title="true groups", alignment="left", title_fontsize=9)  # fmt: skip
    return figures.svg(figure, "clusters of clients over time")


@dataclass(frozen=True)
class Map:
    """A map: `codes` (clients, evaluations) of `colors`, and the color and share of each code over time."""

    title: str
    members: Membership
    codes: np.ndarray
    colors: list[str]
    sizes: list[tuple[str, np.ndarray]]


def _of_clusters(title: str, members: Membership) -> Map:
    """Build a map of clusters; code 0 is a client's own expert, the last code another model."""
    codes = np.minimum(members.table, len(figures.MODEL_COLORS)) + 1
    colors = [model_color(number) for number in range(-1, len(figures.MODEL_COLORS) + 1)]
    return Map(title, members, codes, colors, [(model_color(n), members.sizes[n]) for n in sorted(members.sizes)])


def _of_groups(members: Membership) -> Map:
    """Build a map of the true groups of the same clients."""
    assert members.truth is not None
    colors = [group_color(number) for number in range(max(members.shares) + 1)]
    sizes = [(group_color(n), members.shares[n]) for n in members.shares]
    return Map("true groups", members, members.truth, colors, sizes)


def group_color(number: int) -> str:
    """Return the color of a true group, never the color of a model: the palette, its tints, its shades, and again.

    >>> group_color(0), group_color(7), group_color(14), group_color(21)
    ('#332288', '#9990c3', '#191144', '#332288')
    """
    turn = number // len(TRUE_COLORS) % 3
    channels = bytes.fromhex(TRUE_COLORS[number % len(TRUE_COLORS)].removeprefix("#"))
    shaded = (part if turn == 0 else (part + 255) // 2 if turn == 1 else part // 2 for part in channels)
    return f"#{bytes(shaded).hex()}"


def group_names(record: ExperimentRecord, truth: Membership | None) -> list[str]:
    """Return the names of the groups: those of the population, or of groups that drift."""
    if truth is None:
        return record.groups
    count = max(truth.shares) + 1
    what = record.experiment.shift.what
    domains = isinstance(what, ChangePoints) and isinstance(what.concepts, Domains)
    return (
        record.domains if domains and len(record.domains) >= count else [f"group {number}" for number in range(count)]
    )


def model_color(number: int) -> str:
    """Return the color of a model, as in the picture of gate weights; -1 is a client's own expert."""
    return (
        figures.OWN_COLOR
        if number < 0
        else figures.MODEL_COLORS[number]
        if number < len(figures.MODEL_COLORS)
        else figures.OTHER_COLOR
    )


def _draw_map(axes: Axes, panel: Map, groups: Sequence[str] | None) -> None:
    """Draw clients as rows, the first group on top; black lines separate the groups, named at the left."""
    members, cmap = panel.members, ListedColormap(panel.colors)
    edges = np.concatenate([[0], members.after])
    axes.pcolormesh(
        edges, np.arange(len(panel.codes) + 1), panel.codes, cmap=cmap,
        norm=BoundaryNorm(np.arange(len(panel.colors) + 1) - 0.5, cmap.N), rasterized=True,
    )  # fmt: skip
    axes.set_ylim(len(panel.codes), 0)
    axes.tick_params(axis="x", labelbottom=False)
    starts = np.flatnonzero(np.diff(members.group, prepend=-1))
    for start in starts[1:]:
        axes.axhline(start, color="black", lw=1.2)
    middles = (starts + np.append(starts[1:], len(panel.codes))) / 2
    axes.set_yticks(middles, [""] * len(middles))
    axes.tick_params(axis="y", length=0)
    if groups is None:
        return
    if len(groups) > 1:
        axes.set_yticklabels([figures.label(groups[members.group[start]]) for start in starts])
    if members.truth is not None:
        axes.tick_params(axis="y", labelsize=8)
    drawn = len(members.clients)
    axes.set_ylabel(f"{drawn} of {members.of} clients" if members.of > drawn else f"{drawn} clients")


def _draw_sizes(axes: Axes, panel: Map, *, first: bool) -> None:
    """Draw the share of all judged clients at each code, stacked."""
    edges = np.concatenate([[0], panel.members.after])
    low = np.zeros(len(panel.members.after))
    for color, share in panel.sizes:
        high = low + 100 * share
        below, above = (np.concatenate([side[:1], side]) for side in (low, high))
        axes.fill_between(edges, below, above, step="pre", color=color, lw=0)
        low = high
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 50, 100])
    axes.set_xlabel("rounds done")
    if first:
        axes.set_ylabel("clients, %")
    else:
        axes.set_yticklabels([])
        axes.tick_params(axis="y", length=0)


TOPIC = Topic((*CLUSTERS[:-1], *OTHERS), measure, (clusters_over_time,), (clusters_table,))
