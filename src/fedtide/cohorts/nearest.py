"""Nearest: clients that are like the others."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtide.cohorts.draw import Known, chosen, descending, heard, silent, told
from fedtide.cohorts.protocol import Patience, Served, asked
from fedtide.core.config_types import AtLeastOne, Count, NonNegative, ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Fleet, Moment, Reply


@ingredient
class Nearest:
    """Clients near the mean of what `among` said of themselves: the shares of their labels, or what a method tells.

    Drawn without replacement with probability softmax(-distance / T), T being `temperature` times the median distance.
    The paper that compares this way (Fielding) gives no formula; this is ours.

    Args:
        clients_per_round: how many count.
        temperature: 0 takes the nearest; the larger, the nearer to a uniform draw.
        distance: "l1" or "l2".
        over_selection: ask so many times more to train, and count the first `clients_per_round` that answer; `simulate`
            has `first` for that.
        deadline: count only those who answer within so many seconds of the simulated clock, inf for all;
            `simulate` has its own.
    """

    clients_per_round: Count = 10
    temperature: NonNegative = 1.0
    distance: Literal["l1", "l2"] = "l1"
    over_selection: AtLeastOne = 1.0
    deadline: Patience | None = None
    kind: Literal["nearest"] = "nearest"
    asks: ClassVar[tuple[str, ...]] = ("labels",)
    reveals: ClassVar[tuple[str, ...]] = ()

    def init(self, fleet: Fleet) -> Known:
        """The shares of labels of those clients that are reachable before round 0."""
        return self.told(silent(len(fleet.clients), 0), *told(fleet, "labels"))

    def told(self, memo: Known, clients: Tensor, said: Tensor) -> Known:
        """Take in representations (clients, width), for methods that have others than shares of labels."""
        return heard(memo, clients, said) if len(clients) else memo

    def pick(
        self,
        memo: Known,
        fleet: Fleet,
        rng: Rng,
        served: Served | None,
        among: Tensor | None = None,
        m: int | None = None,
    ) -> Tensor:
        """`m` clients of `among`, sorted; all of them where there are no more. A silent one is the farthest."""
        among, m = fleet.reachable if among is None else among, asked(self) if m is None else m
        far = self._distances(memo.of[among], memo.heard[among])
        heat = self.temperature * float(far.median()) if len(far) else 0.0
        if heat:
            return chosen(among, -far / heat, m, rng.at("select"))
        order = descending(-far, rng.at("select"))
        return among[order[:m]].sort().values

    def _distances(self, of: Tensor, known: Tensor) -> Tensor:
        far = torch.zeros(len(of), dtype=torch.float64)
        if known.any():
            power = 1.0 if self.distance == "l1" else 2.0
            far[known] = torch.linalg.vector_norm(of[known] - of[known].mean(0), ord=power, dim=1)
            far[~known] = far[known].max()
        return far

    def learn(self, memo: Known, reply: Reply, moment: Moment) -> Known:
        """Return the memo as it is: nothing is learned."""
        return memo
