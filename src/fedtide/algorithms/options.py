"""Options of an algorithm: the signature of its function, checked alike in a file and from Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from functools import cache, partial, wraps
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, create_model

from fedtide.algorithms.entry import Safe, build, with_safe
from fedtide.cohorts import Cohort
from fedtide.core.base import Algorithm, Holdings
from fedtide.core.errors import FedtideError, refused, within
from fedtide.fields.explain import unknown_key
from fedtide.fields.types import Strict, as_written, by_kind, on_default
from fedtide.learn.local import check_fit
from fedtide.learn.losses import SAFE_BLEND, WSM
from fedtide.learn.task import Task
from fedtide.transforms.transform import apply


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
        if _is_choice(kind):
            spelled = _whole if kind == Cohort else by_kind
            kind = Annotated[kind, BeforeValidator(partial(on_default, default)), BeforeValidator(spelled)]
        elif key in getattr(make, "changed", ()):  # a preset's: what is not given stays as the preset has it
            kind = Annotated[kind, BeforeValidator(partial(on_default, default))]
        fields[key] = (kind, default)
    return create_model(f"options of {name}", __base__=Strict, **fields)


def checked(name: str, make: Callable[..., Algorithm], safe: Safe | None = None) -> Callable[..., Algorithm]:
    """Return an algorithm's function that reads its arguments as a file does: `cohort=10`, `safe=True`.

    Objects that are none of a file's, such as a cohort of your own, are left as they are.
    """
    signature = inspect.signature(make)
    model = cache(partial(options_of, make, name, required=False))  # made when it is needed: it takes a while

    @wraps(make)
    def made(*given: Any, **named: Any) -> Algorithm:
        in_safe = named.pop("safe", False)
        if not isinstance(in_safe, bool):
            raise refused(f"{name}.safe", in_safe, "true or false")
        try:
            bound = signature.bind(*given, **named)
        except TypeError as error:
            strangers = {key: value for key, value in named.items() if key not in signature.parameters}
            if not strangers:
                raise FedtideError(f"{name}: {error}") from None
            key = next(iter(strangers))
            raise FedtideError(f"{name}.{unknown_key(key, model())}") from None
        if in_safe:
            weighted = isinstance(getattr(bound.arguments.get("task"), "loss", None), WSM)
            with within(name):
                bound.arguments.update(with_safe(name, safe or (Safe() if weighted else None), bound.arguments))
        bound.arguments.update(as_written(name, model(), bound.arguments))
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

    made.__signature__ = signature  # type: ignore[attr-defined]
    return made


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


def _is_choice(kind: Any) -> bool:
    """Tell whether a type is a choice among ingredients, by their `kind`."""
    return any(getattr(extra, "discriminator", None) for extra in getattr(kind, "__metadata__", ()))
