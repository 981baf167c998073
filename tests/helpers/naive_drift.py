"""Fielding in plain loops, after Algorithms 1 to 3 of its paper: what `algorithms.fielding` has to agree with.

Shared with the library are the clients' rows and the keys of what is drawn (weights to begin with, shuffles, who is
asked, where k-means starts), so that both draw the same. Everything else is written anew, one client at a time.
"""

from __future__ import annotations

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
        out.append(mean(members, center, kind, "mean") if members else center)
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
        order = shuffled(len(y), draw)
        for begin in range(0, len(y), play.batch):
            some = order[begin : begin + play.batch]
            own -= play.rate * (gradient_of(own, x[some], y[some]) + play.mu * (own - w))
    return own


def shuffled(count: int, draw: torch.Generator) -> np.ndarray:
    """An order of so many rows, as the library shuffles them."""
    return torch.randperm(count, generator=draw).numpy()


def naive_fielding(
    start: np.ndarray, clients: int, held: Callable[[int, int], Rows], represent: Callable[[Rows], Row], play: Play
) -> Iterator[Kept]:
    """What the server knows after round 0, 1, 2 and so on.

    Args:
        start: the model that all clusters begin with (classes, dims).
        clients: how many there are.
        held: the rows of a client at a round.
        represent: what a client says of its rows.
        play: the options.
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
        made = {i: trained(models[cluster[i]], held(i, t), play, key.at(t, i, "train")) for i in asked}
        for k in sorted({cluster[i] for i in asked}):
            step = np.mean([made[i] - models[k] for i in asked if cluster[i] == k], axis=0)
            speeds[k] = play.momentum * speeds[k] + step
            models[k] = models[k] + play.server_rate * speeds[k]
        yield replace(now, models=list(models), cluster=list(cluster), centers=list(centers), asked=asked)
        t += 1
