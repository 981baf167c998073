"""Draws of rows by their labels from the rows of all clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.data.shift.what.plan import PopulationView


@dataclass(frozen=True)
class Domain:
    """Rows in the order of their labels; those of label c are `rows[start[c]:start[c + 1]]`."""

    rows: np.ndarray
    start: np.ndarray

    @staticmethod
    def of(rows: Tensor, y: Tensor, classes: int) -> Domain:
        """Sort rows by label."""
        labels = y[rows.long()]
        order = labels.argsort(stable=True)
        counts = torch.bincount(labels, minlength=classes)
        return Domain(rows[order].long().numpy(), np.concatenate([[0], counts.cumsum(0).numpy()]))

    def __getitem__(self, label: int) -> np.ndarray:
        return self.rows[self.start[label] : self.start[label + 1]]

    def drawn(self, counts: Mapping[int, int], draw: np.random.Generator) -> Tensor:
        """Draw a number of rows of each label, sorted, without repetition while there are enough.

        >>> domain = Domain.of(torch.arange(4), torch.tensor([0, 1, 0, 1]), 2)
        >>> domain.drawn({0: 2, 1: 0}, np.random.default_rng(0)).tolist()
        [0, 2]
        """
        found = [
            self[label][draw.choice(len(self[label]), count, replace=count > len(self[label]))]
            for label, count in counts.items()
            if count
        ]
        return torch.from_numpy(np.sort(np.concatenate([self.rows[:0], *found])))


def domains_of(view: PopulationView, wanted: Callable[[str], int]) -> dict[tuple[str, str], Domain]:
    """Return the rows to draw from, for each part of training and held-out clients that has rows and `wanted` ones."""
    found: dict[tuple[str, str], Domain] = {}
    for who, first, last in view.populated():
        rows = {
            part: ragged.rows[ragged.start[first] : ragged.start[last]].long().unique()
            for part, ragged in view.parts.items()
        }
        # Clients may share rows; training rows of any client are no validation rows.
        rows["val"] = rows["val"][~torch.isin(rows["val"], rows["train"])]
        found |= {
            (part, who): Domain.of(of, view.rows.y, view.rows.classes)
            for part, of in rows.items()
            if len(of) and wanted(part)
        }
    return found


def check_apart(view: PopulationView, kind: str) -> None:
    """Raise if rows cannot be drawn by labels: they are sequences, or a client trains on another's test row."""
    if view.rows.steps is not None:
        raise FedtideError(
            f"shift.what: '{kind}' draws rows by their labels, and rows of {view.rows.name} are sequences; allowed: "
            "all, mixture, stream, change-points of domains"
        )
    known, tested = (view.parts[part].rows.long().unique() for part in ("train", "test"))
    both = known[torch.isin(known, tested)]
    if len(both):
        raise FedtideError(
            f"data.partition: row {int(both[0])} is a training row of one client and a test row of another; '{kind}' "
            "draws from all of them; allowed: parts that share no rows"
        )
