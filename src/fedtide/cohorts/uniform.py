"""Uniform: reachable clients, selected uniformly."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedtide.cohorts.draw import draw_clients
from fedtide.cohorts.protocol import Memoless, Patience, Serve, asked
from fedtide.core.config_types import AtLeastOne, Count, ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Fleet


@ingredient
class Uniform(Memoless):
    """Clients drawn uniformly, without replacement, among those that are reachable now.

    Args:
        clients_per_round: number of clients whose answers count.
        over_selection: factor on the clients asked to train; the first `clients_per_round` answers count; `simulate`
            has `first` for that.
        deadline: seconds of the simulated clock after which answers do not count, inf for none; `simulate` has its own.
    """

    clients_per_round: Count = 10
    over_selection: AtLeastOne = 1.0
    deadline: Patience | None = None
    kind: Literal["uniform"] = "uniform"

    def pick(
        self, memo: None, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor | None = None, m: int | None = None
    ) -> Tensor:
        """Return `m` clients of `among`, sorted; all if there are no more."""
        m = asked(self) if m is None else m
        if among is not None:
            return draw_clients(among, torch.zeros(len(among)), m, rng.at("select"))
        reachable = fleet.reachable
        drawn = rng.at("cohort").numpy().choice(len(reachable), min(m, len(reachable)), replace=False)
        return reachable[torch.from_numpy(drawn)].sort().values
