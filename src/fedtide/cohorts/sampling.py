"""Random draws of clients and memos of their reports, shared by several cohorts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import Fleet
from fedtide.core.rng import Rng
from fedtide.core.trees import per_client


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
