"""Questions on their way to nodes, and what came of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fedtide.core import codec
from fedtide.core.base import Moment, Payload
from fedtide.core.memory import MemoryStore, Version
from fedtide.core.trees import Tree
from fedtide.fleets.ask import Ask
from fedtide.remote.answers import LOST, READERS, Heard, Post, Sent, all_alike, most_bytes, one_line, read
from fedtide.remote.messages import Carrier, Question
from fedtide.remote.node import ANSWERED, PROTOCOL
from fedtide.remote.schedule import RealClock
from fedtide.wire.answer_schema import Schema, Schemas
from fedtide.wire.pipeline import Wire

PAUSE = 0.05
"""Seconds between two looks at what came."""


class Mailbox:
    """The questions that a server waits for, and the answers that it has not counted yet.

    Args:
        carrier: the way to the nodes.
        clock: of deadlines.
        heaviest: largest weight that a client may give to a value.
    """

    def __init__(self, carrier: Carrier, clock: RealClock, heaviest: float) -> None:
        self.carrier, self._clock, self._heaviest = carrier, clock, heaviest
        self._sent: dict[str, Sent] = {}
        self._flights: dict[str, Sent] = {}
        self._at: dict[tuple[Post, int], str] = {}
        self._heard: dict[tuple[Post, int], Heard] = {}
        self._node: dict[int, str] = {}
        self.nodes: dict[str, dict[str, Any]] = {}

    def open(self) -> None:
        """Begin to count what passes between the server and each node (`nodes`) anew."""
        self.nodes = {}
        self._forget_removed()

    def node(self, name: str) -> dict[str, Any]:
        """Return what has passed between the server and a node."""
        return self.nodes.setdefault(name, {"clients": {}, "down": 0, "up": 0, "seconds": None})

    def send(self, questions: Iterable[tuple[Question, Sent]]) -> None:
        """Send questions; what is known of their clients from an earlier one is forgotten."""
        pushed = []
        for question, sent in questions:
            self._sent[question.id] = sent
            if sent.post == "flight":
                self._flights[question.id] = sent
            for client in sent.ask.clients.tolist():
                self._node[client] = sent.node
                self._at[sent.post, client] = question.id
                self._heard.pop((sent.post, client), None)
            self.node(sent.node)["down"] += len(question.payload)
            pushed.append(question)
        self.carrier.push(pushed)

    def listen(self, post: Post, clients: list[int], first: int, until: float) -> None:
        """Listen until all clients are heard of, `first` of them have answered, or it is `until`."""
        wanted, waiting, answered = set(clients), set(clients), set[int]()
        news = wanted  # some may have been heard of before
        while True:
            came = self._pull()
            for client in news | {client for kind, client in came if kind == post and client in wanted}:
                heard = self._heard.get((post, client))
                (answered.discard if heard is None or heard.word != ANSWERED else answered.add)(client)
                if (post, client) not in self._at:
                    waiting.discard(client)
            news = set()
            left = until - self._clock.monotonic()
            if not waiting or len(answered) >= first or left <= 0:
                return
            if not came:
                self._clock.sleep(min(PAUSE, left))

    def _pull(self) -> set[tuple[Post, int]]:
        """Read what came, and return its posts and clients; a node whose key was removed has said nothing."""
        came, news = self.carrier.pull(), set[tuple[Post, int]]()
        for response in came:
            sent = self._sent.get(response.id)
            if sent is None:  # an answer to a question that has ended
                continue
            line = self.node(sent.node)
            line["up"] += len(response.payload)
            line["seconds"] = round(response.seconds, 3)
            if response.error:
                line["error"] = one_line(response.error)
            news |= self._close(response.id, read(sent, response, self._heaviest))
        news |= self._forget_removed()
        now = self._clock.monotonic()
        for name, sent in list(self._flights.items()):
            if now - sent.at > sent.seconds:
                late = all_alike(sent, f"{LOST}no answer within {sent.seconds:g} s", sent.seconds)
                news |= self._close(name, late)
        return news

    def _forget_removed(self) -> set[tuple[Post, int]]:
        """Count nothing that came of nodes whose keys were removed since; return of which clients that was."""
        news, removed = set[tuple[Post, int]](), self.carrier.removed()
        for key, heard in self._heard.items() if removed else ():
            if self._node[key[1]] in removed:
                self._heard[key] = replace(heard, word=f"{LOST}its key was removed", sent=None, kept=False)
                news.add(key)
        return news

    def _close(self, name: str, heard: Mapping[int, Heard]) -> set[tuple[Post, int]]:
        """Note what came of the clients of a question, and wait for it no longer; return those who were waited for."""
        sent = self._sent.pop(name)
        self._flights.pop(name, None)
        news = {(sent.post, client) for client in heard if self._at.get((sent.post, client)) == name}
        for key in news:
            del self._at[key]
        self._heard |= {(sent.post, client): each for client, each in heard.items() if (sent.post, client) in news}
        return news

    def asked(self, post: Post, client: int) -> Ask | None:
        """Return the question that a client is at, or that it has answered without being counted; None without one."""
        if (post, client) in self._heard:
            return self._heard[post, client].ask
        return self._sent[self._at[post, client]].ask if (post, client) in self._at else None

    def came(self, post: Post, clients: Collection[int]) -> dict[int, Heard]:
        """Return what came of some clients, in the order in which it came."""
        return {client: heard for (kind, client), heard in self._heard.items() if kind == post and client in clients}

    def forget(self, post: Post, client: int) -> None:
        """Wait for a client no longer, and forget what came of it."""
        self._heard.pop((post, client), None)
        name = self._at.pop((post, client), None)
        if name is None:
            return
        if all(self._at.get((post, other)) != name for other in self._sent[name].ask.clients.tolist()):
            del self._sent[name]
            self._flights.pop(name, None)
            self.carrier.drop([name])


@dataclass(frozen=True)
class Questions:
    """How nodes are asked at one time.

    Args:
        mail: what was sent and heard.
        clock: of deadlines.
        notes: what the server notes of each client, see `versions_of`.
        now: the round, and how many asks came before in it.
        nodes: the node of each client.
        run: digest of the run.
        life: name of this life of the server.
        scored: how many evaluations there were in it.
        schemas: what answers must look like; None takes any.
        wire: how sums in fixed point pass; None where they do not.
    """

    mail: Mailbox
    clock: RealClock
    notes: MemoryStore
    now: Version
    nodes: Mapping[int, str]
    run: str
    life: str
    scored: int
    schemas: Schemas | None
    wire: Wire | None

    def send(self, ask: Ask, payload: Payload, seconds: float, post: Post = "ask", **how: Any) -> None:
        """Send a question to the nodes of its clients."""
        sealed: dict[Any, bytes] = {}
        questions = []
        for name, part in self._by_node(ask):
            slots = None if part.slot is None else part.slot.tolist()
            key = None if slots is None or post in READERS else tuple(sorted(set(slots)))
            if key not in sealed:
                sealed[key] = codec.to_bytes(payload if key is None else {k: payload[k] for k in key})
            kind = {"kind": "ask" if post == "flight" else post, "members": _members(ask, part), "deadline": seconds}
            header = self._header(part) | kind
            attempt = how["mask"]["attempt"] if "mask" in how else ""
            number = f"{part.number}{'' if post in ('ask', 'flight') else post}{attempt}"
            number += f"{self.scored}" if post == "score" else ""
            wanted = self._wanted(part, payload) if post in ("ask", "flight") else None
            wire = None if "mask" in how else self.wire
            sent = Sent(name, post, part, wanted, self.clock.monotonic(), seconds, wire)
            known = f"{part.moment.round}.{number}.{self.life}.{name}"
            most = most_bytes(sent, len(part.clients))
            questions.append((Question(known, name, header | how, sealed[key], seconds, most), sent))
        self.mail.send(questions)

    def _header(self, ask: Ask) -> dict[str, Any]:
        """Return what a node must know to do its clients' work."""
        ids = ask.clients.tolist()
        rows = {client: self.notes.read(client, self.now) for client in ids}
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
            "counted": {str(client): counted_in(rows[client]) for client in ids},
            "settled": {str(client): counted_in(self.notes.settled(client)) for client in ids},
            "forms": None if ask.forms is None else {str(slot): asdict(form) for slot, form in ask.forms.items()},
        }

    def send_again(self, ask: Ask, payload: Payload, seconds: float) -> None:
        """Ask clients anew that are at work since an earlier round, where an earlier server took their question along.

        They get the key and the moment of that round, so their answers are the same.
        """
        anew = []
        for place, client in enumerate(ask.clients.tolist()):
            row = self.notes.read(client, ask.version)
            if self.mail.asked("flight", client) is not None or row is None or row["flight"] is None:
                continue
            then = {**row["flight"], "moment": Moment(**row["flight"]["moment"])}
            anew.append(replace(ask.of(torch.tensor([place])), **then))
        for each in sorted(anew, key=lambda then: then.version):
            self.send(each, payload, seconds, "flight")

    def _by_node(self, ask: Ask) -> Iterator[tuple[str, Ask]]:
        """Yield the question to the clients of each node."""
        places: dict[str, list[int]] = {}
        for place, client in enumerate(ask.clients.tolist()):
            places.setdefault(self.nodes[client], []).append(place)
        for name, at in places.items():
            yield name, ask.of(torch.tensor(at))

    def _wanted(self, ask: Ask, payload: Payload) -> Mapping[int | None, Schema] | None:
        """Return what answers must look like, by slot; None where that is not checked."""
        if self.schemas is None:
            return None
        slots = [None] if ask.slot is None else ask.slot.unique().tolist()
        given = {slot: payload if slot is None else payload[slot] for slot in slots}
        return {slot: self.schemas.of(ask.question, given[slot], ask.moment, ask.reveal) for slot in slots}


def _members(ask: Ask, part: Ask) -> int:
    """Count the clients in the smallest sum that an answer of a part of those asked is in."""
    if ask.slot is None or part.slot is None:
        return len(ask.clients)
    return min(int((ask.slot == slot).sum()) for slot in part.slot.unique())


def counted_in(row: Tree) -> list[int] | None:
    """Return the version of a client's memory that counts, from what the server notes of the client."""
    return None if row is None or row["counted"] is None else row["counted"].tolist()


def to_put_again(ask: Ask) -> dict[str, Any]:
    """Return what it takes to put a question again in a later round, after the server was started again."""
    moment = {key: getattr(ask.moment, key) for key in ("round", "rounds", "seconds")}
    return {"purpose": ask.purpose, "moment": moment, "number": ask.number, "reveal": ask.reveal}
