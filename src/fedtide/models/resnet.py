"""Residual networks for images, which return logits; the feature is the input of `head`, a mean over the image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn

from fedtide.core.errors import FedtideError
from fedtide.fields.types import Count, ingredient
from fedtide.models.images import check_picture, sequence

Norm = Callable[[int], nn.Module]
"""Constructor of a normalization layer for a number of channels."""

WIDTHS = (64, 128, 256, 512)
"""Channels of the four stages of ResNet-18."""


@ingredient
class ResNet18:
    """ResNet-18: a stem, four stages of two residual blocks (64, 128, 256, 512 channels), mean over the image, head.

    "pre-activation" is the network of the periodic-shift paper for CIFAR: stem 7x7 with stride 2 and max pool 3x3 with
    stride 2, stages without strides, norm and ReLU before each convolution, GroupNorm without scale and offset. Initial
    weights are He normal, and N(0, 0.01^2) in the head, as in the authors' code.

    "cifar" is the network of the thesis on the re-weighted softmax, which uses norm = "mixed" except in section 3.7:
    stem 3x3, stages 2 to 4 halve the image, convolutions have biases, and the last pool covers 3x3 of the remaining
    4x4. The listing prints BatchNorm2d(64) in every stage; here it has the channels of its stage. Images of 17x17 to
    32x32.

    "imagenet" is the standard network: the stem of "pre-activation", the stages of "cifar", no biases.

    Args:
        form: "pre-activation", "cifar" or "imagenet".
        norm: "batch" is BatchNorm; "group" is GroupNorm in 2 groups; "mixed" (for "cifar") is BatchNorm in the stem and
            first in each block, GroupNorm elsewhere.

    >>> sum(p.numel() for p in ResNet18().build((3, 24, 24), 110).parameters())
    11223342
    >>> sum(p.numel() for p in ResNet18(norm="batch").build((3, 24, 24), 110).parameters())
    11232942
    >>> sum(p.numel() for p in ResNet18(form="cifar").build((3, 32, 32), 10).parameters())
    11178762
    >>> [sum(p.numel() for p in ResNet18(form="imagenet").build((3, 224, 224), c).parameters()) for c in (62, 1000)]
    [11208318, 11689512]
    """

    form: Literal["pre-activation", "cifar", "imagenet"] = "pre-activation"
    norm: Literal["group", "batch", "mixed"] = "group"
    kind: Literal["resnet18"] = "resnet18"

    def __post_init__(self) -> None:
        if self.norm == "mixed" and self.form != "cifar":
            raise ValueError(f"norm = 'mixed' belongs to form = 'cifar', not to '{self.form}'")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        depth, height, width = check_picture(self.kind, shape, smallest=7)
        if self.form == "pre-activation":
            return _pre_activation(depth, classes, nn.BatchNorm2d if self.norm == "batch" else _plain_group)
        if self.form == "imagenet":
            return _post_activation(_conv(depth, 64, 7, 2), nn.MaxPool2d(3, 2, 1), WIDTHS, 2, classes, self.norm)
        if not (17 <= height <= 32 and 17 <= width <= 32):
            raise FedtideError(
                f"model.form: 'cifar' needs pictures of 17 x 17 to 32 x 32, found rows of shape {shape}; "
                "allowed: 'pre-activation', 'imagenet'"
            )
        return _post_activation(
            _conv(depth, 64, 3, bias=True), None, WIDTHS, 2, classes, self.norm, bias=True, mean=nn.AvgPool2d(3, 2)
        )


@ingredient
class ResNet8:
    """A small residual network for a CPU: stem 3x3, three stages of one block, of which the last two halve images.

    Args:
        width: channels of the first stage; the others have two and four times as many. Widths of 8 or 16 are fast.
        norm: "batch" is BatchNorm; "group" is GroupNorm in 2 groups; "mixed" is BatchNorm in the stem and first in each
            block, GroupNorm elsewhere.

    >>> [sum(p.numel() for p in ResNet8(width=w).build((3, 32, 32), 10).parameters()) for w in (8, 16)]
    [19954, 78042]
    """

    width: Count = 8
    norm: Literal["group", "batch", "mixed"] = "group"
    kind: Literal["resnet8"] = "resnet8"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        depth, _, _ = check_picture(self.kind, shape, smallest=7)
        widths = (self.width, 2 * self.width, 4 * self.width)
        return _post_activation(_conv(depth, self.width, 3), None, widths, 1, classes, self.norm)


class Residual(nn.Module):
    """A residual block: the output of `body` added to the input or its projection, followed by `last`."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut, self.last = body, shortcut, last

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, channels, height, width) to an output with the block's channels and stride."""
        return self.last(self.body(x) + self.shortcut(x))


class HeConv2d(nn.Conv2d):
    """A convolution without bias whose initial weights follow He's normal distribution."""

    def __init__(self, depth: int, channels: int, size: int, stride: int = 1) -> None:
        super().__init__(depth, channels, size, stride, size // 2, bias=False)

    def reset_parameters(self) -> None:
        """Draw weights from N(0, 2 / fan-in)."""
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")


class QuietLinear(nn.Linear):
    """A linear layer with initial weights close to zero."""

    def reset_parameters(self) -> None:
        """Draw weights from N(0, 0.01^2) and set biases to 0."""
        nn.init.normal_(self.weight, std=0.01)
        nn.init.zeros_(self.bias)


def two_groups(channels: int) -> nn.Module:
    """Return GroupNorm with two groups, or with one group if the number of channels is odd."""
    return nn.GroupNorm(math.gcd(2, channels), channels)


def _pre_activation(depth: int, classes: int, norm: Norm) -> nn.Module:
    stages: dict[str, nn.Module] = {}
    before = WIDTHS[0]
    for i, channels in enumerate(WIDTHS, start=1):
        # The input of the first stage is already normalized.
        first = _pre_block(before, channels, norm, [] if i == 1 else [norm(before), nn.ReLU()])
        stages[f"stage{i}"] = nn.Sequential(first, _pre_block(channels, channels, norm, [norm(channels), nn.ReLU()]))
        before = channels
    return sequence(
        stem=HeConv2d(depth, WIDTHS[0], 7, 2), norm1=norm(WIDTHS[0]), relu1=nn.ReLU(), pool=nn.MaxPool2d(3, 2, 1),
        **stages, norm2=norm(before), relu2=nn.ReLU(), mean=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(),
        head=QuietLinear(before, classes),
    )  # fmt: skip


def _pre_block(before: int, channels: int, norm: Norm, first: list[nn.Module]) -> nn.Module:
    body = [*first, HeConv2d(before, channels, 3), norm(channels), nn.ReLU(), HeConv2d(channels, channels, 3)]
    same = before == channels
    shortcut = nn.Identity() if same else nn.Sequential(HeConv2d(before, channels, 1), norm(channels))
    return Residual(nn.Sequential(*body), shortcut, nn.Identity())


def _post_activation(
    stem: nn.Module,
    pool: nn.Module | None,
    widths: Sequence[int],
    blocks: int,
    classes: int,
    norm: str,
    *,
    bias: bool = False,
    mean: nn.Module | None = None,
) -> nn.Module:
    first: Norm = two_groups if norm == "group" else nn.BatchNorm2d
    second: Norm = nn.BatchNorm2d if norm == "batch" else two_groups
    stages: dict[str, nn.Module] = {}
    before = widths[0]
    for i, channels in enumerate(widths, start=1):
        stage = nn.Sequential()
        for k in range(blocks):
            stride = 2 if i > 1 and k == 0 else 1
            stage.append(_post_block(before, channels, stride, first, second, bias))
            before = channels
        stages[f"stage{i}"] = stage
    return sequence(
        stem=stem, norm=first(widths[0]), relu=nn.ReLU(), **({} if pool is None else {"pool": pool}), **stages,
        mean=mean or nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), head=nn.Linear(before, classes),
    )  # fmt: skip


def _post_block(before: int, channels: int, stride: int, first: Norm, second: Norm, bias: bool) -> nn.Module:
    body = nn.Sequential(
        _conv(before, channels, 3, stride, bias), first(channels), nn.ReLU(),
        _conv(channels, channels, 3, 1, bias), second(channels),
    )  # fmt: skip
    same = before == channels and stride == 1
    shortcut = nn.Identity() if same else nn.Sequential(_conv(before, channels, 1, stride, bias), second(channels))
    return Residual(body, shortcut, nn.ReLU())


def _conv(before: int, channels: int, size: int, stride: int = 1, bias: bool = False) -> nn.Module:
    return nn.Conv2d(before, channels, size, stride, size // 2, bias=bias)


def _plain_group(channels: int) -> nn.Module:
    """Return GroupNorm in 2 groups without scale and offset, as in TensorFlow Federated."""
    return nn.GroupNorm(2, channels, eps=1e-3, affine=False)
