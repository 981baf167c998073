"""The last layer is the same for all: the whole module "head", else the last layer with parameters."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import fedtide as ft
from fedtide.clusters.profile import Profiler
from fedtide.clusters.representation import Gradient
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn.layers import in_last_layer, last_layers, match_layers
from fedtide.models.two_headed import TwoHeaded
from fedtide.personal.client_networks import Networks

EXAMPLE = torch.zeros(2, 4)


def wide_head() -> ft.Task:
    head = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    net = nn.Sequential(OrderedDict(body=nn.Linear(4, 6), act=nn.ReLU(), head=head))
    return ft.Task(lambda: copy.deepcopy(net), example=EXAMPLE)


def without_head() -> ft.Task:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return ft.Task(lambda: copy.deepcopy(net), example=EXAMPLE)


@pytest.mark.parametrize(("task", "last"), [(wide_head(), "head."), (without_head(), "2.")])
def test_all_mean_the_same_layer(task, last):
    names = [name for name in task.scratch.names if name.startswith(last)]
    numbers = sum(task.scratch.weights.params[name].numel() for name in names)
    assert [*filter(in_last_layer(task), task.scratch.names)] == last_layers(task, 1, "layers") == names
    assert [*filter(match_layers(task, ("head",), "home"), task.scratch.names)] == names
    assert Networks(task).features(None)(task.init(Rng(0)), EXAMPLE).shape == (2, 6)
    assert Profiler(task).features(task.init(Rng(0)), EXAMPLE).shape == (2, 3)
    assert Gradient(last_layer=True, sketch=1_000_000).numbers(task) == numbers


@pytest.mark.parametrize("name", ["moon", "feroma", "flux_like", "fedper", "fedrod", "fedala", "knn_per", "fedpac"])
def test_methods_take_a_network_without_a_module_head(name):
    population = ft.population(torch.randn(40, 4), torch.arange(40) % 3, ft.data.IID(clients=2))
    options = {"warmup": 1} if name in ("feroma", "flux_like") else {}
    method = getattr(ft.algorithms, name)(without_head(), cohort=2, **options)
    run = ft.simulate(method, population, rounds=2)
    assert all(line["refused"] == 0 and line["samples"] > 0 for line in run.lines)


def test_a_network_of_one_layer_has_nothing_else():
    task = ft.Task(lambda: nn.Linear(4, 3), example=EXAMPLE)
    assert all(map(in_last_layer(task), task.scratch.names))
    assert Networks(task).features(None)(task.init(Rng(0)), EXAMPLE).shape == (2, 4)
    with pytest.raises(FedtideError, match="nothing is left to send"):
        ft.transforms.apply(ft.algorithms.fedavg(task), ft.transforms.AtHome())


@pytest.mark.parametrize("layer", ["2", ""])
def test_a_copy_of_a_network_with_two_heads_works_by_itself(layer):
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)) if layer else nn.Linear(4, 3)
    heads, x = TwoHeaded(net, layer), torch.randn(5, 4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        heads(torch.randn(5, 9))
    twin = copy.deepcopy(heads)
    assert torch.equal(twin(x), heads(x))
    with torch.no_grad():
        next(twin.own.parameters()).zero_()
    assert not torch.equal(twin(x), heads(x))


class Swapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.top, self.body = nn.Linear(6, 3), nn.Linear(4, 6)

    def forward(self, x):
        return self.top(self.body(x).relu())


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu", "fedrod", "fedccfa", "fedpac", "moon"])
def test_a_last_layer_that_makes_no_outputs_is_refused(name):
    with pytest.raises(FedtideError, match="the last layer 'body', but it does not make the outputs"):
        getattr(ft.algorithms, name)(ft.Task(Swapped, example=EXAMPLE))


def test_a_second_head_is_refused_without_an_example_too():
    population = ft.population(torch.randn(40, 4), torch.arange(40) % 3, ft.data.IID(clients=2))
    with pytest.raises(FedtideError, match="the last layer 'body', but it does not make the outputs"):
        ft.simulate(ft.algorithms.fedrod(ft.Task(Swapped), cohort=2), population, rounds=1)
