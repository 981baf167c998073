"""Losses of several models on a client's samples, from the fewest passes.

A client compares models before it chooses one. Networks of dense layers, or of convolutions with few channels, are
stored side by side: one product of matrices passes the samples through a layer of all models. Loading one model after
the other into a module takes half as long again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fedtide.core.base import Shard, Weights
from fedtide.core.trees import leaves
from fedtide.learn.device import CPU, to_cpu
from fedtide.learn.fast import LayerStack, stack_models
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
    """Return the plain loss (K, samples) of each sample by each model in float64, in evaluation mode.

    Sequences without a mask have a loss for each step.
    """
    x = task.inputs(shard.x)
    compared = _compared_models(task, models, shard)
    if compared is not None:
        return compared.losses(task, x, shard.y)
    return torch.stack([task.row_losses(model, x, shard.y, shard.mask) for model in models])


def finite_losses(losses: Tensor) -> Tensor:
    """Return losses with infinity in place of values that are not finite, so that no such model is chosen."""
    return torch.where(losses.isfinite(), losses, torch.inf)


class ComparedModels:
    """Several models, side by side.

    Args:
        models: their weights; the reference keeps their storage from being reused for other models.
        stack: passes samples through all models.
        state: identifies models and samples (`_state`).
    """

    def __init__(self, models: Sequence[Weights], stack: LayerStack, state: Hashable) -> None:
        self.models, self.stack, self.state = models, stack, state
        most = PASS_BYTES if stack.device.type == CPU else GPU_PASS_BYTES
        self.rows = max(most // (stack.row_bytes * len(models)), 1)
        stack.read(stack.starts(models))

    @torch.no_grad()
    def losses(self, task: Task, x: Tensor, y: Tensor) -> Tensor:
        """Return the plain loss (models, samples) of each sample, in float64."""
        count, losses = len(self.models), []
        for rows, labels in zip(x.split(self.rows), y.split(self.rows), strict=True):
            outputs = self.stack.outputs(task.to_device(rows).expand(count, *rows.shape))
            answers = task.target.read_outputs(to_cpu(outputs).double().flatten(0, 1))
            labels = labels.expand(count, *labels.shape).flatten(0, 1)
            losses.append(task.target.losses(answers, labels, None).unflatten(0, (count, -1)))
        return torch.cat(losses, 1)


def _compared_models(task: Task, models: Sequence[Weights], shard: Shard) -> ComparedModels | None:
    """Return models side by side, from the last call if they are the same; None if they cannot be."""
    if len(models) < 2 or task.bfloat or shard.mask is not None or not len(shard) or not shard.x.is_floating_point():
        return None  # rows that torch refuses are refused here, too
    tensors, shape = leaves(list(models)), tuple(shard.x.shape[1:])
    if any(leaf.is_inference() for leaf in tensors):
        return None  # changes of such tensors have no version
    scratch, state = task.scratch, _state(models, shape)
    if scratch.compared is None or scratch.compared.state != state:
        scratch.compared = None
        if sum(leaf.nbytes for leaf in tensors) > SIDE_BY_SIDE_BYTES or models[0].buffers:
            return None
        stack = stack_models(scratch, shape)
        if stack is not None:
            scratch.compared = ComparedModels(models, stack, state)
    compared: ComparedModels | None = scratch.compared
    return compared


def _state(models: Sequence[Weights], shape: tuple[int, ...]) -> Hashable:
    """Return a key that is equal for the same tensors with the same numbers and samples of the same shape."""
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
