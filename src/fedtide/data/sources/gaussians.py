"""Synthetic Gaussians with known groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from fedtide.core.rng import Rng
from fedtide.data.rows import Rows
from fedtide.data.sources.files import Loading
from fedtide.fields.types import ClassCount, Count, NonNegative, Positive, Whole, ingredient


@ingredient
class Gaussians(Loading):
    """Gaussian blobs, one per class in each of several groups, where a label has another place in each group.

    Where `data.target` is a number or a count, each row has a count that follows from its features, otherwise in each
    domain.

    The center of class c in domain k is N(0, separation^2) per dimension, plus an offset of the domain N(0, offset^2);
    rows are the center plus N(0, noise^2).

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
    drawn: ClassVar[bool] = True

    def load_values(self, directory: Path | None, seed: int) -> Rows:
        """Draw the rows, with counts as values: of a Poisson distribution, of mean exp(1 + a linear function of x).

        The function is another one in each domain, and differs by one standard deviation over rows.
        """
        rows = self.load(directory, seed)
        draw = Rng(seed).at("gaussians", "values").numpy()
        slopes = draw.normal(0, 1, (self.domains, self.dims))
        domain = np.zeros(len(rows), np.int64) if rows.domain is None else rows.domain.numpy()
        linear = (slopes[domain] * rows.x.numpy()).sum(1)
        value = draw.poisson(np.exp(1 + np.clip(linear / linear.std(), -3, 3))).astype(np.float32)
        return replace(rows, y=torch.zeros(len(rows), dtype=torch.int64), classes=1, value=torch.from_numpy(value))

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Draw the rows from the seed alone."""
        draw = Rng(seed).at("gaussians").numpy()
        offsets = draw.normal(0, self.offset, (self.domains, 1, self.dims))
        centers = draw.normal(0, self.separation, (self.domains, self.classes, self.dims)) + offsets
        each = self.samples + self.test_samples
        domain = np.repeat(np.arange(self.domains), each)
        y = np.tile(np.arange(each) % self.classes, self.domains)
        x = (centers[domain, y] + draw.normal(0, self.noise, (len(y), self.dims))).astype(np.float32)
        held_out = np.tile(np.arange(each) >= self.samples, self.domains)
        names = ("day", "night") if self.domains == 2 else tuple(f"domain {k}" for k in range(self.domains))
        return Rows(
            self.kind,
            torch.from_numpy(x),
            torch.from_numpy(y),
            self.classes,
            torch.from_numpy(domain),
            names,
            time=None if self.every is None else torch.arange(each).repeat(self.domains).double() * self.every,
            held_out=torch.from_numpy(held_out) if self.test_samples else None,
        )
