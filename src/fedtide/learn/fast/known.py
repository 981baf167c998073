"""Recognition of networks of known layers (`fedtide.learn.fast.layers`); torch does all else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedtide.learn.fast.layers import Conv2d, Flatten, Linear, MaxPool2d, Mean, Product, ReLU
from fedtide.learn.fast.plan import Input, Layer, Plan, Room
from fedtide.models.branched import Averaged, Branched, Branches

if TYPE_CHECKING:
    from fedtide.learn.task import Task

FEW_CHANNELS = 16
"""Outputs of a convolution up to which products of matrices are mostly faster than a library for convolutions."""


def known_layers(task: Task, shape: tuple[int, ...], room: Room, *, within: str = "") -> list[Layer] | None:
    """Return the layers of a task's model for rows of a shape; None if there is one that is not known here.

    Of branches only the last layer is known. In the room is what they need for one client and one row.

    Args:
        task: the model.
        shape: of a row.
        room: where their numbers are.
        within: name of a part of the model, if its layers are asked for alone.
    """
    module = task.scratch.module.get_submodule(within)
    if torch.nn.modules.module._has_any_global_hook() or any(map(_is_watched, task.scratch.module.modules())):
        return None
    made: list[Layer] = []
    comes = shape
    for name, layer in _in_order(module, within):
        known = _known(name, layer, made, shape)
        if known is None or (branch_count(made) is not None and not isinstance(known, Mean)):
            return None
        if isinstance(known, Flatten) and len(shape) == 1:
            continue
        if isinstance(known, MaxPool2d) and made and isinstance(made[-1], Conv2d):
            made[-1].cropped = True
        made.append(known)
        shape = known.output(shape)
    products = [layer for layer in made if isinstance(layer, Product)]
    names = [name for layer in products for name in layer.names]
    if not names or len(shape) != 1 or sorted(names) != sorted(n for n in task.scratch.names if n.startswith(within)):
        return None
    for product in products:
        product.weights = [torch.empty(1, *size, device="meta") for size in product.sizes]
    Plan(made, Input(turned(made, torch.empty(1, 1, *comes, device="meta")).shape, False), "descent", room)
    return made


def turned(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """Return rows (clients, rows, ...) as the first layer reads them: those of pictures innermost."""
    flat = x.dim() == 3 or (isinstance(layers[0], Flatten) and layers[0].ready)
    return x.flatten(2) if flat else x.movedim(1, -1)


def branch_count(layers: Sequence[Layer]) -> int | None:
    """Return how often the last layer is repeated; None if it is not."""
    return getattr(layers[-1], "branches", None) if layers else None


def has_wide(layers: Sequence[Layer]) -> bool:
    """Tell whether a convolution has so many outputs that a library for convolutions is faster."""
    return any(isinstance(each, Conv2d) and each.shape[0] > FEW_CHANNELS for each in layers)


def _is_watched(module: nn.Module) -> bool:
    """Tell whether something is called at a module's passes, or in place of its own, which only torch calls."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    params = module.parameters(recurse=False)
    return any(hooks) or "forward" in vars(module) or any(param._backward_hooks for param in params)


def _in_order(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a sequence, of sequences in it, too, with their names."""
    inside = f"{name}.model" if name else "model"
    if type(module) is Averaged:
        yield from _in_order(module.model, inside)
        yield name, module
        return
    if type(module) is Branched:
        name, module = inside, module.model
    if type(module) is not nn.Sequential:
        yield name, module
        return
    for inner, layer in module._modules.items():  # `named_children` leaves out one that comes twice
        assert layer is not None
        yield from _in_order(layer, f"{name}.{inner}" if name else inner)


def _known(name: str, layer: nn.Module, before: Sequence[Layer], shape: tuple[int, ...]) -> Layer | None:
    """Return what does the steps of a layer on rows of a shape, after those before it, if it is known and they fit."""
    first, branches = not any(isinstance(each, Product) for each in before), None
    if type(layer) is Branches and {type(copy) for copy in layer.copies} == {nn.Linear}:
        branches, layer = layer, layer.copies[0]
    kind = type(layer)
    if kind is Averaged:
        count = branch_count(before)
        return None if count is None else Mean(count)
    if isinstance(layer, nn.Linear) and kind is nn.Linear and len(shape) == 1:
        return Linear(name, layer, first, branches) if shape == (layer.in_features,) else None
    if isinstance(layer, nn.Conv2d) and kind is nn.Conv2d and len(shape) == 3:
        odd = all(side % 2 for side in layer.kernel_size) and layer.stride == (1, 1)
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        if not plain or (layer.padding == "same" and not odd) or layer.in_channels != shape[0]:
            return None
        made = Conv2d(name, layer, first)
        return made if min(made.sides(shape)[1]) > 0 else None
    if isinstance(layer, nn.MaxPool2d) and kind is nn.MaxPool2d and len(shape) == 3:
        sizes = [(each, each) if isinstance(each, int) else each for each in (layer.kernel_size, layer.stride)]
        plain = (layer.padding, layer.dilation) == (0, 1) and not (layer.ceil_mode or layer.return_indices)
        return MaxPool2d() if plain and sizes == [(2, 2), (2, 2)] and min(shape[1:]) > 1 else None
    if isinstance(layer, nn.Flatten) and kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return Flatten(not before)
    return ReLU() if kind is nn.ReLU else None
