"""Actors of Ray: the bits of one process, whoever is killed; what cannot work is one line and leaves nothing."""

from __future__ import annotations

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
from fedtide.fleets import pool as calls
from fedtide.fleets import ray_cluster, ray_pool
from fedtide.fleets.ray_pool import RayPool, packed, unpacked
from fedtide.fleets.worker_engine import WorkersEngine
from fedtide.runs import parallel
from fedtide.runs.build import as_json, spec_of
from fedtide.runs.experiment import RunCall, execute
from fedtide.runs.folder import create
from fedtide.runs.preflight import preflight
from helpers.studies import SCAFFOLD, A, record_of, study
from helpers.toys import played, toy

ECHO = "fedtide.fleets.worker:echo"
PLAY = "fedtide.runs.parallel:play_in_worker"
MANY = {"data": {"partition": {"kind": "iid", "clients": 32}}, "rounds": 3}
LARGE = {"model": {"kind": "mlp", "hidden": [600]}}
"""A model whose copy in a client's memory is a file."""


def play(folder: Path, algorithm: str, options: dict | None = None, **changes) -> dict:
    """The arguments of a call that plays a run."""
    call = RunCall(as_json(toy(algorithm, options, **changes)), "toy", 0, str(folder / "toy" / "0"))
    return {"player": "fedtide.runs.experiment:play_run", "call": call}


def flags(folder: Path, deaths: int) -> str:
    folder.mkdir()
    for number in range(deaths):
        (folder / str(number)).touch()
    return str(folder)


# -- without a cluster -------------------------------------------------------------------------------------------------


def test_any_tree_survives_being_packed():
    tree = {
        "a": (1, None, float("nan"), [torch.tensor(True), torch.zeros(0, 2)]),
        3: {"x/y": torch.ones((), dtype=torch.bfloat16), "t": torch.arange(6).reshape(2, 3).T},
    }
    assert same(unpacked(packed(tree)), tree)
    assert same(unpacked(packed(tree), copy=False), tree)


def test_a_missing_ray_is_a_line_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(FedtideError, match=r'^fleet\.kind: "ray" needs Ray; pip install "fedtide\[ray\]"$'):
        preflight(toy("fedavg", fleet={"kind": "ray"}))


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:10001", "host:", ":6379", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused(monkeypatch, address):
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: True)
    with pytest.raises(FedtideError, match=r"^fleet\.address: .*allowed: "):
        ray_cluster.check(address)


def test_a_dead_address_is_one_line_at_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: True)
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


def test_whoever_listens_but_is_no_cluster_is_found_out_in_time(monkeypatch):
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    monkeypatch.setattr(ray_cluster, "JOIN_SECONDS", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with (
            pytest.raises(FedtideError, match=f"^fleet.address: no Ray cluster answers at {address} "),
            ray_cluster._existing_cluster(address),
        ):
            pass


def test_an_address_without_ray_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit) as left:
        main(["run", "recipe:demo", "--fleet", "local", "--address", "auto", "--out", str(tmp_path / "r")])
    assert left.value.code == 2
    assert capsys.readouterr().err == (
        "fedtide: --address: found 'auto', but --fleet is local; allowed: with --fleet ray\n"
    )


def test_a_share_of_a_gpu_is_refused_where_nothing_would_compute_on_it(monkeypatch):
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: True)
    with pytest.raises(
        FedtideError, match=r"fleet\.gpus: found 0\.25, but 'fedavg' computes on the CPU; allowed: 0, or"
    ):
        preflight(toy("fedavg", fleet={"kind": "ray", "gpus": 0.25}))


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 40])
def test_results_come_in_the_order_of_the_arguments(actors, count):
    arguments = [{"i": i, "x": torch.full((3,), float(i))} for i in range(count)]
    assert same(list(actors.map(ECHO, arguments)), arguments)


def test_no_call_begins_long_before_its_turn(actors):
    """So that few results wait: here nobody takes the first one."""
    asked = []

    class Watched(list):
        def __getitem__(self, place):
            asked.append(place)
            return super().__getitem__(place)

    results = actors.map(ECHO, Watched(range(100)))
    assert next(results) == 0
    assert max(asked) <= 4 * 2
    results.close()


def test_messages_of_several_calls_and_a_stop_in_between(actors, tmp_path):
    arguments = [play(tmp_path / str(i), "helpers.deadly:remembering", {"seconds": 0.02}, rounds=300) for i in (0, 1)]
    said = {0: [], 1: []}
    try:
        for message in actors.run(PLAY, arguments):
            if not message.final:
                said[message.call].append(message.value.round)
            if all(said.values()):
                (actors.folder / "stop").touch()
    finally:
        (actors.folder / "stop").unlink(missing_ok=True)
    for rounds in said.values():
        assert rounds == list(range(1, len(rounds) + 1))
        assert len(rounds) < 300


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


def test_a_payload_is_let_go_of(actors):
    experiment = toy("fedavg")
    spec = spec_of(experiment, experiment.method[0], 0, None)
    played(experiment, engine=lambda host: WorkersEngine(host, actors, spec))
    assert not [name for name in actors._shared if name.startswith("payload")]


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


@pytest.mark.thorough
def test_scaffold_loses_no_control_variate_with_an_actor(actors, tmp_path, monkeypatch):
    monkeypatch.setattr(actors, "multi_node", True)  # rows of memory travel
    options = {"cohort": {"kind": "everyone"}, "local": {"lr": 0.1, "epochs": 40}}
    experiment = toy("scaffold", options, **MANY)
    alone, memory = played(experiment), MemoryStore(tmp_path, small=0)
    spec = spec_of(experiment, experiment.method[0], 0, None)
    list(actors.map(ECHO, range(4)))
    victim, asked = actors.processes[1], []

    class Killing(WorkersEngine):
        def ask(self, jobs, payload):
            for number, done in enumerate(super().ask(jobs, payload)):
                if number == 1 and not asked:
                    asked.append(os.kill(victim, signal.SIGKILL))
                yield done

    many = played(experiment, memory=memory, engine=lambda host: Killing(host, actors, spec))
    assert asked
    assert victim not in actors.processes
    assert same(alone.state, many.state)
    assert same(*([run.fleet.engine.memory.read(c, (99, 0)) for c in range(32)] for run in (alone, many)))


@pytest.mark.thorough  # its rule is that of processes, in test_pool.py
def test_a_call_that_takes_its_actor_down_again_and_again_is_one_clear_line(actors, tmp_path, monkeypatch):
    """Three times in earnest; actors take long to start, so that two have to do here."""
    assert calls.DEATHS == 3
    monkeypatch.setattr(calls, "DEATHS", 2)
    options = {"flags": flags(tmp_path / "flags", 9)}
    with pytest.raises(FedtideError, match=r"^an actor died 2 times on the same work; giving up$"):
        list(actors.run(PLAY, [play(tmp_path, "helpers.deadly:dying", options)]))
    assert len(list((tmp_path / "flags").iterdir())) == 7
    assert list(actors.map(ECHO, range(5))) == list(range(5))


# -- too little --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "more", "said"), [
    (3, {}, r"^fleet\.workers: found 3 with 1 CPUs each, allowed: at most 2, .* has CPUs \(2\)$"),
    (None, {"threads": 3}, r"^fleet\.workers: found 1 with 3 CPUs each, allowed: at most 0, "),
    (1, {"gpus": 0.25}, r"^fleet\.workers: found 1 with 0\.25 of a GPU each, allowed: at most 0, .* has GPUs \(0\)$"),
])  # fmt: skip
def test_a_cluster_that_is_too_small_is_one_line(actors, size, more, said):
    with pytest.raises(FedtideError, match=said):
        RayPool(size, **more)
    assert list(actors.map(ECHO, [1])) == [1]


def test_a_cluster_without_room_is_one_line_within_a_deadline(actors, monkeypatch):
    """All its CPUs belong to the actors of the session."""
    monkeypatch.setattr(ray_pool, "BEGIN_SECONDS", 0.5)
    with pytest.raises(
        FedtideError, match=r"had no room for an actor within 0 seconds; it needs 1 CPUs and 0 GPUs, free: 0"
    ):
        RayPool(1)
    assert list(actors.map(ECHO, [1])) == [1]


# -- whole experiments -------------------------------------------------------------------------------------------------


@pytest.fixture
def borrowed(actors, monkeypatch):
    """The actors are those of the session: nobody has to wait for new ones."""
    size = []

    class Borrowed:
        def __new__(cls, wanted, **more):
            size.append((wanted, more["most"]))
            return actors

    monkeypatch.setattr(parallel, "RayPool", Borrowed)
    monkeypatch.setattr(RayPool, "__exit__", lambda self, *given: None)
    yield size
    (actors.folder / "stop").unlink(missing_ok=True)


def test_runs_side_by_side_on_actors_leave_the_same_bytes(borrowed, tmp_path):
    several = study(A, SCAFFOLD, fleet={"kind": "ray"}, seeds=[0, 1])
    for name, settings in (("ray", several), ("here", study(A, SCAFFOLD, seeds=[0, 1]))):
        create(settings, tmp_path / name)
        assert execute(settings, tmp_path / name, workers=None if name == "ray" else 1)
    assert borrowed == [(None, 4)]
    ours, theirs = record_of(tmp_path / "ray"), record_of(tmp_path / "here")
    assert {k: v for k, v in ours.items() if k != "config.toml"} == {
        k: v for k, v in theirs.items() if k != "config.toml"
    }


def test_a_run_folder_that_a_node_does_not_reach_is_refused_there(actors, tmp_path):
    settings = study(A)
    call = RunCall(as_json(settings), "A", 0, str(tmp_path / "a" / "0"), str(tmp_path))
    with pytest.raises(
        FedtideError, match=r"not a run folder on .*; several runs on a Ray cluster need one that every node"
    ):
        list(actors.run(PLAY, [{"player": "fedtide.runs.experiment:play_run", "call": call}]))
    assert not (tmp_path / "a").exists()


# -- the end -----------------------------------------------------------------------------------------------------------

HOLDING = """
import json, sys, time
from fedtide.fleets.ray_pool import RayPool
with RayPool(1, resume="fedtide resume x") as pool:
    print(json.dumps(pool.processes), flush=True)
    time.sleep(600)
"""


IDLE = """
import json, sys, torch
from fedtide.fleets.ray_pool import RayPool
with RayPool(1, resume="fedtide resume x") as pool:
    print(json.dumps(pool.processes), flush=True)
    sys.stdin.readline()
    payload = pool.put("payload", {"x": torch.ones(300_000)})
    print(len(list(pool.map("fedtide.fleets.worker:echo", [{"payload": payload}] * 3))), flush=True)
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
    assert not Path(folders.pop()).exists()


@pytest.mark.thorough  # a cluster of its own
def test_a_program_that_sits_idle_while_its_ray_dies_ends_at_its_next_call_in_one_line():
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    mark = f"idle-{os.getpid()}-"
    program = subprocess.Popen(
        [sys.executable, "-c", IDLE],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "FEDTIDE_TEST_MARK": mark},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdout.readline()
    (raylet,) = (one for one in of_cluster(mark) if one.name() == "raylet")
    raylet.kill()
    out, err = program.communicate("go on\n", timeout=120)
    assert (program.returncode, out) == (1, "")
    assert err == "fedtide: a process of Ray's died, and Ray ended this one; go on with: fedtide resume x\n"
    _, alive = psutil.wait_procs(of_cluster(mark), timeout=30)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
