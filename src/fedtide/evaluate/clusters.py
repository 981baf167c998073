"""Whether clusters of clients are the groups that there are, and whether they stay."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from fedtide.parts.cluster import entropy
from fedtide.parts.drift import heterogeneity

Table = np.ndarray
"""(groups, clusters) how many clients of each group are in each cluster."""


def crossed(groups: np.ndarray, clusters: np.ndarray) -> Table:
    """The table of two labellings.

    >>> crossed(np.array([0, 0, 1]), np.array([2, 2, 0])).tolist()
    [[0, 0, 2], [1, 0, 0]]
    """
    table = np.zeros((int(groups.max()) + 1, int(clusters.max()) + 1), dtype=np.int64)
    np.add.at(table, (groups, clusters), 1)
    return table


def purity(table: Table) -> float:
    """The share of clients that are of the commonest group of their cluster; at least the largest group's share.

    >>> purity(np.array([[3, 1], [0, 4]]))
    0.875
    """
    return float(table.max(axis=0).sum() / table.sum())


def ari(table: Table) -> float:
    """The adjusted Rand index: 1 where clusters are the groups, about 0 where they are drawn at random.

    Hubert and Arabie 1985. 1 by definition where both are a single cluster, or all singletons.

    >>> ari(np.array([[4, 0], [0, 4]])), ari(np.array([[8, 0], [8, 0]]))
    (1.0, 0.0)
    """
    both, rows, columns = (float(_pairs(counts)) for counts in (table, table.sum(axis=1), table.sum(axis=0)))
    expected = rows * columns / max(float(_pairs(table.sum())), 1.0)
    largest = (rows + columns) / 2
    return 1.0 if largest == expected else (both - expected) / (largest - expected)


def nmi(table: Table) -> float:
    """Mutual information over the mean of both entropies: 1 where clusters are the groups, 0 where they tell nothing.

    1 by definition where both are a single cluster.

    >>> nmi(np.array([[4, 0], [0, 4]])), nmi(np.array([[2, 2], [2, 2]]))
    (1.0, 0.0)
    """
    share = table / table.sum()
    rows, columns = share.sum(axis=1), share.sum(axis=0)
    mean = (entropy(rows) + entropy(columns)) / 2
    return 1.0 if mean == 0 else max(entropy(rows) + entropy(columns) - entropy(share.flatten()), 0.0) / mean


def churn(before: dict[int, int], after: dict[int, int]) -> float:
    """The share of clients, of those in both, whose cluster is another than before; NaN without any.

    Numbers of clusters say nothing, as whoever clusters anew numbers anew: each cluster is taken to be one of those
    before, so that as few clients as possible have changed.

    >>> churn({1: 0, 2: 0, 3: 1}, {2: 0, 3: 0}), churn({1: 0, 2: 0, 3: 1}, {1: 5, 2: 5, 3: 0})
    (0.5, 0.0)
    """
    both = [client for client in after if client in before]
    if not both:
        return math.nan
    old, new = (np.unique([held[client] for client in both], return_inverse=True)[1] for held in (before, after))
    table = crossed(old, new)
    stayed = int(table[linear_sum_assignment(table, maximize=True)].sum())
    return (len(both) - stayed) / len(both)


def apart_within(shares: np.ndarray, clusters: np.ndarray) -> float:
    """Intra-cluster heterogeneity: how far clients are, by L1, from the others of their cluster, a mean over clients.

    Fielding (arXiv 2411.01580), section 2 and table 3: for each client the mean L1 distance of its distribution of
    labels from those of the other clients in its cluster, 0 where it is alone, then the mean over clients. Between 0
    and 2; NaN of nobody.

    Args:
        shares: (clients, classes) the distribution of each client.
        clusters: (clients,) the cluster of each.

    >>> apart_within(np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]), np.array([0, 0, 1])).__round__(4)
    0.6667
    """
    if not len(shares):
        return math.nan
    return heterogeneity(torch.from_numpy(shares.astype(np.float64)), torch.from_numpy(clusters.astype(np.int64)), "l1")


def accompanied(clusters: np.ndarray) -> np.ndarray:
    """Which clients are not alone in their cluster (clients,) bool.

    >>> accompanied(np.array([3, 1, 3])).tolist()
    [True, False, True]
    """
    _, which, count = np.unique(clusters, return_inverse=True, return_counts=True)
    return np.asarray(count[which] > 1)


def _pairs(counts: np.ndarray) -> np.ndarray:
    return (counts * (counts - 1) // 2).sum()
