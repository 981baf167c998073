"""Gaussian classes that are generated on request and shifted for every client, for any number of clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.rng import Rng
from fedtide.data.generated import GeneratedRows
from fedtide.data.sources.files import Loading
from fedtide.fields.types import ClassCount, Count, NonNegative, Positive, ingredient

LARGEST = 10_000_000
"""Maximum size of the features of one client, or of the centers of all classes, in numbers."""


@ingredient
class Generated(Loading):
    """Rows as functions of the seed and the client's number, which are neither stored nor dealt.

    The center of class c is N(0, separation^2) per dimension, equal for all clients; client i adds an offset N(0,
    spread^2) to all of its rows, and N(0, noise^2) to each row. Labels are drawn uniformly. The source needs
    `data.partition = "natural"` and refuses settings that need all rows: groups, held-out clients, public rows, drift.

    Args:
        clients: number of clients.
        samples: number of rows of each client; `data.split` gives the shares for validation and testing.
        classes: number of labels.
        dims: number of features.
        separation: standard deviation of class centers.
        spread: standard deviation of clients' offsets.
        noise: standard deviation within a class and a client.

    >>> rows = Generated(clients=1_000_000_000, samples=4).load(None, 0)
    >>> len(rows), rows.take(torch.tensor([3_999_999_999]))[0].shape
    (4000000000, torch.Size([1, 32]))
    """

    clients: Count = 1_000_000
    samples: Annotated[int, Field(ge=2)] = 25
    classes: ClassCount = 10
    dims: Count = 32
    separation: NonNegative = 1.0
    spread: NonNegative = 0.5
    noise: Positive = 1.0
    kind: Literal["generated"] = "generated"
    drawn: ClassVar[bool] = True

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
