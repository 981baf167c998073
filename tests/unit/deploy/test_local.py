"""Programs that are served and reached at a socket, and which users get there."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from fedtide.deploy.flower.processes import at_socket

SERVED = """
import socket, subprocess, sys, uvicorn

async def app(scope, receive, send):
    if scope["type"] == "http":
        assert scope["client"] is None, scope["client"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})

if sys.argv[1:] == ["port"]:
    opened = socket.create_server(("127.0.0.1", 0))
if sys.argv[1:] == ["task"]:
    subprocess.Popen([sys.executable, "-c", "pass", "flower-superexec"])
uvicorn.run(app, host="127.0.0.1", port=9, log_level="warning", lifespan="off")
"""
ASKING = """
import httpx
print(httpx.get("http://127.0.0.1:9", headers={"X-Forwarded-For": "10.0.0.1"}, trust_env=False).text)
"""
NOBODY = 65534


def program(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def served(tmp_path):
    """The socket of a program that would be served at a port, in a folder of its owner's."""
    around = Path(tempfile.mkdtemp())
    around.chmod(0o755)
    folder = around / "own"
    folder.mkdir(mode=0o700)
    command = at_socket(folder / "s", program(tmp_path / "served", SERVED))
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not (folder / "s").exists():
            assert running.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        yield folder / "s"
    finally:
        running.terminate()
        assert "Traceback" not in running.communicate(timeout=30)[1]
        shutil.rmtree(around)


def test_a_program_is_served_at_its_socket_and_found_there(served, tmp_path):
    command = at_socket(served, program(tmp_path / "asking", ASKING))
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.stdout == "here\n", said.stderr
    refused = subprocess.run([sys.executable, tmp_path / "asking"], capture_output=True, text=True, check=False)
    assert "Connection refused" in refused.stderr


def test_what_a_program_deletes_from_its_databases_is_overwritten(tmp_path):
    text = """
import sqlite3.dbapi2
made = sqlite3.dbapi2.connect("kept.db")
made.execute("PRAGMA journal_mode = WAL")
made.execute("CREATE TABLE messages (content BLOB)")
made.execute("INSERT INTO messages VALUES (?)", (b"masked" * 9999,))
made.commit()
made.execute("PRAGMA wal_checkpoint(TRUNCATE)")
made.execute("DELETE FROM messages")
made.commit()
made.execute("PRAGMA wal_checkpoint(TRUNCATE)")
print([made.execute(f"PRAGMA {name}").fetchone()[0] for name in ("secure_delete", "journal_size_limit")])
"""
    command = at_socket(tmp_path / "s", program(tmp_path / "program", text))
    said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert said.stdout == "[1, 0]\n", said.stderr
    assert b"masked" not in (tmp_path / "kept.db").read_bytes()


def error_of(user: int, path: Path) -> int:
    """Connect as another user; the number of the error, or 0."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            socket.socket(socket.AF_UNIX).connect(str(path))
            os._exit(0)
        except OSError as error:
            os._exit(error.errno)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can be another user")
def test_another_user_does_not_get_there(served):
    assert error_of(NOBODY, served) == errno.EACCES
    assert error_of(0, served) == 0
    served.parent.chmod(0o755)
    assert error_of(NOBODY, served) == 0  # it is the folder that keeps others out


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="the system does not tell")
def test_a_program_that_opens_a_port_is_ended(tmp_path):
    command = [*at_socket(tmp_path / "s", program(tmp_path / "served", SERVED)), "port"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 4
    assert "Flower listens on port " in said.stderr


def test_a_program_ends_with_a_thread_that_ends_by_an_error(tmp_path):
    text = "import threading, time; threading.Thread(target=lambda: 1 / 0).start(); time.sleep(60)"
    command = at_socket(tmp_path / "s", program(tmp_path / "program", text))
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 6
    assert "division by zero" in said.stderr
    assert said.stderr.endswith("a thread of Flower ended by ZeroDivisionError; it is started again\n")


@pytest.mark.slow
def test_a_program_whose_tasks_nobody_hands_out_any_more_is_ended(tmp_path):
    command = [*at_socket(tmp_path / "s", program(tmp_path / "served", SERVED)), "task"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 5
    assert "what hands out Flower's tasks has ended" in said.stderr
