"""Configured values: their ranges, and the short spelling of a choice."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, dataclass_transform
from zoneinfo import ZoneInfo

import pydantic.dataclasses
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator

from fedtide.core.errors import FedtideError, shown
from fedtide.fields import shapes

T = TypeVar("T")

Flag = Annotated[bool, Field(strict=True)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
OpenFraction = Annotated[float, Field(strict=True, ge=0, lt=1)]
InnerFraction = Annotated[float, Field(strict=True, gt=0, lt=1)]
PositiveFraction = Annotated[float, Field(strict=True, gt=0, le=1)]
AtLeastOne = Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]
ModelCount = Annotated[int, Field(strict=True, ge=1, le=1000)]
"""A number of models, branches, components or clusters, each of which takes the memory of a model or more."""
ClassCount = Annotated[int, Field(strict=True, ge=2, le=1_000_000)]
StepCount = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
"""A number of passes, steps or restarts, during which a run says nothing and cannot be stopped."""
Whole = Annotated[int, Field(strict=True, ge=0)]


def _held_by_weights(value: float) -> float:
    if abs(value) > LARGEST:
        raise ValueError(f"found {value:g}, allowed: at most {LARGEST:g}, as weights hold no larger number")
    return value


LARGEST = 3.4e38
"""About the largest number that weights, and models, compute with: above it they have infinity."""
ForWeights = AfterValidator(_held_by_weights)
"""Mark of a number that weights are multiplied by."""


_OBEYED = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e0fff"
OBEYED = re.compile(f"[{_OBEYED}]")
"""Characters that a terminal obeys, or that turn the direction of what follows."""
HIDDEN = re.compile(f"[{_OBEYED}\xad\u180e\u200b\u2060-\u206f\ufeff\ufff9-\uffff\ue000-\uf8ff]")
"""Those characters, and characters that cannot be seen."""


def check_visible(text: str, *, lines: bool = False) -> str:
    r"""Return a text; raise for one with control characters.

    Args:
        lines: whether it may have several lines and characters that cannot be seen, as names of columns do.

    >>> check_visible("two\nlines")
    Traceback (most recent call last):
        ...
    ValueError: found the control character '\n', allowed: text without any
    """
    if match := (OBEYED.search(text) if lines else HIDDEN.search(text) or re.search("[\t\n]", text)):
        raise ValueError(f"found the control character {match[0]!a}, allowed: text without any")
    return text


Text = Annotated[str, AfterValidator(lambda text: check_visible(text))]
"""Text that is shown to people: in a terminal, on a page. All texts of a configuration are checked as it is read."""


def _different(values: Any) -> Any:
    seen = set[Any]()
    for value in values:
        same = value if isinstance(value, bool | int | float) else repr(value)  # a table is not hashable
        if same in seen:
            raise ValueError(f"found {shown(value)} twice, allowed: each once")
        seen.add(same)
    return values


def _distinct(values: Any) -> Any:
    if not values:
        raise ValueError("found [], allowed: one value or more")
    return _different(values)


Different = AfterValidator(_different)
"""Mark of a list without repetition."""

Distinct = AfterValidator(_distinct)
"""Mark of a list of one value or more, without repetition."""

Unbracketed = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
"""Mark of a list of texts in which a single one may be written without brackets."""


@dataclasses.dataclass(frozen=True)
class OfShift:
    """Marks a value that an experiment takes from its shift if it is None.

    Args:
        what: for a periodic shift the "period", a round at which the first group "peak"s, or the period in whole
            "rounds". "start" is the round at which the turn of the first group begins (for a block-cyclic shift half a
            turn earlier).
            For a mixture the rounds in which all domains are "seen" alike.
    """

    what: Literal["period", "peak", "start", "rounds", "seen"]


@dataclasses.dataclass(frozen=True)
class IsFile:
    """Marks a value that names a file; its content decides numbers.

    Args:
        hint: advice if there is no such file, for the error.
    """

    hint: str


DataFile = Annotated[str, IsFile("set data.directory or FEDTIDE_DATA")]
WEIGHTS = IsFile("allowed: a file of safetensors, or RUN/METHOD/SEED, here or below data.directory or FEDTIDE_DATA")
WeightsFile = Annotated[str, WEIGHTS]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def ingredient(kind: type[T]) -> type[T]:
    """A frozen dataclass whose values are checked, in a file or from Python; unknown keys are errors.

    >>> @ingredient
    ... class Toy:
    ...     rate: Positive = 0.1
    >>> Toy(rate=0)
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: Toy.rate: found 0, allowed: greater than 0.0
    """
    checked: Any = pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))(kind)
    init = checked.__init__

    @functools.wraps(init)
    def from_python(self: Any, *positional: Any, **named: Any) -> None:
        try:
            init(self, *positional, **named)
        except ValidationError as error:
            names = [field.name for field in dataclasses.fields(checked) if field.init]
            values = dict(zip(names, positional, strict=False)) | named
            raise FedtideError(shapes.of_python(error, checked, values)) from None

    checked.__init__ = from_python  # tables of a file are read without it
    return cast("type[T]", checked)


def allowing(allowed: str) -> WrapValidator:
    """Return a validator with a single message for a union of types, for which pydantic would give several."""

    def check(value: Any, parsed: Callable[[Any], Any]) -> Any:
        try:
            return parsed(value)
        except ValidationError:
            raise ValueError(f"found {shown(value)}, allowed: {allowed}") from None

    return WrapValidator(check)


def by_kind(value: Any) -> Any:
    """Read `"name"` as `{kind = "name"}`, and `"name:path"` as `{kind = "name", path = "path"}`, also as the kind.

    >>> by_kind("iid"), by_kind("idx:mnist"), by_kind("python:mine:load")
    ({'kind': 'iid'}, {'kind': 'idx', 'path': 'mnist'}, {'kind': 'python', 'function': 'mine:load'})
    >>> by_kind({"kind": "python:mine:load", "classes": 3})
    {'kind': 'python', 'function': 'mine:load', 'classes': 3}
    """
    if isinstance(value, dict) and ":" in str(kind := value.get("kind")):
        return by_kind(kind) | {key: child for key, child in value.items() if key != "kind"}
    if not isinstance(value, str):
        return value
    kind, _, path = value.partition(":")
    return {"kind": kind, "function" if kind == "python" else "path": path} if path else {"kind": kind}


def by_name(value: Any) -> Any:
    """Read `"name"` as `{kind = "name"}`, and `"module:function"` as code of a person's own; of kinds without a path.

    >>> by_name("auc"), by_name("mine:cost") == by_name("python:mine:cost")
    ({'kind': 'auc'}, True)
    """
    is_code = isinstance(value, str) and ":" in value
    return {"kind": "python", "function": value.removeprefix("python:")} if is_code else by_kind(value)


def changed(value_made: Any) -> dict[str, Any]:
    """An ingredient as a file would say it: its kind, and the values that are not the defaults of that kind.

    >>> from fedtide.learn.server import SGD
    >>> changed(SGD(momentum=0.9)), changed(SGD())
    ({'momentum': 0.9, 'kind': 'sgd'}, {'kind': 'sgd'})
    """
    kind: Any = type(value_made)
    usual = {name: info.get_default(call_default_factory=True) for name, info in shapes.infos_of(kind).items()}
    values = {name: getattr(value_made, name) for name in usual}
    return {name: value for name, value in values.items() if name == "kind" or value != usual[name]}


def on_default(default: Any, value: Any) -> Any:
    """A table that names no kind as one that changes the default; anything else as it is.

    >>> from fedtide.learn.server import SGD
    >>> on_default(SGD(momentum=0.9), {"lr": 0.5})
    {'momentum': 0.9, 'kind': 'sgd', 'lr': 0.5}
    """
    partly = isinstance(value, dict) and "kind" not in value and dataclasses.is_dataclass(default)
    return changed(default) | value if partly else value


Spelled = BeforeValidator(by_kind)
"""Lets a choice among ingredients be written as a string."""


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DAY = float(UNITS["d"])
LONGEST = 366 * UNITS["d"]


def seconds_of(duration: str | float) -> float:
    """Return the seconds of a duration: a number and one of s, m, h, d, or from Python a number of seconds.

    >>> seconds_of("90s"), seconds_of("1.5h"), seconds_of(60)
    (90.0, 5400.0, 60.0)
    """
    if isinstance(duration, int | float) and not isinstance(duration, bool):
        seconds = float(duration)
    elif match := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd])", str(duration)):
        seconds = float(match[1]) * UNITS[match[2]]
    else:
        raise ValueError(f"found {shown(duration)}, allowed: a number and s, m, h or d, such as '90s' or '1h'")
    if not 1 <= seconds <= LONGEST:
        raise ValueError(f"found {shown(duration)}, allowed: 1s to {LONGEST // UNITS['d']}d")
    return seconds


def rounded_up(seconds: float) -> str:
    """Return a duration that is at least so many seconds, in tens of them or in minutes.

    >>> rounded_up(34.0), rounded_up(130.0)
    ('40s', '3m')
    """
    return f"{max(math.ceil(seconds / 10), 1)}0s" if seconds <= 90 else f"{math.ceil(seconds / 60)}m"


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone.

    >>> zone_of("Europe/Berlin").key
    'Europe/Berlin'
    """
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        raise ValueError(f"found {shown(name)}, allowed: a time zone, such as 'Europe/Berlin'") from None


def kept_if(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator of values that a function takes; they are kept as they are."""

    def keep(value: str) -> str:
        check(value)
        return value

    return AfterValidator(keep)


def spelled(pattern: str, allowed: str) -> AfterValidator:
    """Return a validator of texts that a pattern matches; `allowed` says which these are."""

    def check(value: str) -> None:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"found {shown(value)}, allowed: {allowed}")

    return kept_if(check)


Duration = Annotated[str, kept_if(seconds_of)]
Zone = Annotated[str, kept_if(zone_of)]


M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """Frozen, and no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise FedtideError(shapes.of_python(error, type(self), values)) from None

        __init__.__pydantic_base_init__ = True  # tables of a file are read without it


def checked(kind: type[M], values: Any, where: str) -> M:
    """Return a table from nested values; `where` begins the error."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise FedtideError(f"{where}: {shapes.explain(error, kind, values)}") from None


def as_written(name: str, model: type[Strict], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as a file would be read with the same values: `cohort=10`, `shift={"who": "periodic"}`.

    Objects that are none of a file's, such as a cohort of your own, are left as they are.

    Args:
        name: of the function, for messages.
        model: its arguments, with defaults.

    Raises:
        FedtideError: one of them will not do.
    """
    plain = {key: value.item() if _is_scalar(value) else value for key, value in arguments.items()}
    values = {key: value for key, value in plain.items() if key in model.model_fields and is_written(value)}
    try:
        read = model.model_validate(values)
    except ValidationError as error:
        raise FedtideError(f"{name}.{shapes.explain(error, model, values)}") from None
    return {key: getattr(read, key) if key in values else value for key, value in plain.items()}


def _is_scalar(value: Any) -> bool:
    """Tell whether a value is a single number of numpy."""
    return type(value).__module__ == "numpy" and hasattr(value, "item") and value.shape == ()


def is_written(value: Any) -> bool:
    """Tell whether a value could stand in a file, is an ingredient of ours, or the class of one."""
    plain = value is None or isinstance(value, bool | int | float | str | dict | list | tuple | type)
    return plain or (dataclasses.is_dataclass(value) and hasattr(type(value), "__pydantic_validator__"))
