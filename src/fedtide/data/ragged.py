"""Ragged index lists: the rows of each client in two arrays, for up to a million clients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BLOCK = 50_000
"""Number of clients of a block."""
ENTRIES = 1 << 20
"""Number of entries of lists that are replaced at a time."""


def rank_rows(owner: np.ndarray) -> np.ndarray:
    """Return for each row how many rows of the same owner stand before it.

    >>> rank_rows(np.array([1, 0, 1, 1, 0])).tolist()
    [0, 0, 1, 2, 1]
    """
    order, counts = np.argsort(owner, kind="stable"), np.bincount(owner)
    ranks = np.empty(len(owner), dtype=np.int64)
    ranks[order] = np.arange(len(owner)) - (counts.cumsum() - counts)[owner[order]]
    return ranks


@dataclass(frozen=True)
class Ragged:
    """A sorted list of row numbers for each of N clients.

    Args:
        start: (N + 1,) the first position of each client's list.
        rows: (total,) the concatenated lists.

    >>> lists = Ragged.of([[3, 1], [], [2]])
    >>> len(lists), lists[0].tolist(), lists.counts.tolist()
    (3, [1, 3], [2, 0, 1])
    """

    start: Tensor
    rows: Tensor

    @staticmethod
    def of(lists: Sequence[Sequence[int] | np.ndarray]) -> "Ragged":
        """Build the lists from one sequence per client."""
        counts = np.array([len(rows) for rows in lists], dtype=np.int64)
        owner = np.repeat(np.arange(len(lists)), counts)
        flat = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in lists]) if lists else np.empty(0, np.int64)
        return Ragged.from_pairs(owner, flat, len(lists))

    @staticmethod
    def from_owner(owner: np.ndarray, clients: int) -> "Ragged":
        """Build the lists from the owner of each row; a negative owner means no client."""
        rows = np.flatnonzero(owner >= 0)
        return Ragged.from_pairs(owner[rows], rows, clients)

    @staticmethod
    def from_pairs(owner: np.ndarray, rows: np.ndarray, clients: int) -> "Ragged":
        """Build the lists from (client, row) pairs in any order."""
        order = np.lexsort((rows, owner))
        start = np.zeros(clients + 1, dtype=np.int64)
        np.cumsum(np.bincount(owner, minlength=clients), out=start[1:])
        return Ragged(torch.from_numpy(start), torch.from_numpy(rows[order].astype(np.int64)))

    @staticmethod
    def equal(table: np.ndarray) -> "Ragged":
        """Build lists of equal length from a table (clients, rows each), which is sorted in place and kept."""
        clients, size = table.shape
        table.sort(axis=1)
        return Ragged(torch.arange(clients + 1) * size, torch.from_numpy(table.reshape(-1)))

    @staticmethod
    def empty(clients: int) -> "Ragged":
        """Build an empty list for each client."""
        return Ragged(torch.zeros(clients + 1, dtype=torch.int64), torch.empty(0, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.start) - 1

    def sizes(self, clients: Tensor) -> Tensor:
        """Count the rows of each of some clients (clients,)."""
        return self.start[clients + 1] - self.start[clients]

    def __getitem__(self, client: int) -> Tensor:
        return self.rows[self.start[client] : self.start[client + 1]]

    @property
    def counts(self) -> Tensor:
        """Number of rows of each client (N,)."""
        return self.start[1:] - self.start[:-1]

    @property
    def owner(self) -> Tensor:
        """Client of each entry of `rows` (total,)."""
        return torch.repeat_interleave(torch.arange(len(self)), self.counts)

    def translated(self, rows: Tensor, *, in_place: bool = False) -> "Ragged":
        """Replace every entry `i` by `rows[i]`, for lists made on a subset; `rows` ascends."""
        rows, out = rows.to(self.rows.dtype), self.rows if in_place else torch.empty_like(self.rows)
        for entries, its in zip(self.rows.split(ENTRIES), out.split(ENTRIES), strict=True):
            its.copy_(rows.index_select(0, entries))
        return Ragged(self.start, out)

    def only(self, entries: Tensor) -> "Ragged":
        """Return the lists with those entries alone that a mask (total,) has."""
        counts = torch.bincount(self.owner[entries], minlength=len(self))
        return Ragged(torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]), self.rows[entries])

    def blocks(self) -> "Iterator[Ragged]":
        """Yield the lists of some clients at a time: work on the rows of a million clients takes memory."""
        for first in range(0, len(self), BLOCK):
            start = self.start[first : first + BLOCK + 1]
            yield Ragged(start - start[0], self.rows[start[0] : start[-1]])

    @staticmethod
    def join(lists: "Sequence[Ragged]") -> "Ragged":
        """Append lists to others."""
        counts = torch.cat([torch.zeros(1, dtype=torch.int64), *(part.counts for part in lists)])
        # Torch would widen, or copy, the rows of a million clients just to append an empty tensor.
        rows = [part.rows for part in lists if len(part.rows)] or [torch.empty(0, dtype=torch.int64)]
        return Ragged(counts.cumsum(0), torch.cat(rows) if len(rows) > 1 else rows[0])


@dataclass(frozen=True)
class Spans:
    """Lists with the interface of `Ragged` for consecutive rows, equally many per client, computed by arithmetic.

    Args:
        clients: N.
        each: rows of a client in total; those of client c begin at `c * each`.
        first: position of the first listed row among them.
        count: number of consecutive rows in the list.

    >>> spans = Spans(clients=1_000_000, each=10, first=2, count=3)
    >>> spans[7].tolist(), len(spans)
    ([72, 73, 74], 1000000)
    """

    clients: int
    each: int
    first: int
    count: int

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> Tensor:
        start = client * self.each + self.first
        return torch.arange(start, start + self.count)

    def sizes(self, clients: Tensor) -> Tensor:
        """Count the rows of each of some clients (clients,)."""
        return torch.full((len(clients),), self.count)


def count_pairs(owner: Tensor, kind: Tensor, owners: int, kinds: int) -> Tensor:
    """Count the rows of each owner and kind (owners, kinds).

    >>> count_pairs(torch.tensor([0, 0, 1]), torch.tensor([2, 2, 0]), owners=2, kinds=3).tolist()
    [[0, 0, 2], [1, 0, 0]]
    """
    return torch.bincount(owner * kinds + kind, minlength=owners * kinds).reshape(owners, kinds)


def part_sizes(counts: np.ndarray, val: float, test: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of test rows and of validation rows of clients with `counts` rows."""
    n_test = np.minimum(np.maximum((counts * test).round().astype(np.int64), 1), counts - 1).clip(0) * (test > 0)
    left = counts - n_test
    n_val = np.maximum((left * val).round().astype(np.int64), left >= 10) * (val > 0)
    return n_test, np.minimum(n_val, np.maximum(left - 1, 0))
