"""Temporal priors: the share of each group that the server expects among the participants of a round.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, Eq. 3 for "linear" and "cosine", always with the exponent 1 whatever
the exponent of the shift; appendix A.3 for "soft", whose peak we put at s = 0 as in Eq. 3 and whose counts run over all
participants. "measured" and more than two groups are our own extension.

Every prior has `shares(moment, groups, now, before)`, the expected share of each group (groups,) in float64, or None
for no expectation; `check(groups)`, which algorithms call at construction; and `timed`, whether it depends on the time.
All but "soft" use the time alone: `now`, the share of the first group counted in this round, and `before`, its
expected share in the last round, may be left out.

The time is the round, or with a period such as "1d" the clock: then `phase` is a time of the day such as "14h". A
simulation begins at midnight; real clients have the midnight of their time zone.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.config_types import Finite, Fraction, OfShift, Positive, explained, ingredient
from fedtide.core.curves import periodic_shares
from fedtide.core.durations import Duration, seconds_of
from fedtide.core.errors import FedtideError, refused, shown
from fedtide.core.types import Moment

Rounds = Annotated[Positive | None, OfShift("period")]
RoundPeak = Annotated[Finite | None, OfShift("peak")]
LENGTH = explained("a number of rounds above 0, or a time such as '1d'")
WHEN = explained("a round, or a time of the day such as '14h'")
Period = Annotated[Positive | Duration | None, LENGTH, OfShift("period")]
Peak = Annotated[Finite | Duration | None, WHEN, OfShift("peak")]
Start = Annotated[Finite | Duration | None, WHEN, OfShift("start")]


class _Timed:
    """A prior by the clock, or with it: the common part of all kinds but "uniform" and "em-only"."""

    kind: str
    period: float | str | None
    phase: float | str | None
    timed: ClassVar[bool] = True
    most: ClassVar[float] = math.inf

    def shares(self, moment: Moment, groups: int, now: float | None = None, before: float | None = None) -> Tensor:
        """Return the expected share of each group (groups,), float64; 1 for a single group."""
        if groups > self.most:
            raise refused("prior", self.kind, f"at most {self.most} groups, not {groups}; or another prior")
        if groups == 1:  # one group has no other to take turns with
            return torch.ones(1, dtype=torch.float64)
        period = need_period(self.period, "prior.period")
        phase = self.phase or 0.0
        if isinstance(period, str) != isinstance(phase, str) and phase:
            unit = "a time such as '14h'" if isinstance(period, str) else "a round"
            raise refused("prior.phase", phase, f"{unit}, as period is {shown(period)}")
        if isinstance(period, str):
            peak = seconds_of(phase) if isinstance(phase, str) else 0.0
            return self.at(moment.seconds - peak, seconds_of(period), groups, now, before)
        return self.at(moment.round - float(phase), period, groups, now, before)

    def at(self, s: float, period: float, groups: int, now: float | None, before: float | None) -> Tensor:
        """Return the expected shares `s` rounds after a peak of the first of several groups."""
        return torch.from_numpy(periodic_shares(self.kind, s, period, 1.0, groups))

    def check(self, groups: int) -> None:
        """Refuse more groups than the prior knows of, and a missing period."""
        need_period(self.period, "prior.period")
        self.shares(Moment(0, 1), groups, 0.0)


@ingredient
class Linear(_Timed):
    """A linear wave: the share of the first of two groups falls from 1 to 0 in half a period and rises again.

    For two groups q = |2s/T - 1|; group k of K > 2 peaks at s = (k-1) T/K with share 1.

    Args:
        period: T, in rounds or a time such as "1d"; None takes that of the experiment's shift.
        phase: a round, or a time of the day, at which the first group peaks, None takes that of the shift;
            s = (round - phase) mod T.

    >>> Linear(period=32).shares(Moment(8, 96), 2)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    period: Period = None
    phase: Peak = None
    kind: Literal["linear"] = "linear"


@ingredient
class Cosine(_Timed):
    """A cosine wave, slower near the peaks than "linear": q = (cos(2 pi s/T) + 1)/2.

    Args:
        period: T, in rounds or a time such as "1d"; None takes that of the experiment's shift.
        phase: a round, or a time of the day, at which the first group peaks, None takes that of the shift.

    >>> Cosine(period=6).shares(Moment(1, 96), 2)
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    period: Period = None
    phase: Peak = None
    kind: Literal["cosine"] = "cosine"


@ingredient
class Block(_Timed):
    """Block-cyclic shares: one group at a time, each for its part of the period.

    Args:
        period: T, in rounds or a time such as "1d"; None takes that of the experiment's shift.
        phase: a round, or a time of the day, at which the first group's block begins, None takes that of the shift.

    >>> Block(period=32).shares(Moment(16, 96), 2)
    tensor([0., 1.], dtype=torch.float64)
    """

    period: Period = None
    phase: Start = None
    kind: Literal["block"] = "block"


@ingredient
class Measured(_Timed):
    """Measured shares of the first of two groups over a period, with linear interpolation.

    Args:
        curve: shares from 0 to 1 at equal steps of a period, from its beginning; the last is followed by the first.
        period: T, in rounds or a time such as "1d"; None takes that of the experiment's shift.
        phase: a round, or a time of the day, at which a period begins, None takes that of the shift.

    >>> prior = Measured(curve=(1.0, 0.4, 0.0, 0.4), period=32)
    >>> [round(float(prior.shares(Moment(t, 96), 2)[0]), 6) for t in (0, 4, 8, 28, 32)]
    [1.0, 0.7, 0.4, 0.7, 1.0]
    """

    curve: Annotated[tuple[Fraction, ...], Field(min_length=1)]
    period: Period = None
    phase: Peak = None
    kind: Literal["measured"] = "measured"
    most: ClassVar[float] = 2

    def at(self, s: float, period: float, groups: int, now: float | None, before: float | None) -> Tensor:
        """Return the expected shares `s` rounds after the beginning of a period."""
        place = s % period / period * len(self.curve)
        here, there = (self.curve[(int(place) + step) % len(self.curve)] for step in (0, 1))
        q = here + (place - int(place)) * (there - here)
        return torch.tensor([q, 1 - q], dtype=torch.float64)


@ingredient
class Uniform:
    """Equal shares of all groups in every round.

    >>> Uniform().shares(Moment(3, 96), 2)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    kind: Literal["uniform"] = "uniform"
    timed: ClassVar[bool] = False

    def shares(self, moment: Moment, groups: int, now: float | None = None, before: float | None = None) -> Tensor:
        """Return the expected share of each group (groups,), float64."""
        return torch.full((groups,), 1 / groups, dtype=torch.float64)

    def check(self, groups: int) -> None:
        """Accept any number of groups."""


@ingredient
class EMOnly:
    """No prior: each participant is assigned by its own posterior.

    >>> EMOnly().shares(Moment(3, 96), 2) is None
    True
    """

    kind: Literal["em-only"] = "em-only"
    timed: ClassVar[bool] = False

    def shares(self, moment: Moment, groups: int, now: float | None = None, before: float | None = None) -> None:
        """Return None: there is no expectation."""
        return None

    def check(self, groups: int) -> None:
        """Accept any number of groups."""


@ingredient
class Soft(_Timed):
    """A prior that knows only the rhythm: the counted share, made to fall for half a period and rise for the other.

    Args:
        period: T, in rounds (for odd T the trough is at floor(T/2)); None takes that of the experiment's shift.
        phase: a round at which the first group peaks, None takes that of the shift.

    >>> prior = Soft(period=4)
    >>> counted, before = (0.9, 0.3, 0.3, 0.2), None
    >>> for t, now in enumerate(counted):
    ...     before = float(prior.shares(Moment(t, 8), 2, now, before)[0])
    ...     print(before)
    1.0
    0.3
    0.0
    0.2
    """

    period: Rounds = None
    phase: RoundPeak = None
    kind: Literal["soft"] = "soft"
    most: ClassVar[float] = 2

    def at(self, s: float, period: float, groups: int, now: float | None, before: float | None) -> Tensor:
        """Return the expected shares, from the share counted now and the one expected in the round before (Eq. 26).

            s = 0            1
            0 < s < T/2      min(before, now)
            s = T/2          0
            s > T/2          max(before, now)

        Args:
            s: rounds since a peak of the first group; taken mod T, in whole rounds.
            period: T.
            groups: 2.
            now: q'(t), the share of all participants' samples that the first component fits best.
            before: the returned share of the first group in the round before; None in the first round.
        """
        assert now is not None
        s, trough = int(s % period), int(period / 2)
        before = now if before is None else before
        q = 1.0 if s == 0 else 0.0 if s == trough else min(before, now) if s < trough else max(before, now)
        return torch.tensor([q, 1 - q], dtype=torch.float64)


Rhythm = Annotated[Linear | Cosine | Block | Measured, Field(discriminator="kind")]
"""A prior that depends on the clock alone."""

Prior = Annotated[Linear | Cosine | Block | Measured | Uniform | EMOnly | Soft, Field(discriminator="kind")]


def need_period(
    value: float | str | None, key: str, allowed: str = "a number of rounds, a time such as '1d'"
) -> float | str:
    """Return a value that may come from the experiment's periodic shift.

    Raises:
        FedtideError: the value is missing, and there was no such shift.
    """
    if value is None:
        raise FedtideError(f"{key}: missing; allowed: {allowed}, or a periodic shift to take it from")
    return value
