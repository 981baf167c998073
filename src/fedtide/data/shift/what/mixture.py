"""All of a client's rows, or a blend of the pools they are from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.prose import listed
from fedtide.core.rng import Rng
from fedtide.core.types import Moment
from fedtide.core.values import Count, Positive, Whole, ingredient
from fedtide.data.shift.what.plan import PerClientPlan, Plan, PopulationView, Rhythm

STILL = 0.1
"""Cycles over a run below which a blend hardly moves."""


@ingredient
class Static:
    """Every row of the client, always."""

    kind: Literal["static"] = "static"
    drifts: ClassVar[bool] = False

    def check(self, view: PopulationView) -> None:
        """Accept any rows."""

    def rhythm(self, rounds: int) -> Rhythm:
        """There is none."""
        return {}

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """Nothing to tell."""
        return ""

    def plan(self, view: PopulationView) -> Plan:
        """Who holds what when."""
        return PerClientPlan(self, view)

    def hold(self, rows: Tensor, pool: Tensor, pools: int, part: str, moment: Moment, rng: Rng) -> Tensor:
        """The rows held at `moment`, of those that are the client's."""
        return rows

    def counts(self, counts: Tensor, part: str) -> Tensor:
        """How many rows each client holds, given how many are its own."""
        return counts


@ingredient
class DomainMixture:
    """A blend of two pools or more on a schedule (pFedEM); more than two are our own extension of its formulas.

    Pools stand on a ring, and pool k of P peaks kT/P rounds into a cycle of T = rounds/cycles rounds. With s = r mod T
    and d its distance from there on the ring, the share of a pool is 1 - Pd/T (linear) or (1 + cos(pi Pd/T))/2 (cosine)
    where d is at most T/P, else 0. So two neighbours are blended at a time, and of two pools the first is alone at 0
    and the second at T/2. The schedule counts rounds, whatever the shift's clock; those that are played before round 0
    are the end of a cycle. Rows are redrawn in every round, with replacement, from the client's own rows.

    Args:
        curve: "linear" or "cosine".
        cycles: periods over the whole run.
        rows: rows a client holds in a round.
        jitter: largest shift of a client's phase, in rounds, drawn once per client.
        test: test rows follow the "mixture" of the round, are "balanced" (as many of each pool, drawn once), or "all".
    """

    curve: Literal["linear", "cosine"] = "linear"
    cycles: Positive = 1
    rows: Count = 100
    jitter: Whole = 0
    test: Literal["mixture", "balanced", "all"] = "balanced"
    kind: Literal["domain-mixture"] = "domain-mixture"
    drifts: ClassVar[bool] = False

    def check(self, view: PopulationView) -> None:
        """Raise where a client has no rows of some pool."""
        rows, train, registered = view.rows, view.parts["train"], view.registered
        if rows.pool is None or len(rows.pool_names) < 2:
            raise FedtideError(
                "shift.what: 'domain-mixture' needs a source with two pools or more; allowed: kind = 'static'"
            )
        pool = rows.pool[train.rows.long()]
        for k, name in enumerate(rows.pool_names):
            held = torch.zeros(len(train)).index_add_(0, train.owner, (pool == k).float())[:registered]
            if not held.any():
                raise FedtideError(
                    f"shift.what: pool '{name}' has no samples: no client has a training row of it; allowed: pools "
                    "with samples (data.source, data.groups), or kind = 'static'"
                )
            if (held == 0).any():
                client = int((held == 0).nonzero()[0])
                raise FedtideError(
                    f"shift.what: client {client} has no rows of pool '{name}', and a mixture blends all pools; "
                    "allowed: data.groups.by = 'none', a partition that deals every pool, or more rows for each client"
                )

    def plan(self, view: PopulationView) -> Plan:
        """Who holds what when."""
        return PerClientPlan(self, view)

    def rhythm(self, rounds: int) -> Rhythm:
        """How many cycles there are, the rounds of one, and half of those in whole rounds, at most all."""
        return {"cycles": self.cycles, "cycle": self.cycle(rounds), "half": min(self.half(rounds), rounds)}

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """What is blended, and how often."""
        said = f"What a client holds is a blend of pools{f', {listed(domains)},' if domains else ''} "
        if self.cycles < STILL:
            return said + f"{'of its own, ' if self.jitter else ''}whose shares stay as they are. "
        cycles = "cycle" if self.cycles == 1 else "cycles"
        return said + f"that changes from round to round, {self.cycles:g} {cycles} over the run. "

    def cycle(self, rounds: int) -> float:
        """T: the rounds of a cycle, in a run of so many."""
        return rounds / self.cycles

    def half(self, rounds: int) -> int:
        """The whole rounds that half a cycle takes, in a run of so many; at least 1.

        >>> Mixture(cycles=3).half(200), Mixture(cycles=200).half(200)
        (34, 1)
        """
        return max(math.ceil(self.cycle(rounds) / 2), 1)

    def shares(self, moment: Moment, pools: int, phase: float = 0.0) -> np.ndarray:
        """The share of each pool at a moment (pools,); sums to 1.

        Args:
            moment: when.
            pools: how many there are.
            phase: rounds by which a client is ahead.

        >>> [Mixture(cycles=2).shares(Moment(r, 40), 2).tolist() for r in (0, 5, 10)]
        [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
        >>> [Mixture().shares(Moment(r, 12), 3).tolist() for r in (4, 6, -4)]
        [[0.0, 1.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]
        """
        period = self.cycle(moment.rounds)
        s = math.fmod(moment.round + phase, period)
        s += period if s < 0 else 0.0
        # Peak P is that of the first pool again, where the ring closes.
        peak = np.arange(pools + 1)
        distance = np.abs(pools * s / period - peak)
        if self.curve == "linear":
            share = np.maximum(1 - distance, 0.0)
        else:  # cos(x - pi k) is cos(x), and -cos(x) for odd k
            wave = math.cos(pools * math.pi * s / period)
            share = np.where(distance <= 1, (1 + np.where(peak % 2, -wave, wave)) / 2, 0.0)
        share[0] += share[pools]
        return share[:pools]

    def hold(self, rows: Tensor, pool: Tensor, pools: int, part: str, moment: Moment, rng: Rng) -> Tensor:
        """The rows held at `moment`, of those that are the client's; `pool` says from which of `pools` each is.

        A client without rows of some pool (among its few validation rows, say) fills up from the others.
        """
        if (part == "test" and self.test == "all") or not len(rows):
            return rows
        phase = float(rng.at("phase").numpy().uniform(-self.jitter, self.jitter)) if self.jitter else 0.0
        balanced = part == "test" and self.test == "balanced"
        shares = np.full(pools, 1 / pools) if balanced else self.shares(moment, pools, phase)
        own = [rows[pool == k] for k in range(pools)]
        wanted = _counts(self.rows, _among(shares, np.array([len(of_pool) > 0 for of_pool in own])))
        # The balanced test rows stay the same, so that accuracy moves with the model only.
        draw = rng.at("hold", part, "balanced" if balanced else moment.round).numpy()
        picked = [_with_replacement(of_pool, count, draw) for of_pool, count in zip(own, wanted, strict=True)]
        return torch.cat(picked).sort().values

    def counts(self, counts: Tensor, part: str) -> Tensor:
        """How many rows each client holds, given how many are its own."""
        return counts if part == "test" and self.test == "all" else self.rows * (counts > 0)


def _among(shares: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Shares of the pools that are there, in proportion; equal where none of them has a share."""
    if there.all():
        return shares
    shares = np.where(there, shares, 0.0)
    return shares / shares.sum() if shares.any() else there / there.sum()


def _counts(rows: int, shares: np.ndarray) -> list[int]:
    """How many of `rows` are from each pool: differences of rounded sums, so that they sum to `rows`.

    Sums run from the last pool backwards: of two pools the second has `round(share * rows)`.

    >>> _counts(10, np.full(3, 1 / 3))
    [3, 4, 3]
    """
    sums = [*np.cumsum(shares[:0:-1]).tolist()[::-1], 0.0]
    up_to = [rows, *(round(total * rows) for total in sums)]
    return [more - fewer for more, fewer in pairwise(up_to)]


def _with_replacement(rows: Tensor, wanted: int, draw: np.random.Generator) -> Tensor:
    picks = draw.integers(0, max(len(rows), 1), wanted)
    return rows[torch.from_numpy(picks)] if len(rows) else rows[:0]
