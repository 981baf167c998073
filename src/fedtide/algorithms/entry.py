"""A line of the registry, and presets: algorithms that are others with other defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Literal

from fedtide.core.reveals import in_words
from fedtide.core.types import Algorithm
from fedtide.request import Family

Trait = Literal["labels", "groups", "meaning", "hours", "drift", "holdings", "nothing"]
"""What an inspection may find that speaks for a method; `fedtide.inspection.advice` says when."""


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


@dataclass(frozen=True)
class Entry:
    """An algorithm in the registry.

    Args:
        make: builds an Algorithm from a task and ingredients; its signature is the algorithm's configuration.
        sends: payloads down and up, in a few words.
        family: what it trains.
        reveals: names of what the server is shown of a client by itself with the default options, beside what the
            cohort asks (`fedtide.core.reveals`).
        tells: what the server learns of a client by itself from sums, or from how it is asked or answers, in words; by
            the beginning of the name of the variants for which it is so, "" for all others.
        keeps: memory of a client between rounds.
        helps: traits of data that speak for the algorithm.
        exempt: laws that cannot hold for the algorithm, each with the reason.
        variants: options that the laws are tested with, by name. The name "" has those that the algorithm needs to show
            its effect within six rounds of a short period. Tables `shift` and `data` are merged into the experiment's.
        reductions: options with which it is another algorithm, or the same one with others. Local training is the same.
    """

    make: Callable[..., Algorithm]
    sends: str
    family: Family
    reveals: tuple[str, ...] = ()
    tells: Mapping[str, str] = field(default_factory=dict)
    keeps: str = "nothing"
    helps: tuple[Trait, ...] = ()
    exempt: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reductions: Sequence[Reduction] = ()

    @property
    def sees(self) -> str:
        """What the server sees of a client by itself, in words."""
        return ", ".join(filter(None, (self.told(), in_words(self.reveals)))) or "sums only"

    def told(self, variant: str = "") -> str:
        """Return what the server learns of a client besides what it is shown, with a variant's options."""
        begin = max((key for key in self.tells if variant.startswith(key)), key=len, default="")
        return self.tells.get(begin, "")


def preset(name: str, make: Callable[..., Algorithm], summary: str, **defaults: Any) -> Callable[..., Algorithm]:
    """Build an algorithm's function from another one by changing defaults.

    Its docstring goes on with that of the first new default, whose module says where the preset is from.

    Args:
        name: of the algorithm.
        make: builds an Algorithm from a task and ingredients.
        summary: first line of the docstring.
        defaults: ingredients that replace defaults of `make`.
    """
    parameters = inspect.signature(make).parameters.values()
    signature = inspect.Signature([p.replace(default=defaults.get(p.name, p.default)) for p in parameters])
    kind = type(next(iter(defaults.values())))

    @wraps(make)
    def made(*given: Any, **options: Any) -> Algorithm:
        bound = signature.bind(*given, **options)
        bound.apply_defaults()
        return replace(make(*bound.args, **bound.kwargs), name=name)

    rule, rest = inspect.getdoc(kind) or "", inspect.getdoc(make) or ""
    made.__doc__ = "\n\n".join([summary, rule.partition("\n\nArgs:")[0], rest.partition("\n\n")[2]])
    made.__module__ = kind.__module__
    made.__name__ = made.__qualname__ = name
    made.__signature__ = signature  # type: ignore[attr-defined]
    return made
