"""Faults of real clients, with processes of their own on the loopback."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("grpc")

from helpers.federation import Federation, until
from helpers.processes import children, used

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.xdist_group("deploy")]

NOT_IN = "the server does not let this node in: its key is not admitted there"
GONE = 120.0
"""Seconds after which a node that was killed is surely known to be gone, or back."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("federation"))
    try:
        made.start("berlin")
        made.start("oslo")
        until(lambda: made.carrier.present() == {"berlin", "oslo"}, GONE)
        yield made
    finally:
        made.close()


def worker_of(federation, name):
    """Return the number of the worker of a node, once it is there."""
    (number,) = until(lambda: children(federation.nodes[name].pid), GONE)
    return number


def test_a_question_is_answered_and_a_node_at_rest_is_small(federation):
    response = federation.ask("berlin", {"times": 2}, b"a tree")
    assert response.error == ""
    assert response.payload == b"a treea tree"
    assert response.header["echo"] == {"times": 2}
    assert used(federation.nodes["berlin"].pid) < 100


def test_a_worker_that_fails_says_no_data_and_answers_the_next_question(federation):
    response = federation.ask("berlin", {"raise": True})
    assert response.header["failed"] == "ValueError"
    assert "secret" not in str(response)
    assert federation.ask("berlin", {"die": True}).error == "its worker died 3 times on this question"
    assert federation.ask("berlin", {}).error == ""
    assert federation.ask("berlin", {"sleep": 600}, seconds=2).error == "late: no answer within its 2 s"
    assert federation.ask("berlin", {}).error == ""
    assert any("a question took longer than it may" in line for line in federation.lines["berlin"])


def test_large_answers_come_through_unless_they_are_too_large(federation):
    assert len(federation.ask("berlin", {"times": 4}, os.urandom(10_000_000)).payload) == 40_000_000
    response = federation.ask("berlin", {"times": 10}, os.urandom(10**6), largest=10**6)
    assert response.error == "sent more than the 1000000 bytes that an answer may have"
    until(lambda: "berlin" in federation.carrier.present(), GONE)
    assert federation.ask("berlin", {}).error == ""


@pytest.mark.parametrize("part", ["node", "worker"])
def test_a_question_is_asked_again_if_its_node_or_worker_is_killed(federation, part):
    before = worker_of(federation, "oslo")
    federation.push("oslo", {"sleep": 2}, seconds=GONE)
    time.sleep(0.5)
    if part == "node":
        federation.stop("oslo", kill=True)
        federation.start("oslo")
    else:
        os.kill(before, signal.SIGKILL)
    response = federation.pull(GONE)
    assert response.payload == b"tree"
    assert response.header["pid"] != before


def test_another_server_at_the_same_address_gets_the_answers_to_its_questions(federation):
    federation.carrier.close()
    federation.serve()
    federation.push("oslo", {}, seconds=GONE)
    assert federation.pull(GONE).payload == b"tree"
    until(lambda: federation.carrier.present() == {"berlin", "oslo"}, GONE)


def test_a_node_that_ends_is_gone_and_one_that_joins_late_is_there(federation):
    federation.start("rome")
    until(lambda: "rome" in federation.carrier.present(), GONE)
    assert federation.ask("rome", {}).error == ""
    federation.stop("rome")
    until(lambda: "rome" not in federation.carrier.present(), GONE)
    assert federation.ask("rome", {}, seconds=0.5).error == "cannot be reached: was not connected within its 0.5 s"


def test_a_key_that_is_not_admitted_and_one_that_is_used_twice_are_told_what_to_do(federation):
    federation.start("stranger", admitted=False)
    assert NOT_IN in until(lambda: federation.lines["stranger"], GONE)[0]
    assert set(federation.carrier.knocked()) == {"stranger"}
    federation.stop("stranger")
    home = federation.root / "berlin"
    federation.start("twin", admitted=False, key=home / "key", name="berlin")
    same = "a node with the same key is connected"
    until(lambda: any(same in line for line in federation.lines["berlin"]), GONE)
    federation.stop("twin")
    assert federation.ask("berlin", {}).error == ""


def test_a_node_that_runs_already_is_not_started_twice(federation):
    federation.lines["berlin"].clear()
    first = federation.nodes["berlin"]
    federation.start("berlin")
    assert federation.nodes["berlin"].wait(GONE) == 2
    (line,) = until(lambda: federation.lines["berlin"], 5.0)  # at once
    assert "another process runs this node already; end it first" in line
    federation.stop("berlin")
    federation.nodes["berlin"] = first


def test_a_removed_key_ends_the_stream_at_once(federation):
    federation.start("rome")
    until(lambda: "rome" in federation.carrier.present(), GONE)
    federation.push("rome", {"sleep": 60})
    del federation.keys["rome"]
    federation.admit()
    assert "rome" not in federation.carrier.present()
    assert federation.pull().error == "its key was removed"
    assert federation.carrier.removed() == {"rome"}
    assert NOT_IN in until(lambda: [line for line in federation.lines["rome"] if "let" in line], GONE)[0]
    federation.stop("rome")


def test_a_node_listens_at_no_port(federation):
    listening = {}  # port by the kernel's number of its socket
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                listening[f"socket:[{words[9]}]"] = int(words[1].rpartition(":")[2], 16)
    assert listening
    for number in (federation.nodes["berlin"].pid, worker_of(federation, "berlin")):
        for file in Path(f"/proc/{number}/fd").iterdir():
            with suppress(OSError):
                assert os.readlink(file) not in listening


def test_when_the_study_is_over_nodes_end(federation):
    federation.carrier.finish()
    for name in ("berlin", "oslo"):
        assert federation.nodes[name].wait(GONE) == 0
        assert federation.lines[name][-1].endswith("the study is over")
