"""The simulated fleet: everything a fleet does except running the work, which an engine does."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedtide.core import sums
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, children, is_node, same, size_in_bytes
from fedtide.core.types import Cost, Grouping, Moment, Payload, Reply, Scores, Slot, State, Weights
from fedtide.data.population import Population
from fedtide.fleets.clock import Clock, Load, SteadyClock
from fedtide.fleets.engine import Engine
from fedtide.fleets.host import Again, Done, Job, Judged, joined
from fedtide.learn.task import ROWS

BLOCKS = 16
"""Into how many blocks a cohort is cut. Fixed, so that no sum depends on the number of workers."""


@dataclass(frozen=True)
class Asked:
    """What the record keeps of one ask; the server's code never sees it.

    sent: who was sent the question now; None where that is all of `clients`, and nobody was asked after who began in an
    earlier round. slot: of each of `clients`. payload: what was sent, in rounds whose questions may be put again; the
    payload itself and no copy.
    """

    question: str
    clients: Tensor
    answered: Tensor
    refused: Tensor
    cost: Cost
    seconds: float
    notes: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    payload: Payload = field(default=None, repr=False)
    slot: Slot | None = None
    sent: Tensor | None = None


class SimulatedFleet:
    """A population as a fleet.

    Sums are taken over sorted client ids, in blocks cut from the number of clients asked, so neither the engine, nor
    the number of its workers, nor a drop-out changes how the rest is summed. Memory is written when an ask ends, for
    counted answers only.

    Args:
        population: who there is.
        engine: runs the work.
        memory: the clients' memory.
        clock: how long answers take.
        reveals: what the server may see per client, () for sums only; None leaves it to the algorithm.
        repeatable: rounds whose questions may be put again when they are over (`again`): in these the ledger holds on
            to what was sent, and the clients' memory to what it was.
        adapts: whether clients work before they are judged, so that the work is shared out by clients and not by rows.
        first: of whoever is asked to "train" only the first so many to answer count, unless the ask says otherwise.
        deadline: and only within so many seconds.
    """

    def __init__(
        self,
        population: Population,
        engine: Engine,
        memory: MemoryStore,
        clock: Clock = SteadyClock(),
        *,
        reveals: Sequence[str] | None = None,
        repeatable: Collection[int] = (),
        adapts: bool = False,
        first: int | None = None,
        deadline: float | None = None,
    ) -> None:
        self.population = population
        self.engine = engine
        self.memory = memory
        self.clock = clock
        self.reveals = reveals
        self.repeatable = frozenset(repeatable)
        self.adapts = adapts
        self.first = first
        self.deadline = deadline
        self.served = 0.0
        self.spent = Cost()
        self.moment = Moment(-1, 0, 0.0)
        self.ledger: list[Asked] = []
        self.filled_in = 0

    # -- time ---------------------------------------------------------------------------------------------------------

    def begin(self, moment: Moment) -> None:
        """Enter a moment."""
        self.moment = moment
        self.ledger = []
        self.filled_in = 0
        self.served = 0.0
        self.memory.hold((moment.round, 0) if moment.round in self.repeatable else None)

    def elapsed(self) -> float:
        """Simulated seconds since `begin`, at least until somebody is awake; the time before round 0 does not count."""
        if self.moment.round < 0:
            return 0.0
        took = self.clock.round([asked.seconds for asked in self.ledger], self.served)
        return max(took, self.population.wait(self.moment))

    def spend(self, seconds: float) -> None:
        """Put so many seconds of the server's own work on the clock (see `fedtide.core.types.Fleet.spend`)."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise FedtideError(f"found {seconds} seconds of server work; allowed: 0 or more")
        self.served += seconds

    # -- who ----------------------------------------------------------------------------------------------------------

    @property
    def clients(self) -> Tensor:
        """Every registered id, sorted."""
        return self.population.clients

    @property
    def reachable(self) -> Tensor:
        """The ids that could answer now, sorted."""
        return self.population.reachable(self.moment)

    @property
    def truth(self) -> Tensor:
        """The true group of every client now (see `fedtide.core.types.Fleet.truth`)."""
        if self.reveals is not None and "truth" not in self.reveals:
            allowed = ", ".join(self.reveals) or "sums only"
            raise FedtideError(f"the true groups are asked for, which nobody knows; allowed: {allowed}")
        return self.population.group_at(self.moment)

    def arrivals(self, m: int) -> Tensor:
        """`m` clients drawn by the shift from (seed, round) alone, sorted."""
        self.filled_in += self.population.filled_in(m, self.moment)
        return self.population.arrivals(m, self.moment)

    # -- asking -------------------------------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        clients: Tensor,
        payload: Payload,
        *,
        slot: Slot | None = None,
        slots: int | None = None,
        reveal: Sequence[str] = (),
        first: int | None = None,
        deadline: float | None = None,
        began: Tensor | None = None,
        passes: float | None = None,
    ) -> Reply:
        """Put one question to some clients and get their sums back (see `fedtide.core.types.Fleet.ask`)."""
        clients, order = clients.sort()
        self._check(question, clients, reveal)
        slot = None if slot is None else slot[order]
        fresh = torch.ones(len(clients), dtype=torch.bool) if began is None else began[order].isinf()
        since = None if began is None else began[order].where(~fresh, self.moment.seconds)
        # How long each has been at it: whoever began before this round is so much nearer to its answer.
        ahead = torch.zeros(len(clients)) if since is None else self.moment.seconds - since
        number = len(self.ledger)
        if question == "train":
            first = self.first if first is None else first
            deadline = self.deadline if deadline is None else deadline
        down = _down(payload, slot, len(clients))
        # Who counts is decided before the work is run: until then an answer is taken to be as large as what was sent.
        each = down // max(len(clients), 1)
        load = Load(question, self.population.counts(clients, "train", self.moment), each, each, passes)
        seconds = self.clock.answers(clients, self.moment, load) - ahead
        dispatched = self._dispatched(clients, number, load.rows, seconds, first, deadline, since)
        jobs = [
            self._job(question, self._purpose(question), clients[at], None if slot is None else slot[at], tuple(reveal))
            for at in in_blocks(dispatched)
        ]
        total, blocks = None, []
        for done in self.engine.ask(jobs, payload):
            total = sums.merge(total, done.total)
            blocks.append(replace(done, total=None))
            del done  # its sum is large, and the next block begins before the name is bound again
        sent = sum(done.up for done in blocks) // max(sum(len(done.clients) for done in blocks), 1)
        seconds = (self.clock.answers(clients, self.moment, replace(load, up=sent)) - ahead).clamp(0, deadline)
        down = down if began is None else each * int(fresh.sum())
        wanted = len(clients) if first is None else min(first, len(clients))
        short = int(dispatched.sum()) < wanted
        # Whoever is late or never answers is waited for until the deadline, where there is one. Those who have been at
        # it since earlier rounds are waited for until their answers are due: nobody else could tell when that is.
        waited = deadline if short else None
        if short and waited is None and since is not None and len(seconds):
            waited = float(seconds.max())
        ended = waited if waited is not None else float(seconds[dispatched].max()) if dispatched.any() else 0.0
        silent = _silent(blocks, clients, dispatched if since is None else seconds <= ended)
        reply = _reply(blocks, total, clients, silent, seconds, down, tuple(reveal))
        if slot is not None and reply.total is not None:
            width = slots if slots is not None else len(payload)
            reply = replace(reply, total=[reply.total.get(k) for k in range(width)])
        held = payload if self.moment.round in self.repeatable else None
        self._close(
            question, clients, None if began is None else clients[fresh], reply, blocks, number, held, slot, waited
        )
        return replace(reply, total=sums.finish(reply.total))

    def _check(self, question: str, clients: Tensor, reveal: Sequence[str]) -> None:
        """Raise on what no fleet of real clients could answer."""
        hidden = [name for name in reveal if self.reveals is not None and name not in self.reveals]
        if hidden:
            allowed = ", ".join(self.reveals or ()) or "sums only"
            raise FedtideError(f"'{question}' asks to see {', '.join(hidden)} per client; allowed: {allowed}")
        if len(clients) and (clients[0] < 0 or clients[-1] >= self.population.registered):
            raise FedtideError(
                f"'{question}' asks client {int(clients[-1])}; allowed: registered clients, 0 to "
                f"{self.population.registered - 1}"
            )
        if (clients.diff() == 0).any():
            raise FedtideError(f"'{question}' asks client {int(clients[1:][clients.diff() == 0][0])} twice")

    def _dispatched(
        self,
        clients: Tensor,
        number: int,
        rows: Tensor,
        seconds: Tensor,
        first: int | None,
        deadline: float | None,
        since: Tensor | None,
    ) -> Tensor:
        """Whose work will count (clients,) bool: decided from the clock before any of it is run."""
        counts = self.population.answers(clients, self.moment, number, since)
        if deadline is not None:
            counts &= seconds <= deadline
        if first is not None:
            # Among equally fast ones chance decides: ids go group by group, so the lowest would be one group's.
            draw = Rng(self.population.seed).at(self.moment.round, number, "first").numpy()
            mixed = torch.from_numpy(draw.permutation(len(clients)))
            # Whoever holds nothing has nothing to say, and takes nobody's place.
            able = counts & (rows > 0)
            fastest = mixed[torch.where(able, seconds, torch.inf)[mixed].argsort(stable=True)][:first]
            counts &= torch.zeros_like(counts).index_fill_(0, fastest, True) | (rows == 0)
        return counts

    def _purpose(self, question: str) -> str:
        """The question's name in the keys of its clients: a second ask in the round shuffles differently."""
        before = sum(asked.question == question for asked in self.ledger)
        return f"{question}#{before}" if before else question

    def _job(
        self,
        question: str,
        purpose: str,
        clients: Tensor,
        slot: Tensor | None,
        reveal: tuple[str, ...] = (),
        part: str = "",
        personal: bool = True,
        grouping: Grouping = "client",
    ) -> Job:
        now = (self.moment.round, len(self.ledger))
        rows = [self.memory.reference(client, now) if personal else None for client in clients.tolist()]
        return Job(question, purpose, self.moment, clients, slot, rows, reveal, part, personal, grouping)

    def _close(
        self,
        question: str,
        clients: Tensor,
        sent: Tensor | None,
        reply: Reply,
        blocks: list[Done],
        number: int,
        payload: Payload,
        slot: Slot | None,
        waited: float | None,
    ) -> None:
        """End an ask: write memory, for counted answers only, and note it in the ledger."""
        for done in blocks:
            for client, row in done.memory.items():
                self.memory.commit(client, (self.moment.round, number), row)
        notes = {client: note for done in blocks for client, note in done.notes.items()}
        took = float(reply.seconds.max()) if len(reply.seconds) else 0.0
        took = took if waited is None else waited
        asked = Asked(question, clients, reply.clients, reply.refused, reply.cost, took, notes, payload, slot, sent)
        self.ledger.append(asked)
        self.spent = Cost(self.spent.down + reply.cost.down, self.spent.up + reply.cost.up)

    # -- judging ------------------------------------------------------------------------------------------------------

    def score(
        self,
        payload: Payload,
        clients: Tensor,
        *,
        slot: Slot | None = None,
        part: str = "test",
        personal: bool = True,
        grouping: Grouping = "client",
    ) -> Scores:
        """Judge predictions on the clients' own rows (see `fedtide.core.types.Fleet.score`).

        `personal = False` judges what the server sends: without memory, and nobody adapts. `grouping` says which rows
        decide together.
        """
        clients, order = clients.sort()
        slot = None if slot is None else slot[order]
        rows = self.population.sizes(clients, part, self.moment)
        jobs = [
            self._job("", "adapt", clients[at], None if slot is None else slot[at], (), part, personal, grouping)
            for at in (_blocks_of_clients(rows) if self.adapts and personal else _blocks_of_rows(rows))
        ]
        return joined(self.engine.score(jobs, payload))

    # -- asking again -------------------------------------------------------------------------------------------------

    def again(
        self, question: str, state: State, owners: Tensor, *, part: str, grouping: Grouping = "client"
    ) -> tuple[Judged, dict[int, Judged]]:
        """Put a question of this round again to everyone whose answer counted, and judge the model of each of them.

        A client does what it did, with what it was sent, what it kept then and the same key, so that its answer is the
        same bit for bit. Its update goes into the weights of `state`, and whoever `owners` are is judged by what these
        would serve, without memory, and nobody adapts. Nothing is kept: no memory, ledger, cost or seconds. The work is
        one training and one pass over the rows of `owners` for each client. Of a client that was asked twice in the
        round it is the first time.

        Args:
            question: a name in `Algorithm.works`.
            state: what the server had when the round began; a dataclass with `weights`, one model or a tuple of K.
            owners: ids, sorted: the clients on whose rows the models are judged.
            part: of their rows.
            grouping: which rows decide together.

        Returns:
            How the weights of `state` do, and by client how those with its update do; or why that cannot be said, as
            in a round whose models were mixed anew before anybody was asked.

        Raises:
            FedtideError: the round is not one of `repeatable`.
        """
        if self.moment.round not in self.repeatable:
            raise FedtideError(f"round {self.moment.round} is not kept; allowed: {sorted(self.repeatable)}")
        judged = Job("", "", self.moment, owners, None, [None] * len(owners), (), part, False, grouping)
        (received,) = self.engine.again([Again(None, judged)], None, state)
        models: dict[int, Judged] = {}
        times = 0
        for number, asked in enumerate(self.ledger):
            if asked.question != question:
                continue
            purpose = f"{question}#{times}" if times else question
            times += 1
            clients = [client for client in asked.answered.tolist() if client not in models]
            if not _sends(asked, state.weights):
                why = "its models were made anew, before they were sent in this round, or since"
                models.update({client: Judged(None, why) for client in clients})
                continue
            jobs = [Again(self.repeated(asked, number, client, purpose), judged) for client in clients]
            models.update(zip(clients, self.engine.again(jobs, asked.payload, state), strict=True))
        return received, models

    def repeated(self, asked: Asked, number: int, client: int, purpose: str) -> Job:
        """The job of one client of an ask that is over."""
        slot = None if asked.slot is None else asked.slot[asked.clients == client]
        row = self.memory.reference(client, (self.moment.round, number))
        return Job(asked.question, purpose, self.moment, torch.tensor([client]), slot, [row])


def _sends(asked: Asked, held: Weights | tuple[Weights, ...]) -> bool:
    """Whether who was asked in a slot was sent the model of that number, or other models that the server held."""
    if asked.slot is None or not isinstance(asked.payload, list):
        return True
    answered = asked.slot[torch.isin(asked.clients, asked.answered)]
    for k in answered.unique().tolist():
        sent = asked.payload[k]
        if not isinstance(held, tuple):
            if not same(sent, held):
                return False
        elif isinstance(sent, Weights):
            if k >= len(held) or not same(sent, held[k]):
                return False
        elif not all(any(same(each, known) for known in held) for each in _models(sent)):
            return False
    return True


def _models(payload: Payload) -> list[Weights]:
    """All models in a payload."""
    if isinstance(payload, Weights):
        return [payload]
    return [model for _, child in children(payload) for model in _models(child)] if is_node(payload) else []


def _reply(
    blocks: list[Done],
    total: Tree,
    clients: Tensor,
    silent: Tensor,
    seconds: Tensor,
    down: int,
    reveal: tuple[str, ...],
) -> Reply:
    answered = torch.tensor([client for done in blocks for client in done.clients], dtype=torch.int64)
    refused = torch.tensor([client for done in blocks for client in done.refused], dtype=torch.int64)
    rows = {name: [row for done in blocks for row in done.revealed[name]] for name in reveal}
    return Reply(
        total if len(answered) else None,
        {name: torch.stack(row) for name, row in rows.items() if row},
        answered,
        seconds[torch.isin(clients, answered)],
        Cost(down, sum(done.up for done in blocks)),
        refused,
        silent,
    )


def _silent(blocks: list[Done], clients: Tensor, due: Tensor) -> Tensor:
    """Those of the clients that are due of whom nothing came."""
    heard = torch.tensor([client for done in blocks for client in (*done.clients, *done.refused)], dtype=torch.int64)
    return clients[due & ~torch.isin(clients, heard)]


def in_blocks(dispatched: Tensor) -> list[Tensor]:
    """Positions of the clients whose work is run, in blocks cut from all that were asked."""
    cut = torch.arange(len(dispatched)).tensor_split(max(min(BLOCKS, len(dispatched)), 1))
    return [block[dispatched[block]] for block in cut if dispatched[block].any()]


def _blocks_of_clients(rows: Tensor) -> list[Tensor]:
    """Positions of clients in at most `BLOCKS` blocks of about equally many."""
    return list(torch.arange(len(rows)).tensor_split(max(min(BLOCKS, len(rows)), 1)))


def _blocks_of_rows(rows: Tensor) -> list[Tensor]:
    """Positions of clients in at most `BLOCKS` blocks of about equally many rows, none smaller than a batch."""
    if not len(rows):
        return []
    size = max(math.ceil(int(rows.sum()) / BLOCKS), ROWS)
    block = (rows.cumsum(0) - rows) // size
    return list(torch.arange(len(rows)).split(torch.unique_consecutive(block, return_counts=True)[1].tolist()))


def _down(payload: Payload, slot: Slot | None, clients: int) -> int:
    """Bytes that go down: everyone receives the payload, or its slot's entry."""
    if slot is None:
        return size_in_bytes(payload) * clients
    return sum(size_in_bytes(payload[k]) * int((slot == k).sum()) for k in slot.unique().tolist())
