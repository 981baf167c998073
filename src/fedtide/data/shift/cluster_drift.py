"""Clustered drift: steady small changes of label distributions, and mass events with many drifting clients.

It follows the drifts in *Fielding: Clustered Federated Learning with Data Drift*, with random draws. Label
distributions change, clients change group, and mass events break up the old groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
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
from fedtide.data.shift.change_points import COLUMNS, write_rows
from fedtide.data.shift.what import (
    Amounts,
    Chain,
    Domain,
    Holding,
    Plan,
    Pools,
    PopulationView,
    check_apart,
    count_events,
)
from fedtide.draw.prose import listed, share_of
from fedtide.fields.types import Count, Flag, Fraction, Positive, Whole, explained, ingredient

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
            n_move, n_redraw = (
                round(share * len(clients)) for share in (self.drift.migrate_fraction, self.drift.resample_fraction)
            )
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

    def distribution(self, client: int, moment: Moment) -> tuple[Labels, np.ndarray]:
        """Return the labels of a client's group, and the share of each among its drawn rows."""
        return self._shares(client, self.state(self.view.time(moment)))

    def _shares(self, client: int, state: State) -> tuple[Labels, np.ndarray]:
        labels = state.labels[state.group[client]]
        draw = self.rng.at("mixture", client, int(state.since[client])).numpy()
        return labels, draw.dirichlet(np.full(len(labels), self.drift.concentration / len(labels)))

    # -- rows over time -----------------------------------------------------------------------------------------------

    def hold(self, client: int, part: str, moment: Moment) -> Tensor:
        """Return the rows that a client holds, sorted."""
        domain = self.pools.of(part, client)
        if domain is None:
            return torch.empty(0, dtype=torch.int64)
        labels, shares = self.distribution(client, moment)
        since = int(self.state(self.view.time(moment)).since[client])
        draw = self.rng.at("rows", part, client, since).numpy()
        own_rows = None
        if self.drift.own_samples_only:
            own_rows = Domain.of(self.view.parts[part][client], self.view.rows.y, self.view.rows.classes)
        counts = draw.multinomial(self.drift.wanted(part), shares).tolist()
        return domain.drawn(dict(zip(labels, counts, strict=True)), draw, own_rows)

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
        return (*(("drift",) if steady.any() else ()), *(("mass",) if mass.any() else ()))

    def check(self, rounds: int) -> None:
        """Raise if there would be too many events."""
        self.number(rounds)

    def write(self, path: Path, until: float, *, concepts: Path) -> None:
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
                labels, distribution = self._shares(client, state)
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


LABELS = explained("a whole number of 1 or more, or for each group a list of its labels")


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
        own_samples_only: draw rows only from the client's own for each label that it has rows of.
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
            raise ValueError(
                f"found migrate_fraction {self.migrate_fraction:g} and resample_fraction {self.resample_fraction:g}; "
                "allowed: at most 1 together"
            )
        if isinstance(self.labels, int):
            return
        flat = [label for labels in self.labels for label in labels]
        if len(self.labels) != self.groups or not all(self.labels) or len(set(flat)) < len(flat):
            raise ValueError(
                f"found labels {self.labels}; allowed: one list for each of {self.groups} groups, disjoint"
            )

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
