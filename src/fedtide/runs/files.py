"""Places of the files that a configuration names beside its data."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fedtide.data.sources.files import find
from fedtide.fields.shapes import fields_of, ranges
from fedtide.fields.types import IsFile


def place(path: str, directory: str | None, key: str, mark: IsFile) -> str:
    """Return the place of a file: below the data directory, or as it is written.

    Args:
        path: the file as the configuration names it.
        directory: the configured data directory, if any.
        key: configuration key, for the error.
        mark: the mark of the key's type.

    Raises:
        FedtideError: there is no such file.
    """
    found = find(path, Path(directory) if directory else None, key, hint=mark.hint)
    return path if found == Path(path).expanduser() else str(found.absolute())


def located(part: Any, directory: str | None, key: str, found: list[str] | None = None) -> Any:
    """Return a part of a configuration in which each value marked as a file is the file's place.

    Args:
        part: an ingredient, which may hold others; any other value is returned as it is.
        directory: the configured data directory, if any.
        key: configuration key of the part, for errors.
        found: a list to which every place is added.
    """
    if isinstance(part, tuple):
        return tuple(located(each, directory, f"{key}[{n}]", found) for n, each in enumerate(part))
    values: dict[str, Any] = {}
    kind: Any = type(part)
    for name, mark in _marks(kind).items():
        value, inside = getattr(part, name), f"{key}.{name}"
        values[name] = value
        if mark is None:
            values[name] = located(value, directory, inside, found)
        elif value is not None:
            values[name] = place(value, directory, inside, mark)
            if found is not None:
                found.append(values[name])
    changed = {name: value for name, value in values.items() if value is not getattr(part, name)}
    return replace(part, **changed) if changed else part


@cache
def _marks(kind: type) -> dict[str, IsFile | None]:
    """Return the keys of a table with the mark of those that name files; none for any other type."""
    marks = {name: ranges(hint) for name, hint in fields_of(kind).items()}
    return {name: next((mark for mark in found if isinstance(mark, IsFile)), None) for name, found in marks.items()}
