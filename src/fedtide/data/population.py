"""The population: all clients, their rows, and how both change with time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.types import Moment, Shard
from fedtide.data.prepare import Prepare, prepared, shape_after
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.data.shift import Shift
from fedtide.data.shift.who import Periodic


@dataclass(frozen=True)
class Population:
    """Who could take part, and what they hold at a moment.

    Clients are 0..registered-1; ids from `registered` on are unseen clients, which are evaluated and never asked.
    Groups are the ground truth (day or night, which rotation), for the shift and for diagnostics: no algorithm can
    see them. Everything is index arrays, so a million clients are a few hundred megabytes.

    Args:
        rows: the samples.
        parts: "train", "valid", "test" -> which rows each client holds in all.
        group: (clients,) the group of each client, unseen ones included.
        group_names: the names of the groups.
        registered: how many clients can be asked.
        shift: who, what, how.
        seed: of arrivals, mixtures and everything else that is drawn.
        names: what the source calls each client (writer, user, station), or () where it names none.
        prepare: what is done to rows when they are handed out, in order.
        public: rows that everybody may see, without their labels, and that no client holds, sorted.
    """

    rows: Rows
    parts: Mapping[str, Ragged]
    group: Tensor
    group_names: tuple[str, ...]
    registered: int
    shift: Shift = field(default_factory=Shift)
    seed: int = 0
    names: tuple[str, ...] = ()
    prepare: tuple[Prepare, ...] = ()
    public: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        if isinstance(self.shift.who, Periodic):
            sizes = [len(members) for members in self._members]
            if len(sizes) < 2:
                raise FedtideError(
                    "shift.who: 'periodic' needs two groups of clients or more, found 1; allowed: "
                    "data.groups.by = 'pool' or 'labels', or shift.who.kind = 'always'"
                )
            if 0 in sizes:
                name = self.group_names[sizes.index(0)]
                raise FedtideError(f"data.groups: group '{name}' has no clients; allowed: at least one in each")
        self.shift.how.check(len(self.group_names), self.rows.shape)
        shape_after(self.prepare, self.rows.name, self.rows.shape)
        self._check_pools()

    def _check_pools(self) -> None:
        if self.shift.what.kind != "mixture":
            return
        if self.rows.pool is None or len(self.rows.pool_names) < 2:
            raise FedtideError("shift.what: 'mixture' needs a source with two pools or more; allowed: kind = 'all'")
        train = self.parts["train"]
        pool = self.rows.pool[train.rows.long()]
        for k, name in enumerate(self.rows.pool_names):
            held = torch.zeros(len(train)).index_add_(0, train.owner, (pool == k).float())[: self.registered]
            if not held.any():
                raise FedtideError(
                    f"shift.what: pool '{name}' has no samples: no client has a training row of it; allowed: pools "
                    "with samples (data.source, data.groups), or kind = 'all'"
                )
            if (held == 0).any():
                client = int((held == 0).nonzero()[0])
                raise FedtideError(f"shift.what: client {client} has no rows of pool '{name}'; give clients more rows")

    # -- who ----------------------------------------------------------------------------------------------------------

    @cached_property
    def _members(self) -> list[Tensor]:
        """The registered clients of each group."""
        return [(self.group[: self.registered] == k).nonzero().flatten() for k in range(len(self.group_names))]

    @cached_property
    def clients(self) -> Tensor:
        """Every registered id, sorted."""
        return torch.arange(self.registered)

    @cached_property
    def unseen(self) -> Tensor:
        """Ids of the clients that never take part in training, sorted."""
        return torch.arange(self.registered, len(self.group))

    def expected(self, moment: Moment) -> np.ndarray:
        """q(t): the expected share of each group among the arrivals (groups,)."""
        sizes = np.array([len(members) for members in self._members])
        return self.shift.who.shares(self.shift.time(moment), sizes)

    def arrivals(self, m: int, moment: Moment) -> Tensor:
        """The `m` clients that arrive at `moment`, sorted: from (seed, round) alone."""
        return self.arrivals_in_order(m, moment).sort().values

    def arrivals_in_order(self, m: int, moment: Moment) -> Tensor:
        """The `m` clients that arrive at `moment`, as they come: the first of more are the same."""
        key = Rng(self.seed).at(moment.round, "arrivals")
        return self.shift.who.arrivals(m, self._members, self.shift.time(moment), key)

    def filled_in(self, m: int, moment: Moment) -> int:
        """How many of `m` arrivals stand in for clients of a group that has no more."""
        key = Rng(self.seed).at(moment.round, "arrivals")
        return self.shift.who.filled_in(m, self._members, self.shift.time(moment), key)

    def reachable(self, moment: Moment) -> Tensor:
        """The registered clients that could answer at `moment`, sorted."""
        return self.shift.who.awake(self._members, self.shift.time(moment), Rng(self.seed).at(moment.round, "awake"))

    def answers(self, clients: Tensor, moment: Moment, ask: int) -> Tensor:
        """Which of the asked `clients` do not drop out (clients,) bool; `ask` counts the asks of a round."""
        if not self.shift.who.dropout:
            return torch.ones(len(clients), dtype=torch.bool)
        chance = [Rng(self.seed).at(moment.round, ask, int(c), "dropout").numpy().random() for c in clients]
        return torch.tensor(chance) >= self.shift.who.dropout

    # -- what and how -------------------------------------------------------------------------------------------------

    def held(self, client: int, moment: Moment, part: str) -> Tensor:
        """The rows that a client holds at `moment`, sorted."""
        rows = self.parts[part][client]
        if self.shift.what.kind == "all":
            return rows
        pool = self.rows.pool[rows.long()] if self.rows.pool is not None else torch.zeros_like(rows)
        key = Rng(self.seed).at("what", client)
        return self.shift.what.hold(rows, pool, len(self.rows.pool_names), part, moment, key)

    def counts(self, clients: Tensor, part: str) -> Tensor:
        """How many rows each of `clients` holds at a moment."""
        ragged = self.parts[part]
        own = ragged.start[clients + 1] - ragged.start[clients]
        return self.shift.what.counts(own, part)

    def sizes(self, clients: Tensor, part: str) -> Tensor:
        """How much there is to judge of each of `clients`: rows, or all steps of their sequences."""
        return self.counts(clients, part) * (self.rows.steps or 1)

    def fetch(self, rows: Tensor, clients: int | Tensor, moment: Moment) -> tuple[Tensor, Tensor]:
        """x and y of some rows as they mean at `moment`; `clients` holds them (one for all, or one per row)."""
        x = self._features(rows)
        y = torch.index_select(self.rows.y, 0, rows)
        if self.shift.how.kind != "identity":
            group = self.group[clients] if isinstance(clients, Tensor) else self.group[clients].expand(len(rows))
            x, y = self.shift.how.apply(x, y, group, self.shift.time(moment))
        return prepared(self.prepare, x), y

    def _features(self, rows: Tensor) -> Tensor:
        """x of some rows as the source means it: bytes are 0 to 1."""
        x = torch.index_select(self.rows.x, 0, rows)
        return x.to(torch.float32).mul_(1 / 255) if x.dtype == torch.uint8 else x

    def public_features(self) -> Tensor:
        """x of the public rows as a model sees them; no shift turns them, as they are of no group."""
        return prepared(self.prepare, self._features(self.public))

    def shard(self, client: int, moment: Moment, part: str = "train") -> Shard:
        """What one client holds at `moment`; its validation rows are fetched when they are looked at."""
        rows = self.held(client, moment, part)
        x, y = self.fetch(rows, client, moment)
        time = None if self.rows.time is None else self.rows.time[rows.long()]
        held_out = None
        if part == "train" and self.has_valid:
            held_out = lambda: self.shard(client, moment, "valid")  # noqa: E731 - fetched only where it is used
        return Shard(x, y, rows, time, self.rows.mask(y), held_out)

    def pooled(self, clients: Tensor, moment: Moment, part: str) -> tuple[Tensor, Tensor]:
        """The rows of several clients, one after the other, and for each its owner's position in `clients`."""
        lists = [self.held(client, moment, part) for client in clients.tolist()]
        counts = torch.tensor([len(rows) for rows in lists], dtype=torch.int64)
        owner = torch.repeat_interleave(torch.arange(len(clients)), counts)
        return (torch.cat(lists) if lists else torch.empty(0, dtype=torch.int64)), owner

    @cached_property
    def has_valid(self) -> bool:
        """Whether anyone has validation rows."""
        return len(self.parts["valid"].rows) > 0
