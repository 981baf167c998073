"""Arrivals: participants given by the shift."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedtide.cohorts.protocol import Memoless, Patience, Serve, asked
from fedtide.core.config_types import AtLeastOne, Count, ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Fleet


@ingredient
class Arrivals(Memoless):
    """Clients that the shift sends in this round: the same for every method of an experiment.

    If a method selects in each of its clusters, those that arrived participate, whatever their cluster.

    Args:
        clients_per_round: number of clients whose answers count.
        over_selection: factor on the clients asked to train; the first `clients_per_round` answers count; `simulate`
            has `first` for that.
        deadline: seconds of the simulated clock after which answers do not count, inf for none; `simulate` has its own.
    """

    clients_per_round: Count = 10
    over_selection: AtLeastOne = 1.0
    deadline: Patience | None = None
    kind: Literal["arrivals"] = "arrivals"

    def pick(
        self, memo: None, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor | None = None, m: int | None = None
    ) -> Tensor:
        """Return the clients of `among` that arrived; their number is up to the shift, not to `m`."""
        came = fleet.arrivals(asked(self))
        return came if among is None else came[torch.isin(came, among)]
