"""Cohorts: which clients the server asks in a round."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.config_types import AtLeastOne, Count, ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Fleet

Patience = Annotated[float, Field(strict=True, gt=0)]
"""Seconds; infinity waits for everybody, as where nothing is said."""


@ingredient
class Arrivals:
    """The clients that the shift sends in this round: the same for every method of an experiment.

    Args:
        size: how many count.
        over: ask so many times more to train, and count the first `size` that answer; `simulate` has `first` for that.
        deadline: count only those who answer within so many seconds of the simulated clock, inf for all;
            `simulate` has its own.
    """

    size: Count = 10
    over: AtLeastOne = 1.0
    deadline: Patience | None = None
    kind: Literal["arrivals"] = "arrivals"

    def __call__(self, rng: Rng, fleet: Fleet) -> Tensor:
        """The clients to ask."""
        return fleet.arrivals(asked(self))


@ingredient
class Uniform:
    """Clients drawn uniformly, without replacement, among those that are reachable now.

    Args:
        size: how many count.
        over: ask so many times more to train, and count the first `size` that answer; `simulate` has `first` for that.
        deadline: count only those who answer within so many seconds of the simulated clock, inf for all;
            `simulate` has its own.
    """

    size: Count = 10
    over: AtLeastOne = 1.0
    deadline: Patience | None = None
    kind: Literal["uniform"] = "uniform"

    def __call__(self, rng: Rng, fleet: Fleet) -> Tensor:
        """The clients to ask."""
        reachable = fleet.reachable
        drawn = rng.at("cohort").numpy().choice(len(reachable), min(asked(self), len(reachable)), replace=False)
        return reachable[torch.from_numpy(drawn)].sort().values


@ingredient
class Everyone:
    """Every client that is reachable now.

    Args:
        deadline: count only those who answer within so many seconds of the simulated clock, inf for all;
            `simulate` has its own.
    """

    deadline: Patience | None = None
    kind: Literal["everyone"] = "everyone"

    def __call__(self, rng: Rng, fleet: Fleet) -> Tensor:
        """The clients to ask."""
        return fleet.reachable


Cohort = Annotated[Arrivals | Uniform | Everyone, Field(discriminator="kind")]


def asked(cohort: Arrivals | Uniform) -> int:
    """How many clients a cohort asks: `over` times those that it counts.

    >>> asked(Uniform(10, over=1.3)), asked(Arrivals(10, over=1.01))
    (13, 11)
    """
    return math.ceil(round(cohort.size * cohort.over, 9))


def wanted(cohort: Arrivals | Uniform | Everyone, fleet: Fleet) -> int:
    """How many clients a selector is to pick in place of a cohort: as many as that would ask."""
    return len(fleet.reachable) if isinstance(cohort, Everyone) else asked(cohort)
