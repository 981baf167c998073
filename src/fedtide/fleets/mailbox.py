"""Questions on their way to nodes, and what came of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fedtide.fleets.ask import Ask
from fedtide.fleets.carrier import Carrier, Question
from fedtide.fleets.heard import LOST, Heard, Post, Sent, all_alike, one_line, read
from fedtide.fleets.node import ANSWERED
from fedtide.fleets.real_clock import RealClock

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
        self._at: dict[tuple[Post, int], str] = {}
        self._heard: dict[tuple[Post, int], Heard] = {}
        self._node: dict[int, str] = {}
        self.nodes: dict[str, dict[str, Any]] = {}

    def open(self) -> None:
        """Begin to count what passes between the server and each node (`nodes`) anew."""
        self.nodes = {}

    def node(self, name: str) -> dict[str, Any]:
        """Return what has passed between the server and a node."""
        return self.nodes.setdefault(name, {"clients": {}, "down": 0, "up": 0, "seconds": None})

    def send(self, questions: Iterable[tuple[Question, Sent]]) -> None:
        """Send questions; what is known of their clients from an earlier one is forgotten."""
        pushed = []
        for question, sent in questions:
            self._sent[question.id] = sent
            for client in sent.ask.clients.tolist():
                self._node[client] = sent.node
                self._at[sent.post, client] = question.id
                self._heard.pop((sent.post, client), None)
            self.node(sent.node)["down"] += len(question.payload)
            pushed.append(question)
        self.carrier.push(pushed)

    def listen(self, post: Post, clients: list[int], first: int, until: float) -> None:
        """Listen until all clients are heard of, `first` of them have answered, or it is `until`."""
        waiting = set(clients)
        while True:
            came = self._pull()
            waiting = {client for client in waiting if (post, client) in self._at}
            heard = (self._heard.get((post, client)) for client in clients)
            answered = sum(each is not None and each.word == ANSWERED for each in heard)
            left = until - self._clock.monotonic()
            if not waiting or answered >= first or left <= 0:
                return
            if not came:
                self._clock.sleep(min(PAUSE, left))

    def _pull(self) -> bool:
        """Read what came; tell whether anything did. What a node said before its key was removed counts no more."""
        came, removed = self.carrier.pull(), self.carrier.removed()
        for response in came:
            sent = self._sent.get(response.id)
            if sent is None:  # an answer to a question that has ended
                continue
            line = self.node(sent.node)
            line["up"] += len(response.payload)
            line["seconds"] = round(response.seconds, 3)
            if response.error:
                line["error"] = one_line(response.error)
            self._close(response.id, read(sent, response, self._heaviest))
        for key, heard in self._heard.items():
            if self._node[key[1]] in removed:
                self._heard[key] = replace(heard, word=f"{LOST}its key was removed", sent=None, kept=False)
        now = self._clock.monotonic()
        for name, sent in list(self._sent.items()):
            if sent.post == "flight" and now - sent.at > sent.seconds:
                self._close(name, all_alike(sent, f"{LOST}no answer within {sent.seconds:g} s", sent.seconds))
        return bool(came)

    def _close(self, name: str, heard: Mapping[int, Heard]) -> None:
        """Note what came of the clients of a question, and wait for it no longer."""
        sent = self._sent.pop(name)
        for client in sent.ask.clients.tolist():
            if self._at.get((sent.post, client)) == name:
                del self._at[sent.post, client]
                self._heard[sent.post, client] = heard[client]

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
        if name is not None and name not in self._at.values():
            del self._sent[name]
