"""What a plan of holdings is made of, and what it answers: which rows a client has at a moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedtide.core.rng import Rng
from fedtide.core.types import Moment
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows

Rhythm = dict[str, float]
"""What a method could know of a rhythm, by name (`fedtide.core.config_types.OfShift`); empty where there is none."""


@dataclass(frozen=True)
class PopulationView:
    """Who holds which rows in all: what a plan is made of, once for a whole run.

    Args:
        rows: the samples.
        parts: "train", "val", "test" -> which rows each client holds in all.
        registered: how many clients can be asked; held-out ones come after them.
        group: (clients,) the group of each client.
        names: what the source calls each client, or ().
        seed: of everything that is drawn.
        clock: a moment as the shift reads it, in rounds or seconds.
    """

    rows: Rows
    parts: Mapping[str, Ragged]
    registered: int
    group: Tensor
    names: tuple[str, ...]
    seed: int
    clock: Callable[[Moment], float]

    def time(self, moment: Moment) -> float:
        """A moment on the shift's clock; what is played before round 0 meets what there is at 0."""
        return max(self.clock(moment), 0.0)

    @property
    def rng(self) -> Rng:
        """The key of everything that is drawn."""
        return Rng(self.seed)

    @property
    def everyone(self) -> Tensor:
        """The registered clients, sorted."""
        return torch.arange(self.registered)

    def populated(self) -> list[tuple[str, int, int]]:
        """Training and held-out clients, where there are any: what they are called, the first id, and the one after
        the last.

        They are drawn apart, so that held-out clients change nothing for the others.
        """
        ranges = [("seen", 0, self.registered), ("unseen", self.registered, len(self.group))]
        return [(name, first, last) for name, first, last in ranges if last > first]


class Holding(Protocol):
    """Which of its rows a client holds: settings, of which a plan is made once for a population."""

    @property
    def drifts(self) -> bool:
        """Whether clients come to hold other rows at events, so that it can be said which drifted."""

    def check(self, view: PopulationView) -> None:
        """Raise where it does not fit the rows."""

    def plan(self, view: PopulationView) -> Plan:
        """Which rows every client holds at every moment."""

    def rhythm(self, rounds: int) -> Rhythm:
        """What a method could know of a cycle, in a run of so many rounds."""

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """Sentences for a report, each with a space behind it.

        Args:
            domains: the names of the source's domains.
            unit: "rounds" or "seconds".
            until: events from then on are not met.
        """


class Plan(Protocol):
    """Which rows every client holds at every moment."""

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """The rows that a client holds, sorted."""

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """How many rows each of `clients` holds; without a moment, those that it holds at one time or another."""

    def there(self, moment: Moment) -> Tensor | None:
        """Which registered clients hold anything to train on (registered,) bool; None where all do at all times."""

    def group(self, moment: Moment) -> Tensor | None:
        """The true group of each client (clients,); None where it is the population's."""

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """The registered clients whose rows are others than at `before`, sorted."""

    def events(self, moment: Moment, before: Moment) -> tuple[str, ...]:
        """What happened since `before`, in words that stay the same."""

    def check(self, rounds: int) -> None:
        """Raise where so many rounds cannot be played, on the clock of rounds."""


@dataclass(frozen=True)
class PerClientPlan:
    """The plan of a `what` that looks at one client at a time: all of its rows, or a blend of its domains."""

    what: Any
    view: PopulationView

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """The rows that a client holds, sorted."""
        rows = self.view.parts[part][client]
        if self.what.kind == "static":
            return rows
        of = self.view.rows
        domain = of.domain[rows.long()] if of.domain is not None else torch.zeros_like(rows)
        key = self.view.rng.at("what", client)
        held: Tensor = self.what.hold(rows, domain, len(of.domain_names), part, moment, key)
        return held

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """How many rows each of `clients` holds: as many at every moment."""
        ragged = self.view.parts[part]
        counted: Tensor = self.what.counts(ragged.sizes(clients), part)
        return counted

    def there(self, moment: Moment) -> Tensor | None:
        """All, at all times."""
        return None

    def group(self, moment: Moment) -> Tensor | None:
        """The population's."""
        return None

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """Nobody, or everybody where rows are redrawn in every round."""
        redrawn = self.what.kind != "static" and moment.round != before.round
        return self.view.everyone if redrawn else self.view.everyone[:0]

    def events(self, moment: Moment, before: Moment) -> tuple[str, ...]:
        """Nothing happens at once."""
        return ()

    def check(self, rounds: int) -> None:
        """Any number of rounds can be played."""
