"""kNN-Per by pencil and paper, and a naive implementation.

The model says 1/2 for both classes. A client has samples at 0 (label 0), at ln 3 (label 1) and at 9 (label 1), and two
of them vote. For x = 0 they weigh exp(0) = 1 and exp(-ln 3) = 1/3: votes 3/4 and 1/4. With lambda = 1/2 the answer is
5/8 and 3/8. If the validation sample at 0 has label 0 the votes are likelier than the model, and lambda is 1; if it has
label 1 lambda is 0. Each class has a millionth of a vote.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedtide as ft
from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.laws.case import judged
from fedtide.learn.task import Task
from fedtide.personal import Neighbors
from fedtide.personal.client_networks import Networks
from helpers.by_batch import LOCAL
from helpers.toys import network_of, played, toy

TASK = Task(lambda: nn.Linear(1, 2, bias=False), dtype=torch.float64)
EVEN = Weights({"weight": torch.zeros(2, 1, dtype=torch.float64)})
ROWS = Shard(torch.tensor([[0.0], [math.log(3)], [9.0]], dtype=torch.float64), torch.tensor([0, 1, 1]), torch.arange(3))
ZERO = torch.zeros(1, 1, dtype=torch.float64)
NOW = Moment(0, 1)


def answer(lam, val=None):
    nets = Networks(TASK)
    way = Neighbors(k=2, lam=lam)
    shard = ROWS if val is None else replace(ROWS, fetch_val=lambda: Shard(ZERO, torch.tensor([val]), torch.arange(1)))
    memory = way.fit(nets, [EVEN], shard, NOW, Rng(0))
    return memory["lam"], way.predict(nets, [EVEN], memory, ZERO).told.exp()[0].tolist()


def test_votes_by_hand():
    assert answer(0.5) == (0.5, pytest.approx([5 / 8, 3 / 8], abs=1e-6))
    assert answer(1.0) == (1.0, pytest.approx([3 / 4, 1 / 4], abs=1e-6))
    assert answer(0.0) == (0.0, pytest.approx([1 / 2, 1 / 2], abs=1e-12))


def test_the_weight_of_the_votes_is_chosen_by_validation_samples():
    assert [answer(None, val)[0] for val in (0, 1, None)] == [1.0, 0.0, 0.5]


def test_votes_alone_are_chosen_if_the_model_says_nothing():
    """Its probabilities are NaN, and with them all mixes but that of lambda 1."""
    broken = Weights({"weight": torch.full((2, 1), torch.nan, dtype=torch.float64)})
    shard = replace(ROWS, fetch_val=lambda: ROWS)
    assert Neighbors(k=2, lam=None).fit(Networks(TASK), [broken], shard, NOW, Rng(0))["lam"] == 1.0


def test_a_client_without_rows_is_served_the_global_model():
    algorithm = ft.algorithms.knn_per(TASK, k=2)
    assert algorithm.adapt(EVEN, None, ROWS.pick(slice(0, 0)), NOW, Rng(0)) is None
    told = algorithm.predict(EVEN, [None], ZERO, torch.tensor([0])).told
    assert torch.equal(told, TASK.predict_rows(EVEN, ZERO))


def test_at_zero_clients_judge_as_in_fedavg():
    runs = [played(toy(name, {"local": LOCAL, **own})) for name, own in (("knn-per", {"lam": 0.0}), ("fedavg", {}))]
    ours, theirs = (judged(run)[-1] for run in runs)
    assert torch.equal(ours.correct, theirs.correct)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({}, {"data": {"target": "number"}, "shift": {"how": "identity"}}, "but its samples vote for classes"),
        ({"layer": "tail"}, {}, "knn-per.layer: found 'tail', allowed: dense1, head"),
    ],
)
def test_rows_without_classes_and_layers_that_are_not_there_are_refused(options, changes, words):
    with pytest.raises(FedtideError, match=words):
        played(toy("knn-per", options, **changes), rounds=1)


def test_a_naive_implementation_agrees_to_1e_9():
    """Features, distances, votes and weights of every client by loops over rows."""
    run = played(toy("knn-per", {"local": LOCAL, "k": 3}, precision="fp64"), rounds=3)
    algorithm, population, w = run.host.algorithm, run.host.population, run.state.weights
    net, moment, chosen = network_of(w), Moment(3, 6, 3.0), set()

    def features(x):
        return torch.relu(net.dense1(x.double())).detach().numpy()

    def answers(shard, x, lam):
        store, asked, labels = features(shard.x), features(x), shard.y.tolist()
        p = net(x.double()).softmax(1).detach().numpy()
        out = np.zeros_like(p)
        for i in range(len(x)):
            distances = [float(np.sqrt(((asked[i] - z) ** 2).sum())) for z in store]
            near = sorted(range(len(store)), key=distances.__getitem__)[:3]
            weights = [math.exp(-distances[j]) for j in near]
            for j, weight in zip(near, weights, strict=True):
                out[i, labels[j]] += weight / sum(weights)
        return (1 - lam) * p + lam * (out + 1e-6) / (1 + 3e-6)

    for client in range(8):
        shard, test = population.shard(client, moment), population.shard(client, moment, "test")
        val = population.shard(client, moment, "val")
        memory = algorithm.adapt(w, None, shard, moment, Rng(0)).memory
        values = [np.log(answers(shard, val.x, k / 10)[range(len(val)), val.y.numpy()]).sum() for k in range(11)]
        lam = int(np.argmax(values)) / 10
        assert float(memory["lam"]) == pytest.approx(lam)
        chosen.add(lam)
        told = algorithm.predict(w, [memory], test.x, torch.zeros(len(test), dtype=torch.int64)).told
        np.testing.assert_allclose(told.exp().numpy(), answers(shard, test.x, lam), rtol=1e-9, atol=1e-9)
    assert len(chosen) > 1


def test_it_is_a_transform_of_any_method():
    run = played(toy("ifca", {"local": LOCAL, "transforms": [{"kind": "neighbors", "k": 3}]}), rounds=2)
    assert run.host.algorithm.transforms[0].label == "neighbors"
    *_, scores = judged(run)
    assert scores.choice.sum(1).equal(scores.rows)
