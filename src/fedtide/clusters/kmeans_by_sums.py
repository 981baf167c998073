"""k-means over clients of whose vectors the server sees sums alone.

k-means of many small cells is nearly k-means of the clients in them. Clients find their cell themselves, and the server
asks for the number of its members and the sum of their vectors. All of it is our own:

| symbol | meaning |
| --- | --- |
| `r_i` | vector of client i, which it keeps to itself |
| `c_k`, `n_k` | mean and number of the members of a cell or cluster |
| `m` | `fewest` clients whose sum may be asked for |

    cells     from all clients, each cell becomes two, of those nearer to c_k - s e and to c_k + s e, along the number e
              that varies most among its members, by its standard deviation s (Linde, Buzo, Gray 1980), until there are
              4 k_max cells, or none can be divided
    sizes     n_k first: a cell stays whole if one of its parts would have less than m members
    sums      then sum of r_i and of r_i^2 over the members of each new cell
    each K    k-means of the cells' means, which the server does alone
    judge     a_i = distance to the mean of the other members, b_i = distance to the nearest other center;
              K of the largest mean of (b_i - a_i) / max(a_i, b_i)

The silhouette of distances to centers (Hruschka, de Castro, Campello 2004) chooses nearly as that of all pairs does,
and is about a quarter larger. A client leaves itself out of its cluster's mean, (n c - r) / (n - 1), else many small
clusters would look tight. Cells have `m` clients or more: where clients are few, so are clusters.

Cells are parts of cells, so all sums of a clustering are sums of whole cells: no arithmetic with them tells of fewer
than `m` clients. Lloyd's steps would: a cluster before and after a step may differ by one client. Nothing here hides
the difference of sums of two clusterings, or a client that vanishes between two questions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.clusters.clusterer import TIE, KMeans
from fedtide.clusters.distance import Distance, Joint, between, unit
from fedtide.clusters.lloyd import kmeans_for_each
from fedtide.core.base import Answer, Fleet, Memory, Moment, Shard, Slotted, Sum, Weighted, Work
from fedtide.core.errors import refused
from fedtide.core.rng import Rng

CELLS = 4
"""How many cells there may be for each of the largest number of clusters."""
TINY = 1e-12
"""Variance below which all members of a cell are taken for equal."""


@dataclass(frozen=True)
class Groups:
    """Sums over the members of clusters, divided by their numbers.

    centers: (K, d) the means; sizes: (K,) float64 the numbers of members; variance: (K, d) of their vectors, about the
    mean.
    """

    centers: Tensor
    sizes: Tensor
    variance: Tensor


@dataclass(frozen=True)
class FoundBySums:
    """A clustering found by sums.

    groups: the clusters; distance: the distance used; silhouette: that of each K that was tried; spread: mean distance
    of clients from the other members' mean; spread_now: the same for the clusters before, by their nearest centers.
    """

    groups: Groups
    distance: Distance
    spread: float
    spread_now: float
    silhouette: dict[int, float] = field(default_factory=dict)


def nearest(vector: Tensor, centers: Tensor, distance: Distance, allowed: Tensor | None = None) -> int:
    """Return the nearest of the centers (K, d), or of those allowed (K,); ties: the first.

    >>> nearest(torch.tensor([3.0]), torch.tensor([[2.0], [9.0]]), "l1", torch.tensor([False, True]))
    1
    """
    if len(centers) == 1:
        return 0
    far = between(vector[None], centers.to(vector.dtype), distance)[0]
    return int((far if allowed is None else far.where(allowed, torch.inf)).argmin())


def summed(
    vector: Tensor, k: int, count: int, distance: Distance, weight: float = 1.0, *, squared: bool = False
) -> Slotted:
    """Return the terms of a client for the sums of `count` clusters: its vector, and maybe the square of it, in slot k.

    Masked sums of fewer than `fewest` clients are not opened (`fedtide.wire.pipeline`). Under the cosine distance the
    vector is made one long.
    """
    row = unit(vector[None])[0] if distance == "cosine" else vector
    return Slotted({k: Weighted([row, row.square()] if squared else [row], weight)}, count)


@dataclass(frozen=True)
class Cells:
    """A tree of cells: those of its leaves hold all clients.

    points: (nodes, d); of a cell's two parts a client is in that of the nearer point. parts: (nodes,) number of the
    first of its two parts, 0 for a leaf. new: the first cell that was not summed yet.
    """

    points: Tensor
    parts: Tensor
    distance: Distance
    new: int = 0

    @property
    def leaves(self) -> Tensor:
        """The numbers of the cells that have no parts."""
        return (self.parts == 0).nonzero()[:, 0]

    def leaf_of(self, vector: Tensor) -> int:
        """Return the cell of a client.

        >>> points = torch.tensor([[0.0], [-1.0], [1.0]], dtype=torch.float64)
        >>> Cells(points, torch.tensor([1, 0, 0]), "l1").leaf_of(torch.tensor([3.0]))
        2
        """
        node = 0
        while (part := int(self.parts[node])) > node:
            node = part + nearest(vector, self.points[part : part + 2], self.distance)
        return node

    def divided(self, cells: Tensor, points: Tensor) -> "Cells":
        """Return the tree whose `cells` (n,) have two parts, each of a point (n, 2, d)."""
        parts, start = self.parts.clone(), len(self.parts)
        parts[cells] = start + 2 * torch.arange(len(cells))
        before = self.points if start > 1 else points.new_zeros(1, points.shape[-1])
        points = torch.cat([before, points.flatten(0, 1)])
        return replace(self, points=points, parts=torch.cat([parts, parts.new_zeros(2 * len(cells))]), new=start)


@dataclass(frozen=True)
class Sets:
    """Sets of centers about which clients are asked, and the number of members of each center."""

    centers: Sequence[Tensor]
    distance: Distance
    sizes: Sequence[Tensor]


def group_questions(k_max: int) -> dict[str, Work]:
    """Build the questions "sizes" and "sums" about cells, and "judge" about sets of centers.

    The client's memory has "reported"; a client without a report abstains. It refuses more cells than a clustering
    needs, because each client could be the only one in its cell.
    """
    most = 4 * CELLS * k_max  # a level may double their number, and a tree has as many nodes above its leaves

    def check(payload: Cells) -> None:
        if len(payload.parts) > most:
            raise refused("cells", len(payload.parts), f"at most {most}, for {k_max} clusters")

    def sizes(payload: Cells, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        check(payload)
        if memory is None:
            return None
        cell = torch.tensor(payload.leaf_of(memory["reported"]))
        return Answer({"sizes": Weighted(F.one_hot(cell, len(payload.parts)).double())})

    def sums(payload: Cells, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        check(payload)
        if memory is None:
            return None
        vector = memory["reported"]
        cell = payload.leaf_of(vector)
        weight = float(cell >= payload.new)  # what was summed is not summed again, maybe without who vanished
        return Answer({"cells": summed(vector, cell, len(payload.parts), payload.distance, weight, squared=True)})

    def judge(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if memory is None:
            return None
        sets = zip(payload.centers, payload.sizes, strict=True)
        scores = [judged(memory["reported"], centers, sizes, payload.distance) for centers, sizes in sets]
        return Answer({"judged": Weighted(scores)})

    return {"sizes": sizes, "sums": sums, "judge": judge}


def judged(vector: Tensor, centers: Tensor, sizes: Tensor, distance: Distance) -> Tensor:
    """Return how far a client is from the other members' mean, and its silhouette (2,); zeros if it is alone.

    >>> centers, sizes = torch.tensor([[1.0], [5.0]], dtype=torch.float64), torch.tensor([2.0, 4.0])
    >>> judged(torch.tensor([0.0], dtype=torch.float64), centers, sizes, "l1").tolist()
    [2.0, 0.6]
    """
    k = nearest(vector, centers, distance)
    count, row = float(sizes[k]), unit(vector[None])[0] if distance == "cosine" else vector
    if count < 2:
        return torch.zeros(2, dtype=torch.float64)
    others = (count * centers[k] - row) / (count - 1)
    others = others.where(others.abs() > TINY, 0.0)  # by rounding a share may be below zero
    spread = float(between(vector[None], others[None], distance))
    far = between(vector[None], centers.to(vector.dtype), distance)[0]
    far[k] = torch.inf
    other = float(far.min())
    larger = max(spread, other)
    score = (other - spread) / larger if len(centers) > 1 and larger > 0 else 0.0
    return torch.tensor([spread, score], dtype=torch.float64)


def divide_sums(sums: Sequence[Sum | None], before: Tensor) -> Groups:
    """Divide sums of `summed` by their numbers; a cluster without a sum keeps its center of `before` (K, ...).

    Without squares the variance has no meaning.
    """
    sums = [one if one is not None and one.weight else None for one in sums]
    sizes = torch.tensor([0.0 if one is None else one.weight for one in sums], dtype=torch.float64)
    like = next((one.value[0] for one in sums if one is not None), before[0])
    before = before if before.shape[1:] == like.shape else torch.zeros(len(sums), len(like), dtype=like.dtype)
    means = [before[k] if one is None else one.value[0] / one.weight for k, one in enumerate(sums)]
    squares = [means[k].square() if one is None else one.value[-1] / one.weight for k, one in enumerate(sums)]
    centers = torch.stack(means)
    return Groups(centers, sizes, (torch.stack(squares) - centers.square()).clamp(min=0))


def sum_cells(
    fleet: Fleet, clients: Tensor, distance: Distance, fewest: int, most: int
) -> tuple[Groups, Groups, Distance] | None:
    """Divide all clients into cells, by sums.

    Args:
        fleet: the clients, which keep "reported".
        clients: those to ask.
        distance: the distance; the scales of a joint one are set anew.
        fewest: m.
        most: how many cells there may be.

    Returns:
        All clients as one cluster, the cells, and the distance; None if fewer than m clients answer.
    """
    tree = Cells(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), distance)
    reply = fleet.ask("sizes", clients, tree)
    if reply.total is None or reply.total["sizes"].weight < fewest:
        return None
    reply = fleet.ask("sums", clients, tree)
    if reply.total is None or reply.total["cells"][0] is None:
        return None
    whole = cells = divide_sums(reply.total["cells"], tree.points)
    distance = scaled_by_sums(distance, whole)
    tree, undivided = replace(tree, distance=distance), torch.zeros(0, dtype=torch.int64)
    while len(tree.leaves) < most:
        may, points = split(cells, fewest)
        may &= (tree.parts == 0) & ~torch.isin(torch.arange(len(may)), undivided)
        if not may.any():
            break
        tried = may.nonzero()[:, 0]
        reply = fleet.ask("sizes", clients, tree.divided(tried, points[tried]))
        if reply.total is None:
            break
        sizes = reply.total["sizes"].value[len(tree.parts) :].view(-1, 2)
        enough = (sizes >= fewest).all(1) & (sizes.sum(1) == cells.sizes[tried])  # else somebody vanished
        undivided = torch.cat([undivided, tried[~enough]])
        if not enough.any():
            continue
        divided = tree.divided(tried[enough], points[tried[enough]])
        reply = fleet.ask("sums", clients, divided)
        new = None if reply.total is None else divide_sums(reply.total["cells"][divided.new :], divided.points)
        if new is None or not (new.sizes >= fewest).all():
            break
        tree = divided
        cells = Groups(*(torch.cat([old, more]) for old, more in zip(_columns(cells), _columns(new), strict=True)))
    leaves = tree.leaves
    return whole, Groups(*(column[leaves] for column in _columns(cells))), distance


def _columns(groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    return groups.centers, groups.sizes, groups.variance


def cluster_by_sums(
    fleet: Fleet,
    clients: Tensor,
    clustering: KMeans,
    distance: Distance,
    fewest: int,
    rng: Rng,
    now: Groups | None = None,
) -> FoundBySums | None:
    """Cluster clients by sums; None if there are fewer than `fewest`.

    Args:
        fleet: the clients, which keep "reported".
        clients: those to ask.
        clustering: the range of K, starts, and the smallest silhouette.
        distance: the distance; the scales of a joint one are set anew.
        fewest: m.
        now: the clusters so far, whose spread is compared.
    """
    most = CELLS * clustering.k_max if clustering.k_max > 1 else 1
    summed_cells = sum_cells(fleet, clients, distance, fewest, most)
    if summed_cells is None:
        return None
    whole, cells, distance = summed_cells
    sets = [whole, *_cluster_cells(cells, clustering, distance, rng)]
    sets = [now or whole, *sets]
    asked = Sets([one.centers for one in sets], distance, [one.sizes for one in sets])
    reply = fleet.ask("judge", clients, asked)
    if reply.total is None:
        return None
    leaf = reply.total["judged"]
    spreads, scores = (torch.stack(leaf.value) / leaf.weight).T.tolist()
    best, silhouette = 1, dict[int, float]()
    for i in range(2, len(sets)):
        k = len(sets[i].centers)
        if k > 1:
            silhouette[k] = max(scores[i], silhouette.get(k, -1.0))
            if scores[i] >= clustering.min_silhouette and (best == 1 or scores[i] > scores[best] + TIE):
                best = i
    return FoundBySums(sets[best], distance, spreads[best], spreads[0], silhouette)


def split(cells: Groups, fewest: int) -> tuple[Tensor, Tensor]:
    """Return the mask (K,) of cells that may be divided, those of 2 m members or more, and their points (K, 2, d).

    >>> cells = Groups(torch.tensor([[1.0, 5.0]]), torch.tensor([6.0]), torch.tensor([[4.0, 1.0]]))
    >>> may, points = split(cells, 3)
    >>> may.tolist(), points.tolist()
    ([True], [[[-1.0, 5.0], [3.0, 5.0]]])
    """
    widest = cells.variance.max(1).values
    # The first of those that vary equally but for rounding, as shares of two classes do.
    along = (cells.variance >= (1 - TIE) * widest[:, None]).int().argmax(1)
    way = F.one_hot(along, cells.centers.shape[1]) * widest.sqrt()[:, None]
    may = (cells.sizes >= 2 * fewest) & (widest > TINY)
    return may, torch.stack([cells.centers - way, cells.centers + way], 1)


def _cluster_cells(cells: Groups, clustering: KMeans, distance: Distance, rng: Rng) -> list[Groups]:
    """Return the clusters for each K: those of k-means of the cells, each mean by the number of its members."""
    most = min(clustering.k_max, len(cells.centers))
    if most < 2:
        return []
    rows = unit(cells.centers) if distance == "cosine" else cells.centers
    ks = range(min(clustering.k_min, most), most + 1)
    labels = kmeans_for_each(rows, ks, distance, rng.at("starts"), n_init=clustering.n_init)
    return [_joined(cells, label) for label in labels]


def _joined(cells: Groups, label: Tensor) -> Groups:
    """Return the clusters of all clients in the cells of each label, in the order of their first cells."""
    numbers = {k: number for number, k in enumerate(dict.fromkeys(label.tolist()))}
    share = F.one_hot(torch.tensor([numbers[k] for k in label.tolist()])).to(cells.centers.dtype) * cells.sizes[:, None]
    centers = share.T @ cells.centers / share.sum(0)[:, None]
    return Groups(centers, share.sum(0), torch.zeros_like(centers))


def scaled_by_sums(distance: Distance, whole: Groups) -> Distance:
    """Set the scales of a joint distance to about the mean of each part between two clients; others unchanged.

    From mean and variance of each number: exact for squared distances, for the others as of normal numbers (the
    divergence by its second-order term).

    >>> whole = Groups(torch.zeros(1, 2), torch.tensor([2.0]), torch.tensor([[1.0, 9.0]]))
    >>> scaled_by_sums(Joint(("sq-l2", "sq-l2"), (1, 1), (1.0, 1.0)), whole).scales
    (4.0, 36.0)
    """
    if not isinstance(distance, Joint):
        return distance
    size, scales = float(whole.sizes[0]), []
    for columns, kind in zip(distance.columns, distance.kinds, strict=True):
        pairs = 2 * whole.variance[0, columns] * size / max(size - 1, 1)  # mean (x - y)^2
        middle = whole.centers[0, columns].clamp(min=TINY)
        scale = {
            "sq-l2": pairs.sum(), "l2": pairs.sum().sqrt(), "l1": (pairs * 2 / torch.pi).sqrt().sum(),
            "js": (pairs / middle).sum().div(8).sqrt(),
        }[kind]  # fmt: skip
        scales.append(float(scale) if scale > TINY else 1.0)
    return replace(distance, scales=tuple(scales))
