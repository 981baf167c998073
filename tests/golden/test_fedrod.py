"""FedRoD by pencil and paper, a naive implementation, and its two models.

The model is logits G * (u x) with one feature, two classes, u = 1, G = (log 3, 0), on rows x = 1. So the plain softmax
is (3/4, 1/4). All rows are one batch, and the step is 1.

Client 0 has one row of class 0 and three of class 1. Balanced softmax: (3 * 1, 1 * 3) / 6 = (1/2, 1/2). The mean label
is (1/4, 3/4), so the gradient by the logits is (1/4, -1/4). G = (log 3 - 1/4, 1/4), and u = 1 - log(3) / 4. P begins
at 0: gradient (3/4 - 1/4, 1/4 - 3/4), so P = (-1/2, 1/2).

Client 1 has four rows of class 0. Balanced softmax: (1, 0), no gradient. P: (3/4 - 1, 1/4), so P = (1/4, -1/4).

By rows, 4 and 4, half of client 0's update counts: G = (log 3 - 1/8, 1/8), and u = 1 - log(3) / 8.
"""

import copy
import math
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedtide.algorithms.fedrod import fedrod
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.fleets.stacked_engine import StackedEngine
from fedtide.learn import LocalTrainer, Task
from helpers import quadratics
from helpers.stages import holding
from helpers.toys import network_of, played, toy

ONE = torch.ones(1, 1, dtype=torch.float64)
BEGIN = Weights({"0.weight": ONE, "1.weight": torch.tensor([[math.log(3)], [0.0]], dtype=torch.float64)})
TASK = Task(
    lambda: nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)), dtype=torch.float64, begin=BEGIN
)
WHO = holding([(ONE.expand(4, 1), torch.tensor(y)) for y in ([0, 1, 1, 1], [0, 0, 0, 0])], classes=2)
LATE = (99, 0)


def test_a_round_by_hand():
    algorithm = fedrod(TASK, LocalTrainer(lr=1.0, batch_size=0), cohort=Everyone())
    fleet = quadratics.fleet_of(algorithm, who=WHO)
    (state, facts), *_ = quadratics.played(algorithm, fleet, algorithm.init(fleet, Rng(0)), 1)
    assert [*state.weights.params] == ["0.weight", "1.weight"]
    assert float(state.weights.params["0.weight"]) == pytest.approx(1 - math.log(3) / 8, abs=1e-15)
    assert state.weights.params["1.weight"].flatten().tolist() == pytest.approx([math.log(3) - 1 / 8, 1 / 8], abs=1e-15)
    for client, expected in enumerate([[-0.5, 0.5], [0.25, -0.25]]):
        (own,) = fleet.engine.memory.read(client, LATE)["own"].params.values()
        assert own.flatten().tolist() == pytest.approx(expected, abs=1e-15)
    # Balanced losses log 2 and 0. Plain ones: (log 4/3 + 3 log 4) / 4, and log 4/3.
    first, second = math.log(2) + (math.log(4 / 3) + 3 * math.log(4)) / 4, math.log(4 / 3)
    assert facts["loss"] == pytest.approx((first + second) / 2, abs=1e-15)


def test_the_second_head_is_of_all_layers_of_the_module_head():
    """As what FedPer keeps at home, and not of the last layer alone."""

    def build() -> nn.Module:
        head = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        return nn.Sequential(OrderedDict(body=nn.Linear(1, 2), head=head))

    algorithm = fedrod(Task(build, dtype=torch.float64), LocalTrainer(batch_size=0), cohort=Everyone())
    fleet = quadratics.fleet_of(algorithm, who=WHO)
    next(quadratics.played(algorithm, fleet, algorithm.init(fleet, Rng(0)), 1))
    own = fleet.engine.memory.read(0, LATE)["own"].params
    assert sorted(own) == ["own.0.bias", "own.0.weight", "own.2.bias", "own.2.weight"]
    assert own["own.2.weight"].any()  # it learns of its features, and not one vector of biases alone


def test_a_client_is_judged_by_both_heads_and_a_newcomer_by_the_generic_one():
    """P = (-log 3, 0) makes the logits of x = 1 equal. Without it they are log 3 and 0."""
    algorithm = fedrod(TASK)
    own = Weights({"own.weight": torch.tensor([[-math.log(3)], [0.0]], dtype=torch.float64)})
    memories = [None, {"own": own}]
    told = algorithm.predict(BEGIN, memories, ONE.expand(3, 1), torch.tensor([1, 0, 1])).told.exp()
    assert told.flatten().tolist() == pytest.approx([0.5, 0.5, 0.75, 0.25, 0.5, 0.5])
    generic = algorithm.others["generic head"].predict(BEGIN, memories, ONE.expand(2, 1), torch.tensor([0, 1])).told
    assert generic.exp().flatten().tolist() == pytest.approx([0.75, 0.25] * 2)


ROUNDS = 4
LOCAL = {"lr": 0.1, "batch_size": 4, "epochs": 2}
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 0.5, "min_samples": 5}}


def naive(population, model):
    """The network and the second heads after all rounds: two optimizers by turns, in float64."""
    heads = {}
    for r in range(ROUNDS):
        moment, mean, total = Moment(r, ROUNDS, float(r)), {}, 0
        for client in population.arrivals(4, moment).tolist():
            shard = population.shard(client, moment)
            shuffle = Rng(0).at(r, client, "train").at("shuffle").torch()
            counts = torch.bincount(shard.y, minlength=3).double()
            own, head = copy.deepcopy(model), heads.get(client, (torch.zeros(3, 5), torch.zeros(3)))
            head = [part.double().requires_grad_() for part in head]
            for _ in range(2):
                for batch in torch.randperm(len(shard.y), generator=shuffle).split(4):
                    y = shard.y[batch]
                    z = own[:2](shard.x.double()[batch])
                    logits = own.head(z)
                    weighted = counts * logits.exp()
                    generic = -(weighted[torch.arange(len(y)), y] / weighted.sum(1)).log().mean()
                    personal = F.cross_entropy(logits.detach() + z.detach() @ head[0].T + head[1], y)
                    params = list(own.parameters())
                    by_params = torch.autograd.grad(generic, params)
                    by_head = torch.autograd.grad(personal, head)
                    for p, g in zip((*params, *head), (*by_params, *by_head), strict=True):
                        p.data -= 0.1 * g
            heads[client] = [part.detach() for part in head]
            for name, p in own.state_dict().items():
                mean[name] = mean.get(name, 0.0) + len(shard) * (p - model.state_dict()[name])
            total += len(shard)
        model.load_state_dict({name: p + mean[name] / total for name, p in model.state_dict().items()})
    return model.state_dict(), heads


def test_a_naive_implementation_agrees_to_1e_10():
    run = played(toy("fedrod", {"local": LOCAL}, rounds=ROUNDS, precision="fp64", data=DATA))
    expected, heads = naive(run.host.population, network_of(run.steps[0].received.weights))
    for name, value in run.state.weights.params.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)
    for client, head in heads.items():
        own = run.host.memory.read(client, LATE)["own"].params
        assert [*own] == ["own.weight", "own.bias"]
        for value, part in zip(own.values(), head, strict=True):
            torch.testing.assert_close(value, part, rtol=1e-10, atol=1e-10)


def test_its_clients_are_trained_at_once():
    run = played(toy("fedrod", {"local": LOCAL}), rounds=1, engine=StackedEngine)
    (stack,) = run.fleet.engine._stacks.values()
    assert not isinstance(stack, str)


def test_other_losses_are_one_line():
    with pytest.raises(FedtideError, match="loss: found 'Plain', allowed: CrossEntropy, WSM, or one with `each`"):
        fedrod(Task(lambda: nn.Linear(3, 2), nn.CrossEntropyLoss()))
    with pytest.raises(FedtideError, match="the method trains two heads at once; allowed: none"):
        played(toy("fedrod", {"local": {**LOCAL, "terms": ["distill"]}}), rounds=1)


def test_running_statistics_are_those_of_the_received_model():
    run = played(toy("fedrod", {"local": LOCAL}, model="python:helpers.toys:normed"), rounds=2)
    assert [*run.state.weights.buffers] == ["1.running_mean", "1.running_var"]


def test_a_network_of_one_layer():
    task = Task(lambda: nn.Linear(1, 2, bias=False), dtype=torch.float64, begin=Weights({"weight": ONE.expand(2, 1)}))
    algorithm = fedrod(task, LocalTrainer(lr=1.0, batch_size=0), cohort=Everyone())
    fleet = quadratics.fleet_of(algorithm, who=WHO)
    (state, _), *_ = quadratics.played(algorithm, fleet, algorithm.init(fleet, Rng(0)), 1)
    assert state.weights.params["weight"].flatten().tolist() == [1.0, 1.0]  # balanced: nothing tells the classes apart
    assert fleet.engine.memory.read(0, LATE)["own"].params["own.weight"].flatten().tolist() == [-0.25, 0.25]
