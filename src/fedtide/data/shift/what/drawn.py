"""Draws of rows by their labels from the rows of all clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import refused
from fedtide.data.shift.what.holding import PopulationView


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

    def drawn(self, counts: Mapping[int, int], draw: np.random.Generator, own_rows: Domain | None = None) -> Tensor:
        """Draw a number of rows of each label, sorted, without repetition while there are enough.

        Args:
            counts: number of rows of each label.
            draw: the generator.
            own_rows: rows that take the place of these for each label that they have.

        >>> domain = Domain.of(torch.arange(4), torch.tensor([0, 1, 0, 1]), 2)
        >>> domain.drawn({0: 2, 1: 0}, np.random.default_rng(0)).tolist()
        [0, 2]
        """
        parts = [self.rows[:0]]
        for label, count in counts.items():
            rows = self[label] if own_rows is None or not len(own_rows[label]) else own_rows[label]
            if count:
                parts.append(rows[draw.choice(len(rows), count, replace=count > len(rows))])
        return torch.from_numpy(np.sort(np.concatenate(parts)))


class Amounts:
    """Numbers of rows that a client draws, by part."""

    samples: int
    val_samples: int
    test_samples: int

    def wanted(self, part: str) -> int:
        """Return the number of rows of a part that a client draws."""
        return {"train": self.samples, "val": self.val_samples, "test": self.test_samples}[part]


@dataclass(frozen=True)
class Pools:
    """Rows from which clients draw: those of all training clients, and separately of all held-out clients, by part."""

    view: PopulationView
    amounts: Amounts

    @cached_property
    def domains(self) -> dict[tuple[str, str], Domain]:
        """Rows to draw from, for each part of training and held-out clients that has rows of which some are wanted."""
        pools: dict[tuple[str, str], Domain] = {}
        for who, first, last in self.view.populated():
            parts = self.view.parts.items()
            rows = {part: lists.rows[lists.start[first] : lists.start[last]].long().unique() for part, lists in parts}
            # Clients may share rows; training rows of any client are no validation rows.
            rows["val"] = rows["val"][~torch.isin(rows["val"], rows["train"])]
            for part, part_rows in rows.items():
                if len(part_rows) and self.amounts.wanted(part):
                    pools[part, who] = Domain.of(part_rows, self.view.rows.y, self.view.rows.classes)
        return pools

    def of(self, part: str, client: int) -> Domain | None:
        """Return the rows from which a client draws; None if it draws none."""
        return self.domains.get((part, "seen" if client < self.view.registered else "unseen"))

    def counts(self, clients: Tensor, part: str) -> Tensor:
        """Count the rows that each of `clients` draws."""
        seen, unseen = (self.amounts.wanted(part) * ((part, who) in self.domains) for who in ("seen", "unseen"))
        return torch.where(clients < self.view.registered, seen, unseen)

    def lacking(self, needed: np.ndarray | None = None) -> dict[int, str]:
        """Return the labels without rows in some part, each with the reason; `needed` (classes,) masks some labels."""
        reasons: dict[int, str] = {}
        for (part, who), domain in self.domains.items():
            empty = np.diff(domain.start) == 0
            for label in np.flatnonzero(empty if needed is None else empty & needed).tolist():
                reasons.setdefault(label, f"{'' if who == 'seen' else 'held-out '}clients have no {part} row of it")
        return reasons


def check_apart(view: PopulationView, kind: str) -> None:
    """Raise if rows cannot be drawn by labels: they are sequences, or a client trains on another's test row."""
    if view.rows.steps is not None:
        but = f"it draws rows by their labels, and rows of {view.rows.name} are sequences"
        raise refused("shift.what.kind", kind, "static, domain-mixture, stream, change-points of domains", but)
    trained, tested = (view.parts[part].rows.long().unique() for part in ("train", "test"))
    both = trained[torch.isin(trained, tested)]
    if len(both):
        but = f"it draws from all rows, and row {int(both[0])} is for training of one client and for tests of another"
        raise refused("shift.what.kind", kind, "a data.partition whose parts share no rows", but)
