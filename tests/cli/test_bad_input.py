"""Mistakes through the command line: one line, exit status 2, and not a byte is written or changed."""

from __future__ import annotations

import gc
import gzip
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedtide.config import from_dict
from fedtide.core import checkpoint, codec
from fedtide.core.record import run_lock
from fedtide.report import clients, page
from fedtide.runs import build, digest, folder
from helpers.shell import contents, done, refused, written
from helpers.studies import MOMENTUM, SCAFFOLD, A, raw, record_of, run_of


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDTIDE_DATA", raising=False)
    monkeypatch.setattr("fedtide.report.page.pictures_of", lambda record: [])
    return tmp_path


def run(capsys, here: Path, *arguments: str) -> str:
    """What `fedtide run study.toml` complains about; nothing is written."""
    return refused(capsys, here, "run", "study.toml", "--workers", "1", *arguments)


# -- the configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("ruonds=3", "study.toml: ruonds: unknown key; allowed: .*; did you mean 'rounds'?"),
        ("data.partition.client=3", "study.toml: data.partition.client: unknown key.*did you mean 'clients'"),
        ("method.local.rate=3", "study.toml: method 'A'.local.rate: unknown key.*did you mean 'lr'"),
        ("rounds=many", "study.toml: rounds: found 'many', allowed: a whole number"),
        ("rounds=0", "study.toml: rounds: found 0, allowed: 1 or more"),
        ("shift.who.period=0", "study.toml: shift.who.period: found 0, allowed: greater than 0"),
        ("data.split.val=1.5", "study.toml: data.split.val: found 1.5, allowed: less than 1"),
        ("method.cohort.clients_per_round=-1", "found -1, allowed: 1 or more"),
        (
            "shift.who.curve=linaer",
            "study.toml: shift.who.curve: found 'linaer', allowed: linear, cosine; did you mean",
        ),
        ("baseline=B", "study.toml: baseline: found 'B', allowed: A"),
        ("sweep.rounds=[]", r"study.toml: sweep.rounds: found \[\]"),
        ("sweep.rounds=[3, 0]", "study.toml: sweep point 'rounds 0': rounds: found 0"),
        ("data.public_samples=-1", "study.toml: data.public_samples: found -1, allowed: 0 or more"),
        ("data.public_samples=many", "study.toml: data.public_samples: found 'many', allowed: a whole number"),
        (
            "data.public_samples=100000",
            "data.public_samples: found 100000, allowed: 0 or more and fewer than .*, the training rows of",
        ),
        ("method.local.optimizer=adamw", None),
    ],
)
def test_a_value_that_cannot_be(capsys, here, assignment, said):
    written(here / "study.toml", {**A, "cohort": {"kind": "uniform", "clients_per_round": 3}})
    if said is None:
        assert done("run", "study.toml", "--set", assignment, "--set", "rounds=1") == 0
    else:
        assert re.search(said.replace("toml:", "toml( with .*=.*)?:"), run(capsys, here, "--set", assignment))


@pytest.mark.parametrize(
    ("changes", "method", "said"),
    [
        ({}, {"cohort": 9}, "method 'A'.cohort.clients_per_round: found 9, allowed: at most 8, the registered clients"),
        ({}, {"local": {"optimizer": "adam", "momentum": 0.5}}, "momentum belongs to optimizer = 'sgd'"),
        (
            {"data": {"groups": {"by": "none"}}},
            {},
            "shift.who.kind: found 'periodic', but there is a single group of clients",
        ),
        ({"model": "cnn"}, {}, "model.kind: 'cnn' needs pictures .* found rows of shape"),
        (
            {"data": {"partition": {"kind": "iid", "clients": 300}}},
            {},
            "they need .* rows and there are .*; allowed: fewer",
        ),
        (
            {"data": {"partition": {"kind": "iid", "clients": 8, "samples": 50}}},
            {},
            "they need .* rows and there are",
        ),
        (
            {"data": {"partition": {"kind": "rotation"}, "groups": {"by": "none"}}, "shift": {"who": "always"}},
            {},
            "images",
        ),
        (
            {"data": {"partition": {"kind": "majority", "clients": 60, "p": 1.0}}},
            {},
            "found 30, but too few of",
        ),
        (
            {"data": {"partition": {"kind": "saved", "path": "nothing.safetensors"}}},
            {},
            "data.partition.path: no such file or folder: nothing.safetensors; set data.directory or FEDTIDE_DATA",
        ),
        (
            {"shift": {"who": {"kind": "replay", "path": "nothing.safetensors"}}},
            {},
            "shift.who.path: no such file or folder: nothing.safetensors",
        ),
    ],
)
def test_a_combination_that_cannot_be(capsys, here, changes, method, said):
    written(here / "study.toml", {**A, **method}, **changes)
    assert re.search(said, run(capsys, here))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"branch_layer": "hed"},
            "method 'A'.branch_layer: found 'hed', .*did you mean 'head'",
        ),
        (
            {"branch_layer": "relu1"},
            "method 'A'.branch_layer: found 'relu1', allowed: a layer with parameters",
        ),
        (
            {"prior": {"period": 0}},
            "method 'A'.prior.period: found 0, allowed: a number of rounds above 0, or a time such as '1d'",
        ),
        (
            {"prior": {"kind": "cosine", "period": -8}},
            "method 'A'.prior.period: found -8, allowed: a number of rounds above 0, or a time such as '1d'",
        ),
        ({"prior": {"kind": "measured", "curve": [1, 1.2]}}, r"prior.curve\[1\]: found 1.2, allowed: 1.0 or less"),
        ({"prior": {"kind": "measured", "curve": [-0.1]}}, r"prior.curve\[0\]: found -0.1, allowed: 0.0 or more"),
        ({"prior": "sunny"}, "method 'A'.prior: found 'sunny', allowed: linear, cosine"),
        ({"prior": "soft", "branches": 3}, "method 'A'.prior: found 'soft', allowed: at most 2 groups, not 3"),
        ({"branches": 0}, "method 'A'.branches: found 0, allowed: 1 or more"),
        ({"eps": 1.5}, "method 'A'.eps: found 1.5, allowed: 1.0 or less"),
    ],
)
@pytest.mark.parametrize("algorithm", ["fedtem", "fedtkm"])
def test_day_and_night_that_cannot_be(capsys, here, algorithm, options, said):
    written(here / "study.toml", {**A, "algorithm": algorithm, **options})
    assert re.search(said, run(capsys, here))


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [("fedtem", "prior.period"), ("fedtkm", "prior.period"), ("scsgd", "prior.period"), ("t-shot", "shots")],
)
def test_a_rhythm_that_there_is_not(capsys, here, algorithm, key):
    written(here / "study.toml", {**A, "algorithm": algorithm}, shift={"who": "always"})
    more = "" if key == "shots" else ", a time such as '1d', prior = 'learned' (FedTEM and FedTKM)"
    assert f"method 'A'.{key}: missing; allowed: a number of rounds{more}, or a periodic shift" in run(capsys, here)


def test_a_group_of_which_there_are_no_rows(capsys, here):
    written(
        here / "study.toml", {**A, "algorithm": "fedtem"}, data={"groups": {"by": "labels", "labels": [[0, 1], []]}}
    )
    assert "'group 1' gets no rows" in run(capsys, here)


@pytest.mark.parametrize("algorithm", ["fedtem", "fedtkm"])
def test_features_that_are_no_vectors(capsys, here, algorithm):
    characters = {"source": "day-night-characters", "partition": {"kind": "iid", "clients": 8, "samples": 10}}
    written(
        here / "study.toml", {**A, "algorithm": algorithm, "branch_layer": "conv1"}, data=characters, model="small-cnn"
    )
    assert (
        "method 'A'.branch_layer: shape of its features: found (1, 28, 28), allowed: a layer that takes vectors"
        in run(capsys, here)
    )


def test_rows_of_several_clients_cannot_decide_together_where_each_client_has_its_own_blend(capsys, here):
    written(here / "study.toml", {**A, "algorithm": "fedem", "decide_per": "oracle"})
    assert "method 'A'.decide_per: found 'oracle', but that joins rows of several clients" in run(capsys, here)


@pytest.mark.parametrize(("data", "said"), [
    ({"source": {"kind": "gaussians", "domains": 1}}, "found 'domain-mixture', but gaussians has a single domain"),
    ({"source": {"kind": "day-night-characters", "labels": "disjoint"},
      "groups": {"by": "labels", "labels": [[0, 1], [2, 3]]}},
     "found 'domain-mixture', but no client has a training row of domain 'night'; allowed: domains with samples"),
    ({"groups": {"by": "domain"}}, "client 4 has no rows of domain 'day'"),
])  # fmt: skip
def test_a_mixture_of_pools_that_are_not_there(capsys, here, data, said):
    written(
        here / "study.toml",
        A,
        data={"groups": {"by": "none"}, **data},
        shift={"who": "always", "what": "domain-mixture"},
    )
    assert re.search(said, run(capsys, here))


@pytest.mark.parametrize(("labels", "said"), [
    (["x"], "data.source: found 1 labels for 2 sources; allowed: a word for each source"),
    ("both", "data.source.labels: found 'both', allowed: 'disjoint', 'shared', or a list of a word for each source"),
    ([1, 2], r"data.source.labels: found \[1, 2\], allowed: 'disjoint', 'shared', or a list"),
])  # fmt: skip
def test_labels_of_domains_that_cannot_be(capsys, here, labels, said):
    on(here, {"kind": "domains", "names": ["a", "b"], "sources": ["gaussians", "gaussians"], "labels": labels})
    assert re.search(said, run(capsys, here))


@pytest.mark.parametrize("algorithm", ["fedtem", "scsgd", "t-shot"])
def test_a_rhythm_in_seconds_is_none_in_rounds(capsys, here, algorithm):
    shift = {"who": {"kind": "periodic", "period": 86400.0}, "clock": "seconds"}
    written(here / "study.toml", {**A, "algorithm": algorithm}, shift=shift, devices="log-normal")
    assert "missing; allowed: a number of rounds" in run(capsys, here)


def test_one_branch_is_allowed(here):
    written(here / "study.toml", {**A, "algorithm": "fedtem", "branches": 1})
    assert done("run", "study.toml", "--set", "rounds=1") == 0


def test_a_stream_that_leaves_a_client_empty(capsys, here):
    """A client with one label holds nothing in the other two of three intervals."""
    data = {
        "source": {"kind": "gaussians", "samples": 160, "dims": 4, "classes": 3},
        "partition": {"kind": "dirichlet", "clients": 8, "alpha": 0.3},
        "groups": {"by": "none"},
    }
    stream = {"kind": "stream", "by": "labels", "intervals": 3, "gap": 2, "retention": 2}
    written(here / "study.toml", A, data=data, shift={"who": "always", "what": stream})
    assert re.search(
        r"shift.what.empty: found 'error', but client \d holds no training rows at \d, .*allowed: 'wait'",
        run(capsys, here),
    )
    assert "no client holds a training row at round 6, of 8" in run(
        capsys, here, "--set", "rounds=8", "--set", "shift.what.empty=wait"
    )
    assert done("run", "study.toml", "--workers", "1", "--set", "shift.what.empty=wait") == 0


@pytest.mark.parametrize(("lines", "said"), [
    (["0,0,day", "99,4,night"], "changes.csv: row 3: client: found '99', allowed: 0 to 9"),
    (["0,-1,night"], "changes.csv: row 2: round: found '-1', allowed: a number of 0 or more"),
    (["0,4,nigth"], "changes.csv: row 2: concept: found 'nigth', allowed: day, night; did you mean 'night'?"),
])  # fmt: skip
def test_a_file_of_changes_that_cannot_be(capsys, here, lines, said):
    (here / "changes.csv").write_text("\n".join(["client,round,concept", *lines]) + "\n")
    what = {"kind": "change-points", "when": "file:changes.csv"}
    written(here / "study.toml", A, data={"groups": {"by": "none"}}, shift={"who": "always", "what": what})
    assert said in run(capsys, here)


@pytest.mark.parametrize(("options", "said"), [
    ({"representation": {"kind": "gradient", "distance": "js"}}, "representation.distance: found 'js'"),
    ({"clustering": {"kind": "k-means", "k_min": 5, "k_max": 3}},
     "clustering: found k_max 3 and k_min 5; allowed: k_max of k_min or more, or 1 for one cluster"),
    ({"representation": "label"}, "representation: found 'label', allowed: .*did you mean 'labels'"),
    ({"trigger": {"kind": "fraction", "tau": -0.5}}, "trigger.tau: found -0.5, allowed: 0"),
])  # fmt: skip
def test_clusters_that_cannot_be(capsys, here, options, said):
    written(here / "study.toml", {**A, "algorithm": "fielding", **options})
    assert re.search(f"method 'A'.{said}", run(capsys, here))


HELD = {"groups": {"by": "none"}}


@pytest.mark.parametrize(("changes", "said"), [
    ({"devices": {"kind": "log-normal", "compute_spread": 1e6}}, "devices.compute_spread: found .*, allowed: 10"),
    ({"devices": {"kind": "log-normal", "bandwidth": 1e-300}}, "devices.bandwidth: found 1e-300, allowed: 1e-30 or"),
    ({"devices": {"kind": "steady", "seconds": 1e308}}, r"devices.seconds: found 1e\+308, allowed: 1e\+30 or less"),
    ({"shift": {"who": "always", "how": {"kind": "label-swaps", "every": 1e-300}}},
     r"shift.how.every: it makes 6e\+300 events, allowed: at most 100000"),
    ({"shift": {"who": "always", "what": {"kind": "change-points", "when": {"kind": "drawn", "every": 4e-5}}},
      "data": HELD}, "shift.what.when.every: it makes 1499.. events, allowed: at most 100000"),
    ({"shift": {"who": "always", "what": {"kind": "cluster-drift", "groups": 2, "labels": 1, "every": 5e-324}},
      "data": HELD}, "shift.what.every: it makes too many events, allowed: at most 100000"),
    ({"shift": {"who": "always", "what": {"kind": "stream", "intervals": 10**9, "gap": 1}}, "data": HELD},
     "shift.what.intervals: found 1000000000, allowed: at most .*, as there are .* clients"),
])  # fmt: skip
def test_what_would_never_end_or_be_no_number(capsys, here, changes, said):
    written(here / "study.toml", A, **changes)
    assert re.search(said, run(capsys, here))


def test_a_gpu_that_is_not_there(capsys, here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    written(here / "study.toml", A)
    said = "fleet.device: found 'cuda', but torch finds no GPU on this machine; allowed: cpu, auto"
    assert said in run(capsys, here, "--set", "fleet.device=cuda")


@pytest.mark.parametrize(("what", "said"), [
    ({"kind": "change-points", "when": {"kind": "file", "path": "x.csv", "every": 5}}, "when.every: unknown key"),
    ({"kind": "change-points", "when": {"kind": "file", "path": "x.csv", "fraction": 0.5}},
     "when.fraction: unknown key"),
    ({"kind": "change-points", "concepts": {"kind": "domains", "samples": 5}}, "concepts.samples: unknown key"),
    ({"kind": "cluster-drift", "events": {"fraction": 0.3}}, "events.at: missing"),
    ({"kind": "stream", "by": {"kind": "labels", "spans": "quantiles"}}, "by.spans: unknown key"),
])  # fmt: skip
def test_what_another_key_leaves_without_effect(capsys, here, what, said):
    shifted(here, what)
    assert re.search(f"shift.what.{said}", run(capsys, here))


def test_shared_concepts_say_what_is_swapped(capsys, here):
    how = {"kind": "label-swaps", "concepts": 2, "local_labels_only": False}
    written(here / "study.toml", A, shift={"who": "always", "how": how})
    assert "shift.how: found local_labels_only false and concepts 2" in run(capsys, here)
    written(here / "study.toml", A, shift={"who": "always", "how": {"kind": "label-swaps", "begin": "dealt"}})
    assert "shift.how: found begin 'dealt' without concepts; allowed: 'source', or a" in run(capsys, here)


def test_more_clusters_than_clients_are_allowed_for_and_there_are_fewer(here):
    written(here / "study.toml", {**A, "algorithm": "fielding", "clustering": {"kind": "k-means", "k_max": 1000}})
    assert done("run", "study.toml", "--set", "rounds=1") == 0


@pytest.mark.parametrize("text", ["rounds = \n", "[[method]\n", "rounds = 3\nrounds = 3\n"])
def test_a_file_that_is_not_toml(capsys, here, text):
    (here / "study.toml").write_text(text)
    assert re.search(r"study.toml: not valid TOML: .*line \d", run(capsys, here))


def test_a_file_without_methods(capsys, here):
    (here / "study.toml").write_text("rounds = 3\n")
    assert run(capsys, here).startswith("study.toml: method")


# -- the data ----------------------------------------------------------------------------------------------------------

PLAIN = {"groups": {"by": "none"}, "held_out_clients": {"clients": 0}, "split": {"val": 0.2}}


def on(here: Path, source, **data) -> None:
    written(here / "study.toml", A, data={"source": source, **PLAIN, **data}, shift={"who": "always"})


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def pictures(folder: Path, count: int = 80) -> None:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(draw.integers(0, 255, (count, 6, 6)))))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(count) % 3)))


def test_rows_of_one_class_are_nothing_to_learn(capsys, here):
    (here / "one.csv").write_text("a,label\n" + "1,cat\n" * 60)
    on(here, "csv:one.csv")
    assert "one.csv: labels: found 'cat', but that is the label of every row; allowed: two or more" in run(capsys, here)


def test_a_model_without_parameters(capsys, here, monkeypatch):
    (here / "bare_model_for_tests.py").write_text("from torch import nn\nmake = lambda *_, **__: nn.Identity()\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    written(here / "study.toml", A, model="python:bare_model_for_tests:make")
    assert "model: found no parameters, allowed: a module with some to train" in run(capsys, here)


def test_a_folder_with_the_character_nul(capsys, here):
    written(here / "study.toml", A)
    assert "has the character NUL" in run(capsys, here, "--out", "a\0b")


PRINTING = """
import os, sys
from fedtide.cli.commands import main
for command in sys.argv[1:]:
    reader, writer = os.pipe()
    if not os.fork():
        os.close(reader)
        os.dup2(writer, 1)
        main(command.split())
    os.close(reader)
    os.close(writer)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_reader_that_goes_away():
    """Each command has a process that ends as an interpreter ends; importing is done once."""
    commands = ["recipes demo", "keys", "--help", "--version"]
    ends = subprocess.run(
        [sys.executable, "-c", PRINTING, *commands], capture_output=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (ends.returncode, ends.stdout, ends.stderr) == (0, b"0\n" * 4, b"")


@pytest.mark.parametrize("source", ["csv", "npz", "images", "leaf"])
def test_a_pipe_is_no_data_file(capsys, here, source):
    os.mkfifo(here / "pipe")
    on(here, f"{source}:pipe")
    assert done("run", "study.toml", "--out", "x") == 2  # what `refused` reads before would wait for the pipe
    assert "pipe: is a pipe or a device" in capsys.readouterr().err


def test_numbers_in_an_npz_that_fp32_cannot_hold(capsys, here):
    x = np.random.default_rng(0).normal(size=(40, 3))
    x[7] *= 1e300
    np.savez(here / "n.npz", x=x, y=np.arange(40) % 3)
    on(here, "npz:n.npz")
    assert "n.npz: row 7, counted from 0: a feature is NaN or beyond 3.4" in run(capsys, here)


def test_a_name_in_data_that_a_terminal_obeys(capsys, here):
    rows = "".join(f"{k},{k % 2},{k % 3},\x1b[2J{k % 2}\n" for k in range(60))
    (here / "named.csv").write_text("a,b,label,d\n" + rows)
    on(here, {"kind": "csv", "path": "named.csv", "domain": "d"})
    assert "named.csv: name of a domain or client: found '\\x1b[2J0'" in run(capsys, here)


def test_an_idx_file_of_255_dimensions(capsys, here):
    pictures(here / "mine")
    (here / "mine" / "train-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 255]) + b"\0\0\0\1" * 255 + b"\0")
    on(here, "idx:mine")
    assert "train-images-idx3-ubyte: damaged or not an IDX file" in run(capsys, here)


def test_a_number_that_fp32_cannot_hold_is_one_line(capsys, here):
    (here / "large.csv").write_text("a,label\n" + "1,0\n2,1\n" * 30 + "1e39,1\n")
    on(here, "csv:large.csv")
    assert "large.csv: row 60, counted from 0: a feature is NaN or beyond 3.4e+38" in run(capsys, here)


@pytest.mark.parametrize(
    ("number", "said"),
    [("9" * 5000, "study.toml: not valid TOML"), ("0x" + "f" * 5000, "rounds: found a whole number of 20000 bits")],
)
def test_a_number_of_thousands_of_digits(capsys, here, number, said):
    study = written(here / "study.toml", A)
    study.write_text(study.read_text().replace("rounds = 6", f"rounds = {number}"))
    assert said in run(capsys, here)


@pytest.mark.parametrize("arguments", [("--set", "title=x\udcff"), ("--out", "x\udcff")])
def test_bytes_that_are_no_text(capsys, here, arguments):
    written(here / "study.toml", A)
    assert "x\\udcff: is not UTF-8" in run(capsys, here, *arguments)


@pytest.mark.parametrize(
    ("key", "found"), [("local.lr", "1e+308"), ("local.weight_decay", "1e+308"), ("server.eps", "1.7e+308")]
)
def test_a_number_that_weights_cannot_hold(capsys, here, key, found):
    written(here / "study.toml", {**A, "algorithm": "fedavgm", "server": {"kind": "yogi"}})
    said = run(capsys, here, "--set", f"method.{key}={found}")
    assert f"{key}: found {found}, allowed: at most 3.4e+38" in said


def test_pictures_that_are_sound_are_run(here):
    pictures(here / "mine")
    on(here, "idx:mine")
    assert done("run", "study.toml", "--set", "rounds=1") == 0


@pytest.mark.parametrize("source", ["idx:nowhere", "npz:nowhere.npz", "csv:nowhere.csv", "cifar:nowhere"])
def test_a_file_that_is_missing(capsys, here, source):
    on(here, source)
    assert re.search(
        "data.source: no such file or folder: .*nowhere.*set data.directory or FEDTIDE_DATA", run(capsys, here)
    )


def test_a_published_file_that_was_changed(capsys, here):
    pictures(here / "mnist")
    on(here, "idx:mnist")
    said = run(capsys, here)
    assert re.search(r"mnist/train-images-idx3-ubyte.gz: md5 \w{32}, published f68b3c2dcbeaaa9fbdd348bbdeb94873", said)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[: len(data) // 2], "damaged or not a whole IDX file"),
        (
            lambda data: data[:40] + bytes([data[40] ^ 255]) + data[41:],
            "damaged or not a whole IDX file|bytes: found|magic",
        ),
        (lambda data: gzip.compress(gzip.decompress(data)[:-5]), "bytes: found .*, as its header announces"),
        (lambda data: b"", "magic number: found .*, as in an IDX file"),
        (lambda data: b"<html>not found</html>", "magic number: found .*, as in an IDX file"),
    ],
)
def test_pictures_that_are_damaged(capsys, here, damage, said):
    pictures(here / "mine")
    path = here / "mine" / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    on(here, "idx:mine")
    assert re.search(f"train-images-idx3-ubyte.gz: .*({said})", run(capsys, here))


def table(x=None, y=None, **columns) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(80, 4)) if x is None else x
    return {"x": x, "y": np.arange(len(x)) % 3 if y is None else y, **columns}


def test_a_table_that_is_sound_is_run(here):
    np.savez(here / "rows.npz", **table())
    on(here, "npz:rows.npz")
    assert done("run", "study.toml", "--set", "rounds=1") == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "pickled"])
def test_an_archive_that_is_damaged(capsys, here, damage):
    np.savez(
        here / "rows.npz", **table(**({"client": np.array([{}] * 80, dtype=object)} if damage == "pickled" else {}))
    )
    whole = (here / "rows.npz").read_bytes()
    if damage == "cut":
        (here / "rows.npz").write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        (here / "rows.npz").write_bytes(whole[:300] + bytes([whole[300] ^ 255]) + whole[301:])
    elif damage == "empty":
        (here / "rows.npz").write_bytes(b"")
    on(here, "npz:rows.npz")
    said = run(capsys, here)
    assert re.search("rows.npz: damaged or not an npz file without pickled objects", said)
    assert "allow_pickle" not in said


def nan_at(row: int) -> np.ndarray:
    x = np.zeros((80, 4))
    x[row, 2] = np.nan
    return x


@pytest.mark.parametrize(("columns", "said"), [
    (table(y=np.where(np.arange(80) == 7, -1, 1)), "rows.npz: row 7: label: found -1, allowed: whole numbers"),
    (table(y=np.where(np.arange(80) == 7, 0.5, 1)), "rows.npz: row 7: label: found 0.5, allowed: whole numbers"),
    (table(x=nan_at(11)), "rows.npz: row 11, counted from 0: a feature is NaN or beyond"),
    (table(y=np.zeros(79, int)), "rows.npz: rows of y: found 79, allowed: 80, as in x"),
    ({"x": np.zeros((80, 4))}, "rows.npz: no array 'y'; allowed: x"),
    (table(x=np.zeros((0, 4)), y=np.zeros(0, int)), "rows.npz: no rows"),
])  # fmt: skip
def test_rows_that_cannot_be(capsys, here, columns, said):
    np.savez(here / "rows.npz", **columns)
    on(here, "npz:rows.npz")
    assert re.search(said, run(capsys, here))


@pytest.mark.parametrize(("lines", "said"), [
    (["a,b,label", "1,2,0", "1,nan,1"], "rows.csv: row 3: b: found 'nan', allowed: a finite number"),
    (["a,b,label", "1,2,0", "1,,1"], "rows.csv: row 3: b: found '', allowed: a finite number"),
    (["a,b,label", "1,2,0", "1,2,-1"], "rows.csv: row 3: label: found '-1', allowed: whole numbers from 0, or names"),
    (["a,b,label", "1,2,0", "1,2"], "rows.csv: row 3: number of cells: found 2, allowed: 3, as in the header"),
    (["a,b,lable", "1,2,0"], "rows.csv: no column 'label'; allowed: a, b, lable; did you mean 'lable'"),
    (["a,b,label"], "rows.csv: no rows below the header"),
])  # fmt: skip
def test_a_table_with_a_bad_row(capsys, here, lines, said):
    (here / "rows.csv").write_text("\n".join(lines) + "\n")
    on(here, "csv:rows.csv")
    assert re.search(said, run(capsys, here))


OWN = """
import numpy as np
from torch import nn

X = np.arange(320.0).reshape(80, 4)

def raising(): return {}["label"]
def column(): return X, (np.arange(80) % 3).reshape(80, 1)
def missing(): return X, [None if i == 7 else "cat" for i in range(80)]
def huge(): return X, np.where(np.arange(80) == 7, 10**9, 0)

class Broken(nn.Module):
    def __init__(self, shape):
        super().__init__()
        raise LookupError("no weights\\nhere")

def many_lines(): raise ValueError("first\\nsecond")
"""


@pytest.fixture
def own(here, monkeypatch):
    """The user's own module, in the current folder."""
    (here / "own_code_of_a_person.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield "python:own_code_of_a_person"
    sys.modules.pop("own_code_of_a_person", None)


@pytest.mark.parametrize(("function", "said"), [
    ("raising", r"data.source: raising\(\) failed with KeyError: 'label' \(.*own_code_of_a_person.py, line 7\)"),
    ("many_lines", r"data.source: many_lines\(\) failed with ValueError: first second \(.*, line 17\)"),
    ("column", r"own_code_of_a_person:column: shape of y: found \(80, 1\), allowed: \(rows,\)"),
    ("missing", "own_code_of_a_person:missing: row 7: label: found None, allowed: names, or whole numbers from 0"),
])  # fmt: skip
def test_a_function_that_fails_or_returns_labels_that_cannot_be(capsys, here, own, function, said):
    on(here, f"{own}:{function}")
    assert re.search(said, run(capsys, here))


def test_a_huge_label_is_told_before_anything_is_made_of_so_many_classes(capsys, here, monkeypatch, own):
    on(here, f"{own}:huge")
    monkeypatch.setattr(build, "build", lambda *given, **named: pytest.fail("rows were dealt"))
    tracemalloc.start()
    began = time.perf_counter()
    said = run(capsys, here)
    took, (_, most) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "row 7: label: found 1000000000, but 80 rows are too few for so many classes; allowed: 0 to 999, or" in said
    assert took < 5
    assert most < 50e6


def test_a_model_that_cannot_be_made(capsys, here, own):
    written(here / "study.toml", A, model=f"{own}:Broken")
    said = run(capsys, here)
    assert re.search(r"model: Broken\(\) failed with LookupError: no weights here \(.*own_code_.*.py, line 15\)", said)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"shift": {"who": "replay:own.safetensors"}}, "shift.who.path"),
        ({"data": {"partition": "saved:own.safetensors"}}, "data.partition.path"),
    ],
)
@pytest.mark.parametrize("tree", [{"weights": torch.zeros(3)}, [1, 2], None], ids=["a model", "a list", "nothing"])
def test_a_file_that_is_no_saved_population(capsys, here, change, key, tree):
    codec.to_file(here / "own.safetensors", tree)
    written(here / "study.toml", A, **change)
    assert f"{key}: own.safetensors is not a saved population; allowed: shift/<seed>.safetensors" in run(capsys, here)


@pytest.mark.parametrize("change", [{"shift": {"who": "replay:own.safetensors"}},
                                    {"data": {"partition": "saved:own.safetensors"}}])  # fmt: skip
def test_tensors_of_another_program_are_no_saved_population(capsys, here, change):
    save_file({"weight": torch.zeros(3)}, here / "own.safetensors")
    written(here / "study.toml", A, **change)
    assert "own.safetensors: damaged or not a file of this program" in run(capsys, here)


def test_a_client_with_no_data(capsys, here):
    np.savez(here / "rows.npz", **table())
    on(here, "npz:rows.npz", groups={"by": "labels", "labels": [[0, 1, 2], []]})
    assert re.search("'group 1' gets no rows", run(capsys, here))


def test_more_clients_than_there_are(capsys, here):
    np.savez(here / "rows.npz", **table(client=np.arange(80) % 5))
    on(here, "npz:rows.npz", partition={"kind": "natural", "clients": 6})
    assert re.search("found 6, allowed: at most 5, the clients of rows.npz with 1 rows or more", run(capsys, here))
    on(here, "npz:rows.npz", partition={"kind": "natural", "clients": 4, "min_samples": 17})
    assert re.search("allowed: at most 0, the clients of rows.npz with 17 rows or more", run(capsys, here))


# -- other files that a configuration names ----------------------------------------------------------------------------

POOLS = {"groups": {"by": "none"}}
GOOD = "client,round,concept\n0,2,night\n"
SHARES = "concept,0,1,2\na,0.5,0.5,0\nb,0,0,1\n"
SHARED = {"kind": "label-shares", "path": "shares.csv", "samples": 5, "test_samples": 2, "val_samples": 1}
DRAWN = {"kind": "change-points", "concepts": SHARED}


def noted(here: Path, **files: str) -> None:
    for name, text in files.items():
        (here / name.replace("__", ".")).write_text(text)


def shifted(here: Path, what=None, who="always", **changes) -> None:
    shift = {"who": who, **({} if what is None else {"what": what})}
    written(here / "study.toml", A, shift=shift, **{"data": POOLS, **changes})


@pytest.mark.parametrize(("algorithm", "options", "said"), [
    ("pfedem", {"features": {"kind": "frozen", "weights": "nowhere.safetensors"}},
     r"method 'A'.features.weights: no such file or folder: nowhere.safetensors; allowed: a file"),
    ("fedgmm", {"features": {"kind": "frozen", "weights": "nowhere.safetensors"}},
     r"method 'A'.features.weights: no such file or folder: nowhere.safetensors; allowed: a file"),
    ("fielding", {"representation": {"kind": "embedding", "weights": "nowhere.safetensors"}},
     r"method 'A'.representation.weights: no such file or folder: nowhere.safetensors; allowed: a file"),
    ("pfedem", {"features": {"kind": "network"}, "gaussian_init": "public"},
     r"method 'A'.gaussian_init: found 'public', but the task has 1 public rows;"
     r" allowed: data.public_samples of 2 or more"),
    ("pfedem", {"gaussian_init": "public"},
     r"method 'A'.gaussian_init: found 'public', but the task has 1 public rows;"
     r" allowed: data.public_samples of 2 or more"),
])  # fmt: skip
def test_a_method_without_what_it_begins_with(capsys, here, algorithm, options, said):
    written(here / "study.toml", {**A, "algorithm": algorithm, **options}, data={"public_samples": 1})
    assert re.search(said, run(capsys, here))


def test_weights_that_are_none(capsys, here):
    (here / "weights").write_bytes(b"nothing of the kind")
    options = {"algorithm": "pfedem", "features": {"kind": "frozen", "weights": "weights"}}
    written(here / "study.toml", {**A, **options})
    assert re.search(r"features.weights: weights: ", run(capsys, here))


def test_a_manifest_that_is_missing(capsys, here):
    on(here, "manifest:nowhere.csv")
    assert "data.source: no such file or folder: " in run(capsys, here)


@pytest.mark.parametrize(("what", "said"), [
    ({"kind": "change-points", "when": "file:nowhere.csv"},
     "shift.what.when.path: no such file or folder: nowhere.csv; set .*"),
    ({**DRAWN, "concepts": "label-shares:nowhere.csv"},
     "shift.what.concepts.path: no such file or folder: nowhere.csv; set .*"),
])  # fmt: skip
def test_change_points_that_are_missing(capsys, here, what, said):
    shifted(here, what)
    assert re.fullmatch(said, run(capsys, here))


@pytest.mark.parametrize(("shares", "said"), [
    ("a,0.5,0.5,0\nb,0,-0.5,1.5\n", "shares.csv: row 3: 1: found '-0.5', allowed: a number of 0 or more"),
    ("a,0.5,0.5,0\nb,0,nan,1\n", "shares.csv: row 3: 1: found 'nan', allowed: a number of 0 or more"),
    ("a,0.5,0.5,0\nb,0,x,1\n", "shares.csv: row 3: 1: found 'x', allowed: a number of 0 or more"),
    ("a,0.5,0.499,0\nb,0,0,1\n", "shares.csv: row 2: sum of the shares of 'a': found 0.999, allowed: 1, within 1e-06"),
    ("a,0.5,0.5,0\na,0,0,1\n", "shares.csv: row 3: concept: found 'a', allowed: a name that is not there yet"),
    ("a,0.5,0.5,0\n,0,0,1\n", "shares.csv: row 3: concept: found '', allowed: a name that is not there yet"),
    ("a,0.5,0.5,0\n", "shares.csv: number of concepts: found 1, allowed: two or more"),
    ("a,0.5,0.5\n", "shares.csv: row 2: number of cells: found 3, allowed: 4, as in the header"),
])  # fmt: skip
def test_label_distributions_that_are_none(capsys, here, shares, said):
    noted(here, shares__csv="concept,0,1,2\n" + shares)
    shifted(here, DRAWN)
    assert run(capsys, here) == said


@pytest.mark.parametrize(("text", "said"), [
    ("concept,0,1\na,0.5,0.5\nb,0,1\n", "shares.csv: row 1: columns of shares: found 2, allowed: 3, one per label"),
    ("concept,0,1,9\na,0.5,0.5,0\nb,0,1,0\n",
     "shares.csv: row 1: column: found '9', allowed: the numbers of the labels, 0 to 2"),
    ("name,0,1,2\na,0.5,0.5,0\n", "shares.csv: no column 'concept'; allowed: name, 0, 1, 2"),
])  # fmt: skip
def test_label_distributions_of_other_labels(capsys, here, text, said):
    noted(here, shares__csv=text)
    shifted(here, DRAWN)
    assert run(capsys, here) == said


def test_change_points_to_a_distribution_that_there_is_not(capsys, here):
    noted(here, shares__csv=SHARES, changes__csv="client,round,concept\n0,2,b\n1,2,night\n")
    shifted(here, {**DRAWN, "when": "file:changes.csv"})
    assert run(capsys, here) == "changes.csv: row 3: concept: found 'night', allowed: a, b"


def test_devices_without_their_files(capsys, here):
    written(here / "study.toml", A, devices={"kind": "traces", "latency": "nowhere.json"})
    assert "devices.latency: no such file or folder: nowhere.json; set data.directory" in run(capsys, here)
    noted(here, latency__json='[{"ResNet Latency": 1}]')
    written(here / "study.toml", A, devices={"kind": "traces", "latency": "latency.json", "lines": "nowhere.csv"})
    assert "devices.lines: no such file or folder: nowhere.csv; set data.directory" in run(capsys, here)


WAKING = "client,start,end\n0,0,10\n"


@pytest.mark.parametrize(("name", "text", "more", "said"), [
    ("awake.csv", None, {}, "shift.who.path: no such file or folder: awake.csv; set data.directory"),
    ("awake.csv", "", {}, "awake.csv: is empty, allowed: a header, and rows below it"),
    ("awake.csv", "client,from,end\n0,0,10\n", {}, "awake.csv: no column 'start'; allowed: client, from, end"),
    ("awake.csv", "client,start,end\n0,9,9\n", {}, "awake.csv: row 2: end: found '9', allowed: more than start, 9"),
    ("awake.csv", "client,start,end\n0,-1,9\n", {}, "awake.csv: row 2: start: found '-1', allowed: a number of 0"),
    ("awake.csv", "client,start,end\n0,0,soon\n", {}, "awake.csv: row 2: end: found 'soon', allowed: a number of 0 or"),
    ("awake.csv", "client,start,end\n0,0,1\n99,0,10\n", {},
     "shift.who.path: awake.csv: client: found '99', allowed: 0 to 9, or match = 'drawn'"),
    ("awake.csv", WAKING, {"period": 5.0}, "awake.csv: row 2: end - start: found 10.0, allowed: at most the period, 5"),
    ("awake.csv", "client,start,end\n0,5,10\n", {}, "shift.who.path: no registered client is awake at 0"),
    ("awake.csv", "client,start,end\n8,0,10\n", {}, "shift.who.path: no registered client is awake at 0"),
    ("awake.json", "{", {}, "shift.who.path: awake.json: damaged or not JSON"),
    ("awake.json", "3", {}, "shift.who.path: awake.json: found 3, allowed: a list or an object"),
    ("awake.json", "[]", {}, "shift.who.path: awake.json: no client is ever awake; allowed: one interval or more"),
    ("awake.json", '[{"client": 0, "start": 1}]', {}, "awake.json: entry 1: found .* allowed: an object with client"),
    ("awake.json", '{"a": 3}', {}, "awake.json: device 'a': found 3, allowed: an object with ready_time, a list of"),
    ("awake.json", '{"a": {"ready_time": [3]}}', {}, r"awake.json: device 'a': found 3, allowed: \[start, end\]"),
    ("awake.json", '{"a": {"ready_time": [[1, 3]], "trace_start": 5, "trace_end": 5}}', {},
     "awake.json: device 'a': trace_end: found 5.0, allowed: more than trace_start, 5"),
    ("awake.json", '{"a": {"ready_time": [[1, 3]], "trace_start": 5}}', {},
     "awake.json: device 'a': trace_end: found None, allowed: a number of 0 or more"),
])  # fmt: skip
def test_a_trace_of_who_is_awake_that_cannot_be(capsys, here, name, text, more, said):
    if text is not None:
        (here / name).write_text(text)
    shifted(here, who={"kind": "availability", "path": name, **more})
    assert re.match(said, run(capsys, here))


def test_seconds_that_nobody_counts(capsys, here):
    written(here / "study.toml", A, shift={"who": {"kind": "periodic", "period": 60}, "clock": "seconds"})
    said = "study.toml: shift.clock: found 'seconds', but no [devices] says how long a round takes; allowed: 'rounds'"
    assert run(capsys, here).startswith(said)
    assert done("run", "study.toml", "--set", "devices=steady", "--set", "rounds=1") == 0


@pytest.mark.parametrize(("stop_at", "said"), [
    (1.5, "stop_at.accuracy: found 1.5, allowed: 1.0 or less"),
    ({"accuracy": 0.5, "evaluations": 0}, "stop_at.evaluations: found 0, allowed: 1 or more"),
    ({"evaluations": 2}, "stop_at.accuracy: missing"),
    ({"acuracy": 0.5}, "stop_at.acuracy: unknown key; allowed: accuracy, evaluations; did you mean 'accuracy'"),
    ("soon", "stop_at: found 'soon', allowed: a table"),
])  # fmt: skip
def test_a_target_that_cannot_be(capsys, here, stop_at, said):
    written(here / "study.toml", A, stop_at=stop_at)
    assert run(capsys, here).startswith(f"study.toml: {said}")


# -- run folders -------------------------------------------------------------------------------------------------------


@pytest.fixture
def half(here):
    """A run folder in which one run is finished and one is at round 2."""
    experiment = from_dict(raw({**A, "name": "a"}, SCAFFOLD, rounds=4))
    folder.create(experiment, here / "x")
    list(run_of(experiment, here / "x").play())
    for _ in range(2):
        list(run_of(experiment, here / "x", method=1).play(lambda: True))
    return here / "x"


def test_a_run_folder_that_exists_is_left_alone(capsys, here, half):
    written(here / "study.toml", A)
    said = run(capsys, here, "--out", "x")
    assert said == "x: already exists, allowed: a new folder; go on with: fedtide resume x"
    (here / "file").write_text("mine")
    assert "file: already exists" in run(capsys, here, "--out", "file")


@pytest.mark.parametrize(
    ("old", "new"), [("rounds = 4", "rounds = 5"), ("lr = 0.1", "lr = 0.2"), ("hidden = [", "hidden = [7,")]
)
def test_a_checkpoint_of_another_configuration(capsys, here, half, old, new):
    text = (half / "config.toml").read_text()
    assert old in text
    (half / "config.toml").write_text(text.replace(old, new))
    said = refused(capsys, here, "resume", "x", "--workers", "1")
    assert "this checkpoint belongs to another configuration" in said


def test_a_stacked_run_goes_on_stacked(capsys, here, half):
    text = (half / "config.toml").read_text()
    assert 'kind = "local"' in text
    (half / "config.toml").write_text(text.replace('kind = "local"', 'kind = "stacked"'))
    said = refused(capsys, here, "resume", "x", "--fleet", "workers")
    assert said.startswith("--fleet: found 'workers', allowed: none, because x is stacked")


def test_a_finished_run_of_another_configuration(capsys, here, half):
    done("resume", "x", "--workers", 1)
    text = (half / "config.toml").read_text()
    (half / "config.toml").write_text(text.replace("lr = 0.1", "lr = 0.2"))
    assert "another configuration" in refused(capsys, here, "resume", "x", "--workers", "1")


def test_a_run_of_before_an_option_is_read_and_not_resumed(capsys, here, half):
    """What an older version would have written: a key that it did not know was not there when it was played."""
    config = half / "config.toml"
    config.write_text(config.read_text().replace("weight_decay = 0.0\n", ""))
    shutil.rmtree(half / "a")
    assert done("resume", "x", "--workers", 1) == 0
    config.write_text(config.read_text().replace("lr = 0.1\n", "lr = 0.2\n"))  # as if its default were another now
    assert done("report", "x") == 0
    assert done("verify", "x") == 0
    assert "another configuration" in refused(capsys, here, "resume", "x", "--workers", "1")


def test_a_line_that_was_removed_since_is_named(capsys, here, half):
    config = half / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1\n", "lr = 0.2\n").replace("weight_decay = 0.0\n", ""))
    for command in ("report", "resume"):
        assert "another configuration" in refused(capsys, here, command, "x")
    assert done("verify", "x") == 1


def test_settings_are_compared_wherever_there_is_another_device(capsys, here, half, monkeypatch):
    config = half / "config.toml"
    config.write_text(config.read_text().replace('device = "cpu"', 'device = "auto"'))
    monkeypatch.setattr(digest, "device_of", lambda experiment: "cuda of this machine")
    assert done("verify", "x") == 0
    config.write_text(config.read_text().replace("lr = 0.1\n", "lr = 0.2\n"))
    assert done("verify", "x") == 1


def change(half: Path, **values) -> Path:
    (path,) = half.glob("scaffold/0/checkpoints/*/checkpoint.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return path


def test_a_checkpoint_of_another_version(capsys, here, half):
    change(half, format=99)
    line = "checkpoint.json: format: found 99, but it was written by another version; allowed: 2"
    assert line in refused(capsys, here, "resume", "x")


@pytest.mark.parametrize("name", ["state.safetensors", "memory.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["cut", "missing", "rubbish"])
def test_a_checkpoint_that_is_damaged(capsys, here, half, name, damage):
    (path,) = half.glob(f"scaffold/0/checkpoints/*/{name}")
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"rubbish")
    assert re.search(f"{name}: (damaged|no such file|missing)", refused(capsys, here, "resume", "x", "--workers", "1"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "config.toml: method"),
        ("rounds = \n", "config.toml: not valid TOML"),
        ("ruonds = 3\n", "config.toml: .*ruonds|method"),
    ],
)
def test_a_configuration_that_is_damaged(capsys, here, half, text, said):
    (half / "config.toml").write_text(text)
    for command in (["resume", "x"], ["report", "x"]):
        assert re.search(said, refused(capsys, here, *command))


def test_a_run_that_another_process_plays(capsys, here, half):
    with run_lock(half / "scaffold" / "0"):
        said = refused(capsys, here, "resume", "x", "--workers", "1")
        gc.collect()  # a file that was left open is told now
    assert said.endswith("x/scaffold/0/rounds.jsonl: another process is playing this run; wait for it, or stop it")
    assert done("resume", "x", "--workers", 1) == 0


@pytest.mark.parametrize(("name", "damage"), [
    ("environment.json", "{"), ("environment.json", "[]"), ("environment.json", "{}"), ("environment.json", '"text"'),
    ("a/0/timings.jsonl", '{"round": 0}\n'), ("a/0/timings.jsonl", '{"seconds": "long"}\n'),
    ("a/0/timings.jsonl", "rubbish}\n"), ("a/0/timings.jsonl", "[1]}\n"),
    ("a/0/clients.csv", "round,view\nmany,held_out_clients\n"), ("a/0/clients.csv", "nothing,of,the,kind\n1,2,3,4\n"),
    ("a/0/clients.csv", "round,view,client,accuracy\n3,held_out_clients,8,high\n"),
    ("a/0/clients.csv", "view,round\nheld_out_clients\n"),
    ("environment.json", "\xff"), ("a/0/timings.jsonl", "\xff}\n"), ("a/0/clients.csv", "view,round\n\xff,3\n"),
])  # fmt: skip
def test_a_report_of_a_run_folder_with_a_damaged_file(capsys, here, monkeypatch, half, name, damage):
    done("report", "x")
    monkeypatch.setattr(page, "pictures_of", lambda record: clients.client_distribution(record) and [])
    (half / name).write_text(damage, encoding="latin-1")
    assert re.search(rf"x/{name}: .*damaged", refused(capsys, here, "report", "x"))


@pytest.mark.parametrize("name", ["environment.json", "a/0/timings.jsonl", "a/0/clients.csv"])
def test_a_first_report_writes_nothing_where_a_file_is_damaged(capsys, here, monkeypatch, half, name):
    monkeypatch.setattr(page, "pictures_of", lambda record: clients.client_distribution(record) and [])
    (half / name).write_text("view,round\nrubbish}\nheld_out_clients\n")
    assert "damaged" in refused(capsys, here, "report", "x")


@pytest.mark.parametrize("first", [False, True])
def test_a_report_in_the_place_of_a_folder(capsys, here, half, first):
    if not first:
        done("report", "x")
    (here / "pages").mkdir()
    (here / "pages" / "mine").write_text("mine")
    assert refused(capsys, here, "report", "x", "--out", "pages") == "pages: is a folder"


# -- a disk that is full -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at",
    [
        "pathlib.Path.mkdir",
        "pathlib.Path.write_text",
        "fedtide.core.record.Record.append",
        "fedtide.core.checkpoint.flush",
    ],
)
def test_a_disk_that_is_full_is_one_clear_line(capsys, here, monkeypatch, at):
    written(here / "study.toml", A, MOMENTUM, rounds=2)

    def full(*given, **named):
        raise OSError(28, "No space left on device", "x/somewhere")

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(at, full)
        assert done("run", "study.toml", "--out", "x", "--workers", 1) == 2
    err = capsys.readouterr().err
    made = (here / "x" / "config.toml").is_file()
    again = r"go on with: \S+ resume x" if made else "run the same command again"
    assert re.fullmatch(rf"fedtide: x/somewhere: No space left on device; make room, and {again}\n", err)
    assert made == (at not in ("pathlib.Path.mkdir", "pathlib.Path.write_text"))


@pytest.mark.parametrize(("arguments", "line"), [
    (["run", "x.toml", "--workers", "two"], "--workers: found 'two', allowed: a whole number"),
    (["run", "x.toml", "--fleet", "rai"],
     "--fleet: found 'rai', allowed: local, workers, ray, stacked, auto; did you mean 'ray'?"),
    (["run", "x.toml", "--workers"], "--workers: no value given; fedtide run --help says what it is"),
    (["run"], "EXPERIMENT: no value given; fedtide run --help says what it is"),
    (["deploy", "x.toml", "--nodes", "a"], "--method: no value given; fedtide deploy --help says what it is"),
    (["export", "x", "--format", "onxn"],
     "--format: found 'onxn', allowed: safetensors, onnx, torch-export; did you mean 'onnx'?"),
    (["join", "x", "--data", "y", "--no-dry"], "Unknown option: --no-dry. Did you mean --dry?"),
    (["run", "."], ".: is a folder, allowed: a TOML file"),
])  # fmt: skip
def test_a_wrong_option_or_argument_is_said_as_everything_else(capsys, here, arguments, line):
    assert refused(capsys, here, *arguments) == line


def test_the_user_is_told_what_python_says_where_there_is_no_file(capsys, monkeypatch):
    def broken(*given, **named):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("fedtide.cli.listings.recipes", broken)
    assert done("recipes") == 2
    assert capsys.readouterr().err == "fedtide: input/output: Input/output error\n"


def test_a_run_that_stopped_on_a_full_disk_goes_on_when_there_is_room(here, monkeypatch):
    written(here / "study.toml", SCAFFOLD, rounds=6, checkpoint_every=2)
    save, saved = checkpoint.save, []

    def full(*given, **named):
        saved.append(1)
        if len(saved) == 2:
            raise OSError(28, "No space left on device", "x")
        save(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        assert done("run", "study.toml", "--out", "x") == 2
    assert done("resume", "x") == 0
    assert done("run", "study.toml", "--out", "y") == 0
    assert record_of(here / "x") == record_of(here / "y")


def test_interrupting_before_the_first_round_is_one_clear_line(capsys, here, monkeypatch):
    written(here / "study.toml", A)

    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedtide.api.jobs.preflight", interrupted)
    assert done("run", "study.toml") == 130
    err = capsys.readouterr().err
    assert err.startswith("fedtide: interrupted")
    assert err.count("\n") == 1
    assert list(contents(here)) == ["study.toml"]


def test_errors_of_the_program_are_not_hidden(here, monkeypatch):
    """A fault in the program keeps its traceback: it cannot be mended by whoever runs it."""
    written(here / "study.toml", A)

    def broken(*given, **named):
        raise ZeroDivisionError

    monkeypatch.setattr("fedtide.api.jobs.preflight", broken)
    with pytest.raises(ZeroDivisionError):
        done("run", "study.toml")


def test_an_error_of_a_work_is_one_clear_line_and_the_run_can_be_looked_at(capsys, here):
    written(here / "study.toml", {**A, "algorithm": "helpers.deadly:failing"})
    assert done("run", "study.toml", "--out", "x") == 2
    assert capsys.readouterr().err == "fedtide: the well is dry\n"
    assert (here / "x" / "config.toml").is_file()
