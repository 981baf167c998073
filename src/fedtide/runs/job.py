"""Jobs, their output and recipes; nothing here is slow to import, because `fedtide --help` waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from fedtide.core.errors import unknown

if TYPE_CHECKING:
    from rich.console import Console

    from fedtide.config import Experiment
    from fedtide.runs.digest import Verdict

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


class Result(Protocol):
    """Result of a finished job."""

    @property
    def report(self) -> Path:
        """The page about it."""

    def print(self, screen: Console) -> None:
        """Print it as tables and lines."""

    def as_json(self) -> dict[str, Any]:
        """Return its values for `--json`."""


class Job(Protocol):
    """Work in a folder: it is played to its end, now or after a stop, and it is read. Each kind has its own `create`.

    kind: the kind of folder in messages. single: whether a page is about one such folder alone.
    """

    kind: ClassVar[str]
    single: ClassVar[bool]

    @property
    def root(self) -> Path:
        """The folder."""

    @property
    def settings(self) -> Experiment:
        """The experiment in the folder's config.toml."""

    def resumed(
        self, output: Output, *, seeds: Any = None, fleet: str | None = None, address: str | None = None
    ) -> Job:
        """Return the job with more seeds or on another fleet.

        Raises:
            FedtideError: this kind of job goes on as it began, or the seeds or the fleet are not allowed.
        """

    def play(self, screen: Console) -> bool:
        """Play the rest and show the progress; return False if a person stopped it, and everything is saved."""

    def result(self) -> Result:
        """Read the results.

        Raises:
            FedtideError: there are none yet.
        """

    def write_page(self, out: Path | None = None) -> Path:
        """Write the page and return its path."""

    def unfinished(self) -> str:
        """Return a line about unfinished runs, "" if there are none."""

    def summary(self) -> dict[str, Any]:
        """Return the values for `--json` beside its page."""

    def verify(self) -> Iterator[Verdict]:
        """Check that the runs in the folder are unchanged, and yield a verdict for each."""


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
