"""Arithmetic on a model's weights."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedtide.core.base import Weights
from fedtide.core.trees import Tree, map_leaves

__all__ = ["add", "div", "flat", "map_leaves", "mix", "mul", "shaped", "sub", "zeros_like"]


def sub(left: Tree, right: Tree) -> Tree:
    """Compute `left - right`, leaf by leaf: the update of a client, new minus old.

    >>> sub({"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([0., 0.])}
    """
    return map_leaves(torch.sub, left, right)


def add(weights: Tree, delta: Tree) -> Tree:
    """Compute `weights + delta` in the type of `weights`, whatever the precision of `delta`."""
    return map_leaves(lambda value, change: value + change.to(value.dtype), weights, delta)


def mul(weights: Tree, factor: float) -> Tree:
    """Compute `weights * factor`, leaf by leaf.

    >>> mul({"w": torch.ones(2)}, 3.0)
    {'w': tensor([3., 3.])}
    """
    return map_leaves(lambda value: value * factor, weights)


def div(weights: Tree, divisor: float) -> Tree:
    """Compute `weights / divisor`, leaf by leaf; its last bit may differ from that of `mul` with the inverse."""
    return map_leaves(lambda value: value / divisor, weights)


def mix(weights: Tree, other: Tree, share: float) -> Tree:
    """Compute `share * other + (1 - share) * weights`, leaf by leaf; at 0 and 1 one of them bit for bit.

    >>> mix({"w": torch.tensor([1.0])}, {"w": torch.tensor([5.0])}, 0.25)
    {'w': tensor([2.])}
    """
    return map_leaves(lambda one, two: torch.lerp(one, two, share), weights, other)


def zeros_like(weights: Tree) -> Tree:
    """Return zeros in the shapes and types of `weights`."""
    return map_leaves(torch.zeros_like, weights)


def renamed(weights: Weights, names: Mapping[str, str]) -> Weights:
    """Return the entries of weights that `names` has, under its new names.

    >>> renamed(Weights({"w": torch.ones(1), "b": torch.ones(1)}), {"w": "layer.w"}).params
    {'layer.w': tensor([1.])}
    """
    params, buffers = (
        {names[old]: value for old, value in part.items() if old in names} for part in (weights.params, weights.buffers)
    )
    return Weights(params, buffers)


def united(parts: Iterable[Weights]) -> Weights:
    """Return the entries of several weights together; the last of equal names counts.

    >>> list(united([Weights({"a": torch.ones(1)}), Weights({"b": torch.ones(1)})]).params)
    ['a', 'b']
    """
    params, buffers = dict[str, Tensor](), dict[str, Tensor]()
    for part in parts:
        params |= part.params
        buffers |= part.buffers
    return Weights(params, buffers)


def flat(params: Mapping[str, Tensor]) -> Tensor:
    """Concatenate all parameters to one vector (P,), in their order.

    >>> flat({"w": torch.ones(2, 1), "b": torch.zeros(1)})
    tensor([1., 1., 0.])
    """
    return torch.cat([param.detach().reshape(-1) for param in params.values()])


def shaped(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut a vector (P,) into parameters: the reverse of `flat`.

    >>> shaped(torch.tensor([1.0, 2.0]), {"w": torch.ones(1, 1), "b": torch.zeros(1)})
    {'w': tensor([[1.]]), 'b': tensor([2.])}
    """
    parts = vector.split([param.numel() for param in like.values()])
    return {name: part.view(param.shape) for (name, param), part in zip(like.items(), parts, strict=True)}


def shapes_of(weights: Weights) -> list[dict[str, torch.Size]]:
    """Return the shapes of the parameters, and of the buffers.

    >>> shapes_of(Weights({"w": torch.zeros(2, 3)}))
    [{'w': torch.Size([2, 3])}, {}]
    """
    return [{name: value.shape for name, value in part.items()} for part in (weights.params, weights.buffers)]


def layers_of(weights: Weights) -> dict[str, list[str]]:
    """Return the names of the parameters of each layer, in their order.

    >>> layers_of(Weights({"conv.w": torch.ones(1), "conv.b": torch.ones(1), "head.w": torch.ones(1)}))
    {'conv': ['conv.w', 'conv.b'], 'head': ['head.w']}
    """
    layers: dict[str, list[str]] = {}
    for name in weights.params:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return layers


def squared_lengths(weights: Weights) -> Tensor:
    """Return the squared length (layers,) float64 of the parameters of each layer.

    >>> squared_lengths(Weights({"conv.w": torch.ones(2), "conv.b": torch.ones(1), "head.w": torch.ones(1)})).tolist()
    [3.0, 1.0]
    """
    squares = {name: param.detach().double().square().sum() for name, param in weights.params.items()}
    return torch.stack([torch.stack([squares[name] for name in names]).sum() for names in layers_of(weights).values()])


def add_update(
    weights: Weights | tuple[Weights, ...], update: Weights | Mapping[int, Weights], slot: int | None = None
) -> Weights | tuple[Weights, ...]:
    """Return a client's own model: the weights that the server keeps, with its update in the models that it trained.

    Args:
        weights: of a state: one model, or a tuple of K.
        update: `Answer.update`, of one model, or by the number of the model. Parameters that it does not name stay as
            they are.
        slot: the slot that the client was asked in, if it was asked in one.

    Raises:
        LookupError: there are several models, and nothing says which of them the update belongs to, or it is an update
            of something else.

    >>> here = Weights({"w": torch.zeros(2)})
    >>> step = Weights({"w": torch.ones(2)})
    >>> add_update(here, step).params["w"].tolist()
    [1.0, 1.0]
    >>> [each.params["w"].tolist() for each in add_update((here, here), {1: step})]
    [[0.0, 0.0], [1.0, 1.0]]
    """
    models = weights if isinstance(weights, tuple) else (weights,)
    one = 0 if len(models) == 1 else slot
    parts = {int(k): part for k, part in update.items()} if isinstance(update, Mapping) else {one: update}
    if any(k is None or not 0 <= k < len(models) for k in parts):
        raise LookupError(f"its update does not say which of {len(models)} models it belongs to")
    if any(not isinstance(part, Weights) for part in parts.values()):
        raise LookupError("its update is no Weights, and no mapping from numbers of models to Weights")
    moved = tuple(_moved(model, parts[k]) if k in parts else model for k, model in enumerate(models))
    return moved if isinstance(weights, tuple) else moved[0]


def _moved(weights: Weights, update: Weights) -> Weights:
    def step(values: dict[str, Tensor], change: dict[str, Tensor]) -> dict[str, Tensor]:
        if any(name not in values or values[name].shape != value.shape for name, value in change.items()):
            raise LookupError("its update has other parameters than the model")
        return {**values, **add({name: values[name] for name in change}, change)}

    return Weights(step(weights.params, update.params), step(weights.buffers, update.buffers))
