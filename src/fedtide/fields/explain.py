"""Validation errors as one line a person can act on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from fedtide.core.errors import folded, shown
from fedtide.fields.shapes import bare, fields_of, is_choice, is_table, is_union, tags
from fedtide.fields.vocabulary import nearest, synonyms

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

Elsewhere = Callable[[str, bool], str]
"""Finds the key of another table that a person may have meant by a word, with `True` also by one that is misspelt; ""
where there is none."""


def explained(error: ValidationError, model: type, data: Any, elsewhere: Elsewhere = lambda word, near: "") -> str:
    """The first problem as `key: what was found, what is allowed`, and how many more there are."""
    problems = error.errors()
    # A key that is misspelt is why another one is missing.
    first = next((p for p in problems if p["type"] in ("extra_forbidden", "unexpected_keyword_argument")), problems[0])
    key, kind = _located(first["loc"], model, data)
    above = _located(first["loc"][:-1], model, data)[1] if len(first["loc"]) > 1 else model
    # A method's own shift repeats the mistakes of the shared one.
    # A list whose entry is refused is too short, too.
    separate = [p for p in problems if p["loc"] != first["loc"][: len(p["loc"])] or p["type"] != "too_short"]
    others = {(p["type"], p["loc"][-1:], repr(p.get("input"))) for p in separate} - {
        (first["type"], first["loc"][-1:], repr(first.get("input")))
    }
    more = f" (and {len(others)} more)" if others else ""
    return f"{key}: {_describe(first, key, kind, above, elsewhere)}{more}"


def of_python(error: ValidationError, model: type, data: Any) -> str:
    """The first problem of a value made in Python: its key begins with the name of the class."""
    line = explained(error, model, data)
    return f"{model.__name__}: {line.removeprefix(WHOLE)}" if line.startswith(WHOLE) else f"{model.__name__}.{line}"


def _describe(problem: Any, key: str, kind: Any, above: Any, elsewhere: Elsewhere) -> str:
    name, value, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    if name == "extra_forbidden" or name == "unexpected_keyword_argument":
        last = str(problem["loc"][-1])
        tail = _below(key.rpartition(".")[0], value, kind) if last in ("kind", "by") else ""
        line = f"unknown key; allowed: {', '.join(names_of(kind))}{tail}"
        return line if tail else _unknown(key, last, kind, elsewhere)
    if name in ("missing", "missing_argument"):
        return "missing"
    if name in ("literal_error", "enum"):
        return f"found {shown(value)}, {nearest(str(value), _words(context['expected']))}"
    if name == "union_tag_invalid":
        tag, tags = str(context["tag"]), _words(context["expected_tags"])
        shown_tags = ["python:module:function" if tag_shown == "python" else tag_shown for tag_shown in tags]
        line, path = nearest(tag, shown_tags), value.get("path") if isinstance(value, dict) else None
        tables = [other for other, hint in fields_of(above).items() if tag in tags_of(hint)]
        meant = f"'python:{tag}:{path}'" if path and "python" in tags else f"{tables[0]} = '{tag}'" if tables else ""
        return f"found '{tag}', {line}{f'; did you mean {meant}?' * ('did you mean' not in line and bool(meant))}"
    if name == "union_tag_not_found":
        by, kinds = context["discriminator"].strip("'"), ", ".join(tags_of(kind))
        return f"found {shown(value)}, allowed: a table with '{by}' = one of {kinds}{_kinds_with(value, kind, by)}"
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


def _unknown(path: str, key: str, kind: Any, elsewhere: Elsewhere) -> str:
    """Say that a table has no such key: it is called or spelled otherwise, or stands in another table."""
    names = names_of(kind)
    tables = {table: bare(hint) for table, hint in fields_of(bare(kind)).items()}
    below = [f"{table}.{name}" for table, hint in tables.items() for name in _meant(key, hint)]
    close = get_close_matches(folded(key), names, n=1, cutoff=0.65)
    other, above = elsewhere(key, not close), path.removesuffix(key)
    here = _meant(key, names) or get_close_matches(key, names, n=1, cutoff=0.85)
    if other == f"'{path}'":
        return f"unknown key with this kind; allowed: {', '.join(names)}"
    if not here and above and other.startswith(f"'{above}") and "." not in other.removeprefix(f"'{above}"):
        return f"unknown key; allowed: {', '.join(names)}; did you mean {other}, with another kind?"
    if here or (not other and len(below) not in (1, 2)):
        return f"unknown key; {nearest(here[0] if here else key, names)}"
    inside = not above or other.startswith(f"'{above}")
    hint = other if other and (inside or len(below) not in (1, 2)) else " or ".join(f"'{name}'" for name in below)
    return f"unknown key; allowed: {', '.join(names)}; did you mean {hint}?"


def _below(key: str, word: Any, kind: Any) -> str:
    """Say in which key of a table a word would choose, as in `data = { source = "cifar" }`; "" if in none."""
    last = key.rpartition(".")[2]
    if isinstance(word, int | float) and not isinstance(word, bool):
        kinds = {name: bare(hint) for name, hint in fields_of(kind).items()}
        takes = [f"{last} = {{ {name} = {word} }}" for name, of in kinds.items() if of in (type(word), float)]
        return f"; did you mean {' or '.join(takes[:2])}?" if takes else ""
    if is_table(type(word)):  # made in Python
        holds = [name for name, hint in fields_of(kind).items() if type(word) in map(bare, get_args(bare(hint)))]
        example = f"{getattr(kind, '__name__', last)}({holds[0]}={type(word).__name__}(...))" if holds else ""
        return f", or {example}" if example else ""
    for name, hint in fields_of(kind).items() if isinstance(word, str) else ():
        words = tags_of(hint) if is_choice(bare(hint)) else get_args(hint) if get_origin(hint) is Literal else ()
        choices = [name for name in words if isinstance(name, str)]
        for meant in [word] if word.partition(":")[0] in choices else synonyms(word, choices):
            return f'; did you mean {last} = {{ {name} = "{meant}" }}?'
    return ""


def _kinds_with(keys: Any, kind: Any, by: str) -> str:
    """Say which kinds of a choice have all of some keys, as they may be meant; "" if many have them, or none."""
    names = names_of(kind)
    spelled = {key: _near(key, names) for key in keys} if isinstance(keys, Mapping) and keys else {}
    members = get_args(kind) if spelled else ()
    meant = [tags(bare(member))[0] for member in members if set(spelled.values()) <= set(fields_of(bare(member)))]
    other = [repr(name) for key, name in spelled.items() if name != key]
    says = " and ".join(other)
    if 0 < len(meant) <= 3:
        says += f"{' with ' if other else ''}{by} = {' or '.join(map(repr, meant))}"
    return f"; did you mean {says}?" if says else ""


def _near(key: str, names: list[str]) -> str:
    """Return the name that a key may mean; the key itself if there is none."""
    return next(iter(_meant(key, names) or get_close_matches(key, names, n=1, cutoff=0.75)), key)


def unknown_key(key: str, kind: Any) -> str:
    """The line of an argument that a function does not have.

    Args:
        key: the argument.
        kind: the table of those that it has.
    """
    return f"{key}: {_unknown(key, key, kind, lambda word, near: '')}"


def _meant(key: str, kind: Any) -> list[str]:
    """The keys of a table that a word means: itself, or what it is called here."""
    names = kind if isinstance(kind, list) else names_of(kind)
    return [name for name in names if folded(name) == folded(key)] or synonyms(key, names)


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
