"""The version of the package that is installed."""

from importlib.metadata import PackageNotFoundError, version


def installed() -> str:
    """Return the version, or "0" for a source tree that is not installed."""
    try:
        return version("fedtide")
    except PackageNotFoundError:
        return "0"
