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
from fedtide.config.shapes import bare, described, is_choice, is_table, is_union, ranges, tags
from fedtide.core.config_types import changed


def options(name: str) -> dict[str, tuple[Any, Any]]:
    """Return the options of a method with this algorithm: (type, default)."""
    make = maker(name)
    hints = get_type_hints(make, include_extras=True)
    return {
        key: (hints.get(key, Any), ... if p.default is inspect.Parameter.empty else p.default)
        for key, p in inspect.signature(make).parameters.items()
        if key != "task"
    }


def arguments(block: str) -> dict[str, str]:
    """Return the description of each name in an `Args:` section.

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
    """Describe the values that a key may have."""
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
        most = _bound(limits["le"]) if "le" in limits else f"below {_bound(limits['lt'])}"
        return f"{word}, {_bound(limits['ge'])} to {most}"
    said = [RANGES[name].format(_bound(value)) for name, value in limits.items()]
    return ", ".join([word, " and ".join(said)] if said else [word])


def _bound(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def code(value: Any) -> str:
    """A value as it stands in TOML.

    >>> code({"kind": "sgd", "momentum": 0.9})
    '`{ kind = "sgd", momentum = 0.9 }`'
    """
    if isinstance(value, dict):
        return f"`{{ {', '.join(f'{key} = {code(each).strip(chr(96))}' for key, each in value.items())} }}`"
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
        own = {key: each for key, each in changed(value).items() if key != "kind"}
        kind = {"by" if hasattr(value, "by") else "kind": names[0]}
        return code(kind | own) if own else code(names[0])
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

    >>> keys = {key.name: key for key in keys_of("vanilla")}
    >>> list(keys)[:3], keys["branches"].allowed, keys["branches"].default, keys["branches"].meaning
    (['local', 'branches', 'branch_layer'], 'whole number, 1 to 1,000', '2', 'number of branches, K.')
    """
    own = [(key, *option) for key, option in options(name).items()]
    shared = [
        (key, field.annotation, ... if field.is_required() else field.default)
        for key, field in Method.model_fields.items()
        if key in {*SHARED, "shift"}
    ]
    said = meanings(Method) | meanings(maker(name))
    return [
        Key(key, _plain(allowed(hint)), _plain(spelled(default)), said.get(key) or described(hint))
        for key, hint, default in (*own, *shared)
    ]


def meanings(owner: Any) -> dict[str, str]:
    """Return the descriptions of arguments in a docstring; a type may say more (`shapes.described`)."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(owner.__doc__ or ""))
    return next((arguments(block) for block in blocks if block.startswith("Args:")), {})


def _plain(text: str) -> str:
    return text.replace("`", "")


def about(name: str) -> Iterator[str]:
    """Describe an algorithm and its source: the first paragraphs of its module, one line each."""
    make = maker(name)
    if hasattr(make, "__wrapped__"):  # a preset, whose module tells of several
        yield (make.__doc__ or "").partition("\n")[0]
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(sys.modules[make.__module__].__doc__ or ""))
    for block in blocks[:2]:
        if not block.startswith(("|", "    ")):
            yield " ".join(block.split())
