"""Availability of clients from a trace: repeating intervals of time for each device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError, nearest, refused, shown
from fedtide.data.shift.what.holding import PopulationView
from fedtide.data.shift.who import Arriving
from fedtide.data.sources.cells import number, read_cells
from fedtide.data.sources.files import find, reading
from fedtide.fields.types import DataFile, OpenFraction, Positive, ingredient

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

    def plan(self, view: PopulationView) -> AvailabilityPlan:
        """Build the plan of the registered clients' availability."""
        table = read_timetable(find(self.path, None, "shift.who.path"), self.period)
        if self.match == "drawn":
            device = view.rng.at("availability").numpy().integers(len(table.names), size=view.registered)
            return AvailabilityPlan(table, device)
        clients = list(view.names) or [str(client) for client in range(len(view.group))]
        stranger = next((name for name in table.names if name not in set(clients)), None)
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
        cells, own_periods = read_cells(path, [], COLUMNS), {}
        rows = enumerate(zip(*cells.texts.values(), strict=True))
        spans = [_span(cells.where(row), *span) for row, span in rows]
    if not spans:
        raise FedtideError(f"shift.who.path: {path}: no client is ever awake; allowed: one interval or more")
    names = tuple(dict.fromkeys(name for _, name, _, _ in spans))
    last = max(end for *_, end in spans)
    periods = {name: own_periods.get(name, last) if period is None else period for name in names}
    for where, name, start, end in spans:
        if end - start > periods[name] * (1 + CLOSE):
            raise refused(f"{where}: end - start", end - start, f"at most the period, {periods[name]:g}")
    place = {name: device for device, name in enumerate(names)}
    start, end = np.array([span[2:] for span in spans]).T
    owner, period_of = [place[name] for _, name, _, _ in spans], [periods[name] for name in names]
    return Timetable(names, start, end - start, np.array(owner), np.array(period_of))


Span = tuple[str, str, float, float]
"""Place in the file for messages, client, beginning and end of an interval."""


def _of_json(path: Path) -> tuple[list[Span], dict[str, float]]:
    """Return the intervals of a JSON file, and the period of each device that has one."""
    with reading(f"shift.who.path: {path}", "JSON"):
        content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, list):
        return [_entry(f"{path}: entry {place}", entry) for place, entry in enumerate(content, start=1)], {}
    if not isinstance(content, dict):
        raise refused(f"shift.who.path: {path}", content, "a list or an object")
    spans: list[Span] = []
    periods: dict[str, float] = {}
    for name, device in content.items():
        where = f"{path}: device '{name}'"
        intervals = list(_ready(where, str(name), device))
        if intervals:
            start, end = (number(where, key, device.get(key), 0) for key in ("trace_start", "trace_end"))
            if end <= start:
                raise refused(f"{where}: trace_end", end, f"more than trace_start, {start:g}")
            spans, periods[str(name)] = spans + intervals, end - start
    return spans, periods


def _entry(where: str, entry: Any) -> Span:
    if not isinstance(entry, Mapping) or not set(COLUMNS) <= entry.keys():
        raise refused(where, entry, f"an object with {', '.join(COLUMNS)}")
    return _span(where, *(entry[key] for key in COLUMNS))


def _ready(where: str, name: str, device: Any) -> Iterator[Span]:
    """Yield the intervals of a device, without the intervals of length 0 in published traces."""
    if not isinstance(device, Mapping) or not isinstance(device.get("ready_time", ""), list | None):
        raise refused(where, device, "an object with ready_time, a list of [start, end]")
    for pair in device["ready_time"] or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise refused(where, pair, "[start, end]")
        if pair[0] != pair[1]:
            yield _span(where, name, *pair)


def _span(where: str, client: Any, start: Any, end: Any) -> Span:
    if not str(client):
        raise refused(f"{where}: client", client, "a number or a name")
    first, last = number(where, "start", start, 0), number(where, "end", end, 0)
    if last <= first:
        raise refused(f"{where}: end", end, f"more than start, {first:g}")
    return where, str(client), first, last
