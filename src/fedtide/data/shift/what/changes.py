"""Change points: who drifts when to which concept, as data that can be read, drawn and written."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.core.atomic import replacing
from fedtide.core.errors import FedtideError, nearest, shown
from fedtide.core.types import Moment
from fedtide.core.values import Fraction, Positive, ingredient
from fedtide.data.shift.what.plan import Holders, Plan
from fedtide.data.sources.table import read_table

COLUMNS = ("client", "round", "concept")


@ingredient
class Changes:
    """A client holds its rows of one pool of the source, the concept that it is in, and changes to others.

    The change points are a CSV file with the columns `client`, `round` and `concept`: from that round on the client
    holds its rows of the pool of that name. A client is written as its number, or as the source calls it where it names
    clients. Who is not in the file at round 0 begins with the first pool. Without a file the change points are drawn:
    clients begin dealt evenly to the pools, and every `every` a share of them changes to another pool. Rounds are
    seconds where `shift.clock` says so.

    Args:
        path: the file, absolute or below the folder that the command runs in; none draws the change points.
        every: time from one drawn change point to the next.
        share: of the clients that change at each.
    """

    path: str | None = None
    every: Positive = 20
    share: Fraction = 0.3
    kind: Literal["change-points"] = "change-points"

    def check(self, holders: Holders) -> None:
        """Raise on a bad file, and where a client will have nothing to train on."""
        rows = holders.rows
        if rows.pool is None or len(rows.pool_names) < 2:
            raise FedtideError(
                "shift.what: 'change-points' needs a source with two pools or more, its concepts; allowed: kind = 'all'"
            )
        plan = ChangesPlan(self, holders)
        train = holders.parts["train"]
        cell = train.owner * len(rows.pool_names) + rows.pool[train.rows.long()]
        own = torch.bincount(cell, minlength=len(train) * len(rows.pool_names)).reshape(len(train), -1)
        meets = plan.met()
        lacking = (meets & (own == 0))[: holders.registered].nonzero()
        if len(lacking):
            client, pool = lacking[0].tolist()
            raise FedtideError(
                f"shift.what: client {client} has no training rows of pool '{rows.pool_names[pool]}', to which it "
                "changes; give clients more rows"
            )

    def plan(self, holders: Holders) -> Plan:
        """Who holds what when."""
        return ChangesPlan(self, holders)


@dataclass(frozen=True)
class ChangesPlan:
    """Which pool each client holds after each change point."""

    changes: Changes
    holders: Holders
    _drawn: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    @property
    def concepts(self) -> tuple[str, ...]:
        """The names of the pools."""
        return self.holders.rows.pool_names

    # -- change points ------------------------------------------------------------------------------------------------

    @cached_property
    def _read(self) -> tuple[list[float], list[Tensor]]:
        """The times of the change points of the file, from 0 on, and the concept of each client after each."""
        table = read_changes(Path(self.changes.path or ""), self.holders)
        times = sorted({0.0, *(time for _, time, _ in table)})
        concept, found = torch.zeros(len(self.holders.group), dtype=torch.int64), []
        for at in times:
            concept = concept.clone()
            for client, time, pool in table:
                if time == at:
                    concept[client] = pool
            found.append(concept)
        return times, found

    def concept(self, time: float) -> Tensor:
        """The pool of each client (clients,)."""
        if self.changes.path is not None:
            times, found = self._read
            return found[bisect_right(times, time) - 1]
        number = int(time // self.changes.every)
        while len(self._drawn) <= number:
            self._drawn.append(self._next(len(self._drawn)))
        return self._drawn[number]

    def _next(self, number: int) -> Tensor:
        """The concepts after a drawn change point; 0 is the start."""
        key, pools = self.holders.rng.at("change-points", number), len(self.concepts)
        concept = torch.zeros(len(self.holders.group), dtype=torch.int64) if not number else self._drawn[-1].clone()
        for who, first, last in self.holders.populated():
            draw = key.at(who).numpy()
            order = first + torch.from_numpy(draw.permutation(last - first))
            if number:
                moved = order[: round(self.changes.share * len(order))]
                concept[moved] = (concept[moved] + torch.from_numpy(draw.integers(1, pools, len(moved)))) % pools
            else:
                concept[order] = torch.arange(len(order)) % pools
        return concept

    def met(self) -> Tensor:
        """Which concepts each client may come to (clients, pools) bool."""
        if self.changes.path is None:
            return torch.ones(len(self.holders.group), len(self.concepts), dtype=torch.bool)
        met = torch.zeros(len(self.holders.group), len(self.concepts), dtype=torch.bool)
        for concept in self._read[1]:
            met[torch.arange(len(concept)), concept] = True
        return met

    def table(self, until: float) -> list[tuple[int, float, int]]:
        """Every change until some time: client, time, concept; everyone's first concept is one at 0."""
        if self.changes.path is not None:
            times = [time for time in self._read[0] if time <= until]
        else:
            times = [k * self.changes.every for k in range(int(until // self.changes.every) + 1)]
        before, found = torch.full((len(self.holders.group),), -1), []
        for time in times:
            concept = self.concept(time)
            found += [(client, time, int(concept[client])) for client in (concept != before).nonzero()[:, 0].tolist()]
            before = concept
        return found

    def write(self, path: Path, until: float) -> None:
        """Write every change until some time as a file that can be read again."""
        names = self.holders.names
        with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(COLUMNS)
            for client, time, concept in self.table(until):
                lines.writerow([names[client] if names else client, f"{time:.17g}", self.concepts[concept]])

    # -- what is there when -------------------------------------------------------------------------------------------

    def _of_pool(self, client: int, part: str, pool: int) -> Tensor:
        rows = self.holders.parts[part][client]
        assert self.holders.rows.pool is not None
        return rows[self.holders.rows.pool[rows.long()] == pool]

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """The rows that a client holds, sorted."""
        return self._of_pool(client, part, int(self.concept(self.holders.time(moment))[client]))

    @cached_property
    def _tables(self) -> dict[str, Tensor]:
        """How many rows of each part each client has of each pool (clients, pools)."""
        pools, found = len(self.concepts), {}
        for part, ragged in self.holders.parts.items():
            assert self.holders.rows.pool is not None
            cell = ragged.owner * pools + self.holders.rows.pool[ragged.rows.long()]
            found[part] = torch.bincount(cell, minlength=len(ragged) * pools).reshape(len(ragged), pools)
        return found

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """How many rows each of `clients` holds; without a moment, how many are its own in all."""
        if moment is None:
            return self._tables[part].sum(1)[clients]
        return self._tables[part][clients, self.concept(self.holders.time(moment))[clients]]

    def there(self, moment: Moment) -> Tensor | None:
        """All, at all times."""
        return None

    def group(self, moment: Moment) -> Tensor | None:
        """The number of the pool that each client holds."""
        return self.concept(self.holders.time(moment))

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """The registered clients that hold another pool than at `before`."""
        now, then = (self.concept(self.holders.time(at)) for at in (moment, before))
        return (now != then)[: self.holders.registered].nonzero()[:, 0]

    def events(self, moment: Moment, before: Moment) -> tuple[str, ...]:
        """ "change" where someone changed."""
        now, then = (self.concept(self.holders.time(at)) for at in (moment, before))
        return ("change",) if bool((now != then).any()) else ()

    def check(self, rounds: int) -> None:
        """Any number of rounds can be played."""


def read_changes(path: Path, holders: Holders) -> list[tuple[int, float, int]]:
    """The change points of a file: client, time, concept.

    Raises:
        FedtideError: the file or one of its rows is wrong; the line names both.
    """
    if not path.is_file():
        raise FedtideError(f"shift.what.path: no such file: {path}")
    header, lines = read_table(path)
    for column in COLUMNS:
        if column not in header:
            raise FedtideError(f"{path}: no column '{column}'; {nearest(column, header)}")
    at = [header.index(column) for column in COLUMNS]
    known = list(holders.names) or [str(client) for client in range(len(holders.group))]
    clients, concepts = ({name: k for k, name in enumerate(names)} for names in (known, holders.rows.pool_names))
    found: dict[tuple[int, float], int] = {}
    for row, line in lines:
        client, time, concept = (line[column].strip() for column in at)
        where = f"{path}: row {row}"
        if client not in clients:
            allowed = f"the source's names, such as {shown(known[0])}" if holders.names else f"0 to {len(known) - 1}"
            raise FedtideError(f"{where}: client is {shown(client)}, allowed: {allowed}")
        if concept not in concepts:
            raise FedtideError(f"{where}: concept is {shown(concept)}; {nearest(concept, list(concepts))}")
        key = clients[client], _time(where, time)
        if key in found:
            raise FedtideError(f"{where}: client {client} changes at {time} twice; allowed: once")
        found[key] = concepts[concept]
    return [(client, time, concept) for (client, time), concept in found.items()]


def _time(where: str, text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not 0 <= time < np.inf:
        raise FedtideError(f"{where}: round is {shown(text)}, allowed: a number of 0 or more")
    return time
