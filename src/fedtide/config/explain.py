"""Validation errors as one line a person can act on."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from fedtide.core.errors import nearest

NUMBERS = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "tuple_type": "a list of values",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "dataclass_type": "a table",
    "model_attributes_type": "a table",
}


def explained(error: ValidationError, model: type, data: Any) -> str:
    """The first problem as `key: what was found, what is allowed`, and how many more there are."""
    problems = error.errors()
    # A key that is misspelt is why another one is missing.
    first = next((p for p in problems if p["type"] in ("extra_forbidden", "unexpected_keyword_argument")), problems[0])
    key, kind = _located(first["loc"], model, data)
    # A method's own shift repeats the mistakes of the shared one.
    others = {(p["type"], p["loc"][-1:], repr(p.get("input"))) for p in problems} - {
        (first["type"], first["loc"][-1:], repr(first.get("input")))
    }
    more = f" (and {len(others)} more)" if others else ""
    return f"{key}: {_said(first, kind)}{more}"


def _said(problem: Any, kind: Any) -> str:
    name, found, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    if name == "extra_forbidden" or name == "unexpected_keyword_argument":
        return f"unknown key; {nearest(str(problem['loc'][-1]), names_of(kind))}"
    if name in ("missing", "missing_argument"):
        return "missing"
    if name in ("literal_error", "enum"):
        return f"found {_shown(found)}; {nearest(str(found), _words(context['expected']))}"
    if name == "union_tag_invalid":
        return f"found '{context['tag']}'; {nearest(str(context['tag']), _words(context['expected_tags']))}"
    if name == "union_tag_not_found":
        key, tags = context["discriminator"], ", ".join(tags_of(kind))
        return f"found {_shown(found)}, allowed: a table with {key} = one of {tags}"
    if name in NUMBERS:
        return f"found {_shown(found)}, allowed: {NUMBERS[name].format(**context)}"
    if name in ("too_short", "string_too_short"):
        return f"found {_shown(found)}, allowed: {context['min_length']} or more"
    if name == "string_too_long":
        return f"found {len(found)} characters, allowed: {context['max_length']} or fewer"
    if name == "value_error":
        return str(context.get("error", problem["msg"]))
    return f"found {_shown(found)}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def _words(listed: str) -> list[str]:
    return [word.strip(" '") for word in listed.replace(" or ", ", ").split(",")]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _located(loc: tuple[Any, ...], model: Any, data: Any) -> tuple[str, Any]:
    """The dotted key of a problem, and the type at (or, for an unknown key, above) it.

    A location names the chosen member of every union on its way; such names are not keys.
    """
    key, kind = "", model
    for step in loc:
        kind = _bare(kind)
        if isinstance(step, str) and _is_union(kind):
            member = _member(kind, step)
            if member is not None:
                kind = member
                continue
        if isinstance(step, int):
            key += _row_name(data, step)
            data = data[step] if isinstance(data, list | tuple) and step < len(data) else None
            kind = next((arg for arg in get_args(kind) if arg is not ...), Any)
            continue
        key += f".{step}" if key else str(step)
        data = data.get(step) if isinstance(data, Mapping) else None
        below = _fields(kind).get(str(step))
        if below is not None:
            kind = below
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
    return key or "the file", _bare(kind)


def _row_name(data: Any, index: int) -> str:
    row = data[index] if isinstance(data, list | tuple) and index < len(data) else None
    return f" {row['name']!r}" if isinstance(row, Mapping) and "name" in row else f"[{index}]"


def _bare(kind: Any) -> Any:
    """A type without its annotations and without None."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    members = [m for m in get_args(kind) if m is not type(None)] if _is_union(kind) else []
    return _bare(members[0]) if len(members) == 1 else kind


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _tags(kind: Any) -> tuple[str, ...]:
    """The values of `kind` (or `by`) that choose a member of a union."""
    for name in ("kind", "by"):
        hint = _fields(kind).get(name)
        if get_origin(hint) is Literal:
            return get_args(hint)
    return ()


def _member(union: Any, tag: str) -> Any:
    return next((m for m in map(_bare, get_args(union)) if tag in _tags(m) or tag == getattr(m, "__name__", "")), None)


def tags_of(union: Any) -> list[str]:
    """Every `kind` that a choice knows."""
    return [tag for member in get_args(_bare(union)) for tag in _tags(_bare(member))]


def names_of(kind: Any) -> list[str]:
    """The keys that a table of this type may have."""
    kind = _bare(kind)
    if _is_union(kind):
        return sorted({name for member in get_args(kind) for name in names_of(member)})
    return list(_fields(kind))


def _fields(kind: Any) -> dict[str, Any]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}
    return {}
