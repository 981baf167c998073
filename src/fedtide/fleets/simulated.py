"""The simulated fleet, which does everything but run the work: that is for an engine."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from fedtide.core.base import (
    Cost,
    Grouping,
    Moment,
    Payload,
    QuestionOptions,
    Reply,
    Scores,
    Shard,
    State,
    SummedScores,
    Weights,
)
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.stopwatch import Stopwatch
from fedtide.core.trees import same
from fedtide.data.population import Population
from fedtide.fleets.ask import (
    ABSTAINED,
    NOT_FINITE,
    Ask,
    BlockResult,
    Query,
    Replay,
    Replayed,
    ScoreOptions,
    Scoring,
    check_ask,
    make_ask,
    make_scoring,
    without_count,
)
from fedtide.fleets.devices import Clock, SteadyClock
from fedtide.fleets.engines import Engine, Host
from fedtide.fleets.scoring import answers_of, concat_scores
from fedtide.fleets.totals import BLOCKS, PLAIN, Block, Vectors, blocks_of_clients, bytes_down, join, split_blocks
from fedtide.learn.task import ROWS
from fedtide.transforms.transform import models_in
from fedtide.wire.ledger import Ledger, arrivals, eligible
from fedtide.wire.pipeline import Wire


@dataclass(frozen=True)
class Race:
    """The decisions of the clock about an ask, before any work is run.

    Args:
        counts: (clients,) bool, clients whose work is run and counts.
        passed_over: (clients,) bool, clients whose answers come when enough others have answered.
        sent: (clients,) bool, clients that are sent the question now; None if all are. The others were sent it in an
            earlier round. Then the server waits for each until its answer is due, and learns which dropped out.
        ahead: (clients,) seconds that each client has been at work already.
        rows: (clients,) training rows of each client.
        payload_bytes: bytes down to a client.
        down: bytes down in all.
        wanted: number of answers that end the ask.
        deadline: seconds after which the ask ends in any case; None is never.
    """

    counts: Tensor
    passed_over: Tensor
    sent: Tensor | None
    ahead: Tensor
    rows: Tensor
    payload_bytes: int
    down: int
    wanted: int
    deadline: float | None

    def waited(self, seconds: Tensor) -> float | None:
        """Compute how long the server waits if answers are missing; None if it has all that it wants.

        Args:
            seconds: (clients,) time of each answer.
        """
        if int(self.counts.sum()) >= self.wanted:
            return None
        if self.deadline is None and self.sent is not None and len(seconds):
            return float(seconds.max())
        return self.deadline


@dataclass(eq=False)
class SimulatedFleet:
    """A population as a fleet.

    Sums are taken over sorted client ids, in blocks cut from the number of clients asked. So neither the engine, nor
    the number of its workers, nor a drop-out changes how the rest is summed. Memory is written when an ask ends, for
    counted answers only.

    Args:
        population: the clients.
        engine: the engine that runs the work, with what clients keep.
        clock: times of answers and rounds.
        reveals: values that the server may see per client, () for sums only; None leaves it to the algorithm.
        replayable: rounds whose questions may be put again when they are over (`replay`). For these the fleet keeps the
            payload, and the memory of clients before the round.
        adapts: whether clients work before they are evaluated, so that work is cut by clients and not by rows.
        first: number of answers to "train" that count, the earliest ones; an ask may say otherwise.
        deadline: seconds within which answers to "train" count; an ask may say otherwise.
        unless_changed: questions that a silent client leaves unanswered until its samples or its memory change.
        vectors: how sums are taken.

    Attributes:
        first_work: the round in which each client worked first, of those that have worked so far.
    """

    population: Population
    engine: Engine
    clock: Clock = SteadyClock()
    _: KW_ONLY
    reveals: Sequence[str] | None = None
    replayable: Collection[int] = ()
    adapts: bool = False
    first: int | None = None
    deadline: float | None = None
    unless_changed: Sequence[str] = ()
    vectors: Vectors = PLAIN

    def __post_init__(self) -> None:
        self._silent: dict[str, tuple[Population, Moment, Tensor]] = {}
        self.spent_on: dict[str, Cost] = {}
        self.clustering = Stopwatch()
        self.moment = Moment(-1, 0, 0.0)
        self.queries: list[Query] = []
        self._summed = 0
        self.substituted = 0
        self.first_work: dict[int, int] = {}
        self._new: list[int] = []

    @classmethod
    def of(
        cls, host: Host, engine: Engine, clock: Clock, replayable: Collection[int] = (), wire: Wire | None = None
    ) -> Self:
        """Build the fleet of a run, as its algorithm demands; `wire` is as the server knows it, None as clients do."""
        algorithm = host.algorithm
        return cls(
            host.population,
            engine,
            clock,
            reveals=algorithm.traits.reveals,
            replayable=replayable,
            adapts=algorithm.adapt is not None,
            first=algorithm.traits.first,
            deadline=algorithm.traits.deadline,
            unless_changed=algorithm.traits.unless_changed,
            vectors=Vectors.of(host.wire if wire is None else wire, algorithm, host.population.few()),
        )

    # -- time ---------------------------------------------------------------------------------------------------------

    def begin(self, moment: Moment) -> None:
        """Enter a moment."""
        self.moment = moment
        self.queries = []
        self._summed = 0
        self.substituted = 0
        self.memory.hold((moment.round, 0) if moment.round in self.replayable else None)

    def elapsed(self) -> float:
        """Return the simulated seconds since `begin`, at least until a client is awake; 0 before round 0.

        If rounds are windows of wall-clock time, the next one begins at its time, and the first one at that of the day.
        """
        if (begins := self.population.clock(self.moment.round + 1)) is not None:
            return begins - self.moment.seconds if self.moment.round >= -1 else 0.0
        if self.moment.round < 0:
            return 0.0
        took = self.clock.round([query.seconds for query in self.queries])
        return max(took, self.population.wait(self.moment))

    # -- what its record counts on -------------------------------------------------------------------------------------

    @property
    def truth(self) -> Population:
        """The population, which no fleet of real clients knows."""
        return self.population

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the clients, () if they have none."""
        return self.population.names

    @property
    def memory(self) -> MemoryStore:
        """The memory of clients."""
        return self.engine.memory

    @property
    def ledger(self) -> Ledger | None:
        """The releases of clients so far, and who may be asked; None if sums are not private."""
        return self.vectors.wire.ledger

    def record_lines(self) -> Sequence[Mapping[str, Any]]:
        """Return nothing: what was asked follows from the seed."""
        return ()

    def take_first_work(self) -> list[int]:
        """Return the clients that have worked for the first time since the last call, sorted."""
        new, self._new = sorted(self._new), []
        return new

    def judged(self, clients: Tensor, part: str) -> Tensor:
        """Keep the clients that can be evaluated now: they are available and hold rows of the part."""
        return self.population.judged(clients, part, self.moment)

    # -- who ----------------------------------------------------------------------------------------------------------

    @property
    def clients(self) -> Tensor:
        """Registered ids, sorted."""
        return self.population.clients

    @property
    def reachable(self) -> Tensor:
        """Ids that could answer now, sorted: of those whose privacy allows it."""
        reachable = self.population.reachable(self.moment)
        return reachable[eligible(self.ledger, reachable, self.moment.round)]

    @property
    def true_groups(self) -> Tensor:
        """True group of every client now (see `fedtide.core.base.Simulation.true_groups`)."""
        self._refuse_on_real("true_groups", "the true groups are")
        return self.population.group_at(self.moment)

    @property
    def all_rows(self) -> Shard:
        """Training rows of all reachable clients now (see `fedtide.core.base.Simulation.all_rows`)."""
        self._refuse_on_real("all_rows", "all clients' rows are")
        clients = self.reachable[self.population.remains(self.reachable)]
        self._note_work(clients)
        rows, owner = self.population.pooled(clients, self.moment, "train")
        return self.population.shard_of(rows, clients[owner], self.moment, self.population.device)

    def _refuse_on_real(self, name: str, what: str) -> None:
        if self.reveals is not None and name not in self.reveals:
            allowed = ", ".join(self.reveals) or "sums only"
            raise FedtideError(f"{what} asked for, which only a simulation knows; allowed: {allowed}")

    def arrivals(self, m: int) -> Tensor:
        """Draw `m` clients by the shift, from (seed, round) alone, sorted; whose privacy forbids it is passed over."""
        draw = partial(self.population.arrivals, moment=self.moment)
        clients, size = arrivals(self.ledger, draw, m, self.population.registered, self.moment.round)
        self.substituted += self.population.substituted(size, self.moment)
        return clients

    # -- asking -------------------------------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        clients: Tensor,
        payload: Payload,
        *,
        first: int | None = None,
        deadline: float | None = None,
        began: Tensor | None = None,
        sizes: Tensor | None = None,
        **options: Unpack[QuestionOptions],
    ) -> Reply:
        """Put a question to some clients and return their sums (see `fedtide.core.base.Timed.ask`)."""
        del sizes  # for transforms
        ask = make_ask(question, clients, payload, self.moment, self.queries, **options)
        check_ask(ask, self.population.registered, self.reveals)
        ask = self.vectors.add_forms(ask, payload)
        began = None if began is None else began[clients.argsort()]
        race = self._race(ask, bytes_down(payload, ask), began, first, deadline)
        race = replace(race, counts=self.vectors.keep_enough(ask, race.counts))
        self._note_work(ask.clients[race.counts])
        blocks = split_blocks(race.counts & ~self._silent_still(ask))
        done = join(self.engine.ask([ask.of(block) for block in blocks], payload), len(blocks))
        staged, done = done.keepers, self.vectors.open(ask, payload, done, self._closed(ask))
        self.memory.discard(client for client in staged if client in done.unopened)
        reply, seconds = self._reply(ask, race, done)
        self._close(ask, race, reply, seconds, done, payload)
        return reply if self.vectors.wire.divisor is None else without_count(reply)

    def _note_work(self, clients: Tensor) -> None:
        """Note the clients that work for the first time."""
        new = [client for client in clients.tolist() if client not in self.first_work]
        self.first_work.update(dict.fromkeys(new, self.moment.round))
        self._new += new

    def _race(self, ask: Ask, down: int, began: Tensor | None, first: int | None, deadline: float | None) -> Race:
        """Decide who counts before the work is run; until then an answer is taken to be as large as the payload."""
        clients, number = ask.clients, len(self.queries)
        if ask.question == "train":
            first = self.first if first is None else first
            deadline = self.deadline if deadline is None else deadline
        sent, since, ahead = None, None, torch.zeros(len(clients))
        size = down // max(len(clients), 1)
        if began is not None:
            sent = began.isinf()
            since = began.where(~sent, self.moment.seconds)
            ahead, down = self.moment.seconds - since, size * int(sent.sum())
        rows = self.population.counts(clients, "train", self.moment)
        seconds = self.clock.answers(ask, rows, size, size) - ahead
        counts = self.population.answers(clients, self.moment, number, since)
        counts &= eligible(self.ledger, clients, self.moment.round)
        if deadline is not None:
            counts &= seconds <= deadline
        able = counts & (rows > 0)  # a client without rows has nothing to say, and takes the place of none
        if first is not None:
            # Ties are broken at random: ids go group by group, so the lowest would be one group's.
            draw = Rng(self.population.seed).at(self.moment.round, number, "first").numpy()
            mixed = torch.from_numpy(draw.permutation(len(clients)))
            fastest = mixed[torch.where(able, seconds, torch.inf)[mixed].argsort(stable=True)][:first]
            counts &= torch.zeros_like(counts).index_fill_(0, fastest, True) | (rows == 0)
        wanted = len(clients) if first is None else min(first, len(clients))
        return Race(counts, able & ~counts, sent, ahead, rows, size, down, wanted, deadline)

    def _closed(self, ask: Ask) -> Mapping[int, list[int]]:
        """Return by slot the units that owners keep closed: a simulation has no owners."""
        return {}

    def _silent_still(self, ask: Ask) -> Tensor:
        """Return the mask (clients,) of those who said nothing the last time, and whose samples have not changed."""
        people, before, silent = self._silent.get(ask.question, (None, self.moment, ask.clients[:0]))
        still = torch.isin(ask.clients, silent)
        if people is not self.population or not still.any():
            return torch.zeros_like(still)
        return still & ~torch.isin(ask.clients, self.population.may_differ(self.moment, before))

    def _reply(self, ask: Ask, race: Race, done: BlockResult) -> tuple[Reply, float]:
        """Return the server's reply and the seconds that it waited, now that the size of answers is known."""
        clients = ask.clients
        answered, refused = (torch.tensor(ids, dtype=torch.int64) for ids in (done.clients, done.refused))
        whole = self.clock.answers(
            ask, race.rows, race.payload_bytes, done.up // max(len(answered) + len(done.unopened), 1)
        )
        left = whole - race.ahead
        seconds = left.clamp(0, race.deadline)
        waited = race.waited(seconds)
        due = race.counts
        if race.sent is not None:  # those passed over, or not done by the deadline, are still at work
            due = (left <= (_longest(seconds[race.counts]) if waited is None else waited)) & ~race.passed_over
        here = torch.isin(clients, answered)
        reply = Reply(
            done.total,
            {name: torch.stack(rows) for name, rows in done.revealed.items() if rows},
            answered,
            torch.where(race.ahead > 0, whole, seconds)[here],
            Cost(race.down, done.up),
            refused,
            clients[
                due & ~torch.isin(clients, torch.tensor(done.clients + done.refused + done.unopened, dtype=torch.int64))
            ],
        )
        return reply, _longest(seconds[here]) if waited is None else waited

    def _close(self, ask: Ask, race: Race, reply: Reply, seconds: float, done: BlockResult, payload: Payload) -> None:
        """End an ask: what its clients keep counts from now on; note the ask for the record and who was silent."""
        self.memory.commit(ask.version, done.keepers)
        keeping = torch.tensor(done.keepers, dtype=torch.int64)
        for question, (people, before, silent) in self._silent.items():
            self._silent[question] = people, before, silent[~torch.isin(silent, keeping)]
        if ask.question in self.unless_changed:
            asked = ask.clients[race.counts]
            answered = torch.cat([reply.clients, reply.refused, torch.tensor(done.unopened, dtype=torch.int64)])
            silent = asked[~torch.isin(asked, answered)]
            self._silent[ask.question] = self.population, self.moment, silent
        sent = payload if self.moment.round in self.replayable else None
        failed: dict[str, list[int]] = {}
        if not len(reply.clients) and not done.unopened:
            able = ask.clients[race.counts & (race.rows > 0)].tolist()
            failed = {NOT_FINITE: done.refused, ABSTAINED: [client for client in able if client not in done.refused]}
        query = Query(ask, race.sent, reply.clients, reply.refused, reply.cost, seconds, done.notes, sent, failed)
        self.queries.append(query)
        self.spent_on[ask.question] = self.spent_on.get(ask.question, Cost()) + reply.cost

    # -- judging ------------------------------------------------------------------------------------------------------

    def score(self, payload: Payload, clients: Tensor, **options: Unpack[ScoreOptions]) -> Scores:
        """Evaluate predictions on the clients' own rows (see `fedtide.core.base.Fleet.score`)."""
        scoring = self._scoring(clients, **options)
        rows = self.population.sizes(scoring.ask.clients, scoring.part, self.moment)
        blocks = blocks_of_clients(rows) if self.adapts and scoring.personal else _blocks_of_rows(rows)
        scores = concat_scores(self.engine.score([scoring.of(block) for block in blocks], payload))
        if not (scoring.record and self.vectors.wire.sums_scores):
            return scores
        return replace(scores, summed=True, by_sum=self._sum_scores(scoring, scores, payload))

    def _sum_scores(self, scoring: Scoring, scores: Scores, payload: Payload) -> SummedScores | None:
        """Release the sum of scores, and return the evaluation as it tells it."""
        ask = self.vectors.add_forms(scoring.as_sum(len(self.queries) + self._summed), payload)
        self._summed += 1
        counts = self.vectors.keep_enough(ask, torch.ones(len(ask.clients), dtype=torch.bool))
        block = Block(ask.of(counts), self.vectors.wire)
        for client, answer in answers_of(scores):
            if counts[ask.clients == client]:
                block.count(client, answer)
        return self.vectors.read_scores(self.vectors.open(ask, payload, block.result()).total)

    def _scoring(self, clients: Tensor, **options: Unpack[ScoreOptions]) -> Scoring:
        """Return the evaluation of some clients, with their true groups if these decide together."""
        scoring = make_scoring(clients, self.moment, len(self.queries), **options)
        if scoring.grouping != "oracle":
            return scoring
        return replace(scoring, group=self.population.group_at(self.moment)[scoring.ask.clients])

    # -- asking once more ---------------------------------------------------------------------------------------------

    def replay(
        self, question: str, state: State, owners: Tensor, *, part: str, grouping: Grouping = "client"
    ) -> tuple[Replayed, dict[int, Replayed]]:
        """Put a question of this round once more to each client whose answer counted, and evaluate the model of each.

        A client works with the same payload, memory and key, so its answer is the same bit for bit. Its update goes
        into the weights of `state`, and the rows of `owners` are predicted by what these would serve, without memory or
        adaptation. No memory, query, cost or time is kept. The work is one training and one pass over the rows of
        `owners` for each client. For a client that was asked twice in the round the first time is repeated.

        Args:
            question: a name in `Algorithm.works`.
            state: the server's state when the round began; a dataclass with `weights`, one model or a tuple of K.
            owners: sorted ids of the clients on whose rows the models are evaluated.
            part: part of their rows.
            grouping: which rows decide together.

        Returns:
            Scores of the weights of `state`, and by client the scores of the weights with its update. If there are
            none, the reason: the models of the round were mixed anew before any client was asked.

        Raises:
            FedtideError: the round is not one of `replayable`.
        """
        if self.moment.round not in self.replayable:
            raise FedtideError(f"round {self.moment.round} is not kept; allowed: {sorted(self.replayable)}")
        scoring = self._scoring(owners, part=part, personal=False, grouping=grouping)
        (received,) = self.engine.replay([Replay(None, scoring)], None, state)
        models: dict[int, Replayed] = {}
        for query in self.queries:
            if query.ask.question != question:
                continue
            clients = [client for client in query.answered.tolist() if client not in models]
            if not _sends(query, state.weights):
                why = "its models were made anew, before they were sent in this round, or since"
                models.update({client: Replayed(None, why) for client in clients})
                continue
            replays = [Replay(query.ask.of(query.ask.clients == client), scoring) for client in clients]
            models.update(zip(clients, self.engine.replay(replays, query.payload, state), strict=True))
        return received, models


def _sends(query: Query, weights: Weights | tuple[Weights, ...]) -> bool:
    """Tell whether clients in a slot were sent the model of that number, or other models that the server held."""
    ask = query.ask
    if ask.slot is None or not isinstance(query.payload, list):
        return True
    for k in ask.slot[torch.isin(ask.clients, query.answered)].unique().tolist():
        sent = query.payload[k]
        if not isinstance(weights, tuple):
            if not same(sent, weights):
                return False
        elif isinstance(sent, Weights):
            if k >= len(weights) or not same(sent, weights[k]):
                return False
        elif not all(any(same(model, other) for other in weights) for model in models_in(sent)):
            return False
    return True


def _longest(seconds: Tensor) -> float:
    return float(seconds.max()) if len(seconds) else 0.0


def _blocks_of_rows(rows: Tensor) -> list[Tensor]:
    """Cut positions of clients into at most `BLOCKS` blocks of about equally many rows, none below a batch."""
    if not len(rows):
        return []
    size = max(math.ceil(int(rows.sum()) / BLOCKS), ROWS)
    block = (rows.cumsum(0) - rows) // size
    return list(torch.arange(len(rows)).split(torch.unique_consecutive(block, return_counts=True)[1].tolist()))
