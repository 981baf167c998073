"""The protocol of cohorts, and all their kinds.

In turn: Malinovsky, Horváth, Burlachenko, Richtárik: *Federated Learning with Regularized Client Participation*, 2023
(arXiv 2302.03662). Each client takes part once in a meta-epoch, which is as many rounds as it takes to ask all.
Power-of-choice: Cho, Wang, Joshi: *Towards Understanding Biased Client Selection in Federated Learning*, AISTATS 2022,
section 4 (`pi_pow-d`; `pi_cpow-d` and `pi_rpow-d` are not here): the candidates are drawn by size.

When to use in-turn: all clients should train equally often, and none should wait for long. If m of n clients are drawn,
a lap takes n / m rounds, and a turn comes at most two laps after the last. Clusters whose members the server does
not know, as in Fielding by sums, train in proportion to their size in every lap.

When to use power-of-choice: rounds are few and clients differ. With d = m it is a draw by size; with larger d it
converges sooner and ends farther from the optimum of the mean loss.

Choices of in-turn:
    - ours: a lap has no fixed number of rounds, because clients come and go. Each lap has a new order.
    - ours: if too few clients wait, others fill up. Once one of these has answered a second time, a new lap begins.
    - ours: a client without an answer waits on, as a new client does.
    - ours: draws in several clusters share one lap, which ends when the first cluster is through. New clusters begin a
      new lap.

Choices of power-of-choice:
    - paper: the mean over participants is uniform: `weighting = "uniform"` of the method.
    - ours: the loss is plain cross-entropy on all training samples, of the model that the client would be evaluated
      with. Ties are broken at random.
    - ours: a candidate that does not answer is not picked. Before there is a model, m are drawn by size.
    - ours: clients are asked for their number of samples before round 0. Others count as having the mean.
    - ours: the losses cost a question each round, in bytes and in seconds of passes over a client's samples.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.base import Fleet, Moment, Payload, Reply, Slot
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.trees import per_client
from fedtide.fields.types import AtLeastOne, Count, Fraction, NonNegative, Positive, ingredient
from fedtide.fields.user_code import call

Size = Annotated[Count, Field(description="number of clients whose answers count.")]
Surplus = Annotated[
    AtLeastOne, Field(description="factor on the clients asked to train; the first `clients_per_round` answers count.")
]
Patience = Annotated[
    float,
    Field(
        strict=True,
        gt=0,
        description="seconds of the simulated clock after which answers do not count; inf for none, the default.",
    ),
]
"""Deadline; infinity lets a method wait for all clients where the others do not."""

Serve = Callable[[Tensor], tuple[Payload, Slot | None]] | None
"""Models that some clients would be evaluated with now, for cohorts that ask for losses: `serve` of an algorithm with
its state; None if there is no model yet."""


class Picking(Protocol):
    """A selection of participants; by default of all clients there, without questions and without a memo."""

    asks: ClassVar[tuple[str, ...]] = ()
    """Questions of the cohort, each also the name of the value revealed per client: "count", "labels", "loss"."""
    reveals: ClassVar[tuple[str, ...]] = ()
    """Values that it needs from the answers to "train": () or ("utility",)."""
    clients_per_round: int | None = None
    """Number of clients whose answers count, of a cohort `Poisson` the expected one; None for all."""
    over_selection: float = 1.0
    """Factor on that number: the clients that are asked."""
    deadline: float | None = None
    """Seconds after which answers do not count; None and infinity for none."""

    def init(self, fleet: Fleet) -> Any:
        """Return the first memo; None if there is none."""
        return None

    def renewed(self, memo: Any) -> Any:
        """Return the memo once clusters have been made anew."""
        return memo

    def pick(
        self, memo: Any, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor | None = None, m: int | None = None
    ) -> Tensor:
        """Return the clients that participate, sorted.

        Args:
            memo: the cohort's memo.
            rng: the round's key.
            serve: models that clients would be evaluated with now; None if there is no model yet.
            among: ids to choose from, sorted, for one cluster of several; None means all reachable clients.
            m: number of clients; None means the cohort's own number.
        """
        among = fleet.reachable if among is None else among
        return self.select(memo, fleet, rng, serve, among, self.asked(len(among)) if m is None else m)

    def select(self, memo: Any, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor, m: int) -> Tensor:
        """Return the clients that participate, as `pick`; by default all of those to choose from."""
        return among

    def learn(self, memo: Any, reply: Reply, moment: Moment) -> Any:
        """Return the memo after a round of training; called with the reply to "train", once a round."""
        return memo

    def asked(self, reachable: int = 0) -> int:
        """Return the number of clients to ask: `over_selection` times those that count; without a number all.

        >>> from fedtide.cohorts import Arrivals, Everyone, Uniform
        >>> Uniform(10, over_selection=1.3).asked(), Arrivals(10, over_selection=1.01).asked(), Everyone().asked(20)
        (13, 11, 20)
        """
        size = self.clients_per_round
        return reachable if size is None else math.ceil(round(size * self.over_selection, 9))


@ingredient
class Sized(Picking):
    """A selection of a fixed number of participants."""

    clients_per_round: Size = 10
    over_selection: Surplus = 1.0
    deadline: Patience | None = None


@dataclass(frozen=True)
class Known:
    """Reports of clients.

    Args:
        of: (clients, width) reports; zero for a client without one.
        heard: (clients,) bool, mask of clients that reported.
    """

    of: Tensor = field(metadata=per_client(new=0.0))
    heard: Tensor = field(metadata=per_client(new=False))


def no_reports(clients: int, width: int) -> Known:
    """Return the memo without reports."""
    return Known(torch.zeros(clients, width, dtype=torch.float64), torch.zeros(clients, dtype=torch.bool))


def with_reports(memo: Known, clients: Tensor, reports: Tensor) -> Known:
    """Add reports of `clients` to a memo; reports of another width replace it."""
    memo = memo if memo.of.shape[1] == reports.shape[1] else no_reports(len(memo.of), reports.shape[1])
    return Known(memo.of.index_copy(0, clients, reports.to(memo.of)), memo.heard.index_fill(0, clients, True))


def ask_reachable(fleet: Fleet, question: str) -> tuple[Tensor, Tensor]:
    """Ask a question of all reachable clients; return those that answer (n,) and their answers (n, width)."""
    reply = fleet.ask(question, fleet.reachable, None, reveal=(question,))
    return reply.clients, reply.rows[question] if len(reply.clients) else torch.zeros(0, 1, dtype=torch.float64)


def ask_sizes(fleet: Fleet) -> Known:
    """Ask clients for their number of samples: the memo of cohorts that draw in proportion to size."""
    clients, answers = ask_reachable(fleet, "count")
    return with_reports(no_reports(len(fleet.clients), 1), clients, answers[:, :1])


def log_sizes(memo: Known, among: Tensor) -> Tensor:
    """Return log-weights (n,) in proportion to samples; a client without a report counts as having the mean."""
    return fill_unknown(memo.of[among, 0], memo.heard[among]).log()


def fill_unknown(values: Tensor, reported: Tensor) -> Tensor:
    """Fill unknown values (clients,) with the mean of the known ones; with 1 if none is known."""
    return torch.where(reported, values, values[reported].mean() if reported.any() else 1.0)


def draw_clients(among: Tensor, likely: Tensor, m: int, rng: Rng) -> Tensor:
    """Draw `m` clients without replacement in proportion to exp(`likely`), sorted.

    Those of probability zero (minus infinity) are drawn uniformly once all others are taken. A client's random number
    depends on its id alone. With equal weights, draws in several clusters first take those that a draw among all would.

    >>> draw_clients(torch.tensor([4, 7, 9]), torch.tensor([0.0, -torch.inf, 1.0]), 2, Rng(0)).tolist()
    [4, 9]
    """
    times = rng.numpy().standard_exponential(int(among.max()) + 1 if len(among) else 0)
    waits = times[among.numpy()]  # the first of exponential times: draws without replacement
    key = np.log(waits) - likely.double().numpy()
    return among[torch.from_numpy(np.lexsort((waits, key))[:m])].sort().values


def descending(values: Tensor, rng: Rng) -> Tensor:
    """Return positions from the largest value to the smallest; ties are broken at random."""
    mixed = torch.from_numpy(rng.numpy().permutation(len(values)))
    return mixed[values[mixed].argsort(descending=True, stable=True)]


# -- kinds ------------------------------------------------------------------------------------------------------------


@ingredient
class Arrivals(Sized):
    """Clients that the shift sends in this round: the same for every method of an experiment.

    If a method selects in each of its clusters, those that arrived participate, whatever their cluster.
    """

    kind: Literal["arrivals"] = "arrivals"

    def pick(
        self, memo: None, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor | None = None, m: int | None = None
    ) -> Tensor:
        """Return the clients of `among` that arrived; their number is up to the shift, not to `m`."""
        arrivals = fleet.arrivals(self.asked())
        return arrivals if among is None else arrivals[torch.isin(arrivals, among)]


@ingredient
class Everyone(Picking):
    """All clients that are reachable now."""

    deadline: Patience | None = None
    kind: Literal["everyone"] = "everyone"


@ingredient
class Uniform(Sized):
    """Clients drawn uniformly, without replacement, among those that are reachable now."""

    kind: Literal["uniform"] = "uniform"

    def select(self, memo: None, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor, m: int) -> Tensor:
        """Return `m` clients of `among`, sorted; all if there are no more."""
        return draw_clients(among, torch.zeros(len(among)), m, rng.at("select"))


@ingredient
class Poisson(Picking):
    """Clients that come independently of each other, each with the same probability.

    The probability is `clients_per_round` over the number of reachable clients, so the number that comes is random.
    With `[wire.privacy]` the same noise gives a smaller epsilon than with `uniform`, because no client takes the place
    of another one. The number that comes is then secret, and sums are divided by the average. `[wire.privacy]` refuses
    this cohort if clients come by a clock or are real.

    Args:
        clients_per_round: number of clients that come on average.
    """

    clients_per_round: Size = 10
    kind: Literal["poisson"] = "poisson"

    def select(self, memo: None, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor, m: int) -> Tensor:
        """Return the clients of `among` whose coin shows heads, sorted; `m` on average."""
        tosses = rng.at("select").numpy().random(int(among.max()) + 1 if len(among) else 0)
        return among[torch.from_numpy(tosses)[among] * len(among) < m]


@ingredient
class BySize(Sized):
    """Selection with probability proportional to the reported number of samples, without replacement.

    A client that reported nothing counts as having the mean of the others.
    """

    kind: Literal["by-size"] = "by-size"
    asks: ClassVar[tuple[str, ...]] = ("count",)

    def init(self, fleet: Fleet) -> Known:
        """Ask the clients that are reachable before round 0 for their number of samples."""
        return ask_sizes(fleet)

    def select(self, memo: Known, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor, m: int) -> Tensor:
        """Return `m` clients of `among`, sorted; all if there are no more."""
        return draw_clients(among, log_sizes(memo, among), m, rng.at("select"))


@dataclass(frozen=True)
class Lap:
    """The memo of `InTurn`. waits: (clients,) mask of clients that have not had a turn in this lap."""

    waits: Tensor = field(metadata=per_client(new=True))


@ingredient
class InTurn(Sized):
    """Clients drawn uniformly among those that have not had a turn, until all have; then a new lap begins."""

    kind: Literal["in-turn"] = "in-turn"

    def init(self, fleet: Fleet) -> Lap:
        """Return the memo of a lap in which all wait."""
        return Lap(torch.ones(len(fleet.clients), dtype=torch.bool))

    def renewed(self, memo: Lap) -> Lap:
        """Return the memo of a lap in which all wait, because models have other members now."""
        return Lap(torch.ones_like(memo.waits))

    def select(self, memo: Lap, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor, m: int) -> Tensor:
        """Return `m` clients of `among`, sorted, first those that wait; all if there are no more."""
        return draw_clients(among, memo.waits[among].double().log(), m, rng.at("select"))

    def learn(self, memo: Lap, reply: Reply, moment: Moment) -> Lap:
        """Return the memo after a round of training.

        >>> from fedtide.core.base import Cost
        >>> def after(lap, *clients):
        ...     ids = torch.tensor(clients)
        ...     return InTurn().learn(lap, Reply(None, {}, ids, torch.zeros(len(ids)), Cost()), Moment(0, 9))
        >>> lap = after(Lap(torch.ones(5, dtype=torch.bool)), 0, 3)
        >>> lap.waits.tolist()
        [False, True, True, False, True]
        >>> after(after(lap, 1, 4), 2, 3).waits.tolist()
        [True, True, True, False, True]
        """
        again = reply.clients[~memo.waits[reply.clients]]
        if len(again):
            return Lap(torch.ones_like(memo.waits).index_fill(0, again, False))
        return Lap(memo.waits.index_fill(0, reply.clients, False))


@dataclass(frozen=True)
class PickedBy(Picking):
    """A cohort by a function of the clients that are reachable, the moment and a key.

    It needs no memo and asks clients for nothing; a cohort that does is a class with the methods of `Picking`.

    Args:
        picked: (reachable clients, sorted; number of clients; moment; key) -> ids of those that participate.
        clients_per_round: number of clients per round; clusters that select their own get a part of it.
    """

    picked: Callable[[Tensor, int, Moment, Rng], Any]
    clients_per_round: int = 10

    def select(self, memo: None, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor, m: int) -> Tensor:
        """Return the clients that the function selects, sorted; see `choose`."""
        return self.choose(among, m, fleet.moment, rng) if m else among[:0]

    def choose(self, among: Tensor, m: int, moment: Moment, rng: Rng) -> Tensor:
        """Return the clients that the function selects, sorted.

        Raises:
            FedtideError: the function does not return distinct ids of the clients that it was given.
        """
        key, allowed = "cohort.function", "ids of the clients that it is given, each once"
        answer = call(self.picked, key, among, m, moment, rng.at("cohort"))
        try:
            ids = torch.as_tensor(answer).flatten()
        except (RuntimeError, TypeError, ValueError):
            raise refused(key, answer, allowed) from None
        clients = ids.long().unique()  # sorted
        if len(clients) < len(ids) or not torch.isin(clients, among).all():
            raise refused(key, ids.tolist(), allowed)
        return clients


@ingredient
class Nearest(Sized):
    """Clients near the mean representation of `among`: label distributions, or representations given by a method.

    Drawn without replacement with probability softmax(-distance / T), T being `temperature` times the median distance.
    The paper that compares this way (Fielding) gives no formula; this is ours. Label distributions of many labels are
    about equally far from their mean: a temperature of 1 is hardly other than a uniform draw. With a few hundredths
    about half of those drawn are of the nearest fifth.

    Args:
        temperature: 0 takes the nearest; the larger, the closer to a uniform draw.
        distance: "l1" or "l2".
    """

    temperature: NonNegative = 1.0
    distance: Literal["l1", "l2"] = "l1"
    kind: Literal["nearest"] = "nearest"
    asks: ClassVar[tuple[str, ...]] = ("labels",)

    def init(self, fleet: Fleet) -> Known:
        """Ask the clients that are reachable before round 0 for their label distributions."""
        clients, reports = ask_reachable(fleet, "labels")
        memo = no_reports(len(fleet.clients), 0)
        return with_reports(memo, clients, reports) if len(clients) else memo

    def select(self, memo: Known, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor, m: int) -> Tensor:
        """Return `m` clients of `among`, sorted; all if there are no more. Clients without a report are farthest."""
        far = self._distances(memo.of[among], memo.heard[among])
        heat = self.temperature * float(far.median()) if len(far) else 0.0
        if heat:
            return draw_clients(among, -far / heat, m, rng.at("select"))
        order = descending(-far, rng.at("select"))
        return among[order[:m]].sort().values

    def _distances(self, of: Tensor, reported: Tensor) -> Tensor:
        far = torch.zeros(len(of), dtype=torch.float64)
        if reported.any():
            power = 1.0 if self.distance == "l1" else 2.0
            far[reported] = torch.linalg.vector_norm(of[reported] - of[reported].mean(0), ord=power, dim=1)
            far[~reported] = far[reported].max()
        return far


@ingredient
class PowerOfChoice(Sized):
    """The clients with the largest losses among `d` candidates drawn in proportion to their samples.

    Args:
        d: number of candidates asked for their loss, in each cluster of Fielding; at least the number of clients
            picked. None means twice that number.
    """

    d: Count | None = None
    kind: Literal["power-of-choice"] = "power-of-choice"
    asks: ClassVar[tuple[str, ...]] = ("count", "loss")

    def init(self, fleet: Fleet) -> Known:
        """Ask the clients that are reachable before round 0 for their number of samples."""
        return ask_sizes(fleet)

    def select(self, memo: Known, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor, m: int) -> Tensor:
        """Return the `m` candidates with the largest reported losses, sorted."""
        if not m:
            return among[:0]  # of a cluster without a place no client is asked
        d = m if serve is None else max(2 * m if self.d is None else self.d, m)
        candidates = draw_clients(among, log_sizes(memo, among), d, rng.at("candidates"))
        if serve is None or len(candidates) <= m:
            return candidates
        payload, slot = serve(candidates)
        reply = fleet.ask("loss", candidates, payload, slot=slot, reveal=("loss",))
        if not len(reply.clients):
            return reply.clients
        order = descending(reply.rows["loss"].flatten(), rng.at("ties"))
        return reply.clients[order[:m]].sort().values


SMALLEST = 1e-4
"""Lower bound on the range of utilities."""

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
    ones. The k others are drawn in proportion to their scores among those with at least `cut_off_util` times the k-th
    score (Lai et al., OSDI 2021, Algorithm 1). The options have the names of FedScale's configuration.

    FedScale differs: its range of utilities has the samples of clients that were never tried, too, and T is of all
    registered clients. Its pacer compares mean utilities of the clients that were drawn by score.

    Args:
        exploration_factor: share of clients that were never tried, in the first round.
        exploration_decay: factor on that share in every round.
        exploration_min: lower bound on that share.
        round_penalty: exponent of the penalty for clients slower than T.
        clip_bound: quantile at which utilities are clipped.
        cut_off_util: fraction of the k-th score from which clients are candidates (FedScale's configuration has 0.05).
        least_candidates: more than this many times k clients are candidates, whatever their scores (FedScale: 10).
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
    least_candidates: NonNegative = 0.0
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
        near = score[order] >= self.cut_off_util * score[order[k - 1]]
        order = order[near | (torch.arange(len(order)) <= self.least_candidates * k)]
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
