"""A fleet of real clients: it asks nodes over a carrier, and sums their answers as a simulation does."""

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from fedtide.core.base import Answer, Cost, Moment, Payload, QuestionOptions, Reply, Scores, Shard, Traits
from fedtide.core.errors import FedtideError, refused
from fedtide.core.memory import MemoryStore, Version
from fedtide.core.stopwatch import Stopwatch
from fedtide.core.trees import same
from fedtide.fields.vocabulary import SHOWN
from fedtide.fleets.ask import (
    ABSTAINED,
    NOT_FINITE,
    Ask,
    BlockResult,
    Query,
    ScoreOptions,
    check_ask,
    make_ask,
    make_scoring,
)
from fedtide.fleets.scoring import concat_scores
from fedtide.fleets.totals import ALL, PLAIN, Block, Vectors, bytes_down, join, split_blocks
from fedtide.remote.asks import (
    ANSWERED,
    AT_WORK,
    LATE,
    LOST,
    REFUSED,
    TOO_FEW,
    UNOPENED,
    AskRecord,
    LastAnswer,
    find_failed,
)
from fedtide.remote.mailbox import Mailbox, counted_version, flight_of
from fedtide.remote.messages import Carrier
from fedtide.remote.node_answers import Post, Received, keep_wanted
from fedtide.remote.opening import LeftOut, MaskedSums, Opened
from fedtide.remote.schedule import Attendance, RealClock, RoundClock, Who
from fedtide.wire.answer_schema import look
from fedtide.wire.ledger import Ledger, Line, arrivals, eligible
from fedtide.wire.pipeline import Wire
from fedtide.wire.scores import is_score

LOOK = 0.2
"""Seconds between two looks at who is present."""

MADE_UP = -1
"""In the server's notes the client whose made-up rows tell what answers must look like."""

SIMULATION_ONLY = tuple(name for name, shown in SHOWN.items() if shown.kind == "truth")
"""Values that methods reveal and that no server of real clients knows."""

UNITS: Mapping[str, str] = {"clusters": "cluster", "branches": "branch", "mixture": "component"}
"""Names of the models among which clients choose."""

NOBODY = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class ReleasedRounds:
    """The releases of a server until a checkpoint counts on them: rounds of before are played again with them.

    Args:
        wire: as the server knows it; without noise nothing is kept.
    """

    wire: Wire

    def lines(self, number: int, ask: int | None = None) -> list[Line]:
        """Return the releases of a round, or of one of its questions, before this server was started."""
        ledger = self.wire.ledger
        return [] if ledger is None or self.wire.safe is None else ledger.of(number, ask)

    def attendance(self, number: int) -> tuple[Tensor, Tensor] | None:
        """Settle the rounds before one, and return who was present and willing in it; None if nothing is released."""
        ledger, safe = self.wire.ledger, self.wire.safe
        if ledger is None or safe is None:
            return None
        safe.settle(number, ledger.lines)
        lines = self.lines(number)
        notes = safe.noted((number, lines[0].ask)) if lines else None
        if notes is None:
            return None
        present, willing = (torch.tensor(notes[name], dtype=torch.int64) for name in ("present", "willing"))
        return present, willing

    def note(
        self, version: Version, attendance: Attendance, counted: set[int], answers: Mapping[int, Received]
    ) -> None:
        """Keep what must be known of a question beside its sums, if the server is killed before its checkpoint."""
        if self.wire.safe is not None:
            clients = sorted(counted)
            notes = {
                "present": attendance.present.tolist(),
                "willing": attendance.willing.tolist(),
                "kept": [client for client in clients if answers[client].keeps],
                "seconds": {str(client): answers[client].seconds for client in clients},
            }
            self.wire.safe.note(version, notes)

    def read(self, ask: Ask, lines: Sequence[Line]) -> tuple[dict[int, Tensor], dict[int, Received]]:
        """Return the sums of a question that are not gone, by slot or 0, and the answers of the clients in them."""
        safe = self.wire.safe
        assert safe is not None
        notes = safe.noted(ask.version) or {"seconds": {}, "kept": []}
        seconds = {int(client): seconds for client, seconds in notes["seconds"].items()}
        possible = set(ask.clients.tolist()) & seconds.keys()
        sums, clients = dict[int, Tensor](), list[int]()
        for line in lines:
            fits = line.question == ask.question and set(line.clients) <= possible
            if fits and (total := safe.read_sum(line)) is not None:
                sums[line.slot or ALL] = total
                clients += line.clients
        answers = {
            client: Received(ANSWERED, None, client in notes["kept"], ask, seconds[client])
            for client in sorted(clients)
        }
        return sums, answers

    def offer(self, ask: Ask) -> None:
        """Count a round of clients that are asked to open a sum, as their nodes do before they show anything.

        All evaluations are planned, so one that is not opened takes no room.
        """
        ledger, safe, number, clients = self.wire.ledger, self.wire.safe, ask.version[0], ask.clients.tolist()
        if is_score(ask.question):
            return
        if ledger is not None and ledger.offer(number, clients) and safe is not None:
            safe.offer(number, clients)


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
        traits: of the method: values that the server may see per client, and the answers and seconds of "train".
        run: digest of the run; nodes refuse questions of another.
        patience: seconds within which answers to a question count; an ask may allow fewer.
        fewest: number of clients that a round waits for before it begins, and of answers below which none is counted.
            Methods that wait for a number of their own have no such bound.
        heaviest: largest weight that a client may give to a value.
        signed: tells whether a key for masks, and for which sum, is signed by the registered key of its node, by its
            name.
        said: file of the keys for masks that nodes have said; None keeps them in memory.
        vectors: how sums are taken, masked if their wire is secure, and what answers must look like.
        waits: tells for a number of present clients whether a round waits for more; it is called again and again before
            a round begins.

    Attributes:
        waited: seconds that rounds waited before they began, for their time and for clients.
    """

    carrier: Carrier
    roster: Mapping[str, Sequence[int]]
    who: Who
    clock: RealClock = RoundClock()
    _: KW_ONLY
    traits: Traits = Traits()
    run: str = ""
    patience: float = 600.0
    fewest: int = 1
    heaviest: float = 1e6
    signed: Callable[..., bool] = lambda node, key, *about: True
    said: Path | None = None
    vectors: Vectors = PLAIN
    waits: Callable[[int], bool] = lambda present: False
    truth: ClassVar[None] = None
    substituted: ClassVar[None] = None

    def __post_init__(self) -> None:
        if unknown := [name for name in self.traits.reveals if name in SIMULATION_ONLY]:
            but = "what real clients can tell, because only a simulation knows it"
            raise refused("the method's reveals", unknown[0], but)
        self.attendance = Attendance(self.carrier, self.roster, self.who)
        self.record = AskRecord()
        self.released = ReleasedRounds(self.vectors.wire)
        self.memory = MemoryStore(None)
        self.moment = Moment(-1, 0, 0.0)
        self.queries: list[Query] = []
        self.spent_on: dict[str, Cost] = {}
        self.clustering = Stopwatch()
        life = secrets.token_hex(4)  # a server that is started again must not take answers to its earlier self
        self._mail = Mailbox(self.carrier, self.clock, self.heaviest, self.run, life, self.memory, self.vectors)
        self._summed = 0
        self._masked = MaskedSums(self._mail, self.released.offer, self.signed, self.fewest, self.said)
        self._left_out = LeftOut()
        self.waited = 0.0
        self._elapsed: float | None = None
        self._began = False

    # -- time ---------------------------------------------------------------------------------------------------------

    def begin(self, moment: Moment) -> None:
        """Enter a moment: wait for the time of the round, and until enough clients are present."""
        self._end_round()
        began = time.perf_counter()
        self.moment = replace(moment, seconds=self.clock.begin(moment))
        self.queries, self._summed, self._elapsed, self._began = [], 0, None, True
        self.record.begin()
        self.attendance.enroll()
        enough = max(self.fewest, self.vectors.wire.fewest)
        while self.waits(present := self.attendance.look()) or present < enough:
            self.clock.sleep(LOOK)
        self.waited += time.perf_counter() - began
        self.attendance.leave_out(self._left_out.clients_in(moment.round), enough)
        if (before := self.released.attendance(moment.round)) is not None:
            self.attendance.present, self.attendance.willing = before

    def _end_round(self) -> None:
        """Write the line of the round that is over."""
        if self._began:
            people, reachable = self.attendance, self.reachable.tolist()
            nodes = sorted({people.node_of[client] for client in people.present.tolist()})
            self.record.end_round(self.moment, self.elapsed(), people.clients, nodes, reachable)
        self._began = False

    def elapsed(self) -> float:
        """Return the seconds between the beginning of this round and that of the next one."""
        if self._elapsed is None:
            self._elapsed = self.clock.elapsed(self.moment)
        return self._elapsed

    @property
    def ledger(self) -> Ledger | None:
        """The releases of clients so far, and who may be asked; None if sums are not private."""
        return self.vectors.wire.ledger

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
        draw = partial(self.attendance.who.arrivals, present=self.attendance.willing, moment=self.moment)
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
    def best(self) -> int | None:
        """Rounds of the model that was best so far, which nodes are told; None if no one is."""
        return self._mail.best

    @best.setter
    def best(self, rounds: int | None) -> None:
        self._mail.best = rounds

    @property
    def heard(self) -> dict[str, LastAnswer]:
        """The last answer of each node that was asked, by its name; another thread may ask for it."""
        return dict(self._mail.heard)

    @property
    def names(self) -> list[str]:
        """Names of the clients: the name of the node, with a number if the node has several clients."""
        return [
            name if len(self.roster[name]) == 1 else f"{name}/{self.roster[name].index(client)}"
            for client, name in sorted(self.attendance.node_of.items())
        ]

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
        check_ask(ask, self.attendance.clients, self.traits.reveals)
        if question == "train":
            first = self.traits.first if first is None else first
            deadline = self.traits.deadline if deadline is None else deadline
        first = len(ask.clients) if first is None else first
        seconds = self.patience if deadline is None else min(self.patience, deadline)
        start = self.clock.monotonic()
        sent = None if began is None else began[clients.argsort()].isinf()
        ask, reply = self._put(ask, payload, seconds, first, sent)
        waited = self.clock.answered(self.clock.monotonic() - start)
        cost = Cost(*(sum(line[way] for line in self._mail.nodes.values()) for way in ("down", "up")))
        failed = {} if len(reply.clients) else find_failed(self._mail.nodes)
        self.queries.append(Query(ask, sent, reply.clients, reply.refused, cost, waited, failed=failed))
        self.spent_on[question] = self.spent_on.get(question, Cost()) + cost
        return reply

    def _put(
        self, ask: Ask, payload: Payload, seconds: float, first: int, sent: Tensor | None = None
    ) -> tuple[Ask, Reply]:
        """Put a question, and count what comes; return it with its forms, and the reply."""
        self._mail.open(ask.version, self.attendance.node_of)
        if self.vectors.schemas.memory is None:
            self.vectors.schemas.memory = self.memory.read(MADE_UP, ask.version)
        ask = self.vectors.add_forms(ask, payload)
        if lines := self.released.lines(self.moment.round, ask.number):
            reply = self._replay_released(ask, payload, lines)
        elif self.vectors.wire.secure and ask.forms is not None:
            opened = self._masked.open(ask.of(self._asked(ask)), payload, seconds, first)
            self._left_out.note(self.moment.round, opened)
            reply = self._count(ask, None, first, payload, opened)
        else:
            self._send(ask, payload, seconds, first, sent)
            reply = self._count(ask, sent, first, payload, Opened({}, frozenset(), {}, {}))
        return ask, reply

    def _asked(self, ask: Ask) -> Tensor:
        """Return the mask (clients,) of those that are asked at all: in an evaluation all, whose budget has it."""
        if is_score(ask.question):
            return torch.ones(len(ask.clients), dtype=torch.bool)
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

    # -- counting -----------------------------------------------------------------------------------------------------

    def _count(self, ask: Ask, sent: Tensor | None, first: int, payload: Payload, opened: Opened) -> Reply:
        """End an ask: add up what counts, note which memory that is, and say of every client what became of it."""
        post: Post = "ask" if sent is None else "flight"
        is_masked = post == "ask" and self.vectors.wire.secure and ask.forms is not None
        # What is in a sum counts, whatever was heard of a client since: a sum cannot be taken back. It stands first for
        # the order, and last for the values.
        answers = {**opened.answers, **self._mail.received(post, set(ask.clients.tolist())), **opened.answers}
        answered = [client for client, answer in answers.items() if answer.word == ANSWERED][:first]
        enough = set(answered) if len(answered) >= self.fewest or post == "flight" else set()
        counted = set(opened.clients) if is_masked else keep_wanted(enough, ask, answers)
        blocks = split_blocks(torch.tensor([client in counted for client in ask.clients.tolist()], dtype=torch.bool))
        done = join((_add_block(ask.of(block), answers) for block in blocks), len(blocks))
        if ask.forms is not None:
            self.released.note(ask.version, self.attendance, counted, answers)
        done = replace(done, vectors=opened.sums if is_masked else done.vectors)
        done = self.vectors.open(ask, payload, done, opened.closed)
        why = dict.fromkeys(enough - counted, UNOPENED) if is_masked else {
            client: f"{REFUSED}its owner wants {answers[client].fewest} clients in a sum, and fewer answered"
            for client in enough - counted if post == "ask"
        }  # fmt: skip
        why |= {**opened.why, **dict.fromkeys(done.unopened, UNOPENED)}
        words = {}
        for client in ask.clients.tolist():
            answer = answers.get(client)
            if answer is None:
                is_asked = self._mail.asked(post, client) is not None
                word = LATE if is_asked else opened.unmet.get(client, f"{LOST}it was not asked")
            elif answer.word != ANSWERED or (client in counted and client not in done.unopened):
                word = answer.word
            else:
                word = why.get(client, TOO_FEW if client in answered and client not in enough else LATE)
            words[client] = AT_WORK if word == LATE and post == "flight" else word
        refused_ids = [client for client, word in words.items() if word.startswith(REFUSED) or word == NOT_FINITE]
        silent = (ABSTAINED,) if sent is None else (ABSTAINED, LOST)
        seconds = [self.clock.answered(answers[client].seconds) for client in done.clients]
        reply = Reply(
            done.total,
            {name: torch.stack(rows) for name, rows in done.revealed.items() if rows},
            torch.tensor(done.clients, dtype=torch.int64),
            torch.tensor(seconds, dtype=torch.float64),
            Cost(bytes_down(payload, ask if sent is None else ask.of(sent)), done.up),
            torch.tensor(refused_ids, dtype=torch.int64),
            torch.tensor([client for client, word in words.items() if word.startswith(silent)], dtype=torch.int64),
        )
        reply = self._close(ask, sent, reply, answers, words)
        if opened.amiss and not is_score(ask.question):  # of an evaluation no line is written
            self.record.asks[-1]["amiss"] = {str(client): opened.amiss[client] for client in sorted(opened.amiss)}
        if ask.forms is not None and any(opened.closed.values()):  # of slots, which scores have none
            line = self.record.asks[-1]
            line["closed"] = {str(slot): list(units) for slot, units in opened.closed.items()}
            line["few"] = {
                f"{UNITS.get(self.traits.models, 'model')} {name}" if name.isdigit() else name: counts
                for slot, units in opened.closed.items()
                for name, counts in ((ask.forms[slot].names[unit], counts) for unit, counts in units.items())
            }
        return reply

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
        return self._close(ask, None, reply, answers, words)

    def _close(
        self, ask: Ask, sent: Tensor | None, reply: Reply, answers: Mapping[int, Received], words: Mapping[int, str]
    ) -> Reply:
        """Note which memory counts now and who is still at work, forget the rest of the ask, and record it."""
        post: Post = "ask" if sent is None else "flight"
        changed, made_up = [], self.vectors.schemas.memory
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
        if is_score(ask.question):
            self.record.score(self._mail.nodes)
        else:
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
        if scoring.record and self.vectors.wire.sums_scores:
            ask = scoring.as_sum(len(self.queries) + self._summed)
            self._summed += 1
            total = self._put(ask, payload, self.patience, len(ids))[1].total if ids else None
            return replace(concat_scores(()), summed=True, by_sum=self.vectors.read_scores(total))
        self._mail.open((self.moment.round, len(self.queries)), self.attendance.node_of)
        header = {name: getattr(scoring, name) for name in ("part", "personal", "grouping", "other")}
        self._mail.send(scoring.ask, payload, self.patience, "score", **header)
        self._mail.listen("score", ids, len(ids), self.clock.monotonic() + self.patience)
        answers, zero = self._mail.received("score", set(ids)), torch.zeros(1, dtype=torch.float64)
        for client in ids:
            self._mail.forget("score", client)
        self.record.score(self._mail.nodes)
        scores = {client: answer.content for client, answer in answers.items() if answer.content}
        return concat_scores(scores.get(client) or Scores(torch.tensor([client]), zero, zero, zero) for client in ids)


def _add_block(ask: Ask, answers: Mapping[int, Received]) -> BlockResult:
    block = Block(ask)
    for client in ask.clients.tolist():
        block.count(client, Answer(answers[client].content["total"], answers[client].content["rows"]))
    return replace(block.result(), notes={})
