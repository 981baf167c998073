"""Partitions by labels: sorted shards, majority classes, Dirichlet draws, super-classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.data.partition.dealing import Dealing, check_enough
from fedtide.data.ragged import Ragged
from fedtide.fields.types import Count, Fraction, Positive, Whole, explained, ingredient


def draw_counts(shares: np.ndarray, wanted: int, left: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Draw for each client the number of its `wanted` rows from each class by `shares` (clients, classes).

    Draws are without replacement: `left` (classes,) is lowered in place. An exhausted class leaves the distribution,
    and a client whose whole distribution is exhausted takes remaining rows, in proportion.
    """
    counts = np.zeros(shares.shape, dtype=np.int64)
    for client, wish in enumerate(shares):
        missing = wanted
        while missing and left.any():
            share = wish * (left > 0)
            share = share / share.sum() if share.sum() > 0 else left / left.sum()
            # A draw from an exhausted class is rejected and repeated without that class.
            taken = np.minimum(draw.multinomial(missing, share), left)
            counts[client] += taken
            left -= taken
            missing -= int(taken.sum())
    return counts


def assign_owners(y: np.ndarray, counts: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return the owner of each row, given the rows of each class that each client takes (clients, classes)."""
    owner = np.full(len(y), -1, dtype=np.int64)
    for c in range(counts.shape[1]):
        rows = draw.permutation(np.flatnonzero(y == c))
        takers = np.repeat(np.arange(len(counts)), counts[:, c])
        owner[rows[: len(takers)]] = takers
    return owner


@ingredient
class LabelShards(Dealing):
    """Sort rows by label, cut them into `per_client` * clients shards, and deal each client `per_client` at random.

    Args:
        clients: number of clients over all groups.
        per_client: number of shards of each client.
    """

    clients: Count = 100
    per_client: Count = 2
    kind: Literal["label-shards"] = "label-shards"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients."""
        shards = clients * self.per_client
        check_enough(len(y), shards, clients)
        draw = rng.at("rows").numpy()
        order = draw.permutation(len(y))
        order = order[np.argsort(y[order], kind="stable")]
        whose = draw.permutation(shards) // self.per_client
        owner = np.empty(len(y), dtype=np.int64)
        for shard, rows in enumerate(np.array_split(order, shards)):
            owner[rows] = whose[shard]
        return Ragged.from_owner(owner, clients)


@ingredient
class Majority(Dealing):
    """Two majority classes with p/2 of a client's rows each, and the rest uniformly from the other classes.

    With p = 0.2 and ten classes this is IID. With p = 1 every client has two classes; an odd row is of a third.

    Args:
        clients: number of clients over all groups.
        p: share of a client's rows in its two majority classes.
        samples: number of rows of each client; None means as many as the classes allow.
        pairs: "random", or "product" for the i-th pair of classes x classes, (0,0), (0,1), ..., as in the released
            code.
    """

    clients: Count = 100
    p: Fraction = 0.8
    samples: Count | None = None
    pairs: Literal["random", "product"] = "random"
    kind: Literal["majority"] = "majority"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients."""
        supply = np.bincount(y, minlength=classes)
        if (supply > 0).sum() < 3:
            but = f"the rows have {(supply > 0).sum()} classes"
            raise refused("data.partition.kind", self.kind, "rows of 3 classes or more", but)
        pairs = self._pairs(np.flatnonzero(supply), clients, rng)
        samples = self.samples or self._most(len(y) // clients, pairs, supply, rng)
        check_enough(len(y), clients * max(samples, 1), clients)
        if not samples:
            but = f"too few of the {supply.tolist()} rows of the classes suit them"
            raise refused("data.partition.clients", clients, "fewer clients, or classes of more equal size", but)
        counts = self._counts(samples, pairs, supply, rng)
        if counts is None:
            asked = np.bincount(pairs.reshape(-1), minlength=classes) * self._half(samples)
            short = np.flatnonzero(asked > supply)
            which = f"class {short[0]} is asked for {asked[short[0]]} times" if len(short) else "classes run out"
            but = f"{which} (there are {supply.tolist()} rows of the classes)"
            most = self._most(len(y) // clients, pairs, supply, rng)
            raise refused("data.partition.samples", samples, f"at most {most}", but)
        return Ragged.from_owner(assign_owners(y, counts, rng.at("rows").numpy()), clients)

    def _pairs(self, present: np.ndarray, clients: int, rng: Rng) -> np.ndarray:
        """Return the majority classes of each client (clients, 2), out of the present ones."""
        if self.pairs == "product":
            i, n = np.arange(clients), len(present)
            return present[np.stack([i // n % n, i % n], axis=1)]
        draw = rng.at("pairs").numpy()
        return np.stack([draw.choice(present, 2, replace=False) for _ in range(clients)])

    def _half(self, samples: int) -> int:
        return int(round(self.p * samples / 2, 9))

    def _counts(self, samples: int, pairs: np.ndarray, supply: np.ndarray, rng: Rng) -> np.ndarray | None:
        """Count the rows of each class that each client takes (clients, classes); None if a class has too few."""
        clients = len(pairs)
        majority = np.zeros((clients, len(supply)), dtype=np.int64)
        np.add.at(majority, (np.repeat(np.arange(clients), 2), pairs.reshape(-1)), self._half(samples))
        left = supply - majority.sum(0)
        if (left < 0).any():
            return None
        others = np.ones_like(majority, dtype=np.float64)
        np.put_along_axis(others, pairs, 0.0, axis=1)
        rest = draw_counts(others, samples - 2 * self._half(samples), left, rng.at("others").numpy())
        return None if np.take_along_axis(rest, pairs, axis=1).any() else majority + rest

    def _most(self, equal: int, pairs: np.ndarray, supply: np.ndarray, rng: Rng) -> int:
        """Return the largest number of rows per client for which every class suffices; even if p is 1."""
        low, high = 0, equal  # bisection: sizes below a feasible one are feasible, up to chance in the draws
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._counts(middle, pairs, supply, rng) is not None else (low, middle - 1)
        return low - low % 2 if self.p == 1 else low


@ingredient
class DirichletClass(Dealing):
    """Draw Dirichlet(alpha) over clients for each class and cut the shuffled class accordingly: client sizes vary.

    As in NIID-Bench, clients that already hold an equal part get no more of a class. The draw is repeated until all
    clients have `min_samples`. After `tries` draws rows move from the largest clients instead.

    Args:
        clients: number of clients over all groups.
        alpha: concentration; a small value means that few clients share a class.
        min_samples: smallest number of rows of a client; 0 allows clients without rows.
        tries: number of draws before rows are moved.
    """

    clients: Count = 100
    alpha: Positive = 0.5
    min_samples: Whole = 10
    tries: Count = 100
    kind: Literal["dirichlet-class"] = "dirichlet-class"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients."""
        check_enough(len(y), clients * max(self.min_samples, 1), clients)
        for attempt in range(self.tries):
            draw = rng.at("rows", attempt).numpy()
            owner = np.empty(len(y), dtype=np.int64)
            counts = np.zeros(clients, dtype=np.int64)
            for c in range(classes):
                rows = draw.permutation(np.flatnonzero(y == c))
                # NIID-Bench: clients that hold an equal part already get none of this class.
                share = draw.dirichlet(np.full(clients, self.alpha)) * (counts < len(y) / clients)
                share = share / share.sum() if share.sum() > 0 else np.full(clients, 1 / clients)
                cuts = (np.cumsum(share) * len(rows)).astype(np.int64)[:-1]
                owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
                counts += np.bincount(owner[rows], minlength=clients)
            if counts.min() >= self.min_samples:
                break
        return Ragged.from_owner(_top_up(owner, clients, self.min_samples, rng.at("moved").numpy()), clients)


def _top_up(owner: np.ndarray, clients: int, least: int, draw: np.random.Generator) -> np.ndarray:
    """Move random rows from the largest clients to those with fewer than `least`."""
    counts = np.bincount(owner, minlength=clients)
    for poor in np.flatnonzero(counts < least):
        while counts[poor] < least:
            rich = int(counts.argmax())
            count = min(least - counts[poor], max(counts[rich] - least, 1))
            moved = draw.permutation(np.flatnonzero(owner == rich))[:count]
            owner[moved] = poor
            counts[rich] -= len(moved)
            counts[poor] += len(moved)
    return owner


@ingredient
class Dirichlet(Dealing):
    """Draw Dirichlet(alpha) over classes for each client, then its rows by that distribution: client sizes are equal.

    Rows are drawn without replacement; an exhausted class leaves every client's distribution. If the whole distribution
    of a client is exhausted, the client takes remaining rows in proportion. Hsu, Qi and Brown (2019) draw Dirichlet(a *
    prior) instead, which for C equally large classes equals alpha = a / C.

    Args:
        clients: number of clients over all groups.
        alpha: concentration; a small value means few classes per client.
        samples: number of rows of each client; None means all rows divided by clients, rounded down.
    """

    clients: Count = 100
    alpha: Positive = 0.5
    samples: Count | None = None
    kind: Literal["dirichlet"] = "dirichlet"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients."""
        samples = self.samples or len(y) // clients
        check_enough(len(y), clients * max(samples, 1), clients)
        draw = rng.at("rows").numpy()
        profiles = draw.dirichlet(np.full(classes, self.alpha), size=clients)
        counts = draw_counts(profiles, samples, np.bincount(y, minlength=classes), draw)
        return Ragged.from_owner(assign_owners(y, counts, draw), clients)


CIFAR_100 = (
    (4, 30, 55, 72, 95), (1, 32, 67, 73, 91), (54, 62, 70, 82, 92), (9, 10, 16, 28, 61), (0, 51, 53, 57, 83),
    (22, 39, 40, 86, 87), (5, 20, 25, 84, 94), (6, 7, 14, 18, 24), (3, 42, 43, 88, 97), (12, 17, 37, 68, 76),
    (23, 33, 49, 60, 71), (15, 19, 21, 31, 38), (34, 63, 64, 66, 75), (26, 45, 77, 79, 99), (2, 11, 35, 46, 98),
    (27, 29, 44, 78, 93), (36, 50, 65, 74, 80), (47, 52, 56, 59, 96), (8, 13, 48, 58, 90), (41, 69, 81, 85, 89),
)  # fmt: skip
"""Five labels of each of the 20 published super-classes, in their published order."""

Groups = Annotated[tuple[Annotated[tuple[Whole, ...], Field(min_length=1)], ...], Field(min_length=1)]


@ingredient
class Pachinko(Dealing):
    """Draw Dirichlet(alpha) over super-classes and Dirichlet(beta) over the labels of each: client sizes are equal.

    Each row is drawn by a super-class, then by one of its labels, without replacement. An exhausted label leaves its
    share to its super-class, and an exhausted super-class to the others. If the whole distribution of a client is
    exhausted, the client takes remaining rows in proportion. This is the Pachinko allocation of Reddi et al.: *Adaptive
    Federated Optimization*, 2021, for CIFAR-100 with alpha 0.1 and beta 10.

    Args:
        clients: number of clients over all groups.
        alpha: concentration over super-classes; a small value means few of them per client.
        beta: concentration over the labels of a super-class.
        samples: number of rows of each client; None means all rows divided by clients, rounded down.
        groups: the labels of each super-class, or "cifar-100" for the published super-classes of that data set.

    >>> rows = Pachinko(clients=2, groups=((0, 1), (2, 3))).deal(np.arange(40) % 4, 4, 2, Rng(0))
    >>> rows.counts.tolist()
    [20, 20]
    """

    clients: Count = 100
    alpha: Positive = 0.1
    beta: Positive = 10.0
    samples: Count | None = None
    groups: Annotated[Literal["cifar-100"] | Groups, explained("'cifar-100', or lists of labels")] = "cifar-100"
    kind: Literal["pachinko"] = "pachinko"

    def __post_init__(self) -> None:
        labels = [label for group in self.super_classes for label in group]
        twice = next((label for i, label in enumerate(labels) if label in labels[:i]), None)
        if twice is not None:
            raise ValueError(f"label {twice} stands twice in groups; a label belongs to one super-class")

    @property
    def super_classes(self) -> Groups:
        """Labels of each super-class."""
        return CIFAR_100 if isinstance(self.groups, str) else self.groups

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients."""
        samples = self.samples or len(y) // clients
        check_enough(len(y), clients * max(samples, 1), clients)
        supers = self._supers(y, classes)
        draw = rng.at("rows").numpy()
        root = draw.dirichlet(np.full(len(supers), self.alpha), size=clients)
        fine = [draw.dirichlet(np.full(len(labels), self.beta), size=clients) for labels in supers]
        counts = allocate(root, fine, supers, samples, np.bincount(y, minlength=classes), draw)
        return Ragged.from_owner(assign_owners(y, counts, draw), clients)

    def _supers(self, y: np.ndarray, classes: int) -> list[np.ndarray]:
        """Return the labels of each super-class; raise if they do not fit the labels of the rows."""
        supers = [np.array(labels) for labels in self.super_classes]
        grouped = np.concatenate(supers)
        if (grouped >= classes).any():
            allowed = f"labels from 0 to {classes - 1} (groups = 'cifar-100' has 100)"
            raise refused("data.partition.groups", int(grouped[grouped >= classes][0]), allowed)
        lost = np.setdiff1d(y, grouped)
        if len(lost):
            raise FedtideError(f"data.partition.groups: label {lost[0]} is in none of them; allowed: every label once")
        return supers


def allocate(
    root: np.ndarray,
    fine: Sequence[np.ndarray],
    supers: Sequence[np.ndarray],
    wanted: int,
    left: np.ndarray,
    draw: np.random.Generator,
) -> np.ndarray:
    """Draw for each client the number of its `wanted` rows from each label.

    The number of rows of a super-class does not depend on the choice of its labels, so it is drawn first.

    Args:
        root: (clients, super-classes) shares.
        fine: (clients, labels of the super-class) shares, for each super-class.
        supers: the labels of each super-class.
        wanted: number of rows of each client.
        left: (labels,) remaining rows; lowered in place.
        draw: the generator of the draws.

    Returns:
        Counts (clients, labels).
    """
    counts = np.zeros((len(root), len(left)), dtype=np.int64)
    supply = np.array([left[labels].sum() for labels in supers])
    for client, wish in enumerate(root):
        falls = draw_counts(wish[None], wanted, supply, draw)[0]
        for labels, shares, number in zip(supers, fine, falls.tolist(), strict=True):
            inside = left[labels]
            counts[client, labels] = draw_counts(shares[client][None], number, inside, draw)[0]
            left[labels] = inside
    return counts
