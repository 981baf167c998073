"""A node with its rows: the worker's program, which answers until the connected process is gone; and predictions.

A node predicts with the model that its client was evaluated with last.
"""

import json
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedtide.core.atomic import append, check_free, write_text
from fedtide.core.base import Memory, Moment, Payload
from fedtide.core.errors import UNREADABLE, FedtideError, refused
from fedtide.core.memory import MemoryStore
from fedtide.fleets.engines import Host
from fedtide.remote.asks import REFUSED
from fedtide.remote.node import Node
from fedtide.remote.node_memory import Judged
from fedtide.runs.build import host_of, task_of
from fedtide.runs.export import CHECKED, Model, described, names_of_classes, prepared, read_features, table
from fedtide.runs.trained import Models
from fedtide.site.accounts import OWN, Budget, ledger_for
from fedtide.site.client_rows import FileRows, zero_rows
from fedtide.site.machine import Health, read_private_key
from fedtide.site.node_process import answer_questions, write_log
from fedtide.site.owner import Owner, Peers
from fedtide.site.seat import RECORD, Seat
from fedtide.site.site import Site
from fedtide.site.tickets import Ticket
from fedtide.wire.masks import Masker
from fedtide.wire.pipeline import FLOATING

REFUSALS, REFUSED_OF = 100, 100
"""Refused questions of a minute that are written down, with as many clients and names: more could fill the disk. A
question that is answered is written down whole."""
SLOW = 2.5
"""Seconds that a question takes in a round in which a rehearsal kills a process."""


def node_of(settings: Mapping[str, Any]) -> Node:
    """Build a node.

    Args:
        settings: paths of a seat: `ticket`, `data`, `policy`, `home`. For a rehearsal with the rows of a site: `site`,
            `home`, and `name` if that is not the folder's.
    """
    folder = Path(settings["home"])
    if "site" in settings:
        site = Site.read(Path(settings["site"]))
        experiment, name, key = site.experiment, settings.get("name", folder.name), folder / "key"
        members = {member.name: member for member in site.roster.node}
        host = host_of(experiment, site.method, site.seed, MemoryStore(None))
        node = Node(
            host.algorithm,
            site.seed,
            host.population,
            folder / "memory" / site.digest,
            run=site.digest,
            partial_work=experiment.timing.partial_work,
            threads=experiment.fleet.threads,
            log=write_log,
            clients=frozenset(members[name].clients),
        )

        def trusts(node: str, key: str) -> str | None:
            return None if node in members and members[node].key == key else "its key is not that of the roster"

    else:
        policy = None if settings["policy"] is None else Path(settings["policy"])
        seat = Seat.read(Path(settings["ticket"]), [Path(path) for path in settings["data"]], policy, folder)
        experiment, name, key = seat.ticket.experiment, seat.ticket.node, seat.key
        study = ledger_for(experiment, seat.algorithm)
        clip = None if experiment.wire is None else experiment.wire.build().clip
        budget = None if study is None or clip is None else Budget(study, clip, folder / OWN)
        owner = Owner(policy, folder / "judged.jsonl", experiment.rounds, write_log, budget)
        rules = {"policy": owner.policy, "refuses": owner.refuses, "shown": owner.shown}
        node = seat.node(**rules, log=write_log, judged=folder / "judged")
        trusts = Peers(folder / "peers.json", owner.policy, write_log).trusts
    wire = FLOATING if experiment.wire is None else experiment.wire.build()
    masker = None
    if wire.secure:
        masker = Masker(node.run, name, read_private_key(key), trusts, folder / "opened")
    return replace(node, wire=wire, masker=masker)


@dataclass
class WatchedNode:
    """A node whose questions and answers are written down, and which tells programs of its machine how it is.

    Args:
        node: answers.
        since: time at which it was ready.
        record: file with a line for each question: its clients, what became of them, and the bytes that were sent.
        slow: rounds whose questions take so many seconds, because a rehearsal kills a process in them.
        answered: number of questions since then.
        last: the last question, and the time of its answer.
    """

    node: Node
    since: datetime
    record: Path
    slow: Mapping[int, float] = field(default_factory=dict)
    answered: int = 0
    last: dict[str, Any] | None = None
    _refused: dict[int, int] = field(default_factory=dict)

    def handle(self, header: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer a question; nothing is sent of a client that is not written down."""
        if self.slow:
            time.sleep(self.slow.get(header.get("moment", {}).get("round"), 0.0))
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
        append(self.record, json.dumps(line))

    def status(self) -> dict[str, Any]:
        """Return how the node is, in plain JSON."""
        return {"run": self.node.run, "since": self.since.isoformat(), "answered": self.answered, "last": self.last}


# -- predictions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False, kw_only=True)
class JudgedModel(Models):
    """The model that a client was evaluated with last."""

    received: Payload
    memory: Memory

    def _receive(self, client: int | None) -> tuple[Payload, Memory]:
        return self.received, self.memory


def predict_at_node(folder: Path, path: Path, out: Path, client: int | None = None) -> tuple[str, int, int]:
    """Predict the rows of a CSV, Parquet or NPZ file, and write a CSV file with their classes and probabilities.

    Args:
        folder: the node's folder.
        path: the file, with the features of the study; a label is not read.
        out: the new file.
        client: id of one of the node's clients; needed if there are several.

    Returns:
        A name of the client, the round of the evaluation whose model predicted, and the number of rows.

    Raises:
        FedtideError: the node was never started or evaluated, or the rows are not those of the study.
    """
    check_free(out)
    model, ticket, client = _read_model(folder, client)
    about = ticket.rows
    rows = read_features(path, about.shape, about.columns)
    x = prepared(rows, getattr(torch, about.dtype), ticket.experiment.data.transforms)
    write_text(out, table(model.predict(x).told, names_of_classes(model)))
    return f"{ticket.node}, client {client}", model.moment.round, len(x)


def model_at_node(folder: Path, client: int | None = None) -> tuple[str, Model]:
    """Return a name for a file, and the model that a client was evaluated with last.

    Args:
        folder: the node's folder.
        client: id of one of the node's clients; needed if there are several.

    Raises:
        FedtideError: the node was never started or evaluated, or which of several networks predicts depends on the row.
    """
    model, ticket, client = _read_model(folder, client)
    about = described(model, ticket.experiment, f"client {client}")
    return f"{ticket.node}-client-{client}", Model(model.task, model.parts(), model.rows(CHECKED), about)


def _read_model(folder: Path, client: int | None) -> tuple[JudgedModel, Ticket, int]:
    """Return the model of a client in a node's folder, the node's ticket, and the client that is meant."""
    try:
        settings = json.loads((folder / "run" / "worker.json").read_text(encoding="utf-8"))
        ticket = Ticket.read(Path(settings["ticket"]))
    except (OSError, *UNREADABLE):
        but = "not the folder of a node that was started; start it with: fedtide join"
        raise FedtideError(f"{folder}: {but}") from None
    client = ticket.clients[0] if client is None and len(ticket.clients) == 1 else client
    if client is None or client not in ticket.clients:
        raise refused("--client", client, ", ".join(map(str, ticket.clients)))
    node, judged, experiment = node_of(settings), Judged.read(folder / "judged"), ticket.experiment
    assert isinstance(node.rows, FileRows)
    received, memory = node.last_evaluation(judged, client)
    model = JudgedModel(
        title=f"{experiment.title or 'a study'}, {experiment.method[0].name}",
        host=Host(node.algorithm, node.rows.population(), node.seed, MemoryStore(None)),
        task=task_of(experiment, experiment.method[0], zero_rows(ticket.rows)),
        state=None,
        moment=Moment(**judged.header["moment"]),
        decide_per=judged.header["grouping"],
        received=received,
        memory=memory,
    )
    return model, ticket, client


# -- the program -------------------------------------------------------------------------------------------------------


def main(path: Path, line: int) -> None:
    """Answer questions on a line to the node's process, with the settings of a file."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    slow = dict.fromkeys(settings.get("slow", ()), SLOW)
    watch = WatchedNode(node_of(settings), datetime.now(UTC), Path(settings["home"]) / RECORD, slow)
    with ExitStack() as stack:
        if (port := settings.get("health")) is not None:
            write_log(f"health: {stack.enter_context(Health(port, watch.status)).address}")
        write_log("ready")
        answer_questions(Connection(line), watch.handle, write_log)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
