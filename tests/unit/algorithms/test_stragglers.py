"""FedProx's stragglers: who is slow, what they do, and what it counts for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedtide.algorithms.fedavg import State
from fedtide.algorithms.fedprox import fedprox
from fedtide.cohorts import Everyone
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.types import Moment, Shard
from fedtide.learn.local import LocalTrainer
from helpers.quadratics import TASK, after, at, value

NOW = Moment(0, 10)


@pytest.mark.parametrize("local", [{}, {"epochs": 1}, {"local_steps": 1, "epochs": 3}])
def test_stragglers_need_work_that_has_a_part(local):
    with pytest.raises(FedtideError, match=r"^stragglers: found 0.5, allowed: 0, as the local work of"):
        fedprox(TASK, LocalTrainer(**local), stragglers=0.5)
    fedprox(TASK, LocalTrainer(**local))


@pytest.mark.parametrize("kind", ["epochs", "steps"])
def test_a_straggler_does_any_part_of_the_work_but_all_and_none(kind):
    solver = LocalTrainer(**{kind: 4})
    done = [getattr(solver.shortened(Rng(seed)), kind) for seed in range(300)]
    counts = [done.count(k) for k in (1, 2, 3)]
    assert sum(counts) == 300
    assert all(70 < count < 130 for count in counts)
    assert solver.shortened(Rng(0)) == replace(solver, **{kind: done[0]})


def test_who_is_slow_is_drawn_from_the_key_alone_and_counts_in_full():
    """Client 1's three epochs of one full batch, 4 - 3 (1/2)^e from 1: which e was done can be read from the update."""
    solver = LocalTrainer(lr=0.5, batch_size=0, epochs=3)
    x, y = torch.ones(3, 1, dtype=torch.float64), torch.tensor([4, 4, 4])
    seen, slow = [], 0
    for client in range(200):
        key = Rng(0).at(0, client, "train")
        shard = Shard(x, y, torch.arange(3))
        done = []
        for mu in (0.0, 1e-9):
            algorithm = fedprox(TASK, solver, mu=mu, stragglers=0.6)
            answer = algorithm.works["train"](at(1.0), None, shard, NOW, key)
            assert answer.total["delta"].weight == 3.0
            done.append(round(float(answer.total["delta"].value.params["weight"]), 6))
        assert done[0] == done[1]
        seen.append({1.5: 1, 2.25: 2, 2.625: 3}[done[0]])
        slow += seen[-1] < 3
    assert 95 < slow < 145  # 120 of 200
    assert abs(seen.count(1) - seen.count(2)) < 35


def test_the_mean_of_a_round_is_over_what_stragglers_did():
    """Everyone slow, two epochs: one each. The law of reductions says the rest."""
    two = LocalTrainer(lr=0.5, batch_size=0, epochs=2)
    algorithm = fedprox(TASK, two, mu=1.0, stragglers=1.0, cohort=Everyone())
    assert value(after(algorithm, State(at(1.0), None))) == 2.0
