"""FedPAC by pencil and paper, a naive implementation, and what it becomes for one client.

Statistics of a client whose features are those of its rows: 1 and 3 of class 0, 5 of class 2. The shares are 2/3 and
1/3, so h = (2/3 * 2, 0, 1/3 * 5) = (4/3, 0, 5/3). The mean square is 35/3, and ||h||^2 = 41/9. So the variance is
(35/3 - 41/9) / 3 = 64/27.

Shares of two clients with h = 0 and 1, V = 1, 1. For client 0: a_0^2 + a_1^2 + a_1^2, so a = (2/3, 1/3). Client 1 has
the reverse. With V = 0 of client 0 its own head is best for it; client 1 minimizes a_0^2 + a_1^2: (1/2, 1/2).
Three clients with h = 0, 0, 99, V = 1, 3, 1. For client 0: a_0^2 + 3 a_1^2 + 9802 a_2^2, so a is as 1, 1/3, 1/9802. The
last is below a thousandth, and the others are 3/4 and 1/4.

The pull of z = (1, 3) to (0, 1) with strength 2: 2 (1 + 4) / 2 = 5.
"""

import copy
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtide as ft
from fedtide.algorithms.fedpac import Pull, Sent, fedpac, mix_shares
from fedtide.algorithms.fedrep import fedrep
from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.fleets.stacked_engine import StackedEngine
from fedtide.learn import LocalTrainer, Task
from helpers.toys import network_of, played, toy

LATE = (99, 0)


def test_statistics_by_hand():
    one = torch.ones(1, 1, dtype=torch.float64)
    begin = Weights({"0.weight": one, "1.weight": torch.zeros(3, 1, dtype=torch.float64)})
    layers = lambda: nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 3, bias=False))  # noqa: E731
    algorithm = fedpac(Task(layers, dtype=torch.float64, begin=begin, example=one))
    shard = Shard(torch.tensor([[1.0], [3.0], [5.0]], dtype=torch.float64), torch.tensor([0, 0, 2]), torch.arange(3))
    sent = Sent(begin, torch.zeros(3, 1, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    answer = algorithm.works["train"](sent, None, shard, Moment(0, 1), Rng(0))
    assert answer.rows["moments"].flatten().tolist() == pytest.approx([4 / 3, 0.0, 5 / 3], abs=1e-15)
    assert float(answer.rows["variance"]) == pytest.approx(64 / 27, abs=1e-14)
    assert answer.total["counts"].value.tolist() == [2.0, 0.0, 1.0]


def test_shares_by_hand():
    h = torch.tensor([[[0.0]], [[1.0]]])
    assert mix_shares(h, torch.tensor([1.0, 1.0])).flatten().tolist() == pytest.approx([2 / 3, 1 / 3, 1 / 3, 2 / 3])
    assert mix_shares(h, torch.tensor([0.0, 1.0])).flatten().tolist() == pytest.approx([1.0, 0.0, 0.5, 0.5])
    three = mix_shares(torch.tensor([[[0.0]], [[0.0]], [[99.0]]]), torch.tensor([1.0, 3.0, 1.0]))
    assert three[0].tolist() == pytest.approx([0.75, 0.25, 0.0], abs=1e-12)


def test_the_pull_by_hand():
    z, y = torch.tensor([[1.0, 3.0]]), torch.tensor([1])
    pull = Pull(2.0, torch.tensor([[9.0, 9.0], [0.0, 1.0]]))
    assert pull.each(z, z, y, pull.prepare(None, None, Shard(z, y, y))).tolist() == [5.0]


def best_shares(h, variance, i):
    """The least value over all sets of clients whose shares are positive: each is a linear system."""
    n = len(h)
    apart = (h[i] - h).reshape(n, -1)
    p = (apart @ apart.T).numpy() + np.diag(variance.numpy())
    found = []
    for size in range(1, n + 1):
        for members in combinations(range(n), size):
            part = p[np.ix_(members, members)]
            system = np.block([[2 * part, np.ones((size, 1))], [np.ones((1, size)), np.zeros((1, 1))]])
            a = np.linalg.solve(system, np.append(np.zeros(size), 1.0))[:-1]
            if (a >= -1e-12).all():
                share = np.zeros(n)
                share[list(members)] = a
                found.append((float(a @ part @ a), share))
    share = min(found, key=lambda pair: pair[0])[1]
    share[share < 1e-3] = 0
    return torch.from_numpy(share / share.sum())


@pytest.mark.parametrize("seed", range(6))
def test_shares_are_the_least_of_all_sets_of_clients(seed):
    draw = torch.Generator().manual_seed(seed)
    h = torch.randn(6, 2, 3, generator=draw, dtype=torch.float64)
    variance = torch.rand(6, generator=draw, dtype=torch.float64) + 0.01
    expected = torch.stack([best_shares(h, variance, i) for i in range(6)])
    torch.testing.assert_close(mix_shares(h, variance), expected, rtol=1e-8, atol=1e-8)
    assert (expected == 0).any()


# -- an independent naive implementation -------------------------------------------------------------------------------

ROUNDS = 5
LOCAL = {"lr": 0.05, "batch_size": 4, "epochs": 2, "momentum": 0.5, "weight_decay": 0.01}
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 0.2, "min_samples": 5}}


def descend(model, part, x, y, key, lr, epochs, targets=None):
    """SGD of the parameters of one layer, with momentum and weight decay."""
    shuffle = key.at("shuffle").torch()
    optimizer = torch.optim.SGD(getattr(model, part).parameters(), lr=lr, momentum=0.5, weight_decay=0.01)
    for _ in range(epochs):
        for batch in torch.randperm(len(y), generator=shuffle).split(4):
            z = model[:2](x[batch])
            loss = F.cross_entropy(model.head(z), y[batch])
            if targets is not None:
                loss = loss + 0.7 * F.mse_loss(z, torch.stack([targets[c] for c in y[batch].tolist()]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def averages(model, x, y):
    with torch.no_grad():
        z = model[:2](x)
    return z, {c: z[y == c].mean(0) for c in y.unique().tolist()}


def naive(population, model):
    """The model with the mean head, global means by class, and heads of all clients after all rounds."""
    heads, common, missing = {}, {}, 0
    for r in range(ROUNDS):
        moment, sums, total, met, by_class = Moment(r, ROUNDS, float(r)), {}, 0, {}, {}
        for client in population.arrivals(2, moment).tolist():
            shard, key = population.shard(client, moment), Rng(0).at(r, client, "train")
            x, y = shard.x.double(), shard.y
            own = copy.deepcopy(model)
            own.head = copy.deepcopy(heads.get(client, model.head))
            z, before = averages(own, x, y)
            h, v = torch.zeros(3, 5).double(), 0.0
            for c, mean in before.items():
                p = float((y == c).double().mean())
                h[c] = p * mean
                v += p * float((z[y == c] ** 2).sum(1).mean()) - p**2 * float(mean @ mean)
            descend(own, "head", x, y, key.at("head"), 0.2, 2)
            missing += len(before.keys() - common.keys()) if common else 0
            descend(own, "dense1", x, y, key, 0.05, 2, before | common if common else None)
            _, means = averages(own, x, y)
            for c, mean in means.items():
                by_class.setdefault(c, []).append((int((y == c).sum()), mean))
            met[client] = own.head, h, v / len(y)
            for name, p in own.dense1.named_parameters():
                sums[name] = sums.get(name, 0.0) + len(y) * (p.detach() - model.dense1.get_parameter(name).detach())
            total += len(y)
        for name, p in model.dense1.named_parameters():
            p.data += sums[name] / total
        common = {c: sum(n * mean for n, mean in parts) / sum(n for n, _ in parts) for c, parts in by_class.items()}
        order = sorted(met)
        h, v = torch.stack([met[i][1] for i in order]), torch.tensor([met[i][2] for i in order]).double()
        for place, client in enumerate(order):
            share = best_shares(h, v, place)
            mixed = copy.deepcopy(met[client][0])
            for name, p in mixed.named_parameters():
                p.data = sum(a * met[i][0].get_parameter(name).detach() for a, i in zip(share, order, strict=True))
            heads[client] = mixed
        for name, p in model.head.named_parameters():
            p.data = sum(met[i][0].get_parameter(name).detach() for i in order) / len(order)
    return model, common, heads, missing


def test_a_naive_implementation_agrees_to_1e_8():
    options = {"local": LOCAL, "head_epochs": 2, "head_lr": 0.2, "lam": 0.7, "cohort": 2}
    run = played(toy("fedpac", options, rounds=ROUNDS, precision="fp64", data=DATA))
    model, common, heads, missing = naive(run.host.population, network_of(run.steps[0].received.weights))
    assert missing  # some class that a client has was held by nobody in the round before
    for name, value in model.state_dict().items():
        torch.testing.assert_close(run.state.weights.params[name], value, rtol=1e-8, atol=1e-8)
    assert run.state.classes.nonzero().flatten().tolist() == sorted(common)
    for c, mean in common.items():
        torch.testing.assert_close(run.state.means[c], mean, rtol=1e-8, atol=1e-8)
    for client, head in heads.items():
        row = torch.cat([head.weight, head.bias[:, None]], 1).detach()
        torch.testing.assert_close(run.host.memory.read(client, LATE)["head"], row, rtol=1e-8, atol=1e-8)


# -- reductions --------------------------------------------------------------------------------------------------------


def test_one_client_without_the_pull_is_one_of_fedrep():
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    begin = Weights({name: p.detach() for name, p in net.named_parameters()})
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    task = Task(lambda: copy.deepcopy(net), dtype=torch.float64, begin=begin, example=x[:1])
    people = ft.population(x, torch.arange(40) % 3, ft.data.IID(clients=1))
    local, cohort = LocalTrainer(lr=0.1, batch_size=8), ft.cohorts.Arrivals(1)
    ours = fedpac(task, local, head_lr=0.1, lam=0.0, cohort=cohort)
    theirs = fedrep(task, local, head_epochs=1, cohort=cohort)
    one, two = (ft.simulate(method, people, rounds=4).state for method in (ours, theirs))
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(one.weights.params[name], two.inner.weights.params[name], rtol=1e-12, atol=1e-12)


def test_its_clients_are_trained_at_once():
    run = played(toy("fedpac", {"local": LOCAL}), rounds=2, engine=StackedEngine)
    stacks = run.fleet.engine._stacks.values()
    assert len(stacks) == 2
    assert not any(isinstance(stack, str) for stack in stacks)
