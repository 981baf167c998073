"""Reading experiments from TOML or dicts, with scales, defaults, overrides and sweeps; and writing them back."""

from __future__ import annotations

import copy
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from fedtide.algorithms import REGISTRY
from fedtide.config.explain import explained
from fedtide.config.schema import Experiment, options_model
from fedtide.core.errors import FedtideError, nearest
from fedtide.core.values import by_kind

SCALES = ("nano", "cpu", "paper")


def read(path: str | Path, *, scale: str | None = None, sets: Sequence[str] = ()) -> Experiment:
    """Read an experiment from a TOML file.

    Args:
        path: the file.
        scale: "nano", "cpu" or "paper", for files that have `[scale.<name>]` tables; by default "cpu" where there is
            one.
        sets: overrides `key=value`, e.g. "data.partition.alpha=0.1"; the value is TOML, or a string where it is not.

    Raises:
        FedtideError: with one line naming the file, the key, what was found and what is allowed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise FedtideError(f"{path}: {why}") from None
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FedtideError(f"{path}: not valid TOML: {error}") from None
    return from_dict(raw, where=str(path), scale=scale, sets=sets)


def from_dict(
    raw: Mapping[str, Any], *, where: str = "experiment", scale: str | None = None, sets: Sequence[str] = ()
) -> Experiment:
    """An experiment from nested dicts, as `read` gets them from a file."""
    values = copy.deepcopy(dict(raw))
    values = _scaled(values, where, scale)
    for assignment in sets:
        _assign(values, *_parsed(assignment))
    defaults = values.pop("defaults", {})
    _turned(values)
    try:
        values["method"] = _methods(values, defaults, where)
        experiment = Experiment.model_validate(values)
    except ValidationError as error:
        raise FedtideError(f"{where}: {explained(error, Experiment, values)}") from None
    _check(experiment, where)
    return experiment


def _turned(values: dict[str, Any]) -> None:
    """The partition "rotation" brings its turning along, unless `shift.how` says otherwise."""
    data, shift = values.get("data", {}), values.setdefault("shift", {})
    partition = by_kind(data.get("partition")) if isinstance(data, dict) else None
    if isinstance(partition, dict) and partition.get("kind") == "rotation" and isinstance(shift, dict):
        shift.setdefault("how", {"kind": "rotation", "angles": partition.get("angles", (0, 180))})


def _scaled(values: dict[str, Any], where: str, scale: str | None) -> dict[str, Any]:
    scales = values.pop("scale", {})
    if scale is None:
        scale = "cpu" if "cpu" in scales else None
    elif scale not in scales:
        have = ", ".join(scales) or "none: it has no [scale] tables"
        raise FedtideError(f"{where}: scale: found '{scale}', allowed: {have}")
    for name in scales:
        if name not in SCALES:
            raise FedtideError(f"{where}: scale.{name}: {nearest(name, SCALES)}")
    for key, value in _flat(scales[scale]) if scale else ():
        _assign(values, key, value)
    return values


def _flat(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> list[tuple[list[str], Any]]:
    """(path, value) of everything below a table; a table with `kind` is a value, as it replaces a choice."""
    out: list[tuple[list[str], Any]] = []
    for key, value in table.items():
        if isinstance(value, Mapping) and "kind" not in value and value:
            out += _flat(value, (*above, key))
        else:
            out.append(([*above, key], value))
    return out


def _parsed(assignment: str) -> tuple[list[str], Any]:
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise FedtideError(f"--set: found '{assignment}', allowed: key=value, e.g. data.partition.alpha=0.1")
    try:
        return key.strip().split("."), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip().split("."), text.strip()


def _assign(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a dotted key. `method.x` means every method; a list is entered by position or by a method's name."""
    *above, last = path
    node: Any = values
    for depth, key in enumerate(above):
        if isinstance(node, list):
            chosen = [m for i, m in enumerate(node) if key in (str(i), m.get("name"))]
            for item in chosen or node:
                _assign(item, path[depth + 1 :] if chosen else path[depth:], value)
            return
        if isinstance(node.get(key), str) and key in ("source", "partition", "model", "cohort", "server"):
            node[key] = by_kind(node[key])
        node = node.setdefault(key, {})
        if not isinstance(node, dict | list):
            raise FedtideError(f"{'.'.join(path)}: '{key}' holds a value, not a table")
    if isinstance(node, list):
        for item in node:
            item[last] = value
    else:
        node[last] = value


def _methods(values: dict[str, Any], defaults: Any, where: str) -> list[Any]:
    """Each method with the defaults merged in and its own keys gathered under `options`."""
    methods = values.get("method", [])
    if not isinstance(methods, list) or not isinstance(defaults, dict):
        raise FedtideError(f"{where}: methods are [[method]] tables and defaults a [defaults] table")
    out, used = [], set()
    for number, given in enumerate(methods):
        entry = copy.deepcopy(given)
        name = str(entry.get("name") or entry.get("algorithm", number))
        key = f"method '{name}'"
        if "algorithm" not in entry:
            raise FedtideError(f"{where}: {key}: algorithm is missing; {nearest('', list(REGISTRY))}")
        entry.setdefault("name", name)
        try:
            model = options_model(str(entry["algorithm"]))
        except FedtideError as error:
            raise FedtideError(f"{where}: {key}.algorithm: {error}") from None
        common = {k: v for k, v in defaults.items() if k in model.model_fields or k == "loss"}
        used |= set(common)
        entry = _merged(common, entry)
        if "options" in entry:  # a resolved configuration, read again
            entry |= entry.pop("options")
        own = {k: v for k, v in entry.items() if k not in ("name", "algorithm", "loss", "shift")}
        try:
            options = model.model_validate(own)
        except ValidationError as error:
            raise FedtideError(f"{where}: {key}.{explained(error, model, own)}") from None
        out.append(
            {k: v for k, v in entry.items() if k in ("name", "algorithm", "loss")}
            | {"options": options.model_dump()}
            | ({"shift": _merged(values.get("shift", {}), entry["shift"])} if "shift" in entry else {})
        )
    unused = [key for key in defaults if key not in used]
    if unused and methods:
        known = sorted({k for m in methods for k in options_model(str(m["algorithm"])).model_fields} | {"loss"})
        raise FedtideError(f"{where}: defaults.{unused[0]}: no method takes it; {nearest(unused[0], known)}")
    return out


def _merged(below: Any, above: Any) -> Any:
    """Nested tables, `above` winning; a table with another `kind` replaces."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if "kind" in above and above["kind"] != below.get("kind"):
        return above
    return {
        key: _merged(below[key], above[key])
        if key in below and key in above
        else (above if key in above else below)[key]
        for key in [*below, *(k for k in above if k not in below)]
    }


def _check(experiment: Experiment, where: str) -> None:
    names = [method.name for method in experiment.method]
    slugs = [slug(name) for name in names]
    for name, path in zip(names, slugs, strict=True):
        if slugs.count(path) > 1:
            raise FedtideError(f"{where}: method '{name}': two methods need different names (folder '{path}')")
    if experiment.baseline is not None and experiment.baseline not in names:
        raise FedtideError(f"{where}: baseline: found '{experiment.baseline}'; {nearest(experiment.baseline, names)}")


def slug(name: str) -> str:
    """A name as a folder is called.

    >>> slug("FedAdam, rate 0.1")
    'fedadam-rate-0.1'
    """
    kept = "".join(c.lower() if c.isalnum() or c in "._" else "-" for c in name)
    return "-".join(part for part in kept.split("-") if part) or "method"


def to_toml(experiment: Experiment) -> str:
    """The whole experiment, every default written out, as TOML that `read` takes."""
    return tomli_w.dumps(resolved(experiment))


def resolved(experiment: Experiment) -> dict[str, Any]:
    """The whole experiment as nested dicts without None, which TOML has no word for."""
    values = _without_none(experiment.model_dump(mode="json"))
    for method in values["method"]:
        method |= method.pop("options", {})
    return values


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(child) for key, child in value.items() if child is not None}
    return [_without_none(child) for child in value] if isinstance(value, list | tuple) else value


def points(experiment: Experiment, where: str = "experiment") -> list[tuple[str, Experiment]]:
    """The points of the `[sweep]` grid with their names; without a sweep the experiment itself, named ""."""
    if not experiment.sweep:
        return [("", experiment)]
    out = []
    base = resolved(experiment)
    base.pop("sweep")
    for key, choices in experiment.sweep.items():
        if not choices:
            raise FedtideError(f"{where}: sweep.{key}: found an empty list, allowed: one value or more")
    for chosen in itertools.product(*experiment.sweep.values()):
        values = copy.deepcopy(base)
        for key, value in zip(experiment.sweep, chosen, strict=True):
            _assign(values, key.split("."), value)
        name = ", ".join(f"{k.rpartition('.')[2]} {v}" for k, v in zip(experiment.sweep, chosen, strict=True))
        out.append((name, from_dict(values, where=f"{where}: sweep point '{name}'")))
    return out
