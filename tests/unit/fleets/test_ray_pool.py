"""Actors of Ray: the bits of one process, whoever is killed; what cannot work is one line and leaves nothing."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch

from fedtide.cli.commands import main
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import same
from fedtide.fleets import ray_pool
from fedtide.fleets.engines import WorkersEngine
from fedtide.fleets.ray_pool import RayPool, packed, unpacked
from fedtide.fleets.this_machine import Scratch
from fedtide.runs.build import spec_of
from fedtide.runs.preflight import preflight
from helpers.federation import until
from helpers.toys import played, toy

ECHO = "fedtide.fleets.pool:echo"
MANY = {"data": {"partition": {"kind": "iid", "clients": 32}}, "rounds": 3}
LARGE = {"model": {"kind": "mlp", "hidden": [600]}}
"""A model whose copy in a client's memory is a file."""


# -- without a cluster -------------------------------------------------------------------------------------------------


def test_any_tree_survives_being_packed():
    tree = {
        "a": (1, None, float("nan"), [torch.tensor(True), torch.zeros(0, 2)]),
        3: {"x/y": torch.ones((), dtype=torch.bfloat16), "t": torch.arange(6).reshape(2, 3).T},
    }
    assert same(unpacked(packed(tree)), tree)


def test_a_missing_ray_is_a_line_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(ray_pool, "find_spec", lambda name: None)
    with pytest.raises(FedtideError, match=r'^fleet\.kind: "ray" needs Ray; pip install "fedtide\[ray\]"$'):
        preflight(toy("fedavg", fleet={"kind": "ray"}))


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:10001", "host:", ":6379", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused(monkeypatch, address):
    monkeypatch.setattr(ray_pool, "find_spec", lambda name: True)
    with pytest.raises(FedtideError, match=r"^fleet\.address: .*allowed: "):
        ray_pool.check_address(address)


def test_a_dead_address_is_one_line_at_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ray_pool, "find_spec", lambda name: True)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        port = bound.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(SystemExit) as left:
            main(
                [
                    "run",
                    "recipe:demo",
                    "--scale",
                    "nano",
                    "--out",
                    str(tmp_path / "r"),
                    "--address",
                    f"127.0.0.1:{port}",
                ]
            )
        assert time.monotonic() - began < 30
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fedtide: fleet.address: nothing answers at 127.0.0.1:{port} (")
    assert said.count("\n") == 1
    assert not (tmp_path / "r").exists()


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 40])
def test_results_come_in_the_order_of_the_arguments(actors, count):
    arguments = [{"i": i, "x": torch.full((3,), float(i))} for i in range(count)]
    assert same(list(actors.map(ECHO, arguments)), arguments)


@pytest.mark.parametrize(("kind", "error", "said"), [
    ("user", FedtideError, "^the well is dry$"),
    ("memory", FedtideError, "^not enough memory: Unable to allocate 18.2 TiB$"),
    ("program", RuntimeError, "(?s)Traceback.*a fault in the program"),
])  # fmt: skip
def test_an_error_of_a_work_comes_back(actors, kind, error, said):
    experiment = toy("helpers.deadly:failing", {"kind": kind, "cohort": 1})
    spec = spec_of(experiment, experiment.method[0], 0, None)
    with pytest.raises(error, match=said):
        played(experiment, engine=lambda host: WorkersEngine(host, actors, spec))
    assert list(actors.map(ECHO, [1, 2, 3])) == [1, 2, 3]


# -- processes that die ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("travels", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_actors_killed_in_mid_round_change_no_bit(actors, tmp_path, travels, capfd, monkeypatch):
    """One by its own work in the middle of a block, one from outside while it works; with rows of memory in files."""
    monkeypatch.setattr(actors, "multi_node", travels)
    (tmp_path / "flags").mkdir()
    options = {"flags": str(tmp_path / "flags"), "cohort": {"kind": "everyone"}}
    alone = played(toy("helpers.deadly:remembering", options, **MANY, **LARGE))
    (tmp_path / "flags" / "once").touch()
    slow = toy("helpers.deadly:remembering", {**options, "seconds": 0.02}, **MANY, **LARGE)
    memory = MemoryStore(tmp_path / "memory")
    list(actors.map(ECHO, range(4)))
    victim = actors.processes[0]
    killer = threading.Timer(0.2, os.kill, (victim, signal.SIGKILL))
    killer.start()
    spec = spec_of(slow, slow.method[0], 0, None if travels else memory.directory)
    many = played(slow, memory=memory, engine=lambda host: WorkersEngine(host, actors, spec))
    killer.join()
    assert not list((tmp_path / "flags").iterdir())
    assert victim not in actors.processes
    assert same(alone.state, many.state)
    for client in range(32):
        assert same(*(run.fleet.engine.memory.read(client, (99, 0)) for run in (alone, many)))
    assert len(list((tmp_path / "memory").glob("*.safetensors"))) >= 32
    assert capfd.readouterr() == ("", "")


# -- too little --------------------------------------------------------------------------------------------------------


def test_a_cluster_without_room_is_one_line_within_a_deadline(actors, monkeypatch):
    """All its CPUs belong to the actors of the session."""
    monkeypatch.setattr(ray_pool, "BEGIN_SECONDS", 0.5)
    with pytest.raises(
        FedtideError, match=r"had no room for an actor within 0 seconds; it needs 1 CPUs and 0 GPUs, free: 0"
    ):
        RayPool(1)
    assert list(actors.map(ECHO, [1])) == [1]


# -- whole experiments -------------------------------------------------------------------------------------------------


# -- the end -----------------------------------------------------------------------------------------------------------

HOLDING = """
import json, sys, time
from fedtide.fleets.ray_pool import RayPool
with RayPool(1) as pool:
    print(json.dumps(pool.processes), flush=True)
    time.sleep(600)
"""


def of_cluster(folder: str) -> list[psutil.Process]:
    """The processes that know a cluster's folder, and its actors."""
    found = []
    for process in psutil.process_iter():
        try:
            said = " ".join(process.cmdline()) + " ".join(process.environ().values())
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
        if folder in said:
            found.append(process)
    return found


def test_a_program_that_is_killed_leaves_no_process_and_no_folder():
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "FEDTIDE_TEST_MARK": f"mark-{os.getpid()}-"}
    program = subprocess.Popen(
        [sys.executable, "-c", HOLDING], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    (actor,) = json.loads(program.stdout.readline())
    assert psutil.pid_exists(actor)
    family = of_cluster(environment["FEDTIDE_TEST_MARK"])
    assert len(family) >= 5
    folders = {
        part for one in family for part in re.findall(r"/tmp/fedtide-[^/\s]+(?=/r/session)", " ".join(one.cmdline()))
    }
    assert len(folders) == 1
    assert stat.S_IMODE(Path(*folders).stat().st_mode) == 0o700
    listening = [held.laddr for one in family for held in one.net_connections("inet") if held.status == "LISTEN"]
    assert len(listening) > 3
    assert {place.ip.removeprefix("::ffff:") for place in listening} == {"127.0.0.1"}
    program.kill()
    program.wait()
    assert program.stderr.read() == b""
    program.stdout.close()
    program.stderr.close()
    _, alive = psutil.wait_procs([one for one in family if one.pid != program.pid], timeout=30)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    left = Path(folders.pop())

    def removed() -> bool:
        with Scratch(left.parent):  # removes what was left behind, unless another one is at it
            return not left.exists()

    until(removed, 10)
