"""Sums of predictions for each client, and the rows that decide together which model answers for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fedtide.core.base import Grouping, Prediction, Scores
from fedtide.fleets.pooled import POOLED
from fedtide.learn.target import CLASSES, Target

BATCH = 64
"""Rows that decide together with grouping "batch" and "oracle"."""


def decision_units(owner: Tensor, group: Tensor | None, grouping: Grouping) -> tuple[Tensor, Tensor]:
    """Number the units of rows that decide together 0..n-1 (rows,), and find the first row of each unit (n,).

    Args:
        owner: (rows,) position of the client that owns each row, sorted.
        group: (owners,) the true group of each owner, for the grouping "oracle".
        grouping: see `fedtide.core.base.Grouping`.

    >>> decision_units(torch.tensor([0, 0, 1]), None, "client")[0].tolist()
    [0, 0, 1]
    """
    rows = torch.arange(len(owner))
    if grouping == "sample":
        return rows, rows
    source = owner
    if grouping == "client":
        _, unit = torch.unique(owner, return_inverse=True)
        return unit, _first_rows(unit)
    if grouping == "oracle":
        assert group is not None, "only a simulation knows true groups"
        source = group[owner]
    # The place of each row among those of the same source, for batches of at most BATCH of them.
    order = source.argsort(stable=True)
    counts = torch.bincount(source)
    place = torch.empty_like(rows)
    place[order] = rows - (counts.cumsum(0) - counts)[source[order]]
    _, unit = torch.unique(torch.stack([source, place // BATCH], 1), dim=0, return_inverse=True)
    return unit, _first_rows(unit)


def _first_rows(unit: Tensor) -> Tensor:
    """Return the first row of each unit."""
    return torch.full((int(unit.max()) + 1,), len(unit)).scatter_reduce(0, unit, torch.arange(len(unit)), "amin")


class Tally:
    """Sums of a scoring for each client."""

    def __init__(self, clients: int, pooled: Sequence[str] = (), target: Target = CLASSES) -> None:
        self.target = target
        self.rows = torch.zeros(clients, dtype=torch.float64)
        self.correct = torch.zeros(clients, dtype=torch.float64)
        self.loss = torch.zeros(clients, dtype=torch.float64)
        self.choice: Tensor | None = None
        self.weights: Tensor | None = None
        self.others: dict[str, Tensor] = {}
        self.density: Tensor | None = None
        self.sums: dict[str, Tensor] = {}
        self.wanted = pooled
        self.pooled: dict[str, Tensor] = {}

    def add(self, owner: Tensor, prediction: Prediction, y: Tensor, scored: Tensor | None = None) -> None:
        """Count predictions of some rows, or of those of their labels that are `scored`."""
        told, choice, weights, target = prediction.told, prediction.choice, prediction.weights, self.target
        right = target.right(target.says(told), y)
        if target == CLASSES:
            right = right.masked_fill(told.isnan().any(-1), 0.0)  # of NaN, argmax is one of them
        rows = _per_row(torch.ones_like(right), scored)
        self.rows.index_add_(0, owner, rows)
        self.correct.index_add_(0, owner, _per_row(right, scored))
        self.loss.index_add_(0, owner, _per_row(target.losses(told, y).double(), scored))
        for name, other in prediction.others.items():
            correct = _per_row(target.right(other, y), scored)
            self.others.setdefault(name, torch.zeros_like(self.rows)).index_add_(0, owner, correct)
        for name, summed in target.sums(told, y).items():
            known = self.sums.setdefault(name, summed.new_zeros(len(self.rows), *summed.shape[1:]))
            known.index_add_(0, owner, summed)
        for name in self.wanted:
            counted = POOLED[name](*_flat(told, y, scored))
            self.pooled[name] = self.pooled[name] + counted if name in self.pooled else counted
        if prediction.density is not None:
            self.density = torch.zeros_like(self.rows) if self.density is None else self.density
            self.density.index_add_(0, owner, prediction.density.double() * rows)
        if choice is not None:
            counts = _wide(self.choice, len(self.rows), int(choice.max()) + 1)
            self.choice = counts.index_put_((owner, choice), torch.ones(len(y), dtype=torch.float64), accumulate=True)
        if weights is not None:
            self.weights = _wide(self.weights, len(self.rows), weights.shape[1])
            self.weights[:, : weights.shape[1]].index_add_(0, owner, weights.double())

    def scores(self, clients: Tensor) -> Scores:
        """Return the scores of the clients."""
        return Scores(
            clients, self.rows, self.correct, self.loss, self.choice, self.weights, self.others, self.density,
            pooled=self.pooled, sums=self.sums,
        )  # fmt: skip


def _per_row(column: Tensor, scored: Tensor | None) -> Tensor:
    """Sum sequences (rows, steps) over the steps that are scored (rows,); return other rows as they are."""
    return column if scored is None else column.masked_fill(~scored, 0.0).reshape(len(column), -1).sum(1)


def _flat(told: Tensor, y: Tensor, scored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return predictions (rows, classes) and labels (rows,) of rows, or of those steps of sequences that are scored."""
    flat, labels = told.reshape(-1, told.shape[-1]), y.reshape(-1)
    return (flat, labels) if scored is None else (flat[scored.reshape(-1)], labels[scored.reshape(-1)])


def _wide(table: Tensor | None, clients: int, width: int) -> Tensor:
    """Copy a table (clients, K), padded with zeros to at least `width` columns; None is an empty table."""
    known = 0 if table is None else table.shape[1]
    grown = torch.zeros(clients, max(width, known), dtype=torch.float64)
    if table is not None:
        grown[:, :known] = table
    return grown


def _stacked(tables: Sequence[Tensor | None], clients: Sequence[int]) -> Tensor | None:
    """Concatenate the tables of several blocks, padded to the widest; None where no block has one."""
    width = max((table.shape[1] for table in tables if table is not None), default=0)
    return torch.cat([_wide(*each, width) for each in zip(tables, clients, strict=True)]) if width else None


def _filled(columns: Sequence[Tensor | None], clients: Sequence[int]) -> Tensor:
    """Concatenate the columns of several blocks, with zeros for a block in which no client had rows."""
    inner = next((tuple(column.shape[1:]) for column in columns if column is not None), ())
    zeros = partial(torch.zeros, dtype=torch.float64)
    return torch.cat(
        [zeros(n, *inner) if column is None else column for column, n in zip(columns, clients, strict=True)]
    )


def concat_scores(blocks: Iterable[Scores]) -> Scores:
    """Concatenate the scores of several blocks of one evaluation."""
    none = torch.empty(0, dtype=torch.float64)
    parts = list(blocks) or [Scores(torch.empty(0, dtype=torch.int64), none, none, none)]
    clients = [len(part) for part in parts]
    names = dict.fromkeys(name for part in parts for name in part.others)
    summed = dict.fromkeys(name for part in parts for name in part.sums)
    density = [part.density for part in parts]
    pooled = dict.fromkeys(name for part in parts for name in part.pooled)
    return Scores(
        torch.cat([part.clients for part in parts]),
        torch.cat([part.rows for part in parts]),
        torch.cat([part.correct for part in parts]),
        torch.cat([part.loss for part in parts]),
        _stacked([part.choice for part in parts], clients),
        _stacked([part.weights for part in parts], clients),
        {name: _filled([part.others.get(name) for part in parts], clients) for name in names},
        None if all(column is None for column in density) else _filled(density, clients),
        pooled={name: torch.stack([p.pooled[name] for p in parts if name in p.pooled]).sum(0) for name in pooled},
        sums={name: _filled([part.sums.get(name) for part in parts], clients) for name in summed},
    ).credited
