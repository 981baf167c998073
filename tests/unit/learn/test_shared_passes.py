"""Models that are judged side by side: the losses are those that each has by itself."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedtide.core.base import Shard
from fedtide.core.rng import Rng
from fedtide.learn import steps as judging
from fedtide.learn.steps import Losses, mean_losses
from fedtide.learn.target import CountTarget, LabelsTarget, NumberTarget, QuantileTarget
from fedtide.learn.task import ROWS, Task


def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))


def convolution():
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2, 3))


def channels():
    return nn.Sequential(nn.Conv2d(1, 17, 3), nn.ReLU(), nn.Flatten(), nn.Linear(34, 3))


def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def client(rows):
    draw = torch.Generator().manual_seed(rows)
    return Shard(torch.rand(rows, 1, 3, 4, generator=draw), torch.arange(rows) % 3, torch.arange(rows))


def one_by_one(task, models, shard):
    return torch.stack([task.losses(model, shard).double().mean() for model in models])


@pytest.mark.parametrize("rows", [1, 7, ROWS + 3])
@pytest.mark.parametrize("build", [dense, convolution])
@pytest.mark.parametrize("held", [1, 1000, judging.PASS_BYTES])
def test_losses_of_models_side_by_side_are_those_of_each(build, rows, held, monkeypatch):
    monkeypatch.setattr(judging, "PASS_BYTES", held)
    task, shard = Task(build), client(rows)
    models = [task.init(Rng(k)) for k in range(3)]
    found = mean_losses(task, models, shard)
    assert task.scratch.compared is not None
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, one_by_one(task, models, shard), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "target",
    [
        NumberTarget(2.0, 3.0, (0.0,)),
        NumberTarget(2.0, 3.0, (0.0,), form="gaussian"),
        QuantileTarget(2.0, 3.0, (0.0, 1.0), at=(0.2, 0.7)),
        CountTarget(2.0, 3.0, (0.0,)),
        LabelsTarget(4),
    ],
)
def test_losses_of_rows_without_classes_are_taken_side_by_side(target):
    task = Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, target.width)), target=target)
    labels = torch.arange(28).reshape(7, 4) % 2 if isinstance(target, LabelsTarget) else torch.arange(7)
    shard = replace(client(7), y=labels.float())
    models = [task.init(Rng(k)) for k in range(3)]
    found = mean_losses(task, models, shard)
    assert task.scratch.compared is not None
    torch.testing.assert_close(found, one_by_one(task, models, shard), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("build", [channels, normed])
def test_other_models_are_judged_one_by_one(build):
    task, shard = Task(build), client(6)
    models = [task.init(Rng(k)) for k in range(2)]
    torch.testing.assert_close(mean_losses(task, models, shard), one_by_one(task, models, shard), rtol=1e-6, atol=1e-6)
    assert task.scratch.compared is None


def test_models_are_held_until_others_are_judged_or_their_numbers_change():
    task, shard = Task(dense), client(5)
    models = [task.init(Rng(k)) for k in range(2)]
    before, held = mean_losses(task, models, shard), task.scratch.compared
    mean_losses(task, tuple(models), client(3))
    assert task.scratch.compared is held
    models[1].params["3.bias"].add_(torch.tensor([1.0, 0.0, 0.0]))
    after = mean_losses(task, models, shard)
    assert after[0] == before[0]
    torch.testing.assert_close(after, one_by_one(task, models, shard), rtol=1e-6, atol=1e-6)
    assert mean_losses(task, models[::-1], shard).tolist() == after.flip(0).tolist()


def test_a_model_whose_loss_is_not_finite_spoils_no_other():
    task, shard = Task(dense), client(5)
    models = [task.init(Rng(k)) for k in range(2)]
    models[0].params["1.weight"].fill_(torch.nan)
    found = mean_losses(task, models, shard)
    assert found[0] == torch.inf
    assert found[1].isfinite()


def test_models_that_do_not_tell_of_changes_are_judged_one_by_one():
    task = Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    with torch.inference_mode():
        models = [task.init(Rng(k)) for k in range(2)]
    shard = client(4)
    torch.testing.assert_close(mean_losses(task, models, shard), one_by_one(task, models, shard))
    assert task.scratch.compared is None


def test_sequences_without_a_mask_have_one_mean():
    task, rows = Task(lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))), torch.arange(42).reshape(6, 7) % 5
    shard = Shard(rows, rows.roll(1, 1), torch.arange(6))
    models = [task.init(Rng(k)) for k in range(2)]
    alone, (together, _) = (
        mean_losses(task, models, shard),
        Losses(task, models, shard).run_batched([Losses(task, models, shard)] * 2),
    )
    assert alone.shape == (2,)
    torch.testing.assert_close(alone, together)
    torch.testing.assert_close(alone, one_by_one(task, models, shard), rtol=1e-6, atol=1e-6)
