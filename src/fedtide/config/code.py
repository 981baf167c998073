"""Functions, classes and rows of a Python session in an experiment: by names, as a file has them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedtide.algorithms import REGISTRY
from fedtide.core.errors import refused
from fedtide.data.rows import Rows
from fedtide.fields.user_code import name_of

PARTS = ("cohort", "loss", "model", "partition", "source", "who", "what", "how")
"""Keys of parts that may be of kind "python"."""


def named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an experiment with a name in place of all code and rows.

    A function is an algorithm, a loss or a metric, or makes one of the other parts; any other object is that part.

    >>> from collections import Counter
    >>> named({"method": [{"algorithm": Counter}], "model": Counter})["method"]
    [{'name': 'Counter', 'algorithm': 'collections:Counter'}]
    """
    return {key: _named(key.rpartition(".")[2], value) for key, value in values.items()}


def _named(key: str, value: Any) -> Any:
    if key == "source" and _is_rows(value):
        return _of_kind(lambda: value, "rows")
    if isinstance(value, Mapping):
        algorithm: Any = value.get("algorithm")
        name = {"name": algorithm.__name__} if _is_code(algorithm) else {}
        return name | named(value)
    if isinstance(value, list | tuple):
        return [_named(key, each) for each in value]
    if key == "algorithm" and _is_code(value):
        shipped = (name for name, entry in REGISTRY.items() if entry.make is inspect.unwrap(value))
        return next(shipped, None) or name_of(value, key)
    if key == "metrics" and _is_code(value):
        return {"function": name_of(value, key), "name": value.__name__}
    if key == "function" and _is_code(value):
        return name_of(value, key)
    return _part(key, value) if key in PARTS and not _is_written(value) else value


def _part(key: str, value: Any) -> Any:
    """Return a part of an experiment that is a person's own."""
    if key == "model" and isinstance(value, nn.Module):
        raise refused(
            key, type(value).__name__, "a function that makes a fresh module, such as lambda: nn.Linear(3, 2)"
        )
    if inspect.isclass(value) or (_is_code(value) and key != "loss"):
        return _of_kind(value, key)
    return _of_kind(lambda: value, getattr(value, "__name__", type(value).__name__))


def _of_kind(function: Any, called: str) -> dict[str, Any]:
    return {"kind": "python", "function": name_of(function, called)}


def _is_code(value: Any) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value)


def _is_written(value: Any) -> bool:
    """Tell whether a value can stand in a file, or is an ingredient of one."""
    plain = value is None or isinstance(value, bool | int | float | str)
    return plain or (not inspect.isclass(value) and hasattr(type(value), "__pydantic_validator__"))


def _is_rows(value: Any) -> bool:
    pair = isinstance(value, tuple) and len(value) == 2
    return isinstance(value, Rows) or pair or (isinstance(value, Mapping) and {"x", "y"} <= value.keys())
