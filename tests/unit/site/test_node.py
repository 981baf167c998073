"""The program of a node: it ends when it should, with the status that it should, and its worker ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("grpc")

from fedtide.core.errors import FedtideError
from fedtide.site.node_process import node_command, write_settings
from helpers.federation import Federation, until
from helpers.processes import children

WORK = """
import json, os, sys, time
from multiprocessing.connection import Connection

line = Connection(int(sys.argv[-1]))
line.send_bytes(b"ready")
while True:
    header, payload = json.loads(line.recv_bytes()), line.recv_bytes()
    time.sleep(header.get("sleep", 0))
    line.send_bytes(json.dumps({"pid": os.getpid()}).encode())
    line.send_bytes(payload)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("node"))
    made.work = made.root / "work.py"
    made.work.write_text(WORK)
    yield made
    made.close()


def start(federation, name="berlin"):
    federation.start(name, worker=federation.work)
    until(lambda: name in federation.carrier.present(), 20.0)
    (worker,) = until(lambda: children(federation.nodes[name].pid), 20.0)
    return federation.nodes.pop(name), worker


def gone(number):
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda each: each.name)
@pytest.mark.parametrize("busy", [False, True], ids=["at rest", "at work"])
def test_a_node_that_is_ended_ends_well_and_its_worker_with_it(federation, number, busy):
    process, worker = start(federation)
    with process:
        if busy:
            federation.push("berlin", {"sleep": 100}, seconds=1.0)
            time.sleep(0.3)
        process.send_signal(number)
        assert process.wait(10.0) == 0
        until(lambda: gone(worker), 5.0)
        until(lambda: "berlin" not in federation.carrier.present(), 10.0)
        assert not any("Traceback" in line for line in federation.lines["berlin"])
    if busy:
        assert federation.pull().error.startswith("late: ")


def test_a_node_ends_when_its_input_does(federation):
    process, worker = start(federation)
    with process:
        process.stdin.close()
        assert process.wait(10.0) == 0
        until(lambda: gone(worker), 5.0)


@pytest.mark.parametrize("busy", [False, True], ids=["at rest", "at work"])
def test_a_node_whose_study_is_over_ends_well(federation, busy):
    """A question that is still at work, and was given up, does not keep it."""
    process, worker = start(federation)
    with process:
        if busy:
            federation.push("berlin", {"sleep": 100}, seconds=500.0)
            time.sleep(0.3)
        federation.carrier.finish()
        assert process.wait(10.0) == 0
        until(lambda: gone(worker), 5.0)
        until(lambda: federation.lines["berlin"][-1].endswith("the study is over"), 5.0)
    federation.serve()


def run_once(path):
    """Run a node that ends by itself; return its status and what it said."""
    found = subprocess.run(node_command(path), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert "Traceback" not in found.stdout + found.stderr
    assert len(found.stdout.splitlines()) == 1, found
    return found.returncode, found.stdout.strip().partition(" ")[2]


def told(federation, name, **changes):
    worker = [sys.executable, "-S", str(federation.work)]
    return write_settings(
        federation.root / name, {}, federation.line(name, worker=worker, with_parent=False, **changes)
    )


def test_a_key_that_others_may_read_is_one_line(federation):
    path = told(federation, "rome")
    key = federation.root / "rome" / "key"
    key.chmod(0o644)
    assert run_once(path) == (2, f"error: {key}: mode: found '0644', allowed: 0600; mend it with: chmod 600 {key}")


@pytest.mark.parametrize(
    "content", [b"", b"no key", b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n", bytes(range(256))], ids=range(4)
)
def test_a_key_that_is_damaged_is_one_line(federation, content):
    path = told(federation, "oslo")
    key = federation.root / "oslo" / "key"
    before = key.read_bytes()
    key.write_bytes(content)
    with pytest.raises(FedtideError) as error:
        federation.line("oslo").known  # noqa: B018
    assert str(error.value).startswith(f"{key}: damaged or not a private key of OpenSSH")
    assert "\n" not in str(error.value)
    key.write_bytes(before)
    assert path.exists()


def test_a_node_that_its_server_will_never_let_in_is_one_line(federation):
    federation.known("oslo")
    path = told(federation, "oslo", run="f" * 16)
    status, line = run_once(path)
    assert status == 2
    assert line.startswith(f"error: server 127.0.0.1:{federation.port}: the server plays another study than that")


def test_a_folder_is_of_one_node_and_of_the_next_when_that_ends(federation):
    first, worker = start(federation)
    federation.start("berlin", worker=federation.work)
    with first:
        time.sleep(0.5)
        first.kill()
        first.wait()
        first.stdin.close()
    until(lambda: gone(worker), 10.0)
    assert federation.ask("berlin", {}, seconds=30.0).payload == b"tree"
    federation.stop("berlin")
