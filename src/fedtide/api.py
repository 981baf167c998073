"""A whole experiment, from its file to its report: what the command line and Python both do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fedtide.config import Experiment, from_dict, read, resolved, slug
from fedtide.config.overrides import seed_list
from fedtide.core.errors import refused, unknown, within
from fedtide.evaluate.judge import views
from fedtide.report.measures import check_measures
from fedtide.runs import auto, folder
from fedtide.runs.build import population_of
from fedtide.runs.disk import check_room, needed
from fedtide.runs.experiment import Display, execute
from fedtide.runs.preflight import preflight
from fedtide.tuning import folder as tunings
from fedtide.tuning import plan, search
from fedtide.tuning.tune import Display as TuningDisplay
from fedtide.tuning.tune import execute as execute_tuning

if TYPE_CHECKING:
    from fedtide.report.summary import Study, Summary

Spelled = Experiment | Mapping[str, Any] | str | Path
"""An experiment made in Python, as nested dicts, as a TOML file, or `recipe:NAME`."""

Scale = Literal["nano", "cpu", "paper"]
"""Size of a recipe: seconds, minutes, as published."""

T = TypeVar("T")


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

    def folder(self, name: str) -> Path:
        """The folder to make, by default one of this name that is free."""
        return folder.unused(Path("runs"), name) if self.out is None else Path(self.out)


@dataclass(frozen=True)
class Prepared:
    """An experiment that can be run or tuned: every name in it was made once.

    settings: with every default. root: the folder that it gets; not made yet. where: how messages call the experiment.
    workers: number of processes, if given. said: the fleet that was chosen for it, if one was.
    """

    settings: Experiment
    root: Path
    where: str
    workers: int | None = None
    said: str = ""


@dataclass(frozen=True, repr=False)
class Finished:
    """A finished experiment: its run folder, its report, and what it found (a `fedtide.report.summary.Study`)."""

    folder: Path
    report: Path
    study: Study

    def __repr__(self) -> str:
        made = self.summaries
        means = [(m.name, m.measures["accuracy"].mean) for m in made[0].methods if "accuracy" in m.measures]
        found = [f"{len(made)} points"] if len(made) > 1 else [f"{name} {mean:.4g}" for name, mean in means]
        return f"Finished({', '.join([repr(str(self.folder)), *found])})"

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
        raise unknown("recipe", name, list(found))
    return found[name]


def prepare(experiment: Spelled, request: Request = Request()) -> Prepared:
    """Read an experiment, and find out whatever would stop it before anything is written.

    Where its fleet is to be chosen ("auto"), the choice is made here.

    Raises:
        FedtideError: with one line that says what to mend.
    """
    if request.out is not None:
        folder.free(Path(request.out))
    more = [f"seeds={seed_list(request.seeds)}"] if request.seeds is not None else []
    settings, where, name = _read(experiment, request.scale, [*request.sets, *more])
    _ready(settings, where)
    choice = auto.resolve_auto(settings, workers=request.workers)
    return Prepared(choice.experiment, request.folder(slug(name)), where, choice.workers, choice.said)


def _ready(experiment: Experiment, where: str) -> None:
    """Raise for whatever would stop an experiment."""
    check_measures(experiment, where)
    preflight(experiment, where)


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
    scale: Scale | None = None,
    sets: Sequence[str] = (),
    seeds: str | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> Finished:
    """Run an experiment: every method with every seed, in parallel, and write its report.

    Args:
        experiment: made in Python, nested dicts, a TOML file, or "recipe:demo".
        out, scale, sets, seeds, workers: see `Request`.
        quiet: print nothing; by default the progress and the results are printed, as the command does.

    Raises:
        FedtideError: with one line that says what to mend.
        KeyboardInterrupt: after Ctrl-C; everything is saved then.
    """
    made = prepare(experiment, Request(out, scale, sets, seeds, workers))
    check_room(needed(made.settings, made.where), made.root)
    folder.create(made.settings, made.root, made.where, scale)
    # Here and not above: worker processes show nothing.
    from fedtide.runs.display import Live
    from fedtide.terminal import console, print_results, say

    screen = console(quiet=quiet)
    say(f"run folder: {made.root}", screen)
    finished = _done(play(made.settings, made.root, workers=made.workers, display=Live(screen)), made.root)
    print_results(finished.study, screen)
    return finished


def _done(finished: T | None, root: Path) -> T:
    if finished is None:
        raise KeyboardInterrupt(f"stopped and saved; go on with: fedtide resume {root}")
    return finished


def prepare_tuning(experiment: Spelled, request: Request = Request(), trials: int | None = None) -> Prepared:
    """Read an experiment with a `[tune]` table, and find out whatever would stop its tuning before anything is written.

    Args:
        experiment: what to tune.
        request: how.
        trials: for each method of every stage, in place of what the file says.

    Raises:
        FedtideError: with one line that says what to mend.
    """
    if request.out is not None:
        folder.free(Path(request.out))
    settings, where, name = _read(experiment, request.scale, request.sets, timed=False)
    settings = plan.with_budget(settings, where, trials=trials, seeds=request.seeds)
    search.imported_optuna()
    ends = list(plan.ends(settings, where))
    base = from_dict(plan.base_of(settings), where=where)
    _ready(base, where)
    for end, made in ends:
        with within(end):
            preflight(made, end, fresh=False)
    people = population_of(base, base.shift, plan.seeds_of(settings)[0])
    if not any(view.name == "val" for view in views(people)):
        but = "trials are judged on validation rows, never on test rows"
        raise refused(f"{where}: data.split.val", base.data.split.val, "more than 0 with [tune]", but)
    return Prepared(settings, request.folder(f"{slug(name)}-tune"), where)


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
    scale: Scale | None = None,
    sets: Sequence[str] = (),
    seeds: str | None = None,
    trials: int | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> FinishedTuning:
    """Search the values that the `[tune]` table of an experiment names, by accuracy on validation rows.

    Args:
        experiment: made in Python, nested dicts, a TOML file, or "recipe:NAME".
        trials: for each method of every stage, in place of what the file says.
        out, scale, sets, seeds, workers: see `Request`.
        quiet: print nothing; by default the trials are printed, as the command does.

    Raises:
        FedtideError: with one line that says what to mend.
        KeyboardInterrupt: after Ctrl-C; every finished trial is saved then.
    """
    made = prepare_tuning(experiment, Request(out, scale, sets, seeds), trials)
    tunings.create(made.settings, made.root)
    from fedtide.terminal import console, say
    from fedtide.tuning.display import LiveTuning

    screen = console(quiet=quiet)
    say(f"tune folder: {made.root}", screen)
    return _done(play_tuning(made.root, workers=workers, display=LiveTuning(screen)), made.root)
