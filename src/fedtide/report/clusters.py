"""How clients are clustered: measures of one run, and who was where when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fedtide.evaluate.clusters import ari, churn, crossed, nmi, purity
from fedtide.evaluate.metrics import mean_of_known
from fedtide.parts.cluster import evenness
from fedtide.report.reading import RunRecord


def clustering(run: RunRecord, view: str, groups: Sequence[str], since: int) -> dict[str, float]:
    """Agreement of clusters with known groups, their evenness over the evaluations after `since`, and all their churn.

    A client that is at an expert of its own, of a mixture, is in no cluster. Nothing where nobody is in one. Of one
    group there is nothing to agree with.
    """
    found = {
        number: {client: (group, cluster) for client, (group, cluster) in members.items() if cluster >= 0}
        for number, members in run.clusters(view).items()
    }
    used = _numbers(found)
    if not used:
        return {}
    # Models that nobody is in count as empty clusters.
    numbers = range(max(run.models, max(used) + 1))
    late = [members for number, members in found.items() if number >= since and members]
    out = {
        "evenness": mean_of_known(evenness(_sizes(members, numbers)) for members in late),
        "churn": mean_of_known(
            churn(*({client: cluster for client, (_, cluster) in m.items()} for m in pair))
            for pair in pairwise(found.values())
        ),
    }
    if len(groups) > 1:
        tables = [_table(members, groups) for members in late]
        out |= {name: mean_of_known(map(of, tables)) for name, of in (("ari", ari), ("nmi", nmi), ("purity", purity))}
    return out


@dataclass(frozen=True)
class Membership:
    """Which cluster clients are in at each evaluation.

    Args:
        after: (evaluations,) rounds done.
        clients: (clients,) ids of some clients, by group and then by id.
        group: (clients,) the number of the true group of each.
        table: (clients, evaluations) their clusters, -1 where that is an expert of their own; NaN where none is known.
        sizes: for each cluster its share of all clients that have one, at each evaluation.
        of: how many clients have one, at any evaluation.
    """

    after: np.ndarray
    clients: np.ndarray
    group: np.ndarray
    table: np.ndarray
    sizes: dict[int, np.ndarray]
    of: int


def membership(run: RunRecord, view: str, groups: Sequence[str], at_most: int) -> Membership | None:
    """Who was in which cluster when, of at most so many clients, drawn evenly; None where clients have no cluster."""
    found = run.clusters(view)
    if not found:
        return None
    group_of = {client: groups.index(g) if groups else 0 for m in found.values() for client, (g, _) in m.items()}
    clients = np.array(evenly(group_of, at_most))
    table = np.full((len(clients), len(found)), np.nan)
    sizes = {cluster: np.zeros(len(found)) for cluster in _numbers(found)}
    for column, members in enumerate(found.values()):
        for row, client in enumerate(clients.tolist()):
            if client in members:
                table[row, column] = members[client][1]
        for _, cluster in members.values():
            sizes[cluster][column] += 1 / len(members)
    after = np.array(list(found)) + 1
    return Membership(after, clients, np.array([group_of[c] for c in clients.tolist()]), table, sizes, len(group_of))


def evenly(group_of: dict[int, int], at_most: int) -> list[int]:
    """At most so many clients, sorted by group and then by id: of each group its share and at least one, evenly spaced.

    >>> evenly({5: 1, 0: 0, 1: 0, 2: 0, 3: 0, 4: 0}, at_most=3)
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
    """Of all clusters that any client was ever in."""
    return sorted({cluster for members in found.values() for _, cluster in members.values()})


def _sizes(members: dict[int, tuple[str, int]], numbers: Sequence[int]) -> np.ndarray:
    held = [cluster for _, cluster in members.values()]
    return np.array([held.count(number) for number in numbers])


def _table(members: dict[int, tuple[str, int]], groups: Sequence[str]) -> np.ndarray:
    return crossed(
        np.array([groups.index(group) for group, _ in members.values()]),
        np.unique([cluster for _, cluster in members.values()], return_inverse=True)[1],
    )
