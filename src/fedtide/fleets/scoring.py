"""What clients predict for their own rows, wherever these lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedtide.core.base import Memory, Payload, Scores
from fedtide.core.trees import Tree, size_in_bytes
from fedtide.fleets.ask import Ask, Scoring
from fedtide.fleets.client import Clients, Kept
from fedtide.fleets.tally import Tally, decision_units
from fedtide.learn.task import ROWS

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
