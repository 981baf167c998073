"""Representations of clients' data, so that the server can compare clients: labels, embeddings, gradients, or several.

Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu: *Fielding: Clustered Federated Learning with Data Drift*, section 2.3.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.clusters.distance import Distance, Joint, Kind, between, unit
from fedtide.core.base import Shard, Weights
from fedtide.core.checkpoint import load_weights
from fedtide.core.rng import Rng
from fedtide.core.weights import flat
from fedtide.fields.types import Count, Flag, Fraction, Spelled, WeightsFile, Whole, ingredient
from fedtide.learn.features import FrozenInputs, feature_width
from fedtide.learn.layers import in_last_trained
from fedtide.learn.task import Task, classes_of, label_shares

Euclidean = Literal["l1", "l2", "sq-l2", "cosine"]
"""Distance between vectors of any sign."""

Represent = Callable[[Any, Shard], Tensor]
"""Map from (model sent along by the server, or None; a client's samples) to the representation (r,) float64."""


class Representing(Protocol):
    """A representation; by default no model has to be sent along, and a client keeps the order of its numbers."""

    @property
    def passes(self) -> float:
        """Cost for a client in passes forward and back over its samples."""

    @property
    def needs_model(self) -> bool:
        """Tell whether a model has to be sent along."""
        return False

    @property
    def of_update(self) -> bool:
        """Tell whether it is a gradient, or holds one: then it tells of a client's update."""
        return False

    def distance_of(self, task: Task) -> Distance:
        """Return the distance between representations."""
        return self.distance  # type: ignore[attr-defined, no-any-return]

    def of(self, task: Task, key: str = "representation") -> Represent:
        """Return the representation for a task; `key` is where it stands, for errors."""

    def draw_order(self, task: Task, rng: Rng) -> Tensor | None:
        """Draw the fixed order in which a client reports its numbers, at the first report; None keeps the order."""
        return None


@ingredient
class Labels(Representing):
    """The label distribution of the client's samples; sums to one.

    Args:
        malicious: share of clients that permute the labels they report, each by its own fixed permutation. Every client
            is drawn independently, so their number is about that share.
        distance: distance between clients; "js" is the root of the Jensen-Shannon divergence.
    """

    malicious: Fraction = 0.0
    distance: Kind = "l1"
    kind: Literal["labels"] = "labels"
    passes: ClassVar[float] = 0.0

    def numbers(self, task: Task, key: str = "representation") -> int:
        """Return the width of the representation; `key` is where it stands, for errors."""
        return classes_of(task)

    def of(self, task: Task, key: str = "representation") -> Represent:
        """Return the representation for a task; `key` is where it stands, for errors."""
        classes = classes_of(task)

        def represent(model: Weights | None, shard: Shard) -> Tensor:
            return label_shares(shard, classes)

        return represent

    def draw_order(self, task: Task, rng: Rng) -> Tensor | None:
        """Draw the fixed order in which a client reports its numbers, at the first report; None keeps the order."""
        if not self.malicious or rng.at("malicious").numpy().random() >= self.malicious:
            return None
        return permutation(classes_of(task), rng.at("permuted"))


@ingredient
class Embedding(FrozenInputs, Representing):
    """The mean feature of the client's samples: inputs of a layer of a network that is never trained.

    Args:
        distance: distance between clients.
    """

    distance: Euclidean = "sq-l2"
    kind: Literal["embedding"] = "embedding"
    passes: ClassVar[float] = 1 / 3

    def numbers(self, task: Task, key: str = "representation") -> int:
        """Return the width of the representation; `key` is where it stands, for errors."""
        if self.width is not None:
            return self.width
        return feature_width(task, self.layer, key)

    def of(self, task: Task, key: str = "representation") -> Represent:
        """Return the representation for a task; `key` is where it stands, for errors."""
        extract = self.extractor(task, key)
        return lambda model, shard: extract(Weights({}), shard.x).mean(0)


@ingredient
class Gradient(Representing):
    """The direction of the gradient over all samples, of length one.

    Evaluation mode makes it deterministic. Appendix E.1 of the paper takes it at a small
    pretrained network: that is "frozen" with `weights`.

    Args:
        at: model of the gradient: "frozen", always the same, or "global", the current mean of all clusters' models.
        weights: with "frozen", a safetensors file with that model's weights by name; None draws random ones.
        last_layer: use only the gradient of the last layer, or of the last adapter if the base makes the outputs.
        sketch: number of sums to send, each of random numbers of the gradient with random signs. A gradient of no more
            numbers is sent whole.
        seed: seed of a random frozen model and of the sketch.
        distance: distance between clients.
    """

    at: Literal["frozen", "global"] = "frozen"
    weights: WeightsFile | None = None
    last_layer: Flag = False
    sketch: Count = 256
    seed: Whole = 0
    distance: Euclidean = "cosine"
    kind: Literal["gradient"] = "gradient"
    passes: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.weights is not None and self.at == "global":
            raise ValueError("found weights and at 'global'; allowed: at 'frozen', because files hold frozen models")

    @property
    def needs_model(self) -> bool:
        """Tell whether a model has to be sent along."""
        return self.at == "global"

    @property
    def of_update(self) -> bool:
        """Tell whether it is a gradient, or holds one."""
        return True

    def numbers(self, task: Task, key: str = "representation") -> int:
        """Return the width of the representation; `key` is where it stands, for errors."""
        size = sum(parameter.numel() for parameter in self._parts(task, task.scratch.weights).values())
        return min(size, self.sketch)

    def _parts(self, task: Task, weights: Weights) -> dict[str, Tensor]:
        """Return the parameters whose gradient is used."""
        is_last = in_last_trained(task)
        return {name: part for name, part in weights.params.items() if not self.last_layer or is_last(name)}

    def of(self, task: Task, key: str = "representation") -> Represent:
        """Return the representation for a task; `key` is where it stands, for errors."""
        rng = Rng(self.seed).at("gradients")
        frozen = task.init_random(rng)
        if self.weights is not None:
            frozen = load_weights(Path(self.weights), frozen, f"{key}.weights")
        names = tuple(self._parts(task, frozen))
        size = sum(frozen.params[name].numel() for name in names)
        project = hashing(size, self.sketch, rng.at("sketch")) if self.sketch < size else None

        def represent(model: Weights | None, shard: Shard) -> Tensor:
            at = model if self.needs_model and model is not None else frozen
            vector = flat(task.gradient(at, shard, train=False, names=names)[0]).double()
            vector = vector if project is None else project(vector)
            return unit(vector[None])[0]

        return represent


def hashing(size: int, width: int, rng: Rng) -> Callable[[Tensor], Tensor]:
    """Draw a linear map of vectors (size,) to sketches (width,): each number goes to one random sum, by a random sign.

    Charikar, Chen, Farach-Colton: *Finding Frequent Items in Data Streams*, ICALP 2002. Inner products are right in the
    mean, with the variance of as many Gaussian projections. Memory is one integer for each number.

    >>> hashing(4, 4, Rng(0))(torch.tensor([1.0, 2.0, 4.0, 8.0])).abs().sum()
    tensor(15., dtype=torch.float64)
    """
    place = torch.from_numpy(rng.numpy().integers(0, 2 * width, size, dtype=np.int32))

    def sketch(vector: Tensor) -> Tensor:
        plus, minus = torch.bincount(place, vector.double(), minlength=2 * width).view(2, width)
        return plus - minus

    return sketch


Single = Annotated[Annotated[Labels | Embedding | Gradient, Field(discriminator="kind")], Spelled]


@ingredient
class Combined(Representing):
    """Several representations side by side.

    The distance is the sum of the parts' distances, each divided by its mean between two clients at the last
    clustering: no part outweighs another by its units. Gradients compared by cosine use the squared distance of vectors
    of length one, which is twice as large. Their centers are plain means.

    Args:
        parts: two or more other representations, each by name or with its own keys.
    """

    parts: Annotated[tuple[Single, ...], Field(min_length=2)]
    kind: Literal["combined"] = "combined"

    def __post_init__(self) -> None:
        if any(part.kind != "gradient" and part.distance == "cosine" for part in self.parts):
            raise ValueError(
                "found labels or an embedding by 'cosine'; allowed: another distance, because centers have to be means"
            )

    def distance_of(self, task: Task) -> Distance:
        """Return the initial distance between representations, with scales of one."""
        kinds = tuple("sq-l2" if part.distance == "cosine" else part.distance for part in self.parts)
        return Joint(kinds, tuple(part.numbers(task, key) for part, key in self._keyed()), (1.0,) * len(self.parts))

    def _keyed(self) -> Iterator[tuple[Labels | Embedding | Gradient, str]]:
        """Yield every part with its key."""
        return ((part, f"representation.parts[{place}]") for place, part in enumerate(self.parts))

    @property
    def passes(self) -> float:
        """Cost for a client in passes forward and back over its samples."""
        return sum(part.passes for part in self.parts)

    @property
    def needs_model(self) -> bool:
        """Tell whether a model has to be sent along."""
        return any(part.needs_model for part in self.parts)

    @property
    def of_update(self) -> bool:
        """Tell whether it is a gradient, or holds one."""
        return any(part.of_update for part in self.parts)

    def of(self, task: Task, key: str = "representation") -> Represent:
        """Return the representation for a task; `key` is where it stands, for errors."""
        functions = [part.of(task, inside) for part, inside in self._keyed()]
        return lambda model, shard: torch.cat([represent(model, shard) for represent in functions])

    def draw_order(self, task: Task, rng: Rng) -> Tensor | None:
        """Draw the fixed order in which a client reports its numbers; parts stay in place."""
        orders = [part.draw_order(task, rng.at("part", place)) for place, part in enumerate(self.parts)]
        if all(order is None for order in orders):
            return None
        widths = [part.numbers(task) for part in self.parts]
        starts = [sum(widths[:place]) for place in range(len(widths))]
        places = [torch.arange(n) if order is None else order for n, order in zip(widths, orders, strict=True)]
        return torch.cat([start + place for start, place in zip(starts, places, strict=True)])


Representation = Annotated[Labels | Embedding | Gradient | Combined, Field(discriminator="kind")]


def drifted_from(vector: Tensor, last: Tensor, distance: Distance, eps: float) -> bool:
    """Tell whether a client reports; by rounding, some vectors have a cosine distance from themselves."""
    return not torch.equal(vector, last) and float(between(vector[None], last[None], distance)) > eps


def permutation(n: int, rng: Rng) -> Tensor:
    """Draw a permutation that is not the identity, if there is one.

    >>> permutation(2, Rng(0)).tolist()
    [1, 0]
    """
    draw = rng.numpy()
    order = draw.permutation(n)
    while n > 1 and bool((order == np.arange(n)).all()):
        order = draw.permutation(n)
    return torch.from_numpy(order)
