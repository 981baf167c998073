"""k-means of plain arrays: from given seeds, the best of ten starts, and summaries of a client's rows."""

from __future__ import annotations

import numpy as np

from fedtide.core.rng import Rng

Points = np.ndarray
"""(rows, d) float64."""

STARTS = 10
"""Number of k-means starts; the best is taken."""


def distances(x: Points, centers: Points) -> Points:
    """Return squared Euclidean distances (rows, K)."""
    square = (x * x).sum(1)[:, None] - 2 * x @ centers.T + (centers * centers).sum(1)
    return np.maximum(square, 0.0)


def draw_seeds(x: Points, k: int, rng: Rng, *, weights: np.ndarray | None = None) -> Points:
    """Draw k-means++ seeds (k, d), each in proportion to the squared distance to the seeds before it.

    Arthur and Vassilvitskii 2007. If every row is a seed already, the rest are drawn uniformly.

    Args:
        x: (rows, d).
        k: number of seeds.
        rng: the key of the draw.
        weights: (rows,) weight of each row; None means 1.
    """
    draw = rng.numpy()
    first = draw.integers(len(x)) if weights is None else draw.choice(len(x), p=weights / weights.sum())
    seeds = [x[first]]
    while len(seeds) < k:
        far = distances(x, np.stack(seeds)).min(1) * (1.0 if weights is None else weights)
        seeds.append(x[draw.choice(len(x), p=far / far.sum() if far.sum() > 0 else None)])
    return np.stack(seeds)


def summary(x: Points, k: int, rng: Rng) -> tuple[Points, np.ndarray, Points]:
    """Summarize rows by at most k centers: centers (k, d), rows of each (k,), and variances around them (k, d).

    k-means++ and ten Lloyd iterations. With fewer than k rows the last centers are empty, so that all summaries have
    the same shape.

    >>> centers, counts, variances = summary(np.array([[0.0], [2.0], [9.0]]), 4, Rng(0))
    >>> sorted(centers[counts > 0].flatten().tolist()), int(counts.sum())
    ([0.0, 2.0, 9.0], 3)
    """
    means, member = kmeans_from(x, draw_seeds(x, min(k, len(x)), rng), iterations=10)
    centers, counts, variances = np.zeros((k, x.shape[1])), np.zeros(k), np.zeros((k, x.shape[1]))
    centers[: len(means)], counts[: len(means)] = means, np.bincount(member, minlength=len(means))
    for j in np.unique(member):
        variances[j] = x[member == j].var(0)
    return centers, counts, variances


def farthest_first(x: Points, k: int, first: int) -> Points:
    """Pick k rows, each the farthest from those before it, beginning with row `first` (Gonzalez 1985).

    >>> farthest_first(np.array([[0.0], [1.0], [5.0]]), 2, first=1).tolist()
    [[1.0], [5.0]]
    """
    picked = [first]
    while len(picked) < k:
        picked.append(int(distances(x, x[picked]).min(1).argmax()))
    return x[picked]


def kmeans_from(
    x: Points, seeds: Points, *, weights: np.ndarray | None = None, iterations: int = 100
) -> tuple[Points, np.ndarray]:
    """Run Lloyd's algorithm from given seeds; return centers (K, d) and the cluster of each row.

    A center without members stays where it is.

    >>> centers, member = kmeans_from(np.array([[0.0], [2.0], [9.0]]), np.array([[0.0], [9.0]]))
    >>> centers.tolist(), member.tolist()
    ([[1.0], [9.0]], [0, 0, 1])
    """
    weights = np.ones(len(x)) if weights is None else weights
    centers, member = seeds.astype(np.float64), np.full(len(x), -1)
    for _ in range(iterations):
        now = distances(x, centers).argmin(1)
        if (now == member).all():
            break
        member = now
        for k in range(len(centers)):
            mass = weights * (member == k)
            if mass.sum() > 0:
                centers[k] = mass @ x / mass.sum()
    return centers, distances(x, centers).argmin(1)


def best_kmeans(x: Points, k: int, rng: Rng, *, weights: np.ndarray | None = None) -> tuple[Points, np.ndarray]:
    """Run k-means from ten k-means++ starts; return centers (K, d) and clusters of the cheapest; ties: the first.

    >>> best_kmeans(np.array([[0.0], [9.0], [1.0]]), 2, Rng(0))[1].tolist() in ([0, 1, 0], [1, 0, 1])
    True
    """
    mass = np.ones(len(x)) if weights is None else weights
    results = [
        kmeans_from(x, draw_seeds(x, k, rng.at(number), weights=weights), weights=weights) for number in range(STARTS)
    ]
    costs = [float(mass @ ((x - centers[member]) ** 2).sum(1)) for centers, member in results]
    # Costs that differ only by rounding are equal; otherwise the sign of a singular direction could decide.
    return results[next((number for number, cost in enumerate(costs) if cost <= min(costs) + 1e-9), 0)]
