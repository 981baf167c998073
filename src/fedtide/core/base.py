"""The vocabulary: messages between server and clients, and the parts of an algorithm.

An algorithm is `work` (what one client does, a pure function) and `round` (what the server does, straight-line code).
`round` reaches clients only through `Fleet.ask`, which returns sums.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, map_leaves

__all__ = [
    "Algorithm", "Answer", "Fleet", "Moment", "Prediction", "Reply", "Shard", "Slotted", "Sum", "Traits",
    "Weighted", "Weights", "mean", "shared_weights",
]  # fmt: skip

PARTS = "train", "val", "test"
"""Parts of the rows that a client holds."""

Payload = Tree
"""Values that the server sends to a client."""
Memory = Tree
"""State that stays on a client between rounds; None if there is none yet."""
State = Tree
"""Values that the server keeps between rounds: a frozen dataclass declared in the algorithm's file."""
S = TypeVar("S")
"""The class of that state."""
Facts = Mapping[str, "float | int | Tensor"]
"""Scalars and small named arrays that a round reports for the record."""
Slot = Tensor
"""For each client the slot (cluster, branch, model) it belongs to: integers, shape (clients,)."""


@dataclass(frozen=True)
class Moment:
    """Point in time of a run.

    Args:
        round: counted from 0. Rounds that an algorithm plays before round 0, to collect, are -before to -1; `init` is
            one earlier (-1 if there are none).
        rounds: how many are planned, for schedules.
        seconds: on the simulated or real clock.
        part: for a client that does only a part of its local work now, the key that says how much; None for all of it.

    >>> Moment(round=3, rounds=10, seconds=3.0).progress
    0.3
    """

    round: int
    rounds: int
    seconds: float = 0.0
    part: Rng | None = None

    @property
    def progress(self) -> float:
        """The share of the planned rounds that is over, for schedules."""
        return max(self.round, 0) / max(self.rounds, 1)


@dataclass(frozen=True)
class Weights:
    """A model's state.

    Args:
        params: what server optimizers, clipping, proximal terms and control variates act on.
        buffers: running statistics, aggregated as plain weighted means; step counters are not carried.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """The rows that one client holds at one moment, sorted by sample id.

    Args:
        x: (rows, ...) features; with `fleet.device` in a simulation they may be on that device, all else is on the CPU.
        y: (rows,) labels, or (rows, steps) of sequences; of numbers their values (rows,), of several labels at once
            (rows, labels).
        ids: (rows,) stable sample ids.
        time: (rows,) seconds, or None.
        mask: (rows, steps) which steps count, for sequences; else None.
        fetch_val: fetches the client's validation rows; see `val`.
        bins: (rows,) classes in place of `y`, for code that reads labels, if `y` are no classes; else None.
        apart: whether the client is never judged on its validation rows; if it is, they are hidden from its `adapt`.
    """

    x: Tensor
    y: Tensor
    ids: Tensor
    time: Tensor | None = None
    mask: Tensor | None = None
    fetch_val: "Callable[[], Shard] | None" = field(default=None, repr=False, compare=False)
    bins: Tensor | None = None
    apart: bool = False

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def pick(self, where: Tensor | slice) -> "Shard":
        """Some of the rows, by mask, position or slice; the validation rows stay what they are."""
        time, mask, bins = (None if column is None else column[where] for column in (self.time, self.mask, self.bins))
        return Shard(self.x[where], self.y[where], self.ids[where], time, mask, self.fetch_val, bins, self.apart)

    def joined(self, other: "Shard") -> "Shard":
        """These rows and then those of another shard, without a column that one of the two lacks."""

        def both(name: str) -> Tensor | None:
            one, two = getattr(self, name), getattr(other, name)
            return None if one is None or two is None else torch.cat([one, two.to(one.device)])

        columns: Any = {name: both(name) for name in ("x", "y", "ids", "time", "mask", "bins")}
        return replace(self, **columns)

    @property
    def labels(self) -> Tensor:
        """The classes that count (labels,): of every row, or of the steps of the mask; of numbers their bins."""
        if self.bins is not None:
            return self.bins
        return (self.y if self.mask is None else self.y[self.mask]).flatten()

    @cached_property
    def val(self) -> "Shard | None":
        """The client's validation rows, for work that stops early, weighs or chooses; None if it has none."""
        return None if self.fetch_val is None else self.fetch_val()


LARGEST = 2**53
"""Largest number that a server of real clients takes. Whole numbers below it are exact in float64, and squares of such
numbers are finite in float32, summed too."""


@dataclass(frozen=True)
class Weighted:
    """A value to be summed as weight * value. The client does not multiply: the sum does, in float64."""

    value: Tree
    weight: float = 1.0


@dataclass(frozen=True)
class Slotted:
    """Weighted values for some of `slots` separate sums: one (IFCA) or several (pFedEM, FedEM, FedGMM)."""

    parts: Mapping[int, Weighted]
    slots: int


@dataclass(frozen=True)
class Sum:
    """Sum of a Weighted leaf on the server: of weight * value (float64), and of the weights."""

    value: Tree
    weight: float


@dataclass(frozen=True)
class Notes:
    """Notes of a client's work for the record; None for what it does not report.

    Args:
        branch: () the branch or model that it trained.
        component: (rows,) the component that each of its training rows went to.
        loss: () its mean training loss; None takes the leaf "loss" of its answer to "train", if there is one.
    """

    branch: Tensor | None = None
    component: Tensor | None = None
    loss: Tensor | None = None


@dataclass(frozen=True)
class Answer:
    """Result of one client's work. A work may return None instead: nothing is sent and nothing counted.

    Args:
        total: summed over clients, a tree with Weighted and Slotted leaves.
        rows: reach the server in clear, and only those it asked for by name.
        memory: replaces the client's memory; None keeps what was there.
        notes: diagnostics for the record, in simulation only; `round` never sees them.
        repeated: names in `rows` of what is in `total` too, and so is sent once.
        update: the client's whole update, from which simulation alone measures forgetting: received + update is the
            model that it trained. By the number of the model where the state has several and the client was asked in
            no slot. Never sent, and no bytes of the answer.
    """

    total: Tree
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Memory = None
    notes: Notes | None = None
    repeated: tuple[str, ...] = ()
    update: Weights | Mapping[int, Weights] | None = None


@dataclass(frozen=True)
class Cost:
    """Bytes on the wire.

    Args:
        down: from server to clients.
        up: from clients to server.

    >>> Cost(2, 1) + Cost(3, 3) - Cost(1, 0)
    Cost(down=4, up=4)
    """

    down: int = 0
    up: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.down + other.down, self.up + other.up)

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(self.down - other.down, self.up - other.up)


@dataclass(frozen=True)
class Reply:
    """Result of one ask for the server.

    Args:
        total: the sums (Sum leaves; a list of K if `slot=` or Slotted was used); None if no client answered.
        rows: the revealed names only, in the order of `clients`.
        clients: ids of those that answered, sorted; drop-outs and abstentions are absent.
        seconds: (clients,) from when each was sent the question until its answer, on the simulated or real clock.
        cost: bytes of this ask.
        refused: ids of those that answered with a number that is not finite, and were not counted.
        silent: ids of clients whose answer will never come, sorted: those that abstained and, with `began`, those that
            dropped out, once their answers are due.
    """

    total: Tree
    rows: Mapping[str, Tensor]
    clients: Tensor
    seconds: Tensor
    cost: Cost
    refused: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    silent: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class Prediction:
    """Predictions for some rows.

    Args:
        told: the answer for each row (`Target.read_outputs`): (rows, classes) log-probabilities; for sequences (rows,
            steps, classes); for other targets (rows, width), such as a number in the units of the data.
        choice: (rows,) the branch or model used, or None if there is only one.
        weights: (rows, experts) mixture or gate weights, which sum to one, or None.
        others: by name, the labels (rows,) that other combinations of the same models would predict, for the report.
            Sequences have (rows, steps), other targets their answers.
        density: (rows,) how likely the method takes the row's features to be, a log-density, or None: low is novel.
    """

    told: Tensor
    choice: Tensor | None = None
    weights: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    density: Tensor | None = None


@dataclass(frozen=True)
class SummedScores:
    """An evaluation read from a sum over clients. No client's score is visible.

    Args:
        accuracy: mean over clients that have rows, each of which counts once; with noise it may be below 0 or above 1.
        noise: standard deviation of the noise on it; 0 without noise.
        clients: how many have rows, with noise.
    """

    accuracy: float
    noise: float
    clients: float


Over = Literal["rows", "clients"]
"""Accuracies are means over all rows, or over clients. Then each client counts the same."""


def mean_over(over: Over, summed: Tensor, rows: Tensor) -> float:
    """Return the mean of what was summed over the rows of each client; NaN without rows.

    Args:
        over: rows or clients.
        summed: (clients,).
        rows: (clients,).

    >>> right, rows = torch.tensor([10.0, 0.0]), torch.tensor([10.0, 30.0])
    >>> mean_over("rows", right, rows), mean_over("clients", right, rows)
    (0.25, 0.5)
    """
    if over == "rows":
        return float(summed.sum() / rows.sum())
    judged = rows > 0
    return float((summed[judged] / rows[judged]).mean())


def mean_of_rows(over: Over, values: Tensor, owner: Tensor) -> float:
    """Return the mean of a value of each row (rows,), of which `owner` (rows,) has the client's position.

    >>> mean_of_rows("clients", torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 1, 1]))
    0.5
    """
    if over == "rows":
        return float(values.mean())
    rows = torch.bincount(owner).double()
    return mean_over(over, torch.zeros_like(rows).index_add_(0, owner, values.double()), rows)


@dataclass(frozen=True)
class Scores:
    """Per-client results on one part of the data, as sums, so that any mean can be taken afterwards.

    Args:
        clients: (clients,) ids.
        rows: (clients,) how many rows were judged. Of sequences these are steps: no padding, and no label that the
            source leaves out (ends, unknown words).
        correct: (clients,) how many of them were right; of numbers their skill, summed (see `credited`).
        loss: (clients,) their summed cross-entropy, or plain loss.
        choice: (clients, K) rows predicted by each branch or model, None if there is only one.
        weights: (clients, experts) mixture or gate weights, summed over rows; None if nothing is mixed.
        others: (clients,) how many rows each other way to predict gets right, by its name.
        density: (clients,) log-densities summed over rows, that of a sequence once for each of its steps; None if
            the method has none.
        sums: by name, what the target sums over rows beside: (clients,) or (clients, k).
        group: (clients,) number of each client's true group, in an evaluation that knows it.
        moment: when they were judged, in an evaluation.
        pooled: sums over the rows of all these clients, by their names in `fedtide.fleets.scoring`.
        summed: true if the server gets only a sum, which is `by_sum` (None: no sum was opened). The other numbers are
            for the simulation.
        by_sum: the evaluation read from the sum.
        over: what accuracies are means of. A sum is always over clients.
    """

    clients: Tensor
    rows: Tensor
    correct: Tensor
    loss: Tensor
    choice: Tensor | None = None
    weights: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    density: Tensor | None = None
    group: Tensor | None = None
    moment: Moment | None = None
    pooled: Mapping[str, Tensor] = field(default_factory=dict)
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    summed: bool = False
    by_sum: SummedScores | None = None
    over: Over = "rows"

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def counted(self) -> float:
        """How many rows, or clients that have rows, its accuracies are means of."""
        return float((self.rows if self.over == "rows" else self.rows > 0).sum())

    def share(self, correct: Tensor) -> float:
        """Return an accuracy, by how many rows of each client are right (clients,)."""
        return mean_over(self.over, correct, self.rows)

    @property
    def credited(self) -> "Scores":
        """Scores of numbers whose `correct` is minus an error, as sums of skill; others as they are.

        The skill of a row is 1 - error / mean error of a constant on all of these rows ("reference" among the sums).
        So the skill of clients, weighted by rows, is the skill of all rows. No client is measured by a rival that
        hardly errs.
        """
        if self.reference is None:
            return self
        unit = self.rows.sum() / self.reference

        def credit(errors: Tensor) -> Tensor:
            skill = self.rows + errors * unit
            return skill.masked_fill(~skill.isfinite(), math.nan)

        others = {name: credit(errors) for name, errors in self.others.items()}
        return replace(self, correct=credit(self.correct), others=others)

    @property
    def reference(self) -> float | None:
        """Error of a constant on all of these rows, by which means over evaluations weigh skills; None of others."""
        return float(self.sums["reference"].sum()) if "reference" in self.sums else None

    def pick(self, where: Tensor) -> "Scores":
        """The scores of some clients, by mask or by position."""
        whole = replace(self, pooled={})
        picked: Scores = map_leaves(lambda leaf: leaf[where] if isinstance(leaf, Tensor) else leaf, whole)
        return picked

    @property
    def headline(self) -> float:
        """The accuracy by which choices are made: what the server is told by sums, NaN if that is nothing, or all."""
        if self.summed:
            return math.nan if self.by_sum is None else self.by_sum.accuracy
        return self.accuracy

    @property
    def accuracy(self) -> float:
        """Correct rows over all rows, or the mean of that over clients; NaN without rows, or if all models say NaN.

        >>> one, two = torch.tensor([7, 8]), torch.tensor([10.0, 30.0])
        >>> Scores(one, two, torch.tensor([10.0, 0.0]), two).accuracy
        0.25
        """
        silent = bool(self.loss[self.rows > 0].isnan().all())
        return math.nan if silent else self.share(self.correct)


Work = Callable[[Payload, Memory, Shard, Moment, Rng], "Answer | None"]
"""Work of one client: a pure function of what it received, what it keeps, its rows, the moment and a key."""

ComputeCost = Callable[[str, Tensor], Tensor]
"""Cost of a question for clients, for the clock: (question, rows that each holds) -> rows that each puts through its
model, forward and back; a pass without gradients counts a third."""


Grouping = Literal["client", "batch", "sample", "oracle"]
"""Rows that decide together, at inference, which branch answers for them: all rows of a client, at most 64 of a
client's, each row for itself, or at most 64 of clients of the same true group (known in a simulation alone)."""

EvalSplit = Literal["train_clients", "held_out_clients", "val"]
"""Clients that are judged: training and held-out ones on their test rows, or training ones on validation rows."""


class Holdings(Protocol):
    """Clients and their rows, for `Algorithm.check`."""

    @property
    def registered(self) -> int:
        """Number of clients that can be asked."""

    @property
    def clients(self) -> Tensor:
        """Registered ids, sorted."""

    @property
    def held_out_clients(self) -> Tensor:
        """Ids of the clients that are evaluated and never asked, sorted."""

    @property
    def has_val(self) -> bool:
        """True if any client has validation rows."""

    def counts(self, clients: Tensor, part: str) -> Tensor:
        """Return the number of rows of a part ("train", "val", "test") that each of `clients` holds (clients,)."""

    def few(self) -> tuple[Shard, int]:
        """Return some rows as a model sees them, and the number of classes of all."""


class QuestionOptions(TypedDict, total=False):
    """Options of a question.

    Args:
        slot: for each of the clients the slot it belongs to; totals come back per slot.
        slots: how many slots there are, needed when the payload does not say.
        reveal: names in `Answer.rows` that the server wants to see per client.
        passes: what it costs each client on the clock, in passes over its rows without gradients; None is what
            `Traits.compute_cost` says.
    """

    slot: Slot | None
    slots: int | None
    reveal: Sequence[str]
    passes: float | None


class AskOptions(QuestionOptions, total=False):
    """Options of a question, and what transforms are told with it.

    Args:
        sizes: (slots,) how many clients the participants of each slot stand for; None means themselves. A fleet has no
            use for it.
    """

    sizes: Tensor | None


class TimedOptions(AskOptions, total=False):
    """Options of a question on a clock that can be read ahead.

    Args:
        first: count only the first so many to answer.
        deadline: count only those that answer within so many seconds.
        began: (clients,) the time at which each client was sent this question in an earlier round; infinity for clients
            that are sent it now. None means all are sent it now. A client at work is nearer to its answer, and is not
            sent the question again.
    """

    first: int | None
    deadline: float | None
    began: Tensor | None


class Fleet(Protocol):
    """The reachable clients, and the only way for server code to touch them."""

    @property
    def clustering(self) -> AbstractContextManager[Any]:
        """A stopwatch for the server's own work on clusters: `with fleet.clustering:`, without questions inside.

        Its seconds are recorded beside those of training, and change nothing.
        """

    @property
    def moment(self) -> Moment:
        """Now."""

    @property
    def clients(self) -> Tensor:
        """Registered ids, sorted."""

    @property
    def reachable(self) -> Tensor:
        """The ids that could answer now, sorted."""

    def arrivals(self, m: int) -> Tensor:
        """Draw `m` clients by the shift from (seed, round) alone: the same for every method."""

    def ask(self, question: str, clients: Tensor, payload: Payload, **options: Unpack[AskOptions]) -> Reply:
        """Ask some clients one question and return their sums.

        Args:
            question: a name in `Algorithm.works`.
            clients: ids, in any order, without repetition.
            payload: what every client receives; with `slot` a list, and each client receives its slot's entry.
            options: slots, reveals and cost (see `AskOptions`).
        """

    def score(self, payload: Payload, clients: Tensor, *, slot: Slot | None = None, part: str = "test") -> Scores:
        """Judge predictions on the clients' own rows; `adapt` and `predict` run where rows and memory live."""


class Timed(Fleet, Protocol):
    """A fleet with a clock on which it can be told in advance when each client answers."""

    def ask(self, question: str, clients: Tensor, payload: Payload, **options: Unpack[TimedOptions]) -> Reply:
        """Ask some clients one question and return the sums of those that are in time (see `Fleet.ask`)."""


class Simulation(Timed, Protocol):
    """A fleet that knows what no real one can know; the loop hands it to every algorithm.

    An algorithm whose functions take a `Fleet` needs no simulation, and its type says so.
    """

    @property
    def true_groups(self) -> Tensor:
        """The true group of every client now, held-out ones included (clients,).

        For baselines that say what could be reached at best, and name "true_groups" among what they reveal.
        """

    @property
    def all_rows(self) -> Shard:
        """The training rows of all reachable clients now, in one place.

        For baselines without a federation, which name "all_rows" among what they reveal.
        """


Models = Literal["one", "clusters", "mixture", "branches", "none"]
"""What a method trains: one model for all; one for each cluster; components of a mixture; branches of one network; or
nothing that clients share."""


@dataclass(frozen=True)
class Traits:
    """Declarations of an algorithm: values that it shows and keeps, and its costs.

    Args:
        reveals: every value the server sees per client; () = sums only. "true_groups" and "all_rows" are known in
            simulation alone.
        sends: dataclasses in what clients receive, beside weights and those of the state.
        models: what it trains; transforms apply to some of these.
        refuses: transforms that have no meaning for it, by kind, each with the reason.
        before: how many rounds are played before round 0, to collect and not to train; their numbers are negative.
        keeps: number of models' worth of values that each client keeps between rounds, at most; the disk space of a
            run follows from it.
        remembers: whether clients keep anything else between rounds, such as a few numbers. In a private study each
            client then keeps a row whether it has anything new or not.
        at_home: whether clients receive only a part of their models, because some layers stay with them.
        personal: options by which its paper personalizes, with their defaults. A transform that replaces this refuses
            other values.
        own_expert: whether the first of the experts that its predictions weigh is the client's own; else all of them
            are shared.
        compute_cost: cost of its questions for clients on a clock of devices. None means local training for "train",
            and a pass over the rows without gradients for every other question. An ask may override it (`passes=`).
        first: number of answers to "train" that count, the earliest ones; None means all.
        deadline: seconds within which answers to "train" count; None means that the server waits for all.
        groups_by: questions beside "train" by whose answers clients are grouped; the record has their bytes.
        unless_changed: questions that a client does not answer again before its samples or memory change, once it had
            nothing to say, whatever it is sent. A simulation, which knows both, then does not run them.
        unmaskable: reason why its sums tell what a single client sends, beside `reveals`: masks would hide nothing.
            "" if they do not tell it.
        fewest: number of clients in the smallest differences of its sums; None if it asks for no parts of a sum.
        unprivate: reason why sums with noise would still tell of single clients, or would not be what the method wants;
            "" where there is none.
        kept_as_sent: values that clients both send and keep, with their largest norm (infinity if they have none).
            Clipping changes only the sent values.
        whole: values that must not be clipped, with their largest norm: a cut one would be read as another size.
    """

    reveals: tuple[str, ...] = ()
    sends: tuple[type, ...] = ()
    models: Models = "one"
    refuses: Mapping[str, str] = field(default_factory=dict)
    before: int = 0
    keeps: int = 0
    remembers: bool = False
    at_home: bool = False
    personal: Mapping[str, Any] = field(default_factory=dict)
    own_expert: bool = False
    compute_cost: ComputeCost | None = None
    first: int | None = None
    deadline: float | None = None
    groups_by: tuple[str, ...] = ()
    unless_changed: tuple[str, ...] = ()
    unmaskable: str = ""
    fewest: int | None = None
    unprivate: str = ""
    kept_as_sent: Mapping[str, float] = field(default_factory=dict)
    whole: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Algorithm(Generic[S]):
    """A federated algorithm: the work of clients, the rounds of the server, and the use of its models.

    Args:
        name: for the record.
        init: (fleet, rng) -> the first state; may ask.
        works: question name -> work; the local training question is "train", a client's mean training loss in it the
            leaf "loss".
        round: (state, fleet, rng) -> the next state and facts for the record.
        serve: (state, clients) -> the payload that inference needs, and each client's slot or None.
        predict: (payload, memories, x, owner) -> prediction for pooled rows of many clients of one slot; owner (rows,)
            is the position in the memory list. Rows of one owner are all there, and may decide together.
        adapt: work of a client before it is evaluated (choose, weigh, personalize). It sees training and validation
            rows and a copy of the memory. Nothing flows back.
        as_served: (payload of "train", memory, answer) -> (payload, memory) with which `predict` gives the client's
            prediction at the time of the question; None for no prediction. By default the payload itself, and the
            client's memory now.
        check: raises `FedtideError` if the clients do not suit the algorithm's options, before anything is written.
        others: by name, algorithms with another use of the same state, each evaluated as a method of its own. Only
            their `adapt`, `predict` and `traits.own_expert` count.
        traits: what it declares.
        task: model and loss of the algorithm (`fedtide.learn.task.Task`), which make a module of its weights; None if
            they are unknown (`with_cohort` sets them).
        options: the arguments that it was made with, by name; transforms train and step as these say.
        unpersonalized: the algorithm without the personalization of its paper, which a transform replaces; None if it
            has none.
        plain: the algorithm without transforms; None if it has none.
        transforms: those that made it of `plain`, in the order in which they were applied.
    """

    name: str
    init: Callable[[Simulation, Rng], S]
    works: Mapping[str, Work]
    round: Callable[[S, Simulation, Rng], tuple[S, Facts]]
    serve: Callable[[S, Tensor], tuple[Payload, Slot | None]]
    predict: Callable[[Payload, Sequence[Memory], Tensor, Tensor], Prediction]
    adapt: Work | None = None
    as_served: Callable[[Payload, Memory, Answer], tuple[Payload, Memory] | None] | None = None
    check: Callable[[Holdings], None] | None = None
    others: "Mapping[str, Algorithm[S]]" = field(default_factory=dict)
    traits: Traits = Traits()
    task: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    unpersonalized: "Algorithm[Any] | None" = None
    plain: "Algorithm[Any] | None" = None
    transforms: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Extended:
    """The state of a method and what a transform keeps beside it."""

    inner: State
    own: State

    @property
    def weights(self) -> Any:
        """The method's models."""
        return self.inner.weights


def with_weights(state: Any, weights: Any) -> Any:
    """Return a state with other models."""
    if isinstance(state, Extended):
        return replace(state, inner=with_weights(state.inner, weights))
    return replace(state, weights=weights)


def to_everyone(payload: Callable[[Any], Payload]) -> Callable[[Any, Tensor], tuple[Payload, None]]:
    """The `serve` of an algorithm of whose state everyone gets the same, as `payload` takes it from the state."""
    return lambda state, clients: (payload(state), None)


def shared_weights(state: Any, clients: Tensor) -> tuple[Payload, None]:
    """The `serve` of every algorithm with one global model: everyone gets `state.weights`."""
    del clients
    return state.weights, None


def mean(total: Tree) -> Tree:
    """Divide every Sum by its weight; None if the weight is zero or no client answered.

    >>> mean({"loss": Sum(6.0, 3.0), "empty": Sum(0.0, 0.0)})
    {'loss': 2.0, 'empty': None}
    """
    return map_leaves(_mean_of, total, stop=lambda node: isinstance(node, Sum))


def _mean_of(leaf: Any) -> Any:
    if not isinstance(leaf, Sum):
        return leaf
    if leaf.weight == 0.0:
        return None
    return map_leaves(lambda value: value / leaf.weight, leaf.value)
