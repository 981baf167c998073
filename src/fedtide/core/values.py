"""Configured values: their ranges, and the short spelling of a choice."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

Flag = Annotated[bool, Field(strict=True)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
OpenFraction = Annotated[float, Field(strict=True, ge=0, lt=1)]
Count = Annotated[int, Field(strict=True, ge=1)]
Whole = Annotated[int, Field(strict=True, ge=0)]


def by_kind(value: Any) -> Any:
    """`"name"` for `{kind = "name"}`, and `"name:path"` for `{kind = "name", path = "path"}`.

    >>> by_kind("iid"), by_kind("idx:mnist"), by_kind("python:mine:load")
    ({'kind': 'iid'}, {'kind': 'idx', 'path': 'mnist'}, {'kind': 'python', 'function': 'mine:load'})
    """
    if not isinstance(value, str):
        return value
    kind, _, path = value.partition(":")
    return {"kind": kind, "function" if kind == "python" else "path": path} if path else {"kind": kind}


Spelled = BeforeValidator(by_kind)
"""Lets a choice among ingredients be written as a string."""
