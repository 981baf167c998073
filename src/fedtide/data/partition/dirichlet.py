"""Partitions by Dirichlet draws: over clients for each class, or over classes for each client."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedtide.core.rng import Rng
from fedtide.data.partition.draws import Dealing, assign_owners, check_enough, draw_counts
from fedtide.data.ragged import Ragged
from fedtide.fields.types import Count, Positive, Whole, ingredient


@ingredient
class DirichletClass(Dealing):
    """Draw Dirichlet(alpha) over clients for each class and cut the shuffled class accordingly: client sizes vary.

    As in NIID-Bench, clients that already hold an equal part get no more of a class, and the draw is repeated until all
    clients have `min_samples`. After `tries` draws rows move from the largest clients, so that it terminates.

    Args:
        clients: number of clients over all groups.
        alpha: concentration; a small value means that few clients share a class.
        min_samples: smallest number of rows of a client; 0 allows clients without rows.
        tries: number of draws before rows are moved.
    """

    clients: Count = 100
    alpha: Positive = 0.5
    min_samples: Whole = 10
    tries: Count = 100
    kind: Literal["dirichlet-class"] = "dirichlet-class"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients."""
        check_enough(len(y), clients * max(self.min_samples, 1), clients)
        for attempt in range(self.tries):
            draw = rng.at("rows", attempt).numpy()
            owner = np.empty(len(y), dtype=np.int64)
            held = np.zeros(clients, dtype=np.int64)
            for c in range(classes):
                rows = draw.permutation(np.flatnonzero(y == c))
                # NIID-Bench: clients that hold an equal part already get none of this class.
                share = draw.dirichlet(np.full(clients, self.alpha)) * (held < len(y) / clients)
                share = share / share.sum() if share.sum() > 0 else np.full(clients, 1 / clients)
                cuts = (np.cumsum(share) * len(rows)).astype(np.int64)[:-1]
                owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
                held += np.bincount(owner[rows], minlength=clients)
            if held.min() >= self.min_samples:
                break
        return Ragged.from_owner(_topped_up(owner, clients, self.min_samples, rng.at("moved").numpy()), clients)


def _topped_up(owner: np.ndarray, clients: int, least: int, draw: np.random.Generator) -> np.ndarray:
    """Move random rows from the largest clients to those with fewer than `least`."""
    held = np.bincount(owner, minlength=clients)
    for poor in np.flatnonzero(held < least):
        while held[poor] < least:
            rich = int(held.argmax())
            count = min(least - held[poor], max(held[rich] - least, 1))
            moved = draw.permutation(np.flatnonzero(owner == rich))[:count]
            owner[moved] = poor
            held[rich] -= len(moved)
            held[poor] += len(moved)
    return owner


@ingredient
class Dirichlet(Dealing):
    """Draw Dirichlet(alpha) over classes for each client, then its rows by that distribution: client sizes are equal.

    Rows are drawn without replacement; an exhausted class leaves every client's distribution. A client whose whole
    distribution is exhausted takes remaining rows, in proportion. Hsu, Qi and Brown (2019) draw Dirichlet(a * prior)
    instead, which for C equally large classes equals alpha = a / C.

    Args:
        clients: number of clients over all groups.
        alpha: concentration; a small value means few classes per client.
        samples: number of rows of each client; None means all rows divided by clients, rounded down.
    """

    clients: Count = 100
    alpha: Positive = 0.5
    samples: Count | None = None
    kind: Literal["dirichlet"] = "dirichlet"

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients."""
        each = self.samples or len(y) // clients
        check_enough(len(y), clients * max(each, 1), clients)
        draw = rng.at("rows").numpy()
        profiles = draw.dirichlet(np.full(classes, self.alpha), size=clients)
        counts = draw_counts(profiles, each, np.bincount(y, minlength=classes), draw)
        return Ragged.from_owner(assign_owners(y, counts, draw), clients)
