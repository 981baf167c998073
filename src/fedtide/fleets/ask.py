"""Questions to clients and what comes of them; all but `Query` are trees, so any engine can carry them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypedDict, Unpack

import torch
from torch import Tensor

from fedtide.core.base import Cost, Grouping, Moment, Notes, Payload, Reply, Scores, Slot
from fedtide.core.errors import FedtideError, refused
from fedtide.core.memory import Version
from fedtide.core.trees import Tree
from fedtide.wire.scores import question_of
from fedtide.wire.vector import Form

ABSTAINED, NOT_FINITE = "abstained", "not finite"
"""Words for what became of a client that had nothing to say, or whose numbers cannot be counted."""


@dataclass(frozen=True)
class Ask:
    """One question to some clients.

    Args:
        question: name of the work; "adapt" is what clients do before they are evaluated.
        purpose: name of the question in its clients' keys: "train", then "train#1" for a second ask in the round, so
            that it shuffles differently.
        moment: round and time.
        clients: (clients,) ids, sorted.
        slot: (clients,) the slot of each, or None.
        slots: how many slots there are.
        reveal: names of `Answer.rows` that the server gets per client.
        passes: cost for each client on the clock, if the server states it.
        number: how many asks came before it in the round.
        forms: by slot, or 0, the form of the sum in fixed point; None if sums are in floating point.
    """

    question: str
    purpose: str
    moment: Moment
    clients: Tensor
    slot: Tensor | None = None
    slots: int = 0
    reveal: tuple[str, ...] = ()
    passes: float | None = None
    number: int = 0
    forms: Mapping[int, Form] | None = None

    @property
    def version(self) -> Version:
        """Version of what clients keep after it; they work with what they kept before."""
        return self.moment.round, self.number

    def of(self, where: Tensor) -> Self:
        """Return the question to some of its clients, by mask or by position."""
        return replace(self, clients=self.clients[where], slot=None if self.slot is None else self.slot[where])

    @classmethod
    def joined(cls, blocks: Sequence[Self]) -> Self:
        """Return the question to the clients of several blocks of it, in their order."""
        clients, slots = [block.clients for block in blocks], [block.slot for block in blocks if block.slot is not None]
        return replace(blocks[0], clients=torch.cat(clients), slot=torch.cat(slots) if slots else None)

    def sent(self, payload: Payload) -> Iterator[tuple[int, Payload]]:
        """Yield each client with what it receives: the payload, or the entry of its slot."""
        slots = [None] * len(self.clients) if self.slot is None else self.slot.tolist()
        for client, slot in zip(self.clients.tolist(), slots, strict=True):
            yield client, payload if slot is None else payload[slot]


def make_ask(
    question: str,
    clients: Tensor,
    payload: Payload,
    moment: Moment,
    before: Sequence["Query"],
    *,
    slot: Slot | None = None,
    slots: int | None = None,
    reveal: Sequence[str] = (),
    passes: float | None = None,
) -> Ask:
    """Return a question as a server puts it (see `fedtide.core.base.Fleet.ask`); `before` are those of the round."""
    clients, order = clients.sort()
    slot = None if slot is None else slot[order]
    width = 0 if slot is None else len(payload) if slots is None else slots
    times = sum(query.ask.question == question for query in before)
    purpose = f"{question}#{times}" if times else question
    return Ask(question, purpose, moment, clients, slot, width, tuple(reveal), passes, len(before))


def check_ask(ask: Ask, registered: int, reveals: Sequence[str] | None) -> None:
    """Raise on an ask that no fleet of real clients could answer.

    Args:
        registered: clients are 0 to `registered` - 1.
        reveals: what the server may see per client; None allows all.
    """
    question, clients = ask.question, ask.clients
    hidden = [name for name in ask.reveal if reveals is not None and name not in reveals]
    if hidden:
        allowed = ", ".join(reveals or ()) or "sums only"
        raise FedtideError(f"'{question}' asks to see {', '.join(hidden)} per client; allowed: {allowed}")
    if len(clients) and (clients[0] < 0 or clients[-1] >= registered):
        raise FedtideError(
            f"'{question}' asks client {int(clients[-1])}; allowed: registered clients, 0 to {registered - 1}"
        )
    if (clients.diff() == 0).any():
        raise FedtideError(f"'{question}' asks client {int(clients[1:][clients.diff() == 0][0])} twice")


class Withheld:
    """Stands in a reply for what no server is told: any use of it is an error."""

    def _refuse(self, *arguments: Any, **named: Any) -> Any:
        but = "it reads how many clients came, which is not told in a private run"
        raise refused("cohort", "poisson", "uniform", but)

    __getattr__ = __len__ = __iter__ = __getitem__ = __index__ = _refuse

    @classmethod
    def __torch_function__(cls, *call: Any) -> Any:
        return cls()._refuse()


def without_count(reply: Reply) -> Reply:
    """Return a reply that does not tell who answered, or how many."""
    hidden: Any = Withheld()
    return replace(reply, clients=hidden, seconds=hidden, cost=hidden, refused=hidden, silent=hidden)


@dataclass(frozen=True)
class Scoring:
    """One block of clients to evaluate on a part of their own rows.

    Args:
        ask: the clients, the moment and the slots.
        part: part of their rows, such as "test".
        personal: whether clients use their memory and adapt before.
        grouping: which rows decide together.
        other: name of the other use of the state that is evaluated; "" is the algorithm's own.
        group: (clients,) the true group of each, for the grouping "oracle" alone; else None.
        pooled: names of sums over all rows, `fedtide.fleets.scoring`.
        record: whether it is an evaluation of the record, whose scores may be sums.
    """

    ask: Ask
    part: str = "test"
    personal: bool = True
    grouping: Grouping = "client"
    other: str = ""
    group: Tensor | None = None
    pooled: tuple[str, ...] = ()
    record: bool = False

    def of(self, where: Tensor) -> Self:
        """Return the scoring of some of its clients, by mask or by position."""
        return replace(self, ask=self.ask.of(where), group=None if self.group is None else self.group[where])

    def as_sum(self, number: int) -> Ask:
        """Return the question whose sum tells the scores; `number` counts the asks before it in the round."""
        question = question_of(self.part, self.grouping, self.other)
        return replace(self.ask, question=question, purpose=question, number=number)


class ScoreOptions(TypedDict, total=False):
    """Options of an evaluation: `slot`, the slot of each of the clients, and those of `Scoring`."""

    slot: Slot | None
    part: str
    personal: bool
    grouping: Grouping
    other: str
    pooled: tuple[str, ...]
    record: bool


def make_scoring(clients: Tensor, moment: Moment, number: int, **options: Unpack[ScoreOptions]) -> Scoring:
    """Return the evaluation of some clients, after so many asks of the round."""
    clients, order = clients.sort()
    how: dict[str, Any] = {**options}
    slot = how.pop("slot", None)
    if slot is None:
        return Scoring(Ask("adapt", "adapt", moment, clients, number=number), **how)
    slots = int(slot.max()) + 1 if len(slot) else 0
    return Scoring(Ask("adapt", "adapt", moment, clients, slot[order], slots, number=number), **how)


@dataclass(frozen=True)
class BlockResult:
    """The result of a block of an ask, or of several that stand side by side.

    Args:
        total: partial sum of its answers; with slots it is `Slotted`.
        clients: sorted ids of the clients that were counted.
        revealed: values that each counted client revealed, by name.
        keepers: ids of the clients that keep something new.
        notes: diagnostics by client.
        refused: ids of clients whose numbers were not finite, or did not fit the sum's fixed point.
        up: bytes that clients sent.
        vectors: in place of `total`, by slot, or 0, the sum in fixed point.
        unopened: ids of clients in whose sums there were too few.
        blocks: how many blocks are added up.
    """

    total: Tree
    clients: list[int]
    revealed: dict[str, list[Tensor]]
    keepers: list[int]
    notes: dict[int, Notes]
    refused: list[int]
    up: int
    vectors: dict[int, Tensor] = field(default_factory=dict)
    unopened: list[int] = field(default_factory=list)
    blocks: int = 1


@dataclass(frozen=True)
class Query:
    """One ask as the record keeps it; the server's code never sees it.

    Args:
        ask: the question and its clients.
        sent: (clients,) bool, clients that were sent the question now; the others were sent it in an earlier round.
            None if all were.
        answered: ids of the clients that were counted.
        refused: ids of the clients whose numbers were not finite.
        cost: bytes down and up.
        seconds: time that the server waited.
        notes: diagnostics by client.
        payload: the payload itself, no copy, in rounds whose questions may be put once more.
        failed: if no answer counts, by reason the ids of clients that could have answered.
    """

    ask: Ask
    sent: Tensor | None
    answered: Tensor
    refused: Tensor
    cost: Cost
    seconds: float
    notes: dict[int, Notes] = field(default_factory=dict)
    payload: Payload = field(default=None, repr=False)
    failed: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Replay:
    """A question put to one client once more, to evaluate its model on rows of other clients.

    Args:
        ask: the question to that client, as it was; None evaluates the server's state.
        scoring: clients on whose rows the model is evaluated, and the part of these rows.
    """

    ask: Ask | None
    scoring: Scoring


@dataclass(frozen=True)
class Replayed:
    """Scores of the model of a replay, or the reason why there is none."""

    scores: Scores | None
    why: str = ""
