"""Temporal priors: the share of each group that the server expects among the participants of a round.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, Eq. 3 for "linear" and "cosine", always with the exponent 1 whatever
the shift does; appendix A.3 for "soft", whose peak we put at s = 0 as in Eq. 3 and whose counts run over all
participants. `certainty`, "measured" and more than two groups are our own extension.

A prior reads the round and nothing else: `shares(moment, groups)` is (groups,) float64, or None where nothing is
expected. Only "soft" also asks what was counted in the round.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.curves import periodic_shares
from fedtide.core.errors import FedtideError
from fedtide.core.types import Moment
from fedtide.core.values import Finite, Fraction, OfShift, Positive, ingredient

Period = Annotated[Positive | None, OfShift("period")]
Peak = Annotated[Finite | None, OfShift("peak")]
Start = Annotated[Finite | None, OfShift("start")]


@ingredient
class Linear:
    """The share of the first of two groups falls from 1 to 0 in half a period and rises again: q = |2s/T - 1|.

    Group k of K > 2 peaks at s = (k-1) T/K and is alone there.

    Args:
        period: T, in rounds; None is that of the experiment's shift.
        phase: a round at which the first group peaks, None for that of the shift; s = (round - phase) mod T.

    >>> Linear(period=32).shares(Moment(8, 96), 2)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    period: Period = None
    phase: Peak = None
    kind: Literal["linear"] = "linear"

    def shares(self, moment: Moment, groups: int) -> Tensor:
        """The expected share of each group (groups,), float64."""
        return _periodic(self.kind, moment, self.period, self.phase, groups)


@ingredient
class Cosine:
    """As "linear", but slow near the peaks: q = (cos(2 pi s/T) + 1)/2.

    Args:
        period: T, in rounds; None is that of the experiment's shift.
        phase: a round at which the first group peaks, None for that of the shift.

    >>> Cosine(period=6).shares(Moment(1, 96), 2)
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    period: Period = None
    phase: Peak = None
    kind: Literal["cosine"] = "cosine"

    def shares(self, moment: Moment, groups: int) -> Tensor:
        """The expected share of each group (groups,), float64."""
        return _periodic(self.kind, moment, self.period, self.phase, groups)


@ingredient
class Block:
    """One group at a time, each for its part of the period (block-cyclic).

    Args:
        period: T, in rounds; None is that of the experiment's shift.
        phase: a round at which the block of the first group begins, None for that of the shift.

    >>> Block(period=32).shares(Moment(16, 96), 2)
    tensor([0., 1.], dtype=torch.float64)
    """

    period: Period = None
    phase: Start = None
    kind: Literal["block"] = "block"

    def shares(self, moment: Moment, groups: int) -> Tensor:
        """The expected share of each group (groups,), float64."""
        return _periodic(self.kind, moment, self.period, self.phase, groups)


@ingredient
class Measured:
    """The share of the first of two groups as somebody has counted it over a period, with straight lines in between.

    Args:
        curve: shares from 0 to 1 at equal steps of a period, from its beginning on; after the last comes the first.
        period: T, in rounds; None is that of the experiment's shift.
        phase: a round at which a period begins, None for that of the shift.

    >>> prior = Measured(curve=(1.0, 0.4, 0.0, 0.4), period=32)
    >>> [round(float(prior.shares(Moment(t, 96), 2)[0]), 6) for t in (0, 4, 8, 28, 32)]
    [1.0, 0.7, 0.4, 0.7, 1.0]
    """

    curve: Annotated[tuple[Fraction, ...], Field(min_length=1)]
    period: Period = None
    phase: Peak = None
    kind: Literal["measured"] = "measured"

    def shares(self, moment: Moment, groups: int) -> Tensor:
        """The expected share of each group (groups,), float64; 1 for a single group."""
        self.check(groups)
        if groups == 1:
            return torch.ones(1, dtype=torch.float64)
        period = known(self.period, "prior.period")
        place = (moment.round - (self.phase or 0.0)) % period / period * len(self.curve)
        here, there = (self.curve[(int(place) + step) % len(self.curve)] for step in (0, 1))
        q = here + (place - int(place)) * (there - here)
        return torch.tensor([q, 1 - q], dtype=torch.float64)

    def check(self, groups: int) -> None:
        """Refuse more than two groups, whose shares one curve does not tell."""
        _at_most_two(self.kind, groups)


@ingredient
class Uniform:
    """Every group has the same share in every round.

    >>> Uniform().shares(Moment(3, 96), 2)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    kind: Literal["uniform"] = "uniform"

    def shares(self, moment: Moment, groups: int) -> Tensor:
        """The expected share of each group (groups,), float64."""
        return torch.full((groups,), 1 / groups, dtype=torch.float64)


@ingredient
class EMOnly:
    """No prior: each participant goes where its own posterior says.

    >>> EMOnly().shares(Moment(3, 96), 2) is None
    True
    """

    kind: Literal["em-only"] = "em-only"

    def shares(self, moment: Moment, groups: int) -> None:
        """Nothing is expected."""
        return None


@ingredient
class Soft:
    """Only the rhythm is known: the share falls for half a period and rises for the other, as far as the rows say.

    Args:
        period: T, in rounds, of an odd one the trough is at floor(T/2); None is that of the experiment's shift.
        phase: a round at which the first group peaks, None for that of the shift.

    >>> prior = Soft(period=4)
    >>> counted, before = (0.9, 0.3, 0.3, 0.2), None
    >>> for t, now in enumerate(counted):
    ...     before = float(prior.soft(now, before, Moment(t, 8))[0])
    ...     print(before)
    1.0
    0.3
    0.0
    0.2
    """

    period: Period = None
    phase: Peak = None
    kind: Literal["soft"] = "soft"

    def soft(self, share_now: float, share_before: float | None, moment: Moment, groups: int = 2) -> Tensor:
        """The expected share of each group, from what was counted now and expected in the round before (Eq. 26).

            s = 0            1
            0 < s < T/2      min(share_before, share_now)
            s = T/2          0
            s > T/2          max(share_before, share_now)

        Args:
            share_now: q'(t), the share of the rows of all participants that the first component fits best.
            share_before: what this returned for the first group in the round before; None in the first round.
            moment: now; s = (round - phase) mod T, in whole rounds.
            groups: K.

        Returns:
            (groups,) float64; 1 for a single group.

        Raises:
            FedtideError: for more than two groups, among which a count of the first says too little.
        """
        self.check(groups)
        if groups == 1:
            return torch.ones(1, dtype=torch.float64)
        period = known(self.period, "prior.period")
        s, trough = int((moment.round - (self.phase or 0.0)) % period), int(period / 2)
        before = share_now if share_before is None else share_before
        q = 1.0 if s == 0 else 0.0 if s == trough else min(before, share_now) if s < trough else max(before, share_now)
        return torch.tensor([q, 1 - q], dtype=torch.float64)

    def check(self, groups: int) -> None:
        """Refuse more than two groups; algorithms ask when they are made, before anything runs."""
        _at_most_two(self.kind, groups)


Rhythm = Annotated[Linear | Cosine | Block | Measured, Field(discriminator="kind")]
"""A prior that reads the clock and nothing else."""

Prior = Annotated[Linear | Cosine | Block | Measured | Uniform | EMOnly | Soft, Field(discriminator="kind")]


def fits(prior: Prior, groups: int) -> None:
    """Refuse a prior that cannot say anything about so many groups, or does not know its period.

    Raises:
        FedtideError: it knows one curve, and there are more than two groups; or its period is None.
    """
    if isinstance(prior, Soft | Measured):
        prior.check(groups)
    if not isinstance(prior, Uniform | EMOnly):
        known(prior.period, "prior.period")


def known(value: float | None, key: str) -> float:
    """What an experiment takes from its periodic shift where it is not given.

    Raises:
        FedtideError: it is not given, and there was no such shift.
    """
    if value is None:
        raise FedtideError(f"{key}: missing; allowed: a number of rounds, or a periodic shift to take it from")
    return value


def expected(prior: Prior, moment: Moment, groups: int, now: float, before: float | None) -> Tensor | None:
    """What a prior expects of a round (groups,), given what was counted of the first group now and expected before."""
    if isinstance(prior, Soft):
        return prior.soft(now, before, moment, groups)
    return prior.shares(moment, groups)


def certainty(shares: Tensor, a0: float, above: float | None = None) -> Tensor:
    """How far each component may move: a_k = a0 * max(0, (q_k - h)/(1 - h)), so only while its group is in excess.

    With h = 1/K that is a0 * max(0, (K q_k - 1)/(K - 1)), for two groups a0 * max(0, 2 q_k - 1), the idea of Eq. 27 for
    the components of a mixture; for one group a0.

    Args:
        shares: (K,) on the simplex.
        a0: the step of a group that is alone.
        above: h, the share from which a group counts; None means 1/K.

    Returns:
        (K,) float64.

    >>> certainty(torch.tensor([0.75, 0.25]), 0.2)
    tensor([0.1000, 0.0000], dtype=torch.float64)
    """
    q, groups = shares.double(), len(shares)
    if groups == 1:
        return a0 * torch.ones_like(q)
    if above is None:
        return a0 * ((groups * q - 1) / (groups - 1)).clamp_min(0)
    return a0 * ((q - above) / (1 - above)).clamp_min(0)


def steps(prior: Prior, shares: Tensor | None, mass: Tensor, a0: float, above: float | None = None) -> Tensor:
    """How far each component may move: by `certainty` where a prior knows the hour, else by its share of the rows.

    Args:
        prior: what was assumed.
        shares: (K,) what it expected of the round; None where it expects nothing.
        mass: (K,) the rows of each mode's participants.
        a0: the step of a group that is alone.
        above: as in `certainty`.

    Returns:
        (K,) float64.

    >>> steps(EMOnly(), None, torch.tensor([30.0, 10.0]), 1.0)
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    if shares is None or isinstance(prior, Uniform):
        return a0 * mass.double() / mass.sum()
    return certainty(shares, a0, above)


def zero_mid(shares: Tensor, eta_max: float) -> float:
    """The step of FedTKM's scale (Eq. 27): eta_max at the peaks of a group, 0 when all groups are expected equally.

    eta_max * max_k max(0, (K q_k - 1)/(K - 1)); for two groups 2 |1/2 - q| eta_max; for one group eta_max.

    Args:
        shares: (K,) on the simplex.
        eta_max: the largest step.

    >>> zero_mid(torch.tensor([0.25, 0.75]), 0.02)
    0.01
    """
    return float(certainty(shares, eta_max).max())


def _at_most_two(kind: str, groups: int) -> None:
    if groups > 2:
        raise FedtideError(f"prior: found '{kind}' with {groups} groups, allowed: at most 2 groups, or another prior")


def _periodic(curve: str, moment: Moment, period: float | None, phase: float | None, groups: int) -> Tensor:
    if groups == 1:  # one group has no other to take turns with
        return torch.ones(1, dtype=torch.float64)
    cycle = known(period, "prior.period")
    return torch.from_numpy(periodic_shares(curve, moment.round - (phase or 0.0), cycle, 1.0, groups))
