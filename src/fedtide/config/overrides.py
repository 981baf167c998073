"""Dotted keys: what `--set`, `[scale]` and `[sweep]` change in the nested tables of an experiment."""

import copy
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from fedtide.algorithms.entry import as_cohort
from fedtide.config.schema import Method, as_stop_at, form_of, is_own, options_model
from fedtide.core.errors import FedtideError, refused
from fedtide.data.partition import by_what
from fedtide.fields.types import by_kind
from fedtide.fields.vocabulary import nearest

SEEDS = 1000
"""At most so many seeds may be asked for as the first and the last."""

SHORT = {"cohort": as_cohort, "stop_at": as_stop_at, "groups": by_what}
"""Readers of short values of keys that are not read by their kind."""


def parse_assignment(assignment: str) -> tuple[list[str], Any]:
    """Split `key=value` into (path, value); the value is TOML, or else a string.

    Raises:
        FedtideError: there is no key, or the value begins as text, a list or a table of TOML and is none.

    >>> parse_assignment("data.partition.alpha=0.1"), parse_assignment("model=linear")
    ((['data', 'partition', 'alpha'], 0.1), (['model'], 'linear'))
    """
    key, equals, text = assignment.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise refused("--set", assignment, "key=value, e.g. data.partition.alpha=0.1")
    try:
        values = tomllib.loads(f"value = {text}")
        if len(values) > 1:
            raise refused("--set", assignment, "one key=value")
        return path, values["value"]
    except ValueError as error:  # no TOML, or a number with thousands of digits
        if text.strip()[:1] in ("'", '"', "[", "{"):
            raise refused("--set", assignment, "a value of TOML", str(error)) from None
        return path, text.strip()


def seed_list(text: str) -> str:
    """Return the seeds of the command line as a list of TOML.

    >>> seed_list("0,1,2"), seed_list("0-2"), seed_list("7, 0-1")
    ('[0,1,2]', '[0,1,2]', '[7,0,1]')
    """
    out: list[str] = []
    for part in text.strip("[] ").split(","):
        first, _, last = (end.strip() for end in part.partition("-"))
        spans = first.isdecimal() and last.isdecimal()
        if not spans and not part.strip().isdecimal():
            raise refused("--seeds", text, "whole numbers of 0 or more, such as 0,1,2 or 0-4")
        if spans and not 0 <= int(last) - int(first) < SEEDS:
            raise refused("--seeds", text, f"FIRST-LAST, LAST not below FIRST, at most {SEEDS} seeds, such as 0-4")
        out += [str(seed) for seed in range(int(first), int(last) + 1)] if spans else [part.strip()]
    return f"[{','.join(out)}]"


def flatten(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> list[tuple[list[str], Any]]:
    """Return (path, value) of all values below a table; a table with `kind`, or of a sweep, is a value.

    >>> flatten({"rounds": 4, "data": {"partition": {"kind": "iid"}}})
    [(['rounds'], 4), (['data', 'partition'], {'kind': 'iid'})]
    """
    out: list[tuple[list[str], Any]] = []
    for key, value in table.items():
        if isinstance(value, Mapping) and "kind" not in value and value and key != "sweep":
            out += flatten(value, (*above, key))
        else:
            out.append(([*above, key], value))
    return out


def locate(path: Sequence[str], names: Sequence[Any]) -> tuple[int | None, list[str]]:
    """Return the number of the named table that a dotted key enters (None for all of them), and the key within.

    A table is meant by its name, which may have dots (the longest that fits counts), or else by its position.

    >>> locate(["b", "2", "local", "rate"], ["A", "b.2"]), locate(["0", "q"], ["A"]), locate(["q"], ["A"])
    ((1, ['local', 'rate']), (0, ['q']), (None, ['q']))
    """
    for end in range(len(path), 0, -1):
        if (name := ".".join(path[:end])) in names:
            return names.index(name), list(path[end:])
    positions = [str(number) for number in range(len(names))]
    return (positions.index(path[0]), list(path[1:])) if path[0] in positions else (None, list(path))


def assign(node: Any, path: list[str], value: Any, above: str = "") -> None:
    """Set a dotted key below a table, in place.

    A list of tables is entered by position or by a table's name, transforms by their kind. Without either every table
    is meant, so `method.x` is the `x` of all methods. A list of values is entered by position. A choice that was
    written as a word becomes a table first.

    >>> values = {"method": [{"name": "A"}, {"name": "B"}], "shift": {"who": "periodic"}}
    >>> assign(values, ["method", "B", "q"], 0.1); assign(values, ["shift", "who", "period"], 8); values
    {'method': [{'name': 'A'}, {'name': 'B', 'q': 0.1}], 'shift': {'who': {'kind': 'periodic', 'period': 8}}}
    """
    key, *rest = path
    full = f"{above}.{key}" if above else key
    if isinstance(node, list):
        _assign_in_list(node, path, value, above)
    elif not rest:
        node[key] = value
    else:
        node[key] = _as_table(key, node.get(key, {}), f"{full}.{'.'.join(rest)}")
        assign(node[key], rest, value, full)


def _assign_in_list(items: list[Any], path: list[str], value: Any, above: str) -> None:
    if above.endswith(".transforms") or above == "transforms":
        items[:] = map(by_kind, items)
    if not all(isinstance(item, dict) for item in items):
        if path not in [[str(number)] for number in range(len(items))]:
            last = f", or one of them by its position, '{above}.0' to '{above}.{len(items) - 1}'"
            raise FedtideError(f"{above}.{'.'.join(path)}: '{above}' is a list of values; set it as a whole{last}")
        items[int(path[0])] = value
        return
    names = [item.get("name", item.get("algorithm", item.get("kind"))) for item in items]
    where = f"{above}.{'.'.join(path)}"
    number, rest = _locate_method(path, items, names, where) if above == "method" else locate(path, names)
    if not rest:
        raise FedtideError(f"{where}: that is a whole table; name one of its keys, '{where}.<key>'")
    if above == "method" and number is None and len(rest) > 1 and not _is_key(rest[0], items, names):
        hint = nearest(rest[0], list(map(str, names)), quoted=True)
        raise FedtideError(f"{where}: no method is called '{rest[0]}'; {hint}")
    for item in items if number is None else [items[number]]:
        assign(item, rest, copy.deepcopy(value), above)  # a later key may change it for one of them


def _locate_method(path: list[str], methods: list[Any], names: list[Any], where: str) -> tuple[int | None, list[str]]:
    """Return the number of the method that a dotted key enters, by its name with or without its form, and the rest."""
    forms = [form_of(method) for method in methods]
    bare = [str(name).removesuffix(form) for name, form in zip(names, forms, strict=True)]
    for full in ([name + form for name, form in zip(bare, forms, strict=True)], bare):
        number, rest = locate(path, full)
        if number is not None:
            if full.count(full[number]) > 1 and not path[0].isdigit():
                raise FedtideError(f"{where}: several methods are called '{full[number]}'; name one with its form")
            return number, rest
    return None, path


def _is_key(word: str, methods: list[Any], names: list[Any]) -> bool:
    """Tell whether a word is a key of one of the methods, or much like one.

    A user's algorithm may have any key, but hardly one that is much like the name of a method.
    """
    algorithms = [str(method["algorithm"]) for method in methods if "algorithm" in method]
    if any(map(is_own, algorithms)):  # not imported for this
        return "did you mean" not in nearest(word, list(map(str, names)))
    keys = {*Method.model_fields}.union(*(options_model(algorithm).model_fields for algorithm in algorithms))
    return word in keys or "did you mean" in nearest(word, sorted(keys))


def _as_table(key: str, value: Any, full: str) -> Any:
    """Return the table at a key, also for a choice that is written as a word or number."""
    table = value if key in ("kind", "by") else SHORT.get(key, by_kind)(value)
    if not isinstance(table, dict | list):
        raise FedtideError(f"{full}: '{key}' holds a value, not a table")
    return table
