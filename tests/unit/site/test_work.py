"""The worker of a node: with the rules of its owner, watched, and used where it is."""

from __future__ import annotations

import csv
import json
import threading
import urllib.request
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from types import SimpleNamespace

import pytest
import torch

from fedtide.config import read
from fedtide.core.errors import FedtideError
from fedtide.evaluate.judge import Judge, views
from fedtide.remote import answers as heard
from fedtide.remote.asks import OTHER, REASONS, AskLine, NodeLine, NodeRecord
from fedtide.remote.fleet import RemoteFleet
from fedtide.remote.offline import NearCarrier
from fedtide.remote.schedule import Present
from fedtide.runs import folder
from fedtide.runs.runner import Run
from fedtide.site.client_rows import FileRows, algorithm_without_rows
from fedtide.site.deploying import make_site
from fedtide.site.machine import Health
from fedtide.site.node_process import answer_questions
from fedtide.site.seat import Seat
from fedtide.site.site import Roster
from fedtide.site.work import Watch, node_of, predict_at_node
from helpers import echo_worker
from helpers.hospitals import CLASSES, COLUMNS, NAMES, hospitals
from helpers.shell import done, refused

# -- as its owner wants ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A site of SCAFFOLD whose nodes, made as `fedtide join` makes them, have played all rounds in this process."""
    pytest.importorskip("cryptography")
    place = tmp_path_factory.mktemp("hospitals")
    site = make_site(
        read(hospitals(place, rows=90)), "SCAFFOLD", Roster.of(",".join(NAMES)), place / "site", None, "study.toml"
    )
    (place / "policy.toml").write_text("reveals = []\nrows_at_least = 5\n")
    nodes = {}
    for name in NAMES:
        ticket, data = site.root / "tickets" / f"{name}.ticket", place / f"{name}.csv"
        seat = Seat.read(ticket, [data], place / "policy.toml", home=place / name)
        seat.settle()
        (seat.home / "run").mkdir()
        (seat.home / "run" / "worker.json").write_text(json.dumps(seat.settings))
        nodes[name] = node_of(seat.settings)
    algorithm = algorithm_without_rows(site.experiment, site.about.rows)
    roster = {node.name: node.clients for node in site.roster.node}
    fleet = RemoteFleet(NearCarrier(nodes), roster, Present(site.seed), run=site.digest, patience=5.0)
    rows = FileRows.read(
        [place / f"{name}.csv" for name in NAMES], range(3), site.about.rows, site.experiment.data.split
    )
    judge = Judge(algorithm, fleet, views(rows.population()))
    folder.create(site.experiment, site.run)
    list(Run(site.experiment, site.method, site.seed, site.record).play(judge_of=lambda _: judge))
    return place


def test_a_study_is_judged_under_the_rules_that_hold_without_a_file(place):
    line = json.loads((place / "site/run/scaffold/0/rounds.jsonl").read_text().splitlines()[-1])
    assert line["scores"]["train_clients"]["rows"] > 30
    assert line["scores"]["train_clients"]["accuracy"] > 0.6
    judged = [json.loads(text) for text in (place / "berlin/judged.jsonl").read_text().splitlines() if text]
    assert [each[:3] for each in judged] == [[0, number, part] for number in (1, 3) for part in ("test", "val")]


def test_a_node_predicts_rows_of_its_own(place, tmp_path):
    out = tmp_path / "predictions.csv"
    assert done("predict", place / "berlin", place / "berlin.csv", "--out", out) == 0
    with open(place / "berlin.csv", newline="") as file:
        labels = [row["label"] for row in csv.DictReader(file)]
    with open(out, newline="") as file:
        said = [row["class"] for row in csv.DictReader(file)]
    assert len(said) == len(labels)
    assert sum(map(str.__eq__, said, labels)) > 0.6 * len(labels)
    found = predict_at_node(place / "berlin", place / "lyon.csv", tmp_path / "other.csv")
    assert (found.node, found.client, found.round, found.rows) == ("berlin", 0, 3, 90)


def test_a_node_exports_the_model_that_it_predicts_with(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert done("predict", place / "berlin", place / "berlin.csv") == 0
    assert done("export", place / "berlin", "--format", "torch-export") == 0
    assert "SCAFFOLD, after round 4: program" in capsys.readouterr().out
    with open(place / "berlin.csv", newline="") as file:
        rows = torch.tensor([[float(row[name]) for name in COLUMNS] for row in csv.DictReader(file)])
    said = torch.export.load("berlin-client-0.pt2").module()(rows).exp()
    with open("predictions.csv", newline="") as file:
        want = torch.tensor([[float(row[f"p {name}"]) for name in CLASSES] for row in csv.DictReader(file)])
    assert (said - want).abs().max() < 1e-5
    assert "--cluster: found 0, allowed: none at a node" in refused(
        capsys, tmp_path, "export", place / "berlin", "--format", "safetensors", "--cluster", 0
    )


def test_what_a_node_cannot_predict_is_named(place, tmp_path, capsys):
    words = ["predict", place / "berlin", place / "berlin.csv", "--out", tmp_path / "predictions.csv"]
    assert "--client: found 1, allowed: 0" in refused(capsys, tmp_path, *words, "--client", 1)
    assert "--method: found 'A', allowed: none at a node" in refused(capsys, tmp_path, *words, "--method", "A")
    words[2] = place / "none.csv"
    assert "none.csv: no such file" in refused(capsys, tmp_path, *words)
    home = tmp_path / "home"
    home.mkdir()
    with pytest.raises(FedtideError, match="not the folder of a node that was started"):
        predict_at_node(home, place / "berlin.csv", tmp_path / "x.csv")


# -- on its line to the node's process ---------------------------------------------------------------------------------


@pytest.fixture
def ask():
    """Ask a worker that echoes."""
    here, there = (Connection(end.detach()) for end in socketpair())
    serving = threading.Thread(target=answer_questions, args=(there, echo_worker.handle, print))
    serving.start()
    assert here.recv_bytes() == b"ready"

    def put(header: bytes, payload: bytes) -> list[bytes]:
        here.send_bytes(header)
        here.send_bytes(payload)
        return [here.recv_bytes(), here.recv_bytes()]

    with here, there:
        yield put
        here.close()
        serving.join(5)
        assert not serving.is_alive()


@pytest.mark.parametrize("header", [b"[" * 100_000, b'{"a": ' * 50_000, b"[]", b"\xff", b"", b"null", b'{"a": 1e999}'])
def test_what_a_server_says_to_a_worker_does_not_end_it(ask, header):
    told, sent = ask(header, b"x")
    assert json.loads(told)["failed"]
    assert sent == b""
    told, sent = ask(b'{"kind": "who"}', b"payload")
    assert (json.loads(told)["echo"], sent) == ({"kind": "who"}, b"payload")


# -- as others see it --------------------------------------------------------------------------------------------------


def test_a_node_says_how_it_is(tmp_path):
    node = SimpleNamespace(run="0123456789abcdef", handle=lambda header, sent: ({"seconds": 0.5}, b""))
    watch = Watch(node, datetime.now(UTC), tmp_path / "asked.jsonl")
    with Health(0, watch.status) as health:
        assert json.load(urllib.request.urlopen(health.address, timeout=5))["answered"] == 0
        watch.handle({"kind": "ask", "question": "train", "clients": [0]}, b"")
        said = json.load(urllib.request.urlopen(health.address, timeout=5))
    assert (said["run"], said["answered"]) == ("0123456789abcdef", 1)
    assert {key: said["last"][key] for key in ("kind", "question", "seconds")} == {
        "kind": "ask",
        "question": "train",
        "seconds": 0.5,
    }


def asked(node: SimpleNamespace, record: Path) -> tuple[dict, bytes]:
    header = {"kind": "ask", "question": "train", "reveal": ["count"], "members": 3, "clients": [0]}
    return Watch(node, datetime.now(UTC), record).handle({**header, "moment": {"round": 7}}, b"model")


def test_what_a_node_is_asked_and_sends_is_written_down(tmp_path):
    words = {"0": "answered"}
    node = SimpleNamespace(run="", handle=lambda header, sent: ({"clients": words, "seconds": 0.5}, b"delta!"))
    for _ in range(2):
        assert asked(node, tmp_path / "asked.jsonl")[1] == b"delta!"
    lines = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().split("\n") if line]
    assert [line.pop("at")[:2] for line in lines] == ["20", "20"]
    want = {"round": 7, "kind": "ask", "question": "train", "reveal": ["count"], "members": 3, "clients": words}
    assert lines == [want | {"received": 5, "sent": 6}] * 2


def test_nothing_is_sent_that_cannot_be_written_down(tmp_path):
    words = {"0": "answered", "1": "refused: its owner says so"}
    node = SimpleNamespace(
        run="", handle=lambda header, sent: ({"clients": words, "kept": [0], "seconds": 0.5}, b"delta!")
    )
    (tmp_path / "asked.jsonl").mkdir()  # in place of a full disk
    told, sent = asked(node, tmp_path / "asked.jsonl")
    assert (sent, told["kept"], told["clients"]["1"]) == (b"", [], "refused: its owner says so")
    assert told["clients"]["0"].startswith("refused: the node cannot write down what it sends; see whether its disk")


def test_a_node_that_talks_much_does_not_fill_the_record():
    node = NodeRecord("oslo")
    for number in range(3 * REASONS):
        node.hear(AskLine(question="train", nodes={}), NodeLine(clients={"0": f"refused: reason {number}"}), number)
    assert len(node.reasons) == REASONS + 1
    assert node.reasons[OTHER] == 2 * REASONS
    assert len(heard.one_line("x" * 100_000)) <= heard.WORDS + 3
