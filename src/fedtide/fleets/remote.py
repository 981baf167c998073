"""A fleet of real clients: it asks nodes over a carrier, and sums what they answer as a simulation does."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, Unpack
from zoneinfo import ZoneInfo

import torch
from torch import Tensor

from fedtide.cohorts.draw import draw_clients
from fedtide.core import codec, strangers
from fedtide.core.errors import FedtideError, printable, refused
from fedtide.core.memory import MemoryStore, Version
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, all_finite, same
from fedtide.core.types import Answer, AskOptions, Cost, Grouping, Moment, Payload, Reply, Scores, Shard, Slot
from fedtide.data.population import Population
from fedtide.fleets import messages
from fedtide.fleets.ask import Ask, BlockResult, Query, check, put
from fedtide.fleets.carrier import Carrier, Question, Response
from fedtide.fleets.node import ABSTAINED, ANSWERED, COLUMNS, NOT_FINITE, PROTOCOL, REFUSED
from fedtide.fleets.schema import Schema, Schemas, misfit
from fedtide.fleets.tally import concat_scores
from fedtide.fleets.totals import Block, bytes_down, join, split_blocks

PAUSE = 0.05
"""Seconds between two looks at what came."""

LOOK = 1.0
"""Seconds between two looks at who is there."""

LOST, LATE = "lost: ", "late"
"""Words of the record for a client of which nothing came, or nothing in time."""

ROOM = 10_000
"""Bytes of a message beside the answers in it, and of what a client tells when it is judged."""

MADE_UP = -1
"""In the server's notes the client whose made-up rows tell what answers must look like."""

SIMULATION_ONLY = ("true_groups", "all_rows")
"""What methods reveal that no server of real clients knows."""

Post = Literal["ask", "flight", "score"]
"""Questions that are over with their ask, those that may be answered in a later round, and evaluations."""


# -- time -------------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """The clock of a run on real clients."""

    def monotonic(self) -> float:
        """Return seconds on a clock that nobody sets, for deadlines."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""

    def begin(self, moment: Moment) -> float:
        """Wait until a round may begin; return the time at which it does."""

    def elapsed(self, moment: Moment) -> float:
        """Return the seconds from a moment until the round after it may begin."""

    def answered(self, seconds: float) -> float:
        """Return what the record says of an answer that took so many seconds."""


@dataclass(frozen=True)
class RoundClock:
    """A clock whose rounds all take equally long, as the simulation's: what a rehearsal is compared by."""

    seconds: float = 1.0
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def begin(self, moment: Moment) -> float:
        """Return the time that it should be."""
        return moment.seconds

    def elapsed(self, moment: Moment) -> float:
        """Return the seconds of a round; 0 before round 0."""
        return self.seconds if moment.round >= 0 else 0.0

    def answered(self, seconds: float) -> float:
        """Return the seconds of a round."""
        return self.seconds


@dataclass(frozen=True)
class WallClock:
    """A clock of the day in a time zone: seconds of a run are counted from a midnight there.

    So a time of the day is the same number on every day, daylight saving or not, and a period of a day is one of
    86,400 seconds. Where clocks are set back, the run's clock stands still.

    Args:
        since: seconds since the epoch of the moment at which the run was set up; it counts from the midnight before.
        zone: name of the time zone, such as "Europe/Berlin".
        every: seconds between the beginnings of rounds, at multiples counted from midnight. A round that takes longer,
            or a server that was away, leaves some out. None begins each round when the one before is over.
        now: returns seconds since the epoch.
    """

    since: float
    zone: str = "UTC"
    every: float | None = None
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @cached_property
    def _midnight(self) -> datetime:
        return self._local(self.since).replace(hour=0, minute=0, second=0, microsecond=0)

    def _local(self, seconds: float) -> datetime:
        return datetime.fromtimestamp(seconds, ZoneInfo(self.zone)).replace(tzinfo=None)

    def seconds(self) -> float:
        """Return the seconds since the run's midnight, by the clocks of the zone."""
        return (self._local(self.now()) - self._midnight) / timedelta(seconds=1)

    def begin(self, moment: Moment) -> float:
        """Wait for the time of the round; where that is long over, since the server was away, return the time now."""
        while moment.round >= 0 and (left := moment.seconds - self.seconds()) > 0:
            self.sleep(min(left, 60.0))  # clocks may be set meanwhile
        return max(moment.seconds, self.seconds())

    def elapsed(self, moment: Moment) -> float:
        """Return the seconds until the next round begins; those before round 0 take none."""
        if moment.round < 0:
            return 0.0
        now = max(self.seconds(), moment.seconds)
        if self.every is not None:
            now = self.every * max(math.ceil(now / self.every), math.floor(moment.seconds / self.every) + 1)
        return now - moment.seconds

    def answered(self, seconds: float) -> float:
        """Return the seconds that it took."""
        return seconds


# -- who is there -----------------------------------------------------------------------------------------------------


class Who(Protocol):
    """Which of the clients that are present take part."""

    def reachable(self, present: Tensor, moment: Moment) -> Tensor:
        """Return the clients that could answer now, sorted."""

    def arrivals(self, m: int, present: Tensor, moment: Moment) -> Tensor:
        """Draw `m` of them, sorted."""

    def answers(self, clients: Tensor, moment: Moment, number: int) -> Tensor:
        """Return the mask (clients,) of those that are sent question `number` of the round at all."""


@dataclass(frozen=True)
class Present:
    """All clients whose nodes are there; arrivals are drawn among them uniformly, from (seed, round)."""

    seed: int

    def reachable(self, present: Tensor, moment: Moment) -> Tensor:
        """Return all who are present."""
        return present

    def arrivals(self, m: int, present: Tensor, moment: Moment) -> Tensor:
        """Draw `m` of them; all if there are no more."""
        return draw_clients(present, torch.zeros(len(present)), m, Rng(self.seed).at(moment.round, "arrivals"))

    def answers(self, clients: Tensor, moment: Moment, number: int) -> Tensor:
        """Return a mask of all."""
        return torch.ones(len(clients), dtype=torch.bool)


@dataclass(frozen=True)
class Rehearsed:
    """The clients that a simulation draws from (seed, round), whoever is present."""

    population: Population

    def reachable(self, present: Tensor, moment: Moment) -> Tensor:
        """Return those that the simulation could reach."""
        return self.population.reachable(moment)

    def arrivals(self, m: int, present: Tensor, moment: Moment) -> Tensor:
        """Draw as the simulation does."""
        return self.population.arrivals(m, moment)

    def answers(self, clients: Tensor, moment: Moment, number: int) -> Tensor:
        """Return those that do not drop out in the simulation."""
        return self.population.answers(clients, moment, number)


# -- the fleet --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sent:
    """A question at a node.

    Args:
        node: its name.
        post: how long it is waited for.
        ask: the question to the node's clients.
        wanted: what answers must look like, by slot; None where nobody looks.
        at: when it was sent.
        seconds: within which an answer counts.
    """

    node: str
    post: Post
    ask: Ask
    wanted: Mapping[int | None, Schema] | None
    at: float
    seconds: float


@dataclass(frozen=True)
class _Heard:
    """What came of a client: a word, what it sends, whether it keeps more, of which ask, and after how many seconds."""

    word: str
    sent: Tree
    kept: bool
    ask: Ask
    seconds: float


@dataclass(eq=False)
class RemoteFleet:
    """Real clients as a fleet.

    Sums are taken as in `SimulatedFleet`: over sorted client ids, in blocks cut from the clients asked, in float64.
    Memory stays at the nodes; the server knows which version of it counts. Rows never leave their node.

    What a simulation knows of its clients, `truth` and `substituted`, is None.

    Args:
        carrier: the way to the nodes.
        roster: ids of the clients of each node, by its name; together 0 to n-1.
        who: draws who takes part.
        clock: of rounds and deadlines.
        run: digest of the run; nodes refuse questions of another.
        reveals: values that the server may see per client, () for sums only.
        patience: seconds within which answers to a question count; an ask may allow fewer.
        fewest: number of answers below which none is counted, but for methods that wait for a number of their own.
        first: number of answers to "train" that count, the earliest ones; an ask may say otherwise.
        deadline: seconds within which answers to "train" count; an ask may say otherwise.
        schemas: what answers must look like; None takes any, from nodes of this process.
        heaviest: largest weight that a client may give to a value.
    """

    carrier: Carrier
    roster: Mapping[str, Sequence[int]]
    who: Who
    clock: Clock = RoundClock()
    _: KW_ONLY
    run: str = ""
    reveals: Sequence[str] = ()
    patience: float = 600.0
    fewest: int = 1
    first: int | None = None
    deadline: float | None = None
    schemas: Schemas | None = None
    heaviest: float = 1e6
    truth: ClassVar[None] = None
    substituted: ClassVar[None] = None

    def __post_init__(self) -> None:
        known = [name for name in self.reveals if name in SIMULATION_ONLY]
        if known:
            raise refused("the method's reveals", known[0], "what real clients can tell; only a simulation knows this")
        ids = sorted(client for clients in self.roster.values() for client in clients)
        if ids != list(range(len(ids))):
            raise refused("roster", ids, "client ids from 0 on, each at one node")
        self._node = {client: name for name, clients in self.roster.items() for client in clients}
        self._life = secrets.token_hex(4)  # a server that is started again must not take answers to its earlier self
        self._sent: dict[str, _Sent] = {}
        self._at: dict[tuple[Post, int], str] = {}
        self._heard: dict[tuple[Post, int], _Heard] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self.memory = MemoryStore(None)
        self.moment = self._due = Moment(-1, 0, 0.0)
        self.queries: list[Query] = []
        self.asks: list[dict[str, Any]] = []
        self._drawn: dict[str, list[int]] = {}
        self._elapsed: float | None = None
        self._began = False
        self._lines: list[dict[str, Any]] = []
        self.spent = Cost()
        self._scored = 0
        self.present = torch.empty(0, dtype=torch.int64)

    # -- time ---------------------------------------------------------------------------------------------------------

    def begin(self, moment: Moment) -> None:
        """Enter a moment: wait for the time of the round, and a while for enough clients to be there."""
        if self._began:
            self._lines.append(self._round_line())
        self._due, self.moment = moment, replace(moment, seconds=self.clock.begin(moment))
        self.queries, self.asks, self._drawn = [], [], {}
        self._elapsed, self._began = None, True
        until = self.clock.monotonic() + self.patience
        while len(self._look()) < self.fewest and self.clock.monotonic() < until:
            self.clock.sleep(LOOK)

    def _look(self) -> Tensor:
        there = self.carrier.present()
        ids = sorted(client for name in there for client in self.roster.get(name, ()))
        self.present = torch.tensor(ids, dtype=torch.int64)
        return self.present

    def elapsed(self) -> float:
        """Return the seconds between the beginning of this round and that of the next one."""
        if self._elapsed is None:
            self._elapsed = self.clock.elapsed(self._due)
        return self._elapsed

    def add_server_time(self, seconds: float) -> None:
        """Do nothing: on a real clock the server's own work takes the time it takes."""

    # -- who ----------------------------------------------------------------------------------------------------------

    @property
    def clients(self) -> Tensor:
        """All ids of the roster, sorted, whoever is present."""
        return torch.arange(len(self._node))

    @property
    def reachable(self) -> Tensor:
        """Ids that could answer now, sorted: those that were present when the round began."""
        return self.who.reachable(self.present, self.moment)

    def arrivals(self, m: int) -> Tensor:
        """Draw `m` of the clients that are there, from (seed, round) alone, sorted."""
        came = self.who.arrivals(m, self.present, self.moment)
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
        **options: Unpack[AskOptions],
    ) -> Reply:
        """Put a question to some clients and return the sums of those that answer in time.

        See `fedtide.core.types.Timed.ask`. With `began`, questions that are not answered yet stay with their nodes, and
        are asked after by a later ask. A client does the work when it is asked: with the rows, the key and the moment
        of that round, whenever its answer is counted.
        """
        began = None if began is None else began[clients.argsort()]
        ask = put(question, clients, payload, self.moment, self.queries, **options)
        check(ask, len(self._node), self.reveals)
        if question == "train":
            first = self.first if first is None else first
            deadline = self.deadline if deadline is None else deadline
        start, self._nodes = self.clock.monotonic(), {}
        seconds = self.patience if deadline is None else min(self.patience, deadline)
        there = self.who.answers(ask.clients, self.moment, ask.number)
        post: Post = "ask"
        sent = None
        if self.schemas is not None and self.schemas.memory is None:
            self.schemas.memory = self.memory.read(MADE_UP, ask.version)
        if began is None:
            self._send(ask.of(there), payload, seconds)
        else:
            post, sent = "flight", began.isinf()
            self._send_again(ask.of(~sent), payload, seconds)
            self._send(ask.of(there & sent), payload, seconds, post)
            there = there | ~sent
        first = len(ask.clients) if first is None else first
        until = start + seconds if began is None else math.inf  # each question that began has an end of its own
        self._listen(post, ask.clients[there].tolist(), first, until)
        reply = self._reply(post, ask, sent, first, bytes_down(payload, ask if sent is None else ask.of(sent)))
        waited = self.clock.answered(self.clock.monotonic() - start)
        cost = Cost(*(sum(line[way] for line in self._nodes.values()) for way in ("down", "up")))
        self.queries.append(Query(ask, sent, reply.clients, reply.refused, cost, waited))
        self.spent = Cost(self.spent.down + cost.down, self.spent.up + cost.up)
        return reply

    # -- questions ----------------------------------------------------------------------------------------------------

    def _send(self, ask: Ask, payload: Payload, seconds: float, post: Post = "ask", **how: Any) -> None:
        """Send a question to the nodes of its clients."""
        now = (self.moment.round, len(self.queries))
        sealed: dict[Any, bytes] = {}
        questions = []
        for name, part in self._by_node(ask):
            slots = None if part.slot is None else part.slot.tolist()
            key = None if slots is None else tuple(sorted(set(slots)))
            if key not in sealed:
                sealed[key] = codec.to_bytes(payload if key is None else {k: payload[k] for k in key})
            kind = {"kind": "score" if post == "score" else "ask", "members": _members(ask, part), "deadline": seconds}
            header = self._header(part, now) | kind
            number = f"{part.number}{'' if post != 'score' else f'score{self._scored}'}"
            question = Question(
                f"{part.moment.round}.{number}.{self._life}.{name}", name, header | how, sealed[key], seconds
            )
            wanted = None if post == "score" else self._wanted(part, payload)
            self._sent[question.id] = _Sent(name, post, part, wanted, self.clock.monotonic(), seconds)
            for client in part.clients.tolist():
                self._at[post, client] = question.id
                self._heard.pop((post, client), None)
            self._node_line(name)["down"] += len(question.payload)
            questions.append(question)
        self.carrier.push(questions)

    def _header(self, ask: Ask, now: Version) -> dict[str, Any]:
        """Return what a node must know to do its clients' work; `counted` is as of `now`."""
        ids = ask.clients.tolist()
        rows = {client: self.memory.read(client, now) for client in ids}
        return {
            "protocol": PROTOCOL,
            "run": self.run,
            "question": ask.question,
            "purpose": ask.purpose,
            "moment": {key: getattr(ask.moment, key) for key in ("round", "rounds", "seconds")},
            "version": list(ask.version),
            "reveal": list(ask.reveal),
            "clients": ids,
            "slot": None if ask.slot is None else dict(zip(map(str, ids), ask.slot.tolist(), strict=True)),
            "counted": {str(client): _counted(rows[client]) for client in ids},
            "settled": {str(client): _counted(self.memory.settled(client)) for client in ids},
        }

    def _send_again(self, ask: Ask, payload: Payload, seconds: float) -> None:
        """Ask clients anew that are at work since an earlier round, where an earlier server took their question along.

        They get the key and the moment of that round, so their answers are the same.
        """
        anew = []
        for place, client in enumerate(ask.clients.tolist()):
            row = self.memory.read(client, ask.version)
            if ("flight", client) in self._at | self._heard or row is None or row["flight"] is None:
                continue
            then = {**row["flight"], "moment": Moment(**row["flight"]["moment"])}
            anew.append(replace(ask.of(torch.tensor([place])), **then))
        for each in sorted(anew, key=lambda then: then.version):
            self._send(each, payload, seconds, "flight")

    def _by_node(self, ask: Ask) -> Iterator[tuple[str, Ask]]:
        """Yield the question to the clients of each node."""
        places: dict[str, list[int]] = {}
        for place, client in enumerate(ask.clients.tolist()):
            places.setdefault(self._node[client], []).append(place)
        for name, at in places.items():
            yield name, ask.of(torch.tensor(at))

    def _wanted(self, ask: Ask, payload: Payload) -> Mapping[int | None, Schema] | None:
        """Return what answers must look like, by slot; None where nobody looks."""
        if self.schemas is None:
            return None
        slots = [None] if ask.slot is None else ask.slot.unique().tolist()
        given = {slot: payload if slot is None else payload[slot] for slot in slots}
        return {slot: self.schemas.of(ask.question, given[slot], ask.moment, ask.reveal) for slot in slots}

    # -- answers ------------------------------------------------------------------------------------------------------

    def _listen(self, post: Post, clients: list[int], first: int, until: float) -> None:
        """Listen until all clients are heard of, `first` of them have answered, or it is `until`."""
        waiting = set(clients)
        while True:
            came = self._pull()
            waiting = {client for client in waiting if (post, client) in self._at}
            heard = (self._heard.get((post, client)) for client in clients)
            answered = sum(each is not None and each.word == ANSWERED for each in heard)
            left = until - self.clock.monotonic()
            if not waiting or answered >= first or left <= 0:
                return
            if not came:
                self.clock.sleep(min(PAUSE, left))

    def _pull(self) -> bool:
        """Read what came; tell whether anything did."""
        came = self.carrier.pull()
        for response in came:
            sent = self._sent.get(response.id)
            if sent is None:  # an answer to a question that nobody waits for any more
                continue
            line = self._node_line(sent.node)
            line["up"] += len(response.payload)
            line["seconds"] = round(response.seconds, 3)
            if response.error:
                line["error"] = _line(response.error)
            self._close(response.id, self._read(sent, response))
        now = self.clock.monotonic()
        for name, sent in list(self._sent.items()):
            if sent.post == "flight" and now - sent.at > sent.seconds:
                self._close(name, _all(sent, f"{LOST}no answer within {sent.seconds:g} s", sent.seconds))
        return bool(came)

    def _close(self, name: str, heard: Mapping[int, _Heard]) -> None:
        """Note what came of the clients of a question, and wait for it no longer."""
        sent = self._sent.pop(name)
        for client in sent.ask.clients.tolist():
            if self._at.get((sent.post, client)) == name:
                del self._at[sent.post, client]
                if client in heard:
                    self._heard[sent.post, client] = heard[client]

    def _read(self, sent: _Sent, response: Response) -> dict[int, _Heard]:
        """Read an answer that anyone may have written."""
        if response.error:
            return _all(sent, LOST + _line(response.error), response.seconds)
        try:
            told = messages.read(messages.Told, response.header)
        except FedtideError as error:
            return _all(sent, REFUSED + _line(error), response.seconds)
        if told.failed:
            return _all(sent, REFUSED + _line(told.failed), response.seconds)
        words = {client: _word(told.clients.get(str(client))) for client in sent.ask.clients.tolist()}
        answered = [client for client, word in words.items() if word == ANSWERED]
        trees: Mapping[int, Tree] = {}
        try:
            if answered:
                trees = self._decoded(sent, response.payload, answered)
        except FedtideError as error:
            words |= dict.fromkeys(answered, REFUSED + _line(error))
        heard = {}
        slots = dict.fromkeys(words) if sent.ask.slot is None else dict(zip(words, sent.ask.slot.tolist(), strict=True))
        for client, word in words.items():
            if word == ANSWERED and sent.post != "score":
                wanted = None if sent.wanted is None else sent.wanted[slots[client]]
                why = _fault(trees.get(client), wanted, sent.ask.reveal, self.heaviest)
                word = word if why is None else REFUSED + _line(why)
            heard[client] = _Heard(word, trees.get(client), client in told.kept, sent.ask, response.seconds)
        return heard

    def _decoded(self, sent: _Sent, payload: bytes, answered: list[int]) -> Mapping[int, Tree]:
        """Return what each client sent."""
        most = ROOM * (1 + len(answered)) if sent.post == "score" else None
        if sent.wanted is not None:
            most = ROOM + len(answered) * max(schema.bytes for schema in sent.wanted.values())
        if most is not None and len(payload) > most:
            raise FedtideError(f"message: found {len(payload)} bytes, allowed: at most {most}")
        tree = strangers.decode(payload)
        if sent.post == "score":
            return _scores_of(tree, answered)
        if not isinstance(tree, dict):
            raise refused("message", tree, "answers by client")
        return tree

    # -- sums ---------------------------------------------------------------------------------------------------------

    def _reply(self, post: Post, ask: Ask, sent: Tensor | None, first: int, down: int) -> Reply:
        """End an ask: add up what counts, note which memory that is, and tell of every client what became of it."""
        asked = set(ask.clients.tolist())
        came = {client: heard for (kind, client), heard in self._heard.items() if kind == post and client in asked}
        answered = [client for client, heard in came.items() if heard.word == ANSWERED][:first]
        counted = set(answered) if len(answered) >= self.fewest or post == "flight" else set()
        counts = torch.tensor([client in counted for client in ask.clients.tolist()], dtype=torch.bool)
        done = join(_block(ask.of(at), came) for at in split_blocks(counts))
        words = self._words(post, ask, came, counted)
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
            Cost(down, done.up),
            torch.tensor(refused_ids, dtype=torch.int64),
            torch.tensor(silent, dtype=torch.int64),
        )
        self._keep(post, ask, came, words)
        self.asks.append(self._line(ask, sent, reply, words))
        return reply

    def _words(self, post: Post, ask: Ask, came: Mapping[int, _Heard], counted: set[int]) -> dict[int, str]:
        """Say of every client what became of it."""
        words = {}
        for client in ask.clients.tolist():
            word = came[client].word if client in came else LATE
            if word == LATE and (post, client) not in self._at:
                word = LOST + "it was not asked"
            if word == ANSWERED and client not in counted:
                word = LATE
            words[client] = "at work" if word == LATE and post == "flight" else word
        return words

    def _keep(self, post: Post, ask: Ask, came: Mapping[int, _Heard], words: Mapping[int, str]) -> None:
        """Note which memory counts now and who is still at work; forget what this ask no longer waits for."""
        changed = []
        made_up = None if self.schemas is None else self.schemas.memory
        if made_up is not None and self.memory.read(MADE_UP, ask.version) is None:
            self.memory.stage(MADE_UP, made_up)
            changed.append(MADE_UP)
        for client, word in words.items():
            row = self.memory.read(client, ask.version) or {"counted": None, "flight": None}
            then = dict(row)
            if word == ANSWERED and came[client].kept:
                then["counted"] = torch.tensor(came[client].ask.version)
            if post == "flight":
                at = self._sent.get(self._at.get((post, client), ""))
                asked = came[client].ask if client in came else None if at is None else at.ask
                then["flight"] = _flight(asked) if word == "at work" and asked is not None else None
            if not same(then, row):
                self.memory.stage(client, then)
                changed.append(client)
            if post == "ask" or word != "at work":
                self._heard.pop((post, client), None)
                name = self._at.pop((post, client), None)
                if name is not None and not any(each == name for each in self._at.values()):
                    self._sent.pop(name, None)
        self.memory.commit(ask.version, changed)

    def counted(self, client: int) -> Version | None:
        """Return the version of a client's memory that counts now."""
        version = _counted(self.memory.read(client, (self.moment.round, len(self.queries))))
        return None if version is None else (version[0], version[1])

    # -- what is told -------------------------------------------------------------------------------------------------

    def _node_line(self, name: str) -> dict[str, Any]:
        return self._nodes.setdefault(name, {"clients": {}, "down": 0, "up": 0, "seconds": None})

    def _line(self, ask: Ask, sent: Tensor | None, reply: Reply, words: Mapping[int, str]) -> dict[str, Any]:
        """Return what the record keeps of an ask: enough to play it again, and to tell each node what was asked."""
        for client, word in words.items():
            self._node_line(self._node[client])["clients"][str(client)] = word
        return {
            "question": ask.question,
            "purpose": ask.purpose,
            "reveal": list(ask.reveal),
            "clients": ask.clients.tolist(),
            "sent": None if sent is None else ask.clients[sent].tolist(),
            "answered": reply.clients.tolist(),
            "seconds": reply.seconds.tolist(),
            "nodes": self._nodes,
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

    def score(
        self,
        payload: Payload,
        clients: Tensor,
        *,
        slot: Slot | None = None,
        part: str = "test",
        personal: bool = True,
        grouping: Grouping = "client",
        other: str = "",
    ) -> Scores:
        """Let clients evaluate predictions on their own rows, and send sums (see `fedtide.core.types.Fleet.score`).

        One that does not answer in time counts as having no rows.
        """
        if grouping == "oracle":
            raise refused("decide_per", grouping, "client, batch, sample: real clients have no true group")
        clients, order = clients.sort()
        slot, ids = None if slot is None else slot[order], clients.tolist()
        ask = Ask("adapt", "adapt", self.moment, clients, slot, number=len(self.queries))
        self._nodes, self._scored = {}, self._scored + 1
        how = {"part": part, "personal": personal, "grouping": grouping, "other": other}
        self._send(ask, payload, self.patience, "score", **how)
        self._listen("score", ids, len(ids), self.clock.monotonic() + self.patience)
        none = torch.zeros(1, dtype=torch.float64)
        told = []
        for client in ids:
            heard = self._heard.pop(("score", client), None)
            told.append(heard.sent if heard and heard.sent else Scores(torch.tensor([client]), none, none, none))
        for name in [name for name, sent in self._sent.items() if sent.post == "score"]:
            self._close(name, {})
        return concat_scores(told)


# -- reading what strangers send --------------------------------------------------------------------------------------


def _line(said: Any) -> str:
    """Return a stranger's words as one short line."""
    words = printable(" ".join(str(said)[:400].split()))
    return words if len(words) <= 300 else f"{words[:300]}..."


def _word(said: str | None) -> str:
    """Return what a node says became of a client."""
    if said in (ANSWERED, ABSTAINED, NOT_FINITE):
        return said
    if said is not None and said.startswith(REFUSED):
        return REFUSED + _line(said.removeprefix(REFUSED))
    return f"{REFUSED}its node says nothing of it"


def _all(sent: _Sent, word: str, seconds: float) -> dict[int, _Heard]:
    return {client: _Heard(word, None, False, sent.ask, seconds) for client in sent.ask.clients.tolist()}


def _fault(answer: Tree, wanted: Schema | None, reveal: Sequence[str], heaviest: float) -> str | None:
    """Return the reason why an answer may not be summed; None if it may."""
    if not isinstance(answer, dict) or set(answer) != {"total", "rows"} or not isinstance(answer["rows"], dict):
        return "no answer came with it"
    if wanted is not None:
        return misfit(wanted, answer, heaviest)
    if set(answer["rows"]) != set(reveal):
        return f"it reveals {sorted(answer['rows'])}, and was asked for {sorted(reveal)}"
    return None if all_finite(answer) else NOT_FINITE


def _scores_of(columns: Tree, answered: list[int]) -> dict[int, Scores]:
    """Read what a node's clients tell of an evaluation.

    Raises:
        FedtideError: it is not that.
    """
    if not isinstance(columns, dict) or set(columns) != set(COLUMNS) or not isinstance(columns["others"], dict):
        raise refused("scores", columns, f"columns {', '.join(COLUMNS)}")
    given = {**{name: columns[name] for name in COLUMNS if name != "others"}, **columns["others"]}
    for name, column in given.items():
        missing = column is None and name in ("choice", "weights", "density")
        wide = 2 if name in ("choice", "weights") else 1
        if not missing and not (isinstance(column, Tensor) and column.dim() == wide and len(column) == len(answered)):
            raise refused(f"scores: {name}", column, f"a number for each of {len(answered)} clients")
    ids, rows, correct = (columns[name] for name in ("clients", "rows", "correct"))
    if ids.tolist() != answered:
        raise refused("scores: clients", ids.tolist(), f"{answered}")
    if not all(
        column.dtype == torch.float64 for name, column in given.items() if column is not None and column is not ids
    ):
        raise refused("scores", "other numbers", "float64")
    if not bool(((rows >= 0) & (correct >= 0) & (correct <= rows) & rows.isfinite()).all()):
        raise refused("scores: correct", correct.tolist(), "0 to the number of rows")
    scores = Scores(**columns)
    return {client: scores.pick(torch.tensor([place])) for place, client in enumerate(answered)}


# -- sums and versions ------------------------------------------------------------------------------------------------


def _block(ask: Ask, came: Mapping[int, _Heard]) -> BlockResult:
    block = Block(ask)
    for client in ask.clients.tolist():
        block.count(client, Answer(came[client].sent["total"], came[client].sent["rows"]))
    return replace(block.result(), notes={})


def _members(ask: Ask, part: Ask) -> int:
    """Count the clients in the smallest sum that an answer of a part of those asked is in."""
    if ask.slot is None or part.slot is None:
        return len(ask.clients)
    return min(int((ask.slot == slot).sum()) for slot in part.slot.unique())


def _counted(row: Tree) -> list[int] | None:
    """Return the version of a client's memory that counts, from what the server notes of the client."""
    return None if row is None or row["counted"] is None else row["counted"].tolist()


def _flight(ask: Ask) -> dict[str, Any]:
    """Return what it takes to put a question again in a later round, after the server was started again."""
    moment = {key: getattr(ask.moment, key) for key in ("round", "rounds", "seconds")}
    return {"purpose": ask.purpose, "moment": moment, "number": ask.number, "reveal": ask.reveal}
