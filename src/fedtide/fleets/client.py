"""The work of clients, in a simulation or on their own machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from fedtide.core.base import Algorithm, Answer, Memory, Moment, Payload, Shard, Work
from fedtide.core.memory import Version
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite, detached
from fedtide.fleets.ask import Ask
from fedtide.learn.device import drawn_from
from fedtide.learn.target import Target


class ClientRows(Protocol):
    """The rows of some clients."""

    @property
    def target(self) -> Target:
        """The target of their rows."""

    @property
    def apart(self) -> bool:
        """Whether no validation row by which a client decides is one that it is judged on at the same time."""

    def shard(self, client: int, moment: Moment) -> Shard:
        """Return the training rows of one client; its validation rows are fetched when they are used."""

    def sizes(self, clients: Tensor, part: str, moment: Moment) -> Tensor:
        """Count the units of evaluation of each of `clients`: its rows, or all steps of its sequences."""

    def pool(self, clients: Tensor, moment: Moment, part: str) -> tuple[Shard, Tensor]:
        """Return the rows of several clients, and for each row its owner's position in `clients`.

        The mask of sequences tells which steps are scored.
        """


class Kept(Protocol):
    """The memory of clients between rounds."""

    def read(self, client: int, now: Version) -> Memory:
        """Return a client's memory before the ask of that version; None if it keeps nothing."""


@dataclass(frozen=True)
class Clients:
    """All that it takes to do the work of clients.

    Args:
        algorithm: the algorithm whose works they do.
        rows: their rows.
        seed: seed of every random key.
        memory: what they keep.
        partial_work: probability that a client asked to train does only a part of its local work.
        hides: whether one that has nothing to say, or not numbers, answers with zeros, as that would tell of its rows.
    """

    algorithm: Algorithm
    rows: ClientRows
    seed: int
    memory: Kept
    partial_work: float = 0.0
    hides: bool = False

    def answers(self, ask: Ask, payload: Payload) -> Iterator[tuple[int, Answer | None]]:
        """Yield each client of a question with its answer, one after the other."""
        for client, received in ask.sent(payload):
            yield client, self.answer(ask, client, received)

    def answer(self, ask: Ask, client: int, received: Payload) -> Answer | None:
        """Return the answer of one client, the same bits each time; its tensors may soon be written over."""
        answer = self._do(self.algorithm.works[ask.question], ask, client, received)
        return Answer({}) if self.hides and (answer is None or not is_finite(answer)) else answer

    def adapt(self, ask: Ask, client: int, received: Payload, part: str) -> Memory:
        """Return a client's memory in an evaluation, adapted on its own rows if the algorithm adapts.

        Args:
            ask: the clients, the moment and the version of what they keep.
            client: one of them.
            received: what it is evaluated with.
            part: part of its rows that is evaluated.
        """
        assert self.algorithm.adapt is not None
        answer = self._do(self.algorithm.adapt, ask, client, received, part)
        if answer is not None and answer.memory is not None and all_finite(answer.memory):
            return detached(answer.memory)
        return self.memory.read(client, ask.version)

    def _do(self, work: Work, ask: Ask, client: int, received: Payload, judged: str = "") -> Answer | None:
        """Do a work; `judged` is the part of the client's rows that it is evaluated on afterwards."""
        rng = self.key(ask, client)
        with drawn_from(rng.number):
            shard = replace(self.rows.shard(client, ask.moment), apart=self.rows.apart)
            if judged == "val" and not shard.apart:  # rows that are judged must not be adapted on
                shard = replace(shard, fetch_val=None)
            return work(*self.arguments_of(ask, client, received, shard, rng))

    def key(self, ask: Ask, client: int) -> Rng:
        """Return the key of all that a client draws for a question."""
        return Rng(self.seed).at(ask.moment.round, client, ask.purpose)

    def arguments_of(
        self, ask: Ask, client: int, received: Payload, shard: Shard, rng: Rng
    ) -> tuple[Payload, Memory, Shard, Moment, Rng]:
        """Return the arguments of a client's work."""
        moment = ask.moment
        if ask.question == "train" and self.partial_work and rng.at("straggler").numpy().random() < self.partial_work:
            moment = replace(moment, part=rng.at("work"))
        return received, self.memory.read(client, ask.version), shard, moment, rng


def is_finite(answer: Answer, sums: bool = True) -> bool:
    """Tell whether all that an answer leaves behind is finite; with `sums = False` its total is left out."""
    return all_finite([dict(answer.rows), answer.memory, answer.total if sums else None])
