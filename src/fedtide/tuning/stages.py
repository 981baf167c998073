"""Plan of a tuning: stages, the parameters of each method, and experiments with given values."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedtide.config import Experiment, Range, Tune, TuneStage, from_dict, resolved
from fedtide.config.overrides import assign, locate, seed_list
from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.runs.digest import digest_of

Place = tuple[str, ...]
"""Path of a value in the tables of an experiment."""
Placed = list[tuple[Place, Any]]
"""Places and their values."""

FIXED = ("name", "algorithm", "shift", "safe", "transforms")
"""Keys of a method that no search may change, so that all compared methods meet the same data."""

NEAR = 0.05
"""Share of a range within which a value counts as lying at its edge."""


@dataclass(frozen=True)
class Parameter:
    """A value that is searched for one method.

    key: key in the file. place: path of the value in this method. also: other paths that the found value is written to.
    range: searched range. where: name of the range in messages.
    """

    key: str
    place: Place
    also: tuple[Place, ...]
    range: Range
    where: str

    @property
    def name(self) -> str:
        """Key within the method."""
        return ".".join(self.place[2:])


@dataclass(frozen=True)
class Search:
    """Search for one method in one stage, independent of other methods."""

    stage: str
    method: str
    trials: int
    parameters: tuple[Parameter, ...]

    @property
    def title(self) -> str:
        """Name shown to people."""
        return f"{self.stage} · {self.method}" if self.stage else self.method

    def assigned(self, values: Mapping[str, Any]) -> Placed:
        """Return the places of a trial's values, with the values."""
        return [(place, values[p.key]) for p in self.parameters for place in (p.place, *p.also)]


def tune_of(experiment: Experiment, where: str) -> Tune:
    """Return the `[tune]` table of an experiment.

    Raises:
        FedtideError: it has none.
    """
    if experiment.tune is None:
        raise FedtideError(f"{where}: tune: missing; allowed: a table [tune] that says what is searched")
    return experiment.tune


def seeds_of(experiment: Experiment) -> tuple[int, ...]:
    """Return the seeds that a trial plays."""
    seeds = None if experiment.tune is None else experiment.tune.seeds
    return experiment.seeds[:1] if seeds is None else seeds


def digest_of_tuning(experiment: Experiment) -> str:
    """Return a short digest of everything that trials depend on; trials with another digest are refused."""
    base = from_dict(base_of(experiment), where="the configuration")
    runs = [digest_of(base, method, seed) for method in base.method for seed in seeds_of(experiment)]
    content = [runs, base.late, tune_of(experiment, "the configuration").model_dump(mode="json")]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def with_budget(
    experiment: Experiment, where: str = "experiment", *, trials: int | None = None, seeds: str | None = None
) -> Experiment:
    """Return the experiment with another number of trials per method and stage, or other seeds (such as "0,1").

    Raises:
        FedtideError: it has no `[tune]` table, or the numbers are invalid.
    """
    staged = tune_of(experiment, where).stage
    sets = [f"tune.seeds={seed_list(seeds)}"] if seeds is not None else []
    if trials is not None:
        sets += [f"tune.trials={trials}", *([f"tune.stage.trials={trials}"] if staged else [])]
    return from_dict(resolved(experiment), where=where, sets=sets, timed=False) if sets else experiment


def stages(experiment: Experiment, where: str = "experiment") -> list[list[Search]]:
    """Return for each stage the search of each of its methods.

    Raises:
        FedtideError: a key, a method or a range is invalid.
    """
    tune = tune_of(experiment, where)
    return [_searches(stage, tune, names_of(experiment), where) for stage in tune.stages()]


def names_of(experiment: Experiment) -> dict[str, str]:
    """Return the name of each method by that name, and by the written one if no other method has it."""
    written = [method.bare for method in experiment.method]
    shown = {method.name: method.name for method in experiment.method}
    return {name: full for name, full in zip(written, shown, strict=True) if written.count(name) == 1} | shown


def _searches(stage: TuneStage, tune: Tune, methods: Mapping[str, str], where: str) -> list[Search]:
    names = list(dict.fromkeys(methods.values()))
    at = f"{where}: tune.stage '{stage.name}'" if stage.name else f"{where}: tune"
    among = [methods.get(name, name) for name in stage.methods or ()]
    for name in among:
        if name not in names:
            raise unknown(f"{at}.methods", name, names)
    allowed = names if stage.methods is None else list(dict.fromkeys(among))
    about = {key: _about(key, methods, f"{at}.ranges.{key}") for key in stage.ranges}
    for key, (method, _) in about.items():
        if method is not None and method not in allowed:
            raise unknown(f"{at}.ranges.{key}", method, allowed)
    reached = [name for name in allowed if any(method in (None, name) for method, _ in about.values())]
    for name in allowed if stage.methods is not None else ():
        if name not in reached:
            raise refused(f"{at}.methods", name, "methods that a range of the stage is about")
    out = []
    for name in reached:
        parameters = []
        for key, (method, rest) in about.items():
            if method in (None, name):
                label, range_ = f"{at}.ranges.{key}", stage.ranges[key]
                also = tuple(_elsewhere(other, methods, label) for other in range_.also)
                if also and method is None and len(reached) > 1:
                    raise FedtideError(f"{label}.also: allowed with a range about one method, 'method.<name>.<key>'")
                parameters.append(Parameter(key, ("method", name, *rest), also, range_, label))
        places = [parameter.place for parameter in parameters]
        if twice := next((place for i, place in enumerate(places) if place in places[:i]), None):
            raise FedtideError(f"{at}.ranges: two ranges are about '{'.'.join(twice)}'")
        out.append(Search(stage.name, name, stage.trials or tune.trials, tuple(parameters)))
    return out


def _about(key: str, methods: Mapping[str, str], label: str) -> tuple[str | None, Place]:
    """Return the method that a key refers to (None for all) and the key within it."""
    first, *path = key.split(".")
    if first != "method" or not path or "" in path:
        raise FedtideError(
            f"{label}: allowed: keys of methods, 'method.<key>' or 'method.<name>.<key>': all methods of a comparison "
            "share the rest"
        )
    names = list(dict.fromkeys(methods.values()))
    which, rest = locate(path, names)
    if which is None and not path[0].isdigit():  # a name as it is written in the file, without its form
        place, rest = locate(path, list(methods))
        which = None if place is None else names.index(methods[list(methods)[place]])
    if not rest or rest[0] in FIXED:
        first_key = "".join(rest[:1])
        raise refused(label, first_key, f"a key of the method other than {', '.join(FIXED)}")
    return None if which is None else names[which], tuple(rest)


def _elsewhere(key: str, methods: Mapping[str, str], label: str) -> Place:
    method, rest = _about(key, methods, f"{label}.also: found '{key}'")
    if method is None:
        raise refused(
            f"{label}.also", key, f"'method.<name>.<key>'; names: {', '.join(dict.fromkeys(methods.values()))}"
        )
    return ("method", method, *rest)


def base_of(experiment: Experiment) -> dict[str, Any]:
    """Return the tuned experiment as nested dicts, without search, sweep, and claims about points of the sweep."""
    values = resolved(experiment)
    values.pop("tune", None)
    if values.pop("sweep", None):
        values["claim"] = [c for c in values["claim"] if c.get("at") in (None, "chosen") and "beyond" not in c]
    return values


def with_values(experiment: Experiment, values: Placed) -> dict[str, Any]:
    """Return the tuned experiment with given values, as nested dicts that are not validated yet."""
    out = base_of(experiment)
    for place, value in values:
        assign(out, list(place), value)
    return out


def ends(experiment: Experiment, where: str = "experiment") -> Iterator[tuple[str, Experiment]]:
    """Yield the experiment at both ends of every range and every value of a list, with the methods concerned.

    Raises:
        FedtideError: a key does not exist, or a value is invalid.
    """
    for search in (search for stage in stages(experiment, where) for search in stage):
        for parameter in search.parameters:
            for value in parameter.range.edges():
                pairs = [(place, value) for place in (parameter.place, *parameter.also)]
                name = f"{parameter.where} = {value}"
                at_end = from_dict(with_values(experiment, pairs), where=name)
                methods = tuple(method for method in at_end.method if method.name == search.method)
                yield name, at_end.model_copy(update={"method": methods})


def at_edge(range_: Range, value: Any) -> Literal["low", "high"] | None:
    """Return the end of its range near which a found value lies, as better values may lie beyond; None for neither.

    >>> at_edge(Range(low=0.01, high=1.0, log=True), 0.9), at_edge(Range(low=0.0, high=1.0), 0.5)
    ('high', None)
    """
    if range_.low is None or range_.high is None or range_.low == range_.high:
        return None
    low, high, at = (math.log(v) if range_.log else float(v) for v in (range_.low, range_.high, value))
    share = (at - low) / (high - low)
    near = 1e-9 if range_.whole or range_.step else NEAR
    return "low" if share <= near else "high" if share >= 1 - near else None
