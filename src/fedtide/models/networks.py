"""Networks, and initial weights of their layers that torch does not draw."""

import copy
import inspect
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedtide.core.errors import FedtideError, refused
from fedtide.fields import user_code
from fedtide.fields.types import Count, Flag, OpenFraction, Spelled, ingredient
from fedtide.models.adapters import LoRA
from fedtide.models.base import hold, train_head
from fedtide.models.transformer import Transformer

INIT = 'initial weights: as "torch" draws them, or uniform with biases of 0, "glorot" as in Keras, "he" for ReLU.'
Init = Annotated[Literal["torch", "glorot", "he"], Field(description=INIT)]


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "glorot": nn.init.xavier_uniform_,
    "he": partial(nn.init.kaiming_uniform_, nonlinearity="relu"),
}
"""Functions that draw weights, by the names of initial weights."""
DRAWN = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
"""Layers whose weights they draw."""


def initialize(module: nn.Module, init: Init) -> None:
    """Draw the weights of all linear, convolutional and LSTM layers anew, from torch's global generator.

    As in Keras, the recurrent weights of an LSTM are orthogonal and its forget gate begins with a bias of 1. Norms and
    embeddings are left as they are.

    >>> layer = nn.Linear(300, 500)
    >>> initialize(layer, "glorot")
    >>> bound = (6 / (300 + 500)) ** 0.5
    >>> bool(layer.bias.any()), bool(0.99 * bound < layer.weight.abs().max() < 1.01 * bound)
    (False, True)
    """
    if init == "torch":
        return
    draw = DRAWS[init]
    for layer in module.modules():
        if isinstance(layer, DRAWN):
            draw(layer.weight.detach())
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, OneBiasLSTM):
            cell = dict(layer.cell.named_parameters())
            received, hidden = cell["weight_ih_l0"].detach(), layer.cell.hidden_size
            draw(received[:, :-1])
            received[:, -1] = 0.0
            received[hidden : 2 * hidden, -1] = 1.0
            nn.init.orthogonal_(cell["weight_hh_l0"])


class OneBiasLSTM(nn.Module):
    """An LSTM with one bias vector, the weights of a last input that is always 1."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(width + 1, hidden, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, steps, width) to (rows, steps, hidden)."""
        return self.cell(F.pad(x, (0, 1), value=1.0))[0]


@ingredient
class Linear:
    """Softmax regression: one linear layer on the flattened input.

    >>> sum(p.numel() for p in Linear().build((1, 28, 28), 10).parameters())
    7850
    """

    init: Init = "torch"
    kind: Literal["linear"] = "linear"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        return sequence(flatten=nn.Flatten(), head=nn.Linear(math.prod(shape), classes))


@ingredient
class MLP:
    """Fully connected layers with ReLU between them.

    Args:
        hidden: width of each hidden layer.

    >>> sum(p.numel() for p in MLP(hidden=(200,)).build((1, 28, 28), 10).parameters())
    159010
    >>> sum(p.numel() for p in MLP(hidden=(64,)).build((196,), 26).parameters())
    14298
    """

    hidden: tuple[Count, ...] = (200,)
    init: Init = "torch"
    kind: Literal["mlp"] = "mlp"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
        width = math.prod(shape)
        for i, wide in enumerate(self.hidden, start=1):
            layers |= {f"dense{i}": nn.Linear(width, wide), f"relu{i}": nn.ReLU()}
            width = wide
        return sequence(**layers, head=nn.Linear(width, classes))


@ingredient
class CNN:
    """The LeNet-type network of the periodic-shift paper (1.2 M parameters for 28 x 28 images and 62 classes).

    conv 3x3 -> 32, ReLU, conv 3x3 -> 64, ReLU, max pool 2, dense 128, ReLU, head. TFF's "cnn_dropout" is the same
    network with `dropout = [0.25, 0.5]`.

    Args:
        channels: output channels of the two convolutions.
        dense: width of the dense layer, whose output is the feature.
        dropout: probabilities after the pool and after the dense layer.

    >>> sum(p.numel() for p in CNN().build((1, 28, 28), 62).parameters())
    1206590
    >>> sum(p.numel() for p in CNN().build((1, 28, 28), 10).parameters())
    1199882
    """

    channels: tuple[Count, Count] = (32, 64)
    dense: Count = 128
    dropout: tuple[OpenFraction, OpenFraction] = (0.0, 0.0)
    init: Init = "torch"
    kind: Literal["cnn"] = "cnn"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        depth, height, width = check_picture(self.kind, shape, smallest=6)
        a, b = self.channels
        flat = b * ((height - 4) // 2) * ((width - 4) // 2)
        return sequence(
            conv1=nn.Conv2d(depth, a, 3), relu1=nn.ReLU(), conv2=nn.Conv2d(a, b, 3), relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2), **dropout("dropout1", self.dropout[0]), flatten=nn.Flatten(),
            dense=nn.Linear(flat, self.dense), relu3=nn.ReLU(), **dropout("dropout2", self.dropout[1]),
            head=nn.Linear(self.dense, classes),
        )  # fmt: skip


@ingredient
class LeafCNN:
    """The network of LEAF for FEMNIST (6.6 M parameters for 28 x 28 images and 62 classes; Caldas et al. 2018).

    conv 5x5 -> 32, ReLU, max pool 2, conv 5x5 -> 64, ReLU, max pool 2, dense 2048, ReLU, head. The network of PFLlib is
    `padding = "valid"` and `dense = 512`.

    Args:
        padding: "same" keeps the image size in a convolution, as in LEAF. "valid" does not, as in the code of FedEM and
            of adaptive expert models.
        channels: output channels of the two convolutions.
        dense: width of the dense layer, whose output is the feature.
        dropout: probability of dropping units of the dense layer.

    >>> sum(p.numel() for p in LeafCNN().build((1, 28, 28), 62).parameters())
    6603710
    >>> sum(p.numel() for p in LeafCNN(padding="valid").build((1, 28, 28), 62).parameters())
    2278334
    >>> sum(p.numel() for p in LeafCNN(padding="valid", dense=512).build((1, 28, 28), 10).parameters())
    582026
    """

    padding: Literal["same", "valid"] = "same"
    channels: tuple[Count, Count] = (32, 64)
    dense: Count = 2048
    dropout: OpenFraction = 0.0
    init: Init = "torch"
    kind: Literal["leaf-cnn"] = "leaf-cnn"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        same = self.padding == "same"
        depth, *sides = check_picture(self.kind, shape, smallest=4 if same else 16)
        a, b = self.channels
        high, wide = (side // 2 // 2 if same else ((side - 4) // 2 - 4) // 2 for side in sides)
        return sequence(
            conv1=nn.Conv2d(depth, a, 5, padding=self.padding), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(a, b, 5, padding=self.padding), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(), dense=nn.Linear(b * high * wide, self.dense), relu3=nn.ReLU(),
            **dropout("dropout", self.dropout), head=nn.Linear(self.dense, classes),
        )  # fmt: skip


@ingredient
class SmallCNN:
    """A small network for studies on a CPU (about 28,000 parameters for 28 x 28 images).

    conv 3x3 -> 8 with stride 2, ReLU, conv 3x3 -> 16, ReLU, max pool 2, dense 64, ReLU, head.

    Args:
        channels: output channels of the two convolutions.
        dense: width of the dense layer, whose output is the feature.
        dropout: probability of dropping units of the dense layer.

    >>> [sum(p.numel() for p in SmallCNN().build((1, 28, 28), c).parameters()) for c in (10, 36)]
    [27562, 29252]
    """

    channels: tuple[Count, Count] = (8, 16)
    dense: Count = 64
    dropout: OpenFraction = 0.0
    init: Init = "torch"
    kind: Literal["small-cnn"] = "small-cnn"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        depth, height, width = check_picture(self.kind, shape, smallest=9)
        a, b = self.channels
        flat = b * (((height - 3) // 2 - 1) // 2) * (((width - 3) // 2 - 1) // 2)
        return sequence(
            conv1=nn.Conv2d(depth, a, 3, stride=2), relu1=nn.ReLU(), conv2=nn.Conv2d(a, b, 3), relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2), flatten=nn.Flatten(), dense=nn.Linear(flat, self.dense), relu3=nn.ReLU(),
            **dropout("dropout", self.dropout), head=nn.Linear(self.dense, classes),
        )  # fmt: skip


@ingredient
class CifarCNN:
    """Two unpadded 5 x 5 convolutions, as in the code of adaptive expert models (section 4) on CIFAR-10.

    conv 5x5, ReLU, max pool 2, conv 5x5, ReLU, max pool 2, dense layers with ReLU, head.

    Args:
        channels: output channels of the two convolutions.
        dense: width of each dense layer.
        dropout: probabilities of dropping whole maps before the second pool, and units after each dense layer.
        response: use local response normalization over four neighboring maps, after the first pool and before the
            second. That code has it for IFCA's network. (IFCA's own code pads, pools 3 x 3 and normalizes over nine.)

    >>> sum(p.numel() for p in CifarCNN().build((3, 32, 32), 10).parameters())
    878538
    >>> ifca = CifarCNN(channels=(64, 64), dense=(384, 194), response=True)
    >>> sum(p.numel() for p in ifca.build((3, 32, 32), 10).parameters())
    798752
    """

    channels: tuple[Count, Count] = (32, 64)
    dense: tuple[Count, ...] = (512,)
    dropout: tuple[OpenFraction, OpenFraction] = (0.0, 0.0)
    response: Flag = False
    init: Init = "torch"
    kind: Literal["cifar-cnn"] = "cifar-cnn"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        depth, *sides = check_picture(self.kind, shape, smallest=16)
        (a, b), (maps, features) = self.channels, self.dropout
        high, wide = (((side - 4) // 2 - 4) // 2 for side in sides)
        layers: dict[str, nn.Module] = {
            "conv1": nn.Conv2d(depth, a, 5), "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
            **({"norm1": nn.LocalResponseNorm(4, alpha=0.001 / 9)} if self.response else {}),
            "conv2": nn.Conv2d(a, b, 5), "relu2": nn.ReLU(),
            **({"norm2": nn.LocalResponseNorm(4, alpha=0.001 / 9)} if self.response else {}),
            **dropout("drop2", maps, nn.Dropout2d),
            "pool2": nn.MaxPool2d(2), "flatten": nn.Flatten(),
        }  # fmt: skip
        width = b * high * wide
        for place, dense in enumerate(self.dense, start=3):
            layers |= {f"dense{place}": nn.Linear(width, dense), f"relu{place}": nn.ReLU()}
            layers |= dropout(f"drop{place}", features)
            width = dense
        return sequence(**layers, head=nn.Linear(width, classes))


@ingredient
class LeNet5:
    """LeNet-5 with ReLU and max pooling; 28 x 28 images are padded by 2 (LeCun et al. 1998).

    >>> sum(p.numel() for p in LeNet5().build((1, 28, 28), 10).parameters())
    61706
    """

    init: Init = "torch"
    kind: Literal["lenet5"] = "lenet5"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        depth, height, width = check_picture(self.kind, shape, smallest=16)
        pad = 2 if (height, width) == (28, 28) else 0
        flat = 16 * (((height + 2 * pad - 4) // 2 - 4) // 2) * (((width + 2 * pad - 4) // 2 - 4) // 2)
        return sequence(
            conv1=nn.Conv2d(depth, 6, 5, padding=pad), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2), flatten=nn.Flatten(),
            dense1=nn.Linear(flat, 120), relu3=nn.ReLU(), dense2=nn.Linear(120, 84), relu4=nn.ReLU(),
            head=nn.Linear(84, classes),
        )  # fmt: skip


def sequence(**layers: nn.Module) -> nn.Sequential:
    """Return a sequence of named layers.

    A ReLU right before a max pool is put after it: the same bits, from a part of the numbers.

    >>> [name for name, _ in sequence(relu=nn.ReLU(), pool=nn.MaxPool2d(2), flatten=nn.Flatten()).named_children()]
    ['pool', 'relu', 'flatten']
    """
    named = list(layers.items())
    for i, ((_, layer), (_, following)) in enumerate(pairwise(layers.items())):
        if isinstance(layer, nn.ReLU) and isinstance(following, nn.MaxPool2d):
            named[i : i + 2] = named[i + 1], named[i]
    return nn.Sequential(OrderedDict(named))


def dropout(name: str, probability: float, layer: type[nn.Module] = nn.Dropout) -> dict[str, nn.Module]:
    """Return a layer of dropout by its name, or nothing if its probability is 0."""
    return {name: layer(probability)} if probability else {}


def check_picture(kind: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return channels, height and width of image rows; raise for any other shape."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        needed = f"pictures (channels, height, width) of {smallest} x {smallest} or more"
        line = f"'{kind}' needs {needed}, found rows of shape {shape}; allowed: 'linear', 'mlp'"
        raise FedtideError(f"model.kind: {line}")
    return shape[0], shape[1], shape[2]


# -- blocks of large networks ------------------------------------------------------------------------------------------


Norm = Callable[[int], nn.Module]
"""Constructor of a normalization layer for a number of channels."""


def two_groups(channels: int) -> nn.Module:
    """Return GroupNorm with two groups, or with one group if the number of channels is odd."""
    return nn.GroupNorm(math.gcd(2, channels), channels)


def plain_groups(channels: int) -> nn.Module:
    """Return GroupNorm in 2 groups without scale and offset, as in TensorFlow Federated."""
    return nn.GroupNorm(2, channels, eps=1e-3, affine=False)


NORMS: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": two_groups}


def convolution(before: int, after: int, size: int, stride: int = 1, groups: int = 1, bias: bool = False) -> nn.Module:
    """Return a convolution from `before` to `after` channels that keeps the sides of images but for its stride."""
    return nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=bias)


class HeConv2d(nn.Conv2d):
    """A convolution without bias whose initial weights follow He's normal distribution, N(0, 2 / fan-in)."""

    fan: Literal["fan_in", "fan_out"] = "fan_in"

    def __init__(self, depth: int, channels: int, size: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(depth, channels, size, stride, size // 2, groups=groups, bias=False)

    def reset_parameters(self) -> None:
        """Draw weights."""
        nn.init.kaiming_normal_(self.weight, mode=self.fan, nonlinearity="relu")


class FanOutConv2d(HeConv2d):
    """A convolution with weights from N(0, 2 / fan-out); fan-out = channels x kernel pixels, whatever the groups."""

    fan = "fan_out"


class QuietLinear(nn.Linear):
    """A linear layer with initial weights close to zero."""

    def reset_parameters(self) -> None:
        """Draw weights from N(0, 0.01^2) and set biases to 0."""
        nn.init.normal_(self.weight, std=0.01)
        nn.init.zeros_(self.bias)


class Residual(nn.Module):
    """A residual block: the output of `body` added to the input or its projection, followed by `last`."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut, self.last = body, shortcut, last

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, channels, height, width) to an output with the block's channels and stride."""
        return self.last(self.body(x) + self.shortcut(x))


def stacked_stages(
    before: int, stages: Sequence[tuple[int, int]], block: Callable[[int, int, int, int], nn.Module]
) -> dict[str, nn.Module]:
    """Return stages of blocks by their names.

    Args:
        before: channels of the input.
        stages: channels and number of blocks of each stage.
        block: (stage, place of the block in the stage, input channels, channels) -> block.
    """
    named: dict[str, nn.Module] = {}
    for number, (channels, blocks) in enumerate(stages, start=1):
        stage = nn.Sequential()
        for place in range(blocks):
            stage.append(block(number, place, before, channels))
            before = channels
        named[f"stage{number}"] = stage
    return named


def pooled_head(head: nn.Module, mean: nn.Module | None = None, probability: float = 0.0) -> dict[str, nn.Module]:
    """Return the last layers: the mean over the image, dropout and the head."""
    mean = mean or nn.AdaptiveAvgPool2d(1)
    return {"mean": mean, "flatten": nn.Flatten(), **dropout("dropout", probability), "head": head}


# -- ResNet ------------------------------------------------------------------------------------------------------------


WIDTHS = (64, 128, 256, 512)
"""Channels of the four stages of ResNet-18."""


@ingredient
class ResNet18:
    """ResNet-18: a stem, four stages of two residual blocks (64, 128, 256, 512 channels), mean over the image, head.

    "pre-activation" is the network of the periodic-shift paper for CIFAR. It has a stem 7x7 with stride 2, a max pool
    3x3 with stride 2, and stages without strides. Norm and ReLU come before each convolution; GroupNorm has no scale
    and offset. Initial weights are He normal, and N(0, 0.01^2) in the head, as in the authors' code.

    "cifar" is the network of the thesis on the re-weighted softmax, which uses norm = "mixed" except in section 3.7. It
    has a stem 3x3, stages 2 to 4 halve the image, and convolutions have biases. The last pool covers 3x3 of the
    remaining 4x4. The listing prints BatchNorm2d(64) in every stage; here it has the channels of its stage. Images are
    of 17x17 to 32x32.

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
            return _pre_activation(depth, classes, nn.BatchNorm2d if self.norm == "batch" else plain_groups)
        if self.form == "cifar" and not (17 <= height <= 32 and 17 <= width <= 32):
            line = f"'cifar' needs pictures of 17 x 17 to 32 x 32, found rows of shape {shape}"
            raise FedtideError(f"model.form: {line}; allowed: 'pre-activation', 'imagenet'")
        return _post_activation(depth, classes, WIDTHS, 2, self.norm, self.form)


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
        return _post_activation(depth, classes, widths, 1, self.norm, "small")


def _pre_activation(depth: int, classes: int, norm: Norm) -> nn.Module:
    def block(stage: int, place: int, before: int, channels: int) -> nn.Module:
        # The input of the first stage is already normalized.
        first = [] if stage == 1 and place == 0 else [norm(before), nn.ReLU()]
        body = [*first, HeConv2d(before, channels, 3), norm(channels), nn.ReLU(), HeConv2d(channels, channels, 3)]
        same = before == channels
        shortcut = nn.Identity() if same else nn.Sequential(HeConv2d(before, channels, 1), norm(channels))
        return Residual(nn.Sequential(*body), shortcut, nn.Identity())

    stages = stacked_stages(WIDTHS[0], [(channels, 2) for channels in WIDTHS], block)
    return sequence(
        stem=HeConv2d(depth, WIDTHS[0], 7, 2), norm1=norm(WIDTHS[0]), relu1=nn.ReLU(), pool=nn.MaxPool2d(3, 2, 1),
        **stages, norm2=norm(WIDTHS[-1]), relu2=nn.ReLU(), **pooled_head(QuietLinear(WIDTHS[-1], classes)),
    )  # fmt: skip


def _post_activation(depth: int, classes: int, widths: Sequence[int], blocks: int, norm: str, form: str) -> nn.Module:
    large, bias = form == "imagenet", form == "cifar"
    first: Norm = two_groups if norm == "group" else nn.BatchNorm2d
    second: Norm = nn.BatchNorm2d if norm == "batch" else two_groups

    def block(stage: int, place: int, before: int, channels: int) -> nn.Module:
        stride = 2 if stage > 1 and place == 0 else 1
        body = nn.Sequential(
            convolution(before, channels, 3, stride, bias=bias), first(channels), nn.ReLU(),
            convolution(channels, channels, 3, bias=bias), second(channels),
        )  # fmt: skip
        shortcut: nn.Module = nn.Identity()
        if before != channels or stride > 1:
            shortcut = nn.Sequential(convolution(before, channels, 1, stride, bias=bias), second(channels))
        return Residual(body, shortcut, nn.ReLU())

    return sequence(
        stem=convolution(depth, widths[0], 7 if large else 3, 2 if large else 1, bias=bias),
        norm=first(widths[0]), relu=nn.ReLU(), **({"pool": nn.MaxPool2d(3, 2, 1)} if large else {}),
        **stacked_stages(widths[0], [(channels, blocks) for channels in widths], block),
        **pooled_head(nn.Linear(widths[-1], classes), nn.AvgPool2d(3, 2) if bias else None),
    )  # fmt: skip


# -- MobileNetV2 -------------------------------------------------------------------------------------------------------


INVERTED = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion t, channels c, blocks n and stride s of the first block for each stage, as in Table 2 of the paper."""


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
        norm = NORMS[self.norm]
        # For small images the first two of the five strides of 2 become 1: those of the stem and of stage 2.
        small = self.form == "cifar"

        def block(stage: int, place: int, before: int, channels: int) -> nn.Module:
            expansion, _, _, stride = INVERTED[stage - 1]
            return _inverted(before, channels, 1 if place or (small and stage == 2) else stride, expansion, norm)

        stages = stacked_stages(32, [(channels, blocks) for _, channels, blocks, _ in INVERTED], block)
        return sequence(
            stem=FanOutConv2d(depth, 32, 3, 1 if small else 2), norm1=norm(32), relu1=nn.ReLU6(), **stages,
            last=FanOutConv2d(320, 1280, 1), norm2=norm(1280), relu2=nn.ReLU6(),
            **pooled_head(QuietLinear(1280, classes), probability=self.dropout),
        )  # fmt: skip


def _inverted(before: int, channels: int, stride: int, expansion: int, norm: Norm) -> nn.Module:
    """Build an inverted residual: expand, depthwise convolution with the stride, project without a ReLU."""
    wide = expansion * before
    wider = [] if expansion == 1 else [FanOutConv2d(before, wide, 1), norm(wide), nn.ReLU6()]
    body = nn.Sequential(
        *wider, FanOutConv2d(wide, wide, 3, stride, groups=wide), norm(wide), nn.ReLU6(),
        FanOutConv2d(wide, channels, 1), norm(channels),
    )  # fmt: skip
    return Residual(body, nn.Identity(), nn.Identity()) if stride == 1 and before == channels else body


# -- ShuffleNetV2 ------------------------------------------------------------------------------------------------------


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
        norm = NORMS[self.norm]
        small = self.form == "cifar"
        stages, before = dict[str, nn.Module](), 24
        # Stages 2 to 4 with width 1.0, as in Table 5 of the paper; the first block (stride 2) is drawn last.
        for number, (channels, blocks) in enumerate([(116, 4), (232, 8), (464, 4)], start=2):
            half = channels // 2
            others = [Shuffled(None, _shuffled(half, half, 1, norm)) for _ in range(blocks - 1)]
            stages[f"stage{number}"] = nn.Sequential(_halved(before, channels, norm), *others)
            before = channels
        return sequence(
            stem=convolution(depth, 24, 3, 1 if small else 2), norm1=norm(24), relu1=nn.ReLU(),
            **({} if small else {"pool": nn.MaxPool2d(3, 2, 1)}), **stages,
            last=convolution(464, 1024, 1), norm2=norm(1024), relu2=nn.ReLU(), **pooled_head(nn.Linear(1024, classes)),
        )  # fmt: skip


class Shuffled(nn.Module):
    """A block that shuffles `shortcut` and `body` (all channels); without one a half and `body` of the other."""

    def __init__(self, shortcut: nn.Module | None, body: nn.Module) -> None:
        super().__init__()
        self.shortcut, self.body = shortcut, body

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, channels, height, width) to the block's channels, with half the sides if there is a shortcut."""
        left, right = x.chunk(2, 1) if self.shortcut is None else (self.shortcut(x), x)
        return shuffle(left, self.body(right))


def shuffle(a: Tensor, b: Tensor) -> Tensor:
    """Interleave the channels of two tensors: a0, b0, a1, b1, ...

    >>> shuffle(torch.zeros(1, 2, 1, 1), torch.ones(1, 2, 1, 1)).flatten()
    tensor([0., 1., 0., 1.])
    """
    return torch.stack((a, b), 2).flatten(1, 2)


def _halved(before: int, channels: int, norm: Norm) -> nn.Module:
    """Build the first block of a stage, which has stride 2."""
    half = channels // 2
    shortcut = nn.Sequential(
        convolution(before, before, 3, 2, before), norm(before), convolution(before, half, 1), norm(half), nn.ReLU()
    )
    return Shuffled(shortcut, _shuffled(before, half, 2, norm))


def _shuffled(before: int, channels: int, stride: int, norm: Norm) -> nn.Module:
    """Build a convolution 1x1, a depthwise one 3x3 with the stride and no ReLU after it, and another one 1x1."""
    return nn.Sequential(
        convolution(before, channels, 1), norm(channels), nn.ReLU(),
        convolution(channels, channels, 3, stride, channels), norm(channels),
        convolution(channels, channels, 1), norm(channels), nn.ReLU(),
    )  # fmt: skip


# -- vision transformers -----------------------------------------------------------------------------------------------


SIZES = {"tiny": (4, 2, 32, 4), "b/16": (16, 12, 768, 12)}
"""Patch, depth, width and heads of each size."""

EPS = 1e-6
"""Epsilon of the layer norms, as in the authors' code."""


@ingredient
class ViT:
    """A vision transformer: patches, a class token, learned positions, pre-norm blocks with GELU, norm, head.

    Dosovitskiy et al.: *An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale*, ICLR 2021. Initial
    weights follow the authors' code, except in the head: N(0, 0.01^2) in place of 0, so that branches differ.

    Positions are learned for one image size; the published number of parameters is for 224x224.

    Args:
        size: "tiny" is for a CPU, with patches of 4 x 4 pixels; "b/16" is ViT-B/16.
        dropout: probability after the positions are added, and after attention and each dense layer of a block.

    >>> sum(p.numel() for p in ViT().build((3, 32, 32), 10).parameters())
    29482
    >>> with torch.device("meta"):
    ...     large = ViT(size="b/16").build((3, 224, 224), 1000)
    >>> sum(p.numel() for p in large.parameters())
    86567656
    """

    size: Literal["tiny", "b/16"] = "tiny"
    dropout: OpenFraction = 0.0
    kind: Literal["vit"] = "vit"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        patch, blocks, width, heads = SIZES[self.size]
        depth, *sides = check_picture(self.kind, shape, smallest=patch)
        if any(side % patch for side in sides):
            allowed = f"a patch of {patch} that divides both sides of pictures of {sides[0]} x {sides[1]}"
            raise refused("model.size", self.size, allowed)
        count = math.prod(side // patch for side in sides)
        return sequence(
            tokens=Tokens(depth, patch, count, width), drop=nn.Dropout(self.dropout),
            blocks=nn.Sequential(*(Block(width, heads, self.dropout) for _ in range(blocks))),
            first=First(), norm=nn.LayerNorm(width, EPS), head=QuietLinear(width, classes),
        )  # fmt: skip


class Tokens(nn.Module):
    """A class token and one token for each patch, row by row, with learned positions."""

    def __init__(self, depth: int, patch: int, count: int, width: int) -> None:
        super().__init__()
        self.patches = PatchConv2d(depth, width, patch, patch)
        self.token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + count, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the class token to 0 and draw positions from N(0, 0.02^2)."""
        nn.init.zeros_(self.token)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (rows, channels, height, width) to tokens (rows, 1 + patches, width)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        # Not len(x), which an exported program would take for a constant.
        return torch.cat((self.token.expand(x.shape[0], -1, -1), patches), 1) + self.positions


class Block(nn.Module):
    """A transformer block: attention and two dense layers, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, EPS)
        self.attention = Attention(width, heads)
        self.drop = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, EPS)
        self.mlp = sequence(
            dense1=XavierLinear(width, 4 * width), gelu=nn.GELU(), drop1=nn.Dropout(dropout),
            dense2=XavierLinear(4 * width, width), drop2=nn.Dropout(dropout),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, tokens, width) to an output of equal shape."""
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Self-attention with the parameters of nn.MultiheadAttention, which cannot reset the weights of copies."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (XavierLinear(width, width) for _ in range(3))
        self.out = XavierLinear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, tokens, width) to an output of equal shape."""
        # Each has shape (rows, heads, tokens, width / heads).
        parts = (self.query, self.key, self.value)
        q, k, v = (part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class First(nn.Module):
    """A module that returns the class token."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, tokens, width) to (rows, width)."""
        return x[:, 0]


class PatchConv2d(nn.Conv2d):
    """A convolution over patches whose initial weights follow LeCun's normal distribution."""

    def reset_parameters(self) -> None:
        """Draw weights from N(0, 1 / fan-in) and set biases to 0."""
        nn.init.normal_(self.weight, std=self.weight[0].numel() ** -0.5)
        assert self.bias is not None
        nn.init.zeros_(self.bias)


class XavierLinear(nn.Linear):
    """A linear layer whose initial weights follow Glorot's uniform distribution."""

    def reset_parameters(self) -> None:
        """Draw weights from U(-a, a) with a^2 = 6 / (fan-in + fan-out) and set biases to 0."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


PADDING = 0
"""Token that pads a row at its end."""


@ingredient
class LSTM:
    """The next-word network of the periodic-shift paper (4.1 M parameters with 10,004 words).

    At every step: embedding, LSTM, a dense `projection` back to the width of the embedding, a dense `vocabulary` with
    one logit per word. Rows are token ids (steps,) and classes are words; the token 0 is padding and stands at the end.
    `projection` is the layer for branches: it is 15 times smaller than `vocabulary`, which stays shared.

    The LSTM has one bias vector, as in Keras, which the paper uses; torch's own LSTM adds up two.

    `embedding = 16, hidden = 64` gives a small network for a CPU.

    Args:
        embedding: width of a word's embedding, and of the projection.
        hidden: width of the LSTM, whose output is the feature.

    >>> sum(p.numel() for p in LSTM().build((20,), 10_004).parameters())
    4050748
    >>> sum(p.numel() for p in LSTM(embedding=16, hidden=64).build((20,), 1_000).parameters())
    54776
    """

    embedding: Count = 96
    hidden: Count = 670
    init: Init = "torch"
    kind: Literal["lstm"] = "lstm"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        if len(shape) != 1:
            raise refused("model.kind: 'lstm': shape of rows", shape, "(steps,), with the id of a token at each")
        return NextWord(classes, self.embedding, self.hidden)


class NextWord(nn.Module):
    """A network that predicts the next word at every step."""

    def __init__(self, words: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, embedding, padding_idx=PADDING)
        self.lstm = OneBiasLSTM(embedding, hidden)
        self.projection = nn.Linear(hidden, embedding)
        self.vocabulary = nn.Linear(embedding, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (rows, steps) to logits (rows, steps, words)."""
        if tokens.is_floating_point():
            raise refused("model.kind: 'lstm': type of rows", tokens.dtype, "integers, ids of tokens")
        return self.vocabulary(self.projection(self.lstm(self.embedding(tokens.long()))))

    def counted(self, tokens: Tensor) -> Tensor:
        """Return the mask (rows, steps) of the steps that are not padding."""
        return tokens != PADDING


@ingredient
class Python(user_code.Python):
    """The user's own `module:function` or class, called with `options`, and if accepted `shape` and `classes`.

    Args:
        adapters: what is trained beside the layer "head", in place of the whole model. The function is then called
            once in a process, with torch's generator at seed 0: what it draws or loads is the same for all.
    """

    adapters: Annotated[LoRA, Spelled] | None = None

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the module by calling the user's function."""
        if self.adapters is None:
            return self._make(shape, classes)
        options = json.dumps(self.options, sort_keys=True, default=repr)
        module = copy.deepcopy(_load_base(_Wanted(self.find("model"), options, shape, classes, self)))
        self.adapters.add(module)
        return train_head(module)

    def _make(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        make = self.find("model")
        takes = inspect.signature(make).parameters
        arguments = {name: value for name, value in (("shape", shape), ("classes", classes)) if name in takes}
        module = user_code.call(make, "model.options", **arguments, **self.options)
        if not isinstance(module, nn.Module):
            raise FedtideError(f"model.function: '{self.name}' returned {type(module).__name__}, allowed: nn.Module")
        return module


@dataclass(frozen=True)
class _Wanted:
    """A base that a user's function makes; equal ones are one base."""

    function: Callable[..., Any]
    options: str
    shape: tuple[int, ...]
    classes: int
    model: Python = field(compare=False)


@lru_cache(maxsize=4)
def _load_base(wanted: _Wanted) -> nn.Module:
    """Return the module of a user's function with its parameters held, the same one at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return hold(wanted.model._make(wanted.shape, wanted.classes))


Model = Annotated[
    Linear | MLP | CNN | LeafCNN | CifarCNN | SmallCNN | LeNet5
    | ResNet8 | ResNet18 | MobileNetV2 | ShuffleNetV2 | ViT | LSTM | Transformer | Python,
    Field(discriminator="kind"),
]  # fmt: skip
