"""Predictions and models at a node, with what its client was evaluated with last: its own where the method has such."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedtide._version import installed
from fedtide.config import resolved
from fedtide.core.atomic import check_free, write_text
from fedtide.core.base import Moment
from fedtide.core.errors import UNREADABLE, FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.remote.node_memory import Judged
from fedtide.runs.build import task_of
from fedtide.runs.export import CHECKED, Model
from fedtide.runs.predict import prepared, read_features, table
from fedtide.runs.trained import ROWS, mixed
from fedtide.site.seat import blank
from fedtide.site.tickets import Ticket
from fedtide.site.work import node_of
from fedtide.wire.answer_schema import made_up


@dataclass(frozen=True)
class Predicted:
    """What was predicted.

    Args:
        node: name of the node.
        client: of it.
        round: of the evaluation whose model it was, from 0.
        rows: how many.
    """

    node: str
    client: int
    round: int
    rows: int


def predict_at_node(home: Path, path: Path, out: Path, client: int | None = None) -> Predicted:
    """Predict the rows of a CSV, Parquet or NPZ file, and write a CSV file with their classes and probabilities.

    Args:
        home: the node's folder.
        path: the file, with the features of the study; a label is not looked at.
        out: the file that is written; it must not exist.
        client: id of one of the node's clients; needed where there are several.

    Raises:
        FedtideError: the node was never started or evaluated, or the rows are not those of the study.
    """
    check_free(out)
    told, ticket, client = _told(home, client)
    about = ticket.rows
    rows = read_features(path, about.shape, about.columns)
    x = prepared(rows, getattr(torch, about.dtype), ticket.experiment.data.transforms)
    node, judged = node_of(told), Judged.read(home / "judged")
    said = node.predict(judged, client, x)
    write_text(out, table(said.told, _classes(ticket)))
    return Predicted(ticket.node, client, judged.header["moment"]["round"], len(x))


def model_at_node(home: Path, client: int | None = None) -> tuple[str, Model]:
    """Return the model that a client was evaluated with last, for a file, and a name for that.

    Args:
        home: the node's folder.
        client: id of one of the node's clients; needed where there are several.

    Raises:
        FedtideError: the node was never started or evaluated, or which of several networks predicts depends on the row.
    """
    told, ticket, client = _told(home, client)
    node, judged, experiment = node_of(told), Judged.read(home / "judged"), ticket.experiment
    method, moment = experiment.method[0], Moment(**judged.header["moment"])
    task = task_of(experiment, method, blank(ticket.rows))
    own = node.rows.shard(client, moment)
    made = made_up(own, ticket.rows.classes, rows=ROWS).x
    rows = task.inputs(torch.cat([own.x[:ROWS], made.to(own.x.dtype)]))
    received, memory = node.held(judged, client)
    said = node.algorithm.predict(received, [memory] * len(rows), rows, torch.arange(len(rows)))
    parts = mixed(task, replace(task, begin=None).init(Rng(0)), rows, received, memory, said)
    if parts is None:
        but = "which of its networks predicts, or how much each counts, depends on the row"
        raise FedtideError(f"{home}: {but}; allowed: fedtide predict {home} ROWS")
    about = {
        "fedtide": installed(),
        "run": f"{experiment.title or 'a study'}, {method.name}",
        "rounds": str(moment.round + 1),
        "whose": f"client {client}",
        "model": json.dumps(resolved(experiment)["model"]),
        "shape": json.dumps(list(ticket.rows.shape)),
        "classes": json.dumps(_classes(ticket)),
        "format": "pt",
    }
    return f"{ticket.node}-client-{client}", Model(task, parts, rows[-CHECKED:], about)


def _told(home: Path, client: int | None) -> tuple[dict[str, Any], Ticket, int]:
    """Return what a node's worker was started with, its ticket, and which of its clients is meant."""
    try:
        told = json.loads((home / "run" / "worker.json").read_text(encoding="utf-8"))
        ticket = Ticket.read(Path(told["ticket"]))
    except (OSError, *UNREADABLE):
        raise FedtideError(f"{home}: not the folder of a node that was started; start it with: fedtide join") from None
    client = ticket.clients[0] if client is None and len(ticket.clients) == 1 else client
    if client is None or client not in ticket.clients:
        raise refused("--client", client, ", ".join(map(str, ticket.clients)))
    return told, ticket, client


def _classes(ticket: Ticket) -> list[str]:
    return [str(name) for name in ticket.rows.labels or range(ticket.rows.classes)]
