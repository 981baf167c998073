"""In turn: reachable clients, each once before any has a second turn.

Malinovsky, Horváth, Burlachenko, Richtárik: *Federated Learning with Regularized Client Participation*, 2023
(arXiv 2302.03662): each client takes part once in a meta-epoch, which is as many rounds as it takes to ask all.

When to use it: all are to train equally often, and none to wait for long. Where m of n clients are drawn, a lap takes
n / m rounds, and a turn comes at most two laps after the last. Above all, clusters whose members the server does not
know, as in Fielding by sums, train in proportion to their size in every lap, and not only on average.

Choices:
    A lap, their meta-epoch, has no fixed rounds, as clients come and go, and a new order each time. Of the clients that
    are there those are drawn that have not had a turn in this lap. If they are too few, others fill up, and once one of
    these has answered a second time a new lap begins, in which it has had its turn. A client whose answer did not come
    waits on, as does one that is new. Draws in each of several clusters share one lap, which ends when the first is
    through; where Fielding clusters anew, a new lap begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedtide.cohorts.draw import draw_clients
from fedtide.cohorts.protocol import Serve, Sized
from fedtide.core.base import Fleet, Moment, Reply
from fedtide.core.ids import per_client
from fedtide.core.rng import Rng
from fedtide.fields.types import ingredient


@dataclass(frozen=True)
class Lap:
    """The memo.

    Args:
        waits: (clients,) bool, mask of clients that have not had a turn in this lap.
    """

    waits: Tensor = field(metadata=per_client(new=True))


@ingredient
class InTurn(Sized):
    """Clients drawn uniformly among those that have not had a turn, until all have; then a new lap begins."""

    kind: Literal["in-turn"] = "in-turn"

    def init(self, fleet: Fleet) -> Lap:
        """Return the memo of a lap in which all wait."""
        return Lap(torch.ones(len(fleet.clients), dtype=torch.bool))

    def renewed(self, memo: Lap) -> Lap:
        """Return the memo of a lap in which all wait, as models have other members now."""
        return Lap(torch.ones_like(memo.waits))

    def pick(
        self, memo: Lap, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor | None = None, m: int | None = None
    ) -> Tensor:
        """Return `m` clients of `among`, sorted, first those that wait; all if there are no more."""
        among = fleet.reachable if among is None else among
        first = memo.waits[among].double().log()
        return draw_clients(among, first, self.asked() if m is None else m, rng.at("select"))

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
