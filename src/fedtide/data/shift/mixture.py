"""All rows of a client, or a mixture of its domains."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import Moment
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.data.ragged import count_pairs
from fedtide.data.shift.what import Holding, OwnRows, Plan, PopulationView, Rhythm
from fedtide.draw.prose import listed
from fedtide.fields.types import Count, Positive, Whole, ingredient

JUDGED = "val", "test"
"""Parts on which clients are judged."""
STILL = 0.1
"""Number of cycles over a run below which a mixture counts as constant."""


@ingredient
class Static(Holding):
    """All rows of the client at all times."""

    kind: Literal["static"] = "static"

    def plan(self, view: PopulationView) -> Plan:
        """Build the plan of the rows that each client holds over time."""
        return OwnRows(view)


@ingredient
class DomainMixture(Holding):
    """A mixture of two or more domains on a schedule (pFedEM); more than two extend its formulas.

    Domains stand on a ring, and domain k of P peaks kT/P rounds into a cycle of T = rounds/cycles rounds. Let d be the
    distance of r mod T from that peak on the ring. The share of a domain is 1 - Pd/T (linear) or (1 + cos(pi Pd/T))/2
    (cosine) if d is at most T/P, otherwise 0. So two neighbors are mixed at a time, and of two domains the first is
    alone at 0 and the second at T/2. The schedule counts rounds, whatever the shift's clock; rounds before round 0 are
    the end of a cycle. Rows are redrawn in every round, with replacement, from the client's own rows.

    Args:
        curve: "linear" or "cosine".
        cycles: number of cycles over the whole run.
        samples: number of rows that a client holds in a round.
        jitter: largest shift of a client's phase, in rounds, drawn once per client.
        test: rows for evaluation, both test and validation. They follow the "mixture" of the round, are "balanced"
            (equally many of each domain, drawn once), or are "all". Clients decide on a mixture.
    """

    curve: Literal["linear", "cosine"] = "linear"
    cycles: Positive = 1
    samples: Count = 100
    jitter: Whole = 0
    test: Literal["mixture", "balanced", "all"] = "balanced"
    kind: Literal["domain-mixture"] = "domain-mixture"

    def check(self, view: PopulationView) -> None:
        """Raise if a client has no rows of some domain."""
        rows, train, registered = view.rows, view.parts["train"], view.registered
        if rows.domain is None or len(rows.domain_names) < 2:
            raise refused("shift.what.kind", self.kind, "'static'", f"{rows.name} has a single domain")
        table = count_pairs(train.owner, rows.domain[train.rows.long()], len(train), len(rows.domain_names))
        for name, counts in zip(rows.domain_names, table[:registered].T, strict=True):
            if not counts.any():
                allowed = "domains with samples (data.source, data.groups), or 'static'"
                raise refused("shift.what.kind", self.kind, allowed, f"no client has a training row of domain '{name}'")
            if (counts == 0).any():
                but = f"client {int((counts == 0).nonzero()[0])} has no rows of domain '{name}'"
                allowed = "data.groups.by = 'none', a partition that deals every domain, or more rows for each client"
                raise refused("shift.what.kind", self.kind, allowed, but)

    def plan(self, view: PopulationView) -> Plan:
        """Build the plan of the rows that each client holds over time."""
        return MixturePlan(view, self)

    def rhythm(self, rounds: int, turns: int = 2) -> Rhythm:
        """Return the number of cycles, the rounds of a cycle, and those that show all domains alike, at most all."""
        return {"cycles": self.cycles, "cycle": self.cycle(rounds), "seen": min(self.seen(rounds, turns), rounds)}

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """Describe the mixture and its number of cycles."""
        text = f"What a client holds is a blend of domains{f', {listed(domains)},' if domains else ''} "
        if self.cycles < STILL:
            return text + f"{'of its own, ' if self.jitter else ''}whose shares stay as they are. "
        cycles = "cycle" if self.cycles == 1 else "cycles"
        return text + f"that changes from round to round, {self.cycles:g} {cycles} over the run. "

    def cycle(self, rounds: int) -> float:
        """Return T, the rounds of a cycle, in a run of `rounds`."""
        return rounds / self.cycles

    def seen(self, rounds: int, domains: int = 2) -> int:
        """Return the rounds before round 0 that show all domains alike, in a run of `rounds`; at least 1.

        Of two domains it is half a cycle, from the peak of the second to the peak of the first; of more all of it.

        >>> DomainMixture(cycles=3).seen(200), DomainMixture(cycles=3).seen(200, 3), DomainMixture(cycles=200).seen(200)
        (34, 67, 1)
        """
        return max(math.ceil(self.cycle(rounds) / (2 if domains <= 2 else 1)), 1)

    def shares(self, moment: Moment, domains: int, phase: float = 0.0) -> np.ndarray:
        """Return the share of each domain at a moment (domains,); the shares sum to 1.

        Args:
            moment: the time.
            domains: number of domains.
            phase: number of rounds by which a client is ahead.

        >>> [DomainMixture(cycles=2).shares(Moment(r, 40), 2).tolist() for r in (0, 5, 10)]
        [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
        >>> [DomainMixture().shares(Moment(r, 12), 3).tolist() for r in (4, 6, -4)]
        [[0.0, 1.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]
        """
        period = self.cycle(moment.rounds)
        s = math.fmod(moment.round + phase, period)
        s += period if s < 0 else 0.0
        # Peak P is that of the first domain, where the ring closes.
        peak = np.arange(domains + 1)
        distance = np.abs(domains * s / period - peak)
        if self.curve == "linear":
            share = np.maximum(1 - distance, 0.0)
        else:  # cos(x - pi k) is cos(x), and -cos(x) for odd k
            wave = math.cos(domains * math.pi * s / period)
            share = np.where(distance <= 1, (1 + np.where(peak % 2, -wave, wave)) / 2, 0.0)
        share[0] += share[domains]
        return share[:domains]

    def hold(self, rows: Tensor, domain: Tensor, domains: int, part: str, moment: Moment, rng: Rng) -> Tensor:
        """Return the rows held at `moment`, out of the client's own rows; `domain` is the domain of each row.

        A client without rows of some domain (among few validation rows, for example) takes more of the others.
        """
        judged = part in JUDGED
        if (judged and self.test == "all") or not len(rows):
            return rows
        phase = float(rng.at("phase").numpy().uniform(-self.jitter, self.jitter)) if self.jitter else 0.0
        balanced = judged and self.test == "balanced"
        shares = np.full(domains, 1 / domains) if balanced else self.shares(moment, domains, phase)
        parts = [rows[domain == k] for k in range(domains)]
        wanted = _counts(self.samples, _among(shares, np.array([len(of_domain) > 0 for of_domain in parts])))
        # Balanced rows are constant, so that accuracy changes with the model only.
        draw = rng.at("hold", part, "balanced" if balanced else moment.round).numpy()
        picks = [
            draw.integers(0, max(len(of_domain), 1), count) for of_domain, count in zip(parts, wanted, strict=True)
        ]
        picked = [of_domain[torch.from_numpy(pick)] for of_domain, pick in zip(parts, picks, strict=True)]
        return torch.cat(picked).sort().values


@dataclass(frozen=True)
class MixturePlan(OwnRows):
    """Mixture of the domains of each client over time."""

    mixture: DomainMixture

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """Return the rows of a part that a client trains on or is judged on, sorted."""
        return self._mixed(client, part, moment, self.mixture)

    def aside(self, client: int, moment: Moment) -> Tensor:
        """Return the validation rows that a client decides on, sorted: a mixture, as its training rows are."""
        return self._mixed(client, "val", moment, replace(self.mixture, test="mixture"))

    def _mixed(self, client: int, part: str, moment: Moment, mixture: DomainMixture) -> Tensor:
        rows, of = super().hold(client, part, moment), self.view.rows
        assert of.domain is not None
        domain, key = of.domain[rows.long()], self.view.rng.at("what", client)
        return mixture.hold(rows, domain, len(of.domain_names), part, moment, key)

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """Count the rows that each of `clients` holds, which are equally many at every moment."""
        own_rows = super().counts(clients, part, moment)
        return own_rows if part in JUDGED and self.mixture.test == "all" else self.mixture.samples * (own_rows > 0)

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """Return all registered clients, as rows are redrawn in every round."""
        return self.view.everyone[: None if moment.round != before.round else 0]


def _among(shares: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Scale the shares of the present domains to sum to 1; equal shares if all are 0."""
    if present.all():
        return shares
    shares = np.where(present, shares, 0.0)
    return shares / shares.sum() if shares.any() else present / present.sum()


def _counts(rows: int, shares: np.ndarray) -> list[int]:
    """Divide `rows` over the domains by differences of rounded cumulative sums, so that the counts sum to `rows`.

    The sums run from the last domain backwards: of two domains the second has `round(share * rows)`.

    >>> _counts(10, np.full(3, 1 / 3))
    [3, 4, 3]
    """
    sums = [*np.cumsum(shares[:0:-1]).tolist()[::-1], 0.0]
    up_to = [rows, *(round(total * rows) for total in sums)]
    return [more - fewer for more, fewer in pairwise(up_to)]
