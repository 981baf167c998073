"""The simulated clock: how long answers and rounds take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedtide.core.types import Effort
from fedtide.fleets.ask import Ask


class Clock(Protocol):
    """How long things take on the simulated clock."""

    def answers(self, ask: Ask, rows: Tensor, down: int, up: int) -> Tensor:
        """Seconds until each client would have answered (clients,), in float64.

        Args:
            ask: what is asked, and the clients.
            rows: (clients,) training rows that each holds.
            down: bytes that each receives.
            up: bytes that each sends.
        """

    def round(self, asks: Sequence[float], server: float = 0.0) -> float:
        """Seconds that a round took whose asks took so long each, and the server's own work so long."""


@dataclass(frozen=True)
class SteadyClock:
    """Every round takes equally long, however many clients take part."""

    seconds: float = 1.0

    def answers(self, ask: Ask, rows: Tensor, down: int, up: int) -> Tensor:
        """Return the seconds of a round for each."""
        return torch.full((len(ask.clients),), self.seconds, dtype=torch.float64)

    def round(self, asks: Sequence[float], server: float = 0.0) -> float:
        """Return the seconds of a round."""
        return self.seconds


@dataclass(frozen=True)
class DeviceClock:
    """Every client is a device of its own speed, on a line of its own.

    An answer takes `compute_i * effort + down / bandwidth_i + up / upload_i` seconds. Asks follow each other, so a
    round takes their sum, with what the server adds.

    Args:
        compute: (registered clients,) seconds that a row takes, forward and back.
        bandwidth: (registered clients,) bytes a second that a client receives.
        upload: (registered clients,) bytes a second that it sends.
        effort: how many rows a question means.
        overhead: seconds of the server in every round.

    >>> compute, down, up = torch.tensor([[0.1], [50.0], [25.0]], dtype=torch.float64)
    >>> clock = DeviceClock(compute, down, up, lambda question, rows: rows)
    >>> from fedtide.core.types import Moment
    >>> ask = Ask("train", "train", Moment(0, 1), torch.tensor([0]))
    >>> clock.answers(ask, torch.tensor([20]), 100, 100).tolist()
    [8.0]
    """

    compute: Tensor
    bandwidth: Tensor
    upload: Tensor
    effort: Effort
    overhead: float = 0.0

    def answers(self, ask: Ask, rows: Tensor, down: int, up: int) -> Tensor:
        """Compute and transfer of each."""
        clients = ask.clients
        effort = self.effort(ask.question, rows) if ask.passes is None else rows * ask.passes / 3
        compute = self.compute[clients].double() * effort
        return compute + down / self.bandwidth[clients].double() + up / self.upload[clients].double()

    def round(self, asks: Sequence[float], server: float = 0.0) -> float:
        """The asks one after the other, the server's own work, and what it adds in every round."""
        return sum(asks, 0.0) + server + self.overhead
