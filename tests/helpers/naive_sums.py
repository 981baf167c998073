"""Fielding by sums in plain loops: what `algorithms.fielding_by_sums` has to agree with, one client at a time.

What each client keeps to itself is a dict here, and what the server computes uses sums and numbers of clients alone.
Shared with the library are the clients' rows and the keys of what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from fedtide.core.rng import Rng
from helpers.naive_clusters import Row, distance, lloyd
from helpers.naive_drift import Kept, Play, Rows, asked_of, by_lowest_member, length, starts, trained

Cell = tuple[Row, int, Row]
"""Mean, number and variance of the members of a cluster."""


def nearest(row: Row, centers: list[Row], kind: str) -> int:
    return min(range(len(centers)), key=lambda k: distance(row, centers[k], kind))


def cells_of(said: list[Row], centers: list[Row], kind: str, fewest: int) -> list[Cell]:
    """Sums around centers, of those alone that enough clients are nearest to."""
    sizes = [0] * len(centers)
    for row in said:
        sizes[nearest(row, centers, kind)] += 1
    left = [center for center, size in zip(centers, sizes, strict=True) if size >= fewest] or centers[:1]
    out = []
    for k in range(len(left)):
        n, total, square = 0, np.zeros(len(said[0])), np.zeros(len(said[0]))
        for row in said:
            if nearest(row, left, kind) == k:
                one = np.array(row) / (math.hypot(*row) if kind == "cosine" else 1.0)
                n, total, square = n + 1, total + one, square + one**2
        out.append(((total / n).tolist(), n, (square / n - (total / n) ** 2).tolist()))
    return out


def halves(cells: list[Cell], fewest: int) -> list[Row]:
    """Each center that has the clients for it in two, by a standard deviation along what varies most."""
    out = []
    for center, n, variance in cells:
        j = next(j for j, v in enumerate(variance) if v >= (1 - 1e-6) * max(variance))
        if n < 2 * fewest or variance[j] <= 1e-12:
            out.append(center)
            continue
        way = math.sqrt(variance[j])
        out += [[c - way * (i == j) for i, c in enumerate(center)], [c + way * (i == j) for i, c in enumerate(center)]]
    return out


def told(row: Row, cells: list[Cell], kind: str) -> tuple[float, float]:
    """How far a client is from the others of its cluster, and its silhouette."""
    centers = [center for center, _, _ in cells]
    k = nearest(row, centers, kind)
    n = cells[k][1]
    if n < 2:
        return 0.0, 0.0
    one = [x / (math.hypot(*row) if kind == "cosine" else 1.0) for x in row]
    others = [(n * c - x) / (n - 1) for c, x in zip(centers[k], one, strict=True)]
    a = distance(row, [x if abs(x) > 1e-12 else 0.0 for x in others], kind)
    if len(cells) == 1:
        return a, 0.0
    b = min(distance(row, center, kind) for j, center in enumerate(centers) if j != k)
    return a, (b - a) / max(a, b) if max(a, b) else 0.0


def clustered(said: list[Row], kind: str, play: Play, fewest: int, key: Rng) -> list[Cell]:
    """The clusters of the largest silhouette."""
    cells = cells_of(said, [said[0]], kind, 1)
    whole = cells
    while len(cells) < 2 * play.k_max:
        parts = halves(cells, fewest)
        if len(parts) == len(cells):
            break
        made = cells_of(said, parts, kind, fewest)
        if len(made) <= len(cells):
            break
        cells = made
    middles = [center for center, _, _ in cells]
    if kind == "cosine":
        middles = [[x / math.hypot(*row) for x in row] for row in middles]
    most = min(play.k_max, len(cells))
    draws = key.at("starts").numpy().random((play.n_init, most)) if most > 1 else []
    best, found = -1.0 - 1e-6, whole
    for k in range(2, most + 1):
        tries = [lloyd(middles, [middles[seed] for seed in starts(middles, k, one, kind)], kind) for one in draws]
        label = by_lowest_member(min(tries, key=lambda tried: tried[1])[0])
        centers = []
        for j in range(k):
            n = sum(cell[1] for cell, its in zip(cells, label, strict=True) if its == j)
            total = sum(np.array(cell[0]) * cell[1] for cell, its in zip(cells, label, strict=True) if its == j)
            centers.append((total / n).tolist())
        for _ in range(10):
            made = cells_of(said, centers, kind, fewest)
            if [cell[0] for cell in made] == centers:
                break
            centers = [cell[0] for cell in made]
        score = sum(told(row, made, kind)[1] for row in said) / len(said)
        if score > best + 1e-6:
            best, found = score, made
    return found


def naive_by_sums(
    start: np.ndarray,
    clients: int,
    held: Callable[[int, int], Rows],
    represent: Callable[[Rows], Row],
    play: Play,
    fewest: int,
) -> Iterator[Kept]:
    """What the server knows after round 0, 1, 2 and so on; `cluster` is what clients would like."""
    kind, key = play.distance, Rng(0)
    said = [represent(held(i, -1)) for i in range(clients)]
    cells = clustered(said, kind, play, fewest, key.at(-1, "server", "cluster"))
    centers = [cell[0] for cell in cells]
    cluster = [nearest(row, centers, kind) for row in said]
    before = centers
    models, speeds = [start.copy() for _ in centers], [np.zeros_like(start) for _ in centers]
    t = 0
    while True:
        server = key.at(t, "server")
        now = Kept([], [], [])
        drifted = [i for i in range(clients) if represent(held(i, t)) != said[i]]
        went = list(cluster)
        for i in drifted:
            said[i] = represent(held(i, t))
            went[i] = nearest(said[i], centers, kind)
        sizes = [went.count(k) for k in range(len(centers))]
        use = counted(went, sizes, said, centers, kind, fewest)
        if drifted:
            after = []
            for k, center in enumerate(centers):
                rows = [np.array(row) for row, its in zip(said, use, strict=True) if its == k]
                if kind == "cosine":
                    rows = [row / np.sqrt((row**2).sum()) for row in rows]
                after.append((sum(rows) / len(rows)).tolist() if rows else center)
            since = centers if play.reference == "last-event" else before
            way = max(length(since[k], after[k], kind) for k in set(use))
            there = sorted(set(use))
            ways = [length(after[k], after[j], kind) for k in there for j in there if k < j]
            theta = float(np.mean(ways)) if ways else 0.0
            fired = play.tau == 0 or way >= play.tau * theta
            moved = sum(a != b for a, b in zip(cluster, went, strict=True))
            now = Kept([], [], [], len(drifted), moved, int(fired))
            centers = after
            # As centers have moved, who is in a closed cluster may be nearer to another one.
            sizes = [use.count(k) or sizes[k] for k in range(len(centers))]
            use = counted(went, sizes, said, centers, kind, fewest)
            if fired:
                cells = clustered(said, kind, play, fewest, server.at("cluster"))
                had, pace = [models[k] for k in use], [speeds[k] for k in use]
                centers = [cell[0] for cell in cells]
                before = centers
                went = use = [nearest(row, centers, kind) for row in said]
                members = [[i for i in range(clients) if went[i] == k] for k in range(len(centers))]
                models = [np.mean([had[i] for i in each], axis=0) for each in members]
                speeds = [np.mean([pace[i] for i in each], axis=0) for each in members]
        cluster = went
        asked = asked_of([0] * clients, 1, play.ask, server)
        made = {i: trained(models[use[i]], held(i, t), play, key.at(t, i, "train")) for i in asked}
        for k in sorted({use[i] for i in asked}):
            step = np.mean([made[i] - models[k] for i in asked if use[i] == k], axis=0)
            speeds[k] = play.momentum * speeds[k] + step
            models[k] = models[k] + play.server_rate * speeds[k]
        yield Kept(list(models), list(cluster), list(centers), now.drifted, now.moved, now.reclustered, asked)
        t += 1


def counted(
    went: list[int], sizes: list[int], said: list[Row], centers: list[Row], kind: str, fewest: int
) -> list[int]:
    """Where clients are counted: as they like, but for clusters with some members and too few of them."""
    full = [k for k, size in enumerate(sizes) if size >= fewest]
    return [
        k if k in full or not sizes[k] else min(full, key=lambda j: distance(said[i], centers[j], kind))
        for i, k in enumerate(went)
    ]
