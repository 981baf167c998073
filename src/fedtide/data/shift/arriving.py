"""Interface of `who`, with the defaults of most kinds: a uniform order of arrival among all available clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fedtide.core.rng import Rng
from fedtide.data.shift.what.plan import PopulationView, Rhythm


class Arriving(Protocol):
    """Available clients and their order of arrival; `groups` are those clients, by their group."""

    dropout_rate: float
    """Share of the asked clients that never answer."""
    changes: ClassVar[bool] = True
    """Tell whether availability depends on the time."""
    by_rows: ClassVar[bool] = False
    """Tell whether only clients to which rows come in the round arrive."""
    recorded: ClassVar[bool] = False
    """Tell whether arrivals are those of another run, from which clients without rows are removed afterwards."""

    def check(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Raise if the settings do not fit the groups with these names and numbers of clients."""
        return

    def plan(self, view: PopulationView) -> Any:
        """Build the plan of the clients' availability (`awake`, `wait`); None if all are always available."""
        return None

    def shares(self, time: float, sizes: np.ndarray) -> np.ndarray:
        """Return the expected share of each group among the arrivals (groups,); the shares sum to 1."""
        return np.asarray(sizes / sizes.sum())

    def arrivals(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """Return `m` clients in the order of arrival; `arrivals(m)` begins with `arrivals(m - 1)`."""
        return first_of(torch.cat(groups) if len(groups) > 1 else groups[0], m, rng.at("order"))

    def substituted(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> int:
        """Count the arrivals among `m` that replace clients of an exhausted group."""
        return 0

    def reachable(self, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """Return a prefix of the order of arrival, sorted."""
        return torch.cat(groups).sort().values

    def rhythm(self, turns: int) -> Rhythm:
        """Return the rhythm that a method may know, on the shift's clock, with a number of turns per period."""
        return {}

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the settings in sentences for a report, each followed by a space."""
        return ""


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
