"""The workers engine: the same bits as in one process, whoever is killed and whatever was asked before."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import same
from fedtide.core.types import Moment, Weights
from fedtide.fleets.local import LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.workers import WorkersEngine
from fedtide.run.assemble import spec_of
from toys import played, toy

MANY = {"data": {"partition": {"kind": "iid", "clients": 32}}, "rounds": 3}


def engine_for(pool, experiment, folder):
    spec = spec_of(experiment, experiment.method[0], 0, folder)
    return lambda host: WorkersEngine(pool, spec)


def rows_of(run) -> list:
    store, clients = run.fleet.memory, run.host.population.clients.tolist()
    return [store.read(client, (99, 0)) for client in clients]


def test_a_worker_killed_by_its_own_work_in_mid_round_changes_no_bit(pool, tmp_path):
    (tmp_path / "flags").mkdir()
    options = {"flags": str(tmp_path / "flags"), "cohort": {"kind": "everyone"}}
    experiment = toy("unit.fleets.deadly:remembering", options, **MANY)
    alone = played(experiment)
    (tmp_path / "flags" / "once").touch()
    before = pool.processes
    many = played(
        experiment, memory=MemoryStore(tmp_path / "memory", small=0),
        engine=engine_for(pool, experiment, tmp_path / "memory"),
    )  # fmt: skip
    assert not list((tmp_path / "flags").iterdir())
    assert pool.processes != before
    assert same(alone.state, many.state)
    assert same(rows_of(alone), rows_of(many))


def test_a_worker_killed_from_outside_in_mid_round_changes_no_bit(pool, tmp_path):
    (tmp_path / "flags").mkdir()
    options = {"flags": str(tmp_path / "flags"), "cohort": {"kind": "everyone"}, "seconds": 0.02}
    experiment = toy("unit.fleets.deadly:remembering", options, **MANY)
    alone = played(experiment)
    killed = []

    def kill():
        time.sleep(0.3)
        killed.append(pool.processes[0])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    many = played(experiment, engine=engine_for(pool, experiment, None))
    killer.join()
    assert len(killed) == 1
    assert killed[0] not in pool.processes
    assert same(alone.state, many.state)
    assert same(rows_of(alone), rows_of(many))
    assert same([a.notes for a in alone.fleet.ledger], [a.notes for a in many.fleet.ledger])


def test_judging_in_workers_gives_the_same_scores(pool, tmp_path):
    experiment = toy("fedavg", **MANY)
    alone, many = played(experiment), played(experiment, engine=engine_for(pool, experiment, None))
    everyone = torch.cat([alone.host.population.clients, alone.host.population.unseen])
    for part in ("train", "valid", "test"):
        scores = [run.fleet.score(run.state.weights, everyone, part=part) for run in (alone, many)]
        assert same(*scores)


def test_every_ask_is_answered_with_its_own_payload(pool):
    """One engine after another, with one ask each: none may be answered with what an earlier one had sent."""
    experiment = toy("fedavg")
    run = played(experiment, rounds=1)
    clients, spec = run.host.population.clients, spec_of(experiment, experiment.method[0], 0, None)

    def payload(factor):
        return Weights({name: factor * param for name, param in run.state.weights.params.items()}, {})

    def judged(factor, engine):
        made = SimulatedFleet(run.host.population, engine, run.host.memory)
        made.begin(Moment(0, 6, 0.0))
        return made.score(payload(factor), clients).loss.tolist()

    expected = [judged(factor, LocalEngine(run.host)) for factor in range(1, 7)]
    assert len({tuple(losses) for losses in expected}) == 6
    assert [judged(factor, WorkersEngine(pool, spec)) for factor in range(1, 7)] == expected


@pytest.mark.parametrize(("kind", "error", "said"), [
    ("user", FedtideError, "^the well is dry$"), ("program", RuntimeError, "(?s)Traceback.*a fault in the program"),
])  # fmt: skip
def test_an_error_of_a_work_comes_back(pool, kind, error, said):
    experiment = toy("unit.fleets.deadly:failing", {"kind": kind, "cohort": 1})
    with pytest.raises(error, match=said):
        played(experiment, engine=engine_for(pool, experiment, None))
    assert list(pool.folder.iterdir()) == []
    good = toy("fedavg")
    assert same(played(good).state, played(good, engine=engine_for(pool, good, None)).state)


def test_payloads_do_not_stay_in_shared_memory(pool):
    experiment = toy("fedavg")
    played(experiment, engine=engine_for(pool, experiment, None))
    assert list(pool.folder.iterdir()) == []
