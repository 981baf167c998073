"""Models that a client trains by turns, batch by batch, in steps that a method takes by itself.

`LocalTrainer` trains one model to the end. APFL, pFedMe and Per-FedAvg take a gradient at one point and a step from
another, on the same batch. FedALA takes gradients of a few layers, at points that it mixes. Their models have storage
of their own here, because a task has one module.

A work in steps yields `ModelByBatch.ask`: the gradients of several clients are then computed together.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtide.core.base import Moment, Weights
from fedtide.core.trees import map_leaves
from fedtide.learn.device import read, to_cpu
from fedtide.learn.fast.layers import has_wide
from fedtide.learn.fast.stacks import LayerStack
from fedtide.learn.local import Batch, LocalOptimizer, LocalTrainer, clip, refuse_terms
from fedtide.learn.task import Task

Seen = list[tuple[Tensor, int]]
"""Mean loss of each batch, and the number of its labels."""
BY_BATCH = "the method takes steps of its own"
"""Why such methods refuse terms of the loss."""
STACK_BYTES = 8 * 2**20
"""Bytes of models that are trained together, which is what a processor's last cache holds."""


class ModelByBatch:
    """A model whose steps a method takes by itself, with the optimizer of local training.

    A step along the model's own gradient gives the bits of `LocalTrainer`. Running statistics of BatchNorm without
    momentum (None) are those of the last batch.

    Args:
        task: the model.
        local: optimizer, rate, weight decay, clipping, and FedProx's pull towards the initial weights.
        weights: the initial weights; left unchanged.
        moment: the time, for the schedule of the rate.

    Raises:
        FedtideError: local training has terms of the loss. A method refuses them when it is built (`refuse_terms`).

    >>> from fedtide.core.base import Shard
    >>> from fedtide.core.rng import Rng
    >>> task, local, now = Task(lambda: torch.nn.Linear(1, 2)), LocalTrainer(), Moment(0, 1)
    >>> rows, start = Shard(torch.ones(4, 1), torch.tensor([0, 0, 0, 1]), torch.arange(4)), task.init(Rng(0))
    >>> model = ModelByBatch(task, local, start, now)
    >>> for batch in local.batches(task, task.loss, rows, now, Rng(0)):
    ...     model.step(model.gradient(batch)[1])
    >>> fitted = local(task, task.loss, start, rows, now, Rng(0))
    >>> torch.equal(model.trained().params["weight"], fitted.weights.params["weight"])
    True
    """

    def __init__(self, task: Task, local: LocalTrainer, weights: Weights, moment: Moment) -> None:
        refuse_terms(local, BY_BATCH)
        self.task, self.local = task, local
        params = {name: task.to_device(weights.params[name]).clone() for name in task.scratch.names}
        self.weights = Weights(params, {name: task.to_device(b).clone() for name, b in weights.buffers.items()})
        self.values = list(params.values())
        self.rate = local.lr * local.lr_schedule(moment)
        self.steps = 0
        self._terms = local.gradient_terms(None)
        self._received = [value.clone() for value in self.values] if self._terms else []
        self._changes = bool(self._terms) or local.max_grad_norm is not None or local.weight_decay > 0
        self._optimizer = LocalOptimizer(local, self.rate, self.values)

    def gradient(
        self, batch: Batch, at: Sequence[Tensor] | None = None, names: Sequence[str] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the mean loss of a batch, and its gradient, which is lost at the next one; running statistics move.

        Args:
            batch: of `LocalTrainer.batches`.
            at: parameters of another point; None is the model itself.
            names: parameters whose gradient is wanted; None for all.
        """
        scratch, loss = self.task.scratch, self.task.loss
        params = self.weights.params if at is None else dict(zip(scratch.names, at, strict=True))
        scratch.load(Weights(params, self.weights.buffers), train=True)
        context = (batch.x, batch.y, batch.shared, batch.columns)
        if names is not None and _whole_stack(self.task, batch) is not None:  # without autograd all take no longer
            value, every = self.task.differentiate(loss, *context)
            by_name = dict(zip(scratch.names, every, strict=True))
            gradient = [by_name[name] for name in names]
        else:
            value, gradient = self.task.differentiate(loss, *context, names=names)
        for name, buffer in self.weights.buffers.items():
            buffer.copy_(scratch.buffers[name])
        return value, gradient

    def ask(self, batch: Batch, at: Sequence[Tensor] | None = None, names: Sequence[str] | None = None) -> "Gradient":
        """Return the request for `gradient`, of a work in steps. The result is lost at the next request."""
        stack = _stack_for(self.task, batch) if names is None else _whole_stack(self.task, batch)
        return Gradient(self, batch, at, names) if stack is None else StackedGradient(self, batch, at, names, stack)

    def step(self, gradient: Sequence[Tensor]) -> None:
        """Take a step along a gradient, which is left unchanged."""
        gradient = [leaf.clone() for leaf in gradient] if self._changes else list(gradient)
        for term in self._terms:
            torch._foreach_add_(gradient, term(self.values, self._received))
        if self.local.max_grad_norm is not None:
            clip(gradient, self.local.max_grad_norm)
        self._optimizer(self.values, gradient, self.steps)
        self.steps += 1

    def trained(self) -> Weights:
        """Return the weights now, on the CPU."""
        return map_leaves(to_cpu, self.weights)


@dataclass(frozen=True, eq=False)
class Gradient:
    """Loss and gradient of a batch: what `ModelByBatch.gradient` is called with."""

    model: ModelByBatch
    batch: Batch
    at: Sequence[Tensor] | None
    names: Sequence[str] | None

    @property
    def key(self) -> Hashable:
        """The task, the shape of the batch, and the parameters."""
        return type(self), id(self.model.task), self.batch.x.shape, self.names and tuple(self.names)

    def run_single(self) -> tuple[Tensor, list[Tensor]]:
        """Compute it for one client."""
        return self.model.gradient(self.batch, self.at, self.names)


@dataclass(frozen=True, eq=False)
class StackedGradient(Gradient):
    """Loss and gradient of a batch, for a model whose copies pass side by side."""

    stack: LayerStack

    def run_batched(self, others: Sequence["StackedGradient"]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield it for several clients, of batches of one shape; `others` has this one, too."""
        most = max(STACK_BYTES // sum(value.nbytes for value in self.model.values), 1)
        for first in range(0, len(others), most):
            yield from self._side_by_side(others[first : first + most])

    def _side_by_side(self, others: Sequence["StackedGradient"]) -> list[tuple[Tensor, list[Tensor]]]:
        names, loss = self.model.task.scratch.names, self.model.task.loss
        points = [other.model.weights.params if other.at is None else dict(zip(names, other.at, strict=True))
                  for other in others]  # fmt: skip
        batches = [other.batch for other in others]
        self.stack.load_each([Weights(point, self.model.weights.buffers) for point in points])
        x, y = (torch.stack([getattr(batch, name) for batch in batches]) for name in "xy")
        context = loss.stacked([batch.shared for batch in batches])
        if self.batch.columns:
            context = (context, *map(torch.stack, zip(*(batch.columns for batch in batches), strict=True)))
        share = x.new_full(y.shape, 1 / y.shape[1])
        gradient, values, _ = self.stack.gradient([], [], x, y, share, None, context)
        named = self.stack.named(gradient)
        return [(value, [named[name][k] for name in self.names or names]) for k, value in enumerate(values)]


def _stack_for(task: Task, batch: Batch) -> LayerStack | None:
    """Return a stack for gradients of several clients; None if the model, its loss or the labels need autograd."""
    masked = any(column.dtype == torch.bool for column in batch.columns)  # a mask is for steps of sequences
    return None if masked else task.layer_stack(task.loss, batch.x, batch.y, "batches")


def _whole_stack(task: Task, batch: Batch) -> LayerStack | None:
    """Return the stack if the gradient of all layers takes no longer than autograd of a few."""
    stack = _stack_for(task, batch)
    return None if stack is None or has_wide(stack.layers) else stack


def mean_loss(seen: Seen) -> float:
    """Return the mean loss over all labels; 0 without any.

    >>> mean_loss([(torch.tensor(1.0), 3), (torch.tensor(5.0), 1)])
    2.0
    """
    total, count = 0.0, 0
    for value, labels in read(seen):
        total, count = total + value * labels, count + int(labels)
    return total / count if count else 0.0
