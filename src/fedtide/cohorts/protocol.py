"""The protocol of cohorts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field
from torch import Tensor

from fedtide.core.base import Fleet, Moment, Payload, Reply, Slot
from fedtide.core.rng import Rng
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
