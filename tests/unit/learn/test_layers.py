"""Products of matrices with rows innermost train as the modules do: every layer, padding, strides, ties, steps."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedtide.core.base import Moment, Shard
from fedtide.core.rng import Rng
from fedtide.core.trees import map_leaves
from fedtide.learn.fast.layers import known_layers
from fedtide.learn.fast.stacks import FuncStack, LayerStack, stack_copies
from fedtide.learn.layers import freeze_layers, freeze_weights
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import WSM, CrossEntropy
from fedtide.learn.stack import train_stacked
from fedtide.learn.steps import Train
from fedtide.learn.task import Task, with_branches
from fedtide.learn.terms import Correction, Proximal
from fedtide.mixtures.branches import BranchLoss

NOW = Moment(0, 1)
SHAPE = (2, 13, 11)

MODELS = {
    "dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(286, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)),
    "lenet": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3),
    ),
    "strides": lambda: nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(2, 3), bias=False), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=(1, 0)), nn.ReLU(),
        nn.Flatten(), nn.Linear(48, 3),
    ),
    "far": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 5, stride=(3, 2)), nn.ReLU(), nn.Conv2d(3, 4, 2, stride=3), nn.Flatten(), nn.Linear(4, 3)
    ),
    "pool first": lambda: nn.Sequential(
        nn.MaxPool2d(2), nn.ReLU(), nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.MaxPool2d(2)), nn.Flatten(),
        nn.Linear(18, 3),
    ),
    "neighbors": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding="valid"), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(40, 3),
    ),
}  # fmt: skip

SETTINGS = {
    "one epoch": {},
    "steps": {"local_steps": 5},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01, "epochs": 2},
    "clipped": {"max_grad_norm": 0.05},
    "adam": {"optimizer": "adam"},
}


class Squared:
    """A person's own loss, by what `StackedLoss` asks for and no more."""

    def prepare(self, shard):
        return None, ()

    def value(self, outputs, y, shared, columns):
        return self.each(outputs, y, shared).mean()

    def each(self, outputs, y, shared, eps=0.0):
        wanted = (1 - eps) * (y[..., None] == torch.arange(3)) + eps / 3
        return (outputs.softmax(-1) - wanted).square().sum(-1)

    def stacked(self, shared):
        return None


def some_shards(ties=False):
    draw = torch.Generator().manual_seed(0)
    for rows in (9, 8, 3):
        x = torch.randn(rows, *SHAPE, generator=draw, dtype=torch.float64)
        yield Shard(x.round() if ties else x, torch.arange(rows) % 3, torch.arange(rows))


def stack_of(task, loss=None):
    return stack_copies(task.scratch, loss or task.loss, SHAPE)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", [*SETTINGS, "proximal", "correction", "wsm"])
def test_clients_are_trained_as_alone(model, case):
    loss = WSM(blend=0.0) if case == "wsm" else CrossEntropy()
    task, local = (
        Task(MODELS[model], loss, dtype=torch.float64),
        LocalTrainer(lr=0.1, batch_size=4, **SETTINGS.get(case, {})),
    )
    shards, one, other = list(some_shards(ties=True)), task.init(Rng(0)), task.init(Rng(1))
    rngs = [Rng(0).at(i) for i in range(3)]
    shards[1] = replace(shards[1], y=shards[1].y % 2)  # a client without a class
    by = [torch.randn_like(each) for each in task.scratch.values]
    term = {"proximal": Proximal(0.5), "correction": Correction(by)}.get(case)
    made = stack_of(task)
    assert isinstance(made, LayerStack)
    for received in ([one] * 3, [one, other, one]):  # the second time in storage that was used
        given = zip(received, shards, rngs, strict=True)
        fit = train_stacked(made, [Train(task, local, weights, shard, NOW, rng, term) for weights, shard, rng in given])
        for client, (weights, shard, rng) in enumerate(zip(received, shards, rngs, strict=True)):
            alone = local(task, task.loss, weights, shard, NOW, rng, term=term)
            assert fit.loss[client] == pytest.approx(alone.loss, abs=1e-9)
            assert list(fit.delta.params) == list(alone.delta.params)
            for name, change in alone.delta.params.items():
                torch.testing.assert_close(fit.delta.params[name][client], change, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("place", [0, -1])
def test_layers_that_are_frozen_stay_and_others_are_trained_as_by_torch(model, place):
    task = Task(MODELS[model], dtype=torch.float64)
    layer = task.scratch.names[place].rpartition(".")[0]
    frozen = freeze_layers(task, lambda name: name.startswith(f"{layer}."))
    local = LocalTrainer(lr=0.1, batch_size=4, epochs=2, momentum=0.5, weight_decay=0.01)
    starts = [freeze_weights(task.init(Rng(k)), lambda name: name.startswith(f"{layer}.")) for k in range(3)]
    requests = [
        Train(frozen, local, weights, shard, NOW, Rng(0).at(client))
        for client, (weights, shard) in enumerate(zip(starts, some_shards(ties=True), strict=True))
    ]
    fast = stack_of(frozen)
    assert isinstance(fast, LayerStack)
    fits = [map_leaves(torch.clone, train_stacked(stack, requests).delta)
            for stack in (fast, FuncStack(frozen.scratch, frozen.loss))]  # fmt: skip
    for client, request in enumerate(requests):
        alone = request.run_single().delta
        for fit in fits:
            for one, other in ((fit.params, alone.params), (fit.buffers, alone.buffers)):
                assert one.keys() == other.keys()
                for name, change in other.items():
                    torch.testing.assert_close(one[name][client], change, rtol=1e-9, atol=1e-9)
        assert alone.buffers
        assert not any(bool(change.any()) for change in alone.buffers.values())


@pytest.mark.filterwarnings("ignore:Using padding")
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 2, 3, dilation=2), nn.Conv2d(2, 2, 3, groups=2), nn.Conv2d(2, 2, 2, padding="same"),
        nn.Conv2d(2, 2, 3, padding_mode="circular", padding=1),
        nn.MaxPool2d(3), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, stride=1),
        nn.Linear(11, 2), nn.Tanh(), nn.BatchNorm2d(2), nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3)),
    ],
    ids=repr,
)  # fmt: skip
def test_other_layers_are_trained_as_copies_of_the_module(layer):
    def build():
        features = nn.Sequential(copy.deepcopy(layer), nn.Flatten())
        return nn.Sequential(features, nn.Linear(features(torch.zeros(2, *SHAPE)).shape[1], 3))

    task, local = Task(build, dtype=torch.float64), LocalTrainer(lr=0.1, batch_size=4, epochs=2)
    weights, stack = task.init(Rng(0)), stack_of(task)
    assert isinstance(stack, FuncStack)
    requests = [
        Train(task, local, weights, shard, NOW, Rng(0).at(client)) for client, shard in enumerate(some_shards())
    ]
    fit = train_stacked(stack, requests).delta
    for client, request in enumerate(requests):
        alone = request.run_single().delta
        for ours, theirs in ((fit.params, alone.params), (fit.buffers, alone.buffers)):
            assert ours.keys() == theirs.keys()
            for name, change in theirs.items():
                torch.testing.assert_close(ours[name][client], change, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("layer", "base", "kind"),
    [
        ("6", CrossEntropy(), LayerStack), ("6", WSM(), LayerStack), ("6", WSM(blend=0.0), LayerStack),
        ("4", CrossEntropy(), FuncStack), ("0", CrossEntropy(), FuncStack), ("*", WSM(), LayerStack),
        ("6", Squared(), FuncStack),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("count", "lam", "eps"), [(1, 0.25, 0.5), (2, 0.25, 0.5), (3, 0.5, 0.0), (3, 0.0, 0.5)])
def test_clients_that_train_branches_are_trained_as_alone(layer, base, kind, count, lam, eps):
    rows, case = count == 3, "momentum" if count == 2 else "one epoch"

    def build():
        return nn.Sequential(
            nn.Conv2d(2, 3, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(90, 4), nn.ReLU(),
            nn.Linear(4, 3, bias=lam > 0),
        )  # fmt: skip

    task, local = Task(build, base, dtype=torch.float64), LocalTrainer(lr=0.1, batch_size=4, **SETTINGS[case])
    task = with_branches(task, layer, count)
    shards, weights, rngs = list(some_shards(ties=True)), task.init(Rng(0)), [Rng(0).at(i) for i in range(3)]
    choices = [torch.arange(k, k + len(shard)) % count if rows else k % count for k, shard in enumerate(shards, 1)]
    losses = [BranchLoss(task.loss, k, lam, eps) for k in choices]
    assert len({each.alike for each in losses}) == 1
    made = stack_of(task, losses[0])
    assert isinstance(made, kind)
    for _ in range(2):
        given = zip(shards, rngs, losses, strict=True)
        fit = train_stacked(made, [Train(task, local, weights, *one, NOW, rng, loss=loss) for *one, rng, loss in given])
        for client, (shard, rng, loss) in enumerate(zip(shards, rngs, losses, strict=True)):
            alone = local(task, loss, weights, shard, NOW, rng)
            assert fit.loss[client] == pytest.approx(alone.loss, abs=1e-9)
            assert list(fit.delta.params) == list(alone.delta.params)
            for name, change in alone.delta.params.items():
                torch.testing.assert_close(fit.delta.params[name][client], change, rtol=1e-9, atol=1e-9)


def test_a_layer_that_is_used_twice_or_looked_at_is_left_to_torch():
    twice, watched = nn.Linear(286, 286), nn.Linear(286, 3)
    watched.register_forward_hook(lambda *given: None)
    whole = nn.Sequential(nn.Flatten(), nn.Linear(286, 3))
    whole.register_forward_hook(lambda *given: None)
    before, masked, changed = (nn.Sequential(nn.Flatten(), nn.Linear(286, 3)) for _ in range(3))
    before.register_full_backward_pre_hook(lambda *given: None)
    masked[1].weight.register_hook(torch.zeros_like)
    changed[1].forward = lambda x: x[:, :3]

    class Halves(nn.Flatten):
        def forward(self, x):
            return super().forward(x) / 2

    for build in (
        lambda: before,
        lambda: masked,
        lambda: changed,
        lambda: nn.Sequential(Halves(), nn.Linear(286, 3)),
        lambda: nn.Sequential(nn.Flatten(), twice, nn.ReLU(), twice, nn.Linear(286, 3)),
        lambda: nn.Sequential(nn.Flatten(), watched),
        lambda: nn.Sequential(whole),
        lambda: nn.Sequential(nn.Flatten()),
    ):
        assert isinstance(stack_of(Task(build)), FuncStack)
    hook = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        assert isinstance(stack_of(Task(MODELS["dense"])), FuncStack)
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Conv2d(3, 2, 3, padding=1), nn.Flatten(), nn.Linear(24, 2)], (1, 3, 4)),
        ([nn.Conv2d(1, 2, 5), nn.Flatten(), nn.Linear(24, 2)], (1, 9, 4)),
        ([nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 2)], (1, 3, 6)),
        ([nn.Flatten(), nn.Linear(24, 2)], (1, 3, 4)),
    ],
    ids=["channels", "kernel", "pool", "inputs"],
)
def test_rows_that_do_not_fit_are_left_to_torch_which_says_so(layers, shape):
    assert known_layers(Task(lambda: nn.Sequential(*layers)).scratch, shape) is None


def test_bytes_of_a_row_are_those_of_what_is_computed():
    """A 3 x 3 kernel on 8 x 9 and a pool: 6 x 6 outputs of 6 x 7, from eight lines of 3 x 6 numbers and ones."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 2))
    (convolution, *_), room = known_layers(Task(lambda: model).scratch, (1, 8, 9))
    assert {key[1]: held.numel() for key, held in room._held.items() if key[0] is convolution} == {
        "padded": 72,
        "x": 192,
        "y": 72,
    }
