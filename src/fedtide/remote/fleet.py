"""A fleet of real clients: it asks nodes over a carrier, and sums what they answer as a simulation does."""

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
from fedtide.fleets.ask import Ask, BlockResult, Query, ScoreOptions, check, put, put_scoring
from fedtide.fleets.scoring import concat_scores
from fedtide.fleets.totals import ALL, Block, Vectors, bytes_down, join, split_blocks
from fedtide.remote.answers import LOST, Heard, Post
from fedtide.remote.mailbox import Mailbox, Questions, counted_in, to_put_again
from fedtide.remote.masked import Attempts
from fedtide.remote.messages import Carrier
from fedtide.remote.node import ABSTAINED, ANSWERED, NOT_FINITE, REFUSED
from fedtide.remote.opening import UNOPENED, LeftOut, MaskedSums, Opened, as_owners_want
from fedtide.remote.schedule import RealClock, RoundClock, Who
from fedtide.wire.answer_schema import Schemas, look
from fedtide.wire.clip import SHOWN
from fedtide.wire.ledger import Ledger, Line, Safe, arrivals, eligible
from fedtide.wire.masks import Bundle
from fedtide.wire.release import ledger_of, release_of

LOOK = 0.2
"""Seconds between two looks at who is there."""

LATE, AT_WORK = "late", "at work"
"""Words of the record for a client of which nothing came in time, and for one that is asked after again."""

MADE_UP = -1
"""In the server's notes the client whose made-up rows tell what answers must look like."""

SIMULATION_ONLY = tuple(name for name, shown in SHOWN.items() if shown.kind == "truth")
"""What methods reveal that no server of real clients knows."""


@dataclass(eq=False)
class RemoteFleet:
    """Real clients as a fleet.

    Sums are taken as in `SimulatedFleet`: over sorted client ids, in blocks cut from the clients asked, in float64.
    Memory stays at the nodes; the server knows which version of it counts. Rows never leave their node.

    What a simulation knows of its clients, `truth` and `substituted`, is None.

    Args:
        carrier: the way to the nodes.
        roster: ids of the clients of each node, by its name; together 0 to n-1. Nodes may be added while a run is
            played: they are clients from the next round on.
        who: draws who takes part.
        clock: of rounds and deadlines.
        run: digest of the run; nodes refuse questions of another.
        reveals: values that the server may see per client, () for sums only.
        patience: seconds within which answers to a question count; an ask may allow fewer.
        fewest: number of clients that a round waits for before it begins, and of answers below which none is counted,
            but for methods that wait for a number of their own.
        first: number of answers to "train" that count, the earliest ones; an ask may say otherwise.
        deadline: seconds within which answers to "train" count; an ask may say otherwise.
        schemas: what answers must look like; None takes any, from nodes of this process.
        heaviest: largest weight that a client may give to a value.
        signed: tells whether a key for masks is signed by the registered key of its node, by its name.
        vectors: sums in fixed point, masked where their wire is secure; None adds in floating point.
        waits: tells whether a round waits for more clients than are there, whose number it is told; it is asked
            again and again before a round begins.
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
    vectors: Vectors | None = None
    waits: Callable[[int], bool] = lambda there: False
    truth: ClassVar[None] = None
    substituted: ClassVar[None] = None

    def __post_init__(self) -> None:
        known = [name for name in self.reveals if name in SIMULATION_ONLY]
        if known:
            raise refused("the method's reveals", known[0], "what real clients can tell; only a simulation knows this")
        self._enroll()
        self._life = secrets.token_hex(4)  # a server that is started again must not take answers to its earlier self
        self._mail = Mailbox(self.carrier, self.clock, self.heaviest)
        secure = self.vectors is not None and self.vectors.wire.secure
        self._masks = Attempts(self._life, self.signed) if secure else None
        self.memory = MemoryStore(None)
        self.moment = Moment(-1, 0, 0.0)
        self.queries: list[Query] = []
        self.asks: list[dict[str, Any]] = []
        self._drawn: dict[str, list[int]] = {}
        self._elapsed: float | None = None
        self._began = False
        self._lines: list[dict[str, Any]] = []
        self.spent = Cost()
        self._scored = 0
        self.present = self._willing = torch.empty(0, dtype=torch.int64)
        self._left_out = LeftOut()

    def _enroll(self) -> None:
        """Read the roster, which may have grown."""
        ids = sorted(client for clients in self.roster.values() for client in clients)
        if ids != list(range(len(ids))):
            raise refused("roster", ids, "client ids from 0 on, each at one node")
        self._node = {client: name for name, clients in self.roster.items() for client in clients}

    # -- time ---------------------------------------------------------------------------------------------------------

    def begin(self, moment: Moment) -> None:
        """Enter a moment: wait for the time of the round, and for as many clients to be there as it takes."""
        if self._began:
            self._lines.append(self._round_line())
        self.moment = replace(moment, seconds=self.clock.begin(moment))
        self.queries, self.asks, self._drawn = [], [], {}
        self._elapsed, self._began = None, True
        self._enroll()
        while self.waits(there := len(self._look())) or there < self.fewest:
            self.clock.sleep(LOOK)
        self._willing = self._without(self._left_out.now(moment.round))
        self._go_back()

    def _look(self) -> Tensor:
        there = self.carrier.present()
        ids = sorted(client for name in there for client in self.roster.get(name, ()))
        self.present = torch.tensor(ids, dtype=torch.int64)
        return self.present

    def _without(self, shut: set[int]) -> Tensor:
        """Return who is present, without those who kept sums shut, if enough are left."""
        left = [client for client in self.present.tolist() if client not in shut]
        fewest = max(self.fewest, 1 if self.vectors is None else self.vectors.wire.fewest)
        return torch.tensor(left, dtype=torch.int64) if len(left) >= fewest else self.present

    def elapsed(self) -> float:
        """Return the seconds between the beginning of this round and that of the next one."""
        if self._elapsed is None:
            self._elapsed = self.clock.elapsed(self.moment)
        return self._elapsed

    def add_server_time(self, seconds: float) -> None:
        """Do nothing: on a real clock the server's own work takes the time it takes."""

    @property
    def ledger(self) -> Ledger | None:
        """What was released of clients, and who may be asked; None where sums are not private."""
        return ledger_of(None if self.vectors is None else self.vectors.wire)

    @property
    def safe(self) -> Safe | None:
        """What was released and is in no checkpoint yet; None where it is not kept."""
        release = release_of(None if self.vectors is None else self.vectors.wire)
        return None if release is None else release.safe

    # -- rounds that are played once more -----------------------------------------------------------------------------

    def _go_back(self) -> None:
        """Have those present who were, in a round of which a server before this one has released something."""
        if self.safe is None or self.ledger is None:
            return
        self.safe.settle(self.moment.round, self.ledger.lines)
        if lines := self._released():
            noted = self.safe.noted((lines[0].round, lines[0].ask))
            if noted is not None:
                self.present = torch.tensor(noted["present"], dtype=torch.int64)
                self._willing = torch.tensor(noted.get("willing", noted["present"]), dtype=torch.int64)

    def _released(self, ask: int | None = None) -> list[Line]:
        """Return what was released in this round, or by one of its questions, before this server was started."""
        return [] if self.ledger is None or self.safe is None else self.ledger.of(self.moment.round, ask)

    def _again(self, ask: Ask, payload: Payload, lines: Sequence[Line]) -> Reply:
        """End an ask whose sums were released before: they are taken as they were, and no client works again.

        Where they are gone the question has no answer, and the ledger counts what was spent on it.
        """
        assert self.vectors is not None
        assert self.safe is not None
        noted = self.safe.noted(ask.version) or {"seconds": {}, "kept": []}
        asked, heard = set(ask.clients.tolist()), set(map(int, noted["seconds"]))
        told_of = [line for line in lines if line.question == ask.question and set(line.clients) <= asked & heard]
        known = [(line, found) for line in told_of if (found := self.safe.found(line)) is not None]
        clients = sorted(client for line, _ in known for client in line.clients)
        seconds = {int(client): took for client, took in noted["seconds"].items()}
        came = {c: Heard(ANSWERED, None, c in noted["kept"], ask, seconds[c]) for c in clients}
        gone = f"{LOST}its sum was released before the server ended, and is gone"
        words = {client: ANSWERED if client in came else gone for client in ask.clients.tolist()}
        took = torch.tensor([self.clock.answered(seconds[client]) for client in clients], dtype=torch.float64)
        total = self.vectors.again(ask, payload, {line.slot or ALL: found for line, found in known})
        told, none = torch.tensor(clients, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        reply = Reply(total, {}, told, took, Cost(), none, none)
        self._keep("ask", ask, came, words)
        self.asks.append(self._line(ask, None, reply, words))
        return reply

    # -- who ----------------------------------------------------------------------------------------------------------

    @property
    def clients(self) -> Tensor:
        """All ids of the roster, sorted, present or not."""
        return torch.arange(len(self._node))

    @property
    def reachable(self) -> Tensor:
        """Ids that could answer now, sorted: those that were present when the round began."""
        there = self.who.reachable(self._willing, self.moment)
        return there[eligible(self.ledger, there, self.moment.round)]

    def arrivals(self, m: int) -> Tensor:
        """Draw `m` of the clients that are there, from (seed, round) alone, sorted."""

        def draw(size: int) -> Tensor:
            return self.who.arrivals(size, self._willing, self.moment)

        came, _ = arrivals(self.ledger, draw, m, len(self._node), self.moment.round)
        self._drawn[str(m)] = came.tolist()
        return came

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
        """Names of the clients: that of their node, with a number where it has several."""
        return [
            name if len(self.roster[name]) == 1 else f"{name}/{self.roster[name].index(client)}"
            for client, name in sorted(self._node.items())
        ]

    def judged(self, clients: Tensor, part: str) -> Tensor:
        """Return those of `clients` whose nodes were present when the round began."""
        return clients[torch.isin(clients, self.present)]

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
        began = None if began is None else began[clients.argsort()]
        ask = put(question, clients, payload, self.moment, self.queries, **options)
        check(ask, len(self._node), self.reveals)
        if question == "train":
            first = self.first if first is None else first
            deadline = self.deadline if deadline is None else deadline
        first = len(ask.clients) if first is None else first
        seconds = self.patience if deadline is None else min(self.patience, deadline)
        start = self.clock.monotonic()
        self._mail.open()
        if self.schemas is not None and self.schemas.memory is None:
            self.schemas.memory = self.memory.read(MADE_UP, ask.version)
        if self.vectors is not None:
            ask = self.vectors.formed(ask, payload)
        sent = None if began is None else began.isinf()
        if before := self._released(ask.number):
            reply = self._again(ask, payload, before)
        elif self._masks is not None and ask.forms is not None:
            reply = self._reply("ask", ask, None, first, payload, self._opened(ask, payload, seconds, first))
        else:
            self._put(ask, payload, seconds, first, sent)
            reply = self._reply("ask" if sent is None else "flight", ask, sent, first, payload, None)
        waited = self.clock.answered(self.clock.monotonic() - start)
        cost = Cost(*(sum(line[way] for line in self._mail.nodes.values()) for way in ("down", "up")))
        self.queries.append(Query(ask, sent, reply.clients, reply.refused, cost, waited))
        self.spent = Cost(self.spent.down + cost.down, self.spent.up + cost.up)
        return reply

    def _answering(self, ask: Ask) -> Tensor:
        """Tell of each client whether it is asked."""
        there = self.who.answers(ask.clients, self.moment, ask.number)
        return there & eligible(self.ledger, ask.clients, self.moment.round)

    def _put(self, ask: Ask, payload: Payload, seconds: float, first: int, sent: Tensor | None) -> None:
        """Put a question, and listen until there are enough answers, or it is late.

        With `sent` it is put to those clients anew, and others are at work on an earlier one; each of these questions
        has an end of its own.
        """
        there, questions = self._answering(ask), self._questions
        if sent is None:
            questions.send(ask.of(there), payload, seconds)
            until = self.clock.monotonic() + seconds  # from when it went out: before, answers' schemas may be tried
            return self._mail.listen("ask", ask.clients[there].tolist(), first, until)
        questions.send_again(ask.of(~sent), payload, seconds)
        questions.send(ask.of(there & sent), payload, seconds, "flight")
        return self._mail.listen("flight", ask.clients[there | ~sent].tolist(), first, math.inf)

    def _opened(self, ask: Ask, payload: Payload, seconds: float, first: int) -> Opened:
        """Put a question whose answers are masked, and have their sums opened."""
        assert self._masks is not None
        assert self.vectors is not None
        send, offer = self._questions.send, self._offer
        sums = MaskedSums(self._masks, self._mail, self.clock, self.vectors, self.heaviest, self._node, send, offer)
        opened = sums.open(ask.of(self._answering(ask)), payload, seconds, first)
        self._left_out.note(self.moment.round, opened)
        return opened

    def _offer(self, number: int, clients: frozenset[int]) -> None:
        """Count a round of clients that are asked to open a sum, as their nodes do before they show anything."""
        if self.ledger is None or not self.ledger.offer(number, clients):
            return
        if self.safe is not None:
            self.safe.offer(number, sorted(clients))

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    def _questions(self) -> Questions:
        """Return how nodes are asked now."""
        wire = None if self.vectors is None else self.vectors.wire
        now, name = (self.moment.round, len(self.queries)), (self.run, self._life, self._scored)
        return Questions(self._mail, self.clock, self.memory, now, self._node, *name, self.schemas, wire)

    # -- sums ---------------------------------------------------------------------------------------------------------

    def _reply(
        self,
        post: Post,
        ask: Ask,
        sent: Tensor | None,
        first: int,
        payload: Payload,
        opened: Opened | None,
    ) -> Reply:
        """End an ask: add up what counts, note which memory that is, and tell of every client what became of it."""
        came = self._mail.came(post, set(ask.clients.tolist()))
        answered = [client for client, heard in came.items() if heard.word == ANSWERED][:first]
        enough = set(answered) if len(answered) >= self.fewest or post == "flight" else set()
        counted = as_owners_want(enough, ask, came) if opened is None else enough & opened.clients
        counts = torch.tensor([client in counted for client in ask.clients.tolist()], dtype=torch.bool)
        blocks = split_blocks(counts)
        done = join((_block(ask.of(at), came) for at in blocks), len(blocks))
        unopened = {} if opened is None else {**dict.fromkeys(enough - counted, UNOPENED), **opened.why}
        if self.vectors is not None:
            sums = done.vectors if opened is None else opened.sums
            if self.safe is not None and ask.forms is not None:
                self.safe.note(ask.version, _noted(self.present, self._willing, counted, came))
            done = self.vectors.opened(ask, payload, replace(done, vectors=sums))
            unopened |= dict.fromkeys(done.unopened, UNOPENED)
        counted -= unopened.keys()
        unmet = {} if opened is None else opened.unmet
        words = self._words(post, ask, came, counted, enough - counted - unopened.keys(), unopened, unmet)
        of = {word: [client for client in words if words[client].startswith(word)] for word in (REFUSED, LOST)}
        refused_ids = sorted([*of[REFUSED], *(client for client in words if words[client] == NOT_FINITE)])
        silent = [client for client in words if words[client] == ABSTAINED]
        if sent is not None:
            silent = sorted([*silent, *of[LOST]])
        reply = Reply(
            done.total,
            {name: torch.stack(rows) for name, rows in done.revealed.items() if rows},
            torch.tensor(done.clients, dtype=torch.int64),
            torch.tensor([self.clock.answered(came[client].seconds) for client in done.clients], dtype=torch.float64),
            Cost(bytes_down(payload, ask if sent is None else ask.of(sent)), done.up),
            torch.tensor(refused_ids, dtype=torch.int64),
            torch.tensor(silent, dtype=torch.int64),
        )
        self._keep(post, ask, came, words)
        self.asks.append(self._line(ask, sent, reply, words))
        return reply

    def _words(
        self,
        post: Post,
        ask: Ask,
        came: Mapping[int, Heard],
        counted: set[int],
        held_back: set[int],
        unopened: Mapping[int, str],
        unmet: Mapping[int, str],
    ) -> dict[int, str]:
        """Say of every client what became of it; of some the owners want more clients in a sum."""
        words = {}
        for client in ask.clients.tolist():
            word = came[client].word if client in came else LATE
            if word == LATE and self._mail.asked(post, client) is None:
                word = unmet.get(client, LOST + "it was not asked")
            if word == ANSWERED and client in unopened:
                word = unopened[client]
            elif word == ANSWERED and client in held_back and post == "ask":
                word = f"{REFUSED}its owner wants {came[client].fewest} clients in a sum, and fewer answered"
            elif word == ANSWERED and client not in counted:
                word = LATE
            words[client] = AT_WORK if word == LATE and post == "flight" else word
        return words

    def _keep(self, post: Post, ask: Ask, came: Mapping[int, Heard], words: Mapping[int, str]) -> None:
        """Note which memory counts now and who is still at work; forget what this ask no longer waits for."""
        changed = []
        made_up = None if self.schemas is None else self.schemas.memory
        if made_up is not None and look(made_up) != look(self.memory.read(MADE_UP, ask.version)):
            self.memory.stage(MADE_UP, made_up)
            changed.append(MADE_UP)
        for client, word in words.items():
            row = self.memory.read(client, ask.version) or {"counted": None, "flight": None}
            then = dict(row)
            if word == ANSWERED and came[client].kept:
                then["counted"] = torch.tensor(came[client].ask.version)
            if post == "flight":
                asked = self._mail.asked(post, client)
                then["flight"] = to_put_again(asked) if word == AT_WORK and asked is not None else None
            if not same(then, row):
                self.memory.stage(client, then)
                changed.append(client)
            if post == "ask" or word != AT_WORK:
                self._mail.forget(post, client)
        self.memory.commit(ask.version, changed)

    def counted(self, client: int) -> Version | None:
        """Return the version of a client's memory that counts now."""
        version = counted_in(self.memory.read(client, (self.moment.round, len(self.queries))))
        return None if version is None else (version[0], version[1])

    # -- what is told -------------------------------------------------------------------------------------------------

    def _line(self, ask: Ask, sent: Tensor | None, reply: Reply, words: Mapping[int, str]) -> dict[str, Any]:
        """Return what the record keeps of an ask: enough to play it again, and to tell each node what was asked."""
        for client, word in words.items():
            self._mail.node(self._node[client])["clients"][str(client)] = word
        return {
            "question": ask.question,
            "purpose": ask.purpose,
            "reveal": list(ask.reveal),
            "clients": ask.clients.tolist(),
            "sent": None if sent is None else ask.clients[sent].tolist(),
            "answered": reply.clients.tolist(),
            "seconds": reply.seconds.tolist(),
            "nodes": self._mail.nodes,
        }

    def told(self) -> list[dict[str, Any]]:
        """Return the lines of `asks.jsonl` for the rounds since it was last called, as plain JSON.

        They say who was there, what was asked and what came of it.
        """
        lines, self._lines = self._lines, []
        if self._began:
            lines.append(self._round_line())
            self._began = False
        return lines

    def _round_line(self) -> dict[str, Any]:
        return {
            "round": self.moment.round,
            "seconds": self.moment.seconds,
            "elapsed": self.elapsed(),
            "clients": len(self._node),
            "present": sorted({self._node[client] for client in self.present.tolist()}),
            "reachable": self.reachable.tolist(),
            "arrivals": self._drawn,
            "asks": self.asks,
        }

    # -- judging ------------------------------------------------------------------------------------------------------

    def score(self, payload: Payload, clients: Tensor, **options: Unpack[ScoreOptions]) -> Scores:
        """Let clients evaluate predictions on their own rows, and send sums (see `fedtide.core.base.Fleet.score`).

        One that does not answer in time counts as having no rows.
        """
        scoring = put_scoring(clients, self.moment, len(self.queries), **options)
        if scoring.grouping == "oracle":
            raise refused("decide_per", "oracle", "client, batch, sample: real clients have no true group")
        if scoring.pooled:
            raise refused("metrics", ", ".join(scoring.pooled), "what real clients send of an evaluation")
        ids = scoring.ask.clients.tolist()
        self._mail.open()
        self._scored += 1
        how = {name: getattr(scoring, name) for name in ("part", "personal", "grouping", "other")}
        self._questions.send(scoring.ask, payload, self.patience, "score", **how)
        self._mail.listen("score", ids, len(ids), self.clock.monotonic() + self.patience)
        came, none = self._mail.came("score", set(ids)), torch.zeros(1, dtype=torch.float64)
        told = [came[client].sent if client in came else None for client in ids]
        for client in ids:
            self._mail.forget("score", client)
        unheard = (Scores(torch.tensor([client]), none, none, none) for client in ids)
        return concat_scores(each or nothing for each, nothing in zip(told, unheard, strict=True))


# -- sums and versions ------------------------------------------------------------------------------------------------


def _block(ask: Ask, came: Mapping[int, Heard]) -> BlockResult:
    block = Block(ask)
    for client in ask.clients.tolist():
        block.count(client, Answer(came[client].sent["total"], came[client].sent["rows"]))
    return replace(block.result(), notes={})


def _noted(present: Tensor, willing: Tensor, counted: set[int], came: Mapping[int, Heard]) -> dict[str, Any]:
    """Return what must be known of a question beside its sums, should the server be killed before its checkpoint."""
    clients = sorted(counted)
    return {
        "present": present.tolist(),
        "willing": willing.tolist(),
        "kept": [client for client in clients if came[client].kept],
        "seconds": {str(client): came[client].seconds for client in clients},
    }
