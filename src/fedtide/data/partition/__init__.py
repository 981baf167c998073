"""Partitions: seeded rules that deal rows to clients, disjoint unless stated otherwise, and always terminating.

`follow` deals the source's own test set, so that every client is tested on the classes that it trains on.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedtide.core.rng import Rng
from fedtide.data.partition.by_group import ByGroup
from fedtide.data.partition.classes import LabelShards, Majority
from fedtide.data.partition.dirichlet import Dirichlet, DirichletClass
from fedtide.data.partition.draws import Dealing
from fedtide.data.partition.even import IID, Natural, Resample, Rotation
from fedtide.data.partition.own import DealtBy
from fedtide.data.partition.pachinko import Pachinko
from fedtide.data.ragged import Ragged
from fedtide.data.saved import Saved
from fedtide.fields.user_code import Python

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
    known = {field.name for field in fields(partition)} if is_dataclass(partition) else set()
    return replace(partition, samples=rows) if "samples" in known else None


__all__ = [
    "IID", "ByGroup", "Dealing", "DealtBy", "Dirichlet", "DirichletClass", "LabelShards", "Majority", "Natural",
    "Pachinko", "Partition", "Resample", "Rotation", "Saved", "follow", "with_limit",
]  # fmt: skip
