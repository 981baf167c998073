"""Reading of `environment.json`: time, machine, packages and scale with which a folder was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedtide.core.errors import UNREADABLE, FedtideError

NANO = "played to see that it works; its numbers mean nothing"
"""Warning about folders of the scale nano."""


def environment_line(root: Path, name: str) -> str:
    """Describe time, machine and packages with which a folder was made; "" where unknown."""
    path = root / "environment.json"
    if not path.is_file():
        return ""
    try:
        about = environment_of(root)
        packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items() if number)
        machine = f"Python {about['python']}, {about['processor']}, {about['cores']} cores"
        return f"{name}: {about['made']}, {machine}; {packages}"
    except UNREADABLE:
        raise FedtideError(
            f"{path}: damaged; it is needed for the report's last line only and may be removed"
        ) from None


def environment_of(root: Path) -> dict[str, Any]:
    """Return what `environment.json` says; nothing without it.

    Raises:
        ValueError: it is damaged.
    """
    path = root / "environment.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError(path)
    return found


def is_nano(root: Path) -> bool:
    """Tell whether a folder was played at the scale that only shows that an experiment works."""
    try:
        return environment_of(root).get("scale") == "nano"
    except UNREADABLE:
        return False  # the line about the environment says that it is damaged
