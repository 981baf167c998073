"""Flower's end of a node: hands each question to the resident worker and its answer back.

It is a program of its own in place of Flower's SuperExec, and imports neither Fedtide nor torch. Flower would start
Python anew for every question and run what the server sent.
"""

import json
import os
import signal
import sys
import threading
import time
from importlib import import_module
from multiprocessing.connection import Client, Connection
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import LaunchResult

handing_out: Any = import_module("flwr.supercore.superexec.run_superexec")  # packages have functions of these names
answering: Any = import_module("flwr.supernode.runtime.run_clientapp")

SOCKET = "FEDTIDE_WORKER"
"""The environment variable that names the worker's socket."""
MARGIN = 1.0
"""Seconds that the way back may take: so much before its deadline a node says that it is late."""

STARTING = 60.0
"""Seconds that a worker may take until it is there: it reads its rows, maybe on a busy machine."""
PAUSE = 0.2
"""Seconds between two looks whether it is."""

app = ClientApp()


@app.train("ask")
def ask(message: Message, context: Context) -> Message:
    """Return the worker's answer, or one sentence why there is none."""
    del context  # what Flower keeps for a node lives as long as its process, and travels with every message
    question = message.content["question"]
    payload = message.content["tree"]["tree"].data
    seconds = _seconds_left(float(question["seconds"]), message.metadata.created_at) - MARGIN
    try:
        header, answer = _exchange(os.environ[SOCKET], str(question["json"]), payload, seconds)
        error = ""
    except TimeoutError:
        header, answer, error = "{}", b"", f"late: no answer within its {float(question['seconds']):g} s"
    except (OSError, EOFError) as reason:
        header, answer, error = "{}", b"", f"its worker died or is being started ({type(reason).__name__})"
    array = Array("uint8", (len(answer),), "fedtide.tree", answer)
    told = ConfigRecord({"json": header, "error": error})
    return Message(RecordDict({"answer": told, "tree": ArrayRecord({"tree": array})}), reply_to=message)


def _seconds_left(allowed: float, asked_at: float) -> float:
    """Return how many of the allowed seconds are left; a clock that cannot be that of the server does not count."""
    waited = time.time() - asked_at
    return allowed - waited if 0 <= waited <= allowed else allowed


def _exchange(socket: str, header: str, payload: bytes, seconds: float) -> tuple[str, bytes]:
    """Ask the worker, once it is there; raise TimeoutError where it does not answer in time."""
    began = time.monotonic()
    with _met(socket, min(seconds, STARTING)) as line:
        seconds -= time.monotonic() - began
        line.send_bytes(json.dumps({"seconds": seconds}).encode())
        line.send_bytes(header.encode())
        line.send_bytes(payload)
        if not line.poll(max(seconds, 0.0)):
            raise TimeoutError
        return line.recv_bytes().decode(), line.recv_bytes()


def _met(socket: str, seconds: float) -> Connection:
    """Connect to the worker, which may be being started: that is not the fault of this question."""
    end = time.monotonic() + seconds
    while True:
        try:
            return Client(socket, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() >= end:
                raise
            time.sleep(PAUSE)


class Forks:
    """Starts Flower's process for a question as a copy of this one, in which all that it needs is imported.

    The app that the server sends is never run: what runs at a node is what was installed there.
    """

    def get_eligible_capacity(self, supported: set[Any], **_: Any) -> tuple[set[Any], set[str]]:
        """Return what is started here: what answers questions."""
        return {kind for kind in supported if kind == TaskType.CLIENT_APP}, set()

    def launch(self, spec: Any) -> Any:
        """Answer one question in a process of its own."""
        if spec.task_type != TaskType.CLIENT_APP or not spec.insecure:
            return LaunchResult.failed("only questions are answered here, over the loopback")
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                answering.run_clientapp(spec.runtime_api_address, spec.token, True, parent_pid=spec.parent_pid)
            finally:
                os._exit(0)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Do nothing: there is no pool."""

    def close(self) -> None:
        """Do nothing."""


def _end_with(parent: int) -> None:
    """End at once when the SuperNode is gone; Flower would try to reach it for minutes."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def main() -> None:
    """Run what Flower calls its SuperExec: it takes questions from the SuperNode and has them answered here."""
    for module, name in (
        (handing_out, "get_executor"),
        (answering, "install_from_fab"),
        (answering, "get_load_client_app_fn"),
    ):
        if not hasattr(module, name):
            sys.exit("this version of flwr is not known here: install fedtide with the extra 'deploy'")
    handing_out.get_executor = lambda *_, **__: Forks()
    answering.install_from_fab = lambda *_, **__: None
    answering.get_load_client_app_fn = lambda **_: lambda *_: app
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    flower_superexec()


if __name__ == "__main__":
    main()
