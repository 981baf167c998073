"""Change points: times at which clients move to other concepts, drawn or from a file, and exportable.

A concept is a domain of the source, or a distribution of labels by which a client draws rows.
"""

import csv
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.atomic import replacing
from fedtide.core.base import Moment
from fedtide.core.errors import refused, shown, unknown
from fedtide.data.ragged import count_pairs
from fedtide.data.shift.what import Amounts, Chain, Holding, Plan, Pools, PopulationView, check_apart, count_events
from fedtide.data.sources.cells import number, read_cells, read_names
from fedtide.data.sources.files import find
from fedtide.draw.prose import share_of
from fedtide.fields.types import Count, DataFile, Fraction, Positive, Spelled, Whole, ingredient

COLUMNS = ("client", "round", "concept")
CLOSE = 1e-6
"""Largest deviation of the sum of a concept's shares from 1."""


@ingredient
class Drawn:
    """Change points at equal distances, with clients first dealt evenly to the concepts.

    Args:
        every: time between two change points, in rounds or seconds.
        fraction: share of the clients that move to another concept at each change point.
    """

    every: Positive = 20
    fraction: Fraction = 0.3
    kind: Literal["drawn"] = "drawn"


@ingredient
class File:
    """A CSV file with the columns `client`, `round` and `concept`: from that round on the client is in the concept.

    A client is given by its number, or by the source's name for it if there is one. Clients without an entry at round 0
    begin with the first concept. Rounds are seconds if `shift.clock` says so.

    Args:
        path: the file, below the data directory (data.directory or FEDTIDE_DATA), absolute, or relative to the working
            directory of the command.
    """

    path: DataFile
    kind: Literal["file"] = "file"


@ingredient
class Domains:
    """Concepts that are the domains of the source: a client holds its own rows of a domain."""

    kind: Literal["domains"] = "domains"


@ingredient
class LabelShares(Amounts):
    """Concepts that are label distributions, by which clients draw their rows.

    The distributions are in a CSV file with the column `concept`, a name, and a column for each label. Columns are
    named by the numbers of the labels, and shares sum to one. An optional column `group` gives the true group of each
    concept; otherwise each concept is a group of its own. Rows of a label are drawn as by `cluster-drift`: from all
    rows of the part, without replacement while there are enough. A client draws the same rows each time that it is in
    the concept.

    Args:
        path: the file, searched first below the data directory.
        samples: number of training rows that a client draws.
        val_samples: number of validation rows, if there are any.
        test_samples: number of test rows, if there are any.
    """

    path: DataFile
    samples: Count = 100
    val_samples: Whole = 10
    test_samples: Whole = 40
    kind: Literal["label-shares"] = "label-shares"


@ingredient
class ChangePoints(Holding):
    """Rows of one concept per client, which changes at change points.

    Args:
        when: the source of the change points: "drawn", or a "file".
        concepts: the kind of concept: the source's "domains", or "label-shares" of a file.
    """

    when: Annotated[Drawn | File, Field(discriminator="kind"), Spelled] = Drawn()
    concepts: Annotated[Domains | LabelShares, Field(discriminator="kind"), Spelled] = Domains()
    kind: Literal["change-points"] = "change-points"
    drifts: ClassVar[bool] = True

    def check(self, view: PopulationView) -> None:
        """Raise for a wrong file, and if a client would have no training rows."""
        rows, plan = view.rows, ChangePointsPlan(self, view)
        if isinstance(self.concepts, LabelShares):
            plan.check_labels()
            plan.met()
            return
        if rows.domain is None or len(rows.domain_names) < 2:
            allowed = "a file of label distributions (shift.what.concepts), or kind = 'static'"
            raise refused("shift.what.concepts", "domains", allowed, f"{rows.name} has a single domain")
        lacking = (plan.met() & (plan.domain_counts["train"] == 0))[: view.registered].nonzero()
        if len(lacking):
            client, domain = lacking[0].tolist()
            but = f"client {client} has no training rows of domain '{rows.domain_names[domain]}', to which it changes"
            raise refused("shift.what.kind", self.kind, "more rows for each client", but)

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """Describe the kind of concept and the change points."""
        named = f", {', '.join(domains[:-1])} or {domains[-1]}," if len(domains) > 1 else ""
        text = f"A client holds its rows of one domain{named} "
        if isinstance(self.concepts, LabelShares):
            text = "A client draws its rows by one of several mixes of labels "
        if isinstance(self.when, File):
            return text + "and changes to another when a file of change points says so. "
        many = share_of(self.when.fraction)
        return text + f"and every {self.when.every:g} {unit} {many} of the clients change to another. "

    def plan(self, view: PopulationView) -> Plan:
        """Build the plan of the rows that each client holds over time."""
        return ChangePointsPlan(self, view)


@dataclass(frozen=True)
class ChangePointsPlan(Plan):
    """Concept and rows of each client after each change point."""

    changes: ChangePoints
    view: PopulationView

    @cached_property
    def _shares(self) -> "Concepts | None":
        """Label distributions of the file; None if concepts are domains."""
        concepts = self.changes.concepts
        if not isinstance(concepts, LabelShares):
            return None
        return read_concepts(find(concepts.path, None, "shift.what.concepts.path"), self.view.rows.classes)

    @property
    def concepts(self) -> tuple[str, ...]:
        """Names of the concepts."""
        return self.view.rows.domain_names if self._shares is None else self._shares.names

    @cached_property
    def _pools(self) -> Pools:
        assert isinstance(self.changes.concepts, LabelShares)
        return Pools(self.view, self.changes.concepts)

    def check_labels(self) -> None:
        """Raise if rows cannot be drawn by the distributions."""
        check_apart(self.view, "change-points")
        assert self._shares is not None
        for label, why in self._pools.lacking(self._shares.table.max(0) > 0).items():
            concept = self._shares.names[int(self._shares.table[:, label].argmax())]
            path = getattr(self.changes.concepts, "path", "")
            raise refused(f"{path}: concept '{concept}': label", label, "labels that are there", why)

    # -- change points ------------------------------------------------------------------------------------------------

    @cached_property
    def _times(self) -> list[float] | None:
        """Times of the file's change points, from 0 on; None if change points are drawn."""
        if isinstance(self.changes.when, Drawn):
            return None
        return sorted({0.0, *(time for _, time, _ in self._read)})

    @cached_property
    def _read(self) -> list[tuple[int, float, int]]:
        assert isinstance(self.changes.when, File)
        return read_changes(find(self.changes.when.path, None, "shift.what.when.path"), self.view, self.concepts)

    @cached_property
    def _concepts(self) -> Chain[Tensor]:
        """Concept of each client (clients,) after a number of change points."""
        return Chain(self._first, self._after)

    def _first(self) -> Tensor:
        if self._times is None:
            return self.view.deal(self.view.rng.at("change-points", 0), len(self.concepts))
        return self._moved(torch.zeros(len(self.view.group), dtype=torch.int64), 0.0)

    def _after(self, concept: Tensor, number: int) -> Tensor:
        """Return the concepts after a change point, given those before it."""
        if self._times is not None:
            return self._moved(concept, self._times[number])
        assert isinstance(self.changes.when, Drawn)
        concept, domains, fraction = concept.clone(), len(self.concepts), self.changes.when.fraction
        for _, draw, order in self.view.shuffled(self.view.rng.at("change-points", number)):
            moved = order[: round(fraction * len(order))]
            concept[moved] = (concept[moved] + torch.from_numpy(draw.integers(1, domains, len(moved)))) % domains
        return concept

    def _moved(self, concept: Tensor, at: float) -> Tensor:
        """Return the concepts after the changes that the file has at a time."""
        concept = concept.clone()
        for client, time, other in self._read:
            if time == at:
                concept[client] = other
        return concept

    def _number(self, time: float) -> int:
        """Return the number of change points up to a time, without that at 0."""
        if isinstance(self.changes.when, Drawn):
            return count_events(time, self.changes.when.every, "shift.what.when.every")
        assert self._times is not None
        return bisect_right(self._times, time) - 1

    def concept(self, time: float) -> Tensor:
        """Return the concept of each client (clients,)."""
        return self._concepts[self._number(time)]

    def met(self) -> Tensor:
        """Return the mask (clients, domains) of the concepts that each client may have at some time."""
        met = torch.full((len(self.view.group), len(self.concepts)), self._times is None)
        for time in self._times or ():
            met[torch.arange(len(met)), self.concept(time)] = True
        return met

    def table(self, until: float) -> list[tuple[int, float, int]]:
        """Return every change up to a time as (client, time, concept), with the first concepts at time 0."""
        before, changes = torch.full((len(self.view.group),), -1), []
        for place in range(self._number(until) + 1):
            concept = self._concepts[place]
            time = self._times[place] if self._times else place * getattr(self.changes.when, "every", 0.0)
            changes += [(client, time, int(concept[client])) for client in (concept != before).nonzero()[:, 0].tolist()]
            before = concept
        return changes

    def write(self, path: Path, until: float) -> None:
        """Write every change up to a time as a file that `File` can read."""
        names = self.view.names
        table = [(names[c] if names else c, f"{time:.17g}", self.concepts[k]) for c, time, k in self.table(until)]
        write_rows(path, [COLUMNS, *table])

    # -- rows over time -----------------------------------------------------------------------------------------------

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """Return the rows that a client holds, sorted: of a domain, or drawn by a label distribution."""
        concept = int(self.concept(self.view.time(moment))[client])
        if self._shares is None:
            rows = self.view.parts[part][client]
            assert self.view.rows.domain is not None
            return rows[self.view.rows.domain[rows.long()] == concept]
        domain = self._pools.of(part, client)
        if domain is None:
            return torch.empty(0, dtype=torch.int64)
        draw = self.view.rng.at("concept", part, client, concept).numpy()
        counts = draw.multinomial(self._pools.amounts.wanted(part), self._shares.table[concept])
        return domain.drawn(dict(enumerate(counts.tolist())), draw)

    @cached_property
    def domain_counts(self) -> dict[str, Tensor]:
        """Number of rows of each client in each domain (clients, domains), for each part."""
        domain, domains = self.view.rows.domain, len(self.concepts)
        assert domain is not None
        return {
            part: count_pairs(ragged.owner, domain[ragged.rows.long()], len(ragged), domains)
            for part, ragged in self.view.parts.items()
        }

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """Count the rows that each of `clients` holds; without a moment, all of its own rows."""
        if self._shares is not None:
            return self._pools.counts(clients, part)
        if moment is None:
            return self.domain_counts[part].sum(1)[clients]
        return self.domain_counts[part][clients, self.concept(self.view.time(moment))[clients]]

    def group(self, moment: Moment) -> Tensor | None:
        """Return the true group of each client: the number of its domain, or the group of its concept."""
        concept = self.concept(self.view.time(moment))
        return concept if self._shares is None else self._shares.group[concept]

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """Return the registered clients whose concept differs from that at `before`."""
        now, then = (self.concept(self.view.time(at)) for at in (moment, before))
        return (now != then)[: self.view.registered].nonzero()[:, 0]

    def events(self, moment: Moment, before: Moment) -> tuple[str, ...]:
        """Return ("change",) if the concept of any client changed, otherwise ()."""
        now, then = (self.concept(self.view.time(at)) for at in (moment, before))
        return ("change",) if bool((now != then).any()) else ()

    def check(self, rounds: int) -> None:
        """Raise if there would be too many change points."""
        self._number(rounds)


@dataclass(frozen=True)
class Concepts:
    """Label distributions of the concepts.

    names: names of the concepts. group: (concepts,) the true group of each. table: (concepts, classes) label shares.
    """

    names: tuple[str, ...]
    group: Tensor
    table: np.ndarray


def read_concepts(path: Path, classes: int) -> Concepts:
    """Read the label distributions of a file.

    Raises:
        FedtideError: the file or one of its rows is wrong; the message names both.
    """
    header = read_names(path)
    columns = [column for column in header if column not in ("concept", "group")]
    if len(columns) != classes:
        raise refused(f"{path}: row 1: columns of shares", len(columns), f"{classes}, one per label")
    label_names = [str(label) for label in range(classes)]
    for name in columns:
        if name not in label_names:
            raise refused(f"{path}: row 1: column", name, f"the numbers of the labels, 0 to {classes - 1}")
    cells = read_cells(path, [*dict.fromkeys(["concept", *label_names, *header])])
    names, shares = cells.texts("concept"), zip(*map(cells.texts, label_names), strict=True)
    table = np.empty((len(names), classes))
    for row, (name, texts) in enumerate(zip(names, shares, strict=True)):
        where = cells.where(row)
        if not name or name in names[:row]:
            raise refused(f"{where}: concept", name, "a name that is not there yet")
        table[row] = [number(where, label, text, 0) for label, text in zip(label_names, texts, strict=True)]
        if abs(table[row].sum() - 1) > CLOSE:
            raise refused(f"{where}: sum of the shares of '{name}'", float(table[row].sum()), f"1, within {CLOSE:g}")
    if len(names) < 2:
        raise refused(f"{path}: number of concepts", len(names), "two or more")
    groups = cells.texts("group") if "group" in header else names
    order = list(dict.fromkeys(groups))
    # Shares that do not sum to 1 exactly would make a draw fail.
    return Concepts(tuple(names), torch.tensor([order.index(g) for g in groups]), table / table.sum(1, keepdims=True))


def write_rows(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file atomically."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
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
