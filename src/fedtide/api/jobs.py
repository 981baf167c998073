"""Jobs and their results: a run folder, a tune folder, the folder of a tournament; and models of a run or a node."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Self

from rich.console import Console
from torch import nn

from fedtide.config import Experiment, Local, from_dict, read, resolved, slug
from fedtide.config.overrides import flatten, seed_list
from fedtide.config.reading import named
from fedtide.config.settings import check_installed
from fedtide.config.writing import as_toml
from fedtide.core.errors import FedtideError, in_shell, refused, unknown, within
from fedtide.data.sources.dates import FORMS
from fedtide.data.sources.files import strip_endings
from fedtide.data.sources.frames import Roles, join_columns
from fedtide.draw.prose import listed
from fedtide.draw.tables import Library, frame
from fedtide.evaluate.judge import views
from fedtide.fields.types import seconds_of
from fedtide.fields.user_code import session_code
from fedtide.fleets.this_machine import remove_left_behind
from fedtide.inspection.findings import inspect_table
from fedtide.inspection.table import read as read_table
from fedtide.learn.task import TURNS
from fedtide.report import notebook
from fedtide.report import study as study_rows
from fedtide.report.page import report_of, write_report
from fedtide.report.run_records import is_nano
from fedtide.report.study import Study, Summary, read_finished
from fedtide.report.terminal import console, print_results, print_table, say
from fedtide.report.topics import check_measures
from fedtide.runs import folder
from fedtide.runs.build import as_json, population_of, read_again
from fedtide.runs.digest import Verdict, verify_runs
from fedtide.runs.display import Live, TerminalBars
from fedtide.runs.experiment import RunsDisplay, check_runs, execute
from fedtide.runs.job import Output, Request, Seeds, Sets, StudyRequest, check_positive, experiment_file, fleet_sets
from fedtide.runs.preflight import Preflight, check_room, preflight, resolve_auto
from fedtide.runs.privacy import check_needed, warn_of_epsilon
from fedtide.runs.trained import Trained
from fedtide.runs.unlearn import Comparison, Leaving
from fedtide.tracking.feed import Tracking
from fedtide.tuning import pages, tournament, tune
from fedtide.tuning.tune import base_of, ends, seeds_of, with_budget

Spelled = Experiment | Mapping[str, Any] | str | Path
"""An experiment made in Python, as nested dicts, as a TOML file, or `recipe:NAME`."""


# -- requests ----------------------------------------------------------------------------------------------------------


def request_of(
    out: Path | str | None = None, *, sets: Sets = (), seeds: Seeds | None = None, **more: Any
) -> StudyRequest:
    """Return the request that arguments from Python make."""
    text = None if seeds is None else seed_text(seeds)
    return StudyRequest(None if out is None else Path(out), sets=assignments(sets), seeds=text, **more)


def assignments(sets: Sets) -> tuple[str, ...]:
    """Return overrides as on the command line."""
    if not isinstance(sets, Mapping):
        return tuple(sets)
    try:
        return tuple(f"{'.'.join(path)}={as_toml(value)}" for path, value in flatten(sets))
    except TypeError:
        raise refused("sets", dict(sets), "values that a file can hold: numbers, words, lists and tables") from None


def seed_text(seeds: Seeds) -> str:
    """Return seeds as on the command line."""
    if isinstance(seeds, str):
        return seeds
    if not isinstance(seeds, Sequence):
        raise refused("seeds", seeds, "a list of whole numbers, such as [0, 1, 2]")
    return ",".join(map(str, seeds))


def read_study(
    experiment: Spelled, request: Request, seeds: str | None = None, *, timed: bool = True
) -> tuple[Experiment, str, str]:
    """Return the experiment, its name in messages, and the name of its folder. Its data are read again.

    Args:
        experiment: a file, `recipe:NAME`, nested dicts or an `Experiment`.
        request: with its scale and overrides.
        seeds: in place of those of the experiment.
        timed: see `fedtide.config.read`.
    """
    if not isinstance(experiment, str | Path | Mapping | Experiment):
        allowed = "a file, recipe:NAME, nested dicts or an Experiment"
        raise refused("experiment", type(experiment).__name__, allowed)
    read_again()
    sets = [*request.overrides, *([] if seeds is None else [f"seeds={seed_list(seeds)}"])]
    if isinstance(experiment, str | Path):
        path = experiment_file(experiment) if isinstance(experiment, str) else experiment
        return read(path, scale=request.scale, sets=sets, timed=timed), str(path), slug(path.stem)
    values = resolved(experiment) if isinstance(experiment, Experiment) else named(experiment)
    settings = from_dict(values, scale=request.scale, sets=sets, timed=timed)
    return settings, "experiment", slug(settings.title or "experiment")


def folder_of(request: Request, name: str) -> Path:
    """Return the folder to make, by default one of this name that is free; raise if there is something at it."""
    if request.out is None:
        return folder.unused(Path("runs"), name)
    folder.free(request.out)
    return request.out


def is_study(data: Any) -> bool:
    """Tell whether the argument of `inspect` or `recommend` is an experiment and no data."""
    if isinstance(data, Experiment) or (isinstance(data, Mapping) and "method" in data):
        return True
    return isinstance(data, str | Path) and (str(data).startswith("recipe:") or str(data).endswith(".toml"))


def columns(*, zone: str | None, time_format: str | None, **names: Any) -> Roles:
    """Return the roles of columns, label, client, time, features and without, as the command line has them."""
    roles: dict[str, Any] = {role: join_columns(name) for role, name in names.items()}
    if time_format not in (None, *FORMS):
        raise unknown("--time-format", str(time_format), FORMS)
    return Roles(zone=zone, time_format=time_format, **roles)


def check_no_columns(roles: Roles) -> None:
    """Raise if columns of a study are named."""
    for name, value in vars(roles).items():
        if value != getattr(Roles(), name):
            raise refused(f"--{name.replace('_', '-')}", value, "with data (CSV, Parquet, NPZ), not with a study")


def processes_for(settings: Experiment, workers: int | None) -> int | None:
    """Return the number of processes that is asked for; 1 if no other process can import the code of a Python session.

    Raises:
        FedtideError: more are asked for.
    """
    code = session_code(as_json(settings))
    if not code:
        return workers
    because = f"no other process can import {listed(code)} of this Python session"
    if workers not in (None, 1):
        raise refused("workers", workers, "1, or code in a file", because)
    if settings.fleet.kind in ("workers", "ray"):
        raise refused("fleet.kind", settings.fleet.kind, "local, or code in a file", because)
    return 1


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Finished:
    """A finished experiment: its run folder, its report, and its results (a `fedtide.report.study.Study`).

    Data frames are of pandas, or of polars if only that is installed or it is asked for (`library="polars"`). Their
    columns are the names of the records; of a sweep there are also the point and the swept values.
    """

    folder: Path
    report: Path
    study: Study

    def __repr__(self) -> str:
        scores = [(method.name, method.measures.get(method.score)) for method in self.summaries[0].methods]
        means = [f"{name} {score.mean:.4g}" for name, score in scores if score is not None and score.mean is not None]
        shown = [f"{len(self.summaries)} points"] if len(self.summaries) > 1 else means
        return f"Finished({', '.join([repr(str(self.folder)), *shown])})"

    def _repr_html_(self) -> str:
        return notebook.render_study(self.study, self.report)

    def frame(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each method and seed, and a column for each measure."""
        return self._frame("measures", library)

    def curves(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each evaluation of a run, by whose rows were judged (`view`)."""
        return self._frame("curves", library)

    def rounds(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each round of a run: messages and the numbers that methods report."""
        return self._frame("rounds", library)

    def clients(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each client and evaluation of a run; `slot` is its cluster or model."""
        return self._frame("clients", library)

    def clusters(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each cluster or model and evaluation of a run: its clients, their mean."""
        return self._frame("clusters", library)

    def _frame(self, kind: str, library: Library | None) -> Any:
        return frame(list(getattr(study_rows, kind)(self.study)), library)

    def trained(self, method: str | None = None, seed: int | None = None, model: str | int | None = None) -> Trained:
        """Return the trained models of a method (see `ft.trained`)."""
        return Trained.read(self.folder, method, seed, None if model is None else str(model))

    @property
    def model(self) -> nn.Module:
        """Module of the only method with the first seed, which predicts as for a new client; see `trained`.

        Raises:
            FedtideError: there are several methods or points, or which of its networks predicts depends on rows.
        """
        names = [repr(method.name) for method in self.summaries[0].methods]
        if len(self.summaries) > 1:
            raise FedtideError("model: a sweep has one for each point; allowed: ft.trained(FOLDER_OF_A_POINT).model()")
        if len(names) > 1:
            raise FedtideError(
                f"model: each method has one; allowed: trained({names[0]}).model(), of {', '.join(names)}"
            )
        return self.trained().model()

    @property
    def summaries(self) -> list[Summary]:
        """The `fedtide.report.study.Summary` of each point of its sweep; one if there is none."""
        return list(self.study.summaries)

    def print(self, screen: Console) -> None:
        """Print the table, the alarms and the claims."""
        print_results(self.study, screen)

    def as_json(self) -> dict[str, Any]:
        """Return the summary of the run folder."""
        return _summary(self.folder)


def _summary(root: Path) -> dict[str, Any]:
    return {"folder": root, "summary": json.loads((root / "summary.json").read_text(encoding="utf-8"))}


@dataclass(frozen=True, repr=False)
class FinishedTuning:
    """A finished tuning: its folder, the experiment file that it wrote, and its report.

    Args:
        folder: of the tuning.
        tuned: the experiment file.
        report: the page.
        stages: for each stage the result of each of its methods (`fedtide.tuning.tune.Tuned`).
        score: the measure of trials, accuracy or skill.
    """

    folder: Path
    tuned: Path
    report: Path
    stages: list[list[tune.Tuned]]
    score: str = "accuracy"

    def __repr__(self) -> str:
        best = [(tuned.search.title, tuned.best) for stage in self.stages for tuned in stage if tuned.best is not None]
        shown = [f"{title} {trial.accuracy:.4g}" for title, trial in best if trial.accuracy is not None]
        return f"FinishedTuning({', '.join([repr(str(self.folder)), *shown])})"

    def _repr_html_(self) -> str:
        return notebook.render_table(repr(self), pages.best_table(self.stages, self.score), self.report)

    def frame(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each trial: its values, and its accuracy on validation rows."""
        names = "stage", "method", "number", "state", "accuracy"
        rows = [
            {name: getattr(trial, name) for name in names} | dict(trial.values)
            for stage in self.stages
            for tuned in stage
            for trial in tuned.trials
        ]
        return frame(rows, library)

    def print(self, screen: Console) -> None:
        """Print the best values."""
        print_table(pages.best_table(self.stages, self.score), screen)
        say(f"tuned: {self.tuned}", screen)

    def as_json(self) -> dict[str, Any]:
        """Return every trial."""
        return {"tuned": self.tuned, "stages": [[asdict(tuned) for tuned in stage] for stage in self.stages]}


@dataclass(frozen=True, repr=False)
class Recommendation:
    """A finished tournament: its folder, the study with the survivors for a proper run, and its page.

    Args:
        folder: of the tournament.
        study: the file with the survivors.
        report: the page.
        made: the record of the tournament (`fedtide.tuning.tournament.Tournament`). Its scores are those by which
            methods were chosen, and flatter them: a run of the study tells a method's accuracy.
    """

    folder: Path
    study: Path
    report: Path
    made: tournament.Tournament

    @property
    def survivors(self) -> list[str]:
        """Entries that may be the best, first the one with the highest score."""
        return self.made.survivors

    def __repr__(self) -> str:
        first, *others = self.survivors
        rest = f"; not told apart from it: {listed(others)}" if others else ""
        return f"Recommendation({str(self.folder)!r}, {first} {self.made.stands}{rest})"

    def _repr_html_(self) -> str:
        return notebook.render_table(repr(self), pages.standings_table(self.made), self.report)

    def frame(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each entry, rung and seed: its accuracy on validation rows."""
        rows = [
            {"entry": entry, "rounds": rung.rounds, "seed": seed, "accuracy": value}
            for rung in self.made.reached
            for entry, by_seed in rung.values.items()
            for seed, value in by_seed.items()
        ]
        return frame(rows, library)

    def print(self, screen: Console) -> None:
        """Print how the entries stand."""
        print_table(pages.standings_table(self.made), screen)
        say(pages.standings_headline(self.made), screen)
        say(pages.scale_line(self.made), screen)
        say(f"study: {self.study}", screen)
        say(pages.next_line(self.study), screen)

    def as_json(self) -> dict[str, Any]:
        """Return the survivors and how the entries stand."""
        return {
            "study": self.study,
            "survivors": self.survivors,
            "standings": [asdict(standing) for standing in self.made.standings],
            "references": dict(self.made.reached[-1].references),
            "leads": not self.made.doubt,
            "failed": dict(self.made.failed),
            "ended": self.made.ended,
        }


# -- jobs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Work in a folder: it is played to its end, now or after a stop, and it is read. Each kind has its own `create`.

    kind: the kind of folder in messages. Each kind has functions that play the rest (False if a person stopped it, and
    everything is saved), read the results and write the page.
    """

    root: Path
    workers: int | None = None
    kind: ClassVar[str]

    @cached_property
    def settings(self) -> Experiment:
        """The experiment in the folder's config.toml."""
        return folder.load(self.root)

    def resumed(
        self, output: Output, *, seeds: Seeds | None = None, fleet: str | None = None, address: str | None = None
    ) -> Self:
        """Return the job with more seeds or on another fleet.

        Raises:
            FedtideError: this kind of job goes on as it began, or the seeds or the fleet are not allowed.
        """
        for name, value in {"seeds": seeds, "fleet": fleet, "address": address}.items():
            if value is not None:
                raise FedtideError(f"--{name}: {self.root} is a {self.kind}, which goes on as it began")
        return self

    def unfinished(self) -> str:
        """Return a line about unfinished runs; "" if there are none, or the page itself names them."""
        return ""

    def summary(self) -> dict[str, Any]:
        """Return the values for `--json` beside its page."""
        return {"folder": self.root}

    def verify(self) -> Iterator[Verdict]:
        """Check that the runs in the folder are unchanged, and yield a verdict for each."""
        raise refused("verify", str(self.root), "a run folder, or the folder of a tournament", f"it is a {self.kind}")

    def _check_finished(self, name: str) -> Path:
        file = self.root / name
        if not file.is_file():
            raise FedtideError(f"{self.root}: is not finished; go on with: fedtide resume {in_shell(self.root)}")
        return file


@dataclass(frozen=True)
class RunJob(Job):
    """A run folder: every method with every seed at every point of a sweep.

    sets: overrides of its config.toml, such as another fleet.
    """

    sets: Sequence[str] = ()
    kind: ClassVar[str] = "run folder"

    @staticmethod
    def create(experiment: Spelled, request: StudyRequest, output: Output) -> "RunJob":
        """Check an experiment, say its fleet and its disk space, and make its run folder.

        Everything in it is built once before anything is written, and a fleet "auto" is chosen.

        Raises:
            FedtideError: one line says what to mend.
        """
        folder_of(request, "")
        settings, where, name = read_study(experiment, request, request.seeds)
        workers = processes_for(settings, request.workers)
        checked = _check(settings, where)
        settings, message = resolve_auto(settings)
        root = folder_of(request, name)
        weak = warn_of_epsilon(checked.epsilon)
        for line in filter(None, (message, *checked.messages, weak, check_room(checked.need, root))):
            say(line, console(output))
        folder.create(settings, root, where, request.scale)
        return RunJob(root, workers)

    @cached_property
    def settings(self) -> Experiment:
        """The experiment in the folder's config.toml."""
        return folder.load(self.root, self.sets)

    def resumed(
        self, output: Output, *, seeds: Seeds | None = None, fleet: str | None = None, address: str | None = None
    ) -> Self:
        """Return the job with more seeds, which its config.toml then asks for, or on another fleet."""
        if fleet is not None and self.settings.fleet.kind == "stacked":
            raise refused("--fleet", fleet, f"none, because {self.root} is stacked and has other last bits")
        job = replace(self, sets=fleet_sets(fleet, address))
        _ = job.settings  # they are read, and refused, before more seeds are written
        if seeds is not None:
            more = folder.extended(self.root, seed_text(seeds))
            if line := check_room(preflight(more, str(self.root)).need, self.root):
                say(line, console(output))
            for run in folder.plan(job.settings, self.root)[:1]:  # rows that have changed have changed for all runs
                population = population_of(run.experiment, run.experiment.shift_of(run.method), run.seed)
                folder.check_rows(run.folder, run.experiment, run.method, run.seed, population)
            folder.extend(self.root, more)
            job = replace(job)
        return job

    def play(self, screen: Console) -> bool:
        """Play the runs that are left."""
        display: RunsDisplay = Live(screen)
        if self.settings.track is not None:
            display = Tracking(self.settings, self.root, display, partial(say, screen=screen))
        workers = processes_for(self.settings, self.workers)
        return execute(self.settings, self.root, workers=workers, display=display)

    def result(self) -> Finished:
        """Read the finished runs."""
        return Finished(self.root, report_of(self.root), read_finished(self.root))

    def write_page(self, out: Path | None = None) -> Path:
        """Write the report."""
        return write_page([self], out)

    def _runs(self) -> list[folder.Planned]:
        return folder.plan(folder.load(self.root, imports=False), self.root)

    def unfinished(self) -> str:
        """Say how many runs are left; raise if a configuration or a record was changed."""
        runs = self._runs()
        check_runs(runs)
        left = sum(not run.finished for run in runs)
        again = f"{len(runs)} runs are not finished; go on with: {folder.go_on(self.root)}"
        return f"{self.root}: {left} of {again}" if left else ""

    def summary(self) -> dict[str, Any]:
        """Return the summary that `fedtide report` wrote."""
        return _summary(self.root)

    def verify(self) -> Iterator[Verdict]:
        """Check every file that the checkpoints count on."""
        return verify_runs(self._runs())


@dataclass(frozen=True, repr=False)
class FinishedWithout(Finished):
    """A finished experiment without a client, and each of its runs compared with that with the client."""

    comparisons: Sequence[Comparison] = ()

    def print(self, screen: Console) -> None:
        """Print the table, what was played again, and what cannot be taken back."""
        super().print(screen)
        for run in self.comparisons:
            for line in run.lines():
                say(line, screen)

    def as_json(self) -> dict[str, Any]:
        """Return the summary of the run folder, and the comparison."""
        return super().as_json() | {"comparisons": [asdict(run) for run in self.comparisons]}


@dataclass(frozen=True)
class UnlearningJob(RunJob):
    """A run folder that is played again without a client, in a new folder beside it."""

    leaving: Leaving | None = None

    @staticmethod
    def leave(leaving: Leaving, out: Path | None, workers: int | None, output: Output) -> "UnlearningJob":
        """Make the run folder without the client, or go on with that of an earlier command.

        Raises:
            FedtideError: something else is there.
        """
        root = out or leaving.place
        workers = processes_for(leaving.experiment, workers)
        if not leaving.began(root):
            folder.free(root)
            checked = _check(leaving.experiment, str(leaving.root))
            if line := check_room(checked.need, root):
                say(line, console(output))
            folder.create(leaving.experiment, root, scale="nano" if is_nano(leaving.root) else None)
        return UnlearningJob(root, workers, leaving=leaving)

    def result(self) -> FinishedWithout:
        """Read the finished runs, and compare them."""
        assert self.leaving is not None
        comparisons = self.leaving.compare(self.root)
        return FinishedWithout(self.root, report_of(self.root), read_finished(self.root), comparisons)


@dataclass(frozen=True)
class TuningJob(Job):
    """A tune folder: trials of the values that the `[tune]` table of an experiment names."""

    kind: ClassVar[str] = "tune folder"

    @staticmethod
    def create(experiment: Spelled, request: StudyRequest, count: int | None) -> "TuningJob":
        """Check an experiment with a `[tune]` table and both ends of every range, and make its tune folder.

        Args:
            experiment: its seeds are those of trials.
            request: how.
            count: trials for each method of every stage, in place of the number in the file.

        Raises:
            FedtideError: one line says what to mend.
        """
        folder_of(request, "")
        settings, where, name = read_study(experiment, request, timed=False)
        settings = with_budget(settings, where, trials=count, seeds=request.seeds)
        tune.imported_optuna()
        range_ends = list(ends(settings, where))
        base = from_dict(base_of(settings), where=where)
        processes_for(settings, request.workers)
        _check(base, where)
        for end, at_end in range_ends:
            with within(end):
                # Stacked clients need one method of the comparison that stacks, and here is one alone.
                preflight(at_end.model_copy(update={"fleet": Local()}), end, fresh=False)
        people = population_of(base, base.shift, seeds_of(settings)[0])
        if not any(view.name == "val" for view in views(people)):
            because = "trials are judged on validation rows, never on test rows"
            raise refused(f"{where}: data.split.val", base.data.split.val, "more than 0 with [tune]", because)
        root = folder_of(request, f"{name}-tune")
        tune.create(settings, root, request.scale)
        return TuningJob(root, request.workers)

    @cached_property
    def settings(self) -> Experiment:
        """The experiment in the folder's config.toml."""
        return tune.load(self.root)

    def play(self, screen: Console) -> bool:
        """Play the trials that are left."""
        workers = processes_for(self.settings, self.workers)
        return tune.execute(self.settings, self.root, workers=workers, display=tune.LiveTuning(screen))

    def result(self) -> FinishedTuning:
        """Read the trials."""
        ready = self._check_finished(tune.READY)
        experiment, stages = tune.read_tuning(self.root)
        return FinishedTuning(self.root, ready, self.root / "report.html", stages, experiment.score)

    def write_page(self, out: Path | None = None) -> Path:
        """Write the page about the trials."""
        return pages.write_tuning(self.root, out)


@dataclass(frozen=True)
class TournamentJob(Job):
    """The folder of a tournament: methods that an inspection nominates are compared on validation rows."""

    kind: ClassVar[str] = "tournament folder"

    @staticmethod
    def create(
        data: Any, request: Request = Request(), budget: str | float = "5m", roles: Roles = Roles()
    ) -> "TournamentJob":
        """Inspect data or a study, nominate methods, and make the folder of a tournament.

        Args:
            data: as `fedtide.inspect` takes it, or an experiment.
            request: how; the seeds are the tournament's own.
            budget: how long the tournament takes, such as "5m" or "90s", or seconds.
            roles: columns of data.

        Raises:
            FedtideError: one line says what to mend.
        """
        began = time.monotonic()
        try:
            seconds = seconds_of(budget)
        except ValueError as error:
            raise FedtideError(f"--budget: {error}") from None
        folder_of(request, "")
        if is_study(data):
            check_no_columns(roles)
            settings, where, name = read_study(data, request)
            if settings.rounds == 0:
                raise refused(f"{where}: rounds", 0, "1 or more, because methods that train are compared")
            processes_for(settings, request.workers)
            root = folder_of(request, f"{name}-recommend")
            tournament.begin_with_study(root, settings, where, seconds, began, request.scale)
        else:
            if options := [*request.sets, *([request.scale] if request.scale else [])]:
                raise refused("--set, --scale", options[0], "with a study (a TOML file or recipe:NAME)")
            findings = inspect_table(read_table(data, roles, "recommend"))
            root = folder_of(request, f"{slug(strip_endings(findings.table.name))}-recommend")
            tournament.begin_with_data(root, findings, seconds, began)
        return TournamentJob(root, request.workers)

    def play(self, screen: Console) -> bool:
        """Play the rungs that are left.

        Raises:
            TooShort: the budget was over before two methods could be compared; what was written is removed.
        """
        for line in tournament.read_tournament(self.root).said:
            say(line, screen)
        workers = processes_for(self.settings, self.workers)
        try:
            return tournament.execute(self.root, workers=workers, display=TerminalBars(screen))
        except tournament.TooShort:
            tournament.remove(self.root)
            raise

    def result(self) -> Recommendation:
        """Read the rungs."""
        study = self._check_finished(tournament.STUDY)
        record = tournament.read_tournament(self.root)
        return Recommendation(self.root, study, self.root / "report.html", record)

    def write_page(self, out: Path | None = None) -> Path:
        """Write the page about the rungs."""
        return pages.write_recommendation(self.root, out)

    def verify(self) -> Iterator[Verdict]:
        """Check the runs as far as the tournament played them."""
        return tournament.verify(self.root)


AnyJob = RunJob | TuningJob | TournamentJob


def of(root: str | Path, workers: int | None = None) -> AnyJob:
    """Return the job in a folder."""
    check_positive("--workers", workers)
    root = Path(root)
    if root.name in ("", ".."):  # a folder beside it, and the site above it, are told from its name
        root = root.resolve()
    if (root / "config.toml").is_file():
        if (root / tune.TRIALS).is_file():
            return TuningJob(root, workers)
        if (root / tournament.LADDER).is_file():
            return TournamentJob(root, workers)
    return RunJob(root, workers)


def leaving(root: Path, client: str) -> Leaving:
    """Look for a client that has to be forgotten in a run folder.

    Raises:
        FedtideError: it is another folder, or there is no such client.
    """
    job = of(root)
    if not isinstance(job, RunJob):
        raise refused("forget", str(root), "a run folder, or the folder of a site", f"it is a {job.kind}")
    return Leaving.of(job.root, client)


def play(job: AnyJob, output: Output = Output()) -> Any:
    """Play the rest of a job, write its page and print its result; None if a person stopped it, and all is saved."""
    remove_left_behind()
    screen = console(output)
    say(f"{job.kind}: {job.root}", screen)
    for file in folder.changed_code(job.root):
        say(f"{file}: was changed since {job.root} was made, and numbers may depend on it", screen)
    if code := session_code(as_json(job.settings)):
        verb = "is" if len(code) == 1 else "are"
        effect = "one process plays all, and it cannot be resumed in another"
        say(f"{listed(code)} {verb} of this Python session: {effect}", screen)
    with TURNS:
        if not job.play(screen):
            return None
        job.write_page()
        result = job.result()
    result.print(screen)
    return result


def finished(job: AnyJob, output: Output) -> Any:
    """Play the rest of a job and return its result; a stop raises KeyboardInterrupt."""
    result = play(job, output)
    if result is None:
        raise KeyboardInterrupt(f"stopped and saved; go on with: fedtide resume {in_shell(job.root)}")
    return result


def write_page(
    jobs: Sequence[AnyJob], out: Path | None = None, pictures: Path | None = None, tables: Path | None = None
) -> Path:
    """Write the page of a job, or one page about several run folders.

    Args:
        jobs: whose folders.
        out: the page; by default report.html in the folder, or here for several folders. Only an earlier page is
            replaced.
        pictures: a folder for every picture of run folders.
        tables: a folder for every table of run folders.
    """
    if not jobs:
        raise FedtideError("report: name at least one run folder")
    for job in jobs:
        if not isinstance(job, RunJob) and len(jobs) > 1:
            raise FedtideError(f"{job.root}: is a {job.kind}, which has a page by itself; allowed: run folders")
        if not isinstance(job, RunJob):
            for option, place in {"--figures": pictures, "--tables": tables}.items():
                if place is not None:
                    raise refused(option, str(place), "with run folders", f"{job.root} is a {job.kind}")
            return job.write_page(out)
    return write_report([job.root for job in jobs], out, pictures=pictures, saved_tables=tables)


def _check(experiment: Experiment, where: str) -> Preflight:
    """Build an experiment once, and raise for anything that would stop it."""
    check_measures(experiment, where)
    if experiment.track is not None:
        check_installed(experiment.track)
    checked = preflight(experiment, where)
    check_needed(experiment, checked.forms, where)
    return checked
