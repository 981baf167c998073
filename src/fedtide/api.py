"""A whole experiment, from its file to its report: what the command line and Python both do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtide.config import Experiment, from_dict, read, resolved, slug
from fedtide.core.errors import FedtideError, nearest
from fedtide.evaluate.judge import views
from fedtide.report.measures import check_claims
from fedtide.runs import auto, folder
from fedtide.runs.build import population_of, preflight
from fedtide.runs.disk import check_room, needed
from fedtide.runs.experiment import Display, execute
from fedtide.tuning import folder as tunings
from fedtide.tuning import plan, search
from fedtide.tuning.tune import Display as TuningDisplay
from fedtide.tuning.tune import execute as execute_tuning

if TYPE_CHECKING:
    from fedtide.report.summary import Study, Summary

Spelled = Experiment | Mapping[str, Any] | str | Path
"""An experiment made in Python, as nested dicts, as a TOML file, or `recipe:NAME`."""


@dataclass(frozen=True)
class Prepared:
    """An experiment that can be run or tuned: every name in it was made once.

    settings: with every default. root: the folder that it gets; not made yet. where: how messages call the experiment.
    workers: how many processes play it, where somebody said so. said: which fleet was chosen for it, where one was.
    """

    settings: Experiment
    root: Path
    where: str
    workers: int | None = None
    said: str = ""


@dataclass(frozen=True)
class Finished:
    """A finished experiment: its run folder, its report, and what it found (a `fedtide.report.summary.Study`)."""

    folder: Path
    report: Path
    study: Study

    @property
    def summaries(self) -> list[Summary]:
        """The `fedtide.report.summary.Summary` of each point of its sweep; one where there is none."""
        return list(self.study.summaries)


@dataclass(frozen=True)
class FinishedTuning:
    """A finished tuning: its folder, the experiment file that it wrote, and its report.

    stages: for each stage what each of its methods found (`fedtide.tuning.folder.Tuned`).
    """

    folder: Path
    tuned: Path
    report: Path
    stages: list[list[tunings.Tuned]]


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
        raise FedtideError(f"recipe: found '{name}'; {nearest(name, list(found))}")
    return found[name]


def prepare(
    experiment: Spelled,
    out: str | Path | None = None,
    *,
    scale: str | None = None,
    sets: Sequence[str] = (),
    seeds: str | None = None,
    workers: int | None = None,
) -> Prepared:
    """Read an experiment, and find out whatever would stop it before anything is written.

    Where its fleet is to be chosen ("auto"), the choice is made here.

    Args:
        experiment: what to run.
        out: the run folder, which must not exist; by default `runs/<name>`, or the next that is free.
        scale: as in `fedtide.config.read`.
        sets: overrides `key=value`.
        seeds: in place of the experiment's, e.g. "0,1,2".
        workers: processes; None means the experiment's own number, or the machine's cores.

    Raises:
        FedtideError: with one line that says what to mend.
    """
    if out is not None:
        folder.free(Path(out))
    more = [f"seeds=[{seeds}]"] if seeds is not None else []
    settings, where, name = _read(experiment, scale, [*sets, *more])
    _ready(settings, where)
    choice = auto.resolve_auto(settings, workers=workers)
    return Prepared(choice.experiment, _root(out, slug(name)), where, choice.workers, choice.said)


def _ready(experiment: Experiment, where: str) -> None:
    """Raise for whatever would stop an experiment."""
    check_claims(experiment, where)
    preflight(experiment, where)


def _root(out: str | Path | None, name: str) -> Path:
    return folder.unused(Path("runs"), name) if out is None else Path(out)


def _read(
    experiment: Spelled, scale: str | None, sets: Sequence[str], *, timed: bool = True
) -> tuple[Experiment, str, str]:
    """An experiment, how messages call it, and how its folder is called."""
    if isinstance(experiment, str) and experiment.startswith("recipe:"):
        experiment = recipe(experiment.removeprefix("recipe:"))
    if isinstance(experiment, str | Path):
        settings = read(experiment, scale=scale, sets=sets, timed=timed)
        return settings, str(experiment), Path(experiment).stem
    values = resolved(experiment) if isinstance(experiment, Experiment) else experiment
    settings = from_dict(values, scale=scale, sets=sets, timed=timed)
    return settings, "experiment", slug(settings.title or "experiment")


def play(
    settings: Experiment, root: Path, *, workers: int | None = None, display: Display | None = None
) -> Finished | None:
    """Play what is left of a run folder and write its report; None if a person stopped it, and everything is saved."""
    # Here and not above: a report draws, and every worker process imports what runs an experiment.
    from fedtide.report.page import write_report
    from fedtide.report.summary import read_study

    if not execute(settings, root, workers=workers, display=display):
        return None
    page = write_report([root])
    return Finished(root, page, read_study(root))


def run(
    experiment: Spelled,
    out: str | Path | None = None,
    *,
    scale: str | None = None,
    sets: Sequence[str] = (),
    seeds: str | None = None,
    workers: int | None = None,
) -> Finished:
    """Run an experiment: every method with every seed, in parallel, and write its report.

    Args:
        experiment: made in Python, nested dicts, a TOML file, or "recipe:demo".
        out: the run folder; by default `runs/<name>`.
        scale: as in `fedtide.config.read`.
        sets: overrides `key=value`.
        seeds: in place of the experiment's, e.g. "0,1,2".
        workers: processes; by default the machine's cores.

    Raises:
        FedtideError: with one line that says what to mend.
        KeyboardInterrupt: after Ctrl-C; everything is saved then.
    """
    made = prepare(experiment, out, scale=scale, sets=sets, seeds=seeds, workers=workers)
    check_room(needed(made.settings, made.where), made.root)
    folder.create(made.settings, made.root, made.where)
    finished = play(made.settings, made.root, workers=made.workers)
    if finished is None:
        raise KeyboardInterrupt(f"stopped and saved; go on with: fedtide resume {made.root}")
    return finished


def prepare_tuning(
    experiment: Spelled,
    out: str | Path | None = None,
    *,
    scale: str | None = None,
    sets: Sequence[str] = (),
    seeds: str | None = None,
    trials: int | None = None,
) -> Prepared:
    """Read an experiment with a `[tune]` table, and find out whatever would stop its tuning before anything is written.

    Args:
        experiment: what to tune.
        out: the tune folder, which must not exist; by default `runs/<name>-tune`, or the next that is free.
        scale: as in `fedtide.config.read`.
        sets: overrides `key=value`.
        seeds: what every trial plays, in place of `tune.seeds`, e.g. "0,1".
        trials: for each method of every stage, in place of what the file says.

    Raises:
        FedtideError: with one line that says what to mend.
    """
    if out is not None:
        folder.free(Path(out))
    settings, where, name = _read(experiment, scale, sets, timed=False)
    settings = plan.with_budget(settings, where, trials=trials, seeds=seeds)
    search.imported_optuna()
    ends = list(plan.ends(settings, where))
    base = from_dict(plan.base_of(settings), where=where)
    _ready(base, where)
    for end, made in ends:
        try:
            preflight(made, end, fresh=False)
        except FedtideError as error:
            raise FedtideError(f"{end}: {str(error).removeprefix(f'{end}: ')}") from None
    people = population_of(base, base.shift, plan.seeds_of(settings)[0])
    if not any(view.name == "val" for view in views(people)):
        raise FedtideError(
            f"{where}: data.split.val: found {base.data.split.val:g}, allowed with [tune]: more than 0: trials are "
            "judged on validation rows, never on test rows"
        )
    return Prepared(settings, _root(out, f"{slug(name)}-tune"), where)


def play_tuning(
    root: Path, *, workers: int | None = None, display: TuningDisplay | None = None
) -> FinishedTuning | None:
    """Play what is left of a tune folder, write `tuned.toml` and its report; None if a person stopped it."""
    from fedtide.report.tuning import write_tuning

    if not execute_tuning(tunings.load(root), root, workers=workers, display=display):
        return None
    page = write_tuning(root)
    return FinishedTuning(root, root / tunings.READY, page, tunings.read_tuning(root)[1])


def tune(
    experiment: Spelled,
    out: str | Path | None = None,
    *,
    scale: str | None = None,
    sets: Sequence[str] = (),
    seeds: str | None = None,
    trials: int | None = None,
    workers: int | None = None,
) -> FinishedTuning:
    """Search the values that the `[tune]` table of an experiment names, by accuracy on validation rows.

    Args:
        experiment: made in Python, nested dicts, a TOML file, or "recipe:NAME".
        out: the tune folder; by default `runs/<name>-tune`.
        scale: as in `fedtide.config.read`.
        sets: overrides `key=value`.
        seeds: what every trial plays, in place of `tune.seeds`, e.g. "0,1".
        trials: for each method of every stage, in place of what the file says.
        workers: processes; by default the machine's cores.

    Raises:
        FedtideError: with one line that says what to mend.
        KeyboardInterrupt: after Ctrl-C; every finished trial is saved then.
    """
    made = prepare_tuning(experiment, out, scale=scale, sets=sets, seeds=seeds, trials=trials)
    tunings.create(made.settings, made.root)
    finished = play_tuning(made.root, workers=workers)
    if finished is None:
        raise KeyboardInterrupt(f"stopped and saved; go on with: fedtide resume {made.root}")
    return finished
