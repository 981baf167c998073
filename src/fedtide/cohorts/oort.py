"""Oort: clients that matter for training and are fast.

Lai, Zhu, Madhyastha, Chowdhury: *Oort: Efficient Federated Learning via Guided Participant Selection*, OSDI 2021,
Algorithm 1, with what FedScale's code does where that says nothing.

| symbol | meaning |
| --- | --- |
| `U_i` | utility of client i when it was tried last |
| `l_i` | the round in which that was, counted from 1 |
| `s_i` | seconds that it took |
| `T` | seconds up to which no client is penalized |

When to use it: devices differ in speed, and clients in how much the model still has to learn from them.

Choices:
    Rounds are counted from 1, as `t` in the paper. A score's range is that of utilities before the largest are clipped.
    How long a client takes that was never tried is unknown, so it is not penalized unless the memo has its seconds.
    Ties are broken at random. The utility of a client that trains the model that it received is of plain cross-entropy
    under that model, whatever loss trains; where a method's clients do more than that (choose a model, say), it is of
    their mean training loss, as FedScale takes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.cohorts.draw import chosen, descending, filled, put, told
from fedtide.cohorts.protocol import Patience, Served, asked
from fedtide.core.config_types import AtLeastOne, Count, Fraction, NonNegative, Positive, ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Fleet, Moment, Reply

SMALLEST = 1e-4
"""What a range of utilities is taken to be at least."""

WIDEST = 10
"""Candidates at most, for each client that is picked by its score."""

FLAT, STEEP = 0.1, 5.0
"""Relative changes of what rounds bring: up to the first the pacer lets slower clients in, from the second fewer."""


@dataclass(frozen=True)
class Tried:
    """What Oort knows of clients, all (clients,), and of past rounds.

    Args:
        reward: what a client is worth before it was tried: rows that it trains on; 0 where it said nothing.
        utility: what it was worth when it was tried last.
        seconds: how long it took then; 0 where that is unknown.
        last: the round in which it was tried last, from 1; 0 for never.
        sums: (rounds,) utility that each of the latest rounds brought.
        percent: the percentile of the seconds up to which no client is penalized.
    """

    reward: Tensor
    utility: Tensor
    seconds: Tensor
    last: Tensor
    sums: Tensor
    percent: float


@ingredient
class Oort:
    """Clients that matter (large losses) and are fast, and now and then one that was never tried.

    With U_i the utility of client i when it was tried last, in round l_i, and s_i the seconds it took,

        score_i = (min(U_i, clip) - min U) / range + sqrt(0.1 ln t / l_i),   times (T / s_i)^penalty where s_i > T

    `exploration_factor` of the m clients, falling by `exploration_decay` each round down to `exploration_min`, are new
    ones. The others are drawn in proportion to their scores among those within `cut_off_util` of the m-th score. The
    options have the names of FedScale's configuration.

    Args:
        clients_per_round: how many count.
        exploration_factor: share of clients that were never tried, in the first round.
        exploration_decay: what it is multiplied with in every round.
        exploration_min: below which it does not fall.
        round_penalty: exponent of the penalty for clients slower than T.
        clip_bound: quantile at which utilities are clipped.
        cut_off_util: part of the m-th score from which clients are candidates (FedScale's configuration has 0.05).
        round_threshold: T is this percentile of the seconds that clients took.
        pacer_step: rounds after which the percentile is looked at: where the utility that rounds bring has changed by a
            tenth or less it rises, where by five times or more it falls.
        pacer_delta: by how much.
        sample_window: new clients are drawn among so many times as many, those worth most.
        over_selection: ask so many times more to train, and count the first `clients_per_round` that answer; `simulate`
            has `first` for that.
        deadline: count only those who answer within so many seconds of the simulated clock, inf for all;
            `simulate` has its own.
    """

    clients_per_round: Count = 10
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
    over_selection: AtLeastOne = 1.0
    deadline: Patience | None = None
    kind: Literal["oort"] = "oort"
    asks: ClassVar[tuple[str, ...]] = ("count",)
    reveals: ClassVar[tuple[str, ...]] = ("utility",)

    def init(self, fleet: Fleet) -> Tried:
        """How many rows those clients train on that are reachable before round 0; none was tried."""
        zeros = torch.zeros(len(fleet.clients), dtype=torch.float64)
        never = torch.zeros(len(fleet.clients), dtype=torch.int64)
        memo = Tried(zeros, zeros.clone(), zeros.clone(), never, zeros[:0].clone(), self.round_threshold)
        clients, said = told(fleet, "count")
        return replace(memo, reward=put(memo.reward, clients, said[:, -1].to(memo.reward)))

    def share(self, t: int) -> float:
        """The share of new clients in round `t`, from 1.

        >>> Oort().share(1), round(Oort().share(2), 3), Oort().share(1000)
        (0.9, 0.882, 0.3)
        """
        return max(
            self.exploration_factor * self.exploration_decay ** (t - 1),
            min(self.exploration_factor, self.exploration_min),
        )

    def pick(
        self,
        memo: Tried,
        fleet: Fleet,
        rng: Rng,
        served: Served | None,
        among: Tensor | None = None,
        m: int | None = None,
    ) -> Tensor:
        """`m` clients of `among`, sorted; all of them where there are no more."""
        among, m = (fleet.reachable if among is None else among).sort().values, asked(self) if m is None else m
        t = max(fleet.moment.round + 1, 1)
        if m >= len(among):
            return among
        tried, new = among[memo.last[among] > 0], among[memo.last[among] == 0]
        explored = min(math.floor(round(self.share(t) * m, 9)), len(new))
        exploited = min(m - explored, len(tried))
        best = self._best(memo, tried, exploited, t, rng.at("exploit"))
        fresh = self._fresh(memo, new, m - exploited, rng.at("explore"))
        return torch.cat([best, fresh]).sort().values

    def scores(self, memo: Tried, clients: Tensor, t: int) -> Tensor:
        """What clients that were tried are worth in round `t` (clients,)."""
        utility = memo.utility[clients]
        ordered = utility.sort().values
        clipped = utility.clamp(max=ordered[min(int(len(ordered) * self.clip_bound), len(ordered) - 1)])
        worth = (clipped - ordered[0]) / (ordered[-1] - ordered[0]).clamp(min=SMALLEST)
        stale = (0.1 * math.log(max(t, 1)) / memo.last[clients].clamp(min=1)).sqrt()
        return (worth + stale) * self._slowness(memo, clients)

    def preferred(self, memo: Tried) -> float:
        """T: seconds up to which no client is penalized."""
        known = memo.seconds[memo.seconds > 0].sort().values
        if memo.percent >= 100 or not len(known):
            return math.inf
        return float(known[min(int(len(known) * memo.percent / 100), len(known) - 1)])

    def _slowness(self, memo: Tried, clients: Tensor) -> Tensor:
        """1 for those that are fast enough or of unknown speed, less for the others."""
        seconds, preferred = memo.seconds[clients], self.preferred(memo)
        return torch.where(seconds > preferred, (preferred / seconds) ** self.round_penalty, 1.0)

    def _best(self, memo: Tried, clients: Tensor, k: int, t: int, rng: Rng) -> Tensor:
        """`k` of those that were tried, in proportion to their scores."""
        if not k:
            return clients[:0]
        score = self.scores(memo, clients, t)
        order = descending(score, rng.at("order"))
        order = order[score[order] >= self.cut_off_util * score[order[k - 1]]][: max(WIDEST * k, k)]
        return chosen(clients[order], score[order].log(), k, rng)

    def _fresh(self, memo: Tried, clients: Tensor, k: int, rng: Rng) -> Tensor:
        """`k` of those that were never tried, in proportion to what they promise."""
        reward = filled(memo.reward[clients], memo.reward[clients] > 0) * self._slowness(memo, clients)
        order = descending(reward, rng.at("order"))[: self.sample_window * k]
        return chosen(clients[order], reward[order].log(), k, rng)

    def learn(self, memo: Tried, reply: Reply, moment: Moment) -> Tried:
        """Take in what the clients that answered were worth (see `utility`), and how long they took."""
        if not len(reply.clients):
            return memo
        worth, t = reply.rows["utility"].flatten().to(memo.utility), moment.round + 1
        known = replace(
            memo,
            utility=put(memo.utility, reply.clients, worth),
            seconds=put(memo.seconds, reply.clients, reply.seconds.to(memo.seconds)),
            last=put(memo.last, reply.clients, torch.full_like(reply.clients, t)),
            sums=torch.cat([memo.sums, worth.sum().reshape(1)])[-2 * self.pacer_step :],
        )
        return replace(known, percent=self._paced(known, t))

    def _paced(self, memo: Tried, t: int) -> float:
        """The percentile after round `t`: slower clients are let in where rounds bring no more than before."""
        if t % self.pacer_step or len(memo.sums) < 2 * self.pacer_step:
            return memo.percent
        before, now = float(memo.sums[: self.pacer_step].sum()), float(memo.sums[self.pacer_step :].sum())
        if abs(now - before) <= FLAT * before:
            return min(memo.percent + self.pacer_delta, 100.0)
        lower = min(max(memo.percent - self.pacer_delta, self.pacer_delta), memo.percent)
        return lower if abs(now - before) >= STEEP * before else memo.percent


def utility(losses: Tensor, trained: int) -> Tensor:
    """Oort's utility of a client (1,): rows that it trains on times the root of their mean squared loss.

    Args:
        losses: (rows,) cross-entropy of its rows under the model that it received.
        trained: of how many of them a round makes use.

    >>> utility(torch.tensor([3.0, 4.0, 5.0, 5.0]), 2).tolist()
    [8.660254037844387]
    """
    return trained * losses.double().square().mean().sqrt().reshape(1) if len(losses) else torch.zeros(1).double()
