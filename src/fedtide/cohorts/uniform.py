"""Uniform: reachable clients, selected uniformly."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedtide.cohorts.draw import draw_clients
from fedtide.cohorts.protocol import Serve, Sized
from fedtide.core.base import Fleet
from fedtide.core.rng import Rng
from fedtide.fields.types import ingredient


@ingredient
class Uniform(Sized):
    """Clients drawn uniformly, without replacement, among those that are reachable now."""

    kind: Literal["uniform"] = "uniform"

    def pick(
        self, memo: None, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor | None = None, m: int | None = None
    ) -> Tensor:
        """Return `m` clients of `among`, sorted; all if there are no more."""
        among = fleet.reachable if among is None else among
        return draw_clients(among, torch.zeros(len(among)), self.asked() if m is None else m, rng.at("select"))
