"""Uniform: reachable clients, selected uniformly."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedtide.cohorts.draw import draw_clients
from fedtide.cohorts.protocol import Serve, Sized
from fedtide.core.config_types import ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Fleet


@ingredient
class Uniform(Sized):
    """Clients drawn uniformly, without replacement, among those that are reachable now."""

    kind: Literal["uniform"] = "uniform"

    def pick(
        self, memo: None, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor | None = None, m: int | None = None
    ) -> Tensor:
        """Return `m` clients of `among`, sorted; all if there are no more."""
        m = self.asked() if m is None else m
        if among is not None:
            return draw_clients(among, torch.zeros(len(among)), m, rng.at("select"))
        reachable = fleet.reachable
        drawn = rng.at("cohort").numpy().choice(len(reachable), min(m, len(reachable)), replace=False)
        return reachable[torch.from_numpy(drawn)].sort().values
