"""A custom cohort from one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtide.cohorts.protocol import Picking, Serve
from fedtide.core.base import Fleet, Moment
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.fields.user_code import call


@dataclass(frozen=True)
class PickedBy(Picking):
    """A cohort by a function of the clients that are reachable, the moment and a key.

    It needs no memo and asks clients for nothing; a cohort that does is a class with the methods of `Picking`.

    Args:
        picked: (reachable clients, sorted; number of clients; moment; key) -> ids of those that participate.
        clients_per_round: number of clients per round; clusters that select their own get a part of it.
    """

    picked: Callable[[Tensor, int, Moment, Rng], Any]
    clients_per_round: int = 10

    def pick(
        self, memo: None, fleet: Fleet, rng: Rng, serve: Serve, among: Tensor | None = None, m: int | None = None
    ) -> Tensor:
        """Return the clients that the function selects, sorted.

        Raises:
            FedtideError: the function does not return distinct ids of the clients that it was given.
        """
        there = fleet.reachable if among is None else among
        wanted = self.clients_per_round if m is None else m
        if not wanted:
            return there[:0]
        return self.choose(there, wanted, fleet.moment, rng)

    def choose(self, there: Tensor, wanted: int, moment: Moment, rng: Rng) -> Tensor:
        """Return the clients that the function selects of those that are there, sorted."""
        key, allowed = "cohort.function", "ids of the clients that it is given, each once"
        found = call(self.picked, key, there, wanted, moment, rng.at("cohort"))
        try:
            made = torch.as_tensor(found).flatten()
        except (RuntimeError, TypeError, ValueError):
            raise refused(key, found, allowed) from None
        picked = made.long().unique()  # sorted
        if len(picked) < len(made) or not torch.isin(picked, there).all():
            raise refused(key, made.tolist(), allowed)
        return picked
