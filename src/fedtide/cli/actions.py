"""Commands that play, that look before a run, and that read a folder."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from fedtide.core.errors import FedtideError, refused
from fedtide.report.terminal import console, say, tell
from fedtide.runs.job import Assignments, ExactKind, Output, Request, RunRequest, Scale, StudyRequest, check_positive

Format = Literal["safetensors", "onnx", "torch-export"]
"""Kinds of `fedtide.runs.export.Format`."""

FULL = ("No space left on device", "Disk quota exceeded", "File too large")
"""Messages of the system if a file cannot grow."""


@Parameter(name="*")
@dataclass(frozen=True)
class ColumnNames:
    """Columns of data, as `fedtide.inspect` describes them.

    Args:
        label: label column; by default the one with that name, or the last.
        client: column of the client; by default one with a name like user or station; "" for none.
        time: column of the time, or the columns of a date divided by commas (year,month,day,hour); by default the one
            with dates; "" for none.
        features: columns of the features, divided by commas; by default all other numbers.
        zone: time zone of hours and days, e.g. Europe/Berlin; by default times are taken as they are, in UTC if they
            name a zone.
        without: columns that are left out, divided by commas.
    """

    label: str | None = None
    client: str | None = None
    time: str | None = None
    features: str | None = None
    zone: str | None = None
    without: str | None = None


@Parameter(name="*")
@dataclass(frozen=True)
class ModelChoice:
    """One of the models of a run.

    Args:
        method: name of the method, if there are several.
        seed: by default the first.
        client: the model of this client, with its own memory, and its own rows to adapt on; by default the model of a
            new client.
        cluster: number of a network of the server instead: of a cluster, component or branch.
    """

    method: str | None = None
    seed: int | None = None
    client: int | None = None
    cluster: int | None = None


# -- playing -----------------------------------------------------------------------------------------------------------


def run(experiment: str, /, *, request: RunRequest = RunRequest(), output: Output = Output()) -> int:
    """Command of `fedtide.run`."""
    from fedtide.api.jobs import RunJob

    return _play(RunJob.create(experiment, request, output), output)


def tune(
    experiment: str, /, *, request: StudyRequest = StudyRequest(), trials: int | None = None, output: Output = Output()
) -> int:
    """Command of `fedtide.tune`."""
    from fedtide.api.jobs import TuningJob

    check_positive("--trials", trials)
    return _play(TuningJob.create(experiment, request, trials), output)


def recommend(
    data: list[str],
    /,
    *,
    budget: Annotated[str, Parameter(allow_leading_hyphen=True)] = "5m",
    names: ColumnNames = ColumnNames(),
    request: Request = Request(),
    output: Output = Output(),
) -> int:
    """Command of `fedtide.recommend`."""
    from fedtide.api.jobs import TournamentJob, columns, is_study

    study = next(filter(is_study, data), None)
    if study is not None and len(data) > 1:
        raise refused("recommend", study, "one study, or data")
    paths = [Path(path) for path in data]
    return _play(TournamentJob.create(study or paths, request, budget, columns(**vars(names))), output)


def resume(
    run_folder: Path,
    /,
    *,
    seeds: str | None = None,
    workers: int | None = None,
    fleet: ExactKind | None = None,
    address: str | None = None,
    output: Output = Output(),
) -> int:
    """Command of `fedtide.resume`.

    Args:
        fleet: engine of the clients' work, in place of the run folder's; it may be another than before.
        address: address of a Ray cluster's head node, e.g. 10.0.0.1:6379 or auto.
    """
    from fedtide.api.jobs import of

    job = of(run_folder, workers).resumed(output, seeds=seeds, fleet=fleet, address=address)
    return _play(job, output)


def init(study: Path = Path("study.toml"), /) -> int:
    """Write a study to begin with: a file that runs as it stands, with comments about its keys.

    Args:
        study: the file; it must not exist. For data of your own, fedtide inspect writes one.
    """
    from fedtide.core.atomic import check_free, write_text

    check_free(study)
    write_text(study, files("fedtide.config").joinpath("study.toml").read_text(encoding="utf-8"))
    say(f"study: {study}")
    say(f"next: fedtide run {study}")
    return 0


def _play(job: Any, output: Output) -> int:
    """Play the rest of a job and print the path of its report, or after a stop how to go on; return the exit status."""
    from fedtide.api.jobs import play
    from fedtide.fleets.this_machine import keep_freed

    keep_freed()
    # As it was started: the shell may not find the command of `make demo`.
    module = "python -m fedtide" if sys.argv[0].endswith("fedtide/__main__.py") else ""
    again = f"{module or ('fedtide' if shutil.which('fedtide') else sys.argv[0])} resume {job.root}"
    try:
        result = play(job, output)
    except KeyboardInterrupt:
        print(f"fedtide: interrupted; go on from what was saved with: {again}", file=sys.stderr)
        return 130
    except (OSError, FedtideError) as error:
        if not is_full(str(error)) or not (job.root / "config.toml").is_file():
            raise
        line = f"{error.filename or job.root}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise FedtideError(f"{line}; make room, and go on with: {again}") from None
    if result is None:
        say(f"stopped and saved; go on with: {again}", console(output))
        return 130
    report = result.report.resolve()
    say(f"report: {report}", console(output))
    tell({"report": report, **result.as_json()}, output)
    return 0


def is_full(line: str) -> bool:
    """Tell whether an error says that a file cannot grow.

    >>> is_full("[Errno 27] File too large: 'rounds.jsonl'")
    True
    """
    return any(message in line for message in FULL)


# -- looking -----------------------------------------------------------------------------------------------------------


def show(
    experiment: str,
    /,
    *,
    out: Path = Path("show.html"),
    scale: Scale | None = None,
    sets: Assignments = (),
    seeds: str | None = None,
    output: Output = Output(),
) -> int:
    """Command of `fedtide.show`.

    Args:
        experiment: a TOML file, or recipe:NAME; of a sweep its first point is shown.
        out: the page.
    """
    from fedtide import api

    previews, screen = api.show(experiment, scale=scale, sets=sets, seeds=seeds), console(output)
    lines = repr(previews).splitlines()
    for line in lines:
        say(line, screen)
    previews.write(out)
    say(f"page: {out}", screen)
    tell({"page": out, "lines": lines}, output)
    return 0


def inspect(
    data: list[Path], /, *, names: ColumnNames = ColumnNames(), out: Path | None = None, output: Output = Output()
) -> int:
    """Command of `fedtide.inspect`. It writes a page with pictures, and a study that is ready to run.

    Args:
        out: the folder that is made; it must not exist. By default runs/NAME-inspect.
    """
    from fedtide import api
    from fedtide.config import slug
    from fedtide.core.atomic import check_new
    from fedtide.data.sources.files import strip_endings
    from fedtide.inspection.findings import STUDY
    from fedtide.runs import folder

    if not data:
        raise FedtideError("inspect: name a CSV, ARFF, Parquet or NPZ file")
    if out is not None:
        check_new(out)
    findings = api.inspect(data, **vars(names))
    screen = console(output)
    for line in str(findings).splitlines():
        say(line, screen)
    page = findings.write(out or folder.unused(Path("runs"), f"{slug(strip_endings(data[0].name))}-inspect"))
    study = next(page.parent.glob(STUDY), None)
    if study is not None:
        say(f"study: {study}", screen)
    elif not findings.table.simulated:
        say("no study: no columns of features are left, without which there is no model", screen)
    say(f"page: {page.resolve()}", screen)
    answers = [asdict(answer) for answer in findings]
    tell({"answers": answers, "notes": findings.notes, "study": study, "page": page.resolve()}, output)
    return 0


def check(algorithm: str, /, *, sets: Assignments = (), output: Output = Output()) -> int:
    """Command of `fedtide.check`. The exit status is 1 if one does not hold."""
    from fedtide.laws.every import check as check_laws

    broken = checked = 0
    screen, laws = console(output), []
    for verdict in check_laws(algorithm, sets):
        law = verdict.law
        laws.append({"law": law.name, "says": law.says, "broken": verdict.broken, "silent": verdict.silent})
        checked += verdict.silent is None
        broken += verdict.broken is not None
        mark = "BROKEN" if verdict.broken else "ok" if verdict.silent is None else "-"
        say(f"{mark:6}  {law.name:12}{law.says}", screen)
        for line in filter(None, (verdict.broken, verdict.silent)):
            say(f"{'':20}{line}", screen)
    say(f"{algorithm}: {checked - broken} of {checked} laws hold", screen)
    tell({"algorithm": algorithm, "laws": laws}, output)
    return 1 if broken else 0


# -- reading -----------------------------------------------------------------------------------------------------------


def report(
    run_folders: list[Path],
    /,
    *,
    out: Path | None = None,
    figures: Path | None = None,
    tables: Path | None = None,
    output: Output = Output(),
) -> int:
    """Command of `fedtide.write_report`.

    Args:
        figures: a directory for every picture of run folders as SVG and PDF; it may be that of the tables.
        tables: a directory for every table of run folders as CSV and LaTeX.
    """
    from fedtide.api.jobs import of, write_page

    if not run_folders:
        raise FedtideError("report: name at least one run folder")
    screen, jobs = console(output), [of(root) for root in run_folders]
    for line in filter(None, (job.unfinished() for job in jobs)):
        say(line, screen)
    page = write_page(jobs, out, figures, tables)
    say(f"report: {page}", screen)
    tell({"report": page, "folders": [job.summary() for job in jobs]}, output)
    return 0


def verify(run_folder: Path, /, *, output: Output = Output()) -> int:
    """Command of `fedtide.verify`. The exit status is 1 if a file was changed."""
    from fedtide.api.jobs import of

    changed = 0
    screen, lines = console(output), []
    for verdict in of(run_folder).verify():
        lines.append({"run": verdict.run.title, "rounds": verdict.rounds, "wrong": verdict.wrong})
        changed += verdict.wrong is not None
        line = f"whole, {verdict.rounds} of {verdict.run.experiment.rounds} rounds are saved"
        if verdict.wrong is not None:
            line = f"{verdict.wrong}; its records are whole up to round {verdict.rounds}"
        say(f"{verdict.run.title}: {line}", screen)
    tell({"runs": lines}, output)
    return 1 if changed else 0


def track(run_folder: Path, tracker: str | None = None, /, *, output: Output = Output()) -> int:
    """Command of `fedtide.track`."""
    from fedtide.config.settings import read_tracker
    from fedtide.tracking.feed import track as track_folder

    runs = track_folder(run_folder, None if tracker is None else read_tracker(tracker))
    say(f"{len(runs)} run{'s' * (len(runs) != 1)} tracked", console(output))
    tell({"folder": run_folder, "runs": [run.title for run in runs]}, output)
    return 0


def export(run_folder: Path, /, *, format: Format, choice: ModelChoice = ModelChoice(), out: Path | None = None) -> int:
    """Write a model of a run to a file that other programs read; a program is checked first.

    Args:
        run_folder: the run folder (of a sweep, the folder of one point). Or the folder of a node of real clients, for
            its last evaluated model.
        format: weights by name (safetensors), or a program that takes rows as the model sees them and returns
            log-probabilities (torch-export, onnx).
        out: the file; it must not exist. By default METHOD-SEED or NODE here.
    """
    from fedtide.config import slug
    from fedtide.core.atomic import check_free
    from fedtide.runs.export import ENDINGS, Model, check_onnx
    from fedtide.runs.export import export as write
    from fedtide.runs.trained import Trained
    from fedtide.site.work import model_at_node

    if format == "onnx":
        check_onnx()
    if _is_node(run_folder, choice):
        name, model = model_at_node(run_folder, choice.client)
    else:
        trained = Trained.read(run_folder, choice.method, choice.seed)
        parts = {"client": choice.client, "cluster": choice.cluster}
        part = "".join(f"-{key}-{number}" for key, number in parts.items() if number is not None)
        name, model = f"{slug(trained.run.method.name)}-{trained.run.seed}{part}", Model.of(trained, **parts)
    file = out or Path(f"{name}{ENDINGS[format]}")
    check_free(file)
    line = write(model, file, format)
    say(f"{model.about['run']}, after round {model.about['rounds']}: {line}")
    say(f"export: {file}")
    return 0


def predict(
    run_folder: Path, rows: Path, /, *, choice: ModelChoice = ModelChoice(), out: Path = Path("predictions.csv")
) -> int:
    """Predict the rows of a file with a model of a run, as its evaluation does: classes and probabilities as CSV.

    Args:
        run_folder: the run folder (of a sweep, the folder of one point). Or the folder of a node of real clients, which
            predicts as in its last evaluation.
        rows: a CSV file with the features of the run's rows, or an NPZ file with the features as x. For a run of
            series: a file of series, to forecast.
        out: the file; it must not exist.
    """
    from fedtide.runs.export import predict_file
    from fedtide.runs.trained import Trained
    from fedtide.site.work import predict_at_node

    if _is_node(run_folder, choice):
        done = predict_at_node(run_folder, rows, out, choice.client)
        title, last, count = f"{done.node}, client {done.client}", done.round, done.rows
    else:
        trained = Trained.read(run_folder, choice.method, choice.seed)
        count = predict_file(trained, rows, out, client=choice.client, cluster=choice.cluster)
        title, last = trained.run.title, trained.moment.round
    say(f"{title}, after round {last + 1}: {count} rows predicted")
    say(f"predictions: {out}")
    return 0


def _is_node(folder: Path, choice: ModelChoice) -> bool:
    """Tell whether a folder is that of a node of real clients; raise for an option that a node does not have."""
    if not any(folder.glob("*.ticket")):
        return False
    for name, value in vars(choice).items():
        if value is not None and name != "client":
            raise refused(f"--{name}", value, "none at a node, which has one model")
    return True
