"""A custom partition from one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.data.ragged import Ragged
from fedtide.fields.user_code import call


@dataclass(frozen=True)
class DealtBy:
    """A partition by a function from the rows' labels to the client of each row.

    Args:
        owner: (labels of the rows, number of classes, number of clients, a key) -> (rows,) the client of each row, -1
            for an unused row.
        clients: number of clients over all groups.
        by_labels: the function needs labels, so that it cannot deal sequences.
    """

    owner: Callable[[np.ndarray, int, int, Rng], Any]
    clients: int = 100
    by_labels: bool = True
    shares_rows: bool = False

    def deal(self, y: np.ndarray, classes: int, clients: int, rng: Rng) -> Ragged:
        """Deal rows with labels `y` to clients.

        Raises:
            FedtideError: the function does not return a client's number for each row.
        """
        made = np.asarray(call(self.owner, "data.partition.function", y, classes, clients, rng))
        if made.shape != y.shape or made.dtype.kind not in "iu":
            raise refused("data.partition.function", made, f"a client's number for each of {len(y)} rows")
        if len(made) and not -1 <= made.min() <= made.max() < clients:
            raise refused("data.partition.function", int(made.max()), f"clients from 0 to {clients - 1}, -1 for none")
        return Ragged.from_owner(made.astype(np.int64), clients)
