"""Search for data files."""

from __future__ import annotations

import os
from pathlib import Path

from fedtide.core.errors import FedtideError


def find(
    path: str, directory: Path | None, key: str = "data.source", *, hint: str = "set data.directory or FEDTIDE_DATA"
) -> Path:
    """Return the path of a file or folder, which is absolute, below the data directory or relative.

    The data directory is the configured one or FEDTIDE_DATA. `key` is the configuration key and `hint` the advice for
    error messages.

    Raises:
        FedtideError: the path does not exist in any place; the message names all places.
    """
    wanted = Path(path).expanduser()
    places = [Path()] if wanted.is_absolute() else _places(directory)
    for place in places:
        if (place / wanted).exists():
            return place / wanted
    tried = ", ".join(str(place / wanted) for place in places)
    raise FedtideError(f"{key}: no such file or folder: {tried}; {hint}")


def folder_of(path: str, directory: Path | None) -> Path:
    """Return the path of a folder, found like a file by `find`."""
    found = find(path, directory)
    if not found.is_dir():
        raise FedtideError(f"data.source: {found} is a file; a folder is needed")
    return found


def _places(directory: Path | None) -> list[Path]:
    named = os.environ.get("FEDTIDE_DATA")
    return [*([directory] if directory else []), *([Path(named)] if named else []), Path()]
