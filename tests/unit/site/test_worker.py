"""A node's worker is there when it is needed, whatever it dies of, and what is wrong with it is said once."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair

import pytest

from fedtide.remote.grpc.line import Failed
from fedtide.site import node_process
from fedtide.site.node_process import Worker, answer_questions, write_log
from helpers.federation import until

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


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    for name, value in {"SHORTEST": 0.05, "LONGEST": 0.1, "LOOK": 0.01, "OVERTIME": 0.1}.items():
        monkeypatch.setattr(node_process, name, value)


@pytest.fixture
def make(tmp_path):
    """Makes a worker of a program; what it says is in `said`."""
    made = []

    def start(program=WORK, log=tmp_path / "worker.log", **options):
        (tmp_path / "work.py").write_text(program)
        said = []
        worker = Worker([sys.executable, "-S", str(tmp_path / "work.py")], log, said.append, **options)
        worker.said = said
        made.append(worker)
        return worker

    yield start
    for worker in made:
        worker.close()


def ask(worker, payload=b"tree", seconds=10.0, **header):
    told, sent = worker.answer(json.dumps(header).encode(), payload, seconds)
    return json.loads(told), sent


def test_a_worker_is_started_when_it_is_needed_and_answers(make):
    worker = make()
    first, sent = ask(worker, times=3)
    assert sent == b"treetreetree"
    assert ask(worker)[0] == first  # the same process
    assert worker.said == []


def test_a_worker_is_kept_between_questions(make):
    worker = make()
    until(lambda: worker.keep() or worker._process, 5.0)
    before = ask(worker)[0]["pid"]
    os.kill(before, 9)
    until(lambda: worker.keep() or (worker._process and worker._process.pid != before), 5.0)
    assert ask(worker)[0]["pid"] != before
    assert len(worker.said) == 1
    assert worker.said[0].startswith("worker: ended with status -9 after 0 s; see ")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("class E(Exception): pass\nE.__module__ = 'fedtide.core.errors'\nE.__qualname__ = 'FedtideError'\n"
         "raise E('data.csv: row 3 has 4 columns, allowed: 5')", "worker: data.csv: row 3 has 4 columns, allowed: 5"),
        ("raise MemoryError", "worker: this machine's memory is too small for the work"),
        ("raise OSError(28, 'No space left on device')", "worker: no space is left on the disk"),
        ("raise SystemExit(3)", "worker: ended with status 3 after 0 s; see "),
    ],
    ids=["own", "memory", "disk", "other"],
)  # fmt: skip
def test_why_a_worker_dies_at_its_start_is_said_once(make, end, words, monkeypatch):
    starts = []
    begin = Worker._start
    monkeypatch.setattr(Worker, "_start", lambda self: (starts.append(1), begin(self))[1])
    worker = make(end)
    until(lambda: worker.keep() or len(starts) > 3, 10.0)
    assert len(worker.said) == 1
    assert worker.said[0].startswith(words)
    with pytest.raises(Failed, match=r"^late: its worker did not start in time$"):
        ask(worker, seconds=0.2)


def test_what_an_earlier_worker_wrote_is_no_cause(make):
    worker = make("raise MemoryError")
    until(lambda: worker.keep() or worker.said, 5.0)
    (Path(worker._command[-1])).write_text("raise SystemExit(3)")
    until(lambda: worker.keep() or len(worker.said) > 1, 5.0)
    assert "ended with status 3" in worker.said[1]


def test_a_worker_that_is_mended_is_there_again(make):
    worker = make("raise SystemExit(3)")
    until(lambda: worker.keep() or worker.said, 5.0)
    Path(worker._command[-1]).write_text(WORK)
    assert ask(worker)[1] == b"tree"


def test_a_question_takes_three_workers_down_and_no_more(make):
    worker = make()
    with pytest.raises(Failed, match=r"^its worker died 3 times on this question$"):
        ask(worker, die=True)
    assert ask(worker)[1] == b"tree"


def test_a_worker_that_is_late_is_killed_and_the_next_question_is_answered(make):
    worker = make()
    before = ask(worker)[0]["pid"]
    with pytest.raises(Failed, match=r"^late: no answer in time$"):
        ask(worker, sleep=100, seconds=0.1)
    assert not Path(f"/proc/{before}").exists()
    assert worker.said == ["a question took longer than it may; the worker starts again"]
    assert ask(worker)[0]["pid"] != before


def test_what_a_worker_started_ends_with_it(make):
    worker = make(
        WORK.replace("while True:", "import subprocess\nchild = subprocess.Popen(['sleep', '100'])\nwhile True:")
    )
    ask(worker)
    (child,) = Path(f"/proc/{worker._process.pid}/task/{worker._process.pid}/children").read_text().split()
    with pytest.raises(Failed):
        ask(worker, sleep=100, seconds=0.1)

    def ended():
        try:
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(ended, 5.0)


def test_a_worker_that_never_is_ready_is_started_again(make, monkeypatch):
    monkeypatch.setattr(node_process, "STARTING", 0.1)
    worker = make("import time\ntime.sleep(100)")
    with pytest.raises(Failed, match="did not start in time"):
        ask(worker, seconds=0.5)
    Path(worker._command[-1]).write_text(WORK)
    monkeypatch.setattr(node_process, "STARTING", 5.0)
    worker._end()
    assert ask(worker)[1] == b"tree"


def test_a_worker_that_has_nothing_to_do_rests_until_it_is_asked(make, monkeypatch):
    worker = make(rests=True)
    first = ask(worker)[0]["pid"]
    worker.keep()
    assert ask(worker)[0]["pid"] == first
    monkeypatch.setattr(node_process, "IDLE", -1.0)
    for _ in range(3):
        worker.keep()
        assert not os.path.exists(f"/proc/{first}")
    again = ask(worker)[0]["pid"]
    assert again != first
    assert worker.said == []
    monkeypatch.setattr(node_process, "QUICK", 0.0)  # one that takes long to start stays
    worker.keep()
    assert ask(worker)[0]["pid"] == again


def test_a_log_that_has_grown_begins_anew_and_the_old_one_is_kept(make, tmp_path, monkeypatch):
    monkeypatch.setattr(node_process, "LOG", 1000)
    worker = make()
    os.kill(ask(worker, words=2000)[0]["pid"], 9)
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
    assert len(worker.said) == 1
    assert worker.said[0].startswith("worker: cannot be started (")
    (tmp_path / "gone").mkdir()
    assert ask(worker)[1] == b"tree"


def test_a_worker_is_not_started_again_once_its_node_ends(make):
    worker = make()
    ask(worker)
    found = []

    def answer():
        try:
            ask(worker, sleep=100, seconds=100.0)
        except Failed as why:
            found.append(str(why))

    thread = threading.Thread(target=answer)
    thread.start()
    time.sleep(0.1)
    worker.close()
    thread.join(5.0)
    assert not thread.is_alive()
    assert found == ["its node ends"]
    worker.keep()
    assert worker._process is None or worker._process.poll() is not None


# -- the worker's own end ---------------------------------------------------------------------------------------------


def test_a_worker_answers_whatever_goes_wrong_and_says_no_text_of_it(capsys):
    def handle(header, payload):
        if header.get("raise"):
            raise ValueError("a secret of the clients")
        return {"got": header}, payload

    here, there = (Connection(each.detach()) for each in socketpair())
    thread = threading.Thread(target=answer_questions, args=(there, handle, write_log), daemon=True)
    thread.start()
    assert here.recv_bytes() == b"ready"
    found = []
    for header in (b'{"raise": true}', b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a": 1}'):
        here.send_bytes(header)
        here.send_bytes(b"x")
        found.append((json.loads(here.recv_bytes()), here.recv_bytes()))
    here.close()
    thread.join(5.0)
    there.close()
    assert found[0] == ({"failed": "ValueError"}, b"")
    assert all(told.keys() == {"failed"} and sent == b"" for told, sent in found[1:5])
    assert found[5] == ({"got": {"a": 1}}, b"x")
    assert "failed: ValueError: a secret of the clients" in capsys.readouterr().out


def test_a_log_that_cannot_be_written_is_no_reason_not_to_answer(monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    write_log("x")
