"""A fleet of real clients: it asks nodes over a carrier, and sums their answers as a simulation does."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from fedtide.core.base import Answer, Cost, Moment, Payload, QuestionOptions, Reply, Scores, Shard
from fedtide.core.errors import FedtideError, refused
from fedtide.core.memory import MemoryStore, Version
from fedtide.core.trees import same
from fedtide.fields.vocabulary import SHOWN
from fedtide.fleets.ask import Ask, BlockResult, Query, ScoreOptions, check_ask, make_ask, make_scoring
from fedtide.fleets.scoring import concat_scores
from fedtide.fleets.totals import PLAIN, Block, Vectors, bytes_down, join, split_blocks
from fedtide.remote.asks import (
    ABSTAINED,
    ANSWERED,
    AT_WORK,
    LATE,
    LOST,
    NOT_FINITE,
    REFUSED,
    UNOPENED,
    AskRecord,
)
from fedtide.remote.mailbox import Mailbox, counted_version, flight_of
from fedtide.remote.messages import Carrier
from fedtide.remote.node_answers import Post, Received, keep_wanted
from fedtide.remote.opening import LeftOut, MaskedSums, Opened
from fedtide.remote.released import ReleasedRounds
from fedtide.remote.schedule import Attendance, RealClock, RoundClock, Who
from fedtide.wire.answer_schema import Schemas, look
from fedtide.wire.ledger import Ledger, Line, Safe, arrivals, eligible
from fedtide.wire.masks import Bundle

LOOK = 0.2
"""Seconds between two looks at who is present."""

MADE_UP = -1
"""In the server's notes the client whose made-up rows tell what answers must look like."""

SIMULATION_ONLY = tuple(name for name, shown in SHOWN.items() if shown.kind == "truth")
"""Values that methods reveal and that no server of real clients knows."""

NOBODY = torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class RemoteFleet:
    """Real clients as a fleet.

    Sums are taken as in `SimulatedFleet`: over sorted client ids, in blocks cut from the clients asked, in float64.
    Memory stays at the nodes; the server knows which version of it counts. Rows never leave their node.

    `truth` and `substituted`, which a simulation knows of its clients, are None.

    Args:
        carrier: the way to the nodes.
        roster: ids of the clients of each node, by its name; in all 0 to n-1. Nodes may be added during a run: they are
            clients from the next round on.
        who: draws who takes part.
        clock: of rounds and deadlines.
        run: digest of the run; nodes refuse questions of another.
        reveals: values that the server may see per client, () for sums only.
        patience: seconds within which answers to a question count; an ask may allow fewer.
        fewest: number of clients that a round waits for before it begins, and of answers below which none is counted.
            Methods that wait for a number of their own have no such bound.
        first: number of answers to "train" that count, the earliest ones; an ask may say otherwise.
        deadline: seconds within which answers to "train" count; an ask may say otherwise.
        schemas: what answers must look like; None takes any, from nodes of this process.
        heaviest: largest weight that a client may give to a value.
        signed: tells whether a key for masks is signed by the registered key of its node, by its name.
        vectors: how sums are taken, masked if their wire is secure.
        waits: tells for a number of present clients whether a round waits for more; it is called again and again before
            a round begins.
    """

    carrier: Carrier
    roster: Mapping[str, Sequence[int]]
    who: Who
    clock: RealClock = RoundClock()
    _: KW_ONLY
    run: str = ""
    reveals: Sequence[str] = ()
    patience: float = 600.0
    fewest: int = 1
    first: int | None = None
    deadline: float | None = None
    schemas: Schemas | None = None
    heaviest: float = 1e6
    signed: Callable[[str, Bundle], bool] = lambda node, key: True
    vectors: Vectors = PLAIN
    waits: Callable[[int], bool] = lambda present: False
    truth: ClassVar[None] = None
    substituted: ClassVar[None] = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.reveals if name in SIMULATION_ONLY]
        if unknown:
            raise refused(
                "the method's reveals", unknown[0], "what real clients can tell, because only a simulation knows it"
            )
        self.attendance = Attendance(self.carrier, self.roster, self.who)
        self.record = AskRecord()
        self.released = ReleasedRounds(self.vectors.wire)
        self.memory = MemoryStore(None)
        self.moment = Moment(-1, 0, 0.0)
        self.queries: list[Query] = []
        self.spent = Cost()
        life = secrets.token_hex(4)  # a server that is started again must not take answers to its earlier self
        self._mail = Mailbox(
            self.carrier,
            self.clock,
            self.heaviest,
            self.run,
            life,
            self.memory,
            self.schemas,
            self.vectors.wire,
        )
        self._masked = MaskedSums(self._mail, self.vectors, self.released.offer, life, self.signed)
        self._left_out = LeftOut()
        self._elapsed: float | None = None
        self._began = False

    # -- time ---------------------------------------------------------------------------------------------------------

    def begin(self, moment: Moment) -> None:
        """Enter a moment: wait for the time of the round, and until enough clients are present."""
        self._end_round()
        self.moment = replace(moment, seconds=self.clock.begin(moment))
        self.queries, self._elapsed, self._began = [], None, True
        self.record.begin()
        self.attendance.enroll()
        while self.waits(present := self.attendance.look()) or present < self.fewest:
            self.clock.sleep(LOOK)
        shut = self._left_out.clients_in(moment.round)
        self.attendance.leave_out(shut, max(self.fewest, self.vectors.wire.fewest))
        if (before := self.released.attendance(moment.round)) is not None:
            self.attendance.present, self.attendance.willing = before

    def _end_round(self) -> None:
        """Write the line of the round that is over."""
        if self._began:
            elapsed, reachable = self.elapsed(), self.reachable.tolist()
            self.record.end_round(self.moment, elapsed, self.attendance.clients, self.attendance.nodes, reachable)
        self._began = False

    def elapsed(self) -> float:
        """Return the seconds between the beginning of this round and that of the next one."""
        if self._elapsed is None:
            self._elapsed = self.clock.elapsed(self.moment)
        return self._elapsed

    def add_server_time(self, seconds: float) -> None:
        """Do nothing: on a real clock the server's own work takes the time it takes."""

    @property
    def ledger(self) -> Ledger | None:
        """The releases of clients so far, and who may be asked; None if sums are not private."""
        return self.vectors.wire.ledger

    @property
    def safe(self) -> Safe | None:
        """The releases that no checkpoint holds yet; None if they are not kept."""
        return self.vectors.wire.safe

    # -- who ----------------------------------------------------------------------------------------------------------

    @property
    def clients(self) -> Tensor:
        """All ids of the roster, sorted, present or not."""
        return torch.arange(self.attendance.clients)

    @property
    def reachable(self) -> Tensor:
        """Ids that could answer now, sorted: those that were present when the round began."""
        reachable = self.attendance.who.reachable(self.attendance.willing, self.moment)
        return reachable[eligible(self.ledger, reachable, self.moment.round)]

    def arrivals(self, m: int) -> Tensor:
        """Draw `m` of the present clients, from (seed, round) alone, sorted."""

        def draw(size: int) -> Tensor:
            return self.attendance.who.arrivals(size, self.attendance.willing, self.moment)

        clients, _ = arrivals(self.ledger, draw, m, self.attendance.clients, self.moment.round)
        self.record.arrivals[str(m)] = clients.tolist()
        return clients

    @property
    def true_groups(self) -> Tensor:
        """Raise: only a simulation knows them."""
        raise FedtideError("the true groups are asked for, which only a simulation knows")

    @property
    def all_rows(self) -> Shard:
        """Raise: no server has them."""
        raise FedtideError("all clients' rows are asked for, which only a simulation knows")

    @property
    def names(self) -> list[str]:
        """Names of the clients: the name of the node, with a number if the node has several clients."""
        return self.attendance.names

    def judged(self, clients: Tensor, part: str) -> Tensor:
        """Keep the clients whose nodes were present when the round began."""
        return clients[torch.isin(clients, self.attendance.present)]

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
        """Put a question to some clients and return the sums of those that answer in time.

        See `fedtide.core.base.Timed.ask`. With `began`, questions that are not answered yet stay with their nodes, and
        are asked after by a later ask. A client does the work when it is asked: with the rows, the key and the moment
        of that round, whenever its answer is counted.
        """
        del sizes  # for transforms
        ask = make_ask(question, clients, payload, self.moment, self.queries, **options)
        check_ask(ask, self.attendance.clients, self.reveals)
        if question == "train":
            first = self.first if first is None else first
            deadline = self.deadline if deadline is None else deadline
        first = len(ask.clients) if first is None else first
        seconds = self.patience if deadline is None else min(self.patience, deadline)
        start = self.clock.monotonic()
        self._mail.open((self.moment.round, len(self.queries)), self.attendance.node_of)
        if self.schemas is not None and self.schemas.memory is None:
            self.schemas.memory = self.memory.read(MADE_UP, ask.version)
        ask = self.vectors.add_forms(ask, payload)
        sent = None if began is None else began[clients.argsort()].isinf()
        if lines := self.released.lines(self.moment.round, ask.number):
            reply = self._replay_released(ask, payload, lines)
        elif self.vectors.wire.secure and ask.forms is not None:
            reply = self._count("ask", ask, None, first, payload, self._open_masked(ask, payload, seconds, first))
        else:
            self._send(ask, payload, seconds, first, sent)
            reply = self._count("ask" if sent is None else "flight", ask, sent, first, payload, None)
        waited = self.clock.answered(self.clock.monotonic() - start)
        cost = Cost(*(sum(line[way] for line in self._mail.nodes.values()) for way in ("down", "up")))
        self.queries.append(Query(ask, sent, reply.clients, reply.refused, cost, waited))
        self.spent = Cost(self.spent.down + cost.down, self.spent.up + cost.up)
        return reply

    def _asked(self, ask: Ask) -> Tensor:
        """Return the mask (clients,) of those that are asked at all."""
        answering = self.attendance.who.answers(ask.clients, self.moment, ask.number)
        return answering & eligible(self.ledger, ask.clients, self.moment.round)

    def _send(self, ask: Ask, payload: Payload, seconds: float, first: int, sent: Tensor | None) -> None:
        """Send a question, and listen until there are enough answers, or it is late.

        With `sent` it goes to those clients anew, and others are at work on an earlier question. Each of these
        questions has an end of its own.
        """
        asked = self._asked(ask)
        if sent is None:
            self._mail.send(ask.of(asked), payload, seconds)
            until = self.clock.monotonic() + seconds  # from when it went out: before, answers' schemas may be tried
            return self._mail.listen("ask", ask.clients[asked].tolist(), first, until)
        self._mail.send_again(ask.of(~sent), payload, seconds)
        self._mail.send(ask.of(asked & sent), payload, seconds, "flight")
        return self._mail.listen("flight", ask.clients[asked | ~sent].tolist(), first, math.inf)

    def _open_masked(self, ask: Ask, payload: Payload, seconds: float, first: int) -> Opened:
        """Send a question whose answers are masked, and have their sums opened."""
        opened = self._masked.open(ask.of(self._asked(ask)), payload, seconds, first)
        self._left_out.note(self.moment.round, opened)
        return opened

    # -- counting -----------------------------------------------------------------------------------------------------

    def _count(
        self, post: Post, ask: Ask, sent: Tensor | None, first: int, payload: Payload, opened: Opened | None
    ) -> Reply:
        """End an ask: add up what counts, note which memory that is, and say of every client what became of it."""
        answers = self._mail.received(post, set(ask.clients.tolist()))
        answered = [client for client, answer in answers.items() if answer.word == ANSWERED][:first]
        enough = set(answered) if len(answered) >= self.fewest or post == "flight" else set()
        counted = keep_wanted(enough, ask, answers) if opened is None else enough & opened.clients
        blocks = split_blocks(torch.tensor([client in counted for client in ask.clients.tolist()], dtype=torch.bool))
        done = join((_block(ask.of(block), answers) for block in blocks), len(blocks))
        if ask.forms is not None:
            self.released.note(ask.version, self.attendance, counted, answers)
        sums = done.vectors if opened is None else opened.sums
        done = self.vectors.open(ask, payload, replace(done, vectors=sums))
        unopened = dict.fromkeys(done.unopened, UNOPENED)
        if opened is not None:
            unopened = {**dict.fromkeys(enough - counted, UNOPENED), **opened.why, **unopened}
        unmet = {} if opened is None else opened.unmet
        words = self._words(post, ask, answers, counted - unopened.keys(), enough - counted, unopened, unmet)
        refused_ids = [client for client, word in words.items() if word.startswith(REFUSED) or word == NOT_FINITE]
        silent = (ABSTAINED,) if sent is None else (ABSTAINED, LOST)
        reply = Reply(
            done.total,
            {name: torch.stack(rows) for name, rows in done.revealed.items() if rows},
            torch.tensor(done.clients, dtype=torch.int64),
            torch.tensor(
                [self.clock.answered(answers[client].seconds) for client in done.clients], dtype=torch.float64
            ),
            Cost(bytes_down(payload, ask if sent is None else ask.of(sent)), done.up),
            torch.tensor(refused_ids, dtype=torch.int64),
            torch.tensor([client for client, word in words.items() if word.startswith(silent)], dtype=torch.int64),
        )
        return self._close(post, ask, sent, reply, answers, words)

    def _replay_released(self, ask: Ask, payload: Payload, lines: Sequence[Line]) -> Reply:
        """End an ask whose sums were released before: they are taken as they were, and no client works again.

        If they are gone the question has no answer, and the ledger counts what was spent on it.
        """
        sums, answers = self.released.read(ask, lines)
        gone = f"{LOST}its sum was released before the server ended, and is gone"
        words = {client: ANSWERED if client in answers else gone for client in ask.clients.tolist()}
        seconds = [self.clock.answered(answer.seconds) for answer in answers.values()]
        total, clients = self.vectors.read_released(ask, payload, sums), torch.tensor([*answers], dtype=torch.int64)
        reply = Reply(total, {}, clients, torch.tensor(seconds, dtype=torch.float64), Cost(), NOBODY, NOBODY)
        return self._close("ask", ask, None, reply, answers, words)

    def _words(
        self,
        post: Post,
        ask: Ask,
        answers: Mapping[int, Received],
        counted: set[int],
        left_over: set[int],
        unopened: Mapping[int, str],
        unmet: Mapping[int, str],
    ) -> dict[int, str]:
        """Return the word of the record for every client.

        Args:
            post: kind of the question.
            ask: the question.
            answers: what came of clients.
            counted: clients in the sums.
            left_over: clients that answered, in whose sums the owners want more clients.
            unopened: reasons of clients whose sum was not opened.
            unmet: reasons of clients that were not asked.
        """
        words = {}
        for client in ask.clients.tolist():
            answer = answers.get(client)
            if answer is None:
                asked = self._mail.asked(post, client) is not None
                word = LATE if asked else unmet.get(client, f"{LOST}it was not asked")
            elif answer.word != ANSWERED or client in counted:
                word = answer.word
            elif client in unopened:
                word = unopened[client]
            elif client in left_over and post == "ask":
                word = f"{REFUSED}its owner wants {answer.fewest} clients in a sum, and fewer answered"
            else:
                word = LATE
            words[client] = AT_WORK if word == LATE and post == "flight" else word
        return words

    def _close(
        self,
        post: Post,
        ask: Ask,
        sent: Tensor | None,
        reply: Reply,
        answers: Mapping[int, Received],
        words: Mapping[int, str],
    ) -> Reply:
        """Note which memory counts now and who is still at work, forget the rest of the ask, and record it."""
        changed = []
        made_up = None if self.schemas is None else self.schemas.memory
        if made_up is not None and look(made_up) != look(self.memory.read(MADE_UP, ask.version)):
            self.memory.stage(MADE_UP, made_up)
            changed.append(MADE_UP)
        for client, word in words.items():
            row = self.memory.read(client, ask.version) or {"counted": None, "flight": None}
            changes: dict[str, Any] = {}
            if word == ANSWERED and answers[client].keeps:
                changes["counted"] = torch.tensor(answers[client].ask.version)
            if post == "flight":
                asked = self._mail.asked(post, client)
                changes["flight"] = flight_of(asked) if word == AT_WORK and asked is not None else None
            if not same(row | changes, row):
                self.memory.stage(client, row | changes)
                changed.append(client)
            if post == "ask" or word != AT_WORK:
                self._mail.forget(post, client)
            self._mail.node(self._mail.node_of[client])["clients"][str(client)] = word
        self.memory.commit(ask.version, changed)
        self.record.add(ask, sent, reply, self._mail.nodes)
        return reply

    def counted(self, client: int) -> Version | None:
        """Return the version of a client's memory that counts now."""
        version = counted_version(self.memory.read(client, (self.moment.round, len(self.queries))))
        return None if version is None else (version[0], version[1])

    def record_lines(self) -> list[dict[str, Any]]:
        """Return the lines of `asks.jsonl` for the rounds since the last call, as plain JSON."""
        self._end_round()
        return self.record.take()

    # -- scoring ------------------------------------------------------------------------------------------------------

    def score(self, payload: Payload, clients: Tensor, **options: Unpack[ScoreOptions]) -> Scores:
        """Let clients evaluate predictions on their own rows, and send sums (see `fedtide.core.base.Fleet.score`).

        A client that does not answer in time counts as having no rows.
        """
        scoring = make_scoring(clients, self.moment, len(self.queries), **options)
        if scoring.grouping == "oracle":
            raise refused("decide_per", "oracle", "client, batch, sample: real clients have no true group")
        if scoring.pooled:
            raise refused("metrics", ", ".join(scoring.pooled), "what real clients send of an evaluation")
        ids = scoring.ask.clients.tolist()
        self._mail.open((self.moment.round, len(self.queries)), self.attendance.node_of)
        header = {name: getattr(scoring, name) for name in ("part", "personal", "grouping", "other")}
        self._mail.send(scoring.ask, payload, self.patience, "score", **header)
        self._mail.listen("score", ids, len(ids), self.clock.monotonic() + self.patience)
        answers, zero = self._mail.received("score", set(ids)), torch.zeros(1, dtype=torch.float64)
        for client in ids:
            self._mail.forget("score", client)
        scores = {client: answer.content for client, answer in answers.items() if answer.content}
        return concat_scores(scores.get(client) or Scores(torch.tensor([client]), zero, zero, zero) for client in ids)


def _block(ask: Ask, answers: Mapping[int, Received]) -> BlockResult:
    block = Block(ask)
    for client in ask.clients.tolist():
        block.count(client, Answer(answers[client].content["total"], answers[client].content["rows"]))
    return replace(block.result(), notes={})
