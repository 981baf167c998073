"""The simulated clock: how long answers and rounds take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedtide.core.base import ComputeCost
from fedtide.fleets.ask import Ask


class Clock(Protocol):
    """A simulated clock."""

    def answers(self, ask: Ask, rows: Tensor, down: int, up: int) -> Tensor:
        """Compute the seconds until each client would have answered (clients,), in float64.

        Args:
            ask: the question and its clients.
            rows: (clients,) training rows of each client.
            down: bytes that each client receives.
            up: bytes that each client sends.
        """

    def round(self, asks: Sequence[float], server: float = 0.0) -> float:
        """Compute the seconds of a round from those of its asks and of the server's own work."""


@dataclass(frozen=True)
class SteadyClock:
    """A clock whose rounds all take equally long, however many clients take part."""

    seconds: float = 1.0

    def answers(self, ask: Ask, rows: Tensor, down: int, up: int) -> Tensor:
        """Return the seconds of a round for each."""
        return torch.full((len(ask.clients),), self.seconds, dtype=torch.float64)

    def round(self, asks: Sequence[float], server: float = 0.0) -> float:
        """Return the seconds of a round."""
        return self.seconds


@dataclass(frozen=True)
class DeviceClock:
    """A clock on which every client is a device with a speed and a line of its own.

    An answer takes `compute_i * cost + down / bandwidth_i + up / upload_i` seconds. Asks follow each other, so a
    round takes their sum, with what the server adds.

    Args:
        compute: (registered clients,) seconds that a row takes, forward and back.
        bandwidth: (registered clients,) bytes a second that a client receives.
        upload: (registered clients,) bytes a second that it sends.
        cost: how many rows a question means.
        overhead: seconds of the server in every round.

    >>> compute, down, up = torch.tensor([[0.1], [50.0], [25.0]], dtype=torch.float64)
    >>> clock = DeviceClock(compute, down, up, lambda question, rows: rows)
    >>> from fedtide.core.base import Moment
    >>> ask = Ask("train", "train", Moment(0, 1), torch.tensor([0]))
    >>> clock.answers(ask, torch.tensor([20]), 100, 100).tolist()
    [8.0]
    """

    compute: Tensor
    bandwidth: Tensor
    upload: Tensor
    cost: ComputeCost
    overhead: float = 0.0

    def answers(self, ask: Ask, rows: Tensor, down: int, up: int) -> Tensor:
        """Add up the time of computing and of transfers for each client."""
        clients = ask.clients
        cost = self.cost(ask.question, rows) if ask.passes is None else rows * ask.passes / 3
        compute = self.compute[clients].double() * cost
        return compute + down / self.bandwidth[clients].double() + up / self.upload[clients].double()

    def round(self, asks: Sequence[float], server: float = 0.0) -> float:
        """Add up the asks one after the other, the server's own work and the overhead of a round."""
        return sum(asks, 0.0) + server + self.overhead
