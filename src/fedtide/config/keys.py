"""The keys of an algorithm, and what may stand there, in words: for the command line and the documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from textwrap import dedent
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from fedtide.config.reading import SHARED
from fedtide.config.schema import Method, maker
from fedtide.config.shapes import bare, is_choice, is_table, is_union, ranges, tags


def options(name: str) -> dict[str, tuple[Any, Any]]:
    """What a method with this algorithm may say: (type, default)."""
    make = maker(name)
    hints = get_type_hints(make, include_extras=True)
    return {
        key: (hints.get(key, Any), ... if p.default is inspect.Parameter.empty else p.default)
        for key, p in inspect.signature(make).parameters.items()
        if key != "task"
    }


def arguments(block: str) -> dict[str, str]:
    """What the lines of an `Args:` section say of each name.

    >>> arguments("Args:\\n    rate: of learning,\\n        above 0.\\n    batch: rows.")
    {'rate': 'of learning, above 0.', 'batch': 'rows.'}
    """
    found: dict[str, str] = {}
    name = ""
    for line in dedent("\n".join(block.splitlines()[1:])).splitlines():
        if line.startswith(" "):
            found[name] += " " + line.strip()
        else:
            name, _, found_text = line.partition(":")
            found[name] = found_text.strip()
    return found


RANGES = {"gt": "more than {}", "ge": "{} or more", "lt": "less than {}", "le": "at most {}"}


def allowed(kind: Any) -> str:
    """What a key may hold, in words."""
    marks, kind = ranges(kind), bare(kind)
    if is_choice(kind):
        return ", ".join(code(tag) for member in get_args(kind) for tag in tags(bare(member))[:1])
    if get_origin(kind) is Literal:
        return ", ".join(code(value) for value in get_args(kind))
    if get_origin(kind) is tuple:
        inside = get_args(kind)
        if inside[-1] is ...:
            return f"list of: {'table' if is_table(inside[0]) else allowed(inside[0])}"
        return f"list of {len(inside)}: {allowed(inside[0])}"
    if get_origin(kind) is dict or is_table(kind):
        return "table"
    if is_union(kind):
        return " or ".join(allowed(member) for member in get_args(kind))
    word = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", Any: "any value"}.get(kind)
    if word is None:
        return f"`{getattr(kind, '__name__', kind)}`"
    limits = {name: getattr(r, name) for r in marks for name in RANGES if getattr(r, name, None) is not None}
    if limits.keys() in ({"ge", "le"}, {"ge", "lt"}):
        return f"{word}, {limits['ge']:g} to {'below ' if 'lt' in limits else ''}{limits.get('le', limits.get('lt')):g}"
    said = [RANGES[name].format(f"{value:g}") for name, value in limits.items()]
    return ", ".join([word, " and ".join(said)] if said else [word])


def code(value: Any) -> str:
    """A value as it stands in TOML."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def spelled(value: Any) -> str:
    """A default as it would be written."""
    if value is ...:
        return "must be given"
    if value is None:
        return "none"
    if value == {}:
        return "empty"
    if dataclasses.is_dataclass(value) and (names := tags(type(value))):
        return code(names[0])
    if isinstance(value, list | tuple):
        return f"`[{', '.join(code(v).strip('`') for v in value)}]`"
    if isinstance(value, dict | BaseModel) or dataclasses.is_dataclass(value):
        return "see its keys"
    return code(value)


# -- one algorithm ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a method: its name, what it may hold, its default, and what it means."""

    name: str
    allowed: str
    default: str
    meaning: str


def keys_of(name: str) -> list[Key]:
    """The keys of a method with this algorithm, and then those that every method has.

    >>> [key.name for key in keys_of("fedavg")][:2], [key for key in keys_of("fedprox") if key.name == "mu"]
    (['local', 'server'], [Key(name='mu', allowed='number, 0 or more', default='0.1', meaning='strength of the pull.')])
    """
    own = [(key, *said) for key, said in options(name).items()]
    shared = [
        (key, field.annotation, ... if field.is_required() else field.default)
        for key, field in Method.model_fields.items()
        if key in {*SHARED, "shift"}
    ]
    means = _means(Method) | _means(maker(name))
    return [Key(key, _plain(allowed(hint)), _plain(spelled(default)), means.get(key, "")) for key, hint, default in (
        *own, *shared)]  # fmt: skip


def _means(owner: Any) -> dict[str, str]:
    """What the docstring of a function or class says of its arguments."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(owner.__doc__ or ""))
    return next((arguments(block) for block in blocks if block.startswith("Args:")), {})


def _plain(text: str) -> str:
    return text.replace("`", "")


def about(name: str) -> Iterator[str]:
    """What an algorithm is and where it is from: the first paragraphs of its module, one line each."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(sys.modules[maker(name).__module__].__doc__ or ""))
    for block in blocks[:2]:
        if not block.startswith(("|", "    ")):
            yield " ".join(block.split())
