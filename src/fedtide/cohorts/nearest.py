"""Nearest: clients that are similar to the others."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtide.cohorts.protocol import (
    Known,
    Serve,
    Sized,
    ask_reachable,
    descending,
    draw_clients,
    no_reports,
    with_reports,
)
from fedtide.core.base import Fleet
from fedtide.core.rng import Rng
from fedtide.fields.types import NonNegative, ingredient


@ingredient
class Nearest(Sized):
    """Clients near the mean representation of `among`: label distributions, or representations given by a method.

    Drawn without replacement with probability softmax(-distance / T), T being `temperature` times the median distance.
    The paper that compares this way (Fielding) gives no formula; this is ours. Label distributions of many labels are
    about equally far from their mean: a temperature of 1 is hardly other than a uniform draw. With a few hundredths
    about half of those drawn are of the nearest fifth.

    Args:
        temperature: 0 takes the nearest; the larger, the closer to a uniform draw.
        distance: "l1" or "l2".
    """

    temperature: NonNegative = 1.0
    distance: Literal["l1", "l2"] = "l1"
    kind: Literal["nearest"] = "nearest"
    asks: ClassVar[tuple[str, ...]] = ("labels",)
    recorded: ClassVar[tuple[str, ...]] = ("labels",)

    def init(self, fleet: Fleet) -> Known:
        """Ask the clients that are reachable before round 0 for their label distributions."""
        return self.record(self.init_unasked(fleet), *ask_reachable(fleet, "labels"))

    def init_unasked(self, fleet: Fleet) -> Known:
        """Return the memo without reports."""
        return no_reports(len(fleet.clients), 0)

    def record(self, memo: Known, clients: Tensor, reports: Tensor) -> Known:
        """Record representations (clients, width), for methods with others than label distributions."""
        return with_reports(memo, clients, reports) if len(clients) else memo

    def select(self, memo: Known, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor, m: int) -> Tensor:
        """Return `m` clients of `among`, sorted; all if there are no more. Clients without a report are farthest."""
        far = self._distances(memo.of[among], memo.heard[among])
        heat = self.temperature * float(far.median()) if len(far) else 0.0
        if heat:
            return draw_clients(among, -far / heat, m, rng.at("select"))
        order = descending(-far, rng.at("select"))
        return among[order[:m]].sort().values

    def _distances(self, of: Tensor, reported: Tensor) -> Tensor:
        far = torch.zeros(len(of), dtype=torch.float64)
        if reported.any():
            power = 1.0 if self.distance == "l1" else 2.0
            far[reported] = torch.linalg.vector_norm(of[reported] - of[reported].mean(0), ord=power, dim=1)
            far[~reported] = far[reported].max()
        return far
