"""Predictions of methods whose clients keep a model, or a part of one, of their own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedtide.clusters.rounds import Served, mix_models
from fedtide.core.base import Prediction, Weights
from fedtide.core.trees import map_leaves
from fedtide.learn import Task

OWN_MODELS: Mapping[str, str] = {"personalized": "its clients keep models of their own"}
"""Transforms that have no meaning for methods with a model on each client (`Traits.refuses`)."""


def take_own_model(payload: Weights, memory: Any) -> Weights:
    """Return the model that a client keeps as its "own"."""
    return memory["own"]


def by_own_weights(task: Task, weights_of: Callable[[Weights, Any], Weights] = take_own_model) -> Any:
    """Build the `predict` of methods whose clients may keep a model: by the client's own, else by the payload's.

    Args:
        weights_of: (payload, memory of a client) -> the model of the client.
    """

    def predict(payload: Weights, memories: Sequence[Any], x: Tensor, owner: Tensor) -> Prediction:
        def predict_group(memory: Any, members: Tensor, rows: Tensor) -> Prediction:
            weights = payload if memory is None else weights_of(payload, memory)
            return Prediction(task.predict_rows(weights, x[rows]))

        return predict_by_memory(memories, owner, predict_group)

    return predict


def by_own_mean(task: Task, models: int) -> Any:
    """Build the `predict` of methods whose clients take a mean of K received models.

    A client keeps the "shares" (K,) of the mean, and without them takes equal ones.
    """
    even = torch.full((models,), 1 / models, dtype=torch.float64)

    def predict(payload: Served, memories: Sequence[Any], x: Tensor, owner: Tensor) -> Prediction:
        shares = [even if memory is None else memory["shares"] for memory in memories]
        means = [{"own": mix_models(payload.models, share)} for share in shares]
        prediction: Prediction = by_own_weights(task)(payload.models[0], means, x, owner)
        return replace(prediction, choice=torch.stack(shares).argmax(1)[owner])

    return predict


def predict_by_memory(
    memories: Sequence[Any], owner: Tensor, predict_group: Callable[[Any, Tensor, Tensor], Prediction]
) -> Prediction:
    """Predict rows of many clients, each by its memory; clients without one go together.

    Args:
        memories: of the clients.
        owner: (rows,) the client of each row.
        predict_group: (a client's memory or None, places of the clients, positions of their rows) -> their prediction.
    """
    keeping = torch.tensor([memory is not None for memory in memories], dtype=torch.bool)
    groups = [(~keeping).nonzero().flatten(), *keeping.nonzero().split(1)]
    parts = [(members.flatten(), torch.isin(owner, members).nonzero().flatten()) for members in groups]
    parts = [part for part in parts if len(part[1])] or parts[:1]
    predictions = [
        predict_group(memories[int(members[0])] if len(members) else None, members, rows) for members, rows in parts
    ]
    order = torch.cat([rows for _, rows in parts]).argsort()
    joined: Prediction = map_leaves(
        lambda *leaves: None if leaves[0] is None else torch.cat(leaves)[order], *predictions
    )
    return joined
