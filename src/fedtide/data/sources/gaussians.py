"""Synthetic Gaussians with known groups."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from fedtide.core.rng import Rng
from fedtide.core.values import Count, NonNegative, Positive, Whole, ingredient
from fedtide.data.rows import Rows


@ingredient
class Gaussians:
    """`pools` groups of `classes` Gaussian blobs, in which the same label lies in different places.

    The centre of class c in pool k is N(0, separation^2) per dimension, plus an offset of the pool N(0, offset^2);
    rows are the centre plus N(0, noise^2).

    Args:
        rows: rows per pool.
        test_rows: rows per pool of the source's own test set.
        classes: labels.
        dims: features.
        pools: groups; called day and night where there are two.
        separation: standard deviation of class centres.
        offset: standard deviation of pool offsets.
        noise: standard deviation within a blob.
    """

    rows: Count = 2000
    test_rows: Whole = 0
    classes: Count = 4
    dims: Count = 8
    pools: Count = 2
    separation: NonNegative = 1.5
    offset: NonNegative = 1.0
    noise: Positive = 1.0
    kind: Literal["gaussians"] = "gaussians"
    drawn: ClassVar = True

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Draw the rows, from the seed alone."""
        draw = Rng(seed).at("gaussians").numpy()
        offsets = draw.normal(0, self.offset, (self.pools, 1, self.dims))
        centres = draw.normal(0, self.separation, (self.pools, self.classes, self.dims)) + offsets
        each = self.rows + self.test_rows
        pool = np.repeat(np.arange(self.pools), each)
        y = np.tile(np.arange(each) % self.classes, self.pools)
        x = (centres[pool, y] + draw.normal(0, self.noise, (len(y), self.dims))).astype(np.float32)
        held_out = np.tile(np.arange(each) >= self.rows, self.pools)
        names = ("day", "night") if self.pools == 2 else tuple(f"pool {k}" for k in range(self.pools))
        return Rows(
            self.kind,
            torch.from_numpy(x),
            torch.from_numpy(y),
            self.classes,
            torch.from_numpy(pool),
            names,
            held_out=torch.from_numpy(held_out) if self.test_rows else None,
        )
