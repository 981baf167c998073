"""The workers engine: the same bits as in one process, whoever is killed and whatever was asked before."""

import os
import signal
import threading
import time

import pytest
import torch

from fedtide.config import from_dict
from fedtide.core.base import Moment, Weights
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import same
from fedtide.fleets.engines import LocalEngine, WorkersEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.runs.build import spec_of
from helpers.blended import BLEND, SPLITTING
from helpers.toys import TOY, played, toy

MANY = {"data": {"partition": {"kind": "iid", "clients": 32}}, "rounds": 3}


def engine_for(pool, experiment, folder):
    spec = spec_of(experiment, experiment.method[0], 0, folder)
    return lambda host: WorkersEngine(host, pool, spec, experiment.fleet.threads)


def rows_of(run) -> list:
    store, clients = run.fleet.engine.memory, run.host.population.clients.tolist()
    return [store.read(client, (99, 0)) for client in clients]


def test_workers_killed_in_mid_round_change_no_bit(pool, tmp_path):
    """One by its own work in the middle of a block, one from outside while it works."""
    (tmp_path / "flags").mkdir()
    options = {"flags": str(tmp_path / "flags"), "cohort": {"kind": "everyone"}}
    experiment = toy("helpers.deadly:remembering", options, **MANY)
    alone = played(experiment)
    (tmp_path / "flags" / "once").write_text(str(os.getpid()))  # this process works, too
    slow = toy("helpers.deadly:remembering", {**options, "seconds": 0.02}, **MANY)
    before, killed = pool.processes, []

    def kill():
        time.sleep(0.1)
        killed.append(pool.processes[0])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    many = played(
        slow, memory=MemoryStore(tmp_path / "memory", small=0), engine=engine_for(pool, slow, tmp_path / "memory")
    )
    killer.join()
    assert not list((tmp_path / "flags").iterdir())
    assert killed[0] not in pool.processes
    assert pool.processes != before
    assert same(alone.state, many.state)
    assert same(rows_of(alone), rows_of(many))
    assert same([a.notes for a in alone.fleet.queries], [a.notes for a in many.fleet.queries])


def test_judging_in_workers_gives_the_same_scores(pool, tmp_path):
    experiment = toy("fedavg", **MANY)
    alone, many = played(experiment), played(experiment, engine=engine_for(pool, experiment, None))
    everyone = torch.cat([alone.host.population.clients, alone.host.population.held_out_clients])
    for part in ("train", "val", "test"):
        scores = [
            run.fleet.score(run.state.weights, everyone, part=part, pooled=("confusion", "odds"))
            for run in (alone, many)
        ]
        assert same(*scores)
        assert scores[0].pooled["confusion"].sum(0)[1:].tolist() == [float(scores[0].rows.sum())] * 2


def test_workers_tell_of_components_losses_other_ways_and_densities_as_one_process_does(pool):
    experiment = from_dict({**BLEND, "rounds": 2, "model": TOY["model"], "method": [SPLITTING]})
    alone, many = played(experiment), played(experiment, engine=engine_for(pool, experiment, None))
    assert same([a.notes for a in alone.fleet.queries], [a.notes for a in many.fleet.queries])
    assert all(note.component is not None and note.loss is not None for note in alone.fleet.queries[0].notes.values())
    everyone = torch.cat([alone.host.population.clients, alone.host.population.held_out_clients])
    scores = [run.fleet.score(run.state, everyone) for run in (alone, many)]
    assert set(scores[0].others) == {"global", "class 0"}
    assert scores[0].density is not None
    assert same(*scores)


@pytest.mark.parametrize("name", ["scaffold", pytest.param("local", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("files", [True, False])
def test_rows_travel_where_processes_cannot_reach_the_files(pool, tmp_path, monkeypatch, name, files):
    """As on a cluster of several nodes: workers have no folder, and lend back what clients keep."""
    monkeypatch.setattr(pool, "multi_node", True)
    experiment, memory = toy(name), MemoryStore(tmp_path, small=0 if files else 10**9)
    alone = played(experiment, rounds=3)
    many = played(experiment, rounds=3, memory=memory, engine=engine_for(pool, experiment, None))
    assert same(alone.state, many.state)
    assert same(rows_of(alone), rows_of(many))
    assert bool(memory.files()) == files
    assert {row.file for row in memory.files()} == {path.name for path in tmp_path.iterdir()}
    clients = alone.host.population.clients
    payload, _ = alone.host.algorithm.serve(alone.state, clients)
    assert same(*(run.fleet.score(payload, clients) for run in (alone, many)))


def test_every_ask_is_answered_with_its_own_payload(pool):
    """One engine after another, with one ask each: none may be answered with what an earlier one had sent."""
    experiment = toy("fedavg")
    run = played(experiment, rounds=1)
    clients, spec = run.host.population.clients, spec_of(experiment, experiment.method[0], 0, None)

    def payload(factor):
        return Weights({name: factor * param for name, param in run.state.weights.params.items()}, {})

    def judged(factor, engine):
        made = SimulatedFleet(run.host.population, engine)
        made.begin(Moment(0, 6, 0.0))
        return made.score(payload(factor), clients).loss.tolist()

    expected = [judged(factor, LocalEngine(run.host)) for factor in range(1, 26)]
    assert len({tuple(losses) for losses in expected}) == 25
    assert [judged(factor, WorkersEngine(run.host, pool, spec)) for factor in range(1, 26)] == expected
