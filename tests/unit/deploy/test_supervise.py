"""Keeping processes running, and the worker of a node, with real processes and without Flower."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from multiprocessing.connection import Client

import pytest

from fedtide.deploy.flower.processes import supervise
from helpers import echo_worker


def until(check, seconds=60.0):
    end = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def process(name, script, last="x", causes=()):
    command = [sys.executable, "-c", script, str(last)]
    return {"name": name, "command": command, "env": dict(os.environ), "causes": list(causes)}


def alive(number):
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True, check=False)
    return bool(shown.stdout.strip()) and not shown.stdout.startswith("Z")


def number_of(file):
    return int(file.read_text() or 0) if file.is_file() else 0


@pytest.fixture
def keep(tmp_path):
    """Starts a keeper of processes; all end with the test."""
    started = []

    def start(*processes, with_parent=True):
        command = supervise(tmp_path / "kept", processes, with_parent=with_parent)
        keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(keeper)
        return keeper

    yield start
    for keeper in started:
        keeper.stdin.close()
        keeper.wait(20)
        keeper.stdout.close()


def test_a_killed_process_is_started_again_and_ends_with_the_one_who_asked(keep, tmp_path):
    pid = tmp_path / "kept" / "node.pid"
    keeper = keep(process("node", "import time; time.sleep(1000)"))
    first = until(lambda: number_of(pid))
    os.kill(first, signal.SIGKILL)
    second = until(lambda: number_of(pid) not in (0, first) and number_of(pid))
    assert "node: ended with status -9" in keeper.stdout.readline()
    assert alive(second)
    keeper.stdin.close()
    assert keeper.wait(20) == 0
    assert not alive(second)


def test_what_a_process_leaves_behind_ends_with_it(keep, tmp_path):
    script = "import os, time\nchild = os.fork()\nif not child: time.sleep(1000)\nprint(child, flush=True)"
    keeper = keep(process("node", script))
    keeper.stdout.readline()
    child = int((tmp_path / "kept" / "node.log").read_text().split()[0])
    assert until(lambda: not alive(child))


def test_the_cause_is_said_in_one_line_and_once(keep, tmp_path):
    script = "import sys; print('[code: 2004] no'); sys.exit(1)"
    keeper = keep(process("node", script, causes=[["code: 200[14]", "not admitted: ask for it"]]))
    assert keeper.stdout.readline().strip().endswith("node: not admitted: ask for it")
    log = tmp_path / "kept" / "node.log"
    until(lambda: log.read_text().count("2004") >= 2)
    keeper.stdin.close()
    assert keeper.stdout.read() == ""


def test_it_is_said_when_a_process_is_up(keep):
    keeper = keep(
        process("node", "import time; print('I am 12', flush=True); time.sleep(1000)") | {"up": [r"am \d", "up"]}
    )
    assert keeper.stdout.readline().strip().endswith("node: up")


def test_a_second_keeper_is_refused(keep, tmp_path):
    sleeping = process("node", "import time; time.sleep(1000)")
    keep(sleeping)
    until(lambda: number_of(tmp_path / "kept" / "node.pid"))
    second = keep(sleeping, with_parent=False)
    assert second.wait(20) == 2
    assert "another process keeps this one running already" in second.stdout.read()


def test_a_killed_keeper_leaves_nothing_to_its_successor(keep, tmp_path):
    pid = tmp_path / "kept" / "node.pid"
    sleeping = process("node", "import time; time.sleep(1000)", last=tmp_path / "mark")
    keeper = keep(sleeping)
    first = until(lambda: number_of(pid))
    keeper.kill()
    keeper.wait()
    assert alive(first)
    keep(sleeping)
    second = until(lambda: number_of(pid) not in (0, first) and number_of(pid))
    assert alive(second)
    until(lambda: not alive(first))


def test_what_cannot_be_started_and_a_disk_that_is_full_end_no_keeper(keep, tmp_path):
    (tmp_path / "kept" / "node.pid").mkdir(parents=True)  # it cannot be written
    missing = process("missing", "") | {"command": [str(tmp_path / "missing")]}
    keeper = keep(missing, process("node", f"open({str(tmp_path / 'started')!r}, 'a').write('x')"))
    assert "missing: cannot be started ([Errno 2] No such file or directory" in keeper.stdout.readline()
    until(lambda: (tmp_path / "started").exists() and len((tmp_path / "started").read_text()) > 1)
    assert keeper.poll() is None


def test_a_log_is_bounded_while_it_is_written(keep, tmp_path):
    script = (
        "import time\nfor _ in range(5):\n    print('x' * 7_000_000, flush=True)\n    time.sleep(1)\ntime.sleep(1000)"
    )
    keep(process("node", script))
    log, sizes = tmp_path / "kept" / "node.log", [0]
    until(lambda: sizes.append(log.stat().st_size if log.exists() else 0) or sizes[-1] < sizes[-2])
    assert 20_000_000 < max(sizes) < 29_000_000
    assert (tmp_path / "kept" / "node.log.1").stat().st_size == max(sizes)
    until(lambda: log.stat().st_size > 0)
    assert log.read_bytes()[:1] == b"x"  # it is written at its new end, without a hole before


def test_a_process_starts_anew_with_the_file_that_it_follows(keep, tmp_path):
    followed, pid = tmp_path / "server.crt", tmp_path / "kept" / "gate.pid"
    followed.write_text("old")
    keeper = keep(process("gate", "import time; time.sleep(1000)") | {"follows": str(followed)})
    first = until(lambda: number_of(pid))
    followed.unlink()
    time.sleep(0.5)
    assert alive(first)  # it is being written
    followed.write_text("new")
    assert keeper.stdout.readline().strip().endswith("gate: starts again with its new server.crt")
    assert until(lambda: number_of(pid) not in (0, first) and number_of(pid))
    assert not alive(first)


@pytest.fixture
def worker(tmp_path):
    with echo_worker.started(tmp_path / "w") as running:
        yield tmp_path / "w", running


def question(socket, header, payload=b"tree", seconds=20.0):
    with Client(str(socket), "AF_UNIX") as line:
        for frame in (json.dumps({"seconds": seconds}).encode(), json.dumps(header).encode(), payload):
            line.send_bytes(frame)
        return json.loads(line.recv_bytes()), line.recv_bytes()


@pytest.mark.slow
def test_a_worker_answers_says_no_data_in_errors_and_ends_past_a_deadline(worker):
    socket, running = worker
    assert stat.S_IMODE(os.stat(socket).st_mode) == 0o600
    told, answer = question(socket, {"times": 2})
    assert told["echo"] == {"times": 2}
    assert answer == b"treetree"
    with Client(str(socket), "AF_UNIX") as line:
        line.send_bytes(b"not JSON")
    assert question(socket, {"raise": True}) == ({"failed": "ValueError"}, b"")
    with pytest.raises(EOFError):
        question(socket, {"sleep": 60}, seconds=0.1)
    assert running.wait(20) == 3
    assert "took longer than its 0 s" in running.stdout.read()
