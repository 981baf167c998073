"""The report page: one HTML file that opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from fedtide.config import to_toml
from fedtide.core.atomic import replacing
from fedtide.core.errors import refused
from fedtide.draw.prose import listed
from fedtide.report import figures, gating, narrative, tables
from fedtide.report.alarms import alarms
from fedtide.report.contents import VERDICTS, tables_of
from fedtide.report.environment import NANO, environment_line
from fedtide.report.pictures import pictures_of
from fedtide.report.reading import ExperimentRecord
from fedtide.report.render import Part, Picture, anchor, render, save_pictures, save_tables, swatch, to_pictures
from fedtide.report.summary import Study, Summary, names_of, read_finished, write_summary
from fedtide.report.together import Shown, Together, together

MARKS = {
    tables.HIGHER: "clearly higher than {}",
    tables.LOWER: "clearly lower",
    tables.MARKS["unclear"]: "no clear difference",
    tables.MARKS["too few seeds"]: "too few seeds to tell",
    tables.SAME: "the same run, to the last digit",
}
"""What the signs in the first table mean."""


@dataclass(frozen=True)
class Section:
    """Section of an experiment, or of one point of a sweep, on the page."""

    heading: str
    anchor: str
    setting: str
    alarms: list[str]
    headline: str
    methods: Part
    sentences: list[tuple[Markup, str, str]]
    unfinished: str
    pictures: list[Picture]
    parts: list[Part]
    config: str


@dataclass(frozen=True)
class _Root:
    """Content of one run folder."""

    root: Path
    name: str
    study: Study


def report_of(root: Path) -> Path:
    """Return where the report of a run folder is, or will be."""
    return root / "report.html"


def write_report(
    roots: Sequence[Path], out: Path | None = None, *, pictures: Path | None = None, saved_tables: Path | None = None
) -> Path:
    """Write `summary.json` into each run folder and one page about all of them.

    Args:
        roots: run folders.
        out: path of the page; by default `report.html` in the only folder, or in the current directory for several.
        pictures: directory for every picture as SVG and PDF; None saves none.
        saved_tables: directory for every table as CSV and LaTeX; None saves none.

    Raises:
        FedtideError: a folder is not a run folder, or no run in it is finished.
    """
    for root in roots:
        if out is not None and root.resolve() in out.resolve().parents and out.suffix != ".html":
            raise refused("--out", str(out), "a page (.html), or a place outside of the run folder")
    made = [_Root(root, name, read_finished(root)) for root, name in zip(roots, names_of(roots), strict=True)]
    shown = [
        Shown(number, " · ".join(p for p in (each.name * (len(made) > 1), record.point) if p), record, summary)
        for number, each in enumerate(made)
        for record, summary in _shown(each.study)
    ]
    sections = [_section(each.record, each.summary, each.name, nano=made[each.folder].study.nano) for each in shown]
    sweeps = [_sweep(each, several=len(made) > 1) for each in made if each.study.swept]
    begin = together(shown) if len(made) > 1 else None
    path = out or (report_of(roots[0]) if len(roots) == 1 else Path("report.html"))
    text = render(
        "page.html",
        title=listed([each.study.summaries[0].title for each in made]),
        about=made[0].study.records[0].experiment.description if len(made) == 1 else "",
        nano=[each.name for each in made if each.study.nano],
        warning=NANO,
        several=len(made) > 1,
        together=begin,
        sections=sections,
        sweeps=sweeps,
        environments=[environment_line(each.root, each.name) for each in made],
    )
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        # Everything is computed by now: no file appears if one of the folders is damaged.
        for each in made:
            write_summary(each.root / "summary.json", each.study)
    everything: list[Together | Sweep | Section] = [*([begin] if begin else []), *sweeps, *sections]
    if pictures is not None:
        save_pictures((picture for each in everything for picture in each.pictures), pictures)
    if saved_tables is not None:
        heads = [section.methods for section in sections]
        save_tables([*heads, *(part for each in everything for part in each.parts)], saved_tables)
    return path


@dataclass(frozen=True)
class Sweep:
    """Part of the page about all points of a sweep: accuracy, and claims that no section has.

    shown: sentence on the points with a section of their own; "" where all have one. pictures: measures along a swept
    key. parts: accuracy at every point, then claims.
    """

    heading: str
    anchor: str
    shown: str
    pictures: list[Picture]
    parts: list[Part]


def _sweep(root: _Root, *, several: bool) -> Sweep:
    study, verdicts = root.study, not root.study.nano
    place = root.name if several else ""
    sections = [summary for _, summary in _shown(study)]
    others = [summary for summary in study.summaries if summary.methods and summary not in sections]
    shown = f"{len(sections)} of {len(study.summaries)} points have a section below." if others else ""
    gates = ("Gate weight along the sweep", _about_sweep(study), gating.own_weight_over_sweep(study))
    elsewhere = [summary for summary in others if summary.claims]
    claims = [
        tables.claims_table(study.claims, verdicts=verdicts) if study.claims else None,
        tables.claims_by_point(elsewhere, verdicts=verdicts) if elsewhere else None,
    ]
    found = [tables.sweep_table(study.summaries, study.chosen), *claims]
    names = ("Points of the sweep", "Claims about the sweep", "Claims by point")
    captions = ("", "" if elsewhere or not verdicts else VERDICTS, VERDICTS if verdicts else "")
    parts = [
        Part("", table, caption, anchor(name, place))
        for name, table, caption in zip(names, found, captions, strict=True)
        if table is not None
    ]
    heading = f"All points of the sweep{f' of {root.name}' if several else ''}"
    return Sweep(heading, anchor(heading), shown, to_pictures([gates], place), parts)


def _shown(study: Study) -> list[tuple[ExperimentRecord, Summary]]:
    """Return the points with a section of their own: all of a few, else those chosen by a method, or the first ones."""
    finished = [(r, s) for r, s in zip(study.records, study.summaries, strict=True) if s.methods]
    if len(finished) <= 3 or not study.chosen:
        return finished[:6]
    names = {summary.point for summary in study.chosen.values()}
    return [(r, s) for r, s in finished if s.point in names]


def _section(record: ExperimentRecord, summary: Summary, heading: str, *, nano: bool) -> Section:
    marks = [swatch(figures.look(number)) for number, method in enumerate(record.methods) if method.runs]
    methods = tables.methods_table(summary)
    floor = [Markup("")] * (len(methods.rows) - len(summary.methods))
    left = [f"{method.unfinished} of {method.unfinished + len(method.seeds)} runs of {method.name}"
            for method in summary.methods if method.unfinished]  # fmt: skip
    return Section(
        heading,
        anchor(heading) if heading else "",
        narrative.setting(record),
        alarms(summary),
        narrative.headline(record, summary),
        Part("", methods, _about_marks(methods, summary), anchor("Methods", heading), [*marks, *floor]),
        [(mark, method.name, narrative.sentence(summary, method))
         for mark, method in zip(marks, summary.methods, strict=True)],
        f"Not finished and not counted: {listed(left)}." if left else "",
        to_pictures(pictures_of(record, summary), heading),
        [Part(title, table, caption, anchor(f"table {title}", heading))
         for title, table, caption in tables_of(record, summary, nano=nano) if table],
        to_toml(record.experiment),
    )  # fmt: skip


def _about_marks(methods: tables.Table, summary: Summary) -> str:
    """Return the legend of the signs that there are in the first table."""
    if not summary.paired:
        return ""
    base = summary.paired[0].baseline
    found = [
        f"{mark} {word.format(base)}" for mark, word in MARKS.items() if any(r[2][0] == mark for r in methods.rows)
    ]
    return f"{', '.join(found)}: by 95 % confidence intervals over seeds (Student's t), seed by seed." if found else ""


def _about_sweep(study: Study) -> str:
    seeds = max(len(method.seeds) for summary in study.summaries for method in summary.methods)
    bars = " Bars are one standard error over seeds." if seeds > 1 else ""
    return f"How much of a prediction comes from the client's own expert, the rest from models that are shared.{bars}"
