"""The local solver against optimizers written out, and its choices: epochs, steps, batches, what it leaves alone."""

import math
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, same
from fedtide.core.weights import sub
from fedtide.learn.local import LocalOptimizer, LocalTrainer, clip
from fedtide.learn.losses import CrossEntropy
from fedtide.learn.schedules import Exponential
from fedtide.learn.task import Task
from fedtide.learn.terms import Proximal
from helpers.examples import examples

law = examples(25)
KEY = Rng(0).at(0, 3, "train")
NOW = Moment(0, 10)
LINEAR = Task(lambda: nn.Linear(3, 2), dtype=torch.float64)
NORMED = Task(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), dtype=torch.float64)


def shard(rows: int, seed: int = 0) -> Shard:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=draw, dtype=torch.float64)
    return Shard(x, torch.arange(rows) % 2, torch.arange(rows))


@dataclass(frozen=True)
class Kept:
    """A copy of what was fitted, which the next training does not change."""

    weights: Weights
    delta: Weights
    loss: float
    steps: int
    lr_sum: float


def fit(solver: LocalTrainer, rows: Shard, task: Task = LINEAR, key: Rng = KEY, moment: Moment = NOW, **named: Any):
    start = task.init(Rng(1))
    fitted = solver(task, task.loss, start, rows, moment, key, **named)
    weights, delta = detached(fitted.weights), detached(fitted.delta)
    return start, Kept(weights, delta, fitted.loss, fitted.steps, fitted.lr_sum)


def orders(rows: int, epochs: int, key: Rng = KEY) -> list[list[int]]:
    """The shuffles of each epoch, from the same key."""
    draw = key.at("shuffle").torch()
    return [torch.randperm(rows, generator=draw).tolist() for _ in range(epochs)]


def batches(rows: int, batch: int, epochs: int) -> list[list[int]]:
    return [order[i : i + batch] for order in orders(rows, epochs) for i in range(0, rows, batch)]


def written_out(optimizer: Any, rows: Shard, plan: list[list[int]], task: Task = LINEAR) -> tuple[dict, float]:
    """The same training with a module and an optimizer of torch; parameters and mean loss."""
    module = task.build().to(task.dtype)
    start = task.init(Rng(1))
    module.load_state_dict(start.params | start.buffers, strict=False)
    stepper = optimizer(module.parameters())
    total = 0.0
    for picked in plan:
        stepper.zero_grad()
        loss = F.cross_entropy(module(rows.x[picked]), rows.y[picked])
        loss.backward()
        stepper.step()
        total += loss.item() * len(picked)
    state = {name: value for name, value in module.state_dict().items() if value.is_floating_point()}
    return state, total / sum(map(len, plan))


def agree(weights: Weights, expected: dict) -> None:
    for name, value in (weights.params | weights.buffers).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


# -- against torch.optim -----------------------------------------------------------------------------------------------

OPTIMISERS = {
    "momentum and decay": (
        {"momentum": 0.9, "weight_decay": 0.3},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.3),
    ),
    "adam": ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, lr=0.1)),
}


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize(("rows", "batch", "epochs"), [(7, 3, 2), (6, 0, 3), (4, 9, 1)])
def test_training_equals_an_optimizer_of_torch(name, rows, batch, epochs):
    options, optimizer = OPTIMISERS[name]
    held = shard(rows)
    _, fitted = fit(LocalTrainer(lr=0.1, batch_size=batch, epochs=epochs, **options), held)
    expected, loss = written_out(optimizer, held, batches(rows, batch or rows, epochs))
    agree(fitted.weights, expected)
    assert fitted.loss == pytest.approx(loss, rel=1e-12)


def test_batch_norm_statistics_move_as_in_torch():
    held = shard(8)
    start, fitted = fit(LocalTrainer(lr=0.1, batch_size=4, epochs=2), held, NORMED)
    expected, _ = written_out(lambda p: torch.optim.SGD(p, lr=0.1), held, batches(8, 4, 2), NORMED)
    agree(fitted.weights, expected)
    assert set(fitted.weights.buffers) == {"1.running_mean", "1.running_var"}
    assert not same(start.buffers, fitted.weights.buffers)


# -- epochs, steps, batches --------------------------------------------------------------------------------------------


def seen(solver: LocalTrainer, rows: int, task: Task = LINEAR) -> list[list[int]]:
    """The rows of each step, found out by a loss that is told every row's number."""
    taken: list[list[int]] = []

    class Telling(CrossEntropy):
        def prepare(self, shard):
            return None, (shard.ids,)

        def value(self, outputs, y, shared, columns):
            taken.append(columns[0].tolist())
            return F.cross_entropy(outputs, y)

    solver(task, Telling(), task.init(Rng(1)), shard(rows), NOW, KEY)
    return taken


@law
@given(st.integers(1, 12), st.integers(0, 13), st.integers(1, 3))
def test_every_epoch_sees_every_row_once_and_keeps_the_ragged_last_batch(rows, batch, epochs):
    taken = seen(LocalTrainer(batch_size=batch, epochs=epochs), rows)
    size = batch or rows
    per_epoch = math.ceil(rows / size)
    assert len(taken) == epochs * per_epoch
    assert taken == batches(rows, size, epochs)
    for e in range(epochs):
        epoch = taken[e * per_epoch : (e + 1) * per_epoch]
        assert sorted(row for taken_rows in epoch for row in taken_rows) == list(range(rows))


@law
@given(st.integers(1, 9), st.integers(0, 5), st.integers(1, 20))
def test_steps_count_batches_and_go_on_through_newly_shuffled_epochs(rows, batch, steps):
    taken = seen(LocalTrainer(batch_size=batch, local_steps=steps), rows)
    assert taken == batches(rows, batch or rows, 20)[:steps]


def test_the_loss_is_a_mean_over_rows_and_not_over_batches():
    """A rate of next to nothing: the mean over a ragged epoch is the loss of all rows together."""
    held = shard(7)
    start, fitted = fit(LocalTrainer(lr=1e-30, batch_size=3), held)
    expected = F.cross_entropy(held.x @ start.params["weight"].t() + start.params["bias"], held.y)
    assert fitted.loss == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    "solver", [LocalTrainer(), LocalTrainer(local_steps=5), LocalTrainer(batch_size=0), LocalTrainer(optimizer="adam")]
)
def test_an_empty_shard_leaves_the_weights_as_they_came(solver):
    start, fitted = fit(solver, shard(0))
    assert same(fitted.weights, start)
    assert (fitted.steps, fitted.lr_sum, fitted.loss) == (0, 0.0, 0.0)


def test_the_received_weights_and_the_rows_are_left_alone():
    task, held = NORMED, shard(6)
    start = task.init(Rng(1))
    before = detached((start, held.x, held.y, held.ids))
    LocalTrainer(lr=0.5, epochs=3, momentum=0.9)(task, task.loss, start, held, NOW, KEY)
    assert same(before, (start, held.x, held.y, held.ids))
    assert not start.params["0.weight"].requires_grad


# -- batch norm --------------------------------------------------------------------------------------------------------


def test_batch_norm_drops_a_last_batch_of_one():
    assert [len(batch) for batch in seen(LocalTrainer(batch_size=3), 7, NORMED)] == [3, 3]
    assert [len(batch) for batch in seen(LocalTrainer(batch_size=3), 7)] == [3, 3, 1]
    assert [len(batch) for batch in seen(LocalTrainer(batch_size=3, local_steps=5), 7, NORMED)] == [3] * 5
    assert [len(batch) for batch in seen(LocalTrainer(batch_size=3), 8, NORMED)] == [3, 3, 2]


@pytest.mark.parametrize(
    "solver", [LocalTrainer(batch_size=2), LocalTrainer(batch_size=0), LocalTrainer(local_steps=4)]
)
def test_batch_norm_and_one_row_do_nothing(solver):
    start, fitted = fit(solver, shard(1), NORMED)
    assert same(fitted.weights, start)
    assert fitted.steps == 0


def test_batch_norm_refuses_batches_of_one():
    with pytest.raises(FedtideError, match=r"local.batch_size: found 1, allowed: 2 or more"):
        fit(LocalTrainer(batch_size=1), shard(4), NORMED)


# -- clipping, schedules, terms ----------------------------------------------------------------------------------------


@law
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=5), st.floats(1e-3, 1e3))
def test_clipping_bounds_the_norm_and_keeps_the_direction(values, largest):
    gradient = [torch.tensor(values[:2], dtype=torch.float64), torch.tensor(values[2:], dtype=torch.float64)]
    before = torch.cat(gradient).clone()
    clip(gradient, largest)
    after = torch.cat(gradient)
    assert float(after.norm()) <= largest * (1 + 1e-9)
    if float(before.norm()) <= largest * (1 - 1e-9):
        assert torch.equal(before, after)
    torch.testing.assert_close(after * before.norm(), before * after.norm(), rtol=1e-9, atol=1e-9)


def test_the_norm_is_that_of_all_parameters_together():
    start, fitted = fit(LocalTrainer(lr=1.0, batch_size=0, max_grad_norm=1e-3), shard(6))
    moved = torch.cat([(fitted.weights.params[n] - start.params[n]).flatten() for n in start.params])
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}, {"optimizer": "adam"}])
def test_the_schedule_is_a_factor_on_the_rate(options):
    scheduled = LocalTrainer(lr=0.4, batch_size=3, lr_schedule=Exponential(0.5), **options)
    now = fit(scheduled, shard(7), moment=Moment(2, 10))[1]
    assert same(now, fit(LocalTrainer(lr=0.1, batch_size=3, **options), shard(7))[1])
    assert now.lr_sum == pytest.approx(0.3)


def test_an_extra_term_is_added_to_every_gradient():
    """A constant term c moves every parameter by -rate * steps * c where the gradient's own part is the same."""
    told = []

    def term(now, received):
        told.append(([v.clone() for v in now], [v.clone() for v in received]))
        return [torch.full_like(v, 2.0) for v in now]

    solver = LocalTrainer(lr=0.1, batch_size=0)
    start, plain = fit(solver, shard(6))
    _, pulled = fit(solver, shard(6), term=term)
    for name in start.params:
        torch.testing.assert_close(pulled.weights.params[name], plain.weights.params[name] - 0.2)
    ((now, received),) = told
    assert same(now, received)
    assert same(received, list(start.params.values()))


def test_a_proximal_term_pulls_back_and_clipping_comes_after_it():
    solver = LocalTrainer(lr=0.1, batch_size=2, epochs=3)
    start, free = fit(solver, shard(6))
    _, held = fit(solver, shard(6), term=Proximal(5.0))

    def far(fitted):
        return sum(float((fitted.weights.params[n] - start.params[n]).square().sum()) for n in start.params)

    assert far(held) < far(free)
    _, clipped = fit(
        LocalTrainer(lr=1.0, batch_size=0, max_grad_norm=0.1),
        shard(6),
        term=lambda now, _: [torch.full_like(v, 1e6) for v in now],
    )
    assert far(clipped) == pytest.approx(0.01, rel=1e-9)


# -- settings that cannot be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_momentum_of_another_optimizer_is_refused(optimizer):
    with pytest.raises(FedtideError, match="momentum belongs to optimizer = 'sgd'"):
        LocalTrainer(optimizer=optimizer, momentum=0.9)


# -- models of all kinds -----------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """A body that is not trained, as from a pretrained model."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_frozen_layer_stays_as_it_is(optimizer):
    task = Task(Frozen, dtype=torch.float64)
    start, fitted = fit(LocalTrainer(lr=0.1, optimizer=optimizer, weight_decay=0.1), shard(6), task)
    for name in ("body.weight", "body.bias"):
        held = {**fitted.weights.params, **fitted.weights.buffers}.get(name)
        was = {**start.params, **start.buffers}.get(name)
        assert same(held, was)
    assert not same(fitted.weights.params["head.weight"], start.params["head.weight"])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.second(self.first(x)))


def test_tied_layers_stay_tied():
    start, fitted = fit(LocalTrainer(lr=0.1), shard(6), Task(Tied, dtype=torch.float64))
    assert "second.weight" not in fitted.weights.params
    assert not same(fitted.weights.params["first.weight"], start.params["first.weight"])


# -- the update --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [LINEAR, NORMED], ids=["plain", "batch norm"])
@pytest.mark.parametrize("rows", [0, 1, 8])
def test_the_update_is_new_minus_old_statistics_included(task, rows):
    start = task.init(Rng(1))
    fitted = LocalTrainer(lr=0.1, batch_size=4)(task, task.loss, start, shard(rows), NOW, KEY)
    assert same(detached(fitted.delta), sub(fitted.weights, start))
    assert fitted.delta.params.keys() == start.params.keys()
    assert fitted.delta.buffers.keys() == start.buffers.keys()
    assert bool(fitted.steps) == any(bool(d.any()) for d in fitted.delta.params.values())


def test_the_update_is_val_until_the_next_training_and_a_difference_beyond():
    start = LINEAR.init(Rng(1))
    solver = LocalTrainer(lr=0.1)
    first = solver(LINEAR, LINEAR.loss, start, shard(6), NOW, KEY)
    kept, own = detached(first.delta), sub(first.weights, start)
    second = solver(LINEAR, LINEAR.loss, start, shard(6, seed=1), NOW, KEY)
    assert not same(detached(second.delta), kept)
    assert same(own, kept)


OTHER_USES = {
    "judging": lambda task, other: task.logits(other, shard(6).x),
    "judging the received ones": lambda task, other: task.logits(task.init(Rng(1)), shard(6).x),
    "an objective": lambda task, other: task.objective(other, shard(6)),
    "training": lambda task, other: LocalTrainer(lr=0.1)(task, task.loss, other, shard(6), NOW, KEY),
    "training on nothing": lambda task, other: LocalTrainer()(task, task.loss, other, shard(0), NOW, KEY),
}


@pytest.mark.parametrize("part", ["weights", "delta"])
@pytest.mark.parametrize("use", OTHER_USES)
def test_what_was_fitted_is_not_read_from_a_module_that_was_given_other_weights(use, part):
    fitted = LocalTrainer(lr=0.1)(LINEAR, LINEAR.loss, LINEAR.init(Rng(1)), shard(6), NOW, KEY)
    OTHER_USES[use](LINEAR, LINEAR.init(Rng(2)))
    with pytest.raises(RuntimeError, match="the module has been given other weights"):
        getattr(fitted, part)


@pytest.mark.parametrize("task", [LINEAR, NORMED], ids=["plain", "batch norm"])
def test_judging_what_was_fitted_leaves_it_as_it_is(task):
    start, held = task.init(Rng(1)), shard(6)
    fitted = LocalTrainer(lr=0.1, batch_size=2)(task, task.loss, start, held, NOW, KEY)
    kept = detached(fitted.weights)
    before = task.logits(fitted.weights, held.x)
    task.objective(fitted.weights, held)
    assert same(fitted.weights, kept)
    assert same(detached(fitted.delta), sub(kept, start))
    assert torch.equal(before, task.logits(kept, held.x))


def test_epochs_beside_steps_are_refused():
    with pytest.raises(FedtideError, match="found epochs 2 and local_steps 3, allowed: one of the two"):
        LocalTrainer(epochs=2, local_steps=3)
    assert LocalTrainer().samples(torch.tensor([7])).tolist() == [7]


# -- local optimizers --------------------------------------------------------------------------------------------------


SETTINGS = {
    "sgd": (LocalTrainer(weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.1)),
    "momentum": (
        LocalTrainer(momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.1),
    ),
    "adam": (LocalTrainer(optimizer="adam", weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.3, weight_decay=0.1)),
    "adamw": (
        LocalTrainer(optimizer="adamw", weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.3, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_torch_to_the_bit(name, dtype):
    local, made = SETTINGS[name]
    generator = torch.Generator().manual_seed(0)
    begin = [torch.randn(shape, generator=generator, dtype=dtype) for shape in [(), (5,), (3, 40, 7)]]
    ours, theirs = [p.clone() for p in begin], [nn.Parameter(p.clone()) for p in begin]
    step, optimizer = LocalOptimizer(local, 0.3, ours), made(theirs)
    for number in range(30):
        gradient = [torch.randn(p.shape, generator=generator, dtype=dtype) for p in begin]
        for param, part in zip(theirs, gradient, strict=True):
            param.grad = part.clone()
        optimizer.step()
        step(ours, gradient, number)
        assert same(ours, [p.detach() for p in theirs])


TRAINED = """
import sys, torch
import fedtide as ft
from fedtide.core.base import Moment, Shard
from fedtide.core.rng import Rng
task = ft.Task(lambda: torch.nn.Linear(3, 2))
shard = Shard(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.arange(4))
for local in (ft.LocalTrainer(momentum=0.9), ft.LocalTrainer(optimizer="adamw")):
    local(task, task.loss, task.init(Rng(0)), shard, Moment(0, 1, 0.0), Rng(0))
print("torch._dynamo" in sys.modules)
"""


def test_training_does_not_wait_for_a_compiler():
    made = subprocess.run([sys.executable, "-c", TRAINED], capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["False"]
