"""Predictions and models at a node, with the model that its client was evaluated with last."""

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
from fedtide.runs.export import CHECKED, Model, prepared, read_features, table
from fedtide.runs.trained import ROWS, mixed
from fedtide.site.client_rows import zero_rows
from fedtide.site.tickets import Ticket
from fedtide.site.work import node_of
from fedtide.wire.answer_schema import made_up


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


def predict_at_node(home: Path, path: Path, out: Path, client: int | None = None) -> Predicted:
    """Predict the rows of a CSV, Parquet or NPZ file, and write a CSV file with their classes and probabilities.

    Args:
        home: the node's folder.
        path: the file, with the features of the study; a label is not read.
        out: the new file.
        client: id of one of the node's clients; needed if there are several.

    Raises:
        FedtideError: the node was never started or evaluated, or the rows are not those of the study.
    """
    check_free(out)
    settings, ticket, client = _read_settings(home, client)
    about = ticket.rows
    rows = read_features(path, about.shape, about.columns)
    x = prepared(rows, getattr(torch, about.dtype), ticket.experiment.data.transforms)
    node, judged = node_of(settings), Judged.read(home / "judged")
    prediction = node.predict(judged, client, x)
    write_text(out, table(prediction.told, _class_names(ticket)))
    return Predicted(ticket.node, client, judged.header["moment"]["round"], len(x))


def model_at_node(home: Path, client: int | None = None) -> tuple[str, Model]:
    """Return a name for a file, and the model that a client was evaluated with last.

    Args:
        home: the node's folder.
        client: id of one of the node's clients; needed if there are several.

    Raises:
        FedtideError: the node was never started or evaluated, or which of several networks predicts depends on the row.
    """
    settings, ticket, client = _read_settings(home, client)
    node, judged, experiment = node_of(settings), Judged.read(home / "judged"), ticket.experiment
    method, moment = experiment.method[0], Moment(**judged.header["moment"])
    task = task_of(experiment, method, zero_rows(ticket.rows))
    shard = node.rows.shard(client, moment)
    filler = made_up(shard, ticket.rows.classes, rows=ROWS).x
    rows = task.inputs(torch.cat([shard.x[:ROWS], filler.to(shard.x.dtype)]))
    received, memory = node.held(judged, client)
    prediction = node.algorithm.predict(received, [memory] * len(rows), rows, torch.arange(len(rows)))
    parts = mixed(task, replace(task, begin=None).init(Rng(0)), rows, received, memory, prediction)
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
        "classes": json.dumps(_class_names(ticket)),
        "format": "pt",
    }
    return f"{ticket.node}-client-{client}", Model(task, parts, rows[-CHECKED:], about)


def _read_settings(home: Path, client: int | None) -> tuple[dict[str, Any], Ticket, int]:
    """Return the settings of a node's worker, its ticket, and the client that is meant."""
    try:
        settings = json.loads((home / "run" / "worker.json").read_text(encoding="utf-8"))
        ticket = Ticket.read(Path(settings["ticket"]))
    except (OSError, *UNREADABLE):
        raise FedtideError(f"{home}: not the folder of a node that was started; start it with: fedtide join") from None
    client = ticket.clients[0] if client is None and len(ticket.clients) == 1 else client
    if client is None or client not in ticket.clients:
        raise refused("--client", client, ", ".join(map(str, ticket.clients)))
    return settings, ticket, client


def _class_names(ticket: Ticket) -> list[str]:
    return [str(name) for name in ticket.rows.labels or range(ticket.rows.classes)]
