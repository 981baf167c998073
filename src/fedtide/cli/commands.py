"""The command line.

What takes long to import (what computes, checks configurations or draws) is imported by the commands that need it:
`--help`, and a line about a wrong option, come at once.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from cyclopts import App, CoercionError, CycloptsError, Group, MissingArgumentError, Parameter
from rich.console import Console
from rich.table import Table

from fedtide._version import installed
from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.fields.vocabulary import Family
from fedtide.report.terminal import Screen, console, say, tell
from fedtide.runs.request import ExactKind, FleetKind, Output, Request, Scale, recipe, recipes
from fedtide.site import site_commands as deployment

if TYPE_CHECKING:
    from fedtide.config import Experiment
    from fedtide.config.keys import Key

FULL = ("No space left on device", "Disk quota exceeded", "File too large")
"""What the system says where a file cannot grow."""
AGAIN = "; make room, and run the same command again"
HELP = """Federated learning when the data will not hold still.

Simulate a federation whose clients differ and come and go with the hour;
compare methods over seeds; read one report that shows what the shift did
and which method coped.

    fedtide init study.toml        write a study to begin with
    fedtide recipes                list what ships with the package
    fedtide run recipe:demo        run a recipe
    fedtide show study.toml        see who holds what, and when, before a run
    fedtide run study.toml         run your own experiment
    fedtide tune study.toml        search its learning rates and the like
    fedtide resume runs/study      go on after a stop or a crash
    fedtide report runs/study      make the report again
    fedtide track runs/study ...   tell TensorBoard, MLflow or W&B of it
    fedtide inspect data.csv       tell which shift your own data have
    fedtide recommend data.csv     and which methods may help with it
    fedtide export runs/study      write a model for other programs
    fedtide predict runs/study ... predict the rows of a file
    fedtide check mine:fednova     check your own algorithm against the laws
    fedtide algorithms             list the algorithms; models and keys likewise
    fedtide deploy study.toml ...  make a site for real clients, who join it

Exit status: 0 done, 1 a law, a file or a replay is not as it should be,
2 something to mend (one line says what), 130 stopped by Ctrl-C.
"""

commands = Group("Commands", sort_key=0)
real = Group("Real clients", sort_key=1)
app = App(
    name="fedtide",
    help=HELP,
    help_format="plaintext",
    version=installed,
    group_commands=commands,
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=()),  # what is not asked for needs no option of its own
)
app["--help"].group = "About"
app["--version"].group = "About"
app.register_install_completion_command(group="About")


for command in (
    deployment.deploy,
    deployment.rehearse,
    deployment.serve,
    deployment.admit,
    deployment.invite,
    deployment.status,
    deployment.join,
    deployment.replay,
):
    app.command(command, group=real)

Options = Annotated[
    Request, Parameter(name="*", name_transform=lambda field: {"sets": "set"}.get(field, field), negative=())
]
"""Options that `run` and `tune` share, one for each field."""
Telling = Annotated[Output, Parameter(name="*", negative=())]
"""Options of commands that find something."""


@app.command
def run(
    experiment: str,
    /,
    *,
    request: Options = Request(),
    fleet: FleetKind | None = None,
    address: str | None = None,
    output: Telling = Output(),
) -> int:
    """Run an experiment: every method with every seed, in parallel, and write its report.

    Args:
        experiment: a TOML file, or recipe:NAME.
        fleet: what runs the clients' work, in place of fleet.kind: local, workers and ray give the same bits, stacked
            differs from them in rounding, and auto measures.
        address: of a Ray cluster's head node, as fleet.address in the file, e.g. 10.0.0.1:6379 or auto; without it one
            is started on this machine, which ends with the command.
    """
    from fedtide import api
    from fedtide.runs import folder

    _positive("--workers", request.workers)
    made = api.prepare(experiment, replace(request, sets=[*request.sets, *_fleet_sets(fleet, address)]))
    if made.said:
        say(made.said, console(output))
    _say_room(made.settings, made.root, made.where, output)
    folder.create(made.settings, made.root, made.where, request.scale)
    return _play(made.settings, made.root, made.workers, output)


@app.command
def init(study: Path = Path("study.toml"), /) -> int:
    """Write a study to begin with: a file that runs as it stands, and says what else may stand in it.

    Args:
        study: the file; it must not exist. For data of your own, fedtide inspect writes one.
    """
    from fedtide.core.atomic import check_free, write_text

    check_free(study)
    write_text(study, files("fedtide.config").joinpath("study.toml").read_text(encoding="utf-8"))
    say(f"study: {study}")
    say(f"next: fedtide run {study}")
    return 0


@app.command
def tune(
    experiment: str,
    /,
    *,
    request: Options = Request(),
    trials: int | None = None,
    output: Telling = Output(),
) -> int:
    """Search values of methods by accuracy on validation rows, and write an experiment file with what was found.

    Args:
        experiment: a TOML file with a [tune] table, or recipe:NAME.
        trials: for each method of every stage.
    """
    from fedtide import api
    from fedtide.tuning import folder as tunings

    _positive("--trials", trials)
    _positive("--workers", request.workers)
    made = api.prepare_tuning(experiment, request, trials)
    tunings.create(made.settings, made.root)
    return _tune(made.root, request.workers, output)


@app.command
def resume(
    run_folder: Path,
    /,
    *,
    seeds: str | None = None,
    workers: int | None = None,
    fleet: ExactKind | None = None,
    address: str | None = None,
    output: Telling = Output(),
) -> int:
    """Go on where a run was stopped or killed: the result is the same as if it had not been.

    Args:
        run_folder: the run folder, or the folder of a tuning or a tournament.
        seeds: play more seeds than were asked for, e.g. 0,1,2,3,4 or 0-4; those that are finished are not played again.
        workers: processes; by default the machine's cores.
        fleet: what runs the clients' work, in place of what the run folder says; it may be another than before.
        address: of a Ray cluster's head node, e.g. 10.0.0.1:6379 or auto.
    """
    from fedtide.runs import folder
    from fedtide.tuning import folder as tunings
    from fedtide.tuning import tournament as tournaments

    _positive("--workers", workers)
    if tunings.is_tuning(run_folder):
        if fleet is not None or address is not None:
            raise FedtideError(f"--fleet: {run_folder} is a tune folder, whose fleet is that of its config.toml")
        if seeds is not None:
            raise FedtideError(f"--seeds: {run_folder} is a tune folder, whose seeds are those of its config.toml")
        return _tune(run_folder, workers, output)
    if tournaments.is_tournament(run_folder):
        _check_as_begun(run_folder, "a tournament", fleet=fleet, address=address, seeds=seeds)
        return _recommend(run_folder, workers, output)
    sets = _fleet_sets(fleet, address)
    kind = folder.load(run_folder).fleet.kind
    if fleet is not None and kind == "stacked":
        raise refused("--fleet", fleet, f"none, as {run_folder} is stacked and has other last bits")
    settings = folder.load(run_folder, sets)  # before more seeds are written down
    if seeds is not None:
        _say_room(folder.extended(run_folder, seeds), run_folder, str(run_folder), output)
        settings = folder.load(run_folder, sets)
    return _play(settings, run_folder, workers, output)


def _check_as_begun(root: Path, what: str, **given: str | None) -> None:
    """Raise for an option that would change what goes on as it began."""
    if name := next((name for name, value in given.items() if value), None):
        raise FedtideError(f"--{name}: {root} is the folder of {what}, which goes on as it began")


@app.command
def check(
    algorithm: str,
    /,
    *,
    set_: Annotated[list[str], Parameter(name="--set", show_default=False)] = [],  # noqa: B006 - never changed
    output: Telling = Output(),
) -> int:
    """Check an algorithm against the laws on a toy federation; exit status 1 where one does not hold.

    Args:
        algorithm: your own module:function, or a registered name.
        set_: override a value of the toy experiment, e.g. --set method.mu=0.1 or --set model.kind=linear; may be
            repeated.
    """
    from fedtide.laws.check import check as verdicts

    broken = checked = 0
    screen, found = console(output), []
    for verdict in verdicts(algorithm, set_):
        law = verdict.law
        found.append({"law": law.name, "says": law.says, "broken": verdict.broken, "silent": verdict.silent})
        checked += verdict.silent is None
        broken += verdict.broken is not None
        mark = "BROKEN" if verdict.broken else "ok" if verdict.silent is None else "-"
        say(f"{mark:6}  {law.name:12}{law.says}", screen)
        for line in (verdict.broken, verdict.silent):
            if line:
                say(f"{'':20}{line}", screen)
    say(f"{algorithm}: {checked - broken} of {checked} laws hold", screen)
    tell({"algorithm": algorithm, "laws": found}, output)
    return 1 if broken else 0


@app.command
def verify(run_folder: Path, /, *, output: Telling = Output()) -> int:
    """Look whether a run folder is what was written; exit status 1 where a file is not.

    Args:
        run_folder: the run folder, or the folder of a tournament; nothing in it is changed.
    """
    from fedtide import api

    damaged = 0
    screen, found = console(output), []
    for verdict in api.verdicts(run_folder):
        found.append({"run": verdict.run.title, "rounds": verdict.rounds, "wrong": verdict.wrong})
        damaged += verdict.wrong is not None
        whole = f"whole, {verdict.rounds} of {verdict.run.experiment.rounds} rounds are saved"
        if verdict.wrong is not None:
            whole = f"{verdict.wrong}; its records are whole up to round {verdict.rounds}"
        say(f"{verdict.run.title}: {whole}", screen)
    tell({"runs": found}, output)
    return 1 if damaged else 0


@app.command
def export(
    run_folder: Path,
    /,
    *,
    format: Literal["safetensors", "onnx", "torch-export"],
    method: str | None = None,
    seed: int | None = None,
    client: int | None = None,
    cluster: int | None = None,
    out: Path | None = None,
) -> int:
    """Write a model of a run to a file that other programs read; one that is a program is checked first.

    Args:
        run_folder: the run folder, with a sweep that of one point; or the folder of a node of real clients, for the
            model that it was evaluated with last.
        format: weights by name (safetensors), or a program that takes rows as the model sees them and returns
            log-probabilities (torch-export, onnx).
        method: name of the method, where there are several.
        seed: by default the first.
        client: the model by which this client predicts, with what it keeps; by default that of a new client.
        cluster: number of a network of the server instead: of a cluster, component or branch.
        out: the file; it must not exist. By default METHOD-SEED or NODE here.
    """
    from fedtide.config import slug
    from fedtide.core.atomic import check_free
    from fedtide.runs.export import ENDINGS, Model, check_onnx
    from fedtide.runs.export import export as write
    from fedtide.runs.trained import Trained

    if format == "onnx":
        check_onnx()
    if any(run_folder.glob("*.ticket")):
        from fedtide.site.node_predict import model_at_node

        _check_none(method=method, seed=seed, cluster=cluster)
        name, model = model_at_node(run_folder, client)
    else:
        trained = Trained.read(run_folder, method, seed)
        part = f"-client-{client}" * (client is not None) + f"-cluster-{cluster}" * (cluster is not None)
        name = f"{slug(trained.run.method.name)}-{trained.run.seed}{part}"
        model = Model.of(trained, client, cluster)
    file = out or Path(f"{name}{ENDINGS[format]}")
    check_free(file)
    said = write(model, file, format)
    say(f"{model.about['run']}, after round {model.about['rounds']}: {said}")
    say(f"export: {file}")
    return 0


def _check_none(**given: Any) -> None:
    """Raise for an option that has no meaning at a node."""
    for name, value in given.items():
        if value is not None:
            raise refused(f"--{name}", value, "none at a node, which has one model")


@app.command
def predict(
    run_folder: Path,
    rows: Path,
    /,
    *,
    method: str | None = None,
    seed: int | None = None,
    client: int | None = None,
    cluster: int | None = None,
    out: Path = Path("predictions.csv"),
) -> int:
    """Predict the rows of a file with a model of a run, as its evaluation does: classes and probabilities as CSV.

    Args:
        run_folder: the run folder, with a sweep that of one point; or the folder of a node of real clients, which
            predicts as it was evaluated last.
        rows: a CSV file with the features of the run's rows, or an NPZ file with them as x; of a run of series a file
            of series, which are forecast.
        method: name of the method, where there are several.
        seed: by default the first.
        client: as this client, with what it keeps and its own rows to adapt on; by default as a new client.
        cluster: with one network of the server alone: of a cluster, component or branch.
        out: the file; it must not exist.
    """
    if any(run_folder.glob("*.ticket")):
        from fedtide.site.node_predict import predict_at_node

        _check_none(method=method, seed=seed, cluster=cluster)
        done = predict_at_node(run_folder, rows, out, client)
        say(f"{done.node}, client {done.client}, after round {done.round + 1}: {done.rows} rows predicted")
        say(f"predictions: {out}")
        return 0
    from fedtide.runs.predict import predict_file
    from fedtide.runs.trained import Trained

    trained = Trained.read(run_folder, method, seed)
    count = predict_file(trained, rows, out, client=client, cluster=cluster)
    say(f"{trained.run.title}, after round {trained.moment.round + 1}: {count} rows predicted")
    say(f"predictions: {out}")
    return 0


@app.command
def report(
    run_folders: list[Path],
    /,
    *,
    out: Path | None = None,
    figures: Path | None = None,
    tables: Path | None = None,
    output: Telling = Output(),
) -> int:
    """Make the report of one run folder, or one page about several.

    Args:
        run_folders: run folders.
        out: where the page goes; by default report.html in the run folder, or here for several.
        figures: a directory for every picture as SVG and PDF; it may be that of the tables.
        tables: a directory for every table as CSV and LaTeX.
    """
    from fedtide import api
    from fedtide.report.page import write_report
    from fedtide.runs import folder
    from fedtide.runs.experiment import check_runs
    from fedtide.tuning import folder as tunings
    from fedtide.tuning import tournament as tournaments

    if not run_folders:
        raise FedtideError("report: name at least one run folder")
    screen = console(output)
    for root in run_folders:
        if tunings.is_tuning(root) or tournaments.is_tournament(root):
            if len(run_folders) > 1:
                kind = "a tune folder" if tunings.is_tuning(root) else "the folder of a tournament"
                raise FedtideError(f"{root}: is {kind}, whose report stands alone; allowed: run folders")
            page = api.write_report(root, out=out)
            say(f"report: {page}", screen)
            tell({"report": page}, output)
            return 0
    for root in run_folders:
        runs = folder.plan(folder.load(root, imports=False), root)
        check_runs(runs)
        left = sum(not run.finished for run in runs)
        if left:
            said = f"{root}: {left} of {len(runs)} runs are not finished; go on with: {folder.go_on(root)}"
            say(said, screen)
    page = write_report(run_folders, out, pictures=figures, saved_tables=tables)
    say(f"report: {page}", screen)
    tell({"report": page, "folders": [_summarized(root) for root in run_folders]}, output)
    return 0


@app.command
def show(
    experiment: str,
    /,
    *,
    out: Path = Path("show.html"),
    scale: Scale | None = None,
    set_: Annotated[list[str], Parameter(name="--set", show_default=False)] = [],  # noqa: B006 - never changed
    seeds: str | None = None,
    output: Telling = Output(),
) -> int:
    """Show who holds what, who is there when and how the mix moves, before anything is run.

    Args:
        experiment: a TOML file, or recipe:NAME; of a sweep its first point.
        out: where the page goes.
        scale: size of a recipe: nano, cpu, paper.
        set_: override a value, e.g. --set data.partition.alpha=0.1; may be repeated.
        seeds: override the seeds; the first is shown.
    """
    from fedtide import api

    page = out
    shown = api.show(experiment, scale=scale, sets=set_, seeds=seeds)
    screen = console(output)
    for line in repr(shown).splitlines():
        say(line, screen)
    shown.write(page)
    say(f"page: {page}", screen)
    tell({"page": page, "lines": repr(shown).splitlines()}, output)
    return 0


@app.command
def track(run_folder: Path, tracker: str | None = None, /, *, output: Telling = Output()) -> int:
    """Tell TensorBoard, MLflow or Weights & Biases what a run folder has recorded; nothing stands there twice.

    Args:
        run_folder: the run folder; of runs that are not finished what there is.
        tracker: tensorboard, mlflow or wandb, or one with its place, such as mlflow:http://localhost:5000; by default
            that of its [track].
    """
    from fedtide.config.settings import read_tracker
    from fedtide.tracking.feed import track as track_folder

    runs = track_folder(run_folder, None if tracker is None else read_tracker(tracker))
    say(f"{len(runs)} run{'s' * (len(runs) != 1)} tracked", console(output))
    tell({"folder": run_folder, "runs": [run.title for run in runs]}, output)
    return 0


@app.command
def inspect(
    data: list[Path],
    /,
    *,
    label: str | None = None,
    client: str | None = None,
    time: str | None = None,
    features: str | None = None,
    zone: str | None = None,
    without: str | None = None,
    out: Path | None = None,
    output: Telling = Output(),
) -> int:
    """Tell which shift your own data have: eight lines, a page with pictures, and a study that is ready to run.

    Args:
        data: a CSV, ARFF or Parquet file, several with the same header or a series each, or an NPZ file; or a study: a
            TOML file, or recipe:NAME, of which the rows are looked at that its clients bring.
        label: column of the label; by default the one that is called so, or the last.
        client: column of the client; by default one with a name like user or station; "" for none.
        time: column of the time, or those of a date divided by commas (year,month,day,hour); by default the one with
            dates; "" for none.
        features: columns of the features, divided by commas; by default all other numbers.
        zone: time zone in which hours and days are counted, e.g. Europe/Berlin; by default times are taken as they are,
            in UTC where they name a zone.
        without: columns that are left out, divided by commas.
        out: the folder that is made; it must not exist. By default runs/NAME-inspect.
    """
    from fedtide import api
    from fedtide.config import slug
    from fedtide.core.atomic import check_new
    from fedtide.data.sources.files import bare
    from fedtide.inspection.findings import STUDY
    from fedtide.runs import folder

    if not data:
        raise FedtideError("inspect: name a CSV, ARFF, Parquet or NPZ file")
    if out is not None:
        check_new(out)
    found = api.inspect(data, label=label, client=client, time=time, features=features, zone=zone, without=without)
    screen = console(output)
    for line in str(found).splitlines():
        say(line, screen)
    page = found.write(out or folder.unused(Path("runs"), f"{slug(bare(data[0].name))}-inspect"))
    study = next(page.parent.glob(STUDY), None)
    if study is not None:
        say(f"study: {study}", screen)
    elif not found.table.simulated:
        say("no study: no columns of features are left, without which there is no model", screen)
    say(f"page: {page.resolve()}", screen)
    answers = [asdict(answer) for answer in found]
    tell({"answers": answers, "notes": found.notes, "study": study, "page": page.resolve()}, output)
    return 0


@app.command
def recommend(
    data: list[str],
    /,
    *,
    budget: Annotated[str, Parameter(allow_leading_hyphen=True)] = "5m",
    label: str | None = None,
    client: str | None = None,
    time: str | None = None,
    features: str | None = None,
    zone: str | None = None,
    without: str | None = None,
    scale: Scale | None = None,
    sets: Annotated[list[str], Parameter(name="--set", show_default=False)] = [],  # noqa: B006 - never changed
    workers: int | None = None,
    out: Path | None = None,
    output: Telling = Output(),
) -> int:
    """Recommend methods for your own data, or among those of a study: a tournament on validation rows within a budget.

    Args:
        data: a file, or several, as of fedtide inspect; or a study: a TOML file with two methods or more, or
            recipe:NAME.
        budget: how long it may take, e.g. 90s or 5m.
        label: column of the label, as of fedtide inspect; so are client, time, features, zone and without.
        client: column of the client; "" for none.
        time: column of the time, or those of a date divided by commas; "" for none.
        features: columns of the features, divided by commas.
        zone: time zone in which hours and days are counted, e.g. Europe/Berlin.
        without: columns that are left out, divided by commas.
        scale: size of a recipe: nano (seconds), cpu (minutes), paper (as published).
        sets: override a value of a study, e.g. data.partition.alpha=0.1; may be repeated.
        workers: processes; by default the machine's cores.
        out: the folder that is made; it must not exist. By default runs/NAME-recommend.
    """
    from fedtide import api
    from fedtide.data.sources.guesses import Roles

    _positive("--workers", workers)
    if len(data) > 1 and (study := next(filter(api.is_study, data), None)) is not None:
        raise refused("recommend", study, "one study, or data")
    roles = Roles(label, client, time, features, zone, without=without)
    what = data[0] if api.is_study(data[0]) else [Path(path) for path in data]
    root = api.begin_recommendation(what, Request(out, scale, sets, None, workers), budget, roles)
    return _recommend(root, workers, output)


@app.command(name="recipes")
def list_recipes(name: str | None = None, /) -> int:
    """List the recipes that ship with the package, or print one as TOML.

    Args:
        name: print this one.
    """
    if name is not None:
        sys.stdout.write(recipe(name).read_text(encoding="utf-8"))
        return 0
    table = Table("recipe", "scales", "what it shows", box=None, pad_edge=False)
    for path in recipes():
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        table.add_row(path.stem, " ".join(content.get("scale", {})) or "-", content.get("description", ""))
    console().print(table)
    return 0


@app.command
def algorithms(name: str | None = None, /, *, family: Family | None = None) -> int:
    """List the algorithms, with the papers that they are from and what the server sees of a client; or tell of one.

    Args:
        name: tell of this one: where it is from, what it sends, which keys it has, and which laws cannot hold for it.
        family: list these alone: one model (global), another step of the server (server-optimizer), a network with
            branches, components that clients are mixtures of (mixture), a model for each cluster (clustered), or what
            needs no federation (baseline).
    """
    from fedtide.algorithms import REGISTRY
    from fedtide.config.keys import source

    screen = console()
    if name is not None:
        if family is not None:
            raise refused("--family", family, "without the name of an algorithm")
        _tell(name, screen)
        return 0
    heads = ("algorithm", "family", "what it is", "paper", "the server sees, and what its cohort asks")
    table = Table(*heads, box=None, pad_edge=False)
    for known, entry in REGISTRY.items():
        if family in (None, entry.family):
            said = source(known)
            paper = f"{said.paper}, {said.year}" if said.paper else ""
            table.add_row(known, entry.family, f"{said.title}: {said.summary}", paper, entry.sees)
    screen.print(table)
    return 0


def _tell(name: str, screen: Console) -> None:
    """Print the description of one algorithm."""
    from fedtide.algorithms import REGISTRY
    from fedtide.config.keys import about, keys_of, options, safe_form, tables_in

    if name not in REGISTRY:
        raise unknown("algorithms", name, list(REGISTRY))
    entry = REGISTRY[name]
    laws = [f"It is exempt from the law of {law}: {why}." for law, why in entry.exempt.items()]
    says = (
        f"Family: {entry.family}.",
        f"Sends: {entry.sends}.",
        f"The server sees: {entry.sees}, and what its cohort asks.",
        f"Clients keep: {entry.keeps}.",
        f"safe = true: {safe_form(name).replace('`', '') or 'it has no other form'}.",
    )
    for line in (*about(name), *says, *laws):
        screen.print(line)
    screen.print()
    _print_keys(keys_of(name), screen)
    tables = [f"fedtide keys method.{key}" for key, (kind, _) in options(name).items() if tables_in(kind)]
    if tables:
        screen.print(f"\nKeys of the tables: {', '.join(tables)}")


@app.command
def keys(key: str = "", /) -> int:
    """List the keys of an experiment file, or of one of its tables: what they may be, their defaults and meaning.

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


@app.command
def models(name: str | None = None, /) -> int:
    """List the models, or the keys of one.

    Args:
        name: list the keys of this one.
    """
    from fedtide.config.keys import sections, tables_in
    from fedtide.fields.shapes import tags
    from fedtide.fields.vocabulary import synonyms
    from fedtide.models import Model

    if name is not None:
        known = [tags(model)[0] for model in tables_in(Model)]
        if name not in known:
            raise unknown("models", name, known, synonyms(name, known))
        return keys(f"model.{name}")
    table = Table("model", "what it is", "keys", box=None, pad_edge=False)
    for section, model in zip(sections("model"), tables_in(Model), strict=True):
        table.add_row(tags(model)[0], section.about, ", ".join(key.name for key in section.keys) or "-")
    console().print(table)
    return 0


def _print_keys(found: list[Key], screen: Console) -> None:
    table = Table("key", "allowed", "default", "what it is", box=None, pad_edge=False)
    for key in found:
        table.add_row(key.name, key.allowed, key.default, key.meaning)
    screen.print(table)


def _play(settings: Experiment, root: Path, workers: int | None, output: Output) -> int:
    from fedtide import api

    finished = _to_the_end(root, lambda: api.play_shown(settings, root, workers, output), output)
    if not isinstance(finished, api.Finished):
        return 130
    say(f"report: {finished.report.resolve()}", console(output))
    tell({"report": finished.report.resolve(), **_summarized(root)}, output)
    return 0


def _tune(root: Path, workers: int | None, output: Output) -> int:
    from fedtide import api

    finished = _to_the_end(root, lambda: api.tune_shown(root, workers, output), output)
    if not isinstance(finished, api.FinishedTuning):
        return 130
    say(f"report: {finished.report.resolve()}", console(output))
    stages = [[asdict(tuned) for tuned in stage] for stage in finished.stages]
    tell({"report": finished.report.resolve(), "tuned": finished.tuned, "stages": stages}, output)
    return 0


def _recommend(root: Path, workers: int | None, output: Output) -> int:
    from fedtide import api

    finished = _to_the_end(root, lambda: api.recommendation_shown(root, workers, output), output)
    if not isinstance(finished, api.Recommendation):
        return 130
    say(f"report: {finished.report.resolve()}", console(output))
    made = finished.made
    standings = [asdict(each) for each in made.standings]
    found = {"survivors": made.survivors, "standings": standings, "failed": dict(made.failed), "ended": made.ended}
    tell({"report": finished.report.resolve(), "study": finished.study, **found}, output)
    return 0


def _summarized(root: Path) -> dict[str, Any]:
    """Return what the summary of a run folder says."""
    return {"folder": root, "summary": json.loads((root / "summary.json").read_text(encoding="utf-8"))}


class NoRoom(FedtideError):
    """The disk is full, and the line says how to go on."""


def _to_the_end(root: Path, play: Callable[[], Any], output: Output) -> Any:
    """Play what is left of a folder and return what it found; None where a person stopped it, told how to go on."""
    from fedtide.fleets.machine import keep_freed

    keep_freed()
    # As it was started: `make demo` runs it where the shell does not find it.
    module = "python -m fedtide" if sys.argv[0].endswith("fedtide/__main__.py") else ""
    again = f"{module or ('fedtide' if shutil.which('fedtide') else sys.argv[0])} resume {root}"
    try:
        finished = play()
    except KeyboardInterrupt:
        _fail(f"interrupted; go on from what was saved with: {again}")
        return None
    except (OSError, FedtideError) as error:
        if not _is_full(str(error)) or not (root / "config.toml").is_file():
            raise
        said = f"{error.filename or root}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise NoRoom(f"{said}; make room, and go on with: {again}") from None
    if finished is None:
        say(f"stopped and saved; go on with: {again}", console(output))
    return finished


def _is_full(line: str) -> bool:
    """Tell whether an error says that a file cannot grow.

    >>> _is_full("[Errno 27] File too large: 'rounds.jsonl'")
    True
    """
    return any(each in line for each in FULL)


def _say_room(settings: Experiment, root: Path, where: str, output: Output) -> None:
    """Print how much a run will leave on the disk, where that is much; raise where there is no room for it."""
    from fedtide.runs.disk import check_room, needed

    if room := check_room(needed(settings, where), root):
        say(room, console(output))


def _fleet_sets(fleet: FleetKind | None, address: str | None) -> list[str]:
    """Return the overrides that `--fleet` and `--address` stand for; an address is that of a Ray cluster."""
    if address is not None and fleet is None:
        fleet = "ray"
    if address is not None and fleet != "ray":
        raise refused("--address", address, "with --fleet ray", f"--fleet is {fleet}")
    kind = [] if fleet is None else [f"fleet.kind={fleet}"]
    return kind + ([] if address is None else [f"fleet.address={json.dumps(address)}"])


def _positive(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise refused(option, value, "1 or more")


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exit status 2 and one line for anything a person can mend."""
    os.environ["MPLBACKEND"] = "agg"  # pictures are files; one that is set for screens may not exist here
    # Before NumPy is imported: its threads wait for each other in a loop, nine times the work where others use cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot write
    try:
        _check_text(sys.argv[1:] if arguments is None else arguments)
        status = app(arguments, console=Screen(), exit_on_error=False, print_error=False, result_action="return_value")
    except FedtideError as error:
        status = _fail(str(error), full="" if isinstance(error, NoRoom) else AGAIN)
    except CycloptsError as error:
        status = _fail(_of_option(error))
    except KeyboardInterrupt:
        status = _fail("interrupted", status=130)
    except ValueError as error:
        if "null" not in str(error):
            raise
        status = _fail("the name of a file or folder has the character NUL, allowed: names without it")
    except MemoryError as error:
        status = _fail(f"not enough memory: {error}" if str(error) else "not enough memory")
    except BrokenPipeError:  # what read the output has ended (`| head`)
        status = 0
    except OSError as error:
        place = error.filename or "input/output"
        no_folder = isinstance(error, FileExistsError | NotADirectoryError) and not Path(place).is_dir()
        status = _fail(f"{place}: {'no folder, allowed: a folder' if no_folder else error.strerror or error}")
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status if isinstance(status, int) else 0)


def _of_option(error: CycloptsError) -> str:
    """Say what is wrong with an option or argument in the words of all other errors."""
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        command = " ".join(["fedtide", *(error.command_chain or ())])
        return f"{error.keyword or error.argument.name}: no value given; {command} --help says what it is"
    if isinstance(error, CoercionError) and error.token is not None and error.argument is not None:
        name, found = error.token.keyword or error.argument.name, error.token.value
        if get_origin(error.target_type) is Literal:
            return str(unknown(name, found, get_args(error.target_type)))
        if error.target_type is int:
            return str(refused(name, found, "a whole number"))
    return " ".join(str(error).split())


def _check_text(arguments: list[str]) -> None:
    """Raise for an argument that no file could hold: bytes that are no text where this process runs."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise FedtideError(f"{argument}: is not UTF-8, or no text in this locale; allowed: UTF-8") from None


def _fail(line: str, status: int = 2, full: str = AGAIN) -> int:
    """Print what is wrong, and of a full disk what to do, and return an exit status."""
    # Folders and files are made under another name first, which is not the one that was asked for.
    line = re.sub(r"\.(making-[0-9a-f]{16}|[0-9a-f]{16}\.writing)\b", "", line)
    line += full if _is_full(line) else ""
    print(f"fedtide: {line}", file=sys.stderr)
    return status
