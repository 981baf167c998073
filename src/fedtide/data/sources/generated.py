"""A crowd of any size: Gaussian classes that lie a little elsewhere for every client, made when they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.config_types import Count, NonNegative, Positive, ingredient
from fedtide.core.rng import Rng
from fedtide.data.generated import GeneratedRows

LARGEST = 10_000_000
"""Numbers that a client's rows, or the centers of all classes, may have."""


@ingredient
class Generated:
    """Rows of so many clients as functions of the seed and the client's number: none is kept, and nothing is dealt.

    The center of class c is N(0, separation^2) per dimension, for everyone the same; client i adds an offset
    N(0, spread^2) to all of its rows, and to each row N(0, noise^2). Labels are drawn uniformly. Needs
    `data.partition = "natural"`, and refuses what has to see all rows: groups, held-out clients, public rows, drift.

    Args:
        clients: how many.
        samples: that each has; `data.split` says how many are for validation and testing.
        classes: labels.
        dims: features.
        separation: standard deviation of class centers.
        spread: standard deviation of clients' offsets.
        noise: standard deviation within a class and a client.

    >>> rows = Generated(clients=1_000_000_000, rows=4).load(None, 0)
    >>> len(rows), rows.take(torch.tensor([3_999_999_999]))[0].shape
    (4000000000, torch.Size([1, 32]))
    """

    clients: Count = 1_000_000
    samples: Annotated[int, Field(ge=2)] = 25
    classes: Annotated[int, Field(ge=2)] = 10
    dims: Count = 32
    separation: NonNegative = 1.0
    spread: NonNegative = 0.5
    noise: Positive = 1.0
    kind: Literal["generated"] = "generated"
    drawn: ClassVar = True

    def __post_init__(self) -> None:
        if max(self.samples, self.classes) * self.dims > LARGEST:
            raise ValueError(
                f"found dims = {self.dims} with {self.samples} rows and {self.classes} classes, allowed: at most "
                f"{LARGEST} numbers in the rows of a client, or in the centers of the classes"
            )

    def load(self, directory: Path | None, seed: int) -> GeneratedRows:
        """Draw the centers of the classes; rows are made later."""
        key = Rng(seed).at("generated")
        centers = key.at("centres").numpy().normal(0, self.separation, (self.classes, self.dims))

        def make(client: int) -> tuple[Tensor, Tensor]:
            draw = key.at(client).numpy()
            y = draw.integers(0, self.classes, self.samples)
            offset = draw.normal(0, self.spread, self.dims)
            x = draw.standard_normal((self.samples, self.dims), dtype=np.float32)
            x *= self.noise
            x += (centers + offset).astype(np.float32)[y]
            return torch.from_numpy(x), torch.from_numpy(y)

        return GeneratedRows(self.kind, self.clients, self.samples, (self.dims,), self.classes, make)
