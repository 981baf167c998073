"""Separate partitions for the groups of clients."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedtide.core.errors import refused
from fedtide.data.partition.classes import LabelShards, Majority
from fedtide.data.partition.dirichlet import Dirichlet, DirichletClass
from fedtide.data.partition.draws import Dealing
from fedtide.data.partition.even import IID
from fedtide.data.partition.pachinko import Pachinko
from fedtide.fields.types import Spelled, ingredient

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
