"""The simulated clock: how long answers and rounds take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedtide.core.types import Moment


class Clock(Protocol):
    """How long things take on the simulated clock."""

    def answers(self, clients: Tensor, moment: Moment, down: int) -> Tensor:
        """Seconds until each of `clients` would have answered (clients,), having received `down` bytes."""

    def round(self, asks: Sequence[float]) -> float:
        """Seconds that a round took whose asks took so long each."""


@dataclass(frozen=True)
class SteadyClock:
    """Every round takes the same time, whoever takes part."""

    seconds: float = 1.0

    def answers(self, clients: Tensor, moment: Moment, down: int) -> Tensor:
        """The same for everyone."""
        return torch.full((len(clients),), self.seconds, dtype=torch.float64)

    def round(self, asks: Sequence[float]) -> float:
        """Always the same."""
        return self.seconds
