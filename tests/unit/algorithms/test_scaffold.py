"""SCAFFOLD: what it refuses, what clients keep, what its extra pass sees, and with what it goes together."""

import re

import pytest
import torch
from torch import nn

from fedtide.algorithms.scaffold import Sent, scaffold
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import WSM, CrossEntropy
from fedtide.learn.schedules import Exponential
from fedtide.learn.task import Task
from fedtide.runs.preflight import preflight
from golden.test_scaffold import control, start, value
from helpers.quadratics import TASK, after
from helpers.studies import A, study
from helpers.toys import normed, played, toy

KEY, NOW = Rng(0).at(0, 3, "train"), Moment(0, 10)
LOSSES = ["cross-entropy", "wsm"]


# -- what it refuses ---------------------------------------------------------------------------------------------------

REFUSED = [
    ({"momentum": 0.9}, "local.momentum: found 0.9, allowed: 0, as control variates are made for plain SGD"),
    (
        {"optimizer": "adam"},
        "local.optimizer: found 'adam', allowed: 'sgd', as control variates are made for plain SGD",
    ),
    (
        {"max_grad_norm": 1.0},
        "local.max_grad_norm: found 1.0, allowed: none, as control variates are made for plain SGD",
    ),
]


@pytest.mark.parametrize(("local", "line"), REFUSED, ids=lambda v: str(v)[:20])
def test_what_variates_are_not_made_for_is_one_clear_line(local, line):
    with pytest.raises(FedtideError, match=f"^{re.escape(line)}$"):
        scaffold(TASK, LocalTrainer(**local))
    experiment = study({**A, "name": "mine", "algorithm": "scaffold", "local": local})
    with pytest.raises(FedtideError, match=f"^{re.escape(f'method {chr(39)}mine{chr(39)}.{line}')}$"):
        preflight(experiment)


def test_weight_decay_and_schedules_are_allowed():
    """With one full step a variate is the gradient where it was taken, however long the step was."""
    falling = LocalTrainer(lr=0.5, batch_size=0, lr_schedule=Exponential(0.5), weight_decay=0.1)
    one, two = (after(scaffold(TASK, falling, variant=v, cohort=Everyone()), start(), rounds=4) for v in ("I", "II"))
    assert value(one) == pytest.approx(value(two), abs=1e-12)
    assert control(one) == pytest.approx(control(two), abs=1e-12)


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_variates_are_of_parameters_alone_and_running_statistics_are_plain_means():
    """Client by client from the same key, what each made of the running statistics, equally weighted."""
    experiment = toy(
        "scaffold", {"cohort": {"kind": "everyone"}}, model="python:helpers.toys:normed", shift={"who": "always"}
    )
    run = played(experiment, rounds=1)
    received, state = run.steps[0].received, run.state
    assert set(state.control) == set(received.weights.params)
    assert set(state.weights.buffers) == {"1.running_mean", "1.running_var"}
    task, population = Task(lambda: normed((4,), 3)), run.host.population
    made = []
    for client in population.clients.tolist():
        solver, key = LocalTrainer(0.1, batch_size=4), Rng(0).at(0, client, "train")
        fitted = solver(task, task.loss, received.weights, population.shard(client, NOW), NOW, key)
        made.append(detached(fitted.weights.buffers))
    for name, mean in state.weights.buffers.items():
        torch.testing.assert_close(mean, torch.stack([own[name] for own in made]).mean(0))


# -- the extra pass of option I ----------------------------------------------------------------------------------------


def by_autograd(task: Task, weights, shard: Shard) -> list[torch.Tensor]:
    module = task.build().to(task.dtype)
    module.load_state_dict(weights.params | weights.buffers, strict=False)
    loss = task.loss.value(module(shard.x), shard.y, *task.loss.prepare(shard))
    return list(torch.autograd.grad(loss, list(module.parameters())))


@pytest.mark.parametrize("rows", [3, 4, 10_000])
@pytest.mark.parametrize("loss", [CrossEntropy(), WSM(blend=0.0)], ids=LOSSES)
def test_it_is_the_gradient_of_all_rows_however_many_are_passed_at_once(loss, rows, monkeypatch):
    monkeypatch.setattr("fedtide.learn.task.ROWS", rows)
    task = Task(lambda: nn.Linear(3, 4), loss, torch.float64)
    draw = torch.Generator().manual_seed(0)
    shard = Shard(torch.randn(7, 3, generator=draw).double(), torch.tensor([0, 0, 1, 2, 0, 1, 2]), torch.arange(7))
    weights = task.init(Rng(0))
    before = detached(weights)
    found, value = task.gradient(weights, shard)
    for g, expected in zip(found.values(), by_autograd(task, weights, shard), strict=True):
        torch.testing.assert_close(g, expected, rtol=1e-12, atol=1e-14)
    assert value == pytest.approx(task.objective(weights, shard), rel=1e-12)
    assert same(weights, before)


def test_dropout_and_running_statistics_of_the_extra_pass_do_not_reach_the_model():
    def build():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))

    shard = Shard(torch.randn(9, 4), torch.arange(9) % 3, torch.arange(9))
    updates = []
    for variant in ("I", "II"):
        task = Task(build)
        weights = task.init(Rng(0))
        payload = Sent(weights, {name: torch.zeros_like(p) for name, p in weights.params.items()})
        torch.manual_seed(0)
        answer = scaffold(task, LocalTrainer(0.1, batch_size=3), variant).works["train"](payload, None, shard, NOW, KEY)
        updates.append(detached(answer.total["delta"].value))
    assert same(*updates)
