"""Shape of an experiment file, read from types: tables, their keys and choices; and errors about them in one line."""

import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fedtide.core.errors import shown
from fedtide.fields.vocabulary import meant, nearest, synonyms

T = TypeVar("T")


def bare(kind: Any) -> Any:
    """A type without its annotations and without None.

    >>> bare(Annotated[int, "whole"] | None)
    <class 'int'>
    """
    return _stripped(kind)[0]


def list_marks(kind: Any) -> list[Any]:
    """Return the marks (validators, fields, ranges) that stand in a type's annotations."""
    return _stripped(kind)[1]


@cache
def marks_of(kind: Any, mark: type[T]) -> dict[str, T]:
    """Return the keys of a table whose types have a mark of this class, with the first one."""
    marks = {name: [one for one in list_marks(hint) if isinstance(one, mark)] for name, hint in fields_of(kind).items()}
    return {name: marked[0] for name, marked in marks.items() if marked}


def described(kind: Any) -> str:
    """Return the description in a type's annotations, or the first line of a table's docstring.

    >>> from fedtide.learn.local import LocalTrainer
    >>> from fedtide.models.branched import BranchCount
    >>> described(BranchCount), described(LocalTrainer)[:14], described(int)
    ('number of branches, K.', 'local training', '')
    """
    kind, marks = _stripped(kind)
    if description := next((mark.description for mark in marks if getattr(mark, "description", None)), None):
        return str(description)
    first = (kind.__doc__ or "").partition("\n")[0] if is_table(kind) else ""
    return first[:1].lower() + first[1:]


def _stripped(kind: Any) -> tuple[Any, list[Any]]:
    marks: list[Any] = []
    while True:
        if get_origin(kind) is Annotated:
            kind, *extras = get_args(kind)
            for extra in extras:
                marks += [extra, *extra.metadata] if isinstance(extra, FieldInfo) else [extra]
        elif is_union(kind) and len(rest := [m for m in get_args(kind) if m is not type(None)]) == 1:
            kind = rest[0]
        else:
            return kind, marks


def is_union(kind: Any) -> bool:
    """Tell whether a type is a choice between types."""
    return get_origin(kind) in (Union, types.UnionType)


def is_table(kind: Any) -> bool:
    """Tell whether values of a type are tables with keys of their own."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel))


def is_choice(kind: Any) -> bool:
    """Tell whether a type is a choice among tables.

    >>> from fedtide.cohorts import Cohort
    >>> is_choice(bare(Cohort)), is_choice(int | str)
    (True, False)
    """
    return is_union(kind) and all(is_table(bare(member)) for member in get_args(kind))


@cache
def infos_of(kind: Any) -> dict[str, FieldInfo]:
    """Return the keys of a table with what pydantic knows of them; none for anything else."""
    if not is_table(kind):
        return {}
    return kind.model_fields if issubclass(kind, BaseModel) else getattr(kind, "__pydantic_fields__", {})


def fields_of(kind: Any) -> dict[str, Any]:
    """The keys of a table with their types; none for anything else."""
    return {name: Annotated[field.annotation, field] for name, field in infos_of(kind).items()}


def tags(kind: Any) -> tuple[str, ...]:
    """The word of `kind` (or `by`) that chooses a table among others, in a tuple; an empty one if it has none.

    >>> from fedtide.cohorts import Everyone
    >>> tags(Everyone)
    ('everyone',)
    """
    fields = fields_of(kind)
    hints = (bare(fields[name]) for name in ("kind", "by") if name in fields)
    words = (get_args(hint) for hint in hints if get_origin(hint) is Literal)
    return next((those for those in words if len(those) == 1), ())


A_TABLE = "a table"
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
    **dict.fromkeys(("dict_type", "model_type", "dataclass_type", "model_attributes_type"), A_TABLE),
}
"""What is allowed, by pydantic's name of a problem."""

WHOLE = "the file: "
"""Place of a problem that is of no single key."""

Elsewhere = Callable[[str], str]
"""Finds the place of another table's key that a person may have meant by a word; "" if there is none."""

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def explain(error: ValidationError, model: type, data: Any, elsewhere: Elsewhere = lambda word: "") -> str:
    """The first problem as `key: what was found, what is allowed`."""
    problems = error.errors()
    # A key that is misspelt is why another one is missing.
    first = next((problem for problem in problems if problem["type"] in UNKNOWN), problems[0])
    key, kind = _located(first["loc"], model, data)
    return f"{key}: {_describe(first, key, kind, elsewhere)}"


def of_python(error: ValidationError, model: type, data: Any) -> str:
    """The first problem of a value made in Python: its key begins with the name of the class."""
    line = explain(error, model, data)
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
        hint, allowed = _below(key, value, kind), NUMBERS[name].format(**context)
        if allowed == A_TABLE and (choices := tags_of(kind)):
            allowed = f"one of {', '.join(map(repr, choices))}, or a table with such a kind"
        if isinstance(value, float) and math.isnan(value):
            allowed = allowed if allowed == NUMBERS["finite_number"] else f"a number, {allowed}"
        return f"found {shown(value)}, {f'{hint} Allowed' if hint else 'allowed'}: {allowed}"
    if name in ("too_short", "string_too_short"):
        what = "characters" if isinstance(value, str) else "values"
        return f"found {shown(value)}, allowed: {context['min_length']} or more {what}"
    if name == "string_too_long":
        return f"found {len(value)} characters, allowed: at most {context['max_length']}"
    if name == "value_error":
        return str(context.get("error", problem["msg"]))
    return f"found {shown(value)}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def unknown_key(path: str, key: str, kind: Any, elsewhere: Elsewhere = lambda word: "") -> str:
    """Say that a table has no such key: it is called or spelled otherwise, or stands in another table."""
    names = names_of(kind)
    line = nearest(key, names)
    tables = fields_of(bare(kind)).items()
    inside = [f"'{table}.{name}'" for table, hint in tables for name in meant(key, names_of(hint))]
    is_slip = bool(meant(key, names) or difflib.get_close_matches(key, names, cutoff=0.9))  # such as a plural
    other = "" if is_slip else " or ".join(inside) if len(inside) in (1, 2) else elsewhere(key)
    if other.startswith(f"'{path}'") and "method" not in names:  # a table of methods is no choice; these have the key
        return f"unknown key with this choice; allowed: {', '.join(names) or 'no keys'}"
    return f"unknown key; did you mean {other}? Allowed: {', '.join(names)}" if other else f"unknown key; {line}"


def _below(key: str, word: Any, kind: Any) -> str:
    """Say in which key of a table a word would choose, as in `data = { source = "cifar" }`; "" if in none."""
    for name, hint in fields_of(kind).items() if isinstance(word, str) else ():
        choices = tags_of(hint) if is_choice(bare(hint)) else []
        for choice in [word] if word.partition(":")[0] in choices else synonyms(word, choices):
            return f'did you mean {key.rpartition(".")[2]} = {{ {name} = "{choice}" }}?'
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
        if isinstance(step, str) and step.startswith("function-"):  # pydantic's name of a validator
            continue
        kind = bare(kind)
        if isinstance(step, str) and is_union(kind):
            members = [m for m in map(bare, get_args(kind)) if step in tags(m) or step == getattr(m, "__name__", "")]
            if members:
                kind = members[0]
                continue
        if isinstance(step, int):
            data = data[step] if isinstance(data, list | tuple) and step < len(data) else None
            key += f" {data['name']!r}" if isinstance(data, Mapping) and "name" in data else f"[{step}]"
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


def tags_of(union: Any) -> list[str]:
    """Return every `kind` of a choice."""
    return [tag for member in get_args(bare(union)) for tag in tags(bare(member))]


def names_of(kind: Any) -> list[str]:
    """The keys that a table of this type may have."""
    kind = bare(kind)
    if is_union(kind):
        return sorted({name for member in get_args(kind) for name in names_of(member)})
    return list(fields_of(kind))
