"""Who is there: clients that come and go with the hour.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, section 2, Eq. 2 and 3; more than two groups are our own extension.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.config_types import Finite, OpenFraction, Positive, ingredient
from fedtide.core.curves import periodic_shares
from fedtide.core.rng import Rng
from fedtide.data.saved import Replay
from fedtide.data.shift.awake import Availability


@ingredient
class Always:
    """Everyone is there; arrivals are drawn uniformly, without replacement (no distribution shift, NDS).

    Args:
        dropout_rate: share of the asked clients that never answer.
    """

    dropout_rate: OpenFraction = 0.0
    kind: Literal["always"] = "always"

    def shares(self, time: float, sizes: np.ndarray) -> np.ndarray:
        """The expected share of each group among the arrivals (groups,): its share of the clients."""
        return sizes / sizes.sum()

    def arrivals(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """`m` clients in the order they arrive; `arrivals(m)` begins with `arrivals(m - 1)`."""
        return _first(torch.cat(groups) if len(groups) > 1 else groups[0], m, rng.at("order"))

    def filled_in(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> int:
        """Nobody stands in for anybody."""
        return 0

    def reachable(self, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """All clients, sorted."""
        return torch.cat(groups).sort().values


@ingredient
class Periodic:
    """Groups take turns: day and night, or K groups that peak one after the other.

    With s = (t - phase) mod period, the expected share q(t) of the first of two groups is

        linear   |2s/T - 1|^p            1 at s = 0, 0 at s = T/2
        cosine   ((cos(2 pi s/T) + 1)/2)^p
        block    1 if s < T/2 else 0     block-cyclic

    Group k of K > 2 peaks at s = (k-1) T/K. Each arrival is from group k with probability q_k (so the counts are
    Binomial, or multinomial), then a client of it without replacement. Where a group is exhausted the others fill in.

    Args:
        curve: "linear", "cosine" or "block".
        period: T, in rounds or seconds as `shift.clock` says.
        exponent: p; below 1 more of the first group over a period, above 1 less; "block" has none.
        phase: the time of the first group's peak, for "block" the beginning of its block.
        dropout_rate: share of the asked clients that never answer.

    >>> Periodic(period=32).shares(0.0, np.array([5, 5])).tolist()
    [1.0, 0.0]
    >>> Periodic(period=32).shares(8.0, np.array([5, 5])).tolist()
    [0.5, 0.5]
    """

    curve: Literal["linear", "cosine", "block"] = "linear"
    period: Positive = 256
    exponent: Positive = 1.0
    phase: Finite = 0.0
    dropout_rate: OpenFraction = 0.0
    kind: Literal["periodic"] = "periodic"

    def shares(self, time: float, sizes: np.ndarray) -> np.ndarray:
        """The expected share of each group among the arrivals (groups,); sums to 1."""
        return periodic_shares(self.curve, time - self.phase, self.period, self.exponent, len(sizes))

    def arrivals(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """`m` clients in the order they arrive; `arrivals(m)` begins with `arrivals(m - 1)`."""
        sizes = np.array([len(group) for group in groups])
        came = torch.from_numpy(_with_stand_ins(self._drawn(m, groups, time, rng), sizes))
        # Each group's clients come in a random order of its own, so that prefixes stay prefixes.
        arrived = torch.empty(len(came), dtype=torch.int64)
        for k, group in enumerate(groups):
            here = came == k
            arrived[here] = _first(group, int(here.sum()), rng.at("order", k))
        return arrived

    def filled_in(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> int:
        """How many of `m` arrivals stand in for clients of a group that has no more."""
        wanted = np.bincount(self._drawn(m, groups, time, rng), minlength=len(groups))
        return int(np.maximum(wanted - [len(group) for group in groups], 0).sum())

    def _drawn(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> np.ndarray:
        """The group that each of `m` arrivals should be from."""
        sizes = np.array([len(group) for group in groups])
        uniform = rng.at("group").numpy().random(min(m, int(sizes.sum())))
        return np.searchsorted(np.cumsum(self.shares(time, sizes))[:-1], uniform, side="right")

    def reachable(self, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """The first R arrivals, sorted, with R = sum_k n_k q_k / max q: a uniform draw among them follows q.

        The largest share is that of a group that has clients; where no such group has a share all clients are there.
        """
        sizes = np.array([len(group) for group in groups])
        shares = self.shares(time, sizes) * (sizes > 0)
        there = round(float(sizes @ (shares / shares.max()))) if shares.any() else int(sizes.sum())
        return self.arrivals(there, groups, time, rng).sort().values


Who = Annotated[Always | Periodic | Availability | Replay, Field(discriminator="kind")]


def _first(clients: Tensor, m: int, rng: Rng) -> Tensor:
    """The first `m` of a random order of `clients`, in O(m): a Fisher-Yates shuffle that stops."""
    n = len(clients)
    m = min(m, n)
    picks = (rng.numpy().random(m) * (n - np.arange(m))).astype(np.int64) + np.arange(m)
    moved: dict[int, int] = {}
    out = np.empty(m, dtype=np.int64)
    for i, j in enumerate(picks.tolist()):
        out[i] = moved.get(j, j)
        moved[j] = moved.get(i, i)
    return clients[torch.from_numpy(out)]


def _with_stand_ins(wanted: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The group that each arrival is from: where the wanted one has no more clients, the next that still has one.

    Args:
        wanted: (arrivals,) the group that was drawn for each; as many arrivals as clients, or fewer.
        sizes: (groups,) how many clients there are.

    >>> _with_stand_ins(np.array([0, 0, 1, 0, 0]), np.array([1, 2, 2])).tolist()
    [0, 1, 1, 2, 2]
    """
    came = wanted.copy()
    while True:
        places = [np.flatnonzero(came == k)[size:] for k, size in enumerate(sizes.tolist())]
        first, k = min((int(at[0]), k) if len(at) else (len(came), k) for k, at in enumerate(places))
        if first == len(came):
            return came
        came[places[k]] = (k + 1) % len(sizes)
