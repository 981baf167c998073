"""The protocol of cohorts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Protocol

from pydantic import Field
from torch import Tensor

from fedtide.core.rng import Rng
from fedtide.core.types import Fleet, Moment, Payload, Reply, Slot

Patience = Annotated[float, Field(strict=True, gt=0)]
"""Deadline in seconds; infinity waits for all clients, which is the default."""

Served = Callable[[Tensor], tuple[Payload, Slot | None]]
"""Models that some clients would be evaluated with now, for cohorts that ask for losses: `serve` with the state."""


class Picking(Protocol):
    """A selection of participants.

    asks: the questions that it asks, each also the name of the value revealed per client: "count", "labels", "loss".
    reveals: values that it needs from the answers to "train": () or ("utility",).
    """

    asks: tuple[str, ...]
    reveals: tuple[str, ...]

    def init(self, fleet: Fleet) -> Any:
        """Return the first memo; None if there is none."""

    def pick(
        self,
        memo: Any,
        fleet: Fleet,
        rng: Rng,
        served: Served | None,
        among: Tensor | None = None,
        m: int | None = None,
    ) -> Tensor:
        """Return the clients that participate, sorted.

        Args:
            memo: the cohort's memo.
            fleet: the clients.
            rng: the round's key.
            served: models that clients would be evaluated with now; None if there is no model yet.
            among: ids to choose from, sorted, for one cluster of several; None means all reachable clients.
            m: number of clients; None means the cohort's own number.
        """

    def learn(self, memo: Any, reply: Reply, moment: Moment) -> Any:
        """Return the memo after a round of training; called with the reply to "train", once a round."""


class Sized(Protocol):
    """A cohort with a fixed number of clients."""

    @property
    def clients_per_round(self) -> int:
        """Number of clients whose answers count."""

    @property
    def over_selection(self) -> float:
        """Factor on the number of clients asked."""


def asked(cohort: Sized) -> int:
    """Return the number of clients that a cohort asks: `over_selection` times those that count.

    >>> from fedtide.cohorts import Arrivals, Uniform
    >>> asked(Uniform(10, over_selection=1.3)), asked(Arrivals(10, over_selection=1.01))
    (13, 11)
    """
    return math.ceil(round(cohort.clients_per_round * cohort.over_selection, 9))
