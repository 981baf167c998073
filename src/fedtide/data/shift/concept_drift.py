"""Concepts of clients that change: at change points, or by clustered drift; both are exportable.

Change points are drawn, planned, in a cycle, or from a file (`fedtide.data.shift.changes`). A concept is a domain of
the source, a bank of labels, or a distribution of labels by which a client draws rows. Clustered drift follows
*Fielding: Clustered Federated Learning with Data Drift*, with random draws. Label distributions change a little, and
mass events break up the old groups.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from fedtide.core.base import Moment
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.data.ragged import count_pairs
from fedtide.data.shift.changes import COLUMNS, Drawn, Tested, Trace, When, check_test, write_rows
from fedtide.data.shift.what import JUDGED, Chain, Holding, Plan, PopulationView, Recent, count_events
from fedtide.data.sources.cells import number, read_cells
from fedtide.data.sources.files import find
from fedtide.data.sources.table_files import read_names
from fedtide.draw.prose import listed, share_of
from fedtide.fields.types import (
    ClassCount,
    Count,
    DataFile,
    Flag,
    Fraction,
    Positive,
    Spelled,
    Whole,
    allowing,
    ingredient,
)


@dataclass(frozen=True)
class Domain:
    """Rows in the order of their labels; those of label c are `rows[start[c]:start[c + 1]]`."""

    rows: np.ndarray
    start: np.ndarray

    @staticmethod
    def of(rows: Tensor, y: Tensor, classes: int) -> "Domain":
        """Sort rows by label."""
        labels = y[rows.long()]
        order = labels.argsort(stable=True)
        counts = torch.bincount(labels, minlength=classes)
        return Domain(rows[order].long().numpy(), np.concatenate([[0], counts.cumsum(0).numpy()]))

    def __getitem__(self, label: int) -> np.ndarray:
        return self.rows[self.start[label] : self.start[label + 1]]

    def drawn(self, counts: Mapping[int, int], draw: np.random.Generator, own_rows: "Domain | None" = None) -> Tensor:
        """Draw a number of rows of each label, sorted, without repetition while there are enough.

        Args:
            counts: number of rows of each label.
            own_rows: rows that take the place of these for each label that they have.

        >>> domain = Domain.of(torch.arange(4), torch.tensor([0, 1, 0, 1]), 2)
        >>> domain.drawn({0: 2, 1: 0}, np.random.default_rng(0)).tolist()
        [0, 2]
        """
        parts = [self.rows[:0]]
        for label, count in counts.items():
            rows = self[label] if own_rows is None or not len(own_rows[label]) else own_rows[label]
            if count:
                parts.append(rows[draw.choice(len(rows), count, replace=count > len(rows))])
        return torch.from_numpy(np.sort(np.concatenate(parts)))


class Amounts:
    """Numbers of rows that a client draws, by part."""

    samples: int
    val_samples: int
    test_samples: int

    def wanted(self, part: str) -> int:
        """Return the number of rows of a part that a client draws."""
        return {"train": self.samples, "val": self.val_samples, "test": self.test_samples}[part]


@dataclass(frozen=True)
class Pools:
    """Rows from which clients draw: those of all training clients, and separately of all held-out clients, by part."""

    view: PopulationView
    amounts: Amounts
    drawn: Recent = field(default_factory=Recent, init=False, repr=False, compare=False)

    @cached_property
    def domains(self) -> dict[tuple[str, str], Domain]:
        """Rows to draw from, for each part of training and held-out clients that has rows of which some are wanted."""
        pools: dict[tuple[str, str], Domain] = {}
        for who, first, last in self.view.populated():
            parts = self.view.parts.items()
            rows = {part: lists.rows[lists.start[first] : lists.start[last]].long().unique() for part, lists in parts}
            # Clients may share rows; training rows of any client are no validation rows.
            rows["val"] = rows["val"][~torch.isin(rows["val"], rows["train"])]
            for part, part_rows in rows.items():
                if len(part_rows) and self.amounts.wanted(part):
                    pools[part, who] = Domain.of(part_rows, self.view.rows.y, self.view.rows.classes)
        return pools

    def of(self, part: str, client: int) -> Domain | None:
        """Return the rows from which a client draws; None if it draws none."""
        return self.domains.get((part, "seen" if client < self.view.registered else "unseen"))

    def draw(
        self, part: str, client: int, rng: Rng, shares: Mapping[int, float], own_rows: Domain | None = None
    ) -> Tensor:
        """Draw the rows of a part of a client by the shares of labels; `own_rows` rows take the place of these."""
        domain, draw = self.of(part, client), rng.numpy()
        if domain is None:
            return torch.empty(0, dtype=torch.int64)
        counts = draw.multinomial(self.amounts.wanted(part), [*shares.values()]).tolist()
        return domain.drawn(dict(zip(shares, counts, strict=True)), draw, own_rows)

    def counts(self, clients: Tensor, part: str) -> Tensor:
        """Count the rows that each of `clients` draws."""
        seen, unseen = (self.amounts.wanted(part) * ((part, who) in self.domains) for who in ("seen", "unseen"))
        return torch.where(clients < self.view.registered, seen, unseen)

    def lacking(self, needed: np.ndarray | None = None) -> dict[int, str]:
        """Return the labels without rows in some part, each with the reason; `needed` (classes,) masks some labels."""
        reasons: dict[int, str] = {}
        for (part, who), domain in self.domains.items():
            empty = np.diff(domain.start) == 0
            for label in np.flatnonzero(empty if needed is None else empty & needed).tolist():
                reasons.setdefault(label, f"{'' if who == 'seen' else 'held-out '}clients have no {part} row of it")
        return reasons


def check_apart(view: PopulationView, kind: str) -> None:
    """Raise if rows cannot be drawn by labels: they are sequences, or a client trains on another's test row."""
    if view.rows.steps is not None:
        but = f"it draws rows by their labels, and rows of {view.rows.name} are sequences"
        raise refused("shift.what.kind", kind, "static, domain-mixture, stream, change-points of domains", but)
    trained, tested = (view.parts[part].rows.long().unique() for part in ("train", "test"))
    both = trained[torch.isin(trained, tested)]
    if len(both):
        but = f"it draws from all rows, and row {int(both[0])} is for training of one client and for tests of another"
        raise refused("shift.what.kind", kind, "a data.partition whose parts share no rows", but)


CLOSE = 1e-6
"""Largest deviation of the sum of a concept's shares from 1."""


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


BANKS = allowing("a whole number of 2 or more, or lists of labels")


@ingredient
class LabelBanks:
    """Concepts that are sets of labels: a client holds its own rows with these labels, and no others.

    Args:
        banks: number of sets, drawn once and all different; or the labels of each set.
        labels: number of labels of each drawn set.
    """

    banks: Annotated[ClassCount | tuple[tuple[Whole, ...], ...], BANKS] = 4
    labels: Count = 2
    kind: Literal["label-banks"] = "label-banks"

    def __post_init__(self) -> None:
        lists = () if isinstance(self.banks, int) else self.banks
        if lists and (len(lists) < 2 or not all(len(set(labels)) == len(labels) > 0 for labels in lists)):
            banks = [list(labels) for labels in lists]
            raise ValueError(f"found banks {banks}; allowed: two lists or more, each with different labels")

    def members(self, classes: int, rng: Rng) -> np.ndarray:
        """Return the mask of the labels of each set (banks, classes).

        Raises:
            FedtideError: there are too few labels.
        """
        if not isinstance(self.banks, int):
            if (most := max(max(labels) for labels in self.banks)) >= classes:
                raise refused("shift.what.concepts.banks", most, f"labels from 0 to {classes - 1}")
            return np.stack([np.isin(np.arange(classes), labels) for labels in self.banks])
        if self.banks > (most := math.comb(classes, self.labels)):
            but = f"there are {most} sets of {self.labels} of {classes} labels"
            raise refused("shift.what.concepts.banks", self.banks, f"at most {most}", but)
        draw, sets = rng.at("banks").numpy(), list[tuple[int, ...]]()
        while len(sets) < self.banks:
            labels = tuple(sorted(draw.choice(classes, self.labels, replace=False).tolist()))
            sets += [labels] if labels not in sets else []
        return np.stack([np.isin(np.arange(classes), labels) for labels in sets])


@ingredient
class ChangePoints(Holding):
    """Each client holds rows of one concept. It changes at change points.

    Args:
        when: the change points: "drawn", "planned", a "cycle", or a "file".
        concepts: the kind of concept: the source's "domains", "label-banks", or "label-shares" of a file.
        test: concept of the rows on which a client is judged: that of the moment ("now"), its "first" one, or one that
            it never trains on ("unseen", if change points are drawn).
    """

    when: When = Drawn()
    concepts: Annotated[Domains | LabelBanks | LabelShares, Field(discriminator="kind"), Spelled] = Domains()
    test: Tested = "now"
    kind: Literal["change-points"] = "change-points"
    drifts: ClassVar[bool] = True

    def check(self, view: PopulationView) -> None:
        """Raise for a wrong file, and if a client would have no training rows."""
        rows, plan = view.rows, ChangePointsPlan(self, view)
        if isinstance(self.concepts, LabelBanks):
            if rows.steps is not None:
                but = f"rows of {rows.name} are sequences"
                raise refused("shift.what.concepts", "label-banks", "'domains', or kind = 'static'", but)
        elif isinstance(self.concepts, Domains) and (rows.domain is None or len(rows.domain_names) < 2):
            allowed = "label-banks, a file of label distributions (shift.what.concepts), or kind = 'static'"
            raise refused("shift.what.concepts", "domains", allowed, f"{rows.name} has a single domain")
        self.when.check(len(plan.concepts), "shift.what.when")
        check_test(self.test, self.when, len(plan.concepts), "shift.what.test")
        if plan.shares is not None and isinstance(self.concepts, LabelShares):
            check_apart(view, "change-points")
            for label, why in plan.pools.lacking(plan.shares.table.max(0) > 0).items():
                concept = plan.shares.names[int(plan.shares.table[:, label].argmax())]
                line = f"{self.concepts.path}: concept '{concept}': label"
                raise refused(line, label, "labels that are there", why)
            plan.trace.met()
            return
        lacking = (plan.trace.met() & (plan.own_counts["train"] == 0))[: view.registered].nonzero()
        if len(lacking):
            client, concept_number = lacking[0].tolist()
            named = f"{'domain' if isinstance(self.concepts, Domains) else 'bank'} '{plan.concepts[concept_number]}'"
            but = f"client {client} has no training rows of {named}, to which it changes"
            raise refused("shift.what.kind", self.kind, "more rows for each client", but)

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """Describe the kind of concept and the change points."""
        named = f", {', '.join(domains[:-1])} or {domains[-1]}," if len(domains) > 1 else ""
        text = f"A client holds its rows of one domain{named}"
        if isinstance(self.concepts, LabelBanks):
            text = "A client holds its rows of a few labels"
        elif isinstance(self.concepts, LabelShares):
            text = "A client draws its rows by one of several mixes of labels"
        return f"{text} and {self.when.words(unit)}. "

    def plan(self, view: PopulationView) -> Plan:
        """Build the plan of the rows that each client holds over time."""
        return ChangePointsPlan(self, view)


@dataclass(frozen=True)
class ChangePointsPlan(Plan):
    """Concept and rows of each client after each change point."""

    changes: ChangePoints
    view: PopulationView

    @cached_property
    def shares(self) -> "Concepts | None":
        """Label distributions of the file; None if concepts are domains or banks of labels."""
        concepts = self.changes.concepts
        if not isinstance(concepts, LabelShares):
            return None
        return read_concepts(find(concepts.path, None, "shift.what.concepts.path"), self.view.rows.classes)

    @property
    def concepts(self) -> tuple[str, ...]:
        """Names of the concepts; sets of labels have numbers."""
        if self.shares is not None:
            return self.shares.names
        return tuple(map(str, range(len(self.members)))) if self.by_labels else self.view.rows.domain_names

    @property
    def by_labels(self) -> bool:
        """Tell whether concepts are sets of labels."""
        return isinstance(self.changes.concepts, LabelBanks)

    @cached_property
    def members(self) -> Tensor:
        """Mask of the labels, or domains, of each concept (concepts, labels)."""
        kind, rows = self.changes.concepts, self.view.rows
        if isinstance(kind, LabelBanks):
            return torch.from_numpy(kind.members(rows.classes, self.view.rng))
        return torch.eye(len(rows.domain_names), dtype=torch.bool)

    @property
    def values(self) -> Tensor:
        """Label, or domain, of each row of the source."""
        rows = self.view.rows
        assert rows.domain is not None or self.by_labels
        return rows.y if self.by_labels or rows.domain is None else rows.domain

    @cached_property
    def pools(self) -> Pools:
        """Rows to draw from by label distributions."""
        assert isinstance(self.changes.concepts, LabelShares)
        return Pools(self.view, self.changes.concepts)

    # -- change points ------------------------------------------------------------------------------------------------

    @cached_property
    def trace(self) -> Trace:
        """Concept of each client over time."""
        return Trace(self.changes.when, self.view, self.concepts, "shift.what.when", "change-points", self.changes.test)

    def write(self, path: str | Path, until: float) -> None:
        """Write every change up to a time as a file that `File` can read."""
        self.trace.write(path, until)

    # -- rows over time -----------------------------------------------------------------------------------------------

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """Return the rows that a client trains on or is judged on, sorted: of a concept, or drawn by its labels."""
        return self._rows_of(client, part, self.trace.concept(self.view.time(moment), judged=part in JUDGED))

    def aside(self, client: int, moment: Moment) -> Tensor:
        """Return the validation rows that a client decides on, sorted: of the concept that it trains on."""
        return self._rows_of(client, "val", self.trace.concept(self.view.time(moment)))

    def _rows_of(self, client: int, part: str, concepts: Tensor) -> Tensor:
        concept = int(concepts[client])
        if self.shares is None:
            rows = self.view.parts[part][client]
            return rows[self.members[concept][self.values[rows.long()]]]
        return self.pools.drawn.get((part, client, concept), partial(self._draw, self.shares, part, client, concept))

    def _draw(self, shares: "Concepts", part: str, client: int, concept: int) -> Tensor:
        rng = self.view.rng.at("concept", part, client, concept)
        return self.pools.draw(part, client, rng, dict(enumerate(shares.table[concept])))

    @cached_property
    def own_counts(self) -> dict[str, Tensor]:
        """Number of rows of each client in each concept (clients, concepts), for each part."""
        values, member, parts = self.values, self.members.long(), self.view.parts.items()
        return {
            part: count_pairs(of.owner, values[of.rows.long()], len(of), member.shape[1]) @ member.T
            for part, of in parts
        }

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """Count the rows that each of `clients` holds; without a moment, all of its own rows."""
        if self.shares is not None:
            return self.pools.counts(clients, part)
        if moment is None:
            return self.view.parts[part].sizes(clients)
        concept = self.trace.concept(self.view.time(moment), judged=part in JUDGED)
        return self.own_counts[part][clients, concept[clients]]

    def group(self, moment: Moment) -> Tensor | None:
        """Return the true group of each client: the number of its domain, or the group of its concept."""
        concept = self.trace.concept(self.view.time(moment))
        return concept if self.shares is None else self.shares.group[concept]

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """Return the registered clients whose concept differs from that at `before`."""
        return self.trace.changed(self.view.time(moment), self.view.time(before))

    def events(self, moment: Moment, before: Moment) -> tuple[str, ...]:
        """Return ("change",) if the concept of any client changed, otherwise ()."""
        return self.trace.events(self.view.time(moment), self.view.time(before))

    def check(self, rounds: int) -> None:
        """Raise if there would be too many change points."""
        self.trace.number(rounds)


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
    table, seen = np.empty((len(names), classes)), set[str]()
    for row, (name, texts) in enumerate(zip(names, shares, strict=True)):
        where = cells.where(row)
        if not name or name in seen:
            raise refused(f"{where}: concept", name, "a name that is not there yet")
        seen.add(name)
        table[row] = [number(where, label, text, 0) for label, text in zip(label_names, texts, strict=True)]
        if abs(table[row].sum() - 1) > CLOSE:
            raise refused(f"{where}: sum of the shares of '{name}'", float(table[row].sum()), f"1, within {CLOSE:g}")
    if len(names) < 2:
        raise refused(f"{path}: number of concepts", len(names), "two or more")
    groups = cells.texts("group") if "group" in header else names
    order = list(dict.fromkeys(groups))
    # Shares that do not sum to 1 exactly would make a draw fail.
    return Concepts(tuple(names), torch.tensor([order.index(g) for g in groups]), table / table.sum(1, keepdims=True))


Labels = tuple[int, ...]
"""Labels of a group."""


@dataclass(frozen=True)
class State:
    """Groups and distributions of all clients after a number of events.

    group: (clients,) group numbers; groups of the start come first, then the groups of each mass event. since:
    (clients,) event at which the client's distribution was drawn, 0 for the start. labels: labels of all groups so far.
    """

    group: np.ndarray
    since: np.ndarray
    labels: tuple[Labels, ...]


@dataclass(frozen=True)
class ClusterDriftPlan(Plan):
    """Group and rows of each client after each event."""

    drift: "ClusterDrift"
    view: PopulationView

    @property
    def rng(self) -> Rng:
        """Key of the trace."""
        return self.view.rng.at("drift")

    # -- rows and labels ----------------------------------------------------------------------------------------------

    @cached_property
    def pools(self) -> Pools:
        """Rows to draw from."""
        return Pools(self.view, self.drift)

    def first_groups(self) -> tuple[Labels, ...]:
        """Return the labels of the first groups.

        Raises:
            FedtideError: there are too few labels, or some have no rows to train or to evaluate on.
        """
        lacking = self.pools.lacking()
        usable = [label for label in range(self.view.rows.classes) if label not in lacking]
        groups, labels = self.drift.groups, self.drift.labels
        if not isinstance(labels, int):
            for label in (label for of in labels for label in of if label not in usable):
                but = lacking.get(label, f"there are {self.view.rows.classes} classes")
                raise refused("shift.what.labels", label, ", ".join(map(str, usable)), but)
            return labels
        but = f"there are rows of {len(usable)} labels in every part"
        if groups > len(usable):
            raise refused("shift.what.groups", groups, f"at most {len(usable) // labels}, each of {labels} labels", but)
        if groups * labels > len(usable):
            allowed = f"at most {len(usable) // groups} for each of {groups} groups"
            raise refused("shift.what.labels", labels, allowed, but)
        drawn = self.rng.at("labels").numpy().permutation(usable)[: groups * labels]
        return tuple(tuple(part) for part in drawn.reshape(groups, labels).tolist())

    # -- the trace ----------------------------------------------------------------------------------------------------

    @property
    def _mass_events(self) -> tuple[float, ...]:
        """Times of the mass events."""
        return () if self.drift.events is None else self.drift.events.at

    def _events(self, until: float) -> np.ndarray:
        """Return the times of the events up to a time, in order."""
        return _event_times(self.drift.every, self._mass_events, until)

    def number(self, time: float) -> int:
        """Return the number of events up to a time."""
        return len(self._events(time))

    def state(self, time: float) -> State:
        """Return the state at a time."""
        return self._states[self.number(time)]

    @cached_property
    def _states(self) -> Chain[State]:
        return Chain(self._start, self._after)

    def _start(self) -> State:
        """Deal clients evenly to the groups."""
        group = self.view.deal(self.rng.at("start"), self.drift.groups).numpy()
        return State(group, np.zeros_like(group), self.first_groups())

    def _after(self, state: State, event: int) -> State:
        """Return the state after an event, numbered from 1."""
        steady = self.drift.every * np.arange(1, event + 1)
        key, when = self.rng.at("event", event), np.union1d(steady, self._mass_events)[event - 1]
        if when in steady:
            state = self._small(state, event, key)
        return self._mass(state, event, key.at("mass")) if when in self._mass_events else state

    def _small(self, state: State, event: int, key: Rng) -> State:
        """Apply a small drift: some clients change group, and others draw a new distribution."""
        group, since, draw = state.group.copy(), state.since.copy(), key.at("group").numpy()
        for _, _, clients in self.view.shuffled(key):
            n_move = round(self.drift.migrate_fraction * len(clients))
            n_redraw = round(self.drift.resample_fraction * len(clients))
            moved = clients[:n_move]
            other = draw.integers(0, len(state.labels) - 1, n_move)
            group[moved] = other + (other >= group[moved])
            since[clients[: n_move + n_redraw]] = event
        return replace(state, group=group, since=since)

    def _mass(self, state: State, event: int, key: Rng) -> State:
        """Apply a mass event: deal some clients to new groups that cut across the newest ones."""
        assert self.drift.events is not None
        group, since = state.group.copy(), state.since.copy()
        for _, _, clients in self.view.shuffled(key):
            dealt = clients[: round(self.drift.events.fraction * len(clients))]
            group[dealt] = len(state.labels) + np.arange(len(dealt)) % self.drift.groups
            since[dealt] = event
        return State(group, since, state.labels + cut_across(state.labels[-self.drift.groups :], key.at("labels")))

    def shares(self, client: int, state: State) -> tuple[Labels, np.ndarray]:
        """Return the labels of a client's group, and the share of each among its drawn rows."""
        labels = state.labels[state.group[client]]
        draw = self.rng.at("mixture", client, int(state.since[client])).numpy()
        return labels, draw.dirichlet(np.full(len(labels), self.drift.concentration / len(labels)))

    # -- rows over time -----------------------------------------------------------------------------------------------

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """Return the rows that a client holds, sorted."""
        state = self.state(self.view.time(moment))
        # The event at which a client drew last tells its group, too.
        key = part, client, int(state.since[client])
        return self.pools.drawn.get(key, partial(self._draw, part, client, state))

    def _draw(self, part: str, client: int, state: State) -> Tensor:
        labels, shares = self.shares(client, state)
        rng = self.rng.at("rows", part, client, int(state.since[client]))
        own_rows = None
        if self.drift.own_samples_only:
            own_rows = Domain.of(self.view.parts[part][client], self.view.rows.y, self.view.rows.classes)
        return self.pools.draw(part, client, rng, dict(zip(labels, shares, strict=True)), own_rows)

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """Count the rows that each of `clients` holds, which are equally many at every moment."""
        return self.pools.counts(clients, part)

    def group(self, moment: Moment) -> Tensor | None:
        """Return the group of each client; groups of the start count from 0, and new groups follow."""
        return torch.from_numpy(self.state(self.view.time(moment)).group)

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """Return the registered clients that hold other rows than at `before`."""
        now, then = (self.state(self.view.time(at)).since[: self.view.registered] for at in (moment, before))
        redrawn = (now != then).nonzero()[0].tolist()  # newly drawn rows may be equal by chance
        return torch.tensor([client for client in redrawn if self.differs(client, moment, before)], dtype=torch.int64)

    def events(self, moment: Moment, before: Moment) -> tuple[str, ...]:
        """Return the events since `before`: "drift" for small drifts, "mass" for mass events."""
        then, now = sorted((self.view.time(moment), self.view.time(before)))
        between = self._events(now)[self.number(then) :]
        mass = np.isin(between, self._mass_events)
        steady = np.isin(between, self.drift.every * np.arange(1, len(self._events(now)) + 1))
        return ("drift",) * bool(steady.any()) + ("mass",) * bool(mass.any())

    def check(self, rounds: int) -> None:
        """Raise if there would be too many events."""
        self.number(rounds)

    def write(self, path: str | Path, until: float, *, concepts: str | Path) -> None:
        """Write all distributions up to a time as the two files of change points by label distributions.

        Each drawn distribution is a concept, `<client>@<event>`, with the true group at that time. `shift.what.kind =
        "change-points"` reads the files; the rows that a client holds are then other draws by the same distributions.

        Args:
            path: the file of the change points.
            until: the last time, in rounds or seconds.
            concepts: the file of the label distributions.
        """
        names, classes = self.view.names, self.view.rows.classes
        changes: list[Sequence[object]] = []
        shares: list[Sequence[object]] = []
        before: dict[int, int] = {}
        for time in (0.0, *self._events(until).tolist()):
            state = self.state(time)
            for client, since in enumerate(state.since.tolist()):
                if before.get(client) == since:
                    continue
                before[client] = since
                name, row = f"{client}@{since}", np.zeros(classes)
                labels, distribution = self.shares(client, state)
                row[list(labels)] = distribution
                changes.append([names[client] if names else client, f"{time:.17g}", name])
                shares.append([name, int(state.group[client]), *(f"{share:.17g}" for share in row)])
        write_rows(concepts, [["concept", "group", *range(classes)], *shares])
        write_rows(path, [COLUMNS, *changes])


def cut_across(groups: tuple[Labels, ...], rng: Rng) -> tuple[Labels, ...]:
    """Return equally many groups of the same sizes, whose labels are taken in turn from each given group.

    >>> sorted(sorted(label % 2 for label in group) for group in cut_across(((0, 2), (1, 3)), Rng(0)))
    [[0, 1], [0, 1]]
    """
    mixed = [rng.at(k).numpy().permutation(labels).tolist() for k, labels in enumerate(groups)]
    dealt = [label for turn in zip_longest(*mixed) for label in turn if label is not None]
    ends = np.cumsum([len(labels) for labels in groups]).tolist()
    return tuple(tuple(dealt[last - len(labels) : last]) for last, labels in zip(ends, groups, strict=True))


@lru_cache(maxsize=64)  # every client is asked for its rows at the same time
def _event_times(every: float, mass_events: tuple[float, ...], until: float) -> np.ndarray:
    """Return the times up to one at which there is a small drift or a mass event, in order."""
    steady = every * np.arange(1, count_events(until, every, "shift.what.every") + 2)
    times = np.union1d(steady, mass_events)
    return times[times <= until]


LABELS = allowing("a whole number of 1 or more, or for each group a list of its labels")


@ingredient
class MassEvents:
    """Times at which many clients drift at once.

    Args:
        at: the times, in rounds or seconds.
        fraction: share of the clients that each event deals to new groups.
    """

    at: Annotated[tuple[Positive, ...], Field(min_length=1)]
    fraction: Fraction = 0.5

    def __post_init__(self) -> None:
        if len(set(self.at)) < len(self.at):
            raise ValueError("found an event twice; allowed: times that differ")


def _times(value: Any) -> Any:
    """Expand `[10, 20]` to `{at = [10, 20]}`, and an empty list to None."""
    return ({"at": value} if value else None) if isinstance(value, list | tuple) else value


@ingredient
class ClusterDrift(Amounts, Holding):
    """Rows drawn for each client by its own label distribution, which drifts.

    There are groups of labels. A client's distribution is drawn from a Dirichlet distribution over the labels of its
    group, each with the parameter concentration / (labels of the group). At each multiple of `every`, a share
    `migrate_fraction` of the clients changes group. A share `resample_fraction` draws a new distribution within the
    group. Each of `events` deals a share of the clients to equally many new groups. Labels of a new group are taken in
    turn from the previous groups, so that new groups cut across them. The old groups keep the other clients, and
    clients that migrate later may go to any group. If both coincide, the small drift comes first. A client that drifts
    draws new rows. Times are rounds, or seconds, by `shift.clock`. Held-out clients drift too.

    Rows of a label are drawn without replacement while there are enough of them. They are drawn from the same part of
    all registered clients, or of all held-out clients. So a training row of a client may be a training row of another,
    but never a test row. The partition only decides the part of each row.

    Args:
        groups: number of groups at the start, and number of new groups with every event.
        labels: number of labels of each group, drawn once; or the labels of each group.
        concentration: sum of the parameters of the Dirichlet distribution; smaller values make clients differ more.
        every: time between two small drifts.
        migrate_fraction: share of the clients that change group in a small drift.
        resample_fraction: share of the clients whose distribution changes within the group.
        events: the mass events: their times, or a table with their times and fraction; none disables them.
        samples: number of training rows that a client holds.
        val_samples: number of validation rows, if there are any.
        test_samples: number of test rows, if there are any.
        own_samples_only: of a label that a client has rows of, draw its own rows alone.
    """

    groups: Annotated[int, Field(strict=True, ge=2, le=1000)] = 4
    labels: Annotated[Count | tuple[tuple[Whole, ...], ...], LABELS] = 6
    concentration: Positive = 6.0
    every: Positive = 10
    migrate_fraction: Fraction = 0.05
    resample_fraction: Fraction = 0.15
    events: Annotated[MassEvents | None, BeforeValidator(_times)] = None
    samples: Count = 100
    val_samples: Whole = 10
    test_samples: Whole = 40
    own_samples_only: Flag = False
    kind: Literal["cluster-drift"] = "cluster-drift"
    drifts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.migrate_fraction + self.resample_fraction > 1:
            both = f"{self.migrate_fraction:g} and resample_fraction {self.resample_fraction:g}"
            raise ValueError(f"found migrate_fraction {both}; allowed: at most 1 together")
        lists = () if isinstance(self.labels, int) else self.labels
        flat = [label for labels in lists for label in labels]
        if lists and (len(lists) != self.groups or not all(lists) or len(set(flat)) < len(flat)):
            raise ValueError(f"found labels {lists}; allowed: one list for each of {self.groups} groups, disjoint")

    def check(self, view: PopulationView) -> None:
        """Raise if there are too few labels, or if a training row is a test row of another client."""
        check_apart(view, "cluster-drift")
        ClusterDriftPlan(self, view).first_groups()

    def words(self, domains: Sequence[str], unit: str, until: float) -> str:
        """Describe the groups, the small drift and the mass events before `until`."""
        small = [f"{share_of(self.migrate_fraction)} of the clients change group"] if self.migrate_fraction else []
        small += [f"{share_of(self.resample_fraction)} draw other rows within theirs"] if self.resample_fraction else []
        text = f"Clients belong to {self.groups} groups and hold rows of the labels of their group. "
        text += f"Every {self.every:g} {unit} {listed(small)}. " if small else ""
        events = [f"{event:g}" for event in sorted(self.events.at) if event < until] if self.events else []
        if self.events is None or not events:
            return text
        at = unit if len(events) > 1 else unit.removesuffix("s")
        return text + (
            f"At {at} {listed(events)} {share_of(self.events.fraction)} of them are dealt to {self.groups} new groups, "
            "whose labels cut across the old ones. "
        )

    def plan(self, view: PopulationView) -> Plan:
        """Build the plan of the rows that each client holds over time."""
        return ClusterDriftPlan(self, view)
