"""k-means over clients of whose vectors the server sees sums alone.

Lloyd's algorithm needs the sum and the number of a cluster's members. Both are sums over clients, who find their
nearest center themselves. So a server that asks for sums over its clusters runs the same iterations as one that
holds all vectors. How it begins, how it chooses K and what it asks first is our own:

| symbol | meaning |
| --- | --- |
| `r_i` | vector of client i, which it keeps to itself |
| `c_k`, `n_k` | mean and number of the members of cluster k |
| `m` | `fewest` clients whose sum may be asked for |

    sizes     n_k first: a center with n_k < m is dropped, and its members go to their next nearest
    overlaps  how many clients the new clusters have in common with each cluster that was summed before: if two differ
              by some clients, but fewer than m, their difference would be these, and the set is not summed
    sums      then the sum of r_i over the members of each cluster, and of r_i^2 before a cluster is split
    begin     from the mean of all, each center becomes two, c_k +- s e, along the number e that varies most among its
              members, by its standard deviation s (Linde, Buzo, Gray 1980), until there are twice as many as k_max
    each K    k-means of these cells' means, which the server does alone, then Lloyd steps by sums
    judge     a_i = distance to the mean of the other members, b_i = distance to the nearest other center;
              K of the largest mean of (b_i - a_i) / max(a_i, b_i)

The silhouette of distances to centers (Hruschka, de Castro, Campello 2004) chooses nearly as that of all pairs does,
and is about a quarter larger. A client leaves itself out of its cluster's mean, (n c - r) / (n - 1), else many small
clusters would look tight. Cells have `m` clients or more: where clients are few, so are clusters.

Not hidden: three sums or more may tell of one client together, and two of different rounds may differ by one. Only
noise hides that. Clients may also vanish between two questions.
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

STEPS = 10
"""Largest number of Lloyd steps: each costs two questions, and from such a beginning most end after four."""
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


def summed(vector: Tensor, k: int, count: int, distance: Distance, *, squared: bool = False) -> Slotted:
    """Return the terms of a client for the sums of `count` clusters: its vector in slot k, and the square of it.

    Masked sums of fewer than `fewest` clients are not opened (`fedtide.wire.pipeline`). Under the cosine distance the
    vector is made one long.
    """
    row = unit(vector[None])[0] if distance == "cosine" else vector
    return Slotted({k: Weighted([row, row.square()] if squared else [row])}, count)


@dataclass(frozen=True)
class Sets:
    """Sets of centers about which clients are asked, and the number of members of each center.

    squared: whether the server asks for the squares too, from which it splits clusters. before: sets that were summed.
    """

    centers: Sequence[Tensor]
    distance: Distance
    sizes: Sequence[Tensor] = field(default_factory=list)
    squared: bool = False
    before: Sequence[Tensor] = field(default_factory=list)


def group_questions(k_max: int) -> dict[str, Work]:
    """Build the questions "sizes", "overlaps", "sums" and "judge" about sets of centers.

    The client's memory has "reported"; a client without a report abstains. A client does not answer if a set has more
    than 4 `k_max` centers, because no clustering needs as many, and with enough of them each client would be the only
    one near its center.
    """

    def check(payload: Any) -> None:
        if (most := max(map(len, [*payload.centers, *payload.before]), default=0)) > 4 * k_max:
            raise refused("centers", most, f"at most {4 * k_max}, four times k_max")

    def sizes(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        check(payload)
        if memory is None:
            return None
        vector, distance = memory["reported"], payload.distance
        places = [torch.tensor(nearest(vector, centers, distance)) for centers in payload.centers]
        sizes = [len(centers) for centers in payload.centers]
        return Answer({"sizes": Weighted([F.one_hot(k, n).double() for k, n in zip(places, sizes, strict=True)])})

    def overlaps(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        check(payload)
        if memory is None:
            return None
        sets = [*payload.before, *payload.centers]
        places = [nearest(memory["reported"], centers, payload.distance) for centers in sets]
        tables = [
            F.one_hot(torch.tensor(places[i] * len(sets[j]) + places[j]), len(sets[i]) * len(sets[j])).double()
            for j in range(len(payload.before), len(sets)) for i in range(j)
        ]  # fmt: skip
        return Answer({"overlaps": Weighted(tables)})

    def sums(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        check(payload)
        if memory is None:
            return None
        vector, distance = memory["reported"], payload.distance
        return Answer({"groups": [
            summed(vector, nearest(vector, centers, distance), len(centers), distance, squared=payload.squared)
            for centers in payload.centers
        ]})  # fmt: skip

    def judge(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if memory is None:
            return None
        sets = zip(payload.centers, payload.sizes, strict=True)
        scores = [judged(memory["reported"], centers, sizes, payload.distance) for centers, sizes in sets]
        return Answer({"judged": Weighted(scores)})

    return {"sizes": sizes, "overlaps": overlaps, "sums": sums, "judge": judge}


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


def group(
    fleet: Fleet,
    clients: Tensor,
    sets: Sequence[Tensor],
    distance: Distance,
    fewest: int,
    before: list[Tensor],
    *,
    squared: bool = False,
) -> list[Groups | None]:
    """Ask for the sums of clusters around several sets of centers: of sizes first, of vectors where there are `fewest`.

    Args:
        fleet: the clients.
        clients: those to ask.
        sets: each (K, d).
        distance: the distance.
        fewest: m; a center with fewer members is dropped, unless there is no other.
        before: sets that were summed; those that are summed now are added.
        squared: whether the variances are needed.

    Returns:
        The clusters of each set; None for a set that cannot be summed.
    """
    none: list[Groups | None] = [None] * len(sets)
    reply = fleet.ask("sizes", clients, Sets(sets, distance))
    if reply.total is None or reply.total["sizes"].weight < fewest:
        return none
    enough = [size >= fewest for size in reply.total["sizes"].value]
    left = [one[mask] if mask.any() else one[:1] for one, mask in zip(sets, enough, strict=True)]
    may = [True] * len(left)
    if before or len(left) > 1:
        reply = fleet.ask("overlaps", clients, Sets(left, distance, before=before))
        if reply.total is None:
            return none
        may = _distinct(reply.total["overlaps"].value, before, left, fewest)
    asked = [one for one, allowed in zip(left, may, strict=True) if allowed]
    if not asked:
        return none
    reply = fleet.ask("sums", clients, Sets(asked, distance, squared=squared))
    if reply.total is None:
        return none
    before += asked
    groups = (_divided(one, sums, squared=squared) for one, sums in zip(asked, reply.total["groups"], strict=True))
    return [next(groups) if allowed else None for allowed in may]


def _distinct(tables: Sequence[Tensor], before: Sequence[Tensor], sets: Sequence[Tensor], fewest: int) -> list[bool]:
    """Tell which sets have clusters that are equal to others, or differ from them by `fewest` clients or more."""
    overlaps, whole = iter(tables), [*before, *sets]
    summed_sets = [True] * len(before)
    for j, one in enumerate(sets, start=len(before)):
        differ = list[Tensor]()
        for i in range(j):
            both = next(overlaps).view(len(whole[i]), len(one))
            if summed_sets[i]:
                differ.append((both.sum(1, keepdim=True) + both.sum(0) - 2 * both).flatten())
        clients = torch.cat(differ) if differ else torch.zeros(0)
        summed_sets.append(bool(((clients == 0) | (clients >= fewest)).all()))
    return summed_sets[len(before) :]


def sums_of(sums: Sequence[Sum | None], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the numbers of clients (K,) and the sums of each of their values (K, d); zeros in slots without a sum.

    Args:
        sums: of `summed`, by slot.
        like: (K, ...) centers, in whose place all sums are zero if there is none.
    """
    sizes = torch.tensor([0.0 if one is None else one.weight for one in sums], dtype=torch.float64)
    some = next((one.value for one in sums if one is not None), [torch.zeros_like(like[0])])
    values = ([torch.zeros_like(part) if one is None else one.value[k] for one in sums] for k, part in enumerate(some))
    return sizes, [torch.stack(rows) for rows in values]


def _divided(before: Tensor, sums: Sequence[Sum | None], *, squared: bool) -> Groups:
    """Divide sums by sizes; a cluster whose members have all vanished, or are too few now, keeps its center."""
    size, values = sums_of(sums, before)
    count = size.clamp(min=1)[:, None]
    centers = torch.where(size[:, None] > 0, values[0] / count, before)
    variance = values[-1] / count - centers.square() if squared else torch.zeros_like(centers)
    return Groups(centers, size, variance.clamp(min=0))


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
        rng: the key of all draws.
        now: the clusters so far, whose spread is compared.
    """
    before: list[Tensor] = []
    (whole,) = group(fleet, clients, [torch.zeros(1, 1)], distance, fewest, before, squared=True)
    if whole is None:
        return None
    distance, cells = scaled_by_sums(distance, whole), whole
    while (
        clustering.k_max > 1
        and len(cells.centers) < 2 * clustering.k_max
        and (parts := split(cells, fewest)) is not None
    ):
        (new,) = group(fleet, clients, [parts], distance, fewest, before, squared=True)
        if new is None or len(new.centers) <= len(cells.centers):
            break
        cells = new
    sets = [whole, *_lloyd(fleet, clients, _begin(cells, clustering, distance, rng), distance, fewest, before)]
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


def split(cells: Groups, fewest: int) -> Tensor | None:
    """Return the centers of cells, those of 2 m members or more in two; None if none can be split.

    >>> cells = Groups(torch.tensor([[1.0, 5.0]]), torch.tensor([6.0]), torch.tensor([[4.0, 1.0]]))
    >>> split(cells, 3).tolist(), split(cells, 4)
    ([[-1.0, 5.0], [3.0, 5.0]], None)
    """
    widest = cells.variance.max(1).values
    may = (cells.sizes >= 2 * fewest) & (widest > TINY)
    if not may.any():
        return None
    # The first of those that vary equally but for rounding, as shares of two classes do.
    along = (cells.variance >= (1 - TIE) * widest[:, None]).int().argmax(1)
    step = F.one_hot(along, cells.centers.shape[1]) * widest.sqrt()[:, None]
    ways = zip(cells.centers, step, may, strict=True)
    return torch.cat([torch.stack([c - way, c + way]) if two else c[None] for c, way, two in ways])


def _begin(cells: Groups, clustering: KMeans, distance: Distance, rng: Rng) -> list[Groups]:
    """Return the first clusters for each K: those of k-means of the cells, each mean by the number of its members."""
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


def _lloyd(
    fleet: Fleet, clients: Tensor, begin: list[Groups], distance: Distance, fewest: int, before: list[Tensor]
) -> list[Groups]:
    """Run Lloyd steps of several sets of clusters at once, each until it does not move, or cannot be summed."""
    groups, moving = list(begin), list(range(len(begin)))
    for _ in range(STEPS):
        if not moving:
            break
        new = group(fleet, clients, [groups[i].centers for i in moving], distance, fewest, before)
        pairs = [(i, groups[i], one) for i, one in zip(moving, new, strict=True) if one is not None]
        moving = [i for i, old, one in pairs if not torch.equal(old.centers, one.centers)]
        for i, _, one in pairs:
            groups[i] = one
    return groups


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
