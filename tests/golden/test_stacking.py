"""Weights of stacked models: fixed points of EM by hand, and the mixture of a client of adaptive expert models."""

import math

import pytest
import torch

from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.learn.task import Task
from fedtide.personal.client_networks import Networks
from fedtide.personal.ways import Stacking, stack


def logs(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def test_experts_that_never_agree_get_the_counts_of_their_rows():
    """Three rows of one and one of the other, half a count on each: 3.5 and 1.5 of 5; without counts 3 and 1 of 4."""
    rows = logs((1, 0), (1, 0), (1, 0), (0, 1))
    torch.testing.assert_close(stack(rows, 0.5), torch.tensor([0.7, 0.3]).double())
    torch.testing.assert_close(stack(rows, 0.0), torch.tensor([0.75, 0.25]).double())


def test_one_row_that_one_of_two_experts_finds_twice_as_likely():
    """The fixed point of w = (1/2 + w / (w + (1 - w)/2)) / 2 solves 2 w^2 - w/2 - 1/2 = 0: (1 + sqrt 17) / 8."""
    weights = stack(logs((1, 0.5)), 0.5)
    assert weights.tolist() == pytest.approx([(1 + math.sqrt(17)) / 8, (7 - math.sqrt(17)) / 8], abs=1e-5)


def test_equal_experts_share_and_the_weights_are_the_best_there_are():
    """Against a fine grid of two weights, with the third in its place, by the posterior that EM climbs."""
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double()
    found, best = stack(rows, 0.5), -math.inf
    grid = torch.arange(1, 100).double() / 100
    for one in grid.tolist():
        for two in grid[grid < 1 - one - 1e-9].tolist():
            w = torch.tensor([one, two, 1 - one - two]).double()
            best = max(best, float(torch.logsumexp(rows + w.log(), 1).sum() + 0.5 * w.log().sum()))
    ours = float(torch.logsumexp(rows + found.log(), 1).sum() + 0.5 * found.log().sum())
    assert ours >= best
    assert stack(rows[:, :1].expand(-1, 4), 0.5).tolist() == pytest.approx([0.25] * 4)


def fixed(task: Task, *probabilities: float) -> Weights:
    """A model that says the same of every row."""
    start = task.init(Rng(0))
    zero = {name: torch.zeros_like(value) for name, value in start.params.items()}
    return Weights({**zero, "bias": torch.tensor(probabilities).log()})


def test_a_mixture_by_hand():
    """Neither private model learns (no training rows): the local one is drawn, the tuned one is the best received.

    Rows of validation: three of class 0, one of class 1. Received: (.9, .1) and (.2, .8).
    """
    task = Task(lambda: torch.nn.Linear(1, 2), example=torch.zeros(1, 1))
    nets, models = Networks(task), [fixed(task, 0.9, 0.1), fixed(task, 0.2, 0.8)]
    val = Shard(torch.zeros(4, 1), torch.tensor([0, 0, 0, 1]), torch.arange(4))
    shard = Shard(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64), torch.arange(0), fetch_val=lambda: val)
    kept = Stacking().fit(nets, models, shard, Moment(0, 1), Rng(3))
    own, tuned = kept["private"]
    assert torch.equal(tuned.params["bias"], models[0].params["bias"])
    p = own.params["bias"].double().softmax(0)
    logp = logs((0.9, 0.2, float(p[0]), 0.9), (0.1, 0.8, float(p[1]), 0.1))[val.y]
    torch.testing.assert_close(kept["weights"], stack(logp, 0.5), rtol=1e-6, atol=1e-7)
    found = Stacking().predict(nets, models, kept, val.x)
    w = kept["weights"]
    mixed = 0.9 * (w[0] + w[3]) + 0.2 * w[1] + float(p[0]) * w[2]
    torch.testing.assert_close(found.told.exp()[:, 0], mixed.expand(4), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.weights, torch.stack([w[2] + w[3], w[0], w[1]]).expand(4, -1))
    assert found.choice.tolist() == [int(found.weights[0].argmax())] * 4


def test_without_validation_rows_it_is_the_choice_by_training_rows():
    task = Task(lambda: torch.nn.Linear(1, 2), example=torch.zeros(1, 1))
    nets, models = Networks(task), [fixed(task, 0.9, 0.1), fixed(task, 0.2, 0.8)]
    shard = Shard(torch.zeros(3, 1), torch.tensor([1, 1, 0]), torch.arange(3))
    kept = Stacking().fit(nets, models, shard, Moment(0, 1), Rng(0))
    assert kept["weights"].tolist() == [0, 1]
    assert kept["private"] == []
    found = Stacking().predict(nets, models, kept, shard.x)
    torch.testing.assert_close(found.told.exp(), torch.tensor([[0.2, 0.8]]).double().expand(3, -1))
    assert found.weights.tolist() == [[0, 0, 1]] * 3
    assert found.choice.tolist() == [2] * 3
    assert Stacking().fit(nets, models, shard.pick(slice(0, 0)), Moment(0, 1), Rng(0)) is None
