"""The trackers themselves, where their libraries are installed: each value once, also after a process was killed.

All tracking is in processes of its own. Some libraries leave sockets open, which would end in other tests.
"""

import os
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest

from fedtide.config import from_dict, resolved, to_toml
from fedtide.core.record import read_lines
from fedtide.tracking.feed import values_of
from helpers.toys import toy

ROUNDS = 40
BLOCK = 32768
FEDTIDE = sys.executable, "-m", "fedtide"

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def study(kind):
    return from_dict(resolved(toy("fedavg", rounds=ROUNDS, eval_every=4, checkpoint_every=8)) | {"track": kind})


def track(root):
    subprocess.run([*FEDTIDE, "track", str(root)], check=True, stdout=subprocess.DEVNULL)


def killed_and_resumed(kind, folder):
    """Kill a run while it plays, twice, and go on."""
    (folder / "study.toml").write_text(to_toml(study(kind)))
    root = folder / "run"
    command = ["run", "study.toml", "--out", "run"]
    for enough in (12, 24):
        process = subprocess.Popen([*FEDTIDE, *command], cwd=folder, stdout=subprocess.DEVNULL)
        lines = root / "toy" / "0" / "rounds.jsonl"
        while process.poll() is None and not (lines.is_file() and lines.read_bytes().count(b"\n") > enough):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        command = ["resume", "run"]
    assert b"held_out_clients" in lines.read_bytes()
    subprocess.run([*FEDTIDE, *command, "--quiet"], cwd=folder, check=True)
    told = {}
    for line in read_lines(root / "toy" / "0"):
        for name, value in values_of(line).items():
            told.setdefault(name, []).append((line["round"] + 1, pytest.approx(value, rel=1e-6)))
    return root, told


def test_tensorboard(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    root, told = killed_and_resumed({"kind": "tensorboard"}, tmp_path)
    for _ in range(2):
        read = events.EventAccumulator(str(root / "track" / "tensorboard" / "toy" / "0"), {"scalars": 0}).Reload()
        assert {name: [(e.step, e.value) for e in read.Scalars(name)] for name in read.Tags()["scalars"]} == told
        track(root)


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    root, told = killed_and_resumed({"kind": "mlflow"}, tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{root / 'track' / 'mlflow.db'}")
    for _ in range(2):
        (run,) = client.search_runs([client.get_experiment_by_name("run").experiment_id])
        found = {name: sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))
                 for name in run.data.metrics}  # fmt: skip
        assert found == told
        assert run.data.params["method.name"] == "toy"
        assert run.info.status == "FINISHED"
        track(root)


def test_wandb(tmp_path):
    pytest.importorskip("wandb")
    internal = import_module("wandb.proto.wandb_internal_pb2")
    root, told = killed_and_resumed({"kind": "wandb"}, tmp_path)
    for _ in range(2):
        (file,) = (tmp_path / "run-wandb" / "wandb").glob("offline-run-*/*.wandb")
        found = {}
        for data in records_in(file.read_bytes()):
            record = internal.Record()
            record.ParseFromString(data)
            values = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            for name in values.keys() - {"_step", "_runtime", "_timestamp"}:
                found.setdefault(name, []).append((int(values["_step"]), float(values[name])))
        assert found == told
        track(root)


def records_in(data):
    """Yield the records of a file in LevelDB's log format, after its header."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if (left := BLOCK - place % BLOCK) < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""
