"""Augmentation: pictures changed at random while a client trains. Whatever judges, decides or reads features sees none.

Each picture is changed on its own, by numbers drawn from the client's key, whole batches at a time.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.core.config_types import Count, Finite, Fraction, Whole, ingredient
from fedtide.core.errors import FedtideError


@ingredient
class RandomCrop:
    """Pictures are padded on all sides, and a window is cut out at a random place.

    Args:
        padding: how wide.
        size: height and width of the window; None means those of the picture.
        fill: what is padded with: the nearest pixel of the "edge", or one number per channel, as the model sees it: of
            pictures that `data.transforms` normalizes, black is (0 - mean) / std. None is 0.

    >>> x = torch.ones(2, 1, 3, 3)
    >>> RandomCrop(padding=1)(x, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 1, 3, 3])
    """

    padding: Whole = 4
    size: Count | None = None
    fill: Literal["edge"] | tuple[Finite, ...] | None = None
    kind: Literal["random-crop"] = "random-crop"

    def shape(self, shape: tuple[int, ...], key: str = "local") -> tuple[int, ...]:
        """The shape of a picture after it.

        Raises:
            FedtideError: rows are no pictures, or smaller than the window.
        """
        depth, height, width = _picture(self.kind, shape, key)
        if isinstance(self.fill, tuple) and len(self.fill) != depth:
            raise FedtideError(
                f"{key}.augment: 'random-crop' found fill {list(self.fill)}, allowed: {depth} numbers, one per channel"
            )
        largest = min(height, width) + 2 * self.padding
        if self.size is None:
            return shape
        if self.size > largest:
            raise FedtideError(
                f"{key}.augment: 'random-crop' found size {self.size}, allowed: at most {largest}, the smaller side of "
                f"pictures of {height} x {width} with the padding of {self.padding}"
            )
        return depth, self.size, self.size

    def __call__(self, x: Tensor, draw: torch.Generator) -> Tensor:
        """A window of each picture (rows, channels, height, width)."""
        _, high, wide = self.shape(tuple(x.shape[1:]))
        padded = self._padded(x)
        rows, _, height, width = padded.shape
        top = torch.randint(height - high + 1, (rows,), generator=draw)
        left = torch.randint(width - wide + 1, (rows,), generator=draw)
        # A view of all windows of every picture, of which one each is copied.
        windows = padded.unfold(2, high, 1).unfold(3, wide, 1)
        return windows[torch.arange(rows), :, top, left]

    def _padded(self, x: Tensor) -> Tensor:
        sides = (self.padding,) * 4
        if self.fill is None:
            return F.pad(x, sides)
        if self.fill == "edge":
            return F.pad(x, sides, mode="replicate")
        fill = torch.tensor(self.fill, dtype=x.dtype)[:, None, None]
        padded = fill.expand(len(x), -1, x.shape[2] + 2 * self.padding, x.shape[3] + 2 * self.padding).clone()
        padded[:, :, self.padding : self.padding + x.shape[2], self.padding : self.padding + x.shape[3]] = x
        return padded


@ingredient
class Flip:
    """Pictures are mirrored, left to right.

    Args:
        p: how likely.

    >>> Flip(p=1.0)(torch.tensor([[[[1.0, 2.0]]]]), torch.Generator()).tolist()
    [[[[2.0, 1.0]]]]
    """

    p: Fraction = 0.5
    kind: Literal["flip"] = "flip"

    def shape(self, shape: tuple[int, ...], key: str = "local") -> tuple[int, ...]:
        """The shape of a picture after it: the same.

        Raises:
            FedtideError: rows are no pictures.
        """
        return _picture(self.kind, shape, key)

    def __call__(self, x: Tensor, draw: torch.Generator) -> Tensor:
        """Each picture (rows, channels, height, width) as it is or mirrored."""
        mirrored = torch.rand(len(x), generator=draw) < self.p
        return torch.where(mirrored[:, None, None, None], x.flip(-1), x)


Augment = Annotated[RandomCrop | Flip, Field(discriminator="kind")]


def _picture(kind: str, shape: tuple[int, ...], key: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise FedtideError(
            f"{key}.augment: '{kind}' needs pictures (channels, height, width), found rows of shape {shape}; allowed: "
            "[], no augmentation"
        )
    return shape[0], shape[1], shape[2]
