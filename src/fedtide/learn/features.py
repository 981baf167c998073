"""Features for Gaussian mixtures: one vector per row, in one space for all clients and models."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.base import Weights
from fedtide.core.checkpoint import load_weights
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.fields.types import Count, WeightsFile, Whole, ingredient
from fedtide.learn.device import to_cpu
from fedtide.learn.layers import resolve_layer
from fedtide.learn.task import Task, join_models, width, with_branches

__all__ = [
    "PCA",
    "Features",
    "Frozen",
    "Network",
]  # fmt: skip

Extract = Callable[[Weights, Tensor], Tensor]
"""Feature extractor: (current first model, rows) -> features (rows, d), float64."""


@ingredient
class PCA:
    """Principal components of the public samples (`data.public_samples`), frozen: the space never moves.

    It adds no communication.

    Args:
        width: number of components.
    """

    width: Count = 16
    kind: Literal["pca"] = "pca"
    moves: ClassVar[bool] = False

    def of(self, task: Task, key: str = "features") -> Extract:
        """Return the feature extractor of a task; `key` is its key, for errors."""
        public = _public(task, f"{key}.kind: 'pca'", "features = 'network'")
        return _projected(lambda model, x: to_cpu(x).flatten(1).double(), public, self.width, key)


@ingredient
class FrozenInputs:
    """Inputs of a layer of a network that is never trained: the task's initial network, or one from a file.

    Args:
        layer: the layer, in a network of the task's architecture; "head" is the last one.
        weights: a safetensors file with the network's weights by name; None draws random ones.
        seed: seed of random weights, without a file.
        width: number of principal components of the public samples' features to keep; None keeps the features.
    """

    layer: str = "head"
    weights: WeightsFile | None = None
    seed: Whole = 0
    width: Count | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and self.seed:
            raise ValueError(f"found seed {self.seed} and weights, allowed: one of the two")

    def extractor(self, task: Task, key: str) -> Extract:
        """Return the feature extractor of a task; `key` is its key, for errors."""
        begin = task.init_random(Rng(self.seed).at("frozen features"))
        model = begin if self.weights is None else load_weights(Path(self.weights), begin, f"{key}.weights")
        inputs = _inputs_of(task, self.layer, key)

        def extract(first: Weights, x: Tensor) -> Tensor:
            return inputs(model, x)

        if self.width is None:
            return extract
        return _projected(extract, _public(task, f"{key}.width: {self.width}", "no width"), self.width, key)


@ingredient
class Frozen(FrozenInputs):
    """Inputs of a layer of a network that is never trained: the task's initial network, or one from a file."""

    kind: Literal["frozen"] = "frozen"
    moves: ClassVar[bool] = False

    def of(self, task: Task, key: str = "features") -> Extract:
        """Return the feature extractor of a task; `key` is its key, for errors."""
        return self.extractor(task, key)


@ingredient
class Network:
    """Inputs of a layer of the current first model; the trunk, if the models share all layers before it.

    The space moves with training, and the Gaussians with it. If whole models differ it is that of the first, so their
    order matters.

    Args:
        layer: the layer; "head" is the last one.
    """

    layer: str = "head"
    kind: Literal["network"] = "network"
    moves: ClassVar[bool] = True

    def of(self, task: Task, key: str = "features") -> Extract:
        """Return the feature extractor of a task; `key` is its key, for errors."""
        return _inputs_of(task, self.layer, key)


Features = Annotated[PCA | Frozen | Network, Field(discriminator="kind")]


def _inputs_of(task: Task, layer: str, key: str) -> Extract:
    """Return the extractor of the inputs of a layer, given a network."""
    layer, one, _ = _one_branch(task, layer, key)

    def extract(model: Weights, x: Tensor) -> Tensor:
        return one.features(join_models([model], layer), x).double()

    return extract


def feature_width(task: Task, layer: str, key: str) -> int:
    """Return the width of the inputs of a layer of the task's network; `key` is the key of the layer, for errors."""
    return _one_branch(task, layer, key)[2]


def _one_branch(task: Task, layer: str, key: str) -> tuple[str, Task, int]:
    """Return the layer's name, a task with one branch of it, and the width of its inputs, which must be vectors."""
    layer = resolve_layer(task, layer)
    one = with_branches(task, layer, 1, vectors=True, key=f"{key}.layer")
    return layer, one, width(one, join_models([task.init_random(Rng(0))], layer), f"{key}.layer")


def _public(task: Task, what: str, instead: str) -> Tensor:
    """Return the public samples; raise that `what` needs them and `instead` does not if there are none."""
    if task.public is None or len(task.public) < 2:
        raise FedtideError(
            f"{what} needs public rows, found {0 if task.public is None else len(task.public)}; allowed: "
            f"data.public_samples of 2 or more, in Python Task(..., public=x), or {instead}"
        )
    if not task.public.is_floating_point():
        raise FedtideError(f"{what} is not defined for text; allowed: {instead}")
    return task.public


def _projected(extract: Extract, public: Tensor, wide: int, key: str) -> Extract:
    """Project features on principal components of the public samples; raise if these do not determine as many.

    The components are computed at first use, since algorithms are also constructed without being run.
    """
    numbers = extract(Weights({}), public[:1]).shape[1]
    most = min(len(public) - 1, numbers)
    if wide > most:
        allowed = f"at most {most}, with {len(public)} public rows of {numbers} numbers"
        raise refused(f"{key}.width", wide, allowed)
    basis = cache(lambda: principal(extract(Weights({}), public), wide))

    def project(first: Weights, x: Tensor) -> Tensor:
        center, components = basis()
        return (extract(first, x) - center) @ components

    return project


def principal(x: Tensor, wide: int) -> tuple[Tensor, Tensor]:
    """Return the mean (d,) of rows (rows, d) and their first principal components (d, wide), float64.

    Signs are normalized: a component's first entry that is not small relative to its largest is positive. Every process
    computes the components itself, so the last bits, which depend on the number of threads, are rounded off.

    >>> center, components = principal(torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]]), 1)
    >>> center.tolist(), components.flatten().tolist()
    ([2.0, 1.0], [1.0, 0.0])
    """
    values = x.double().numpy()
    center = values.mean(0)
    _, _, rows = np.linalg.svd(values - center, full_matrices=False)
    chosen = rows[:wide]
    size = np.abs(chosen)
    telling = (size >= size.max(1, keepdims=True) / 2).argmax(1)
    chosen = chosen * np.sign(chosen[np.arange(len(chosen)), telling])[:, None]
    mean, components = (torch.from_numpy(np.ascontiguousarray(part)).float().double() for part in (center, chosen.T))
    return mean, components
