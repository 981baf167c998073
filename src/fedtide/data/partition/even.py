"""Partitions that ignore labels: equal parts, shared rows, natural clients, rotated copies."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.data.partition.draws import Dealing, check_enough
from fedtide.data.ragged import Ragged
from fedtide.fields.types import Count, ingredient


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
