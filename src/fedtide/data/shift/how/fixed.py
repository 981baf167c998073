"""Rows that mean the same at all times: as they are, turned, or with other labels for each group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.core.config_types import Whole, ingredient
from fedtide.core.errors import FedtideError
from fedtide.data.shift.how.meaning import ByGroup, Meaning, exchangeable
from fedtide.data.shift.what.plan import Holders


@ingredient
class Identity:
    """As they are."""

    kind: Literal["identity"] = "identity"

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise where the transform does not fit the data; `classes` is None for sequences."""

    def plan(self, holders: Holders) -> Meaning:
        """What the rows of every client mean when."""
        return ByGroup(self, holders)

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """The rows as they mean at `time`; `group` (rows,) is that of each row's client."""
        return x, y


@ingredient
class Rotation:
    """The pictures of group k are turned by `angles[k]` degrees, counter-clockwise.

    Args:
        angles: one per group, multiples of 90.

    >>> x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> Rotation(angles=(180,)).apply(x, torch.tensor([0]), torch.tensor([0]), 0.0)[0].tolist()
    [[[[4.0, 3.0], [2.0, 1.0]]]]
    """

    angles: tuple[Literal[0, 90, 180, 270], ...] = (0, 180)
    kind: Literal["rotation"] = "rotation"

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise where the transform does not fit the data; `classes` is None for sequences."""
        if len(self.angles) != groups:
            raise FedtideError(f"shift.how.angles: found {len(self.angles)} angles, allowed: one per group, {groups}")
        turned = any(angle in (90, 270) for angle in self.angles)
        if len(shape) != 3 or (turned and shape[1] != shape[2]):
            raise FedtideError(f"shift.how: rotation needs (square) pictures, found rows of shape {shape}")

    def plan(self, holders: Holders) -> Meaning:
        """What the rows of every client mean when."""
        return ByGroup(self, holders)

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """The rows as they mean at `time`; `group` (rows,) is that of each row's client."""
        x = x.clone()
        for k, angle in enumerate(self.angles):
            if angle:
                mine = group == k
                x[mine] = torch.rot90(x[mine], angle // 90, (-2, -1))
        return x, y


@ingredient
class Permuted:
    """The labels of group k are exchanged: label c of a row is read as `permutations[k][c]`.

    Args:
        permutations: one per group, each with every label once; none draws them: the first group's labels are as they
            are, those of the others exchanged at random.
    """

    permutations: tuple[tuple[Whole, ...], ...] = ()
    kind: Literal["permutation"] = "permutation"

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise where the transform does not fit the data; `classes` is None for sequences."""
        classes = exchangeable(self.kind, classes)
        if not self.permutations:
            return
        if len(self.permutations) != groups:
            raise FedtideError(
                f"shift.how.permutations: found {len(self.permutations)}, allowed: one per group, {groups}"
            )
        for k, permutation in enumerate(self.permutations):
            if sorted(permutation) != list(range(classes)):
                raise FedtideError(
                    f"shift.how.permutations: found {list(permutation)} for group {k}, allowed: each label from 0 to "
                    f"{classes - 1} once"
                )

    def plan(self, holders: Holders) -> Meaning:
        """What the rows of every client mean when."""
        classes, groups = holders.rows.classes, int(holders.group.max()) + 1
        table = self.permutations or [
            holders.rng.at("permutation", k).numpy().permutation(classes) if k else np.arange(classes)
            for k in range(groups)
        ]
        return ByGroup(_Table(torch.tensor(np.array(table))), holders)


@dataclass(frozen=True)
class _Table:
    """A permutation of the labels for each group (groups, classes)."""

    table: Tensor

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        return x, self.table[group, y]
