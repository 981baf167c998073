"""The population: all clients, their rows, and the changes of both over time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import Moment, Over, Shard, mean_of_rows
from fedtide.core.errors import FedtideError, Words, missing, refused
from fedtide.core.rng import Rng
from fedtide.data.ragged import BLOCK, Ragged, Spans, count_pairs
from fedtide.data.rows import BASELINES, GeneratedRows, Rows
from fedtide.data.shift import Shift
from fedtide.data.shift.how import Identity, Reading, RowTransform
from fedtide.data.shift.what import JUDGED, Holding, Plan, PopulationView, Window
from fedtide.data.shift.who import Arriving, AvailabilityPlan
from fedtide.data.transforms import Prepare, apply_transforms, features, shape_after
from fedtide.draw.tables import html_table
from fedtide.fields.types import seconds_of
from fedtide.fields.user_code import build_part
from fedtide.learn.device import CPU
from fedtide.learn.target import Measured, Target

TRANSFORMED = 2**28
"""Maximum number of bytes of all rows after transforms, if these are kept."""


@dataclass(frozen=True, repr=False)
class Population:
    """All clients with their availability and their rows over time.

    Clients are 0..registered-1; ids from `registered` on are held-out clients, which are evaluated and never trained.
    Groups are the ground truth (day or night, which rotation), for the shift and for diagnostics; algorithms cannot see
    them. All fields are index arrays, so that a million clients take a few hundred megabytes.

    Args:
        rows: the samples.
        parts: "train", "val", "test" -> all rows that each client holds at some time.
        group: (clients,) the group of each client, held-out ones included.
        group_names: the names of the groups.
        registered: number of clients that can take part in training.
        shift: the change over time: who, what, how.
        seed: the seed of arrivals, mixtures and all other random draws.
        names: the source's name of each client (writer, user, station), or () if it has none.
        transforms: transforms of the rows that clients receive, in order.
        public: rows that are public without their labels and that no client holds, sorted.
        device: device of the features that clients get.
        left: ids of registered clients that have left, sorted. They are drawn as before and answer nothing, and no
            number is made of their rows.
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
    device: str = CPU
    left: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __repr__(self) -> str:
        rows = self.rows
        aside = len(self.group) - self.registered
        counts = [f"{self.registered} clients", *([f"{aside} held out"] if aside else []), f"{len(rows)} rows"]
        return f"Population({', '.join(counts)} of shape {tuple(rows.shape)}, {rows.labeled})"

    def _repr_html_(self) -> str:
        """Return the clients, their rows and the shift as a table, for a notebook."""
        lines = [("", repr(self))]
        for part, purpose in (("train", "train on"), ("val", "validate on"), ("test", "test on")):
            rows = self.counts(torch.arange(len(self.group)), part)
            lines.append((f"rows to {purpose}", f"{int(rows.sum())}, {float(rows.double().mean()):g} a client"))
        sizes = zip(self.group_names, self.group.bincount(minlength=len(self.group_names)).tolist(), strict=True)
        lines.append(("clients of each group", ", ".join(f"{name} {count}" for name, count in sizes)))
        parts = (("who", self.shift.who), ("what", self.shift.what), ("how", self.shift.how))
        kinds = [f"{name}: {getattr(part, 'kind', type(part).__name__)}" for name, part in parts]
        return html_table([*lines, ("shift", ", ".join(kinds))])

    def __post_init__(self) -> None:
        self._who.check(self.group_names, [len(members) for members in self._members])
        if self.availability is not None and not self.availability.awake(0.0).any():
            raise FedtideError("shift.who: no registered client is awake at 0, allowed: one or more")
        kind = getattr(self._how, "kind", "python")
        if self.rows.value is not None and kind not in ("identity", "rotation", "python"):
            raise refused("shift.how.kind", kind, "'identity'", "it exchanges labels, and rows have no classes")
        self._how.check(len(self.group_names), self.rows.shape, None if self.rows.steps else self.rows.classes)
        shape_after(self.transforms, self.rows.name, self.rows.shape)
        self._what.check(self._view)
        if self._by_rows and not self.apart:
            kind = getattr(self.shift.what, "kind", type(self.shift.what).__name__)
            raise refused("shift.who.kind", "data", "what = 'calendar', or who = 'always'", f"what is '{kind}'")

    def check(self, rounds: int) -> None:
        """Raise if the shift does not fit a number of rounds, as far as this is known in advance."""
        if self.shift.clock == "rounds" or self.apart:
            self.plan.check(rounds)
        if self.shift.clock == "rounds":
            self.row_transform.events(float(rounds), 0.0)  # counts the events and raises if there are too many

    @property
    def target(self) -> Target:
        """The target of the rows."""
        return self.rows.target

    @property
    def trained_on(self) -> Tensor:
        """Positions of all rows that registered clients train on at some time, client by client."""
        train = cast(Ragged, self.parts["train"])
        rows = train.rows[: train.start[self.registered]]
        return rows[self.remains(train.owner[: len(rows)])] if len(self.left) else rows

    @property
    def _view(self) -> PopulationView:
        rows: Any = self.rows  # generated ones are refused with a shift that needs rows of more than one client
        parts: Any = self.parts
        return PopulationView(rows, parts, self.registered, self.group, self.names, self.seed, self.shift.time)

    @cached_property
    def _who(self) -> Arriving:
        needs = ("check", "plan", "shares", "arrivals", "substituted", "reachable", "dropout_rate", "recorded")
        return cast(Arriving, build_part(self.shift.who, "shift.who", needs))

    @cached_property
    def _what(self) -> Holding:
        return cast(Holding, build_part(self.shift.what, "shift.what", ("check", "plan")))

    @cached_property
    def _how(self) -> Reading:
        return cast(Reading, build_part(self.shift.how, "shift.how", ("check", "plan")))

    # A user's own kinds need not inherit from ours.
    @property
    def apart(self) -> bool:
        """True if clients never decide by rows that they are judged on, because these rows are still to come."""
        return getattr(self._what, "ahead", False)

    @property
    def _by_rows(self) -> bool:
        return getattr(self._who, "by_rows", False)

    @cached_property
    def _dated(self) -> Any:
        """Plan of rows that arrive at real times (as `CalendarPlan`); None if rows do not arrive."""
        return self.plan if self.apart else None

    @cached_property
    def plan(self) -> Plan:
        """Plan of the rows that each client holds over time."""
        return self._what.plan(self._view)

    @cached_property
    def row_transform(self) -> RowTransform:
        """Transform that gives the rows of each client their meaning over time."""
        return self._how.plan(self._view)

    def _reading(self, part: str) -> RowTransform:
        """Return the transform of the rows of a part; rows on which clients are judged may have another."""
        reading = self.row_transform
        return getattr(reading, "judged", reading) if part in JUDGED else reading

    @cached_property
    def availability(self) -> AvailabilityPlan | None:
        """Plan of the clients' availability over time, whatever rows they hold; None if all are always available."""
        return self._who.plan(self._view)

    # -- availability -------------------------------------------------------------------------------------------------

    @cached_property
    def _members(self) -> list[Tensor]:
        """Registered clients of each group."""
        if len(self.group_names) == 1:
            return [self.clients]
        return [(self.group[: self.registered] == k).nonzero().flatten() for k in range(len(self.group_names))]

    def there(self, moment: Moment) -> Tensor | None:
        """Return the mask (registered,) of the clients that hold rows and can take part; None if all do."""
        return self.plan.there(moment)

    def _members_at(self, moment: Moment) -> list[Tensor]:
        """Return the registered clients of each group that hold rows and are awake."""
        # Arrivals of another run are replayed unchanged; clients without rows are removed from them later.
        holders = None if self._who.recorded else self.there(moment)
        awake = None if self.availability is None else self.availability.awake(self.shift.time(moment))
        fresh = self._dated.fresh(moment) if self._dated and self._by_rows else None
        masks = [mask for mask in (holders, awake, fresh) if mask is not None]
        if not masks:
            return self._members
        here = torch.stack(masks).all(0)
        return [members[here[members]] for members in self._members]

    def window(self, moment: Moment) -> Window | None:
        """Return the window of wall-clock time of a round; None where rounds have none."""
        return None if self._dated is None else self._dated.window(moment)

    def clock(self, number: int) -> float | None:
        """Return the time at which a round begins on the clock of the run; None where this is up to the devices."""
        return None if self._dated is None else self._dated.clock(number)

    def wait(self, moment: Moment) -> float:
        """Return the seconds until a client is awake, on the clock of seconds; 0 if one is."""
        if self.availability is None or self.shift.clock != "seconds":
            return 0.0
        return self.availability.wait(moment.seconds)

    @cached_property
    def clients(self) -> Tensor:
        """Ids of all registered clients, sorted."""
        return torch.arange(self.registered)

    @cached_property
    def held_out_clients(self) -> Tensor:
        """Ids of the clients that never take part in training, sorted."""
        return torch.arange(self.registered, len(self.group))

    def without(self, names: Sequence[str], key: str) -> "Population":
        """Return the population without some clients; `key` begins the error.

        Raises:
            FedtideError: a client is not registered, or none would be left.
        """
        left = torch.tensor([self.number_of(name, key) for name in names], dtype=torch.int64).unique()
        if len(left) and int(left[-1]) >= self.registered:
            but = "the others are held out, and never take part" if len(self.held_out_clients) else ""
            raise refused(key, int(left[-1]), f"0 to {self.registered - 1}", but)
        if len(left) == self.registered:
            raise refused(key, Words(f"all {len(left)} clients"), "some of them")
        return replace(self, left=left)

    def number_of(self, name: str, key: str) -> int:
        """Return the number of a client, from 0, by its name in the data, such as "B6" or "carrier=B6".

        Only if clients have no names, the name is that number. `key` begins the error.

        Raises:
            FedtideError: no client has the name; the message has a few that there are.
        """
        names = self.names
        if name in names:
            return names.index(name)
        if (last := name.partition("=")[2]) in names:
            return names.index(last)
        if not names and name.isdecimal() and len(name) < 19:  # a longer one is no number of a tensor
            return int(name)
        raise missing(key, name, names, "the number of a client, from 0")

    def remains(self, clients: Tensor) -> Tensor:
        """Return the mask (clients,) of those that have not left."""
        return ~torch.isin(clients, self.left)

    def expected(self, moment: Moment) -> np.ndarray:
        """Return q(t), the expected share of each group among the arrivals (groups,)."""
        limited = self.availability is not None or self._by_rows
        members = self._members_at(moment) if limited else self._members
        if not any(len(group) for group in members):  # if no client is awake, all clients count
            members = self._members
        sizes = np.array([len(group) for group in members])
        return self._who.shares(self.shift.time(moment), sizes)

    def arrivals(self, m: int, moment: Moment) -> Tensor:
        """Return the `m` clients that arrive at `moment`, sorted; they depend on seed and round alone."""
        return self.arrivals_in_order(m, moment).sort().values

    def arrivals_in_order(self, m: int, moment: Moment) -> Tensor:
        """Return the `m` clients that arrive at `moment`, in order; a larger `m` only appends clients."""
        return self._only_there(self._who.arrivals(m, *self._draw(moment)), moment)

    def _draw(self, moment: Moment) -> tuple[list[Tensor], float, Rng]:
        """Return the source of arrivals: the available clients of each group, the time, and the key."""
        return self._members_at(moment), self.shift.time(moment), Rng(self.seed).at(moment.round, "arrivals")

    def _only_there(self, clients: Tensor, moment: Moment) -> Tensor:
        holders = self.there(moment) if self._who.recorded else None
        return clients if holders is None else clients[holders[clients]]

    def substituted(self, m: int, moment: Moment) -> int:
        """Count the arrivals among `m` that replace clients of an exhausted group."""
        return self._who.substituted(m, *self._draw(moment))

    def reachable(self, moment: Moment) -> Tensor:
        """Return the registered clients that could answer at `moment`, sorted: a prefix of the order of arrival."""
        return self._only_there(self._who.reachable(*self._draw(moment)), moment)

    def answers(self, clients: Tensor, moment: Moment, ask: int, began: Tensor | None = None) -> Tensor:
        """Return the mask (clients,) of the asked `clients` that have not left and do not drop out.

        Args:
            clients: the asked clients.
            moment: the time of the request.
            ask: number of the request within its round.
            began: (clients,) times at which the clients were asked, if this may be in an earlier round. A client then
                drops out once, and not again in each later round.
        """
        if not self._who.dropout_rate:
            return self.remains(clients)
        times: list[tuple[Any, ...]] = [(moment.round, ask)] * len(clients)
        if began is not None:
            times = [("since", since.hex()) for since in began.tolist()]
        pairs = zip(times, clients.tolist(), strict=True)
        chance = [Rng(self.seed).at(*time, client, "dropout").numpy().random() for time, client in pairs]
        return (torch.tensor(chance) >= self._who.dropout_rate) & self.remains(clients)

    # -- rows and labels ----------------------------------------------------------------------------------------------

    def held(self, client: int, moment: Moment, part: str) -> Tensor:
        """Return the rows of a part that a client trains on or is judged on at `moment`, sorted."""
        return self.plan.hold(client, part, moment)

    def counts(self, clients: Tensor, part: str, moment: Moment | None = None) -> Tensor:
        """Count the rows that each of `clients` holds at a moment; None counts the rows that it holds at some time."""
        return self.plan.counts(clients, part, moment)

    def sizes(self, clients: Tensor, part: str, moment: Moment | None = None) -> Tensor:
        """Count the units of evaluation of each of `clients`: its rows, or all steps of its sequences."""
        return self.counts(clients, part, moment) * (self.rows.steps or 1)

    def judged(self, clients: Tensor, part: str, moment: Moment) -> Tensor:
        """Return the clients that can be evaluated at a moment: they have not left, are available, and hold such rows.

        If these rows are still to come, clients without training rows are evaluated, too.
        """
        counted = (self.counts(clients, part, moment) > 0) & self.remains(clients)
        holders = None if self.apart else self.there(moment)  # what is to come is judged, whoever has nothing yet
        if holders is not None:
            seen = clients < self.registered
            counted &= ~seen | holders[torch.where(seen, clients, 0)]
        return clients[counted]

    def group_at(self, moment: Moment) -> Tensor:
        """Return the true group of each client (clients,) at a moment, including groups defined by `what` or `how`."""
        drifting = self.drifting_group(moment)
        return self.group if drifting is None else drifting

    def drifting_group(self, moment: Moment) -> Tensor | None:
        """Return the group of each client (clients,) as defined by `what` or `how`; None if neither defines groups."""
        drifting = self.plan.group(moment)
        return self.row_transform.group(self.shift.time(moment)) if drifting is None else drifting

    def changed(self, moment: Moment, before: Moment | None = None) -> Tensor:
        """Return the registered clients that drifted, sorted: their rows or the labels of these rows changed.

        Args:
            moment: the current time.
            before: the time to compare with; None is the previous round, if the clock of the shift is rounds.
        """
        before = self._before(moment) if before is None else before
        moved = self.plan.changed(moment, before)
        other = self.row_transform.changed(self.shift.time(moment), self.shift.time(before))
        still, pictures = other[~torch.isin(other, moved)].tolist(), getattr(self.row_transform, "pictures", False)
        read = still if pictures else [c for c in still if self._reads_otherwise(c, moment, before)]
        return torch.cat([moved, torch.tensor(read, dtype=torch.int64)]).sort().values

    def may_differ(self, moment: Moment, before: Moment) -> Tensor:
        """Return the registered clients that may hold other samples than `before`, sorted; all if that is unknown."""
        # Plans of a user's own kinds need not say which clients changed.
        if any(getattr(part, "kind", "python") == "python" for part in (self._what, self._how)):
            return self.clients
        read = self.row_transform.changed(self.shift.time(moment), self.shift.time(before))
        return torch.cat([self.plan.changed(moment, before), read]).unique()

    def _reads_otherwise(self, client: int, moment: Moment, before: Moment) -> bool:
        """Tell whether any row of a client, whose rows did not change since `before`, has another label."""
        rows = torch.cat([self.held(client, moment, part) for part in self.parts])
        whose = torch.tensor(client).expand(len(rows))
        now, then = (self._labels(rows, whose, self.shift.time(at)) for at in (moment, before))
        return not torch.equal(now, then)

    def _labels(self, rows: Tensor, clients: Tensor, time: float, part: str = "train") -> Tensor:
        """Return the labels of rows at a time; `clients` (rows,) hold them."""
        y = self.rows.labels(rows)
        pictures = torch.empty(len(y), 1, 1, 1)  # images for the transform, which may rotate them
        return self._reading(part).apply(pictures, y, clients, time)[1]

    def label_shares(self, clients: Tensor, moment: Moment) -> Tensor:
        """Return the share of each class among a client's training rows (clients, classes) float64; zeros without rows.

        Shares are of rows, not of sequences, with their labels at `moment`.
        """
        rows, owner = self.pooled(clients, moment, "train")
        labels = self._labels(rows, clients[owner], self.shift.time(moment), "train").long()
        counts = count_pairs(owner, labels, len(clients), self.rows.classes)
        return counts.double() / counts.sum(1, keepdim=True).clamp(min=1)

    def commonest(self, clients: Tensor, moment: Moment, part: str, over: Over = "rows") -> float | None:
        """Return the share of the commonest class among the rows of clients; None without rows, and of sequences.

        Over clients it is the mean of their shares of that class.

        If test rows are still to come, the class is the commonest one of all rows that came before. Other targets have
        the headline of the best constant prediction (`Target.score_constant`).
        """
        rows, owner = self.pooled(clients, moment, part)
        before = self._arrived(moment) if self._dated and part != "train" else None
        if self.rows.steps is not None or not len(rows) or (before is not None and not len(before[0])):
            return None

        def targets_of(rows: Tensor, clients: Tensor) -> Tensor:
            return self.rows.targets(rows, self._labels(rows, clients, self.shift.time(moment), part).long())[0]

        y = targets_of(rows, clients[owner])
        scores = self.target.score_constant(y, y if before is None else targets_of(*before))
        return mean_of_rows(over, scores, owner)

    def training_rows(self, moment: Moment) -> tuple[Tensor, Tensor]:
        """Return the training rows of all clients, and the client that holds each.

        If rows arrive, these are all that have come with their labels, also those that are no longer held.
        """
        if self._dated:
            return self._arrived(moment, "train")
        clients = self.clients[self.remains(self.clients)]
        rows, owner = self.pooled(clients, moment, "train")
        return rows, clients[owner]

    def _arrived(self, moment: Moment, *parts: str) -> tuple[Tensor, Tensor]:
        """Return the rows that have come so far of the clients that have not left, and their owners."""
        rows, owner = self._dated.arrived(moment, *parts)
        remain = self.remains(owner)
        return rows[remain], owner[remain]

    def baselines(self, clients: Tensor, moment: Moment, part: str) -> dict[str, float]:
        """Return the skill of saying the value of the same client a day and a week ago, of numbers that have a time.

        A row without such a value has the constant of the target. Left out if fewer than half of the rows have one, or
        if labels of that time are not known yet.
        """
        if not isinstance(self.target, Measured) or not isinstance(self.rows, Rows) or self.rows.value is None:
            return {}
        rows, _ = self.pooled(clients, moment, part)
        skills = {}
        delay = getattr(self.shift.what, "delay", None)
        for name, earlier in self.rows.earlier.items():
            if delay is not None and BASELINES[name].seconds < seconds_of(delay):
                continue
            before = earlier[rows.long()]
            present = before >= 0
            if len(rows) and 2 * int(present.sum()) >= len(rows):
                constant = torch.tensor(self.target.constant)
                answers = torch.where(present[:, None], self.rows.value[before.clamp(min=0), None], constant)
                skills[name] = self.target.skill_of(answers, self.rows.value[rows.long()])
        return skills

    def events(self, moment: Moment, before: Moment | None = None) -> tuple[str, ...]:
        """Return the names of events since the previous round or `before`: "arrival", "drift", "swap", ..."""
        before = self._before(moment) if before is None else before
        times = self.shift.time(moment), self.shift.time(before)
        return (*self.plan.events(moment, before), *self.row_transform.events(*times))

    def _before(self, moment: Moment) -> Moment:
        """Return the previous round on the clock of rounds; on that of seconds its time is not known here."""
        if self.shift.clock != "rounds":
            raise ValueError("on the clock of seconds, say since when")
        return replace(moment, round=moment.round - 1)

    def fetch(
        self, rows: Tensor, clients: int | Tensor, moment: Moment, device: str = CPU, part: str = "train"
    ) -> tuple[Tensor, Tensor]:
        """Return x and y of some rows with their meaning at `moment`; `clients` (one, or one per row) hold them.

        The part tells whether clients are judged on the rows.

        On another device than the CPU x is gathered, scaled and turned there, if rows lie on it.
        """
        own_code = getattr(self._how, "kind", "python") == "python"  # which may expect to find x on the CPU
        ready = None
        if isinstance(self.rows, Rows) and self._transforms_once and device == CPU:  # a GPU rounds in another way
            ready = self.rows.transformed(self.transforms, len(rows))
        x, y = (self.rows if ready is None else ready).take(rows, CPU if own_code else device)
        x = features(x)
        whose = clients if isinstance(clients, Tensor) else torch.tensor(clients).expand(len(rows))
        x, y = self._reading(part).apply(x, y, whose, self.shift.time(moment))
        return (apply_transforms(self.transforms, x) if ready is None else x), y

    @cached_property
    def _transforms_once(self) -> bool:
        """Tell whether rows may be transformed once for all: nothing comes before, and the result is small."""
        size = 4 * len(self.rows) * math.prod(shape_after(self.transforms, self.rows.name, self.rows.shape))
        return bool(self.transforms) and size <= TRANSFORMED and isinstance(self._how, Identity)

    def shard_of(
        self, rows: Tensor, clients: int | Tensor, moment: Moment, device: str = CPU, part: str = "train"
    ) -> Shard:
        """Return some rows as a model sees them at `moment`; arguments are those of `fetch`."""
        x, labels = self.fetch(rows, clients, moment, device, part)
        y, bins = self.rows.targets(rows, labels)
        time = None if self.rows.time is None else self.rows.time[rows.long()]
        return Shard(x, y, rows, time, self.rows.mask(y), bins=bins)

    def few(self) -> tuple[Shard, int]:
        """Return some rows as a model sees them, and the number of classes of all.

        The smallest label, and of tokens the smallest and the largest, are among them.
        """
        rows = torch.arange(min(2, len(self.rows)))
        if isinstance(self.rows, Rows):
            rows = torch.cat([rows, self.rows.extremes]).unique()
        return replace(self.shard_of(rows, 0, Moment(0, 1)), time=None), self.rows.classes

    def public_features(self) -> Tensor:
        """Return x of the public rows as a model sees them, without shift, since they belong to no group."""
        return apply_transforms(self.transforms, features(self.rows.take(self.public)[0]))

    def shard(self, client: int, moment: Moment, part: str = "train") -> Shard:
        """Return the rows that one client holds at `moment`; its validation rows are fetched when they are used."""
        fetch_val = partial(self.aside, client, moment) if part == "train" and self.has_val else None
        shard = self.shard_of(self.held(client, moment, part), client, moment, self.device, part)
        return replace(shard, fetch_val=fetch_val)

    def aside(self, client: int, moment: Moment) -> Shard:
        """Return the validation rows that a client decides on at `moment`."""
        return self.shard_of(self.plan.aside(client, moment), client, moment, self.device)

    def shards(self, clients: Tensor, moment: Moment) -> list[Shard]:
        """Return the training rows of several clients at `moment`, fetched at once: equal to `shard` of each client."""
        rows, owner = self.pooled(clients, moment, "train")
        joined = self.shard_of(rows, clients[owner], moment, self.device)
        sizes = torch.bincount(owner, minlength=len(clients)).tolist()
        columns = (joined.x, joined.y, joined.ids, joined.time, joined.mask, joined.bins)
        *parts, bins = [[None] * len(sizes) if column is None else column.split(sizes) for column in columns]
        fetch = [partial(self.aside, client, moment) if self.has_val else None for client in clients.tolist()]
        return [Shard(*columns_of_client) for columns_of_client in zip(*parts, fetch, bins, strict=True)]

    def pooled(self, clients: Tensor, moment: Moment, part: str) -> tuple[Tensor, Tensor]:
        """Return the concatenated rows of several clients, and for each row its owner's position in `clients`."""
        lists = [self.held(client, moment, part) for client in clients.tolist()]
        counts = torch.tensor([len(rows) for rows in lists], dtype=torch.int64)
        owner = torch.repeat_interleave(torch.arange(len(clients)), counts)
        return (torch.cat(lists) if lists else torch.empty(0, dtype=torch.int64)), owner

    def pool(self, clients: Tensor, moment: Moment, part: str) -> tuple[Shard, Tensor]:
        """Return the rows of several clients with their owners, as `pooled`; a mask tells which steps are scored."""
        rows, owner = self.pooled(clients, moment, part)
        x, y = self.fetch(rows, clients[owner], moment, self.device, part)
        y, bins = self.rows.targets(rows, y)
        return Shard(x, y, rows, mask=self.rows.scored(y), bins=bins), owner

    @cached_property
    def has_val(self) -> bool:
        """Tell whether any client has validation rows."""
        everyone = torch.arange(len(self.group)).split(BLOCK)
        return any(bool(self.counts(clients, "val").any()) for clients in everyone)
