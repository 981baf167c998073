"""Who is there: clients that come and go with the hour.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, section 2, Eq. 2 and 3; more than two groups are our own extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.config_types import Finite, OpenFraction, Positive, ingredient
from fedtide.core.curves import periodic_shares
from fedtide.core.errors import FedtideError
from fedtide.core.prose import listed
from fedtide.core.rng import Rng
from fedtide.core.user_code import Python
from fedtide.data.saved import Replay
from fedtide.data.shift import uniform
from fedtide.data.shift.availability import Availability, AvailabilityPlan
from fedtide.data.shift.what.plan import PopulationView, Rhythm


class Arriving(Protocol):
    """Which clients are there, and in which order they arrive; `groups` are those clients, by their group."""

    dropout_rate: float
    """Share of the asked clients that never answer."""
    changes: ClassVar[bool]
    """Whether it matters when one looks."""
    recorded: ClassVar[bool]
    """Whether arrivals are those of another run, of which clients that hold nothing are left out afterwards."""

    def check(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Raise where it does not fit the groups, of such names and so many clients."""

    def plan(self, view: PopulationView) -> AvailabilityPlan | None:
        """Which clients are there at a time; None where all are."""

    def shares(self, time: float, sizes: np.ndarray) -> np.ndarray:
        """The expected share of each group among the arrivals (groups,); sums to 1."""

    def arrivals(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """`m` clients in the order they arrive; `arrivals(m)` begins with `arrivals(m - 1)`."""

    def filled_in(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> int:
        """How many of `m` arrivals stand in for clients of a group that has no more."""

    def reachable(self, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """A beginning of the order of arrival, sorted."""

    def rhythm(self, turns: int) -> Rhythm:
        """What a method could know of its period, on the shift's clock, with so many turns in one."""

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Sentences for a report, each with a space behind it."""


@ingredient
class Always:
    """Everyone is there; arrivals are drawn uniformly, without replacement (no distribution shift, NDS).

    Args:
        dropout_rate: share of the asked clients that never answer.
    """

    dropout_rate: OpenFraction = 0.0
    kind: Literal["always"] = "always"
    changes: ClassVar[bool] = False
    recorded: ClassVar[bool] = False

    def check(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Accept any groups."""

    def plan(self, view: PopulationView) -> None:
        """Nothing thins out the clients."""

    def rhythm(self, turns: int) -> Rhythm:
        """There is none."""
        return {}

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Nothing to tell."""
        return ""

    def shares(self, time: float, sizes: np.ndarray) -> np.ndarray:
        """The expected share of each group among the arrivals (groups,): its share of the clients."""
        return uniform.shares(sizes)

    def arrivals(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """`m` clients in the order they arrive; `arrivals(m)` begins with `arrivals(m - 1)`."""
        return uniform.arrivals(m, groups, rng)

    def filled_in(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> int:
        """No client stands in for another."""
        return 0

    def reachable(self, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """All clients, sorted."""
        return uniform.reachable(groups)


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
    changes: ClassVar[bool] = True
    recorded: ClassVar[bool] = False

    def check(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Raise where there are fewer than two groups, or one without clients."""
        if len(sizes) < 2:
            raise FedtideError(
                "shift.who: 'periodic' needs two groups of clients or more, found 1; allowed: "
                "data.groups.by = 'domain' or 'labels', or shift.who.kind = 'always'"
            )
        if 0 in sizes:
            raise FedtideError(
                f"data.groups: group '{names[list(sizes).index(0)]}' has no clients; allowed: at least one in each"
            )

    def plan(self, view: PopulationView) -> None:
        """Nothing thins out the clients."""

    def rhythm(self, turns: int) -> Rhythm:
        """The period, its whole rounds, and the rounds at which the first of so many turns starts and peaks."""
        # A block begins at its phase; what has a peak instead has it in the middle of the block's rounds.
        peak = self.phase + (self.period / turns - 1) / 2 if self.curve == "block" else self.phase
        return {"period": self.period, "peak": peak, "start": self.phase, "rounds": max(round(self.period), 1)}

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Which groups take turns, and how."""
        if not groups:
            return ""
        first, others = groups[0], groups[1:]
        turn = f"from only {first} clients to only {others[0]} clients and back"
        if len(others) > 1:
            turn = f"from {first} clients by way of {listed(others)} clients to {first} clients again"
        return (
            f"They belong to groups, {listed(groups)}, that take turns: every {self.period:g} {unit} the "
            f"participants change {turn}{', from one block to the next' if self.curve == 'block' else ''}. "
        )

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
            arrived[here] = uniform.first_of(group, int(here.sum()), rng.at("order", k))
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


Who = Annotated[Always | Periodic | Availability | Replay | Python, Field(discriminator="kind")]


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
