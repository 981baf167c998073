"""Nodes of real clients in the report and in `fedtide status`."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedtide.core.errors import FedtideError
from fedtide.core.record import ASKS, read_lines
from fedtide.remote.asks import nodes_of, read_asks, state_of
from fedtide.report.clients import nodes_over_rounds, nodes_table
from fedtide.report.run_records import ExperimentRecord


def ask(reveal: tuple[str, ...] = (), **clients: str) -> dict:
    nodes = {
        name: {"clients": {str(number): word}, "down": 1000, "up": 500, "seconds": 2.0 if word == "answered" else None}
        for number, (name, word) in enumerate(clients.items())
    }
    return {"question": "train", "purpose": "train", "reveal": list(reveal), "nodes": nodes}


LINES = [
    {"round": 0, "present": ["berlin", "lyon"], "asks": [ask(("pi",), berlin="answered", lyon="answered")]},
    {"round": 1, "present": ["berlin", "lyon"], "asks": [ask(berlin="answered", lyon="late")]},
    {"round": 2, "present": ["berlin"], "asks": [ask(berlin="refused: a weight of 1e30", lyon="lost: the node died")]},
    {"round": 3, "present": ["berlin", "lyon", "oslo"], "asks": [ask(berlin="not finite", lyon="abstained")]},
]


def folder(tmp_path: Path, lines=LINES) -> Path:
    (tmp_path / ASKS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def record(path: Path):
    return SimpleNamespace(runs=[SimpleNamespace(folder=path)], experiment=SimpleNamespace(rounds=5))


def test_a_record_tells_of_each_node(tmp_path):
    berlin, lyon, oslo = nodes_of(read_lines(folder(tmp_path), ASKS))
    assert (berlin.asked, berlin.words["answered"], berlin.words["refused"]) == (4, 2, 2)
    assert (lyon.words["late"], lyon.words["abstained"], lyon.shown) == (2, 1, {"pi"})
    assert berlin.reasons == {"refused: a weight of 1e30": 1, "not finite": 1}
    assert (berlin.down, berlin.up, berlin.rounds) == (4000, 2000, 4)
    assert (oslo.asked, oslo.rounds) == (0, 1)


@pytest.mark.parametrize("change", [
    {"asks": 3}, {"round": "x"}, {"scored": {"berlin": "well"}}, {"asks": [{"nodes": {}, "few": {"a": 3}}]},
])  # fmt: skip
def test_a_line_of_another_shape_is_named(tmp_path, change):
    assert read_asks(folder(tmp_path)) == LINES
    with pytest.raises(FedtideError, match=rf"{ASKS}: line 2 is damaged"):
        read_asks(folder(tmp_path, [LINES[0], {**LINES[1], **change}]))


def test_the_report_has_a_table_and_a_picture_of_nodes(tmp_path):
    made = record(folder(tmp_path))
    table = nodes_table(made, None)
    assert [row[0] for row in table.rows] == ["berlin", "lyon", "oslo"]
    assert table.rows[1][2:7] == ["3 of 4", "4", "1", "2", "0"]
    assert "a weight of 1e30" in table.rows[0][7]
    assert table.rows[0][8:] == ["pi", "4 kB", "2 kB", "2.0 s"]
    cells = nodes_over_rounds(made).figure.axes[0].images[0].get_array()
    assert cells.tolist() == [[0, 0, 4, 4], [0, 3, 3, 1], [6, 6, 6, 5]]


def test_simulated_clients_have_none(tmp_path):
    assert nodes_table(record(tmp_path), None) is None
    assert nodes_over_rounds(record(tmp_path)) is None
    assert not ExperimentRecord.real.func(record(tmp_path))
    assert ExperimentRecord.real.func(record(folder(tmp_path)))


@pytest.mark.parametrize("word", ["", "Answered", "nonsense", "refused", "not finite"])
def test_no_word_counts_as_an_answer_but_that_of_one(word):
    assert state_of(word) == "refused"


def test_what_was_asked_before_the_first_round_is_told(tmp_path):
    begin = {"round": -1, "present": ["berlin"], "asks": []}
    assert nodes_table(record(folder(tmp_path, [begin, *LINES])), None) == nodes_table(record(folder(tmp_path)), None)
    asked = begin | {"asks": [ask(berlin="answered")]}
    assert nodes_table(record(folder(tmp_path, [asked, *LINES])), None).rows[0][2:4] == ["5 of 5", "5"]
