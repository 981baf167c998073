"""Reading experiments from TOML or dicts, with scales, defaults and overrides; and writing them back."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from fedtide.algorithms import REGISTRY
from fedtide.algorithms.entry import Safe, with_safe
from fedtide.algorithms.old_keys import old_key
from fedtide.config.fleet import replace_kind
from fedtide.config.keys import place, place_beside, places
from fedtide.config.overrides import as_toml, assign, flat, key_as_toml, parsed
from fedtide.config.schema import SHARED, Experiment, is_own, maker, options_model
from fedtide.core.errors import FedtideError, nearest, refused, shown, unknown, within
from fedtide.data.shift import Shift
from fedtide.data.shift.what import Rhythm
from fedtide.evaluate.metrics import SHIPPED
from fedtide.fields.explain import explained
from fedtide.fields.shapes import fields_of
from fedtide.fields.types import OfShift, by_kind, on_default
from fedtide.learn.losses import SAFE_BLEND
from fedtide.learn.target import CLASSES

SCALES = ("nano", "cpu", "paper")

SHIFT = TypeAdapter(Shift)

ALGORITHM = "a registered name, or module:function, called with the task and keywords that have types"
TAKEN = ("config.toml", "environment.json", "summary.json", "report.html", "shift", "track")
"""Names in a run folder that no method may have."""


def read(
    path: str | Path, *, scale: str | None = None, sets: Sequence[str] = (), timed: bool = True, imports: bool = True
) -> Experiment:
    """Read an experiment from a TOML file.

    Args:
        path: the file.
        scale: "nano", "cpu" or "paper", for files that have `[scale.<name>]` tables; by default "cpu" where there is
            one.
        sets: overrides `key=value`, e.g. "data.partition.alpha=0.1"; the value is TOML, or a string where it is not.
        timed: whether methods take what they do not say of the rhythm from the shift; False where values that it
            depends on are still to come.
        imports: whether an algorithm `module:function` is imported, and its options checked by it; False executes
            nothing that the file names.

    Raises:
        FedtideError: with one line naming the file, the key, what was found and what is allowed.
    """
    raw = read_toml(path)
    try:
        made = _with_sets(raw, str(path), sets, scale=scale, timed=timed, imports=imports)
        scales = raw.get("scale", {})
        for other in scales if isinstance(scales, dict) else ():  # what is not played today is to be right tomorrow
            if other == (scale or "cpu") and not sets:
                continue  # as made
            from_dict(raw, where=f"{path}, scale '{other}'", scale=other, timed=timed, imports=imports)
    except RecursionError:
        raise FedtideError(f"{path}: nested too deeply") from None
    return made


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        FedtideError: with one line that names the file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        kinds: dict[type[Exception], str] = {
            FileNotFoundError: "no such file",
            IsADirectoryError: "is a folder, allowed: a TOML file",
        }
        raise FedtideError(f"{path}: {kinds.get(type(error), str(error))}") from None
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also a number with thousands of digits
        hint = "; methods are [[method]] tables, with two brackets" if "('method',)" in str(error) else ""
        raise FedtideError(f"{path}: not valid TOML: {error}{hint}") from None
    except RecursionError:
        raise FedtideError(f"{path}: nested too deeply") from None


def _with_sets(raw: Mapping[str, Any], path: str, sets: Sequence[str], **how: Any) -> Experiment:
    """Read a file's values with overrides, which errors name where the file is right without them."""
    try:
        return from_dict(raw, where=path, sets=sets, **how)
    except FedtideError:
        with suppress(FedtideError):
            from_dict(raw, where=path, **how)
            path = f"{path} with {' '.join(sets)}"
    return from_dict(raw, where=path, sets=sets, **how)


def from_dict(
    raw: Mapping[str, Any],
    *,
    where: str = "experiment",
    scale: str | None = None,
    sets: Sequence[str] = (),
    timed: bool = True,
    imports: bool = True,
) -> Experiment:
    """An experiment from nested dicts, as `read` gets them from a file."""
    values = scaled(copied(dict(raw)), where, scale)
    for assignment in sets:
        path, value = parsed(assignment)
        assign(values, path, value)
        if path == ["fleet", "kind"]:  # what the file says of its cluster is for that alone
            values["fleet"] = replace_kind(values["fleet"], value)
    _check_integers(values, f"{where}: ", "")
    defaults = values.pop("defaults", {})
    try:
        values["method"] = _methods(values, defaults, where, timed=timed, imports=imports)
        experiment = Experiment.model_validate(values)
    except ValidationError as error:
        raise FedtideError(f"{where}: {explained(error, Experiment, values, place)}") from None
    experiment = _labeled(experiment)
    _check(experiment, where)
    claims = tuple(claim.about(experiment.score) for claim in experiment.claim)
    experiment = experiment.model_copy(update={"claim": claims})
    experiment._imports = imports
    return experiment


def copied(value: Any) -> Any:
    """Copy nested tables and lists; what is in them is copied where it is neither a number nor a string."""
    if isinstance(value, dict):
        return {key: copied(child) for key, child in value.items()}
    if isinstance(value, list):
        return [copied(child) for child in value]
    return value if value is None or isinstance(value, str | int | float) else copy.deepcopy(value)


def _check_integers(value: Any, key: str, dot: str = ".") -> None:
    """Raise for a whole number of more than 64 bits, which TOML does not have and Python may be unable to write."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise FedtideError(f"{key}: found a whole number of {value.bit_length()} bits, allowed: at most 64")
    if isinstance(value, dict):
        for name, child in value.items():
            if isinstance(child, int | dict | list | tuple):
                _check_integers(child, f"{key}{dot}{name}")
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            if isinstance(child, int | dict | list | tuple):
                _check_integers(child, f"{key}[{number}]")


def scaled(values: dict[str, Any], where: str, scale: str | None) -> dict[str, Any]:
    """Return the values of a file at a scale, by default "cpu" where there is one."""
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
        have = ", ".join(scales) or "none: it has no [scale] tables"
        raise refused(f"{where}: scale", scale, have)
    before = _names(values)
    for path, value in flat(scales[scale]) if scale else ():
        assign(values, path, value)
    return _with_renamed(values, dict(zip(before, _names(values), strict=False)))


def _names(values: Mapping[str, Any]) -> list[str | None]:
    methods = values.get("method")
    tables = [method for method in methods if isinstance(method, dict)] if isinstance(methods, list) else []
    return [name if isinstance(name := method.get("name"), str) else None for method in tables]


def _with_renamed(values: dict[str, Any], new: Mapping[str | None, str | None]) -> dict[str, Any]:
    """Let the baseline and claims follow methods that a scale gives another name."""
    claims = values.get("claim")
    tables = [values, *(claims if isinstance(claims, list) else ())]
    for table in tables:
        for key in ("baseline",) if table is values else ("method", "versus"):
            if isinstance(table, dict) and isinstance(table.get(key), str):
                table[key] = new.get(table[key], table[key])
    return values


def _methods(values: dict[str, Any], defaults: Any, where: str, *, timed: bool, imports: bool) -> list[Any]:
    """Each method with the defaults merged in and its own keys gathered under `options`."""
    methods = values.get("method", [])
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        found = "a single table" if isinstance(methods, dict) else shown(methods)
        raise FedtideError(f"{where}: method: found {found}, allowed: [[method]] tables, with two brackets each")
    if not isinstance(defaults, dict):
        raise refused(f"{where}: defaults", defaults, "a [defaults] table")
    models = [_options_of(method, number, where, imports=imports) for number, method in enumerate(methods)]
    known = {key for model in models if model is not None for key in model.model_fields} | SHARED
    for key in defaults:
        if methods and key not in known and None not in models:
            raise FedtideError(f"{where}: defaults.{key}: no method takes it; {_said_of(key, sorted(known))}")
    shared, rounds = values.get("shift", {}), values.get("rounds", Experiment.model_fields["rounds"].default)
    # What a sweep changes is not known yet: each of its points takes its rhythm from its own shift.
    swept = bool(values.get("sweep"))
    return [
        _method(method, model, defaults, shared, rounds, where, timed=timed and not swept)
        for method, model in zip(methods, models, strict=True)
    ]


def _said_of(key: str, known: list[str]) -> str:
    """Return the tail of an error about a key that no method has."""
    said = nearest(key, known)
    found = [place.removeprefix("method.") for place in places(key) if place.startswith("method.")][:1]
    return said if "did you mean" in said or found in ([], [key]) else f"{said}; did you mean '{found[0]}'?"


def _options_of(method: dict[str, Any], number: int, where: str, *, imports: bool) -> type[BaseModel] | None:
    """Return the model of a method's options; None for those of an algorithm that is not to be imported."""
    if "algorithm" not in method:
        name = method.get("name", number)
        raise FedtideError(f"{where}: method '{name}': algorithm is missing; {nearest('', list(REGISTRY))}")
    algorithm = method["algorithm"]
    if not isinstance(algorithm, str):
        key, allowed = f"{where}: method '{method.get('name', number)}'.algorithm", ALGORITHM
        if callable(algorithm):
            name = getattr(algorithm, "__name__", "function")
            allowed = (
                f"'module:{name}' with {name} in a file, module.py, as other processes import it; "
                f"ft.simulate({name}(task), people) plays it as it is"
            )
        raise refused(key, algorithm, allowed)
    if not imports and is_own(algorithm):
        return None
    key = f"{where}: method '{method.get('name', algorithm)}'.algorithm"
    maker(algorithm, key)
    try:
        return options_model(algorithm)
    except Exception as error:  # whatever a function has for a signature that is no algorithm
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
    if common.get("safe") and not _has_safe_form({**common, **method}):
        del common["safe"]
    entry = _merged(common, {"name": str(method["algorithm"])} | method)
    nested = entry.pop("options", {})  # an experiment that was dumped, read again
    if not isinstance(nested, dict):
        raise refused(f"{where}: method '{entry['name']}'.options", nested, "a table")
    entry |= {key: value for key, value in nested.items() if key not in entry}
    own = {key: value for key, value in entry.items() if key not in {"name", "algorithm", "shift"} | SHARED}
    with within(f"{where}: method '{entry['name']}'"):
        own = _in_safe_form(entry, own, nested)
        known = own if model is None else model.model_fields
        for key in own:
            if entry["algorithm"] in REGISTRY and key not in known and (old := old_key(entry["algorithm"], key)):
                raise FedtideError(old)
    shift = _merged(shared, entry.get("shift", {}))
    if model is not None:
        if timed and isinstance(shift, dict):
            own = _timed(own, model, _rhythm(shift, rounds, own.get("branches", own.get("components", 2))))
        try:
            own = model.model_validate(own).model_dump()
        except ValidationError as error:
            said = explained(error, model, own, place_beside)
            raise FedtideError(f"{where}: method '{entry['name']}'.{said}") from None
    out = {key: value for key, value in entry.items() if key in {"name", "algorithm"} | SHARED}
    if "shift" in entry:
        out["shift"] = _merged(shared, entry["shift"])
    return out | {"options": own}


def _has_safe_form(method: Mapping[str, Any]) -> bool:
    """Tell whether a method that is written has a safe form, of its own or of its loss."""
    known, loss = REGISTRY.get(str(method["algorithm"])), by_kind(method.get("loss"))
    return (known is not None and known.safe is not None) or (isinstance(loss, dict) and loss.get("kind") == "wsm")


def _in_safe_form(entry: dict[str, Any], own: dict[str, Any], dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's options with those that `safe = true` stands for, and set its loss.

    Args:
        entry: all that is written of the method.
        own: its options.
        dumped: options of an experiment that was dumped, with what safe sets among them.
    """
    if entry.get("safe") is not True:
        return own
    known = REGISTRY.get(entry["algorithm"])
    safe, loss = None if known is None else known.safe, entry.get("loss")
    table = by_kind(loss)
    if isinstance(table, dict) and table.get("kind") == "wsm":
        if "blend" in table and table["blend"] != SAFE_BLEND:
            raise FedtideError("loss.blend: is not allowed with safe = true, which sets it; leave one of them out")
        entry["loss"] = {**table, "blend": SAFE_BLEND}
        safe = safe or Safe()
    written = {key: value for key, value in own.items() if key not in dumped}
    return {**with_safe(entry["algorithm"], safe, written), **{key: own[key] for key in dumped if key in own}}


def _labeled(experiment: Experiment) -> Experiment:
    """Put what is ours in a method behind its name, in claims and as the baseline, too."""
    methods = [
        method if method.name.endswith(method.form) else method.model_copy(update={"name": method.name + method.form})
        for method in experiment.method
    ]
    names = {each.name for method in methods for each in (method, *map(method.named, method.others))}
    written = [method.bare for method in methods]
    meant = {method.bare: method.name for method in methods if written.count(method.bare) == 1}
    meant |= {f"{method.bare}, {other}": method.named(other).name for method in methods for other in method.others}

    def full(name: Any) -> Any:
        if isinstance(name, tuple):
            return tuple(map(full, name))
        return name if name in names else meant.get(name, name)

    claims = [
        claim.model_copy(update={"method": full(claim.method), "versus": full(claim.versus)})
        for claim in experiment.claim
    ]
    update = {"method": tuple(methods), "claim": tuple(claims), "baseline": full(experiment.baseline)}
    return experiment.model_copy(update=update)


def _timed(own: dict[str, Any], model: type[BaseModel], rhythm: dict[str, float]) -> dict[str, Any]:
    """Values that are marked `OfShift` and not given, as one who knows the rhythm would give them."""
    timed = dict(own)
    for name, marks in _marked(model).items():
        if isinstance(marks, OfShift):
            if marks.what in rhythm:
                timed.setdefault(name, rhythm[marks.what])
            continue
        table = _table(model.model_fields[name], own.get(name))
        said = next((said for kind, said in marks.items() if kind == table.get("kind")), {})
        known = {key: rhythm[what] for key, what in said.items() if what in rhythm}
        if known:
            timed[name] = known | table
    return timed


def _rhythm(shift: dict[str, Any], rounds: Any, models: Any) -> Rhythm:
    """Return a shift's rhythm; empty where it, or the number of rounds, will be refused."""
    turns = models if isinstance(models, int) and models > 0 else 2
    if not isinstance(rounds, int) or rounds < 1:
        return {}
    try:
        return SHIFT.validate_python(shift).rhythm(rounds, turns)
    except ValidationError:
        return {}


@cache
def _marked(model: type[BaseModel]) -> dict[str, OfShift | Mapping[Any, Mapping[str, str]]]:
    """Return the options that are marked `OfShift`, and for a choice among ingredients what each kind's marks say."""
    out: dict[str, OfShift | Mapping[Any, Mapping[str, str]]] = {}
    for name, field in model.model_fields.items():
        if (mark := _mark(field.metadata)) is not None:
            out[name] = mark
            continue
        kinds: dict[Any, Mapping[str, str]] = {}
        for member in filter(is_dataclass, get_args(field.annotation)):
            found = {key: _mark(getattr(hint, "__metadata__", ())) for key, hint in fields_of(member).items()}
            if marks := {key: mark.what for key, mark in found.items() if mark is not None}:
                kinds.setdefault(getattr(member, "kind", None), marks)
        if kinds:
            out[name] = kinds
    return out


def _table(field: FieldInfo, given: Any) -> dict[str, Any]:
    """Return the table of an ingredient that was chosen, or that is the default; empty for what is no table."""
    if is_dataclass(given):  # of the safe form
        return {key: value for key, value in vars(given).items() if value is not None}
    table = on_default(field.default, {} if given is None and is_dataclass(field.default) else by_kind(given))
    return table if isinstance(table, dict) else {}


def _mark(metadata: Iterable[Any]) -> OfShift | None:
    return next((extra for extra in metadata if isinstance(extra, OfShift)), None)


def _merged(below: Any, above: Any) -> Any:
    """Nested tables, `above` winning; a table with another `kind` replaces."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if "kind" in above and above["kind"] != below.get("kind"):
        return above
    return below | {key: _merged(below[key], each) if key in below else each for key, each in above.items()}


def _check(experiment: Experiment, where: str) -> None:
    names = [method.name for method in experiment.method]
    folders = [slug(name) for name in names]
    for name, path in zip(names, folders, strict=True):
        if path in TAKEN:
            raise FedtideError(f"{where}: method '{name}': the run folder needs '{path}' itself; take another name")
        if folders.count(path) > 1:
            raise FedtideError(f"{where}: method '{name}': two methods need different names (folder '{path}')")
    for method in experiment.method:
        names += [method.named(other).name for other in method.others]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise refused(f"{where}: method '{doubled[0]}'", "two of that name", "one, other uses of models included")
    if experiment.baseline is not None and experiment.baseline not in names:
        raise unknown(f"{where}: baseline", experiment.baseline, names)
    for claim in experiment.claim:
        for said in (claim.method, *claim.rivals):
            if said not in names:
                raise unknown(f"{where}: claim '{claim.text}': method", said, names)
    for number, metric in enumerate(experiment.metrics):
        of_classes = metric.kind if metric.kind in SHIPPED else getattr(metric, "needs", None)
        if of_classes and experiment.data.target != CLASSES:
            but = f"data.target is '{experiment.data.target.kind}'"
            raise refused(f"{where}: metrics[{number}]", of_classes, "metrics of your own, or classes", but)
    if experiment.data.target.kind == "counts" and getattr(experiment.data.source, "own_scale", False):
        raise refused(f"{where}: data.source.own_scale", True, "false, as data.target is 'counts'")
    last = experiment.rounds - 1
    for number in experiment.forgetting.rounds if experiment.forgetting is not None else ():
        if number > last:
            raise refused(f"{where}: forgetting.rounds", number, f"0 to {last}")


def slug(name: str) -> str:
    """A name as a folder is called.

    >>> slug("FedAdam, rate 0.1"), slug("phase -8")
    ('fedadam-rate-0.1', 'phase-minus-8')
    """
    signed = re.sub(r"(^|[^\w])-(?=[\d.])", r"\1minus ", name)
    kept = "".join(c.lower() if c.isalnum() or c in "._" else "-" for c in signed)
    return "-".join(part for part in kept.split("-") if part.strip(".")) or "method"


def to_toml(experiment: Experiment) -> str:
    """The whole experiment, every default written out, as TOML that `read` takes."""
    return tomli_w.dumps(resolved(experiment))


ALWAYS = ("rounds", "seeds", "kind", "name", "algorithm")
"""Keys that a file names also where they are as by default."""


def brief(experiment: Experiment) -> str:
    """The experiment as TOML that a person would write: what is not as by default, in a line for each table of tables.

    >>> print(brief(from_dict({"model": {"kind": "mlp", "hidden": [8]}, "method": [{"algorithm": "fedavg"}]})))
    rounds = 100
    seeds = [0]
    model = { kind = "mlp", hidden = [8] }
    <BLANKLINE>
    [[method]]
    name = "fedavg"
    algorithm = "fedavg"
    """
    values = resolved(experiment)
    whole = copy.deepcopy(values)

    def alike() -> bool:
        try:
            return resolved(from_dict(copy.deepcopy(values))) == whole
        except FedtideError:
            return False

    def shorten(table: dict[str, Any]) -> None:
        order = sorted(table, key=lambda key: key != "kind")
        for key in order:
            value = table.pop(key)
            if key not in ALWAYS and alike():
                continue
            table[key] = value
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, dict):
                    shorten(each)
            if isinstance(value, dict) and [*value] == ["kind"]:
                table[key] = value["kind"]
                table[key] = table[key] if alike() else value

    shorten(values)
    return "\n\n".join("\n".join(part) for part in _parts(values) if part)


def _parts(values: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of a file in parts: what is in no table, the data, and each table of a list."""

    def lines(table: Mapping[str, Any]) -> list[str]:
        return [f"{key_as_toml(key)} = {as_toml(value)}" for key, value in table.items()]

    lists = {key for key, value in values.items() if isinstance(value, list) and value and isinstance(value[0], dict)}
    apart = {*lists, "data"}
    yield lines({key: value for key, value in values.items() if key not in apart})
    for key in (key for key in values if key in apart):
        for table in values[key] if key in lists else [values[key]]:
            yield [f"[[{key}]]" if key in lists else f"[{key}]", *lines(table)]


def resolved(experiment: Experiment) -> dict[str, Any]:
    """The whole experiment as nested dicts without None, which TOML has no word for."""
    values = _without_none(experiment.model_dump(mode="json"))
    for method, made in zip(values["method"], experiment.method, strict=True):
        known = REGISTRY.get(made.algorithm)
        sets = known.safe.options if known is not None and known.safe is not None and made.safe else {}
        method["name"] = made.bare
        method |= {key: value for key, value in method.pop("options", {}).items() if key not in sets}
    return values


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(child) for key, child in value.items() if child is not None}
    return [_without_none(child) for child in value] if isinstance(value, list | tuple) else value
