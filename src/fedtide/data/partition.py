"""Groups of rows and clients, held-out clients, and rules by which rows are dealt to clients."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.data.ragged import BLOCK, Ragged, count_pairs, rank_rows
from fedtide.data.rows import GeneratedRows, Rows
from fedtide.data.saved import Saved
from fedtide.fields.types import Count, Flag, Fraction, OpenFraction, Positive, Spelled, Whole, allowing, ingredient
from fedtide.fields.user_code import Python, call


@ingredient
class OneGroup:
    """A single group with all clients."""

    by: Literal["none"] = "none"

    def of(self, rows: Rows) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the group of each row and the names of the groups."""
        return np.zeros(len(rows), dtype=np.int64), ("all",)


@ingredient
class ByDomain:
    """A group per domain of the source, such as day and night."""

    by: Literal["domain"] = "domain"

    def of(self, rows: Rows) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the group of each row and the names of the groups."""
        if rows.domain is None or len(rows.domain_names) < 2:
            raise refused("data.groups.by", "domain", "none, labels", f"{rows.name} has one domain")
        return rows.domain.numpy(), rows.domain_names


@ingredient
class ByLabels:
    """A group per set of labels.

    Args:
        labels: the labels of each group; rows with other labels are left out.
        names: names of the groups; by default group 0, group 1, ...
    """

    labels: Annotated[tuple[tuple[Whole, ...], ...], Field(min_length=1)]
    names: tuple[str, ...] = ()
    by: Literal["labels"] = "labels"

    def of(self, rows: Rows) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the group of each row and the names of the groups."""
        table = np.full(rows.classes, -1)
        for k, label in ((k, label) for k, labels in enumerate(self.labels) for label in labels):
            if label >= rows.classes or table[label] >= 0:
                raise refused("data.groups.labels", label, f"each from 0 to {rows.classes - 1} at most once")
            table[label] = k
        names = self.names or tuple(f"group {k}" for k in range(len(self.labels)))
        if len(names) != len(self.labels):
            raise refused("data.groups.names", list(names), f"{len(self.labels)}, one for each group")
        return table[rows.y.numpy()], names


def by_what(value: Any) -> Any:
    """Read `"domain"` as `{by = "domain"}`."""
    return {"by": value} if isinstance(value, str) else value


Groups = Annotated[OneGroup | ByDomain | ByLabels, Field(discriminator="by"), BeforeValidator(by_what)]


@ingredient
class Split:
    """Division of a client's own rows into train, validation and test.

    Args:
        val: share of the training rows kept for validation; at least one row if there are ten.
        test: share of all rows kept for testing; None means 0.2, or 0 if the source has a test set of its own.
        by: "random" or "time". With "time" the latest rows of all clients are for testing and the latest before these
            for validation. So no row for training is later than a row for validation or testing. Shares then differ
            between clients and may be 0. Held-out clients are judged on the latest rows, too.
        merge: deal the source's own test set as all other rows, and divide each client's rows, as PFLlib does.
    """

    val: OpenFraction = 0.1
    test: OpenFraction | None = None
    by: Literal["random", "time"] = "random"
    merge: Flag = False

    def in_time(self, rows: Rows | GeneratedRows) -> tuple[float, float]:
        """Return from when on rows are for validation, and for testing.

        >>> import torch
        >>> rows = Rows("log", torch.zeros(10, 1), torch.arange(10) % 2, 2, time=torch.arange(10).double())
        >>> Split(val=0.25, test=0.2, by="time").in_time(rows)
        (6.0, 8.0)
        """
        but = f"rows of {rows.name} have no time"
        if rows.time is None:
            raise refused("data.split.by", "time", "'random', or a source with a column of time", but)
        if rows.held_out is not None and bool(rows.held_out.any()):
            raise refused("data.split.by", "time", "'random'", f"{rows.name} has a test set of its own")
        time, borders = rows.time.sort().values, [math.inf]
        for name, share in (("test", 0.2 if self.test is None else self.test), ("val", self.val)):
            left = int(torch.searchsorted(time, borders[-1]))
            borders.append(float(time[min(left - max(round(share * left), 1), left - 1)]) if share else borders[-1])
            if share and borders[-1] == time[0]:
                raise refused(f"data.split.{name}", share, "less, or split by 'random'", "no row is earlier")
        return borders[2], borders[1]


@ingredient
class HeldOutClients:
    """Clients that never take part in training, dealt from the source's own test set if it has one.

    With a skewed partition and `samples`, the labels of all held-out clients are skewed, too. Accuracy then swings with
    the classes in their rows. Without `samples` all rows are dealt, so that all labels are as even as in the source.

    Args:
        clients: number over all groups; 0 deals the source's test set to the registered clients instead.
        samples: number of rows of each; None divides all rows.
        labeled: share of these rows on which a held-out client may adapt before its evaluation on the others.
            Algorithms use it if clients choose, weigh or personalize models. `data.split.val` of this share is for
            validation.
    """

    clients: Whole = 0
    samples: Count | None = None
    labeled: OpenFraction = 0.0


class Dealing:
    """A rule that deals rows to `clients` by `deal(labels, number of classes, number of clients, key)`."""

    by_labels: ClassVar[bool] = True
    """Tell whether rows are dealt by their labels, so that sequences cannot be dealt."""
    shares_rows: ClassVar[bool] = False
    """Tell whether clients may hold the same row, so that tests need rows of their own."""


def check_enough(rows: int, wanted: int, clients: int) -> None:
    """Raise if there are fewer rows than clients need."""
    if rows < wanted:
        but = f"they need {wanted} rows and there are {rows}"
        raise refused("data.partition.clients", clients, "fewer clients, or fewer rows each", but)


@ingredient
class IID(Dealing):
    """Shuffle rows and cut them into equal parts; the remainder goes to the first clients.

    Args:
        clients: number of clients over all groups.
        samples: maximum number of rows of each client; remaining rows stay unused.

    >>> IID(3).deal(np.zeros(7, int), 1, 3, Rng(0)).counts.tolist()
    [3, 2, 2]
    """

    clients: Count = 100
    samples: Count | None = None
    kind: Literal["iid"] = "iid"
    by_labels: ClassVar[bool] = False

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients."""
        check_enough(len(y), clients * (self.samples or 1), clients)
        order = rng.at("rows").numpy().permutation(len(y))
        equal = np.full(clients, len(y) // clients) + (np.arange(clients) < len(y) % clients)
        owners = np.repeat(np.arange(clients), self.samples or equal)
        owner = np.full(len(y), -1)
        owner[order[: len(owners)]] = owners
        return Ragged.from_owner(owner, clients)


LARGEST = 10**11
"""Maximum number of entries of the lists of rows of all clients."""


@ingredient
class Resample(Dealing):
    """Draw `samples` different rows for every client; clients may share rows, which suits huge populations.

    Rows for validation are for validation at every client, so their number varies between clients.

    Args:
        clients: number of clients over all groups.
        samples: number of rows of each client.
    """

    clients: Count = 100
    samples: Count = 50
    kind: Literal["resample"] = "resample"
    by_labels: ClassVar[bool] = False
    shares_rows: ClassVar[bool] = True

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients."""
        check_enough(len(y), self.samples, 1)
        if clients * self.samples > LARGEST:
            but = f"their {self.samples} rows each do not fit into memory"
            raise refused("data.partition.clients", clients, "fewer clients or rows", but)
        draw = rng.at("rows").numpy()
        if 2 * self.samples > len(y):
            return Ragged.equal(draw.random((clients, len(y))).argsort(axis=1)[:, : self.samples].astype(np.int32))
        table = draw.integers(0, len(y), (clients, self.samples), dtype=np.int32)
        blocks = [table[first : first + BLOCK] for first in range(0, clients, BLOCK)]
        twice = []
        for block in blocks:
            block.sort(axis=1)
            twice.append((block, np.argwhere(block[:, 1:] == block[:, :-1])))
        while twice := [(block, at) for block, at in twice if len(at)]:
            twice = [(block, _draw_again(block, at, len(y), draw)) for block, at in twice]
        return Ragged.equal(table)


def _draw_again(table: np.ndarray, at: np.ndarray, rows: int, draw: np.random.Generator) -> np.ndarray:
    """Draw the entries `at` (entries, 2) of sorted lists (clients, rows each) again, in place; return those to follow.

    An entry is drawn again if the next one of its list is equal.
    """
    table[at[:, 0], at[:, 1]] = draw.integers(0, rows, len(at), dtype=np.int32)
    changed = np.unique(at[:, 0])
    lists = np.sort(table[changed], axis=1)
    table[changed] = lists
    place = np.argwhere(lists[:, 1:] == lists[:, :-1])
    place[:, 0] = changed[place[:, 0]]
    return place


@ingredient
class Natural(Dealing):
    """The source's own clients (writer, user, station) with at least `min_samples` rows.

    Args:
        min_samples: smallest number of rows of a client.
        clients: number of clients to draw at random; None keeps all.
        samples: maximum number of rows of each client, which are its first; of those in a test set, too.
    """

    min_samples: Count = 1
    clients: Count | None = None
    samples: Count | None = None
    kind: Literal["natural"] = "natural"
    by_labels: ClassVar[bool] = False


@ingredient
class Rotation(Dealing):
    """Groups of clients that each hold a full copy of the data, dealt equally, with images rotated by an angle.

    The group is the ground truth of clustering; the rotation itself is `shift.how`, which follows from the angles.
    Groups share the copies, so that the partition is disjoint within a group only. A validation row may be a training
    row of another group, at another angle.

    Args:
        clients: number of clients over all groups.
        angles: rotation of each group in degrees, multiples of 90.
        samples: maximum number of rows of each client.
    """

    clients: Count = 100
    angles: Annotated[tuple[Literal[0, 90, 180, 270], ...], Field(min_length=1)] = (0, 180)
    samples: Count | None = None
    kind: Literal["rotation"] = "rotation"
    by_labels: ClassVar[bool] = False
    shares_rows: ClassVar[bool] = True

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal one copy."""
        return IID(clients, self.samples).deal(y, classes, clients, rng)


@dataclass(frozen=True)
class DealtBy:
    """A partition by a function from the rows' labels to the client of each row.

    Args:
        owner: (labels of the rows, number of classes, number of clients, a key) -> (rows,) the client of each row, -1
            for an unused row.
        clients: number of clients over all groups.
        by_labels: the function needs labels, so that it cannot deal sequences.
    """

    owner: Callable[[np.ndarray, int, int, Rng], Any]
    clients: int = 100
    by_labels: bool = True
    shares_rows: bool = False

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients.

        Raises:
            FedtideError: the function does not return a client's number for each row.
        """
        owners = np.asarray(call(self.owner, "data.partition.function", y, classes, clients, rng))
        if owners.shape != y.shape or owners.dtype.kind not in "iu":
            raise refused("data.partition.function", owners, f"a client's number for each of {len(y)} rows")
        if len(owners) and not -1 <= owners.min() <= owners.max() < clients:
            raise refused("data.partition.function", int(owners.max()), f"clients from 0 to {clients - 1}, -1 for none")
        return Ragged.from_owner(owners.astype(np.int64), clients)


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
class LabelsInOrder(Dealing):
    """Give each client `per_client` classes in the order of labels and of clients; sizes are uneven.

    The "pathological" partition of PFLlib (released code). A class goes to the first clients that still lack classes,
    clients / classes * `per_client` of them, rounded up. Each of them takes a number of rows, drawn uniformly between a
    tenth of an even share and an even share. The last one takes all others instead. Rows of a class that no client
    lacks stay unused.

    Args:
        clients: number of clients over all groups.
        per_client: number of classes of each client.

    >>> y = np.arange(4).repeat(50)
    >>> dealt = LabelsInOrder(clients=4, per_client=2).deal(y, 4, 4, Rng(0))
    >>> [sorted(set(y[dealt[client].numpy()].tolist())) for client in range(4)]
    [[0, 1], [0, 1], [2, 3], [2, 3]]
    """

    clients: Count = 100
    per_client: Count = 2
    kind: Literal["labels-in-order"] = "labels-in-order"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients."""
        check_enough(len(y), clients, clients)
        draw, owner = rng.at("rows").numpy(), np.full(len(y), -1, dtype=np.int64)
        present, lacking = np.unique(y), np.full(clients, self.per_client)
        if len(present) < self.per_client:
            raise refused("data.partition.per_client", self.per_client, f"at most {len(present)}, the number of labels")
        for c in present.tolist():
            takers = np.flatnonzero(lacking)[: math.ceil(clients * self.per_client / len(present))]
            rows = draw.permutation(np.flatnonzero(y == c))
            if len(rows) < len(takers):
                but = f"label {c} has {len(rows)} rows for {len(takers)} of them"
                raise refused("data.partition.clients", clients, "fewer clients, or more rows", but)
            if len(takers):
                even = len(rows) / len(takers)
                least, most = max(int(even / 10), 1), max(int(even), 2)
                cuts = np.cumsum(draw.integers(least, most, len(takers) - 1))
                owner[rows] = takers[np.searchsorted(cuts, np.arange(len(rows)), side="right")]
                lacking[takers] -= 1
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
        counts = self._counts(samples, pairs, supply, rng) if samples else None
        if counts is None:
            but = f"too few of the {supply.tolist()} rows of the classes suit them"
            if not samples:
                raise refused("data.partition.clients", clients, "fewer clients, or classes of more equal size", but)
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

    def _counts(self, samples: int, pairs: np.ndarray, supply: np.ndarray, rng: Rng) -> np.ndarray | None:
        """Count the rows of each class that each client takes (clients, classes); None if a class has too few."""
        clients, half = len(pairs), int(round(self.p * samples / 2, 9))
        majority = np.zeros((clients, len(supply)), dtype=np.int64)
        np.add.at(majority, (np.repeat(np.arange(clients), 2), pairs.reshape(-1)), half)
        left = supply - majority.sum(0)
        if (left < 0).any():
            return None
        others = np.ones_like(majority, dtype=np.float64)
        np.put_along_axis(others, pairs, 0.0, axis=1)
        rest = draw_counts(others, samples - 2 * half, left, rng.at("others").numpy())
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

    The "practical" partition of PFLlib (released code) is `alpha = 0.1` with `split.merge`. The code draws until each
    client has one row, and 40 rows with its batches of ten in former versions. The partition of FedCCFA (released code)
    is `base = 5` and `limited = false`. The source's test set follows the shares of each client; the code deals two
    test rows of each class to each client first.

    Args:
        clients: number of clients over all groups.
        alpha: concentration; a small value means that few clients share a class.
        min_samples: smallest number of rows of a client; 0 allows clients without rows.
        tries: number of draws before rows are moved.
        base: number of rows of each class that each client gets before the draw.
        limited: give no more of a class to clients that hold an equal part.
    """

    clients: Count = 100
    alpha: Positive = 0.5
    min_samples: Whole = 10
    tries: Count = 100
    base: Whole = 0
    limited: Flag = True
    kind: Literal["dirichlet-class"] = "dirichlet-class"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients."""
        check_enough(len(y), clients * max(self.min_samples, 1), clients)
        supply = np.bincount(y, minlength=classes)
        if (supply[supply > 0] < clients * self.base).any():
            c = int(np.flatnonzero((supply > 0) & (supply < clients * self.base))[0])
            but = f"label {c} has {supply[c]} rows for {clients} clients"
            raise refused("data.partition.base", self.base, f"at most {supply[c] // clients}", but)
        for attempt in range(self.tries):
            draw = rng.at("rows", attempt).numpy()
            owner = np.empty(len(y), dtype=np.int64)
            counts = np.zeros(clients, dtype=np.int64)
            for c in range(classes):
                rows = draw.permutation(np.flatnonzero(y == c))
                share = draw.dirichlet(np.full(clients, self.alpha))
                if self.limited:  # NIID-Bench: clients that hold an equal part already get none of this class.
                    share = share * (counts < len(y) / clients)
                share = share / share.sum() if share.sum() > 0 else np.full(clients, 1 / clients)
                dealt, rows = np.split(rows, [clients * self.base if len(rows) else 0])
                owner[dealt] = np.arange(len(dealt)) % clients
                cuts = (np.cumsum(share) * len(rows)).astype(np.int64)[:-1]
                owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
                counts += np.bincount(owner[y == c], minlength=clients)
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

Arrays = Sequence[np.ndarray]
SuperClasses = Annotated[tuple[Annotated[tuple[Whole, ...], Field(min_length=1)], ...], Field(min_length=1)]


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
    groups: Annotated[Literal["cifar-100"] | SuperClasses, allowing("'cifar-100', or lists of labels")] = "cifar-100"
    kind: Literal["pachinko"] = "pachinko"

    def __post_init__(self) -> None:
        labels = [label for group in self.super_classes for label in group]
        if len(set(labels)) < len(labels):
            twice = max(labels, key=labels.count)
            raise ValueError(f"label {twice} stands twice in groups; a label belongs to one super-class")

    @property
    def super_classes(self) -> SuperClasses:
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
    root: np.ndarray, fine: Arrays, supers: Arrays, wanted: int, left: np.ndarray, draw: np.random.Generator
) -> np.ndarray:
    """Draw for each client the number of its `wanted` rows from each label.

    The number of rows of a super-class does not depend on the choice of its labels, so it is drawn first.

    Args:
        root: (clients, super-classes) shares.
        fine: (clients, labels of the super-class) shares, for each super-class.
        supers: the labels of each super-class.
        wanted: number of rows of each client.
        left: (labels,) remaining rows; lowered in place.

    Returns:
        Counts (clients, labels).
    """
    counts = np.zeros((len(root), len(left)), dtype=np.int64)
    supply = np.array([left[labels].sum() for labels in supers])
    for client in range(len(root)):
        falls = draw_counts(root[[client]], wanted, supply, draw)[0]
        for labels, shares, number in zip(supers, fine, falls.tolist(), strict=True):
            inside = left[labels]
            counts[client, labels] = draw_counts(shares[[client]], number, inside, draw)[0]
            left[labels] = inside
    return counts


OnePartition = IID | DirichletClass | Dirichlet | Pachinko | LabelShards | LabelsInOrder | Majority
"""Partitions that deal each row of a group to one client."""


@ingredient
class ByGroup(Dealing):
    """A separate partition for each group of clients, so that groups may differ in their number of clients.

    Held-out clients are still divided equally between the groups; each is dealt by its group's partition.

    Args:
        of: a partition for each group name: "iid", "dirichlet", "dirichlet-class", "pachinko", "label-shards",
            "labels-in-order" or "majority"; its `clients` is the number of clients of the group.

    >>> partition = ByGroup(of={"day": IID(clients=3), "night": Dirichlet(clients=5, alpha=0.1)})
    >>> partition.clients, [part.clients for part in partition.within(("night", "day"))]
    (8, [5, 3])
    """

    of: dict[str, Annotated[OnePartition, Field(discriminator="kind"), Spelled]]
    kind: Literal["by-group"] = "by-group"

    @property
    def clients(self) -> int:
        """Number of clients over all groups."""
        return sum(part.clients for part in self.of.values())

    @property
    def min_samples(self) -> int:
        """Smallest number of rows that a client of any group may have."""
        return min(getattr(part, "min_samples", 1) for part in self.of.values())

    def within(self, names: tuple[str, ...]) -> list[OnePartition]:
        """Return the partition of each group.

        Raises:
            FedtideError: a group has no partition, or a partition has no group.
        """
        if set(self.of) != set(names):
            raise refused("data.partition.of", list(self.of), f"one for each group, {', '.join(names)} (data.groups)")
        return [self.of[name] for name in names]


Partition = Annotated[
    OnePartition | Resample | Natural | Rotation | ByGroup | Saved | Python, Field(discriminator="kind")
]


def follow(y: np.ndarray, profile: np.ndarray, rng: Rng) -> Ragged:
    """Deal other rows so that each client's share of every class is that in `profile`.

    Args:
        y: labels of the rows to deal.
        profile: (clients, classes) number of rows of each class that each client already holds.
        rng: the key of the shuffle.
    """
    draw = rng.numpy()
    owner = np.full(len(y), -1, dtype=np.int64)
    for c in np.flatnonzero(profile.sum(0)):
        rows = draw.permutation(np.flatnonzero(y == c))
        cuts = (profile[:, c].cumsum() * (len(rows) / profile[:, c].sum())).round().astype(np.int64)
        owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
    return Ragged.from_owner(owner, len(profile))


def with_limit(partition: Any, rows: int | None) -> Any:
    """Return the partition with at most `rows` rows per client; None if it has no such limit."""
    if rows is None and isinstance(partition, Resample):
        return None  # it shares rows and so cannot divide them
    names = {field.name for field in fields(partition)} if is_dataclass(partition) else set()
    return replace(partition, samples=rows) if "samples" in names else None


def remove_labels(rows: Rows, partition: Partition, groups: Groups) -> Rows:
    """Return sequences as rows of a single class; raise for partitions and groups that need labels."""
    of: dict[str, Any] = partition.of if isinstance(partition, ByGroup) else {}
    but = f"rows of {rows.name} are sequences"
    for key, part in [(f".of.{name}", part) for name, part in of.items()] or [("", partition)]:
        if part.by_labels:
            allowed = "iid" if of else "iid, natural, resample, saved"
            raise refused(f"data.partition{key}.kind", part.kind, allowed, f"it deals by labels, and {but}")
    if isinstance(groups, ByLabels):
        raise refused("data.groups.by", "labels", "none, domain", but)
    return replace(rows, y=torch.zeros(len(rows), dtype=torch.int64), classes=1, padding=None, unscored=())


@dataclass(frozen=True)
class Dealt:
    """Rows of each client before the division into parts: training clients, their given test rows, held-out clients.

    names: names of the groups. client_names: the source's own names of the clients, in their order.
    """

    seen: Ragged
    test: Ragged
    held_out_clients: Ragged
    group: Tensor
    names: tuple[str, ...]
    client_names: tuple[str, ...] = ()


def deal(rows: Rows, free: Tensor, partition: Any, groups: Groups, held_out_clients: HeldOutClients, rng: Rng) -> Dealt:
    """Deal each group's `free` rows to its share of the clients; ids go group by group, held-out ones last."""
    if isinstance(partition, Natural):
        return _deal_natural(rows, free, partition, groups, held_out_clients, rng)
    held_out = torch.zeros(len(rows), dtype=torch.bool) if rows.held_out is None else rows.held_out
    masks, names = _row_masks(rows, partition, groups)
    parts = partition.within(names) if isinstance(partition, ByGroup) else [partition] * len(masks)
    seen, test, outside, sizes = [], [], [], []
    for k, (mask, part) in enumerate(zip(masks, parts, strict=True)):
        n = part.clients if isinstance(partition, ByGroup) else _part_size(partition.clients, k, len(masks))
        n_unseen = _part_size(held_out_clients.clients, k, len(masks))
        trained, tested = mask & free & ~held_out, mask & held_out
        if not n or not trained.any():
            but = f"of {len(masks)} groups '{names[k]}' gets no {'rows' if n else 'clients'}"
            raise refused("data.partition.clients", partition.clients, "rows and clients for each group", but)
        prefix = f"data.partition.of.{names[k]}" if isinstance(partition, ByGroup) else "data.partition"
        try:
            if n_unseen:
                out_of = tested if tested.any() else trained
                taken = _deal_held_out(part, rows, out_of, n, n_unseen, held_out_clients, rng.at(k, "unseen"))
                trained = trained & ~torch.zeros_like(trained).index_fill_(0, taken.rows.long(), True)
                outside.append(taken)
            seen.append(_deal(part, rows, trained, n, rng.at(k)))
        except FedtideError as error:
            raise FedtideError(str(error).replace("data.partition", prefix, 1)) from None
        if tested.any() and not n_unseen:
            where, counts = tested.nonzero().flatten(), _class_counts(seen[-1], rows)
            test.append(follow(rows.y[where].numpy(), counts, rng.at(k, "test")).translated(where))
        sizes.append((n, n_unseen))
    if test and len(test) < len(masks):
        allowed = f"{len(masks)} or more, or a test set for every group"
        but = f"some groups have test rows of their own in {rows.name}, and some have none"
        raise refused("data.held_out_clients.clients", held_out_clients.clients, allowed, but)
    which = torch.arange(len(masks)).repeat(2).repeat_interleave(torch.tensor(sizes).T.flatten())
    none = Ragged.empty(sum(n for n, _ in sizes))
    return Dealt(Ragged.join(seen), Ragged.join(test) if test else none, Ragged.join(outside), which, names)


def _row_masks(rows: Rows, partition: Partition, groups: Groups) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return the mask of each group's rows and the group names; a rotation gives every group all rows."""
    row_group, names = groups.of(rows)
    if not isinstance(partition, Rotation):
        return [torch.from_numpy(row_group == k) for k in range(len(names))], names
    if len(names) > 1:
        raise refused("data.groups.by", groups.by, "'none'", "the partition 'rotation' makes the groups itself")
    angles = partition.angles
    return [torch.ones(len(rows), dtype=torch.bool)] * len(angles), tuple(f"{angle} degrees" for angle in angles)


def _deal(partition: Any, rows: Rows, mask: Tensor, clients: int, rng: Rng) -> Ragged:
    where = mask.nonzero().flatten()
    dealt = partition.deal(rows.y[where].numpy(), rows.classes, clients, rng)
    if not isinstance(dealt, Ragged):
        raise refused("data.partition.function", dealt, "deal() that returns a fedtide.data.ragged.Ragged")
    # The lists of `resample` are new here, and with millions of clients there is no room for a copy.
    return dealt.translated(where, in_place=isinstance(partition, Resample))


def _deal_held_out(
    partition: Partition, rows: Rows, mask: Tensor, seen: int, held_out_clients: int, settings: HeldOutClients, rng: Rng
) -> Ragged:
    """Deal rows to the held-out clients: `samples` each, else a whole given test set, else their share of all rows."""
    own_tests = rows.held_out is not None and bool(rows.held_out[mask].any())
    samples = settings.samples or (None if own_tests else max(int(mask.sum()) // (seen + held_out_clients), 1))
    within = with_limit(partition, samples)
    if within is not None:
        return _deal(within, rows, mask, held_out_clients, rng)
    if samples is not None:  # A kind without a limit deals the wanted number of rows, drawn at random.
        where = mask.nonzero().flatten()
        drawn = rng.at("drawn").numpy().permutation(len(where))[: held_out_clients * samples]
        mask = torch.zeros_like(mask).index_fill_(0, where[torch.from_numpy(drawn)], True)
    return _deal(partition, rows, mask, held_out_clients, rng)


def _class_counts(dealt: Ragged, rows: Rows) -> np.ndarray:
    """Count the rows of each class of each client (clients, classes)."""
    counts = [count_pairs(part.owner, rows.y[part.rows.long()], len(part), rows.classes) for part in dealt.blocks()]
    return torch.cat(counts).numpy()


def _deal_natural(
    rows: Rows, free: Tensor, partition: Natural, groups: Groups, held_out_clients: HeldOutClients, rng: Rng
) -> Dealt:
    """Draw clients of the source at random and hold some out; a client's group is that of most of its rows."""
    if rows.client is None:
        raise refused("data.partition.kind", "natural", "a kind that deals rows", f"{rows.name} names no clients")
    row_group, names = groups.of(rows)
    client, inside_groups = rows.client.numpy(), (row_group >= 0) & free.numpy()
    held_out = np.zeros(len(rows), dtype=bool) if rows.held_out is None else rows.held_out.numpy()
    n = int(client.max()) + 1
    large = np.flatnonzero(np.bincount(client[inside_groups & ~held_out], minlength=n) >= partition.min_samples)
    if partition.samples is not None:
        inside_groups &= rank_rows(np.where(inside_groups, 2 * client + held_out, 2 * n)) < partition.samples
    seen = partition.clients or len(large) - held_out_clients.clients
    wanted = seen + held_out_clients.clients
    if wanted > len(large) or seen <= 0:
        who = f"the clients of {rows.name} with {partition.min_samples} rows or more"
        allowed = f"at most {len(large)}, {who}, of which one at least is not held out"
        raise refused("data.partition.clients and data.held_out_clients.clients", wanted, allowed)
    chosen = rng.at("natural").numpy().permutation(large)[:wanted]
    chosen = np.concatenate([np.sort(chosen[:seen]), np.sort(chosen[seen:])])
    number = np.full(n, -1)
    number[chosen] = np.arange(wanted)
    owner = np.where(inside_groups, number[client], -1)
    votes = np.zeros((wanted, len(names)), dtype=np.int64)
    np.add.at(votes, (owner[owner >= 0], row_group[owner >= 0]), 1)
    inside, outside = np.where(owner < seen, owner, -1), np.where(owner >= seen, owner - seen, -1)
    train, test = (Ragged.from_owner(np.where(held_out == part, inside, -1), seen) for part in (False, True))
    unseen = Ragged.from_owner(outside, held_out_clients.clients)
    client_names = tuple(rows.client_names[client] for client in chosen.tolist()) if rows.client_names else ()
    return Dealt(train, test, unseen, torch.from_numpy(votes.argmax(1)), names, client_names)


def _part_size(total: int, k: int, parts: int) -> int:
    """Return the size of the k-th of `parts` nearly equal parts of `total`."""
    return total // parts + (k < total % parts)
