"""The carrier over Flower: questions and answers through the relay, which Flower runs as its ServerApp."""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedtide.core.errors import FedtideError
from fedtide.fleets import messages
from fedtide.fleets.carrier import Question, Response

SILENCE = 15.0
"""Seconds without a word of the relay after which no client counts as present."""
PAUSE, LONGEST = 2.0, 60.0
"""Seconds until a question is sent again, at least; twice as many each time, as a node may say often that it died, but
never more than the second number."""
QUIET = 60.0
"""Seconds without an answer after which a question is sent once more, and then whenever it has waited twice as long.

Flower hands a message out once, and says nothing of one that broke off on its way. A node that is at work on the first
one answers the second as before, unless it is taken back by then.
"""
ATTEMPTS = 3
"""Workers or processes of a node that one question may take down."""
LOST, DIED = (-1, 3, 4, 5), (8,)
"""Flower's codes of a message that was lost on its way or with its node, and of one whose process died."""
ROOM = 2**21
"""Bytes of an answer beside its payload."""
FRAME = 2**32
"""Bytes of one frame of the relay, which itself bounds what nodes send."""
WORKER_DIED = "its worker died"
"""How the sentence of a node's Flower app begins that could not reach its worker."""


@dataclass
class Open:
    """A question without an answer.

    Attributes:
        question: what is asked.
        asked: when.
        sent: to which life of its node and relay.
        times: how often it was sent.
        deaths: how many workers or processes it took down.
        again: when it may be sent again.
        quiet: when it is sent again although all that it was sent to is still there.
    """

    question: Question
    asked: float
    sent: tuple[int, str] | None = None
    times: int = 0
    deaths: int = 0
    again: float = 0.0
    quiet: float = 0.0

    @property
    def left(self) -> float:
        """Seconds within which an answer counts."""
        return self.asked + self.question.expires - time.monotonic()


class FlowerCarrier:
    """A way to nodes over Flower; it outlives Flower's processes.

    A question is sent when its node is there, and again when the node, its worker or the server's Flower died before it
    answered, or nothing was heard for long, and there is time left. Where no answer comes within its seconds, the
    response says so.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._gone: set[str] = set()
        self._removed: set[str] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="fedtide-"))  # for this user alone, and a short path
        self.socket = self._folder / "relay"
        self._listener = Listener(str(self.socket), "AF_UNIX")
        os.chmod(self.socket, 0o600)
        self._lock = threading.Lock()
        self._nodes: dict[str, tuple[int, str]] = {}
        self._relays = 0
        self._heard = -SILENCE
        self._line: queue.SimpleQueue[list[bytes] | None] | None = None
        self._answers: list[tuple[str, dict[str, Any], bytes]] = []
        self._open: dict[str, Open] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connected(self) -> bool:
        """Whether the relay is there."""
        return self._line is not None

    def admit(self, keys: Mapping[str, str]) -> None:
        """Know these nodes from now on, by their public keys as PEM (SubjectPublicKeyInfo), and no others.

        Questions at a node whose key is not among them any more are over.
        """
        names = {key.strip(): name for name, key in keys.items()}
        with self._lock:
            gone = {name for key, name in self._names.items() if names.get(key) != name}
            self._names, self._gone, self._removed = names, self._gone | gone, self._removed | gone
            self._nodes = {name: node for name, node in self._nodes.items() if name not in gone}

    def present(self) -> frozenset[str]:
        """Return the names of the nodes that can be asked now."""
        with self._lock:
            there = self._line is not None and time.monotonic() - self._heard < SILENCE
            return frozenset(self._nodes) if there else frozenset()

    def removed(self) -> frozenset[str]:
        """Return the names of nodes whose keys were removed since the last call."""
        with self._lock:
            names, self._removed = frozenset(self._removed), set()
            return names

    def push(self, questions: Sequence[Question]) -> None:
        """Send questions on their way."""
        for question in questions:
            self._open[question.id] = Open(question, time.monotonic())
        self._send()

    def pull(self) -> list[Response]:
        """Return what came since the last pull."""
        with self._lock:
            answers, self._answers = self._answers, []
            gone, self._gone = self._gone, set()
        removed = [waiting for waiting in self._open.values() if waiting.question.node in gone]
        done = [self._close(waiting, error="its key was removed") for waiting in removed]
        done += [response for told in answers if (response := self._response(*told)) is not None]
        late = [waiting for waiting in self._open.values() if waiting.left <= 0]
        for waiting in late:
            allowed = f"within its {waiting.question.expires:g} s"
            never = f"cannot be reached: was not there {allowed}"
            done.append(self._close(waiting, error=f"late: no answer {allowed}" if waiting.times else never))
        if late or removed:
            self._order({"kind": "drop", "questions": [waiting.question.id for waiting in (*removed, *late)]})
        self._send()
        return done

    def close(self) -> None:
        """Hang up: the relay ends, and with it Flower's run."""
        with self._lock:
            if self._line is not None:
                self._line.put(None)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _send(self) -> None:
        """Send what is open and whose node is there, one payload of many questions once."""
        with self._lock:
            nodes = dict(self._nodes) if self._line is not None else {}
        payloads: dict[int, int] = {}
        order: list[dict[str, Any]] = []
        blobs: list[bytes] = []
        now = time.monotonic()
        for waiting in self._open.values():
            question, node = waiting.question, nodes.get(waiting.question.node)
            if node is None or now < waiting.again or waiting.left <= 0:
                continue
            if waiting.sent == node and now < waiting.quiet:
                continue
            waiting.sent, waiting.again = node, now + min(PAUSE * 2**waiting.times, LONGEST)
            waiting.quiet = now + max(QUIET, now - waiting.asked)
            waiting.times += 1
            if id(question.payload) not in payloads:
                payloads[id(question.payload)] = len(blobs)
                blobs.append(question.payload)
            header = json.dumps(question.header)
            told = {"id": question.id, "node": node[0], "header": header, "seconds": waiting.left}
            order.append(told | {"payload": payloads[id(question.payload)], "largest": question.largest + ROOM})
        if order:
            self._order({"kind": "push", "questions": order, "payloads": len(blobs)}, *blobs)

    def _response(self, name: str, told: Mapping[str, Any], payload: bytes) -> Response | None:
        """Return the response to a question; None where it is sent again, or was answered before."""
        waiting = self._open.get(name)
        if waiting is None:
            return None
        error, code = told["error"], told["code"]
        if code in LOST and not told["own"]:
            self._again(waiting)
            return None
        if code in (*LOST, *DIED) or error.startswith(WORKER_DIED):
            waiting.deaths += 1
            if waiting.deaths < ATTEMPTS:
                self._again(waiting)
                return None
            return self._close(waiting, error=f"died {ATTEMPTS} times on this question ({error})")
        if error:
            return self._close(waiting, error=f"its Flower app failed (code {code}): {error}" if code else error)
        try:
            header = messages.from_json(told["header"])
        except FedtideError as reason:
            return self._close(waiting, error=f"sent what cannot be read ({reason})")
        return self._close(waiting, header, payload)

    def _again(self, waiting: Open) -> None:
        """Have a question sent again."""
        waiting.sent, waiting.again = None, max(waiting.again, time.monotonic() + PAUSE)

    def _close(
        self, waiting: Open, header: Mapping[str, Any] | None = None, payload: bytes = b"", error: str = ""
    ) -> Response:
        del self._open[waiting.question.id]
        seconds = time.monotonic() - waiting.asked
        return Response(waiting.question.id, waiting.question.node, header or {}, payload, seconds, error)

    def _order(self, order: Mapping[str, Any], *blobs: bytes) -> None:
        with self._lock:
            if self._line is not None:
                self._line.put([json.dumps(order).encode(), *blobs])

    def _accept(self) -> None:
        """Take up the relay of each of Flower's runs, one after the other."""
        while True:
            try:
                line = self._listener.accept()
            except OSError:  # closed
                return
            out: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
            with self._lock:
                self._line, self._nodes = out, {}
                self._relays += 1
            threading.Thread(target=_write, args=(line, out), daemon=True).start()
            self._read(line)
            out.put(None)
            with self._lock:
                self._line = None

    def _read(self, line: Connection) -> None:
        """Keep what the relay says until it is gone."""
        try:
            while True:
                told = json.loads(line.recv_bytes(FRAME))
                if told["kind"] == "nodes":
                    with self._lock:
                        relay = self._relays
                        nodes = {
                            self._names.get(node["key"].strip()): (node["id"], f"{relay} {node['since']}")
                            for node in told["nodes"]
                        }
                        self._nodes = {name: node for name, node in nodes.items() if name is not None}
                        self._heard = time.monotonic()
                else:
                    payload = line.recv_bytes(FRAME)
                    with self._lock:
                        self._answers.append((told["question"], told, payload))
        except (EOFError, OSError):
            return


def _write(line: Connection, out: queue.SimpleQueue[list[bytes] | None]) -> None:
    """Send what is put into the queue; None hangs up."""
    try:
        while (frames := out.get()) is not None:
            for frame in frames:
                line.send_bytes(frame)
        with socket.socket(fileno=os.dup(line.fileno())) as both:
            both.shutdown(socket.SHUT_RDWR)
    except OSError:  # the relay has gone, which its reader sees
        return
