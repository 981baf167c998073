"""Programs in Flower's processes: the relay, with messages that nodes made up, and a node's app."""

from __future__ import annotations

import json
import subprocess
import sys
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.proto.message_pb2 import Message as Head
from flwr.proto.message_pb2 import Metadata, ObjectTree
from flwr.proto.node_pb2 import Node

from fedtide.deploy.flower import client_app, server_app
from helpers import echo_worker

SERVER, NODE = 1, 77


class Answer:
    """An answer as Flower reads it from its pieces."""

    def __init__(self, header: Any = "{}", data: bytes = b"numbers") -> None:
        self.content = {"answer": {"json": header, "error": ""}, "tree": {"tree": SimpleNamespace(data=data)}}

    def has_error(self) -> bool:
        """Whether it is an error."""
        return False


class Failure:
    """An error in place of an answer."""

    error = SimpleNamespace(code=5, reason="unavailable")

    def has_error(self) -> bool:
        """Whether it is an error."""
        return True


class Flower:
    """A Flower that is played here: messages by the question that they answer, and pieces that are there by then."""

    def __init__(self, messages: dict[str, dict[str, bytes | None]], rounds: int = 4, source: int = NODE) -> None:
        self.messages, self.rounds, self.source = messages, rounds, source
        self.node, self.run, self._runtime_client = Node(node_id=SERVER), SimpleNamespace(run_id=3), self
        self.pieces = {name: piece for each in messages.values() for name, piece in each.items()}
        self.here: Any = None
        self.meanwhile: dict[str, Any] | None = None
        self.away = False
        self.confirmed: list[str] = []
        self.asked: list[str] = []

    def get_nodes(self) -> list[Any]:
        """Return the node, unless it is away, and end the relay after some looks."""
        self.rounds -= 1
        if self.rounds < 0:
            raise EOFError
        here = SimpleNamespace(node_id=NODE, public_key=b"key", last_activated_at="now")
        return [] if self.away else [here]

    def push_messages(self, messages: list[Any]) -> list[str]:
        """Take one question."""
        return ["question"]

    def PullMessages(self, request: Any) -> Any:
        """Tell of all messages at once."""
        heads, trees = [], []
        for to, pieces in self.messages.items():
            root = f"of {to}"
            about = Metadata(message_id=root, reply_to_message_id=to, src_node_id=self.source)
            heads.append(Head(metadata=about))
            trees.append(ObjectTree(object_id=root, children=[ObjectTree(object_id=name) for name in pieces]))
            self.pieces[root] = b"."
        self.messages = {}
        if self.meanwhile is not None:
            self.here.send_bytes(json.dumps(self.meanwhile).encode())
        return SimpleNamespace(messages_list=heads, message_object_trees=trees)

    def PullObject(self, request: Any) -> Any:
        """Hand out a piece, if it is there."""
        self.asked.append(request.object_id)
        piece = self.pieces.get(request.object_id, b"")
        return SimpleNamespace(object_found=piece is not None, object_available=piece != b"", object_content=piece)

    def ConfirmMessageReceived(self, request: Any) -> None:
        """Delete a message."""
        self.confirmed.append(request.message_object_id)


@pytest.fixture
def relayed(monkeypatch):
    """Ask one question over a relay; what the serving process hears."""
    monkeypatch.setattr(server_app, "Message", lambda *args, **kwargs: None)  # wants a run of Flower
    monkeypatch.setattr(server_app, "MEET", 0.0)
    monkeypatch.setattr(server_app, "POLL", 0.001)

    def relay(flower: Flower, read: Any, largest: int = 100) -> list[tuple[dict[str, Any], bytes]]:
        monkeypatch.setattr(server_app, "inflate_object_from_contents", read)
        here, there = Pipe()
        flower.here = here
        question = {"id": "q", "node": NODE, "header": "{}", "seconds": 9.0, "payload": 0, "largest": largest}
        here.send_bytes(json.dumps({"kind": "push", "payloads": 1, "questions": [question]}).encode())
        here.send_bytes(b"model")
        with pytest.raises(EOFError):
            server_app._relay(flower, there)
        there.close()
        heard = []
        while here.poll():
            try:
                told = json.loads(here.recv_bytes())
            except EOFError:
                break
            if told["kind"] == "answer":
                heard.append((told, here.recv_bytes()))
        return heard

    return relay


def test_an_answer_is_passed_on_once_all_its_pieces_are_there(relayed):
    flower = Flower({"question": {"a": b"12", "b": b"34", "c": b"56"}})
    seen = {}

    def read(number, pieces):
        seen.update(pieces, number=number)
        return Answer()

    ((told, payload),) = relayed(flower, read)
    assert (told["question"], told["own"], told["code"], payload) == ("q", True, 0, b"numbers")
    assert seen == {"a": b"12", "b": b"34", "c": b"56", "of question": b".", "number": "of question"}
    assert flower.confirmed == ["of question"]


def test_what_answers_nothing_is_not_even_fetched(relayed):
    flower = Flower({"": {"a": b"1"}, "of another": {"b": b"2"}})
    assert relayed(flower, lambda *_: Answer()) == []
    assert flower.asked == []


def _fails(*_):
    raise IndexError("list index out of range")


@pytest.mark.parametrize(
    "read", [_fails, lambda *_: object(), lambda *_: Answer(header=[1.0]), lambda *_: Answer(header="x" * 2**21)]
)
def test_what_cannot_be_read_is_the_fault_of_its_node_alone(relayed, read):
    ((told, payload),) = relayed(Flower({"question": {"a": b"1"}}), read)
    assert told["error"].startswith("sent something else than an answer (")
    assert (told["code"], payload) == (0, b"")


def test_an_answer_that_is_too_large_is_not_fetched_to_its_end(relayed):
    flower = Flower({"question": dict.fromkeys("abcdef", b"x" * 60)})
    ((told, payload),) = relayed(flower, lambda *_: Answer(), largest=100)
    assert told["error"] == "sent more than the 100 bytes that an answer may have"
    assert payload == b""
    assert flower.asked == ["a", "b"]
    assert flower.confirmed == ["of question"]
    flower = Flower({"question": dict.fromkeys("abcdefgh", b"")})
    ((told, payload),) = relayed(flower, lambda *_: Answer(), largest=100)
    assert told["error"] == "sent more pieces than an answer may have"
    assert flower.confirmed == ["of question"]


def test_an_answer_whose_pieces_never_come_holds_nobody_up(relayed):
    flower = Flower({"question": {"a": b""}}, rounds=20)
    assert relayed(flower, lambda *_: Answer()) == []  # and the relay has looked for nodes 20 times meanwhile
    assert len(flower.asked) > 10
    flower = Flower({"question": {"a": b""}}, rounds=20)
    flower.pieces["a"] = None  # given up by Flower
    ((told, _),) = relayed(flower, lambda *_: Answer())
    assert (told["error"], told["code"], told["own"]) == ("did not send all of its answer", 8, True)


def test_flower_is_not_asked_after_a_node_that_is_away(relayed):
    """It would give the question up, and so the answer of one that was only slow to say that it lives."""
    flower = Flower({"question": {"a": b"12"}})
    flower.away = True
    assert relayed(flower, lambda *_: Answer()) == []
    assert flower.messages  # still there for when it is back


def test_an_answer_to_a_question_that_is_over_is_deleted(relayed):
    flower = Flower({"question": {"a": b""}}, rounds=20)
    flower.meanwhile = {"kind": "drop", "questions": ["q"]}
    assert relayed(flower, lambda *_: Answer()) == []
    assert flower.confirmed == ["of question"]
    assert len(flower.asked) < 10


@pytest.mark.parametrize(("source", "own"), [(NODE, True), (SERVER, False)])
def test_it_is_told_whether_an_error_is_the_node_s_own(relayed, source, own):
    ((told, _),) = relayed(Flower({"question": {}}, source=source), lambda *_: Failure())
    assert (told["code"], told["error"], told["own"]) == (5, "unavailable", own)


def test_a_question_waits_for_a_worker_that_is_being_started(tmp_path, monkeypatch):
    """As one is that took too long, or died, at the question before."""
    path = tmp_path / "worker"
    with pytest.raises(FileNotFoundError):
        client_app._exchange(str(path), "{}", b"tree", 0.3)
    worker = subprocess.Popen([sys.executable, echo_worker.__file__, str(path)])
    try:
        told, answer = client_app._exchange(str(path), '{"times": 2}', b"tree", 60.0)
    finally:
        worker.kill()
        worker.wait()
    assert json.loads(told)["echo"] == {"times": 2}
    assert answer == b"treetree"
