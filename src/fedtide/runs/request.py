"""What commands and Python ask for beside an experiment; nothing here is slow to import, as `--help` waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from fedtide.core.errors import unknown

Scale = Literal["nano", "cpu", "paper"]
"""Size of a recipe: seconds, minutes, as published."""

FleetKind = Literal["local", "workers", "ray", "stacked", "auto"]
"""Kinds of `fedtide.config.FleetSettings`."""

ExactKind = Literal["local", "workers", "ray"]
"""Kinds that give the same bits, with which a run may go on."""


@dataclass(frozen=True)
class Request:
    """Settings of a run or tuning beside the experiment: arguments of `run` and `tune`, also on the command line.

    Args:
        out: the folder that is made; it must not exist. By default runs/NAME, of a tuning runs/NAME-tune.
        scale: size of a recipe: nano (seconds), cpu (minutes), paper (as published).
        sets: override a value, e.g. data.partition.alpha=0.1; may be repeated. Keys of methods apply to all of them
            (method.local.lr=0.1) or to one by name (method.FedAvg.local.lr=0.1).
        seeds: override the seeds, e.g. 0,1,2 or 0-4; of a tuning those that every trial plays, by default the first.
        workers: processes; by default as many as the machine has cores, and one for a single run, unless its [fleet]
            says "workers". The result does not depend on it.
    """

    out: Path | str | None = None
    scale: Scale | None = None
    sets: Sequence[str] = ()
    seeds: str | None = None
    workers: int | None = None


@dataclass(frozen=True)
class Output:
    """How a command tells what it does and finds.

    Args:
        quiet: print nothing but errors, and with --json what was found.
        json: print what was found as JSON, and all else on the standard error.
    """

    quiet: bool = False
    json: bool = False


def recipes() -> list[Path]:
    """The recipes that ship with the package."""
    return sorted(Path(str(files("fedtide").joinpath("recipes"))).glob("*.toml"))


def recipe(name: str) -> Path:
    """The file of a recipe.

    Raises:
        FedtideError: there is none of that name.
    """
    found = {path.stem: path for path in recipes()}
    if name not in found:
        raise unknown("recipe", name, list(found))
    return found[name]
