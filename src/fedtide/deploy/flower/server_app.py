"""Flower's end of a server: passes questions from the serving process on to nodes, and their answers back.

It imports neither Fedtide nor torch: whatever happens to Flower's processes, what plays the rounds lives on. Every
message on the line is JSON, followed by the payloads that it counts. Only the app of this file runs, and none that a
run brings along.
"""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Client, Connection
from queue import Queue
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.superexec.executor import LaunchResult
from flwr.supercore.tls import validate_and_resolve_root_certificates

handing_out: Any = import_module("flwr.supercore.superexec.run_superexec")  # packages have functions of these names
flower: Any = import_module("flwr.superlink.runtime.run_serverapp")

SOCKET = "FEDTIDE_RELAY"
"""The environment variable that names the socket of the serving process."""
POLL = 0.1
"""Seconds between two looks for answers."""
MEET = 1.0
"""Seconds between two looks for nodes."""
PIECES = 2
"""Pieces of one answer that are fetched before it is another one's turn."""
SPARE, PIECE = 8, 2**22
"""Pieces of an answer beside its bytes, and bytes of each other one at least; Flower makes 5 MB each."""
HEADER = 2**20
"""Bytes of what a node says beside its payload."""
KEPT = 60.0
"""Seconds that Flower keeps a message, at least, however soon its answer is late: a run that sends an expired one is
ended."""

app = ServerApp()


@dataclass(frozen=True)
class Asked:
    """A question at a node: its name, Flower's number of the node, and the bytes that an answer may have."""

    name: str
    node: int
    largest: int


@dataclass
class Coming:
    """An answer of which some pieces are still to come.

    Attributes:
        asked: what it answers.
        message: its number in Flower.
        own: whether the node wrote it; else Flower says that there is none.
        missing: the numbers of its pieces.
        pieces: those that came.
    """

    asked: Asked
    message: str
    own: bool
    missing: list[str]
    pieces: dict[str, bytes] = field(default_factory=dict)
    bytes: int = 0


@app.main()
def pass_on(grid: Grid, context: Context) -> None:
    """Pass messages on until the serving process hangs up."""
    del context
    with Client(os.environ[SOCKET], "AF_UNIX") as line:
        try:
            _relay(grid, line)
        except (EOFError, ConnectionError):
            return


def _relay(grid: Any, line: Connection) -> None:
    waiting: dict[str, Asked] = {}  # by Flower's number of the message
    coming: list[Coming] = []
    there: set[int] = set()
    met, busy = 0.0, False
    while True:
        if time.monotonic() - met > MEET:
            nodes = [
                {"id": node.node_id, "key": node.public_key.decode(), "since": node.last_activated_at}
                for node in grid.get_nodes()
            ]
            line.send_bytes(json.dumps({"kind": "nodes", "nodes": nodes}).encode())
            there = {node["id"] for node in nodes}
            met = time.monotonic()
        while line.poll(0.0 if busy else POLL):
            order = json.loads(line.recv_bytes())
            if order["kind"] == "push":
                _push(grid, line, order, waiting)
            else:
                dropped = set(order["questions"])
                _take_back(grid, waiting, dropped)
                for reply in (reply for reply in coming if reply.asked.name in dropped):
                    _forget(grid, reply.message)
                coming = [reply for reply in coming if reply.asked.name not in dropped]
        coming += _begun(grid, waiting, there)
        busy = False
        for reply in list(coming):
            before = len(reply.pieces)
            said = _fetched(grid, reply)
            busy = busy or len(reply.pieces) > before
            if said is None:
                continue
            coming.remove(reply)
            _forget(grid, reply.message)
            told, payload = said
            if reply.own:
                _take_back(grid, waiting, {reply.asked.name})
            told |= {"kind": "answer", "question": reply.asked.name, "own": reply.own}
            line.send_bytes(json.dumps(told).encode())
            line.send_bytes(payload)


def _push(grid: Grid, line: Connection, order: dict[str, Any], waiting: dict[str, Asked]) -> None:
    """Send questions to nodes; one payload of many of them is one object, which Flower carries once."""
    payloads = [line.recv_bytes() for _ in range(order["payloads"])]
    trees = [ArrayRecord({"tree": Array("uint8", (len(data),), "fedtide.tree", data)}) for data in payloads]
    messages = []
    for question in order["questions"]:
        told = ConfigRecord({"json": question["header"], "seconds": float(question["seconds"])})
        content = RecordDict({"question": told, "tree": trees[question["payload"]]})
        messages.append(Message(content, question["node"], "train.ask", ttl=max(float(question["seconds"]), KEPT)))
    for question, message in zip(order["questions"], grid.push_messages(messages), strict=True):
        if message:
            waiting[message] = Asked(question["id"], question["node"], question["largest"])
            continue
        line.send_bytes(
            json.dumps(_error("", -1) | {"kind": "answer", "question": question["id"], "own": False}).encode()
        )
        line.send_bytes(b"")


def _begun(grid: Any, waiting: dict[str, Asked], there: set[int]) -> list[Coming]:
    """Return the answers that have begun to come; a message that answers nothing is left out.

    What an answer answers is what Flower checked, and not what is written in it. Flower is not asked after nodes that
    are away: it would give their questions up, and so the answers of those that were only slow to say that they live.
    """
    awaited = [message for message, asked in waiting.items() if asked.node in there]
    if not awaited:
        return []
    found = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=awaited))
    begun = []
    for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
        about = message.metadata
        asked = waiting.pop(about.reply_to_message_id, None)
        if asked is not None:
            pieces = list(dict.fromkeys(each.object_id for each in iterate_object_tree(tree)))
            begun.append(Coming(asked, about.message_id, about.src_node_id != grid.node.node_id, pieces))
    return begun


def _fetched(grid: Any, reply: Coming) -> tuple[dict[str, Any], bytes] | None:
    """Fetch some pieces of an answer that are there; return what it says once it has all of them.

    Nodes choose what is in a message: whatever is wrong with one is said in place of its answer.
    """
    if len(reply.missing) + len(reply.pieces) > SPARE + reply.asked.largest // PIECE:
        return _error("sent more pieces than an answer may have", 0), b""
    for piece in reply.missing[:PIECES]:
        found = grid._runtime_client.PullObject(
            PullObjectRequest(node=grid.node, run_id=grid.run.run_id, object_id=piece)
        )
        if not found.object_found:
            return _error("did not send all of its answer", 8), b""
        if not found.object_available:
            return None
        reply.missing.remove(piece)
        reply.pieces[piece] = found.object_content
        reply.bytes += len(found.object_content)
        if reply.bytes > reply.asked.largest:
            return _error(f"sent more than the {reply.asked.largest} bytes that an answer may have", 0), b""
    if reply.missing:
        return None
    try:
        return _told(inflate_object_from_contents(reply.message, reply.pieces))
    except Exception as error:
        return _error(f"sent something else than an answer ({type(error).__name__})", 0), b""


def _told(reply: Any) -> tuple[dict[str, Any], bytes]:
    """Return what a reply says and its payload; of Flower's own errors the code."""
    if reply.has_error():
        return _error(str(reply.error.reason)[:300], int(reply.error.code)), b""
    told, data = reply.content["answer"], reply.content["tree"]["tree"].data
    header, error = told["json"], told["error"]
    if not isinstance(header, str) or not isinstance(error, str) or len(header) > HEADER:
        raise TypeError
    return {"header": header, "error": error[:300], "code": 0}, bytes(data)


def _error(said: str, code: int) -> dict[str, Any]:
    return {"header": "{}", "error": said, "code": code}


def _take_back(grid: Any, waiting: dict[str, Asked], names: set[str]) -> None:
    """Wait no more for answers to some questions, and have Flower delete those that no node has taken up yet."""
    for message in [message for message, asked in waiting.items() if asked.name in names]:
        del waiting[message]
        _forget(grid, message)


def _forget(grid: Any, message: str) -> None:
    """Have Flower delete a message."""
    grid._runtime_client.ConfirmMessageReceived(
        ConfirmMessageReceivedRequest(node=grid.node, run_id=grid.run.run_id, message_object_id=message)
    )


class Forks:
    """Starts the relay as a copy of this process, in which all that it needs is imported.

    Flower gives up what has not spoken half a minute after it was told to start, and a busy machine takes longer to
    start Python. An app that is sent is never run: what runs is the relay.
    """

    def get_eligible_capacity(self, supported: set[Any], **_: Any) -> tuple[set[Any], set[str]]:
        """Return what is started here: the relay."""
        return {kind for kind in supported if kind == TaskType.SERVER_APP}, set()

    def launch(self, spec: Any) -> Any:
        """Start the relay."""
        if spec.task_type != TaskType.SERVER_APP:
            return LaunchResult.failed("only the relay is started here")
        parent = os.getpid()
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
                certificates = validate_and_resolve_root_certificates(spec.root_certificates_path, spec.insecure)
                flower.run_serverapp(spec.runtime_api_address, Queue(), spec.token, spec.insecure, certificates)
            finally:
                os._exit(0)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Do nothing: there is no pool."""

    def close(self) -> None:
        """Do nothing."""


def _end_with(parent: int) -> None:
    """End at once when the process is gone that started this one; Flower would try to reach it for minutes."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def main() -> None:
    """Run what Flower calls its SuperExec: it has the app of this file run."""
    known = (
        (handing_out, "get_executor"),
        (flower, "install_from_fab"),
        (flower, "run_"),
        (flower.HttpGrid, "_runtime_client"),
    )
    if not all(hasattr(module, name) for module, name in known):
        sys.exit("this version of flwr is not known here: install fedtide with the extra 'deploy'")

    def run(grid: Grid, context: Context, **_: Any) -> Context:
        app(grid=grid, context=context)
        return context

    flower.run_ = run
    handing_out.get_executor = lambda *_, **__: Forks()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    flower_superexec()


if __name__ == "__main__":
    main()
