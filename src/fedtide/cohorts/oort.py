"""Oort: clients with a large utility for training that are also fast.

Lai, Zhu, Madhyastha, Chowdhury: *Oort: Efficient Federated Learning via Guided Participant Selection*, OSDI 2021,
Algorithm 1; where it leaves something open, FedScale's code.

| symbol | meaning |
| --- | --- |
| `U_i` | utility of client i when it was last tried |
| `l_i` | the round of that trial, counted from 1 |
| `s_i` | seconds from when the client was sent its model until its answer |
| `T` | seconds up to which no client is penalized |

When to use it: devices differ in speed, and clients in how much the model still has to learn from them.

Choices:
    - paper: rounds are counted from 1. The range in the score is that of utilities before clipping.
    - ours: a client that was never tried is not penalized. Ties are broken at random.
    - ours: the utility is computed from plain cross-entropy under the received model. If a method's clients do more
      than train it, the utility is computed from their mean training loss, as in FedScale.
    - ours: if a client answers in a later round (FedBuff), `s_i` is its whole time and `l_i` the round of its answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.cohorts.selection import (
    Known,
    Serve,
    Sized,
    ask_reachable,
    descending,
    draw_clients,
    fill_unknown,
    no_reports,
    with_reports,
)
from fedtide.core.base import Fleet, Moment, Reply
from fedtide.core.rng import Rng
from fedtide.core.trees import per_client
from fedtide.fields.types import Count, Fraction, NonNegative, Positive, ingredient

SMALLEST = 1e-4
"""Lower bound on the range of utilities."""

WIDEST = 10
"""Largest number of candidates for each client that is selected by score."""

FLAT, STEEP = 0.1, 5.0
"""Relative changes of utility: at or below the first the pacer admits slower clients, from the second fewer."""


@dataclass(frozen=True)
class Tried:
    """Oort's memo of clients, all (clients,), and of past rounds.

    Args:
        reward: value of a client before its first trial, where known: the samples it trains on.
        tried: mask of clients that were tried; the next three are zero for the others.
        utility: utility at the last trial.
        seconds: duration of the last trial, over all rounds that it took.
        last: round of the last trial, from 1.
        sums: (rounds,) total utility of each of the latest rounds.
        percent: the percentile of the seconds up to which no client is penalized.
    """

    reward: Known
    tried: Tensor = field(metadata=per_client(new=False))
    utility: Tensor = field(metadata=per_client(new=0.0))
    seconds: Tensor = field(metadata=per_client(new=0.0))
    last: Tensor = field(metadata=per_client(new=0))
    sums: Tensor
    percent: float


@ingredient
class Oort(Sized):
    """Clients with large utility (losses) and speed, and a share of clients that were never tried.

    With U_i the utility of client i when it was last tried, in round l_i, and s_i the seconds it took,

        score_i = (min(U_i, clip) - min U) / range + sqrt(0.1 ln t / l_i),   times (T / s_i)^penalty where s_i > T

    `exploration_factor` of the m clients, falling by `exploration_decay` each round down to `exploration_min`, are new
    ones. The others are drawn in proportion to their scores among those with at least `cut_off_util` times the m-th
    score. The options have the names of FedScale's configuration.

    Args:
        exploration_factor: share of clients that were never tried, in the first round.
        exploration_decay: factor on that share in every round.
        exploration_min: lower bound on that share.
        round_penalty: exponent of the penalty for clients slower than T.
        clip_bound: quantile at which utilities are clipped.
        cut_off_util: fraction of the m-th score from which clients are candidates (FedScale's configuration has 0.05).
        round_threshold: T is this percentile of the seconds that clients took.
        pacer_step: rounds between updates of the percentile: it rises if the total utility of rounds has changed by a
            tenth or less, and falls if by five times or more.
        pacer_delta: change of the percentile.
        sample_window: new clients are drawn among this many times as many, those of the largest value.
    """

    exploration_factor: Fraction = 0.9
    exploration_decay: Fraction = 0.98
    exploration_min: Fraction = 0.3
    round_penalty: NonNegative = 2.0
    clip_bound: Fraction = 0.9
    cut_off_util: Fraction = 0.95
    round_threshold: Annotated[float, Field(strict=True, gt=0, le=100)] = 30.0
    pacer_step: Count = 20
    pacer_delta: Positive = 5.0
    sample_window: Count = 5
    kind: Literal["oort"] = "oort"
    asks: ClassVar[tuple[str, ...]] = ("count",)
    reveals: ClassVar[tuple[str, ...]] = ("utility",)

    def init(self, fleet: Fleet) -> Tried:
        """Ask the clients reachable before round 0 how many samples they train on; none is tried yet."""
        clients, answers = ask_reachable(fleet, "count")
        reward = with_reports(no_reports(len(fleet.clients), 1), clients, answers[:, -1:])
        never = torch.zeros(len(fleet.clients), dtype=torch.int64)
        zeros = never.double()
        return Tried(reward, never > 0, zeros, zeros, never, zeros[:0], self.round_threshold)

    def share(self, t: int) -> float:
        """Return the share of new clients in round `t`, from 1.

        >>> Oort().share(1), round(Oort().share(2), 3), Oort().share(1000)
        (0.9, 0.882, 0.3)
        """
        return max(
            self.exploration_factor * self.exploration_decay ** (t - 1),
            min(self.exploration_factor, self.exploration_min),
        )

    def select(self, memo: Tried, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor, m: int) -> Tensor:
        """Return `m` clients of `among`, sorted; all if there are no more."""
        among = among.sort().values
        t = max(fleet.moment.round + 1, 1)
        if m >= len(among):
            return among
        tried, new = among[memo.tried[among]], among[~memo.tried[among]]
        explored = min(math.floor(round(self.share(t) * m, 9)), len(new))
        exploited = min(m - explored, len(tried))
        best = self._best(memo, tried, exploited, t, rng.at("exploit"))
        fresh = self._fresh(memo, new, m - exploited, rng.at("explore"))
        return torch.cat([best, fresh]).sort().values

    def scores(self, memo: Tried, clients: Tensor, t: int) -> Tensor:
        """Return the scores of tried clients in round `t` (clients,)."""
        utility = memo.utility[clients]
        ordered = utility.sort().values
        clipped = utility.clamp(max=ordered[min(int(len(ordered) * self.clip_bound), len(ordered) - 1)])
        worth = (clipped - ordered[0]) / (ordered[-1] - ordered[0]).clamp(min=SMALLEST)
        stale = (0.1 * math.log(max(t, 1)) / memo.last[clients].clamp(min=1)).sqrt()
        return (worth + stale) * self._slowness(memo, clients)

    def preferred(self, memo: Tried) -> float:
        """Return T: seconds up to which no client is penalized."""
        seconds = memo.seconds[memo.tried].sort().values
        if memo.percent >= 100 or not len(seconds):
            return math.inf
        return float(seconds[min(int(len(seconds) * memo.percent / 100), len(seconds) - 1)])

    def _slowness(self, memo: Tried, clients: Tensor) -> Tensor:
        """Return the speed factor: 1 for clients that are fast enough or of unknown speed, less for the others."""
        seconds, preferred = memo.seconds[clients], self.preferred(memo)
        return torch.where(seconds > preferred, (preferred / seconds) ** self.round_penalty, 1.0)

    def _best(self, memo: Tried, clients: Tensor, k: int, t: int, rng: Rng) -> Tensor:
        """Draw `k` tried clients in proportion to their scores."""
        if not k:
            return clients[:0]
        score = self.scores(memo, clients, t)
        order = descending(score, rng.at("order"))
        order = order[score[order] >= self.cut_off_util * score[order[k - 1]]][: max(WIDEST * k, k)]
        return draw_clients(clients[order], score[order].log(), k, rng)

    def _fresh(self, memo: Tried, clients: Tensor, k: int, rng: Rng) -> Tensor:
        """Draw `k` clients that were never tried, in proportion to their reward."""
        reward = fill_unknown(memo.reward.of[clients, 0], memo.reward.heard[clients]) * self._slowness(memo, clients)
        order = descending(reward, rng.at("order"))[: self.sample_window * k]
        return draw_clients(clients[order], reward[order].log(), k, rng)

    def learn(self, memo: Tried, reply: Reply, moment: Moment) -> Tried:
        """Record the utilities (see `utility`) and durations of the clients that answered."""
        if not len(reply.clients):
            return memo
        worth, t = reply.rows["utility"].flatten().to(memo.utility), moment.round + 1
        updated = replace(
            memo,
            tried=memo.tried.index_fill(0, reply.clients, True),
            utility=memo.utility.index_copy(0, reply.clients, worth),
            seconds=memo.seconds.index_copy(0, reply.clients, reply.seconds.to(memo.seconds)),
            last=memo.last.index_copy(0, reply.clients, torch.full_like(reply.clients, t)),
            sums=torch.cat([memo.sums, worth.sum().reshape(1)])[-2 * self.pacer_step :],
        )
        return replace(updated, percent=self._paced(updated, t))

    def _paced(self, memo: Tried, t: int) -> float:
        """Return the percentile after round `t`: slower clients are admitted if rounds bring no more than before."""
        if t % self.pacer_step or len(memo.sums) < 2 * self.pacer_step:
            return memo.percent
        before, now = float(memo.sums[: self.pacer_step].sum()), float(memo.sums[self.pacer_step :].sum())
        if abs(now - before) <= FLAT * before:
            return min(memo.percent + self.pacer_delta, 100.0)
        lower = min(max(memo.percent - self.pacer_delta, self.pacer_delta), memo.percent)
        return lower if abs(now - before) >= STEEP * before else memo.percent
