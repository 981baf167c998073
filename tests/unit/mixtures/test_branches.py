"""Branches: the loss of the chosen and the other branches, who is sure, and the step that leaves idle branches."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtide as ft
from fedtide.cohorts import OneModel
from fedtide.core.base import Shard, Sum, Weights
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import WSM, CrossEntropy
from fedtide.learn.server import SGD, Adagrad, Adam, KerasAdam, Yogi
from fedtide.learn.task import Task, with_branches
from fedtide.mixtures.branches import (
    BranchLoss,
    divide_branches,
    keep_chosen,
    most_certain,
    step_branches,
    step_trained,
)
from fedtide.models.networks import MLP

CLASSES, ROWS, DIMS = 3, 6, 4
SERVERS = [SGD(0.5), SGD(0.5, momentum=0.9), Adam(), KerasAdam(), Adagrad(), Yogi()]


def task_of(branches: int, dtype: torch.dtype = torch.float64) -> Task:
    plain = Task(lambda: MLP(hidden=(5,)).build((DIMS,), CLASSES), dtype=dtype, example=torch.zeros(1, DIMS))
    return with_branches(plain, "head", branches)


def rows(seed: int = 0, count: int = ROWS) -> Shard:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, DIMS, generator=draw, dtype=torch.float64)
    return Shard(x, torch.randint(CLASSES, (count,), generator=draw), torch.arange(count))


def logits_of(branches: int, count: int = ROWS, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(branches, count, CLASSES, generator=draw, dtype=torch.float64)


def value(loss: BranchLoss, logits: Tensor, y: Tensor) -> Tensor:
    shard = Shard(torch.zeros(len(y), 1), y, torch.arange(len(y)))
    shared, columns = loss.prepare(shard)
    return loss.value((logits, torch.zeros(len(y), 2)), y, shared, columns)


def gradient(loss: BranchLoss, branches: int = 2) -> dict[str, Tensor]:
    """Of the loss of some rows, by parameter; zeros where a parameter takes no part."""
    task, shard = task_of(branches), rows()
    module = task.scratch.load(task.init(Rng(0)), train=True)
    shared, columns = loss.prepare(shard)
    value = loss.value(module(shard.x), shard.y, shared, columns)
    found = torch.autograd.grad(value, task.scratch.params, allow_unused=True, materialize_grads=True)
    return dict(zip(task.scratch.names, found, strict=True))


# -- the loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [0, 1, torch.tensor([1] * ROWS)], ids=["first", "second", "second, per row"])
@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_without_lam_the_other_branch_has_exactly_no_gradient(choice, eps):
    k = int(choice if isinstance(choice, int) else choice[0])
    found = gradient(BranchLoss(CrossEntropy(), choice, 0.0, eps))
    for part in ("weight", "bias"):
        assert not found[f"model.head.copies.{1 - k}.{part}"].any()
        assert found[f"model.head.copies.{k}.{part}"].all()
    assert found["model.dense1.weight"].any()


def test_the_loss_by_hand():
    """Chosen branch CE, plus lam times -(1 - eps) log p_y - eps/C sum_c log p_c of the other."""
    logits, y, lam, eps = logits_of(2), rows().y, 0.3, 0.2
    expected = 0.0
    for b in range(ROWS):
        logp = [
            [float(z) - math.log(sum(math.exp(v) for v in logits[k, b].tolist())) for z in logits[k, b]]
            for k in range(2)
        ]
        other = -(1 - eps) * logp[0][int(y[b])] - eps / CLASSES * sum(logp[0])
        expected += (-logp[1][int(y[b])] + lam * other) / ROWS
    for choice in (1, torch.ones(ROWS, dtype=torch.int64)):
        found = value(BranchLoss(CrossEntropy(), choice, lam, eps), logits, y)
        assert float(found) == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_a_class_that_the_client_does_not_have_is_left_alone_by_every_branch(per_row, eps):
    """With the re-weighted softmax; cross-entropy pushes it out of both."""
    y = torch.zeros(ROWS, dtype=torch.int64)
    y[0] = 1
    choice = torch.ones(ROWS, dtype=torch.int64) if per_row else 1
    for base, absent in ((WSM(blend=0.0), 0), (CrossEntropy(), ROWS)):
        logits = logits_of(2).requires_grad_()
        shared, each = BranchLoss(base, choice, 0.3, eps).prepare(Shard(torch.zeros(ROWS, 1), y, torch.arange(ROWS)))
        found = BranchLoss(base, choice, 0.3, eps).value((logits, torch.zeros(ROWS, 2)), y, shared, each)
        (gradient,) = torch.autograd.grad(found, logits)
        assert [int((gradient[k, :, 2:] != 0).any(1).sum()) for k in range(2)] == [absent, absent]


@pytest.mark.parametrize("branches", [2, 3])
@pytest.mark.parametrize("lam", [0.0, 0.25])
def test_a_branch_per_row_is_the_batch_split_by_branch(branches, lam):
    """The loss of both parts' rows, divided by the batch; a branch that no row chose adds nothing of its own."""
    logits, y = logits_of(branches), rows().y
    for choice in ([0, 1, 0, 1, 1, 0], [1] * ROWS, [branches - 1, 0, 0, 0, 0, 0]):
        k = torch.tensor(choice)
        expected = sum(
            (k == j).sum() * value(BranchLoss(CrossEntropy(), j, lam, 0.5), logits[:, k == j], y[k == j])
            for j in range(branches)
            if (k == j).any()
        )
        found = value(BranchLoss(CrossEntropy(), k, lam, 0.5), logits, y)
        torch.testing.assert_close(found, expected / ROWS, rtol=1e-13, atol=0)


def test_steps_that_do_not_count_do_not_count_for_the_other_branch_either():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, CLASSES, generator=draw, dtype=torch.float64)
    y = torch.randint(CLASSES, (3, 5), generator=draw)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    shard = Shard(torch.zeros(3, 1), y, torch.arange(3), mask=mask)
    client = BranchLoss(CrossEntropy(), 0, 0.5, 0.2)
    found = client.value((logits, torch.zeros(3, 2)), y, *client.prepare(shard))
    own = F.cross_entropy(logits[0][mask], y[mask])
    other = F.cross_entropy(logits[1][mask], y[mask], label_smoothing=0.2)
    torch.testing.assert_close(found, own + 0.5 * other, rtol=1e-13, atol=0)
    changed = logits.masked_fill(~mask[None, :, :, None], 7.0)
    assert torch.equal(client.value((changed, torch.zeros(3, 2)), y, *client.prepare(shard)), found)
    rows = BranchLoss(CrossEntropy(), torch.zeros(3, dtype=torch.int64), 0.5, 0.2)
    torch.testing.assert_close(rows.value((logits, torch.zeros(3, 2)), y, *rows.prepare(shard)), found)


# -- certainty ---------------------------------------------------------------------------------------------------------


def test_ties_go_to_the_lowest_branch():
    one = logits_of(1)[0]
    owner = torch.zeros(ROWS, dtype=torch.int64)
    for together in (False, True):
        assert not most_certain(torch.stack([one, one, one]), owner, together).any()
        # Sure of another class by as much is a tie too.
        assert not most_certain(torch.stack([one, one.roll(1, -1)]).mul(0), owner, together).any()


def test_each_row_or_all_rows_of_an_owner():
    """Owner 0: branch 1 is a little surer of two rows, branch 0 much surer of one; owner 1: branch 1 for both rows."""

    def sure_of(*levels: float) -> Tensor:
        return torch.stack([level * F.one_hot(torch.tensor(0), CLASSES).double() for level in levels])

    logits = torch.stack([sure_of(1.0, 8.0, 1.0, 0.0, 0.0), sure_of(1.5, 0.0, 1.5, 1.0, 1.0)])
    owner = torch.tensor([0, 0, 0, 1, 1])
    assert most_certain(logits, owner, per_owner=False).tolist() == [1, 0, 1, 1, 1]
    assert most_certain(logits, owner, per_owner=True).tolist() == [0, 0, 0, 1, 1]
    order = torch.tensor([3, 1, 4, 0, 2])
    mixed = most_certain(logits[:, order], owner[order], per_owner=True)
    assert mixed.tolist() == [1, 0, 1, 0, 0]


# -- the server's step -------------------------------------------------------------------------------------------------


def ones(weights: Weights, scale: float = 1.0) -> Weights:
    draw = torch.Generator().manual_seed(3)
    return Weights({n: scale * torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in weights.params.items()})


@pytest.mark.parametrize("server", SERVERS, ids=str)
@pytest.mark.parametrize("idle", [0, 1])
def test_an_idle_branch_and_its_moments_stay_bit_for_bit(server, idle):
    """Not even momentum moves it; what is trained moves exactly as it would anyhow."""
    weights = task_of(2).init(Rng(0))
    memo = server.init(weights)
    both = torch.ones(2, dtype=torch.bool)
    weights, memo = step_trained(server, weights, memo, ones(weights), both)
    active = both.clone()
    active[idle] = False
    moved, after = step_trained(server, weights, memo, ones(weights, 0.0), active)
    moved, after = step_trained(server, moved, after, ones(weights), active)
    whole, whole_memo = step_trained(server, weights, memo, ones(weights, 0.0), both)
    whole, _ = step_trained(server, whole, whole_memo, ones(weights), both)
    for name in weights.params:
        if f"copies.{idle}." in name:
            assert torch.equal(moved.params[name], weights.params[name])
            if isinstance(after, dict):
                assert torch.equal(after[name], memo[name])
            elif after is not None:
                assert torch.equal(after.first[name], memo.first[name])
                assert torch.equal(after.second[name], memo.second[name])
                assert after.steps[name] == memo.steps[name] == 1
        else:
            assert torch.equal(moved.params[name], whole.params[name])
            assert not torch.equal(moved.params[name], weights.params[name])
    assert list(moved.params) == list(weights.params)


def test_a_branch_whose_update_stayed_masked_takes_no_step():
    """Half of the rows trained branch 1, of whose update zeros are left: step 1 is that of branch 0 alone."""
    weights = task_of(2).init(Rng(0))
    params = {name: value * ("copies.1." not in name) for name, value in ones(weights).params.items()}
    shares = torch.tensor([0.5, 0.5], dtype=torch.float64)
    total = {"delta": Sum(Weights(params), 1.0), "loss": Sum(1.0, 1.0), "branches": Sum(shares, 1.0)}
    state, _ = step_branches(
        OneModel(weights, Adam().init(weights)), SimpleNamespace(total=total), server=Adam(), lam=0.0
    )
    assert state.server.steps == {name: int("copies.1." not in name) for name in params}


@pytest.mark.parametrize("method", ["scsgd", "min_loss", "fedtem", "fedtkm"])
def test_clients_of_another_branch_leave_an_idle_branch_and_its_running_statistics_alone(method):
    """Day trains alone for four rounds, then night: the model of the day stays, whatever weight decay would do."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=draw) + torch.tensor([4.0, -4.0]).repeat_interleave(100)[:, None]
    y, domain = (torch.randn(200, generator=draw) > 0).long(), ["day"] * 100 + ["night"] * 100
    clock = ft.Shift(who=ft.shift.BlockCyclic(period=8))
    split = ft.data.Split(val=0.0, test=0.2)
    people = ft.population(
        x, y, ft.data.IID(clients=4), domain=domain, groups=ft.data.ByDomain(), split=split, shift=clock
    )
    task = ft.Task(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), example=x[:1])
    keys = {"branch_layer": "*", "lam": 0.0, "server": ft.server.SGD(), "cohort": ft.cohorts.Arrivals(2)}
    if method != "min_loss":
        keys["prior"] = ft.priors.Block(period=8)
    local = LocalTrainer(lr=0.1, batch_size=10, optimizer="adam", weight_decay=0.1)
    algorithm = getattr(ft.algorithms, method)(task, local, **keys)
    before, after = (
        ft.simulate(algorithm, people, rounds=rounds, eval_every=rounds).state.weights for rounds in (4, 8)
    )
    idle = {
        k: all(
            torch.equal(value, after_part[name])
            for part, after_part in ((before.params, after.params), (before.buffers, after.buffers))
            for name, value in part.items()
            if f"copies.{k}." in name
        )
        for k in range(2)
    }
    assert sorted(idle.values()) == [False, True]


def test_running_statistics_of_a_branch_are_the_mean_over_its_members():
    """Of branch 0: changes 1 and 3 at weights 1 and 2, half a client's rows the second; of branch 1: 3 and 9."""
    names = ["copies.0.mean", "copies.1.mean"]
    total = dict.fromkeys(names, torch.zeros(1))
    clients = [(1.0, [1.0, 0.0], 1.0), (3.0, [0.5, 0.5], 2.0), (9.0, [0.0, 1.0], 1.0)]
    for seen, shares, weight in clients:
        delta = Weights({}, {name: torch.tensor([seen]) for name in names})
        kept = keep_chosen(delta, torch.tensor(shares)).buffers
        total = {name: total[name] + weight * kept[name] / 4 for name in names}
    found = divide_branches(total, torch.tensor([0.5, 0.5]))
    assert [float(found[name]) for name in names] == [2.0, 6.0]  # (1 + 3) / 2 and (3 + 9) / 2
