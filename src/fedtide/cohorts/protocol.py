"""What every cohort can do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Protocol

from pydantic import Field
from torch import Tensor

from fedtide.core.rng import Rng
from fedtide.core.types import Fleet, Moment, Payload, Reply, Slot

Patience = Annotated[float, Field(strict=True, gt=0)]
"""Seconds; infinity waits for all clients, as where nothing is said."""

Served = Callable[[Tensor], tuple[Payload, Slot | None]]
"""What some clients would be judged with now, for cohorts that ask for losses: `serve` with the state as it is."""


class Picking(Protocol):
    """A way to choose who takes part.

    asks: the questions that it asks, each also the name of what the server then sees of a client: "count", "labels",
    "loss". reveals: what it has to see in the answers to "train": () or ("utility",).
    """

    asks: tuple[str, ...]
    reveals: tuple[str, ...]

    def init(self, fleet: Fleet) -> Any:
        """The first memo; None where nothing is remembered."""

    def pick(
        self,
        memo: Any,
        fleet: Fleet,
        rng: Rng,
        served: Served | None,
        among: Tensor | None = None,
        m: int | None = None,
    ) -> Tensor:
        """The clients that take part, sorted.

        Args:
            memo: what is known of clients.
            fleet: whose clients.
            rng: the round's key.
            served: what clients would be judged with now; None where there is no model yet.
            among: ids to choose from, sorted, for one cluster of several; None means all that are reachable.
            m: how many; None means as many as the cohort asks for.
        """

    def learn(self, memo: Any, reply: Reply, moment: Moment) -> Any:
        """The memo after a round of training; called with the reply to "train", once a round."""


class Sized(Protocol):
    """A cohort with a number of clients."""

    @property
    def clients_per_round(self) -> int:
        """How many count."""

    @property
    def over_selection(self) -> float:
        """How many times more are asked."""


def asked(cohort: Sized) -> int:
    """How many clients a cohort asks: `over_selection` times those that it counts.

    >>> from fedtide.cohorts import Arrivals, Uniform
    >>> asked(Uniform(10, over_selection=1.3)), asked(Arrivals(10, over_selection=1.01))
    (13, 11)
    """
    return math.ceil(round(cohort.clients_per_round * cohort.over_selection, 9))
