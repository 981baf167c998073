"""How rows are to be read: a transform of (x, y) that depends on the client's group and the moment."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.values import ingredient


@ingredient
class Identity:
    """As they are."""

    kind: Literal["identity"] = "identity"

    def check(self, groups: int, shape: tuple[int, ...]) -> None:
        """Raise where the transform does not fit the data."""

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

    def check(self, groups: int, shape: tuple[int, ...]) -> None:
        """Raise where the transform does not fit the data."""
        if len(self.angles) != groups:
            raise FedtideError(f"shift.how.angles: found {len(self.angles)} angles, allowed: one per group, {groups}")
        turned = any(angle in (90, 270) for angle in self.angles)
        if len(shape) != 3 or (turned and shape[1] != shape[2]):
            raise FedtideError(f"shift.how: rotation needs (square) pictures, found rows of shape {shape}")

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """The rows as they mean at `time`; `group` (rows,) is that of each row's client."""
        x = x.clone()
        for k, angle in enumerate(self.angles):
            if angle:
                mine = group == k
                x[mine] = torch.rot90(x[mine], angle // 90, (-2, -1))
        return x, y


How = Annotated[Identity | Rotation, Field(discriminator="kind")]
