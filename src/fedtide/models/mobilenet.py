"""MobileNetV2 for images, which returns logits; the feature is the input of `head`, a mean over the image."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fedtide.fields.types import OpenFraction, ingredient
from fedtide.models.images import check_picture, dropout, sequence
from fedtide.models.resnet import Norm, QuietLinear, Residual, two_groups

STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion t, channels c, blocks n and stride s of the first block for each stage, as in Table 2 of the paper."""

STEM, LAST = 32, 1280
"""Output channels of the first convolution and of the last one, whose mean is the feature."""


@ingredient
class MobileNetV2:
    """MobileNetV2 with width 1.0: a stem, 17 inverted residuals, a convolution to 1280, mean over the image, head.

    Sandler, Howard, Zhu, Zhmoginov, Chen: *MobileNetV2: Inverted Residuals and Linear Bottlenecks*, CVPR 2018. Initial
    weights are torchvision's: He normal by fan-out in the convolutions, N(0, 0.01^2) in the head.

    "imagenet" is the standard form, which shrinks an image 32 times. "cifar" is for 32x32 images, which it shrinks to
    4x4: the stem and the first stage with stride 2 have stride 1 instead.

    Args:
        form: "cifar" or "imagenet".
        norm: "batch" is BatchNorm, "group" is GroupNorm in 2 groups.
        dropout: probability before the head.

    >>> sum(p.numel() for p in MobileNetV2(form="imagenet").build((3, 224, 224), 1000).parameters())
    3504872
    >>> [sum(p.numel() for p in MobileNetV2().build((3, 32, 32), classes).parameters()) for classes in (10, 110)]
    [2236682, 2364782]
    """

    form: Literal["cifar", "imagenet"] = "cifar"
    norm: Literal["batch", "group"] = "batch"
    dropout: OpenFraction = 0.2
    kind: Literal["mobilenet-v2"] = "mobilenet-v2"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        depth, _, _ = check_picture(self.kind, shape, smallest=7)
        norm: Norm = two_groups if self.norm == "group" else nn.BatchNorm2d
        # For small images the first two of the five strides of 2 become 1: those of the stem and of stage 2.
        small = self.form == "cifar"
        stages: dict[str, nn.Module] = {}
        before = STEM
        for i, (expansion, channels, blocks, stride) in enumerate(STAGES, start=1):
            stage = nn.Sequential()
            for block in range(blocks):
                first = 1 if block or (small and i == 2) else stride
                stage.append(_block(before, channels, first, expansion, norm))
                before = channels
            stages[f"stage{i}"] = stage
        return sequence(
            stem=FanOutConv2d(depth, STEM, 3, 1 if small else 2), norm1=norm(STEM), relu1=nn.ReLU6(), **stages,
            last=FanOutConv2d(before, LAST, 1), norm2=norm(LAST), relu2=nn.ReLU6(), mean=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(), **dropout("dropout", self.dropout), head=QuietLinear(LAST, classes),
        )  # fmt: skip


class FanOutConv2d(nn.Conv2d):
    """A convolution without bias whose initial weights follow He's normal distribution by fan-out."""

    def __init__(self, depth: int, channels: int, size: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(depth, channels, size, stride, size // 2, groups=groups, bias=False)

    def reset_parameters(self) -> None:
        """Draw weights from N(0, 2 / fan-out) with fan-out = channels x kernel pixels, for any number of groups."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


def _block(before: int, channels: int, stride: int, expansion: int, norm: Norm) -> nn.Module:
    """Build an inverted residual: expand, depthwise convolution with the stride, project without a ReLU."""
    wide = expansion * before
    wider = [] if expansion == 1 else [FanOutConv2d(before, wide, 1), norm(wide), nn.ReLU6()]
    body = nn.Sequential(
        *wider, FanOutConv2d(wide, wide, 3, stride, groups=wide), norm(wide), nn.ReLU6(),
        FanOutConv2d(wide, channels, 1), norm(channels),
    )  # fmt: skip
    return Residual(body, nn.Identity(), nn.Identity()) if stride == 1 and before == channels else body
