"""Selection: which clients are asked, of those that could be, by what is known of them.

A selector is a value: `init(clients)` makes its memo, `pick(memo, rng, fleet, among, m)` chooses, `told` takes in what
clients said of themselves once, `learn` what a round showed. The memo holds tensors over all registered clients and is
part of the algorithm's state, so checkpoints keep it. `among` may be everyone reachable or the members of one cluster.

| kind | who is picked | what the server has to see of each client |
| --- | --- | --- |
| uniform | anyone | nothing |
| by-size | with probability proportional to rows | rows |
| oort | whose rows have large losses and who are fast; sometimes somebody new | rows, a loss statistic |
| nearest | who is like the center of `among` | a representation, here the shares of its labels |

Lai, Zhu, Madhyastha, Chowdhury: *Oort: Efficient Federated Learning via Guided Participant Selection*, OSDI 2021,
Algorithm 1, with what FedScale's code does where that says nothing.

Choices:
    Rounds are counted from 1, as `t` in the paper. A score's range is that of utilities before the largest are clipped.
    How long a client takes that was never tried is unknown, so it is not penalized unless the memo has its seconds. Of
    clients that are worth the same chance decides, not their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.config_types import Count, Fraction, NonNegative, Positive, ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Answer, Fleet, Moment, Shard, Work

SMALLEST = 1e-4
"""What a range of utilities is taken to be at least."""

WIDEST = 10
"""Candidates at most, for each client that is picked by its score."""

FLAT, STEEP = 0.1, 5.0
"""Relative changes of what rounds bring: up to the first the pacer lets slower clients in, from the second fewer."""

Need = Literal["", "count", "labels"]
"""The question that is asked of everyone before round 0, and the name of what it reveals."""


@dataclass(frozen=True)
class Known:
    """What clients said of themselves.

    Args:
        of: (clients, width); zero for whoever said nothing yet.
        heard: (clients,) bool, who did.
    """

    of: Tensor
    heard: Tensor


@dataclass(frozen=True)
class Tried:
    """What Oort knows of clients, all (clients,), and of past rounds.

    Args:
        reward: what a client is worth before it was tried: rows that it trains on; 0 where it said nothing.
        utility: what it was worth when it was tried last.
        seconds: how long it took then; 0 where that is unknown.
        last: the round in which it was tried last, from 1; 0 for never.
        sums: (rounds,) utility that each of the latest rounds brought.
        percent: the percentile of the seconds up to which nobody is penalized.
    """

    reward: Tensor
    utility: Tensor
    seconds: Tensor
    last: Tensor
    sums: Tensor
    percent: float


@ingredient
class AtRandom:
    """Anyone, each as likely as the others."""

    kind: Literal["uniform"] = "uniform"

    @property
    def needs(self) -> Need:
        """Nothing."""
        return ""

    @property
    def learns(self) -> bool:
        """Nothing."""
        return False

    def init(self, clients: int) -> None:
        """There is nothing to remember."""

    def told(self, memo: None, clients: Tensor, said: Tensor) -> None:
        """Nothing is kept."""

    def pick(self, memo: None, rng: Rng, fleet: Fleet, among: Tensor, m: int) -> Tensor:
        """`m` of `among`, sorted; all of them where there are no more."""
        return chosen(among, torch.zeros(len(among)), m, rng.at("select"))

    def learn(self, memo: None, clients: Tensor, utilities: Tensor, seconds: Tensor, round: int) -> None:
        """Nothing is kept."""


@ingredient
class BySize:
    """With probability proportional to the rows that a client said it has, without replacement.

    Whoever said nothing is taken to have as many as the others on average.
    """

    kind: Literal["by-size"] = "by-size"

    @property
    def needs(self) -> Need:
        """How many rows clients have."""
        return "count"

    @property
    def learns(self) -> bool:
        """Nothing."""
        return False

    def init(self, clients: int) -> Known:
        """Nobody said anything."""
        return _silent(clients, 1)

    def told(self, memo: Known, clients: Tensor, said: Tensor) -> Known:
        """Take in numbers of rows (clients, 1 or more); the first column counts."""
        return _heard(memo, clients, said[:, :1])

    def pick(self, memo: Known, rng: Rng, fleet: Fleet, among: Tensor, m: int) -> Tensor:
        """`m` of `among`, sorted; all of them where there are no more."""
        return chosen(among, filled(memo.of[among, 0], memo.heard[among]).log(), m, rng.at("select"))

    def learn(self, memo: Known, clients: Tensor, utilities: Tensor, seconds: Tensor, round: int) -> Known:
        """Nothing is learned."""
        return memo


@ingredient
class Nearest:
    """Those that are like the others: near the mean of what `among` said of themselves.

    Drawn without replacement with probability softmax(-distance / T), T being `temperature` times the median distance.
    The paper that compares this way gives no formula; this is ours.

    Args:
        temperature: 0 takes the nearest; the larger, the nearer to a uniform draw.
        distance: "l1" or "l2".
    """

    temperature: NonNegative = 1.0
    distance: Literal["l1", "l2"] = "l1"
    kind: Literal["nearest"] = "nearest"

    @property
    def needs(self) -> Need:
        """The shares of clients' labels; whoever has other representations may tell those instead."""
        return "labels"

    @property
    def learns(self) -> bool:
        """Nothing."""
        return False

    def init(self, clients: int) -> Known:
        """Nobody said anything."""
        return _silent(clients, 0)

    def told(self, memo: Known, clients: Tensor, said: Tensor) -> Known:
        """Take in representations (clients, width)."""
        return _heard(memo, clients, said)

    def pick(self, memo: Known, rng: Rng, fleet: Fleet, among: Tensor, m: int) -> Tensor:
        """`m` of `among`, sorted; all of them where there are no more. Whoever said nothing counts as the farthest."""
        far = self._distances(memo.of[among], memo.heard[among])
        heat = self.temperature * float(far.median()) if len(far) else 0.0
        if heat:
            return chosen(among, -far / heat, m, rng.at("select"))
        order = _descending(-far, rng.at("select"))
        return among[order[:m]].sort().values

    def _distances(self, of: Tensor, known: Tensor) -> Tensor:
        far = torch.zeros(len(of), dtype=torch.float64)
        if known.any():
            power = 1.0 if self.distance == "l1" else 2.0
            far[known] = torch.linalg.vector_norm(of[known] - of[known].mean(0), ord=power, dim=1)
            far[~known] = far[known].max()
        return far

    def learn(self, memo: Known, clients: Tensor, utilities: Tensor, seconds: Tensor, round: int) -> Known:
        """Nothing is learned."""
        return memo


@ingredient
class Oort:
    """Clients that matter (large losses) and are fast, and now and then somebody who was never tried.

    With U_i the utility of client i when it was tried last, in round l_i, and s_i the seconds it took,

        score_i = (min(U_i, clip) - min U) / range + sqrt(0.1 ln t / l_i),   times (T / s_i)^penalty where s_i > T

    `explore` of the m clients, falling by `decay` each round down to `least`, are new ones. The others are drawn in
    proportion to their scores among those within `cutoff` of the m-th score.

    Args:
        explore: share of clients that were never tried, in the first round.
        decay: what it is multiplied with in every round.
        least: below which it does not fall.
        penalty: exponent of the penalty for clients slower than T.
        clip: quantile at which utilities are clipped.
        cutoff: part of the m-th score from which clients are candidates (FedScale's configuration has 0.05).
        percent: T is this percentile of the seconds that clients took.
        pace: rounds after which the percentile is looked at: where the utility that rounds bring has changed by a tenth
            or less it rises, where by five times or more it falls.
        step: by how much.
        window: new clients are drawn among so many times as many, those worth most.
    """

    explore: Fraction = 0.9
    decay: Fraction = 0.98
    least: Fraction = 0.3
    penalty: NonNegative = 2.0
    clip: Fraction = 0.9
    cutoff: Fraction = 0.95
    percent: Annotated[float, Field(strict=True, gt=0, le=100)] = 30.0
    pace: Count = 20
    step: Positive = 5.0
    window: Count = 5
    kind: Literal["oort"] = "oort"

    @property
    def needs(self) -> Need:
        """How many rows clients train on."""
        return "count"

    @property
    def learns(self) -> bool:
        """What clients are worth, and how long they take."""
        return True

    def init(self, clients: int) -> Tried:
        """Nobody was tried."""
        zeros = torch.zeros(clients, dtype=torch.float64)
        never = torch.zeros(clients, dtype=torch.int64)
        return Tried(zeros, zeros.clone(), zeros.clone(), never, zeros[:0].clone(), self.percent)

    def told(self, memo: Tried, clients: Tensor, said: Tensor) -> Tried:
        """Take in numbers of rows (clients, 1 or more); the last column counts, rows that are trained on."""
        return replace(memo, reward=_put(memo.reward, clients, said[:, -1].to(memo.reward)))

    def share(self, t: int) -> float:
        """The share of new clients in round `t`, from 1.

        >>> Oort().share(1), round(Oort().share(2), 3), Oort().share(1000)
        (0.9, 0.882, 0.3)
        """
        return max(self.explore * self.decay ** (t - 1), min(self.explore, self.least))

    def pick(self, memo: Tried, rng: Rng, fleet: Fleet, among: Tensor, m: int) -> Tensor:
        """`m` of `among`, sorted; all of them where there are no more."""
        t, among = max(fleet.moment.round + 1, 1), among.sort().values
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
        clipped = utility.clamp(max=ordered[min(int(len(ordered) * self.clip), len(ordered) - 1)])
        worth = (clipped - ordered[0]) / (ordered[-1] - ordered[0]).clamp(min=SMALLEST)
        stale = (0.1 * math.log(max(t, 1)) / memo.last[clients].clamp(min=1)).sqrt()
        return (worth + stale) * self._slowness(memo, clients)

    def preferred(self, memo: Tried) -> float:
        """T: seconds up to which nobody is penalized."""
        known = memo.seconds[memo.seconds > 0].sort().values
        if memo.percent >= 100 or not len(known):
            return math.inf
        return float(known[min(int(len(known) * memo.percent / 100), len(known) - 1)])

    def _slowness(self, memo: Tried, clients: Tensor) -> Tensor:
        """1 for those that are fast enough or of unknown speed, less for the others."""
        seconds, preferred = memo.seconds[clients], self.preferred(memo)
        return torch.where(seconds > preferred, (preferred / seconds) ** self.penalty, 1.0)

    def _best(self, memo: Tried, clients: Tensor, k: int, t: int, rng: Rng) -> Tensor:
        """`k` of those that were tried, in proportion to their scores."""
        if not k:
            return clients[:0]
        score = self.scores(memo, clients, t)
        order = _descending(score, rng.at("order"))
        order = order[score[order] >= self.cutoff * score[order[k - 1]]][: max(WIDEST * k, k)]
        return chosen(clients[order], score[order].log(), k, rng)

    def _fresh(self, memo: Tried, clients: Tensor, k: int, rng: Rng) -> Tensor:
        """`k` of those that were never tried, in proportion to what they promise."""
        reward = filled(memo.reward[clients], memo.reward[clients] > 0) * self._slowness(memo, clients)
        order = _descending(reward, rng.at("order"))[: self.window * k]
        return chosen(clients[order], reward[order].log(), k, rng)

    def learn(self, memo: Tried, clients: Tensor, utilities: Tensor, seconds: Tensor, round: int) -> Tried:
        """Take in what a round showed; called once a round, with everyone who answered.

        Args:
            memo: what was known before.
            clients: ids of those whose answers counted.
            utilities: (clients,) what they were worth (see `utility`).
            seconds: (clients,) how long they took.
            round: counted from 0.
        """
        worth = utilities.flatten().to(memo.utility)
        sums = torch.cat([memo.sums, worth.sum().reshape(1)])[-2 * self.pace :]
        known = replace(
            memo,
            utility=_put(memo.utility, clients, worth),
            seconds=_put(memo.seconds, clients, seconds.to(memo.seconds)),
            last=_put(memo.last, clients, torch.full_like(clients, round + 1)),
            sums=sums,
        )
        return replace(known, percent=self._paced(known, round + 1))

    def _paced(self, memo: Tried, t: int) -> float:
        """The percentile after round `t`: slower clients are let in where rounds bring no more than before."""
        if t % self.pace or len(memo.sums) < 2 * self.pace:
            return memo.percent
        before, now = float(memo.sums[: self.pace].sum()), float(memo.sums[self.pace :].sum())
        if abs(now - before) <= FLAT * before:
            return min(memo.percent + self.step, 100.0)
        lower = min(max(memo.percent - self.step, self.step), memo.percent)
        return lower if abs(now - before) >= STEEP * before else memo.percent


Select = Annotated[AtRandom | BySize | Nearest | Oort, Field(discriminator="kind")]


# -- drawing ----------------------------------------------------------------------------------------------------------


def chosen(among: Tensor, likely: Tensor, m: int, rng: Rng) -> Tensor:
    """`m` of some clients, drawn one after the other in proportion to exp(`likely`), sorted.

    Those that have no chance (minus infinity) come when all others are taken, each as likely as the other.

    >>> chosen(torch.tensor([4, 7, 9]), torch.tensor([0.0, -torch.inf, 1.0]), 2, Rng(0)).tolist()
    [4, 9]
    """
    waits = rng.numpy().standard_exponential(len(among))  # the first of exponential times: draws without replacement
    key = np.log(waits) - likely.double().numpy()
    return among[torch.from_numpy(np.lexsort((waits, key))[:m])].sort().values


def _descending(values: Tensor, rng: Rng) -> Tensor:
    """Positions from the largest value to the smallest; chance orders equal ones."""
    mixed = torch.from_numpy(rng.numpy().permutation(len(values)))
    return mixed[values[mixed].argsort(descending=True, stable=True)]


def filled(values: Tensor, known: Tensor) -> Tensor:
    """Values (clients,) with the mean of those that are known in place of the others; ones where none is known."""
    return torch.where(known, values, values[known].mean() if known.any() else 1.0)


def _silent(clients: int, width: int) -> Known:
    return Known(torch.zeros(clients, width, dtype=torch.float64), torch.zeros(clients, dtype=torch.bool))


def _heard(memo: Known, clients: Tensor, said: Tensor) -> Known:
    """What was known with what `clients` said; where that has another width, what was known is forgotten."""
    memo = memo if memo.of.shape[1] == said.shape[1] else _silent(len(memo.of), said.shape[1])
    return Known(_put(memo.of, clients, said.to(memo.of)), memo.heard.index_fill(0, clients, True))


def _put(held: Tensor, clients: Tensor, values: Tensor) -> Tensor:
    return held.index_copy(0, clients, values)


# -- what clients say -------------------------------------------------------------------------------------------------


def utility(losses: Tensor, trained: int) -> Tensor:
    """Oort's utility of a client (1,): rows that it trains on times the root of their mean squared loss.

    Args:
        losses: (rows,) cross-entropy of its rows under the model that it received.
        trained: of how many of them a round makes use.

    >>> utility(torch.tensor([3.0, 4.0, 5.0, 5.0]), 2).tolist()
    [8.660254037844387]
    """
    return trained * losses.double().square().mean().sqrt().reshape(1) if len(losses) else torch.zeros(1).double()


def counting(trained: Callable[[Tensor], Tensor]) -> Work:
    """The question "count": rows that a client has, and of how many of them a round makes use; nothing without rows.

    Args:
        trained: rows -> those that local training makes use of.
    """

    def count(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        rows = torch.tensor([len(shard)])
        return Answer({}, {"count": torch.cat([rows, trained(rows)]).double()})

    return count


def labeled(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
    """The question "labels": the share of each of `payload["classes"]` among a client's labels that count."""
    y = shard.y if shard.mask is None else shard.y[shard.mask]
    if not y.numel():
        return None
    return Answer({}, {"labels": torch.bincount(y.flatten(), minlength=payload["classes"]).double() / y.numel()})


def introduced(select: Any, fleet: Fleet, payload: Any = None) -> Any:
    """The memo of a selector that has asked everyone reachable what it needs to know.

    Args:
        select: a selector.
        fleet: whose clients.
        payload: of the question; "labels" needs {"classes": how many}.
    """
    memo = select.init(len(fleet.clients))
    if not select.needs:
        return memo
    reply = fleet.ask(select.needs, fleet.reachable, payload, reveal=(select.needs,))
    return select.told(memo, reply.clients, reply.rows[select.needs]) if len(reply.clients) else memo
