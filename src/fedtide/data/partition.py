"""Partitions: how rows are dealt to clients. Seeded, disjoint unless stated, and every one of them terminates.

A test set of the source's own is dealt by `follow`, so that every client is tested on the classes it trains on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.values import Count, Fraction, Positive, Whole
from fedtide.data.ragged import Ragged
from fedtide.data.saved import Saved


@dataclass(frozen=True)
class IID:
    """Shuffle and cut into equal parts; the remainder goes to the first clients.

    Args:
        clients: how many, over all groups.
        rows: at most so many rows each; the rest stays unused.

    >>> IID(3).deal(np.zeros(7, int), 1, 3, Rng(0)).counts.tolist()
    [3, 2, 2]
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    clients: Count = 100
    rows: Count | None = None
    kind: Literal["iid"] = "iid"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal."""
        _enough(len(y), clients * (self.rows or 1), clients)
        order = rng.at("rows").numpy().permutation(len(y))
        if self.rows is not None:
            return Ragged.equal(order[: clients * self.rows].reshape(clients, self.rows))
        owner = np.empty(len(y), dtype=np.int64)
        sizes = np.full(clients, len(y) // clients) + (np.arange(clients) < len(y) % clients)
        owner[order] = np.repeat(np.arange(clients), sizes)
        return Ragged.from_owner(owner, clients)


@dataclass(frozen=True)
class DirichletClass:
    """For each class draw Dirichlet(alpha) over clients and cut the shuffled class accordingly: sizes vary.

    As in NIID-Bench, clients that already hold an equal part get nothing more of a class, and the draw is repeated
    until everyone has `min_rows`; after `tries` draws rows are moved from the largest clients, so that it ends.

    Args:
        clients: how many, over all groups.
        alpha: concentration; small means few clients share a class.
        min_rows: fewest rows of a client; 0 allows clients without rows.
        tries: draws before rows are moved.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    clients: Count = 100
    alpha: Positive = 0.5
    min_rows: Whole = 10
    tries: Count = 100
    kind: Literal["dirichlet-class"] = "dirichlet-class"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal."""
        _enough(len(y), clients * max(self.min_rows, 1), clients)
        for attempt in range(self.tries):
            draw = rng.at("rows", attempt).numpy()
            owner = np.empty(len(y), dtype=np.int64)
            held = np.zeros(clients, dtype=np.int64)
            for c in range(classes):
                rows = draw.permutation(np.flatnonzero(y == c))
                # NIID-Bench: who holds an equal part already gets none of this class.
                share = draw.dirichlet(np.full(clients, self.alpha)) * (held < len(y) / clients)
                share = share / share.sum() if share.sum() > 0 else np.full(clients, 1 / clients)
                cuts = (np.cumsum(share) * len(rows)).astype(np.int64)[:-1]
                owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
                held += np.bincount(owner[rows], minlength=clients)
            if held.min() >= self.min_rows:
                break
        return Ragged.from_owner(_topped_up(owner, clients, self.min_rows, rng.at("moved").numpy()), clients)


def _topped_up(owner: np.ndarray, clients: int, least: int, draw: np.random.Generator) -> np.ndarray:
    """Rows moved at random from the largest clients to those with fewer than `least`."""
    held = np.bincount(owner, minlength=clients)
    for poor in np.flatnonzero(held < least):
        while held[poor] < least:
            rich = int(held.argmax())
            count = min(least - held[poor], max(held[rich] - least, 1))
            moved = draw.permutation(np.flatnonzero(owner == rich))[:count]
            owner[moved] = poor
            held[rich] -= len(moved)
            held[poor] += len(moved)
    return owner


@dataclass(frozen=True)
class DirichletEqual:
    """For each client draw Dirichlet(alpha) over classes, then its rows from that distribution: equal sizes.

    Rows are drawn without replacement; an exhausted class leaves every client's distribution. A client whose whole
    distribution is exhausted takes what is left, in proportion. Hsu, Qi and Brown (2019) draw Dirichlet(a * prior)
    instead, which for C equally large classes is the same with alpha = a / C.

    Args:
        clients: how many, over all groups.
        alpha: concentration; small means few classes per client.
        rows: rows each; None means all rows divided by clients, rounded down.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    clients: Count = 100
    alpha: Positive = 0.5
    rows: Count | None = None
    kind: Literal["dirichlet", "dirichlet-equal"] = "dirichlet"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal."""
        each = self.rows or len(y) // clients
        _enough(len(y), clients * max(each, 1), clients)
        draw = rng.at("rows").numpy()
        profiles = draw.dirichlet(np.full(classes, self.alpha), size=clients)
        counts = _draw(profiles, each, np.bincount(y, minlength=classes), draw)
        return Ragged.from_owner(_hand_out(y, counts, draw), clients)


def _draw(shares: np.ndarray, wanted: int, left: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """For each client how many of `wanted` rows it draws from each class by `shares` (clients, classes).

    Without replacement: `left` (classes,) is lowered in place. An exhausted class leaves the distribution, and a
    client whose whole distribution is exhausted takes what is left, in proportion.
    """
    counts = np.zeros(shares.shape, dtype=np.int64)
    for client, wish in enumerate(shares):
        missing = wanted
        while missing and left.any():
            share = wish * (left > 0)
            share = share / share.sum() if share.sum() > 0 else left / left.sum()
            # A draw that hits an exhausted class is rejected and drawn again without that class.
            taken = np.minimum(draw.multinomial(missing, share), left)
            counts[client] += taken
            left -= taken
            missing -= int(taken.sum())
    return counts


def _hand_out(y: np.ndarray, counts: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """The owner of each row, given how many rows of each class each client takes (clients, classes)."""
    owner = np.full(len(y), -1, dtype=np.int64)
    for c in range(counts.shape[1]):
        rows = draw.permutation(np.flatnonzero(y == c))
        takers = np.repeat(np.arange(len(counts)), counts[:, c])
        owner[rows[: len(takers)]] = takers
    return owner


@dataclass(frozen=True)
class Shards:
    """Sort by label, cut into `per_client` * clients shards, and give each client `per_client` of them at random.

    Args:
        clients: how many, over all groups.
        per_client: shards of each.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    clients: Count = 100
    per_client: Count = 2
    kind: Literal["shards"] = "shards"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal."""
        shards = clients * self.per_client
        _enough(len(y), shards, clients)
        draw = rng.at("rows").numpy()
        order = draw.permutation(len(y))
        order = order[np.argsort(y[order], kind="stable")]
        whose = draw.permutation(shards) // self.per_client
        owner = np.empty(len(y), dtype=np.int64)
        for shard, rows in enumerate(np.array_split(order, shards)):
            owner[rows] = whose[shard]
        return Ragged.from_owner(owner, clients)


@dataclass(frozen=True)
class Majority:
    """Two majority classes with p/2 of a client's rows each, the rest uniformly from the other classes.

    With p = 0.2 and ten classes this is IID; with p = 1 every client has two classes (and an odd row of a third).

    Args:
        clients: how many, over all groups.
        p: share of a client's rows that its two majority classes hold.
        rows: rows each; None means as many as the classes allow.
        pairs: "random", or "product" for the i-th pair of classes x classes, (0,0), (0,1), ..., as released.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    clients: Count = 100
    p: Fraction = 0.8
    rows: Count | None = None
    pairs: Literal["random", "product"] = "random"
    kind: Literal["majority"] = "majority"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal."""
        supply = np.bincount(y, minlength=classes)
        if (supply > 0).sum() < 3:
            raise FedtideError(
                f"data.partition: kind 'majority' needs 3 classes or more, found {int((supply > 0).sum())}"
            )
        pairs = self._pairs(np.flatnonzero(supply), clients, rng)
        each = self.rows or self._most(len(y) // clients, pairs, supply, rng)
        _enough(len(y), clients * max(each, 1), clients)
        if not each:
            raise FedtideError(
                f"data.partition: kind 'majority' finds no rows for {clients} clients among {supply.tolist()} rows of "
                "the classes; allowed: fewer clients, or classes of more equal size"
            )
        counts = self._counts(each, pairs, supply, rng)
        if counts is None:
            asked = np.bincount(pairs.reshape(-1), minlength=classes) * self._half(each)
            short = np.flatnonzero(asked > supply)
            which = (
                f"class {int(short[0])} is asked for {int(asked[short[0]])} times" if len(short) else "classes run out"
            )
            raise FedtideError(
                f"data.partition.rows: found {each}, too many: {which} "
                f"(there are {supply.tolist()} rows of the classes); "
                f"allowed: at most {self._most(len(y) // clients, pairs, supply, rng)}"
            )
        return Ragged.from_owner(_hand_out(y, counts, rng.at("rows").numpy()), clients)

    def _pairs(self, present: np.ndarray, clients: int, rng: Rng) -> np.ndarray:
        """The majority classes of each client (clients, 2), among those that are there."""
        if self.pairs == "product":
            i, n = np.arange(clients), len(present)
            return present[np.stack([i // n % n, i % n], axis=1)]
        draw = rng.at("pairs").numpy()
        return np.stack([draw.choice(present, 2, replace=False) for _ in range(clients)])

    def _half(self, each: int) -> int:
        return int(round(self.p * each / 2, 9))

    def _counts(self, each: int, pairs: np.ndarray, supply: np.ndarray, rng: Rng) -> np.ndarray | None:
        """How many rows of each class each client takes (clients, classes); None where a class does not suffice."""
        clients = len(pairs)
        majority = np.zeros((clients, len(supply)), dtype=np.int64)
        np.add.at(majority, (np.repeat(np.arange(clients), 2), pairs.reshape(-1)), self._half(each))
        left = supply - majority.sum(0)
        if (left < 0).any():
            return None
        others = np.ones_like(majority, dtype=np.float64)
        np.put_along_axis(others, pairs, 0.0, axis=1)
        rest = _draw(others, each - 2 * self._half(each), left, rng.at("others").numpy())
        return None if np.take_along_axis(rest, pairs, axis=1).any() else majority + rest

    def _most(self, equal: int, pairs: np.ndarray, supply: np.ndarray, rng: Rng) -> int:
        """The most rows each for which every class suffices; even where there is nothing but majority classes."""
        low, high = 0, equal  # bisection: what suffices for some rows suffices for fewer, but for luck in the draws
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._counts(middle, pairs, supply, rng) is not None else (low, middle - 1)
        return low - low % 2 if self.p == 1 else low


@dataclass(frozen=True)
class Resample:
    """Every client draws `rows` different rows, and clients may share rows: index arrays for huge populations.

    Args:
        clients: how many, over all groups.
        rows: rows each.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    clients: Count = 100
    rows: Count = 50
    kind: Literal["resample"] = "resample"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal."""
        _enough(len(y), self.rows, 1)
        draw = rng.at("rows").numpy()
        if 2 * self.rows > len(y):
            return Ragged.equal(draw.random((clients, len(y))).argsort(axis=1)[:, : self.rows].astype(np.int32))
        table = draw.integers(0, len(y), (clients, self.rows), dtype=np.int32)
        table.sort(axis=1)
        while (twice := table[:, 1:] == table[:, :-1]).any():
            at = np.nonzero(twice)
            table[at[0], at[1]] = draw.integers(0, len(y), len(at[0]), dtype=np.int32)
            changed = np.unique(at[0])
            table[changed] = np.sort(table[changed], axis=1)
        return Ragged.equal(table)


@dataclass(frozen=True)
class Natural:
    """The source's own clients (writer, user, station), those with fewer than `min_rows` left out.

    Args:
        min_rows: fewest rows a client must have.
        clients: keep so many, drawn at random; None keeps all.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    min_rows: Count = 1
    clients: Count | None = None
    kind: Literal["natural"] = "natural"


@dataclass(frozen=True)
class Rotation:
    """Groups of clients that each hold a full copy of the data, dealt equally, with pictures turned by an angle.

    The group is the ground truth of clustering; the turning itself is `shift.how`, which follows from the angles.
    Copies are shared between groups, so the partition is disjoint within a group only.

    Args:
        clients: how many, over all groups.
        angles: degrees per group, multiples of 90.
        rows: at most so many rows each.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    clients: Count = 100
    angles: Annotated[tuple[Literal[0, 90, 180, 270], ...], Field(min_length=1)] = (0, 180)
    rows: Count | None = None
    kind: Literal["rotation"] = "rotation"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal one copy."""
        return IID(clients, self.rows).deal(y, classes, clients, rng)


Partition = Annotated[
    IID | DirichletClass | DirichletEqual | Shards | Majority | Resample | Natural | Rotation | Saved,
    Field(discriminator="kind"),
]


def follow(y: np.ndarray, profile: np.ndarray, rng: Rng) -> Ragged:
    """Deal other rows so that each client gets of every class the share that it holds in `profile`.

    Args:
        y: labels of the rows to deal.
        profile: (clients, classes) how many rows of each class each client holds already.
        rng: of the shuffle.
    """
    draw = rng.numpy()
    owner = np.full(len(y), -1, dtype=np.int64)
    for c in np.flatnonzero(profile.sum(0)):
        rows = draw.permutation(np.flatnonzero(y == c))
        cuts = (profile[:, c].cumsum() * (len(rows) / profile[:, c].sum())).round().astype(np.int64)
        owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
    return Ragged.from_owner(owner, len(profile))


def limited(partition: Any, rows: int | None) -> Any:
    """The same partition with at most `rows` rows each; None where it knows no such limit."""
    return replace(partition, rows=rows) if "rows" in {f.name for f in fields(partition)} else None


def _enough(rows: int, wanted: int, clients: int) -> None:
    if rows < wanted:
        raise FedtideError(
            f"data.partition: {clients} clients need {wanted} rows and there are {rows}; "
            "allowed: fewer clients, or fewer rows each"
        )
