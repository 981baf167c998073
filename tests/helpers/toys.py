"""Tiny federations for tests: eight clients in two groups, four features, three classes."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedtide.algorithms import REGISTRY
from fedtide.config import Experiment
from fedtide.core.base import PARTS, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.laws import case as laws
from fedtide.laws.case import TOY, Played, merged, played
from helpers.variants import variants_of, without_replaced

__all__ = ["ALIKE", "PARTS", "TOY", "VARIANTS", "Played", "normed", "played", "toy"]

VARIANTS = {
    f"{algorithm} {name}".strip(): (algorithm, options)
    for algorithm in REGISTRY
    for name, options in variants_of(algorithm).items()
}
"""Algorithms as the laws meet them, with their options."""

ALIKE = (
    "fedasync", "fedbn", "fedntd", "fedprox", "fedsgd", "k-fed", "lg-fedavg", "min-loss", "moon", "pfedme", "q-fedavg",
    "t-shot", "window", *(name for name, entry in REGISTRY.items() if entry.family == "server-optimizer"),
)  # fmt: skip
"""Registered algorithms that are much like another: it with a step of its own, other layers, or another optimizer.

Without `--thorough` few laws run over them.
"""


def toy(algorithm: str, options: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    """The toy experiment with one method.

    Args:
        algorithm: registered name or module:function.
        options: of the method; local training and a cohort of four are given. A cohort that is a word is one of four.
        changes: top-level keys; tables are merged into the toy's.
    """
    algorithm, own = VARIANTS.get(algorithm, (algorithm, {}))
    tables = {key: value for key, value in own.items() if key in ("shift", "data")}
    options = without_replaced({key: value for key, value in own.items() if key not in tables} | (options or {}))
    if algorithm == "fielding":
        options = {"cohort": "uniform"} | options
    if isinstance(options.get("cohort"), str) and options["cohort"] != "everyone":
        options["cohort"] = {"kind": options["cohort"], "clients_per_round": 4}
    return laws.toy(algorithm, options, **merged(tables, changes))


def dropping(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 5), nn.Dropout(0.5), nn.Linear(5, classes))


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, classes))


# -- the toy's network as plain modules, for naive implementations -----------------------------------------------------


def network_of(weights: Weights) -> nn.Module:
    """The network in float64."""
    layers = {"dense1": nn.Linear(4, 5), "relu1": nn.ReLU(), "head": nn.Linear(5, 3)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    model.double().load_state_dict(weights.params)
    return model


def trained_plainly(model: nn.Module, shard: Shard, key: Rng, lr: float = 0.1) -> nn.Module:
    """A copy after two epochs of SGD in batches of four, shuffled by the key of a client's training."""
    own, shuffle = copy.deepcopy(model), key.at("shuffle").torch()
    optimizer = torch.optim.SGD(own.parameters(), lr=lr)
    for _ in range(2):
        for batch in torch.randperm(len(shard.y), generator=shuffle).split(4):
            optimizer.zero_grad()
            F.cross_entropy(own(shard.x.double()[batch]), shard.y[batch]).backward()
            optimizer.step()
    return own
