"""Tiny federations for tests: eight clients in two groups, four features, three classes."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

from torch import nn

from fedtide.algorithms import REGISTRY
from fedtide.config import Experiment, from_dict
from fedtide.laws.toy import TOY, Played, played

PARTS = ("train", "val", "test")
"""Of the rows that a client holds in all."""

VARIANTS = {
    f"{algorithm} {name}".strip(): (algorithm, options)
    for algorithm, entry in REGISTRY.items()
    for name, options in entry.variants.items()
}
"""Algorithms as the laws meet them, with their options."""


def toy(algorithm: str, options: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    """The toy experiment with one method.

    Args:
        algorithm: registered name or module:function.
        options: of the method; local training and a cohort of four are given. A cohort that is a word is one of four.
        changes: top-level keys; tables are merged into the toy's.
    """
    algorithm, own = VARIANTS.get(algorithm, (algorithm, {}))
    tables = {key: value for key, value in own.items() if key in ("shift", "data")}
    values = copy.deepcopy(TOY)
    for key, value in (*tables.items(), *changes.items()):
        both = isinstance(values.get(key), dict) and isinstance(value, dict)
        values[key] = {**values[key], **value} if both else value
    options = {key: value for key, value in own.items() if key not in tables} | (options or {})
    cohort = options.get("cohort", "uniform" if algorithm == "fielding" else 4)
    if isinstance(cohort, str) and cohort != "everyone":
        cohort = {"kind": cohort, "clients_per_round": 4}
    method = {"name": "toy", "algorithm": algorithm, "local": {"lr": 0.1, "batch_size": 4}, **options, "cohort": cohort}
    return from_dict({**values, "method": [method]})


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model with BatchNorm."""
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, classes))


@lru_cache(maxsize=2)
def reference(name: str) -> Played:
    """The toy of a method played as it is, once for all tests of a method that only read it."""
    return played(toy(name))
