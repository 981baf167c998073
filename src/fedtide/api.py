"""A whole experiment, from its file to its report: what the command line and Python both do."""

from __future__ import annotations

import shutil
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fedtide.config import Experiment, Method, from_dict, points, read, resolved, slug
from fedtide.config.overrides import flat, seed_list
from fedtide.config.settings import check_installed, read_tracker
from fedtide.config.writing import as_toml, named
from fedtide.core.errors import FedtideError, refused, within
from fedtide.data.population import Population
from fedtide.data.sources.files import bare
from fedtide.data.sources.guesses import Roles, spelled_columns
from fedtide.draw.frames import Library, frame
from fedtide.draw.prose import listed
from fedtide.evaluate.judge import views
from fedtide.fields.types import seconds_of
from fedtide.fields.user_code import session_code
from fedtide.fields.vocabulary import nearest
from fedtide.report.measures import check_measures
from fedtide.runs import auto, folder
from fedtide.runs.build import as_json, cohort_size, population_of
from fedtide.runs.disk import check_room, needed
from fedtide.runs.experiment import RunsDisplay, execute
from fedtide.runs.own_code import changed_since
from fedtide.runs.preflight import Preflight, preflight
from fedtide.runs.private import check_needed
from fedtide.runs.request import Output, Request, Scale, recipe
from fedtide.tuning import folder as tunings
from fedtide.tuning import plan, search, tournament
from fedtide.tuning.tune import TrialsDisplay
from fedtide.tuning.tune import execute as execute_tuning

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from fedtide.inspection.findings import Findings
    from fedtide.inspection.preview_page import Shown
    from fedtide.laws.check import Verdict as LawVerdict
    from fedtide.report.summary import Study, Summary
    from fedtide.runs.trained import Trained
    from fedtide.runs.verify import Verdict as RunVerdict

Spelled = Experiment | Mapping[str, Any] | str | Path
"""An experiment made in Python, as nested dicts, as a TOML file, or `recipe:NAME`."""

Sets = Sequence[str] | Mapping[str, Any]
"""Values to override: `{"data.partition.alpha": 0.1}`, or as on the command line `["data.partition.alpha=0.1"]`."""

Seeds = Sequence[int] | str
"""Seeds: `[0, 1, 2]`, or as on the command line `"0-2"`."""

Name = str | int
"""Name of a column: in a data frame it may be a number."""

T = TypeVar("T")
P = ParamSpec("P")


def hinted(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that says what a person may have meant by an argument that it does not have."""
    names = list(signature(function).parameters)

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> T:
        for key in (key for key in named if key not in names):
            said = f"allowed: {', '.join(names)}"
            if key in Experiment.model_fields and "sets" in names:
                said += f"; did you mean sets={{'{key}': {named[key]!r}}}?"
            else:
                said = nearest(key, names)
            raise FedtideError(f"{function.__name__}: unknown argument '{key}', {said}")
        return function(*given, **named)

    return call


def _request(
    out: Path | str | None, scale: Scale | None, sets: Sets, seeds: Seeds | None, workers: int | None = None
) -> Request:
    """Return a request as the command line would have it."""
    assigned = [_assigned(path, value) for path, value in flat(sets)] if isinstance(sets, Mapping) else sets
    return Request(out, scale, assigned, None if seeds is None else _seeds(seeds), workers)


def _assigned(path: Sequence[str], value: Any) -> str:
    try:
        return f"{'.'.join(path)}={as_toml(value)}"
    except TypeError:
        raise refused("sets", value, "what a file can say: numbers, words, lists and tables") from None


def _seeds(seeds: Seeds) -> str:
    if isinstance(seeds, str):
        return seeds
    if not isinstance(seeds, Sequence):
        raise refused("seeds", seeds, "a list of whole numbers, such as [0, 1, 2]")
    return ",".join(map(str, seeds))


@dataclass(frozen=True)
class Prepared:
    """An experiment that can be run or tuned: every name in it was made once.

    settings: with every default. root: the folder that it gets; not made yet. where: how messages call the experiment.
    workers: number of processes, if given. said: a line about its fleet: which was chosen, or what it does not stack.
    """

    settings: Experiment
    root: Path
    where: str
    workers: int | None = None
    said: str = ""


@dataclass(frozen=True, repr=False)
class Finished:
    """A finished experiment: its run folder, its report, and what it found (a `fedtide.report.summary.Study`).

    Data frames are of pandas, or of polars where that alone is installed or is asked for (`library="polars"`). Their
    columns are the names of the records; of a sweep there are also the point and what is swept.
    """

    folder: Path
    report: Path
    study: Study

    def __repr__(self) -> str:
        made = self.summaries
        means = [(m.name, m.measures[m.score].mean) for m in made[0].methods if m.score in m.measures]
        found = [f"{len(made)} points"] if len(made) > 1 else [f"{name} {mean:.4g}" for name, mean in means]
        return f"Finished({', '.join([repr(str(self.folder)), *found])})"

    def _repr_html_(self) -> str:
        from fedtide.report.notebook import shown

        return shown(self.study, self.report)

    def frame(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each method and seed, and a column for each measure."""
        return self._frame("measures", library)

    def curves(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each evaluation of a run, by whose rows were judged (`view`)."""
        return self._frame("curves", library)

    def rounds(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each round of a run: what was asked and sent, and what methods tell."""
        return self._frame("rounds", library)

    def clients(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each client and evaluation of a run; `slot` is its cluster or model."""
        return self._frame("clients", library)

    def clusters(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each cluster or model and evaluation of a run: its clients, their mean."""
        return self._frame("clusters", library)

    def _frame(self, of: str, library: Library | None) -> Any:
        from fedtide.report import rows  # as a report, what every worker process need not import

        return frame(list(getattr(rows, of)(self.study)), library)

    def trained(self, method: str | None = None, seed: int | None = None) -> Trained:
        """What a method has trained (see `ft.trained`)."""
        return trained(self.folder, method, seed)

    @property
    def model(self) -> nn.Module:
        """Module that the only method has trained with the first seed, as a new client predicts; see `trained`.

        Raises:
            FedtideError: there are several methods or points, or which of its networks predicts depends on rows.
        """
        names = [repr(method.name) for method in self.summaries[0].methods]
        if len(self.summaries) > 1:
            raise FedtideError("model: a sweep has one for each point; allowed: ft.trained(FOLDER_OF_A_POINT).model()")
        if len(names) > 1:
            raise FedtideError(f"model: each method has one; allowed: trained({names[0]}).model(), of {listed(names)}")
        return self.trained().model()

    @property
    def summaries(self) -> list[Summary]:
        """The `fedtide.report.summary.Summary` of each point of its sweep; one where there is none."""
        return list(self.study.summaries)


@dataclass(frozen=True, repr=False)
class FinishedTuning:
    """A finished tuning: its folder, the experiment file that it wrote, and its report.

    stages: for each stage what each of its methods found (`fedtide.tuning.folder.Tuned`). score: what trials are judged
    by, accuracy or skill.
    """

    folder: Path
    tuned: Path
    report: Path
    stages: list[list[tunings.Tuned]]
    score: str = "accuracy"

    def __repr__(self) -> str:
        best = [(tuned.search.title, tuned.best) for stage in self.stages for tuned in stage if tuned.best is not None]
        found = [f"{title} {trial.accuracy:.4g}" for title, trial in best if trial.accuracy is not None]
        return f"FinishedTuning({', '.join([repr(str(self.folder)), *found])})"

    def _repr_html_(self) -> str:
        from fedtide.report.notebook import tuned
        from fedtide.tuning.page import found_table

        return tuned(repr(self), found_table(self.stages, self.score), self.report)

    def frame(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each trial: its values, and its accuracy on validation rows."""
        trials = (trial for stage in self.stages for tuned in stage for trial in tuned.trials)
        columns = "stage", "method", "number", "state", "accuracy"
        rows = [{name: getattr(trial, name) for name in columns} | dict(trial.values) for trial in trials]
        return frame(rows, library)


@dataclass(frozen=True, repr=False)
class Recommendation:
    """A finished tournament: its folder, the study with the survivors for a proper run, and its page.

    made: what its folder says (`fedtide.tuning.tournament.Tournament`). Scores of a tournament are those by which
    methods were chosen, and flatter them: what a method's accuracy is, a run of the study tells.
    """

    folder: Path
    study: Path
    report: Path
    made: tournament.Tournament

    @property
    def survivors(self) -> list[str]:
        """Entries that may be the best, first the one that leads."""
        return self.made.survivors

    def __repr__(self) -> str:
        first, *others = self.survivors
        beside = f"; not told apart from it: {listed(others)}" if others else ""
        return f"Recommendation({str(self.folder)!r}, {first} leads{beside})"

    def _repr_html_(self) -> str:
        from fedtide.report.notebook import tuned
        from fedtide.tuning.recommendation import standings_table

        return tuned(repr(self), standings_table(self.made), self.report)

    def frame(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each entry, rung and seed: its accuracy on validation rows."""
        rows = [
            {"entry": entry, "rounds": rung.rounds, "seed": seed, "accuracy": value}
            for rung in self.made.reached
            for entry, own in rung.values.items()
            for seed, value in own.items()
        ]
        return frame(rows, library)


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
    workers = _workers(settings, request.workers)
    found = _ready(settings, where)
    choice = auto.resolve_auto(settings, workers=workers)
    return Prepared(choice.experiment, _folder(request, slug(name)), where, choice.workers, choice.said or found.said)


def _folder(request: Request, name: str) -> Path:
    """Return the folder to make, by default one of this name that is free."""
    return folder.unused(Path("runs"), name) if request.out is None else Path(request.out)


def _ready(experiment: Experiment, where: str) -> Preflight:
    """Try an experiment, and raise for whatever would stop it."""
    check_measures(experiment, where)
    if experiment.track is not None:
        check_installed(experiment.track)
    found = preflight(experiment, where)
    check_needed(experiment, found.forms, where)
    return found


def _workers(settings: Experiment, asked: int | None) -> int | None:
    """Return the number of processes that are asked for; one where no other could import what a Python session has.

    Raises:
        FedtideError: more are asked for.
    """
    code = session_code(as_json(settings))
    if not code:
        return asked
    but = f"no other process can import {listed(code)} of this Python session"
    if asked not in (None, 1):
        raise refused("workers", asked, "1, or code in a file", but)
    if settings.fleet.kind in ("workers", "ray"):
        raise refused("fleet.kind", settings.fleet.kind, "local, or code in a file", but)
    return 1


def _say_code(settings: Experiment, root: Path, screen: Console) -> None:
    """Say what code of a person's own means for a run: of a Python session, or changed since the run began."""
    from fedtide.report.terminal import say

    for file in changed_since(root):
        say(f"{file}: not what it was when {root} was made, and numbers may depend on it", screen)

    if code := session_code(as_json(settings)):
        have = "is" if len(code) == 1 else "are"
        said = "one process plays all, and it cannot be resumed in another"
        say(f"{listed(code)} {have} of this Python session: {said}", screen)


def _read(
    experiment: Spelled, scale: str | None, sets: Sequence[str], *, timed: bool = True
) -> tuple[Experiment, str, str]:
    """An experiment, how messages call it, and how its folder is called."""
    if isinstance(experiment, str) and experiment.startswith("recipe:"):
        experiment = recipe(experiment.removeprefix("recipe:"))
    if isinstance(experiment, str | Path):
        settings = read(experiment, scale=scale, sets=sets, timed=timed)
        return settings, str(experiment), Path(experiment).stem
    values = resolved(experiment) if isinstance(experiment, Experiment) else named(experiment)
    settings = from_dict(values, scale=scale, sets=sets, timed=timed)
    return settings, "experiment", slug(settings.title or "experiment")


def play(
    settings: Experiment, root: Path, *, workers: int | None = None, display: RunsDisplay | None = None
) -> Finished | None:
    """Play what is left of a run folder and write its report; None if a person stopped it, and everything is saved."""
    # Here and not above: a report draws, and every worker process imports what runs an experiment.
    from fedtide.report.page import write_report
    from fedtide.report.summary import read_study

    if not execute(settings, root, workers=_workers(settings, workers), display=display):
        return None
    page = write_report([root])
    return Finished(root, page, read_study(root))


def play_shown(settings: Experiment, root: Path, workers: int | None, output: Output = Output()) -> Finished | None:
    """Play what is left of a run folder as `play` does, and print the progress and the results."""
    # Here and not above: worker processes show nothing.
    from fedtide.report.terminal import console, print_results, say
    from fedtide.runs.display import InNotebook, Live
    from fedtide.tracking.feed import Tracking

    screen = console(output)
    say(f"run folder: {root}", screen)
    _say_code(settings, root, screen)
    display: RunsDisplay = InNotebook() if screen.is_jupyter and not output.quiet else Live(screen)
    if settings.track is not None:
        display = Tracking(settings, root, display, partial(say, screen=screen))
    finished = play(settings, root, workers=workers, display=display)
    if finished is not None:
        print_results(finished.study, screen)
    return finished


@hinted
def run(
    experiment: Spelled,
    out: str | Path | None = None,
    *,
    scale: Scale | None = None,
    sets: Sets = (),
    seeds: Seeds | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> Finished:
    """Run an experiment: every method with every seed, in parallel, and write its report.

    Args:
        experiment: made in Python, nested dicts, a TOML file, or "recipe:demo". In dicts functions, classes and rows of
            a Python session stand as they are: one process plays them, and no other session can resume the run.
        out: the folder that is made; it must not exist. By default runs/NAME.
        scale: size of a recipe: nano (seconds), cpu (minutes), paper (as published).
        sets: values to override, `{"rounds": 10, "data.partition.alpha": 0.1}`. Keys of methods apply to all of them
            ("method.local.lr") or to one by name ("method.FedAvg.local.lr").
        seeds: in place of the experiment's, `[0, 1, 2]`.
        workers: processes; by default as many as the machine has cores. The result does not depend on it.
        quiet: print nothing; by default the progress and the results are printed, as the command does.

    Raises:
        FedtideError: with one line that says what to mend.
        KeyboardInterrupt: after Ctrl-C; everything is saved then.
    """
    from fedtide.report.terminal import console, say

    made = prepare(experiment, _request(out, scale, sets, seeds, workers))
    if made.said:
        say(made.said, console(Output(quiet)))
    check_room(needed(made.settings, made.where), made.root)
    folder.create(made.settings, made.root, made.where, scale)
    return _done(play_shown(made.settings, made.root, made.workers, Output(quiet)), made.root)


@hinted
def resume(
    run_folder: str | Path, *, seeds: Seeds | None = None, workers: int | None = None, quiet: bool = False
) -> Finished | FinishedTuning | Recommendation:
    """Go on where a run, a tuning or a tournament was stopped; of one that is finished, return what it found.

    Args:
        run_folder: the run folder, or the folder of a tuning.
        seeds: play more seeds than were asked for, those that are there among them.
        workers: processes; by default as many as the machine has cores.
        quiet: print nothing.

    Raises:
        FedtideError: with one line that says what to mend.
        KeyboardInterrupt: after Ctrl-C; everything is saved then.
    """
    root = Path(run_folder)
    if tunings.is_tuning(root):
        if seeds is not None:
            raise refused("seeds", seeds, "None, as the seeds of a tuning are those of its config.toml")
        return _done(tune_shown(root, workers, Output(quiet)), root)
    if tournament.is_tournament(root):
        if seeds is not None:
            raise refused("seeds", seeds, "None, as a tournament has seeds of its own")
        return _done(recommendation_shown(root, workers, Output(quiet)), root)
    settings = folder.load(root)
    if seeds is not None:
        settings = folder.extended(root, _seeds(seeds))
        check_room(needed(settings, str(root)), root)
    return _done(play_shown(settings, root, workers, Output(quiet)), root)


@hinted
def write_report(*run_folders: str | Path, out: str | Path | None = None) -> Path:
    """Make the report of a run folder or a tuning, or one page about several run folders, and return where it is.

    Args:
        run_folders: the folders.
        out: where the page goes; by default report.html in the folder, or here for several.
    """
    from fedtide.report.page import write_report as write_page
    from fedtide.tuning.page import write_tuning

    roots, page = [Path(root) for root in run_folders], None if out is None else Path(out)
    if len(roots) == 1 and tunings.is_tuning(roots[0]):
        return write_tuning(roots[0], page)
    if len(roots) == 1 and tournament.is_tournament(roots[0]):
        from fedtide.tuning.recommendation import write_recommendation

        return write_recommendation(roots[0], page)
    return write_page(roots, page)


@hinted
def show(
    shown: Spelled | Population,
    *,
    scale: Scale | None = None,
    sets: Sets = (),
    seeds: Seeds | None = None,
    rounds: int | None = None,
    clients_per_round: int | None = None,
) -> Shown:
    """Show who holds what, who is there when and how the mix moves, before anything is run.

    Args:
        shown: an experiment as `ft.run` takes it, or a population made by `ft.population`.
        scale: size of a recipe: nano, cpu, paper.
        sets: values to override, `{"data.partition.alpha": 0.1}`.
        seeds: in place of the experiment's; the first is shown.
        rounds: of a population, by default 100; an experiment says its own.
        clients_per_round: how many arrive, by default 10 of a population, else as the first method asks.

    Returns:
        Printed it is a few lines; `write(page)` makes a page with pictures, which a notebook shows at once.

    >>> import torch
    >>> from fedtide.data import IID
    >>> from fedtide.runs.simulate import population
    >>> shown = show(population(torch.randn(80, 3), torch.arange(80) % 2, IID(clients=4)), rounds=2)
    >>> print(shown)  # doctest: +ELLIPSIS
    4 clients; 80 rows of shape (3,), 2 classes
    rows to train on: 14 a client
    ...
    """
    from fedtide.inspection.preview import Preview
    from fedtide.inspection.preview_page import Shown

    if isinstance(shown, Population):
        m = min(clients_per_round or 10, shown.registered)
        return Shown("Population", [Preview(shown, rounds or 100, m)])
    more = [] if seeds is None else [f"seeds={seed_list(_seeds(seeds))}"]
    settings, where, _ = _read(shown, scale, [*_request(None, None, sets, None).sets, *more])
    seed, previews = settings.seeds[0], dict[str, list[Method]]()
    first = points(settings, where)[0].experiment
    for method in first.method:
        previews.setdefault(repr(first.shift_of(method)), []).append(method)
    made = []
    for methods in previews.values():
        people = population_of(first, first.shift_of(methods[0]), seed)
        people.check(first.rounds)
        m = clients_per_round or min(cohort_size(methods[0], people.registered), people.registered)
        names = [method.name for method in methods] if len(previews) > 1 else []
        made.append(Preview(people, rounds or first.rounds, m, first.timing.seconds or 1.0, names))
    return Shown(settings.title or where, made)


@hinted
def track(run_folder: str | Path, tracker: str | None = None) -> None:
    """Tell TensorBoard, MLflow or Weights & Biases what a run folder has recorded; nothing stands there twice.

    Args:
        run_folder: the run folder; of runs that are not finished what there is.
        tracker: "tensorboard", "mlflow" or "wandb", or one with its place, such as "mlflow:http://localhost:5000"; by
            default that of its `[track]`.

    Raises:
        FedtideError: it is no run folder, no tracker is named, or its library is not installed.
    """
    from fedtide.tracking.feed import track as track_folder

    track_folder(Path(run_folder), None if tracker is None else read_tracker(tracker))


@hinted
def results(run_folder: str | Path) -> Finished:
    """Return what a run folder found: printed it is a line, in a notebook its table and curve.

    Args:
        run_folder: the run folder. Runs in it that are not finished are left out.

    Raises:
        FedtideError: it is no run folder, or no run in it is finished.
    """
    from fedtide.report.page import report_of
    from fedtide.report.summary import read_finished

    root = Path(run_folder)
    if tunings.is_tuning(root):
        raise FedtideError(f"{root}: is a tune folder; ft.resume returns what it found")
    if tournament.is_tournament(root):
        raise FedtideError(f"{root}: is the folder of a tournament; ft.resume returns what it found")
    return Finished(root, report_of(root), read_finished(root))


@hinted
def verify(run_folder: str | Path) -> list[RunVerdict]:
    """Look whether a run folder is what was written; `wrong` of a run's verdict is None where it is.

    Args:
        run_folder: the run folder, or the folder of a tournament.
    """
    return list(verdicts(Path(run_folder)))


def verdicts(root: Path) -> Iterator[RunVerdict]:
    """Yield what `verify` finds, run by run."""
    from fedtide.runs.verify import verify as of_runs

    if tunings.is_tuning(root):
        raise refused("verify", str(root), "a run folder, or that of a tournament", "a tune folder keeps no runs")
    yield from tournament.verify(root) if tournament.is_tournament(root) else of_runs(root)


@hinted
def trained(run_folder: str | Path, method: str | None = None, seed: int | None = None) -> Trained:
    """Return what a run has trained: `model()` is a module, `predict(x)` predicts as the run's evaluation does.

    Args:
        run_folder: the run folder, with a sweep that of one point.
        method: name of the method, where there are several.
        seed: by default the first.
    """
    from fedtide.runs.trained import Trained

    return Trained.read(Path(run_folder), method, seed)


@hinted
def inspect(
    data: Any,
    *,
    label: Name | None = None,
    client: Name | None = None,
    time: Sequence[Name] | Name | None = None,
    features: Sequence[Name] | Name | None = None,
    zone: str | None = None,
    without: Sequence[Name] | Name | None = None,
    seed: int = 0,
) -> Findings:
    """Tell which shift data have: eight questions, each against the same data shuffled.

    Args:
        data: a CSV, ARFF or Parquet file, several with the same header or a series each (a column of times and one of
            numbers), or an NPZ file; a data frame (pandas, polars, pyarrow), a mapping of columns, or a population,
            whose rows are looked at as they are dealt. Or an experiment, as `ft.run` takes it: the rows that its
            clients bring over its rounds are looked at, for its first seed.
        label: column of the label; by default the one that is called so, or the last.
        client: column of the client; by default one with a name like user or station; "" for none.
        time: column of the time, or those of a date; by default the one with dates; "" for none.
        features: columns of the features; by default all other numbers.
        zone: time zone in which hours and days are counted, such as "Europe/Berlin"; by default times are taken as they
            are, in UTC where they name a zone.
        without: columns that are left out.
        seed: of the shuffles.

    Returns:
        The answers: printed they are eight lines, `found["drift"]` is one of them, `found.write(folder)` writes a page
        and a study.

    >>> import numpy as np
    >>> x, user = np.arange(400) % 7, np.repeat(range(20), 20)
    >>> found = inspect({"x": x, "user": user, "label": (x > 3) == (user < 10)})
    >>> found["meaning"].level, found["labels"].level
    ('strong', 'no')
    """
    from fedtide.inspection.findings import inspect_table
    from fedtide.inspection.table import read as read_table

    roles = _roles(label, client, time, features, zone, without)
    experiment = data[0] if isinstance(data, list) and len(data) == 1 else data
    if is_study(experiment):
        _no_roles(roles)
        return _in_world(experiment)
    return inspect_table(read_table(data, roles), seed)


def _in_world(experiment: Spelled) -> Findings:
    """Inspect the rows of an experiment.

    Raises:
        FedtideError: its rows are no single labels, or all of one.
    """
    from fedtide.tuning.nominate import found_in_world

    settings, where, _ = _read(str(experiment) if isinstance(experiment, Path) else experiment, None, ())
    if (found := found_in_world(settings, settings.seeds[0])) is None:
        raise FedtideError(
            f"{where}: inspect: rows are sequences, or all have one label, allowed: rows of several labels"
        )
    return found


def _no_roles(roles: Roles) -> None:
    """Raise where columns are named of a study."""
    if given := [(name, value) for name, value in vars(roles).items() if value != getattr(Roles(), name)]:
        raise refused(f"--{given[0][0]}", given[0][1], "with data (CSV, Parquet, NPZ), not with a study")


def _roles(
    label: Name | None,
    client: Name | None,
    time: Sequence[Name] | Name | None,
    features: Sequence[Name] | Name | None,
    zone: str | None,
    without: Sequence[Name] | Name | None,
) -> Roles:
    """Return columns as the command line would have them."""
    label, client, time, features, without = map(spelled_columns, (label, client, time, features, without))
    return Roles(label, client, time, features, zone, without=without)


@hinted
def check(algorithm: str, *, sets: Sets = ()) -> list[LawVerdict]:
    """Check an algorithm, a registered name or module:function, against the laws on a toy federation.

    Args:
        algorithm: the algorithm.
        sets: values of the toy experiment to override, such as `{"method.mu": 0.1}`.

    Returns:
        A verdict for each law: `broken` is None where it holds, `silent` says why it was not checked.
    """
    from fedtide.laws.check import check as verdicts

    return list(verdicts(algorithm, _request(None, None, sets, None).sets))


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
    _workers(settings, request.workers)
    _ready(base, where)
    for end, made in ends:
        with within(end):
            preflight(made, end, fresh=False)
    people = population_of(base, base.shift, plan.seeds_of(settings)[0])
    if not any(view.name == "val" for view in views(people)):
        but = "trials are judged on validation rows, never on test rows"
        raise refused(f"{where}: data.split.val", base.data.split.val, "more than 0 with [tune]", but)
    return Prepared(settings, _folder(request, f"{slug(name)}-tune"), where)


def play_tuning(
    root: Path, *, workers: int | None = None, display: TrialsDisplay | None = None
) -> FinishedTuning | None:
    """Play what is left of a tune folder, write `tuned.toml` and its report; None if a person stopped it."""
    from fedtide.tuning.page import write_tuning

    settings = tunings.load(root)
    if not execute_tuning(settings, root, workers=_workers(settings, workers), display=display):
        return None
    page = write_tuning(root)
    return FinishedTuning(root, root / tunings.READY, page, tunings.read_tuning(root)[1], settings.score)


def tune_shown(root: Path, workers: int | None, output: Output = Output()) -> FinishedTuning | None:
    """Play what is left of a tune folder as `play_tuning` does, and print the trials and what was found."""
    from fedtide.report.terminal import console, print_table, say
    from fedtide.tuning.display import LiveTuning
    from fedtide.tuning.page import found_table

    screen = console(output)
    say(f"tune folder: {root}", screen)
    _say_code(tunings.load(root), root, screen)
    finished = play_tuning(root, workers=workers, display=LiveTuning(screen))
    if finished is not None:
        print_table(found_table(finished.stages, finished.score), screen)
        say(f"tuned: {finished.tuned}", screen)
    return finished


@hinted
def tune(
    experiment: Spelled,
    out: str | Path | None = None,
    *,
    scale: Scale | None = None,
    sets: Sets = (),
    seeds: Seeds | None = None,
    trials: int | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> FinishedTuning:
    """Search the values that the `[tune]` table of an experiment names, by accuracy on validation rows.

    Args:
        experiment: made in Python, nested dicts, a TOML file, or "recipe:NAME".
        out: the folder that is made; it must not exist. By default runs/NAME-tune.
        scale: size of a recipe: nano (seconds), cpu (minutes), paper (as published).
        sets: values to override, `{"rounds": 10}`.
        seeds: those that every trial plays; by default the first.
        trials: for each method of every stage, in place of what the file says.
        workers: processes; by default as many as the machine has cores.
        quiet: print nothing; by default the trials and what was found are printed, as the command does.

    Raises:
        FedtideError: with one line that says what to mend.
        KeyboardInterrupt: after Ctrl-C; every finished trial is saved then.
    """
    made = prepare_tuning(experiment, _request(out, scale, sets, seeds), trials)
    tunings.create(made.settings, made.root)
    return _done(tune_shown(made.root, workers, Output(quiet)), made.root)


def is_study(data: Any) -> bool:
    """Tell whether what is to be recommended for is an experiment, and no data."""
    if isinstance(data, Experiment) or (isinstance(data, Mapping) and "method" in data):
        return True
    return isinstance(data, str | Path) and (str(data).startswith("recipe:") or str(data).endswith(".toml"))


def begin_recommendation(
    data: Any, request: Request = Request(), budget: str | float = "5m", roles: Roles = Roles()
) -> Path:
    """Inspect data or a study, nominate methods, and make the folder of a tournament.

    Args:
        data: as `inspect` takes it, or an experiment.
        request: how; the seeds are a tournament's own.
        budget: how long the tournament takes, such as "5m" or "90s", or seconds.
        roles: columns of data, as of `inspect`.

    Raises:
        FedtideError: with one line that says what to mend.
    """
    from fedtide.inspection.findings import inspect_table
    from fedtide.inspection.table import read as read_table
    from fedtide.tuning import entering

    began = clock.time()
    try:
        seconds = seconds_of(budget)
    except ValueError as error:
        raise FedtideError(f"--budget: {error}") from None
    if request.out is not None:
        folder.free(Path(request.out))
    if is_study(data):
        _no_roles(roles)
        settings, where, name = _read(data, request.scale, request.sets)
        _workers(settings, request.workers)
        root = _folder(request, f"{slug(name)}-recommend")
        entering.begin_with_study(root, settings, where, seconds, began, request.scale)
        return root
    if options := [*request.sets, *([request.scale] if request.scale else [])]:
        raise refused("--set, --scale", options[0], "with a study (a TOML file or recipe:NAME)")
    found = inspect_table(read_table(data, roles, "recommend"))
    root = _folder(request, f"{slug(bare(found.table.name))}-recommend")
    entering.begin_with_data(root, found, seconds, began)
    return root


def play_recommendation(
    root: Path, *, workers: int | None = None, display: tournament.RungsDisplay | None = None
) -> Recommendation | None:
    """Play what is left of a tournament, write its study and its page; None if a person stopped it."""
    from fedtide.tuning.recommendation import write_recommendation

    if not tournament.execute(root, workers=_workers(folder.load(root), workers), display=display):
        return None
    page = write_recommendation(root)
    return Recommendation(root, root / tournament.STUDY, page, tournament.read_tournament(root))


def recommendation_shown(root: Path, workers: int | None, output: Output = Output()) -> Recommendation | None:
    """Play what is left of a tournament as `play_recommendation` does, and print its rungs and how methods stand.

    Raises:
        TooShort: the budget was over before anything could be said; the folder is removed.
    """
    from fedtide.report.terminal import console, print_table, say
    from fedtide.tuning.display import LiveTournament
    from fedtide.tuning.recommendation import earlier, headline, standings_table

    screen = console(output)
    say(f"tournament folder: {root}", screen)
    _say_code(folder.load(root), root, screen)
    for line in tournament.read_tournament(root).said:
        say(line, screen)
    try:
        finished = play_recommendation(root, workers=workers, display=LiveTournament(screen))
    except tournament.TooShort:
        shutil.rmtree(root, ignore_errors=True)
        raise
    if finished is not None:
        print_table(standings_table(finished.made), screen)
        if said := earlier(finished.made):
            say(said.strip(), screen)
        say(headline(finished.made), screen)
        say(f"study: {finished.study}", screen)
    return finished


@hinted
def recommend(
    data: Any,
    out: str | Path | None = None,
    *,
    budget: str | float = "5m",
    label: Name | None = None,
    client: Name | None = None,
    time: Sequence[Name] | Name | None = None,
    features: Sequence[Name] | Name | None = None,
    zone: str | None = None,
    without: Sequence[Name] | Name | None = None,
    scale: Scale | None = None,
    sets: Sets = (),
    workers: int | None = None,
    quiet: bool = False,
) -> Recommendation:
    """Recommend methods for data or a study: an inspection nominates them, a tournament on validation rows decides.

    Args:
        data: a file, several files or a data frame, as `ft.inspect` takes it; or a study: an experiment made in Python,
            nested dicts with `method`, a TOML file, or "recipe:NAME".
        out: the folder that is made; it must not exist. By default runs/NAME-recommend.
        budget: how long the tournament may take, such as "90s" or "5m", or seconds.
        label: column of the label, as of `ft.inspect`; so are the others up to `without`.
        client: column of the client.
        time: column of the time.
        features: columns of the features.
        zone: time zone in which hours and days are counted.
        without: columns that are left out.
        scale: of a recipe.
        sets: values of a study to override.
        workers: processes; by default as many as the machine has cores.
        quiet: print nothing.

    Returns:
        Who leads, who cannot be told apart from it, and a study with these for a proper run on fresh seeds.

    Raises:
        FedtideError: with one line that says what to mend.
        KeyboardInterrupt: after Ctrl-C; everything is saved then.
    """
    roles = _roles(label, client, time, features, zone, without)
    root = begin_recommendation(data, _request(out, scale, sets, None, workers), budget, roles)
    return _done(recommendation_shown(root, workers, Output(quiet)), root)
