"""Messages between a fleet and an engine; all are trees, so any engine can carry them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedtide.core.memory import Stored
from fedtide.core.trees import Tree
from fedtide.core.types import Grouping, Moment, Notes, Scores


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
        passes: cost for each client on the clock, where the server states it.
    """

    question: str
    purpose: str
    moment: Moment
    clients: Tensor
    slot: Tensor | None = None
    slots: int = 0
    reveal: tuple[str, ...] = ()
    passes: float | None = None

    def of(self, where: Tensor) -> Ask:
        """Return the question to some of its clients, by mask or by position."""
        return replace(self, clients=self.clients[where], slot=None if self.slot is None else self.slot[where])


@dataclass(frozen=True)
class Job:
    """One block of an ask, with each client's memory: a tree, the name of its file, or None."""

    ask: Ask
    memory: list[Tree | Stored]


@dataclass(frozen=True)
class Scoring:
    """One block of clients to evaluate on a part of their own rows.

    Args:
        ask: the clients, the moment and the slots.
        memory: memory of each client, as in a job.
        part: part of their rows, such as "test".
        personal: whether clients use their memory and adapt before.
        grouping: which rows decide together.
        other: name of the other use of the state that is evaluated; "" is the algorithm's own.
    """

    ask: Ask
    memory: list[Tree | Stored]
    part: str
    personal: bool = True
    grouping: Grouping = "client"
    other: str = ""


@dataclass(frozen=True)
class BlockResult:
    """The result of a block of an ask.

    Args:
        total: partial sum of its answers; with slots it is `Slotted`.
        clients: sorted ids of the clients that were counted.
        revealed: values that each counted client revealed, by name.
        memory: new memory by client; clients that keep what they had are absent.
        notes: diagnostics by client.
        refused: ids of clients whose numbers were not finite.
        up: bytes that clients sent.
    """

    total: Tree
    clients: list[int]
    revealed: dict[str, list[Tensor]]
    memory: dict[int, Tree | Stored]
    notes: dict[int, Notes]
    refused: list[int]
    up: int


@dataclass(frozen=True)
class Replay:
    """A question put to one client once more, to evaluate its model on rows of other clients.

    Args:
        job: the question to that client, as it was; None evaluates the server's state.
        scoring: clients on whose rows the model is evaluated, and the part of these rows.
    """

    job: Job | None
    scoring: Scoring


@dataclass(frozen=True)
class Replayed:
    """Scores of the model of a replay, or the reason why there is none."""

    scores: Scores | None
    why: str = ""
