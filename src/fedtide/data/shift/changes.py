"""Times at which clients change their concept: drawn, planned, in a cycle or from a file.

A concept is what a kind of shift makes of it: rows that a client holds (`what`), or a way to read rows (`how`).
"""

import csv
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.atomic import replacing
from fedtide.core.errors import refused, shown, unknown
from fedtide.core.rng import Rng
from fedtide.data.shift.what import Chain, PopulationView, count_events
from fedtide.data.sources.cells import number, read_cells
from fedtide.data.sources.files import find
from fedtide.draw.prose import listed, share_of
from fedtide.fields.types import Count, DataFile, Flag, Fraction, NonNegative, Positive, Spelled, Whole, ingredient

COLUMNS = ("client", "round", "concept")

Tested = Literal["now", "first", "unseen"]
"""Concept of the rows on which a client is judged: see `Trace`."""


class Changing(Protocol):
    """Settings of the times at which clients change their concept."""

    def check(self, concepts: int, key: str) -> None:
        """Raise if the settings do not fit the number of concepts; `key` is their place in a configuration."""
        return

    @abstractmethod
    def number(self, time: float, trace: "Trace") -> int:
        """Return the number of the last change point that a client may have met at a time; 0 is the start."""

    @abstractmethod
    def time(self, number: int, trace: "Trace") -> float:
        """Return the time of a change point; 0 is the start."""

    @abstractmethod
    def begin(self, trace: "Trace") -> Tensor:
        """Return the concept of each client at the start (clients,)."""

    @abstractmethod
    def follow(self, concept: Tensor, number: int, trace: "Trace") -> Tensor:
        """Return the concepts after a change point, given those before it."""

    def times_of_clients(self, number: int, trace: "Trace") -> Tensor | None:
        """Return the time of a change point for each client (clients,); None if it is the same for all."""
        return None

    def last(self, trace: "Trace") -> int | None:
        """Return the number of the last change point; None if every client may meet every concept."""
        return None

    def read(self, trace: "Trace") -> Any:
        """Read a file of the settings once for a population; the content is kept as `Trace.content`."""
        return None

    def words(self, unit: str) -> str:
        """Describe the changes, in words that follow "and"."""
        return ""


class Even(Changing):
    """Change points at equal distances."""

    every: float

    def number(self, time: float, trace: "Trace") -> int:
        """Return the number of change points up to a time."""
        return count_events(time, self.every, f"{trace.key}.every")

    def time(self, number: int, trace: "Trace") -> float:
        """Return the time of a change point."""
        return number * self.every


@ingredient
class Drawn(Even):
    """Change points come every `every` rounds. Clients that move, and their new concepts, are drawn at random.

    At first clients are dealt evenly to the concepts. With `fraction = 0` clients never change. The drifts of ANDA
    (FEROMA, 2026) are those with `fraction = 1`: "regular" with `to = "any"`, "asynchronous" with `together = false`
    besides.

    Args:
        every: time between two change points, in rounds or seconds.
        fraction: share of the clients that move to another concept at each change point.
        to: "another" concept than before, or "any", which may be the same again.
        together: all clients move at the change point. If false, each moves at a time of its own before it, drawn
            uniformly since the last one.
    """

    every: Positive = 20
    fraction: Fraction = 0.3
    to: Literal["another", "any"] = "another"
    together: Flag = True
    kind: Literal["drawn"] = "drawn"

    def number(self, time: float, trace: "Trace") -> int:
        """Return the number of change points up to a time, and of the one that some clients may have met already."""
        return super().number(time, trace) + (not self.together)

    def begin(self, trace: "Trace") -> Tensor:
        """Deal clients evenly to the concepts."""
        return trace.view.deal(trace.rng.at(0), trace.count)

    def follow(self, concept: Tensor, number: int, trace: "Trace") -> Tensor:
        """Move some clients to other concepts."""
        concept, count = concept.clone(), trace.count
        least = int(self.to == "another" and count > 1)
        for _, draw, order in trace.view.shuffled(trace.rng.at(number)):
            moved = order[: round(self.fraction * len(order))]
            concept[moved] = (concept[moved] + torch.from_numpy(draw.integers(least, count, len(moved)))) % count
        return concept

    def times_of_clients(self, number: int, trace: "Trace") -> Tensor | None:
        """Return the time at which each client moves."""
        if self.together or not number:
            return None
        parts = trace.view.populated()
        drawn = [trace.rng.at(number, "time").at(name).numpy().random(last - first) for name, first, last in parts]
        return self.every * (number - 1 + torch.from_numpy(np.concatenate(drawn)))

    def words(self, unit: str) -> str:
        """Describe the changes."""
        if not self.fraction:
            return "no client changes"
        other = "change to another" if self.to == "another" else "draw one anew"
        when = "" if self.together else ", each at a time of its own"
        return f"every {self.every:g} {unit} {share_of(self.fraction)} of the clients {other}{when}"


@ingredient
class Planned(Changing):
    """Groups of clients that change at given times; clients of no group stay in the first concept.

    A client is in the group that lists its number modulo `modulo`.

    The drifts of FedCCFA (2024) have `modulo = 10`, `groups = [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]` and four concepts.
    "Sudden" is `at = [100]` and `to = [[1, 2, 3]]`, and "recurrent" returns: `at = [100, 150]`, `to = [[1, 2, 3], [0,
    0, 0]]`. "Incremental" is `at = [100, 110, 120]` and `to = [[1, 0, 0], [1, 2, 0], [1, 2, 3]]`.

    Args:
        at: times of the changes, in rounds or seconds, in order. Until the first one all clients are in concept 0.
        to: for each time the concept of each group, counted from 0.
        groups: for each group the remainders of the numbers of its clients, divided by `modulo`.
        modulo: divisor of the remainders. By default all clients are of one group.

    >>> plan = Planned(at=(100, 150), to=((1, 2), (0, 0)), groups=((0,), (1,)), modulo=3)
    >>> plan.follow(torch.zeros(4, dtype=torch.int64), 1, None).tolist()
    [1, 2, 0, 1]
    """

    at: Annotated[tuple[NonNegative, ...], Field(min_length=1)]
    to: Annotated[tuple[tuple[Whole, ...], ...], Field(min_length=1)]
    groups: Annotated[tuple[tuple[Whole, ...], ...], Field(min_length=1)] = ((0,),)
    modulo: Count = 1
    kind: Literal["planned"] = "planned"

    def __post_init__(self) -> None:
        if any(later <= time for time, later in pairwise(self.at)):
            raise ValueError(f"found at {list(self.at)}; allowed: times that rise")
        if len(self.to) != len(self.at) or any(len(row) != len(self.groups) for row in self.to):
            sizes = f"{len(self.at)} times and {len(self.groups)} groups"
            raise ValueError(f"found to {[list(row) for row in self.to]}; allowed: a concept for each of {sizes}")
        flat = [rest for group in self.groups for rest in group]
        if len(set(flat)) < len(flat) or any(rest >= self.modulo for rest in flat):
            allowed = f"each remainder from 0 to {self.modulo - 1} at most once"
            raise ValueError(f"found groups {[list(group) for group in self.groups]}; allowed: {allowed}")

    def check(self, concepts: int, key: str) -> None:
        """Raise if a concept does not exist."""
        if (most := max(max(row) for row in self.to)) >= concepts:
            raise refused(f"{key}.to", most, f"0 to {concepts - 1}", f"there are {concepts} concepts")

    def number(self, time: float, trace: "Trace") -> int:
        """Return the number of changes up to a time."""
        return bisect_right(self.at, time)

    def time(self, number: int, trace: "Trace") -> float:
        """Return the time of a change."""
        return self.at[number - 1] if number else 0.0

    def begin(self, trace: "Trace") -> Tensor:
        """Return the first concept for each client."""
        return torch.zeros(len(trace.view.group), dtype=torch.int64)

    def follow(self, concept: Tensor, number: int, trace: "Trace") -> Tensor:
        """Return the concepts after a change."""
        concept = concept.clone()
        for to, group in zip(self.to[number - 1], self.groups, strict=True):
            concept[torch.isin(torch.arange(len(concept)) % self.modulo, torch.tensor(group))] = to
        return concept

    def last(self, trace: "Trace") -> int | None:
        """Return the number of changes."""
        return len(self.at)

    def words(self, unit: str) -> str:
        """Describe the changes."""
        when = listed([f"{time:g}" for time in self.at])
        named = unit if len(self.at) > 1 else unit.removesuffix("s")
        return f"groups of clients change at {named} {when}"


@ingredient
class Cycle(Even):
    """Concepts that come, go and come back: a recurring world, for methods that keep or forget models.

    Concepts stand on a ring. Clients are dealt evenly to `present` of them, and to no others. After each `every` all
    clients move on by `present` places, or by one place if all concepts are present. So `concepts = 6` and `present =
    2` make three pairs that take turns. With `present = 1` all clients are in the same concept at a time.

    Args:
        every: time between two change points, in rounds or seconds.
        present: number of concepts with clients at a time; None means all concepts.
    """

    every: Positive = 20
    present: Count | None = None
    kind: Literal["cycle"] = "cycle"

    def check(self, concepts: int, key: str) -> None:
        """Raise if there are fewer concepts."""
        if self.present is not None and self.present > concepts:
            raise refused(f"{key}.present", self.present, f"at most {concepts}", f"there are {concepts} concepts")

    def begin(self, trace: "Trace") -> Tensor:
        """Deal clients evenly to the first concepts."""
        return trace.view.deal(trace.rng.at(0), self.present or trace.count)

    def follow(self, concept: Tensor, number: int, trace: "Trace") -> Tensor:
        """Move all clients on along the ring."""
        return (concept + ((self.present or 0) % trace.count or 1)) % trace.count

    def words(self, unit: str) -> str:
        """Describe the changes."""
        few = "" if self.present is None else f", of which {self.present} are present at a time"
        return f"every {self.every:g} {unit} all clients move on along the ring of them{few}"


@ingredient
class File(Changing):
    """A CSV file with the columns `client`, `round` and `concept`: from that round on the client is in the concept.

    A client is given by its number, or by the source's name for it if there is one. Concepts have the names of their
    kind, or numbers from 0. Clients without an entry at round 0 begin with the first concept. Rounds are seconds if
    `shift.clock` says so.

    Args:
        path: the file, below the data directory (data.directory or FEDTIDE_DATA), absolute, or relative to the working
            directory of the command.
    """

    path: DataFile
    kind: Literal["file"] = "file"

    def read(self, trace: "Trace") -> "Content":
        """Return the change points of the file."""
        changes = read_changes(find(self.path, None, f"{trace.key}.path"), trace.view, trace.names)
        return Content(changes, sorted({0.0, *(time for _, time, _ in changes)}))

    def number(self, time: float, trace: "Trace") -> int:
        """Return the number of change points up to a time, without that at 0."""
        return bisect_right(trace.content.times, time) - 1

    def time(self, number: int, trace: "Trace") -> float:
        """Return the time of a change point."""
        return float(trace.content.times[number])

    def begin(self, trace: "Trace") -> Tensor:
        """Return the concepts at time 0."""
        return self.follow(torch.zeros(len(trace.view.group), dtype=torch.int64), 0, trace)

    def follow(self, concept: Tensor, number: int, trace: "Trace") -> Tensor:
        """Return the concepts after the changes that the file has at a time."""
        concept = concept.clone()
        for client, time, other in trace.content.changes:
            if time == trace.content.times[number]:
                concept[client] = other
        return concept

    def last(self, trace: "Trace") -> int | None:
        """Return the number of change points."""
        return len(trace.content.times) - 1

    def words(self, unit: str) -> str:
        """Describe the changes."""
        return "changes to another when a file of change points says so"


@dataclass(frozen=True)
class Content:
    """Content of a file: changes as (client, time, concept), and the times of its change points, from 0 on."""

    changes: list[tuple[int, float, int]]
    times: list[float]


When = Annotated[Drawn | Planned | Cycle | File, Field(discriminator="kind"), Spelled]


def check_test(test: Tested, when: Changing, concepts: int, key: str) -> None:
    """Raise if clients cannot be judged on a concept that they never train on; `key` is the place of `test`."""
    if test != "unseen":
        return
    if not isinstance(when, Drawn):
        raise refused(key, test, "'now', 'first'", "'unseen' works only with `when = \"drawn\"`")
    if concepts < 2 + (when.fraction > 0):
        raise refused(key, test, "'now', 'first', or more concepts", f"{concepts} are too few to leave one out")


@dataclass(frozen=True)
class Trace:
    """Concept of each client over time.

    Rows on which a client is judged are of the concept of the moment ("now"). With "first" they stay in the first
    concept of the client. With "unseen" they stay in a concept that the client never trains on: each client has one
    of its own, drawn evenly, and its other concepts are drawn among the rest.

    Args:
        when: the changes.
        view: the clients.
        names: names of the concepts.
        key: the place of `when` in a configuration, for messages.
        stream: name of the key of the draws.
        test: the concept of the rows on which a client is judged.
    """

    when: Changing
    view: PopulationView
    names: tuple[str, ...]
    key: str
    stream: Literal["change-points", "readings"]
    test: Tested = "now"

    @property
    def rng(self) -> Rng:
        """Key of the draws, which differs between rows and readings."""
        return self.view.rng.at(self.stream)

    @property
    def count(self) -> int:
        """Number of concepts among which a client moves."""
        return len(self.names) - (self.test == "unseen")

    @cached_property
    def content(self) -> Any:
        """Content of the file of the settings; None without one."""
        return self.when.read(self)

    @cached_property
    def _places(self) -> Chain[Tensor]:
        """Place of each client among the concepts that it meets, after a number of change points."""
        return Chain(lambda: self.when.begin(self), lambda place, number: self.when.follow(place, number, self))

    @cached_property
    def _apart(self) -> Tensor:
        """Concept of each client that it never trains on (clients,)."""
        return self.view.deal(self.rng.at("unseen"), len(self.names))

    def _after(self, number: int) -> Tensor:
        """Return the concept of each client after a number of change points."""
        place = self._places[number]
        return place + (place >= self._apart) if self.test == "unseen" else place

    def number(self, time: float) -> int:
        """Return the number of the last change point that a client may have met at a time; 0 is the start."""
        return self.when.number(time, self)

    def concept(self, time: float, *, judged: bool = False) -> Tensor:
        """Return the concept of each client (clients,): of the rows that it trains on, or is `judged` on."""
        if judged and self.test == "unseen":
            return self._apart
        if judged and self.test == "first":
            time = 0.0
        number = self.number(time)
        concept, times = self._after(number), self.when.times_of_clients(number, self)
        return concept if times is None else torch.where(times <= time, concept, self._after(number - 1))

    def met(self) -> Tensor:
        """Return the mask (clients, concepts) of the concepts that each client may have at some time."""
        last = self.when.last(self)
        met = torch.full((len(self.view.group), len(self.names)), last is None)
        for place in range(0 if last is None else last + 1):
            met[torch.arange(len(met)), self._after(place)] = True
        return met

    def table(self, until: float) -> list[tuple[int, float, int]]:
        """Return every change up to a time as (client, time, concept), with the first concepts at time 0."""
        before, changes = torch.full((len(self.view.group),), -1), []
        for place in range(self.number(until) + 1):
            concept, times = self._after(place), self.when.times_of_clients(place, self)
            time = self.when.time(place, self)
            for client in (concept != before).nonzero()[:, 0].tolist():
                changes.append((client, time if times is None else float(times[client]), int(concept[client])))
            before = concept
        return sorted((change for change in changes if change[1] <= until), key=lambda change: (change[1], change[0]))

    def write(self, path: str | Path, until: float) -> None:
        """Write every change up to a time as a file that `File` can read."""
        names = self.view.names
        table = [(names[c] if names else c, f"{time:.17g}", self.names[k]) for c, time, k in self.table(until)]
        write_rows(path, [COLUMNS, *table])

    def changed(self, time: float, before: float) -> Tensor:
        """Return the registered clients whose concept differs from that at `before`."""
        return (self.concept(time) != self.concept(before))[: self.view.registered].nonzero()[:, 0]

    def events(self, time: float, before: float) -> tuple[str, ...]:
        """Return ("change",) if the concept of any client differs from that at `before`, otherwise ()."""
        return ("change",) if bool((self.concept(time) != self.concept(before)).any()) else ()


def write_rows(path: str | Path, rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file atomically."""
    with replacing(Path(path)) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def read_changes(path: Path, view: PopulationView, names: Sequence[str]) -> list[tuple[int, float, int]]:
    """Read the change points of a file as (client, time, position of the concept in `names`).

    Raises:
        FedtideError: the file or one of its rows is wrong; the message names both.
    """
    cells = read_cells(path, COLUMNS)
    ids = list(view.names) or [str(client) for client in range(len(view.group))]
    clients, concepts = ({name: k for k, name in enumerate(names_in_order)} for names_in_order in (ids, names))
    changes: dict[tuple[int, float], int] = {}
    for row, (client, time, concept) in enumerate(zip(*map(cells.texts, COLUMNS), strict=True)):
        where = cells.where(row)
        if client not in clients:
            allowed = f"the source's names, such as {shown(ids[0])}" if view.names else f"0 to {len(ids) - 1}"
            raise refused(f"{where}: client", client, allowed)
        if concept not in concepts:
            raise unknown(f"{where}: concept", concept, list(concepts))
        key = clients[client], number(where, "round", time, 0)
        if key in changes:
            raise refused(f"{where}: round", time, f"once for client {client}", "it is there twice")
        changes[key] = concepts[concept]
    return [(client, time, concept) for (client, time), concept in changes.items()]
