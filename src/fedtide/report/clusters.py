"""Clusters of clients: measures of one run, and membership over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from fedtide.evaluate.clusters import ari, churn, contingency, evenness, nmi, purity
from fedtide.evaluate.metrics import mean_of_known
from fedtide.report.drift import cluster_counts
from fedtide.report.reading import RunRecord


def clustering(run: RunRecord, view: str, groups: Sequence[str], since: int) -> dict[str, float]:
    """Return the agreement of clusters with known groups, their evenness and largest after `since`, and their churn.

    Where groups drift, clusters are compared with the groups of that moment. A client at an expert of its own, of a
    mixture, is in no cluster. Empty where no client is in a cluster. With a single group there is no agreement.
    """
    found = {
        number: {client: (group, cluster) for client, (group, cluster) in members.items() if cluster >= 0}
        for number, members in run.clusters(view).items()
    }
    used = _numbers(found)
    if not used:
        return {}
    late = [members for number, members in found.items() if number >= since and members]
    # Models without clients count as empty clusters; unused slots for models do not.
    there = {int(number): int(count) for number, count in zip(*cluster_counts(run), strict=True)}
    sizes = [
        _sizes(members, there.get(number, max(used) + 1))
        for number, members in found.items()
        if number >= since and members
    ]
    out = {
        "evenness": mean_of_known(map(evenness, sizes)),
        "fullest_cluster": mean_of_known(float(each.max() / each.sum()) for each in sizes),
        "churn": mean_of_known(
            churn(*({client: cluster for client, (_, cluster) in m.items()} for m in pair))
            for pair in pairwise(found.values())
        ),
    }
    names = groups_in(found) if run.regrouped else groups
    if len(names) > 1:
        tables = [_table(members, names) for members in late]
        out |= {name: mean_of_known(map(of, tables)) for name, of in (("ari", ari), ("nmi", nmi), ("purity", purity))}
        every = [ari(_table(members, names)) for members in found.values() if members]
        out |= {"ari_over_rounds": mean_of_known(every), "ari_last": every[-1]}
    return out


def groups_in(found: dict[int, dict[int, tuple[str, int]]]) -> list[str]:
    """Return the groups that any client was ever in, sorted by number where groups drift."""
    groups = {group for members in found.values() for group, _ in members.values()}
    return sorted(groups, key=lambda group: (int(group) if group.isdecimal() else 0, group))


@dataclass(frozen=True)
class Membership:
    """Clusters of clients at each evaluation.

    Args:
        after: (evaluations,) rounds done.
        clients: (clients,) ids of the selected clients, by group and then by id.
        group: (clients,) number of each client's true group, the last known one where groups drift.
        table: (clients, evaluations) cluster of each client, -1 for an expert of its own; NaN where unknown.
        sizes: for each cluster its share, at each evaluation, of all clients that have one.
        of: number of clients that have a cluster at any evaluation.
        truth: (clients, evaluations) number of the true group at each evaluation, NaN where the cluster is unknown;
            None where groups do not drift.
        shares: for each true group its share of all clients at each evaluation, where groups drift.
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
    """Return the clusters of at most `at_most` clients, drawn evenly; None where clients have no cluster.

    Where groups drift, clients are sorted by their last group, and within it by their earlier groups.
    """
    found = run.clusters(view)
    if not found:
        return None
    past: dict[int, list[int]] = {}
    for members in found.values():
        for client, (group, _) in members.items():
            number = int(group) if run.regrouped else groups.index(group) if groups else 0
            past.setdefault(client, []).append(number)
    last = {client: numbers[-1] for client, numbers in past.items()}
    clients = draw_evenly(last, at_most)
    if run.regrouped:
        clients.sort(key=lambda client: (past[client][::-1], client))
    table, truth = np.full((2, len(clients), len(found)), np.nan)
    for column, members in enumerate(found.values()):
        for row, client in enumerate(clients):
            if client in members:
                table[row, column] = members[client][1]
                truth[row, column] = past[client].pop(0)
    groups_of = np.array([last[client] for client in clients])
    sizes = _shares([[cluster for _, cluster in members.values()] for members in found.values()])
    made = Membership(np.array(list(found)) + 1, np.array(clients), groups_of, table, sizes, len(last))
    if not run.regrouped:
        return made
    shares = _shares([[int(group) for group, _ in members.values()] for members in found.values()])
    return replace(made, truth=truth, shares=shares)


def _shares(held: Sequence[Sequence[int]]) -> dict[int, np.ndarray]:
    """Return the share of each number at each evaluation."""
    numbers = sorted({number for each in held for number in each})
    return {number: np.array([each.count(number) / len(each) for each in held]) for number in numbers}


def draw_evenly(group_of: dict[int, int], at_most: int) -> list[int]:
    """Select at most `at_most` clients by group and id: of each group its share, at least one, evenly spaced.

    >>> draw_evenly({5: 1, 0: 0, 1: 0, 2: 0, 3: 0, 4: 0}, at_most=3)
    [0, 4, 5]
    """
    chosen: list[int] = []
    for group in sorted(set(group_of.values())):
        members = sorted(client for client, own in group_of.items() if own == group)
        count = len(members)
        if len(group_of) > at_most:
            count = max(int(at_most * len(members) / len(group_of)), 1)
        chosen += [members[k] for k in np.linspace(0, len(members) - 1, count).round().astype(int)]
    return chosen


def _numbers(found: dict[int, dict[int, tuple[str, int]]]) -> list[int]:
    """Return the numbers of all clusters that any client was ever in."""
    return sorted({cluster for members in found.values() for _, cluster in members.values()})


def _sizes(members: dict[int, tuple[str, int]], count: int) -> np.ndarray:
    """Count the clients of each of `count` clusters, empty clusters last."""
    sizes = np.unique([cluster for _, cluster in members.values()], return_counts=True)[1]
    return np.concatenate([sizes, np.zeros(max(count - len(sizes), 0), dtype=sizes.dtype)])


def _table(members: dict[int, tuple[str, int]], groups: Sequence[str]) -> np.ndarray:
    return contingency(
        np.array([groups.index(group) for group, _ in members.values()]),
        np.unique([cluster for _, cluster in members.values()], return_inverse=True)[1],
    )
