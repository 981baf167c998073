"""A partition of your own from one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.data.ragged import Ragged


@dataclass(frozen=True)
class DealtBy:
    """A partition: which client each row goes to follows from the labels of the rows.

    Args:
        owner: (labels of the rows, how many classes and clients there are, a key) -> (rows,) the number of the client
            that gets each row, -1 for a row that stays unused.
        clients: how many, over all groups.
        by_labels: whether it looks at labels, so that it cannot deal sequences.
    """

    owner: Callable[[np.ndarray, int, int, Rng], Any]
    clients: int = 100
    by_labels: bool = True
    shares_rows: bool = False

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal.

        Raises:
            FedtideError: the function returns something else than a client's number for each row.
        """
        made = np.asarray(self.owner(y, classes, clients, rng))
        if made.shape != y.shape or made.dtype.kind not in "iu":
            raise refused("data.partition.function", made, f"a client's number for each of {len(y)} rows")
        if len(made) and not -1 <= made.min() <= made.max() < clients:
            raise refused("data.partition.function", int(made.max()), f"clients from 0 to {clients - 1}, -1 for none")
        return Ragged.from_owner(made.astype(np.int64), clients)
