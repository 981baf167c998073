"""Arithmetic on a model's weights."""

from __future__ import annotations

import torch

from fedtide.core.trees import Tree, map_leaves
from fedtide.core.types import Weights


def sub(left: Tree, right: Tree) -> Tree:
    """`left - right`, leaf by leaf: the update of a client, new minus old.

    >>> sub(Weights({"w": torch.ones(2)}), Weights({"w": torch.ones(2)})).params
    {'w': tensor([0., 0.])}
    """
    return map_leaves(torch.sub, left, right)


def add(weights: Tree, delta: Tree) -> Tree:
    """`weights + delta` in the type of `weights`, whatever the precision of `delta`."""
    return map_leaves(lambda held, change: held + change.to(held.dtype), weights, delta)


def parameter_count(weights: Weights) -> int:
    """How many trainable numbers the model has.

    >>> parameter_count(Weights({"w": torch.ones(2, 3)}, {"running_mean": torch.ones(3)}))
    6
    """
    return sum(param.numel() for param in weights.params.values())
