"""Options of commands, and recipes; nothing here is slow to import, because `fedtide --help` waits for it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from fedtide.core.errors import refused, unknown

Sets = Sequence[str] | Mapping[str, Any]
"""Values to override: `{"data.partition.alpha": 0.1}`, or as on the command line `["data.partition.alpha=0.1"]`."""

Assignments = Annotated[tuple[str, ...], Parameter(name="--set", show_default=False)]
"""Values to override, as on the command line."""

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

Format = Literal["safetensors", "onnx", "torch-export", "peft", "merged"]
"""Kind of a model's file: weights by name, a program with its weights for ONNX or `torch.export.load`, PEFT's folder,
or the folder of a pretrained model with its adapters merged."""


@Parameter(name="*", negative=())
@dataclass(frozen=True)
class Output:
    """How a command shows its progress and results.

    Args:
        quiet: print nothing but errors, and with --json the results.
        json: print the results as JSON, and all else on the standard error.
    """

    quiet: bool = False
    json: bool = False


@Parameter(name="*")
@dataclass(frozen=True)
class Request:
    """A request to play something and to write it to a folder.

    Args:
        out: a new or empty folder for the results. By default runs/NAME, runs/NAME-tune or runs/NAME-recommend, by
            command.
        scale: size, a [scale] table of the file: nano (seconds), cpu (minutes), paper (as published). By default cpu,
            if there is one.
        sets: override a value, e.g. data.partition.alpha=0.1; may be repeated. Keys of methods apply to all of them
            (method.local.lr=0.1) or to one by name (method.FedAvg.local.lr=0.1).
        workers: number of processes; by default one for each core, and for a single run one, unless fleet.kind is
            "workers". The result does not depend on it.
    """

    out: Path | None = None
    scale: Scale | None = None
    sets: Assignments = ()
    workers: int | None = None

    def __post_init__(self) -> None:
        check_positive("--workers", self.workers)

    @property
    def overrides(self) -> list[str]:
        """All overrides."""
        return [*self.sets]


@Parameter(name="*")
@dataclass(frozen=True)
class StudyRequest(Request):
    """A request about a study with seeds.

    Args:
        seeds: seeds to play, e.g. 0,1,2 or 0-4, in place of the study's. By default tune plays only the first of these.
    """

    seeds: str | None = None


@Parameter(name="*")
@dataclass(frozen=True)
class RunRequest(StudyRequest):
    """A request to run a study.

    Args:
        fleet: engine of the clients' work, in place of fleet.kind. The engines local, workers and ray give equal bits;
            stacked differs in rounding; auto chooses by size.
        address: address of a Ray cluster's head node, as fleet.address in the file, e.g. 10.0.0.1:6379 or auto. Without
            an address Ray starts on this machine and ends with the command.
    """

    fleet: FleetKind | None = None
    address: str | None = None

    @property
    def overrides(self) -> list[str]:
        """The overrides, those of the fleet among them."""
        return [*self.sets, *fleet_sets(self.fleet, self.address)]


@Parameter(name="*")
@dataclass(frozen=True)
class Asked:
    """Questions to a model of texts.

    Args:
        embeddings: for texts: instead write the mean of the features of each text's tokens, without the head.
        tokens: for next tokens: continue each text by so many tokens, or up to the mark of an end; by default 40. The
            most likely token is taken each time.
        choices: for next tokens: instead choose among answers; columns of texts, divided by commas, or of lists of
            texts. The answer with the highest log-likelihood is chosen.
        right: column with the number (from 0) of the right answer; then the accuracy is printed.
    """

    embeddings: Annotated[bool, Parameter(negative="")] = False
    tokens: int | None = None
    choices: str | None = None
    right: str | None = None

    def check(self) -> None:
        """Raise for questions that do not go together."""
        if self.embeddings:
            replace(self, embeddings=False).check_unasked("--embeddings asks for the features of the texts alone")
        if self.choices is None and self.right is not None:
            raise refused("--right", self.right, "a column beside --choices")
        if self.choices is not None and self.tokens is not None:
            raise refused("--tokens", self.tokens, "none beside --choices")
        if self.tokens is not None and self.tokens < 1:
            raise refused("--tokens", self.tokens, "1 or more")

    def check_unasked(self, why: str) -> None:
        """Raise if anything is asked of a model of another kind."""
        for name, value in vars(self).items():
            if value not in (None, False):
                raise refused(f"--{name}", value, f"none, because {why}")


def fleet_sets(fleet: str | None, address: str | None) -> list[str]:
    """Return the overrides of `--fleet` and `--address`; an address is that of a Ray cluster."""
    if address is not None and fleet is None:
        fleet = "ray"
    if address is not None and fleet != "ray":
        raise refused("--address", address, "with --fleet ray", f"--fleet is {fleet}")
    kind = [] if fleet is None else [f"fleet.kind={fleet}"]
    return kind + ([] if address is None else [f"fleet.address={json.dumps(address)}"])


def check_positive(option: str, value: int | None) -> None:
    """Raise for what is no whole number, and for one below 1."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise refused(option, value, "1 or more")


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
