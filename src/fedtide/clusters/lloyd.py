"""k-means from many starts at once: Lloyd's algorithm, in which the triangle inequality spares distances."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedtide.clusters.distance import CELLS, Distance, Halves, Joint, between, blocks, pairs, renormalize
from fedtide.core.rng import Rng

ITERATIONS = 100
"""Largest number of Lloyd iterations: if the mean does not minimize the distance, the algorithm need not terminate."""


def kmeans_for_each(x: Tensor, ks: Sequence[int], kind: Distance, rng: Rng, *, n_init: int = 10) -> Tensor:
    """Return for each K the labels (Ks, rows) int64 of the lowest cost among `n_init` starts; no cluster is empty.

    Args:
        x: (rows, d); unit vectors for "cosine".
        ks: the numbers of clusters, ascending, each at most the number of rows.
        rng: the key of the starts.
        n_init: number of starts.
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
        label, cost = lloyd(x, x[seeds[[start for _, start in batch], :top]], kind, bound=bound)
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


def lloyd(x: Tensor, centers: Tensor, kind: Distance, *, bound: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run Lloyd's algorithm from many starts at once: labels (starts, rows) int64 and costs (starts,) float64.

    Each row goes to the nearest center. An empty cluster gets the row that is farthest from its center, among clusters
    of two or more. Ties: the first. Then centers are computed, until no row moves.

    Args:
        x: (rows, d); unit vectors for "cosine".
        centers: (starts, K, d).
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
        means = renormalize((sums / count.clamp(min=1)[:, None]).to(x.dtype), kind, centers)
        anew = torch.where(count[:, None] > 0, means, centers)
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
            bound = between(x, anew, metric).T.contiguous()
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
    def of(cls, size: Tensor) -> "_Runs":
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
