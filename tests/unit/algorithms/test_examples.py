"""The worked examples of the documentation: they run, and do what their pages say."""

import sys
from pathlib import Path

import pytest
import torch

import fedtide as ft
from fedtide.core.base import Moment, Shard
from fedtide.core.rng import Rng
from fedtide.core.trees import same

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
TASK = ft.Task(lambda: torch.nn.Linear(4, 3), dtype=torch.float64)
COHORT = ft.cohorts.Arrivals(3)


@pytest.fixture
def people():
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return ft.population(x, torch.arange(120) % 3, ft.data.IID(clients=6))


@pytest.fixture(autouse=True)
def found(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


def test_the_first_step_of_last_two_is_that_of_fedavg_and_the_second_is_not(people):
    from last_two import last_two

    for rounds, alike in ((1, True), (2, False)):
        ours = ft.simulate(last_two(TASK, cohort=COHORT), people, rounds=rounds).state.weights
        theirs = ft.simulate(ft.algorithms.fedavg(TASK, cohort=COHORT), people, rounds=rounds).state.weights
        assert same(ours, theirs) == alike


def test_the_global_model_of_ditto_is_that_of_fedavg(people):
    from ditto import ditto

    plain = ft.simulate(ft.algorithms.fedavg(TASK, cohort=COHORT), people, rounds=4)
    result = ft.simulate(ditto(TASK, cohort=COHORT), people, rounds=4)
    assert same(result.state.weights, plain.state.weights)


def test_a_client_of_ditto_by_hand():
    """One row, one step each: v = w - lr (grad + lam (v - w)); from v = w the pull is 0, afterwards it is not."""
    from ditto import ditto

    algorithm = ditto(TASK, ft.LocalTrainer(lr=0.5, batch_size=0), lam=0.4)
    w = TASK.init(Rng(0))
    shard = Shard(torch.ones(1, 4, dtype=torch.float64), torch.tensor([1]), torch.arange(1))
    train, now = algorithm.works["train"], Moment(0, 2)
    first = train(w, None, shard, now, Rng(1))
    kept = first.memory["own"]
    assert same(ft.weights.sub(kept, w), first.total["delta"].value)
    second = train(w, {"own": kept}, shard, now, Rng(2)).memory["own"]
    for name, value in second.params.items():
        gradient, _ = TASK.gradient(kept, shard)
        expected = kept.params[name] - 0.5 * (gradient[name] + 0.4 * (kept.params[name] - w.params[name]))
        torch.testing.assert_close(value, expected)
