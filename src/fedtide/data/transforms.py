"""What is done to pictures before a model sees them: steps without chance, the same in training and in testing.

They come last: bytes have become 0..1, and a shift has turned what it turns. A source's own rows stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.core.config_types import Count, Finite, Positive, Spelled, ingredient
from fedtide.core.errors import FedtideError


@ingredient
class CenterCrop:
    """The square in the middle of every picture; of an odd rest one row or column more is cut off below and right.

    Args:
        size: rows and columns that are kept.

    >>> CenterCrop(2).apply(torch.arange(16.0).reshape(1, 1, 4, 4)).tolist()
    [[[[5.0, 6.0], [9.0, 10.0]]]]
    """

    size: Count
    kind: Literal["center-crop"] = "center-crop"

    def shape_after(self, where: str, name: str, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """The shape of a picture (channels, height, width) afterwards; raises where the picture is too small."""
        depth, height, width = shape
        if self.size > min(height, width):
            raise FedtideError(
                f"{where}.size: found {self.size}, allowed: at most {min(height, width)}, as rows of {name} are "
                f"pictures of {height} x {width}"
            )
        return depth, self.size, self.size

    def apply(self, x: Tensor) -> Tensor:
        """Pictures (rows, channels, height, width), cropped."""
        top, left = ((side - self.size) // 2 for side in x.shape[-2:])
        return x[..., top : top + self.size, left : left + self.size].contiguous()


@ingredient
class Downscale:
    """Every picture made smaller: each pixel the mean of a square of so many by so many; an odd rest is cut off.

    Args:
        factor: rows and columns of that square.

    >>> Downscale(2).apply(torch.arange(16.0).reshape(1, 1, 4, 4)).tolist()
    [[[[2.5, 4.5], [10.5, 12.5]]]]
    """

    factor: Annotated[int, Field(strict=True, ge=2)] = 2
    kind: Literal["downscale"] = "downscale"

    def shape_after(self, where: str, name: str, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """The shape of a picture (channels, height, width) afterwards; raises where nothing would be left."""
        depth, height, width = shape
        if self.factor > min(height, width):
            raise FedtideError(
                f"{where}.factor: found {self.factor}, allowed: 2 to {min(height, width)}, as rows of {name} are "
                f"pictures of {height} x {width}"
            )
        return depth, height // self.factor, width // self.factor

    def apply(self, x: Tensor) -> Tensor:
        """Pictures (rows, channels, height, width), shrunk."""
        return F.avg_pool2d(x, self.factor)


@ingredient
class Standardize:
    """Every picture less its own mean, divided by its own standard deviation, over all its pixels and channels.

    Divided is by at least 1/sqrt(numbers of the picture), so that a blank picture becomes zeros and a faint one is not
    blown up: `(x - mean) / max(std, 1/sqrt(n))`, as `tf.image.per_image_standardization` does.

    >>> Standardize().apply(torch.tensor([[[[-3.0, 1.0], [5.0, 9.0]]]])).mul(5**0.5).round().tolist()
    [[[[-3.0, -1.0], [1.0, 3.0]]]]
    """

    kind: Literal["standardize"] = "standardize"

    def shape_after(self, where: str, name: str, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """The shape of a picture (channels, height, width) afterwards: the same."""
        return shape

    def apply(self, x: Tensor) -> Tensor:
        """Pictures (rows, channels, height, width), standardized."""
        if not len(x):
            return x  # torch warns of the deviation of nothing
        std, mean = torch.std_mean(x, (1, 2, 3), correction=0, keepdim=True)
        return (x - mean).div_(std.clamp_(min=1 / math.sqrt(x[0].numel())))


@ingredient
class Normalize:
    """Every channel less a given mean, divided by a given standard deviation; pictures of bytes count from 0 to 1.

    Args:
        mean: one number per channel.
        std: one number per channel.

    >>> Normalize(mean=(0.5,), std=(0.25,)).apply(torch.tensor([[[[0.0, 1.0]]]])).tolist()
    [[[[-2.0, 2.0]]]]
    """

    mean: Annotated[tuple[Finite, ...], Field(min_length=1)]
    std: Annotated[tuple[Positive, ...], Field(min_length=1)]
    kind: Literal["normalize"] = "normalize"

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise ValueError(f"{len(self.mean)} mean for {len(self.std)} std; give one of each per channel")

    def shape_after(self, where: str, name: str, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """The shape of a picture (channels, height, width) afterwards: the same; raises for other channels."""
        if len(self.mean) != shape[0]:
            numbers = "1 number" if len(self.mean) == 1 else f"{len(self.mean)} numbers"
            raise FedtideError(f"{where}.mean: found {numbers}, allowed: one per channel, {shape[0]}")
        return shape

    def apply(self, x: Tensor) -> Tensor:
        """Pictures (rows, channels, height, width), normalized."""
        mean, std = (torch.tensor(numbers, dtype=x.dtype).reshape(-1, 1, 1) for numbers in (self.mean, self.std))
        return (x - mean).div_(std)


Prepare = Annotated[CenterCrop | Downscale | Standardize | Normalize, Field(discriminator="kind")]
Step = Annotated[Prepare, Spelled]
"""One of them, in a file also by its name alone."""


def shape_after(steps: Sequence[Prepare], name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that rows have after all steps.

    Args:
        steps: in order.
        name: of the rows, for messages.
        shape: of one row before.

    Raises:
        FedtideError: a step does not fit; the line names its key in an experiment file.

    >>> shape_after([CenterCrop(24), Standardize()], "toy", (3, 32, 32))
    (3, 24, 24)
    """
    for number, step in enumerate(steps):
        where = f"data.transforms[{number}]"
        if len(shape) != 3:
            raise FedtideError(
                f"{where}.kind: found '{step.kind}', but rows of {name} have shape {shape}; "
                "allowed: pictures (channels, height, width)"
            )
        shape = step.shape_after(where, name, (shape[0], shape[1], shape[2]))
    return shape


def prepared(steps: Sequence[Prepare], x: Tensor) -> Tensor:
    """Rows after all steps, in order.

    >>> prepared([CenterCrop(2), Standardize()], torch.zeros(5, 1, 4, 4)).shape
    torch.Size([5, 1, 2, 2])
    """
    for step in steps:
        x = step.apply(x)
    return x
