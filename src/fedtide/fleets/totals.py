"""Sums of answers: blocks cut from the clients that are asked, totals in float64 or fixed point, slots, reveals.

Blocks are added along one binary tree that follows from their number alone. So any process may add up the blocks of a
branch, and the whole has the same bits whoever added what. A simulation and a server of real clients add alike.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fedtide.core import sums
from fedtide.core.base import Algorithm, Answer, Notes, Payload, Shard, Slotted, SummedScores
from fedtide.core.errors import refused
from fedtide.core.trees import Tree, detached, leaves, size_in_bytes
from fedtide.fleets.ask import Ask, BlockResult
from fedtide.learn.training import training_loss
from fedtide.wire.answer_schema import Schema, Schemas, made_up
from fedtide.wire.noise import score_deviation
from fedtide.wire.pipeline import FLOATING, Opening, Wire
from fedtide.wire.scores import is_score, read_sums, total_of
from fedtide.wire.vector import Form, added, as_total, form_of

BLOCKS = 16
"""Number of blocks that a cohort is cut into. It is fixed, so that no sum depends on the number of workers."""


class Block:
    """The answers of a block of clients, added up one after the other.

    Args:
        ask: the question to these clients.
        wire: how their sums pass to the server, if the question says their form; None if they came that way.
    """

    def __init__(self, ask: Ask, wire: Wire | None = None) -> None:
        self._ask, self._wire = ask, wire
        self._slots = {} if ask.slot is None else dict(zip(ask.clients.tolist(), ask.slot.tolist(), strict=True))
        self._total: Tree = None
        self._up = 0
        self._done = BlockResult(None, [], {name: [] for name in ask.reveal}, [], {}, [], 0)

    def count(self, client: int, answer: Answer) -> None:
        """Add the answer of a client, and copy what it reveals, keeps and notes.

        Raises:
            TooLarge: a number does not fit the sum's fixed point; nothing was added.
        """
        ask, done = self._ask, self._done
        slot = self._slots.get(client, 0)
        if ask.forms is not None:
            vector = answer.total if self._wire is None else self._wire.send(ask.forms[slot], answer.total)
            done.vectors[slot] = added(done.vectors.get(slot), vector)
            sent: list[Tree] = [vector]
        else:
            total = answer.total if ask.slot is None else Slotted({slot: answer.total}, ask.slots)
            self._total = sums.add(self._total, total)
            sent = [answer.total]
        done.clients.append(client)
        for name, rows in done.revealed.items():
            rows.append(answer.rows[name].detach().clone())
        if answer.memory is not None:
            done.keepers.append(client)
        notes = answer.notes or Notes()
        if notes.loss is None and ask.question == "train":
            notes = replace(notes, loss=training_loss(answer))
        if any(leaf is not None for leaf in leaves(notes)):
            done.notes[client] = detached(notes)
        sent += [answer.rows[name] for name in ask.reveal if name not in answer.repeated]
        self._up += size_in_bytes(sent)

    def refuse(self, client: int) -> None:
        """Leave out the answer of a client, which has a number that is not finite or does not fit."""
        self._done.refused.append(client)

    def result(self) -> BlockResult:
        """Return the partial sum and who is in it."""
        return replace(self._done, total=self._total, up=self._up)


def join(results: Iterable[BlockResult], blocks: int) -> BlockResult:
    """Add the results of so many blocks up (see `add_up`), and finish their sums: slots become lists."""
    whole = add_up(results, blocks)
    return replace(whole, total=sums.finish(whole.total))


def add_up(results: Iterable[BlockResult], blocks: int) -> BlockResult:
    """Add results up along the tree of so many blocks.

    Args:
        results: in the order of the blocks, each of one of them or of a branch of the tree.
        blocks: how many there are, also those without a client.
    """
    branches_so_far: list[tuple[int, int, BlockResult]] = []  # a branch: its first block, the one after it, their sum
    branches = branches_of(blocks)
    last = 0
    for done in results:
        first, last = last, last + done.blocks
        while branches_so_far and (branches_so_far[-1][0], last) in branches:
            first, _, before = branches_so_far.pop()
            done = _both(before, done)
        branches_so_far.append((first, last, done))
        del done  # its sum is large, and the next block begins before the name is bound again
    ((_, _, whole),) = branches_so_far
    return whole


@lru_cache(maxsize=64)
def branches_of(blocks: int, first: int = 0) -> frozenset[tuple[int, int]]:
    """Return the branches of the tree that halves so many blocks again and again: first block, and the one after.

    >>> sorted(branches_of(3))
    [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)]
    """
    whole = frozenset([(first, first + blocks)])
    if blocks < 2:
        return whole
    left, right = halves(blocks)
    return whole | branches_of(left, first) | branches_of(right, first + left)


def halves(blocks: int) -> tuple[int, int]:
    """Return how many blocks the two halves of a branch have.

    >>> halves(16), halves(5)
    ((8, 8), (3, 2))
    """
    return blocks - blocks // 2, blocks // 2


def _both(one: BlockResult, other: BlockResult) -> BlockResult:
    """Add two results up, in place in the first."""
    for name, rows in other.revealed.items():
        one.revealed.setdefault(name, []).extend(rows)
    for ours, theirs in ((one.clients, other.clients), (one.keepers, other.keepers), (one.refused, other.refused)):
        ours.extend(theirs)
    for slot, vector in other.vectors.items():
        one.vectors[slot] = added(one.vectors.get(slot), vector)
    one.notes.update(other.notes)
    total = sums.merge(one.total, other.total)
    return replace(one, total=total, up=one.up + other.up, blocks=one.blocks + other.blocks)


def split_blocks(counts: Tensor) -> list[Tensor]:
    """Return positions of the clients whose work counts, in blocks cut from all that were asked; some may be empty."""
    blocks = blocks_of_clients(counts)
    return blocks if counts.all() else [block[counts[block]] for block in blocks]


def blocks_of_clients(clients: Tensor) -> list[Tensor]:
    """Cut positions of clients into at most `BLOCKS` blocks of about equally many."""
    return list(torch.arange(len(clients)).tensor_split(max(min(BLOCKS, len(clients)), 1)))


def bytes_down(payload: Payload, ask: Ask) -> int:
    """Count the bytes down: each client receives the payload, or the entry of its slot."""
    if ask.slot is None:
        return size_in_bytes(payload) * len(ask.clients)
    return sum(size_in_bytes(payload[k]) * int((ask.slot == k).sum()) for k in ask.slot.unique().tolist())


ALL = 0
"""The one sum of clients that are in no slots."""


OF_SCORES = Schema({"total": total_of(None), "rows": {}}, 1000)
"""The schema of what a client says of an evaluation."""


@dataclass(frozen=True)
class Vectors:
    """The sums of a fleet as vectors.

    Args:
        wire: how they pass from clients to the server.
        schemas: what answers look like.
        grouped: whether a client may train only some tensors of a model, such as one of its branches.
    """

    wire: Wire
    schemas: Schemas
    grouped: bool = False

    @staticmethod
    def of(wire: Wire, algorithm: Algorithm, few: tuple[Shard, int]) -> "Vectors":
        """Build the sums of an algorithm from some rows and the number of classes."""
        grouped = algorithm.traits.models == "branches"
        return Vectors(wire, Schemas(algorithm.works, made_up(*few)), grouped)

    def add_forms(self, ask: Ask, payload: Payload) -> Ask:
        """Return a question with the forms of its sums; it has none if it only reveals, or in floating point."""
        if not self.wire.fixed_point:
            return ask
        forms, private = dict[int, Form](), self.wire.clip is not None
        for slot, schema in self.schemas_of(ask, payload).items():
            like, optional = _like(schema)
            form = form_of(
                like,
                len(_members(ask, ask.clients.tolist(), slot)),
                counted=self.wire.secure,
                grouped=self.grouped and not private,
                optional=frozenset() if private else optional,
            )
            forms[slot] = self.wire.add_bounds(form, ask.version[0])
        return replace(ask, forms=forms if any(form.size for form in forms.values()) else None)

    def keep_enough(self, ask: Ask, counts: Tensor) -> Tensor:
        """Return the mask (clients,) of those that count and are asked the same as enough others that do."""
        if ask.forms is None:
            return counts
        slot = torch.zeros_like(ask.clients) if ask.slot is None else ask.slot
        members = (slot[:, None] == slot[counts]).sum(1)
        return counts & (members >= self.wire.fewest)

    def open(
        self, ask: Ask, payload: Payload, done: BlockResult, closed: Mapping[int, Iterable[int]] | None = None
    ) -> BlockResult:
        """Open the sums in which there are enough clients; the others' clients have not answered.

        Args:
            ask: the question, formed.
            payload: what was sent.
            done: the answers of all blocks, added up in fixed point.
            closed: by slot, or 0, the units that stay closed although the wire would open them.
        """
        if ask.forms is None:
            return done
        schemas, sums, few = self.schemas_of(ask, payload), dict[int, Tree](), list[int]()
        vectors, wire = done.vectors, self.wire.of(ask.question)
        if wire.divisor is not None:
            if ask.slot is not None:
                raise refused("cohort", "poisson", "uniform", "the method asks clients in slots, whose sizes tell them")
            vectors = {ALL: torch.zeros(ask.forms[ALL].size, dtype=torch.int64)} | vectors
        for slot, vector in vectors.items():
            members = _members(ask, done.clients, slot)
            if len(members) < wire.fewest and wire.divisor is None:
                few += members
                continue
            for unit in (closed or {}).get(slot, ()):
                vector[ask.forms[slot].end + unit] = 0
            named = None if ask.slot is None else slot
            opening = Opening(ask.question, ask.version, named, tuple(members), ask.forms[slot])
            sums[slot] = wire.receive(vector, opening, *_like(schemas[slot]))
        return replace(without(done, few), total=_total(ask, sums), vectors={})

    def read_released(self, ask: Ask, payload: Payload, released: Mapping[int, Tensor]) -> Tree:
        """Return the total of sums that were released before: their vectors (size,), by slot."""
        schemas, forms = self.schemas_of(ask, payload), ask.forms or {}
        sums = {slot: as_total(forms[slot], vector, *_like(schemas[slot])) for slot, vector in released.items()}
        return _total(ask, sums)

    def read_scores(self, total: Tree) -> SummedScores | None:
        """Return the evaluation that opened sums tell, with the deviation of their noise."""
        ledger = self.wire.ledger
        deviation = 0.0 if ledger is None or ledger.score_ledger is None else score_deviation(ledger.score_ledger.z)
        sums = total if isinstance(total, list) else [total]
        opened = [part for part in sums if part is not None]
        return read_sums(opened, deviation) if opened else None

    def schemas_of(self, ask: Ask, payload: Payload) -> Mapping[int, Schema]:
        """Return the schemas of the answers to a question, by slot, or 0."""
        slots = [ALL] if ask.slot is None else ask.slot.unique().tolist()
        if is_score(ask.question):
            return dict.fromkeys(slots, OF_SCORES)
        sent = {slot: payload if ask.slot is None else payload[slot] for slot in slots}
        return {slot: self.schemas.of(ask.question, sent[slot], ask.moment, ask.reveal) for slot in slots}


PLAIN = Vectors(FLOATING, Schemas({}, Shard(torch.empty(0), torch.empty(0), torch.empty(0))))
"""The sums of a fleet in floating point."""


def _like(schema: Schema) -> tuple[Tree, frozenset[str]]:
    """Return the form of a sum as a tree, and the names of values that may be missing in it."""
    return schema.answer["total"], frozenset(place.removeprefix("total.") for place in schema.optional)


def _total(ask: Ask, sums: Mapping[int, Tree]) -> Tree:
    """Return the sums of a question as an algorithm reads them."""
    return sums.get(ALL) if ask.slot is None else [sums.get(k) for k in range(ask.slots)] if sums else None


def _members(ask: Ask, clients: list[int], slot: int) -> list[int]:
    """Keep the clients that are in a slot."""
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
        keepers=[client for client in done.keepers if client not in left],
        notes={client: notes for client, notes in done.notes.items() if client not in left},
        unopened=sorted(left),
    )
