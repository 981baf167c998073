"""Options of commands, and recipes; nothing here is slow to import, because `fedtide --help` waits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedtide.core.errors import unknown

if TYPE_CHECKING:
    from fedtide.config import Experiment

    Spelled = Experiment | Mapping[str, Any] | str | Path
    """An experiment made in Python, as nested dicts, as a TOML file, or `recipe:NAME`."""

Sets = Sequence[str] | Mapping[str, Any]
"""Values to override: `{"data.partition.alpha": 0.1}`, or as on the command line `["data.partition.alpha=0.1"]`."""

Seeds = Sequence[int] | str
"""Seeds: `[0, 1, 2]`, or as on the command line `"0-2"`."""

Name = str | int
"""Name of a column: in a data frame it may be a number."""

Scale = Literal["nano", "cpu", "paper"]
"""Size of a recipe: seconds, minutes, as published."""

FleetKind = Literal["local", "workers", "ray", "stacked", "auto"]
"""Kinds of `fedtide.config.FleetSettings`."""

ExactKind = Literal["local", "workers", "ray"]
"""Kinds that give the same bits, with which a run may go on."""


@dataclass(frozen=True)
class Output:
    """How a command shows its progress and results.

    Args:
        quiet: print nothing but errors, and with --json the results.
        json: print the results as JSON, and all else on the standard error.
    """

    quiet: bool = False
    json: bool = False


def recipes() -> list[Path]:
    """Return the recipes that ship with the package."""
    return sorted(Path(str(files("fedtide").joinpath("recipes"))).glob("*.toml"))


def recipe(name: str) -> Path:
    """Return the file of a recipe.

    Raises:
        FedtideError: there is none of that name.
    """
    paths = {path.stem: path for path in recipes()}
    if name not in paths:
        raise unknown("recipe", name, list(paths))
    return paths[name]


def experiment_file(experiment: str) -> Path:
    """Return the file of an experiment, which may be called `recipe:NAME`."""
    return recipe(experiment.removeprefix("recipe:")) if experiment.startswith("recipe:") else Path(experiment)
