"""Transforms that are constant over time: identity, rotation, or permuted labels for each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import refused
from fedtide.data.shift.how.row_transform import ByGroup, Reading, RowTransform, check_exchangeable
from fedtide.data.shift.what.plan import PopulationView
from fedtide.draw.prose import listed
from fedtide.fields.types import Whole, ingredient


@ingredient
class Identity(Reading):
    """Rows as the source gives them."""

    kind: Literal["identity"] = "identity"
    exact: ClassVar[bool] = True


@ingredient
class Rotation(Reading):
    """Images of group k are rotated by `angles[k]` degrees, counter-clockwise.

    Args:
        angles: one angle per group, multiples of 90.

    >>> x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> Rotation(angles=(180,)).apply(x, torch.tensor([0]), torch.tensor([0]), 0.0)[0].tolist()
    [[[[4.0, 3.0], [2.0, 1.0]]]]
    """

    angles: tuple[Literal[0, 90, 180, 270], ...] = (0, 180)
    kind: Literal["rotation"] = "rotation"
    exact: ClassVar[bool] = True

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the groups with rotated images, and their angles."""
        names = groups or [f"group {k}" for k in range(len(self.angles))]
        turned = [f"of {n} clients by {a} degrees" for n, a in zip(names, self.angles, strict=False) if a]
        return f"Pictures are turned: those {listed(turned)}. " if turned else ""

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise if the transform does not fit the data; `classes` is None for sequences."""
        if len(self.angles) != groups:
            raise refused("shift.how.angles", self.angles, f"one per group, {groups}")
        turned = any(angle in (90, 270) for angle in self.angles)
        if len(shape) != 3 or (turned and shape[1] != shape[2]):
            raise refused("shift.how.kind", self.kind, "(square) images", f"rows have shape {shape}")

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning at `time`; `group` (rows,) is that of each row's client."""
        x = x.clone()
        for k, angle in enumerate(self.angles):
            if angle:
                mine = group == k
                x[mine] = torch.rot90(x[mine], angle // 90, (-2, -1))
        return x, y


@ingredient
class Permutation(Reading):
    """Labels of group k are permuted: label c of a row becomes `permutations[k][c]`.

    Args:
        permutations: one per group, each with every label once; if empty, the labels of the first group stay and those
            of the other groups are permuted at random.
    """

    permutations: tuple[tuple[Whole, ...], ...] = ()
    kind: Literal["permutation"] = "permutation"
    exact: ClassVar[bool] = True

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the groups between which labels differ."""
        if len(groups) < 2:
            return "Labels are exchanged, for all clients alike. "
        first, others = groups[0], listed(groups[1:])
        return f"Labels are exchanged: what is one class to {first} clients is another to {others} clients. "

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise if the transform does not fit the data; `classes` is None for sequences."""
        classes = check_exchangeable(self.kind, classes)
        if not self.permutations:
            return
        if len(self.permutations) != groups:
            raise refused("shift.how.permutations", self.permutations, f"one per group, {groups}")
        for k, permutation in enumerate(self.permutations):
            if sorted(permutation) != list(range(classes)):
                allowed = f"each label from 0 to {classes - 1} once"
                raise refused(f"shift.how.permutations: group {k}", list(permutation), allowed)

    def plan(self, view: PopulationView) -> RowTransform:
        """Build the transform of a population's rows."""
        classes, groups = view.rows.classes, int(view.group.max()) + 1
        table = self.permutations or [
            view.rng.at("permutation", k).numpy().permutation(classes) if k else np.arange(classes)
            for k in range(groups)
        ]
        return ByGroup(_Table(torch.tensor(np.array(table))), view)


@dataclass(frozen=True)
class _Table(Reading):
    """Permutations of the labels for each group (groups, classes)."""

    table: Tensor

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        return x, self.table[group, y]
