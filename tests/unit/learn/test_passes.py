"""Gradients of a module by its layers are those of autograd: every layer, loss, branch and batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedtide.core.rng import Rng
from fedtide.core.types import Moment, Shard
from fedtide.learn import passes
from fedtide.learn.local import LocalTrainer
from fedtide.learn.loss import CrossEntropy, as_loss
from fedtide.learn.passes import ModulePasses
from fedtide.learn.target import LabelsTarget, NumberTarget
from fedtide.learn.task import Task
from fedtide.learn.wsm import WSM
from fedtide.models.branched import Averaged, branched
from fedtide.multi.branches import BranchLoss, with_branches
from fedtide.multi.mixture_loss import Blended
from unit.learn.test_layers import MODELS, SHAPE, Squared


def batch(rows, draw=0, dtype=torch.float64):
    x = torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(draw), dtype=torch.float64)
    return Shard(x.round().to(dtype), torch.arange(rows) % 3, torch.arange(rows))  # with ties


def both(task, loss, shard):
    """Loss and gradient without autograd, and by it; the first is None where autograd was needed."""
    task.scratch.load(task.init(Rng(0)), train=True)
    shared, columns = loss.prepare(shard)
    x = task.inputs(shard.x)
    found = task._passes(x)
    made = None if found is None else found(loss, x, shard.y, shared, columns)
    value = loss.value(task.scratch.module(x), shard.y, shared, columns)
    gradient = torch.autograd.grad(value, task.scratch.params, allow_unused=True, materialize_grads=True)
    return made, (value.detach(), list(gradient))


def assert_equal(made, wanted):
    assert made is not None
    torch.testing.assert_close(made, wanted, rtol=1e-10, atol=1e-12)


LOSSES = {
    "cross-entropy": CrossEntropy(),
    "wsm": WSM(),
    "torch": as_loss(nn.CrossEntropyLoss(label_smoothing=0.1)),
    "own": Squared(),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_batch(model, loss, channels_last):
    task = Task(MODELS[model], dtype=torch.float64, channels_last=channels_last)
    for draw, rows in enumerate((7, 3, 1, 7)):  # shapes take turns in one storage
        assert_equal(*both(task, LOSSES[loss], batch(rows, draw)))


def first_of(model):
    """A sequence that ends in a dense layer, as the name of that layer has it."""
    return str(len(MODELS[model]()) - 1)


@pytest.mark.parametrize("model", ["dense", "lenet"])
@pytest.mark.parametrize("layer", ["last", "*"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("base", ["cross-entropy", "wsm", "own"])
def test_branches_and_whole_copies(model, layer, count, base):
    task = with_branches(Task(MODELS[model], dtype=torch.float64), first_of(model) if layer == "last" else "*", count)
    shard, base = batch(6), LOSSES[base]
    q = torch.rand(6, count, dtype=torch.float64).softmax(1)
    rows = torch.arange(6) % count
    for loss in (BranchLoss(base, count - 1, 0.3, 0.2), BranchLoss(base, rows, 0.3, 0.2), Blended(q, base)):
        assert_equal(*both(task, loss, shard))


@pytest.mark.parametrize("model", ["dense", "lenet"])
def test_averaged_branches(model):
    task = Task(lambda: Averaged(branched(MODELS[model](), first_of(model), 3)), dtype=torch.float64)
    for loss in LOSSES.values():
        assert_equal(*both(task, loss, batch(6)))


def test_targets_that_are_no_classes():
    shard = batch(6)
    numbers = NumberTarget(0.5, 2.0, (0.5,))
    labels = LabelsTarget(3)
    for target, y in ((numbers, torch.randn(6, dtype=torch.float64)), (labels, torch.rand(6, 3).round().double())):
        width = target.width or 3
        task = Task(
            lambda width=width: nn.Sequential(nn.Flatten(), nn.Linear(286, 4), nn.ReLU(), nn.Linear(4, width)),
            dtype=torch.float64, target=target,
        )  # fmt: skip
        assert_equal(*both(task, task.loss, Shard(shard.x, y, shard.ids)))


class Pulled(CrossEntropy):
    """A loss that reads the features of a branched model."""

    def value(self, outputs, y, shared, columns):
        logits, features = outputs
        return super().value(logits[0], y, shared, columns) + features.square().mean()

    graded = None


@pytest.mark.parametrize("layer", ["9", "*"])
def test_a_loss_that_reads_features_is_left_to_autograd(layer):
    task = with_branches(Task(MODELS["dense" if layer == "*" else "lenet"], dtype=torch.float64), layer, 2)
    made, wanted = both(task, Pulled(), batch(6))
    assert made is None
    shard = batch(6)
    torch.testing.assert_close(task.differentiate(Pulled(), shard.x, shard.y, None, ()), wanted)


def test_a_loss_that_reads_nothing_has_no_gradient():
    task = Task(MODELS["dense"], dtype=torch.float64)
    made, wanted = both(task, as_loss(lambda outputs, y: outputs.sum() * 0 + 2.0), batch(4))
    assert_equal(made, wanted)
    task.scratch.load(task.init(Rng(0)), train=True)
    constant = torch.ones((), dtype=torch.float64, requires_grad=True)
    value, gradient = task.differentiate(as_loss(lambda outputs, y: constant * 2), batch(4).x, batch(4).y, None, ())
    assert value == 2
    assert not any(each.any() for each in gradient)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Conv2d(2, 17, 3), nn.ReLU(), nn.Flatten(), nn.Linear(17 * 99, 3)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(286, 4), nn.Dropout(0.5), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(286, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
    ],
    ids=["wide", "dropout", "batch norm"],
)
def test_other_networks_are_left_to_autograd(build):
    task = Task(build, dtype=torch.float64)
    assert ModulePasses.of(task, SHAPE) is None
    assert both(task, task.loss, batch(4))[0] is None


def test_what_is_left_to_autograd(monkeypatch):
    task = Task(MODELS["lenet"])
    shard = batch(4, dtype=torch.float32)
    assert task._passes(shard.x) is not None
    assert task._passes(shard.x[:0]) is None
    assert task._passes(shard.x.double()) is None
    assert Task(MODELS["lenet"], device="meta")._passes(shard.x) is None
    assert Task(MODELS["lenet"], device="cpu:0")._passes(shard.x) is not None
    monkeypatch.setattr(passes, "MOST_BYTES", 3 * task.scratch.passes[SHAPE].stack.row_bytes)
    few = Task(MODELS["lenet"])
    assert few._passes(shard.x[:3]) is not None
    assert few._passes(shard.x) is None


def test_rows_are_left_as_they_are():
    task = Task(lambda: nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(286, 3)), dtype=torch.float64)
    shard = batch(5)
    before = shard.x.clone()
    assert_equal(*both(task, task.loss, shard))
    assert torch.equal(shard.x, before)


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"max_grad_norm": 0.05}, {"optimizer": "adam"}], ids=str
)
@pytest.mark.parametrize("model", MODELS)
def test_training_is_that_by_autograd(model, settings):
    task, local = Task(MODELS[model], dtype=torch.float64), LocalTrainer(lr=0.1, batch_size=4, epochs=2, **settings)
    shard, begun = batch(10), Task(MODELS[model], dtype=torch.float64).init(Rng(0))

    def trained():
        fitted = local(task, task.loss, begun, shard, Moment(0, 1), Rng(1))
        return fitted.loss, {name: each.clone() for name, each in fitted.delta.params.items()}

    found = trained()
    task.scratch.passes[SHAPE] = None
    torch.testing.assert_close(found, trained(), rtol=1e-9, atol=1e-10)
