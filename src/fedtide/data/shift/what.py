"""Interfaces of settings and plans of the rows that each client holds over time."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.fields import user_code
from fedtide.fields.types import ingredient
from fedtide.fields.user_code import call

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

    drifts: ClassVar[bool] = False
    """Tell whether the rows of clients change at events, so that the clients that drifted are known."""
    ahead: ClassVar[bool] = False
    """Tell whether test rows are those to come: all rows are for testing, and later for training."""

    def check(self, view: PopulationView) -> None:
        """Raise if the settings do not fit the rows."""
        return

    @abstractmethod
    def plan(self, view: PopulationView) -> "Plan":
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


T = TypeVar("T")

MOST = 100_000
"""Maximum number of events of a run, since each is drawn in turn for all clients."""

KEPT = 8
"""Number of stored states; a round needs its own and the previous one."""


@dataclass(frozen=True)
class Chain(Generic[T]):
    """States after any number of events, in constant memory.

    Args:
        start: the function that makes the state before the first event.
        after: the function from a state and an event number, from 1, to the next state, without changes in place.

    >>> chain = Chain(lambda: 0, lambda state, number: state + number)
    >>> chain[4], chain[2]
    (10, 3)
    """

    start: Callable[[], T]
    after: Callable[[T, int], T]
    _kept: dict[int, T] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, number: int) -> T:
        """Return the state after `number` events."""
        if number not in self._kept:
            nearest = max((at for at in self._kept if at < number), default=-1)
            state = self.start() if nearest < 0 else self._kept[nearest]
            for event in range(max(nearest, 0) + 1, number + 1):
                state = self.after(state, event)
            self._kept[number] = state
        self._kept[number] = self._kept.pop(number)  # most recently used
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return self._kept[number]


def count_events(time: float, every: float, key: str) -> int:
    """Return the number of events up to a time, at equal distances from 0; raise if they are more than can be drawn.

    `key` is the configuration key of the distance.
    """
    number = max(time, 0.0) // every
    if not number <= MOST:
        count = f"{number:.6g}" if math.isfinite(number) else "too many"
        raise FedtideError(f"{key}: it makes {count} events, allowed: at most {MOST}; make it longer")
    return int(number)


@dataclass(frozen=True)
class Domain:
    """Rows in the order of their labels; those of label c are `rows[start[c]:start[c + 1]]`."""

    rows: np.ndarray
    start: np.ndarray

    @staticmethod
    def of(rows: Tensor, y: Tensor, classes: int) -> "Domain":
        """Sort rows by label."""
        labels = y[rows.long()]
        order = labels.argsort(stable=True)
        counts = torch.bincount(labels, minlength=classes)
        return Domain(rows[order].long().numpy(), np.concatenate([[0], counts.cumsum(0).numpy()]))

    def __getitem__(self, label: int) -> np.ndarray:
        return self.rows[self.start[label] : self.start[label + 1]]

    def drawn(self, counts: Mapping[int, int], draw: np.random.Generator, own_rows: "Domain | None" = None) -> Tensor:
        """Draw a number of rows of each label, sorted, without repetition while there are enough.

        Args:
            counts: number of rows of each label.
            draw: the generator.
            own_rows: rows that take the place of these for each label that they have.

        >>> domain = Domain.of(torch.arange(4), torch.tensor([0, 1, 0, 1]), 2)
        >>> domain.drawn({0: 2, 1: 0}, np.random.default_rng(0)).tolist()
        [0, 2]
        """
        parts = [self.rows[:0]]
        for label, count in counts.items():
            rows = self[label] if own_rows is None or not len(own_rows[label]) else own_rows[label]
            if count:
                parts.append(rows[draw.choice(len(rows), count, replace=count > len(rows))])
        return torch.from_numpy(np.sort(np.concatenate(parts)))


class Amounts:
    """Numbers of rows that a client draws, by part."""

    samples: int
    val_samples: int
    test_samples: int

    def wanted(self, part: str) -> int:
        """Return the number of rows of a part that a client draws."""
        return {"train": self.samples, "val": self.val_samples, "test": self.test_samples}[part]


@dataclass(frozen=True)
class Pools:
    """Rows from which clients draw: those of all training clients, and separately of all held-out clients, by part."""

    view: PopulationView
    amounts: Amounts

    @cached_property
    def domains(self) -> dict[tuple[str, str], Domain]:
        """Rows to draw from, for each part of training and held-out clients that has rows of which some are wanted."""
        pools: dict[tuple[str, str], Domain] = {}
        for who, first, last in self.view.populated():
            parts = self.view.parts.items()
            rows = {part: lists.rows[lists.start[first] : lists.start[last]].long().unique() for part, lists in parts}
            # Clients may share rows; training rows of any client are no validation rows.
            rows["val"] = rows["val"][~torch.isin(rows["val"], rows["train"])]
            for part, part_rows in rows.items():
                if len(part_rows) and self.amounts.wanted(part):
                    pools[part, who] = Domain.of(part_rows, self.view.rows.y, self.view.rows.classes)
        return pools

    def of(self, part: str, client: int) -> Domain | None:
        """Return the rows from which a client draws; None if it draws none."""
        return self.domains.get((part, "seen" if client < self.view.registered else "unseen"))

    def counts(self, clients: Tensor, part: str) -> Tensor:
        """Count the rows that each of `clients` draws."""
        seen, unseen = (self.amounts.wanted(part) * ((part, who) in self.domains) for who in ("seen", "unseen"))
        return torch.where(clients < self.view.registered, seen, unseen)

    def lacking(self, needed: np.ndarray | None = None) -> dict[int, str]:
        """Return the labels without rows in some part, each with the reason; `needed` (classes,) masks some labels."""
        reasons: dict[int, str] = {}
        for (part, who), domain in self.domains.items():
            empty = np.diff(domain.start) == 0
            for label in np.flatnonzero(empty if needed is None else empty & needed).tolist():
                reasons.setdefault(label, f"{'' if who == 'seen' else 'held-out '}clients have no {part} row of it")
        return reasons


def check_apart(view: PopulationView, kind: str) -> None:
    """Raise if rows cannot be drawn by labels: they are sequences, or a client trains on another's test row."""
    if view.rows.steps is not None:
        but = f"it draws rows by their labels, and rows of {view.rows.name} are sequences"
        raise refused("shift.what.kind", kind, "static, domain-mixture, stream, change-points of domains", but)
    trained, tested = (view.parts[part].rows.long().unique() for part in ("train", "test"))
    both = trained[torch.isin(trained, tested)]
    if len(both):
        but = f"it draws from all rows, and row {int(both[0])} is for training of one client and for tests of another"
        raise refused("shift.what.kind", kind, "a data.partition whose parts share no rows", but)


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
