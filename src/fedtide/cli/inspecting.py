"""Commands that look before a run: show, inspect and check."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from fedtide.cli.running import Sets, Shown
from fedtide.core.errors import FedtideError
from fedtide.report.terminal import console, say, tell
from fedtide.runs.job import Output, Scale


def show(
    experiment: str,
    /,
    *,
    out: Path = Path("show.html"),
    scale: Scale | None = None,
    sets: Sets = [],  # noqa: B006 - never changed
    seeds: str | None = None,
    output: Shown = Output(),
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
    output: Shown = Output(),
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
    findings = api.inspect(data, label=label, client=client, time=time, features=features, zone=zone, without=without)
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


def check(
    algorithm: str,
    /,
    *,
    sets: Sets = [],  # noqa: B006 - never changed
    output: Shown = Output(),
) -> int:
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
