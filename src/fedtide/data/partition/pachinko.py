"""A partition by super-classes: a draw over super-classes, then over the labels of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.data.partition.draws import Dealing, assign_owners, check_enough, draw_counts
from fedtide.data.ragged import Ragged
from fedtide.fields.types import Count, Positive, Whole, explained, ingredient

CIFAR_100 = (
    (4, 30, 55, 72, 95), (1, 32, 67, 73, 91), (54, 62, 70, 82, 92), (9, 10, 16, 28, 61), (0, 51, 53, 57, 83),
    (22, 39, 40, 86, 87), (5, 20, 25, 84, 94), (6, 7, 14, 18, 24), (3, 42, 43, 88, 97), (12, 17, 37, 68, 76),
    (23, 33, 49, 60, 71), (15, 19, 21, 31, 38), (34, 63, 64, 66, 75), (26, 45, 77, 79, 99), (2, 11, 35, 46, 98),
    (27, 29, 44, 78, 93), (36, 50, 65, 74, 80), (47, 52, 56, 59, 96), (8, 13, 48, 58, 90), (41, 69, 81, 85, 89),
)  # fmt: skip
"""Five labels of each of the 20 published super-classes, in their published order."""

Groups = Annotated[tuple[Annotated[tuple[Whole, ...], Field(min_length=1)], ...], Field(min_length=1)]


@ingredient
class Pachinko(Dealing):
    """Draw Dirichlet(alpha) over super-classes and Dirichlet(beta) over the labels of each: client sizes are equal.

    Each row is drawn by a super-class, then by one of its labels, without replacement; an exhausted label leaves its
    share to its super-class, and a super-class to the others. A client whose whole distribution is exhausted takes
    remaining rows, in proportion. This is the Pachinko allocation of Reddi et al.: *Adaptive Federated Optimization*,
    2021, for CIFAR-100 with alpha 0.1 and beta 10.

    Args:
        clients: number of clients over all groups.
        alpha: concentration over super-classes; a small value means few of them per client.
        beta: concentration over the labels of a super-class.
        samples: number of rows of each client; None means all rows divided by clients, rounded down.
        groups: the labels of each super-class, or "cifar-100" for the published super-classes of that data set.

    >>> rows = Pachinko(clients=2, groups=((0, 1), (2, 3))).deal(np.arange(40) % 4, 4, 2, Rng(0))
    >>> rows.counts.tolist()
    [20, 20]
    """

    clients: Count = 100
    alpha: Positive = 0.1
    beta: Positive = 10.0
    samples: Count | None = None
    groups: Annotated[Literal["cifar-100"] | Groups, explained("'cifar-100', or lists of labels")] = "cifar-100"
    kind: Literal["pachinko"] = "pachinko"

    def __post_init__(self) -> None:
        labels = [label for group in self.super_classes for label in group]
        twice = next((label for i, label in enumerate(labels) if label in labels[:i]), None)
        if twice is not None:
            raise ValueError(f"label {twice} stands twice in groups; a label belongs to one super-class")

    @property
    def super_classes(self) -> Groups:
        """Labels of each super-class."""
        return CIFAR_100 if isinstance(self.groups, str) else self.groups

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients."""
        each = self.samples or len(y) // clients
        check_enough(len(y), clients * max(each, 1), clients)
        supers = self._supers(y, classes)
        draw = rng.at("rows").numpy()
        root = draw.dirichlet(np.full(len(supers), self.alpha), size=clients)
        fine = [draw.dirichlet(np.full(len(labels), self.beta), size=clients) for labels in supers]
        counts = allocate(root, fine, supers, each, np.bincount(y, minlength=classes), draw)
        return Ragged.from_owner(assign_owners(y, counts, draw), clients)

    def _supers(self, y: np.ndarray, classes: int) -> list[np.ndarray]:
        """Return the labels of each super-class; raise if they do not fit the labels of the rows."""
        supers = [np.array(labels) for labels in self.super_classes]
        known = np.concatenate(supers)
        if (known >= classes).any():
            allowed = f"labels from 0 to {classes - 1} (groups = 'cifar-100' has 100)"
            raise refused("data.partition.groups", int(known[known >= classes][0]), allowed)
        lost = np.setdiff1d(y, known)
        if len(lost):
            raise FedtideError(f"data.partition.groups: label {lost[0]} is in none of them; allowed: every label once")
        return supers


def allocate(
    root: np.ndarray,
    fine: Sequence[np.ndarray],
    supers: Sequence[np.ndarray],
    wanted: int,
    left: np.ndarray,
    draw: np.random.Generator,
) -> np.ndarray:
    """Draw for each client the number of its `wanted` rows from each label.

    The number of rows of a super-class does not depend on the choice of its labels, so it is drawn first.

    Args:
        root: (clients, super-classes) shares.
        fine: (clients, labels of the super-class) shares, for each super-class.
        supers: the labels of each super-class.
        wanted: number of rows of each client.
        left: (labels,) remaining rows; lowered in place.
        draw: the generator of the draws.

    Returns:
        Counts (clients, labels).
    """
    counts = np.zeros((len(root), len(left)), dtype=np.int64)
    supply = np.array([left[labels].sum() for labels in supers])
    for client, wish in enumerate(root):
        falls = draw_counts(wish[None], wanted, supply, draw)[0]
        for labels, shares, number in zip(supers, fine, falls.tolist(), strict=True):
            inside = left[labels]
            counts[client, labels] = draw_counts(shares[client][None], number, inside, draw)[0]
            left[labels] = inside
    return counts
