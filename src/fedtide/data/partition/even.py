"""Partitions that look at no labels: equal parts, shared rows, natural clients, turned copies."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedtide.core.config_types import Count, ingredient
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.data.partition.draws import enough
from fedtide.data.ragged import Ragged


@ingredient
class IID:
    """Shuffle and cut into equal parts; the remainder goes to the first clients.

    Args:
        clients: how many, over all groups.
        samples: at most so many rows each; the rest stays unused.

    >>> IID(3).deal(np.zeros(7, int), 1, 3, Rng(0)).counts.tolist()
    [3, 2, 2]
    """

    clients: Count = 100
    samples: Count | None = None
    kind: Literal["iid"] = "iid"
    by_labels: ClassVar[bool] = False
    shares_rows: ClassVar[bool] = False

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal."""
        enough(len(y), clients * (self.samples or 1), clients)
        order = rng.at("rows").numpy().permutation(len(y))
        if self.samples is not None:
            return Ragged.equal(order[: clients * self.samples].reshape(clients, self.samples))
        owner = np.empty(len(y), dtype=np.int64)
        sizes = np.full(clients, len(y) // clients) + (np.arange(clients) < len(y) % clients)
        owner[order] = np.repeat(np.arange(clients), sizes)
        return Ragged.from_owner(owner, clients)


@ingredient
class Resample:
    """Every client draws `samples` different rows, and clients may share rows: index arrays for huge populations.

    Args:
        clients: how many, over all groups.
        samples: rows each.
    """

    clients: Count = 100
    samples: Count = 50
    kind: Literal["resample"] = "resample"
    by_labels: ClassVar[bool] = False
    shares_rows: ClassVar[bool] = True

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal.

        Raises:
            FedtideError: so many clients do not fit into memory.
        """
        enough(len(y), self.samples, 1)
        draw = rng.at("rows").numpy()
        try:
            if 2 * self.samples > len(y):
                return Ragged.equal(draw.random((clients, len(y))).argsort(axis=1)[:, : self.samples].astype(np.int32))
            table = draw.integers(0, len(y), (clients, self.samples), dtype=np.int32)
        except (MemoryError, ValueError) as error:  # a ValueError where it is more than any array can hold
            raise FedtideError(
                f"data.partition: {clients} clients with {self.samples} rows each do not fit into memory ({error}); "
                "allowed: fewer clients or rows"
            ) from None
        table.sort(axis=1)
        while (twice := table[:, 1:] == table[:, :-1]).any():
            at = np.nonzero(twice)
            table[at[0], at[1]] = draw.integers(0, len(y), len(at[0]), dtype=np.int32)
            changed = np.unique(at[0])
            table[changed] = np.sort(table[changed], axis=1)
        return Ragged.equal(table)


@ingredient
class Natural:
    """The source's own clients (writer, user, station), those with fewer than `min_samples` left out.

    Args:
        min_samples: fewest rows a client must have.
        clients: keep so many, drawn at random; None keeps all.
    """

    min_samples: Count = 1
    clients: Count | None = None
    kind: Literal["natural"] = "natural"
    by_labels: ClassVar[bool] = False
    shares_rows: ClassVar[bool] = False


@ingredient
class Rotation:
    """Groups of clients that each hold a full copy of the data, dealt equally, with pictures turned by an angle.

    The group is the ground truth of clustering; the turning itself is `shift.how`, which follows from the angles.
    Copies are shared between groups, so the partition is disjoint within a group only.

    Args:
        clients: how many, over all groups.
        angles: degrees per group, multiples of 90.
        samples: at most so many rows each.
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
