"""A node with its rows: the worker's program, which answers until the connected process is gone; and predictions.

A node predicts with the model that its client was evaluated with last.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedtide._version import installed
from fedtide.config import resolved
from fedtide.core.atomic import check_free, write_text
from fedtide.core.base import Moment
from fedtide.core.errors import UNREADABLE, FedtideError, refused
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.fleets.client import ClientRows
from fedtide.remote.asks import REFUSED
from fedtide.remote.node import Node, NoRules, Rules
from fedtide.remote.node_memory import Judged
from fedtide.runs.build import host_of, task_of
from fedtide.runs.export import CHECKED, Model, prepared, read_features, table
from fedtide.runs.trained import ROWS, mixed
from fedtide.site import certificates
from fedtide.site.accounts import OWN, Budget, ledger_for
from fedtide.site.client_rows import zero_rows
from fedtide.site.machine import Health
from fedtide.site.node_process import Handle, answer_questions, write_log
from fedtide.site.policy import Owner, Peers
from fedtide.site.seat import RECORD, Seat
from fedtide.site.site import Site
from fedtide.site.tickets import Ticket
from fedtide.wire.answer_schema import made_up
from fedtide.wire.masks import Masker
from fedtide.wire.pipeline import FLOATING

REFUSALS, REFUSED_OF = 100, 100
"""Refused questions of a minute that are written down, with as many clients and names: more could fill the disk. A
question that is answered is written down whole."""


def node_of(settings: Mapping[str, Any]) -> Node:
    """Build a node.

    Args:
        settings: paths of a seat: `ticket`, `data`, `policy`, `home`. For a rehearsal with the rows of a site: `site`,
            `home`, and `name` if that is not the folder's.
    """
    folder = Path(settings["home"])
    rows: ClientRows
    rules: Rules = NoRules()
    trusts: Callable[[str, str], str | None]
    if "site" in settings:
        site = Site.read(Path(settings["site"]))
        host = host_of(site.experiment, site.method, site.seed, MemoryStore(None))
        experiment, run = site.experiment, site.digest
        algorithm, seed, rows = host.algorithm, site.seed, host.population
        name, key = settings.get("name", folder.name), folder / "key"
        (clients,) = (node.clients for node in site.roster.node if node.name == name)
        trusts = partial(_check_key, {node.name: node.key for node in site.roster.node})
    else:
        policy = None if settings["policy"] is None else Path(settings["policy"])
        seat = Seat.read(Path(settings["ticket"]), [Path(path) for path in settings["data"]], policy, folder)
        experiment, run, seed = seat.ticket.experiment, seat.ticket.digest, seat.ticket.seed
        algorithm, rows = seat.algorithm, seat.rows
        study = ledger_for(experiment, algorithm)
        clip = None if experiment.wire is None else experiment.wire.build().clip
        budget = None if study is None or clip is None else Budget(study, clip, folder / OWN)
        rules = owner = Owner(policy, folder / "judged.jsonl", experiment.rounds, write_log, budget)
        name, key, clients = seat.ticket.node, seat.key, seat.ticket.clients
        trusts = Peers(folder / "peers.json", lambda: owner.policy, write_log).trusts
    wire = FLOATING if experiment.wire is None else experiment.wire.build()
    masker = None
    if wire.secure:
        masker = Masker(run, name, certificates.read_private_key(key), trusts, folder / "opened")
    return Node(
        algorithm,
        seed,
        rows,
        folder / "memory" / run,
        run=run,
        rules=rules,
        partial_work=experiment.timing.partial_work,
        threads=experiment.fleet.threads,
        log=write_log,
        judged=folder / "judged" if "site" not in settings else None,
        wire=wire,
        masker=masker,
        clients=frozenset(clients),
    )


def _check_key(keys: Mapping[str, str | None], node: str, key: str) -> str | None:
    """Return the reason why the key of a node does not count in a rehearsal; None if it does."""
    return None if keys.get(node) == key else "its key is not that of the roster"


@dataclass
class WatchedNode:
    """A node whose questions and answers are written down, and which tells programs of its machine how it is.

    Args:
        node: answers.
        since: time at which it was ready.
        record: file with a line for each question: its clients, what became of them, and the bytes that were sent.
        answered: number of questions since then.
        last: the last question, and the time of its answer.
    """

    node: Node
    since: datetime
    record: Path
    answered: int = 0
    last: dict[str, Any] | None = None
    _refused: dict[int, int] = field(default_factory=dict)

    def handle(self, header: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer a question; nothing is sent of a client that is not written down."""
        answer, sent = self.node.handle(header, payload)
        if answer.get("clients"):
            try:
                self._note(header, answer["clients"], len(payload), len(sent))
            except OSError:
                but = f"{REFUSED}the node cannot write down what it sends; see whether its disk is full"
                words = {
                    client: word if word.startswith(REFUSED) else but for client, word in answer["clients"].items()
                }
                answer, sent = {**answer, "clients": words, "kept": []}, b""
        question = {key: str(header.get(key))[:100] for key in ("kind", "question")}
        self.last = {"at": datetime.now(UTC).isoformat(), "seconds": answer["seconds"], **question}
        self.answered += 1
        return answer, sent

    def _note(self, header: Mapping[str, Any], words: Mapping[str, str], received: int, sent: int) -> None:
        """Write down a question, and what is sent to the server."""
        refused = all(word.startswith(REFUSED) for word in words.values())
        minute = int(time.time() // 60)
        if refused and self._refused.get(minute, 0) >= REFUSALS:
            self._refused[minute] += 1
            return
        skipped = sum(max(count - REFUSALS, 0) for then, count in self._refused.items() if then != minute)
        self._refused = {minute: self._refused.get(minute, 0) + refused}
        reveal = header.get("reveal", [])
        line = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "round": header["moment"]["round"],
            **{key: header[key] for key in ("kind", "question")},
            "reveal": [name[:100] for name in reveal[:REFUSED_OF]] if refused else reveal,
            "members": header.get("members", 0),
            "clients": dict(list(words.items())[: REFUSED_OF if refused else None]),
            "received": received,
            "sent": sent,
        }
        if skipped:
            line["not noted"] = skipped
        if header["kind"] == "unmask" and not refused:
            line["opened"] = header["alive"]
        self.record.parent.mkdir(parents=True, exist_ok=True)
        with open(self.record, "ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read() != b"\n":  # a kill may have left half a line
                    file.write(b"\n")
            file.write(json.dumps(line).encode() + b"\n")

    def status(self) -> dict[str, Any]:
        """Return how the node is, in plain JSON."""
        return {"run": self.node.run, "since": self.since.isoformat(), "answered": self.answered, "last": self.last}


# -- predictions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """A file of predictions.

    Args:
        node: name of the node.
        client: id of its client.
        round: round of the evaluation whose model predicted, from 0.
        rows: number of rows.
    """

    node: str
    client: int
    round: int
    rows: int


def predict_at_node(folder: Path, path: Path, out: Path, client: int | None = None) -> Predicted:
    """Predict the rows of a CSV, Parquet or NPZ file, and write a CSV file with their classes and probabilities.

    Args:
        folder: the node's folder.
        path: the file, with the features of the study; a label is not read.
        out: the new file.
        client: id of one of the node's clients; needed if there are several.

    Raises:
        FedtideError: the node was never started or evaluated, or the rows are not those of the study.
    """
    check_free(out)
    settings, ticket, client = _read_settings(folder, client)
    about = ticket.rows
    rows = read_features(path, about.shape, about.columns)
    x = prepared(rows, getattr(torch, about.dtype), ticket.experiment.data.transforms)
    node, judged = node_of(settings), Judged.read(folder / "judged")
    prediction = node.predict(judged, client, x)
    write_text(out, table(prediction.told, _class_names(ticket)))
    return Predicted(ticket.node, client, judged.header["moment"]["round"], len(x))


def model_at_node(folder: Path, client: int | None = None) -> tuple[str, Model]:
    """Return a name for a file, and the model that a client was evaluated with last.

    Args:
        folder: the node's folder.
        client: id of one of the node's clients; needed if there are several.

    Raises:
        FedtideError: the node was never started or evaluated, or which of several networks predicts depends on the row.
    """
    settings, ticket, client = _read_settings(folder, client)
    node, judged, experiment = node_of(settings), Judged.read(folder / "judged"), ticket.experiment
    method, moment = experiment.method[0], Moment(**judged.header["moment"])
    task = task_of(experiment, method, zero_rows(ticket.rows))
    shard = node.rows.shard(client, moment)
    filler = made_up(shard, ticket.rows.classes, rows=ROWS).x
    rows = task.inputs(torch.cat([shard.x[:ROWS], filler.to(shard.x.dtype)]))
    received, memory = node.last_evaluation(judged, client)
    prediction = node.algorithm.predict(received, [memory] * len(rows), rows, torch.arange(len(rows)))
    parts = mixed(task, replace(task, begin=None).init(Rng(0)), rows, received, memory, prediction)
    if parts is None:
        but = "which of its networks predicts, or how much each counts, depends on the row"
        raise FedtideError(f"{folder}: {but}; allowed: fedtide predict {folder} ROWS")
    about = {
        "fedtide": installed(),
        "run": f"{experiment.title or 'a study'}, {method.name}",
        "rounds": str(moment.round + 1),
        "whose": f"client {client}",
        "model": json.dumps(resolved(experiment)["model"]),
        "shape": json.dumps(list(ticket.rows.shape)),
        "classes": json.dumps(_class_names(ticket)),
        "format": "pt",
    }
    return f"{ticket.node}-client-{client}", Model(task, parts, rows[-CHECKED:], about)


def _read_settings(folder: Path, client: int | None) -> tuple[dict[str, Any], Ticket, int]:
    """Return the settings of a node's worker, its ticket, and the client that is meant."""
    try:
        settings = json.loads((folder / "run" / "worker.json").read_text(encoding="utf-8"))
        ticket = Ticket.read(Path(settings["ticket"]))
    except (OSError, *UNREADABLE):
        raise FedtideError(
            f"{folder}: not the folder of a node that was started; start it with: fedtide join"
        ) from None
    client = ticket.clients[0] if client is None and len(ticket.clients) == 1 else client
    if client is None or client not in ticket.clients:
        raise refused("--client", client, ", ".join(map(str, ticket.clients)))
    return settings, ticket, client


def _class_names(ticket: Ticket) -> list[str]:
    return [str(name) for name in ticket.rows.labels or range(ticket.rows.classes)]


# -- the program -------------------------------------------------------------------------------------------------------


def _slow_down(handle: Handle, slow: Mapping[str, Any] | None) -> Handle:
    """Take time for questions of some rounds, in which a rehearsal kills a process."""
    if slow is None:
        return handle

    def handle_slowly(header: dict[str, Any], payload: bytes) -> tuple[Mapping[str, Any], bytes]:
        if header.get("moment", {}).get("round") in slow["rounds"]:
            time.sleep(slow["seconds"])
        return handle(header, payload)

    return handle_slowly


def main(path: Path, line: int) -> None:
    """Answer questions on a line to the node's process, with the settings of a file."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    watch = WatchedNode(node_of(settings), datetime.now(UTC), Path(settings["home"]) / RECORD)
    with ExitStack() as stack:
        if (port := settings.get("health")) is not None:
            write_log(f"health: {stack.enter_context(Health(port, watch.status)).address}")
        write_log("ready")
        answer_questions(Connection(line), _slow_down(watch.handle, settings.get("slow")), write_log)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
