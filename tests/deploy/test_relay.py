"""What passes messages on for a server, with a Flower that is played here."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.task_identity import TaskIdentity

from fedtide.deploy.flower import server_app as module

pytestmark = pytest.mark.deploy


class Flower:
    """Flower's grid, as far as the relay uses it."""

    def __init__(self) -> None:
        self.node, self.run, self._runtime_client = Node(node_id=1), SimpleNamespace(run_id=2), self
        self.there, self.pushed, self.deleted, self.asked_after = {7}, list[Any](), list[str](), set[str]()
        self.replies: dict[str, int] = {}

    def get_nodes(self) -> Any:
        return [SimpleNamespace(node_id=node, public_key=b"PEM", last_activated_at="now") for node in self.there]

    def push_messages(self, messages: Any) -> list[str]:
        self.pushed += messages
        return [f"m{len(self.pushed) - len(messages) + number}" for number in range(len(messages))]

    def PullMessages(self, wanted: Any) -> Any:
        self.asked_after = set(wanted.message_ids)
        told = [
            SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=to, message_id=f"r{to}", src_node_id=node))
            for to, node in self.replies.items()
            if to in wanted.message_ids
        ]
        trees = [ObjectTree(object_id=each.metadata.message_id) for each in told]
        return SimpleNamespace(messages_list=told, message_object_trees=trees)

    def PullObject(self, wanted: Any) -> Any:
        return SimpleNamespace(object_found=False)

    def ConfirmMessageReceived(self, told: Any) -> None:
        self.deleted.append(told.message_object_id)


@pytest.fixture
def relay(monkeypatch):
    monkeypatch.setattr(module, "MEET", 0.0)
    monkeypatch.setattr(module, "POLL", 0.001)
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    flower, (line, other) = Flower(), Pipe()

    def play() -> None:
        with suppress(EOFError, ConnectionError):
            module._relay(flower, other)

    thread = threading.Thread(target=play)
    thread.start()
    yield flower, line
    line.close()
    thread.join()
    other.close()


def push(line: Any, name: str, seconds: float = 100.0, node: int = 7) -> None:
    question = {"id": name, "node": node, "header": "{}", "seconds": seconds, "payload": 0, "largest": 1000}
    line.send_bytes(json.dumps({"kind": "push", "questions": [question], "payloads": 1}).encode())
    line.send_bytes(b"tree")


def looks(line: Any, times: int = 3) -> None:
    """Let the relay look around so often."""
    for _ in range(times):
        assert line.poll(10), "it has ended"
        while json.loads(line.recv_bytes())["kind"] != "nodes":
            line.recv_bytes()


def test_flower_keeps_a_question_for_a_while_however_soon_it_is_late(relay):
    flower, line = relay
    push(line, "soon", seconds=0.01)
    push(line, "later")
    looks(line)
    assert [message.metadata.ttl for message in flower.pushed] == [module.KEPT, 100.0]
    assert [message.content["question"]["seconds"] for message in flower.pushed] == [0.01, 100.0]


def test_flower_is_not_asked_after_nodes_that_are_away(relay):
    flower, line = relay
    push(line, "here")
    push(line, "away", node=8)
    looks(line)
    assert flower.asked_after == {"m0"}
    flower.there = {7, 8}
    looks(line)
    assert flower.asked_after == {"m0", "m1"}


@pytest.mark.parametrize("how", ["answer", "drop", "flower's word"])
def test_copies_of_a_question_that_is_over_are_taken_back(relay, how):
    flower, line = relay
    for name in ("twice", "other", "twice"):
        push(line, name)
    if how == "drop":
        line.send_bytes(json.dumps({"kind": "drop", "questions": ["twice"]}).encode())
    else:
        flower.replies = {"m0": 1 if how == "flower's word" else 7}
    looks(line, 5)
    left = {"m1", "m2"} if how == "flower's word" else {"m1"}
    assert flower.asked_after == left
    assert set(flower.deleted) - {"rm0"} == {"answer": {"m2"}, "drop": {"m0", "m2"}, "flower's word": set()}[how]
