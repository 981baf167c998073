"""What clients predict for their own rows, wherever these lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtide.core.base import Grouping, Memory, Payload, Prediction, Scores
from fedtide.core.trees import Tree, size_in_bytes
from fedtide.fleets.ask import Ask, Scoring
from fedtide.fleets.client import Clients, Kept
from fedtide.learn.target import CLASSES, Target
from fedtide.learn.task import ROWS

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
        right = target.score_rows(target.predict_labels(told), y)
        if target == CLASSES:
            right = right.masked_fill(told.isnan().any(-1), 0.0)  # of NaN, argmax is one of them
        rows = _per_row(torch.ones_like(right), scored)
        self.rows.index_add_(0, owner, rows)
        self.correct.index_add_(0, owner, _per_row(right, scored))
        self.loss.index_add_(0, owner, _per_row(target.losses(told, y).double(), scored))
        for name, other in prediction.others.items():
            correct = _per_row(target.score_rows(other, y), scored)
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


PERSONAL_BYTES = 256_000_000
"""Upper bound on the bytes of personal models held at a time during evaluation, but for those of one client."""


def score(clients: Clients, scoring: Scoring, payload: Payload) -> Scores:
    """Evaluate a block of clients on their own rows, pooled by slot into large batches."""
    if scoring.other:
        algorithm = clients.algorithm.others[scoring.other]
        return score(replace(clients, algorithm=algorithm), replace(scoring, other=""), payload)
    ask = scoring.ask
    slots = torch.zeros(len(ask.clients), dtype=torch.int64) if ask.slot is None else ask.slot
    tally = Tally(len(ask.clients), scoring.pooled, clients.rows.target)
    for slot in slots.unique().tolist():
        received = payload if ask.slot is None else payload[slot]
        for places in _batches(clients, scoring, (slots == slot).nonzero().flatten()):
            for some, memories in _with_memory(clients, scoring, received, places):
                _predict(clients, scoring.of(some), received, memories, some, tally)
    return tally.scores(ask.clients)


def _batches(clients: Clients, scoring: Scoring, places: Tensor) -> list[Tensor]:
    """Cut positions of the clients that have rows into batches of about `ROWS`; all rows of a client stay together."""
    rows = clients.rows.sizes(scoring.ask.clients[places], scoring.part, scoring.ask.moment)
    places, rows = places[rows > 0], rows[rows > 0]
    batch = (rows.cumsum(0) - rows) // ROWS
    return [places[batch == k] for k in batch.unique().tolist()]


def _predict(
    clients: Clients, scoring: Scoring, received: Payload, memories: Sequence[Memory], places: Tensor, tally: Tally
) -> None:
    """Predict the rows of some clients, which stand at `places` of the tally."""
    rows, owner = clients.rows.pool(scoring.ask.clients, scoring.ask.moment, scoring.part)
    unit, first = decision_units(owner, scoring.group, scoring.grouping)
    prediction = clients.algorithm.predict(received, _pick(memories, owner[first].tolist()), rows.x, unit)
    tally.add(places[owner], prediction, rows.y, rows.mask)


def _with_memory(
    clients: Clients, scoring: Scoring, received: Payload, places: Tensor
) -> Iterator[tuple[Tensor, Sequence[Memory]]]:
    """Yield positions of clients with their memory, adapted on their own rows where the algorithm says so.

    Nothing flows back. Memory is read when `predict` looks at it, and adapted memory is held for some clients at a
    time, so that no scoring needs the memory of all.
    """
    ask = scoring.ask.of(places)
    if not scoring.personal:
        yield places, [None] * len(places)
        return
    if clients.algorithm.adapt is None:
        yield places, _Memories(clients.memory, ask, ask.clients.tolist())
        return
    made: list[Memory] = []
    first, held = 0, 0
    for i, client in enumerate(ask.clients.tolist()):
        made.append(clients.adapt(ask, client, received, scoring.part))
        held += size_in_bytes(made[-1])
        if held >= PERSONAL_BYTES or i + 1 == len(places):
            yield places[first : i + 1], made
            made, first, held = [], i + 1, 0


@dataclass(frozen=True)
class _Memories(Sequence[Any]):
    """Memory of some clients, read at each access."""

    store: Kept
    ask: Ask
    clients: list[int]

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, place: Any) -> Tree:
        return self.store.read(self.clients[place], self.ask.version)


def _pick(memories: Sequence[Memory], places: list[int]) -> Sequence[Memory]:
    """Pick memories by position, with repetition; those that were not read are not read now."""
    if isinstance(memories, _Memories):
        return replace(memories, clients=[memories.clients[place] for place in places])
    return [memories[place] for place in places]
