"""Tasks: where weights meet a module. Initial values, number types, memory formats, buffers, many models, losses."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, leaves, same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import CrossEntropy
from fedtide.learn.schedules import Constant, Cosine, Exponential, Steps
from fedtide.learn.target import CLASSES
from fedtide.learn.task import ROWS, Task, joined


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 6 * 6, 4))


def pictures(rows: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(rows, 2, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5])
def test_a_gradient_in_evaluation_mode_drops_nothing_and_leaves_statistics_alone(rows):
    """With frozen statistics a row counts for itself, so that the gradient is the mean over rows; one is enough."""
    task = Task(lambda: nn.Sequential(normed(), nn.Dropout(0.5)))
    weights = task.init(Rng(0))
    x, y = pictures(rows), torch.arange(rows) % 4
    shards = [Shard(x[i : i + 1], y[i : i + 1], torch.tensor([i])) for i in range(rows)]
    whole = task.gradient(weights, Shard(x, y, torch.arange(rows)), train=False)[0]
    for name, value in whole.items():
        each = torch.stack([task.gradient(weights, shard, train=False)[0][name] for shard in shards])
        torch.testing.assert_close(value, each.mean(0), rtol=1e-4, atol=1e-6)
    if rows > 1:
        assert not same(whole, task.gradient(weights, Shard(x, y, torch.arange(rows)))[0])


# -- evaluation --------------------------------------------------------------------------------------------------------


def test_pictures_are_evaluated_in_passes_of_so_many_values(monkeypatch):
    """Pictures of 128 values: 2,048 of them fill a pass, as tables do; with 512 values a quarter as many."""
    seen = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return self.scale * x.flatten(1)[:, :4]

    task = Task(Counted)
    weights = task.init(Rng(0))
    for shape in [(128,), (2, 8, 8), (8, 8, 8), (1, 16, 17)]:
        assert task.logits(weights, torch.zeros(2500, *shape)).shape == (2500, 4)
    assert seen == [2048, 452, 2048, 452, *4 * [512], 452, *3 * [682], 454]
    monkeypatch.setattr("fedtide.learn.task.PIXELS", 1)
    assert torch.equal(task.logits(weights, pictures(3)), pictures(3).flatten(1)[:, :4])
    assert seen[-3:] == [1, 1, 1]


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"target": "number"}, "Task.target: found 'number', allowed: population.target"),
        ({"loss": "cross"}, "Task.loss: found 'cross', allowed: a loss of ft.losses"),
        ({"dtype": "float64"}, "Task.dtype: found 'float64', allowed: a number type"),
    ],
)
def test_names_are_no_parts_of_a_task(options, line):
    with pytest.raises(FedtideError, match=line):
        Task(lambda: nn.Linear(4, 2), **options)


# -- initialization ----------------------------------------------------------------------------------------------------


def test_the_same_key_initializes_the_same_weights_and_another_key_others():
    task = Task(normed)
    assert same(task.init(Rng(0)), task.init(Rng(0)))
    assert same(task.init(Rng(0)), Task(normed).init(Rng(0)))
    assert not same(task.init(Rng(0)), task.init(Rng(1)))


def test_initialization_neither_uses_nor_disturbs_global_randomness():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = Task(normed).init(Rng(0))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(first, Task(normed).init(Rng(0)))


def test_initial_weights_have_a_storage_of_their_own():
    task = Task(normed)
    first = task.init(Rng(0))
    before = detached(first)
    task.init(Rng(1))
    task.scratch.load(task.init(Rng(2)), train=True)
    assert same(first, before)
    assert not any(tensor.requires_grad for tensor in leaves(first))


# -- number types and memory formats -----------------------------------------------------------------------------------


def test_channels_last_gives_the_same_numbers_to_tolerance():
    plain, last = Task(normed), Task(normed, channels_last=True)
    weights = plain.init(Rng(0))
    assert same(weights, last.init(Rng(0)))
    torch.testing.assert_close(
        plain.logits(weights, pictures()), last.logits(weights, pictures()), rtol=1e-5, atol=1e-5
    )
    shard = Shard(pictures(6), torch.arange(6) % 4, torch.arange(6))
    solver = LocalTrainer(lr=0.1, batch_size=2, epochs=2)
    fitted = [detached(solver(t, t.loss, weights, shard, Moment(0, 1), Rng(0)).weights) for t in (plain, last)]
    for a, b in zip(*(leaves(f) for f in fitted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_module_that_is_not_safe_in_channels_last_keeps_the_usual_format():
    """Its gradient is right in either format; torch's own would be written past its end."""
    build = lambda: nn.Sequential(nn.Conv2d(2, 3, 1, stride=2), nn.Flatten(), nn.Linear(48, 4))  # noqa: E731
    plain, asked = (Task(build, channels_last=c) for c in (False, True))
    x, weights = torch.rand(6, 2, 8, 8), plain.init(Rng(0))
    assert not asked.scratch.channels_last
    assert asked.inputs(x).is_contiguous()
    shard = Shard(x, torch.arange(6) % 4, torch.arange(6))
    assert same(*(t.gradient(weights, shard)[0] for t in (plain, asked)))


# -- buffers -----------------------------------------------------------------------------------------------------------


def test_step_counters_start_anew_whenever_weights_are_loaded():
    """Without a momentum the statistics are plain means over the batches: they divide by the counter."""
    task = Task(lambda: nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.Linear(2, 3)))
    start, x = task.init(Rng(0)), torch.arange(12.0).reshape(6, 2)
    shard, solver = Shard(x, torch.arange(6) % 3, torch.arange(6)), LocalTrainer(lr=0.1, batch_size=2)
    fitted = [detached(solver(task, task.loss, start, shard, Moment(0, 1), Rng(0)).weights) for _ in range(3)]
    assert same(fitted[0], fitted[1])
    assert same(fitted[0], fitted[2])
    assert fitted[0].buffers["0.running_mean"].tolist() == x.mean(0).tolist()


def test_loading_puts_every_number_in_place_and_sets_the_mode():
    task = Task(normed)
    weights = task.init(Rng(5))
    weights.buffers["1.running_mean"].fill_(7.0)
    module = task.scratch.load(weights, train=True)
    assert module.training
    assert same(detached(task.scratch.weights), weights)
    assert module[1].running_mean.tolist() == [7.0] * 3
    assert not task.scratch.load(weights, train=False).training
    assert not any(part.training for part in module.modules())


def test_several_models_take_turns_in_one_scratch_without_a_trace():
    task = Task(normed)
    models = [task.init(Rng(k)) for k in range(3)]
    alone = [Task(normed).logits(weights, pictures()) for weights in models]
    for k in (0, 1, 2, 1, 0, 2):
        assert torch.equal(task.logits(models[k], pictures()), alone[k])
    shard = Shard(pictures(), torch.arange(5) % 4, torch.arange(5))
    solver = LocalTrainer(lr=0.1)
    solver(task, task.loss, models[0], shard, Moment(0, 1), Rng(0))
    assert torch.equal(task.logits(models[1], pictures()), alone[1])


# -- reading outputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 3])
def test_any_number_of_rows_is_judged(rows):
    task = Task(lambda: nn.Linear(2, 3))
    weights = task.init(Rng(0))
    x = torch.arange(2.0 * rows).reshape(rows, 2) / max(rows, 1)
    logits = task.logits(weights, x)
    torch.testing.assert_close(logits, x @ weights.params["weight"].t() + weights.params["bias"])
    assert not logits.requires_grad


def test_predictions_are_normalized_log_probabilities():
    task = Task(lambda: nn.Linear(2, 3), dtype=torch.float64)
    prediction = task.predict(task.init(Rng(0)), [None], torch.randn(7, 2), torch.zeros(7, dtype=torch.int64))
    torch.testing.assert_close(prediction.told.exp().sum(-1), torch.ones(7, dtype=torch.float64))
    assert prediction.choice is None


@pytest.mark.parametrize("rows", [0, 5, ROWS + 7])
def test_the_objective_is_the_mean_training_loss_of_all_rows(rows):
    task = Task(lambda: nn.Linear(2, 3), dtype=torch.float64)
    weights = task.init(Rng(0))
    shard = Shard(torch.randn(rows, 2), torch.arange(rows) % 3, torch.arange(rows))
    expected = float(F.cross_entropy(task.logits(weights, shard.x), shard.y)) if rows else 0.0
    assert task.objective(weights, shard) == pytest.approx(expected, rel=1e-9)
    if rows:
        losses = CLASSES.losses(F.log_softmax(task.logits(weights, shard.x), -1), shard.y)
        assert float(losses.mean()) == pytest.approx(expected, rel=1e-6)


# -- losses ------------------------------------------------------------------------------------------------------------


def sequences() -> Shard:
    """Two sequences of three steps: the second ends after one."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    return Shard(torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2], [3, 0, 0]]), torch.arange(2), mask=mask)


def test_steps_that_do_not_count_have_no_part_in_the_loss():
    shard, loss = sequences(), CrossEntropy()
    shared, columns = loss.prepare(shard)
    assert columns == (shard.mask,)
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = F.cross_entropy(logits[shard.mask], shard.y[shard.mask])
    assert torch.equal(loss.value(logits, shard.y, shared, columns), expected)
    logits[1, 1:] = 1e6
    assert torch.equal(loss.value(logits, shard.y, shared, columns), expected)


def test_the_loss_of_a_sequence_is_the_mean_of_its_steps():
    shard = sequences()
    logp = F.log_softmax(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), -1)
    losses = CLASSES.losses(logp, shard.y, shard.mask)
    assert losses.shape == (2,)
    assert float(losses[0]) == pytest.approx(-float(logp[0, 0, 0] + logp[0, 1, 1] + logp[0, 2, 2]) / 3, rel=1e-6)
    assert float(losses[1]) == pytest.approx(-float(logp[1, 0, 3]), rel=1e-6)


# -- schedules ---------------------------------------------------------------------------------------------------------

SCHEDULES = [Constant(), Exponential(0.9), Steps((0.25, 0.5), 0.5), Cosine(), Cosine(0.2)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_schedule_starts_at_one_and_never_rises_or_leaves_zero_to_one(schedule):
    factors = [schedule(Moment(r, 20)) for r in range(20)]
    assert factors[0] == 1.0
    assert all(0 < b <= a for a, b in itertools.pairwise(factors))


def test_schedules_by_hand():
    assert [Exponential(0.5)(Moment(r, 9)) for r in range(4)] == [1.0, 0.5, 0.25, 0.125]
    assert [Steps((0.25, 0.5), 0.5)(Moment(r, 8)) for r in (0, 1, 2, 3, 4, 7)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert [Steps((0.5, 0.25), 0.5)(Moment(r, 8)) for r in (1, 2, 4)] == [1, 0.5, 0.25]
    assert Cosine(0.2)(Moment(5, 10)) == pytest.approx(0.6)
    assert Cosine(0.2)(Moment(10, 10)) == pytest.approx(0.2)
    assert Constant()(Moment(7, 9)) == 1.0


# -- modes -------------------------------------------------------------------------------------------------------------


class Frozen(nn.BatchNorm2d):
    """Statistics that no training moves."""

    def train(self, mode: bool = True) -> nn.Module:
        del mode
        return super().train(False)


@pytest.mark.parametrize(("norm", "moves"), [(nn.BatchNorm2d, True), (Frozen, False)])
def test_a_module_decides_what_training_mode_is_for_it(norm, moves):
    task = Task(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), norm(3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(108, 4)))
    task.scratch.load(task.init(Rng(0)), train=False)
    assert not any(module.training for module in task.scratch.module.modules())
    task.scratch.load(task.init(Rng(0)), train=True)
    assert [module.training for module in task.scratch.module] == [True, moves, True, True, True]


def test_columns_that_are_joined_without_a_copy_are_rows_of_their_base():
    whole = torch.arange(36.0).reshape(4, 3, 3).clone()
    assert joined(whole.split([3, 1])) is whole
    views = (
        whole.transpose(1, 2).split([3, 1]), whole.flip(0).split([3, 1]), whole[:, :2].split([3, 1]),
        whole.flatten(1).split([3, 1]), [whole[0].expand(3, 3, 3)], [whole[0, 0].expand(3, 3)],
        whole.view(torch.int32).split([3, 1]),
    )  # fmt: skip
    for columns in views:
        assert same(joined(columns), torch.cat(list(columns)))
