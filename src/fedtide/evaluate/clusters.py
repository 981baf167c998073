"""Measures of clusters of clients: agreement with the true groups, evenness and churn."""

from __future__ import annotations

import math

import numpy as np

Table = np.ndarray
"""Contingency table (groups, clusters): number of clients of each group in each cluster."""


def contingency(groups: np.ndarray, clusters: np.ndarray) -> Table:
    """Return the contingency table of two labelings.

    >>> contingency(np.array([0, 0, 1]), np.array([2, 2, 0])).tolist()
    [[0, 0, 2], [1, 0, 0]]
    """
    table = np.zeros((int(groups.max()) + 1, int(clusters.max()) + 1), dtype=np.int64)
    np.add.at(table, (groups, clusters), 1)
    return table


def purity(table: Table) -> float:
    """Return the share of clients that belong to the commonest group of their cluster.

    At least the share of the largest group.

    >>> purity(np.array([[3, 1], [0, 4]]))
    0.875
    """
    return float(table.max(axis=0).sum() / table.sum())


def ari(table: Table) -> float:
    """Return the adjusted Rand index: 1 where clusters equal groups, about 0 for random clusters.

    Hubert and Arabie 1985. 1 by definition where both are a single cluster, or all singletons.

    >>> ari(np.array([[4, 0], [0, 4]])), ari(np.array([[8, 0], [8, 0]]))
    (1.0, 0.0)
    """
    both, rows, columns = (float(_pairs(counts)) for counts in (table, table.sum(axis=1), table.sum(axis=0)))
    expected = rows * columns / max(float(_pairs(table.sum())), 1.0)
    largest = (rows + columns) / 2
    return 1.0 if largest == expected else (both - expected) / (largest - expected)


def nmi(table: Table) -> float:
    """Return the mutual information over the mean of both entropies: 1 for equal labelings, 0 for independent ones.

    1 by definition where both are a single cluster.

    >>> nmi(np.array([[4, 0], [0, 4]])), nmi(np.array([[2, 2], [2, 2]]))
    (1.0, 0.0)
    """
    share = table / table.sum()
    rows, columns = share.sum(axis=1), share.sum(axis=0)
    mean = (entropy(rows) + entropy(columns)) / 2
    return 1.0 if mean == 0 else max(entropy(rows) + entropy(columns) - entropy(share.flatten()), 0.0) / mean


def churn(before: dict[int, int], after: dict[int, int]) -> float:
    """Return the share of clients that changed their cluster, of those in both clusterings; NaN without any.

    Cluster numbers carry no meaning, as a re-clustering numbers clusters anew: new clusters are matched to old ones so
    that as few clients as possible have changed.

    >>> churn({1: 0, 2: 0, 3: 1}, {2: 0, 3: 0}), churn({1: 0, 2: 0, 3: 1}, {1: 5, 2: 5, 3: 0})
    (0.5, 0.0)
    """
    from scipy.optimize import linear_sum_assignment  # takes longer to import than all of this package

    both = [client for client in after if client in before]
    if not both:
        return math.nan
    old, new = (np.unique([held[client] for client in both], return_inverse=True)[1] for held in (before, after))
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
    kept = shares[shares > 0]
    return abs(float((kept * np.log(kept)).sum()))


def _pairs(counts: np.ndarray) -> np.ndarray:
    return (counts * (counts - 1) // 2).sum()
