"""Networks for images and vectors, which return logits; the feature, if needed, is the input of `head`."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import pairwise
from typing import Literal

from torch import nn

from fedtide.core.errors import FedtideError
from fedtide.fields.types import Count, Flag, OpenFraction, ingredient
from fedtide.models.init import Init


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

    conv 5x5 -> 32, ReLU, max pool 2, conv 5x5 -> 64, ReLU, max pool 2, dense 2048, ReLU, head.

    Args:
        padding: "same" keeps the image size in a convolution, as in LEAF; "valid" does not, as in the code of FedEM and
            of adaptive expert models.
        dropout: probability of dropping units of the dense layer.

    >>> sum(p.numel() for p in LeafCNN().build((1, 28, 28), 62).parameters())
    6603710
    >>> sum(p.numel() for p in LeafCNN(padding="valid").build((1, 28, 28), 62).parameters())
    2278334
    """

    padding: Literal["same", "valid"] = "same"
    dropout: OpenFraction = 0.0
    init: Init = "torch"
    kind: Literal["leaf-cnn"] = "leaf-cnn"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        same = self.padding == "same"
        depth, *sides = check_picture(self.kind, shape, smallest=4 if same else 16)
        high, wide = (side // 2 // 2 if same else ((side - 4) // 2 - 4) // 2 for side in sides)
        return sequence(
            conv1=nn.Conv2d(depth, 32, 5, padding=self.padding), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5, padding=self.padding), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(), dense=nn.Linear(64 * high * wide, 2048), relu3=nn.ReLU(),
            **dropout("dropout", self.dropout), head=nn.Linear(2048, classes),
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
        response: use local response normalization over four neighboring maps after the first pool and before the
            second, as that code has it for IFCA's network. (IFCA's own pads, pools 3 x 3 and normalizes over nine.)

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
    """LeNet-5 with ReLU and max pooling, where 28 x 28 images are padded by 2 (LeCun et al. 1998).

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
    """Return a layer of dropout by its name, or nothing where its probability is 0."""
    return {name: layer(probability)} if probability else {}


def check_picture(kind: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return channels, height and width of image rows; raise for any other shape."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise FedtideError(
            f"model.kind: '{kind}' needs pictures (channels, height, width) of {smallest} x {smallest} or more, "
            f"found rows of shape {shape}; allowed: 'linear', 'mlp'"
        )
    return shape[0], shape[1], shape[2]
