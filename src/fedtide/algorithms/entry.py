"""An entry of the registry: presets, options checked alike in a file and from Python, and how an algorithm is made."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache, partial, wraps
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BeforeValidator, create_model

from fedtide.cohorts import Cohort
from fedtide.core.base import Algorithm, Holdings
from fedtide.core.errors import FedtideError, refused, within
from fedtide.fields.shapes import unknown_key
from fedtide.fields.types import Strict, as_written, by_kind, on_default
from fedtide.fields.vocabulary import Family, in_words
from fedtide.learn.local import LocalTrainer, check_fit, on_local_default
from fedtide.learn.losses import SAFE_BLEND, WSM
from fedtide.learn.task import Task
from fedtide.transforms.transform import Transform, apply

Trait = Literal["labels", "groups", "meaning", "hours", "drift", "holdings", "nothing"]
"""What an inspection may find that speaks for a method; `fedtide.inspection.findings` says when."""


@dataclass(frozen=True)
class Safe:
    """The safe form of a method (`safe = true`): it lost no point if there was nothing to find.

    Args:
        options: of the algorithm, which may not be given beside `safe`.
        usual: defaults of the safe form, which may be changed.
        transforms: that it has.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    transforms: tuple[Transform, ...] = ()


@dataclass(frozen=True)
class Entry:
    """An algorithm in the registry.

    Args:
        name: in a configuration.
        make: builds an Algorithm from a task and ingredients; its signature is the algorithm's configuration.
        sends: payloads down and up, in a few words.
        family: what it trains.
        reveals: names of what the server is shown of a client by itself with the default options, beside what the
            cohort asks (`fedtide.core.base`).
        tells: what the server learns of a client by itself from sums, or from how it is asked or answers, in words.
        keeps: memory of a client between rounds.
        helps: traits of data that speak for the algorithm.
        exempt: laws that cannot hold for the algorithm, each with the reason.
        safe: what `safe = true` stands for; None if there is no such form.
    """

    name: str
    make: Callable[..., Algorithm]
    sends: str
    family: Family
    reveals: tuple[str, ...] = ()
    tells: str = ""
    keeps: str = "nothing"
    helps: tuple[Trait, ...] = ()
    exempt: Mapping[str, str] = field(default_factory=dict)
    safe: Safe | None = None

    @property
    def sees(self) -> str:
        """Words for the values that the server sees of a single client; semicolons part items with commas."""
        items = [*filter(None, [self.tells]), *(in_words((name,)) for name in self.reveals)]
        return ("; " if any("," in item for item in items) else ", ").join(items) or "sums only"


def preset(
    name: str, make: Callable[..., Algorithm], summary: str, module: str = "", **defaults: Any
) -> Callable[..., Algorithm]:
    """Build an algorithm's function from another one by changing defaults.

    Without `module`, its docstring goes on with that of the first new default, whose module says where it is from.

    Args:
        name: of the algorithm.
        make: builds an Algorithm from a task and ingredients.
        summary: first line of the docstring.
        module: whose docstring says where the preset is from.
        defaults: ingredients that replace defaults of `make`.
    """
    parameters = inspect.signature(make).parameters.values()
    signature = inspect.Signature([p.replace(default=defaults.get(p.name, p.default)) for p in parameters])
    kind = type(next(iter(defaults.values())))

    @wraps(make)
    def make_preset(*args: Any, **options: Any) -> Algorithm:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        return replace(make(*bound.args, **bound.kwargs), name=name)

    rule, rest = "" if module else inspect.getdoc(kind) or "", inspect.getdoc(make) or ""
    make_preset.__doc__ = "\n\n".join(
        filter(None, [summary, rule.partition("\n\nArgs:")[0], rest.partition("\n\n")[2]])
    )
    make_preset.__module__ = module or kind.__module__
    make_preset.__name__ = make_preset.__qualname__ = name
    make_preset.__signature__ = signature  # type: ignore[attr-defined]
    make_preset.changed = tuple(defaults)  # type: ignore[attr-defined]
    return make_preset


def with_safe(name: str, safe: Safe | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return an algorithm's options with those that `safe = true` stands for.

    Args:
        name: of the algorithm, for the error.
        safe: what its safe form is.
        options: the options that are written.

    Raises:
        FedtideError: it has no safe form, or an option is given that `safe` sets.
    """
    if safe is None:
        raise FedtideError(f"safe: '{name}' has no safe form; leave safe out")
    for key in safe.options:
        if key in options:
            raise FedtideError(f"{key}: is not allowed with safe = true, which sets it; leave one of them out")
    return {**safe.usual, **safe.options, **options}


def build(make: Callable[..., Algorithm], options: Mapping[str, Any]) -> Algorithm:
    """Make an algorithm that knows its options.

    Args:
        make: its function.
        options: its arguments by name, the task among them.
    """
    algorithm = make(**options)
    task = options.get("task")  # as it was given: its own may have branches
    return replace(algorithm, options=dict(options), **({} if task is None else {"task": task}))


def options_of(make: Callable[..., Algorithm], name: str, *, required: bool = True) -> type[Strict]:
    """Return the model of an algorithm's options: the signature of its function, without the task.

    Args:
        make: builds an Algorithm from a task and ingredients.
        name: of the algorithm, for the name of the model.
        required: refuse to do without options that have no default.
    """
    hints = get_type_hints(make, include_extras=True)
    fields: dict[str, Any] = {}
    for key, parameter in inspect.signature(make).parameters.items():
        if key == "task":
            continue
        # Without a type an ingredient would come back from a study's file as the table that it was written as.
        untyped = type(parameter.default) if is_dataclass(parameter.default) else Any
        kind = hints.get(key, Cohort if key == "cohort" else untyped)
        missing = ... if required else None
        default = missing if parameter.default is inspect.Parameter.empty else parameter.default
        # A choice among ingredients, by their `kind`.
        if any(getattr(extra, "discriminator", None) for extra in getattr(kind, "__metadata__", ())):
            spelled = _whole if kind == Cohort else by_kind
            kind = Annotated[kind, BeforeValidator(partial(on_default, default)), BeforeValidator(spelled)]
        elif isinstance(parameter.default, LocalTrainer) and key == "local":
            kind = Annotated[kind, BeforeValidator(partial(on_local_default, parameter.default))]
        elif key in getattr(make, "changed", ()):  # a preset's: what is not given stays as the preset has it
            kind = Annotated[kind, BeforeValidator(partial(on_default, default))]
        fields[key] = (kind, default)
    return create_model(f"options of {name}", __base__=Strict, **fields)


def checked(name: str, make: Callable[..., Algorithm], safe: Safe | None = None) -> Callable[..., Algorithm]:
    """Return an algorithm's function that reads its arguments as a file does: `cohort=10`, `safe=True`.

    Objects that are none of a file's, such as a cohort of your own, are left as they are.
    """
    signature = inspect.signature(make)
    model = cache(partial(options_of, make, name, required=False))  # built only if needed, because it takes a while

    @wraps(make)
    def make_checked(*args: Any, **named: Any) -> Algorithm:
        in_safe = named.pop("safe", False)
        if not isinstance(in_safe, bool):
            raise refused(f"{name}.safe", in_safe, "true or false")
        try:
            bound = signature.bind(*args, **named)
        except TypeError as error:
            strangers = {key: value for key, value in named.items() if key not in signature.parameters}
            if not strangers:
                raise FedtideError(f"{name}: {error}") from None
            key = next(iter(strangers))
            raise FedtideError(f"{name}.{key}: {unknown_key(key, key, model())}") from None
        if in_safe:
            weighted = isinstance(getattr(bound.arguments.get("task"), "loss", None), WSM)
            with within(name):
                bound.arguments.update(with_safe(name, safe or (Safe() if weighted else None), bound.arguments))
        bound.arguments.update(as_written(name, model(), bound.arguments))
        cohort = bound.arguments.get("cohort")
        if callable(cohort) and not hasattr(cohort, "asks"):
            raise refused(f"{name}.cohort", cohort, "a number, or one of ft.cohorts, such as PickedBy(function)")
        task = bound.arguments["task"]
        if not isinstance(task, Task):
            raise refused(f"{name}.task", task, "a Task, such as ft.Task(lambda: nn.Linear(3, 2))")
        if in_safe and isinstance(task.loss, WSM):
            bound.arguments["task"] = replace(task, loss=replace(task.loss, blend=SAFE_BLEND))
        bound.apply_defaults()
        transforms = safe.transforms if safe is not None and in_safe else ()
        algorithm = build(make, bound.arguments)
        check = partial(_check, name, bound.arguments, algorithm.check)
        return apply(replace(algorithm, check=check), *transforms)

    make_checked.__signature__ = signature  # type: ignore[attr-defined]
    return make_checked


def _check(name: str, options: Mapping[str, Any], check: Callable[[Holdings], None] | None, clients: Holdings) -> None:
    """Raise for a cohort larger than the population, and for a model that does not fit its rows."""
    size = getattr(options.get("cohort"), "clients_per_round", None)
    if size is not None and size > clients.registered:
        allowed = f"at most {clients.registered}, the registered clients"
        raise refused(f"{name}.cohort.clients_per_round", size, allowed)
    if check is not None:
        check(clients)
    check_fit(options["task"], *clients.few(), options.get("local"), f"{name}.local")


def as_cohort(value: Any) -> Any:
    """Read `10` as `{kind = "arrivals", clients_per_round = 10}`, and other words by their kind."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return {"kind": "arrivals", "clients_per_round": value} if whole else by_kind(value)


def _whole(value: Any) -> Any:
    if isinstance(value, float):
        raise ValueError(f"found {value!r}, allowed: a whole number of clients, or a table")
    return as_cohort(value)
