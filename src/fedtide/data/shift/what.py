"""Rows that each client holds over time: interfaces of settings and plans, and kinds that choose among its own rows."""

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.data.ragged import Ragged, count_pairs
from fedtide.data.rows import Rows
from fedtide.draw.prose import listed
from fedtide.fields import user_code
from fedtide.fields.types import Count, Positive, Whole, ingredient, is_written
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


def read_own(value: Any) -> Any:
    """Wrap an object of a person's own, such as `AwakeBy`, or a function that makes one; leave what a file may have."""
    if is_written(value):
        return value
    return Python(value if callable(value) else lambda: value)


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


ROWS = 4_000_000
"""Number of row numbers that are kept of the last draws: 32 MB."""

ENTRY = 100
"""Number of row numbers that take as much memory as a draw without rows."""


class Recent:
    """Rows that were drawn last, so that the same draw is not made in every round; the oldest are forgotten.

    >>> recent = Recent()
    >>> recent.get("a", lambda: torch.tensor([3])), recent.get("a", lambda: torch.tensor([4]))
    (tensor([3]), tensor([3]))
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}
        self._rows = 0

    def get(self, key: Hashable, draw: Callable[[], Tensor]) -> Tensor:
        """Return the rows of a key, which are drawn if they are not kept; do not change them in place."""
        rows = self._kept.pop(key, None)
        if rows is None:
            rows = draw()
            self._rows += len(rows) + ENTRY
        self._kept[key] = rows  # the last one is the newest
        while self._rows > ROWS and len(self._kept) > 1:
            self._rows -= len(self._kept.pop(next(iter(self._kept)))) + ENTRY
        return rows


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


JUDGED = "val", "test"
"""Parts on which clients are judged."""
STILL = 0.1
"""Number of cycles over a run below which a mixture counts as constant."""


@ingredient
class Static(Holding):
    """All rows of the client at all times."""

    kind: Literal["static"] = "static"

    def plan(self, view: PopulationView) -> Plan:
        """Build the plan of the rows that each client holds over time."""
        return OwnRows(view)


@ingredient
class DomainMixture(Holding):
    """A mixture of two or more domains on a schedule (pFedEM); more than two extend its formulas.

    Domains stand on a ring, and domain k of P peaks kT/P rounds into a cycle of T = rounds/cycles rounds. Let d be the
    distance of r mod T from that peak on the ring. The share of a domain is 1 - Pd/T (linear) or (1 + cos(pi Pd/T))/2
    (cosine) if d is at most T/P, otherwise 0. So two neighbors are mixed at a time, and of two domains the first is
    alone at 0 and the second at T/2. The schedule counts rounds, whatever the shift's clock; rounds before round 0 are
    the end of a cycle. Rows are redrawn in every round, with replacement, from the client's own rows.

    Args:
        curve: "linear" or "cosine".
        cycles: number of cycles over the whole run.
        samples: number of rows that a client holds in a round.
        jitter: largest shift of a client's phase, in rounds, drawn once per client.
        test: rows for evaluation, both test and validation. They follow the "mixture" of the round, are "balanced"
            (equally many of each domain, drawn once), or are "all". Clients decide on a mixture.
    """

    curve: Literal["linear", "cosine"] = "linear"
    cycles: Positive = 1
    samples: Count = 100
    jitter: Whole = 0
    test: Literal["mixture", "balanced", "all"] = "balanced"
    kind: Literal["domain-mixture"] = "domain-mixture"

    def check(self, view: PopulationView) -> None:
        """Raise if a client has no rows of some domain."""
        rows, train, registered = view.rows, view.parts["train"], view.registered
        if rows.domain is None or len(rows.domain_names) < 2:
            raise refused("shift.what.kind", self.kind, "'static'", f"{rows.name} has a single domain")
        table = count_pairs(train.owner, rows.domain[train.rows.long()], len(train), len(rows.domain_names))
        for name, counts in zip(rows.domain_names, table[:registered].T, strict=True):
            if not counts.any():
                allowed = "domains with samples (data.source, data.groups), or 'static'"
                raise refused("shift.what.kind", self.kind, allowed, f"no client has a training row of domain '{name}'")
            if (counts == 0).any():
                but = f"client {int((counts == 0).nonzero()[0])} has no rows of domain '{name}'"
                allowed = "data.groups.by = 'none', a partition that deals every domain, or more rows for each client"
                raise refused("shift.what.kind", self.kind, allowed, but)

    def plan(self, view: PopulationView) -> Plan:
        """Build the plan of the rows that each client holds over time."""
        return MixturePlan(view, self)

    def rhythm(self, rounds: int, turns: int = 2) -> Rhythm:
        """Return the number of cycles, the rounds of a cycle, and those that show all domains alike, at most all."""
        return {"cycles": self.cycles, "cycle": self.cycle(rounds), "seen": min(self.seen(rounds, turns), rounds)}

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """Describe the mixture and its number of cycles."""
        text = f"What a client holds is a blend of domains{f', {listed(domains)},' if domains else ''} "
        if self.cycles < STILL:
            return text + f"{'of its own, ' if self.jitter else ''}whose shares stay as they are. "
        cycles = "cycle" if self.cycles == 1 else "cycles"
        return text + f"that changes from round to round, {self.cycles:g} {cycles} over the run. "

    def cycle(self, rounds: int) -> float:
        """Return T, the rounds of a cycle, in a run of `rounds`."""
        return rounds / self.cycles

    def seen(self, rounds: int, domains: int = 2) -> int:
        """Return the rounds before round 0 that show all domains alike, in a run of `rounds`; at least 1.

        Of two domains it is half a cycle, from the peak of the second to the peak of the first; of more all of it.

        >>> DomainMixture(cycles=3).seen(200), DomainMixture(cycles=3).seen(200, 3), DomainMixture(cycles=200).seen(200)
        (34, 67, 1)
        """
        return max(math.ceil(self.cycle(rounds) / (2 if domains <= 2 else 1)), 1)

    def shares(self, moment: Moment, domains: int, phase: float = 0.0) -> np.ndarray:
        """Return the share of each domain at a moment (domains,); the shares sum to 1.

        Args:
            phase: number of rounds by which a client is ahead.

        >>> [DomainMixture(cycles=2).shares(Moment(r, 40), 2).tolist() for r in (0, 5, 10)]
        [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
        >>> [DomainMixture().shares(Moment(r, 12), 3).tolist() for r in (4, 6, -4)]
        [[0.0, 1.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]
        """
        period = self.cycle(moment.rounds)
        s = math.fmod(moment.round + phase, period)
        s += period if s < 0 else 0.0
        # Peak P is that of the first domain, where the ring closes.
        peak = np.arange(domains + 1)
        distance = np.abs(domains * s / period - peak)
        if self.curve == "linear":
            share = np.maximum(1 - distance, 0.0)
        else:  # cos(x - pi k) is cos(x), and -cos(x) for odd k
            wave = math.cos(domains * math.pi * s / period)
            share = np.where(distance <= 1, (1 + np.where(peak % 2, -wave, wave)) / 2, 0.0)
        share[0] += share[domains]
        return share[:domains]

    def hold(self, rows: Tensor, domain: Tensor, domains: int, part: str, moment: Moment, rng: Rng) -> Tensor:
        """Return the rows held at `moment`, out of the client's own rows; `domain` is the domain of each row.

        A client without rows of some domain (among few validation rows, for example) takes more of the others.
        """
        judged = part in JUDGED
        if (judged and self.test == "all") or not len(rows):
            return rows
        phase = float(rng.at("phase").numpy().uniform(-self.jitter, self.jitter)) if self.jitter else 0.0
        balanced = judged and self.test == "balanced"
        shares = np.full(domains, 1 / domains) if balanced else self.shares(moment, domains, phase)
        parts = [rows[domain == k] for k in range(domains)]
        wanted = _counts(self.samples, _among(shares, np.array([len(of_domain) > 0 for of_domain in parts])))
        # Balanced rows are constant, so that accuracy changes with the model only.
        draw = rng.at("hold", part, "balanced" if balanced else moment.round).numpy()
        pairs = zip(parts, wanted, strict=True)
        picked = [rows[torch.from_numpy(draw.integers(0, max(len(rows), 1), count))] for rows, count in pairs]
        return torch.cat(picked).sort().values


@dataclass(frozen=True)
class MixturePlan(OwnRows):
    """Mixture of the domains of each client over time."""

    mixture: DomainMixture

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """Return the rows of a part that a client trains on or is judged on, sorted."""
        return self._mixed(client, part, moment, self.mixture)

    def aside(self, client: int, moment: Moment) -> Tensor:
        """Return the validation rows that a client decides on, sorted: a mixture, as its training rows are."""
        return self._mixed(client, "val", moment, replace(self.mixture, test="mixture"))

    def _mixed(self, client: int, part: str, moment: Moment, mixture: DomainMixture) -> Tensor:
        rows, of = super().hold(client, part, moment), self.view.rows
        assert of.domain is not None
        domain, key = of.domain[rows.long()], self.view.rng.at("what", client)
        return mixture.hold(rows, domain, len(of.domain_names), part, moment, key)

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """Count the rows that each of `clients` holds, which are equally many at every moment."""
        own_rows = super().counts(clients, part, moment)
        return own_rows if part in JUDGED and self.mixture.test == "all" else self.mixture.samples * (own_rows > 0)

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """Return all registered clients, as rows are redrawn in every round."""
        return self.view.everyone[: None if moment.round != before.round else 0]


def _among(shares: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Scale the shares of the present domains to sum to 1; equal shares if all are 0."""
    if present.all():
        return shares
    shares = np.where(present, shares, 0.0)
    return shares / shares.sum() if shares.any() else present / present.sum()


def _counts(rows: int, shares: np.ndarray) -> list[int]:
    """Divide `rows` over the domains by differences of rounded cumulative sums, so that the counts sum to `rows`.

    The sums run from the last domain backwards: of two domains the second has `round(share * rows)`.

    >>> _counts(10, np.full(3, 1 / 3))
    [3, 4, 3]
    """
    sums = [*np.cumsum(shares[:0:-1]).tolist()[::-1], 0.0]
    up_to = [rows, *(round(total * rows) for total in sums)]
    return [more - fewer for more, fewer in pairwise(up_to)]
