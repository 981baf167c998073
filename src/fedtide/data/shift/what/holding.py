"""Interfaces of settings and plans of the rows that each client holds over time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.fields import user_code
from fedtide.fields.types import ingredient

Rhythm = dict[str, float]
"""Values that a method may know of a rhythm, by name (`fedtide.fields.types.OfShift`); empty without a rhythm."""


@dataclass(frozen=True)
class PopulationView:
    """Rows, parts and groups of all clients, from which a plan is made once for a whole run.

    Args:
        rows: the samples.
        parts: "train", "val", "test" -> all rows that each client holds at some time.
        registered: number of clients that can take part in training; held-out clients follow them.
        group: (clients,) the group of each client.
        names: the source's name of each client, or ().
        seed: the seed of all random draws.
        clock: the function from a moment to its time on the shift's clock, in rounds or seconds.
    """

    rows: Rows
    parts: Mapping[str, Ragged]
    registered: int
    group: Tensor
    names: tuple[str, ...]
    seed: int
    clock: Callable[[Moment], float]

    def time(self, moment: Moment) -> float:
        """Return a moment on the shift's clock; moments before round 0 count as 0."""
        return max(self.clock(moment), 0.0)

    @property
    def rng(self) -> Rng:
        """Key of all random draws."""
        return Rng(self.seed)

    @property
    def everyone(self) -> Tensor:
        """Registered clients, sorted."""
        return torch.arange(self.registered)

    def populated(self) -> list[tuple[str, int, int]]:
        """Return the name, the first id and the id after the last one of training and held-out clients, if present.

        Their draws are separate, so that held-out clients change no result of the others.
        """
        ranges = [("seen", 0, self.registered), ("unseen", self.registered, len(self.group))]
        return [(name, first, last) for name, first, last in ranges if last > first]

    def shuffled(self, key: Rng) -> Iterator[tuple[Rng, np.random.Generator, np.ndarray]]:
        """Yield training clients, then held-out ones, in random order, with their key and the generator after that."""
        for name, first, last in self.populated():
            draw = key.at(name).numpy()
            yield key.at(name), draw, first + draw.permutation(last - first)

    def deal(self, key: Rng, groups: int) -> Tensor:
        """Deal training clients, and separately held-out ones, evenly to groups at random (clients,)."""
        group = torch.zeros(len(self.group), dtype=torch.int64)
        for _, _, clients in self.shuffled(key):
            group[clients] = torch.arange(len(clients)) % groups
        return group


@dataclass(frozen=True)
class Window:
    """The window of wall-clock time of a round.

    begin: beginning of the window, in ISO 8601 by the clocks of the zone. next: beginning of the next window, whose
    rows are the test. came: number of registered clients that have new rows.
    """

    begin: str
    next: str
    came: int


class Holding(Protocol):
    """Settings of the rows that a client holds, which make a plan once for a population."""

    @property
    def drifts(self) -> bool:
        """Tell whether the rows of clients change at events, so that the clients that drifted are known."""
        return False

    exact: ClassVar[bool] = False
    """Tell whether its plan's `changed` names every client that holds other rows."""
    ahead: ClassVar[bool] = False
    """Tell whether test rows are those to come: all rows are for testing, and later for training."""

    def check(self, view: PopulationView) -> None:
        """Raise if the settings do not fit the rows."""
        return

    @abstractmethod
    def plan(self, view: PopulationView) -> Plan:
        """Build the plan of the rows that every client holds over time."""

    def rhythm(self, rounds: int, turns: int = 2) -> Rhythm:
        """Return the rhythm of cycles that a method with `turns` models may know, in a run of `rounds`."""
        return {}

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """Describe the settings in sentences for a report, each followed by a space.

        Args:
            domains: the names of the source's domains.
            unit: "rounds" or "seconds".
            until: end of the run; later events are left out.
        """
        return ""


class Plan(Protocol):
    """Rows that every client holds over time."""

    view: PopulationView

    @abstractmethod
    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """Return the rows of a part that a client trains on or is judged on, sorted."""

    @abstractmethod
    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """Count the rows of a part of each of `clients`; without a moment, those that it holds at some time."""

    def aside(self, client: int, moment: Moment) -> Tensor:
        """Return the validation rows that a client decides on, sorted; it is judged on `hold(client, "val", moment)`.

        The two differ if test rows are not the rows that clients hold: validation rows are judged as test rows are.
        """
        return self.hold(client, "val", moment)

    def there(self, moment: Moment) -> Tensor | None:
        """Return the mask (registered,) of the clients that hold training rows; None if all always do."""
        return None

    def group(self, moment: Moment) -> Tensor | None:
        """Return the true group of each client (clients,); None if it is the population's."""
        return None

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """Return the registered clients whose rows differ from those at `before`, sorted."""
        return self.view.everyone[:0]

    def events(self, moment: Moment, before: Moment) -> tuple[str, ...]:
        """Return the fixed names of the events since `before`."""
        return ()

    def check(self, rounds: int) -> None:
        """Raise if the plan does not cover a number of rounds, on the clock of rounds."""
        return

    def differs(self, client: int, moment: Moment, before: Moment) -> bool:
        """Tell whether a client holds other rows than at `before`, in any part."""
        then, now = ([self.hold(client, part, at) for part in self.view.parts] for at in (before, moment))
        return any(not torch.equal(a, b) for a, b in zip(then, now, strict=True))


class Dated(Plan, Protocol):
    """Rows that arrive at real times: a round is a window of wall-clock time, and rows of the next one are the test."""

    @abstractmethod
    def fresh(self, moment: Moment) -> Tensor:
        """Return the mask (registered,) of the clients that have new rows in a round."""

    @abstractmethod
    def arrived(self, moment: Moment) -> tuple[Tensor, Tensor]:
        """Return all rows that have arrived with their labels, and their owners."""

    @abstractmethod
    def window(self, moment: Moment) -> Window:
        """Return the window of a round."""

    @abstractmethod
    def clock(self, number: int) -> float:
        """Return the time at which a round begins, in seconds on the clock of the run."""


@dataclass(frozen=True)
class OwnRows(Plan):
    """All rows of every client at all times."""

    view: PopulationView

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """Return the rows that a client holds, sorted."""
        return self.view.parts[part][client]

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """Count the rows of each of `clients`."""
        return self.view.parts[part].sizes(clients)


@ingredient
class Python(user_code.Python):
    """Your own kind: what your `module:function`, called with `options`, returns stands in its place."""

    # What can be said of it before it is made: anything may change, in no rhythm that is known.
    drifts: ClassVar[bool] = True
    changes: ClassVar[bool] = True

    def rhythm(self, *_: Any) -> dict[str, float]:
        """Return no rhythm: none is known."""
        return {}

    def words(self, *_: Any) -> str:
        """Name the user's code in words."""
        return f"It follows your own {self.name}, too. "
