"""Losses of several models, and gradients for several clients, from the fewest passes.

A client compares models before it chooses one. Networks of dense layers, or of convolutions with few channels, are
stored side by side: one product of matrices passes the samples through a layer of all models. Loading one model after
the other into a module takes half as long again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fedtide.core.base import Shard, Weights
from fedtide.core.trees import leaves
from fedtide.learn.device import CPU, to_cpu
from fedtide.learn.fast import LayerStack, stack_models
from fedtide.learn.task import ROWS, Task, joined

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


def layer_gradients(
    task: Task, weights: Weights, shards: Sequence[Shard], names: Sequence[str]
) -> list[dict[str, Tensor]]:
    """Return for each client the gradient of its mean training loss by some parameters, in evaluation mode.

    For a linear layer, one pass over the samples of several clients, back to that layer, gives the factors of each
    client's gradient. For other parameters clients go one by one. `Task.gradient` gives the same to
    rounding.

    Args:
        task: model and loss.
        weights: the point of the gradients.
        shards: samples of each client, with masks all or none.
        names: parameters whose gradient is wanted.
    """
    layer = _linear(task, names)
    gradients: list[dict[str, Tensor]] = []
    for group in _passes(shards):
        parts_found = None if layer is None or len(group) < 2 else _in_one_pass(task, weights, group, layer)
        if parts_found is None:
            gradients += [task.gradient(weights, shard, train=False, names=names)[0] for shard in group]
        else:
            gradients += [dict(zip(names, parts, strict=True)) for parts in parts_found]
    return gradients


def _linear(task: Task, names: Sequence[str]) -> nn.Linear | None:
    """Return the linear layer whose parameters these are; None if they are others, or used elsewhere, too."""
    module = task.scratch.module
    layer = next((param for name, param in module.named_modules() if name == names[0].rpartition(".")[0]), None)
    if type(layer) is not nn.Linear or task.bfloat:
        return None
    used = [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]
    named, params = dict(module.named_parameters()), list(layer.parameters())
    alike = len(names) == len(params) and all(named[name] is param for name, param in zip(names, params, strict=True))
    return layer if alike and all(sum(param is one for one in used) == 1 for param in params) else None


def _passes(shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    """Cut clients into those of one pass: their labels are `ROWS` together, or one client has more."""
    group: list[Shard] = []
    labels = 0
    for shard in shards:
        if group and labels + shard.y.numel() > ROWS:
            yield group
            group, labels = [], 0
        group.append(shard)
        labels += shard.y.numel()
    if group:
        yield group


def _in_one_pass(
    task: Task, weights: Weights, shards: Sequence[Shard], layer: nn.Linear
) -> list[tuple[Tensor, ...]] | None:
    """Return the gradients of the layer's parameters for each client; None if a pass does not use it once per row."""
    met: list[tuple[Tensor, Tensor]] = []

    def cut(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        cut_output = output.detach().requires_grad_()  # what came before it is none of the gradient's business
        met.append((inputs[0].detach(), cut_output))
        return cut_output

    module, sizes = task.scratch.load(weights, train=False), [len(shard) for shard in shards]
    handle = layer.register_forward_hook(cut)
    try:
        outputs = task.run(module, task.inputs(joined([shard.x for shard in shards])))
    finally:
        handle.remove()
    if len(met) != 1 or not isinstance(outputs, Tensor) or {len(met[0][0]), len(outputs)} != {sum(sizes)}:
        return None
    inputs, cut_output = met[0]
    losses = []
    for shard, rows in zip(shards, outputs.split(sizes), strict=True):
        shared, columns = task.loss.prepare(shard)
        losses.append(task.loss.value(rows, *task.to_device((shard.y, shared, columns))))
    (slope,) = torch.autograd.grad(torch.stack(losses).sum(), [cut_output])
    return [
        tuple(to_cpu(part) for part in (dy.T @ x, dy.sum(0))[: len(list(layer.parameters()))])
        for x, dy in (
            (x.flatten(0, -2), dy.flatten(0, -2)) for x, dy in zip(inputs.split(sizes), slope.split(sizes), strict=True)
        )
    ]
