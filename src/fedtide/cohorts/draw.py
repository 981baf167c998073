"""Drawing clients, and what clients said of themselves: what several cohorts share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedtide.core.rng import Rng
from fedtide.core.types import Fleet


@dataclass(frozen=True)
class Known:
    """What clients said of themselves.

    Args:
        of: (clients, width); zero for a client that said nothing yet.
        heard: (clients,) bool, which clients did.
    """

    of: Tensor
    heard: Tensor


def silent(clients: int, width: int) -> Known:
    """The memo before any client said anything."""
    return Known(torch.zeros(clients, width, dtype=torch.float64), torch.zeros(clients, dtype=torch.bool))


def heard(memo: Known, clients: Tensor, said: Tensor) -> Known:
    """What was known with what `clients` said; where that has another width, what was known is forgotten."""
    memo = memo if memo.of.shape[1] == said.shape[1] else silent(len(memo.of), said.shape[1])
    return Known(put(memo.of, clients, said.to(memo.of)), memo.heard.index_fill(0, clients, True))


def told(fleet: Fleet, question: str) -> tuple[Tensor, Tensor]:
    """The clients (n,) that answer a question that is asked of all reachable ones, and what each says (n, width)."""
    reply = fleet.ask(question, fleet.reachable, None, reveal=(question,))
    return reply.clients, reply.rows[question] if len(reply.clients) else torch.zeros(0, 1, dtype=torch.float64)


def sizes(fleet: Fleet) -> Known:
    """How many rows clients say that they have: the memo of cohorts that draw in proportion to rows."""
    clients, said = told(fleet, "count")
    return heard(silent(len(fleet.clients), 1), clients, said[:, :1])


def by_size(memo: Known, among: Tensor) -> Tensor:
    """Log-chances (n,) in proportion to rows; a client that said nothing counts as having the mean."""
    return filled(memo.of[among, 0], memo.heard[among]).log()


def filled(values: Tensor, known: Tensor) -> Tensor:
    """Values (clients,) with the mean of those that are known in place of the others; ones where none is known."""
    return torch.where(known, values, values[known].mean() if known.any() else 1.0)


def put(held: Tensor, clients: Tensor, values: Tensor) -> Tensor:
    """`held` (registered,) with new values for some clients."""
    return held.index_copy(0, clients, values)


def chosen(among: Tensor, likely: Tensor, m: int, rng: Rng) -> Tensor:
    """`m` of some clients, drawn one after the other in proportion to exp(`likely`), sorted.

    Those that have no chance (minus infinity) come when all others are taken, each as likely as the other.

    >>> chosen(torch.tensor([4, 7, 9]), torch.tensor([0.0, -torch.inf, 1.0]), 2, Rng(0)).tolist()
    [4, 9]
    """
    waits = rng.numpy().standard_exponential(len(among))  # the first of exponential times: draws without replacement
    key = np.log(waits) - likely.double().numpy()
    return among[torch.from_numpy(np.lexsort((waits, key))[:m])].sort().values


def descending(values: Tensor, rng: Rng) -> Tensor:
    """Positions from the largest value to the smallest; ties are broken at random."""
    mixed = torch.from_numpy(rng.numpy().permutation(len(values)))
    return mixed[values[mixed].argsort(descending=True, stable=True)]
