"""Faults of real clients, with Flower's own processes on the loopback."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import ssl
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

import httpx

from fedtide.core.errors import FedtideError
from fedtide.deploy import certificates
from fedtide.deploy.flower import carrier
from fedtide.deploy.flower.processes import free_port
from fedtide.deploy.join import check_server
from helpers.federation import Federation, until

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.xdist_group("deploy")]

NOT_IN = "supernode: the server does not let this node in: its key is not admitted there"
GONE = 600.0
"""Seconds after which a node that was killed is surely known to be gone, or back."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("federation"))
    try:
        made.link.wait()
        made.start("berlin")
        made.start("oslo")
        until(lambda: made.carrier.present() == {"berlin", "oslo"}, GONE)
        yield made
    finally:
        made.close()


def test_a_question_is_answered_and_a_node_at_rest_is_small(federation):
    response = federation.ask("berlin", {"times": 2}, b"a tree")
    assert response.error == ""
    assert response.payload == b"a treea tree"
    assert response.header["echo"] == {"times": 2}
    assert response.header["seconds"] < 1
    files = [federation.number("berlin", "worker"), federation.number("berlin", "supernode")]
    files.append(federation.nodes["berlin"].pid)
    with open(f"/proc/{files[1]}/task/{files[1]}/children") as children:
        files += map(int, children.read().split())
    used = {}
    for number in files:
        with open(f"/proc/{number}/status") as status:
            used[number] = next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1000
    assert sum(used.values()) < 600, used


def test_an_error_of_the_work_says_no_data(federation):
    response = federation.ask("berlin", {"raise": True})
    assert response.header["failed"] == "ValueError"
    assert "secret" not in str(response)


def test_40_mb_come_through(federation):
    response = federation.ask("berlin", {"times": 4}, os.urandom(10_000_000))
    assert len(response.payload) == 40_000_000


def test_a_worker_that_dies_is_asked_again_three_times(federation):
    response = federation.ask("berlin", {"die": True}, seconds=180)
    assert response.error.startswith("died 3 times on this question (its worker died")
    assert federation.ask("berlin", {}).error == ""


def test_a_slow_node_is_late_and_answers_the_next_question(federation):
    began = time.monotonic()
    response = federation.ask("berlin", {"sleep": 600}, seconds=20)
    assert response.error == "late: no answer within its 20 s"
    assert time.monotonic() - began < 25
    assert federation.ask("berlin", {}).error == ""


def test_a_node_that_is_killed_in_the_midst_of_a_question_is_asked_again(federation):
    federation.push("berlin", {"sleep": 5}, seconds=GONE)
    time.sleep(8)
    for process in ("supernode", "worker"):
        os.killpg(federation.number("berlin", process), signal.SIGKILL)
    response = federation.pull(GONE)
    assert response.error == ""
    assert response.payload == b"tree"


def test_a_server_that_is_killed_in_the_midst_of_a_question_gets_its_answer(federation):
    log = federation.root / "oslo" / "run" / "supernode.log"
    asked = log.read_text().count("Received successfully")
    federation.push("oslo", {"sleep": 10}, seconds=GONE)
    until(lambda: log.read_text().count("Received successfully") > asked, GONE)
    os.killpg(federation.number("", "superlink"), signal.SIGKILL)
    assert federation.carrier.pull() == []
    response = federation.pull(GONE)
    assert response.error == ""
    ended = "see " + str(federation.root / "flower/server/superlink.log")
    until(lambda: any(line.endswith(ended) for line in federation.said), GONE)
    until(lambda: federation.carrier.present() == {"berlin", "oslo"}, GONE)


def test_a_question_with_hardly_any_time_left_is_late_and_flower_goes_on(federation):
    relay = federation.carrier._relays
    assert federation.ask("oslo", {}, seconds=0.01).error == "late: no answer within its 0.01 s"
    assert federation.ask("oslo", {}).error == ""
    assert federation.carrier._relays == relay


def test_a_node_that_ends_is_gone_and_one_that_joins_late_is_there(federation):
    federation.start("rome")
    until(lambda: "rome" in federation.carrier.present(), GONE)
    assert federation.ask("rome", {}).error == ""
    federation.stop("rome")
    until(lambda: "rome" not in federation.carrier.present(), GONE)
    response = federation.ask("rome", {}, seconds=2)
    assert response.error == "cannot be reached: was not there within its 2 s"


def test_a_key_that_is_not_admitted_and_one_that_is_used_twice_are_told_what_to_do(federation):
    federation.start("stranger", admitted=False)
    line = until(lambda: federation.lines["stranger"], GONE)[0]
    assert NOT_IN in line
    federation.start("twin", admitted=False, key=federation.root / "berlin" / "key")
    line = until(lambda: federation.lines["twin"], GONE)[0]
    assert "or a node with the same key is connected" in line
    assert "stranger" not in federation.carrier.present()
    federation.stop("stranger")
    federation.stop("twin")


def test_another_authority_is_named(federation, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    certificates.make_authority(other, "127.0.0.1:1")
    with pytest.raises(
        FedtideError, match=r"of another authority than the ticket's .*ask the server's owner for a new"
    ):
        check_server(f"127.0.0.1:{federation.port}", other / "ca.crt")
    federation.start("wrong", admitted=False, ca=other / "ca.crt")
    line = until(lambda: federation.lines["wrong"], GONE)[0]
    assert "the server's certificate is of another authority than this node's ca.crt" in line
    federation.stop("wrong")


def test_what_is_no_server_is_named(federation, tmp_path):
    ca = federation.authority / "ca.crt"
    assert "has a certificate of the ticket's authority" in check_server(f"127.0.0.1:{federation.port}", ca)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def answer():
            for said in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b""):  # the second as a proxy whose server is away
                line, _ = listening.accept()
                line.recv(1000)
                line.sendall(said)
                line.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(
            FedtideError, match=r"does not speak TLS .*: something else than 'fedtide serve' listens there"
        ):
            check_server(f"127.0.0.1:{listening.getsockname()[1]}", ca)
        said = check_server(f"127.0.0.1:{listening.getsockname()[1]}", ca)
        assert "hangs up, as what stands before a server does while that is away; the node goes on trying" in said
    assert "cannot be reached now" in check_server(f"127.0.0.1:{free_port()}", ca)
    with pytest.raises(FedtideError, match="finds no such host"):
        check_server("no-such-host.invalid:8300", ca)


def test_nothing_but_the_gate_listens_at_a_port(federation):
    listening = {}  # port by the kernel's number of its socket
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                listening[f"socket:[{words[9]}]"] = int(words[1].rpartition(":")[2], 16)
    ports = {}
    leaders = {("", name): federation.number("", name) for name in ("superlink", "gate")}
    leaders |= {("berlin", name): federation.number("berlin", name) for name in ("supernode", "worker")}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            whose = next((name for name, leader in leaders.items() if os.getsid(int(process.name)) == leader), None)
            if whose is not None:
                open_files = [os.readlink(file) for file in (process / "fd").iterdir()]
                ports.setdefault(whose, set()).update(listening[file] for file in open_files if file in listening)
    assert ports == {name: {federation.port} if name == ("", "gate") else set() for name in leaders}


def test_a_certificate_is_made_anew_while_a_server_runs(federation):
    before = {name: federation.number("", name) for name in ("superlink", "gate")}
    certificates.renew(federation.authority, f"127.0.0.1:{federation.port}")
    until(lambda: sum("starts again with its new server.crt" in line for line in federation.said) == 2, GONE)
    until(lambda: all(federation.number("", name) not in (0, before[name]) for name in before), GONE)
    assert federation.ask("berlin", {}, seconds=GONE).error == ""
    certificate = ssl.get_server_certificate(("127.0.0.1", federation.port))
    assert certificate.split() == (federation.authority / "server.crt").read_text().split()


def test_an_answer_that_is_too_large_is_its_nodes_fault(federation):
    response = federation.ask("berlin", {"times": 10}, os.urandom(10**6), largest=10**6)
    assert response.error.startswith("sent more than the ")
    assert federation.ask("berlin", {}).error == ""


@pytest.fixture(scope="module")
def mallory(federation):
    """A node that is admitted, and whose program is its own: its number, and its line to the server."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key = ec.generate_private_key(ec.SECP384R1())
    federation.keys["mallory"] = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    ca = (federation.authority / "ca.crt").read_bytes()
    signed = [NodeAuthHttpInterceptor(key, key.public_key())]
    with FleetHttpClient.from_server_address(f"127.0.0.1:{federation.port}", False, ca, signed) as line:

        def activated():
            with suppress(httpx.HTTPStatusError):  # not admitted yet
                wanted = ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=1800)
                return line.ActivateNode(wanted).node_id

        number = until(activated, GONE)
        until(lambda: "mallory" in federation.carrier.present(), GONE)
        yield number, line
        del federation.keys["mallory"]
        until(lambda: "mallory" not in federation.carrier.present(), GONE)


def pushed(mallory, about, pieces, **changes):
    """Push a message of these pieces, the last of which is the message itself; return what the server wants of it."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
    from flwr.proto.node_pb2 import Node
    from flwr.proto.recorddict_pb2 import RecordDict

    number, line = mallory
    *others, root = [hashlib.sha256(piece).hexdigest() for piece in pieces]
    told = {"src_node_id": number, "dst_node_id": 1, "reply_to_message_id": about.message_id} | changes
    told |= {"run_id": about.run_id, "message_id": root, "message_type": about.message_type, "group_id": about.group_id}
    head = Message(metadata=Metadata(**told, created_at=time.time(), ttl=about.ttl - 60), content=RecordDict())
    tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=each) for each in others])
    wanted = PushMessagesRequest(node=Node(node_id=number), messages_list=[head], message_object_trees=[tree])
    return line.PushMessages(wanted)


def asked(federation, mallory, seconds):
    """Ask the node something; what it needs to know to answer."""
    federation.push("mallory", {}, seconds=seconds)
    return handed_out(mallory)


def handed_out(mallory, meanwhile=lambda: True):
    """Wait for what Flower hands out to the node."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.node_pb2 import Node

    number, line = mallory
    wanted = PullMessagesRequest(node=Node(node_id=number))
    return until(lambda: meanwhile() and line.PullMessages(wanted).messages_list, GONE)[0].metadata


def answered_by_garbage(mallory, about):
    """Push a whole message, by its hash and its head, that is none."""
    from flwr.proto.message_pb2 import PushObjectRequest
    from flwr.proto.node_pb2 import Node

    number, line = mallory
    piece = b"Message  7\x00garbage"
    session = pushed(mallory, about, [piece]).session_id
    told = {"node": Node(node_id=number), "run_id": about.run_id, "session_id": session}
    assert line.PushObject(
        PushObjectRequest(**told, object_id=hashlib.sha256(piece).hexdigest(), object_content=piece)
    ).stored


def test_a_node_asks_nobody_and_answers_for_itself_alone(federation, mallory):
    about = asked(federation, mallory, 30.0)
    berlin = federation.carrier._nodes["berlin"][0]
    for changes in (
        {"reply_to_message_id": ""},
        {"reply_to_message_id": "", "src_node_id": 1},
        {"reply_to_message_id": "", "src_node_id": 1, "dst_node_id": berlin},
        {"src_node_id": berlin},
    ):
        with pytest.raises(httpx.HTTPStatusError, match="403"):
            pushed(mallory, about, [b"x"], **changes)
    assert federation.pull().error == "late: no answer within its 30 s"
    assert federation.ask("berlin", {}).error == ""


def test_a_question_that_is_lost_on_its_way_is_asked_again(federation, mallory, monkeypatch):
    monkeypatch.setattr(carrier, "QUIET", 3.0)
    asked(federation, mallory, GONE)  # and nothing more is heard of it
    about = handed_out(mallory, lambda: federation.carrier.pull() == [])
    answered_by_garbage(mallory, about)
    assert federation.pull().error.startswith("sent something else than an answer (")


def test_what_a_node_makes_up_or_keeps_back_holds_nobody_up(federation, mallory):
    relay = federation.carrier._relays
    answered_by_garbage(mallory, asked(federation, mallory, 120.0))
    assert federation.pull().error.startswith("sent something else than an answer (")
    about = asked(federation, mallory, 150.0)
    pushed(mallory, about, [b"never", b"comes"])
    federation.push("berlin", {}, seconds=GONE)
    first, second = federation.pull(), federation.pull()
    assert (first.node, first.error) == ("berlin", "")
    assert (second.node, second.error) == ("mallory", "late: no answer within its 150 s")
    assert federation.carrier._relays == relay


@pytest.mark.parametrize(
    "path", ["/v1/control/start-run", "/v1/fleet/register-node", "/v1/runtime/acquire-task", "/docs"]
)
def test_nobody_commands_the_server_from_outside(federation, path):
    context = ssl.create_default_context(cafile=str(federation.authority / "ca.crt"))
    with (
        socket.create_connection(("127.0.0.1", federation.port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as line,
    ):
        line.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 403")
