"""Reading of experiments from TOML or dicts, with scales, defaults and overrides; and studies in short."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from torch import nn

from fedtide.algorithms import REGISTRY
from fedtide.algorithms.entry import Safe, with_safe
from fedtide.config.keys import place
from fedtide.config.overrides import assign, flatten, parse_assignment
from fedtide.config.schema import SHARED, Experiment, Method, is_own, maker, options_model
from fedtide.config.settings import replace_kind
from fedtide.core.errors import FedtideError, Words, folded, refused, shown, unknown, within
from fedtide.core.files import read_toml
from fedtide.data.rows import Rows
from fedtide.data.shift import Shift
from fedtide.data.shift.what import Rhythm
from fedtide.draw.prose import slug
from fedtide.evaluate.metrics import METRICS, SHIPPED
from fedtide.fields.shapes import explain, marks_of
from fedtide.fields.types import OfShift, by_kind, check_visible, is_written
from fedtide.fields.user_code import name_of
from fedtide.fields.vocabulary import nearest
from fedtide.learn.losses import SAFE_BLEND
from fedtide.learn.target import CLASSES

SCALES = ("nano", "cpu", "paper")

SHIFT = TypeAdapter(Shift)

ALGORITHM = "a registered name, or module:function, called with the task and keywords that have types"
PARTS = ("cohort", "loss", "model", "partition", "source", "who", "what", "how")
"""Keys of parts that may be of kind "python"."""
TAKEN = ("config.toml", "environment.json", "summary.json", "report.html", "shift", "track")
"""Names in a run folder that no method may have."""
MANY_LINES = ("description", "options", "source")
"""Keys of text with several lines: a paragraph of the report, what code of a person gets, and names of columns."""


def read(
    path: str | Path, *, scale: str | None = None, sets: Sequence[str] = (), timed: bool = True, imports: bool = True
) -> Experiment:
    """Read an experiment from a TOML file.

    Args:
        scale: "nano", "cpu" or "paper", for files that have `[scale.<name>]` tables; by default "cpu" if there is one.
        sets: overrides `key=value`, e.g. "data.partition.alpha=0.1"; the value is TOML, or else a string.
        timed: whether methods take missing values of the rhythm from the shift; False if values that the rhythm
            depends on are still to come.
        imports: whether an algorithm `module:function` is imported, and its options checked by it; False executes
            nothing that the file names.

    Raises:
        FedtideError: with one line naming the file, the key, what was found and what is allowed.
    """
    raw = read_toml(Path(path))
    where = f"{path} with {' '.join(sets)}" if sets else str(path)
    try:
        experiment = from_dict(raw, where=where, scale=scale, sets=sets, timed=timed, imports=imports)
        scales = raw.get("scale", {})
        for other in scales if isinstance(scales, dict) else ():  # a scale that is not played now is checked, too
            if other != (scale or "cpu") or sets:
                from_dict(raw, where=f"{path}, scale '{other}'", scale=other, timed=timed, imports=imports)
    except RecursionError:
        raise FedtideError(f"{path}: nested too deeply") from None
    return experiment


def from_dict(
    raw: Mapping[str, Any],
    *,
    where: str = "experiment",
    scale: str | None = None,
    sets: Sequence[str] = (),
    timed: bool = True,
    imports: bool = True,
) -> Experiment:
    """Return the experiment of nested dicts, as `read` gets them from a file."""
    values = copy.deepcopy(dict(raw))
    names = _names(values)
    values = at_scale(values, where, scale)
    for assignment in sets:
        path, value = parse_assignment(assignment)
        assign(values, path, value)
        if path == ["fleet", "kind"]:  # settings of another kind of fleet do not apply
            values["fleet"] = replace_kind(values["fleet"], value)
    _check_values(values, f"{where}: ")
    defaults = values.pop("defaults", {})
    try:
        values["method"] = _methods(values, defaults, where, timed=timed, imports=imports)
        experiment = Experiment.model_validate(values)
    except ValidationError as error:
        raise FedtideError(f"{where}: {explain(error, Experiment, values, _find_place)}") from None
    experiment = _labeled(experiment, names)
    _check(experiment, where)
    experiment._imports = imports
    return experiment


def _check_values(value: Any, key: str, dot: str = "", *, lines: bool = False) -> None:
    """Raise for a whole number of more than 64 bits, and for text that a terminal obeys or that is no single line.

    TOML does not have such numbers, and Python may be unable to write them.

    Args:
        value: the value of a key, and all that is in it.
        key: the key, for errors.
        dot: what stands between the key and a key in it.
        lines: whether text may have several lines, see `MANY_LINES`.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise FedtideError(f"{key}: found a number that is too large, allowed: whole numbers from -2^63 to 2^63 - 1")
    if isinstance(value, str):
        try:
            check_visible(value, lines=lines)
        except ValueError as error:
            raise FedtideError(f"{key}: {error}") from None
    if isinstance(value, dict):
        for name, child in value.items():
            _check_values(str(name), f"{key}{dot}{name}")
            _check_values(child, f"{key}{dot}{name}", ".", lines=lines or name in MANY_LINES)
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            _check_values(child, f"{key}[{number}]", ".", lines=lines)


def at_scale(values: dict[str, Any], where: str, scale: str | None) -> dict[str, Any]:
    """Return the values of a file at a scale, by default "cpu" if there is one."""
    scales = values.pop("scale", {})
    if not isinstance(scales, dict):
        raise refused(f"{where}: scale", scales, "[scale.nano], [scale.cpu], [scale.paper]")
    for name, table in scales.items():
        if name not in SCALES:
            raise FedtideError(f"{where}: scale.{name}: {nearest(name, SCALES)}")
        if not isinstance(table, dict):
            raise refused(f"{where}: scale.{name}", table, "a table")
    if scale is None:
        scale = "cpu" if "cpu" in scales else None
    elif scale not in scales:
        raise refused(f"{where}: scale", scale, ", ".join(scales) or "none, because the file has no [scale] tables")
    for path, value in flatten(scales[scale]) if scale else ():
        assign(values, path, value)
    return values


def _find_place(word: str) -> str:
    """Return the place of the key that a word at the top of a file may mean; "" if there is none."""
    return "'[defaults]'" if folded(word) == "default" else place(word)


def _names(values: Mapping[str, Any]) -> list[Any]:
    methods = values.get("method")
    return [method.get("name") for method in methods if isinstance(method, dict)] if isinstance(methods, list) else []


# -- methods -----------------------------------------------------------------------------------------------------------


def _methods(values: dict[str, Any], defaults: Any, where: str, *, timed: bool, imports: bool) -> list[Any]:
    """Return the methods with the defaults merged in and their own keys gathered under `options`."""
    methods = values.get("method", [])
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        kind = "a single table" if isinstance(methods, dict) else shown(methods)
        raise FedtideError(f"{where}: method: found {kind}, allowed: [[method]] tables, with two brackets each")
    if not isinstance(defaults, dict):
        raise refused(f"{where}: defaults", defaults, "a [defaults] table")
    models = [_options_of(method, number, where, imports=imports) for number, method in enumerate(methods)]
    allowed = {key for model in models if model is not None for key in model.model_fields} | SHARED
    for key in defaults:
        if methods and key not in allowed and None not in models:
            raise FedtideError(f"{where}: defaults.{key}: no method takes it; {nearest(key, sorted(allowed))}")
    shared, rounds = values.get("shift", {}), values.get("rounds", Experiment.model_fields["rounds"].default)
    # A sweep may change the shift: each of its points takes the rhythm from its own shift.
    timed = timed and not values.get("sweep")
    return [
        _method(method, model, defaults, shared, rounds, where, timed=timed)
        for method, model in zip(methods, models, strict=True)
    ]


def _options_of(method: dict[str, Any], number: int, where: str, *, imports: bool) -> type[BaseModel] | None:
    """Return the model of a method's options; None if its algorithm is not to be imported."""
    if "algorithm" not in method:
        name = f"method '{method['name']}'" if "name" in method else f"[[method]] number {number + 1}"
        raise FedtideError(f"{where}: {name}: algorithm is missing; 'fedtide algorithms' lists them")
    algorithm = method["algorithm"]
    if not isinstance(algorithm, str):
        raise refused(f"{where}: method '{method.get('name', number)}'.algorithm", algorithm, ALGORITHM)
    if not imports and is_own(algorithm):
        return None
    key = f"{where}: method '{method.get('name', algorithm)}'.algorithm"
    maker(algorithm, key)
    try:
        return options_model(algorithm)
    except Exception as error:  # any signature of a function that is no algorithm
        raise refused(key, algorithm, ALGORITHM, f"its keywords cannot be read ({error})") from None


def _method(
    method: dict[str, Any],
    model: type[BaseModel] | None,
    defaults: dict[str, Any],
    shared: Any,
    rounds: Any,
    where: str,
    *,
    timed: bool,
) -> Any:
    """Check one method and return it in the form of the schema."""
    takes = SHARED if model is None else {*model.model_fields, *SHARED}
    common = {key: value for key, value in defaults.items() if key in takes}
    if common.get("safe") and _safe_form({**common, **method}) is None:
        del common["safe"]
    entry = _merged(common, {"name": str(method["algorithm"])} | method)
    where = f"{where}: method '{entry['name']}'"
    options = {key: value for key, value in entry.items() if key not in {"name", "algorithm", "shift"} | SHARED}
    with within(where):
        options = _in_safe_form(entry, options)
    shift = _merged(shared, entry.get("shift", {}))
    if model is not None:
        turns = options.get("branches", options.get("components", 2))
        rhythm = _rhythm(shift, rounds, turns) if timed and isinstance(shift, dict) else {}
        try:
            options = _timed(model, options, rhythm)
        except ValidationError as error:
            raise FedtideError(f"{where}.{explain(error, model, options, place)}") from None
    table = {key: value for key, value in entry.items() if key in {"name", "algorithm"} | SHARED}
    if "shift" in entry:
        table["shift"] = shift
    return table | {"options": options}


def _safe_form(method: Mapping[str, Any]) -> Safe | None:
    """Return the safe form of a method that is written, of its own or of its loss; None if it has none."""
    entry = REGISTRY.get(str(method["algorithm"]))
    safe = None if entry is None else entry.safe
    return safe or (Safe() if _is_wsm(method) else None)


def _is_wsm(method: Mapping[str, Any]) -> bool:
    loss = by_kind(method.get("loss"))
    return isinstance(loss, dict) and loss.get("kind") == "wsm"


def _in_safe_form(entry: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return a method's options with those that `safe = true` stands for, and set the loss in all that is written."""
    if entry.get("safe") is not True:
        return options
    if _is_wsm(entry):
        loss = by_kind(entry["loss"])
        if loss.get("blend", SAFE_BLEND) != SAFE_BLEND:
            raise FedtideError("loss.blend: is not allowed with safe = true, which sets it; leave one of them out")
        entry["loss"] = {**loss, "blend": SAFE_BLEND}
    return with_safe(entry["algorithm"], _safe_form(entry), options)


def _labeled(experiment: Experiment, names_before: Sequence[Any]) -> Experiment:
    """Append its form to the name of each method, in claims and as the baseline, too.

    Claims and the baseline may call a method as it was called before a scale gave it another name.
    """
    methods = tuple(method.model_copy(update={"name": method.bare + method.form}) for method in experiment.method)
    names = {name for method in methods for name in _all_names(method)}
    written = [method.bare for method in methods]
    full = {name: method.name for name, method in zip(names_before, methods, strict=False) if isinstance(name, str)}
    full |= {method.bare: method.name for method in methods if written.count(method.bare) == 1}
    full |= {f"{method.bare}, {other}": method.named(other).name for method in methods for other in method.others}

    def full_name(name: Any) -> Any:
        if isinstance(name, tuple):
            return tuple(map(full_name, name))
        return name if name in names else full.get(name, name)

    score = experiment.score
    claims = [
        claim.about(score).model_copy(update={"method": full_name(claim.method), "versus": full_name(claim.versus)})
        for claim in experiment.claim
    ]
    update = {"method": methods, "claim": tuple(claims), "baseline": full_name(experiment.baseline)}
    return experiment.model_copy(update=update)


def _all_names(method: Method) -> list[str]:
    return [method.name, *(method.named(other).name for other in method.others)]


def _merged(below: Any, above: Any) -> Any:
    """Merge nested tables, `above` winning; a table with another `kind` replaces."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if "kind" in above and above["kind"] != below.get("kind"):
        return above
    return below | {key: _merged(below[key], value) if key in below else value for key, value in above.items()}


# -- values that methods take from the shift ---------------------------------------------------------------------------


def _timed(model: type[BaseModel], written: Mapping[str, Any], rhythm: Rhythm) -> dict[str, Any]:
    """Return a method's options, with missing values that are marked `OfShift` taken from a rhythm."""
    options = model.model_validate(written)
    values = options.model_dump()
    tables: list[tuple[Any, Any]] = [(values, model), *((values[key], type(value)) for key, value in options)]
    for table, kind in tables:
        for key, mark in marks_of(kind, OfShift).items():
            if table[key] is None:
                table[key] = rhythm.get(mark.what)
    return model.model_validate(values).model_dump()


def _rhythm(shift: dict[str, Any], rounds: Any, models: Any) -> Rhythm:
    """Return a shift's rhythm; empty if it, or the number of rounds, will be refused."""
    turns = models if isinstance(models, int) and models > 0 else 2
    if not isinstance(rounds, int) or rounds < 0:
        return {}
    try:
        return SHIFT.validate_python(shift).rhythm(max(rounds, 1), turns)
    except ValidationError:
        return {}


# -- checks of the whole -----------------------------------------------------------------------------------------------


def _check(experiment: Experiment, where: str) -> None:
    if experiment.rounds == 0 and experiment.tune is not None:
        raise refused(f"{where}: rounds", 0, "1 or more with [tune]")
    names = [method.name for method in experiment.method]
    folders = [slug(name) for name in names]
    for name, path in zip(names, folders, strict=True):
        if path in TAKEN:
            raise FedtideError(f"{where}: method '{name}': the run folder needs '{path}' itself; take another name")
        if folders.count(path) > 1:
            raise FedtideError(f"{where}: method '{name}': another one has its folder '{path}', too; take another name")
    names = [name for method in experiment.method for name in _all_names(method)]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise refused(
            f"{where}: method '{doubled[0]}'", Words("two of that name"), "one, other uses of models included"
        )
    if experiment.baseline is not None and experiment.baseline not in names:
        raise unknown(f"{where}: baseline", experiment.baseline, names, quoted=True)
    texts = [claim.text for claim in experiment.claim]
    for claim in experiment.claim:
        if texts.count(claim.text) > 1:
            raise refused(f"{where}: claim '{claim.text}'", Words("two of that text"), "one")
        if claim.measure == "swing" and experiment.period is None and not experiment.sweep:
            but = "nothing in [shift] has a period"
            raise refused(f"{where}: claim '{claim.text}': measure", "swing", "a measure without periods", but)
        for key, called in (("method", (claim.method,)), ("versus", claim.rivals)):
            for name in called:
                if name not in names:
                    raise unknown(f"{where}: claim '{claim.text}': {key}", name, names, quoted=True)
    for number, metric in enumerate(experiment.metrics):
        of_classes = metric.kind if metric.kind in SHIPPED else getattr(metric, "needs", None)
        if of_classes and experiment.data.target != CLASSES:
            but = f"data.target is '{experiment.data.target.kind}'"
            raise refused(f"{where}: metrics[{number}]", of_classes, "metrics of your own, or classes", but)
    if experiment.data.target.kind == "counts" and getattr(experiment.data.source, "own_scale", False):
        raise refused(f"{where}: data.source.own_scale", True, "false, because data.target is 'counts'")
    but = f"data.target is '{experiment.data.target.kind}'"
    if experiment.accuracy_over == "clients" and experiment.score != "accuracy":
        raise refused(f"{where}: accuracy_over", "clients", "rows", but)
    if experiment.forgetting is not None and experiment.score != "accuracy":
        raise refused(f"{where}: forgetting", Words("a table"), "none, because forgetting is a loss of accuracy", but)
    if experiment.keep is not None and experiment.keep.by is not None:
        numbers = [experiment.score, *(metric.name for metric in METRICS[1:]), *experiment.metric_units]
        if experiment.keep.by not in numbers:
            raise unknown(f"{where}: keep.by", experiment.keep.by, numbers, quoted=True)
    last = experiment.rounds - 1  # without rounds the table itself is refused, by `preflight`
    for number in experiment.forgetting.rounds if experiment.forgetting is not None and experiment.rounds else ():
        if number > last:
            raise refused(f"{where}: forgetting.rounds", number, f"0 to {last}")


# -- from Python -------------------------------------------------------------------------------------------------------


def named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an experiment with a name in place of all code and rows of a Python session.

    A function is an algorithm, a loss or a metric, or makes one of the other parts; any other object is that part.

    >>> from collections import Counter
    >>> named({"method": [{"algorithm": Counter}], "model": Counter})["method"]
    [{'name': 'Counter', 'algorithm': 'collections:Counter'}]
    """
    if strangers := [key for key in values if not isinstance(key, str)]:
        raise refused("experiment: a key", strangers[0], "a text")
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
    is_part = key in PARTS and (inspect.isclass(value) or not is_written(value))
    return _part(key, value) if is_part else value


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


def _is_rows(value: Any) -> bool:
    pair = isinstance(value, tuple) and len(value) == 2
    return isinstance(value, Rows) or pair or (isinstance(value, Mapping) and {"x", "y"} <= value.keys())
