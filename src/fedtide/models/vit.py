"""Vision transformers, which return logits; the feature is the input of `head`, the class token after the last norm."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtide.core.errors import refused
from fedtide.fields.types import Count, OpenFraction, ingredient
from fedtide.models.images import check_picture, sequence
from fedtide.models.resnet import QuietLinear

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
        size: "tiny" is for a CPU, "b/16" is ViT-B/16. The next five options replace its values where they are not None.
        patch: side of a patch in pixels, which divides both sides of an image.
        depth: number of blocks.
        width: width of a token; the last class token is the feature.
        heads: number of attention heads, which divides the width.
        mlp: width between the two dense layers of a block; by default four times the width of a token.
        dropout: probability after the positions are added, and after attention and each dense layer of a block.

    >>> sum(p.numel() for p in ViT().build((3, 32, 32), 10).parameters())
    29482
    >>> with torch.device("meta"):
    ...     large = ViT(size="b/16").build((3, 224, 224), 1000)
    >>> sum(p.numel() for p in large.parameters())
    86567656
    """

    size: Literal["tiny", "b/16"] = "tiny"
    patch: Count | None = None
    depth: Count | None = None
    width: Count | None = None
    heads: Count | None = None
    mlp: Count | None = None
    dropout: OpenFraction = 0.0
    kind: Literal["vit"] = "vit"

    def __post_init__(self) -> None:
        _, _, width, heads = self._sizes()
        if width % heads:
            raise ValueError(f"heads = {heads} with width = {width}; allowed: heads that divide the width")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        patch, blocks, width, heads = self._sizes()
        depth, *sides = check_picture(self.kind, shape, smallest=patch)
        if any(side % patch for side in sides):
            raise refused("model.patch", patch, f"a divisor of both sides of pictures of {sides[0]} x {sides[1]}")
        count = math.prod(side // patch for side in sides)
        mlp = self.mlp or 4 * width
        return sequence(
            tokens=Tokens(depth, patch, count, width), drop=nn.Dropout(self.dropout),
            blocks=nn.Sequential(*(Block(width, heads, mlp, self.dropout) for _ in range(blocks))),
            first=First(), norm=nn.LayerNorm(width, EPS), head=QuietLinear(width, classes),
        )  # fmt: skip

    def _sizes(self) -> tuple[int, int, int, int]:
        """Return patch, depth, width and heads."""
        patch, depth, width, heads = SIZES[self.size]
        return self.patch or patch, self.depth or depth, self.width or width, self.heads or heads


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

    def __init__(self, width: int, heads: int, mlp: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, EPS)
        self.attention = Attention(width, heads)
        self.drop = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, EPS)
        self.mlp = sequence(
            dense1=XavierLinear(width, mlp), gelu=nn.GELU(), drop1=nn.Dropout(dropout),
            dense2=XavierLinear(mlp, width), drop2=nn.Dropout(dropout),
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
        q, k, v = (
            part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
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
