"""Who of the real clients takes part: all that are present, or those that a simulation draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedtide.cohorts.draw import draw_clients
from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.data.population import Population


class Who(Protocol):
    """Which of the clients that are present take part."""

    def reachable(self, present: Tensor, moment: Moment) -> Tensor:
        """Return the clients that could answer now, sorted."""

    def arrivals(self, m: int, present: Tensor, moment: Moment) -> Tensor:
        """Draw `m` of them, sorted."""

    def answers(self, clients: Tensor, moment: Moment, number: int) -> Tensor:
        """Return the mask (clients,) of those that are sent question `number` of the round at all."""


@dataclass(frozen=True)
class Present:
    """All clients whose nodes are there; arrivals are drawn among them uniformly, from (seed, round)."""

    seed: int

    def reachable(self, present: Tensor, moment: Moment) -> Tensor:
        """Return all who are present."""
        return present

    def arrivals(self, m: int, present: Tensor, moment: Moment) -> Tensor:
        """Draw `m` of them; all if there are no more."""
        return draw_clients(present, torch.zeros(len(present)), m, Rng(self.seed).at(moment.round, "arrivals"))

    def answers(self, clients: Tensor, moment: Moment, number: int) -> Tensor:
        """Return a mask of all."""
        return torch.ones(len(clients), dtype=torch.bool)


@dataclass(frozen=True)
class Rehearsed:
    """The clients that a simulation draws from (seed, round), present or not."""

    population: Population

    def reachable(self, present: Tensor, moment: Moment) -> Tensor:
        """Return those that the simulation could reach."""
        return self.population.reachable(moment)

    def arrivals(self, m: int, present: Tensor, moment: Moment) -> Tensor:
        """Draw as the simulation does."""
        return self.population.arrivals(m, moment)

    def answers(self, clients: Tensor, moment: Moment, number: int) -> Tensor:
        """Return those that do not drop out in the simulation."""
        return self.population.answers(clients, moment, number)
