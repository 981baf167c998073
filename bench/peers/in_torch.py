"""The models of the works in plain torch, with the names of Fedtide's layers; and what torch peers share."""

from collections import OrderedDict

import torch
from torch import nn
from turns import Weights


def built(kind: str, weights: Weights) -> nn.Sequential:
    """A model with these weights."""
    model = nn.Sequential(OrderedDict(LAYERS[kind]()))
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return model


def weights_of(model: nn.Module) -> Weights:
    """The weights of a model."""
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def _linear() -> dict[str, nn.Module]:
    return {"flatten": nn.Flatten(), "head": nn.Linear(784, 10)}


def _mlp() -> dict[str, nn.Module]:
    return {"flatten": nn.Flatten(), "dense1": nn.Linear(784, 200), "relu1": nn.ReLU(), "head": nn.Linear(200, 10)}


def _lenet5() -> dict[str, nn.Module]:
    return {
        "conv1": nn.Conv2d(1, 6, 5, padding=2), "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(6, 16, 5), "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2), "flatten": nn.Flatten(),
        "dense1": nn.Linear(400, 120), "relu3": nn.ReLU(), "dense2": nn.Linear(120, 84), "relu4": nn.ReLU(),
        "head": nn.Linear(84, 10),
    }  # fmt: skip


def _cnn() -> dict[str, nn.Module]:
    return {
        "conv1": nn.Conv2d(1, 32, 3), "relu1": nn.ReLU(), "conv2": nn.Conv2d(32, 64, 3), "relu2": nn.ReLU(),
        "pool": nn.MaxPool2d(2), "flatten": nn.Flatten(), "dense": nn.Linear(9216, 128), "relu3": nn.ReLU(),
        "head": nn.Linear(128, 10),
    }  # fmt: skip


def _small_cnn() -> dict[str, nn.Module]:
    return {
        "conv1": nn.Conv2d(1, 8, 3, stride=2), "relu1": nn.ReLU(), "conv2": nn.Conv2d(8, 16, 3), "relu2": nn.ReLU(),
        "pool": nn.MaxPool2d(2), "flatten": nn.Flatten(), "dense": nn.Linear(400, 64), "relu3": nn.ReLU(),
        "head": nn.Linear(64, 10),
    }  # fmt: skip


LAYERS = {"linear": _linear, "mlp": _mlp, "lenet5": _lenet5, "cnn": _cnn, "small-cnn": _small_cnn}
