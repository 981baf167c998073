"""Arithmetic on a model's weights."""

from __future__ import annotations

import torch

from fedtide.core.trees import Tree, map_leaves


def sub(left: Tree, right: Tree) -> Tree:
    """`left - right`, leaf by leaf: the update of a client, new minus old.

    >>> sub({"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([0., 0.])}
    """
    return map_leaves(torch.sub, left, right)


def add(weights: Tree, delta: Tree) -> Tree:
    """`weights + delta` in the type of `weights`, whatever the precision of `delta`."""
    return map_leaves(lambda held, change: held + change.to(held.dtype), weights, delta)
