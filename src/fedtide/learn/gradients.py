"""Gradients of one layer for many clients, from one pass over all of their samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedtide.core.base import Shard, Weights
from fedtide.learn.device import home
from fedtide.learn.task import ROWS, Task, joined


def layer_gradients(
    task: Task, weights: Weights, shards: Sequence[Shard], names: Sequence[str]
) -> list[dict[str, Tensor]]:
    """Return for each client the gradient of its mean training loss by some parameters, in evaluation mode.

    Where these are a linear layer's, one pass over samples of several clients, back to that layer and no further, has
    all that each client's gradient is a product of; else clients go one by one. `Task.gradient` says the same to
    rounding.

    Args:
        task: model and loss.
        weights: where the gradients are taken.
        shards: samples of each client, with masks all or none.
        names: parameters whose gradient is wanted.
    """
    layer = _linear(task, names)
    made: list[dict[str, Tensor]] = []
    for some in _passes(shards):
        found = None if layer is None or len(some) < 2 else _in_one_pass(task, weights, some, layer)
        if found is None:
            made += [task.gradient(weights, shard, train=False, names=names)[0] for shard in some]
        else:
            made += [dict(zip(names, parts, strict=True)) for parts in found]
    return made


def _linear(task: Task, names: Sequence[str]) -> nn.Linear | None:
    """Return the linear layer whose parameters these are; None if they are others, or used elsewhere, too."""
    module = task.scratch.module
    layer = next((each for name, each in module.named_modules() if name == names[0].rpartition(".")[0]), None)
    if type(layer) is not nn.Linear or task.bfloat:
        return None
    used = [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]
    named, own = dict(module.named_parameters()), list(layer.parameters())
    alike = len(names) == len(own) and all(named[name] is each for name, each in zip(names, own, strict=True))
    return layer if alike and all(sum(each is one for one in used) == 1 for each in own) else None


def _passes(shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    """Cut clients into those of one pass: their labels are `ROWS` together, or one client has more."""
    some: list[Shard] = []
    labels = 0
    for shard in shards:
        if some and labels + shard.y.numel() > ROWS:
            yield some
            some, labels = [], 0
        some.append(shard)
        labels += shard.y.numel()
    if some:
        yield some


def _in_one_pass(
    task: Task, weights: Weights, shards: Sequence[Shard], layer: nn.Linear
) -> list[tuple[Tensor, ...]] | None:
    """Return the gradients of the layer's parameters for each client; None if a pass does not use it once per row."""
    met: list[tuple[Tensor, Tensor]] = []

    def cut(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        made = output.detach().requires_grad_()  # what came before it is none of the gradient's business
        met.append((inputs[0].detach(), made))
        return made

    module, sizes = task.scratch.load(weights, train=False), [len(shard) for shard in shards]
    handle = layer.register_forward_hook(cut)
    try:
        outputs = task.run(module, task.inputs(joined([shard.x for shard in shards])))
    finally:
        handle.remove()
    if len(met) != 1 or not isinstance(outputs, Tensor) or {len(met[0][0]), len(outputs)} != {sum(sizes)}:
        return None
    inputs, made = met[0]
    losses = []
    for shard, each in zip(shards, outputs.split(sizes), strict=True):
        shared, columns = task.loss.prepare(shard)
        losses.append(task.loss.value(each, *task.there((shard.y, shared, columns))))
    (slope,) = torch.autograd.grad(torch.stack(losses).sum(), [made])
    return [
        tuple(home(part) for part in (dy.T @ x, dy.sum(0))[: len(list(layer.parameters()))])
        for x, dy in (
            (x.flatten(0, -2), dy.flatten(0, -2)) for x, dy in zip(inputs.split(sizes), slope.split(sizes), strict=True)
        )
    ]
