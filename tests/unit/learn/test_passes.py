"""Gradients of a module by its layers are those of autograd: every layer, loss, branch and batch."""

import pytest
import torch
from torch import nn

from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.fast import passes
from fedtide.learn.fast.passes import ModulePasses
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import WSM, Blended, CrossEntropy, FedLC, Masked, as_loss, refuse_mean_loss
from fedtide.learn.stack import unstackable
from fedtide.learn.steps import Train, row_losses
from fedtide.learn.target import LabelsTarget, NumberTarget
from fedtide.learn.task import Task, with_branches
from fedtide.mixtures.branches import BranchLoss
from fedtide.models.branched import branched
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
    made = None if made is None else (made[0], [each.clone() for each in made[1]])
    value = loss.value(task.scratch.module(x), shard.y, shared, columns)
    gradient = torch.autograd.grad(value, task.scratch.params, allow_unused=True, materialize_grads=True)
    return made, (value.detach(), list(gradient))


def assert_equal(made, wanted):
    assert made is not None
    torch.testing.assert_close(made, wanted, rtol=1e-10, atol=1e-12)


LOSSES = {
    "cross-entropy": CrossEntropy(),
    "wsm": WSM(),
    "fedlc": FedLC(),
    "masked": Masked(),
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


RELU_FIRST = {
    "pictures": lambda: nn.Sequential(
        nn.ReLU(), nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(429, 3)
    ),
    "flattened": lambda: nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(286, 3)),
    "twice": lambda: nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Flatten(), nn.Linear(286, 3)),
}  # fmt: skip


@pytest.mark.parametrize("model", RELU_FIRST)
@pytest.mark.parametrize("copies", [0, 1, 3])
def test_a_model_that_begins_with_a_relu_leaves_rows_as_they_are(model, copies):
    task = Task(RELU_FIRST[model], dtype=torch.float64)
    task = with_branches(task, "*", copies) if copies else task
    shard = batch(5)
    before = shard.x.clone()
    assert_equal(*both(task, BranchLoss(task.loss, 0, 0.3) if copies else task.loss, shard))
    assert torch.equal(shard.x, before)
    models = [Task(RELU_FIRST[model], dtype=torch.float64).init(Rng(k)) for k in range(3)]
    plain = Task(RELU_FIRST[model], dtype=torch.float64)
    wanted = torch.stack([plain.row_losses(each, shard.x, shard.y) for each in models])
    torch.testing.assert_close(row_losses(plain, models, shard), wanted)
    assert plain.scratch.compared is not None


@pytest.mark.parametrize("model", ["dense", "lenet"])
@pytest.mark.parametrize("layer", ["last", "*"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("base", ["cross-entropy", "wsm", "masked", "own"])
def test_branches_and_whole_copies(model, layer, count, base):
    task = with_branches(Task(MODELS[model], dtype=torch.float64), first_of(model) if layer == "last" else "*", count)
    shard, base = batch(6), LOSSES[base]
    q = torch.rand(6, count, dtype=torch.float64).softmax(1)
    rows = torch.arange(6) % count
    for loss in (BranchLoss(base, count - 1, 0.3, 0.2), BranchLoss(base, rows, 0.3, 0.2), Blended(q, base)):
        assert_equal(*both(task, loss, shard))


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


@pytest.mark.parametrize("feature", ["shared", "branches"])
@pytest.mark.parametrize("layer", ["9", "*"])
def test_a_loss_may_read_features_without_a_gradient(layer, feature):
    class Looking(CrossEntropy):
        def value(self, outputs, y, shared, columns):
            logits, features = outputs
            places = torch.arange(features[0].numel()).view(features.shape[1:])  # in the module's order
            return super().value(logits[0], y, shared, columns) * (features.detach() * places).square().sum()

    for model in ("dense", "lenet") if layer == "*" else ("lenet",):
        task = Task(lambda model=model: branched(MODELS[model](), layer, 2, feature), dtype=torch.float64)
        assert_equal(*both(task, Looking(), batch(6)))


def test_a_loss_that_reads_parameters_is_left_to_autograd():
    net = MODELS["dense"]()
    task = Task(lambda: net, dtype=torch.float64)
    loss = as_loss(lambda outputs, y: outputs.square().mean() + sum(p.square().sum() for p in net.parameters()))
    made, wanted = both(task, loss, batch(4))
    assert made is None
    torch.testing.assert_close(task.differentiate(loss, batch(4).x, batch(4).y, None, ()), wanted)


def test_a_loss_that_was_left_to_autograd_has_the_bits_of_one_that_was_not():
    """A run that is resumed knows of no earlier batch."""
    net, pulled = MODELS["dense"](), [True]
    task = Task(lambda: net, dtype=torch.float64)
    loss = as_loss(lambda outputs, y: outputs.square().mean() + (net[1].bias.sum() if pulled[0] else 0.0))
    assert both(task, loss, batch(4))[0] is None
    pulled[0] = False
    after, fresh = both(task, loss, batch(4))[0], both(Task(lambda: net, dtype=torch.float64), loss, batch(4))[0]
    assert after is not None
    assert same(after, fresh)


@pytest.mark.parametrize("rows", [6, 3])
def test_a_loss_may_use_the_task_that_is_trained(rows):
    task, other = Task(MODELS["lenet"], dtype=torch.float64), batch(rows, draw=1)

    def value(outputs, y):
        beside, gradient = task.differentiate(task.loss, other.x, other.y, None, ())
        return nn.functional.cross_entropy(outputs, y) * (beside + gradient[0].sum())

    assert_equal(*both(task, as_loss(value), batch(6)))
    teacher = task.init(Rng(1))
    taught = as_loss(lambda outputs, y: (outputs - task.logits(teacher, batch(6).x)).square().mean())
    with pytest.raises(FedtideError, match="give it a second Task"):
        task.differentiate(taught, batch(6).x, batch(6).y, None, ())
    assert_equal(*both(task, task.loss, batch(6)))


class Tempered(CrossEntropy):
    """A loss that says anew what the loss of each label is, and no more."""

    def each(self, outputs, y, shared, eps=0.0):
        return super().each(outputs / 3, y, shared, eps)


class Doubled(CrossEntropy):
    """A loss that says anew what its value is, and no more."""

    def value(self, outputs, y, shared, columns):
        return 2 * super().value(outputs, y, shared, columns)


def test_what_a_loss_has_inherited_is_not_its_own():
    task = Task(MODELS["dense"], Doubled(), dtype=torch.float64)
    assert_equal(*both(task, task.loss, batch(6)))
    assert "its loss has no per-row form" in unstackable(
        Train(task, LocalTrainer(), task.init(Rng(0)), batch(6), Moment(0, 1), Rng(0))
    )
    assert BranchLoss(task.loss, 0).graded is None
    assert BranchLoss(task.loss, 0).alike is None
    assert Blended(torch.ones(6, 1), task.loss).graded is None
    with pytest.raises(FedtideError, match="as FedEM weights samples"):
        refuse_mean_loss(task.loss, "FedEM weights samples")


@pytest.mark.parametrize("layer", ["3", "*"])
def test_the_loss_of_each_label_may_be_its_own(layer):
    task, q = with_branches(Task(MODELS["dense"], dtype=torch.float64), layer, 2), torch.full((6, 2), 0.5)
    for loss in (Blended(q, Tempered()), BranchLoss(Tempered(), 0, 0.5)):
        assert_equal(*both(task, loss, batch(6)))


def test_branches_that_nobody_trains_may_have_diverged():
    task = with_branches(Task(MODELS["dense"], dtype=torch.float64), "*", 2)
    weights = task.init(Rng(0))
    for name, each in weights.params.items():
        if ".copies.1." in name:
            each.fill_(torch.nan)
    task.scratch.load(weights, train=True)
    loss, shard = BranchLoss(CrossEntropy(), 0), batch(6)
    value, gradient = task.differentiate(loss, shard.x, shard.y, *loss.prepare(shard))
    assert value.isfinite()
    own = [each for name, each in zip(task.scratch.names, gradient, strict=True) if ".copies.0." in name]
    assert all(each.isfinite().all() for each in own)


@pytest.mark.parametrize("labels", [
    torch.tensor([0, -100, 2, 1]), torch.tensor([0, 1, 2, 1], dtype=torch.uint8),
    torch.tensor([[0.5, 0.5, 0.0]] * 4, dtype=torch.float64),
], ids=["left out", "bytes", "shares"])  # fmt: skip
def test_labels_that_torch_knows(labels):
    task = Task(MODELS["dense"], dtype=torch.float64)
    loss = as_loss(nn.CrossEntropyLoss()) if labels.is_floating_point() else task.loss
    assert_equal(*both(task, loss, Shard(batch(4).x, labels, torch.arange(4))))
    with pytest.raises(IndexError):
        task.differentiate(task.loss, batch(4).x, torch.tensor([0, 1, 2, 3]), None, ())


LOOSE = {
    "writes to outputs": lambda outputs, y: nn.functional.cross_entropy(outputs.div_(2.0), y),
    "returns an output": lambda outputs, y: outputs[0, 0],
    "views outputs": lambda outputs, y: outputs.view(-1).square().sum(),
}


@pytest.mark.parametrize("how", LOOSE)
def test_a_loss_may_do_with_outputs_as_it_likes(how):
    task = Task(MODELS["dense"], dtype=torch.float64)
    assert_equal(*both(task, as_loss(LOOSE[how]), batch(6)))
    told, _ = task.differentiate(as_loss(LOOSE[how]), batch(6).x, batch(6).y, None, ())
    value = told.clone()
    assert_equal(*both(task, as_loss(LOOSE[how]), batch(6, draw=1)))
    assert torch.equal(told, value)  # it is of no storage that the next pass overwrites
    task = with_branches(Task(MODELS["dense"], dtype=torch.float64), first_of("dense"), 2)
    assert_equal(*both(task, as_loss(lambda outputs, y: outputs[0].view(-1).square().sum()), batch(6)))


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
    assert ModulePasses.of(task.scratch, SHAPE) is None
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
