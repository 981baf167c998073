"""Deterministic transforms of images before a model sees them, for training and for testing.

They are applied last, after the scaling of bytes to 0..1 and after the shift. The stored rows do not change. If the
shift leaves pictures alone and the result is small, all rows are transformed once (`Rows.transformed`).
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.core.errors import refused
from fedtide.fields.types import Count, Finite, Positive, Spelled, ingredient


def _check_side(key: str, value: int, name: str, shape: tuple[int, int, int]) -> None:
    """Raise if a number of pixels is larger than a side of the images."""
    _, height, width = shape
    if value > min(height, width):
        allowed = f"at most {min(height, width)}, because images of {name} are {height} x {width}"
        raise refused(key, value, allowed)


@ingredient
class CenterCrop:
    """The central square of every image; an odd remainder costs one more row or column at the bottom and right.

    Args:
        size: number of rows and columns to keep.

    >>> CenterCrop(2).apply(torch.arange(16.0).reshape(1, 1, 4, 4)).tolist()
    [[[[5.0, 6.0], [9.0, 10.0]]]]
    """

    size: Count
    kind: Literal["center-crop"] = "center-crop"

    def shape_after(self, where: str, name: str, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the new shape (channels, height, width) of an image; raise if the image is too small."""
        _check_side(f"{where}.size", self.size, name, shape)
        return shape[0], self.size, self.size

    def apply(self, x: Tensor) -> Tensor:
        """Crop images (rows, channels, height, width)."""
        top, left = ((side - self.size) // 2 for side in x.shape[-2:])
        return x[..., top : top + self.size, left : left + self.size].contiguous()


@ingredient
class Downscale:
    """Downscaling of every image by means over squares of `factor` x `factor` pixels; a remainder is cut off.

    Args:
        factor: rows and columns of a square.

    >>> Downscale(2).apply(torch.arange(16.0).reshape(1, 1, 4, 4)).tolist()
    [[[[2.5, 4.5], [10.5, 12.5]]]]
    """

    factor: Annotated[int, Field(strict=True, ge=2)] = 2
    kind: Literal["downscale"] = "downscale"

    def shape_after(self, where: str, name: str, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the new shape (channels, height, width) of an image; raise if no pixel is left."""
        _check_side(f"{where}.factor", self.factor, name, shape)
        return shape[0], shape[1] // self.factor, shape[2] // self.factor

    def apply(self, x: Tensor) -> Tensor:
        """Downscale images (rows, channels, height, width)."""
        return F.avg_pool2d(x, self.factor)


@ingredient
class Standardize:
    """Standardization of every image by its own mean and standard deviation over all pixels and channels.

    The result is `(x - mean) / max(std, 1/sqrt(n))` with n numbers of the image, as in
    `tf.image.per_image_standardization`. So a blank image becomes zeros, and a faint image is not amplified.

    >>> Standardize().apply(torch.tensor([[[[-3.0, 1.0], [5.0, 9.0]]]])).mul(5**0.5).round().tolist()
    [[[[-3.0, -1.0], [1.0, 3.0]]]]
    """

    kind: Literal["standardize"] = "standardize"

    def shape_after(self, where: str, name: str, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the unchanged shape (channels, height, width) of an image."""
        return shape

    def apply(self, x: Tensor) -> Tensor:
        """Standardize images (rows, channels, height, width)."""
        if not len(x):
            return x  # avoids torch's warning about the deviation of an empty tensor
        std, mean = torch.std_mean(x, (1, 2, 3), correction=0, keepdim=True)
        return (x - mean).div_(std.clamp_(min=1 / math.sqrt(x[0].numel())))


@ingredient
class Normalize:
    """Normalization of every channel by a given mean and standard deviation, on the scale 0..1 for images of bytes.

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
        """Return the unchanged shape (channels, height, width) of an image; raise for another number of channels."""
        if len(self.mean) != shape[0]:
            raise refused(f"{where}.mean", list(self.mean), f"one number per channel, {shape[0]}")
        return shape

    def apply(self, x: Tensor) -> Tensor:
        """Normalize images (rows, channels, height, width)."""
        mean, std = (x.new_tensor(numbers).reshape(-1, 1, 1) for numbers in (self.mean, self.std))
        return (x - mean).div_(std)


Prepare = Annotated[CenterCrop | Downscale | Standardize | Normalize, Field(discriminator="kind")]
Step = Annotated[Prepare, Spelled]
"""A transform, which an experiment file may give by its name alone."""


def shape_after(steps: Sequence[Prepare], name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a row after all transforms.

    Args:
        steps: transforms in order.
        name: name of the rows, for messages.
        shape: shape of a row before.

    Raises:
        FedtideError: a transform does not fit; the message names its key in an experiment file.

    >>> shape_after([CenterCrop(24), Standardize()], "toy", (3, 32, 32))
    (3, 24, 24)
    """
    for number, step in enumerate(steps):
        where = f"data.transforms[{number}]"
        if len(shape) != 3:
            but = f"rows of {name} have shape {shape}"
            raise refused(f"{where}.kind", step.kind, "images (channels, height, width)", but)
        shape = step.shape_after(where, name, (shape[0], shape[1], shape[2]))
    return shape


def features(x: Tensor) -> Tensor:
    """Convert bytes to numbers from 0 to 1 and leave other features as they are."""
    return x.to(torch.float32).mul_(1 / 255) if x.dtype == torch.uint8 else x


def apply_transforms(steps: Sequence[Prepare], x: Tensor) -> Tensor:
    """Apply all transforms to rows, in order.

    >>> apply_transforms([CenterCrop(2), Standardize()], torch.zeros(5, 1, 4, 4)).shape
    torch.Size([5, 1, 2, 2])
    """
    for step in steps:
        x = step.apply(x)
    return x
