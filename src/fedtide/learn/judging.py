"""Losses of several models on the same samples, as a client takes them before it chooses one.

Where models are networks of dense layers, or of convolutions with few channels, they are held side by side, and one
product of matrices passes the samples through a layer of all of them. Loading one after the other into a module takes
half as long again: their weights are copied for every client, the small operations around the products are as many as
there are models, and libraries for convolutions are made for many channels.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fedtide.core.base import Shard, Weights
from fedtide.core.trees import leaves
from fedtide.learn.device import CPU, home
from fedtide.learn.fast.known import branch_count, has_wide, known_layers
from fedtide.learn.fast.layer_stack import LayerStack
from fedtide.learn.fast.plan import Room
from fedtide.learn.task import Task

SIDE_BY_SIDE_BYTES = 32 * 2**20
"""Bytes of models that are held side by side: of larger ones the product takes so long that a copy weighs little."""
PASS_BYTES = 16 * 2**20
"""Bytes that a pass through models side by side takes, as if it went back, too."""
GPU_PASS_BYTES = 2**30
"""Bytes that a pass takes on a GPU, which is fast only with much to do at once."""


def mean_losses(task: Task, models: Sequence[Weights], shard: Shard) -> Tensor:
    """Return the mean plain loss (K,) of each model on a client's samples; infinite if it is not finite."""
    return finite_losses(row_losses(task, models, shard).flatten(1).mean(1))


def row_losses(task: Task, models: Sequence[Weights], shard: Shard) -> Tensor:
    """Return the plain loss (K, samples) of each sample by each model, in float64.

    K forward passes in evaluation mode over samples that are converted once. Of sequences without a mask each step has
    its loss.
    """
    x = task.inputs(shard.x)
    if (held := _side_by_side(task, models, shard)) is not None:
        return held.losses(x, shard.y)
    return torch.stack([task.row_losses(each, x, shard.y, shard.mask) for each in models])


def finite_losses(losses: Tensor) -> Tensor:
    """Return losses with infinity in place of what is not finite, so that no such model is chosen."""
    return torch.where(losses.isfinite(), losses, torch.inf)


class SideBySide:
    """Several models of known layers.

    Args:
        models: their weights. They are held on to, so that no others can be taken for them.
        stack: what passes samples through all of them.
        shape: of a sample.
    """

    def __init__(self, models: Sequence[Weights], stack: LayerStack, shape: tuple[int, ...]) -> None:
        self.models, self.stack, self.state = models, stack, _state(models, shape)
        held = PASS_BYTES if stack.device.type == CPU else GPU_PASS_BYTES
        self.rows = max(held // (stack.row_bytes * len(models)), 1)
        stack.read(stack.starts(models))

    @torch.no_grad()
    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the plain loss (models, samples) of each sample, in float64."""
        task, count, found = self.stack.task, len(self.models), []
        for some, labels in zip(x.split(self.rows), y.split(self.rows), strict=True):
            made = self.stack.outputs(task.there(some).expand(count, *some.shape))
            told = task.target.told(home(made).double().flatten(0, 1))
            labels = labels.expand(count, *labels.shape).flatten(0, 1)
            found.append(task.target.losses(told, labels, None).unflatten(0, (count, -1)))
        return torch.cat(found, 1)


def _side_by_side(task: Task, models: Sequence[Weights], shard: Shard) -> SideBySide | None:
    """Return models side by side, those of the last call where they are the same; None where they cannot be."""
    if len(models) < 2 or task.bfloat or shard.mask is not None or not len(shard) or not shard.x.is_floating_point():
        return None  # what torch refuses is not judged here, either
    held: SideBySide | None = task.scratch.judged
    tensors, shape = leaves(list(models)), tuple(shard.x.shape[1:])
    if any(leaf.is_inference() for leaf in tensors):
        return None  # they do not tell when they are changed
    if held is not None and held.state == _state(models, shape):
        return held
    task.scratch.judged = None
    if sum(leaf.nbytes for leaf in tensors) > SIDE_BY_SIDE_BYTES or models[0].buffers:
        return None
    room = Room(task.dtype, torch.device(task.device))
    layers = known_layers(task, shape, room)
    if layers is None or has_wide(layers) or branch_count(layers) is not None:
        return None
    task.scratch.judged = made = SideBySide(models, LayerStack(task, layers, room, task.loss), shape)
    return made


def _state(models: Sequence[Weights], shape: tuple[int, ...]) -> Hashable:
    """Return what is equal for the same tensors with the same numbers, while they are held on to, and such samples."""
    return shape, tuple((id(leaf), leaf._version) for model in models for leaf in model.params.values())


def utility(losses: Tensor, trained: int) -> Tensor:
    """Return Oort's utility of a client (1,): samples that it trains on times the root of their mean squared loss.

    Args:
        losses: (samples,) cross-entropy of its samples under the model that it received.
        trained: number of samples that a round uses.

    >>> utility(torch.tensor([3.0, 4.0, 5.0, 5.0]), 2).tolist()
    [8.660254037844387]
    """
    return trained * losses.double().square().mean().sqrt().reshape(1) if len(losses) else torch.zeros(1).double()
