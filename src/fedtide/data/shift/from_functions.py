"""Custom shifts from one function each, for `who`, `what` and `how`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtide.core.base import Moment
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.data.shift.how import Reading
from fedtide.data.shift.what.holding import Holding, OwnRows, Plan, PopulationView
from fedtide.data.shift.who import Arriving
from fedtide.fields.user_code import call


@dataclass(frozen=True)
class HeldBy(Holding):
    """A `what` by a function from a client's own rows and the moment to the rows that it holds.

    Every query calls the function for every client, so it suits some thousands of clients.

    Args:
        held: (the client's rows, sorted; "train", "val" or "test"; the moment; the client's key) -> the rows held,
            sorted.
    """

    held: Callable[[Tensor, str, Moment, Rng], Tensor]

    def plan(self, view: PopulationView) -> Plan:
        """Build the plan of the rows that each client holds over time."""
        return HeldByPlan(view, self.held)


@dataclass(frozen=True)
class HeldByPlan(OwnRows):
    """Rows of each client over time by `HeldBy`."""

    held: Callable[[Tensor, str, Moment, Rng], Tensor]

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """Return the rows that a client holds, sorted."""
        key, all_rows = "shift.what.function", super().hold(client, part, moment)
        rows = call(self.held, key, all_rows, part, moment, self.view.rng.at("what", client))
        if not (isinstance(rows, Tensor) and rows.dtype == all_rows.dtype and torch.isin(rows, all_rows).all()):
            raise refused(key, rows, f"a tensor with some of the client's own rows, such as {all_rows[:3].tolist()}")
        return rows

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """Count the rows that each of `clients` holds; without a moment, all of its own rows."""
        if moment is None:
            return super().counts(clients, part, moment)
        return torch.tensor([len(self.hold(client, part, moment)) for client in clients.tolist()], dtype=torch.int64)

    def there(self, moment: Moment) -> Tensor | None:
        """Return the mask (registered,) of the clients that hold training rows."""
        return self.counts(self.view.everyone, "train", moment) > 0

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """Return the registered clients whose rows differ from those at `before`, sorted."""
        return torch.tensor([c for c in self.view.everyone.tolist() if self.differs(c, moment, before)]).long()

    def events(self, moment: Moment, before: Moment) -> tuple[str, ...]:
        """Return ("change",) if the rows of any client changed, otherwise ()."""
        return ("change",) if len(self.changed(moment, before)) else ()


@dataclass(frozen=True)
class ReadBy(Reading):
    """A `how` by a function from rows, their clients' groups and the time to the meaning of the rows.

    Args:
        read: (x, y, (rows,) the group of each row's client, the time) -> x and y with their meaning at that time.
    """

    read: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning at `time`."""
        key = "shift.how.function"
        result = call(self.read, key, x, y, group, time)
        pair = result if isinstance(result, tuple) else ()
        if [getattr(tensor, "shape", None) for tensor in pair] != [x.shape, y.shape]:
            raise refused(key, result, f"a pair (x, y) of tensors of shapes {tuple(x.shape)} and {tuple(y.shape)}")
        return result


@dataclass(frozen=True)
class AwakeBy(Arriving):
    """A `who` by a function from the time to the available clients, with arrivals drawn uniformly among them.

    Args:
        awake: (the registered clients, the time) -> (registered,) bool, the mask of the available clients.
        dropout_rate: share of the asked clients that never answer.
    """

    awake: Callable[[Tensor, float], Tensor]
    dropout_rate: float = 0.0

    def plan(self, view: PopulationView) -> AwakeByPlan:
        """Build the plan of the clients' availability."""
        return AwakeByPlan(self.awake, view.everyone)


@dataclass(frozen=True)
class AwakeByPlan:
    """Availability of clients by `AwakeBy`."""

    function: Callable[[Tensor, float], Tensor]
    clients: Tensor

    def awake(self, time: float) -> Tensor:
        """Return the mask (registered,) of the available clients."""
        key = "shift.who.function"
        mask = call(self.function, key, self.clients, time)
        if not (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == self.clients.shape):
            raise refused(key, mask, f"a mask: a tensor of {len(self.clients)} true or false, one for each client")
        return mask

    def wait(self, time: float) -> float:
        """Return 1 second if no client is available, otherwise 0, since later availability is unknown."""
        return 0.0 if bool(self.awake(time).any()) else 1.0
