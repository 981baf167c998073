"""Predictions at a node, with what its client was evaluated with last: a model of its own where the method has them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from fedtide.core.errors import UNREADABLE, FedtideError, refused
from fedtide.deploy.tickets import Ticket
from fedtide.deploy.work import node_of
from fedtide.fleets.node_memory import Judged
from fedtide.runs.predict import check_free, prepared, read_features, write_table


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
    """Predict the rows of a CSV or NPZ file, and write a CSV file with their classes and probabilities.

    Args:
        home: the node's folder.
        path: the file, with the features of the study; a label is not looked at.
        out: the file that is written; it must not exist.
        client: id of one of the node's clients; needed where there are several.

    Raises:
        FedtideError: the node was never started or evaluated, or the rows are not those of the study.
    """
    check_free(out)
    try:
        told = json.loads((home / "run" / "worker.json").read_text(encoding="utf-8"))
        ticket = Ticket.read(Path(told["ticket"]))
    except (OSError, *UNREADABLE):
        raise FedtideError(f"{home}: not the folder of a node that was started; start it with: fedtide join") from None
    client = ticket.clients[0] if client is None and len(ticket.clients) == 1 else client
    if client is None or client not in ticket.clients:
        raise refused("--client", client, ", ".join(map(str, ticket.clients)))
    about = ticket.rows
    rows = read_features(path, about.shape, about.columns)
    x = prepared(rows, getattr(torch, about.dtype), ticket.experiment.data.transforms)
    node, judged = node_of(told), Judged.read(home / "judged")
    said = node.predict(judged, client, x)
    write_table(out, said.logp, [str(name) for name in about.labels or range(about.classes)])
    return Predicted(ticket.node, client, judged.header["moment"]["round"], len(x))
