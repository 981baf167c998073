"""ShuffleNetV2 for images, which returns logits; the feature is the input of `head`, a mean over the image."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fedtide.fields.types import ingredient
from fedtide.models.images import check_picture, sequence
from fedtide.models.resnet import Norm, two_groups

STAGES = ((116, 4), (232, 8), (464, 4))
"""Channels and blocks of stages 2 to 4 with width 1.0, as in Table 5 of the paper; the first block has stride 2."""

STEM, LAST = 24, 1024
"""Output channels of the first convolution and of the last one, whose mean is the feature."""


@ingredient
class ShuffleNetV2:
    """ShuffleNetV2 with width 1.0: a stem, 16 blocks, a convolution to 1024, mean over the image, head.

    Ma, Zhang, Zheng, Sun: *ShuffleNet V2: Practical Guidelines for Efficient CNN Architecture Design*, ECCV 2018.
    Initial weights are torch's own, as in torchvision.

    "imagenet" is the standard form, which shrinks an image 32 times. "cifar" is for 32x32 images, which it shrinks to
    4x4: its stem has stride 1 and no max pool.

    Args:
        form: "cifar" or "imagenet".
        norm: "batch" is BatchNorm, "group" is GroupNorm in 2 groups.

    >>> [sum(p.numel() for p in ShuffleNetV2().build((3, 32, 32), classes).parameters()) for classes in (100, 1000)]
    [1356104, 2278604]
    """

    form: Literal["cifar", "imagenet"] = "cifar"
    norm: Literal["batch", "group"] = "batch"
    kind: Literal["shufflenet-v2"] = "shufflenet-v2"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        depth, _, _ = check_picture(self.kind, shape, smallest=7)
        norm: Norm = two_groups if self.norm == "group" else nn.BatchNorm2d
        small = self.form == "cifar"
        stages: dict[str, nn.Module] = {}
        before = STEM
        for i, (channels, blocks) in enumerate(STAGES, start=2):
            same = [Half(_body(channels // 2, channels // 2, 1, norm)) for _ in range(blocks - 1)]  # with stride 1
            stages[f"stage{i}"] = nn.Sequential(_smaller(before, channels, norm), *same)
            before = channels
        return sequence(
            stem=_conv(depth, STEM, 3, 1 if small else 2), norm1=norm(STEM), relu1=nn.ReLU(),
            **({} if small else {"pool": nn.MaxPool2d(3, 2, 1)}), **stages,
            last=_conv(before, LAST, 1), norm2=norm(LAST), relu2=nn.ReLU(), mean=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(), head=nn.Linear(LAST, classes),
        )  # fmt: skip


class Half(nn.Module):
    """A block that keeps one half of the channels, applies `body` to the other half and shuffles both."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, channels, height, width) to an output of equal shape."""
        kept, changed = x.chunk(2, 1)
        return shuffle(kept, self.body(changed))


class Both(nn.Module):
    """A block that applies `shortcut` and `body` to all channels and shuffles both outputs."""

    def __init__(self, shortcut: nn.Module, body: nn.Module) -> None:
        super().__init__()
        self.shortcut, self.body = shortcut, body

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, channels, height, width) to the block's channels with half the height and width."""
        return shuffle(self.shortcut(x), self.body(x))


def shuffle(a: Tensor, b: Tensor) -> Tensor:
    """Interleave the channels of two tensors: a0, b0, a1, b1, ...

    >>> shuffle(torch.zeros(1, 2, 1, 1), torch.ones(1, 2, 1, 1)).flatten()
    tensor([0., 1., 0., 1.])
    """
    return torch.stack((a, b), 2).flatten(1, 2)


def _smaller(before: int, channels: int, norm: Norm) -> nn.Module:
    """Build the first block of a stage, which has stride 2."""
    half = channels // 2
    shortcut = nn.Sequential(
        _conv(before, before, 3, 2, before), norm(before), _conv(before, half, 1), norm(half), nn.ReLU()
    )
    return Both(shortcut, _body(before, half, 2, norm))


def _body(before: int, channels: int, stride: int, norm: Norm) -> nn.Module:
    """Build a convolution 1x1, a depthwise one 3x3 with the stride and no ReLU after it, and another one 1x1."""
    return nn.Sequential(
        _conv(before, channels, 1), norm(channels), nn.ReLU(),
        _conv(channels, channels, 3, stride, channels), norm(channels),
        _conv(channels, channels, 1), norm(channels), nn.ReLU(),
    )  # fmt: skip


def _conv(before: int, channels: int, size: int, stride: int = 1, groups: int = 1) -> nn.Module:
    return nn.Conv2d(before, channels, size, stride, size // 2, groups=groups, bias=False)
