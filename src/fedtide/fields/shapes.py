"""Shape of an experiment file, read from types: tables, their keys, choices and their tags."""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

T = TypeVar("T")


def bare(kind: Any) -> Any:
    """A type without its annotations and without None.

    >>> bare(Annotated[int, "whole"] | None)
    <class 'int'>
    """
    return _stripped(kind)[0]


def ranges(kind: Any) -> list[Any]:
    """The ranges that stand in a type's annotations."""
    return _stripped(kind)[1]


@cache
def marks_of(kind: Any, mark: type[T]) -> dict[str, T]:
    """Return the keys of a table whose types have a mark of this class, with the first one."""
    marks = {name: [each for each in ranges(hint) if isinstance(each, mark)] for name, hint in fields_of(kind).items()}
    return {name: found[0] for name, found in marks.items() if found}


def described(kind: Any) -> str:
    """Return the description in a type's annotations, or the first line of a table's docstring.

    >>> from fedtide.learn.local import LocalTrainer
    >>> from fedtide.models.branched import BranchCount
    >>> described(BranchCount), described(LocalTrainer)[:14], described(int)
    ('number of branches, K.', 'local training', '')
    """
    kind, marks = _stripped(kind)
    if description := next((mark.description for mark in marks if getattr(mark, "description", None)), None):
        return str(description)
    first = (kind.__doc__ or "").partition("\n")[0] if is_table(kind) else ""
    return first[:1].lower() + first[1:]


def _stripped(kind: Any) -> tuple[Any, list[Any]]:
    marks: list[Any] = []
    while True:
        if get_origin(kind) is Annotated:
            kind, *extras = get_args(kind)
            for extra in extras:
                marks += [extra, *extra.metadata] if isinstance(extra, FieldInfo) else [extra]
        elif is_union(kind) and len(rest := [m for m in get_args(kind) if m is not type(None)]) == 1:
            kind = rest[0]
        else:
            return kind, marks


def is_union(kind: Any) -> bool:
    """Tell whether a type is a choice between types."""
    return get_origin(kind) in (Union, types.UnionType)


def is_table(kind: Any) -> bool:
    """Tell whether values of a type are tables with keys of their own."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel))


def is_choice(kind: Any) -> bool:
    """Tell whether a type is a choice among tables.

    >>> from fedtide.cohorts import Cohort
    >>> is_choice(bare(Cohort)), is_choice(int | str)
    (True, False)
    """
    return is_union(kind) and all(is_table(bare(member)) for member in get_args(kind))


def fields_of(kind: Any) -> dict[str, Any]:
    """The keys of a table with their types; none for anything else."""
    if not is_table(kind):
        return {}
    if issubclass(kind, BaseModel):
        return {
            name: Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            for name, field in kind.model_fields.items()
        }
    return _types(kind)


@cache
def _types(kind: type) -> dict[str, Any]:
    """Types of a dataclass's fields, evaluated once: a configuration asks for those of the same classes many times."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def tags(kind: Any) -> tuple[str, ...]:
    """The spellings of `kind` (or `by`) that choose a table among others; none if it has neither.

    >>> from fedtide.cohorts import Everyone
    >>> tags(Everyone)
    ('everyone',)
    """
    fields = fields_of(kind)
    hints = (bare(fields[name]) for name in ("kind", "by") if name in fields)
    return next((get_args(hint) for hint in hints if get_origin(hint) is Literal), ())
