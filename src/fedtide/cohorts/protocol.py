"""The protocol of cohorts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field
from torch import Tensor

from fedtide.core.rng import Rng
from fedtide.core.types import Fleet, Moment, Payload, Reply, Slot

Patience = Annotated[float, Field(strict=True, gt=0)]
"""Deadline in seconds; infinity waits for all clients, which is the default."""

Serve = Callable[[Tensor], tuple[Payload, Slot | None]] | None
"""Models that some clients would be evaluated with now, for cohorts that ask for losses: `serve` of an algorithm with
its state; None if there is no model yet."""


class Picking(Protocol):
    """A selection of participants.

    A cohort with a fixed number of clients also has `clients_per_round`, and may have `over_selection` and `deadline`.
    """

    @property
    def asks(self) -> tuple[str, ...]:
        """Questions of the cohort, each also the name of the value revealed per client: "count", "labels", "loss"."""

    @property
    def reveals(self) -> tuple[str, ...]:
        """Values that it needs from the answers to "train": () or ("utility",)."""

    def init(self, fleet: Fleet) -> Any:
        """Return the first memo; None if there is none."""

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

    def learn(self, memo: Any, reply: Reply, moment: Moment) -> Any:
        """Return the memo after a round of training; called with the reply to "train", once a round."""


class Memoless:
    """A cohort that learns nothing from a round; by default it asks clients for nothing and has no memo."""

    asks: ClassVar[tuple[str, ...]] = ()
    reveals: ClassVar[tuple[str, ...]] = ()

    def init(self, fleet: Fleet) -> Any:
        """Return the first memo: None."""

    def learn(self, memo: Any, reply: Reply, moment: Moment) -> Any:
        """Return the memo unchanged."""
        return memo


def asked(cohort: Any, there: int = 0) -> int:
    """Return the number of clients that a cohort asks: `over_selection` times those that count.

    Args:
        cohort: the selection of participants.
        there: number of clients to choose from, which a cohort without a fixed number asks all.

    >>> from fedtide.cohorts import Arrivals, Everyone, Uniform
    >>> asked(Uniform(10, over_selection=1.3)), asked(Arrivals(10, over_selection=1.01)), asked(Everyone(), 20)
    (13, 11, 20)
    """
    size = getattr(cohort, "clients_per_round", None)
    return there if size is None else math.ceil(round(size * getattr(cohort, "over_selection", 1.0), 9))
