"""A shift of your own from one function, for `who`, `what` and `how`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedtide.core.rng import Rng
from fedtide.core.types import Moment
from fedtide.data.shift import uniform
from fedtide.data.shift.how.row_transform import ByGroup, RowTransform
from fedtide.data.shift.what.plan import Plan, PopulationView


@dataclass(frozen=True)
class HeldBy:
    """A `what`: the rows that a client holds follow from its own rows and the moment.

    Every answer asks the function for every client, so it is for some thousands of clients.

    Args:
        held: (the client's rows, sorted; "train", "val" or "test"; the moment; the client's key) -> those it holds,
            sorted.
    """

    held: Callable[[Tensor, str, Moment, Rng], Tensor]

    def check(self, view: PopulationView) -> None:
        """Accept any rows."""

    def plan(self, view: PopulationView) -> Plan:
        """Which rows each client holds when."""
        return HeldByPlan(self.held, view)


@dataclass(frozen=True)
class HeldByPlan:
    """The plan of `HeldBy`."""

    held: Callable[[Tensor, str, Moment, Rng], Tensor]
    view: PopulationView

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """The rows that a client holds, sorted."""
        return self.held(self.view.parts[part][client], part, moment, self.view.rng.at("what", client))

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """How many rows each of `clients` holds; without a moment, how many are its own in all."""
        if moment is None:
            return self.view.parts[part].sizes(clients)
        return torch.tensor([len(self.hold(client, part, moment)) for client in clients.tolist()], dtype=torch.int64)

    def there(self, moment: Moment) -> Tensor | None:
        """Which registered clients hold anything to train on (registered,) bool."""
        return self.counts(self.view.everyone, "train", moment) > 0

    def group(self, moment: Moment) -> Tensor | None:
        """The population's."""
        return None

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """The registered clients whose rows are others than at `before`, sorted."""
        return torch.tensor([c for c in self.view.everyone.tolist() if self._differ(c, moment, before)]).long()

    def _differ(self, client: int, moment: Moment, before: Moment) -> bool:
        parts = self.view.parts
        return any(not torch.equal(self.hold(client, part, moment), self.hold(client, part, before)) for part in parts)

    def events(self, moment: Moment, before: Moment) -> tuple[str, ...]:
        """ "change" where a client holds other rows."""
        return ("change",) if len(self.changed(moment, before)) else ()

    def check(self, rounds: int) -> None:
        """Accept any number of rounds."""


@dataclass(frozen=True)
class ReadBy:
    """A `how`: what rows mean follows from the group of the client that holds them and the time.

    Args:
        read: (x, y, (rows,) the group of each row's client, the time) -> x and y as they mean then.
    """

    read: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Accept any rows."""

    def plan(self, view: PopulationView) -> RowTransform:
        """What the rows of every client mean when."""
        return ByGroup(self, view)

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """The rows as they mean at `time`."""
        return self.read(x, y, group, time)


@dataclass(frozen=True)
class AwakeBy:
    """A `who`: which clients are there follows from the time; among those, arrivals are drawn uniformly.

    Args:
        awake: (the registered clients, the time) -> (registered,) bool, which of them are there.
        dropout_rate: share of the asked clients that never answer.
    """

    awake: Callable[[Tensor, float], Tensor]
    dropout_rate: float = 0.0
    recorded: ClassVar[bool] = False

    def check(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Accept any groups."""

    def plan(self, view: PopulationView) -> AwakeByPlan:
        """Which clients are there when."""
        return AwakeByPlan(self.awake, view.everyone)

    def shares(self, time: float, sizes: np.ndarray) -> np.ndarray:
        """The expected share of each group among the arrivals (groups,): its share of the clients."""
        return uniform.shares(sizes)

    def arrivals(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """`m` clients in the order they arrive; `arrivals(m)` begins with `arrivals(m - 1)`."""
        return uniform.arrivals(m, groups, rng)

    def filled_in(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> int:
        """No client stands in for another."""
        return 0

    def reachable(self, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """All clients, sorted."""
        return uniform.reachable(groups)


@dataclass(frozen=True)
class AwakeByPlan:
    """The plan of `AwakeBy`."""

    function: Callable[[Tensor, float], Tensor]
    clients: Tensor

    def awake(self, time: float) -> Tensor:
        """Which clients are there (registered,) bool."""
        return self.function(self.clients, time)

    def wait(self, time: float) -> float:
        """A second while nobody is there: the function says nothing of what comes."""
        return 0.0 if bool(self.awake(time).any()) else 1.0
