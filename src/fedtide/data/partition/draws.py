"""Helpers of the partitions: draws of classes without replacement, and the error for too few rows."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedtide.core.errors import refused


class Dealing:
    """A rule that deals rows to `clients` by `deal(labels, number of classes, number of clients, key)`."""

    by_labels: ClassVar[bool] = True
    """Tell whether rows are dealt by their labels, so that sequences cannot be dealt."""
    shares_rows: ClassVar[bool] = False
    """Tell whether clients may hold the same row, so that tests need rows of their own."""


def draw_counts(shares: np.ndarray, wanted: int, left: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Draw for each client the number of its `wanted` rows from each class by `shares` (clients, classes).

    Draws are without replacement: `left` (classes,) is lowered in place. An exhausted class leaves the distribution,
    and a client whose whole distribution is exhausted takes remaining rows, in proportion.
    """
    counts = np.zeros(shares.shape, dtype=np.int64)
    for client, wish in enumerate(shares):
        missing = wanted
        while missing and left.any():
            share = wish * (left > 0)
            share = share / share.sum() if share.sum() > 0 else left / left.sum()
            # A draw from an exhausted class is rejected and repeated without that class.
            taken = np.minimum(draw.multinomial(missing, share), left)
            counts[client] += taken
            left -= taken
            missing -= int(taken.sum())
    return counts


def assign_owners(y: np.ndarray, counts: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return the owner of each row, given the rows of each class that each client takes (clients, classes)."""
    owner = np.full(len(y), -1, dtype=np.int64)
    for c in range(counts.shape[1]):
        rows = draw.permutation(np.flatnonzero(y == c))
        takers = np.repeat(np.arange(len(counts)), counts[:, c])
        owner[rows[: len(takers)]] = takers
    return owner


def check_enough(rows: int, wanted: int, clients: int) -> None:
    """Raise if there are fewer rows than clients need."""
    if rows < wanted:
        but = f"they need {wanted} rows and there are {rows}"
        raise refused("data.partition.clients", clients, "fewer clients, or fewer rows each", but)
