"""Fielding in plain loops, after Algorithms 1 to 3 of its paper: what `algorithms.fielding` has to agree with.

Shared with the library are the clients' rows and the keys of what is drawn (weights to begin with, shuffles, who is
asked, where k-means starts), so that both draw the same. Everything else is written anew, one client at a time.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fedtide.core.rng import Rng
from helpers.naive_clusters import Row, distance, lloyd, mean, silhouette

Rows = tuple[np.ndarray, np.ndarray]
"""x and y of a client."""


@dataclass(frozen=True)
class Play:
    """How it is played: the options that the library has too, by its names."""

    distance: str
    rate: float = 0.3
    epochs: int = 1
    batch: int = 8
    mu: float = 0.0
    server_rate: float = 1.0
    momentum: float = 0.0
    tau: float = 1 / 3
    reference: str = "last-event"
    k_max: int = 8
    n_init: int = 3
    ask: int = 7


@dataclass
class Kept:
    """What the server knows after a round, and what happened in it."""

    models: list[np.ndarray]
    cluster: list[int]
    centers: list[Row]
    drifted: int = 0
    moved: int = 0
    reclustered: int = 0
    asked: list[int] = field(default_factory=list)


def gradient_of(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of a linear model without bias."""
    z = x @ w.T
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return p.T @ x / len(y)


def close_models(weights, models) -> None:
    """Compare linear models without bias, to 1e-8."""
    for made, wanted in zip(weights, models, strict=True):
        np.testing.assert_allclose(made.params["weight"].numpy(), wanted, rtol=0, atol=1e-8)


def label_shares(classes: int) -> Callable[[Rows], Row]:
    """r_i[c] = n_ic / n_i."""
    return lambda rows: [sum(int(label) == c for label in rows[1]) / len(rows[1]) for c in range(classes)]


def direction_at(frozen: np.ndarray) -> Callable[[Rows], Row]:
    """The gradient over all rows at a model that is never trained, made one long."""

    def direction(rows: Rows) -> Row:
        gradient = gradient_of(frozen, *rows).ravel()
        return (gradient / np.sqrt((gradient**2).sum())).tolist()

    return direction


def starts(x: list[Row], k: int, draws: np.ndarray, kind: str) -> list[int]:
    """k-means++: each next seed is drawn in proportion to the distance from the seeds so far."""
    seeds: list[int] = []
    for draw in draws[:k]:
        mass = [min((distance(row, x[seed], kind) for seed in seeds), default=1.0) for row in x]
        reach, run = draw * sum(mass), 0.0
        for i, part in enumerate(mass):
            run += part
            if run > reach:
                seeds.append(i)
                break
    return seeds


def by_lowest_member(label: list[int]) -> list[int]:
    """The same clusters, numbered in the order in which they are met."""
    order = list(dict.fromkeys(label))
    return [order.index(k) for k in label]


def kmeans_of(x: list[Row], kind: str, play: Play, key: Rng) -> list[int]:
    """Algorithm 3: the k-means clusters, K by the largest mean silhouette; of equals the smaller."""
    most = min(play.k_max, len(x) - 1)
    draws = key.at("starts").numpy().random((play.n_init, most))
    best, found = -np.inf, [0] * len(x)
    for k in range(2, most + 1):
        tries = [lloyd(x, [x[seed] for seed in starts(x, k, one, kind)], kind) for one in draws]
        label = min(tries, key=lambda tried: tried[1])[0]
        score = float(np.mean(silhouette(x, label, kind)))
        if score > best + 1e-6:
            best, found = score, label
    return by_lowest_member(found)


def centers_of(x: list[Row], cluster: list[int], old: list[Row], kind: str) -> list[Row]:
    """The mean of each cluster's members; that of nobody stays where it was."""
    out = []
    for k, center in enumerate(old):
        members = [row for row, its in zip(x, cluster, strict=True) if its == k]
        out.append(mean(members, center, kind) if members else center)
    return out


def length(a: Row, b: Row, kind: str) -> float:
    """The root of a distance that grows with the square."""
    return math.sqrt(max(distance(a, b, kind), 0.0)) if kind == "cosine" else distance(a, b, kind)


def theta_of(centers: list[Row], cluster: list[int], kind: str) -> float:
    """The mean distance between the centers of clusters with members; of one alone there is none."""
    there = sorted(set(cluster))
    if len(there) == 1:
        return 0.0
    return float(np.mean([length(centers[k], centers[j], kind) for k in there for j in there if k < j]))


def shares_of(sizes: list[int], ask: int) -> list[int]:
    """M / K of each cluster, one more of the largest while M is not reached; what one lacks the others give in turn."""
    there = sorted((k for k, size in enumerate(sizes) if size), key=lambda k: (-sizes[k], k))
    wanted = dict.fromkeys(there, ask // len(there))
    for k in there[: ask % len(there)]:
        wanted[k] += 1
    given = {k: min(wanted[k], sizes[k]) for k in there}
    while sum(given.values()) < min(ask, sum(sizes)):
        for k in there:
            if given[k] < sizes[k] and sum(given.values()) < ask:
                given[k] += 1
    return [given.get(k, 0) for k in range(len(sizes))]


def asked_of(cluster: list[int], clusters: int, ask: int, key: Rng) -> list[int]:
    """Whose exponential times, one for each client, are the first within its cluster: a draw without replacement."""
    members = [[i for i, its in enumerate(cluster) if its == k] for k in range(clusters)]
    waits = key.at("select").numpy().standard_exponential(len(cluster))
    out: list[int] = []
    for k, count in enumerate(shares_of([len(each) for each in members], ask)):
        out += sorted(members[k], key=lambda client: waits[client])[:count]
    return sorted(out)


def trained(w: np.ndarray, rows: Rows, play: Play, key: Rng) -> np.ndarray:
    """What a client makes of the model of its cluster: mini-batches, each step pulled back towards what it got."""
    x, y = rows
    own, draw = w.copy(), key.at("shuffle").torch()
    for _ in range(play.epochs):
        order = torch.randperm(len(y), generator=draw).numpy()
        for begin in range(0, len(y), play.batch):
            some = order[begin : begin + play.batch]
            own -= play.rate * (gradient_of(own, x[some], y[some]) + play.mu * (own - w))
    return own


def train_models(models, speeds, cluster: list[int], asked: list[int], held, t: int, play: Play) -> None:
    """Algorithm 1, one round: move each model by the mean update of its clients that were asked, with momentum."""
    made = {i: trained(models[cluster[i]], held(i, t), play, Rng(0).at(t, i, "train")) for i in asked}
    for k in sorted({cluster[i] for i in asked}):
        step = np.mean([made[i] - models[k] for i in asked if cluster[i] == k], axis=0)
        speeds[k] = play.momentum * speeds[k] + step
        models[k] = models[k] + play.server_rate * speeds[k]


def naive_fielding(
    start: np.ndarray, clients: int, held: Callable[[int, int], Rows], represent: Callable[[Rows], Row], play: Play
) -> Iterator[Kept]:
    """What the server knows after round 0, 1, 2 and so on.

    All clusters begin with the model `start` (classes, dims); `held(client, round)` are rows, of which a client says
    `represent(rows)`.
    """
    kind, key = play.distance, Rng(0)
    said = [represent(held(i, -1)) for i in range(clients)]  # everybody registers
    cluster = kmeans_of(said, kind, play, key.at(-1, "server", "cluster"))
    centers = centers_of(said, cluster, [said[cluster.index(k)] for k in range(max(cluster) + 1)], kind)
    before = centers
    models = [start.copy() for _ in centers]
    speeds = [np.zeros_like(start) for _ in centers]
    t = 0
    while True:
        server = key.at(t, "server")
        now = Kept([], [], [])
        # Algorithm 2. Each client that drifted goes to the nearest center, and centers follow before the next one goes.
        drifted = []
        for i in range(clients):
            vector = represent(held(i, t))
            if vector != said[i]:
                said[i] = vector
                drifted.append(i)
        if drifted:
            went, after = list(cluster), centers
            for i in drifted:
                there, had = sorted(set(went)), went[i]
                went[i] = min(there, key=lambda k: distance(said[i], after[k], kind))
                anew = centers_of(said, went, after, kind)
                after = [anew[k] if k in (had, went[i]) else center for k, center in enumerate(after)]
            after = centers_of(said, went, centers, kind)
            since = centers if play.reference == "last-event" else before
            way = max(length(since[k], after[k], kind) for k in set(went))
            fired = way >= play.tau * theta_of(after, went, kind)
            moved = sum(a != b for a, b in zip(cluster, went, strict=True))
            now = replace(now, drifted=len(drifted), moved=moved, reclustered=int(fired))
            cluster, centers = went, after
            if fired:
                had, pace = [models[k] for k in cluster], [speeds[k] for k in cluster]
                cluster = kmeans_of(said, kind, play, server.at("cluster"))
                numbers = range(max(cluster) + 1)
                centers = centers_of(said, cluster, [said[cluster.index(k)] for k in numbers], kind)
                before = centers
                members = [[i for i in range(clients) if cluster[i] == k] for k in numbers]
                models = [np.mean([had[i] for i in each], axis=0) for each in members]
                speeds = [np.mean([pace[i] for i in each], axis=0) for each in members]
        # Algorithm 1, one round.
        asked = asked_of(cluster, len(models), play.ask, server)
        train_models(models, speeds, cluster, asked, held, t, play)
        yield replace(now, models=list(models), cluster=list(cluster), centers=list(centers), asked=asked)
        t += 1


# -- fielding by sums in plain loops: what `algorithms.fielding_by_sums` has to agree with, one client at a time -------


Cell = tuple[Row, int, Row]
"""Mean, number and variance of the members of a cluster."""


def nearest(row: Row, centers: list[Row], kind: str) -> int:
    return min(range(len(centers)), key=lambda k: distance(row, centers[k], kind))


def cell_of(rows: list[Row], kind: str) -> Cell:
    """Mean, number and variance of some clients."""
    n, total, square = 0, np.zeros(len(rows[0])), np.zeros(len(rows[0]))
    for row in rows:
        one = np.array(row) / (math.hypot(*row) if kind == "cosine" else 1.0)
        n, total, square = n + 1, total + one, square + one**2
    return (total / n).tolist(), n, (square / n - (total / n) ** 2).tolist()


def halves(rows: list[Row], kind: str, fewest: int) -> list[list[Row]]:
    """Clients in two parts, by a standard deviation along what varies most; none if one would be too small."""
    center, n, variance = cell_of(rows, kind)
    j = next(j for j, v in enumerate(variance) if v >= (1 - 1e-6) * max(variance))
    if n < 2 * fewest or variance[j] <= 1e-12:
        return []
    way = math.sqrt(variance[j])
    points = [[c + sign * way * (i == j) for i, c in enumerate(center)] for sign in (-1, 1)]
    parts = [[row for row in rows if nearest(row, points, kind) == k] for k in (0, 1)]
    return parts if min(map(len, parts)) >= fewest else []


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
    whole, groups, done = [cell_of(said, kind)], [said], list[list[Row]]()
    while groups and len(groups) + len(done) < 4 * play.k_max:
        parts = [(rows, halves(rows, kind, fewest)) for rows in groups]
        done += [rows for rows, two in parts if not two]
        groups = [part for _, two in parts for part in two]
    cells = [cell_of(rows, kind) for rows in done + groups]
    middles = [center for center, _, _ in cells]
    if kind == "cosine":
        middles = [[x / math.hypot(*row) for x in row] for row in middles]
    most = min(play.k_max, len(cells))
    draws = key.at("starts").numpy().random((play.n_init, most)) if most > 1 else []
    best, found = -1.0 - 1e-6, whole
    for k in range(2, most + 1):
        tries = [lloyd(middles, [middles[seed] for seed in starts(middles, k, one, kind)], kind) for one in draws]
        label = by_lowest_member(min(tries, key=lambda tried: tried[1])[0])
        made = list[Cell]()
        for j in range(k):
            n = sum(cell[1] for cell, its in zip(cells, label, strict=True) if its == j)
            total = sum(np.array(cell[0]) * cell[1] for cell, its in zip(cells, label, strict=True) if its == j)
            made.append(((total / n).tolist(), n, []))
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
            fired = play.tau == 0 or way >= play.tau * theta_of(after, use, kind)
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
        train_models(models, speeds, use, asked, held, t, play)
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
