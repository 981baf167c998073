"""Keys: randomness as an argument."""

import hashlib
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

STREAMS: dict[int | str, str] = {"val": "valid", "train_clients": "seen", "held_out_clients": "unseen"}
"""Names in keys that were other words once: their draws stay those of then, and so do the results that are kept."""


@dataclass(frozen=True)
class Rng:
    """A key, not a generator: the same key always gives the same numbers, in any process and any order.

    Keys are made from (seed, round, client, purpose) by `at`, so no result depends on the order in which clients are
    simulated. CPU torch keeps 32 bits of a seed: good for shuffles, not for privacy noise.

    >>> key = Rng(0).at(3, "train")
    >>> key.numpy().random() == Rng(0).at(3, "train").numpy().random()
    True
    >>> key.number == Rng(0).at(3, "test").number
    False
    """

    seed: int
    path: tuple[int | str, ...] = ()

    def at(self, *path: int | str) -> "Rng":
        """The key below this one, for example `rng.at(round, client, "shuffle")`."""
        return Rng(self.seed, self.path + path)

    @property
    def number(self) -> int:
        """The key as a 63-bit integer."""
        text = "\x1f".join([str(self.seed), *(f"{type(p).__name__[0]}{STREAMS.get(p, p)}" for p in self.path)])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def torch(self, device: str = "cpu") -> torch.Generator:
        """A fresh torch generator on a device, started from this key."""
        return torch.Generator(device).manual_seed(self.number)

    def numpy(self) -> np.random.Generator:
        """A fresh numpy generator (PCG64), started from this key."""
        return np.random.Generator(np.random.PCG64(self.number))


Rows = TypeVar("Rows", Tensor, np.ndarray)
"""Rows, as either library has them."""


def draw_some(rows: Rows, at_most: int | None, rng: Rng) -> Rows:
    """Draw at most `at_most` rows without replacement, such as ids, and keep their order; None takes all.

    >>> draw_some(torch.tensor([4, 7, 9]), 2, Rng(0)).tolist()
    [7, 9]
    """
    if at_most is None or len(rows) <= at_most:
        return rows
    return rows[np.sort(rng.numpy().choice(len(rows), at_most, replace=False))]
