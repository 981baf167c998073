"""Arithmetic on a model's weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedtide.core.trees import Tree, map_leaves
from fedtide.core.types import Slotted, Weighted, Weights


def sub(left: Tree, right: Tree) -> Tree:
    """`left - right`, leaf by leaf: the update of a client, new minus old.

    >>> sub({"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([0., 0.])}
    """
    return map_leaves(torch.sub, left, right)


def add(weights: Tree, delta: Tree) -> Tree:
    """`weights + delta` in the type of `weights`, whatever the precision of `delta`."""
    return map_leaves(lambda held, change: held + change.to(held.dtype), weights, delta)


def mul(weights: Tree, factor: float) -> Tree:
    """`weights * factor`, leaf by leaf.

    >>> mul({"w": torch.ones(2)}, 3.0)
    {'w': tensor([3., 3.])}
    """
    return map_leaves(lambda value: value * factor, weights)


def div(weights: Tree, divisor: float) -> Tree:
    """`weights / divisor`, leaf by leaf; its last bit may differ from that of `mul` with the inverse."""
    return map_leaves(lambda value: value / divisor, weights)


def zeros_like(weights: Tree) -> Tree:
    """Zeros in the shapes and types of `weights`."""
    return map_leaves(torch.zeros_like, weights)


def flat(params: Mapping[str, Tensor]) -> Tensor:
    """All parameters as one vector (P,), in their order.

    >>> flat({"w": torch.ones(2, 1), "b": torch.zeros(1)})
    tensor([1., 1., 0.])
    """
    return torch.cat([param.detach().reshape(-1) for param in params.values()])


def shaped(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A vector (P,) as parameters: the reverse of `flat`.

    >>> shaped(torch.tensor([1.0, 2.0]), {"w": torch.ones(1, 1), "b": torch.zeros(1)})
    {'w': tensor([[1.]]), 'b': tensor([2.])}
    """
    parts = vector.split([param.numel() for param in like.values()])
    return {name: part.view(param.shape) for (name, param), part in zip(like.items(), parts, strict=True)}


def placed(
    weights: Weights | tuple[Weights, ...], delta: Weighted | Slotted, slot: int | None = None
) -> Weights | tuple[Weights, ...]:
    """A client's own model: the weights that the server keeps, with its update in the slots that it trained.

    Args:
        weights: of a state: one model, or a tuple of K.
        delta: the leaf "delta" of a client's answer; how much it counts for does not matter here. Parameters that it
            does not name stay as they are.
        slot: the slot that the client was asked in, where it was asked in one.

    Raises:
        LookupError: there are several models, and nothing says which of them the update belongs to.

    >>> here = Weights({"w": torch.zeros(2)})
    >>> step = Weighted(Weights({"w": torch.ones(2)}), 5.0)
    >>> placed(here, step).params["w"].tolist()
    [1.0, 1.0]
    >>> [each.params["w"].tolist() for each in placed((here, here), Slotted({1: step}, 2))]
    [[0.0, 0.0], [1.0, 1.0]]
    """
    held = weights if isinstance(weights, tuple) else (weights,)
    parts: dict[int | None, Weights]
    if isinstance(delta, Slotted):
        parts = {int(k): part.value for k, part in delta.parts.items()}
    elif isinstance(delta.value, list | tuple):
        parts = dict(enumerate(delta.value))
    else:
        parts = {0 if len(held) == 1 else slot: delta.value}
    if any(k is None or not 0 <= k < len(held) for k in parts):
        raise LookupError(f"its update does not say which of {len(held)} models it belongs to")
    moved = tuple(_moved(each, parts[k]) if k in parts else each for k, each in enumerate(held))
    return moved if isinstance(weights, tuple) else moved[0]


def _moved(weights: Weights, delta: Weights) -> Weights:
    return Weights(
        {**weights.params, **add({name: weights.params[name] for name in delta.params}, delta.params)},
        {**weights.buffers, **add({name: weights.buffers[name] for name in delta.buffers}, delta.buffers)},
    )
