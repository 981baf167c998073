"""The sums of a fleet with a wire: what form they have, which may be opened, and what the algorithm reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedtide.core.base import Algorithm, Payload, Shard
from fedtide.core.trees import Tree
from fedtide.fleets.ask import Ask, BlockResult
from fedtide.wire.schema import Schema, Schemas, made_up
from fedtide.wire.steps import Opening, Wire
from fedtide.wire.vector import as_total, form_of

ALL = 0
"""The one sum of clients that are in no slots."""


@dataclass(frozen=True)
class Vectors:
    """The sums of a fleet as vectors.

    Args:
        wire: how they pass from clients to the server.
        schemas: what answers look like.
    """

    wire: Wire
    schemas: Schemas

    @staticmethod
    def of(wire: Wire | None, algorithm: Algorithm, few: tuple[Shard, int]) -> Vectors | None:
        """Build those of an algorithm from some rows and the number of classes; None where there is no wire."""
        return None if wire is None else Vectors(wire, Schemas(algorithm.works, made_up(*few)))

    def formed(self, ask: Ask, payload: Payload) -> Ask:
        """Return a question that says what form its sums have; one without any, which only reveals, says nothing."""
        forms = {
            slot: self.wire.formed(
                form_of(schema.answer["total"], len(_members(ask, ask.clients.tolist(), slot))), ask.version[0]
            )
            for slot, schema in self._schemas(ask, payload).items()
        }
        return replace(ask, forms=forms if any(form.size for form in forms.values()) else None)

    def enough(self, ask: Ask, counts: Tensor) -> Tensor:
        """Return the mask (clients,) of those that count and are asked the same as enough others that do."""
        if ask.forms is None:
            return counts
        slot = torch.zeros_like(ask.clients) if ask.slot is None else ask.slot
        members = (slot[:, None] == slot[counts]).sum(1)
        return counts & (members >= self.wire.fewest)

    def opened(self, ask: Ask, payload: Payload, done: BlockResult) -> BlockResult:
        """Open the sums in which there are enough clients; the others' clients have not answered.

        Args:
            ask: the question, formed.
            payload: what was sent.
            done: the answers of all blocks, added up in fixed point.
        """
        if ask.forms is None:
            return done
        schemas, sums, few = self._schemas(ask, payload), dict[int, Tree](), list[int]()
        for slot, vector in done.vectors.items():
            members = _members(ask, done.clients, slot)
            if len(members) < self.wire.fewest:
                few += members
                continue
            named = None if ask.slot is None else slot
            opening = Opening(ask.question, ask.version, named, tuple(members), ask.forms[slot])
            sums[slot] = self.wire.receive(vector, opening, *_like(schemas[slot]))
        return replace(without(done, few), total=_total(ask, sums), vectors={})

    def again(self, ask: Ask, payload: Payload, released: Mapping[int, Tensor]) -> Tree:
        """Return what an algorithm reads of sums that were released before: their vectors (size,), by slot."""
        schemas, forms = self._schemas(ask, payload), ask.forms or {}
        sums = {slot: as_total(forms[slot], vector, *_like(schemas[slot])) for slot, vector in released.items()}
        return _total(ask, sums)

    def _schemas(self, ask: Ask, payload: Payload) -> Mapping[int, Schema]:
        slots = [ALL] if ask.slot is None else ask.slot.unique().tolist()
        sent = {slot: payload if ask.slot is None else payload[slot] for slot in slots}
        return {slot: self.schemas.of(ask.question, sent[slot], ask.moment, ask.reveal) for slot in slots}


def _like(schema: Schema) -> tuple[Tree, frozenset[str]]:
    """Return what a sum looks like, and what may be missing in it."""
    return schema.answer["total"], frozenset(place.removeprefix("total.") for place in schema.optional)


def _total(ask: Ask, sums: Mapping[int, Tree]) -> Tree:
    """Return the sums of a question as an algorithm reads them."""
    return sums.get(ALL) if ask.slot is None else [sums.get(k) for k in range(ask.slots)] if sums else None


def _members(ask: Ask, clients: list[int], slot: int) -> list[int]:
    """Return those of `clients` that are in a slot."""
    if ask.slot is None:
        return clients
    here = set(ask.clients[ask.slot == slot].tolist())
    return [client for client in clients if client in here]


def without(done: BlockResult, clients: list[int]) -> BlockResult:
    """Return answers of which those of some clients do not count, in whose sums there are too few."""
    left = set(clients)
    return replace(
        done,
        clients=[client for client in done.clients if client not in left],
        revealed={
            name: [row for client, row in zip(done.clients, rows, strict=True) if client not in left]
            for name, rows in done.revealed.items()
        },
        kept=[client for client in done.kept if client not in left],
        notes={client: notes for client, notes in done.notes.items() if client not in left},
        unopened=sorted(left),
    )
