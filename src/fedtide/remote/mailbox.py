"""The mailbox of a server: questions that it sends to nodes, and answers that it has not counted yet."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fedtide.core import codec
from fedtide.core.base import Moment, Payload
from fedtide.core.memory import MemoryStore, Version
from fedtide.core.trees import Tree
from fedtide.fleets.ask import Ask
from fedtide.fleets.totals import Vectors
from fedtide.remote.asks import ANSWERED, LATE, LOST, LastAnswer
from fedtide.remote.machine_facts import read_facts
from fedtide.remote.messages import Carrier, Question
from fedtide.remote.node import PROTOCOL
from fedtide.remote.node_answers import READERS, Post, Received, SentQuestion, all_alike, most_bytes, one_line, read
from fedtide.remote.schedule import RealClock

WORKS: tuple[Post, ...] = ("ask", "flight")
"""Questions that clients answer with a work."""

PAUSE = 0.05
"""Seconds between two looks at what came."""


@dataclass
class Mailbox:
    """The questions that a server sends and waits for, and the answers that it has not counted yet.

    Args:
        carrier: the way to the nodes.
        clock: of deadlines.
        heaviest: largest weight that a client may give to a value.
        run: digest of the run.
        life: name of this life of the server; a server that is started again takes no answers to its earlier self.
        notes: what the server notes of each client: the versions of its memory, and the question that it is at.
        vectors: how sums pass, and what answers must look like.
        node_of: the node of each client.
        nodes: by node, the counts of the traffic between the server and it, in one ask.
        heard: by node, its last answer.
        best: rounds of the model that was best so far, which nodes keep; None if no one is.
    """

    carrier: Carrier
    clock: RealClock
    heaviest: float
    run: str
    life: str
    notes: MemoryStore
    vectors: Vectors
    node_of: Mapping[int, str] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    heard: dict[str, LastAnswer] = field(default_factory=dict)
    best: int | None = None
    _now: Version = (-1, 0)
    _count: int = 0
    _sent: dict[str, SentQuestion] = field(default_factory=dict)
    _at: dict[tuple[Post, int], str] = field(default_factory=dict)
    _received: dict[tuple[Post, int], Received] = field(default_factory=dict)

    def open(self, now: Version, node_of: Mapping[int, str]) -> None:
        """Begin an ask, and count what passes between the server and each node (`nodes`) anew.

        Args:
            now: the round, and how many asks came before in it.
            node_of: the node of each client.
        """
        self._now, self.node_of, self.nodes = now, node_of, {}
        self._forget_removed()

    def node(self, name: str) -> dict[str, Any]:
        """Return the counts of the traffic between the server and a node."""
        return self.nodes.setdefault(name, {"clients": {}, "down": 0, "up": 0, "seconds": None})

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, ask: Ask, payload: Payload, seconds: float, post: Post = "ask", **more: Any) -> None:
        """Send a question to the nodes of its clients; what is known of these from an earlier one is forgotten.

        Args:
            payload: what clients receive, by slot if they have one.
            seconds: within which an answer counts.
            post: kind of the question.
            more: further keys of its header.
        """
        sealed: dict[Any, bytes] = {}
        questions = []
        for name, part in self._split_by_node(ask):
            key = None if part.slot is None or post in READERS else tuple(part.slot.unique().tolist())
            if key not in sealed:
                sealed[key] = codec.to_bytes(payload if key is None else {k: payload[k] for k in key})
            schemas = self.vectors.schemas_of(part, payload) if post in WORKS else {}
            wire = None if "mask" in more else self.vectors.wire
            sent = SentQuestion(name, post, part, schemas, self.clock.monotonic(), seconds, wire)
            header = self._header(part, post) | {"members": _members(ask, part)} | more
            if post in WORKS:
                header["deadline"] = seconds
            self._count += 1
            id_ = f"{part.moment.round}.{self._count}.{self.life}.{name}"
            questions.append(Question(id_, name, header, sealed[key], seconds, most_bytes(sent, len(part.clients))))
            self._sent[id_] = sent
            for client in part.clients.tolist():
                self._at[post, client] = id_
                self._received.pop((post, client), None)
            self.node(name)["down"] += len(sealed[key])
        self.carrier.push(questions)

    def send_again(self, ask: Ask, payload: Payload, seconds: float) -> None:
        """Ask clients anew that are at work since an earlier round, if an earlier server took their question along.

        They get the key and the moment of that round, so their answers are the same.
        """
        flights = []
        for place, client in enumerate(ask.clients.tolist()):
            row = self.notes.read(client, ask.version)
            if self.asked("flight", client) is None and row is not None and row["flight"] is not None:
                changes = {**row["flight"], "moment": Moment(**row["flight"]["moment"])}
                flights.append(replace(ask.of(torch.tensor([place])), **changes))
        for flight in sorted(flights, key=lambda flight: flight.version):
            self.send(flight, payload, seconds, "flight")

    def _split_by_node(self, ask: Ask) -> Iterator[tuple[str, Ask]]:
        """Yield the question to the clients of each node."""
        places: dict[str, list[int]] = {}
        for place, client in enumerate(ask.clients.tolist()):
            places.setdefault(self.node_of[client], []).append(place)
        for name, at in places.items():
            yield name, ask.of(torch.tensor(at))

    def _header(self, ask: Ask, post: Post) -> dict[str, Any]:
        """Return the header of a question to a node."""
        ids = ask.clients.tolist()
        header = {
            "kind": "ask" if post == "flight" else post,
            "protocol": PROTOCOL,
            "run": self.run,
            "question": ask.question,
            "purpose": ask.purpose,
            "moment": _plain(ask.moment),
            "version": list(ask.version),
            "clients": ids,
            "slot": None if ask.slot is None else dict(zip(map(str, ids), ask.slot.tolist(), strict=True)),
            "best": self.best,
        }
        if post not in READERS:
            header["counted"] = {str(client): counted_version(self.notes.read(client, self._now)) for client in ids}
        if post in WORKS:
            header["reveal"] = list(ask.reveal)
            header["settled"] = {str(client): counted_version(self.notes.settled(client)) for client in ids}
            header["forms"] = None if ask.forms is None else {str(k): asdict(form) for k, form in ask.forms.items()}
        return header

    # -- receiving ----------------------------------------------------------------------------------------------------

    def listen(self, post: Post, clients: list[int], first: int, until: float) -> None:
        """Listen until all clients are heard of, `first` of them have answered, or it is `until`."""
        wanted, waiting, answered = set(clients), set(clients), set[int]()
        news = wanted  # some may have been heard of before
        while True:
            arrivals = self._pull()
            for client in news | {client for kind, client in arrivals if kind == post and client in wanted}:
                answer = self._received.get((post, client))
                (answered.discard if answer is None or answer.word != ANSWERED else answered.add)(client)
                if (post, client) not in self._at:
                    waiting.discard(client)
            news = set()
            left = until - self.clock.monotonic()
            if not waiting or len(answered) >= first or left <= 0:
                return
            if not arrivals:
                self.clock.sleep(min(PAUSE, left))

    def _pull(self) -> set[tuple[Post, int]]:
        """Read what came, and return its posts and clients; a node whose key was removed has said nothing."""
        responses, news = self.carrier.pull(), set[tuple[Post, int]]()
        for response in responses:
            sent = self._sent.get(response.id)
            if sent is None:  # an answer to a question that has ended
                continue
            line = self.node(sent.node)
            line["up"] += len(response.payload)
            line["seconds"] = round(response.seconds, 3)
            if response.error:
                line["error"] = one_line(response.error)
            news |= self._close(response.id, read(sent, response, self.heaviest), read_facts(response.header))
        news |= self._forget_removed()
        now = self.clock.monotonic()
        for name, sent in list(self._sent.items()):
            if sent.post == "flight" and now - sent.at > sent.seconds:
                late = all_alike(sent, f"{LOST}no answer within {sent.seconds:g} s", sent.seconds)
                news |= self._close(name, late)
        return news

    def _forget_removed(self) -> set[tuple[Post, int]]:
        """Count nothing that came from nodes whose keys were removed since; return the clients that sent it."""
        news, removed = set[tuple[Post, int]](), self.carrier.removed()
        for key, answer in self._received.items() if removed else ():
            if self.node_of[key[1]] in removed:
                self._received[key] = replace(answer, word=f"{LOST}its key was removed", content=None, keeps=False)
                news.add(key)
        return news

    def _close(
        self, name: str, answers: Mapping[int, Received], facts: Mapping[str, Any] | None = None
    ) -> set[tuple[Post, int]]:
        """Note what came of the clients of a question, and wait for it no longer; return those who were waited for."""
        sent, seconds = self._sent.pop(name), max(answer.seconds for answer in answers.values())
        self.heard[sent.node] = LastAnswer.of(sent.node, seconds, [answer.word for answer in answers.values()], facts)
        news = [(sent.post, client) for client in answers if self._at.get((sent.post, client)) == name]
        for key in news:
            del self._at[key]
            self._received[key] = answers[key[1]]
        return set(news)

    def asked(self, post: Post, client: int) -> Ask | None:
        """Return the question that a client is at, or that it has answered without being counted; None without one."""
        if (post, client) in self._received:
            return self._received[post, client].ask
        return self._sent[self._at[post, client]].ask if (post, client) in self._at else None

    def received(self, post: Post, clients: Collection[int]) -> dict[int, Received]:
        """Return the answers of some clients, in the order of their arrival."""
        return {
            client: answer for (kind, client), answer in self._received.items() if kind == post and client in clients
        }

    def forget(self, post: Post, client: int) -> None:
        """Wait for a client no longer, and forget what came of it."""
        self._received.pop((post, client), None)
        name = self._at.pop((post, client), None)
        if name is None:
            return
        if all(self._at.get((post, other)) != name for other in self._sent[name].ask.clients.tolist()):
            sent = self._sent.pop(name)
            self.heard[sent.node] = LastAnswer.of(sent.node, self.clock.monotonic() - sent.at, [LATE])
            self.carrier.drop([name])


def _members(ask: Ask, part: Ask) -> int:
    """Count the clients in the smallest sum that an answer of a part of those asked is in."""
    if ask.slot is None or part.slot is None:
        return len(ask.clients)
    return min(int((ask.slot == slot).sum()) for slot in part.slot.unique())


def counted_version(row: Tree) -> list[int] | None:
    """Return the version of a client's memory that counts, from what the server notes of the client."""
    return None if row is None or row["counted"] is None else row["counted"].tolist()


def flight_of(ask: Ask) -> dict[str, Any]:
    """Return the parts of a question with which a server that is started again can send it in a later round."""
    return {"purpose": ask.purpose, "moment": _plain(ask.moment), "number": ask.number, "reveal": ask.reveal}


def _plain(moment: Moment) -> dict[str, Any]:
    return {key: getattr(moment, key) for key in ("round", "rounds", "seconds")}
