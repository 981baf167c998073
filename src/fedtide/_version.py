"""Versions of packages that are installed."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache  # metadata of a package is text of hundreds of lines
def version_of(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed() -> str:
    """Return the version, or "0" for a source tree that is not installed."""
    return version_of("fedtide") or "0"
