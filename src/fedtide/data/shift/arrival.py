"""Rows that arrive and expire: interval by interval (streams), or in real time (calendars).

Streams are those of *Fielding: Clustered Federated Learning with Data Drift*, section 3 and appendix D (Table 1). The
formula of arrivals is the one that agrees with the paper's description of its data sets.

In real time a round is a window of wall-clock time, and rows arrive at their times. The next window is the test. Gama,
Sebastião, Rodrigues: *On evaluating stream learning algorithms*, Machine Learning 90, 2013.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.base import PARTS, Moment
from fedtide.core.errors import FedtideError, refused, shown
from fedtide.data.ragged import Ragged, count_pairs, rank_rows
from fedtide.data.shift.what import Holding, Plan, PopulationView, Window
from fedtide.fields.types import (
    DAY,
    Count,
    Duration,
    Positive,
    Spelled,
    Zone,
    allowing,
    ingredient,
    kept_if,
    seconds_of,
    zone_of,
)

CELLS = 20_000_000
"""Maximum number of stored row counts, one for each client and interval."""


@ingredient
class Labels:
    """Intervals by labels: a client's shuffled labels, with all their rows, are dealt to the intervals in turn."""

    kind: Literal["labels"] = "labels"


@ingredient
class Order:
    """Intervals by order: a client's rows in the source's order, such as frames, are cut into equal pieces."""

    kind: Literal["order"] = "order"


@ingredient
class Time:
    """Intervals by the time stamps of the rows, equal for all clients.

    Args:
        spans: intervals are "equal" spans of the whole range of times, or "quantiles", spans with equally many rows.
    """

    spans: Literal["equal", "quantiles"] = "equal"
    kind: Literal["time"] = "time"


By = Annotated[Labels | Order | Time, Field(discriminator="kind")]


@ingredient
class Stream(Holding):
    """Rows of each client in J intervals that arrive one after the other and expire.

    Interval j = 0, 1, ..., J-1 arrives at gap (j+1) - retention and expires `retention` later. So a client begins with
    the intervals whose arrival time is 0 or earlier, and never holds a row for longer than `retention`. Training,
    validation and test rows arrive and expire together: a client is tested on its current window. The last interval
    arrives at gap J - retention. The runs of the paper have that many rounds, and end before rows run out.
    At gap J all rows have expired. Times are rounds, or seconds, by `shift.clock`. With a gap as long as the run and a
    retention of J gaps all rows are there at all times, as a control experiment.

    Args:
        by: the kind of interval: some of the client's "labels", a piece of its rows in their "order", or a span of
            "time".
        intervals: J.
        gap: time between two arrivals; at most `retention`.
        retention: time from arrival to expiry of an interval.
        shared: training rows that all clients hold at all times. 0 means none, "half" a row of each label in the rarer
            half of the labels, 1 or 2 that many rows of each label. More shared rows make clients differ less.
        empty: treatment of a client without training rows of its own at some time. "error" raises. With "wait" the
            client does not arrive, is not reachable and is not evaluated until it has some.

    >>> Stream().live(0.0).nonzero()[0].tolist(), Stream().live(399.0).nonzero()[0].tolist()
    ([0, 1], [7, 8])
    """

    by: Annotated[By, Spelled] = Labels()
    intervals: Count = 10
    gap: Positive = 50
    retention: Positive = 100
    shared: Literal[0, "half", 1, 2] = 0
    empty: Literal["error", "wait"] = "error"
    kind: Literal["stream"] = "stream"
    drifts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.gap > self.retention:
            allowed = "a gap of at most the retention, because no client would hold rows between two intervals"
            raise ValueError(f"found gap {self.gap:g} and retention {self.retention:g}; allowed: {allowed}")

    @property
    def ends(self) -> np.ndarray:
        """Expiry time of each interval (intervals,); its arrival is `retention` earlier."""
        return self.gap * np.arange(1, self.intervals + 1)

    def live(self, time: float) -> np.ndarray:
        """Return the mask (intervals,) of the intervals that are present."""
        return (self.ends - self.retention <= time) & (time < self.ends)

    def check(self, view: PopulationView) -> None:
        """Raise if the stream does not fit the rows."""
        rows, clients = view.rows, len(view.group)
        if self.intervals > (most := max(CELLS // clients, 1)):
            allowed = f"at most {most}, because there are {clients} clients"
            raise refused("shift.what.intervals", self.intervals, allowed)
        for key, value in (("by", self.by.kind), ("shared", self.shared)):
            if rows.steps is not None and value not in ("order", "time", 0):
                but = f"rows of {rows.name} are sequences"
                raise refused(f"shift.what.{key}", value, "by = 'order' or 'time', shared = 0", but)
        if self.by.kind == "time" and (rows.time is None or bool((rows.time == rows.time[0]).all())):
            but = f"rows of {rows.name} have {'no time' if rows.time is None else 'all the same time'}"
            raise refused("shift.what.by", "time", "'labels', 'order', or a source with a column of times", but)

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """Describe the kind of interval, its arrival and its expiry."""
        kind = {"labels": "some of its labels", "order": "a piece of its rows in their order", "time": "a span of time"}
        text = f"The rows of every client come in {self.intervals} intervals, each {kind[self.by.kind]}"
        text += f": one arrives every {self.gap:g} {unit} and expires {self.retention:g} {unit} later. "
        if self.shared != 0:
            few = {"half": "one of each label of the rarer half", 1: "one of each label", 2: "two of each label"}
            text += f"All clients hold a few shared rows at all times, {few[self.shared]}. "
        return text + ("A client without rows waits. " if self.empty == "wait" else "")

    def plan(self, view: PopulationView) -> Plan:
        """Build the plan of the rows that each client holds over time."""
        return StreamPlan(self, view)


@dataclass(frozen=True)
class StreamPlan(Plan):
    """Interval of each row of each client, and presence of the intervals over time."""

    stream: Stream
    view: PopulationView

    # -- intervals ----------------------------------------------------------------------------------------------------

    @cached_property
    def interval(self) -> dict[str, Tensor]:
        """Interval of each entry of the row lists, for each part."""
        parts = [self.view.parts[part] for part in PARTS]
        owner = np.concatenate([part.owner.numpy() for part in parts])
        rows = np.concatenate([part.rows.numpy().astype(np.int64) for part in parts])
        ways = {"labels": self._by_labels, "order": self._by_order, "time": self._by_time}
        number = ways[self.stream.by.kind](owner, rows)
        cut = torch.from_numpy(number.astype(np.int32)).split([len(part.rows) for part in parts])
        return dict(zip(PARTS, cut, strict=True))

    def _by_labels(self, owner: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Deal each client's labels to the intervals in random order, the labels of its training rows first."""
        of, trained = self.view.rows, len(self.view.parts["train"].rows)
        pair, where = np.unique(owner * of.classes + of.y.numpy()[rows], return_inverse=True)
        only_judged = np.bincount(where[:trained], minlength=len(pair)) == 0
        client = pair // of.classes
        drawn = self.view.rng.at("stream", "labels").numpy().random(len(pair))
        order = np.lexsort((drawn, only_judged, client))
        bucket = np.empty(len(pair), dtype=np.int64)
        bucket[order] = rank_rows(client[order]) % self.stream.intervals
        return bucket[where]

    def _by_order(self, owner: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Cut each client's rows, and separately its own test rows of the source, into nearly equal pieces."""
        of = self.view.rows
        kept_back = np.zeros(len(of), dtype=bool) if of.held_out is None else of.held_out.numpy()
        whose = owner * 2 + kept_back[rows]
        order = np.lexsort((rows, whose))
        number = np.empty(len(rows), dtype=np.int64)
        number[order] = rank_rows(whose[order]) * self.stream.intervals // np.bincount(whose)[whose[order]]
        return number

    def _by_time(self, owner: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Cut the time into intervals that are the same for all clients."""
        assert self.view.rows.time is not None
        time = self.view.rows.time.numpy()[rows]
        cuts = np.linspace(0, 1, self.stream.intervals + 1)[1:-1]
        equal = getattr(self.stream.by, "spans", "") == "equal"
        inner = time.min() + cuts * (time.max() - time.min()) if equal else np.quantile(time, cuts)
        return np.searchsorted(inner, time, side="right")

    def _table(self, part: str, entries: Tensor | None = None) -> np.ndarray:
        """Count the rows of a part in each interval of each client (clients, intervals)."""
        ragged, chosen = self.view.parts[part], slice(None) if entries is None else entries
        owner, interval = ragged.owner[chosen], self.interval[part][chosen]
        return count_pairs(owner, interval, len(ragged), self.stream.intervals).numpy()

    @cached_property
    def tables(self) -> dict[str, np.ndarray]:
        """Number of rows in each interval of each client (clients, intervals), for each part."""
        return {part: self._table(part) for part in PARTS}

    # -- rows that all clients hold -----------------------------------------------------------------------------------

    @cached_property
    def shared(self) -> Tensor:
        """Rows that all clients hold, sorted: training rows that are never used for evaluation."""
        if self.stream.shared == 0:
            return torch.empty(0, dtype=torch.int64)
        train, of = self.view.parts["train"], self.view.rows
        trained = train.rows[: train.start[self.view.registered]].long().unique()
        judged = torch.cat([self.view.parts[part].rows.long() for part in ("val", "test")])
        trained = trained[~torch.isin(trained, judged)]
        y, rng = of.y[trained], self.view.rng.at("stream", "shared")
        size = torch.bincount(y, minlength=of.classes)
        labels = [c for c in size.argsort(stable=True).tolist() if size[c]]
        samples = 1 if self.stream.shared == "half" else int(self.stream.shared)
        labels = labels[: len(labels) // 2] if self.stream.shared == "half" else labels
        drawn = [rng.at(c).numpy().permutation(trained[y == c].numpy())[:samples] for c in labels]
        return torch.from_numpy(np.sort(np.concatenate([trained[:0].numpy(), *drawn])))

    @cached_property
    def _twice(self) -> np.ndarray:
        """Number of each client's training rows in each interval that all clients hold (clients, intervals)."""
        if not len(self.shared):
            return np.zeros_like(self.tables["train"])
        return self._table("train", torch.isin(self.view.parts["train"].rows.long(), self.shared))

    # -- rows over time -----------------------------------------------------------------------------------------------

    def _live(self, moment: Moment) -> np.ndarray:
        return self.stream.live(self.view.time(moment))

    def _train(self, live: np.ndarray) -> np.ndarray:
        """Return the mask (clients,) of the clients that have training rows of their own in some intervals."""
        return np.asarray(self.tables["train"][:, live].any(1))

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """Return the rows that a client holds, sorted.

        Raises:
            FedtideError: a registered client has no training rows, and may not wait.
        """
        ragged = self.view.parts[part]
        mine = slice(int(ragged.start[client]), int(ragged.start[client + 1]))
        live = torch.from_numpy(self._live(moment))
        rows = ragged.rows[mine][live[self.interval[part][mine].long()]]
        if part != "train":
            return rows
        if not len(rows):
            if self.stream.empty == "error" and client < self.view.registered:
                raise _nothing(self.view, client, self.view.time(moment))
            return rows
        return torch.cat([rows, self.shared.to(rows.dtype)]).unique() if len(self.shared) else rows

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """Count the rows that each of `clients` holds; without a moment, all of its own rows."""
        if moment is None:
            return self.view.parts[part].sizes(clients)
        live = self._live(moment)
        counted = torch.from_numpy(self.tables[part][:, live].sum(1))[clients]
        if part != "train" or not len(self.shared):
            return counted
        besides = len(self.shared) - torch.from_numpy(self._twice[:, live].sum(1))[clients]
        return counted + besides * (counted > 0)

    def there(self, moment: Moment) -> Tensor | None:
        """Return the mask (registered,) of the clients with training rows of their own; None if all must have some."""
        if self.stream.empty == "error":
            return None
        return torch.from_numpy(self._train(self._live(moment)))[: self.view.registered]

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """Return the registered clients with an interval with rows that arrived or expired since `before`."""
        now, then = self._live(moment), self._live(before)
        others = now != then
        # Rows that all clients hold appear and disappear only with the client itself.
        tables = {**self.tables, "train": self.tables["train"] - self._twice} if others.any() else {}
        moved = self._train(now) != self._train(then)
        for table in tables.values():
            moved |= table[:, others].any(1)
        return torch.from_numpy(moved[: self.view.registered].nonzero()[0])

    def events(self, moment: Moment, before: Moment) -> tuple[str, ...]:
        """Return the events since `before`: "arrival" and "expiry" of intervals."""
        now, then = self._live(moment), self._live(before)
        return ("arrival",) * bool((now & ~then).any()) + ("expiry",) * bool((then & ~now).any())

    def check(self, rounds: int) -> None:
        """Raise if within `rounds` a client runs out of training rows and may not wait, or if all clients do."""
        both = np.concatenate([[0.0], self.stream.ends - self.stream.retention, self.stream.ends])
        when = np.unique(np.ceil(both))
        for time in when[(when >= 0) & (when < rounds)].tolist():
            trained = self._train(self.stream.live(time))[: self.view.registered]
            if not trained.any():
                but = f"no client holds a training row at round {time:g}, of {rounds}"
                last = self.stream.ends[-1]
                allowed = f"a longer retention, fewer rounds or more intervals (the last one ends at {last:g})"
                raise refused("shift.what.kind", self.stream.kind, allowed, but)
            if self.stream.empty == "error" and not trained.all():
                raise _nothing(self.view, int((~trained).nonzero()[0][0]), time)


def _nothing(view: PopulationView, client: int, time: float) -> FedtideError:
    who = f"{client} ({view.names[client]})" if view.names else f"{client}"
    but = f"client {who} holds no training rows at {time:g}, by shift.clock, because no interval at that time has any"
    return refused("shift.what.empty", "error", "'wait', fewer intervals, a longer retention, or more rows", but)


COME = "come"
"""Rows that come to a client, those to validate on too."""

MOST = 1_000_000
"""Maximum number of windows, as of rounds."""


def _date(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"found {shown(text)}, allowed: ISO 8601, such as '2013-03-01T06:00'") from None


@ingredient
class Calendar(Holding):
    """Rows of each client by their times: a round is a window of wall-clock time, and its end is now.

    Round r is the window from `begin` + r `window` to the beginning of the next. At its end a client trains on its rows
    of the last `hold`. Then it is tested on the rows of the next window, before training on any of them. So rows are
    for testing once and for training later, and no test set is divided off. Validation rows are never trained on:
    models are judged on the validation rows of the next window, and clients decide on the validation rows of the last
    `hold`. Windows follow the clocks of the zone: a window of a day is from midnight to midnight, however many hours
    that is. If clocks are set back, the repeated hour is in one window. On the clock of the run all windows are equally
    long, and the run begins at its time of the day.

    Args:
        window: length of a round.
        hold: time for which rows are kept from when they may be trained on, at least a window, or "all".
        delay: time until the label of a row is known, before which no client trains on it; None means at once.
        begin: beginning of round 0, in ISO 8601, on the clocks of the zone if no zone is named. None means the first
            midnight after the earliest tenth of the rows. If a source learns scales, categories or bins of that tenth,
            round 0 must be later. Earlier rows have come.
        zone: time zone of the windows.

    >>> Calendar(window="1d", hold="28d", delay="12h").window
    '1d'
    """

    window: Duration = "1d"
    hold: Annotated[Duration | Literal["all"], allowing("a time of a window or more such as '28d', or 'all'")] = "all"
    delay: Duration | None = None
    begin: Annotated[str, kept_if(_date)] | None = None
    zone: Zone = "UTC"
    kind: Literal["calendar"] = "calendar"
    drifts: ClassVar[bool] = True
    ahead: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.hold != "all" and seconds_of(self.hold) < seconds_of(self.window):
            but = "the rows of a window would be gone before its end"
            raise ValueError(f"found hold {self.hold} and window {self.window}, allowed: a longer hold, because {but}")

    @property
    def seconds(self) -> float:
        """Length of a window, by the clocks."""
        return seconds_of(self.window)

    def whole(self, rounds: int) -> int:
        """Return the number of rounds, of so many, that make whole weeks, else whole days, else all of them.

        >>> Calendar(window="1h").whole(400), Calendar(window="1h").whole(60), Calendar(window="7d").whole(60)
        (336, 48, 60)
        """
        for cycle in (7 * DAY, DAY):
            windows = cycle / self.seconds
            if windows >= 1 and (count := int(rounds // windows)):
                return round(count * windows)
        return rounds

    def starts(self, rows: np.ndarray) -> datetime:
        """Return the beginning of round 0, by the clocks of the zone.

        Args:
            rows: (rows,) times in seconds since 1970.
        """
        zone = zone_of(self.zone)
        if self.begin is not None:
            begin = _date(self.begin)
            return begin if begin.tzinfo is None else begin.astimezone(zone).replace(tzinfo=None)
        tenth = np.partition(rows, (len(rows) - 1) // 10)[(len(rows) - 1) // 10]
        first_tenth = _when(float(tenth), zone).replace(tzinfo=None)
        return first_tenth.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)

    def edges(self, rows: np.ndarray) -> np.ndarray:
        """Return the beginnings of the windows and the end of the last one (windows + 1,), in seconds since 1970.

        Args:
            rows: (rows,) times in seconds since 1970.
        """
        first, last = float(rows.min()), float(rows.max())
        zone, length, begin = zone_of(self.zone), self.seconds, self.starts(rows)
        span = last - begin.replace(tzinfo=zone).timestamp()
        count = int((span + DAY) // length) + 2  # clocks may be set forward meanwhile
        if span < 0:
            shown_begin = begin.isoformat(" ", "minutes")
            allowed = f"a time from {_when(first, zone):%Y-%m-%d %H:%M} to {_when(last, zone):%Y-%m-%d %H:%M}"
            raise refused("shift.what.begin", shown_begin, f"{allowed}, the times of the rows", "no row comes after it")
        if count > MOST:
            raise refused("shift.what.window", self.window, f"at most {MOST} windows, not {count}")
        local = [begin + timedelta(seconds=length * k) for k in range(count + 1)]
        stamps = np.array([time.replace(tzinfo=zone).timestamp() for time in local])
        # A time that clocks leave out is that at which they are set forward.
        stamps = np.minimum.accumulate(stamps[::-1])[::-1]
        return stamps[: int(np.searchsorted(stamps, last, side="right")) + 1]

    def check(self, view: PopulationView) -> None:
        """Raise if the calendar does not fit the rows."""
        time = view.rows.time
        if time is None or bool((time == time[0]).all()):
            but = f"rows of {view.rows.name} have {'no time' if time is None else 'all the same time'}"
            raise refused("shift.what.kind", self.kind, "a source with a column of times", but)
        try:
            self.edges(time.numpy())
        except (OverflowError, OSError, ValueError):
            but = f"times of {view.rows.name} go from {float(time.min()):g} to {float(time.max()):g}"
            raise refused("shift.what.kind", self.kind, "times that are dates, in seconds since 1970", but) from None
        begin, learned = self.starts(time.numpy()), view.rows.learned
        if self.begin is not None and learned is not None:
            zone = zone_of(self.zone)
            if begin.replace(tzinfo=zone).timestamp() <= learned:
                allowed = f"a time after {_when(learned, zone):%Y-%m-%d %H:%M}"
                but = "scales, categories and bins are those of the rows until then"
                raise refused("shift.what.begin", begin.isoformat(" ", "minutes"), allowed, but)

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """Describe windows, hold and delay."""
        clocks = "" if self.zone == "UTC" else f" by the clocks of {self.zone}"
        span = "for good" if self.hold == "all" else f"for {self.hold}"
        late = "" if self.delay is None else f" Labels are known {self.delay} after their rows."
        return (
            f"A round is a window of {self.window}{clocks}: rows arrive at their times and are kept {span}, and every "
            f"model is tested on the rows of the next window before it is trained on them.{late} "
        )

    def plan(self, view: PopulationView) -> "CalendarPlan":
        """Build the plan of the rows that each client holds over time."""
        return CalendarPlan(view, self)


@dataclass(frozen=True)
class CalendarPlan(Plan):
    """Times of the rows of each client, and the beginnings of the windows."""

    view: PopulationView
    calendar: Calendar

    # -- windows ------------------------------------------------------------------------------------------------------

    @cached_property
    def _begin(self) -> datetime:
        assert self.view.rows.time is not None
        return self.calendar.starts(self.view.rows.time.numpy())

    @cached_property
    def edges(self) -> np.ndarray:
        """Beginnings of the windows and the end of the last one (windows + 1,), in seconds since 1970."""
        assert self.view.rows.time is not None
        return self.calendar.edges(self.view.rows.time.numpy())

    @property
    def windows(self) -> int:
        """Number of windows, of which the last one has the last row."""
        return len(self.edges) - 1

    def edge(self, number: int) -> float:
        """Return the beginning of a window; those that there are not are as long as on other days."""
        last = len(self.edges) - 1
        beyond = number - min(max(number, 0), last)
        return float(self.edges[number - beyond]) + beyond * self.calendar.seconds

    @property
    def _delay(self) -> float:
        return 0.0 if self.calendar.delay is None else seconds_of(self.calendar.delay)

    def span(self, part: str, moment: Moment) -> tuple[float, float]:
        """Return from when to when the rows of a part are, the second not included."""
        end, delay = self.edge(moment.round + 1), self._delay
        if part != "train":
            return end, self.edge(moment.round + 2)
        if self.calendar.hold == "all":
            return -np.inf, end - delay
        # A day on which clocks are set back is longer than its name.
        return min(end - seconds_of(self.calendar.hold), self.edge(moment.round)) - delay, end - delay

    # -- rows ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _sorted(self) -> dict[str, tuple[Tensor, np.ndarray, np.ndarray]]:
        """Rows of each part and of `COME`, client by client in the order of their times, these times, and owners."""
        assert self.view.rows.time is not None
        parts, result = self.view.parts, {}
        judged = [parts[part] for part in ("test", "val")]
        owners, rows = (torch.cat([getattr(lists, name) for lists in judged]).numpy() for name in ("owner", "rows"))
        for part, ragged in (*parts.items(), (COME, Ragged.from_pairs(owners, rows, len(parts["test"])))):
            owner, time = ragged.owner.numpy(), self.view.rows.time.numpy()[ragged.rows.long().numpy()]
            order = np.lexsort((time, owner))
            result[part] = ragged.rows[torch.from_numpy(order)], time[order], owner[order]
        return result

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """Return the rows that a client trains on, sorted, or those that it is judged on in the next window."""
        return self._between(client, part, *self.span(part, moment))

    def aside(self, client: int, moment: Moment) -> Tensor:
        """Return the validation rows that a client decides on, sorted: those that it holds."""
        return self._between(client, "val", *self.span("train", moment))

    def _between(self, client: int, part: str, begin: float, end: float) -> Tensor:
        rows, time, _ = self._sorted[part]
        start = self.view.parts[part].start
        first, last = int(start[client]), int(start[client + 1])
        here = first + np.searchsorted(time[first:last], (begin, end), side="left")
        return rows[here[0] : here[1]].sort().values

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """Count the rows that each of `clients` holds; without a moment, all of its own rows."""
        if moment is None:
            return self.view.parts[part].sizes(clients)
        return torch.from_numpy(self._within(part, *self.span(part, moment)))[clients]

    @cached_property
    def _within(self) -> Callable[[str, float, float], np.ndarray]:
        """Count the rows of a part of each client (clients,) from one time on and before another."""

        def count(part: str, begin: float, end: float) -> np.ndarray:
            _, time, owner = self._sorted[part]
            return np.bincount(owner[(begin <= time) & (time < end)], minlength=len(self.view.group))

        return lru_cache(maxsize=16)(count)  # a round asks for the same again and again

    def there(self, moment: Moment) -> Tensor:
        """Return the mask (registered,) of the clients that hold training rows."""
        return self.counts(self.view.everyone, "train", moment) > 0

    def fresh(self, moment: Moment) -> Tensor:
        """Return the mask (registered,) of the clients to which rows, or labels that were late, came in the window."""
        begin, end = (self.edge(moment.round + step) - self._delay for step in (0, 1))
        return torch.from_numpy(self._within(COME, begin, end)[: self.view.registered] > 0)

    def arrived(self, moment: Moment, part: str = COME) -> tuple[Tensor, Tensor]:
        """Return all rows that have arrived with their labels, also those that are no longer held, and their owners."""
        rows, time, owner = self._sorted[part]
        come = torch.from_numpy(time < self.edge(moment.round + 1) - self._delay)
        return rows[come], torch.from_numpy(owner)[come]

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """Return the registered clients to which rows came, or whose rows expired, since `before`."""
        moved = np.zeros(len(self.view.group), dtype=bool)
        _, time, owner = self._sorted[COME]
        for part in ("train", "test"):
            now, then = self.span(part, moment), self.span(part, before)
            inside = [(begin <= time) & (time < end) for begin, end in (now, then)]
            moved |= np.bincount(owner[inside[0] != inside[1]], minlength=len(moved)) > 0
        return torch.from_numpy(moved[: self.view.registered].nonzero()[0])

    def window(self, moment: Moment) -> Window:
        """Return the window of a round."""
        zone = zone_of(self.calendar.zone)
        begin, after = (_when(self.edge(moment.round + step), zone).isoformat() for step in (0, 1))
        return Window(begin, after, int(self.fresh(moment).sum()))

    def clock(self, number: int) -> float:
        """Return the time at which a round begins, in seconds since the midnight before the first one."""
        midnight = self._begin.replace(hour=0, minute=0, second=0, microsecond=0)
        return (self._begin - midnight) / timedelta(seconds=1) + number * self.calendar.seconds

    def check(self, rounds: int) -> None:
        """Raise if there is no next window to be tested on in the last of `rounds`, or if no round has rows."""
        if rounds >= self.windows:
            zone = zone_of(self.calendar.zone)
            last = f"{_when(self.edges[0], zone):%Y-%m-%d %H:%M} to {_when(self.edges[-1], zone):%Y-%m-%d %H:%M}"
            but = f"there are {self.windows} windows of {self.calendar.window}, {last}, and each is tested on the next"
            raise refused("rounds", rounds, f"at most {self.windows - 1}, or shorter windows", but)


def _when(seconds: float, zone: object) -> datetime:
    return datetime.fromtimestamp(seconds, UTC).astimezone(zone)  # type: ignore[arg-type]
