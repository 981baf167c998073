"""Heads of single clients on one trunk, whose rows are for classes, and the means of features by class."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.learn import LocalTrainer, Steps, Summed, Task
from fedtide.learn.layers import Part, check_trunk, last_layer, pick_layers, put_layers
from fedtide.learn.steps import Features
from fedtide.learn.task import example_of, join_models, refuse_numbers, split_models, width, with_branches
from fedtide.learn.terms import LossTerm
from fedtide.models.branched import in_branch, in_layer


class Headed:
    """A task whose last layer is a head of each client.

    Args:
        task: model and loss, with an example.
        method: name of the method, for errors.

    Raises:
        FedtideError: rows have no classes, or several labels, or the last layer is no head of vectors, or the only one.
    """

    def __init__(self, task: Task, method: str) -> None:
        refuse_numbers(task, "algorithm", method, "each row of its heads is for a class")
        check_trunk(task, method)
        self.task, self.layer = task, last_layer(task)
        outputs = next(iter(task.outputs(task.scratch.weights, example_of(task, f"the classes of '{method}'"))))
        self.classes = outputs.shape[-1]
        head = pick_layers(task.scratch.weights, self.is_head).params
        if outputs.dim() != 2 or not all(len(p) == self.classes for p in head.values()):
            raise refused("algorithm", method, "another one, because the head has no row for each class")
        self.one = with_branches(task, self.layer, 1, vectors=True, key="model")  # returns the features, too
        in_one = in_branch(f"{self.layer}.", self.layer, 0)
        self.head_part = Part.of(task, self.is_trunk)
        self.trunk_part = Part.of(self.one, lambda name: name.startswith(in_one))

    def is_head(self, name: str) -> bool:
        """Tell whether a parameter is one of the head."""
        return in_layer(name, self.layer)

    def is_trunk(self, name: str) -> bool:
        """Tell whether a parameter is one of the trunk."""
        return not self.is_head(name)

    def head_of(self, weights: Weights) -> Tensor:
        """Return the head of a model (classes, width), weight and bias of each class side by side."""
        head = pick_layers(weights, self.is_head).params
        return torch.cat([p.detach().reshape(self.classes, -1) for p in head.values()], 1)

    def with_head(self, weights: Weights, head: Tensor) -> Weights:
        """Return a model with another head (classes, width)."""
        like = pick_layers(weights, self.is_head).params
        parts = head.split([p[0].numel() for p in like.values()], 1)
        return put_layers(
            weights, Weights({name: part.reshape(p.shape) for (name, p), part in zip(like.items(), parts, strict=True)})
        )

    def train_head(
        self, local: LocalTrainer, weights: Weights, shard: Shard, moment: Moment, rng: Rng
    ) -> Steps[Weights]:
        """Return the model after training of its head alone."""
        after, _ = yield from self.head_part.train(local, weights, shard, moment, rng)
        return after

    def train_trunk(
        self, local: LocalTrainer, weights: Weights, term: LossTerm, shard: Shard, moment: Moment, rng: Rng
    ) -> Steps[tuple[Weights, Any]]:
        """Return the model after training of its trunk alone, with a term of its features, and the result.

        The result has the features of the samples after training.
        """
        joined = join_models([weights], self.layer)
        loss = Summed.of(self.task.loss, [term], self.one, joined)
        after, fitted = yield from self.trunk_part.train(local, joined, shard, moment, rng, loss, features=True)
        return split_models(after, weights, self.layer, 1)[0], fitted

    def features_of(self, weights: Weights, x: Tensor) -> Features:
        """Return the request for the features (rows, d) of samples."""
        return Features(self.one, join_models([weights], self.layer), x)

    @cached_property
    def no_means(self) -> tuple[Tensor, Tensor]:
        """Means (classes, d) and counts (classes,) of no rows."""
        d = width(self.one, self.one.scratch.weights, "model")
        return torch.zeros(self.classes, d, dtype=self.task.dtype), torch.zeros(self.classes, dtype=self.task.dtype)


def class_means(features: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the mean features of each class (classes, d), zero without rows, and the numbers of rows (classes,).

    >>> means, counts = class_means(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2]), 3)
    >>> means.flatten().tolist(), counts.tolist()
    ([2.0, 0.0, 5.0], [2.0, 0.0, 1.0])
    """
    member = torch.nn.functional.one_hot(y, classes).double()
    counts = member.sum(0)
    return (member.T @ features.double() / counts.clamp(min=1)[:, None]).to(features.dtype), counts
