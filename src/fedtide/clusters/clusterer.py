"""Clustering of rows under any of the distances: k-means with the number of clusters by silhouette, and k-center.

Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu: *Fielding: Clustered Federated Learning with Data Drift*, 2024
(arXiv 2411.01580), Algorithm 3, and the greedy k-center clustering of Algorithm 4. The range of K, the number of
starts, the treatment of empty clusters and ties are our own choices, documented where they are made.

Starts are drawn by k-means++ in proportion to a row's part of the cost, the sum of distances (Arthur and Vassilvitskii
2007, section 5). A start with fewer clusters uses the first of its seeds, which have the distribution of a draw for
that number.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.clusters.distance import Distance, between, means, set_scales, sum_distances, unit
from fedtide.clusters.lloyd import kmeans_for_each
from fedtide.core.rng import Rng, draw_some
from fedtide.fields.types import Count, ModelCount, StepCount, ingredient

SCALED = 1000
"""Rows sampled to set the scales of a joint distance."""
TIE = 1e-6
"""Difference below which silhouettes are equal: rounding in float32 is as large."""


Silhouette = Annotated[float, Field(strict=True, ge=-1, le=1)]


@dataclass(frozen=True)
class Clustering:
    """The clusters of rows, in the order of their lowest members.

    label: (rows,) int64; centers: (k, d); distance: the distance used; silhouette: the mean silhouette of each K that
    was tried, {} without a choice; k: number of clusters.
    """

    label: Tensor
    centers: Tensor
    distance: Distance
    silhouette: dict[int, float] = field(default_factory=dict)
    k: int = 1


@ingredient
class KMeans:
    """k-means, with the number of clusters of the largest mean silhouette; ties: the smaller (Algorithm 3).

    There is one cluster if `k_max` is 1, there are fewer than three rows, all rows are equal, or no silhouette reaches
    `min_silhouette`. Otherwise there are fewer clusters than rows.

    Args:
        k_min: smallest number of clusters.
        k_max: largest number of clusters; 1 means one cluster, whatever `k_min`.
        min_silhouette: if no mean silhouette is as large there is one cluster, as there are no groups; -1 takes any.
        n_init: starts for each number of clusters; the one of the lowest cost is used.
        silhouette_samples: rows drawn at random to compute silhouettes, if there are more.
        fit_samples: rows drawn at random to find centers, if there are more; the others go to the nearest. If all drawn
            rows are equal there is one cluster.

    >>> x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    >>> found = KMeans().fit(x, "l1", Rng(0))
    >>> found.k, found.label.tolist(), {k: round(s, 3) for k, s in found.silhouette.items()}
    (2, [0, 0, 1, 1], {2: 0.889, 3: 0.441})
    >>> KMeans(min_silhouette=0.9).fit(x, "l1", Rng(0)).label.tolist()
    [0, 0, 0, 0]
    """

    k_min: ModelCount = 2
    k_max: ModelCount = 10
    min_silhouette: Silhouette = -1.0
    n_init: StepCount = 10
    silhouette_samples: Count = 1000
    fit_samples: Count = 20_000
    kind: Literal["k-means"] = "k-means"

    def __post_init__(self) -> None:
        if self.k_max < self.k_min and self.k_max != 1:
            values = f"found k_max {self.k_max} and k_min {self.k_min}"
            raise ValueError(f"{values}; allowed: k_max of k_min or more, or 1 for one cluster")

    def fit(self, x: Tensor, distance: Distance, rng: Rng) -> Clustering:
        """Cluster rows.

        Args:
            x: (rows, d) float32 or float64, the rows in the order of their ids.
            distance: distance for assignment, starts, cost and silhouette; a joint one is rescaled.
        """
        kind = set_scales(distance, draw_some(x, SCALED, rng.at("scales")))
        rows = unit(x) if kind == "cosine" else x
        if self.k_max == 1 or len(x) < 3 or _alike(rows):
            return _finished(rows, torch.zeros(len(x), dtype=torch.int64), {}, kind)
        fitted = draw_some(rows, max(self.fit_samples, 3), rng.at("fit"))
        most = len(fitted) - 1
        ks = range(min(self.k_min, most), min(self.k_max, most) + 1)
        labels = kmeans_for_each(fitted, ks, kind, rng.at("starts"), n_init=self.n_init)
        scores: dict[int, float] = {}
        best = 0
        if len(ks) > 1 or self.min_silhouette > -1:
            drawn = draw_some(torch.arange(len(fitted)), self.silhouette_samples, rng.at("silhouette"))
            mean_silhouettes = silhouettes(fitted[drawn], labels[:, drawn], kind).mean(1).tolist()
            scores = dict(zip(ks, mean_silhouettes, strict=True))
            best = next(i for i, score in enumerate(scores.values()) if score >= max(scores.values()) - TIE)
        if scores and max(scores.values()) < self.min_silhouette:
            return _finished(rows, torch.zeros(len(x), dtype=torch.int64), scores, kind)
        label = labels[best]
        if len(fitted) < len(rows):
            centers = means(fitted, label, ks[best], fitted[: ks[best]], kind)
            label = between(rows, centers, kind).min(1).indices
        return _finished(rows, label, scores, kind)


@ingredient
class KCenter:
    """Greedy k-center clustering: centers are rows, each the farthest from those before it (Algorithm 4).

    Clusters are then represented by the means of their members.

    Args:
        k: number of clusters; fewer if rows are equal.

    >>> found = KCenter(3).fit(torch.tensor([[0.0], [1.0], [9.0], [5.0]]), "l1", Rng(0))
    >>> found.label.tolist(), found.centers.flatten().tolist()
    ([0, 0, 1, 2], [0.5, 9.0, 5.0])
    """

    k: ModelCount
    kind: Literal["k-center"] = "k-center"

    @property
    def k_max(self) -> int:
        """Largest possible number of clusters."""
        return self.k

    def fit(self, x: Tensor, distance: Distance, rng: Rng) -> Clustering:
        """Cluster rows; arguments are those of `KMeans.fit`."""
        kind = set_scales(distance, draw_some(x, SCALED, rng.at("scales")))
        clustering = k_center(x, self.k, kind)
        return replace(clustering, centers=means(x, clustering.label, clustering.k, clustering.centers, kind))


Clusterer = Annotated[KMeans | KCenter, Field(discriminator="kind")]
"""A clustering method."""


def _alike(rows: Tensor) -> bool:
    """Tell whether all rows are equal up to rounding."""
    return bool((rows - rows[0]).abs().max() <= 4 * torch.finfo(rows.dtype).eps * rows[0].abs().max())


def _finished(
    rows: Tensor, label: Tensor, scores: dict[int, float], kind: Distance, centers: Tensor | None = None
) -> Clustering:
    """Remove empty clusters, order the others by their lowest members, and compute their centers."""
    first = torch.full((int(label.max()) + 1,), len(label))
    first.scatter_reduce_(0, label, torch.arange(len(label)), "amin")
    order = first.argsort()[: int((first < len(label)).sum())]
    number = torch.empty_like(first)
    number[order] = torch.arange(len(order))
    label = number[label]
    chosen = means(rows, label, len(order), rows[first[order]], kind) if centers is None else centers[order]
    return Clustering(label, chosen, kind, scores, len(order))


# -- quality of a clustering ------------------------------------------------------------------------------------------


def silhouettes(x: Tensor, labels: Tensor, kind: Distance) -> Tensor:
    """Return the silhouette of each row under each labeling (labelings, rows) float64, from one pass over all pairs.

    Rousseeuw 1987: `(b - a) / max(a, b)`, with `a` the mean distance to the other members of the row's cluster, and `b`
    that to the nearest other cluster. It is 0 for a single row or a single cluster.

    Args:
        x: (rows, d).
        labels: (labelings, rows) int64; unused numbers are no clusters.

    >>> x = torch.tensor([[0.0], [1.0], [4.0]])
    >>> silhouettes(x, torch.tensor([[0, 0, 1]]), "l1").tolist()
    [[0.75, 0.6666666666666666, 0.0]]
    """
    ks = (labels.max(1).values + 1).tolist()
    member = torch.cat([torch.nn.functional.one_hot(one, k) for one, k in zip(labels, ks, strict=True)], 1)
    totals = sum_distances(x, member.to(x.dtype), kind).split(ks, 1)
    out = []
    for one, total, mask in zip(labels, totals, member.split(ks, 1), strict=True):
        count = mask.sum(0)
        its = count[one]
        inside = total.gather(1, one[:, None])[:, 0] / (its - 1).clamp(min=1)
        other = (total / count).masked_fill((mask > 0) | (count == 0), torch.inf).min(1).values
        larger = torch.maximum(inside, other)
        score = torch.where((its > 1) & (larger > 0) & larger.isfinite(), (other - inside) / larger, 0.0)
        out.append(score)
    return torch.stack(out)


# -- k-center ---------------------------------------------------------------------------------------------------------


def k_center(x: Tensor, k: int, kind: Distance) -> Clustering:
    """Cluster by Algorithm 4: centers are rows, each the farthest from those before it, beginning with row 0.

    Gonzalez 1985. Each row then goes to the nearest center; ties: the first. There are fewer than k clusters if rows
    are equal.

    Args:
        x: (rows, d).
        k: number of clusters.

    >>> found = k_center(torch.tensor([[0.0], [1.0], [9.0], [5.0]]), 3, "l1")
    >>> found.label.tolist(), found.centers.flatten().tolist()
    ([0, 0, 1, 2], [0.0, 9.0, 5.0])
    """
    picked = [0]
    far = between(x, x[:1], kind)
    while len(picked) < min(k, len(x)):
        near = far.min(1).values
        near[picked] = 0
        if not near.max() > 0:
            break
        picked.append(int(near.argmax()))
        far = torch.cat([far, between(x, x[picked[-1:]], kind)], 1)
    far[picked, torch.arange(len(picked))] = -1  # rounding sends no center elsewhere
    return _finished(x, far.min(1).indices, {}, kind, x[picked])


# -- clusters by density ----------------------------------------------------------------------------------------------


def dbscan(far: Tensor, eps: float, min_samples: int = 2) -> Tensor:
    """Cluster by density: rows with `min_samples` rows within `eps`, themselves included, and all rows near them.

    Ester, Kriegel, Sander, Xu: *A Density-Based Algorithm for Discovering Clusters*, KDD 1996. Clusters are in the
    order of their first dense rows. A row near several clusters is in the first of them.

    Args:
        far: (rows, rows) distances.
        eps: largest distance of neighbors.
        min_samples: neighbors of a dense row; 1 leaves no row without a cluster.

    Returns:
        (rows,) int64 the cluster of each row, -1 for none.

    >>> x = torch.tensor([[0.0], [1.0], [5.0], [2.0], [9.0]])
    >>> dbscan(torch.cdist(x, x), 1.0).tolist(), dbscan(torch.cdist(x, x), 1.0, 1).tolist()
    ([0, 0, -1, 0, -1], [0, 0, 1, 0, 2])
    """
    near = far <= eps
    dense = near.sum(1) >= min_samples
    label, count = torch.full((len(far),), -1), 0
    for row in dense.nonzero().flatten().tolist():
        if label[row] >= 0:
            continue
        size, reached = 0, near[row]
        while int(reached.sum()) > size:
            size = int(reached.sum())
            reached = near[reached & dense].any(0)
        label[reached & (label < 0)] = count
        count += 1
    return label


# -- k-means of plain arrays -------------------------------------------------------------------------------------------


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


def farthest_first(x: Points, k: int, *first: int) -> Points:
    """Pick k rows, each the farthest from those before it, beginning with the rows `first` (Gonzalez 1985).

    >>> farthest_first(np.array([[0.0], [1.0], [5.0]]), 2, 1).tolist()
    [[1.0], [5.0]]
    """
    picked = [*first[:k]]
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


def kmeans_groups(x: Points, k: int, rng: Rng) -> Tensor:
    """Return the cluster (rows,) of each row by `best_kmeans`, in the order of their first members.

    >>> kmeans_groups(np.array([[0.0], [9.0], [1.0]]), 2, Rng(0)).tolist()
    [0, 1, 0]
    """
    _, labels = best_kmeans(x, k, rng)
    _, first, member = np.unique(labels, return_index=True, return_inverse=True)
    return torch.from_numpy(first.argsort().argsort()[member])
