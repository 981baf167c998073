"""Tasks whose network has a layer repeated K times: how they are made, what they compute, and weights in and out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedtide.core.base import Weights
from fedtide.core.errors import refused
from fedtide.core.weights import renamed, united
from fedtide.learn.task import Task, concat_passes, example_of
from fedtide.models.branched import Feature, branch_of, branched, in_branch, in_layer


def with_branches(
    task: Task, layer: str, count: int, feature: Feature = "shared", *, vectors: bool = False, key: str = "branch_layer"
) -> Task:
    """Return the task on a network with `layer` repeated `count` times; see `fedtide.models.branched.branched`.

    If the task has initial weights, all copies of the layer begin with them.

    Args:
        task: the task on the network without branches.
        layer: the layer to repeat.
        count: K.
        feature: kind of features.
        vectors: require features to be vectors, as for clustering.
        key: name of the option that gives the layer, for error messages.

    Raises:
        FedtideError: the model has no such layer, or its features are not vectors; raised before anything runs.
    """
    begin = None if task.begin is None else join_models([task.begin] * count, layer)
    branched_task = replace(task, build=lambda: branched(task.build(), layer, count, feature, key), begin=begin)
    scratch = branched_task.scratch
    if all(branch_of(name) is None for name in scratch.names):
        raise refused(key, layer, "a layer with parameters, such as 'head'")
    if vectors and branched_task.example is not None:
        width(branched_task, scratch.weights, key)
    return branched_task


def width(task: Task, weights: Weights, key: str = "branch_layer") -> int:
    """Return the width of the features of a branched task.

    Raises:
        FedtideError: the task has no example sample, or its features are not vectors.
    """
    shape = tuple(logits_and_features(task, weights, example_of(task, "features"))[1].shape[1:])
    if len(shape) != 1:
        raise refused(f"{key}: shape of its features", shape, "a layer that takes vectors, such as 'head'")
    return shape[0]


def logits_and_features(task: Task, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (K, rows, classes) and features (rows, d) of a branched task, in evaluation mode."""
    features = []

    def logits() -> Iterator[Tensor]:
        for outputs, z in task.outputs(weights, x):
            features.append(z)
            yield outputs

    return concat_passes(logits(), len(x), dim=1), torch.cat(features)


def join_models(models: Sequence[Weights], layer: str) -> Weights:
    """Merge K models of one task into the weights of one network with `layer` repeated, as of `with_branches`.

    Shared layers are run once, and taken from the first model.

    Args:
        models: K.
        layer: the layer in which they differ, or "*" for all.

    >>> one, two = (Weights({"conv.w": torch.ones(1), "head.w": torch.full((1,), k)}) for k in (1.0, 2.0))
    >>> list(join_models([one, two], "head").params)
    ['model.conv.w', 'model.head.copies.0.w', 'model.head.copies.1.w']
    """
    names = [*models[0].params, *models[0].buffers]
    return united(
        renamed(model, {name: in_branch(name, layer, k) for name in names if not k or in_layer(name, layer)})
        for k, model in enumerate(models)
    )


def split_models(weights: Weights, like: Weights, layer: str, count: int) -> list[Weights]:
    """Split joined weights into each model, or its part of an update, by the names in `like`.

    Shared layers are in all of them.
    """
    names = [*like.params, *like.buffers]
    return [
        renamed(weights, {in_branch(name, layer, k if in_layer(name, layer) else 0): name for name in names})
        for k in range(count)
    ]
