"""Models that a client trains by turns, batch by batch, in steps that a method takes by itself.

`LocalTrainer` trains one model to the end. APFL, pFedMe and Per-FedAvg take a gradient at one point and a step from
another, on the same batch. FedALA takes gradients of a few layers, at points that it mixes. Their models have storage
of their own here, because a task has one module.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtide.core.base import Moment, Weights
from fedtide.core.trees import map_leaves
from fedtide.learn.device import read, to_cpu
from fedtide.learn.local import Batch, LocalOptimizer, LocalTrainer, clip, refuse_terms
from fedtide.learn.task import Task

Seen = list[tuple[Tensor, int]]
"""Mean loss of each batch, and the number of its labels."""
BY_BATCH = "the method takes steps of its own"
"""Why such methods refuse terms of the loss."""


class ModelByBatch:
    """A model whose steps a method takes by itself, with the optimizer of local training.

    A step along the model's own gradient gives the bits of `LocalTrainer`.

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
        self._optimizer = LocalOptimizer(local, self.rate, self.values)

    def gradient(
        self, batch: Batch, at: Sequence[Tensor] | None = None, names: Sequence[str] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the mean loss of a batch, and its gradient; running statistics move.

        Args:
            batch: of `LocalTrainer.batches`.
            at: parameters of another point; None is the model itself.
            names: parameters whose gradient is wanted; None for all.
        """
        scratch, loss = self.task.scratch, self.task.loss
        params = self.weights.params if at is None else dict(zip(scratch.names, at, strict=True))
        scratch.load(Weights(params, self.weights.buffers), train=True)
        context = (batch.x, batch.y, batch.shared, batch.columns)
        value, gradient = self.task.differentiate(loss, *context, names=names)
        for name, buffer in self.weights.buffers.items():
            buffer.copy_(scratch.buffers[name])
        return value.clone(), [leaf.clone() for leaf in gradient]

    def step(self, gradient: Sequence[Tensor]) -> None:
        """Take a step along a gradient."""
        gradient = [leaf.clone() for leaf in gradient]
        for term in self._terms:
            torch._foreach_add_(gradient, term(self.values, self._received))
        if self.local.max_grad_norm is not None:
            clip(gradient, self.local.max_grad_norm)
        self._optimizer(self.values, gradient, self.steps)
        self.steps += 1

    def trained(self) -> Weights:
        """Return the weights now, on the CPU."""
        after: Weights = map_leaves(to_cpu, self.weights)
        return after


def mean_loss(seen: Seen) -> float:
    """Return the mean loss over all labels; 0 without any.

    >>> mean_loss([(torch.tensor(1.0), 3), (torch.tensor(5.0), 1)])
    2.0
    """
    total, count = 0.0, 0
    for value, labels in read(seen):
        total, count = total + value * labels, count + int(labels)
    return total / count if count else 0.0
