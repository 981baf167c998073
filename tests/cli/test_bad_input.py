"""Mistakes through the command line: one line, exit status 2, and not a byte is written or changed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pytest
import torch
from pyarrow import parquet

from fedtide.algorithms.centralized import State
from fedtide.config import from_dict
from fedtide.core import codec
from fedtide.core.base import Weights
from fedtide.report import clients, page
from fedtide.runs import digest, folder
from helpers.shell import done, refused, written
from helpers.studies import MOMENTUM, SCAFFOLD, A, raw, run_of

pytestmark = pytest.mark.usefixtures("here", "undrawn")


def run(capsys, here: Path, *arguments: str) -> str:
    """What `fedtide run study.toml` complains about; nothing is written."""
    return refused(capsys, here, "run", "study.toml", "--workers", "1", *arguments)


# -- the configuration -------------------------------------------------------------------------------------------------

ALONE = {"groups": {"by": "none"}}
ARCHIVE = {"kind": "saved", "path": "nothing.safetensors"}
STREAM = {"kind": "stream", "intervals": 10**9, "gap": 1}
HUGE_DRIFT = {"kind": "cluster-drift", "groups": 2, "labels": 1, "every": 5e-324}


def always(**shift) -> dict:
    """A study in which all clients are there, with a shift of what or how."""
    return {"data": ALONE, "shift": {"who": "always", **shift}}


MISTAKES = [
    ({}, {"ruonds": 3}, "study.toml: ruonds: unknown key; did you mean 'rounds'. Allowed: "),
    ({}, {"rounds": "many"}, "study.toml: rounds: found 'many', allowed: a whole number"),
    ({}, {"data": {"public_samples": 100000}}, "data.public_samples: found 100000, allowed: 0 or more and fewer than"),
    ({}, {"model": "cnn"}, "model.kind: 'cnn' needs pictures .* found rows of shape"),
    ({}, {"stop_at": 1.5}, "stop_at.accuracy: found 1.5, allowed: 1.0 or less"),
    ({"local": {"rate": 3}}, {}, "study.toml: method 'A'.local.rate: unknown key.*did you mean 'lr'"),
    # Clients and their rows.
    ({}, {"data": ALONE}, "shift.who.kind: found 'periodic', but there is a single group of clients"),
    ({}, {"data": {"partition": {"kind": "iid", "clients": 300}}}, "they need .* rows and there are .*; allowed: fewe"),
    ({}, {"data": {"partition": {"kind": "majority", "clients": 60, "p": 1.0}}}, "found 30, but too few of"),
    ({}, {"data": {"partition": ARCHIVE}}, "data.partition.path: no such file or folder: nothing.safetensors; set dat"),
    ({}, {"shift": {"who": {"kind": "replay", "path": "x.safetensors"}}}, "shift.who.path: no such file or folder: x."),
    ({}, {"shift": {"who": {"kind": "periodic", "period": 60}, "clock": "seconds"}},
     r"study.toml: shift.clock: found 'seconds', but no \[devices\] says how long a round takes; allowed: 'rounds'"),
    ({}, {**always(what="domain-mixture"), "data": {**ALONE, "source": {"kind": "day-night-characters",
     "labels": "disjoint"}, "groups": {"by": "labels", "labels": [[0, 1], [2, 3]]}}},
     "found 'domain-mixture', but no client has a training row of domain 'night'; allowed: domains with samples"),
    ({}, always(what=STREAM), "shift.what.intervals: found 1000000000, allowed: at most .*, because there are"),
    ({}, always(what=HUGE_DRIFT), "shift.what.every: it makes too many events, allowed: at most 100000"),
    ({}, always(how={"kind": "label-swaps", "begin": "dealt"}), "shift.how: found begin 'dealt' without concepts; all"),
    ({}, {"devices": {"kind": "steady", "seconds": 1e308}}, r"devices.seconds: found 1e\+308, allowed: 1e\+30 or less"),
    ({}, {"tune": {"stage": [{"name": "x", "methods": [], "ranges": {"method.A.local.lr": {"low": 0.1, "high": 1}}}]}},
     "tune.stage 'x'.methods: found .*, allowed: 1 or more values"),
    # Methods.
    ({"algorithm": "fedtem", "branch_layer": "hed"}, {}, "'A'.branch_layer: found 'hed', .*did you mean 'head'"),
    ({"algorithm": "fedtem", "branch_layer": "relu1"}, {}, "found 'relu1', allowed: a layer with parameters"),
    ({"algorithm": "scsgd"}, {"shift": {"who": "always"}}, "'A'.prior.period: missing; allowed: a number of rounds, a"),
    ({"algorithm": "fedem", "decide_per": "oracle"}, {}, "found 'oracle', but that joins rows of several clients"),
    ({"algorithm": "pfedem", "gaussian_init": "public"}, {"data": {"public_samples": 1}},
     "method 'A'.gaussian_init: found 'public', but the task has 1 public rows; allowed: data.public_samples of 2 or"),
    ({"algorithm": "pfedem", "features": {"kind": "frozen", "weights": "nowhere.safetensors"}}, {},
     "method 'A'.features.weights: no such file or folder: nowhere.safetensors; allowed: a file"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "changes", "said"), MISTAKES, ids=lambda case: case if isinstance(case, str) else ""
)
def test_a_value_that_is_not_allowed(capsys, here, method, changes, said):
    written(here / "study.toml", {**A, **method}, **changes)
    assert re.search(said, run(capsys, here))


def test_an_override_is_named_with_the_file(capsys, here):
    written(here / "study.toml", A)
    assert re.search("study.toml with rounds=-1: rounds: found -1", run(capsys, here, "--set", "rounds=-1"))


def test_features_that_are_no_vectors(capsys, here):
    characters = {"source": "day-night-characters", "partition": {"kind": "iid", "clients": 8, "samples": 10}}
    method = {**A, "algorithm": "fedtem", "branch_layer": "conv1"}
    written(here / "study.toml", method, data=characters, model="small-cnn")
    said = "branch_layer: shape of its features: found (1, 28, 28), allowed: a layer that takes vectors"
    assert said in run(capsys, here)


def test_branches_below_layers_that_normalize_over_the_batch(capsys, here):
    """Rows of all branches are one batch there, so a branch that is not trained would change the one that is."""
    method = {**A, "algorithm": "fedtem", "branch_layer": "stage1"}
    characters = {"source": "day-night-characters", "partition": {"kind": "iid", "clients": 8, "samples": 10}}
    written(here / "study.toml", method, data=characters, model="resnet8")
    said = "branch_layer: found 'stage1', but 'stage2.* comes later, .*; allowed: 'head', "
    assert re.search(said, run(capsys, here, "--set", "model.norm=batch"))


def test_a_stream_that_leaves_a_client_empty(capsys, here):
    """A client with one label holds nothing in the other two of three intervals."""
    data = {
        "source": {"kind": "gaussians", "samples": 160, "dims": 4, "classes": 3},
        "partition": {"kind": "dirichlet", "clients": 8, "alpha": 0.3},
        "groups": {"by": "none"},
    }
    stream = {"kind": "stream", "by": "labels", "intervals": 3, "gap": 2, "retention": 2}
    written(here / "study.toml", A, data=data, shift={"who": "always", "what": stream})
    said = r"shift.what.empty: found 'error', but client \d holds no training rows at \d, .*allowed: 'wait'"
    assert re.search(said, run(capsys, here))
    more = ["--set", "rounds=8", "--set", "shift.what.empty=wait"]
    assert "no client holds a training row at round 6, of 8" in run(capsys, here, *more)
    assert done("run", "study.toml", "--workers", "1", "--set", "shift.what.empty=wait") == 0


# -- the data ----------------------------------------------------------------------------------------------------------

PLAIN = {"groups": {"by": "none"}, "held_out_clients": {"clients": 0}, "split": {"val": 0.2}}


def on(here: Path, source, **data) -> None:
    written(here / "study.toml", A, data={"source": source, **PLAIN, **data}, shift={"who": "always"})


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
for command in sys.argv[2:]:
    reader, writer = os.pipe()
    if not os.fork():
        os.close(reader)
        os.dup2(writer if sys.argv[1] == "pipe" else os.open("/dev/full", os.O_WRONLY), 1)
        if sys.argv[1] == "closed":
            os.close(1)
            sys.stdout = None  # as an interpreter finds it
        main(command.split())
    os.close(reader)
    os.close(writer)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.parametrize(("output", "status", "said"), [
    ("pipe", 0, ""), ("closed", 0, ""), ("full", 2, "fedtide: standard output: No space left on device\n"),
])  # fmt: skip
def test_an_output_that_nobody_takes(output, status, said):
    """Each command has a process that ends as an interpreter ends; importing is done once."""
    commands = ["recipes demo", "keys", "--help", "--version"]
    ends = subprocess.run(
        [sys.executable, "-c", PRINTING, output, *commands], capture_output=True, check=False, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (ends.returncode, ends.stdout, ends.stderr) == (0, f"{status}\n" * 4, said * 4)


def test_a_name_in_data_that_a_terminal_obeys(capsys, here):
    rows = "".join(f"{k},{k % 2},{k % 3},\x1b[2J{k % 2}\n" for k in range(60))
    (here / "named.csv").write_text("a,b,label,d\n" + rows)
    on(here, {"kind": "csv", "path": "named.csv", "domain": "d"})
    assert "named.csv: name of a domain or client: found '\\x1b[2J0'" in run(capsys, here)
    on(here, {"kind": "csv", "path": "named.csv", "label": "d"})
    assert "named.csv: name of a class: found '\\x1b[2J0'" in run(capsys, here)


@pytest.mark.parametrize(
    ("number", "said"),
    [("9" * 5000, "study.toml: not valid TOML"), ("0x" + "f" * 5000, "rounds: found a number that is too large")],
)
def test_a_number_of_thousands_of_digits(capsys, here, number, said):
    study = written(here / "study.toml", A)
    study.write_text(study.read_text().replace("rounds = 6", f"rounds = {number}"))
    assert said in run(capsys, here)


@pytest.mark.parametrize("arguments", [("--set", "title=x\udcff"), ("--out", "x\udcff")])
def test_bytes_that_are_no_text(capsys, here, arguments):
    written(here / "study.toml", A)
    assert "x\\udcff: is not UTF-8" in run(capsys, here, *arguments)


@pytest.mark.parametrize("source", ["idx:nowhere", "npz:nowhere.npz", "csv:nowhere.csv", "manifest:nowhere.csv"])
def test_a_file_that_is_missing(capsys, here, source):
    on(here, source)
    assert re.search(
        "data.source: no such file or folder: .*nowhere.*set data.directory or FEDTIDE_DATA", run(capsys, here)
    )


def table(x=None, y=None, **columns) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(80, 4)) if x is None else x
    return {"x": x, "y": np.arange(len(x)) % 3 if y is None else y, **columns}


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
    ("huge", "row 7: label: found 1000000000, but 80 rows are too few for so many classes; allowed: 0 to 999, or"),
    ("missing", "own_code_of_a_person:missing: row 7: label: found None, allowed: names, or whole numbers from 0"),
])  # fmt: skip
def test_a_function_that_fails_or_returns_labels_that_cannot_be(capsys, here, own, function, said):
    on(here, f"{own}:{function}")
    assert re.search(said, run(capsys, here))


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


@pytest.mark.parametrize("part", [
    {"rows": -1}, {"names": 3}, {"arrivals": torch.zeros(2, 3)}, {"group": None}, {"public": [1]}, {"parts": {}},
    {"parts": {"train": {"start": torch.zeros(9), "rows": torch.zeros(0)}}},
], ids=str)  # fmt: skip
def test_a_saved_population_of_other_types(capsys, here, part):
    written(here / "study.toml", A)
    assert not done("run", here / "study.toml", "--out", here / "whole", "--workers", 1)
    whole = codec.from_file(here / "whole" / "shift" / "0.safetensors")
    codec.to_file(here / "own.safetensors", {**whole, **part})
    key = "shift" if "arrivals" in part else "data"
    changes = {"shift": {"who": "replay:own.safetensors"}, "data": {"partition": "saved:own.safetensors"}}
    written(here / "study.toml", A, **{key: changes[key]})
    assert re.search(rf"{key}.*own.safetensors: damaged: ", run(capsys, here))


@pytest.mark.parametrize("params", ["abc", {"head.weight": 0}, None], ids=str)
def test_a_state_whose_weights_are_no_tensors(capsys, here, params):
    codec.to_file(here / "state.safetensors", State(Weights(params, {})))
    written(here / "study.toml", {**A, "init_from": "state.safetensors"})
    assert "init_from: state.safetensors: damaged: its weights are no tensors" in run(capsys, here)


def test_more_clients_than_there_are(capsys, here):
    np.savez(here / "rows.npz", **table(client=np.arange(80) % 5))
    on(here, "npz:rows.npz", partition={"kind": "natural", "clients": 6})
    assert re.search("found 6, allowed: at most 5, the clients of rows.npz with 1 rows or more", run(capsys, here))
    on(here, "npz:rows.npz", partition={"kind": "natural", "clients": 4, "min_samples": 17})
    assert re.search("allowed: at most 0, the clients of rows.npz with 17 rows or more", run(capsys, here))


def test_rows_that_are_all_for_testing(capsys, here):
    np.savez(here / "rows.npz", **table(client=np.arange(80) % 5, held_out=np.ones(80, dtype=bool)))
    on(here, "npz:rows.npz", partition="natural")
    assert "rows.npz: held_out: found 'true for all rows', allowed: false for some" in run(capsys, here)


def test_a_time_that_python_has_no_object_for(capsys, here):
    times = arrow.array([-(2**62) + row * 2**57 for row in range(80)], arrow.timestamp("us"))
    columns = {"label": ["a", "b"] * 40, "x": list(range(80)), "when": times}
    parquet.write_table(arrow.table(columns), here / "rows.parquet")
    on(here, {"kind": "csv", "path": "rows.parquet", "label": "label"})
    assert "rows.parquet: row 0: when: found 'a time outside of the years 1 to 9999'" in run(capsys, here)


def test_a_name_that_is_no_name_of_a_folder_in_this_locale(capsys, here, monkeypatch):
    def encode(name):
        return name.encode("ascii")

    monkeypatch.setattr(os, "fsencode", encode)
    written(here / "study.toml", {**A, "name": "\u65e5"})
    assert "'\u65e5': cannot be written in this locale, allowed: UTF-8" in run(capsys, here)


# -- other files that a configuration names ----------------------------------------------------------------------------

POOLS = {"groups": {"by": "none"}}
SHARED = {"kind": "label-shares", "path": "shares.csv", "samples": 5, "test_samples": 2, "val_samples": 1}
DRAWN = {"kind": "change-points", "concepts": SHARED}


def shifted(here: Path, what=None, who="always", **changes) -> None:
    shift = {"who": who, **({} if what is None else {"what": what})}
    written(here / "study.toml", A, shift=shift, **{"data": POOLS, **changes})


def test_weights_that_are_none(capsys, here):
    (here / "weights").write_bytes(b"nothing of the kind")
    options = {"algorithm": "pfedem", "features": {"kind": "frozen", "weights": "weights"}}
    written(here / "study.toml", {**A, **options})
    assert re.search(r"features.weights: weights: ", run(capsys, here))


@pytest.mark.parametrize(("text", "said"), [
    ("concept,0,1,2\na,0.5,0.5,0\nb,0,nan,1\n", "shares.csv: row 3: 1: found 'nan', allowed: a number of 0 or more"),
    ("concept,0,1,2\na,0.5,0.499,0\nb,0,0,1\n",
     "shares.csv: row 2: sum of the shares of 'a': found 0.999, allowed: 1, within 1e-06"),
    ("concept,0,1,2\na,0.5,0.5,0\na,0,0,1\n",
     "shares.csv: row 3: concept: found 'a', allowed: a name that is not there yet"),
    ("concept,0,1,2\na,0.5,0.5,0\n", "shares.csv: number of concepts: found 1, allowed: two or more"),
    ("concept,0,1\na,0.5,0.5\nb,0,1\n", "shares.csv: row 1: columns of shares: found 2, allowed: 3, one per label"),
])  # fmt: skip
def test_label_distributions_that_are_none(capsys, here, text, said):
    (here / "shares.csv").write_text(text)
    shifted(here, DRAWN)
    assert run(capsys, here) == said


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


def test_a_stacked_run_goes_on_stacked(capsys, here, half):
    text = (half / "config.toml").read_text()
    assert 'kind = "local"' in text
    (half / "config.toml").write_text(text.replace('kind = "local"', 'kind = "stacked"'))
    said = refused(capsys, here, "resume", "x", "--fleet", "workers")
    assert said.startswith("--fleet: found 'workers', allowed: none, because x is stacked")


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


def test_a_method_that_diverges_leaves_a_report_of_the_others(capsys, here):
    written(here / "study.toml", A, {**A, "name": "far", "local": {"lr": 1e30, "batch_size": 4}}, rounds=12)
    assert done("run", "study.toml", "--out", "x", "--workers", 1) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(
        r"not finite \(\d+\), often because a learning rate is too large; a report of what was played: .* report x$",
        said,
    )
    assert done("report", "x") == 0


def test_a_report_of_a_folder_that_is_none_blames_no_link_in_it(capsys, here):
    (here / "other").mkdir()
    (here / "other" / "link").symlink_to("/")
    assert "other: not a run folder (no config.toml in it)" in refused(capsys, here, "report", "other")


def change(half: Path, **values) -> Path:
    (path,) = half.glob("scaffold/0/checkpoints/*/checkpoint.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return path


def test_a_checkpoint_of_another_version(capsys, here, half):
    change(half, format=99)
    line = "checkpoint.json: format: found 99, but it was written by another version; allowed: 3"
    assert line in refused(capsys, here, "resume", "x")


@pytest.mark.parametrize("name", ["state.safetensors", "memory.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["cut", "missing", "rubbish"])
def test_a_checkpoint_that_is_damaged(capsys, here, half, name, damage):
    (path,) = half.glob(f"scaffold/0/checkpoints/*/{name}")
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"rubbish")
    remedy = "; to play this run anew, remove x/scaffold/0"
    said = refused(capsys, here, "resume", "x", "--workers", "1")
    assert re.search(f"{name}: (damaged|no such file|missing).*{remedy}$", said)
    shutil.rmtree(half / "scaffold" / "0")
    assert done("resume", "x", "--workers", 1) == 0


@pytest.mark.parametrize(("name", "damage"), [
    ("environment.json", "{"), ("environment.json", "[]"), ("environment.json", "\xff"),
    ("a/0/timings.jsonl", '{"seconds": "long"}\n'), ("a/0/timings.jsonl", "rubbish}\n"),
    ("a/0/clients.csv", "nothing,of,the,kind\n1,2,3,4\n"), ("a/0/clients.csv", "view,round\nheld_out_clients\n"),
    ("a/0/clients.csv", "round,view,client,accuracy\n3,held_out_clients,8,high\n"),
])  # fmt: skip
def test_a_report_of_a_run_folder_with_a_damaged_file(capsys, here, monkeypatch, half, name, damage):
    done("report", "x")
    monkeypatch.setattr(page, "pictures_of", lambda record: clients.client_distribution(record) and [])
    (half / name).write_text(damage, encoding="latin-1")
    assert re.search(rf"x/{name}: .*damaged", refused(capsys, here, "report", "x"))


@pytest.mark.parametrize("first", [False, True])
def test_a_report_in_the_place_of_a_folder(capsys, here, half, first):
    if not first:
        done("report", "x")
    (here / "pages").mkdir()
    (here / "pages" / "mine").write_text("mine")
    assert refused(capsys, here, "report", "x", "--out", "pages").startswith("pages: is a folder")


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


def test_too_few_handles_are_one_line_with_a_way_out(capsys, here, monkeypatch):
    written(here / "study.toml", A, rounds=2)

    def spent(*given, **named):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("pathlib.Path.mkdir", spent)
    assert done("run", "study.toml", "--out", "x", "--workers", 1) == 2
    assert capsys.readouterr().err.endswith(
        "Too many open files; allow more (ulimit -n 4096), or play with fewer workers\n"
    )


def test_an_error_of_the_system_without_a_name_adds_nothing_to_the_output(capsys, here, monkeypatch):
    def broken(*given, **named):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("fedtide.cli.commands.job.recipe", broken)
    assert done("recipes", "demo") == 2
    assert capsys.readouterr() == ("", "fedtide: input/output: Input/output error\n")


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


def test_an_interrupt_while_a_class_is_made_is_one(capsys, here, monkeypatch):
    """Before Python 3.12 another error is raised from it."""
    written(here / "study.toml", A, rounds=2)

    def interrupted(*given, **named):
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr("pathlib.Path.mkdir", interrupted)
    assert done("run", "study.toml", "--out", "x", "--workers", 1) == 130
    assert capsys.readouterr().err == "fedtide: interrupted\n"
