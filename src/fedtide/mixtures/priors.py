"""Temporal priors: the share of each group that the server expects among the participants of a round.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, Eq. 3 for "linear" and "cosine", always with the exponent 1. Appendix
A.3 for "soft", whose peak we put at s = 0 as in Eq. 3 and whose counts run over all participants. More than two groups
are our own extension.

| member of a prior | meaning |
| --- | --- |
| `check(groups)` | refuses numbers of groups, at construction of an algorithm |
| `init(groups)` | first memo; only "soft" and "learned" have one |
| `see(memo, moment, means, rng, participants)` | memo after a round, from the means of its sums |
| `shares(moment, groups, memo)` | expected share of each group (groups,) float64; None without an expectation |
| `facts(memo)` | facts for the record |
| `timed`, `sketch` | whether it depends on the time; numbers that clients add to their sums, or None |

The time is the round, or with a period such as "1d" the clock: then `phase` is a time of the day such as "14h". A
simulation begins at midnight; real clients have the midnight of their time zone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.clusters.representation import Gradient
from fedtide.core.base import Moment, Shard, Weighted
from fedtide.core.errors import FedtideError, refused, shown
from fedtide.core.rng import Rng
from fedtide.data.shift.who import periodic_shares
from fedtide.fields.types import Count, Duration, Finite, OfShift, Positive, allowing, ingredient, seconds_of
from fedtide.learn.task import Task
from fedtide.mixtures.rhythm import LEAST, Found, curve, look, read_shares, weights_of

__all__ = [
    "Block", "Cosine", "EMOnly", "Learned", "Linear", "Prior", "Soft", "Uniform",
]  # fmt: skip

Rounds = Annotated[Positive | None, OfShift("period")]
RoundPeak = Annotated[Finite | None, OfShift("peak")]
LENGTH = allowing("a number of rounds above 0, or a time such as '1d'")
WHEN = allowing("a round, or a time of the day such as '14h'")
Period = Annotated[Positive | Duration | None, LENGTH, OfShift("period")]
Peak = Annotated[Finite | Duration | None, WHEN, OfShift("peak")]
Start = Annotated[Finite | Duration | None, WHEN, OfShift("start")]


class Expecting:
    """A temporal prior; by default it needs no period, keeps nothing from round to round, and is for any groups."""

    sketch: int | None = None
    timed: ClassVar[bool] = False

    def check(self, groups: int) -> None:
        """Refuse more groups than the prior knows of, and a missing period."""
        return

    def init(self, groups: int) -> Any:
        """Return the memo before the first round."""
        return None

    def see(self, memo: Any, moment: Moment, means: Mapping[str, Tensor], rng: Rng, participants: int = 1) -> Any:
        """Return the memo after a round."""
        return memo

    def facts(self, memo: Any) -> dict[str, Any]:
        """Return the facts of the memo for the record."""
        return {}


class _Timed(Expecting):
    """A prior with a period: the common part of all kinds but "uniform", "em-only" and "learned"."""

    kind: str
    period: float | str | None
    phase: float | str | None
    timed: ClassVar[bool] = True

    def shares(self, moment: Moment, groups: int, memo: Any = None) -> Tensor:
        """Return the expected share of each group (groups,), float64; 1 for a single group."""
        if groups == 1:  # one group has no other to take turns with
            return torch.ones(1, dtype=torch.float64)
        return torch.from_numpy(periodic_shares(self.kind, *self.elapsed(moment), 1.0, groups))

    def elapsed(self, moment: Moment) -> tuple[float, float]:
        """Return the time since a peak of the first group, and the period, both in rounds or both in seconds."""
        period = need_period(self.period, "prior.period")
        phase = self.phase or 0.0
        if isinstance(period, str) != isinstance(phase, str) and phase:
            unit = "a time such as '14h'" if isinstance(period, str) else "a round"
            raise refused("prior.phase", phase, f"{unit}, because period is {shown(period)}")
        if isinstance(period, str):
            peak = seconds_of(phase) if isinstance(phase, str) else 0.0
            return moment.seconds - peak, seconds_of(period)
        return moment.round - float(phase), period

    def check(self, groups: int) -> None:
        """Refuse more groups than the prior knows of, and a missing period."""
        need_period(self.period, "prior.period")
        self.shares(Moment(0, 1), groups, 0.0)  # the memo of "soft"


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
class Uniform(Expecting):
    """Equal shares of all groups in every round.

    >>> Uniform().shares(Moment(3, 96), 2)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    kind: Literal["uniform"] = "uniform"

    def shares(self, moment: Moment, groups: int, memo: Any = None) -> Tensor:
        """Return the expected share of each group (groups,), float64."""
        return torch.full((groups,), 1 / groups, dtype=torch.float64)


@ingredient
class EMOnly(Expecting):
    """No prior: each participant is assigned by its own posterior.

    >>> EMOnly().shares(Moment(3, 96), 2) is None
    True
    """

    kind: Literal["em-only"] = "em-only"

    def shares(self, moment: Moment, groups: int, memo: Any = None) -> None:
        """Return None: there is no expectation."""
        return None


@ingredient
class Soft(_Timed):
    """A prior that knows only the rhythm: the counted share, made to fall for half a period and rise for the other.

    Args:
        period: T, in rounds (for odd T the trough is at floor(T/2)); None takes that of the experiment's shift.
        phase: a round at which the first group peaks, None takes that of the shift.

    >>> prior, q = Soft(period=4), None
    >>> for t, counted in enumerate((0.9, 0.3, 0.3, 0.2)):
    ...     q = prior.see(q, Moment(t, 8), {"modes": torch.tensor([counted, 1 - counted]).double()}, Rng(0))
    ...     print(round(q, 6))
    1.0
    0.3
    0.0
    0.2
    """

    period: Rounds = None
    phase: RoundPeak = None
    kind: Literal["soft"] = "soft"

    def see(self, memo: Any, moment: Moment, means: Mapping[str, Tensor], rng: Rng, participants: int = 1) -> Any:
        """Return the expected share of the first group (Eq. 26); it is the memo.

            s = 0            1
            0 < s < T/2      min(before, now)
            s = T/2          0
            s > T/2          max(before, now)

        Args:
            memo: `before`, the result of the round before; None in the first round.
            moment: the round; s is the time since a peak of the first group mod T, in whole rounds.
            means: "modes", of which the first is `now`: the counted share of the first group.
            rng: not used.
            participants: not used.
        """
        s, period = self.elapsed(moment)
        now = float(means["modes"][0])
        s, trough = int(s % period), int(period / 2)
        before = now if memo is None else memo
        return 1.0 if s == 0 else 0.0 if s == trough else min(before, now) if s < trough else max(before, now)

    def shares(self, moment: Moment, groups: int, memo: Any = None) -> Tensor:
        """Return the expected share of each group (groups,), float64, in the round that the memo saw last."""
        if groups > 2:
            raise refused("prior", self.kind, f"at most 2 groups, not {groups}; or another prior")
        if groups == 1:
            return super().shares(moment, groups)
        return torch.tensor([memo, 1 - memo], dtype=torch.float64)


@dataclass(frozen=True)
class Heard:
    """Memo of a learned prior about n rounds, with its beliefs.

    rounds: how many were heard in all. times: (n,) in rounds. counts: (n,) participants. sketches: (n, d) means over
    them. shares: (n, K) as they are read now, or as counted where nothing is read. ahead: (K,) forecast of the last
    round before it was heard, or None. found: result of the last look.
    """

    rounds: int
    times: Tensor
    counts: Tensor
    sketches: Tensor
    shares: Tensor
    ahead: Tensor | None
    found: Found


@ingredient
class Learned(Expecting):
    """A prior that finds the rhythm by itself, or that there is none; it is told nothing of period, phase or shape.

    It is not `timed`: what is read is as good as counted.

    Each client adds a frozen sketch of its samples to its sums, a vector of length one that no training moves. The
    server follows the direction of their mean that changes slowest (`fedtide.mixtures.rhythm`). For a heard round it
    tells the share of each group as read there, between the extremes seen. For a later round it tells the share of the
    curve, once a period is believed. Before, and where nothing moves, there is no expectation, as with "em-only".

    Args:
        sketch: numbers of a client's sketch.
        memory: rounds looked back; a period is found if it fits in twice.
        look_every: rounds between two looks for a period.
    """

    sketch: Count = 64
    memory: Count = 512
    look_every: Count = 8
    kind: Literal["learned"] = "learned"

    def check(self, groups: int) -> None:
        """Refuse more groups than a sketch can tell apart."""
        if groups > self.sketch:
            raise refused("prior.sketch", self.sketch, f"at least {groups}, the number of groups")

    def init(self, groups: int) -> Heard:
        """Return the memo before the first round."""
        none = torch.zeros(0, dtype=torch.float64)
        return Heard(0, none, none, none, none, None, Found(False, (), 0.0, 0.0))

    def see(self, memo: Any, moment: Moment, means: Mapping[str, Tensor], rng: Rng, participants: int = 1) -> Any:
        """Return the memo after a round.

        Args:
            memo: the memo before.
            moment: the round.
            means: means over participants: the "sketch" (d,), and the counted shares of the "modes" (K,).
            rng: the round's key, for shuffles.
            participants: participants, by which rounds are weighted.
        """
        groups, rounds = len(means["modes"]), memo.rounds + 1
        ahead = self._ahead(memo, moment)
        now, count = torch.tensor([[float(moment.round)], [float(participants)]], dtype=torch.float64)
        times, counts, sketches, shares = (
            (torch.cat([old, new]) if memo.rounds else new)[-self.memory :]
            for old, new in (
                (memo.times, now),
                (memo.counts, count),
                (memo.sketches, means["sketch"].double()[None]),
                (memo.shares, means["modes"].double()[None]),
            )
        )
        result, weights = memo.found, weights_of(counts.numpy())
        if rounds % self.look_every == 0 and len(times) >= LEAST and groups > 1:
            result = look(times.numpy(), sketches.numpy(), rng.at("rhythm").numpy(), weights)
        if result.moves:
            shares = torch.from_numpy(read_shares(sketches.numpy(), groups, shares.numpy(), weights))
        return Heard(rounds, times, counts, sketches, shares, ahead, result)

    def shares(self, moment: Moment, groups: int, memo: Any = None) -> Tensor | None:
        """Return the share of each group (groups,): as read in the round heard last, else as forecast, or None."""
        if groups == 1:
            return torch.ones(1, dtype=torch.float64)
        if memo.rounds and memo.times[-1] == moment.round:
            return memo.shares[-1] if memo.found.moves else None
        return self._ahead(memo, moment)

    def facts(self, memo: Any) -> dict[str, Any]:
        """Return the believed periods and the forecast of this round, and at a look its gain and that of chance."""
        result: Found = memo.found
        facts: dict[str, Any] = {}
        if memo.rounds % self.look_every == 0 and len(memo.times) >= LEAST:
            facts |= {"gain": result.gain, "chance": result.chance}
        if result.periods:
            facts |= {"periods": torch.tensor(result.periods, dtype=torch.float64)}
        return facts if memo.ahead is None else facts | {"forecast": memo.ahead}

    def _ahead(self, memo: Heard, moment: Moment) -> Tensor | None:
        """Return the shares of a round to come (groups,), or None if no period is believed."""
        if not memo.found.periods:
            return None
        at, weights = np.array([float(moment.round)]), weights_of(memo.counts.numpy())
        shares = curve(memo.times.numpy(), memo.shares.numpy(), memo.found.periods, at, weights)[0].clip(0, 1)
        return torch.from_numpy(shares / shares.sum())


Rhythm = Annotated[Linear | Cosine | Block, Field(discriminator="kind")]
"""A prior that depends on the clock alone."""

Prior = Annotated[Linear | Cosine | Block | Uniform | EMOnly | Soft | Learned, Field(discriminator="kind")]


UNKNOWN = "a number of rounds, a time such as '1d', prior = 'learned' (FedTEM and FedTKM)"
"""What may be said where no period is known."""


def need_period(value: float | str | None, key: str, allowed: str = UNKNOWN) -> float | str:
    """Return a value that may come from the experiment's periodic shift.

    Raises:
        FedtideError: the value is missing, and there was no such shift.
    """
    if value is None:
        raise FedtideError(f"{key}: missing; allowed: {allowed}, or a periodic shift to take it from")
    return value


def sketching(prior: Prior, task: Task) -> Callable[[Shard], dict[str, Weighted]]:
    """Return the terms that clients add to their sums for a prior: "sketch" for "learned", nothing for others.

    A sketch is the direction of the gradient of the last layer of a network that is never trained, in a few random
    sums. If a base makes the outputs, as for next tokens, that is the last adapter. Its length is 1, which is its bound
    under privacy. It depends on inputs and labels, and each client counts the same.

    Args:
        task: the task of a single model.
    """
    represent = prior.sketch and Gradient(last_layer=True, sketch=prior.sketch).of(task, "prior")

    def sketch(shard: Shard) -> dict[str, Weighted]:
        return {"sketch": Weighted(represent(None, shard), 1.0)} if represent else {}

    return sketch
