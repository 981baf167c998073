"""Models of single clients at the server: who receives which, what comes back, and how they are mixed."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from fedtide.algorithms.cfl import weighted_mean
from fedtide.algorithms.fedavg import fedavg
from fedtide.algorithms.fesem import mean_client_models
from fedtide.clusters.client_models import (
    REVEALED,
    ClientModels,
    flatten_model,
    mix_client_models,
    no_models,
    reveal_model,
    shape_model,
    train_apart,
)
from fedtide.cohorts import Everyone
from fedtide.core.base import Algorithm, Moment, Traits, Weights, shared_weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import leaves, same
from fedtide.learn import LocalTrainer, Task, Training
from helpers.quadratics import fleet_of
from helpers.stages import holding

TASK = Task(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), dtype=torch.float64)
LOCAL = LocalTrainer(lr=0.1, epochs=2, batch_size=4)
ROWS = (8, 5, 11, 0)
"""The last client has no rows, and never answers."""


@dataclass(frozen=True)
class State:
    weights: Any
    cohort: Any = None


def people():
    draw = torch.Generator().manual_seed(1)
    rows = [
        (torch.randn(n, 3, generator=draw, dtype=torch.float64), torch.randint(2, (n,), generator=draw)) for n in ROWS
    ]
    return holding(rows, classes=2)


def fleet(reveals: Any = REVEALED):
    work = reveal_model(Training(TASK, LOCAL, "samples"))
    method = Algorithm(
        "apart", None, {"train": work}, None, shared_weights, TASK.predict, traits=Traits(reveals=reveals)
    )
    made = fleet_of(method, who=people())
    made.begin(Moment(0, 1, 0.0))
    return made


def apart(models, place, clients=(0, 1, 2, 3), where=None):
    state = State(models[0])
    clients, place = torch.tensor(clients), torch.tensor(place)
    return train_apart(where or fleet(), state, clients, models, place, Everyone())[1:]


def drawn(count):
    return [TASK.init(Rng(k)) for k in range(count)]


def alone(client, model):
    """What a client trains of a model, by local training and nothing else."""
    fitted = LOCAL(
        TASK, TASK.loss, model, people().shard(client, Moment(0, 1)), Moment(0, 1), Rng(0).at(0, client, "train")
    )
    return flatten_model(fitted.weights)


def test_each_client_trains_the_model_of_its_place_with_its_running_statistics():
    models = drawn(3)
    reply, trained = apart(models, [2, 0, 2, 1])
    assert trained.clients.tolist() == reply.clients.tolist() == [0, 1, 2]
    assert trained.weight.tolist() == [8.0, 5.0, 11.0]
    for row, (client, place) in zip(trained.models, ((0, 2), (1, 0), (2, 2)), strict=True):
        torch.testing.assert_close(row, alone(client, models[place]), rtol=0, atol=1e-12)


def test_clients_may_be_named_in_any_order():
    models = drawn(3)
    _, ours = apart(models, [2, 0, 1], (0, 1, 2))
    _, theirs = apart(models, [1, 2, 0], (2, 0, 1))
    assert same(ours, theirs)


def test_nobody_answers():
    reply, trained = apart(drawn(1), [0], (3,))
    assert reply.total is None
    assert same(trained, no_models(drawn(1)[0]))
    assert trained.models.shape == (0, len(flatten_model(drawn(1)[0])))


def test_a_server_that_may_see_sums_alone_refuses_it():
    made = fleet()
    made.reveals = ()
    with pytest.raises(FedtideError, match="sums only"):
        apart(drawn(1), [0, 0, 0, 0], where=made)


def test_equal_shares_of_one_model_are_federated_averaging():
    (start,) = drawn(1)
    _, trained = apart([start], [0, 0, 0, 0])
    algorithm = fedavg(TASK, LOCAL, cohort=Everyone())
    made = fleet_of(algorithm, who=people())
    made.begin(Moment(0, 1, 0.0))
    state, _ = algorithm.round(replace(algorithm.init(made, Rng(0)), weights=start), made, Rng(0).at(0, "server"))
    for mixed in mix_client_models(trained, torch.full((4, 3), 0.25)):
        torch.testing.assert_close(mixed, flatten_model(state.weights), rtol=0, atol=1e-12)


def trained_by_hand(weight=(1.0, 3.0, 4.0)):
    models = torch.tensor([[0.1, -3.0], [4.3, 0.7], [8.9, 1e-3]])
    return ClientModels(torch.tensor([2, 5, 7]), models, torch.tensor(weight, dtype=torch.float64))


def test_a_share_of_one_client_is_its_model_to_the_bit():
    trained = trained_by_hand()
    assert same(mix_client_models(trained, torch.eye(3)), trained.models)
    assert same(mix_client_models(trained, 1e-9 * torch.eye(3)[[1]]), trained.models[[1]])


def test_mixtures_by_hand():
    """Weights 1, 3 and 4 times shares 2, 0 and 1: parts 2/6, 0, 4/6. The scale of shares says nothing."""
    trained = trained_by_hand()
    expected = torch.tensor([[(2 * 0.1 + 4 * 8.9) / 6, (2 * -3.0 + 4 * 1e-3) / 6]])
    for scale in (1.0, 1e-8, 1e8):
        share = scale * torch.tensor([[2.0, 0.0, 1.0]], dtype=torch.float64)
        torch.testing.assert_close(mix_client_models(trained, share), expected, rtol=1e-6, atol=0)


def test_means_of_groups_keep_the_model_of_an_empty_group():
    like = [Weights({"w": torch.full((2,), float(k))}) for k in range(3)]
    means = mean_client_models(trained_by_hand((1.0, 1.0, 3.0)), torch.tensor([2, 0, 2]), 3, like)
    assert means[1] is like[1]
    assert means[0].params["w"].tolist() == trained_by_hand().models[1].tolist()
    assert means[2].params["w"].tolist() == pytest.approx([(0.1 + 3 * 8.9) / 4, (-3.0 + 3e-3) / 4])


def test_members_that_count_for_nothing_leave_everything_finite():
    like = [Weights({"w": torch.full((2,), float(k))}) for k in range(2)]
    trained = trained_by_hand((0.0, 2.0, 1.0))
    means = mean_client_models(trained, torch.tensor([1, 0, 0]), 2, like)
    assert means[1] is like[1]
    assert mix_client_models(trained, torch.eye(3)[[0]]).tolist() == [[0.0, 0.0]]
    assert weighted_mean(trained.models, torch.zeros(3, dtype=torch.float64)).tolist() == [0.0, 0.0]


def test_a_model_survives_as_a_row():
    (model,) = drawn(1)
    again = shape_model(flatten_model(model), model)
    assert same(again, Weights({**model.params}, {**model.buffers}))
    assert len(leaves(again)) == 8
