"""Stragglers: who does a part of its work, what it does, and what that counts for, whatever the algorithm."""

from dataclasses import replace

import pytest
import torch

import fedtide as ft
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.fleets.devices import Steady
from fedtide.learn.local import LocalTrainer
from fedtide.runs.preflight import preflight
from helpers.quadratics import TASK, at, population
from helpers.toys import played, toy


@pytest.mark.parametrize("local", [{}, {"epochs": 1}, {"local_steps": 1}])
def test_work_needs_a_part(local):
    local = {"lr": 0.1, "batch_size": 4, **local}
    with pytest.raises(FedtideError, match=r"^devices.partial_work: found 0.5, allowed: 0, as the local work of"):
        preflight(toy("fedavg", {"local": local}, devices={"kind": "steady", "partial_work": 0.5}))
    preflight(toy("fedavg", {"local": local}))
    algorithm = ft.algorithms.fedavg(TASK, LocalTrainer(**local))
    with pytest.raises(
        FedtideError, match=r"^devices.partial_work: found 0.5, allowed: 0, as the local work of fedavg"
    ):
        ft.simulate(algorithm, population(), rounds=1, devices=Steady(partial_work=0.5))


@pytest.mark.parametrize("kind", ["epochs", "local_steps"])
def test_a_straggler_does_any_part_of_the_work_but_all_and_none(kind):
    solver = LocalTrainer(**{kind: 4})
    done = [getattr(solver.draw_partial(Rng(seed)), kind) for seed in range(300)]
    counts = [done.count(k) for k in (1, 2, 3)]
    assert sum(counts) == 300
    assert all(70 < count < 130 for count in counts)
    assert solver.draw_partial(Rng(0)) == replace(solver, **{kind: done[0]})


def test_a_part_is_drawn_from_its_key_and_counts_in_full():
    """Three epochs of one full batch, 4 - 3 (1/2)^e from 1: which e was done can be read from the update."""
    solver = LocalTrainer(lr=0.5, batch_size=0, epochs=3)
    shard = Shard(torch.ones(3, 1, dtype=torch.float64), torch.tensor([4, 4, 4]), torch.arange(3))
    seen = []
    for client in range(200):
        key = Rng(0).at(client)
        fitted = solver(TASK, TASK.loss, at(1.0), shard, Moment(0, 10, part=key), Rng(0))
        seen.append({1.5: 1, 2.25: 2}[round(float(fitted.delta.params["weight"]), 6)])
        assert seen[-1] == solver.draw_partial(key).epochs
    assert abs(seen.count(1) - seen.count(2)) < 45


def test_who_is_slow_is_the_same_for_every_method_and_has_its_share():
    local = {"lr": 0.1, "batch_size": 4, "epochs": 3}
    half = {"kind": "steady", "partial_work": 0.5}
    runs = [played(toy("fedprox", {"local": {**local, "proximal": mu}}, devices=half)) for mu in (0.0, 1e-12)]
    assert torch.allclose(*(run.state.weights.params["dense1.weight"] for run in runs), atol=1e-6)
    slow = [Rng(0).at(r, c, "train").at("straggler").numpy().random() < 0.5 for r in range(40) for c in range(8)]
    assert 130 < sum(slow) < 190
