"""Clustering of rows under any of the distances: k-means with the number of clusters by silhouette, and k-center.

Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu: *Fielding: Clustered Federated Learning with Data Drift*, 2024
(arXiv 2411.01580), Algorithm 3, and the greedy k-center clustering of Algorithm 4. The range of K, the number of
starts, the treatment of empty clusters and ties are our own choices, documented where they are made.

Starts are drawn by k-means++ in proportion to a row's part of the cost, the sum of distances (Arthur and Vassilvitskii
2007, section 5). A start with fewer clusters uses the first of its seeds, which have the distribution of a draw for
that number. Lloyd's iterations skip distances that the triangle inequality shows to be too long (Elkan 2003). In
the first iteration all distances are computed, from equal centers of several starts once. That changes no assignment,
and leaves a tenth of the distances if clients are in groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.clusters.distance import (
    CELLS,
    Center,
    Distance,
    Halves,
    Joint,
    between,
    blocks,
    means,
    median,
    pairs,
    renormalize,
    set_scales,
    sum_distances,
    unit,
)
from fedtide.core.rng import Rng, draw_some
from fedtide.fields.types import Count, ModelCount, StepCount, ingredient

ITERATIONS = 100
"""Largest number of Lloyd iterations: if the mean does not minimize the distance, the algorithm need not terminate."""
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
        center: center of a cluster; "median" is for label distributions only.
        silhouette_samples: rows drawn at random to compute silhouettes; None means all.
        fit_samples: rows drawn at random to find centers, the others go to the nearest; None means all. If all drawn
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
    center: Center = "mean"
    silhouette_samples: Count | None = 1000
    fit_samples: Count | None = 20_000
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
            rng: the key of all draws.
        """
        kind = set_scales(distance, draw_some(x, SCALED, rng.at("scales")))
        rows = unit(x) if kind == "cosine" else x
        if self.k_max == 1 or len(x) < 3 or _alike(rows):
            return _finished(rows, torch.zeros(len(x), dtype=torch.int64), {}, kind, self.center)
        count = None if self.fit_samples is None else max(self.fit_samples, 3)
        fitted = draw_some(rows, count, rng.at("fit"))
        most = len(fitted) - 1
        ks = range(min(self.k_min, most), min(self.k_max, most) + 1)
        labels = kmeans_for_each(fitted, ks, kind, rng.at("starts"), n_init=self.n_init, center=self.center)
        scores: dict[int, float] = {}
        best = 0
        if len(ks) > 1 or self.min_silhouette > -1:
            drawn = draw_some(torch.arange(len(fitted)), self.silhouette_samples, rng.at("silhouette"))
            mean_silhouettes = silhouettes(fitted[drawn], labels[:, drawn], kind).mean(1).tolist()
            scores = dict(zip(ks, mean_silhouettes, strict=True))
            best = next(i for i, score in enumerate(scores.values()) if score >= max(scores.values()) - TIE)
        if scores and max(scores.values()) < self.min_silhouette:
            return _finished(rows, torch.zeros(len(x), dtype=torch.int64), scores, kind, self.center)
        label = labels[best]
        if len(fitted) < len(rows):
            centers = means(fitted, label, ks[best], fitted[: ks[best]], kind, self.center)
            label = between(rows, centers, kind).min(1).indices
        return _finished(rows, label, scores, kind, self.center)


@ingredient
class KCenter:
    """Greedy k-center clustering: centers are rows, each the farthest from those before it (Algorithm 4).

    Clusters are then represented by the means of their members.

    Args:
        k: number of clusters; fewer if rows are equal.
        center: center of a cluster; "median" is for label distributions only.

    >>> found = KCenter(3).fit(torch.tensor([[0.0], [1.0], [9.0], [5.0]]), "l1", Rng(0))
    >>> found.label.tolist(), found.centers.flatten().tolist()
    ([0, 0, 1, 2], [0.5, 9.0, 5.0])
    """

    k: ModelCount
    center: Center = "mean"
    kind: Literal["k-center"] = "k-center"

    @property
    def k_max(self) -> int:
        """Largest possible number of clusters."""
        return self.k

    def fit(self, x: Tensor, distance: Distance, rng: Rng) -> Clustering:
        """Cluster rows; arguments are those of `KMeans.fit`."""
        kind = set_scales(distance, draw_some(x, SCALED, rng.at("scales")))
        clustering = k_center(x, self.k, kind)
        return replace(
            clustering, centers=means(x, clustering.label, clustering.k, clustering.centers, kind, self.center)
        )


Clusterer = Annotated[KMeans | KCenter, Field(discriminator="kind")]
"""A clustering method."""


def _alike(rows: Tensor) -> bool:
    """Tell whether all rows are equal up to rounding."""
    return bool((rows - rows[0]).abs().max() <= 4 * torch.finfo(rows.dtype).eps * rows[0].abs().max())


def _finished(
    rows: Tensor, label: Tensor, scores: dict[int, float], kind: Distance, center: Center, centers: Tensor | None = None
) -> Clustering:
    """Remove empty clusters, order the others by their lowest members, and compute their centers."""
    first = torch.full((int(label.max()) + 1,), len(label))
    first.scatter_reduce_(0, label, torch.arange(len(label)), "amin")
    order = first.argsort()[: int((first < len(label)).sum())]
    number = torch.empty_like(first)
    number[order] = torch.arange(len(order))
    label = number[label]
    chosen = means(rows, label, len(order), rows[first[order]], kind, center) if centers is None else centers[order]
    return Clustering(label, chosen, kind, scores, len(order))


# -- the fits ---------------------------------------------------------------------------------------------------------


def kmeans_for_each(
    x: Tensor, ks: Sequence[int], kind: Distance, rng: Rng, *, n_init: int = 10, center: Center = "mean"
) -> Tensor:
    """Return for each K the labels (Ks, rows) int64 of the lowest cost among `n_init` starts; no cluster is empty.

    Args:
        x: (rows, d); unit vectors for "cosine".
        ks: the numbers of clusters, ascending, each at most the number of rows.
        kind: the distance.
        rng: the key of the starts.
        n_init: number of starts.
        center: center of a cluster.
    """
    seeds, far = draw_starts(x, max(ks), n_init, kind, rng)
    tries = [(i, start) for i in range(len(ks)) for start in range(n_init)]
    at_once = max(CELLS // (len(x) * max(ks)), 1)
    best = torch.zeros(len(ks), len(x), dtype=torch.int64)
    least = torch.full((len(ks),), torch.inf, dtype=torch.float64)
    for begin in range(0, len(tries), at_once):
        batch = tries[begin : begin + at_once]
        top = ks[batch[-1][0]]
        bound = far[[start for _, start in batch], :top]
        for one, (i, _) in zip(bound, batch, strict=True):
            one[ks[i] :] = torch.inf
        label, cost = lloyd(x, x[seeds[[start for _, start in batch], :top]], kind, center=center, bound=bound)
        for (i, _), its_label, its_cost in zip(batch, label, cost, strict=True):
            if its_cost < least[i]:
                best[i], least[i] = its_label, its_cost
    return best


def draw_starts(x: Tensor, k: int, starts: int, kind: Distance, rng: Rng) -> tuple[Tensor, Tensor]:
    """Draw k-means++ seeds of several starts: their rows (starts, k), and the metric to all rows (starts, k, rows).

    A row of zeros is no seed under the cosine distance. If all distances from the seeds are zero, row 0 is taken.
    """
    draws = torch.from_numpy(rng.numpy().random((starts, k)))
    may = x.abs().sum(1) > 0 if kind == "cosine" else torch.ones(len(x), dtype=torch.bool)
    seeds, far = torch.zeros(starts, k, dtype=torch.int64), torch.empty(starts, k, len(x), dtype=x.dtype)
    near = torch.ones(starts, len(x), dtype=x.dtype)
    for j in range(k):
        mass = (_cost(near, kind).double() * may).cumsum(1)
        seeds[:, j] = (mass > draws[:, j : j + 1] * mass[:, -1:]).max(1).indices
        far[:, j] = between(x, x[seeds[:, j]], _metric(kind)).T
        near = far[:, j].clone() if j == 0 else torch.minimum(near, far[:, j])
    return seeds, far


def _metric(kind: Distance) -> Distance:
    """Return a metric with the same nearest center that obeys the triangle inequality; unit vectors for cosine."""
    if isinstance(kind, Joint):
        return replace(kind, root=True)
    return "l2" if kind in ("sq-l2", "cosine") else kind


def _cost(metric: Tensor, kind: Distance) -> Tensor:
    """Convert values of the metric to the distance."""
    if isinstance(kind, Joint):
        return metric.square()
    return metric.square() / (2 if kind == "cosine" else 1) if kind in ("sq-l2", "cosine") else metric


def lloyd(
    x: Tensor, centers: Tensor, kind: Distance, *, center: Center = "mean", bound: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run Lloyd's algorithm from many starts at once: labels (starts, rows) int64 and costs (starts,) float64.

    Each row goes to the nearest center. An empty cluster gets the row that is farthest from its center, among clusters
    of two or more. Ties: the first. Then centers are computed, until no row moves.

    Args:
        x: (rows, d); unit vectors for "cosine".
        centers: (starts, K, d).
        kind: the distance.
        center: center of a cluster.
        bound: (starts, K, rows) the metric from rows to centers, infinite for unused clusters, which come last. None
            means that all are used.

    >>> x = torch.tensor([[0.0], [2.0], [9.0]])
    >>> [found.tolist() for found in lloyd(x, torch.tensor([[[0.0], [9.0]], [[0.0], [2.0]]]), "l1")]
    [[[0, 0, 1], [0, 0, 1]], [2.0, 2.0]]
    """
    starts, top, _ = centers.shape
    metric = _metric(kind)
    if bound is None:
        bound = between(x, centers.flatten(0, 1), metric).T.reshape(starts, top, len(x))
    used = bound[:, :, 0].isfinite()
    slack = 256 * torch.finfo(x.dtype).eps * float(bound.where(used[:, :, None], 0).max())
    mine = Halves.of(x) if kind == "js" else None
    # The used clusters of all starts are numbered through.
    at = _Runs.of(used.sum(1))
    upper, label = bound.min(1)
    label += at.first[:, None]
    begun, centers = at, centers[used]
    count = _refill(x, label, upper, centers, at, metric)
    sums, changed = _sums(x, label, at), torch.ones_like(label, dtype=torch.bool)
    out, last = torch.zeros_like(label), torch.empty_like(centers)
    alive, numbers = torch.arange(starts), torch.arange(len(centers))
    for iteration in range(ITERATIONS + 1):
        anew = _centered(x, label, sums, count, centers, at, kind, center)
        over = ~changed.any(1) | (iteration == ITERATIONS)
        if over.any():
            ended, unfinished = over[at.owner], ~over
            out[alive[over]] = label[over] + (begun.first[alive[over]] - at.first[over])[:, None]
            last[numbers[ended]] = anew[ended]
            if not unfinished.any():
                break
            fewer = _Runs.of(at.size[unfinished])
            label = label[unfinished] + (fewer.first - at.first[unfinished])[:, None]
            at, alive, upper = fewer, alive[unfinished], upper[unfinished]
            left = _true(~ended)
            numbers, bound, centers, anew, sums = (
                values.index_select(0, left) for values in (numbers, bound, centers, anew, sums)
            )
        before = label.clone()
        if iteration == 0:  # centers were rows, and are means now: few bounds would spare a distance
            bound = _all_distances(x, anew, metric)
            _follow(label, upper, bound, at)
        else:
            numbered = torch.arange(len(centers))
            moved = pairs(centers, numbered, anew, numbered, metric)
            upper += moved[label]
            bound -= moved[:, None]
        centers = anew
        _reassign(x, label, upper, bound, centers, at, slack, metric, mine)
        count = _refill(x, label, upper, centers, at, metric)
        changed = label != before
        _resum(x, label, before, changed, sums)
    return out - begun.first[:, None], _costs(x, out, last, kind)


@dataclass(frozen=True)
class _Runs:
    """The clusters of starts, numbered through: how many each start has, its first, and whose each cluster is."""

    size: Tensor
    first: Tensor
    owner: Tensor

    @classmethod
    def of(cls, size: Tensor) -> _Runs:
        return cls(size, size.cumsum(0) - size, torch.arange(len(size)).repeat_interleave(size))


def _sums(x: Tensor, label: Tensor, at: _Runs) -> Tensor:
    """Return the sum of each cluster's rows (clusters, d) float64."""
    out = torch.zeros(len(at.owner), x.shape[1], dtype=torch.float64)
    numbers = torch.arange(len(out))[:, None]
    for rows in blocks(len(x), len(out), CELLS):
        out += (label[at.owner, rows] == numbers).double() @ x[rows].double()
    return out


def _resum(x: Tensor, label: Tensor, before: Tensor, changed: Tensor, sums: Tensor) -> None:
    """Add rows that came to the sums and subtract rows that left, in place."""
    places = _true(changed)
    for block in blocks(len(places), x.shape[1], CELLS):
        place = places[block]
        rows = x.index_select(0, place % len(x)).double()
        for labels, sign in ((label, 1), (before, -1)):
            sums.index_add_(0, labels.view(-1).index_select(0, place), rows, alpha=sign)


def _centered(
    x: Tensor, label: Tensor, sums: Tensor, count: Tensor, centers: Tensor, at: _Runs, kind: Distance, center: Center
) -> Tensor:
    """Return the new centers (clusters, d); those of empty clusters stay."""
    if center == "mean":
        means = (sums / count.clamp(min=1)[:, None]).to(x.dtype)
    else:
        means = centers.clone()
        for cluster in count.nonzero()[:, 0].tolist():
            means[cluster] = median(x[label[at.owner[cluster]] == cluster])
    means = renormalize(means, kind, center, centers)
    return torch.where(count[:, None] > 0, means, centers)


def _all_distances(x: Tensor, centers: Tensor, metric: Distance) -> Tensor:
    """Return the metric from each center to all rows (clusters, rows), to rounding; equal centers are taken once."""
    whole = np.dtype((np.void, centers.shape[1] * centers.element_size()))
    as_bytes = np.ascontiguousarray(centers.numpy()).view(whole)[:, 0]
    _, one, number = np.unique(as_bytes, return_index=True, return_inverse=True)
    return between(centers[torch.from_numpy(one)], x, metric)[torch.from_numpy(number)]


def _follow(label: Tensor, upper: Tensor, bound: Tensor, at: _Runs) -> None:
    """Move each row to a center of the least bound, in place."""
    n = bound.shape[1]
    np.minimum.reduceat(bound.numpy(), at.first.numpy(), 0, out=upper.numpy())
    place = np.flatnonzero(bound.numpy() == upper.numpy()[at.owner.numpy()])
    cluster = place // n
    label.view(-1).numpy()[at.owner.numpy()[cluster] * n + place % n] = cluster


def _reassign(
    x: Tensor,
    label: Tensor,
    upper: Tensor,
    bound: Tensor,
    centers: Tensor,
    at: _Runs,
    slack: float,
    metric: Distance,
    mine: Halves | None,
) -> None:
    """Move each row to the nearest center, in place.

    `upper` bounds the distance to the row's center from above, and `bound` the distance to each center from below. If
    no other center's bound is below `upper` the row stays. Otherwise both distances are computed. `slack` covers
    rounding.
    """
    n = bound.shape[1]
    its_own, its_bound, its_label = upper.view(-1), bound.view(-1), label.view(-1)
    halves = None if mine is None else (mine, Halves.of(centers))
    doubt = bound <= (upper + slack)[at.owner]
    doubt.view(-1)[label * n + torch.arange(n)] = False
    place = _true(doubt)  # of (cluster, row)
    cell = _cells(place, at, n)  # of (start, row)
    near = _distinct(cell, len(its_own))
    row, its = near % n, its_label.index_select(0, near)
    exact = pairs(x, row, centers, its, metric, halves)
    its_own.index_copy_(0, near, exact)
    its_bound.index_copy_(0, its * n + row, exact)
    still = _true(its_bound.index_select(0, place) <= its_own.index_select(0, cell) + slack)
    place, cell = place.index_select(0, still), cell.index_select(0, still)
    cluster = place // n
    exact = pairs(x, place % n, centers, cluster, metric, halves)
    its_bound.index_copy_(0, place, exact)
    # The least of them and the row's own; of several the first.
    least = its_own.scatter_reduce(0, cell, exact, "amin")
    its_label[least < its_own] = len(centers)
    here = _true(exact == least.index_select(0, cell))
    its_label.scatter_reduce_(0, cell.index_select(0, here), cluster.index_select(0, here), "amin")
    its_own.copy_(least)


def _true(mask: Tensor) -> Tensor:
    """Return the positions of true entries in the flattened mask."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _cells(place: Tensor, at: _Runs, n: int) -> Tensor:
    """Map positions in (cluster, row) to positions in (start, row); numpy divides by a scalar much faster."""
    its = place.numpy()
    cluster = its // n
    return torch.from_numpy(its + (at.owner.numpy() - np.arange(len(at.owner)))[cluster] * n)


def _distinct(places: Tensor, size: int) -> Tensor:
    """Return the distinct positions, ascending."""
    return _true(torch.zeros(size, dtype=torch.bool).index_fill_(0, places, True))


def _refill(x: Tensor, label: Tensor, upper: Tensor, centers: Tensor, at: _Runs, metric: Distance) -> Tensor:
    """Give each empty cluster a row, in place; return the resulting cluster sizes (clusters,)."""
    count = torch.from_numpy(np.bincount(label.view(-1).numpy(), minlength=len(centers)))
    everyone = torch.arange(len(x))
    for cluster in (count == 0).nonzero()[:, 0].tolist():
        start = at.owner[cluster]
        far = pairs(x, everyone, centers, label[start], metric)
        far[count[label[start]] < 2] = -1
        row = far.argmax(keepdim=True)
        count[label[start, row]] -= 1
        count[cluster] = 1
        label[start, row] = cluster
        upper[start, row] = pairs(x, row, centers, torch.tensor([cluster]), metric)
    return count


def _costs(x: Tensor, label: Tensor, centers: Tensor, kind: Distance) -> Tensor:
    """Return the sum of distances to the centers for each start (starts,) float64; clusters are numbered through."""
    everyone = torch.arange(len(x)).repeat(len(label))
    metric = pairs(x, everyone, centers, label.flatten(), _metric(kind))
    return _cost(metric.reshape(len(label), -1), kind).sum(1, dtype=torch.float64)


# -- quality of a clustering ------------------------------------------------------------------------------------------


def silhouettes(x: Tensor, labels: Tensor, kind: Distance) -> Tensor:
    """Return the silhouette of each row under each labeling (labelings, rows) float64, from one pass over all pairs.

    Rousseeuw 1987: `(b - a) / max(a, b)`, with `a` the mean distance to the other members of the row's cluster, and `b`
    that to the nearest other cluster. It is 0 for a single row or a single cluster.

    Args:
        x: (rows, d).
        labels: (labelings, rows) int64; unused numbers are no clusters.
        kind: the distance.

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
        kind: the distance.

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
    return _finished(x, far.min(1).indices, {}, kind, "mean", x[picked])
