"""Flower's end of a server: passes questions from the serving process on to nodes, and their answers back.

It imports neither Fedtide nor torch: whatever happens to Flower's processes, what plays the rounds lives on. Every
message on the line is JSON, followed by the payloads that it counts. Only the app of this file runs, whoever starts a
run.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Client, Connection
from types import SimpleNamespace
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

SOCKET = "FEDTIDE_RELAY"
"""The environment variable that names the socket of the serving process."""
POLL = 0.1
"""Seconds between two looks for answers."""
MEET = 1.0
"""Seconds between two looks for nodes."""

app = ServerApp()


@app.main()
def pass_on(grid: Grid, context: Context) -> None:
    """Pass messages on until the serving process hangs up."""
    del context
    with Client(os.environ[SOCKET], "AF_UNIX") as line:
        try:
            _relay(grid, line)
        except (EOFError, ConnectionError):
            return


def _relay(grid: Grid, line: Connection) -> None:
    waiting: dict[str, str] = {}  # question of each of Flower's messages
    met = 0.0
    while True:
        if time.monotonic() - met > MEET:
            nodes = [
                {"id": node.node_id, "key": node.public_key.decode(), "since": node.last_activated_at}
                for node in grid.get_nodes()
            ]
            line.send_bytes(json.dumps({"kind": "nodes", "nodes": nodes}).encode())
            met = time.monotonic()
        while line.poll(POLL):
            order = json.loads(line.recv_bytes())
            if order["kind"] == "push":
                _push(grid, line, order, waiting)
            else:
                dropped = set(order["questions"])
                waiting = {message: question for message, question in waiting.items() if question not in dropped}
        for reply in grid.pull_messages(list(waiting)) if waiting else ():
            question = waiting.pop(reply.metadata.reply_to_message_id, None)
            if question is not None:
                told, answer = _told(reply)
                line.send_bytes(json.dumps({"kind": "answer", "question": question, **told}).encode())
                line.send_bytes(answer)


def _push(grid: Grid, line: Connection, order: dict[str, Any], waiting: dict[str, str]) -> None:
    """Send questions to nodes; one payload of many of them is one object, which Flower carries once."""
    payloads = [line.recv_bytes() for _ in range(order["payloads"])]
    trees = [ArrayRecord({"tree": Array("uint8", (len(data),), "fedtide.tree", data)}) for data in payloads]
    messages = []
    for question in order["questions"]:
        told = ConfigRecord({"json": question["header"], "seconds": float(question["seconds"])})
        content = RecordDict({"question": told, "tree": trees[question["payload"]]})
        messages.append(Message(content, question["node"], "train.ask", ttl=float(question["seconds"])))
    for question, message in zip(order["questions"], grid.push_messages(messages), strict=True):
        if message is not None:
            waiting[message] = question["id"]
            continue
        error = {"kind": "answer", "question": question["id"], "header": "{}", "error": "", "code": -1}
        line.send_bytes(json.dumps(error).encode())
        line.send_bytes(b"")


def _told(reply: Message) -> tuple[dict[str, Any], bytes]:
    """Return what a reply says and its payload; of Flower's own errors the code."""
    if reply.has_error():
        return {"header": "{}", "error": str(reply.error.reason)[:300], "code": int(reply.error.code)}, b""
    try:
        told, data = reply.content["answer"], reply.content["tree"]["tree"].data
        return {"header": str(told["json"]), "error": str(told["error"]), "code": 0}, bytes(data)
    except (AttributeError, KeyError, TypeError) as error:
        return {"header": "{}", "error": f"sent something else than an answer ({type(error).__name__})", "code": 0}, b""


def unless_malformed(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flower's reader of a message such that one that cannot be read replies to nothing, and is dropped.

    Nodes choose what is in a message; one of them must not end the relay for all.
    """

    def reads(*args: Any) -> Any:
        try:
            return read(*args)
        except Exception as error:
            print(f"a message of a node was dropped: it cannot be read ({type(error).__name__})", file=sys.stderr)
            return SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=""))

    return reads


def _end_with(parent: int) -> None:
    """End at once when the process is gone that started this one; Flower would try to reach it for minutes."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def main() -> None:
    """Run Flower's process of a server with the app of this file."""
    from flwr.superlink.cli import flwr_serverapp

    flower: Any = import_module("flwr.superlink.runtime.run_serverapp")  # the package has a function of the same name
    pulling: Any = import_module("flwr.superlink.grid.http_grid")
    known = ((flower, "install_from_fab"), (flower, "run_"), (pulling, "inflate_object_from_contents"))
    if not all(hasattr(module, name) for module, name in known):
        sys.exit("this version of flwr is not known here: install fedtide with the extra 'deploy'")

    def run(grid: Grid, context: Context, **_: Any) -> Context:
        app(grid=grid, context=context)
        return context

    flower.run_ = run
    pulling.inflate_object_from_contents = unless_malformed(pulling.inflate_object_from_contents)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    flwr_serverapp()


if __name__ == "__main__":
    main()
