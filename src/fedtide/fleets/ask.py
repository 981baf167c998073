"""What travels between a fleet and whatever runs its clients' work. All of it are trees, so any engine can carry it."""

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
        question: the work's name; "adapt" for what clients do before they are judged.
        purpose: the question's name in the keys of its clients: "train", then "train#1" for a second ask of the round,
            which so shuffles differently.
        moment: when.
        clients: (clients,) ids, sorted.
        slot: (clients,) the slot of each, or None.
        slots: how many slots there are.
        reveal: names of `Answer.rows` that are wanted per client.
        passes: what it costs each client on the clock, where the server says so.
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
        """This question to some of the clients, by mask or by position."""
        return replace(self, clients=self.clients[where], slot=None if self.slot is None else self.slot[where])


@dataclass(frozen=True)
class Job:
    """One block of an ask, with each client's memory: the tree, or the name of its file, or None."""

    ask: Ask
    memory: list[Tree | Stored]


@dataclass(frozen=True)
class Scoring:
    """One block of clients to be judged on a part of their own rows.

    Args:
        ask: the clients, the moment and the slots.
        memory: of each client, as in a job.
        part: which of their rows.
        personal: whether their memory counts, and they adapt before.
        grouping: which rows decide together.
    """

    ask: Ask
    memory: list[Tree | Stored]
    part: str
    personal: bool = True
    grouping: Grouping = "client"


@dataclass(frozen=True)
class Done:
    """What a block of an ask gave.

    Args:
        total: a partial sum of its answers; with slots it is `Slotted`.
        clients: ids of those that were counted, sorted.
        revealed: by name, what each counted client revealed.
        memory: what it keeps, by client; those that keep what they had are absent.
        notes: diagnostics, by client.
        refused: ids of clients whose numbers were not finite.
        up: bytes that they sent.
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
    """A question that is put to one client once more, to judge the model that it makes on rows of others.

    Args:
        job: the question to that client, as it was; None judges the state as the server had it.
        scoring: on whose rows, and which part of them. What serves them follows from the state.
    """

    job: Job | None
    scoring: Scoring


@dataclass(frozen=True)
class Replayed:
    """How the model of a replay does, or why there is none."""

    scores: Scores | None
    why: str = ""
