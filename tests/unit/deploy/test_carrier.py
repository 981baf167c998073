"""The carrier over Flower, with a relay that is played here."""

import itertools
import json
import os
import stat
import time
from multiprocessing.connection import Client

import pytest

from fedtide.deploy.flower import carrier as module
from fedtide.deploy.flower.carrier import FlowerCarrier
from fedtide.fleets.carrier import Question

KEYS = {"berlin": "PEM of berlin", "oslo": "PEM of oslo"}


class Relay:
    """What Flower's ServerApp is to the carrier."""

    def __init__(self, carrier):
        self.line = Client(str(carrier.socket), "AF_UNIX")

    def nodes(self, **lives):
        shown = [{"id": n, "key": f"PEM of {name}\n", "since": life} for n, (name, life) in enumerate(lives.items())]
        self.say({"kind": "nodes", "nodes": shown})

    def say(self, told, *payloads):
        for frame in (json.dumps(told).encode(), *payloads):
            self.line.send_bytes(frame)

    def order(self):
        assert self.line.poll(5)
        told = json.loads(self.line.recv_bytes())
        return told, [self.line.recv_bytes() for _ in range(told.get("payloads", 0))]

    def answer(self, question, header="{}", payload=b"", error="", code=0, own=True):
        told = {"kind": "answer", "question": question, "header": header, "error": error, "code": code, "own": own}
        self.say(told, payload)


@pytest.fixture
def carrier():
    with FlowerCarrier() as made:
        made.admit(KEYS)
        yield made


def until(check, seconds=5.0):
    end = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def ask(name, node="berlin", payload=b"tree", expires=5.0):
    return Question(name, node, {"kind": "who"}, payload, expires, 1000)


def test_its_socket_is_for_nobody_else(carrier):
    assert stat.S_IMODE(os.stat(carrier.socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(carrier.socket.parent).st_mode) == 0o700


def test_questions_go_to_nodes_and_answers_come_back(carrier):
    relay = Relay(carrier)
    relay.nodes(berlin="1", oslo="1", stranger="1")
    assert until(carrier.present) == {"berlin", "oslo"}
    payload = b"a tree" * 1000
    carrier.push([ask("q.berlin", payload=payload), ask("q.oslo", "oslo", payload)])
    told, payloads = relay.order()
    assert payloads == [payload]  # what many are sent goes over the line once
    assert [(q["id"], q["node"], q["payload"]) for q in told["questions"]] == [("q.berlin", 0, 0), ("q.oslo", 1, 0)]
    assert all(4 < q["seconds"] <= 5 for q in told["questions"])
    assert all(q["largest"] == 1000 + module.ROOM for q in told["questions"])
    relay.answer("q.oslo", '{"failed": ""}', b"answer")
    (response,) = until(carrier.pull)
    assert (response.id, response.node, response.header, response.payload) == (
        "q.oslo",
        "oslo",
        {"failed": ""},
        b"answer",
    )
    assert response.error == ""
    assert 0 < response.seconds < 5
    relay.answer("q.oslo", payload=b"again")
    relay.answer("q.berlin", "[" * 100_000)
    (response,) = until(carrier.pull)
    assert response.node == "berlin"
    assert response.error.startswith("sent what cannot be read")
    assert not response.payload


def test_questions_of_a_node_whose_key_is_removed_are_over(carrier):
    relay = Relay(carrier)
    relay.nodes(berlin="1", oslo="1")
    until(carrier.present)
    carrier.push([ask("q.berlin"), ask("q.oslo", "oslo")])
    relay.order()
    carrier.admit({"oslo": KEYS["oslo"]})
    assert carrier.present() == {"oslo"}
    assert carrier.removed() == {"berlin"}
    assert carrier.removed() == set()
    (over,) = carrier.pull()
    assert (over.id, over.error) == ("q.berlin", "its key was removed")
    assert relay.order()[0] == {"kind": "drop", "questions": ["q.berlin"]}
    relay.answer("q.berlin")
    relay.answer("q.oslo")
    assert [response.id for response in until(carrier.pull)] == ["q.oslo"]


def test_a_question_waits_for_its_node_until_it_expires(carrier):
    relay = Relay(carrier)
    relay.nodes(oslo="1")
    until(carrier.present)
    carrier.push([ask("q", expires=0.4), ask("later", expires=5)])
    (response,) = until(carrier.pull)
    assert response.error == "cannot be reached: was not there within its 0.4 s"
    assert 0.4 <= response.seconds < 2
    relay.order()  # the first is dropped
    relay.nodes(oslo="1", berlin="1")
    until(lambda: "berlin" in carrier.present())
    carrier.pull()
    assert [q["id"] for q in relay.order()[0]["questions"]] == ["later"]


def test_without_an_answer_it_is_late(carrier):
    relay = Relay(carrier)
    relay.nodes(berlin="1")
    until(carrier.present)
    carrier.push([ask("q", expires=0.3)])
    assert relay.order()[0]["kind"] == "push"
    (response,) = until(carrier.pull)
    assert response.error == "late: no answer within its 0.3 s"
    assert relay.order()[0] == {"kind": "drop", "questions": ["q"]}
    relay.answer("q", payload=b"too late")
    time.sleep(0.1)
    assert carrier.pull() == []


def test_a_question_of_which_nothing_is_heard_is_sent_once_more(carrier, monkeypatch):
    """Flower may have handed it to a node that never got it; then it is whatever copy is answered."""
    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setattr(module, "QUIET", 0.1)
    relay = Relay(carrier)
    relay.nodes(berlin="1")
    until(carrier.present)
    carrier.push([ask("q")])
    began, sent = time.monotonic(), 0
    while time.monotonic() < began + 1.0:  # after 0.1, 0.2, 0.4, 0.8 seconds
        assert carrier.pull() == []
        while relay.line.poll(0.01):
            assert [q["id"] for q in relay.order()[0]["questions"]] == ["q"]
            sent += 1
    assert 3 <= sent <= 5
    relay.answer("q")
    (response,) = until(carrier.pull)
    assert response.error == ""


@pytest.mark.parametrize("how", ["node", "relay", "code 5", "worker"])
def test_what_died_is_asked_again(carrier, monkeypatch, how):
    monkeypatch.setattr(module, "PAUSE", 0.0)
    relay = Relay(carrier)
    relay.nodes(berlin="1")
    until(carrier.present)
    carrier.push([ask("q")])
    relay.order()
    if how == "node":
        relay.nodes(berlin="2")
    elif how == "relay":
        relay.line.close()
        until(lambda: not carrier.connected)
        assert carrier.present() == set()
        relay = Relay(carrier)
        relay.nodes(berlin="1")
    elif how == "code 5":
        for _ in range(2 * module.ATTEMPTS):
            relay.answer("q", error="node unavailable", code=5, own=False)
            until(lambda: carrier.pull() == [] and relay.line.poll(0))
            relay.order()
        relay.answer("q", error="node unavailable", code=5, own=False)
    else:
        relay.answer("q", error="its worker died or is being started (EOFError)")
    until(lambda: carrier.pull() == [] and relay.line.poll(0))
    told, payloads = relay.order()
    assert [q["id"] for q in told["questions"]] == ["q"]
    assert payloads == [b"tree"]
    relay.answer("q")
    (response,) = until(carrier.pull)
    assert response.error == ""


def test_a_node_that_dies_all_the_time_is_sent_its_question_ever_more_seldom(carrier, monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.1)
    relay = Relay(carrier)
    relay.nodes(berlin="0")
    until(carrier.present)
    carrier.push([ask("q")])
    sent, end = 0, time.monotonic() + 1.0  # after 0.1, 0.3, 0.7 seconds
    for life in itertools.count(1):
        relay.nodes(berlin=str(life))
        time.sleep(0.005)
        assert carrier.pull() == []
        while relay.line.poll(0):
            relay.order()
            sent += 1
        if time.monotonic() > end:
            break
    assert 2 <= sent <= 5


@pytest.mark.parametrize(
    ("error", "code"), [("its worker died or is being started (EOFError)", 0), ("no memory", 8), ("lost", 3), ("x", -1)]
)
def test_a_question_that_takes_workers_down_is_given_up(carrier, monkeypatch, error, code):
    monkeypatch.setattr(module, "PAUSE", 0.0)
    relay = Relay(carrier)
    relay.nodes(berlin="1")
    until(carrier.present)
    carrier.push([ask("q")])
    for _ in range(module.ATTEMPTS):
        until(lambda: carrier.pull() == [] and relay.line.poll(0))
        relay.order()
        relay.answer("q", error=error, code=code)  # a node may say of itself what Flower says of nodes that are gone
    (response,) = until(carrier.pull)
    assert response.error == f"died 3 times on this question ({error})"


def test_an_app_that_fails_is_an_error(carrier):
    relay = Relay(carrier)
    relay.nodes(berlin="1")
    until(carrier.present)
    carrier.push([ask("q")])
    relay.order()
    relay.answer("q", error="ValueError", code=2)
    (response,) = until(carrier.pull)
    assert response.error == "its Flower app failed (code 2): ValueError"


def test_a_relay_that_says_nothing_leaves_nobody_present(carrier, monkeypatch):
    relay = Relay(carrier)
    relay.nodes(berlin="1")
    until(carrier.present)
    monkeypatch.setattr(module, "SILENCE", 0.0)
    assert carrier.present() == set()


def test_closing_ends_the_relay():
    carrier = FlowerCarrier()
    relay = Relay(carrier)
    until(lambda: carrier.connected)
    carrier.close()
    with pytest.raises(EOFError):
        relay.line.recv_bytes()
    assert not carrier.socket.exists()
