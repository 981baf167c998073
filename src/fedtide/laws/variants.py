"""Options that the laws are tested with, and options with which a method is another one: data of the laws, in TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Reduction:
    """Options with which an algorithm is another one.

    Args:
        options: of the algorithm.
        to: name of the other algorithm.
        its: options of the other algorithm.
        tolerance: largest relative and absolute difference of the weights; None means equal bit for bit.
    """

    options: Mapping[str, Any]
    to: str
    its: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float | None = None


@cache
def _tables(name: str) -> Mapping[str, Any]:
    return tomllib.loads(files("fedtide.laws").joinpath(name).read_text(encoding="utf-8"))


def variants_of(algorithm: str) -> Mapping[str, Mapping[str, Any]]:
    """Return options that an algorithm is tested with, by name; "" has those that it needs to show its effect.

    >>> list(variants_of("fedprox"))
    ['by-size']
    """
    found: Mapping[str, Mapping[str, Any]] = _tables("variants.toml").get(algorithm, {})
    return found


def reductions_of(algorithm: str) -> Sequence[Reduction]:
    """Return the options with which an algorithm is another one.

    >>> reductions_of("fedprox")
    [Reduction(options={'local': {'proximal': 0.0}}, to='fedavg', its={}, tolerance=None)]
    """
    return [Reduction(**each) for each in _tables("reductions.toml").get(algorithm, [])]
