"""Models of a run for use outside of it: `fedtide export` and `fedtide predict`."""

import csv
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import fedtide as ft
from fedtide.core.errors import FedtideError, quote
from fedtide.data.population import Population
from fedtide.runs.export import Predicting, seen_rows
from fedtide.runs.trained import Trained
from helpers.shell import contents, done, refused, written
from helpers.studies import SCAFFOLD, A

COMMON = {key: A[key] for key in ("cohort", "local")}
METHODS = [
    A,
    SCAFFOLD,
    {**COMMON, "name": "IFCA", "algorithm": "ifca"},
    {**COMMON, "name": "FedTEM", "algorithm": "fedtem", "branch_layer": "head"},
    {**COMMON, "name": "FedEM", "algorithm": "fedem", "components": 2, "component_layer": "head"},
    {
        **COMMON,
        "name": "pFedEM",
        "algorithm": "pfedem",
        "features": "network",
        "gaussian_init": "random",
        "inference": "posterior",
    },
    {**COMMON, "name": "anchored", "algorithm": "fedem", "components": 2, "component_layer": "head", "safe": True},
    {**COMMON, "name": "Fielding", "algorithm": "fielding"},
    {"name": "Local", "algorithm": "local"},
]
NAMES = [f"{method['name']} (safe)" if "safe" in method else str(method["name"]) for method in METHODS]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of all of them."""
    root = tmp_path_factory.mktemp("trained")
    made = written(root / "study.toml", *METHODS, rounds=2, eval_every=2, title="trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedtide.report.page.pictures_of", lambda record: [])
        assert done("run", made, "--out", root / "run", "--workers", 1) == 0
    return root / "run"


pytestmark = pytest.mark.usefixtures("here")


def rows_file(path: Path, x: torch.Tensor) -> Path:
    lines = ["label,a,b,c,d", *(",".join(["0", *map(repr, row)]) for row in x.tolist())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_was_trained_on_a_gpu_is_read_without_one(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('device = "cpu"', 'device = "cuda"'))
    assert 'device = "cuda"' in config.read_text()
    assert Trained.read(tmp_path / "run", "A").task.device == "cpu"


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_those_of_the_runs_evaluation(run, name):
    trained = Trained.read(run, name)
    population = trained.host.population
    found = {}
    for view, clients in (("train_clients", population.clients), ("held_out_clients", population.held_out_clients)):
        right, rows = 0, 0
        for client in clients.tolist():
            shard, _ = population.pool(torch.tensor([client]), trained.moment, "test")
            if len(shard):
                right += int((trained.predict(shard.x, client).told.argmax(1) == shard.y).sum())
                rows += len(shard)
        found[view] = right / rows
    last = json.loads((trained.run.folder / "rounds.jsonl").read_text().splitlines()[-1])
    assert found == {view: pytest.approx(last["scores"][view]["accuracy"], abs=1e-12) for view in found}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("FedTEM", "pFedEM")])
@pytest.mark.parametrize("client", [None, 0, 9])
def test_a_model_predicts_as_the_run_does(run, name, client):
    trained = Trained.read(run, name)
    rows = trained.rows(20)
    model = trained.model(client)
    assert not model.training
    alone = torch.stack([trained.predict(row[None], client).told[0] for row in rows])
    assert torch.allclose(model(rows).softmax(-1).double(), alone.exp().double(), atol=1e-6)


@pytest.mark.parametrize("name", ["FedTEM", "pFedEM"])
def test_a_choice_that_depends_on_rows_is_no_model(run, name):
    trained = Trained.read(run, name)
    with pytest.raises(FedtideError, match=r"depends on the row; allowed: --cluster 0 to 1 for one of its networks"):
        trained.parts()
    assert len(trained.networks) == 2
    assert trained.model(cluster=1)(trained.rows(5)).shape == (5, 3)


# -- commands ----------------------------------------------------------------------------------------------------------


GERMAN = "when;carrier;delay;fare;label\n" + "".join(
    f"{1 + row % 28}.{1 + row // 28}.2018;{('B6', 'UA', '9E')[row % 3]};{row % 7},5;1.{100 + row},2;{'ab'[row % 2]}\n"
    for row in range(90)
)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_client_is_named_as_in_the_data_and_rows_are_written_as_those_of_the_run(here, capsys, scaled):
    (here / "flights.csv").write_text(GERMAN)
    source = {"kind": "csv", "path": str(here / "flights.csv"), "label": "label", "client": "carrier", "time": "when",
              "decimal": ",", "time_format": "day-month-year", "scaled": scaled}  # fmt: skip
    study = {"rounds": 2, "data": {"source": source}, "model": "mlp", "method": [{"algorithm": "fedavg", "cohort": 2}]}
    ft.run(study, here / "run", workers=1, quiet=True)
    (here / "new.csv").write_text("fare;delay\n1.234;2\n")  # a point divides thousands, as in the run
    (here / "plain.csv").write_text("fare,delay\n1234,2\n")
    for client in ("UA", "carrier=UA"):
        for name in ("new", "plain"):
            words = here / "run", here / f"{name}.csv", "--client", client, "--out", f"{name}-out.csv"
            assert done("predict", *words) == 0
        assert "as client UA, after round 2: 1 rows predicted" in capsys.readouterr().out
        assert Path("new-out.csv").read_text() == Path("plain-out.csv").read_text()
        Path("new-out.csv").unlink()
        Path("plain-out.csv").unlink()
    said = refused(capsys, here, "predict", here / "run", here / "new.csv", "--client", "AA")
    assert "--client: found 'AA', allowed: 9E, B6, UA" in said
    assert "--client: found '2', allowed: 9E, B6, UA" in refused(
        capsys, here, "predict", here / "run", here / "new.csv", "--client", "2"
    )
    lines = GERMAN.splitlines(keepends=True)
    (here / "flights.csv").write_text("".join([*lines, lines[-1]]))  # scales and fillings would be others
    for words in (["predict", here / "run", here / "new.csv"], ["export", here / "run", "--format", "safetensors"]):
        assert "the data have changed since" in refused(capsys, here, *words)


@pytest.mark.parametrize(("names", "asked", "found"), [
    (("00001", "00008"), "00008", 1),
    (("00001", "00008"), "8", "did you mean '00008'"),
    (("00001", "00008"), "1", "did you mean '00001'"),
    (("00001", "00008"), "0", "found '0', allowed: 00001, 00008"),
    (("3", "1"), "1", 1),
    (("3", "1"), "0", "found '0', allowed: 3, 1"),
    ((), "3", 3),
    ((), "ann", "allowed: the number of a client, from 0"),
])  # fmt: skip
def test_a_number_is_a_client_only_if_clients_have_no_names(names, asked, found):
    population = SimpleNamespace(names=names)
    if isinstance(found, int):
        assert Population.number_of(population, asked, "--client") == found
        return
    with pytest.raises(FedtideError, match=re.escape(found)):
        Population.number_of(population, asked, "--client")


def test_predict_writes_classes_and_probabilities(run, here, capsys):
    trained = Trained.read(run, "IFCA")
    x = trained.rows(6)
    before = contents(run)
    assert done("predict", run, rows_file(here / "rows.csv", x), "--method", "IFCA", "--client", 2) == 0
    out, _ = capsys.readouterr()
    assert out == "IFCA · seed 0, after round 2: 6 rows predicted\npredictions: predictions.csv\n"
    assert contents(run) == before
    with open("predictions.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    said = trained.predict(x, 2).told
    assert [int(line["class"]) for line in lines] == said.argmax(1).tolist()
    written_ = torch.tensor([[float(line[f"p {k}"]) for k in range(3)] for line in lines])
    assert torch.allclose(written_, said.exp(), atol=1e-5)


def test_predict_takes_a_client_by_name_and_writes_no_formula(here):
    """Names of classes that a spreadsheet would compute have an apostrophe before them."""
    rows = [f"{k % 5},{k % 3},{'B6' if k % 2 else 'UA'},{'=1+1' if k % 3 else '@b'}" for k in range(120)]
    (here / "rows.csv").write_text("\n".join(["a,b,carrier,label", *rows]) + "\n")
    source = {"kind": "csv", "path": str(here / "rows.csv"), "client": "carrier"}
    data = {"source": source, "partition": {"kind": "natural"}, "groups": {"by": "none"}, "held_out_clients": {}}
    study = written(here / "own.toml", {**A, "cohort": 2}, rounds=1, data=data, shift={"who": "always"})
    assert done("run", study, "--out", here / "own", "--workers", 1) == 0
    assert done("predict", here / "own", here / "rows.csv", "--client", "B6") == 0
    with open("predictions.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert {line["class"] for line in lines} <= {"'=1+1", "'@b"}
    assert len(lines) == 120


def test_predict_reads_npz_and_one_network(run, here):
    trained = Trained.read(run, "FedTEM")
    x = trained.rows(4)
    np.savez("rows.npz", x=x.numpy())
    assert done("predict", run, "rows.npz", "--method", "fedtem", "--cluster", 1, "--out", "one.csv") == 0
    with open("one.csv", encoding="utf-8") as file:
        found = [int(line["class"]) for line in csv.DictReader(file)]
    assert found == trained.model(cluster=1)(x).argmax(1).tolist()


@pytest.mark.parametrize(("x", "said"), [
    (np.zeros((0, 4)), "rows.npz: rows: found 0"),
    (np.zeros((3, 5), np.int8), r"rows.npz: shape of a row: found (5,), allowed: (4,), as in the run"),
    (np.array([["a"] * 4]), "rows.npz: x: found '<U1 (1, 4)', allowed: numbers"),
])  # fmt: skip
def test_predict_refuses_other_arrays_in_a_line(run, here, capsys, x, said):
    np.savez("rows.npz", x=x)
    assert done("predict", run, "rows.npz", "--method", "A", "--out", "other.csv") == 2
    assert said in capsys.readouterr().err
    assert not (here / "other.csv").exists()


def test_export_writes_weights(run, here, capsys):
    assert done("export", run, "--format", "safetensors", "--method", "A") == 0
    out, _ = capsys.readouterr()
    assert out == "A · seed 0, after round 2: weights of 43 numbers in 4 arrays\nexport: a-0.safetensors\n"
    trained = Trained.read(run, "A")
    found = load_file("a-0.safetensors")
    weights = trained.state.weights
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in (weights.params | weights.buffers).items()
    }
    with safe_open("a-0.safetensors", "pt") as file:
        about = file.metadata()
    assert (about["whose"], about["rounds"], about["shape"], about["run"]) == ("server", "2", "[4]", "A · seed 0")
    again = written(here / "again.toml", {**A, "init_from": str(here / "a-0.safetensors")}, rounds=1)
    assert done("run", again, "--out", "again", "--workers", 1) == 0


@pytest.mark.thorough  # loading what torch.export needs
def test_export_writes_a_program_that_predicts_the_same(run, here):
    assert done("export", run, "--format", "torch-export", "--method", "FedEM", "--client", 3) == 0
    program = torch.export.load("fedem-0-client-3.pt2").module()
    trained = Trained.read(run, "FedEM")
    for count in (1, 5):
        rows = trained.rows(count)
        assert torch.allclose(program(rows).exp().double(), trained.predict(rows, 3).told.exp().double(), atol=1e-6)


TARGETS = {
    "squared": ("number", ["value"]),
    "gaussian": ({"kind": "number", "loss": "gaussian"}, ["value", "standard deviation"]),
    "quantiles": ({"kind": "quantiles", "at": [0.1, 0.9]}, ["quantile 0.1", "quantile 0.9"]),
    "counts": ("counts", ["value"]),
    "labels": ("labels", ["p 0", "p 1"]),
}


def measured(here: Path, name: str) -> tuple[Trained, torch.Tensor, list[list[float]]]:
    """Play a round about rows of a target, and return what is trained, rows as it sees them, and their predictions."""
    x = np.random.default_rng(0).normal(size=(60, 3))
    counts = np.random.default_rng(1).poisson(np.exp(3 + x[:, 0])).astype(np.float64)
    y = np.stack([x[:, 0] > 0, x[:, 1] > 1], 1).astype(np.float64) if name == "labels" else counts
    np.savez("rows.npz", x=x, y=y)
    written(here / "study.toml", {**A, "cohort": 2}, rounds=1, model="linear", data={
        "source": {"kind": "npz", "path": str(here / "rows.npz")}, "target": TARGETS[name][0],
        "partition": {"kind": "iid", "clients": 4}, "groups": {"by": "none"}, "held_out_clients": {"clients": 0},
    }, shift={"who": "always"})  # fmt: skip
    ft.run("study.toml", "run", workers=1, quiet=True)
    assert done("predict", "run", "rows.npz") == 0
    with open("predictions.csv", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == TARGETS[name][1]
    return ft.trained("run"), torch.from_numpy(x).float(), [[float(cell) for cell in row] for row in rows]


@pytest.mark.parametrize("name", TARGETS)
def test_a_program_says_what_predict_writes_in_units_of_the_data(here, undrawn, name):
    trained, x, predicted = measured(here, name)
    program = Predicting(trained.model(), trained.task.target)
    torch.testing.assert_close(program(x), torch.tensor(predicted), rtol=1e-4, atol=1e-4)
    assert done("export", "run", "--format", "safetensors") == 0
    with safe_open("a-0.safetensors", "pt") as file:
        about = file.metadata()
    assert json.loads(about["columns"]) == TARGETS[name][1]
    assert json.loads(about["target"])["kind"] == trained.task.target.kind
    assert "classes" not in about


@pytest.mark.thorough
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("format", ["torch-export", "onnx"])
def test_programs_of_other_targets_are_exported(here, undrawn, capsys, name, format):
    if format == "onnx":
        for library in ("onnx", "onnxscript"):
            pytest.importorskip(library)
        runtime = pytest.importorskip("onnxruntime")
    _, x, predicted = measured(here, name)
    capsys.readouterr()
    assert done("export", "run", "--format", format, "--out", "program") == 0
    assert f"program that takes rows (3,) and returns {' and '.join(TARGETS[name][1])}" in capsys.readouterr().out
    if format == "onnx":
        session = runtime.InferenceSession("program", providers=["CPUExecutionProvider"])
        found = torch.from_numpy(session.run(["columns"], {"rows": x.numpy()})[0])
    else:
        found = torch.export.load("program").module()(x)
    torch.testing.assert_close(found, torch.tensor(predicted), rtol=1e-4, atol=1e-4)


def test_onnx_needs_libraries_that_are_named(run, here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    line = refused(capsys, here, "export", run, "--format", "onnx", "--method", "A")
    assert line == '--format: onnx needs onnx; pip install "fedtide[onnx]"'


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["export", "RUN", "--format", "safetensors"], f"--method: found none, allowed: {quote(NAMES)}"),
        (["export", "RUN", "--format", "safetensors", "--method", "A", "--seed", 7], "--seed: found 7, allowed: 0"),
        (["export", "RUN", "--format", "safetensors", "--method", "IFCA", "--cluster", 2],
         "--cluster: found 2, allowed: 0 to 1"),
        (["export", "RUN", "--format", "safetensors", "--method", "IFCA", "--cluster", 0, "--client", 1],
         "--cluster: found 0, allowed: one of --client and --cluster"),
        (["export", "RUN", "--format", "safetensors", "--method", "FedEM"],
         "--format: safetensors holds the weights of one network, and this is 2 networks mixed; allowed: "),
        (["export", "RUN", "--format", "safetensors", "--method", "FedTEM"],
         "FedTEM · seed 0: which of its networks predicts"),
        (["export", "RUN", "--format", "safetensors", "--method", "A", "--out", "rows.csv"],
         "rows.csv: is there already, allowed: a new file"),
        (["predict", "RUN", "narrow.csv", "--method", "A"],
         "narrow.csv: columns of features: found 2, allowed: 4, as in the run"),
        (["predict", "RUN", "words.csv", "--method", "A"],
         "words.csv: row 2: d: found 'x', allowed: a number"),
        (["predict", "RUN", "y.npz", "--method", "A"], "y.npz: no array 'x'"),
        (["predict", "RUN", "none.npz", "--method", "A"], "none.npz: rows: found 0, allowed: 1 or more"),
        (["predict", "RUN", "pipe", "--method", "A"], "pipe: is a pipe or a device, allowed: CSV, Parquet or NPZ"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(run, here, capsys, arguments, line):
    rows_file(here / "rows.csv", torch.ones(2, 4))
    (here / "narrow.csv").write_text("a,b,label\n1,2,0\n")
    (here / "words.csv").write_text("a,b,c,d\n1,2,3,x\n")
    np.savez("wide.npz", x=np.ones((2, 5)))
    np.savez("nan.npz", x=np.full((2, 4), np.nan))
    np.savez("y.npz", y=np.ones(3))
    np.savez("none.npz", x=np.ones((0, 4)))
    os.mkfifo("pipe")
    found = refused(capsys, here, *(run if word == "RUN" else word for word in arguments))
    assert found.startswith(line), found


def test_a_run_without_a_checkpoint_and_a_damaged_one_are_named(run, here, capsys, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    state = next((tmp_path / "copy" / "a" / "0" / "checkpoints").glob("*/state.safetensors"))
    state.write_bytes(state.read_bytes()[:-1] + b"\x7f")
    assert "damaged" in refused(capsys, here, "export", "copy", "--format", "safetensors", "--method", "A")
    shutil.rmtree(tmp_path / "copy" / "a" / "0" / "checkpoints")
    line = refused(capsys, here, "predict", "copy", state, "--method", "A")
    assert line == "copy/a/0: has no checkpoint yet; go on with: fedtide resume copy"


def test_a_real_client_is_at_its_node(run, here, capsys, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    for name in ("a", "ifca"):
        (tmp_path / "copy" / name / "0" / "asks.jsonl").write_text("{}\n")
        line = refused(capsys, here, "export", "copy", "--format", "safetensors", "--method", name, "--client", 1)
        at_nodes = "none, because rows and memory of the clients are at their nodes: predict there"
        assert line == f"--client: found '1', allowed: {at_nodes}"
        assert done("export", "copy", "--format", "safetensors", "--method", name) == 0


def test_a_table_of_the_runs_own_kind_is_read_by_its_columns(here):
    rows = [f"{i % 7},{i % 3},{(i * i) % 5},{('no', '=1+1')[i % 2]},{i % 4}" for i in range(200)]
    (here / "own.csv").write_text("\n".join(["u,v,w,kind,owner", *rows]) + "\n")
    source = {"kind": "csv", "path": str(here / "own.csv"), "label": "kind", "client": "owner", "scaled": True}
    written(here / "study.toml", {**A, "cohort": 2}, rounds=1, seeds=[0, 1], data={
        "source": source, "partition": "natural", "groups": {"by": "none"}, "held_out_clients": {"clients": 0},
    }, shift={"who": "always"})  # fmt: skip
    done_ = ft.run("study.toml", "run", workers=1, quiet=True)
    (here / "new.csv").write_text(
        "w,u,note,v\n" + "\n".join(f"{(i * i) % 5},{i % 7},x,{i % 3}" for i in range(8)) + "\n"
    )
    assert done("predict", "run", "new.csv", "--seed", 1) == 0
    trained = done_.trained("A", 1)
    x = trained.host.population.rows.x[:8]
    with open("predictions.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert {line["class"] for line in lines} <= {"no", "'=1+1"}  # which a spreadsheet would compute
    found = [float(line["p =1+1"]) for line in lines]
    assert found == pytest.approx(trained.predict(x).told.exp()[:, 0].tolist(), abs=1e-5)
    assert done_.trained("A", 0).model()(x).shape == (8, 2)
    np.savez("new.npz", x=[[i % 7, i % 3, (i * i) % 5] for i in range(8)])
    assert torch.allclose(seen_rows(trained, Path("new.npz")), x, atol=1e-5)
    assert torch.equal(seen_rows(trained, Path("new.csv")), x)


def test_a_row_that_lacks_its_first_feature_is_predicted_in_its_place(here):
    (here / "own.csv").write_text("u,v,label\n" + "".join(f"{i % 7},{i % 3},{i % 2}\n" for i in range(60)))
    source = {"kind": "csv", "path": str(here / "own.csv"), "missing": "mean"}
    study = {"rounds": 1, "data": {"source": source, "partition": {"kind": "iid", "clients": 3}}, "model": "linear"}
    done_ = ft.run({**study, "method": [{"algorithm": "fedavg", "cohort": 2}]}, "run", workers=1, quiet=True)
    (here / "new.csv").write_text("u,v\n1,2\n,2\n3,0\n")
    seen = seen_rows(done_.trained(), Path("new.csv"))
    assert (seen[:, 1].tolist(), seen[0, 0], seen[2, 0]) == ([2.0, 2.0, 0.0], 1.0, 3.0)


def test_pictures_are_read_as_bytes(here):
    x, y = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3
    np.savez("pictures.npz", x=x, y=y)
    written(here / "study.toml", {**A, "cohort": 2}, rounds=1, model="linear", data={
        "source": {"kind": "npz", "path": str(here / "pictures.npz")}, "partition": {"kind": "iid", "clients": 4},
        "groups": {"by": "none"}, "held_out_clients": {"clients": 0},
    }, shift={"who": "always"})  # fmt: skip
    ft.run("study.toml", "run", workers=1, quiet=True)
    np.savez("new.npz", x=x[:5, None])
    (here / "new.csv").write_text(
        "\n".join([",".join(f"p{k}" for k in range(64)), *(",".join(map(str, row.ravel())) for row in x[:5])]) + "\n"
    )
    for name in ("new.npz", "new.csv"):
        assert done("predict", "run", name, "--out", f"{name}.out.csv") == 0
    assert (here / "new.npz.out.csv").read_bytes() == (here / "new.csv.out.csv").read_bytes()
    trained = ft.trained("run")
    with open("new.npz.out.csv", encoding="utf-8") as file:
        found = [int(line["class"]) for line in csv.DictReader(file)]
    seen = torch.from_numpy(x[:5, None]).float() / 255
    assert found == trained.predict(seen).told.argmax(1).tolist()


def test_a_series_is_forecast_in_its_own_units(here):
    """Values are those of the model on the scale of each series: 100 + 10 z and 5 + z, z the model's."""
    hours = [f"{3600 * k},{100 + 10 * (k % 2 * 2 - 1)},{5 + k % 2 * 2 - 1}" for k in range(60)]
    (here / "old.csv").write_text("\n".join(["time,large,small", *hours]) + "\n")
    source = {"kind": "series", "path": str(here / "old.csv"), "lags": ["1h", "2h"], "own_scale": True}
    written(here / "study.toml", {**A, "cohort": 2}, rounds=1, model="linear", data={
        "source": source, "target": "number", "partition": "natural", "groups": {"by": "none"},
        "held_out_clients": {"clients": 0},
    }, shift={"who": "always"})  # fmt: skip
    ft.run("study.toml", "run", workers=1, quiet=True)
    (here / "new.csv").write_text("time,large,small\n0,90,4\n3600,110,6\n7200,100,5\n")
    assert done("predict", "run", "new.csv") == 0
    with open("predictions.csv", encoding="utf-8") as file:
        found = [(line["series"], line["time"], float(line["value"])) for line in csv.DictReader(file)]
    said = ft.trained("run").predict(torch.tensor([[1.0, -1.0], [0.0, 1.0]])).told[:, 0].tolist()
    assert [row[:2] for row in found] == [(name, at) for name in ("large", "small") for at in ("7200", "10800")]
    wanted = [*(100 + 10 * z for z in said), *(5 + z for z in said)]
    assert [row[2] for row in found] == pytest.approx(wanted, rel=1e-5)
