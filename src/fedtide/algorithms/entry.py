"""An entry of the registry, presets, and how an algorithm is made: as the paper has it, safe, or with transforms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Literal

from fedtide.core.base import Algorithm
from fedtide.core.errors import FedtideError
from fedtide.fields.vocabulary import Family, in_words
from fedtide.transforms.transform import Transform

Trait = Literal["labels", "groups", "meaning", "hours", "drift", "holdings", "nothing"]
"""What an inspection may find that speaks for a method; `fedtide.inspection.advice` says when."""


@dataclass(frozen=True)
class Safe:
    """What `safe = true` stands for: the form of a method that lost no point where there was nothing to find.

    Args:
        options: of the algorithm, which may not be given beside `safe`.
        usual: defaults of the safe form, which may be changed.
        transforms: that it has.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    transforms: tuple[Transform, ...] = ()


@dataclass(frozen=True)
class Entry:
    """An algorithm in the registry.

    Args:
        name: in a configuration.
        make: builds an Algorithm from a task and ingredients; its signature is the algorithm's configuration.
        sends: payloads down and up, in a few words.
        family: what it trains.
        reveals: names of what the server is shown of a client by itself with the default options, beside what the
            cohort asks (`fedtide.fields.vocabulary`).
        tells: what the server learns of a client by itself from sums, or from how it is asked or answers, in words.
        keeps: memory of a client between rounds.
        helps: traits of data that speak for the algorithm.
        exempt: laws that cannot hold for the algorithm, each with the reason.
        safe: what `safe = true` stands for; None if there is no such form.
    """

    name: str
    make: Callable[..., Algorithm]
    sends: str
    family: Family
    reveals: tuple[str, ...] = ()
    tells: str = ""
    keeps: str = "nothing"
    helps: tuple[Trait, ...] = ()
    exempt: Mapping[str, str] = field(default_factory=dict)
    safe: Safe | None = None

    @property
    def sees(self) -> str:
        """What the server sees of a client by itself, in words."""
        return ", ".join(filter(None, (self.tells, in_words(self.reveals)))) or "sums only"


def preset(
    name: str, make: Callable[..., Algorithm], summary: str, module: str = "", **defaults: Any
) -> Callable[..., Algorithm]:
    """Build an algorithm's function from another one by changing defaults.

    Without `module`, its docstring goes on with that of the first new default, whose module says where it is from.

    Args:
        name: of the algorithm.
        make: builds an Algorithm from a task and ingredients.
        summary: first line of the docstring.
        module: whose docstring says where the preset is from.
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

    rule, rest = "" if module else inspect.getdoc(kind) or "", inspect.getdoc(make) or ""
    made.__doc__ = "\n\n".join(filter(None, [summary, rule.partition("\n\nArgs:")[0], rest.partition("\n\n")[2]]))
    made.__module__ = module or kind.__module__
    made.__name__ = made.__qualname__ = name
    made.__signature__ = signature  # type: ignore[attr-defined]
    made.changed = tuple(defaults)  # type: ignore[attr-defined]
    return made


def with_safe(name: str, safe: Safe | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an algorithm's options with those that `safe = true` stands for.

    Args:
        name: of the algorithm, for the error.
        safe: what its safe form is.
        given: the options that are written.

    Raises:
        FedtideError: it has no safe form, or an option is given that `safe` sets.
    """
    if safe is None:
        raise FedtideError(f"safe: '{name}' has no safe form; leave safe out")
    for key in safe.options:
        if key in given:
            raise FedtideError(f"{key}: is not allowed with safe = true, which sets it; leave one of them out")
    return {**safe.usual, **safe.options, **given}


def build(make: Callable[..., Algorithm], options: Mapping[str, Any]) -> Algorithm:
    """Make an algorithm that knows its options.

    Args:
        make: its function.
        options: its arguments by name, the task among them.
    """
    algorithm = make(**options)
    task = options.get("task")  # as it was given: its own may have branches
    return replace(algorithm, options=dict(options), **({} if task is None else {"task": task}))
