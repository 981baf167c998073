"""FedCurv by pencil and paper on two quadratics, and against a naive implementation in plain torch and float64.

By hand: gradients are w - b with b = 0 for client 0 (one row) and b = 4 for client 1 (three rows), lam = 1/4, one full
step of 1/2, uniform means. The Fisher information is the mean square of the rows' gradients: the rows of a client are
alike, so it is (w_j - b_j)^2.

Round 0 from w = 1 is FedAvg's: 1/2 and 5/2, w = 3/2. F_0 = (1/2)^2 = 1/4 and F_1 = (-3/2)^2 = 9/4.
Round 1 from 3/2: client 0 is pulled by 2/4 * 9/4 (3/2 - 5/2) = -9/8, so that its gradient is 3/2 - 9/8 = 3/8: to 21/16.
Client 1 is pulled by 2/4 * 1/4 (3/2 - 1/2) = 1/8: -5/2 + 1/8 = -19/8: to 43/16. w = 2.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedtide.algorithms.fedcurv import State, Sums, fedcurv
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers import quadratics
from helpers.quadratics import at, fleet_of, value
from helpers.toys import network_of, played, toy

ROUNDS = 8
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}


class Halves(Task):
    """The quadratics with their own loss as the plain one, by whose gradient Fisher information is taken."""

    def fisher(self, weights: Weights, shard: Shard) -> dict[str, torch.Tensor]:
        return {"weight": (weights.params["weight"] - shard.y[0]) ** 2}


def test_fedcurv():
    task = Halves(lambda: nn.Linear(1, 1, bias=False), quadratics.Half(), torch.float64)
    local = LocalTrainer(lr=0.5, batch_size=0)
    algorithm = fedcurv(task, local, lam=0.25, cohort=Everyone(), weighting="uniform")
    fleet, zero = fleet_of(algorithm), at(0.0).params
    first, second = (
        state
        for state, _ in quadratics.played(
            algorithm, fleet, State(at(1.0), None, Sums({"fisher": zero, "pulled": zero}, 0)), 2
        )
    )
    assert (value(first), float(first.sums.parts["fisher"]["weight"]), float(first.sums.parts["pulled"]["weight"])) == (
        1.5, 1 / 4 + 9 / 4, 1 / 4 * 1 / 2 + 9 / 4 * 5 / 2,
    )  # fmt: skip
    assert value(second) == 2.0
    assert float(fleet.engine.memory.read(0, (99, 0))["parts"]["fisher"]["weight"]) == (21 / 16) ** 2


def test_fisher_information_is_the_mean_of_squares_and_not_the_square_of_the_mean():
    """Two classes, w = (log 3, 0): p = (3/4, 1/4). Gradients (-1/4, 1/4) and (3/4, -3/4): (1/16 + 9/16)/2 = 5/16."""
    task = Task(lambda: nn.Linear(1, 2, bias=False), dtype=torch.float64)
    w = Weights({"weight": torch.tensor([[3.0], [1.0]], dtype=torch.float64).log()})
    rows = Shard(torch.ones(2, 1), torch.tensor([0, 1]), torch.arange(2))
    assert task.fisher(w, rows)["weight"].flatten().tolist() == pytest.approx([5 / 16, 5 / 16])
    assert not task.fisher(w, rows.pick(slice(0)))["weight"].any()


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3)],
        [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)],
        [nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3)],
    ],
)
def test_fisher_information_is_that_of_autograd_row_by_row(layers):
    draw, net = torch.Generator().manual_seed(0), nn.Sequential(*layers)
    task = Task(lambda: copy.deepcopy(net), dtype=torch.float64)
    x, y = torch.randn(7, 1, 6, 6, generator=draw, dtype=torch.float64), torch.randint(3, (7,), generator=draw)
    w = task.init(Rng(0))
    expected = {name: torch.zeros_like(param) for name, param in w.params.items()}
    for k in range(7):
        model = task.module(w)
        F.cross_entropy(model(x[k : k + 1]), y[k : k + 1]).backward()
        for name, param in model.named_parameters():
            expected[name] += param.grad.square() / 7
    fisher = task.fisher(w, Shard(x, y, torch.arange(7)))
    for name, diagonal in expected.items():
        torch.testing.assert_close(fisher[name], diagonal, rtol=1e-10, atol=1e-14)


def test_steps_of_sequences_that_do_not_count_tell_nothing():
    y, mask = torch.tensor([[0, 1], [1, 1]]), torch.tensor([[True, False], [False, False]])
    rows = Shard(torch.ones(2, 2, 1), y, torch.arange(2), mask=mask)
    task = Task(lambda: nn.Linear(1, 2, bias=False), dtype=torch.float64)
    w = Weights({"weight": torch.tensor([[3.0], [1.0]], dtype=torch.float64).log()})
    assert task.fisher(w, rows)["weight"].flatten().tolist() == pytest.approx([1 / 16, 1 / 16])


def naive(population, model, lam):
    """The objective as it is printed: a sum over the other clients of the last round."""
    last = {}
    for t in range(ROUNDS):
        moment, ends = Moment(t, ROUNDS, float(t)), {}
        for client in population.arrivals(6, moment).tolist():
            shard, own = population.shard(client, moment), copy.deepcopy(model)
            x, y, shuffle = shard.x.double(), shard.y, Rng(0).at(t, client, "train", "shuffle").torch()
            for _ in range(2):
                for batch in torch.randperm(len(y), generator=shuffle).split(4):
                    loss = F.cross_entropy(own(x[batch]), y[batch])
                    for j, (_, there, fisher) in last.items():
                        if j != client:
                            pairs = zip(own.parameters(), there, fisher, strict=True)
                            loss = loss + lam * sum((f * (v - w) ** 2).sum() for v, w, f in pairs)
                    own.zero_grad()
                    loss.backward()
                    with torch.no_grad():
                        for p in own.parameters():
                            p -= 0.1 * p.grad
            fisher = [torch.zeros_like(p) for p in own.parameters()]
            for i in range(len(y)):
                g = torch.autograd.grad(-own(x[i]).log_softmax(0)[y[i]], list(own.parameters()))
                fisher = [f + part**2 / len(y) for f, part in zip(fisher, g, strict=True)]
            ends[client] = len(y), [p.detach().clone() for p in own.parameters()], fisher
        assert not t or last.keys() & ends.keys(), "some client takes its own part away"
        last, n = ends, sum(rows for rows, *_ in ends.values())
        for k, p in enumerate(model.parameters()):
            p.data = sum(rows / n * there[k] for rows, there, _ in ends.values())
    return model.state_dict()


@pytest.mark.parametrize("lam", [1.0, 0.1])
def test_a_naive_implementation_agrees_to_1e_9(lam):
    options = {"lam": lam, "cohort": 6, "local": {"lr": 0.1, "batch_size": 4, "epochs": 2}}
    run = played(toy("fedcurv", options, rounds=ROUNDS, precision="fp64", data=DATA, shift={"who": "always"}))
    expected = naive(run.host.population, network_of(run.steps[0].received.weights), lam)
    for name, param in run.state.weights.params.items():
        torch.testing.assert_close(param, expected[name], rtol=1e-9, atol=1e-9)
