"""Commands that read a finished or unfinished folder: report, verify, track, export and predict."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fedtide.cli.running import Shown
from fedtide.core.errors import FedtideError
from fedtide.report.terminal import console, say, tell
from fedtide.runs.job import Output


def report(
    run_folders: list[Path],
    /,
    *,
    out: Path | None = None,
    figures: Path | None = None,
    tables: Path | None = None,
    output: Shown = Output(),
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


def verify(run_folder: Path, /, *, output: Shown = Output()) -> int:
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


def track(run_folder: Path, tracker: str | None = None, /, *, output: Shown = Output()) -> int:
    """Command of `fedtide.track`."""
    from fedtide.config.settings import read_tracker
    from fedtide.tracking.feed import track as track_folder

    runs = track_folder(run_folder, None if tracker is None else read_tracker(tracker))
    say(f"{len(runs)} run{'s' * (len(runs) != 1)} tracked", console(output))
    tell({"folder": run_folder, "runs": [run.title for run in runs]}, output)
    return 0


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
    """Write a model of a run to a file that other programs read; a program is checked first.

    Args:
        run_folder: the run folder (of a sweep, the folder of one point). Or the folder of a node of real clients, for
            its last evaluated model.
        format: weights by name (safetensors), or a program that takes rows as the model sees them and returns
            log-probabilities (torch-export, onnx).
        method: name of the method, if there are several.
        seed: by default the first.
        client: the model of this client, with its own memory; by default the model of a new client.
        cluster: number of a network of the server instead: of a cluster, component or branch.
        out: the file; it must not exist. By default METHOD-SEED or NODE here.
    """
    from fedtide.api.jobs import model_of
    from fedtide.core.atomic import check_free
    from fedtide.runs.export import ENDINGS, check_onnx
    from fedtide.runs.export import export as write

    if format == "onnx":
        check_onnx()
    name, model = model_of(run_folder, method, seed, client, cluster)
    file = out or Path(f"{name}{ENDINGS[format]}")
    check_free(file)
    line = write(model, file, format)
    say(f"{model.about['run']}, after round {model.about['rounds']}: {line}")
    say(f"export: {file}")
    return 0


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
        run_folder: the run folder (of a sweep, the folder of one point). Or the folder of a node of real clients, which
            predicts as in its last evaluation.
        rows: a CSV file with the features of the run's rows, or an NPZ file with the features as x. For a run of
            series: a file of series, to forecast.
        method: name of the method, if there are several.
        seed: by default the first.
        client: as this client, with its own memory and its own rows to adapt on; by default as a new client.
        cluster: with one network of the server: of a cluster, component or branch.
        out: the file; it must not exist.
    """
    from fedtide.api.jobs import predict_rows

    say(predict_rows(run_folder, rows, out, method, seed, client, cluster))
    say(f"predictions: {out}")
    return 0
