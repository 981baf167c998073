"""Arrivals: the clients that the shift sends."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtide.cohorts.protocol import Patience, Served, asked
from fedtide.core.config_types import AtLeastOne, Count, ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Fleet, Moment, Reply


@ingredient
class Arrivals:
    """The clients that the shift sends in this round: the same for every method of an experiment.

    Where a method picks in each of its clusters, those that arrived take part, whatever their cluster.

    Args:
        clients_per_round: how many count.
        over_selection: ask so many times more to train, and count the first `clients_per_round` that answer; `simulate`
            has `first` for that.
        deadline: count only those who answer within so many seconds of the simulated clock, inf for all;
            `simulate` has its own.
    """

    clients_per_round: Count = 10
    over_selection: AtLeastOne = 1.0
    deadline: Patience | None = None
    kind: Literal["arrivals"] = "arrivals"
    asks: ClassVar[tuple[str, ...]] = ()
    reveals: ClassVar[tuple[str, ...]] = ()

    def init(self, fleet: Fleet) -> None:
        """Return None: nothing is remembered."""

    def pick(
        self,
        memo: None,
        fleet: Fleet,
        rng: Rng,
        served: Served | None,
        among: Tensor | None = None,
        m: int | None = None,
    ) -> Tensor:
        """The clients that arrived, and are in `among`; how many is up to the shift, not to `m`."""
        came = fleet.arrivals(asked(self))
        return came if among is None else came[torch.isin(came, among)]

    def learn(self, memo: None, reply: Reply, moment: Moment) -> None:
        """Return None: nothing is learned."""
