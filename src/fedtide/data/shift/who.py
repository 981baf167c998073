"""Availability and arrivals of clients over time, including periodic changes with the time of day.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, section 2, Eq. 2 and 3; more than two groups are our own extension.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError, nearest, refused, shown
from fedtide.core.files import open_file
from fedtide.core.rng import Rng
from fedtide.data.saved import content_of
from fedtide.data.shift.what import PopulationView, Rhythm
from fedtide.data.sources.cells import number, read_cells
from fedtide.data.sources.files import find, reading
from fedtide.draw.prose import listed
from fedtide.fields.types import DataFile, Finite, OpenFraction, Positive, ingredient
from fedtide.fields.user_code import call


class Arriving(Protocol):
    """Available clients and their order of arrival; `groups` are those clients, by their group."""

    dropout_rate: float
    """Share of the asked clients that never answer."""
    changes: ClassVar[bool] = True
    """Tell whether availability depends on the time."""
    by_rows: ClassVar[bool] = False
    """Tell whether only clients to which rows come in the round arrive."""
    recorded: ClassVar[bool] = False
    """Tell whether arrivals are those of another run, from which clients without rows are removed afterwards."""

    def check(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Raise if the settings do not fit the groups with these names and numbers of clients."""
        return

    def plan(self, view: PopulationView) -> Any:
        """Build the plan of the clients' availability (`awake`, `wait`); None if all are always available."""
        return None

    def shares(self, time: float, sizes: np.ndarray) -> np.ndarray:
        """Return the expected share of each group among the arrivals (groups,); the shares sum to 1."""
        return np.asarray(sizes / sizes.sum())

    def arrivals(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """Return `m` clients in the order of arrival; `arrivals(m)` begins with `arrivals(m - 1)`."""
        return first_of(torch.cat(groups) if len(groups) > 1 else groups[0], m, rng.at("order"))

    def substituted(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> int:
        """Count the arrivals among `m` that replace clients of an exhausted group."""
        return 0

    def reachable(self, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """Return a prefix of the order of arrival, sorted."""
        return torch.cat(groups).sort().values

    def rhythm(self, turns: int) -> Rhythm:
        """Return the rhythm that a method may know, on the shift's clock, with a number of turns per period."""
        return {}

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the settings in sentences for a report, each followed by a space."""
        return ""


def first_of(clients: Tensor, m: int, rng: Rng) -> Tensor:
    """Return the first `m` of a random order of `clients` in O(m), by a truncated Fisher-Yates shuffle."""
    n = len(clients)
    m = min(m, n)
    picks = (rng.numpy().random(m) * (n - np.arange(m))).astype(np.int64) + np.arange(m)
    moved: dict[int, int] = {}
    out = np.empty(m, dtype=np.int64)
    for i, j in enumerate(picks.tolist()):
        out[i] = moved.get(j, j)
        moved[j] = moved.get(i, i)
    return clients[torch.from_numpy(out)]


def periodic_shares(curve: str, time: float, period: float, exponent: float, groups: int) -> np.ndarray:
    """q_k(t) for K groups, on the simplex; for K = 2 the formulas of the paper (Eq. 3).

    K > 2: hat_k = max(0, 1 - K d_k / T) with d_k the circular distance to the peak of group k. Linear: q_k = hat_k.
    Cosine: q_k = (1 - cos(pi hat_k))/2. An exponent p acts on the first group and rescales the others.

    >>> periodic_shares("linear", 4, 12, 1.0, 3).tolist()
    [0.0, 1.0, 0.0]
    """
    s = math.fmod(time, period)
    s += period if s < 0 else 0.0
    if curve == "block":
        return np.eye(groups)[min(int(s * groups / period), groups - 1)]
    peaks = np.arange(groups) * period / groups
    distance = np.abs(s - peaks)
    hat = np.maximum(0.0, 1 - groups * np.minimum(distance, period - distance) / period)
    q = hat if curve == "linear" else (1 - np.cos(np.pi * hat)) / 2
    first = q[0] ** exponent
    rest = q[1:] * ((1 - first) / (1 - q[0])) if q[0] < 1 else q[1:]
    return np.concatenate([[first], rest])


@ingredient
class Replay(Arriving):
    """Arrivals of another run, round by round, from `shift/<seed>.safetensors` in its folder.

    Args:
        path: the file.
        dropout_rate: share of the asked clients that never answer.
    """

    path: DataFile
    dropout_rate: OpenFraction = 0.0
    kind: Literal["replay"] = "replay"
    recorded: ClassVar[bool] = True

    @cached_property
    def saved(self) -> dict[str, Any]:
        """Content of the file."""
        return content_of(self.path, "shift.who.path", "arrivals", "expected", "substituted", "awake")

    def _round(self, time: float) -> int:
        rounds = len(self.saved["arrivals"])
        if not rounds:
            allowed = "a run with clock = 'rounds' or steady devices, in which they are known in advance"
            raise FedtideError(f"shift.who.path: {self.path} has no arrivals; allowed: {allowed}")
        if time >= rounds:
            raise FedtideError(f"shift.who.path: {self.path} ends after {rounds} rounds; allowed: at most {rounds}")
        return max(int(time), 0)

    def shares(self, time: float, sizes: np.ndarray) -> np.ndarray:
        """Return the expected share of each group among the arrivals (groups,)."""
        return self.saved["expected"][self._round(time)].numpy()

    def arrivals(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """Return the first `m` recorded arrivals."""
        arrivals = self.saved["arrivals"][self._round(time)]
        arrivals = arrivals[arrivals >= 0]
        registered = sum(len(group) for group in groups)
        # A round may have fewer arrivals if all clients arrived, provided that there are as many clients here.
        short = len(arrivals) == len(self.saved["arrivals"][0]) or registered != self.saved["registered"]
        if (short and len(arrivals) < min(m, registered)) or (len(arrivals) and int(arrivals.max()) >= registered):
            recorded = f"{len(arrivals)} arrivals a round among {self.saved['registered']} clients"
            raise FedtideError(f"shift.who.path: {self.path} has {recorded}; {m} among {registered} are asked for")
        return arrivals[:m]

    def substituted(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> int:
        """Count the recorded arrivals that replace clients of an exhausted group."""
        return int(self.saved["substituted"][self._round(time)])

    def reachable(self, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """Return the recorded reachable clients."""
        if self.saved["awake"] is None:
            return torch.cat(groups).sort().values
        bits = np.unpackbits(self.saved["awake"][self._round(time)].numpy(), count=sum(len(group) for group in groups))
        return torch.from_numpy(np.flatnonzero(bits))


@ingredient
class Always(Arriving):
    """Constant availability of all clients, with uniform arrivals without replacement (no distribution shift, NDS).

    Args:
        dropout_rate: share of the asked clients that never answer.
    """

    dropout_rate: OpenFraction = 0.0
    kind: Literal["always"] = "always"
    changes: ClassVar[bool] = False


@ingredient
class Data(Arriving):
    """Clients to which rows came in the window of the round, with uniform arrivals without replacement.

    If labels are late, these are the clients to which labels came.

    The mix of those who arrive is that of the data: who is active by day, and who at night. A round in whose window no
    row came is played without participants. It needs a calendar, as no other kind of `what` knows when rows come.

    Args:
        dropout_rate: share of the asked clients that never answer.
    """

    dropout_rate: OpenFraction = 0.0
    kind: Literal["data"] = "data"
    by_rows: ClassVar[bool] = True


class Turns(Arriving):
    """Groups that take turns: what all kinds of turns share."""

    kind: str
    period: float
    phase: float
    blocks: ClassVar[bool] = False
    """Tell whether one group at a time takes part."""

    def check(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Raise if there are fewer than two groups, or if one has no clients."""
        if len(sizes) < 2:
            allowed = "data.groups = 'domain' or by labels, or shift.who.kind = 'always'"
            raise refused("shift.who.kind", self.kind, allowed, "there is a single group of clients")
        if 0 in sizes:
            but = f"'{names[list(sizes).index(0)]}' has no clients"
            raise refused("data.groups", list(names), "a client in each", but)

    def rhythm(self, turns: int) -> Rhythm:
        """Return the period, its whole rounds, and the rounds at which the first of `turns` turns starts and peaks."""
        # A block begins at its phase; curves with a peak have it in the middle of the block's rounds.
        peak = self.phase + (self.period / turns - 1) / 2 if self.blocks else self.phase
        return {"period": self.period, "peak": peak, "start": self.phase, "rounds": max(round(self.period), 1)}

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the groups that take turns, and the curve."""
        if not groups:
            return ""
        first, others = groups[0], groups[1:]
        turn = f"from only {first} clients to only {others[0]} clients and back"
        if len(others) > 1:
            turn = f"from {first} clients by way of {listed(others)} clients to {first} clients again"
        turn += ", from one block to the next" if self.blocks else ""
        text = f"They belong to groups, {listed(groups)}, that take turns: every {self.period:g} {unit} "
        return f"{text}the participants change {turn}. "

    def arrivals(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """Return `m` clients in the order of arrival; `arrivals(m)` begins with `arrivals(m - 1)`."""
        sizes = np.array([len(group) for group in groups])
        group_of = torch.from_numpy(_substitute(self._drawn(m, groups, time, rng), sizes))
        # Each group's clients have their own random order, so that prefixes stay prefixes.
        arrived = torch.empty(len(group_of), dtype=torch.int64)
        for k, group in enumerate(groups):
            here = group_of == k
            arrived[here] = first_of(group, int(here.sum()), rng.at("order", k))
        return arrived

    def substituted(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> int:
        """Count the arrivals among `m` that replace clients of an exhausted group."""
        wanted = np.bincount(self._drawn(m, groups, time, rng), minlength=len(groups))
        return int(np.maximum(wanted - [len(group) for group in groups], 0).sum())

    def _drawn(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> np.ndarray:
        """Draw the group of each of `m` arrivals."""
        sizes = np.array([len(group) for group in groups])
        uniform = rng.at("group").numpy().random(min(m, int(sizes.sum())))
        return np.searchsorted(np.cumsum(self.shares(time, sizes))[:-1], uniform, side="right")

    def reachable(self, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """Return the first R arrivals, sorted, with R = sum_k n_k q_k / max q, among which a uniform draw follows q.

        The maximum is over groups that have clients; if none of these has a share, all clients are reachable.
        """
        sizes = np.array([len(group) for group in groups])
        shares = self.shares(time, sizes) * (sizes > 0)
        count = round(float(sizes @ (shares / shares.max()))) if shares.any() else int(sizes.sum())
        return self.arrivals(count, groups, time, rng).sort().values


@ingredient
class Periodic(Turns):
    """Groups that take turns: day and night, or K groups that peak one after the other.

    With s = (t - phase) mod period, the expected share q(t) of the first of two groups is

        linear   |2s/T - 1|^p            1 at s = 0, 0 at s = T/2
        cosine   ((cos(2 pi s/T) + 1)/2)^p

    Group k of K > 2 peaks at s = (k-1) T/K. Each arrival is from group k with probability q_k (so the counts are
    binomial, or multinomial), then a random client of the group without replacement. The other groups replace an
    exhausted group.

    Args:
        curve: "linear" or "cosine".
        period: T, in rounds or seconds by `shift.clock`.
        exponent: p; below 1 raises the share of the first group over a period, above 1 lowers it.
        phase: the time of the first group's peak.
        dropout_rate: share of the asked clients that never answer.

    >>> Periodic(period=32).shares(0.0, np.array([5, 5])).tolist()
    [1.0, 0.0]
    >>> Periodic(period=32).shares(8.0, np.array([5, 5])).tolist()
    [0.5, 0.5]
    """

    curve: Literal["linear", "cosine"] = "linear"
    period: Positive = 256
    exponent: Positive = 1.0
    phase: Finite = 0.0
    dropout_rate: OpenFraction = 0.0
    kind: Literal["periodic"] = "periodic"

    def shares(self, time: float, sizes: np.ndarray) -> np.ndarray:
        """Return the expected share of each group among the arrivals (groups,); the shares sum to 1."""
        return periodic_shares(self.curve, time - self.phase, self.period, self.exponent, len(sizes))


@ingredient
class BlockCyclic(Turns):
    """Groups that take turns one at a time: all arrivals are from group k of K for the k-th part of every period.

    Eichner, Koren, McMahan, Srebro, Talwar: *Semi-Cyclic Stochastic Gradient Descent*, ICML 2019. The other groups
    replace an exhausted group.

    Args:
        period: T, in rounds or seconds by `shift.clock`.
        phase: the time at which the block of the first group begins.
        dropout_rate: share of the asked clients that never answer.

    >>> [BlockCyclic(period=4).shares(time, np.array([5, 5])).tolist() for time in (1.0, 2.0)]
    [[1.0, 0.0], [0.0, 1.0]]
    """

    period: Positive = 256
    phase: Finite = 0.0
    dropout_rate: OpenFraction = 0.0
    kind: Literal["block-cyclic"] = "block-cyclic"
    blocks: ClassVar[bool] = True

    def shares(self, time: float, sizes: np.ndarray) -> np.ndarray:
        """Return the expected share of each group among the arrivals (groups,); the shares sum to 1."""
        return periodic_shares("block", time - self.phase, self.period, 1.0, len(sizes))


def _substitute(wanted: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Replace each arrival from an exhausted group by one from the next group that has clients left.

    Args:
        wanted: (arrivals,) the group drawn for each arrival; at most as many arrivals as clients.
        sizes: (groups,) number of clients.

    >>> _substitute(np.array([0, 0, 1, 0, 0]), np.array([1, 2, 2])).tolist()
    [0, 1, 1, 2, 2]
    """
    group_of = wanted.copy()
    while True:
        places = [np.flatnonzero(group_of == k)[size:] for k, size in enumerate(sizes.tolist())]
        first, k = min((int(at[0]), k) if len(at) else (len(group_of), k) for k, at in enumerate(places))
        if first == len(group_of):
            return group_of
        group_of[places[k]] = (k + 1) % len(sizes)


COLUMNS = ("client", "start", "end")
CLOSE = 1e-9
"""Share of a period within which an interval counts as begun, because sums of seconds are rounded."""


@ingredient
class Availability(Arriving):
    """Availability from a file, with arrivals drawn uniformly among the awake clients, without replacement.

    The file is a CSV table with the columns `client`, `start` and `end` and a row for each interval in which a client
    is awake. It may also be a JSON list of objects with these keys, or a JSON object of devices as in FLHetBench
    (FLASH). Each device has `ready_time`, a list of [start, end], and `trace_start` and `trace_end`; devices without a
    trace are left out. A client is awake from `start` until just before `end`. Times are seconds, or rounds, by
    `shift.clock`.

    Clients that arrived while awake finish their work. If all clients are asleep, a round has no participants, and on
    the clock of seconds it lasts until a client wakes.

    Args:
        path: the file, below the data directory (data.directory or FEDTIDE_DATA), absolute, or relative to the working
            directory of the command.
        period: time after which everything repeats; None means the last end, or the end of each device's own trace.
        match: "client" gives a client the trace of its number or name; clients missing in the file are never available.
            "drawn" draws a trace for each client, with repetition.
        dropout_rate: share of the asked clients that never answer.
    """

    path: DataFile
    period: Positive | None = None
    match: Literal["client", "drawn"] = "client"
    dropout_rate: OpenFraction = 0.0
    kind: Literal["availability"] = "availability"

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the source of the availability."""
        return "The times at which clients are awake follow a trace. "

    def plan(self, view: PopulationView) -> "AvailabilityPlan":
        """Build the plan of the registered clients' availability."""
        table = read_timetable(find(self.path, None, "shift.who.path"), self.period)
        if self.match == "drawn":
            device = view.rng.at("availability").numpy().integers(len(table.names), size=view.registered)
            return AvailabilityPlan(table, device)
        clients = list(view.names) or [str(client) for client in range(len(view.group))]
        names = set(clients)
        stranger = next((name for name in table.names if name not in names), None)
        if stranger is not None:
            allowed = nearest(stranger, clients) if view.names else f"allowed: 0 to {len(clients) - 1}"
            line = f"client: found {shown(stranger)}, {allowed}, or match = 'drawn'"
            raise FedtideError(f"shift.who.path: {self.path}: {line}")
        place = {name: device for device, name in enumerate(table.names)}
        return AvailabilityPlan(table, np.array([place.get(name, -1) for name in clients[: view.registered]]))


@dataclass(frozen=True)
class Timetable:
    """Awake intervals of each device.

    Args:
        names: names of the devices.
        start: (intervals,) first beginning of each interval.
        length: (intervals,) duration.
        owner: (intervals,) device.
        period: (devices,) time after which the intervals of each device repeat.

    >>> table = Timetable(("a", "b"), *np.array([[8.0, 1.0], [4.0, 2.0]]), np.array([0, 1]), np.array([10.0, 10.0]))
    >>> [table.awake(time).tolist() for time in (1.0, 2.0, 3.0, 18.0)]
    [[True, True], [False, True], [False, False], [True, False]]
    """

    names: tuple[str, ...]
    start: np.ndarray
    length: np.ndarray
    owner: np.ndarray
    period: np.ndarray

    def _since(self, time: float) -> np.ndarray:
        """Return the time since the last beginning of each interval."""
        period = self.period[self.owner]
        since = np.mod(time - self.start, period)
        return np.where(period - since <= CLOSE * period, 0.0, since)

    def awake(self, time: float) -> np.ndarray:
        """Return the mask (devices,) of the devices that are awake."""
        mask = np.zeros(len(self.names), dtype=bool)
        mask[self.owner[self._since(time) < self.length]] = True
        return mask

    def next(self, time: float) -> np.ndarray:
        """Return the time until each device is awake (devices,); 0 for those that are."""
        since = self._since(time)
        wait = np.where(since < self.length, 0.0, self.period[self.owner] - since)
        waits = np.full(len(self.names), np.inf)
        np.minimum.at(waits, self.owner, wait)
        return waits


@dataclass(frozen=True)
class AvailabilityPlan:
    """Availability of registered clients, where `device` (registered,) is the device of each client, -1 for none."""

    table: Timetable
    device: np.ndarray

    def awake(self, time: float) -> Tensor:
        """Return the mask (registered,) of the clients that are awake."""
        return torch.from_numpy((self.device >= 0) & self.table.awake(time)[self.device])

    def wait(self, time: float) -> float:
        """Return the time until a client is awake; infinite if none ever is."""
        return float(self.table.next(time)[self.device[self.device >= 0]].min(initial=np.inf))


def read_timetable(path: Path, period: float | None) -> Timetable:
    """Read the timetable of a file.

    Args:
        path: the file, as for `Availability`.
        period: period of all devices; None uses that of the file.

    Raises:
        FedtideError: the file or one of its rows is wrong; the message names both.
    """
    if path.suffix == ".json":
        spans, own_periods = _of_json(path)
    else:
        cells, own_periods = read_cells(path, COLUMNS), {}
        rows = enumerate(zip(*map(cells.texts, COLUMNS), strict=True))
        spans = [_span(cells.where(row), *span) for row, span in rows]
    if not spans:
        raise FedtideError(f"shift.who.path: {path}: no client is ever awake; allowed: one interval or more")
    names = tuple(dict.fromkeys(name for _, name, _, _ in spans))
    last = max(end for *_, end in spans)
    periods = {name: own_periods.get(name, last) if period is None else period for name in names}
    for where, name, start, end in spans:
        if end - start > periods[name] * (1 + CLOSE):
            raise refused(f"{where}: end - start", end - start, f"at most the period, {periods[name]:g}")
    start, end = np.array([span[2:] for span in spans]).T
    place = {name: device for device, name in enumerate(names)}
    owner = np.array([place[name] for _, name, _, _ in spans])
    return Timetable(names, start, end - start, owner, np.array([periods[name] for name in names]))


Span = tuple[str, str, float, float]
"""Place in the file for messages, client, beginning and end of an interval."""


def _of_json(path: Path) -> tuple[list[Span], dict[str, float]]:
    """Return the intervals of a JSON file, without those of length 0, and the period of each device that has one."""
    with reading(f"shift.who.path: {path}", "JSON"), open_file(path, "utf-8") as file:
        devices = json.load(file)
    if isinstance(devices, list):
        entries = [(f"{path}: entry {place}", entry) for place, entry in enumerate(devices, start=1)]
        for where, entry in entries:
            if not isinstance(entry, dict) or not set(COLUMNS) <= entry.keys():
                raise refused(where, entry, f"an object with {', '.join(COLUMNS)}")
        return [_span(where, str(entry["client"]), entry["start"], entry["end"]) for where, entry in entries], {}
    if not isinstance(devices, dict):
        raise refused(f"shift.who.path: {path}", devices, "a list or an object")
    spans: list[Span] = []
    periods: dict[str, float] = {}
    for name, device in devices.items():
        where = f"{path}: device '{name}'"
        ready = device.get("ready_time", "") if isinstance(device, dict) else ""
        if not isinstance(ready, list | None):
            raise refused(where, device, "an object with ready_time, a list of [start, end]")
        for pair in ready or ():
            if not isinstance(pair, list) or len(pair) != 2:
                raise refused(where, pair, "[start, end]")
        intervals = [_span(where, name, *pair) for pair in ready or () if pair[0] != pair[1]]
        if intervals:
            start, end = (number(where, key, device.get(key), 0) for key in ("trace_start", "trace_end"))
            if end <= start:
                raise refused(f"{where}: trace_end", end, f"more than trace_start, {start:g}")
            spans, periods[name] = spans + intervals, end - start
    return spans, periods


def _span(where: str, client: str, start: Any, end: Any) -> Span:
    if not client:
        raise refused(f"{where}: client", client, "a number or a name")
    first, last = number(where, "start", start, 0), number(where, "end", end, 0)
    if last <= first:
        raise refused(f"{where}: end", end, f"more than start, {first:g}")
    return where, client, first, last


@dataclass(frozen=True)
class AwakeBy(Arriving):
    """A `who` by a function from the time to the available clients, with arrivals drawn uniformly among them.

    Args:
        awake: (the registered clients, the time) -> (registered,) bool, the mask of the available clients.
        dropout_rate: share of the asked clients that never answer.
    """

    awake: Callable[[Tensor, float], Tensor]
    dropout_rate: float = 0.0

    def plan(self, view: PopulationView) -> "AwakeByPlan":
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
