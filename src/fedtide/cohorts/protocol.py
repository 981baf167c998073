"""The protocol of cohorts, and what several share: memos of reports of clients, and random draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.base import Fleet, Moment, Payload, Reply, Slot
from fedtide.core.rng import Rng
from fedtide.core.trees import per_client
from fedtide.fields.types import AtLeastOne, Count, ingredient

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
    recorded: ClassVar[tuple[str, ...]] = ()
    """Those of them that need not be asked where a method records reports of its own (`record`)."""
    reveals: ClassVar[tuple[str, ...]] = ()
    """Values that it needs from the answers to "train": () or ("utility",)."""
    clients_per_round: int | None = None
    """Number of clients whose answers count; None for all."""
    over_selection: float = 1.0
    """Factor on that number: the clients that are asked."""
    deadline: float | None = None
    """Seconds after which answers do not count; None and infinity for none."""

    def init(self, fleet: Fleet) -> Any:
        """Return the first memo; None if there is none."""
        return None

    def init_unasked(self, fleet: Fleet) -> Any:
        """Return the first memo for a method that records reports of its own (`record`)."""
        return self.init(fleet)

    def record(self, memo: Any, clients: Tensor, reports: Tensor) -> Any:
        """Return the memo after reports (n, width) of some clients (n,) to a method that compares clients by them."""
        return memo

    def renewed(self, memo: Any) -> Any:
        """Return the memo once clusters have been made anew."""
        return memo

    def pick(
        self, memo: Any, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor | None = None, m: int | None = None
    ) -> Tensor:
        """Return the clients that participate, sorted.

        Args:
            memo: the cohort's memo.
            fleet: the clients.
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
