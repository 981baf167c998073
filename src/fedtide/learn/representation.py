"""What a client says of its rows, so that the server can tell clients apart: labels, embeddings, gradients.

Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu: *Fielding: Clustered Federated Learning with Data Drift*, section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.types import Shard, Weights
from fedtide.core.values import Count, Flag, Fraction, Whole, ingredient
from fedtide.core.weights import flat
from fedtide.learn.features import Frozen
from fedtide.learn.task import Task
from fedtide.parts.distance import Kind, unit

Represent = Callable[[Any, Shard], Tensor]
"""The representation (r,) float64 of a client's rows, given the model that the server sends along, or None."""


@ingredient
class Labels:
    """The share of each label among the client's rows; sums to one.

    Args:
        malicious: the share of clients that permute their labels when they say them; each its own way, always the same.
            Every client is drawn by itself, so that their number is about that share.
    """

    malicious: Fraction = 0.0
    kind: Literal["labels"] = "labels"

    @property
    def distance(self) -> Kind:
        """How they are compared."""
        return "l1"

    @property
    def passes(self) -> float:
        """Passes forward and back over its rows that it costs a client."""
        return 0.0

    @property
    def follows(self) -> bool:
        """Whether a model has to be sent along."""
        return False

    def of(self, task: Task) -> Represent:
        """The representation of a task."""
        classes = classes_of(task)

        def represent(model: Weights | None, shard: Shard) -> Tensor:
            y = shard.y if shard.mask is None else shard.y[shard.mask]
            counts = torch.bincount(y.flatten(), minlength=classes).double()
            return counts / counts.sum().clamp(min=1)

        return represent

    def order(self, task: Task, rng: Rng) -> Tensor | None:
        """In which order a client will always say its numbers, drawn when it first does; None is as they are."""
        if not self.malicious or rng.at("malicious").numpy().random() >= self.malicious:
            return None
        return permutation(classes_of(task), rng.at("permuted"))


@ingredient
class Embedding:
    """The mean of the rows' features in a network that everybody has and nobody trains.

    Args:
        layer: features are what goes into this layer of a network of the task's kind.
        weights: a file of safetensors with the network's weights, by their names; None takes random ones.
        seed: of random ones.
        width: principal components of the public rows' features that are kept; None keeps the features as they are.
    """

    layer: str = "head"
    weights: str | None = None
    seed: Whole = 0
    width: Count | None = None
    kind: Literal["embedding"] = "embedding"

    @property
    def distance(self) -> Kind:
        """How they are compared."""
        return "sq-l2"

    @property
    def passes(self) -> float:
        """Passes forward and back over its rows that it costs a client."""
        return 1 / 3

    @property
    def follows(self) -> bool:
        """Whether a model has to be sent along."""
        return False

    def of(self, task: Task) -> Represent:
        """The representation of a task."""
        extract = Frozen(self.layer, self.weights, self.seed, self.width).of(task)
        return lambda model, shard: extract(Weights({}), shard.x).mean(0)

    def order(self, task: Task, rng: Rng) -> None:
        """As they are."""


@ingredient
class Gradient:
    """The direction of the gradient over all rows, of length one.

    Args:
        at: the model: "frozen", the same for ever, or "global", the mean of all clusters' models as they are now.
        last_layer: of the last layer alone.
        sketch: random projections of it that are sent; None sends all of it.
        seed: of the frozen model and of the projections.
    """

    at: Literal["frozen", "global"] = "frozen"
    last_layer: Flag = False
    sketch: Count | None = 256
    seed: Whole = 0
    kind: Literal["gradient"] = "gradient"

    @property
    def distance(self) -> Kind:
        """How they are compared."""
        return "cosine"

    @property
    def passes(self) -> float:
        """Passes forward and back over its rows that it costs a client."""
        return 1.0

    @property
    def follows(self) -> bool:
        """Whether a model has to be sent along."""
        return self.at == "global"

    def of(self, task: Task) -> Represent:
        """The representation of a task."""
        key = Rng(self.seed).at("gradients")
        frozen = task.init(key)
        names = list(frozen.params)
        layer = names[-1].rpartition(".")[0]
        names = [name for name in names if name.rpartition(".")[0] == layer] if self.last_layer else names
        size = sum(frozen.params[name].numel() for name in names)
        project = None
        if self.sketch is not None and self.sketch < size:
            normal = key.at("sketch").numpy().standard_normal((size, self.sketch)) / np.sqrt(self.sketch)
            project = torch.from_numpy(normal)

        def represent(model: Weights | None, shard: Shard) -> Tensor:
            gradient = task.gradient(frozen if model is None else model, shard)
            vector = flat({name: gradient[name] for name in names}).double()
            vector = vector if project is None else vector @ project
            return unit(vector[None])[0]

        return represent

    def order(self, task: Task, rng: Rng) -> None:
        """As they are."""


Representation = Annotated[Labels | Embedding | Gradient, Field(discriminator="kind")]


def classes_of(task: Task) -> int:
    """How many labels a task has."""
    if task.example is None:
        raise FedtideError("labels: the algorithm needs to know how rows look; allowed: Task(..., example=x[:1])")
    return int(task.logits(task.init(Rng(0)), task.example).shape[-1])


def permutation(n: int, rng: Rng) -> Tensor:
    """A permutation that is not the identity, where there is one.

    >>> permutation(2, Rng(0)).tolist()
    [1, 0]
    """
    draw = rng.numpy()
    order = draw.permutation(n)
    while n > 1 and bool((order == np.arange(n)).all()):
        order = draw.permutation(n)
    return torch.from_numpy(order)
