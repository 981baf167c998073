"""The trace of a grouped drift: who is in which group after each event, and so which rows everyone draws."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.types import Moment
from fedtide.data.shift.chain import Chain, check_events
from fedtide.data.shift.what.change_points import COLUMNS, write_rows
from fedtide.data.shift.what.drawn import Domain, domains_of
from fedtide.data.shift.what.plan import PopulationView

if TYPE_CHECKING:
    from fedtide.data.shift.what.cluster_drift import ClusterDrift

Labels = tuple[int, ...]
"""The labels of a group."""


@dataclass(frozen=True)
class State:
    """Where everyone is after so many events.

    group: (clients,) numbers, those of the start first, then those of each mass event. since: (clients,) the event at
    which the client's distribution was drawn, 0 for the start. labels: of every group that there has been.
    """

    group: np.ndarray
    since: np.ndarray
    labels: tuple[Labels, ...]


@dataclass(frozen=True)
class ClusterDriftPlan:
    """Which group each client is in after each event, and so which rows it draws."""

    drift: ClusterDrift
    view: PopulationView

    @property
    def rng(self) -> Rng:
        """The key of the trace."""
        return self.view.rng.at("drift")

    # -- rows and labels ----------------------------------------------------------------------------------------------

    @cached_property
    def domains(self) -> dict[tuple[str, str], Domain]:
        """The rows to draw from: of each part of "seen" and of "unseen" clients, where it has any."""
        return domains_of(self.view, self.drift.wanted)

    def first_groups(self) -> tuple[Labels, ...]:
        """The labels of the first groups.

        Raises:
            FedtideError: there are too few, or of some there is nothing to train or to be judged on.
        """
        lacking: dict[int, str] = {}
        for (part, who), domain in self.domains.items():
            for label in np.flatnonzero(np.diff(domain.start) == 0).tolist():
                lacking.setdefault(label, f"{'' if who == 'seen' else 'unseen '}clients have no {part} row of it")
        there = [label for label in range(self.view.rows.classes) if label not in lacking]
        groups, labels = self.drift.groups, self.drift.labels
        if not isinstance(labels, int):
            for label in (label for of in labels for label in of if label not in there):
                why = lacking.get(label, f"there are {self.view.rows.classes} classes")
                raise FedtideError(f"shift.what.labels: label {label}: {why}; allowed: {', '.join(map(str, there))}")
            return labels
        if groups > len(there):
            raise FedtideError(
                f"shift.what.groups: found {groups} with labels of their own, allowed: at most {len(there) // labels}, "
                f"as there are rows of {len(there)} labels in every part and a group has {labels}"
            )
        if groups * labels > len(there):
            raise FedtideError(
                f"shift.what.labels: found {labels} for each of {groups} groups, allowed: at most "
                f"{len(there) // groups}, as there are rows of {len(there)} labels in every part"
            )
        drawn = self.rng.at("labels").numpy().permutation(there)[: groups * labels]
        return tuple(tuple(part) for part in drawn.reshape(groups, labels).tolist())

    # -- the trace ----------------------------------------------------------------------------------------------------

    @property
    def _times(self) -> tuple[float, ...]:
        """When the mass events are."""
        return () if self.drift.events is None else self.drift.events.at

    @cached_property
    def _apart(self) -> list[float]:
        """Mass events at which there is no small drift, sorted."""
        every = self.drift.every
        return sorted(event for event in self._times if round(event / every) * every != event)

    def number(self, time: float) -> int:
        """How many events there have been."""
        check_events(time // self.drift.every, "shift.what.every")
        return _multiples(self.drift.every, time) + bisect_right(self._apart, time)

    def _events(self, time: float) -> list[float]:
        """When they were."""
        steady = [k * self.drift.every for k in range(1, _multiples(self.drift.every, time) + 1)]
        return sorted({*steady, *(event for event in self._times if event <= time)})

    def state(self, time: float) -> State:
        """Where everyone is."""
        return self._states[self.number(time)]

    @cached_property
    def _states(self) -> Chain[State]:
        return Chain(self._start, self._after, "shift.what.every")

    def _when(self, event: int) -> float:
        """When an event is, from 1."""
        every = self.drift.every
        for before, at in enumerate(self._apart):
            steady = event - before
            if at > steady * every:
                return steady * every
            if at > (steady - 1) * every:
                return at
        return (event - len(self._apart)) * every

    def _start(self) -> State:
        """Clients are dealt to the groups evenly."""
        group = np.zeros(len(self.view.group), dtype=np.int64)
        for clients in self._mixed(self.rng.at("start")):
            group[clients] = np.arange(len(clients)) % self.drift.groups
        return State(group, np.zeros_like(group), self.first_groups())

    def _after(self, state: State, event: int) -> State:
        key, when = self.rng.at("event", event), self._when(event)
        if round(when / self.drift.every) * self.drift.every == when:
            state = self._small(state, event, key)
        events = self.drift.events
        if events is None or when not in events.at:
            return state
        return self._mass(state, event, events.fraction, key.at("mass"))

    def _small(self, state: State, event: int, key: Rng) -> State:
        """Some change group, some others draw a new distribution."""
        group, since, draw = state.group.copy(), state.since.copy(), key.at("group").numpy()
        for clients in self._mixed(key):
            n_move, n_redraw = (
                round(share * len(clients)) for share in (self.drift.migrate_fraction, self.drift.resample_fraction)
            )
            moved = clients[:n_move]
            other = draw.integers(0, len(state.labels) - 1, n_move)
            group[moved] = other + (other >= group[moved])
            since[clients[: n_move + n_redraw]] = event
        return replace(state, group=group, since=since)

    def _mass(self, state: State, event: int, fraction: float, key: Rng) -> State:
        """Some are dealt to new groups, which cut across the newest."""
        group, since = state.group.copy(), state.since.copy()
        for clients in self._mixed(key):
            dealt = clients[: round(fraction * len(clients))]
            group[dealt] = len(state.labels) + np.arange(len(dealt)) % self.drift.groups
            since[dealt] = event
        return State(group, since, state.labels + crossed(state.labels[-self.drift.groups :], key.at("labels")))

    def _mixed(self, key: Rng) -> Iterator[np.ndarray]:
        """Training clients in a random order, then held-out ones."""
        for who, first, last in self.view.populated():
            yield first + key.at(who).numpy().permutation(last - first)

    def distribution(self, client: int, moment: Moment) -> tuple[Labels, np.ndarray]:
        """The labels of a client's group, and the share of each in what it draws."""
        return self._shares(client, self.state(self.view.time(moment)))

    def _shares(self, client: int, state: State) -> tuple[Labels, np.ndarray]:
        labels = state.labels[state.group[client]]
        draw = self.rng.at("mixture", client, int(state.since[client])).numpy()
        return labels, draw.dirichlet(np.full(len(labels), self.drift.concentration / len(labels)))

    # -- what is there when -------------------------------------------------------------------------------------------

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """The rows that a client holds, sorted."""
        domain = self.domains.get((part, self._who(client)))
        if domain is None:
            return torch.empty(0, dtype=torch.int64)
        time = self.view.time(moment)
        labels, shares = self.distribution(client, moment)
        since = self.number(time) if self.drift.redraw_for == "all" else int(self.state(time).since[client])
        draw = self.rng.at("rows", part, client, since).numpy()
        own = None
        if self.drift.own_samples_only:
            own = Domain.of(self.view.parts[part][client], self.view.rows.y, self.view.rows.classes)
        drawn = []
        for label, count in zip(labels, draw.multinomial(self.drift.wanted(part), shares).tolist(), strict=True):
            rows = domain[label] if own is None or not len(own[label]) else own[label]
            drawn.append(rows[draw.choice(len(rows), count, replace=count > len(rows))])
        return torch.from_numpy(np.sort(np.concatenate(drawn)))

    def _who(self, client: int) -> str:
        return "seen" if client < self.view.registered else "unseen"

    def counts(self, clients: Tensor, part: str, moment: Moment | None) -> Tensor:
        """How many rows each of `clients` holds: as many at every moment."""
        seen, unseen = (self.drift.wanted(part) * ((part, who) in self.domains) for who in ("seen", "unseen"))
        return torch.where(clients < self.view.registered, seen, unseen)

    def there(self, moment: Moment) -> Tensor | None:
        """All, at all times."""
        return None

    def group(self, moment: Moment) -> Tensor | None:
        """The group of labels that each client is in: those of the start count from 0, new ones follow."""
        return torch.from_numpy(self.state(self.view.time(moment)).group)

    def changed(self, moment: Moment, before: Moment) -> Tensor:
        """The registered clients that drew other rows since `before`."""
        now, then = self.view.time(moment), self.view.time(before)
        drawn = self.state(now).since != self.state(then).since
        if self.drift.redraw_for == "all":
            drawn = np.full_like(drawn, self.number(now) != self.number(then))
        some = drawn[: self.view.registered].nonzero()[0].tolist()
        return torch.tensor([client for client in some if self._differ(client, moment, before)], dtype=torch.int64)

    def _differ(self, client: int, moment: Moment, before: Moment) -> bool:
        """Whether rows that were drawn anew are others: by chance they may be the same."""
        parts = self.view.parts
        return any(not torch.equal(self.hold(client, p, moment), self.hold(client, p, before)) for p in parts)

    def events(self, moment: Moment, before: Moment) -> tuple[str, ...]:
        """ "drift" for a small one, "mass" for a mass event."""
        now, then = self.view.time(moment), self.view.time(before)
        steady = _multiples(self.drift.every, now) != _multiples(self.drift.every, then)
        mass = any(min(now, then) < event <= max(now, then) for event in self._times)
        return (*(("drift",) if steady else ()), *(("mass",) if mass else ()))

    def check(self, rounds: int) -> None:
        """Raise where there would be too many events."""
        self.number(rounds)

    def write(self, path: Path, until: float, *, concepts: Path) -> None:
        """Write everyone's distributions until some time as the two files of change points by label distributions.

        Each that was drawn is a concept, `<client>@<event>`, whose group is the true group then. `shift.what.kind =
        "change-points"` reads them; the rows that a client holds are other draws by the same distributions.

        Args:
            path: the change points.
            until: the last time, in rounds or seconds.
            concepts: the label distributions.
        """
        names, classes = self.view.names, self.view.rows.classes
        changes: list[Sequence[object]] = []
        shares: list[Sequence[object]] = []
        before: dict[int, int] = {}
        for time in (0.0, *self._events(until)):
            state = self.state(time)
            for client, since in enumerate(state.since.tolist()):
                if before.get(client) == since:
                    continue
                before[client] = since
                name, row = f"{client}@{since}", np.zeros(classes)
                labels, own = self._shares(client, state)
                row[list(labels)] = own
                changes.append([names[client] if names else client, f"{time:.17g}", name])
                shares.append([name, int(state.group[client]), *(f"{share:.17g}" for share in row)])
        write_rows(concepts, [["concept", "group", *range(classes)], *shares])
        write_rows(path, [COLUMNS, *changes])


def crossed(groups: tuple[Labels, ...], rng: Rng) -> tuple[Labels, ...]:
    """As many groups of the same sizes, whose labels are taken in turn from each of the given ones.

    >>> sorted(sorted(label % 2 for label in group) for group in crossed(((0, 2), (1, 3)), Rng(0)))
    [[0, 1], [0, 1]]
    """
    mixed = [rng.at(k).numpy().permutation(labels).tolist() for k, labels in enumerate(groups)]
    dealt = [label for turn in zip_longest(*mixed) for label in turn if label is not None]
    ends = np.cumsum([len(labels) for labels in groups]).tolist()
    return tuple(tuple(dealt[last - len(labels) : last]) for last, labels in zip(ends, groups, strict=True))


def _multiples(every: float, until: float) -> int:
    """How many k = 1, 2, ... there are with k * every at most `until`.

    >>> _multiples(10, 9.5), _multiples(10, 30), _multiples(0.1, 0.1)
    (0, 3, 1)
    """
    k = int(until // every)
    return k + 1 if (k + 1) * every <= until else k
