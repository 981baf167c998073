"""Nearest: clients that are similar to the others."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtide.cohorts.draw import Known, ask_reachable, descending, draw_clients, no_reports, with_reports
from fedtide.cohorts.protocol import Memoless, Patience, Serve, asked
from fedtide.core.config_types import AtLeastOne, Count, NonNegative, ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Fleet


@ingredient
class Nearest(Memoless):
    """Clients near the mean representation of `among`: label distributions, or representations given by a method.

    Drawn without replacement with probability softmax(-distance / T), T being `temperature` times the median distance.
    The paper that compares this way (Fielding) gives no formula; this is ours.

    Args:
        clients_per_round: number of clients whose answers count.
        temperature: 0 takes the nearest; the larger, the closer to a uniform draw.
        distance: "l1" or "l2".
        over_selection: factor on the clients asked to train; the first `clients_per_round` answers count; `simulate`
            has `first` for that.
        deadline: seconds of the simulated clock after which answers do not count, inf for none; `simulate` has its own.
    """

    clients_per_round: Count = 10
    temperature: NonNegative = 1.0
    distance: Literal["l1", "l2"] = "l1"
    over_selection: AtLeastOne = 1.0
    deadline: Patience | None = None
    kind: Literal["nearest"] = "nearest"
    asks: ClassVar[tuple[str, ...]] = ("labels",)

    def init(self, fleet: Fleet) -> Known:
        """Ask the clients that are reachable before round 0 for their label distributions."""
        return self.told(no_reports(len(fleet.clients), 0), *ask_reachable(fleet, "labels"))

    def told(self, memo: Known, clients: Tensor, said: Tensor) -> Known:
        """Record representations (clients, width), for methods with others than label distributions."""
        return with_reports(memo, clients, said) if len(clients) else memo

    def pick(
        self,
        memo: Known,
        fleet: Fleet,
        rng: Rng,
        serve: Serve,
        among: Tensor | None = None,
        m: int | None = None,
    ) -> Tensor:
        """Return `m` clients of `among`, sorted; all if there are no more. Clients without a report are farthest."""
        among, m = fleet.reachable if among is None else among, asked(self) if m is None else m
        far = self._distances(memo.of[among], memo.heard[among])
        heat = self.temperature * float(far.median()) if len(far) else 0.0
        if heat:
            return draw_clients(among, -far / heat, m, rng.at("select"))
        order = descending(-far, rng.at("select"))
        return among[order[:m]].sort().values

    def _distances(self, of: Tensor, known: Tensor) -> Tensor:
        far = torch.zeros(len(of), dtype=torch.float64)
        if known.any():
            power = 1.0 if self.distance == "l1" else 2.0
            far[known] = torch.linalg.vector_norm(of[known] - of[known].mean(0), ord=power, dim=1)
            far[~known] = far[known].max()
        return far
