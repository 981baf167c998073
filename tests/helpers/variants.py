"""Options that algorithms are tested with, and those with which one is another: `tests/laws/*.toml`."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedtide.personal.ways import WAYS


@dataclass(frozen=True)
class Reduction:
    """Options with which an algorithm is another one.

    Args:
        options: of the algorithm.
        to: name of the other algorithm.
        its: options of the other algorithm.
        only: condition under which it is the other one, in words; empty for none.
        tolerance: largest relative and absolute difference of the weights; None means equal bit for bit.
    """

    options: Mapping[str, Any]
    to: str
    its: Mapping[str, Any] = field(default_factory=dict)
    only: str = ""
    tolerance: float | None = None


@cache
def _tables(name: str) -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent.parent / "laws" / name).read_text(encoding="utf-8"))


def variants_of(algorithm: str) -> Mapping[str, Mapping[str, Any]]:
    """Return options that an algorithm is tested with, by name; "" has the options that it needs for any effect.

    >>> list(variants_of("fedprox"))
    ['by-size']
    """
    variants: Mapping[str, Mapping[str, Any]] = _tables("variants.toml").get(algorithm, {})
    return variants


def without_replaced(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without the mixture if a personalization among them takes its place.

    >>> without_replaced({"mixture": {}, "transforms": ["choice"]})
    {'transforms': ['choice']}
    """
    kinds = [one if isinstance(one, str) else one["kind"] for one in options.get("transforms", ())]
    is_replaced = options.get("safe") or any(kind in (*WAYS, "personalized") for kind in kinds)
    return {key: value for key, value in options.items() if key != "mixture" or not is_replaced}


def reductions_of(algorithm: str) -> Sequence[Reduction]:
    """Return the options with which an algorithm is another one.

    >>> reductions_of("fedprox")[0]
    Reduction(options={'local': {'proximal': 0.0}}, to='fedavg', its={}, only='', tolerance=None)
    """
    return [Reduction(**table) for table in _tables("reductions.toml").get(algorithm, [])]
