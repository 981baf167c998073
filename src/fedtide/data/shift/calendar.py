"""Real time: a round is a window of wall-clock time, rows arrive at their times, and the next window is the test.

Test, then train: Gama, Sebastião, Rodrigues: *On evaluating stream learning algorithms*, Machine Learning 90, 2013.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import Moment
from fedtide.core.errors import refused, shown
from fedtide.data.ragged import Ragged
from fedtide.data.shift.what import Holding, Plan, PopulationView, Window
from fedtide.fields.types import Duration, Zone, explained, ingredient, kept_if, seconds_of, zone_of

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
    hold: Annotated[Duration | Literal["all"], explained("a time of a window or more such as '28d', or 'all'")] = "all"
    delay: Duration | None = None
    begin: Annotated[str, kept_if(_date)] | None = None
    zone: Zone = "UTC"
    kind: Literal["calendar"] = "calendar"
    drifts: ClassVar[bool] = True
    ahead: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.hold != "all" and seconds_of(self.hold) < seconds_of(self.window):
            raise ValueError(
                f"found hold {self.hold} and window {self.window}, allowed: a hold of a window or more, because the "
                "rows of a window would be gone before its end"
            )

    @property
    def seconds(self) -> float:
        """Length of a window, by the clocks."""
        return seconds_of(self.window)

    def whole(self, rounds: int) -> int:
        """Return the number of rounds, of so many, that make whole weeks, else whole days, else all of them.

        >>> Calendar(window="1h").whole(400), Calendar(window="1h").whole(60), Calendar(window="7d").whole(60)
        (336, 48, 60)
        """
        for cycle in (7 * 86400.0, 86400.0):
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
        count = int((span + 86400) // length) + 2  # clocks may be set forward meanwhile
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
        ends = float(time.min()), float(time.max())
        try:
            _ = [_when(at, UTC).year for at in ends]
        except (OverflowError, OSError, ValueError):
            but = f"times of {view.rows.name} go from {ends[0]:g} to {ends[1]:g}"
            raise refused("shift.what.kind", self.kind, "times that are dates, in seconds since 1970", but) from None
        self.edges(time.numpy())
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

    def arrived(self, moment: Moment) -> tuple[Tensor, Tensor]:
        """Return all rows that have arrived with their labels, also those that are no longer held, and their owners."""
        rows, time, owner = self._sorted[COME]
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
            raise refused(
                "rounds", rounds, f"at most {self.windows - 1}" if self.windows > 1 else "shorter windows", but
            )


def _when(seconds: float, zone: object) -> datetime:
    return datetime.fromtimestamp(seconds, UTC).astimezone(zone)  # type: ignore[arg-type]
