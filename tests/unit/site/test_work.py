"""The worker of a node: its predictions, the record of what was asked, and its words for programs."""

import csv
import json
import urllib.request
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography")

from fedtide.core import checkpoint
from fedtide.core.errors import FedtideError
from fedtide.evaluate.judge import Judge, views
from fedtide.fleets.totals import Vectors
from fedtide.remote import node_answers as answers
from fedtide.remote.asks import OTHER, REASONS, NodeRecord
from fedtide.remote.fleet import RemoteFleet
from fedtide.remote.node_memory import JudgedModels
from fedtide.remote.offline import NearCarrier
from fedtide.remote.schedule import Present
from fedtide.runs import folder
from fedtide.runs.runner import Run
from fedtide.site.client_rows import FileRows, algorithm_without_rows
from fedtide.site.machine import Health
from fedtide.site.seat import Seat, WatchedNode, node_of, predict_at_node
from fedtide.site.tickets import Ticket
from fedtide.wire.pipeline import FLOATING
from helpers.hospitals import CLASSES, COLUMNS, NAMES, STUDY
from helpers.near_sites import nodes_of, played, site_of, words
from helpers.shell import done, refused


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A site of SCAFFOLD whose nodes, made as `fedtide join` makes them, have played all rounds in this process."""
    place = tmp_path_factory.mktemp("hospitals")
    play(place, site_of(place, played="SCAFFOLD", rows=90))
    return place


def play(place: Path, site: Any) -> Any:
    """Play a study on nodes in this process, and return its fleet."""
    (place / "policy.toml").write_text("reveals = []\nrows_at_least = 5\n")
    nodes, data = {}, [place / f"{name}.csv" for name in NAMES]
    for name, file in zip(NAMES, data, strict=True):
        seat = Seat.read(
            Ticket.read(site.root / "tickets" / f"{name}.ticket"), [file], place / "policy.toml", home=place / name
        )
        seat.settle()
        (seat.home / "run").mkdir()
        (seat.home / "run" / "worker.json").write_text(json.dumps(seat.settings))
        nodes[name] = node_of(seat.settings)
    roster = {node.name: node.clients for node in site.roster.node}
    rows = FileRows.read(data, range(3), site.about.rows, site.experiment.data.split)
    algorithm = algorithm_without_rows(site.experiment, site.about.rows)
    vectors = Vectors.of(FLOATING, algorithm, rows.people.few())
    fleet = RemoteFleet(NearCarrier(nodes), roster, Present(site.seed), run=site.digest, patience=5.0, vectors=vectors)
    folder.create(site.experiment, site.run)
    run = Run(site.experiment, site.method, site.seed, site.record)
    list(run.play(judge_of=lambda _: Judge(algorithm, fleet, views(rows.people))))
    return fleet


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_study_is_judged_under_the_rules_that_hold_without_a_file(place):
    line = json.loads((place / "site/run/scaffold/0/rounds.jsonl").read_text().splitlines()[-1])
    assert line["scores"]["train_clients"]["rows"] > 30
    assert line["scores"]["train_clients"]["accuracy"] > 0.6
    judged = [json.loads(text) for text in (place / "berlin/judged.jsonl").read_text().splitlines() if text]
    assert [key for *key, _, _ in judged] == [[0, number, part] for number in (1, 3) for part in ("test", "val")]


def test_a_node_predicts_rows_of_its_own(place, tmp_path):
    out = tmp_path / "predictions.csv"
    assert done("predict", place / "berlin", place / "berlin.csv", "--out", out) == 0
    labels, classes = [row["label"] for row in read(place / "berlin.csv")], [row["class"] for row in read(out)]
    assert len(classes) == len(labels)
    assert sum(map(str.__eq__, classes, labels)) > 0.6 * len(labels)
    result = predict_at_node(place / "berlin", place / "lyon.csv", tmp_path / "other.csv")
    assert result == ("berlin, client 0", 3, 90)


@pytest.mark.parametrize("played", ["FedAvg", "Ditto"])
def test_a_node_predicts_with_the_model_that_the_server_keeps_as_its_best(tmp_path, capsys, monkeypatch, played):
    """Of FedAvg it has the bits of the server's. The model that a client keeps is that of the same evaluation."""
    monkeypatch.chdir(tmp_path)
    local = {"lr": 0.05, "batch_size": 20}
    method = [{"name": played, "algorithm": played.lower(), "cohort": 3, "local": local}]
    data = STUDY["data"]["source"] | {"path": str(tmp_path / "pilot.csv")}
    site = site_of(
        tmp_path, played=played, rows=90, method=method, rounds=5, eval_every=1,
        data={"source": data, "split": {"val": 0.3}}, keep={"best": 2, "by": "loss", "less": False},
    )  # fmt: skip
    fleet = play(tmp_path, site)
    kept = checkpoint.check(site.record / "checkpoints", config=None).kept
    assert fleet.best == kept[0] == 1, "the loss only falls, so the first model is best"
    models, rows = JudgedModels(tmp_path / "berlin" / "judged"), tmp_path / "berlin.csv"
    assert [models.read(model).rounds for model in ("best", "1", "last", "5", None)] == [1, 1, 5, 5, 5]
    assert done("predict", tmp_path / "berlin", rows, "--model", "best", "--out", "node.csv") == 0
    assert "client 0, after round 1: 90 rows predicted" in " ".join(capsys.readouterr().out.split())
    assert done("predict", tmp_path / "berlin", rows, "--out", "last.csv") == 0
    assert Path("node.csv").read_bytes() != Path("last.csv").read_bytes()
    assert done("predict", site.run, rows, "--model", "best", "--out", "server.csv") == 0
    assert (Path("node.csv").read_bytes() == Path("server.csv").read_bytes()) == (played == "FedAvg")
    assert done("export", tmp_path / "berlin", "--model", "best", "--format", "safetensors") == 0
    assert "after round 1" in capsys.readouterr().out
    assert Path("berlin-client-0-best.safetensors").exists()
    words = ["predict", tmp_path / "berlin", rows, "--model", 3, "--out", tmp_path / "three.csv"]
    assert refused(capsys, tmp_path, *words) == "--model: found '3', allowed: 1, 5, last, best"


def test_a_node_exports_the_model_that_it_predicts_with(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert done("predict", place / "berlin", place / "berlin.csv") == 0
    assert done("export", place / "berlin", "--format", "torch-export") == 0
    assert "SCAFFOLD, after round 4: program" in capsys.readouterr().out
    rows = torch.tensor([[float(row[name]) for name in COLUMNS] for row in read(place / "berlin.csv")])
    exported = torch.export.load("berlin-client-0.pt2").module()(rows).exp()
    want = torch.tensor([[float(row[f"p {name}"]) for name in CLASSES] for row in read(Path("predictions.csv"))])
    assert (exported - want).abs().max() < 1e-5
    words = ["export", place / "berlin", "--format", "safetensors", "--cluster", 0]
    assert "--cluster: found 0, allowed: none at a node" in refused(capsys, tmp_path, *words)


def test_predictions_that_cannot_be_made_are_named(place, tmp_path, capsys):
    words = ["predict", place / "berlin", place / "berlin.csv", "--out", tmp_path / "predictions.csv"]
    assert "--client: found '1', allowed: 0" in refused(capsys, tmp_path, *words, "--client", 1)
    assert "--method: found 'A', allowed: none at a node" in refused(capsys, tmp_path, *words, "--method", "A")
    words[2] = place / "none.csv"
    assert "none.csv: no such file" in refused(capsys, tmp_path, *words)
    with pytest.raises(FedtideError, match="not the folder of a node that was started"):
        predict_at_node(tmp_path, place / "berlin.csv", tmp_path / "x.csv")


def test_a_node_with_several_clients_asks_for_one(tmp_path):
    site, data = site_of(tmp_path, "berlin:2,lyon"), [tmp_path / "berlin.csv", tmp_path / "oslo.csv"]
    seat = Seat.read(Ticket.read(site.root / "tickets" / "berlin.ticket"), data, home=tmp_path / "berlin")
    seat.settle()
    (seat.home / "run").mkdir()
    (seat.home / "run" / "worker.json").write_text(json.dumps(seat.settings))
    with pytest.raises(FedtideError, match="berlin: this node has 2 clients: add --client 0 or --client 1"):
        predict_at_node(tmp_path / "berlin", data[0], tmp_path / "x.csv")
    for spoiled in ({"policy": -1}, {"data": 1.5}, {"base": []}):
        (seat.home / "run" / "worker.json").write_text(json.dumps({**seat.settings, **spoiled}))
        with pytest.raises(FedtideError, match="not the folder of a node that was started"):
            predict_at_node(tmp_path / "berlin", data[0], tmp_path / "x.csv")


# -- the record of a node ----------------------------------------------------------------------------------------------

HEADER = {"kind": "ask", "question": "train", "reveal": ["count"], "members": 3, "clients": [0], "moment": {"round": 7}}


def watch(record: Path, **answer) -> WatchedNode:
    node = SimpleNamespace(run="0123456789abcdef", handle=lambda header, sent: ({"seconds": 0.5, **answer}, b"delta!"))
    return WatchedNode(node, datetime.now(UTC), record)


def test_a_node_says_how_it_is(tmp_path):
    node = watch(tmp_path / "asked.jsonl")
    with closing(Health(0, node.status)) as health:
        assert json.load(urllib.request.urlopen(health.address, timeout=5))["answered"] == 0
        node.handle(HEADER, b"")
        status = json.load(urllib.request.urlopen(health.address, timeout=5))
    assert (status["run"], status["answered"]) == ("0123456789abcdef", 1)
    assert status["last"] | {"at": ""} == {"kind": "ask", "question": "train", "seconds": 0.5, "at": ""}


def test_questions_and_answers_are_written_down(tmp_path):
    record = tmp_path / "asked.jsonl"
    record.write_text("half a li")
    for _ in range(2):
        assert watch(record, clients={"0": "answered"}).handle(HEADER, b"model")[1] == b"delta!"
    lines = record.read_text().splitlines()
    want = {"round": 7, "kind": "ask", "question": "train", "reveal": ["count"], "members": 3}
    want |= {"clients": {"0": "answered"}, "received": 5, "sent": 6}
    assert [json.loads(line) | {"at": ""} for line in lines] == [want | {"at": ""}] * 2


def test_rules_that_become_unreadable_are_the_reason_everywhere(tmp_path, capsys):
    site = site_of(tmp_path)
    nodes = nodes_of(tmp_path, site, lambda name: "")
    (tmp_path / "oslo.toml").write_text("fewest = ")
    why = "refused: its owner's rules cannot be read now"
    assert words(played(site, nodes, rounds=1)) == {"answered", why}
    (line,) = map(json.loads, (tmp_path / "oslo" / "asked.jsonl").read_text().splitlines())
    assert (line["question"], line["clients"]) == ("train", {"2": why})
    (said,) = capsys.readouterr().out.splitlines()
    assert "oslo.toml: not valid TOML" in said


def test_nothing_is_sent_that_cannot_be_written_down(tmp_path):
    (tmp_path / "asked.jsonl").mkdir()  # in place of a full disk
    words = {"0": "answered", "1": "refused: its owner says so"}
    answer, sent = watch(tmp_path / "asked.jsonl", clients=words, kept=[0]).handle(HEADER, b"model")
    assert (sent, answer["kept"], answer["clients"]["1"]) == (b"", [], "refused: its owner says so")
    assert answer["clients"]["0"].startswith("refused: the node cannot write down what it sends; see whether its disk")


def test_a_node_that_talks_much_does_not_fill_the_record():
    node = NodeRecord("oslo")
    for number in range(3 * REASONS):
        node.hear({"reveal": []}, {"clients": {"0": f"refused: reason {number}"}, "down": 0, "up": 0})
    assert len(node.reasons) == REASONS + 1
    assert node.reasons[OTHER] == 2 * REASONS
    assert len(answers.one_line("x" * 100_000)) <= answers.WORDS + 3
