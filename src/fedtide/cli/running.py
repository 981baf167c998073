"""Commands that play: run, tune, recommend and resume, and the study to begin with."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from fedtide.core.errors import FedtideError, refused
from fedtide.report.terminal import console, say, tell
from fedtide.runs.job import ExactKind, FleetKind, Output, Scale

Sets = Annotated[list[str], Parameter(name="--set", show_default=False)]
Shown = Annotated[Output, Parameter(name="*", negative=())]
"""Options of commands with results."""

FULL = ("No space left on device", "Disk quota exceeded", "File too large")
"""Messages of the system if a file cannot grow."""


def run(
    experiment: str,
    /,
    *,
    out: Path | None = None,
    scale: Scale | None = None,
    sets: Sets = [],  # noqa: B006 - never changed
    seeds: str | None = None,
    workers: int | None = None,
    fleet: FleetKind | None = None,
    address: str | None = None,
    output: Shown = Output(),
) -> int:
    """Command of `fedtide.run`.

    Args:
        fleet: engine of the clients' work, in place of fleet.kind: local, workers and ray give the same bits, stacked
            differs from them in rounding, and auto chooses by size.
        address: address of a Ray cluster's head node, as fleet.address in the file, e.g. 10.0.0.1:6379 or auto; without
            it one is started on this machine, which ends with the command.
    """
    from fedtide.api.jobs import Request, RunJob, fleet_sets

    request = Request(out, scale, [*sets, *fleet_sets(fleet, address)], seeds, workers)
    return _play(RunJob.create(experiment, request, output), output)


def tune(
    experiment: str,
    /,
    *,
    out: Path | None = None,
    scale: Scale | None = None,
    sets: Sets = [],  # noqa: B006 - never changed
    seeds: str | None = None,
    workers: int | None = None,
    trials: int | None = None,
    output: Shown = Output(),
) -> int:
    """Command of `fedtide.tune`."""
    from fedtide.api.jobs import Request, TuningJob, check_positive

    check_positive("--trials", trials)
    return _play(TuningJob.create(experiment, Request(out, scale, sets, seeds, workers), trials), output)


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
    sets: Sets = [],  # noqa: B006 - never changed
    workers: int | None = None,
    out: Path | None = None,
    output: Shown = Output(),
) -> int:
    """Command of `fedtide.recommend`."""
    from fedtide.api.jobs import Request, TournamentJob, columns, is_study

    study = next(filter(is_study, data), None)
    if study is not None and len(data) > 1:
        raise refused("recommend", study, "one study, or data")
    roles = columns(label=label, client=client, time=time, features=features, zone=zone, without=without)
    request = Request(out, scale, sets, None, workers)
    return _play(TournamentJob.create(study or [Path(path) for path in data], request, budget, roles), output)


def resume(
    run_folder: Path,
    /,
    *,
    seeds: str | None = None,
    workers: int | None = None,
    fleet: ExactKind | None = None,
    address: str | None = None,
    output: Shown = Output(),
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
    """Play the rest of a job and print the path of its report; return the exit status."""
    from fedtide.api.jobs import play

    result = to_the_end(job.root, lambda: play(job, output), output)
    if result is None:
        return 130
    report = result.report.resolve()
    say(f"report: {report}", console(output))
    tell({"report": report, **result.as_json()}, output)
    return 0


class NoRoom(FedtideError):
    """The disk is full, and the line says how to go on."""


def to_the_end(root: Path, play: Callable[[], Any], output: Output) -> Any:
    """Play the rest of a folder and return its result; None if a person stopped it, after a line about how to go on."""
    from fedtide.fleets.this_machine import keep_freed

    keep_freed()
    # As it was started: the shell may not find the command of `make demo`.
    module = "python -m fedtide" if sys.argv[0].endswith("fedtide/__main__.py") else ""
    again = f"{module or ('fedtide' if shutil.which('fedtide') else sys.argv[0])} resume {root}"
    try:
        result = play()
    except KeyboardInterrupt:
        print(f"fedtide: interrupted; go on from what was saved with: {again}", file=sys.stderr)
        return None
    except (OSError, FedtideError) as error:
        if not is_full(str(error)) or not (root / "config.toml").is_file():
            raise
        line = f"{error.filename or root}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise NoRoom(f"{line}; make room, and go on with: {again}") from None
    if result is None:
        say(f"stopped and saved; go on with: {again}", console(output))
    return result


def is_full(line: str) -> bool:
    """Tell whether an error says that a file cannot grow.

    >>> is_full("[Errno 27] File too large: 'rounds.jsonl'")
    True
    """
    return any(message in line for message in FULL)
