"""Profiles of clients' rows: means and deviations of features under a frozen model, over all rows and by label.

Li, Fenoglio, Gjoreski, Langheinrich: *Federated Learning with Profile Mapping under Distribution Shifts and Drifts*,
ICLR 2026 (arXiv 2602.07671), and its forerunner FLUX. A profile is 2 (C + 1) groups of numbers, of C classes: the means
and the deviations over all rows, which need no labels, and then the means, and the deviations, of each label.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedtide.clusters.distance import between
from fedtide.clusters.rounds import Served, decision_rows, predict_by_cluster
from fedtide.core.base import Answer, Memory, Moment, Prediction, Shard, Weights, Work
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn import Task
from fedtide.learn.features import Extract, Network, feature_width, principal
from fedtide.learn.task import classes_of, example_of

POINTS, SIDE, SEED = 200, 2.0, 1
"""Uniform random points in a cube that give the fixed projection of features, the side of the cube, and their seed."""
ABSENT = -1.0
"""Number in place of those of a label with fewer than two rows."""
FLAT = 1e-12
"""Range below which a group of numbers is not scaled."""


@dataclass(frozen=True)
class ProfileMap:
    """Profiles that are compared: the frozen model, the scaled profiles (K, q), and the scales of `Profiler.scales_of`.

    As a payload to find a model by, profiles have their label-free part alone.
    """

    extractor: Weights
    profiles: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Profiler:
    """The profile of a client's rows.

    Args:
        task: model, with an example sample.
        layer: layer whose inputs are the features; "head" is the last one.
        halves: number of random halves of the rows that are profiled, one after the other; 0 profiles all rows once.
        key: key of the method's options, for errors.

    Raises:
        FedtideError: the model has no such layer, its inputs are not vectors, or rows are sequences.
    """

    task: Task
    layer: str = "head"
    halves: int = 0
    key: str = "profile"

    def __post_init__(self) -> None:
        feature_width(self.task, self.layer, self.key)
        if self.task.logits(self.task.init(Rng(0)), example_of(self.task, "profiles")).dim() != 2:
            raise FedtideError(f"{self.key}: found rows that are sequences, allowed: rows with one label each")

    @cached_property
    def classes(self) -> int:
        """Number of classes, C."""
        return classes_of(self.task)

    @cached_property
    def width(self) -> int:
        """Number of projected features in a group: C, or fewer if the layer has fewer inputs."""
        return min(self.classes, feature_width(self.task, self.layer, self.key), POINTS - 1)

    @cached_property
    def _points(self) -> Tensor:
        wide = feature_width(self.task, self.layer, self.key)
        return torch.from_numpy(Rng(SEED).at("profile").numpy().uniform(0.0, SIDE, (POINTS, wide)))

    @cached_property
    def _basis(self) -> tuple[Tensor, Tensor]:
        return principal(self._points, self.width)

    def project(self, features: Tensor) -> Tensor:
        """Project features (rows, d) to (rows, width), float64."""
        center, components = self._basis
        return (features.double() - center) @ components

    @cached_property
    def _extract(self) -> Extract:
        return Network(self.layer).of(self.task, self.key)

    def features(self, model: Weights, x: Tensor) -> Tensor:
        """Return the projected features (rows, width) of rows."""
        return self.project(self._extract(model, x))

    def __call__(self, model: Weights, shard: Shard, rng: Rng) -> Tensor:
        """Return the profile (2 (C + 1) width,) float64 of a client's rows, of which there is one or more."""
        z, y = self.features(model, shard.x), shard.labels
        if self.halves:
            half = max(len(shard) // 2, 1)
            orders = [rng.at("half", k).numpy().permutation(len(shard))[:half] for k in range(self.halves)]
            chosen = torch.cat([torch.from_numpy(order).sort().values for order in orders])
            z, y = z[chosen], y[chosen]
        absent = torch.full((2, self.width), ABSENT, dtype=torch.float64)
        by_label = [mean_and_deviation(z[y == c]) if int((y == c).sum()) > 1 else absent for c in range(self.classes)]
        return torch.cat([mean_and_deviation(z), *torch.stack(by_label, 1)]).flatten()

    @property
    def nothing(self) -> Tensor:
        """The profiles (0, q) of no client."""
        return torch.zeros(0, 2 * self.width * (self.classes + 1), dtype=torch.float64)

    def scales_of(self, profiles: Tensor) -> Tensor:
        """Return the least number and the range (2, groups) of each group of numbers, over all profiles (n, q)."""
        groups = profiles.unflatten(1, (-1, self.width)).transpose(0, 1).flatten(1)
        least, most = groups.aminmax(dim=1)
        return torch.stack([least, torch.where(most - least > FLAT, most - least, 1.0)])

    def scale(self, profiles: Tensor, scales: Tensor) -> Tensor:
        """Scale profiles, or their first groups of numbers, by `scales_of` (2, groups or more)."""
        groups = profiles.unflatten(1, (-1, self.width))
        least, extent = scales[:, : groups.shape[1], None]
        return ((groups - least) / extent).flatten(1)

    def label_free(self, places: ProfileMap) -> ProfileMap:
        """Return the map with the part of its profiles that needs no labels."""
        return replace(places, profiles=places.profiles[:, : 2 * self.width])


def mean_and_deviation(z: Tensor) -> Tensor:
    """Return the mean and the deviation (2, d) of each column of rows (rows, d).

    >>> mean_and_deviation(torch.tensor([[1.0], [5.0]])).tolist()
    [[3.0], [2.0]]
    """
    return torch.stack([z.mean(0), z.std(0, correction=0)])


def profile_question(profiler: Profiler) -> Work:
    """Build the question "profile": the profile of a client's validation rows, or training rows if it has none."""

    def profile(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        rows = decision_rows(shard)
        return Answer({}, {"profile": profiler(payload, rows, rng)}) if len(shard) and len(rows) else None

    return profile


def predict_by_profile(profiler: Profiler) -> Callable[[Served, Sequence[Memory], Tensor, Tensor], Prediction]:
    """Build the `predict` of methods whose newcomers take the model with the nearest label-free profile.

    The profile is of the rows to predict, of those that decide together. So a newcomer needs no labels.
    """
    by_cluster = predict_by_cluster(profiler.task)

    def predict(payload: Served, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
        places: ProfileMap | None = payload.places
        if places is None:
            return by_cluster(payload, [None] * len(memories), x, owner)
        z, nearest = profiler.features(places.extractor, x), [payload.usual] * len(memories)
        for number in owner.unique().tolist():
            profile = profiler.scale(mean_and_deviation(z[owner == number]).reshape(1, -1), places.scales)
            nearest[number] = between(profile, places.profiles, "l2").argmin()
        return by_cluster(payload, [{"found": model} for model in nearest], x, owner)

    return predict
