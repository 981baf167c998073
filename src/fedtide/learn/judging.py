"""Losses of several models on the same samples, as a client takes them before it chooses one.

Where models are networks of dense layers they are held side by side, and one product of matrices passes the samples
through a layer of all of them. Loading one after the other into a module takes half as long again: their weights are
copied for every client, and the small operations around the products are as many as there are models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtide.core.trees import leaves
from fedtide.core.types import Shard, Weights
from fedtide.learn.device import home
from fedtide.learn.layers import Dense, Flat, Layer, Rectifier, Room, known_layers
from fedtide.learn.task import Task, parts

SIDE_BY_SIDE_BYTES = 32 * 2**20
"""Bytes of models that are held side by side: of larger ones the product takes so long that a copy weighs little."""


def mean_losses(task: Task, models: Sequence[Weights], shard: Shard) -> Tensor:
    """Return the mean plain loss (K,) of each model on a client's samples; infinite if it is not finite.

    K forward passes in evaluation mode over samples that are converted once.
    """
    x = task.inputs(shard.x)
    if (held := _side_by_side(task, models, shard)) is not None:
        return finite_losses(held.losses(x, shard.y).mean(1))
    return finite_losses(torch.stack([task.row_losses(each, x, shard.y, shard.mask).mean() for each in models]))


def finite_losses(losses: Tensor) -> Tensor:
    """Return losses with infinity in place of what is not finite, so that no such model is chosen."""
    return torch.where(losses.isfinite(), losses, torch.inf)


class SideBySide:
    """Several models of dense layers.

    Args:
        task: the models' task.
        models: their weights. They are held on to, so that no others can be taken for them.
        layers: the layers, without numbers.
    """

    def __init__(self, task: Task, models: Sequence[Weights], layers: Sequence[Layer]) -> None:
        self.task, self.layers, self.models, self.state = task, layers, models, _state(models)
        for layer in layers:
            if isinstance(layer, Dense):
                each = [layer.layout([model.params[name] for name in layer.names]) for model in models]
                layer.weights = [task.there(torch.stack(same)) for same in zip(*each, strict=True)]

    @torch.no_grad()
    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the plain loss (models, rows) of each sample, in float64."""
        count, found = len(self.models), []
        for rows in parts(max(len(x), 1)):
            made, labels = self.task.there(x[rows]), y[rows]
            shape: tuple[int, ...] = tuple(made.shape[1:])
            for layer in self.layers:
                shape = layer.resize(shape, count, len(made))
            made = made.expand(count, *made.shape)
            for layer in self.layers:
                made = layer.forward(made)
            told = self.task.target.told(home(made).double().flatten(0, 1))
            labels = labels.expand(count, *labels.shape).flatten(0, 1)
            found.append(self.task.target.losses(told, labels, None).unflatten(0, (count, -1)))
        return torch.cat(found, 1)


def _side_by_side(task: Task, models: Sequence[Weights], shard: Shard) -> SideBySide | None:
    """Return models side by side, those of the last call where they are the same; None where they cannot be."""
    if len(models) < 2 or task.bfloat or shard.mask is not None or not len(shard):
        return None
    held: SideBySide | None = task.scratch.judged
    if held is not None and held.state == _state(models):
        return held
    task.scratch.judged = None
    if sum(leaf.nbytes for leaf in leaves(list(models))) > SIDE_BY_SIDE_BYTES or models[0].buffers:
        return None
    room = Room(task.dtype, torch.device(task.device))
    layers = known_layers(task, tuple(shard.x.shape[1:]), room)
    if layers is None or not all(isinstance(layer, Dense | Flat | Rectifier) for layer in layers):
        return None
    if isinstance(next(layer for layer in layers if not isinstance(layer, Flat)), Rectifier):
        return None  # it would write to rows that all models read
    if getattr(layers[-1], "branches", None) is not None:
        return None
    task.scratch.judged = made = SideBySide(task, models, layers)
    return made


def _state(models: Sequence[Weights]) -> list[tuple[int, int]]:
    """Return what is equal for the same tensors with the same numbers, while they are held on to."""
    return [(id(leaf), leaf._version) for model in models for leaf in model.params.values()]
