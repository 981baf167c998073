"""Base class of the tables of an experiment, and arguments from Python that are read like them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedtide.core.errors import FedtideError
from fedtide.fields.explain import explained, of_python

M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """Frozen, and no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise FedtideError(of_python(error, type(self), values)) from None

        __init__.__pydantic_base_init__ = True  # tables of a file are read without it


def checked(kind: type[M], values: Any, where: str) -> M:
    """Return a table from nested values; `where` begins the error."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise FedtideError(f"{where}: {explained(error, kind, values)}") from None


def as_written(name: str, model: type[Strict], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as a file would be read with the same values: `cohort=10`, `shift={"who": "periodic"}`.

    Objects that are none of a file's, such as a cohort of your own, are left as they are.

    Args:
        name: of the function, for messages.
        model: its arguments, with defaults.
        given: the arguments.

    Raises:
        FedtideError: one of them will not do.
    """
    values = {key: value for key, value in given.items() if key in model.model_fields and _is_written(value)}
    try:
        read = model.model_validate(values)
    except ValidationError as error:
        raise FedtideError(f"{name}.{explained(error, model, values)}") from None
    return {key: getattr(read, key) if key in values else value for key, value in given.items()}


def _is_written(value: Any) -> bool:
    """Tell whether a value could stand in a file, is an ingredient of ours, or the class of one."""
    plain = value is None or isinstance(value, bool | int | float | str | dict | list | tuple | type)
    return plain or (dataclasses.is_dataclass(value) and hasattr(type(value), "__pydantic_validator__"))
