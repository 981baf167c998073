"""The host, which runs clients' work block by block in the process where rows and memory live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
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
    Grouping,
    Memory,
    Notes,
    Prediction,
    Scores,
    Slotted,
    State,
    Work,
)
from fedtide.core.weights import placed
from fedtide.data.population import Population
from fedtide.fleets.ask import Ask, BlockResult, Job, Replay, Replayed, Scoring
from fedtide.learn.task import ROWS, row_losses
from fedtide.learn.training import training_loss

BATCH = 64
"""Rows that decide together with grouping "batch" and "oracle"."""

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
            shard = replace(shard, held_out=None)
        moment = ask.moment
        if ask.question == "train" and self.partial_work and rng.at("straggler").numpy().random() < self.partial_work:
            moment = replace(moment, part=rng.at("work"))
        return work(payload, memory, shard, moment, rng)

    def score(self, scoring: Scoring, payload: Tree) -> Scores:
        """Evaluate a block of clients on their own rows, pooled by slot into large batches."""
        ask = scoring.ask
        slots = torch.zeros(len(ask.clients), dtype=torch.int64) if ask.slot is None else ask.slot
        tally = _Tally(len(ask.clients))
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
        self, scoring: Scoring, payload: Tree, places: Tensor, memories: Sequence[Memory], tally: _Tally
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


def decision_units(owner: Tensor, group: Tensor, grouping: Grouping) -> tuple[Tensor, Tensor]:
    """Number the units of rows that decide together 0..n-1 (rows,), and find the first row of each unit (n,).

    Args:
        owner: (rows,) position of the client that owns each row, sorted.
        group: (owners,) the true group of each owner.
        grouping: see `fedtide.core.types.Grouping`.

    >>> decision_units(torch.tensor([0, 0, 1]), torch.tensor([0, 0]), "client")[0].tolist()
    [0, 0, 1]
    """
    rows = torch.arange(len(owner))
    if grouping == "sample":
        return rows, rows
    source = owner if grouping in ("client", "batch") else group[owner]
    # The place of each row among those of the same source, for batches of at most BATCH of them.
    order = source.argsort(stable=True)
    counts = torch.bincount(source)
    place = torch.empty_like(rows)
    place[order] = rows - (counts.cumsum(0) - counts)[source[order]]
    batch = place // BATCH if grouping in ("batch", "oracle") else torch.zeros_like(rows)
    _, unit = torch.unique(torch.stack([source, batch], 1), dim=0, return_inverse=True)
    first = torch.full((int(unit.max()) + 1,), len(owner)).scatter_reduce(0, unit, rows, "amin")
    return unit, first


@contextmanager
def _global_randomness_restored() -> Iterator[None]:
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


class _Tally:
    """Sums of a scoring for each client."""

    def __init__(self, clients: int) -> None:
        self.rows = torch.zeros(clients, dtype=torch.float64)
        self.correct = torch.zeros(clients, dtype=torch.float64)
        self.loss = torch.zeros(clients, dtype=torch.float64)
        self.choice: Tensor | None = None
        self.weights: Tensor | None = None
        self.others: dict[str, Tensor] = {}
        self.density: Tensor | None = None

    def add(self, owner: Tensor, prediction: Prediction, y: Tensor, scored: Tensor | None = None) -> None:
        """Count predictions of some rows, or of those of their labels that are `scored`."""
        logp, choice, weights = prediction.logp, prediction.choice, prediction.weights
        right = ((logp.argmax(-1) == y) & ~logp.isnan().any(-1)).double()  # of NaN, argmax is one of them
        rows = _per_row(torch.ones_like(right), scored)
        self.rows.index_add_(0, owner, rows)
        self.correct.index_add_(0, owner, _per_row(right, scored))
        self.loss.index_add_(0, owner, _per_row(row_losses(logp, y).double(), scored))
        for name, other in prediction.others.items():
            correct = _per_row((other == y).double(), scored)
            self.others.setdefault(name, torch.zeros_like(self.rows)).index_add_(0, owner, correct)
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
        return Scores(clients, self.rows, self.correct, self.loss, self.choice, self.weights, self.others, self.density)


def _per_row(column: Tensor, scored: Tensor | None) -> Tensor:
    """Sum sequences (rows, steps) over the steps that are scored (rows,); return other rows as they are."""
    return column if scored is None else column.masked_fill(~scored, 0.0).reshape(len(column), -1).sum(1)


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
    zeros = partial(torch.zeros, dtype=torch.float64)
    return torch.cat([zeros(n) if column is None else column for column, n in zip(columns, clients, strict=True)])


def concat_scores(blocks: Iterable[Scores]) -> Scores:
    """Concatenate the scores of several blocks."""
    none = torch.empty(0, dtype=torch.float64)
    parts = list(blocks) or [Scores(torch.empty(0, dtype=torch.int64), none, none, none)]
    clients = [len(part) for part in parts]
    names = dict.fromkeys(name for part in parts for name in part.others)
    density = [part.density for part in parts]
    return Scores(
        torch.cat([part.clients for part in parts]),
        torch.cat([part.rows for part in parts]),
        torch.cat([part.correct for part in parts]),
        torch.cat([part.loss for part in parts]),
        _stacked([part.choice for part in parts], clients),
        _stacked([part.weights for part in parts], clients),
        {name: _filled([part.others.get(name) for part in parts], clients) for name in names},
        None if all(column is None for column in density) else _filled(density, clients),
    )
