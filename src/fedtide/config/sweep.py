"""The points of a `[sweep]` grid, and the points that a claim means."""

import copy
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedtide.config.overrides import assign
from fedtide.config.reading import from_dict
from fedtide.config.schema import Experiment
from fedtide.config.writing import resolved
from fedtide.core.errors import FedtideError, Words, refused, unknown
from fedtide.draw.prose import slug

WORLDS = {"data", "shift", "devices", "liars", "wire"}
"""Parts of keys that change what methods meet, so that no point of their sweep is better than others."""
MOST = 1000
"""Points of a sweep: each has a configuration, a folder and figures of its own."""


@dataclass(frozen=True)
class Point:
    """Point of a sweep: its name, its folder in the run folder, and its experiment."""

    name: str
    folder: str
    experiment: Experiment


def points(experiment: Experiment, where: str = "experiment") -> list[Point]:
    """Return the points of the `[sweep]` grid; without a sweep the experiment itself, called ""."""
    if not experiment.sweep:
        _check_parts(experiment, [], where)
        plain = tuple(claim.model_copy(update={"at": None}) for claim in experiment.claim)
        return [Point("", "", experiment.model_copy(update={"claim": plain}))]
    if (number := math.prod(map(len, experiment.sweep.values()))) > MOST:
        raise refused(f"{where}: sweep: number of points", number, f"at most {MOST}")
    base = resolved(experiment)
    base.pop("sweep")
    base["claim"] = [claim for claim in base["claim"] if "at" not in claim]
    for key in experiment.sweep:
        if key.startswith("defaults."):
            raise FedtideError(f"{where}: sweep.{key}: name the methods' own keys, 'method.{key[9:]}'")
    along = axes(experiment, where)
    result: list[Point] = []
    for chosen in itertools.product(*(range(len(choices)) for choices in along.values())):
        values = copy.deepcopy(base)
        for (keys, choices), place in zip(experiment.sweep.items(), chosen, strict=True):
            coupled = keys.split(", ")
            for key, value in zip(coupled, choices[place] if len(coupled) > 1 else choices[place:], strict=False):
                assign(values, key.split("."), copy.deepcopy(value))
        name = _name(along, chosen)
        folder, taken = slug(name), {point.folder for point in result}
        if name in {point.name for point in result}:  # choices of one kind that differ in a value
            name = f"{name} ({len(result) + 1})"
        folder = folder if folder not in taken else f"{folder}-{len(result) + 1}"
        read = from_dict(values, where=f"{where}: sweep point '{name}'", imports=experiment.imports)
        result.append(Point(name, folder, read))
    _check_parts(experiment, [point.name for point in result], where)
    return result


def _name(along: Mapping[str, Sequence[Any]], chosen: Sequence[int]) -> str:
    """Return the name of a point: the end of each swept key, or more if ends are alike, with its value."""
    ends = [key.rpartition(".")[2] for key in along]
    parts = []
    for (key, choices), end, place in zip(along.items(), ends, chosen, strict=True):
        short = "" if key == "title" else end if ends.count(end) == 1 else key.removeprefix("method.")
        parts.append(f"{short} {_shown(choices[place], choices)}".strip())
    return ", ".join(parts)


def axes(experiment: Experiment, where: str = "experiment") -> dict[str, tuple[Any, ...]]:
    """Return the swept keys with their values; of keys that change together the first, which names the points.

    Raises:
        FedtideError: a key that changes with others has no value, or a key stands in two places.
    """
    every = [key for keys in experiment.sweep for key in keys.split(", ")]
    if form := [key for key in every if key.startswith("method.") and key.endswith((".safe", ".transforms"))]:
        raise refused(f"{where}: sweep", form[0], "other keys; write a method for each form")
    if twice := [key for key in every if every.count(key) > 1]:
        raise refused(f"{where}: sweep", Words(f"{twice[0]} twice"), "each once")
    out: dict[str, tuple[Any, ...]] = {}
    for keys, choices in experiment.sweep.items():
        first, *others = keys.split(", ")
        for choice in choices if others else ():
            if not isinstance(choice, list | tuple) or len(choice) != 1 + len(others):
                allowed = f"a list of {1 + len(others)} values, one for each key"
                raise refused(f"{where}: sweep.'{keys}'", choice, allowed)
        out[first] = tuple(choice[0] for choice in choices) if others else choices
    return out


def has_choice(sweep: Iterable[str]) -> bool:
    """Tell whether there is a sweep and none of its keys changes what methods meet: a method can choose its point.

    >>> has_choice(["method.local.lr, rounds"]), has_choice(["method.local.lr, data.partition"]), has_choice([])
    (True, False, False)
    """
    keys = [key for side_by_side in sweep for key in side_by_side.split(", ")]
    return bool(keys) and not any(WORLDS & set(key.split(".")) for key in keys)


def matching(part: str, names: Sequence[str]) -> list[str]:
    """Return the points of a sweep that a claim means: the one of this name, else those with all parts in their names.

    "chosen" means every point.

    >>> matching("norm batch", ["norm group, rate 0.1", "norm batch, rate 0.1", "norm batch, rate 0.3"])
    ['norm batch, rate 0.1', 'norm batch, rate 0.3']
    >>> matching("epsilon 2", ["epsilon 2", "epsilon 2, ten times the clients"])
    ['epsilon 2']
    """
    if part in names:
        return [part]
    return [name for name in names if part == "chosen" or set(part.split(", ")) <= set(name.split(", "))]


def _check_parts(experiment: Experiment, names: Sequence[str], where: str) -> None:
    for number, claim in enumerate(experiment.claim):
        for key, part in (("at", claim.at), ("beyond", claim.beyond)):
            if part is None:
                continue
            if not experiment.sweep and part == "chosen" and claim.beyond is None:
                continue  # of one point that point is chosen
            if not experiment.sweep:
                raise refused(f"{where}: claim[{number}].{key}", part, "none", "there is no [sweep]")
            if key == "beyond" and claim.at is None:
                raise refused(f"{where}: claim[{number}].beyond", part, "with `at`")
            if not matching(part, names):
                parts = list(dict.fromkeys(part for name in names for part in name.split(", ")))
                raise unknown(f"{where}: claim[{number}].{key}", part, ["chosen", *parts])


def _shown(value: Any, choices: Sequence[Any]) -> str:
    """Return a swept value in a name: of a table its kind if no other has that kind, else the values that differ."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, dict):
        return str(value)
    tables = [choice for choice in choices if isinstance(choice, dict)]
    kinds = [table.get("kind") for table in tables]
    if "kind" in value and kinds.count(value["kind"]) == 1:
        return str(value["kind"])
    telling = [key for key in value if any(table.get(key) != value[key] for table in tables)]
    return " ".join(f"{key} {value[key]}" for key in telling) or str(value.get("kind", value))
