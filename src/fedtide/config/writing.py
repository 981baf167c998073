"""Writing of experiments: as plain values, as TOML with every key, and names of folders."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import tomli_w
from torch import nn

from fedtide.algorithms import REGISTRY
from fedtide.config.schema import Experiment
from fedtide.core.errors import refused
from fedtide.data.rows import Rows
from fedtide.fields.user_code import name_of

PARTS = ("cohort", "loss", "model", "partition", "source", "who", "what", "how")
"""Keys of parts that may be of kind "python"."""


def to_toml(experiment: Experiment) -> str:
    """Return the whole experiment, every default written out, as TOML that `read` takes."""
    return tomli_w.dumps(resolved(experiment))


def resolved(experiment: Experiment) -> dict[str, Any]:
    """Return the whole experiment as nested dicts without None, for which TOML has no word."""
    values = _without_none(experiment.model_dump(mode="json"))
    for table, method in zip(values["method"], experiment.method, strict=True):
        entry = REGISTRY.get(method.algorithm)
        sets = entry.safe.options if entry is not None and entry.safe is not None and method.safe else {}
        table["name"] = method.bare
        table |= {key: value for key, value in table.pop("options", {}).items() if key not in sets}
    return values


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(child) for key, child in value.items() if child is not None}
    return [_without_none(child) for child in value] if isinstance(value, list | tuple) else value


def as_toml(value: Any) -> str:
    """Return a value as TOML in one line.

    >>> print(as_toml({"kind": "iid", "clients": [1, 2]}), as_toml("caf\u00e9"))
    { kind = "iid", clients = [1, 2] } "caf\u00e9"

    Raises:
        TypeError: TOML has no word for it.
    """
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key_as_toml(key)} = {as_toml(child)}' for key, child in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def key_as_toml(key: object) -> str:
    """Return a key as TOML.

    >>> print(key_as_toml("lr"), key_as_toml("FedAvg, lr 1"))
    lr "FedAvg, lr 1"
    """
    return str(key) if re.fullmatch(r"[A-Za-z0-9_-]+", str(key)) else as_toml(str(key))


# -- from Python -------------------------------------------------------------------------------------------------------


def named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an experiment with a name in place of all code and rows of a Python session.

    A function is an algorithm, a loss or a metric, or makes one of the other parts; any other object is that part.

    >>> from collections import Counter
    >>> named({"method": [{"algorithm": Counter}], "model": Counter})["method"]
    [{'name': 'Counter', 'algorithm': 'collections:Counter'}]
    """
    return {key: _named(key.rpartition(".")[2], value) for key, value in values.items()}


def _named(key: str, value: Any) -> Any:
    if key == "source" and _is_rows(value):
        return _of_kind_python(lambda: value, "rows")
    if isinstance(value, Mapping):
        algorithm: Any = value.get("algorithm")
        name = {"name": algorithm.__name__} if _is_code(algorithm) else {}
        return name | named(value)
    if isinstance(value, list | tuple):
        return [_named(key, child) for child in value]
    if _is_code(value):
        if key == "algorithm":
            registered = (name for name, entry in REGISTRY.items() if entry.make is inspect.unwrap(value))
            return next(registered, None) or name_of(value, key)
        if key == "metrics":
            return {"function": name_of(value, key), "name": value.__name__}
        if key == "function":
            return name_of(value, key)
    return _part(key, value) if key in PARTS and not _is_plain(value) else value


def _part(key: str, value: Any) -> Any:
    """Return a part of an experiment that is a person's own code."""
    if key == "model" and isinstance(value, nn.Module):
        allowed = "a function that makes a fresh module, such as lambda: nn.Linear(3, 2)"
        raise refused(key, type(value).__name__, allowed)
    if inspect.isclass(value) or (_is_code(value) and key != "loss"):
        return _of_kind_python(value, key)
    return _of_kind_python(lambda: value, getattr(value, "__name__", type(value).__name__))


def _of_kind_python(function: Any, name: str) -> dict[str, Any]:
    return {"kind": "python", "function": name_of(function, name)}


def _is_code(value: Any) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value)


def _is_plain(value: Any) -> bool:
    """Tell whether a value can stand in a file, or is an ingredient of one."""
    plain = value is None or isinstance(value, bool | int | float | str)
    return plain or (not inspect.isclass(value) and hasattr(type(value), "__pydantic_validator__"))


def _is_rows(value: Any) -> bool:
    pair = isinstance(value, tuple) and len(value) == 2
    return isinstance(value, Rows) or pair or (isinstance(value, Mapping) and {"x", "y"} <= value.keys())
