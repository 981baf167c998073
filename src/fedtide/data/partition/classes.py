"""Partitions that give each client a few classes: sorted shards, or two majority classes."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.data.partition.draws import Dealing, assign_owners, check_enough, draw_counts
from fedtide.data.ragged import Ragged
from fedtide.fields.types import Count, Fraction, ingredient


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

    With p = 0.2 and ten classes this is IID; with p = 1 every client has two classes (and any odd row of a third).

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
        each = self.samples or self._most(len(y) // clients, pairs, supply, rng)
        check_enough(len(y), clients * max(each, 1), clients)
        if not each:
            but = f"too few of the {supply.tolist()} rows of the classes suit them"
            raise refused("data.partition.clients", clients, "fewer clients, or classes of more equal size", but)
        counts = self._counts(each, pairs, supply, rng)
        if counts is None:
            asked = np.bincount(pairs.reshape(-1), minlength=classes) * self._half(each)
            short = np.flatnonzero(asked > supply)
            which = f"class {short[0]} is asked for {asked[short[0]]} times" if len(short) else "classes run out"
            but = f"{which} (there are {supply.tolist()} rows of the classes)"
            most = self._most(len(y) // clients, pairs, supply, rng)
            raise refused("data.partition.samples", each, f"at most {most}", but)
        return Ragged.from_owner(assign_owners(y, counts, rng.at("rows").numpy()), clients)

    def _pairs(self, present: np.ndarray, clients: int, rng: Rng) -> np.ndarray:
        """Return the majority classes of each client (clients, 2), out of the present ones."""
        if self.pairs == "product":
            i, n = np.arange(clients), len(present)
            return present[np.stack([i // n % n, i % n], axis=1)]
        draw = rng.at("pairs").numpy()
        return np.stack([draw.choice(present, 2, replace=False) for _ in range(clients)])

    def _half(self, each: int) -> int:
        return int(round(self.p * each / 2, 9))

    def _counts(self, each: int, pairs: np.ndarray, supply: np.ndarray, rng: Rng) -> np.ndarray | None:
        """Count the rows of each class that each client takes (clients, classes); None if a class has too few."""
        clients = len(pairs)
        majority = np.zeros((clients, len(supply)), dtype=np.int64)
        np.add.at(majority, (np.repeat(np.arange(clients), 2), pairs.reshape(-1)), self._half(each))
        left = supply - majority.sum(0)
        if (left < 0).any():
            return None
        others = np.ones_like(majority, dtype=np.float64)
        np.put_along_axis(others, pairs, 0.0, axis=1)
        rest = draw_counts(others, each - 2 * self._half(each), left, rng.at("others").numpy())
        return None if np.take_along_axis(rest, pairs, axis=1).any() else majority + rest

    def _most(self, equal: int, pairs: np.ndarray, supply: np.ndarray, rng: Rng) -> int:
        """Return the largest number of rows per client for which every class suffices; even if p is 1."""
        low, high = 0, equal  # bisection: sizes below a feasible one are feasible, up to chance in the draws
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._counts(middle, pairs, supply, rng) is not None else (low, middle - 1)
        return low - low % 2 if self.p == 1 else low
