"""The host, which runs clients' work block by block in the process where rows and memory live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedtide.core import sums
from fedtide.core.memory import MemoryStore, Stored
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, all_finite, detached, leaves, size_in_bytes
from fedtide.core.types import (
    Algorithm,
    Answer,
    Memory,
    Notes,
    Scores,
    Slotted,
    State,
    Work,
)
from fedtide.core.weights import placed
from fedtide.data.population import Population
from fedtide.fleets.ask import Ask, BlockResult, Job, Replay, Replayed, Scoring
from fedtide.fleets.tally import Tally, decision_units
from fedtide.learn.task import ROWS
from fedtide.learn.training import training_loss

HELD_BYTES = 256_000_000
"""Upper bound on the bytes of personal models held at a time during evaluation, but for those of one client."""

WRITE_UPDATE = "write Answer(..., update=fitted.delta): received + update must be the model that the client trained"
"""Advice for a work whose answers have no update."""


@dataclass(frozen=True)
class Host:
    """All that a process needs to run clients: the algorithm, the population, the seed and the memory.

    Args:
        algorithm: the algorithm whose works are run.
        population: the clients and their rows.
        seed: seed of every random key.
        memory: store of the clients' memory.
        name: name of this process in the names of staged files.
        partial_work: probability that a client asked to train does only a part of its local work.
    """

    algorithm: Algorithm
    population: Population
    seed: int
    memory: MemoryStore
    name: str = ""
    partial_work: float = 0.0

    def ask(self, job: Job, payload: Tree) -> BlockResult:
        """Run one question on a block of clients, one after the other, and add their answers up."""
        done = self._run(job, payload, careful=False)
        # Works are pure, so a block whose sum is not finite can be run again, now looking at every answer.
        if all_finite(done.total):
            return done
        for row in done.memory.values():
            self.memory.discard(row)
        return self._run(job, payload, careful=True)

    def _run(self, job: Job, payload: Tree, *, careful: bool) -> BlockResult:
        ask = job.ask
        work = self.algorithm.works[ask.question]
        done = BlockResult(None, [], {name: [] for name in ask.reveal}, {}, {}, [], 0)
        total, up = None, 0
        with _global_randomness_restored():
            for place, client in enumerate(ask.clients.tolist()):
                slot = None if ask.slot is None else int(ask.slot[place])
                received = payload if slot is None else payload[slot]
                answer = self._answer(work, received, client, self.memory.load(job.memory[place]), ask)
                if answer is None:
                    continue
                telling = answer.rows or answer.memory is not None or careful
                if telling and not all_finite([dict(answer.rows), answer.memory, answer.total if careful else None]):
                    done.refused.append(client)
                    continue
                total = sums.add(total, answer.total if slot is None else Slotted({slot: answer.total}, ask.slots))
                up += size_in_bytes(answer.total) + self._keep(answer, client, done, ask.question)
        return replace(done, total=total, up=up)

    def _keep(self, answer: Answer, client: int, done: BlockResult, question: str) -> int:
        """Note the revealed values, memory and diagnostics of a counted answer; return the bytes it revealed."""
        done.clients.append(client)
        for name, rows in done.revealed.items():
            rows.append(answer.rows[name].detach().clone())
        if answer.memory is not None:
            done.memory[client] = self.memory.stage(client, answer.memory, by=self.name)
        notes = answer.notes or Notes()
        if notes.loss is None and question == "train":
            notes = replace(notes, loss=training_loss(answer))
        if any(leaf is not None for leaf in leaves(notes)):
            done.notes[client] = detached(notes)
        return sum(size_in_bytes(answer.rows[name]) for name in done.revealed if name not in answer.repeated)

    def replay(self, replay: Replay, payload: Tree, state: State) -> Replayed:
        """Put a question to one client once more, and evaluate the server's state with that client's update in it.

        No memory, rows or notes are kept.
        """
        with _global_randomness_restored():
            if replay.job is not None:
                answer, ask = self.repeat(replay.job, payload), replay.job.ask
                if answer is None or answer.update is None:
                    return Replayed(None, f"an answer to '{ask.question}' has no update; {WRITE_UPDATE}")
                slot = None if ask.slot is None else int(ask.slot[0])
                try:
                    state = replace(state, weights=placed(state.weights, answer.update, slot))
                except LookupError as error:
                    return Replayed(None, str(error))
            judged = replay.scoring.ask
            served, slots = self.algorithm.serve(state, judged.clients)
            return Replayed(self.score(replace(replay.scoring, ask=replace(judged, slot=slots)), served))

    def repeat(self, job: Job, payload: Tree) -> Answer | None:
        """Return the answer of the one client of a job, bit for bit; its tensors may soon be written over."""
        ask = job.ask
        received = payload if ask.slot is None else payload[int(ask.slot[0])]
        work = self.algorithm.works[ask.question]
        return self._answer(work, received, int(ask.clients[0]), self.memory.load(job.memory[0]), ask)

    def _answer(
        self, work: Work, payload: Tree, client: int, memory: Memory, ask: Ask, judged: str = ""
    ) -> Answer | None:
        """Run a work on one client; `judged` is the part of its rows that it is evaluated on afterwards."""
        rng = Rng(self.seed).at(ask.moment.round, client, ask.purpose)
        # Dropout knows only torch's global generator: seed it from the key.
        torch.default_generator.manual_seed(rng.number)
        shard = self.population.shard(client, ask.moment)
        if judged == "val":  # rows that are judged must not be adapted on
            shard = replace(shard, fetch_val=None)
        moment = ask.moment
        if ask.question == "train" and self.partial_work and rng.at("straggler").numpy().random() < self.partial_work:
            moment = replace(moment, part=rng.at("work"))
        return work(payload, memory, shard, moment, rng)

    def score(self, scoring: Scoring, payload: Tree) -> Scores:
        """Evaluate a block of clients on their own rows, pooled by slot into large batches."""
        if scoring.other:
            algorithm = self.algorithm.others[scoring.other]
            return replace(self, algorithm=algorithm).score(replace(scoring, other=""), payload)
        ask = scoring.ask
        slots = torch.zeros(len(ask.clients), dtype=torch.int64) if ask.slot is None else ask.slot
        tally = Tally(len(ask.clients))
        for slot in slots.unique().tolist():
            received = payload if ask.slot is None else payload[slot]
            for places in self._batches((slots == slot).nonzero().flatten(), scoring):
                for some, memories in self._with_memory(scoring, received, places):
                    self._predict(scoring, received, some, memories, tally)
        return tally.scores(ask.clients)

    def _batches(self, places: Tensor, scoring: Scoring) -> Iterator[Tensor]:
        """Cut positions of clients into batches of about `ROWS` rows; all rows of a client stay together."""
        rows = self.population.sizes(scoring.ask.clients[places], scoring.part, scoring.ask.moment)
        batch = (rows.cumsum(0) - rows) // ROWS
        return iter(places.split(torch.unique_consecutive(batch, return_counts=True)[1].tolist()))

    def _predict(
        self, scoring: Scoring, payload: Tree, places: Tensor, memories: Sequence[Memory], tally: Tally
    ) -> None:
        clients = scoring.ask.clients[places]
        rows, owner = self.population.pooled(clients, scoring.ask.moment, scoring.part)
        if not len(rows):
            return
        x, y = self.population.fetch(rows, clients[owner], scoring.ask.moment)
        unit, first = decision_units(owner, self.population.group_at(scoring.ask.moment)[clients], scoring.grouping)
        prediction = self.algorithm.predict(payload, _pick(memories, owner[first].tolist()), x, unit)
        tally.add(places[owner], prediction, y, self.population.rows.scored(y))

    def _with_memory(
        self, scoring: Scoring, payload: Tree, places: Tensor
    ) -> Iterator[tuple[Tensor, Sequence[Memory]]]:
        """Yield positions of clients with their memory, adapted on their own rows where the algorithm says so.

        Nothing flows back. Memory in files is read when `predict` looks at it, and adapted memory is held for some
        clients at a time, so that no scoring needs the memory of all.
        """
        rows = [scoring.memory[place] for place in places.tolist()]
        if self.algorithm.adapt is None or not scoring.personal:
            in_files = any(isinstance(row, Stored) for row in rows)
            yield places, _MemoryInFiles(self.memory, rows) if in_files else rows
            return
        made: list[Memory] = []
        first, held = 0, 0
        for i, row in enumerate(rows):
            made.append(self._adapt(scoring, payload, int(scoring.ask.clients[places[i]]), self.memory.load(row)))
            held += size_in_bytes(made[-1])
            if held >= HELD_BYTES or i + 1 == len(rows):
                yield places[first : i + 1], made
                made, first, held = [], i + 1, 0

    def _adapt(self, scoring: Scoring, payload: Tree, client: int, memory: Memory) -> Memory:
        assert self.algorithm.adapt is not None
        with _global_randomness_restored():
            answer = self._answer(self.algorithm.adapt, payload, client, memory, scoring.ask, scoring.part)
        if answer is not None and answer.memory is not None and all_finite(answer.memory):
            return detached(answer.memory)
        return memory


@dataclass(frozen=True)
class _MemoryInFiles(Sequence[Any]):
    """Memory of some clients, read from its file at each access."""

    store: MemoryStore
    rows: list[Tree | Stored]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: Any) -> Any:
        return self.store.load(self.rows[place])


def _pick(memories: Sequence[Memory], places: list[int]) -> Sequence[Memory]:
    """Pick memories by position, with repetition; those in files stay there."""
    if isinstance(memories, _MemoryInFiles):
        return _MemoryInFiles(memories.store, [memories.rows[place] for place in places])
    return [memories[place] for place in places]


@contextmanager
def _global_randomness_restored() -> Iterator[None]:
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)
