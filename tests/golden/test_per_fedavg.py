"""Per-FedAvg by pencil and paper, and a naive implementation.

The two quadratics of quadratics.py: gradients x and x - 4; the model starts at 1. Both steps are of 1/2, and all rows
are one batch. The one row of client 0 is both halves: w~ = 1/2, w_0 = 1 - 1/2 * 1/2 = 3/4. Client 1 has one row and
then two: w~ = 5/2 with gradient -3/2, w_1 = 1 + 3/4 = 7/4. By rows 1 and 3, w = 1 + (-1/4 + 3 * 3/4) / 4 = 3/2.
Clients are judged after one step more: 3/2 - 3/4 = 3/4 and 3/2 + 5/4 = 11/4.
"""

import pytest
import torch
from torch import nn

from fedtide.algorithms.per_fedavg import per_fedavg
from fedtide.cohorts import Everyone, OneModel
from fedtide.core.base import Moment, Shard
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.by_batch import DATA, LOCAL, batches, close, gradient, rounds
from helpers.quadratics import TASK, after, at, population, value
from helpers.toys import network_of, played, toy

ONE = LocalTrainer(lr=0.5, batch_size=0)
NOW = Moment(0, 1)


def adapted(algorithm, w: float, client: int) -> float:
    answer = algorithm.adapt(at(w), None, population().shard(client, NOW), NOW, Rng(0))
    return float(answer.memory["own"].params["weight"])


def test_a_round_and_a_step_before_evaluation_by_hand():
    algorithm = per_fedavg(TASK, ONE, 0.5, cohort=Everyone(), weighting="samples")
    state = after(algorithm, OneModel(at(1.0), None))
    assert value(state) == 1.5
    assert [adapted(algorithm, 1.5, client) for client in (0, 1)] == [0.75, 2.75]


def test_without_rows_or_a_step_clients_are_served_the_global_model():
    none = population([[0], [4]]).shard(0, NOW).pick(slice(0, 0))
    assert per_fedavg(TASK, ONE, 0.5).adapt(at(1.0), None, none, NOW, Rng(0)) is None
    assert per_fedavg(TASK, ONE, 0.5).works["train"](at(1.0), None, none, NOW, Rng(0)) is None
    assert per_fedavg(TASK, ONE, 0.0).adapt(at(1.0), None, population().shard(0, NOW), NOW, Rng(0)) is None


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_halves_of_a_batch_are_large_enough_for_batchnorm(rows):
    task = Task(lambda: nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    shard = Shard(torch.arange(float(rows))[:, None], torch.arange(rows) % 2, torch.arange(rows))
    answer = per_fedavg(task, LocalTrainer(batch_size=4), 0.1).works["train"](
        task.init(Rng(0)), None, shard, NOW, Rng(0)
    )
    assert (answer is None) == (rows == 1)
    assert answer is None or all_finite(answer.total)


@pytest.mark.parametrize("alpha", [0.3, 0.0])
def test_a_naive_implementation_agrees_to_1e_10(alpha):
    run = played(
        toy(
            "per-fedavg",
            {"local": {**LOCAL, "batch_size": 5}, "alpha": alpha, "weighting": "samples"},
            precision="fp64",
            data=DATA,
            rounds=5,
        )
    )
    model = network_of(run.steps[0].received.weights)

    def work(w, memory, shard, key):
        for x, y in batches(shard, key, 5):
            half = len(y) // 2
            first, second = (slice(0, half), slice(half, None)) if half else (slice(None), slice(None))
            inner = [p - alpha * g for p, g in zip(w, gradient(model, w, x[first], y[first]), strict=True)]
            w = [p - 0.1 * g for p, g in zip(w, gradient(model, inner, x[second], y[second]), strict=True)]
        return w, None

    for step, w in zip(run.steps, rounds(run.host.population, model, work, {}), strict=True):
        close(step.state.weights, w)
    if not alpha:
        return
    algorithm, shard = run.host.algorithm, run.host.population.shard(3, NOW)
    found = algorithm.adapt(run.state.weights, None, shard, NOW, Rng(0)).memory["own"]
    close(found, [p - alpha * g for p, g in zip(w, gradient(model, w, shard.x, shard.y), strict=True)])
