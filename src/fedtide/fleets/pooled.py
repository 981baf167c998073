"""Sums over the rows of all clients together, for metrics that no sums of right answers give.

They are counts, so blocks, workers and their order change no bit of them. Of clients by themselves they say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

LARGEST = 16.0
"""Log-odds from which on scores are not told apart; float32 tells few of them."""

BINS = 640
"""Bins of log-odds from -LARGEST to LARGEST, each 0.05 wide."""


def confusion(logp: Tensor, y: Tensor) -> Tensor:
    """Count by class (classes, 3) right predictions, all predictions, and rows; one of NaN predicts no class.

    >>> confusion(torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]).log(), torch.tensor([0, 1, 1])).tolist()
    [[1.0, 2.0, 1.0], [1.0, 1.0, 2.0]]
    """
    said, classes = logp.argmax(-1), logp.shape[-1]
    known = ~logp.isnan().any(-1)
    counts = (torch.bincount(each, minlength=classes) for each in (y[known & (said == y)], said[known], y))
    return torch.stack(list(counts), 1).double()


def odds(logp: Tensor, y: Tensor) -> Tensor:
    """Count the rows of each class, and the others, by their log-odds of that class (classes, 2, BINS).

    Log-odds are log p - log(1 - p), and bins go from the lowest to the highest; NaN is the lowest.

    >>> table = odds(torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log(), torch.tensor([0, 1]))
    >>> [table[1, k].nonzero().flatten().tolist() for k in (0, 1)]  # the row of class 1, then the other
    [[328], [276]]
    """
    exact = logp.double()
    score = (exact - torch.log(-torch.expm1(exact.clamp(max=0.0)))).nan_to_num(-LARGEST)
    place = ((score + LARGEST) * (BINS / (2 * LARGEST))).floor().clamp(0, BINS - 1).long()
    classes = torch.arange(logp.shape[-1])
    cell = (2 * classes + (y[:, None] != classes)) * BINS + place
    return torch.bincount(cell.flatten(), minlength=2 * BINS * len(classes)).reshape(-1, 2, BINS).double()


POOLED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"confusion": confusion, "odds": odds}
"""Sums by name: (rows, classes) log-probabilities and labels (rows,) -> float64."""
