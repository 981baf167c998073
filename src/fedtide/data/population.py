"""The population: all clients, their rows, and how both change with time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.types import Moment, Shard
from fedtide.core.user_code import own
from fedtide.data.generated import GeneratedRows
from fedtide.data.ragged import Ragged, Spans
from fedtide.data.rows import Rows
from fedtide.data.shift import Shift
from fedtide.data.shift.availability import AvailabilityPlan
from fedtide.data.shift.how import Reading, RowTransform
from fedtide.data.shift.what import Holding, Plan, PopulationView
from fedtide.data.shift.who import Arriving
from fedtide.data.transforms import Prepare, prepared, shape_after


@dataclass(frozen=True)
class Population:
    """Who could take part, and what they hold at a moment.

    Clients are 0..registered-1; ids from `registered` on are held-out clients, which are evaluated and never asked.
    Groups are the ground truth (day or night, which rotation), for the shift and for diagnostics: no algorithm can
    see them. Everything is index arrays, so a million clients are a few hundred megabytes.

    Args:
        rows: the samples.
        parts: "train", "val", "test" -> which rows each client holds in all.
        group: (clients,) the group of each client, held-out ones included.
        group_names: the names of the groups.
        registered: how many clients can be asked.
        shift: who, what, how.
        seed: of arrivals, mixtures and everything else that is drawn.
        names: what the source calls each client (writer, user, station), or () where it names none.
        transforms: what is done to rows when they are handed out, in order.
        public: rows that everybody may see, without their labels, and that no client holds, sorted.
    """

    rows: Rows | GeneratedRows
    parts: Mapping[str, Ragged] | Mapping[str, Spans]
    group: Tensor
    group_names: tuple[str, ...]
    registered: int
    shift: Shift = field(default_factory=Shift)
    seed: int = 0
    names: tuple[str, ...] = ()
    transforms: tuple[Prepare, ...] = ()
    public: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        self._who.check(self.group_names, [len(members) for members in self._members])
        if self.availability is not None and not self.availability.awake(0.0).any():
            raise FedtideError(
                "shift.who.path: no registered client is awake at 0, when algorithms begin; allowed: one or more"
            )
        classes = None if self.rows.steps else self.rows.classes
        self._how.check(len(self.group_names), self.rows.shape, classes)
        shape_after(self.transforms, self.rows.name, self.rows.shape)
        self._what.check(self._view)

    def check(self, rounds: int) -> None:
        """Raise where the shift cannot be played for so many rounds, as far as that is known before they are played."""
        if self.shift.clock == "rounds":
            self.plan.check(rounds)
            self.row_transform.events(float(rounds), 0.0)  # which counts them, and there may be too many

    @property
    def _view(self) -> PopulationView:
        people = (self.registered, self.group, self.names)
        # Generated rows meet no shift that looks at more of them than a client's: `generated_population` refuses it.
        rows, parts = cast(Rows, self.rows), cast(Mapping[str, Ragged], self.parts)
        return PopulationView(rows, parts, *people, self.seed, self.shift.time)

    @cached_property
    def _who(self) -> Arriving:
        needs = ("check", "plan", "shares", "arrivals", "filled_in", "reachable", "dropout_rate", "recorded")
        return cast(Arriving, own(self.shift.who, "shift.who", needs))

    @cached_property
    def _what(self) -> Holding:
        return cast(Holding, own(self.shift.what, "shift.what", ("check", "plan")))

    @cached_property
    def _how(self) -> Reading:
        return cast(Reading, own(self.shift.how, "shift.how", ("check", "plan")))

    @cached_property
    def plan(self) -> Plan:
        """Which rows each client holds when."""
        return self._what.plan(self._view)

    @cached_property
    def row_transform(self) -> RowTransform:
        """What the rows of each client mean when."""
        return self._how.plan(self._view)

    @cached_property
    def availability(self) -> AvailabilityPlan | None:
        """Which clients are there at a time, apart from what they hold; None where all are."""
        return self._who.plan(self._view)

    # -- who ----------------------------------------------------------------------------------------------------------

    @cached_property
    def _members(self) -> list[Tensor]:
        """The registered clients of each group."""
        return [(self.group[: self.registered] == k).nonzero().flatten() for k in range(len(self.group_names))]

    def there(self, moment: Moment) -> Tensor | None:
        """Which registered clients hold anything (registered,) bool, so that they can take part; None where all do."""
        return self.plan.there(moment)

    def _members_at(self, moment: Moment) -> list[Tensor]:
        """The registered clients of each group that hold anything and are awake."""
        # Another run's arrivals are replayed as they were, and those who hold nothing now are left out of them.
        there = None if self._who.recorded else self.there(moment)
        awake = None if self.availability is None else self.availability.awake(self.shift.time(moment))
        if there is None and awake is None:
            return self._members
        here = torch.stack([each for each in (there, awake) if each is not None]).all(0)
        return [members[here[members]] for members in self._members]

    def wait(self, moment: Moment) -> float:
        """Seconds until somebody is awake, on the clock of seconds; 0 where somebody is."""
        if self.availability is None or self.shift.clock != "seconds":
            return 0.0
        return self.availability.wait(moment.seconds)

    @cached_property
    def clients(self) -> Tensor:
        """Every registered id, sorted."""
        return torch.arange(self.registered)

    @cached_property
    def held_out_clients(self) -> Tensor:
        """Ids of the clients that never take part in training, sorted."""
        return torch.arange(self.registered, len(self.group))

    def expected(self, moment: Moment) -> np.ndarray:
        """q(t): the expected share of each group among the arrivals (groups,)."""
        members = self._members if self.availability is None else self._members_at(moment)
        if not any(len(some) for some in members):  # while all are asleep it is anybody's turn
            members = self._members
        sizes = np.array([len(some) for some in members])
        return self._who.shares(self.shift.time(moment), sizes)

    def arrivals(self, m: int, moment: Moment) -> Tensor:
        """The `m` clients that arrive at `moment`, sorted: from (seed, round) alone."""
        return self.arrivals_in_order(m, moment).sort().values

    def arrivals_in_order(self, m: int, moment: Moment) -> Tensor:
        """The `m` clients that arrive at `moment`, as they come: the first of more are the same."""
        key = Rng(self.seed).at(moment.round, "arrivals")
        came = self._who.arrivals(m, self._members_at(moment), self.shift.time(moment), key)
        return self._only_there(came, moment)

    def _only_there(self, clients: Tensor, moment: Moment) -> Tensor:
        there = self.there(moment) if self._who.recorded else None
        return clients if there is None else clients[there[clients]]

    def filled_in(self, m: int, moment: Moment) -> int:
        """How many of `m` arrivals stand in for clients of a group that has no more."""
        key = Rng(self.seed).at(moment.round, "arrivals")
        return self._who.filled_in(m, self._members_at(moment), self.shift.time(moment), key)

    def reachable(self, moment: Moment) -> Tensor:
        """The registered clients that could answer at `moment`, sorted: the first so many in the order of arrival."""
        key = Rng(self.seed).at(moment.round, "arrivals")
        reachable = self._who.reachable(self._members_at(moment), self.shift.time(moment), key)
        return self._only_there(reachable, moment)

    def answers(self, clients: Tensor, moment: Moment, ask: int, began: Tensor | None = None) -> Tensor:
        """Which of the asked `clients` do not drop out (clients,) bool.

        Args:
            clients: who was asked.
            moment: when.
            ask: counts the asks of a round.
            began: (clients,) when each was sent the question, where that may be in an earlier round: a client drops out
                once, and not anew in each round in which it is asked after.
        """
        if not self._who.dropout_rate:
            return torch.ones(len(clients), dtype=torch.bool)
        key = Rng(self.seed)
        if began is None:
            keys = [key.at(moment.round, ask, client, "dropout") for client in clients.tolist()]
        else:
            pairs = zip(began.tolist(), clients.tolist(), strict=True)
            keys = [key.at("since", since.hex(), client, "dropout") for since, client in pairs]
        chance = [each.numpy().random() for each in keys]
        return torch.tensor(chance) >= self._who.dropout_rate

    # -- what and how -------------------------------------------------------------------------------------------------

    def held(self, client: int, moment: Moment, part: str) -> Tensor:
        """The rows that a client holds at `moment`, sorted."""
        return self.plan.hold(client, part, moment)

    def counts(self, clients: Tensor, part: str, moment: Moment | None = None) -> Tensor:
        """How many rows each of `clients` holds at a moment; without one, those that it holds at some time."""
        return self.plan.counts(clients, part, moment)

    def sizes(self, clients: Tensor, part: str, moment: Moment | None = None) -> Tensor:
        """How much there is to judge of each of `clients`: rows, or all steps of their sequences."""
        return self.counts(clients, part, moment) * (self.rows.steps or 1)

    def judged(self, clients: Tensor, part: str, moment: Moment) -> Tensor:
        """Those of `clients` that can be judged at a moment: they hold rows of the part and take part."""
        counted = self.counts(clients, part, moment) > 0
        there = self.there(moment)
        if there is not None:
            seen = clients < self.registered
            counted &= ~seen | there[torch.where(seen, clients, 0)]
        return clients if bool(counted.all()) else clients[counted]

    def group_at(self, moment: Moment) -> Tensor:
        """The true group of each client at a moment (clients,), of which `what` or `how` may have groups of its own."""
        drifting = self.drifting_group(moment)
        return self.group if drifting is None else drifting

    def drifting_group(self, moment: Moment) -> Tensor | None:
        """The group of each client (clients,) where `what` or `how` has groups of its own; None at all times if not."""
        drifting = self.plan.group(moment)
        return self.row_transform.group(self.shift.time(moment)) if drifting is None else drifting

    def changed(self, moment: Moment, before: Moment | None = None) -> Tensor:
        """The registered clients that drifted, sorted: they hold other rows than before, or these have other labels.

        Args:
            moment: when.
            before: with when it is compared; None is the round before, if the shift reads rounds.
        """
        before = self._before(moment) if before is None else before
        moved = self.plan.changed(moment, before)
        other = self.row_transform.changed(self.shift.time(moment), self.shift.time(before))
        read = [c for c in other[~torch.isin(other, moved)].tolist() if self._reads_otherwise(c, moment, before)]
        return torch.cat([moved, torch.tensor(read, dtype=torch.int64)]).sort().values

    def _reads_otherwise(self, client: int, moment: Moment, before: Moment) -> bool:
        """Whether labels of a client that holds the same rows are others; one that it has none of does not count."""
        for part in self.parts:
            rows = self.held(client, moment, part)
            whose = torch.tensor(client).expand(len(rows))
            now, then = (self._labels(rows, whose, self.shift.time(at)) for at in (moment, before))
            if not torch.equal(now, then):
                return True
        return False

    def _labels(self, rows: Tensor, clients: Tensor, time: float) -> Tensor:
        """What rows are labeled at a time; `clients` (rows,) hold them."""
        y = self.rows.labels(rows)
        pictures = torch.empty(len(y), 1, 1, 1)  # to be turned, if need be
        return self.row_transform.apply(pictures, y, clients, time)[1]

    def label_shares(self, clients: Tensor, moment: Moment, part: str = "train") -> Tensor:
        """How much of what each client holds is of each class (clients, classes) float64; zeros of who holds nothing.

        Of rows, not of sequences, as they mean at `moment`.
        """
        rows, owner = self.pooled(clients, moment, part)
        labels = self._labels(rows, clients[owner], self.shift.time(moment)).long()
        cells = len(clients) * self.rows.classes
        counts = torch.bincount(owner * self.rows.classes + labels, minlength=cells).reshape(len(clients), -1)
        return counts.double() / counts.sum(1, keepdim=True).clamp(min=1)

    def events(self, moment: Moment, before: Moment | None = None) -> tuple[str, ...]:
        """What happened to rows and labels since the round before, or `before`: "arrival", "drift", "swap", ..."""
        before = self._before(moment) if before is None else before
        times = self.shift.time(moment), self.shift.time(before)
        return (*self.plan.events(moment, before), *self.row_transform.events(*times))

    def _before(self, moment: Moment) -> Moment:
        """The round before, on the clock of rounds: on that of seconds nobody knows here when it was."""
        if self.shift.clock != "rounds":
            raise ValueError("on the clock of seconds, say since when")
        return replace(moment, round=moment.round - 1)

    def fetch(self, rows: Tensor, clients: int | Tensor, moment: Moment) -> tuple[Tensor, Tensor]:
        """x and y of some rows as they mean at `moment`; `clients` holds them (one for all, or one per row)."""
        x, y = self.rows.take(rows)
        x = _features(x)
        whose = clients if isinstance(clients, Tensor) else torch.tensor(clients).expand(len(rows))
        x, y = self.row_transform.apply(x, y, whose, self.shift.time(moment))
        return prepared(self.transforms, x), y

    def public_features(self) -> Tensor:
        """x of the public rows as a model sees them; no shift turns them, as they are of no group."""
        return prepared(self.transforms, _features(self.rows.take(self.public)[0]))

    def shard(self, client: int, moment: Moment, part: str = "train") -> Shard:
        """What one client holds at `moment`; its validation rows are fetched when they are looked at."""
        rows = self.held(client, moment, part)
        x, y = self.fetch(rows, client, moment)
        time = None if self.rows.time is None else self.rows.time[rows.long()]
        held_out = None
        if part == "train" and self.has_val:
            held_out = lambda: self.shard(client, moment, "val")  # noqa: E731 - fetched only where it is used
        return Shard(x, y, rows, time, self.rows.mask(y), held_out)

    def shards(self, clients: Tensor, moment: Moment) -> list[Shard]:
        """The training rows of several clients at `moment`, fetched at once: the same as `shard` of each."""
        rows, owner = self.pooled(clients, moment, "train")
        x, y = self.fetch(rows, clients[owner], moment)
        mask, sizes = self.rows.mask(y), torch.bincount(owner, minlength=len(clients)).tolist()
        columns = (x, y, rows, None if self.rows.time is None else self.rows.time[rows.long()], mask)
        parts = [[None] * len(sizes) if column is None else column.split(sizes) for column in columns]
        fetch = [partial(self.shard, client, moment, "val") if self.has_val else None for client in clients.tolist()]
        return [Shard(*own) for own in zip(*parts, fetch, strict=True)]

    def pooled(self, clients: Tensor, moment: Moment, part: str) -> tuple[Tensor, Tensor]:
        """The rows of several clients, one after the other, and for each its owner's position in `clients`."""
        lists = [self.held(client, moment, part) for client in clients.tolist()]
        counts = torch.tensor([len(rows) for rows in lists], dtype=torch.int64)
        owner = torch.repeat_interleave(torch.arange(len(clients)), counts)
        return (torch.cat(lists) if lists else torch.empty(0, dtype=torch.int64)), owner

    @cached_property
    def has_val(self) -> bool:
        """Whether anyone has validation rows."""
        return bool(self.counts(torch.arange(len(self.group)), "val").any())


def _features(x: Tensor) -> Tensor:
    """Features as the source means them: bytes are 0 to 1."""
    return x.to(torch.float32).mul_(1 / 255) if x.dtype == torch.uint8 else x
