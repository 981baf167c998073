"""Distances between representations of clients, and centers of clusters of them.

Fielding measures label vectors by L1 (section 2.3), or by the Jensen-Shannon distance. Its Table 3 measures embeddings
by squared Euclidean distance. Cosine is for gradients. Input and result are float32 or float64. Several representations
side by side are compared by the sum of their distances (`Joint`). All computation is in blocks that fit a processor's
cache, so memory is that of the result.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Kind = Literal["l1", "l2", "sq-l2", "cosine", "js"]
"""Name of a distance; "js" is the square root of the Jensen-Shannon divergence, in nats, of label vectors."""


@dataclass(frozen=True)
class Joint:
    """A distance of several representations side by side: the sum of their distances, each divided by its scale.

    All allowed kinds have plain means as centers, so the parts of a center are the centers of the parts. The square
    root of the sum obeys the triangle inequality, as the roots of all parts do.

    kinds: distance of each part; widths: number of columns of each part; scales: divisor of each part's distance;
    root: use the square root of the sum.
    """

    kinds: tuple[Literal["l1", "l2", "sq-l2", "js"], ...]
    widths: tuple[int, ...]
    scales: tuple[float, ...]
    root: bool = False

    @property
    def columns(self) -> list[slice]:
        """Columns of each part.

        >>> Joint(("l1", "sq-l2"), (2, 3), (1.0, 1.0)).columns
        [slice(0, 2, None), slice(2, 5, None)]
        """
        ends = [sum(self.widths[: i + 1]) for i in range(len(self.widths))]
        return [slice(end - width, end) for end, width in zip(ends, self.widths, strict=True)]


Distance = Kind | Joint
"""A distance, by name or of several representations together."""

BLOCK = 1 << 16
"""Numbers in a block: few enough for a cache, and enough that the work outweighs the call."""
CELLS = 1 << 20
"""Distances computed at a time."""
LEAST = 1e-12
"""Smallest norm of a vector that has a direction."""
TINY = np.finfo(np.float64).tiny
"""Constant added to halves before a logarithm: it changes only zero, and is faster than a maximum."""


def between(x: Tensor, centers: Tensor, kind: Distance) -> Tensor:
    """Return the distance of each row of x from each of the centers (rows, K).

    Squared Euclidean and cosine distances are matrix products, exact up to the rounding of the inputs and not of their
    difference. The others are exact to the last bits, also for nearly equal rows. A row of zeros has cosine
    distance 1 from everything.

    Args:
        x: (rows, d) float32 or float64; non-negative for "js".
        centers: (K, d).

    >>> x = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> between(x, torch.tensor([[0.0, 1.0]]), "l1").tolist()
    [[2.0], [1.0]]
    >>> between(x.double(), x.double(), "js").square().div(np.log(2)).round(decimals=3).tolist()
    [[0.0, 0.311], [0.311, 0.0]]
    """
    centers = centers.to(x.dtype)
    if isinstance(kind, Joint):
        total = torch.zeros(len(x), len(centers), dtype=x.dtype)
        for columns, one, scale in zip(kind.columns, kind.kinds, kind.scales, strict=True):
            exact = kind.root and one == "sq-l2"  # a square root magnifies rounding errors
            far = between(x[:, columns], centers[:, columns], "l2" if exact else one)
            total += (far.square_() if exact else far) / scale
        return total.sqrt_() if kind.root else total
    if kind == "l1":
        return torch.cdist(x, centers, p=1)
    if kind == "l2":
        return torch.cdist(x, centers, p=2, compute_mode="donot_use_mm_for_euclid_dist")
    if kind == "js":
        return _divergent(x, centers)
    out = torch.empty(len(x), len(centers), dtype=x.dtype)
    if kind == "cosine":
        centers = unit(centers)
        for rows in blocks(len(x), x.shape[1]):
            torch.mm(unit(x[rows]), centers.T, out=out[rows])
        return out.neg_().add_(1).clamp_(0, 2)
    # Relative to the mean, coordinates are no larger than the distances, and little is lost to rounding.
    middle = centers.mean(0)
    centers = centers - middle
    square = centers.square().sum(1)
    for rows in blocks(len(x), x.shape[1]):
        near = x[rows] - middle
        torch.addmm(square, near, centers.T, alpha=-2, out=out[rows])
        out[rows] += near.square().sum(1, keepdim=True)
    return out.clamp_(min=0)


def pairs(
    x: Tensor, rows: Tensor, y: Tensor, others: Tensor, kind: Distance, halves: "tuple[Halves, Halves] | None" = None
) -> Tensor:
    """Return the distance of row `rows[p]` of x from row `others[p]` of y, for every p (pairs,).

    Args:
        x: (rows, d).
        rows: (pairs,) int64.
        y: (others, d).
        others: (pairs,) int64.
        halves: for "js", those of the rows of x and y if known.

    >>> x = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> pairs(x, torch.tensor([0, 1]), x, torch.tensor([1, 1]), "l1").tolist()
    [1.0, 0.0]
    """
    if isinstance(kind, Joint):
        total = torch.zeros(len(rows), dtype=x.dtype)
        for columns, one, scale in zip(kind.columns, kind.kinds, kind.scales, strict=True):
            total += pairs(x[:, columns], rows, y[:, columns], others, one) / scale
        return total.sqrt_() if kind.root else total
    y, i, j = y.to(x.dtype), rows.numpy(), others.numpy()
    out = np.empty(len(i), x.numpy().dtype)
    if kind == "js":
        mine, theirs = halves or (Halves.of(x), Halves.of(y))
        for block in blocks(len(i), x.shape[1]):
            mixed = mine.half.take(i[block], 0)
            mixed += theirs.half.take(j[block], 0)
            out[block] = _root(_entropy(mixed), mine.entropy[i[block]], theirs.entropy[j[block]])
    else:
        left, right = x.numpy(), y.numpy()
        for block in blocks(len(i), x.shape[1]):
            out[block] = _paired(left.take(i[block], 0), right.take(j[block], 0), kind)
    return torch.from_numpy(out)


def lengths(x: Tensor, y: Tensor, kind: Distance) -> Tensor:
    """Return the length of the way from each row of x to that of y (rows,): the distance, or of squares the root.

    The length of several representations is the sum of their lengths, each in its own unit.

    >>> x, y = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    >>> lengths(x, y, "sq-l2"), lengths(x, y, "l1"), lengths(x, y, Joint(("l1", "sq-l2"), (1, 1), (3.0, 4.0)))
    (tensor([5.]), tensor([7.]), tensor([3.]))
    """
    if isinstance(kind, Joint):
        parts = zip(kind.columns, kind.kinds, kind.scales, strict=True)
        part_lengths = [
            lengths(x[:, columns], y[:, columns], one) / (scale**0.5 if one == "sq-l2" else scale)
            for columns, one, scale in parts
        ]
        return torch.stack(part_lengths).sum(0)
    everyone = torch.arange(len(x))
    far = pairs(x, everyone, y, everyone, kind)
    return far.sqrt() if kind in ("sq-l2", "cosine") else far


def _paired(a: np.ndarray, b: np.ndarray, kind: Kind) -> np.ndarray:
    """Return distances of corresponding rows; `a` is overwritten. numpy is faster than torch here."""
    if kind == "cosine":
        lengths = np.sqrt(np.einsum("ij,ij->i", a, a) * np.einsum("ij,ij->i", b, b))
        return np.clip(1 - np.einsum("ij,ij->i", a, b) / np.maximum(lengths, LEAST), 0, 2)
    a -= b
    if kind == "l1":
        return np.einsum("ij->i", np.abs(a, out=a))
    square = np.einsum("ij,ij->i", a, a)
    return np.sqrt(square) if kind == "l2" else square


@dataclass(frozen=True)
class Halves:
    """Half of each row (rows, d) and its entropy in nats (rows,), for the Jensen-Shannon distance.

    Both are float64, since the difference of entropies is small for rows that are near each other. To halve is exact,
    so two halves have the sum that is the mean of their rows.

    >>> Halves.of(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).entropy.round(4).tolist()
    [0.0, 0.6931]
    """

    half: np.ndarray
    entropy: np.ndarray

    @classmethod
    def of(cls, x: Tensor) -> "Halves":
        """Halve rows."""
        half = x.numpy().astype(np.float64)
        half *= 0.5
        half += TINY
        out = np.empty(len(half))
        for rows in blocks(len(half), half.shape[1]):
            out[rows] = _entropy(2 * half[rows])
        return cls(half, out)


def _divergent(x: Tensor, centers: Tensor) -> Tensor:
    """Return Jensen-Shannon distances: the entropy of the mean minus the mean of the entropies, square root."""
    left, right = Halves.of(x), Halves.of(centers)
    out = np.empty((len(x), len(centers)), x.numpy().dtype)
    for rows in blocks(len(x), x.shape[1] * min(len(centers), 64)):
        for columns in blocks(len(centers), x.shape[1] * (rows.stop - rows.start)):
            mixed = left.half[rows, None] + right.half[columns]
            out[rows, columns] = _root(_entropy(mixed), left.entropy[rows, None], right.entropy[columns])
    return torch.from_numpy(out)


def _root(mixed: np.ndarray, mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(mixed - 0.5 * (mine + theirs), 0.0))


def _entropy(p: np.ndarray) -> np.ndarray:
    return -np.einsum("...j,...j->...", p, np.log(p))


def unit(x: Tensor) -> Tensor:
    """Scale rows to length one; a row of zeros stays.

    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    return x / x.norm(dim=1, keepdim=True).clamp_(min=LEAST)


def cosines(x: Tensor, y: Tensor | None = None) -> Tensor:
    """Return cosines (rows, rows of y) of all pairs of rows (y defaults to x), float64; 0 for rows of zeros.

    >>> cosines(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 0.0]])).round().abs().tolist()
    [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    left, right = (unit(z.double()) for z in (x, x if y is None else y))
    return (left @ right.T).clamp(-1.0, 1.0)


def sum_distances(x: Tensor, weights: Tensor, kind: Distance) -> Tensor:
    """Return for each row and each column of weights (rows, m) the weighted sum of distances to all rows, float64.

    Each pair is computed once.
    """
    out = torch.zeros(weights.shape, dtype=torch.float64)
    step = min(max(CELLS // len(x), 16), 128)
    for begin in range(0, len(x), step):
        end = min(begin + step, len(x))
        far = between(x[begin:end], x[begin:], kind)
        far[:, : end - begin].fill_diagonal_(0)
        out[begin:end] += far @ weights[begin:]
        out[end:] += far[:, end - begin :].T @ weights[begin:end]
    return out


def set_scales(kind: Distance, x: Tensor) -> Distance:
    """Set the scale of each part of a joint distance to its mean over pairs of the rows (n, d); other kinds unchanged.

    Every part then has equal influence, whatever its units. A part in which all rows are equal keeps the scale 1.

    >>> x = torch.tensor([[0.0, 0.0], [0.5, 6.0]])
    >>> set_scales(Joint(("l1", "sq-l2"), (1, 1), (1.0, 1.0)), x).scales
    (0.5, 36.0)
    """
    if not isinstance(kind, Joint):
        return kind
    ones, count = torch.ones(len(x), 1, dtype=x.dtype), max(len(x) * (len(x) - 1), 1)
    totals = [
        float(sum_distances(x[:, columns], ones, one).sum())
        for columns, one in zip(kind.columns, kind.kinds, strict=True)
    ]
    return replace(kind, scales=tuple(total / count if total > LEAST else 1.0 for total in totals))


def distances_within(x: Tensor, label: Tensor, kind: Distance) -> Tensor:
    """Return the mean distance of each row from the other members of its cluster (rows,) float64; 0 if it is alone.

    For L1, sums over pairs come from sorted columns in O(n log n) each; for other distances from all pairs.

    >>> distances_within(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1]), "l1").tolist()
    [1.0, 1.0, 0.0]
    """
    out = torch.zeros(len(x), dtype=torch.float64)
    for cluster in label.unique().tolist():
        member = (label == cluster).nonzero()[:, 0]
        if kind == "l1":
            total = _summed_l1(x[member].double())
        else:
            total = sum_distances(x[member], torch.ones(len(member), 1, dtype=x.dtype), kind)[:, 0]
        out[member] = total / max(len(member) - 1, 1)
    return out


def _summed_l1(x: Tensor) -> Tensor:
    """Return the sum of L1 distances of each row from all rows (rows,)."""
    value, order = x.sort(0)
    count, before = len(x), value.cumsum(0) - value  # the sum of all smaller values
    rank = torch.arange(count, dtype=x.dtype)[:, None]
    # In sorted order: r values are smaller, n - r - 1 are larger.
    total = value * rank - before + (value.sum(0) - before - value) - value * (count - rank - 1)
    return torch.zeros_like(x).scatter_(0, order, total).sum(1)


def heterogeneity(x: Tensor, label: Tensor, kind: Distance) -> float:
    """Return the mean over clients (not clusters) of the distance to the rest of the cluster; 0 without rows.

    >>> round(heterogeneity(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1]), "l1"), 4)
    0.6667
    """
    return float(distances_within(x, label, kind).mean()) if len(x) else 0.0


def is_wider(x: Tensor, label: Tensor, delta: float, kind: Distance = "l1") -> bool:
    """Tell whether two rows of one cluster are more than `delta` apart.

    >>> x, label = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1])
    >>> is_wider(x, label, 0.9), is_wider(x, label, 1.0)
    (True, False)
    """
    clusters = (x[label == cluster] for cluster in label.unique().tolist())
    return any(
        bool((between(members[rows], members[rows.start :], kind).fill_diagonal_(0) > delta).any())
        for members in clusters
        for rows in blocks(len(members), len(members), CELLS)
    )


def means(x: Tensor, label: Tensor, k: int, before: Tensor, kind: Distance = "l1") -> Tensor:
    """Return the center of each cluster (k, d), in the type of x, from sums in float64.

    An empty cluster keeps its center. So does one without a direction under the cosine distance, under which centers
    are normalized means of unit vectors.

    Args:
        x: (rows, d).
        label: (rows,) the cluster of each row.
        k: number of clusters.
        before: (k, d) the previous centers.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> means(x, torch.tensor([1, 1]), 2, x).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    out = before.to(x.dtype).clone()
    rows = (unit(x) if kind == "cosine" else x).double()
    sums = torch.zeros(k, x.shape[1], dtype=torch.float64).index_add_(0, label, rows)
    counts = torch.bincount(label, minlength=k)
    filled = counts > 0
    new = (sums[filled] / counts[filled, None]).to(x.dtype)
    out[filled] = renormalize(new, kind, out[filled])
    return out


def renormalize(centers: Tensor, kind: Distance, before: Tensor) -> Tensor:
    """Normalize centers for the distance; keep the old ones where that is impossible."""
    if kind == "cosine":
        return torch.where(centers.norm(dim=1, keepdim=True) > LEAST, unit(centers), before)
    return centers.clamp(min=0) if kind == "js" else centers  # rounding errors of sums after rows were subtracted


def blocks(rows: int, width: int, numbers: int = BLOCK) -> Iterator[slice]:
    """Return slices over rows of `width` numbers, each slice with at most about `numbers` of them."""
    size = max(numbers // max(width, 1), 1)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
