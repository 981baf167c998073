"""Partitions: seeded rules that deal rows to clients, disjoint unless stated otherwise, and always terminating.

`follow` deals the source's own test set, so that every client is tested on the classes that it trains on.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.data.partition.dealing import IID, Dealing, DealtBy, Natural, Resample, Rotation
from fedtide.data.partition.skewed import Dirichlet, DirichletClass, LabelShards, Majority, Pachinko
from fedtide.data.ragged import Ragged
from fedtide.data.saved import Saved
from fedtide.fields.types import Spelled, ingredient
from fedtide.fields.user_code import Python

OnePartition = IID | DirichletClass | Dirichlet | Pachinko | LabelShards | Majority
"""Partitions that deal each row of a group to one client."""


@ingredient
class ByGroup(Dealing):
    """A separate partition for each group of clients, so that groups may differ in their number of clients.

    Held-out clients are still divided equally between the groups; each is dealt by its group's partition.

    Args:
        of: a partition for each group name: "iid", "dirichlet", "dirichlet-class", "pachinko", "label-shards" or
            "majority"; its `clients` is the number of clients of the group.

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
    IID | DirichletClass | Dirichlet | Pachinko | LabelShards | Majority | Resample | Natural | Rotation | ByGroup
    | Saved | Python,
    Field(discriminator="kind"),
]  # fmt: skip


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


__all__ = [
    "IID", "ByGroup", "Dealing", "DealtBy", "Dirichlet", "DirichletClass", "LabelShards", "Majority", "Natural",
    "Pachinko", "Partition", "Resample", "Rotation", "Saved", "follow", "with_limit",
]  # fmt: skip
