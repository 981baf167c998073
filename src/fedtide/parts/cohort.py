"""Cohorts: which clients the server asks in a round."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.rng import Rng
from fedtide.core.types import Fleet
from fedtide.core.values import Count, ingredient


@ingredient
class Arrivals:
    """The clients that the shift sends in this round: the same for every method of an experiment.

    Args:
        size: how many.
    """

    size: Count = 10
    kind: Literal["arrivals"] = "arrivals"

    def __call__(self, rng: Rng, fleet: Fleet) -> Tensor:
        """The clients to ask."""
        return fleet.arrivals(self.size)


@ingredient
class Uniform:
    """Clients drawn uniformly, without replacement, among those that are reachable now.

    Args:
        size: how many.
    """

    size: Count = 10
    kind: Literal["uniform"] = "uniform"

    def __call__(self, rng: Rng, fleet: Fleet) -> Tensor:
        """The clients to ask."""
        reachable = fleet.reachable
        drawn = rng.at("cohort").numpy().choice(len(reachable), min(self.size, len(reachable)), replace=False)
        return reachable[torch.from_numpy(drawn)].sort().values


@ingredient
class Everyone:
    """Every client that is reachable now."""

    kind: Literal["everyone"] = "everyone"

    def __call__(self, rng: Rng, fleet: Fleet) -> Tensor:
        """The clients to ask."""
        return fleet.reachable


Cohort = Annotated[Arrivals | Uniform | Everyone, Field(discriminator="kind")]
