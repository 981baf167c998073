"""Data augmentation of images during local training; evaluation, decisions and features never use it.

Each image is changed independently, by random numbers drawn from the client's key, a whole batch at a time.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.core.errors import refused
from fedtide.fields.types import Count, Finite, Fraction, Whole, ingredient


@ingredient
class RandomCrop:
    """Pad images on all sides and cut out a window at a random place.

    Args:
        padding: width of the padding on each side.
        size: height and width of the window; None keeps the size of the image.
        fill: the padding. "edge" repeats the nearest pixel; a tuple gives one number per channel, in the model's scale;
            None means 0. With `data.transforms` that normalize, black is (0 - mean) / std.

    >>> x = torch.ones(2, 1, 3, 3)
    >>> RandomCrop(padding=1)(x, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 1, 3, 3])
    """

    padding: Whole = 4
    size: Count | None = None
    fill: Literal["edge"] | tuple[Finite, ...] | None = None
    kind: Literal["random-crop"] = "random-crop"

    def shape(self, shape: tuple[int, ...], key: str = "local") -> tuple[int, ...]:
        """Return the shape of an image after cropping.

        Raises:
            FedtideError: the samples are not images, or are smaller than the window.
        """
        depth, height, width = _picture(self.kind, shape, key)
        if isinstance(self.fill, tuple) and len(self.fill) != depth:
            raise refused(f"{key}.augment: 'random-crop': fill", list(self.fill), f"{depth} numbers, one per channel")
        largest = min(height, width) + 2 * self.padding
        if self.size is None:
            return shape
        if self.size > largest:
            side = f"the smaller side of pictures of {height} x {width} with the padding of {self.padding}"
            raise refused(f"{key}.augment: 'random-crop': size", self.size, f"at most {largest}, {side}")
        return depth, self.size, self.size

    def __call__(self, x: Tensor, draw: torch.Generator) -> Tensor:
        """Return a random window of each image (samples, channels, height, width)."""
        _, high, wide = self.shape(tuple(x.shape[1:]))
        padded = self._padded(x)
        rows, _, height, width = padded.shape
        top = torch.randint(height - high + 1, (rows,), generator=draw, device=x.device)
        left = torch.randint(width - wide + 1, (rows,), generator=draw, device=x.device)
        # A view of all windows of every image; one window per image is copied.
        windows = padded.unfold(2, high, 1).unfold(3, wide, 1)
        return windows[torch.arange(rows, device=x.device), :, top, left]

    def _padded(self, x: Tensor) -> Tensor:
        sides = (self.padding,) * 4
        if self.fill is None:
            return F.pad(x, sides)
        if self.fill == "edge":
            return F.pad(x, sides, mode="replicate")
        fill = torch.tensor(self.fill, dtype=x.dtype, device=x.device)[:, None, None]
        padded = fill.expand(len(x), -1, x.shape[2] + 2 * self.padding, x.shape[3] + 2 * self.padding).clone()
        padded[:, :, self.padding : self.padding + x.shape[2], self.padding : self.padding + x.shape[3]] = x
        return padded


@ingredient
class Flip:
    """Mirror images horizontally at random.

    Args:
        p: probability of mirroring an image.

    >>> Flip(p=1.0)(torch.tensor([[[[1.0, 2.0]]]]), torch.Generator()).tolist()
    [[[[2.0, 1.0]]]]
    """

    p: Fraction = 0.5
    kind: Literal["flip"] = "flip"

    def shape(self, shape: tuple[int, ...], key: str = "local") -> tuple[int, ...]:
        """Return the shape of an image, which mirroring leaves unchanged.

        Raises:
            FedtideError: the samples are not images.
        """
        return _picture(self.kind, shape, key)

    def __call__(self, x: Tensor, draw: torch.Generator) -> Tensor:
        """Mirror each image (samples, channels, height, width) with probability `p`."""
        mirrored = torch.rand(len(x), generator=draw, device=x.device) < self.p
        return torch.where(mirrored[:, None, None, None], x.flip(-1), x)


Augment = Annotated[RandomCrop | Flip, Field(discriminator="kind")]


def _picture(kind: str, shape: tuple[int, ...], key: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        allowed = "(channels, height, width), pictures; or [], no augmentation"
        raise refused(f"{key}.augment: '{kind}': shape of rows", shape, allowed)
    return shape[0], shape[1], shape[2]
