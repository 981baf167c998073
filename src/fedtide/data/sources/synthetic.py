"""Synthetic Gaussians: stored, or generated for each client on request."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.rng import Rng
from fedtide.data.rows import GeneratedRows, Rows, make_rows
from fedtide.data.sources.files import Loading
from fedtide.fields.types import ClassCount, Count, NonNegative, Positive, Whole, ingredient


@ingredient
class Gaussians(Loading):
    """Gaussian blobs, one per class in each of several groups; a label has another place in each group.

    If `data.target` is a number or a count, each row has a count that follows from its features, by another function in
    each domain.

    The center of class c in domain k is N(0, separation^2) per dimension, plus an offset of the domain N(0, offset^2).
    A row is the center plus N(0, noise^2).

    Args:
        samples: number of rows per domain.
        test_samples: number of rows per domain of the source's own test set.
        classes: number of labels.
        dims: number of features.
        domains: number of groups; two groups are named day and night.
        separation: standard deviation of class centers.
        offset: standard deviation of domain offsets.
        noise: standard deviation within a blob.
        every: seconds from each row of a domain to the next, from the beginning of 1970; None gives rows no time.
    """

    samples: Count = 2000
    test_samples: Whole = 0
    classes: ClassCount = 4
    dims: Count = 8
    domains: Count = 2
    separation: NonNegative = 1.5
    offset: NonNegative = 1.0
    noise: Positive = 1.0
    every: Positive | None = None
    kind: Literal["gaussians"] = "gaussians"
    measures: ClassVar[bool] = True
    drawn: ClassVar[bool] = True

    def load(self, directory: Path | None, seed: int, *, measured: bool = False) -> Rows:
        """Draw the rows from the seed alone."""
        draw = Rng(seed).at("gaussians").numpy()
        offsets = draw.normal(0, self.offset, (self.domains, 1, self.dims))
        centers = draw.normal(0, self.separation, (self.domains, self.classes, self.dims)) + offsets
        count = self.samples + self.test_samples
        domain = np.repeat(np.arange(self.domains), count)
        y = np.tile(np.arange(count) % self.classes, self.domains)
        x = (centers[domain, y] + draw.normal(0, self.noise, (len(y), self.dims))).astype(np.float32)
        held_out = np.tile(np.arange(count) >= self.samples, self.domains)
        names = ("day", "night") if self.domains == 2 else tuple(f"domain {k}" for k in range(self.domains))
        time = torch.arange(count).repeat(self.domains).double() * self.every if self.every is not None else None
        columns = {"domain": domain, "domain_names": names, "time": time, "held_out": held_out}
        rows = make_rows(self.kind, self.classes, x=x, y=y, **columns)
        return self._counted(rows, seed) if measured else rows

    def _counted(self, rows: Rows, seed: int) -> Rows:
        """Return the rows with counts as values: of a Poisson distribution, of mean exp(1 + a linear function of x).

        The function is another one in each domain, and differs by one standard deviation over rows.
        """
        draw = Rng(seed).at("gaussians", "values").numpy()
        slopes = draw.normal(0, 1, (self.domains, self.dims))
        domain = np.zeros(len(rows), np.int64) if rows.domain is None else rows.domain.numpy()
        linear = (slopes[domain] * rows.x.numpy()).sum(1)
        value = draw.poisson(np.exp(1 + np.clip(linear / linear.std(), -3, 3))).astype(np.float32)
        return replace(rows, y=torch.zeros(len(rows), dtype=torch.int64), classes=1, value=torch.from_numpy(value))


LARGEST = 10_000_000
"""Maximum size of the features of one client, or of the centers of all classes, in numbers."""


@ingredient
class Generated(Loading):
    """Rows as functions of the seed and the client's number, which are neither stored nor dealt.

    The center of class c is N(0, separation^2) per dimension, equal for all clients. Client i adds an offset N(0,
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
            settings = f"dims = {self.dims} with {self.samples} rows and {self.classes} classes"
            raise ValueError(f"found {settings}, allowed: at most {LARGEST} numbers for a client, and for all centers")

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
