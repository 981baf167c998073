"""The connected process of a node and its worker: there when needed, whatever dies, with each mistake said once."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("grpc")

from fedtide.remote import asks
from fedtide.remote.grpc.line import Failed
from fedtide.site import node_process
from fedtide.site.node_process import Refusals, Worker, answer_questions, node_command, write_log, write_settings
from helpers.federation import Federation, until
from helpers.processes import children, gone

WORK = """
import json, os, sys, time
from multiprocessing.connection import Connection

print("it starts", flush=True)
line = Connection(int(sys.argv[-1]))
line.send_bytes(b"ready")
while True:
    header, payload = json.loads(line.recv_bytes()), line.recv_bytes()
    print("x" * header.get("words", 0), flush=True)
    if header.get("die"):
        os._exit(9)
    time.sleep(header.get("sleep", 0))
    line.send_bytes(json.dumps({"pid": os.getpid()}).encode())
    line.send_bytes(payload * header.get("times", 1))
"""
"""A worker without torch, which starts in no time."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


# -- the worker of a node ----------------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a worker of a program; its lines are in `said`."""
    for name, value in {"SHORTEST": 0.05, "LONGEST": 0.1, "LOOK": 0.01, "OVERTIME": 0.1}.items():
        monkeypatch.setattr(node_process, name, value)
    workers = []

    def start(program=WORK, log=tmp_path / "worker.log", **options):
        (tmp_path / "work.py").write_text(program)
        said = []
        worker = Worker([sys.executable, "-S", str(tmp_path / "work.py")], log, said.append, **options)
        worker.said, worker.program = said, tmp_path / "work.py"
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.close()


def ask(worker, payload=b"tree", seconds=10.0, **header):
    header, sent = worker.answer(json.dumps(header).encode(), payload, seconds)
    return json.loads(header)["pid"], sent


def test_a_worker_is_started_and_kept_between_questions(make):
    worker = make()
    first, sent = ask(worker, times=3)
    assert sent == b"treetreetree"
    assert (ask(worker)[0], worker.said) == (first, [])
    os.kill(first, 9)
    until(lambda: worker.keep() or (worker._process and worker._process.pid != first), 5.0)
    assert ask(worker)[0] != first
    (line,) = worker.said
    assert line.startswith("worker: ended with status -9 after 0 s; see ")


def test_a_worker_that_dies_at_its_start_is_said_once(make, monkeypatch):
    starts, begin = [], Worker._start
    monkeypatch.setattr(Worker, "_start", lambda self: (starts.append(1), begin(self))[1])
    worker = make("raise SystemExit(3)")
    until(lambda: worker.keep() or len(starts) > 3, 10.0)
    (line,) = worker.said
    assert line.startswith("worker: ended with status 3 after 0 s; see ")
    with pytest.raises(Failed, match=r"^late: its worker did not start in time$"):
        ask(worker, seconds=0.2)
    worker.program.write_text("raise SystemExit(4)")
    until(lambda: worker.keep() or len(worker.said) > 1, 5.0)
    assert "ended with status 4" in worker.said[1]
    worker.program.write_text(WORK)
    assert ask(worker)[1] == b"tree"


def test_a_question_takes_three_workers_down_and_no_more(make):
    worker = make()
    with pytest.raises(Failed, match=r"^its worker died 3 times on this question$"):
        ask(worker, die=True)
    assert ask(worker)[1] == b"tree"


def test_a_worker_that_is_late_is_killed_with_its_children(make):
    child = "import subprocess\nchild = subprocess.Popen(['sleep', '100'])\nwhile True:"
    worker = make(WORK.replace("while True:", child))
    before, _ = ask(worker)
    (child,) = children(before)
    with pytest.raises(Failed, match=r"^late: no answer in time$"):
        ask(worker, sleep=100, seconds=0.1)
    assert not Path(f"/proc/{before}").exists()
    until(lambda: gone(child), 5.0)
    assert worker.said == ["a question took longer than it may; the worker starts again"]
    assert ask(worker)[0] != before


def test_a_worker_that_has_nothing_to_do_rests_until_it_is_asked(make, monkeypatch):
    worker = make(rests=True)
    first, _ = ask(worker)
    worker.keep()
    assert ask(worker)[0] == first
    monkeypatch.setattr(node_process, "IDLE", -1.0)
    worker.keep()
    assert ask(worker)[0] == first, "its secrets may open a sum, until the others have answered and opened it"
    ask(worker, seconds=0.1)
    time.sleep(0.3)
    for _ in range(3):
        worker.keep()
        assert not os.path.exists(f"/proc/{first}")
    again, _ = ask(worker)
    assert (again != first, worker.said) == (True, [])
    monkeypatch.setattr(node_process, "QUICK", 0.0)  # a worker that takes long to start stays
    worker.keep()
    assert ask(worker)[0] == again


def test_a_log_that_has_grown_begins_anew_and_the_old_one_is_kept(make, tmp_path, monkeypatch):
    monkeypatch.setattr(node_process, "LOG", 1000)
    worker = make()
    os.kill(ask(worker, words=2000)[0], 9)
    assert ask(worker)[1] == b"tree"
    worker.keep()
    assert (tmp_path / "worker.log").stat().st_size < 100
    assert (tmp_path / "worker.log.1").stat().st_size > 2000


def test_a_worker_that_cannot_be_started_is_said_once_and_tried_again(make, tmp_path):
    """No process, file or memory may be left for a while."""
    worker = make(log=tmp_path / "gone" / "worker.log")
    for _ in range(20):
        worker.keep()
        time.sleep(0.02)
    (line,) = worker.said
    assert line.startswith("worker: cannot be started (")
    (tmp_path / "gone").mkdir()
    assert ask(worker)[1] == b"tree"


def test_a_worker_is_not_started_again_once_its_node_ends(make):
    worker, reasons = make(), []
    ask(worker)

    def answer():
        try:
            ask(worker, sleep=100, seconds=100.0)
        except Failed as why:
            reasons.append(str(why))

    thread = threading.Thread(target=answer)
    thread.start()
    time.sleep(0.1)
    worker.close()
    thread.join(5.0)
    assert (thread.is_alive(), reasons) == (False, ["its node ends"])
    worker.keep()
    assert worker._process is None or worker._process.poll() is not None


def test_a_worker_answers_whatever_goes_wrong_and_says_no_text_of_it(capsys):
    def handle(header, payload):
        if header.get("raise"):
            raise ValueError("a secret of the clients")
        return {"got": header}, payload

    ours, theirs = (Connection(end.detach()) for end in socketpair())
    thread = threading.Thread(target=answer_questions, args=(theirs, handle, write_log), daemon=True)
    thread.start()
    assert ours.recv_bytes() == b"ready"
    wrong = (b"{", b"[]", b"\xff", b"", b"null", b"[" * 100_000, b'{"a": ' * 50_000, b'{"a": 1e999}')
    answers = []
    for header in (b'{"raise": true}', *wrong, b'{"a": 1}'):
        ours.send_bytes(header)
        ours.send_bytes(b"x")
        answers.append((json.loads(ours.recv_bytes()), ours.recv_bytes()))
    ours.close()
    thread.join(5.0)
    theirs.close()
    assert answers[0] == ({"failed": "ValueError"}, b"")
    assert all(header.keys() == {"failed"} and sent == b"" for header, sent in answers[1:-1])
    assert answers[-1] == ({"got": {"a": 1}}, b"x")
    assert "failed: ValueError: a secret of the clients" in capsys.readouterr().out


def test_a_node_says_why_its_owner_refuses_once_a_round(tmp_path):
    said, words = [], {"0": f"{asks.REFUSED}its owner says so", "1": "answered"}
    refusals = Refusals(lambda *unused: (json.dumps({"clients": words}).encode(), b""), said.append, tmp_path / "log")
    for number in (3, 3, 4):
        for question in ("train", "score"):
            header = {"moment": {"round": number}, "question": question}
            assert refusals.answer(json.dumps(header).encode(), b"", 1.0)[1] == b""
    assert said == [f"round {number}: 'train' is refused: its owner says so" for number in (3, 4)]
    words["0"] = "refused: its owner's rules cannot be read now"
    refusals.answer(json.dumps(header).encode(), b"", 1.0)
    assert said[2].endswith(f"cannot be read now ({tmp_path / 'log'} says more)")
    for answer in (b"[]", b"{}", b'{"clients": 3}', b"no JSON"):
        assert Refusals(lambda *unused, a=answer: (a, b""), said.append, tmp_path).answer(b"", b"", 1.0)[0] == answer
    assert len(said) == 3


# -- the process -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("node"))
    made.work = made.root / "work.py"
    made.work.write_text(WORK)
    yield made
    made.close()


def start(federation, busy=0.0):
    """Start a node, with a question at work for so many seconds; its process and the number of its worker."""
    federation.start("berlin", worker=federation.work)
    until(lambda: "berlin" in federation.carrier.present(), 20.0)
    (worker,) = until(lambda: children(federation.nodes["berlin"].pid), 20.0)
    if busy:
        federation.push("berlin", {"sleep": 100}, seconds=busy)
        time.sleep(0.3)
    return federation.nodes.pop("berlin"), worker


@pytest.mark.parametrize("busy", [0.0, 1.0], ids=["at rest", "at work"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_node_that_is_ended_ends_well_and_its_worker_with_it(federation, number, busy):
    process, worker = start(federation, busy)
    with process:
        process.send_signal(number)
        assert process.wait(10.0) == (130 if number == signal.SIGINT else 0)
        until(lambda: gone(worker), 5.0)
        until(lambda: "berlin" not in federation.carrier.present(), 10.0)
        assert not any("Traceback" in line for line in federation.lines["berlin"])
    if busy:
        assert federation.pull().error.startswith("late: ")


def test_a_folder_is_of_one_node_and_of_the_next_when_that_ends(federation):
    first, worker = start(federation)
    with first:
        first.kill()
        first.wait()
    federation.start("berlin", worker=federation.work)  # the worker has not noticed yet
    until(lambda: gone(worker), 10.0)
    assert federation.ask("berlin", {}, seconds=30.0).payload == b"tree"
    federation.stop("berlin")


def test_a_node_that_cannot_run_is_one_line(federation):
    federation.known("oslo")
    key, address = federation.root / "rome" / "key", f"127.0.0.1:{federation.port}"
    other = f"server {address}: the server plays another study than that"
    open_ = f"{key}: mode: found '0644', allowed: 0600; mend it with: chmod 600 {key}"
    for name, run, line in (("oslo", "f" * 16, other), ("rome", "0" * 16, open_)):
        worker = [sys.executable, "-S", str(federation.work)]
        settings = federation.line(name, worker=worker, with_parent=False, run=run)
        path = write_settings(federation.root / name, {}, settings)
        if name == "rome":
            key.chmod(0o644)
        done = subprocess.run(node_command(path), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (2, "", 1)
        assert done.stdout.partition(" ")[2].startswith(f"error: {line}")
