"""Initial weights: how they are distributed, what is left as torch drew it, and that branches begin alike."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.task import Task, with_branches
from fedtide.models import (
    CNN,
    LSTM,
    MLP,
    CifarCNN,
    LeafCNN,
    LeNet5,
    Linear,
    MobileNetV2,
    Python,
    ResNet8,
    ResNet18,
    ShuffleNetV2,
    SmallCNN,
    ViT,
)  # fmt: skip
from fedtide.models.networks import initialize
from fedtide.runs.build import rows_of, task_of
from helpers.studies import A, raw

GREY = (1, 28, 28)


def drawn(model, init, shape=GREY, classes=10) -> dict[str, torch.Tensor]:
    """The weights of a network by their names."""
    task = Task(partial(model.build, shape, classes), init_layers=partial(initialize, init=init))
    return task.init(Rng(3)).params


@pytest.mark.parametrize(
    ("init", "bound"),
    [
        ("glorot", lambda received, sent: math.sqrt(6 / (received + sent))),
        ("he", lambda received, sent: math.sqrt(6 / received)),
    ],
)
def test_weights_are_uniform_within_the_published_bound_and_biases_zero(init, bound):
    """784 -> 64 -> 10 and, for a convolution of 3 x 3, 9 and 72 numbers received by each map, 72 and 144 sent."""
    for model, fans in (
        (MLP((64,)), {"dense1": (784, 64), "head": (64, 10)}),
        (SmallCNN(), {"conv1": (9, 72), "conv2": (72, 144), "dense": (400, 64)}),
    ):
        params = drawn(model, init)
        for layer, (received, sent) in fans.items():
            weight, largest = params[f"{layer}.weight"], bound(received, sent)
            assert 0.9 * largest < float(weight.abs().max()) <= largest
            assert float(weight.std()) == pytest.approx(largest / math.sqrt(3), rel=0.15)
            assert not params[f"{layer}.bias"].any()


def test_torch_is_what_the_layers_are_built_with():
    build = partial(CNN((4, 4), 8).build, GREY, 10)
    assert same(Task(build).init(Rng(3)), Task(build, init_layers=partial(initialize, init="torch")).init(Rng(3)))


FIRST = [
    (Linear(), -0.021), (MLP(), -0.236), (CNN(), -4.183), (LeafCNN(), -15.472), (CifarCNN(), 27.67),
    (SmallCNN(), -4.37), (LeNet5(), -46.536), (ResNet8(), 2898.476), (ResNet18(), 1297.925),
    (ResNet18(form="cifar"), 265242.475), (ResNet18(form="imagenet"), 196358.435), (MobileNetV2(), 1844003.615),
    (ShuffleNetV2(), 905596.962), (ViT(), 3361.981), (LSTM(), 36.553),
]  # fmt: skip
"""Sums of first weights with seed 3, those of the k-th tensor k times, which tell the order of the draws."""


@pytest.mark.parametrize(("model", "total"), FIRST, ids=lambda value: str(value)[:30])
def test_first_weights_of_a_seed_stay_the_same(model, total):
    torch.manual_seed(3)
    weights = model.build((6,) if model.kind == "lstm" else (3, 32, 32), 10).parameters()
    found = sum(k * float(p.detach().double().sum()) for k, p in enumerate(weights))
    assert found == pytest.approx(total, rel=1e-4, abs=0.02)  # processors draw normal numbers with other roundings


def test_an_lstm_begins_as_in_keras():
    params = drawn(LSTM(embedding=3, hidden=5), "glorot", (6,), 11)
    received, recurrent = params["lstm.cell.weight_ih_l0"], params["lstm.cell.weight_hh_l0"]
    assert received[:, -1].tolist() == [0.0] * 5 + [1.0] * 5 + [0.0] * 10
    assert float(received[:, :-1].abs().max()) <= math.sqrt(6 / (3 + 20))
    torch.testing.assert_close(recurrent.T @ recurrent, torch.eye(5))
    plain = Task(partial(LSTM(embedding=3, hidden=5).build, (6,), 11)).init(Rng(3)).params
    assert torch.equal(params["embedding.weight"], plain["embedding.weight"])


def test_norms_and_layers_without_bias_are_left():
    module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.GroupNorm(2, 4))
    nn.init.constant_(module[1].weight, 0.7)
    initialize(module, "he")
    assert (module[1].weight == 0.7).all()


def test_every_branch_is_drawn():
    build = partial(SmallCNN().build, GREY, 10)
    task = Task(build, example=torch.zeros(1, *GREY), init_layers=partial(initialize, init="glorot"))
    params = with_branches(task, "head", 2).init(Rng(3)).params
    heads = [p for name, p in params.items() if "copies" in name and name.endswith("weight")]
    assert len(heads) == 2
    assert not torch.equal(*heads)
    assert all(float(head.abs().max()) <= math.sqrt(6 / 74) for head in heads)


def test_it_is_a_key_of_the_model():
    experiment = from_dict(raw(A, model={"kind": "mlp", "hidden": [4], "init": "glorot"}))
    params = task_of(experiment, experiment.method[0], rows_of(experiment, 0)).init(Rng(0)).params
    assert not params["head.bias"].any()
    with pytest.raises(FedtideError, match=r"model\.init: found 'keras', allowed: torch, glorot, he"):
        from_dict(raw(A, model={"kind": "mlp", "init": "keras"}))
    assert not hasattr(Python("fedtide.models:MLP"), "init")  # a module of one's own begins as it is made
