"""Questions of a server to nodes: what a header says, and what an answer must look like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fedtide.core import codec
from fedtide.core.base import Moment, Payload
from fedtide.core.memory import MemoryStore, Version
from fedtide.core.trees import Tree
from fedtide.fleets.ask import Ask
from fedtide.remote.carrier import Question
from fedtide.remote.heard import READERS, Post, Sent, most_bytes
from fedtide.remote.mailbox import Mailbox
from fedtide.remote.node import PROTOCOL
from fedtide.remote.real_clock import RealClock
from fedtide.wire.schema import Schema, Schemas
from fedtide.wire.steps import Wire


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
