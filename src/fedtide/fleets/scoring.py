"""Predictions of clients for their own rows, as sums for each client."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedtide.core.base import Algorithm, Answer, Grouping, Memory, Moment, Payload, Prediction, Scores, Shard, Work
from fedtide.core.memory import Version
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, all_finite, detached, size_in_bytes
from fedtide.fleets.ask import Ask, Scoring
from fedtide.learn.device import drawn_from
from fedtide.learn.target import CLASSES, Target
from fedtide.learn.task import ROWS
from fedtide.wire.scores import is_score, parts_of, total_of


class ClientRows(Protocol):
    """The rows of some clients."""

    @property
    def target(self) -> Target:
        """The target of their rows."""

    @property
    def apart(self) -> bool:
        """Whether clients are judged on other rows than the validation rows by which they decide."""

    def shard(self, client: int, moment: Moment) -> Shard:
        """Return the training rows of one client; its validation rows are fetched when they are used."""

    def sizes(self, clients: Tensor, part: str, moment: Moment) -> Tensor:
        """Count the units of evaluation of each of `clients`: its rows, or all steps of its sequences."""

    def counts(self, clients: Tensor, part: str, moment: Moment) -> Tensor:
        """Count the rows of each of `clients`."""

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
        rows_at_least: rows below which one is not judged in a sum.
    """

    algorithm: Algorithm
    rows: ClientRows
    seed: int
    memory: Kept
    partial_work: float = 0.0
    hides: bool = False
    rows_at_least: int = 1

    def answers(self, ask: Ask, payload: Payload) -> Iterator[tuple[int, Answer | None]]:
        """Yield each client of a question with its answer, one after the other."""
        for client, received in ask.sent(payload):
            yield client, self.answer(ask, client, received)

    def answer(self, ask: Ask, client: int, received: Payload) -> Answer | None:
        """Return the answer of one client, the same bits each time; its tensors may soon be written over."""
        if is_score(ask.question):
            return self._judged(ask, client, received)
        answer = self._do(self.algorithm.works[ask.question], ask, client, received)
        return Answer({}) if self.hides and (answer is None or not is_finite(answer)) else answer

    def _judged(self, ask: Ask, client: int, received: Payload) -> Answer:
        """Return the part of a client in a sum of scores; with too few rows it is that of one without rows."""
        part, grouping, other = parts_of(ask.question)
        ids = torch.tensor([client])
        if int(self.rows.counts(ids, part, ask.moment)) < self.rows_at_least:
            return NO_ROWS
        scoring = Scoring(replace(ask, question="adapt", purpose="adapt", clients=ids, slot=None), part)
        scoring = replace(scoring, grouping=grouping, other=other)
        ((_, answer),) = answers_of(score(self, scoring, received))
        return answer

    def adapt(self, ask: Ask, client: int, received: Payload, part: str) -> Memory:
        """Return a client's memory in an evaluation, adapted on its own rows if the algorithm adapts.

        Args:
            ask: the clients, the moment and the version of what they keep.
            client: one of them.
            received: what it is evaluated with.
            part: part of its rows that is evaluated.
        """
        assert self.algorithm.adapt is not None
        return self.adapted_memory(ask, client, self._do(self.algorithm.adapt, ask, client, received, part))

    def adapted_memory(self, ask: Ask, client: int, answer: Answer | None) -> Memory:
        """Return the memory in the answer of a client that has adapted; without one, or numbers, what it keeps."""
        if answer is not None and answer.memory is not None and all_finite(answer.memory):
            return detached(answer.memory)
        return self.memory.read(client, ask.version)

    def _do(self, work: Work, ask: Ask, client: int, received: Payload, judged: str = "") -> Answer | None:
        """Do a work; `judged` is the part of the client's rows that it is evaluated on afterwards."""
        with drawn_from(self.key(ask, client).number):
            return work(*self.arguments(ask, client, received, judged))

    def arguments(
        self, ask: Ask, client: int, received: Payload, judged: str = ""
    ) -> tuple[Payload, Memory, Shard, Moment, Rng]:
        """Return the arguments of a client's work, with its rows, as of `_do`."""
        shard = replace(self.rows.shard(client, ask.moment), apart=self.rows.apart)
        if judged == "val" and not shard.apart:  # rows that are judged must not be adapted on
            shard = replace(shard, fetch_val=None)
        return self.arguments_of(ask, client, received, shard, self.key(ask, client))

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


# -- scores ------------------------------------------------------------------------------------------------------------


LARGEST = 16.0
"""Log-odds from which on scores are not told apart; float32 tells few of them."""

BINS = 640
"""Bins of log-odds from -LARGEST to LARGEST, each 0.05 wide."""


def confusion(logp: Tensor, y: Tensor) -> Tensor:
    """Count by class (classes, 3) right predictions, all predictions, and rows; one of NaN predicts no class.

    >>> confusion(torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]).log(), torch.tensor([0, 1, 1])).tolist()
    [[1.0, 2.0, 1.0], [1.0, 1.0, 2.0]]
    """
    predicted, classes = logp.argmax(-1), logp.shape[-1]
    is_number = ~logp.isnan().any(-1)
    counts = (
        torch.bincount(labels, minlength=classes)
        for labels in (y[is_number & (predicted == y)], predicted[is_number], y)
    )
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


def tokens(logp: Tensor, y: Tensor) -> Tensor:
    """Count the rows of each class (classes,), such as the tokens that were to be predicted.

    >>> tokens(torch.zeros(3, 4), torch.tensor([1, 3, 1])).tolist()
    [0.0, 2.0, 0.0, 1.0]
    """
    return torch.bincount(y, minlength=logp.shape[-1]).double()


POOLED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"confusion": confusion, "odds": odds, "tokens": tokens}
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
    """Sums of a scoring for each client.

    Args:
        clients: how many there are.
        pooled: names of sums over the rows of all of them, see `POOLED`.
        target: what rows are labeled with.
    """

    def __init__(self, clients: int, pooled: Sequence[str] = (), target: Target = CLASSES) -> None:
        self._clients, self._wanted, self._target = clients, pooled, target
        zeros = torch.zeros(clients, dtype=torch.float64)
        self._columns: dict[str, Any] = {name: zeros.clone() for name in ("rows", "correct", "loss")}
        self._others: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self.pooled: dict[str, Tensor] = {}

    def add(self, owner: Tensor, prediction: Prediction, y: Tensor, scored: Tensor | None = None) -> None:
        """Count predictions of some rows, or of those of their labels that are `scored`."""
        output, target, columns = prediction.told, self._target, self._columns
        right = target.score_rows(target.predict_labels(output), y)
        rows = _per_row(torch.ones_like(right), scored)
        self._add(columns, "rows", owner, rows)
        self._add(columns, "correct", owner, _per_row(right, scored))
        self._add(columns, "loss", owner, _per_row(target.losses(output, y).double(), scored))
        for name, other in prediction.others.items():
            self._add(self._others, name, owner, _per_row(target.score_rows(other, y), scored))
        for name, summed in target.sums(output, y).items():
            self._add(self._sums, name, owner, summed)
        for name in self._wanted:
            counts = POOLED[name](*_flat(output, y, scored))
            self.pooled[name] = self.pooled[name] + counts if name in self.pooled else counts
        if prediction.density is not None:
            self._add(columns, "density", owner, prediction.density.double() * rows)
        if prediction.choice is not None:
            self._add(columns, "choice", owner, torch.nn.functional.one_hot(prediction.choice).double())
        if prediction.weights is not None:
            self._add(columns, "weights", owner, prediction.weights.double())

    def _add(self, sums: dict[str, Tensor], name: str, owner: Tensor, values: Tensor) -> None:
        """Add values (rows, ...) to the sums of their owners, which grow to the width of the values."""
        shape = values.shape[1:]
        sums.setdefault(name, values.new_zeros(self._clients, *shape))
        if sums[name].shape[1:] < shape:
            sums[name] = _widen(sums[name], self._clients, shape)
        sums[name][(slice(None), *map(slice, shape))].index_add_(0, owner, values)

    def scores(self, clients: Tensor) -> Scores:
        """Return the scores of the clients."""
        return Scores(clients, **self._columns, others=self._others, pooled=self.pooled, sums=self._sums)


def _per_row(column: Tensor, scored: Tensor | None) -> Tensor:
    """Sum sequences (rows, steps) over the steps that are scored (rows,); return other rows as they are."""
    return column if scored is None else column.masked_fill(~scored, 0.0).reshape(len(column), -1).sum(1)


def _flat(output: Tensor, y: Tensor, scored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return predictions (rows, classes) and labels (rows,) of rows, or of those steps of sequences that are scored."""
    flat, labels = output.reshape(-1, output.shape[-1]), y.reshape(-1)
    return (flat, labels) if scored is None else (flat[scored.reshape(-1)], labels[scored.reshape(-1)])


def _widen(table: Tensor | None, clients: int, shape: Sequence[int]) -> Tensor:
    """Copy a table (clients, ...), padded with zeros to a shape; None is an empty table."""
    wide = torch.zeros(clients, *shape, dtype=torch.float64)
    if table is not None:
        wide[tuple(map(slice, table.shape))] = table
    return wide


def _concat(tables: Iterable[Tensor | None], clients: Sequence[int]) -> Tensor | None:
    """Concatenate the tables of several blocks, padded to the widest; None if no block has one."""
    tables = list(tables)
    shape = max((tuple(table.shape[1:]) for table in tables if table is not None), default=None)
    if shape is None:
        return None
    return torch.cat([_widen(table, count, shape) for table, count in zip(tables, clients, strict=True)])


def concat_scores(blocks: Iterable[Scores]) -> Scores:
    """Concatenate the scores of several blocks of one evaluation."""
    none = torch.empty(0, dtype=torch.float64)
    parts = list(blocks) or [Scores(torch.empty(0, dtype=torch.int64), none, none, none)]
    clients = [len(part) for part in parts]
    columns = {
        name: _concat((getattr(part, name) for part in parts), clients)
        for name in ("rows", "correct", "loss", "choice", "weights", "density")
    }
    tables: dict[str, dict[str, Any]] = {
        kind: {
            name: _concat((getattr(part, kind).get(name) for part in parts), clients)
            for name in dict.fromkeys(name for part in parts for name in getattr(part, kind))
        }
        for kind in ("others", "sums")
    }
    names = dict.fromkeys(name for part in parts for name in part.pooled)
    pooled = {name: torch.stack([part.pooled[name] for part in parts if name in part.pooled]).sum(0) for name in names}
    ids = torch.cat([part.clients for part in parts])
    return Scores(ids, **columns, **tables, pooled=pooled).credited  # type: ignore[arg-type]


NO_ROWS = Answer(total_of(None))
"""The part in a sum of scores of a client that has no rows."""


def answers_of(scores: Scores) -> Iterator[tuple[int, Answer]]:
    """Yield each client with its part in a sum of scores (`fedtide.wire.scores`); NaN predicts nothing."""
    columns = (scores.clients, scores.rows, scores.correct)
    for client, rows, correct in zip(*(column.tolist() for column in columns), strict=True):
        yield client, Answer(total_of(correct / rows if rows else None))


PERSONAL_BYTES = 256_000_000
"""Upper bound on the bytes of personal models held at a time during evaluation, but for those of one client."""


Adapted = Callable[[Clients, Ask, Payload, str], Iterator[Memory]]
"""(clients, question, what they receive, part that is evaluated) -> the memory of each, adapted, in their order."""


def adapt_one_by_one(clients: Clients, ask: Ask, received: Payload, part: str) -> Iterator[Memory]:
    """Yield the memory of each client in an evaluation, adapted on its own rows."""
    for client in ask.clients.tolist():
        yield clients.adapt(ask, client, received, part)


def score(clients: Clients, scoring: Scoring, payload: Payload, adapted: Adapted = adapt_one_by_one) -> Scores:
    """Evaluate a block of clients on their own rows, pooled by slot into large batches."""
    if scoring.other:
        algorithm = clients.algorithm.others[scoring.other]
        return score(replace(clients, algorithm=algorithm), replace(scoring, other=""), payload, adapted)
    ask = scoring.ask
    slots = torch.zeros(len(ask.clients), dtype=torch.int64) if ask.slot is None else ask.slot
    tally = Tally(len(ask.clients), scoring.pooled, clients.rows.target)
    for slot in slots.unique().tolist():
        received = payload if ask.slot is None else payload[slot]
        for places in _batches(clients, scoring, (slots == slot).nonzero().flatten()):
            for positions, memories in _with_memory(clients, scoring, received, places, adapted):
                _predict(clients, scoring.of(positions), received, memories, positions, tally)
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
    clients: Clients, scoring: Scoring, received: Payload, places: Tensor, adapted: Adapted
) -> Iterator[tuple[Tensor, Sequence[Memory]]]:
    """Yield positions of clients with their memory, adapted on their own rows if the algorithm says so.

    Nothing flows back. Memory is read when `predict` looks at it. Adapted memory is held for some clients at a time, so
    that no scoring needs the memory of all.
    """
    ask = scoring.ask.of(places)
    if not scoring.personal:
        yield places, [None] * len(places)
        return
    if clients.algorithm.adapt is None:
        yield places, _Memories(clients.memory, ask, ask.clients.tolist())
        return
    memories: list[Memory] = []
    first, size = 0, 0
    for i, memory in enumerate(adapted(clients, ask, received, scoring.part)):
        memories.append(memory)
        size += size_in_bytes(memories[-1])
        if size >= PERSONAL_BYTES or i + 1 == len(places):
            yield places[first : i + 1], memories
            memories, first, size = [], i + 1, 0


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
