"""Arrivals drawn uniformly among all available clients, without replacement."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedtide.core.rng import Rng


def shares(sizes: np.ndarray) -> np.ndarray:
    """Return the expected share of each group among the arrivals (groups,): its share of the clients."""
    return sizes / sizes.sum()


def arrivals(m: int, groups: list[Tensor], rng: Rng) -> Tensor:
    """Return `m` clients in the order of arrival; `arrivals(m)` begins with `arrivals(m - 1)`."""
    return first_of(torch.cat(groups) if len(groups) > 1 else groups[0], m, rng.at("order"))


def reachable(groups: list[Tensor]) -> Tensor:
    """Return all clients, sorted."""
    return torch.cat(groups).sort().values


def first_of(clients: Tensor, m: int, rng: Rng) -> Tensor:
    """Return the first `m` of a random order of `clients` in O(m), by a truncated Fisher-Yates shuffle."""
    n = len(clients)
    m = min(m, n)
    picks = (rng.numpy().random(m) * (n - np.arange(m))).astype(np.int64) + np.arange(m)
    moved: dict[int, int] = {}
    out = np.empty(m, dtype=np.int64)
    for i, j in enumerate(picks.tolist()):
        out[i] = moved.get(j, j)
        moved[j] = moved.get(i, i)
    return clients[torch.from_numpy(out)]
