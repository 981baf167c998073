"""Arrivals: participants given by the shift."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedtide.cohorts.protocol import Serve, Sized
from fedtide.core.base import Fleet
from fedtide.core.rng import Rng
from fedtide.fields.types import ingredient


@ingredient
class Arrivals(Sized):
    """Clients that the shift sends in this round: the same for every method of an experiment.

    If a method selects in each of its clusters, those that arrived participate, whatever their cluster.
    """

    kind: Literal["arrivals"] = "arrivals"

    def pick(
        self, memo: None, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor | None = None, m: int | None = None
    ) -> Tensor:
        """Return the clients of `among` that arrived; their number is up to the shift, not to `m`."""
        came = fleet.arrivals(self.asked())
        return came if among is None else came[torch.isin(came, among)]
