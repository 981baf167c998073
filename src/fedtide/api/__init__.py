"""A whole experiment, from its file to its report: what the command line and Python both do.

Docstrings of these functions are the help of the commands; sentences that begin with "In Python" are left out there.
Each function imports what it needs, because `fedtide --help` does not wait for anything that computes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtide.runs.job import Name, Output, Scale, Seeds, Sets, check_positive

if TYPE_CHECKING:
    from fedtide.api.jobs import Finished, FinishedTuning, Recommendation, Spelled
    from fedtide.data.population import Population
    from fedtide.inspection.findings import Findings
    from fedtide.inspection.preview import Shown
    from fedtide.laws.every import Verdict as LawVerdict
    from fedtide.runs.digest import Verdict as RunVerdict
    from fedtide.runs.trained import Trained


def run(
    experiment: "Spelled",
    out: str | Path | None = None,
    *,
    scale: Scale | None = None,
    sets: Sets = (),
    seeds: Seeds | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> "Finished":
    """Run an experiment: every method with every seed, in parallel, and write its report.

    Args:
        experiment: a TOML file, or recipe:NAME. In Python also an `Experiment` or nested dicts, in which functions,
            classes and rows of the session stand as they are: one process plays them, and no other session can resume
            the run.
        out: a new or empty folder for the results. By default runs/NAME.
        scale: size of a recipe: nano (seconds), cpu (minutes), paper (as published).
        sets: override a value, e.g. data.partition.alpha=0.1; may be repeated. Keys of methods apply to all of them
            (method.local.lr=0.1) or to one by name (method.FedAvg.local.lr=0.1). In Python a dict,
            `{"rounds": 10, "data.partition.alpha": 0.1}`.
        seeds: override the seeds, e.g. 0,1,2 or 0-4. In Python also a list, `[0, 1, 2]`.
        workers: number of processes; by default one for each core, and for a single run one, unless fleet.kind is
            "workers". The result does not depend on it.
        quiet: print nothing; by default the progress and the results are printed.

    Raises:
        FedtideError: one line says what to mend.
        KeyboardInterrupt: after Ctrl-C; everything is saved then.
    """
    from fedtide.api.jobs import RunJob, finished, request_of

    request = request_of(out, scale=scale, sets=sets, seeds=seeds, workers=workers)
    return finished(RunJob.create(experiment, request, Output(quiet)), Output(quiet))


def tune(
    experiment: "Spelled",
    out: str | Path | None = None,
    *,
    scale: Scale | None = None,
    sets: Sets = (),
    seeds: Seeds | None = None,
    trials: int | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> "FinishedTuning":
    """Search values of methods by accuracy on validation rows, and write an experiment file with the best ones.

    Args:
        experiment: a TOML file with a [tune] table, or recipe:NAME. In Python also an `Experiment` or nested dicts.
        out: a new or empty folder for the results. By default runs/NAME-tune.
        scale: size of a recipe: nano (seconds), cpu (minutes), paper (as published).
        sets: override a value, e.g. rounds=10; may be repeated. In Python a dict, `{"rounds": 10}`.
        seeds: seeds that every trial plays, e.g. 0,1,2 or 0-4; by default the first. In Python also a list.
        trials: number of trials for each method of every stage, in place of the number in the file.
        workers: number of processes; by default one for each core, and for a single run one.
        quiet: print nothing; by default the trials and the best values are printed.

    Raises:
        FedtideError: one line says what to mend.
        KeyboardInterrupt: after Ctrl-C; every finished trial is saved then.
    """
    from fedtide.api.jobs import TuningJob, finished, request_of

    request = request_of(out, scale=scale, sets=sets, seeds=seeds, workers=workers)
    return finished(TuningJob.create(experiment, request, trials), Output(quiet))


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
    time_format: str | None = None,
    without: Sequence[Name] | Name | None = None,
    scale: Scale | None = None,
    sets: Sets = (),
    workers: int | None = None,
    quiet: bool = False,
) -> "Recommendation":
    """Recommend methods for your own data, or among those of a study: a tournament on validation rows within a budget.

    Args:
        data: a file or several, as for fedtide inspect; or a study: a TOML file with two methods or more, or
            recipe:NAME. In Python also a data frame, as `ft.inspect` takes it, an `Experiment` or nested dicts with
            `method`.
        out: a new or empty folder for the results. By default runs/NAME-recommend.
        budget: how long inspection and tournament may take, e.g. 90s or 5m. In Python also seconds.
        label: label column; this and the arguments from client to without work as in fedtide inspect.
        client: column of the client; "" for none.
        time: column of the time, or the columns of a date divided by commas; "" for none.
        features: columns of the features, divided by commas.
        zone: time zone of hours and days, e.g. Europe/Berlin.
        time_format: how times are written, e.g. day-month-year.
        without: columns that are left out, divided by commas.
        scale: size of a recipe: nano (seconds), cpu (minutes), paper (as published).
        sets: override a value of a study, e.g. data.partition.alpha=0.1; may be repeated. In Python a dict.
        workers: number of processes; by default one for each core, and for a single run one.
        quiet: print nothing.

    Returns:
        The method with the highest score, methods that cannot be told apart from it, and a study of these for a proper
        run.

    Raises:
        FedtideError: one line says what to mend.
        KeyboardInterrupt: after Ctrl-C; everything is saved then.
    """
    from fedtide.api.jobs import TournamentJob, columns, finished, request_of

    names = {"label": label, "client": client, "time": time, "features": features, "without": without}
    roles = columns(zone=zone, time_format=time_format, **names)
    request = request_of(out, scale=scale, sets=sets, workers=workers)
    return finished(TournamentJob.create(data, request, budget, roles), Output(quiet))


def resume(
    run_folder: str | Path, *, seeds: Seeds | None = None, workers: int | None = None, quiet: bool = False
) -> "Finished | FinishedTuning | Recommendation":
    """Go on where a run, a tuning or a tournament was stopped or killed: the result is the same as without the stop.

    Args:
        run_folder: the run folder, or the folder of a tuning or a tournament. In Python the result of a finished one
            is returned at once.
        seeds: play more seeds, e.g. 0,1,2,3,4 or 0-4; the seeds of the run have to be among them, and the finished
            ones are not played again. In Python also a list.
        workers: number of processes; by default one for each core, and for a single run one.
        quiet: print nothing.

    Raises:
        FedtideError: one line says what to mend.
        KeyboardInterrupt: after Ctrl-C; everything is saved then.
    """
    from fedtide.api.jobs import finished, of

    return finished(of(run_folder, workers).resumed(Output(quiet), seeds=seeds), Output(quiet))


def forget(
    run_folder: str | Path,
    client: str | int,
    out: str | Path | None = None,
    *,
    workers: int | None = None,
    quiet: bool = False,
) -> "Finished | FinishedTuning | Recommendation":
    """Play a run folder again as if a client had never taken part: the bits are those of a run without it.

    The client is drawn as before and answers nothing, and no number is made of its rows (`data.without_clients`). The
    old folder stays as it is. If the client never answered, nothing is played.

    Args:
        run_folder: the run folder.
        client: name of the client in the data; its number, from 0, if clients have no names.
        out: the new folder; by default RUN_FOLDER-without-CLIENT. After a stop or a kill the same call goes on.
        workers: number of processes; by default one for each core, and for a single run one.
        quiet: print nothing.

    Returns:
        The results without the client, or those of the run folder if nothing was played.

    Raises:
        FedtideError: there is no such client, or the folder is none of simulated clients.
        KeyboardInterrupt: after Ctrl-C; everything is saved then.
    """
    from fedtide.api.jobs import UnlearningJob, finished, leaving

    departure = leaving(Path(run_folder), str(client))
    if departure.untouched:
        return results(run_folder)
    place = None if out is None else Path(out)
    return finished(UnlearningJob.leave(departure, place, workers, Output(quiet)), Output(quiet))


def write_report(*run_folders: str | Path, out: str | Path | None = None) -> Path:
    """Make the report of a run folder, a tuning or a tournament, or one page about several run folders.

    Args:
        run_folders: the folders.
        out: the page; by default report.html in the folder, or here for several folders. Only an earlier page is
            replaced.
    """
    from fedtide.api.jobs import of, write_page

    return write_page([of(root) for root in run_folders], None if out is None else Path(out))


def results(run_folder: str | Path) -> "Finished | FinishedTuning | Recommendation":
    """Return the results in a folder: printed they are a line, in a notebook their table and curve.

    Args:
        run_folder: the run folder, without its unfinished runs; or the folder of a finished tuning or tournament.

    Raises:
        FedtideError: it is none of these, or nothing in it is finished.
    """
    from fedtide.api.jobs import of

    return of(run_folder).result()


def verify(run_folder: str | Path) -> "list[RunVerdict]":
    """Check that a run folder is unchanged.

    Args:
        run_folder: the run folder, or the folder of a tournament; nothing in it is changed.

    Returns:
        A verdict for each run: `wrong` is None if its files are unchanged.
    """
    from fedtide.api.jobs import of

    return list(of(run_folder).verify())


def trained(
    run_folder: str | Path, method: str | None = None, seed: int | None = None, model: str | int | None = None
) -> "Trained":
    """Return the trained models of a run: `model()` is a module, `predict(x)` predicts as the run's evaluation does.

    Args:
        run_folder: the run folder; of a sweep the folder of one point.
        method: name of the method, if there are several.
        seed: by default the first.
        model: "last", "best" (by the validation rows, if the run keeps it), or the number of rounds of a kept model.
            By default the last.
    """
    from fedtide.runs.trained import Trained

    return Trained.read(Path(run_folder), method, seed, None if model is None else str(model))


def track(run_folder: str | Path, tracker: str | None = None) -> None:
    """Send the metrics of a run folder to TensorBoard, MLflow or Weights & Biases; steps already sent are skipped.

    Args:
        run_folder: the run folder; of unfinished runs the rounds so far are sent.
        tracker: tensorboard, mlflow or wandb, or one with its place, such as mlflow:http://localhost:5000; by default
            that of the run folder's [track].

    Raises:
        FedtideError: it is no run folder, no tracker is named, or its library is not installed.
    """
    from fedtide.config.settings import read_tracker
    from fedtide.tracking.feed import track as track_folder

    track_folder(Path(run_folder), None if tracker is None else read_tracker(tracker))


def show(
    shown: "Spelled | Population",
    *,
    scale: Scale | None = None,
    sets: Sets = (),
    seeds: Seeds | None = None,
    rounds: int | None = None,
    clients_per_round: int | None = None,
) -> "Shown":
    """Show before a run which client holds which rows, which clients are present when, and how the mix moves.

    Args:
        shown: a TOML file, or recipe:NAME; of a sweep its first point. In Python also an `Experiment`, nested dicts,
            or a population made by `ft.population`.
        scale: size of a recipe: nano, cpu, paper.
        sets: override a value, e.g. data.partition.alpha=0.1; may be repeated. In Python a dict.
        seeds: override the seeds; the first is shown.
        rounds: of a population, by default 100.
        clients_per_round: how many arrive; by default 10 of a population, else as many as the first method asks.

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
    from fedtide.api.jobs import read_study, request_of
    from fedtide.config import Method, points
    from fedtide.data.population import Population
    from fedtide.inspection.preview import Preview, Shown
    from fedtide.runs.build import check_cohort, cohort_size, population_of

    check_positive("show.rounds", rounds)
    check_positive("show.clients_per_round", clients_per_round)
    if isinstance(shown, Population):
        m = min(clients_per_round or 10, shown.registered)
        return Shown("Population", [Preview(shown, rounds or 100, m)])
    request = request_of(scale=scale, sets=sets, seeds=seeds)
    settings, where, _ = read_study(shown, request, request.seeds)
    first = points(settings, where)[0].experiment
    methods_by_shift = dict[str, list[Method]]()
    for method in first.method:
        methods_by_shift.setdefault(repr(first.shift_of(method)), []).append(method)
    previews = []
    for methods in methods_by_shift.values():
        people = population_of(first, first.shift_of(methods[0]), settings.seeds[0])
        people.check(first.rounds)
        for method in methods:
            check_cohort(method, people)
        cohort = min(clients_per_round or cohort_size(methods[0], people.registered), people.registered)
        names = [method.name for method in methods] if len(methods_by_shift) > 1 else []
        previews.append(Preview(people, rounds or first.rounds, cohort, first.timing.seconds or 1.0, names))
    return Shown(settings.title or where, previews)


def inspect(
    data: Any,
    *,
    label: Name | None = None,
    client: Name | None = None,
    time: Sequence[Name] | Name | None = None,
    features: Sequence[Name] | Name | None = None,
    zone: str | None = None,
    time_format: str | None = None,
    without: Sequence[Name] | Name | None = None,
    seed: int = 0,
) -> "Findings":
    """Find which shift your own data have: eight questions, each answered against the same data shuffled.

    Args:
        data: a CSV, ARFF, Parquet or NPZ file. Several files share a header, or each is one series. Or a study (a TOML
            file or recipe:NAME), whose clients' training rows are inspected. In Python also a data frame (pandas,
            polars, pyarrow), a mapping of columns, a population, an `Experiment` or nested dicts.
        label: label column; by default one with a name like label or target, else the last one that may be a label.
        client: column of the client; by default one with a name like user or station; "" for none.
        time: column of the time, or the columns of a date divided by commas (year,month,day,hour); by default the one
            with dates; "" for none.
        features: columns of the features, divided by commas; by default all other numbers but ids, row numbers and
            copies of columns.
        zone: time zone of hours and days, e.g. Europe/Berlin; by default clocks count as they are written.
        time_format: how times are written, e.g. day-month-year, excel or digits; by default as the cells tell.
        without: columns that are left out, divided by commas.
        seed: seed of the shuffles.

    Returns:
        The answers: printed they are eight lines, `findings["drift"]` is one of them, `findings.write(folder)` writes
        a page and a study.

    >>> import numpy as np
    >>> x, user = np.arange(400) % 7, np.repeat(range(20), 20)
    >>> findings = inspect({"x": x, "user": user, "label": (x > 3) == (user < 10)})
    >>> findings["meaning"].level, findings["labels"].level
    ('strong', 'no')
    """
    from fedtide.api.jobs import check_no_columns, columns, is_study, read_study, request_of
    from fedtide.inspection.findings import inspect_table
    from fedtide.inspection.table import of_study
    from fedtide.inspection.table import read as read_table

    names = {"label": label, "client": client, "time": time, "features": features, "without": without}
    roles = columns(zone=zone, time_format=time_format, **names)
    study = data[0] if isinstance(data, list) and len(data) == 1 else data
    if is_study(study):
        check_no_columns(roles)
        settings, where, _ = read_study(study, request_of())
        return inspect_table(of_study(settings, where), settings.seeds[0])
    return inspect_table(read_table(data, roles), seed)


def check(algorithm: str, *, sets: Sets = ()) -> "list[LawVerdict]":
    """Check an algorithm on a toy federation against the laws: property tests that all algorithms have to pass.

    Args:
        algorithm: your own module:function, or a registered name.
        sets: override a value of the toy experiment, e.g. method.mu=0.1 or model.kind=linear; may be repeated. In
            Python a dict.

    Returns:
        A verdict for each law: `broken` is None if it holds, `silent` is the reason if it was not checked.
    """
    from fedtide.api.jobs import assignments
    from fedtide.core.errors import refused
    from fedtide.laws.every import check as check_laws

    if not isinstance(algorithm, str):
        raise refused(
            "check.algorithm", algorithm, "module:function of a module that can be imported, or a registered name"
        )

    return list(check_laws(algorithm, assignments(sets)))
