"""Partitions that ignore labels: equal parts, shared rows, natural clients, rotated copies, a user's own rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.data.ragged import Ragged
from fedtide.fields.types import Count, ingredient
from fedtide.fields.user_code import call


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
        if self.samples is not None:
            return Ragged.equal(order[: clients * self.samples].reshape(clients, self.samples))
        owner = np.empty(len(y), dtype=np.int64)
        sizes = np.full(clients, len(y) // clients) + (np.arange(clients) < len(y) % clients)
        owner[order] = np.repeat(np.arange(clients), sizes)
        return Ragged.from_owner(owner, clients)


@ingredient
class Resample(Dealing):
    """Draw `samples` different rows for every client; clients may share rows, which suits huge populations.

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
        """Deal rows with labels `y` to clients.

        Raises:
            FedtideError: the rows of all clients do not fit into memory.
        """
        check_enough(len(y), self.samples, 1)
        draw = rng.at("rows").numpy()
        try:
            if 2 * self.samples > len(y):
                return Ragged.equal(draw.random((clients, len(y))).argsort(axis=1)[:, : self.samples].astype(np.int32))
            table = draw.integers(0, len(y), (clients, self.samples), dtype=np.int32)
        except (MemoryError, ValueError) as error:  # a ValueError beyond the largest possible array
            but = f"their {self.samples} rows each do not fit into memory ({error})"
            raise refused("data.partition.clients", clients, "fewer clients or rows", but) from None
        table.sort(axis=1)
        while (twice := table[:, 1:] == table[:, :-1]).any():
            at = np.nonzero(twice)
            table[at[0], at[1]] = draw.integers(0, len(y), len(at[0]), dtype=np.int32)
            changed = np.unique(at[0])
            table[changed] = np.sort(table[changed], axis=1)
        return Ragged.equal(table)


@ingredient
class Natural(Dealing):
    """The source's own clients (writer, user, station) with at least `min_samples` rows.

    Args:
        min_samples: smallest number of rows of a client.
        clients: number of clients to draw at random; None keeps all.
    """

    min_samples: Count = 1
    clients: Count | None = None
    kind: Literal["natural"] = "natural"
    by_labels: ClassVar[bool] = False


@ingredient
class Rotation(Dealing):
    """Groups of clients that each hold a full copy of the data, dealt equally, with images rotated by an angle.

    The group is the ground truth of clustering; the rotation itself is `shift.how`, which follows from the angles.
    Groups share the copies, so that the partition is disjoint within a group only.

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
