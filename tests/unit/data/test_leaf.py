"""The JSON files of LEAF: what is written comes back, and a damaged file is one clear line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtide.config import from_dict
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.build import build
from fedtide.data.groups import Split
from fedtide.data.partition import Natural
from fedtide.data.sources import LEAF, Domains
from helpers.toys import played

ANN, BOB = {"x": [[0.0, 0.5, 1.0, 0.25], [1.0, 1.0, 1.0, 1.0]], "y": [2, 0]}, {"x": [[0.0, 0.0, 0.5, 0.5]], "y": [1]}


def leaf(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The content of a file."""
    sizes = changes.pop("num_samples", None) or [len(user["y"]) for user in data.values()]
    return {"users": list(data), "num_samples": sizes, "user_data": data, **changes}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def load(path: Path, **options: Any):
    return LEAF(path.name, **options).load(path.parent, 0)


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_written(tmp_path):
    rows = load(write(tmp_path / "all.json", leaf({"ann": ANN, "bob": BOB})))
    assert rows.x.dtype == torch.float32
    assert rows.x.tolist() == [*ANN["x"], *BOB["x"]]
    assert rows.y.tolist() == [2, 0, 1]
    assert (rows.client.tolist(), rows.client_names) == ([0, 0, 1], ("ann", "bob"))
    assert (rows.classes, rows.held_out, rows.name) == (3, None, "all.json")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.json", "test.json"),
        ("train/all_data_0.json", "test/all_data_0.json"),
        ("a_train_9.json", "a_test_9.json"),
    ],
)
def test_a_folder_has_a_part_to_train_on_and_one_to_test(tmp_path, train, test):
    write(tmp_path / "femnist" / train, leaf({"ann": ANN, "bob": BOB}))
    write(tmp_path / "femnist" / test, leaf({"bob": ANN, "cat": BOB}))
    rows = load(tmp_path / "femnist")
    assert rows.held_out.tolist() == [False] * 3 + [True] * 3
    assert (rows.client.tolist(), rows.client_names) == ([0, 0, 1, 1, 1, 2], ("ann", "bob", "cat"))


def test_files_called_test_in_a_folder_called_train_are_to_train_on(tmp_path):
    """As LEAF's names are: all_data_niid_05_keep_0_test_9.json lies in `test`, and a folder decides."""
    write(tmp_path / "set" / "train" / "contest.json", leaf({"ann": ANN}))
    assert load(tmp_path / "set").held_out is None


def test_rows_may_have_a_shape_and_classes_that_nobody_holds(tmp_path):
    path = write(tmp_path / "all.json", leaf({"ann": ANN}, hierarchies=["x"]))
    rows = load(path, shape=(1, 2, 2), classes=62)
    assert (rows.shape, rows.classes) == ((1, 2, 2), 62)
    assert rows.x[0].tolist() == [[[0.0, 0.5], [1.0, 0.25]]]


def test_users_are_the_natural_clients_and_their_test_rows_their_own(tmp_path):
    draw = np.random.default_rng(0)
    parts = {
        part: {
            f"u{i}": {"x": draw.random((n, 4)).round(3).tolist(), "y": draw.integers(0, 3, n).tolist()}
            for i, n in enumerate(sizes)
        }
        for part, sizes in (("train", [12, 8, 20]), ("test", [3, 0, 5]))
    }
    for part, users in parts.items():
        write(tmp_path / "set" / f"{part}.json", leaf(users))
    rows = load(tmp_path / "set")
    population = build(rows, Natural(), split=Split(val=0.25))
    assert population.names == ("u0", "u1", "u2")
    assert population.parts["test"].counts.tolist() == [3, 0, 5]
    assert (population.parts["train"].counts + population.parts["val"].counts).tolist() == [12, 8, 20]
    shard = population.shard(0, Moment(0, 1), "test")
    assert torch.equal(shard.x, torch.tensor(parts["test"]["u0"]["x"]))


def test_it_is_a_source_of_an_experiment_and_one_of_two_domains(tmp_path):
    draw = np.random.default_rng(0)
    users = {f"u{i}": {"x": draw.random((12, 4)).tolist(), "y": (np.arange(12) % 3).tolist()} for i in range(4)}
    path = str(write(tmp_path / "all.json", leaf(users)))
    data = {"source": {"kind": "leaf", "path": path, "classes": 3}, "partition": "natural"}
    method = {"name": "A", "algorithm": "fedavg", "cohort": 2, "loss": "wsm", "local": {"lr": 0.1, "batch_size": 4}}
    run = played(from_dict({"data": data, "model": "linear", "rounds": 2, "method": [method]}))
    assert len(run.steps) == 2
    domains = Domains(("day", "night"), (LEAF(path), LEAF(path))).load(None, 0)
    assert (len(domains), domains.classes, len(domains.client_names)) == (96, 6, 8)


# -- what is wrong -----------------------------------------------------------------------------------------------------


def one_line(path: Path, **options: Any) -> str:
    with pytest.raises(FedtideError) as raised:
        load(path, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_file_cut_anywhere_is_one_line(tmp_path):
    whole = json.dumps(leaf({"ann": ANN, "bob": BOB}))
    path = tmp_path / "cut.json"
    for length in range(len(whole)):
        path.write_text(whole[:length], encoding="utf-8")
        assert one_line(path).startswith(f"{path}: damaged or not a JSON file (")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"PNG"], ids=["utf", "deep", "png"])
def test_another_file_is_one_line(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    assert one_line(path).startswith(f"{path}: damaged or not a JSON file (")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ([1, 2], "no 'users'; allowed: a file of LEAF, with users, num_samples and user_data"),
        ({"users": [], "user_data": {}}, "no 'num_samples'"),
        ({"users": [], "num_samples": [], "user_data": []}, "no 'user_data'"),
        (leaf({"ann": ANN}, users=["ann", "bob"]), "number of num_samples: found 1, allowed: 2, as there are users"),
        (leaf({"ann": ANN}, users=["bob"]), "user 'bob': no lists x and y in user_data"),
        (leaf({"ann": ANN}, users=[["ann"]]), "users: found ['ann'], allowed: names"),
        (leaf({"ann": {"x": ANN["x"], "y": 1}}, num_samples=[1], users=["ann"]), "user 'ann': no lists x and y"),
        (leaf({"ann": ANN}, num_samples=[3]), "user 'ann': rows in x and y: found (2, 2), allowed: 3, as"),
        (leaf({"ann": {**ANN, "x": ANN["x"][:1]}}), "user 'ann': rows in x and y: found (1, 2), allowed: 2"),
        (leaf({"ann": {**ANN, "x": [[1.0], [1.0, 2.0]]}}), "user 'ann': allowed: in x lists of equally many numbers"),
        (leaf({"ann": {**ANN, "x": [1.0, 2.0]}}), "user 'ann': shapes of x and y: found ((2,), (2,)), allowed"),
        (leaf({"ann": {**ANN, "y": [[1], [2]]}}), "user 'ann': shapes of x and y: found ((2, 4), (2, 1)), allowed"),
        (leaf({"ann": {**ANN, "y": [0, 0.5]}}), "user 'ann', row 1: label: found 0.5, allowed: whole numbers from 0"),
        (leaf({"ann": {**ANN, "y": [0, 1e30]}}), "user 'ann', row 1: label: found 1e+30, allowed: whole numbers"),
        (leaf({"ann": {**ANN, "y": [0, 1_000_000]}}), "user 'ann', row 1: label: found 1000000, but 2 rows"),
        (leaf({"ann": {**ANN, "x": [[0.0] * 4, [math.nan] * 4]}}), "user 'ann', row 1: a feature is NaN or infinite"),
        (
            leaf({"ann": ANN, "bob": {"x": [[1.0]], "y": [0]}}),
            "user 'bob': number of features: found 1, allowed: 4, as in the first",
        ),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else "",
)
def test_a_damaged_file_is_one_line_that_names_the_user(tmp_path, content, line):
    path = write(tmp_path / "damaged.json", content)
    assert line in one_line(path)
    assert one_line(path).startswith(f"{path}: ")


def test_labels_beyond_the_classes_are_named(tmp_path):
    path = write(tmp_path / "all.json", leaf({"ann": ANN}))
    line = f"{path}: user 'ann', row 0: label: found 2, allowed: 0 to 1 (data.source.classes)"
    assert one_line(path, classes=2) == line


def test_a_shape_that_does_not_fit_is_one_line(tmp_path):
    path = write(tmp_path / "all.json", leaf({"ann": ANN}))
    line = f"data.source.shape: found [1, 28, 28], allowed: 4 numbers, as rows of {path} have"
    assert one_line(path, shape=(1, 28, 28)) == line


def test_nothing_to_read_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no file called *.json to train on, here or in a folder called train" in one_line(tmp_path / "empty")
    write(tmp_path / "only" / "test.json", leaf({"ann": ANN}))
    assert "no file called *.json to train on" in one_line(tmp_path / "only")
    assert one_line(write(tmp_path / "none.json", leaf({}))) == f"{tmp_path / 'none.json'}: no rows"
    assert "no such file or folder" in one_line(tmp_path / "gone.json")
