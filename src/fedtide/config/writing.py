"""Writing of experiments: as plain values, and as TOML with every key."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import tomli_w

from fedtide.algorithms import REGISTRY
from fedtide.config.schema import Experiment

ALWAYS = ("rounds", "seeds", "method")
"""Tables and values that a study in short has also if they are the defaults."""


def to_toml(experiment: Experiment) -> str:
    """Return the whole experiment, every default written out, as TOML that `read` takes."""
    return tomli_w.dumps(resolved(experiment))


def brief(experiment: Experiment) -> str:
    """Return the experiment as TOML without the tables and values at the top of the file that are the defaults."""
    values, usual = resolved(experiment), resolved(experiment.model_construct(method=()))
    return tomli_w.dumps({key: value for key, value in values.items() if key in ALWAYS or value != usual.get(key)})


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

    >>> print(as_toml({"kind": "iid", "FedAvg, lr 1": [1, 2]}), as_toml("caf\u00e9"))
    { kind = "iid", "FedAvg, lr 1" = [1, 2] } "caf\u00e9"

    Raises:
        TypeError: TOML has no word for it.
    """
    if isinstance(value, Mapping):
        keys = {key: str(key) if re.fullmatch(r"[A-Za-z0-9_-]+", str(key)) else as_toml(str(key)) for key in value}
        return f"{{ {', '.join(f'{keys[key]} = {as_toml(child)}' for key, child in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
