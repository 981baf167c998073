"""Questions on their way to nodes, and what came of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fedtide.fleets.ask import Ask
from fedtide.remote.carrier import Carrier, Question
from fedtide.remote.heard import LOST, Heard, Post, Sent, all_alike, one_line, read
from fedtide.remote.node import ANSWERED
from fedtide.remote.real_clock import RealClock

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
