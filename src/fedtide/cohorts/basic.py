"""Cohorts that select without asking for more than a number of samples, and cohorts of your own code.

In turn: Malinovsky, Horváth, Burlachenko, Richtárik: *Federated Learning with Regularized Client Participation*, 2023
(arXiv 2302.03662). Each client takes part once in a meta-epoch, which is as many rounds as it takes to ask all.

When to use it: all clients should train equally often, and none should wait for long. If m of n clients are drawn,
a lap takes n / m rounds, and a turn comes at most two laps after the last. Clusters whose members the server does
not know, as in Fielding by sums, train in proportion to their size in every lap.

Choices:
    - ours: a lap has no fixed number of rounds, because clients come and go. Each lap has a new order.
    - ours: if too few clients wait, others fill up. Once one of these has answered a second time, a new lap begins.
    - ours: a client without an answer waits on, as a new client does.
    - ours: draws in several clusters share one lap, which ends when the first cluster is through. New clusters begin a
      new lap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtide.cohorts.protocol import Known, Patience, Picking, Serve, Sized, ask_sizes, draw_clients, log_sizes
from fedtide.core.base import Fleet, Moment, Reply
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.trees import per_client
from fedtide.fields.types import ingredient
from fedtide.fields.user_code import call


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
