"""Federated learning when the data will not hold still.

Simulate a federation whose clients differ and come and go with the hour.
Compare methods over seeds, and read one report that shows the effects of the
shift and the method that coped.

    fedtide init study.toml        write a study to begin with
    fedtide recipes                list what ships with the package
    fedtide run recipe:demo        run a recipe
    fedtide show study.toml        see which client holds which rows, and when
    fedtide run study.toml         run your own experiment
    fedtide tune study.toml        search its learning rates and the like
    fedtide resume runs/study      go on after a stop or a crash
    fedtide forget runs/study 7    play it again as if client 7 never was
    fedtide report runs/study      make the report again
    fedtide track runs/study ...   send metrics to TensorBoard, MLflow, W&B
    fedtide watch runs/study       report drift of a watched run or site
    fedtide inspect data.csv       find which shift your own data have
    fedtide recommend data.csv     find which methods may help with it
    fedtide export runs/study      write a model for other programs
    fedtide predict runs/study ... predict the rows of a file
    fedtide check mine:fednova     check your own algorithm against the laws
    fedtide algorithms             list the algorithms; models and keys likewise
    fedtide deploy study.toml ...  make a site for real clients, who join it

Exit status: 0 done; 1 a check failed (check, verify, replay, rehearse);
2 wrong input, and one line says what; 130 stopped by Ctrl-C.
"""

import io
import logging
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)  # fmt: skip
from rich.console import Console
from rich.table import Table

from fedtide import api
from fedtide._version import installed
from fedtide.core.docstrings import docstring
from fedtide.core.errors import FedtideError, Words, in_shell, refused, shown, unknown
from fedtide.draw.prose import counted
from fedtide.fields.vocabulary import Family, nearest
from fedtide.report.terminal import Screen, console, flush, say, tell
from fedtide.runs import job
from fedtide.runs.job import (
    Asked,
    Assignments,
    ExactKind,
    Format,
    Output,
    Request,
    RunRequest,
    Scale,
    StudyRequest,
    check_positive,
)
from fedtide.site import site_commands as deployment

BUDGET = "5m"
"""Budget of a tournament if nobody names one."""
FULL = ("No space left on device", "Disk quota exceeded", "File too large")
"""Messages of the system if a file cannot grow."""


@Parameter(name="*")
@dataclass(frozen=True)
class ColumnNames:
    """Columns of data, as `fedtide.inspect` describes them."""

    label: str | None = None
    client: str | None = None
    time: str | None = None
    features: str | None = None
    zone: str | None = None
    time_format: str | None = None
    without: str | None = None


ColumnNames.__doc__ = str(api.inspect.__doc__).partition(">>>")[0]  # its arguments have these names


@Parameter(name="*")
@dataclass(frozen=True)
class ModelChoice:
    """One of the models of a run.

    Args:
        method: name of the method, if there are several.
        seed: seed of the run; by default the first.
        client: name of a client in the data: its model, with its memory and rows to adapt on. Clients without names
            have numbers, which count from 0. By default the model of a new client.
        cluster: number of a network of the server instead: of a cluster, component or branch.
        model: last, best (by the validation rows, if the run keeps it), or the number of rounds of a kept model. By
            default the last.
    """

    method: str | None = None
    seed: int | None = None
    client: str | None = None
    cluster: int | None = None
    model: str | None = None


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
    budget: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    rounds: int | None = None,
    names: ColumnNames = ColumnNames(),
    request: Request = Request(),
    output: Output = Output(),
) -> int:
    """Command of `fedtide.recommend`.

    The folder of a site, in place of files, recommends between its real clients. After an inspection it writes the
    study of a tournament within a budget of rounds. After the tournament it writes the study of the methods that may
    be best.

    Args:
        budget: how long inspection and tournament may take, e.g. 90s or 10m; by default 5m. Not for a site.
        rounds: the rounds that the tournament of a site may take.
    """
    from fedtide.api.jobs import TournamentJob, columns, is_study

    if len(data) == 1 and (Path(data[0]) / "site.toml").is_file():
        return _recommend_at(Path(data[0]), budget, rounds, names, request, output)
    if rounds is not None:
        raise refused("--rounds", rounds, "with the folder of a site; other data have --budget")

    study = next(filter(is_study, data), None)
    if study is not None and len(data) > 1:
        raise refused("recommend", study, "one study alone, or data files", "there are other files beside it")
    paths = [Path(path) for path in data]
    return _play(TournamentJob.create(study or paths, request, budget or BUDGET, columns(**vars(names))), output)


def _recommend_at(
    root: Path, budget: str | None, rounds: int | None, names: ColumnNames, request: Request, output: Output
) -> int:
    """Recommend at a site; write the study that follows."""
    from fedtide.core.atomic import check_new, making
    from fedtide.report.terminal import print_table
    from fedtide.runs import folder
    from fedtide.site.recommending import recommended

    options = {
        "--budget": budget is not None,
        "--scale": request.scale,
        "--set": request.sets,
        "--workers": request.workers,
    }
    options |= {f"--{name.replace('_', '-')}": value is not None for name, value in vars(names).items()}
    if taken := [name for name, value in options.items() if value]:
        raise refused(taken[0], Words("a value"), "none with a site", "its study says it, and its clients play")
    out = request.out or folder.unused(Path("runs"), f"{root.resolve().name}-recommend")
    check_new(out)
    result = recommended(root, rounds, out / "study.toml")
    screen = console(output)
    for line in result.said:
        say(line, screen)
    if result.table is not None:
        print_table(result.table, screen)
        say(result.verdict, screen)
    with making(out) as temporary:
        (temporary / "study.toml").write_text(result.text, encoding="utf-8")
    say(f"study: {out / 'study.toml'}", screen)
    say(f"next: {result.next}", screen)
    rows = [] if result.table is None else result.table.rows
    tell({"study": out / "study.toml", "lines": result.said, "verdict": result.verdict, "table": rows}, output)
    return 0


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

    work = of(run_folder, workers).resumed(output, seeds=seeds, fleet=fleet, address=address)
    return _play(work, output)


def forget(
    folder: Path, client: str, /, *, out: Path | None = None, workers: int | None = None, output: Output = Output()
) -> int:
    """Command of `fedtide.forget`. Of a site it takes out a node with its clients, and sets the study back.

    Args:
        folder: the run folder, or the folder of a site.
        client: name of the client in the data; its number, from 0, if clients have no names. Of a site the name of a
            node.
        out: the new folder; by default FOLDER-without-CLIENT. After a stop or a kill the same command goes on. Not
            for a site.
    """
    if (folder / "site.toml").is_file():
        for name, value in {"--out": out, "--workers": workers}.items():
            if value is not None:
                raise refused(name, value, "none for a site, which is played again by fedtide serve")
        return deployment.forget(folder, client)
    from fedtide.api.jobs import UnlearningJob, leaving

    check_positive("--workers", workers)
    departure = leaving(folder, client)
    if departure.untouched:
        say(departure.nothing, console(output))
        tell({"folder": folder, "comparisons": []}, output)
        return 0
    return _play(UnlearningJob.leave(departure, out, workers, output), output)


def init(study: Path = Path("study.toml"), /) -> int:
    """Write a study to begin with: a file that runs as it stands, with comments about its keys.

    Args:
        study: the file; it must not exist. For data of your own, fedtide inspect writes one.
    """
    from fedtide.core.atomic import check_free, write_text

    check_free(study)
    write_text(study, files("fedtide.config").joinpath("study.toml").read_text(encoding="utf-8"), new=True)
    say(f"study: {study}")
    say(f"next: fedtide run {in_shell(study)}")
    return 0


def _play(work: Any, output: Output) -> int:
    """Play the rest of a job and print the path of its report, or after a stop how to go on; return the exit status."""
    from fedtide.api.jobs import play
    from fedtide.runs.runner import NothingTrained

    # As it was started: the shell may not find the command of `make demo`.
    module = "python -m fedtide" if sys.argv[0].endswith("fedtide/__main__.py") else ""
    command, root = module or ("fedtide" if shutil.which("fedtide") else sys.argv[0]), in_shell(work.root)
    again = f"{command} resume {root}"
    try:
        result = play(work, output)
    except KeyboardInterrupt:
        print(f"fedtide: interrupted; go on from what was saved with: {again}", file=sys.stderr)
        return 130
    except NothingTrained as error:
        raise FedtideError(f"{error}; a report of what was played: {command} report {root}") from None
    except (OSError, FedtideError) as error:
        if not is_full(str(error)) or not (work.root / "config.toml").is_file():
            raise
        line = _of_system(error, work.root) if isinstance(error, OSError) else str(error)
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
    out: Path | None = None,
    scale: Scale | None = None,
    sets: Assignments = (),
    seeds: str | None = None,
    output: Output = Output(),
) -> int:
    """Command of `fedtide.show`.

    Args:
        experiment: a TOML file, or recipe:NAME; of a sweep its first point is shown.
        out: the page; by default STUDY-show.html here. Only an earlier page is replaced.
    """
    from fedtide.config import slug
    from fedtide.inspection.preview import check_page

    out = out or Path(f"{slug(Path(experiment.removeprefix('recipe:')).stem)}-show.html")
    check_page(out)
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

    If DATA is the folder of a site whose study is the inspection, answers come from its real clients, and there is no
    page.

    Args:
        out: a new or empty folder for the page and the study. By default runs/NAME-inspect.
    """
    from fedtide.config import slug
    from fedtide.core.atomic import check_new
    from fedtide.data.sources.files import strip_endings
    from fedtide.inspection.findings import STUDY
    from fedtide.runs import folder

    if not data:
        raise FedtideError("inspect: name a CSV, ARFF, Parquet or NPZ file")
    if len(data) == 1 and (data[0] / "site.toml").is_file():
        if out is not None:
            raise refused("--out", str(out), "none with a site", "sums make no page")
        if taken := [name for name, value in vars(names).items() if value is not None]:
            raise refused(
                f"--{taken[0].replace('_', '-')}", getattr(names, taken[0]), "none with a site", "its study says it"
            )
        from fedtide.site.inspecting import inspected

        between = inspected(data[0])
        for line in str(between).splitlines():
            say(line, console(output))
        tell({"answers": [asdict(answer) for answer in between], "lines": between.table.said}, output)
        return 0
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
    say(f"{algorithm}: {checked - broken} of {checked} laws that were checked hold", screen)
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
        figures: a directory for every picture of run folders as SVG and PDF. Only pictures of an earlier report are
            replaced. Tables may share it.
        tables: a directory for every table of run folders as CSV and LaTeX.
    """
    from fedtide.api.jobs import of, write_page

    screen, jobs = console(output), [of(root) for root in run_folders]
    for line in filter(None, (work.unfinished() for work in jobs)):
        say(line, screen)
    page = write_page(jobs, out, figures, tables)
    say(f"report: {page}", screen)
    tell({"report": page, "folders": [work.summary() for work in jobs]}, output)
    return 0


def watch(
    folder: Path,
    /,
    *,
    follow: bool = False,
    on_alarm: str | None = None,
    method: str | None = None,
    seed: int | None = None,
) -> int:
    """Print the windows and alarms of a watched run or site, and write them to its page watch.html.

    Args:
        folder: the run folder, or the folder of a site.
        follow: go on until the last round, or Ctrl-C, with a line for each window and alarm, and write the page anew.
        on_alarm: a command with arguments, run for each alarm until it ends with status 0. It gets the alarm as JSON on
            its standard input. No shell reads it.
        method: name of the method, if several are watched; by default all.
        seed: one of the seeds; by default all.
    """
    from fedtide.api.watching import follow_runs
    from fedtide.report.watching import watched

    screen = console()
    page = follow_runs(folder, watched(folder, method, seed), screen, command=on_alarm, again=follow)
    say(f"page: {page}", screen)
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
            until = f"; its records are whole up to round {verdict.rounds}" if verdict.rounds else ""
            line = f"{verdict.wrong}{until}"
        say(f"{verdict.run.title}: {line}", screen)
    tell({"runs": lines}, output)
    return 1 if changed else 0


def track(run_folder: Path, tracker: str | None = None, /, *, output: Output = Output()) -> int:
    """Command of `fedtide.track`."""
    from fedtide.config.settings import read_tracker
    from fedtide.tracking.feed import track as track_folder

    runs = track_folder(run_folder, None if tracker is None else read_tracker(tracker))
    say(f"{counted(len(runs), 'run')} tracked", console(output))
    tell({"folder": run_folder, "runs": [run.title for run in runs]}, output)
    return 0


def export(run_folder: Path, /, *, format: Format, choice: ModelChoice = ModelChoice(), out: Path | None = None) -> int:
    """Write a model of a run to a file that other programs read; a program is checked first.

    Args:
        run_folder: the run folder (of a sweep, the folder of one point). Or the folder of a node of real clients, for
            a model that it was evaluated with.
        format: weights by name (safetensors), or a program (torch-export, onnx) that takes rows as the model sees them.
            It returns log-probabilities, or the columns of another target. Or a folder of adapters that PEFT reads
            (peft), or of a pretrained model with its adapters merged (merged).
        out: the file; it must not exist. By default METHOD-SEED or NODE here.
    """
    from fedtide.config import slug
    from fedtide.core.atomic import check_free
    from fedtide.runs.export import ENDINGS, Model, check_onnx
    from fedtide.runs.export import export as write
    from fedtide.runs.trained import Trained
    from fedtide.site.seat import model_at_node

    if format == "onnx":
        check_onnx()
    if _is_node(run_folder, choice):
        name, model = model_at_node(run_folder, choice.client, choice.model)
    else:
        trained = Trained.read(run_folder, choice.method, choice.seed, choice.model)
        parts = {"client": trained.find_client(choice.client), "cluster": choice.cluster}
        part = "".join(f"-{key}-{number}" for key, number in parts.items() if number is not None)
        part += "" if choice.model in (None, "last") else f"-{choice.model}"
        name, model = f"{slug(trained.run.method.name)}-{trained.run.seed}{part}", Model.of(trained, **parts)
    file = out or Path(f"{name}{ENDINGS[format]}")
    check_free(file, hint=" with --out")
    line = write(model, file, format)
    say(f"{model.about['run']}, after round {model.about['rounds']}: {line}")
    say(f"export: {file}")
    return 0


def predict(
    run_folder: Path,
    rows: Path,
    /,
    *,
    choice: ModelChoice = ModelChoice(),
    asked: Asked = Asked(),
    out: Path = Path("predictions.csv"),
) -> int:
    """Predict the rows of a file with a model of a run, as its evaluation does: classes and probabilities as CSV.

    Args:
        run_folder: the run folder (of a sweep, the folder of one point). Or the folder of a node of real clients, which
            predicts as in an evaluation.
        rows: a CSV, ARFF or Parquet file with the features of the run's rows, or an NPZ file with the features as x.
            A feature may be missing if the study has data.source.missing = "mean".
            For a run of series: a file of series, to forecast. For a run of texts: CSV, Parquet or JSON lines with
            the column of the text, or of the prompt; or a folder of texts.
        out: the file; it must not exist. A class or text that a spreadsheet would compute, such as =1+1, gets an
            apostrophe before it.
    """
    from fedtide.core.atomic import check_free
    from fedtide.runs.export import predict_file
    from fedtide.runs.trained import Trained
    from fedtide.site.seat import predict_at_node

    check_free(out, hint=" with --out")
    lines: tuple[str, ...] = ()
    if _is_node(run_folder, choice):
        asked.check_unasked("a node predicts rows with labels")
        title, last, count = predict_at_node(run_folder, rows, out, choice.client, choice.model)
    else:
        trained = Trained.read(run_folder, choice.method, choice.seed, choice.model)
        client = trained.find_client(choice.client)
        count, lines = predict_file(trained, rows, out, client=client, cluster=choice.cluster, asked=asked)
        names = trained.host.population.names
        whose = f" as client {names[client]}" if client is not None and client < len(names) else ""
        title, last = f"{trained.run.title}{whose}", trained.moment.round
    say(f"{title}, after round {last + 1}: {count} rows predicted")
    for line in lines:
        say(line)
    say(f"predictions: {out}")
    return 0


def _is_node(folder: Path, choice: ModelChoice) -> bool:
    """Tell whether a folder is that of a node of real clients; raise for an option that a node does not have."""
    if not any(folder.glob("*.ticket")):
        return False
    for name, value in vars(choice).items():
        if value is not None and name not in ("client", "model"):
            raise refused(f"--{name}", value, "none at a node, whose models are those of its study")
    return True


# -- listing -----------------------------------------------------------------------------------------------------------


def list_recipes(name: str | None = None, /) -> int:
    """List the recipes that ship with the package, or print one as TOML.

    Args:
        name: print this one.
    """
    if name is not None:
        sys.stdout.write(job.recipe(name).read_text(encoding="utf-8"))
        return 0
    table = Table("recipe", "scales", "what it shows", box=None, pad_edge=False)
    for path in job.recipes():
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        table.add_row(path.stem, " ".join(content.get("scale", {})) or "-", content.get("description", ""))
    console().print(table)
    return 0


def algorithms(name: str | None = None, /, *, family: Family | None = None) -> int:
    """List the algorithms, with their papers and what the server sees of a client; or describe one.

    Args:
        name: describe this one: its paper, its messages, its keys, and the laws from which it is exempt.
        family: list only these: one model (global), another server step (server-optimizer), branches of a network,
            components (mixture), models of clusters (clustered) or clients (personal), no federation (baseline).
    """
    from fedtide.algorithms import REGISTRY
    from fedtide.config.keys import source

    screen = console()
    if name is not None:
        if family is not None:
            raise refused("--family", family, "without the name of an algorithm")
        _describe(name, screen)
        return 0
    heads = ("algorithm", "family", "what it is", "paper", "the server sees, and what its cohort asks")
    table = Table(*heads, box=None, pad_edge=False)
    for algorithm, entry in REGISTRY.items():
        if family in (None, entry.family):
            about = source(algorithm)
            paper = f"{about.paper}, {about.year}" if about.paper else ""
            table.add_row(algorithm, entry.family, f"{about.title}: {about.summary}", paper, entry.sees)
    screen.print(table)
    return 0


def _describe(name: str, screen: Console) -> None:
    """Print the description of one algorithm."""
    from fedtide.algorithms import REGISTRY
    from fedtide.config.keys import about, keys_of, options, safe_form, tables_in

    if name not in REGISTRY:
        raise unknown("algorithms", name, list(REGISTRY))
    entry = REGISTRY[name]
    laws = [f"It is exempt from the law of {law}: {why}." for law, why in entry.exempt.items()]
    lines = (
        f"Family: {entry.family}.",
        f"Sends: {entry.sends}.",
        f"The server sees: {entry.sees}, and what its cohort asks.",
        f"Clients keep: {entry.keeps}.",
        f"safe = true: {safe_form(name).replace('`', '') or 'it has no other form'}.",
    )
    for line in (*about(name), *lines, *laws):
        screen.print(line)
    screen.print()
    _print_keys(keys_of(name), screen)
    tables = [f"fedtide keys method.{key}" for key, (kind, _) in options(name).items() if tables_in(kind)]
    if tables:
        screen.print(f"\nKeys of the tables: {', '.join(tables)}")


def keys(key: str = "", /) -> int:
    """List the keys of an experiment file, or of one of its tables: allowed values, defaults and meaning.

    Args:
        key: dotted, such as data.partition (every kind), data.partition.dirichlet (one kind), data.partition.alpha (one
            key) or method.local; without it the top of the file.
    """
    from fedtide.config.keys import sections

    screen = console()
    for number, section in enumerate(sections(key)):
        if number:
            screen.print()
        screen.print(section.title, style="bold")
        screen.print(section.about)
        if section.keys:
            _print_keys(section.keys, screen)
    if key in ("", "method"):
        screen.print("\nOf a table: fedtide keys TABLE. Of an algorithm: fedtide algorithms NAME.")
    return 0


def models(name: str | None = None, /) -> int:
    """List the models, or the keys of one.

    Args:
        name: list the keys of this one.
    """
    from fedtide.config.keys import sections, tables_in
    from fedtide.fields.shapes import tags
    from fedtide.models import Model

    if name is not None:
        names = [tags(model)[0] for model in tables_in(Model)]
        if name not in names:
            raise FedtideError(f"models: found '{name}', {nearest(name, names)}")
        return keys(f"model.{name}")
    table = Table("model", "what it is", "keys", box=None, pad_edge=False)
    for section, model in zip(sections("model"), tables_in(Model), strict=True):
        table.add_row(tags(model)[0], section.about, ", ".join(key.name for key in section.keys) or "-")
    console().print(table)
    return 0


def _print_keys(rows: list[Any], screen: Console) -> None:
    table = Table("key", "allowed", "default", "what it is", box=None, pad_edge=False)
    for key in rows:
        table.add_row(key.name, key.allowed, key.default, key.meaning)
    screen.print(table)


# -- the command line --------------------------------------------------------------------------------------------------

AGAIN = "; make room, and run the same command again"
commands, real = Group("Commands", sort_key=0), Group("Real clients", sort_key=1)
# Whatever takes long to import (computing, checks of configurations, drawing) is imported by the commands that need it:
# `--help`, and a line about a wrong option, come at once.
app = App(
    name="fedtide",
    help=__doc__,
    help_format="plaintext",
    version=installed,
    group_commands=commands,
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=()),  # options that turn off a default are not needed
)
app["--help"].group = "About"
app["--version"].group = "About"
app.register_install_completion_command(group="About")

OURS = (
    run, init, tune, recommend, resume, forget, report, watch, verify, track, export, predict, show, inspect, check,
    list_recipes, algorithms, keys, models,
)  # fmt: skip
OF_REAL_CLIENTS = "deploy rehearse serve admit invite status join replay rollback"

MEANT = {("join", "--out"): ("--home",), ("deploy", "--home"): ("--out",)}
"""By command and an option that it does not have, the option that is meant."""

RUNS_CODE: dict[str, str] = {
    **dict.fromkeys(("run", "tune", "show", "deploy"), "the experiment"),
    "check": "its argument",
    **dict.fromkeys(("inspect", "recommend"), "a study; a file of data names none"),
    **dict.fromkeys(("resume", "forget", "export", "predict", "replay"), "config.toml of the run folder"),
    **dict.fromkeys(("rehearse", "serve"), "study.toml of the site"),
}
"""Commands that run a person's code (`module:function`), and the place that names the code; others run none."""


def describe(name: str, command: Callable[..., int]) -> None:
    """Describe a command.

    Words of its function in Python, and of the arguments that both have, come before its own words.
    """
    ours, function = docstring(command.__doc__), getattr(api, "write_report" if name == "report" else name, None)
    texts, prose = ours.args, ours.prose
    if function is not None:
        theirs = docstring(function.__doc__)
        texts = {name: text.partition(" In Python")[0] for name, text in theirs.args.items()} | texts
        prose = theirs.prose.partition("\n\n")[0] + prose.partition("`.")[2]  # behind "Command of `fedtide.run`."
    lines = [f"    {name}: {texts[name]}" for name in signature(command).parameters if name in texts]
    # Without that, help would break lines where the source does.
    prose = "\n\n".join(" ".join(paragraph.split()) for paragraph in prose.split("\n\n"))
    code = f"Runs code (module:function) that is named in {RUNS_CODE[name]}." if name in RUNS_CODE else ""
    command.__doc__ = "\n".join([*filter(None, [prose, code and f"\n{code}"]), "", "Args:", *lines])
    for parameter in signature(command).parameters.values():
        for options in filter(is_dataclass, getattr(parameter.annotation, "__mro__", ())):
            about = docstring(options.__doc__)  # help breaks where its source does, so an argument is a line
            meanings = [f"    {key}: {meaning}" for key, meaning in about.args.items()]
            options.__doc__ = "\n".join([about.prose, "", "Args:", *meanings])


for group, functions in {
    commands: OURS, real: [getattr(deployment, name) for name in OF_REAL_CLIENTS.split()]
}.items():  # fmt: skip
    for command in functions:
        name = command.__name__.removeprefix("list_")
        describe(name, command)
        app.command(command, name=name, group=group)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exit status 2 and one line for anything a person can mend."""
    os.environ["MPLBACKEND"] = "agg"  # pictures are files; one that is set for screens may not exist here
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it would tell where it keeps fonts if HOME is read-only
    # Before NumPy is imported: its threads wait for each other in a loop, nine times the work on a busy machine.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:  # it was closed before we began
            setattr(sys, name, io.StringIO())
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot write
    try:
        _check_text(sys.argv[1:] if arguments is None else arguments)
        status = app(arguments, console=Screen(), exit_on_error=False, print_error=False, result_action="return_value")
    except FedtideError as error:
        status = _fail(str(error))
    except CycloptsError as error:
        status = _fail(_of_option(error))
    except KeyboardInterrupt as error:
        status = _fail(str(error) or "interrupted", status=130)
    except RuntimeError as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):  # in a class that is being made, before Python 3.12
            raise
        status = _fail("interrupted", status=130)
    except UnicodeEncodeError as error:
        status = _fail(f"{shown(error.object)}: cannot be written in this locale, allowed: UTF-8, as by LC_ALL=C.UTF-8")
    except ValueError as error:
        if "null" not in str(error):
            raise
        status = _fail("the name of a file or folder has the character NUL, allowed: names without it")
    except MemoryError as error:
        status = _fail(f"not enough memory: {error}" if str(error) else "not enough memory")
    except BrokenPipeError:  # what read the output has ended (`| head`)
        status = 0
    except OSError as error:
        status = _fail(_of_system(error, "input/output"))
    if line := flush(sys.stdout):
        status = _fail(line)
    flush(sys.stderr)
    sys.exit(status if isinstance(status, int) else 0)


def _of_system(error: OSError, place: object) -> str:
    """Describe an error of the system: of its file, of the output if that cannot be written, or of `place`."""
    if error.filename is None:
        return flush(sys.stdout) or f"{place}: {error.strerror or error}"
    no_folder = isinstance(error, FileExistsError | NotADirectoryError) and not Path(error.filename).is_dir()
    return f"{error.filename}: {'no folder, allowed: a folder' if no_folder else error.strerror or error}"


def _of_option(error: CycloptsError) -> str:
    """Describe an error of an option or argument in the words of all other errors."""
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        command = " ".join(["fedtide", *(error.command_chain or ())])
        return f"{error.keyword or error.argument.name}: no value given; {command} --help says what it is"
    if isinstance(error, CoercionError) and error.token is not None and error.argument is not None:
        name, value = error.token.keyword or error.argument.name, error.token.value
        if get_origin(error.target_type) is Literal:
            return str(unknown(name, value, get_args(error.target_type)))
        if error.target_type is int:
            return str(refused(name, value, "a whole number"))
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        return str(unknown("command", error.unused_tokens[0], [name for name in app if not name.startswith("-")]))
    if isinstance(error, UnknownOptionError):
        option, command = error.token.keyword or error.token.value, (error.command_chain or ("",))[-1]
        options = sorted(
            {name for argument in error.argument_collection for name in argument.names if name[:2] == "--"}
        )
        return str(unknown("option", option, options, MEANT.get((command, option), ())))
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        token = error.unused_tokens[0]
        but = f"; repeat the option for each value: --set {token}" if "=" in token else ""
        return f"{token}: is one argument too many{but}"
    return " ".join(str(error).split())


def _check_text(arguments: list[str]) -> None:
    """Raise for an argument that no file could hold: bytes that are no text in this locale."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise FedtideError(f"{argument}: is not UTF-8, or no text in this locale; allowed: UTF-8") from None


def _fail(line: str, status: int = 2) -> int:
    """Print an error, with advice if the disk is full, and return an exit status."""
    # Folders and files are made under another name first, which is not the one that was asked for.
    line = re.sub(r"\.(making-[0-9a-f]{16}|[0-9a-f]{16}\.writing)\b", "", line)
    line += AGAIN if is_full(line) and "make room" not in line and not line.startswith("standard output") else ""
    line += "; allow more (ulimit -n 4096), or play with fewer workers" if line.endswith("Too many open files") else ""
    with suppress(OSError):  # nobody can be told
        print(f"fedtide: {line}", file=sys.stderr)
    return status
