"""Validation errors as one line a person can act on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from fedtide.core.errors import shown
from fedtide.fields.shapes import bare, fields_of, is_choice, is_table, is_union, tags
from fedtide.fields.vocabulary import meant, nearest, synonyms

NUMBERS = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "finite_number": "a finite number",
    "string_type": "a string",
    "tuple_type": "a list of values",
    "list_type": "a list",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("dict_type", "model_type", "dataclass_type", "model_attributes_type"), "a table"),
}
"""What is allowed, by pydantic's name of a problem."""

WHOLE = "the file: "
"""Place of a problem that is of no single key."""

Elsewhere = Callable[[str], str]
"""Finds the place of another table's key that a person may have meant by a word; "" if there is none."""

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def explained(error: ValidationError, model: type, data: Any, elsewhere: Elsewhere = lambda word: "") -> str:
    """The first problem as `key: what was found, what is allowed`."""
    problems = error.errors()
    # A key that is misspelt is why another one is missing.
    first = next((problem for problem in problems if problem["type"] in UNKNOWN), problems[0])
    key, kind = _located(first["loc"], model, data)
    return f"{key}: {_describe(first, key, kind, elsewhere)}"


def of_python(error: ValidationError, model: type, data: Any) -> str:
    """The first problem of a value made in Python: its key begins with the name of the class."""
    line = explained(error, model, data)
    return f"{model.__name__}: {line.removeprefix(WHOLE)}" if line.startswith(WHOLE) else f"{model.__name__}.{line}"


def _describe(problem: Any, key: str, kind: Any, elsewhere: Elsewhere) -> str:
    name, value, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    if name in UNKNOWN:
        return unknown_key(key, str(problem["loc"][-1]), kind, elsewhere)
    if name in ("missing", "missing_argument"):
        return "missing"
    if name in ("literal_error", "enum"):
        return f"found {shown(value)}, {nearest(str(value), _words(context['expected']))}"
    if name == "union_tag_invalid":
        tags = ["python:module:function" if tag == "python" else tag for tag in _words(context["expected_tags"])]
        return f"found '{context['tag']}', {nearest(str(context['tag']), tags)}"
    if name == "union_tag_not_found":
        kinds = ", ".join(tags_of(kind))
        return f"found {shown(value)}, allowed: a table with {context['discriminator']} = one of {kinds}"
    if name == "tuple_type" and bare((get_args(kind) or (Any,))[0]) is int:
        return f"found {shown(value)}, allowed: a list of values, such as [0, 1, 2]"
    if name in NUMBERS:
        return f"found {shown(value)}, allowed: {NUMBERS[name].format(**context)}{_below(key, value, kind)}"
    if name in ("too_short", "string_too_short"):
        return f"found {shown(value)}, allowed: {context['min_length']} or more"
    if name == "string_too_long":
        return f"found {len(value)} characters, allowed: {context['max_length']} or fewer"
    if name == "value_error":
        return str(context.get("error", problem["msg"]))
    return f"found {shown(value)}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def unknown_key(path: str, key: str, kind: Any, elsewhere: Elsewhere = lambda word: "") -> str:
    """Say that a table has no such key: it is called or spelled otherwise, or stands in another table."""
    names = names_of(kind)
    line = nearest(key, names)
    tables = fields_of(bare(kind)).items()
    inside = [f"'{table}.{name}'" for table, hint in tables for name in meant(key, names_of(hint))]
    other = "" if meant(key, names) else " or ".join(inside) if len(inside) in (1, 2) else elsewhere(key)
    if other.startswith(f"'{path}'"):
        return f"unknown key with this kind; allowed: {', '.join(names)}"
    return f"unknown key; allowed: {', '.join(names)}; did you mean {other}?" if other else f"unknown key; {line}"


def _below(key: str, word: Any, kind: Any) -> str:
    """Say in which key of a table a word would choose, as in `data = { source = "cifar" }`; "" if in none."""
    for name, hint in fields_of(kind).items() if isinstance(word, str) else ():
        choices = tags_of(hint) if is_choice(bare(hint)) else []
        for choice in [word] if word.partition(":")[0] in choices else synonyms(word, choices):
            return f'; did you mean {key.rpartition(".")[2]} = {{ {name} = "{choice}" }}?'
    return ""


def _words(listed: str) -> list[str]:
    return [word.strip(" '") for word in listed.replace(" or ", ", ").split(",")]


def _located(loc: tuple[Any, ...], model: Any, data: Any) -> tuple[str, Any]:
    """The dotted key of a problem, and the type at (or, for an unknown key, above) it.

    A location names the chosen member of every union on its way; such names are not keys.
    """
    key, kind = "", model
    if loc and isinstance(loc[0], int) and is_table(bare(model)):  # an argument by position, from Python
        loc = (list(fields_of(bare(model)))[loc[0]], *loc[1:]) if loc[0] < len(fields_of(bare(model))) else loc
    for step in loc:
        kind = bare(kind)
        if isinstance(step, str) and is_union(kind):
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
        below = fields_of(kind).get(str(step))
        if below is not None:
            kind = below
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
    return key or WHOLE.removesuffix(": "), bare(kind)


def _row_name(data: Any, index: int) -> str:
    row = data[index] if isinstance(data, list | tuple) and index < len(data) else None
    return f" {row['name']!r}" if isinstance(row, Mapping) and "name" in row else f"[{index}]"


def _member(union: Any, tag: str) -> Any:
    return next((m for m in map(bare, get_args(union)) if tag in tags(m) or tag == getattr(m, "__name__", "")), None)


def tags_of(union: Any) -> list[str]:
    """Return every `kind` of a choice."""
    return [tag for member in get_args(bare(union)) for tag in tags(bare(member))]


def names_of(kind: Any) -> list[str]:
    """The keys that a table of this type may have."""
    kind = bare(kind)
    if is_union(kind):
        return sorted({name for member in get_args(kind) for name in names_of(member)})
    return list(fields_of(kind))
