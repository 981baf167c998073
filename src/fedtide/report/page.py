"""The report page: one HTML file that opens offline."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from fedtide.config import to_toml
from fedtide.core.atomic import check_free, replacing
from fedtide.core.errors import refused
from fedtide.draw.figures import look
from fedtide.draw.html import (
    MARK,
    Part,
    Picture,
    Pictured,
    anchor,
    check_saved,
    render,
    save_pictures,
    save_tables,
    swatch,
    to_pictures,
)
from fedtide.draw.prose import listed
from fedtide.draw.tables import Table
from fedtide.report import narrative
from fedtide.report.accuracy import (
    SCORES,
    SIGNS,
    WORST_POINT,
    about_methods,
    accuracy_of_all,
    difference_cell,
    methods_table,
)
from fedtide.report.claims import about_claims, claims_by_point, claims_table
from fedtide.report.components import own_weight_over_sweep
from fedtide.report.costs import REFUSED
from fedtide.report.formats import Number, difference, percent
from fedtide.report.periods import SWING
from fedtide.report.run_records import NANO, ExperimentRecord, environment_line
from fedtide.report.study import names_of, read_finished, write_summary
from fedtide.report.summary import MethodSummary, Paired, Study, Summary
from fedtide.report.topic import words_of
from fedtide.report.topics import PICTURES, TABLES


@dataclass(frozen=True)
class Point:
    """An experiment or a point of a sweep on the page: the number of its folder, and its name on the page."""

    folder: int
    name: str
    record: ExperimentRecord
    summary: Summary


@dataclass(frozen=True)
class Section:
    """Part of the page: an experiment or a point of a sweep, all points of a sweep, or a comparison of folders.

    Args:
        pictures: its pictures.
        parts: its tables, the first one at the top.
        heading: its heading; "" without one.
        text: sentences about the setting, or about the points with a section.
        alarms: alarms of an experiment.
        headline: headline of an experiment.
        sentences: mark, name and sentence of each method.
        config: the whole configuration as TOML.
    """

    pictures: list[Picture]
    parts: list[Part]
    heading: str = ""
    text: str = ""
    alarms: Sequence[str] = ()
    headline: str = ""
    sentences: Sequence[tuple[Markup, str, str]] = ()
    config: str = ""

    @property
    def anchor(self) -> str:
        """Anchor of the heading; "" without one."""
        return anchor(self.heading) if self.heading else ""


def report_of(root: Path) -> Path:
    """Return the path of the report of a run folder."""
    return root / "report.html"


def write_report(
    roots: Sequence[Path], out: Path | None = None, *, pictures: Path | None = None, saved_tables: Path | None = None
) -> Path:
    """Write `summary.json` into each run folder and one page about all of them.

    Args:
        roots: run folders.
        out: path of the page; by default `report.html` in the only folder, or in the current directory for several.
            Only an earlier page is replaced.
        pictures: directory for every picture as SVG and PDF; None saves none.
        saved_tables: directory for every table as CSV and LaTeX; None saves none.

    Raises:
        FedtideError: a folder is not a run folder, no run in it is finished, or a file is in the way that is not ours.
    """
    for root in roots:
        if out is not None and root.resolve() in out.resolve().parents and out.suffix != ".html":
            raise refused("--out", str(out), "a page (.html), or a place outside of the run folder")
    several = len(roots) > 1
    path = out or (Path("report.html") if several else report_of(roots[0]))
    if path != report_of(roots[0]):  # that of a run folder is made anew, whatever it is
        check_free(path, MARK)
    studies = [(name, read_finished(root)) for root, name in zip(roots, names_of(roots), strict=True)]
    points = [
        Point(number, " · ".join(part for part in (name * several, record.point) if part), record, summary)
        for number, (name, study) in enumerate(studies)
        for record, summary in _sections_of(study)
    ]
    nano = [name for name, study in studies if study.nano]
    sections = [_section(point) for point in points]
    sweeps = [_sweep(study, name if several else "") for name, study in studies if study.swept]
    comparison = compare(points) if several else None
    content = [*([comparison] if comparison else []), *sweeps, *sections]
    drawn = [picture for section in content for picture in section.pictures]
    tables = [table for section in content for table in section.parts]
    for parts, directory in ((drawn, pictures), (tables, saved_tables)):
        if directory is not None:
            check_saved(parts, directory)
    text = render(
        "page.html",
        title=listed([study.summaries[0].title for _, study in studies]),
        about="" if several else studies[0][1].records[0].experiment.description,
        nano=nano,
        warning=NANO,
        several=several,
        comparison=comparison,
        sections=sections,
        sweeps=sweeps,
        environments=[environment_line(study.root, name) for name, study in studies],
    )
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        # Everything is computed by now: no file appears if one of the folders is damaged.
        for _, study in studies:
            write_summary(study.root / "summary.json", study)
    if pictures is not None:
        save_pictures(drawn, pictures)
    if saved_tables is not None:
        save_tables(tables, saved_tables)
    return path


def pictures_of(record: ExperimentRecord) -> list[Pictured]:
    """Return title, caption and picture of all pictures, in the order of a page."""
    words = words_of(record)
    return [(plan.title.format(**words), plan.caption(record), plan(record)) for plan in PICTURES.values()]


def tables_of(record: ExperimentRecord, summary: Summary) -> list[tuple[str, Table, str]]:
    """Return title, table and caption of all tables with content but the first, in the order of a page."""
    tables = [("Claims", claims_table(summary.claims), about_claims(summary.claims))] if summary.claims else []
    tables += [(plan.title, plan(record, summary), plan.caption(record)) for plan in TABLES]
    return [(title, table, caption) for title, table, caption in tables if table is not None]


def _sections_of(study: Study) -> list[tuple[ExperimentRecord, Summary]]:
    """Return the points with a section: all of a few, else those chosen by a method, or the first ones."""
    finished = [(r, s) for r, s in zip(study.records, study.summaries, strict=True) if s.methods]
    if len(finished) <= 3 or not study.chosen:
        return finished[:6]
    names = {summary.point for summary in study.chosen.values()}
    return [(r, s) for r, s in finished if s.point in names]


def _section(point: Point) -> Section:
    record, summary, heading = point.record, point.summary, point.name
    marks = [swatch(look(number)) for number, _ in record.numbered]
    methods = methods_table(summary)
    empty = [Markup("")] * (len(methods.rows) - len(summary.methods))
    first = Part("", methods, about_methods(record, summary), anchor("Methods", heading), [*marks, *empty])
    tables = tables_of(record, summary)
    sentences = [(mark, m.name, narrative.sentence(summary, m)) for mark, m in zip(marks, summary.methods, strict=True)]
    return Section(
        to_pictures(pictures_of(record), heading),
        [first, *(Part(title, table, about, anchor(f"table {title}", heading)) for title, table, about in tables)],
        heading,
        narrative.setting(record),
        narrative.alarms(summary),
        narrative.headline(record, summary),
        sentences,
        to_toml(record.experiment),
    )


def _sweep(study: Study, name: str) -> Section:
    """Return the part about all points of a sweep; `name` is that of its folder, if there are several."""
    sections = [summary for _, summary in _sections_of(study)]
    others = [summary for summary in study.summaries if summary.methods and summary not in sections]
    elsewhere = [summary for summary in others if summary.claims]
    tables = [("Points of the sweep", sweep_table(study), "")]
    if study.claims:
        tables.append(("Claims about the sweep", claims_table(study.claims), about_claims(study.claims)))
    if elsewhere:
        tables.append(("Claims by point", claims_by_point(elsewhere), ""))
    picture = (
        "Gate weight along the sweep",
        "Share of the clients' own experts in predictions; bars are one standard error.",
        own_weight_over_sweep(study),
    )
    heading = f"All points of the sweep{f' of {name}' if name else ''}"
    first = study.summaries[0]
    how = "each method's point is chosen by validation rows, never by test rows" if study.chosen else study.unchosen
    caption = "; ".join(filter(None, [f"{first.score.capitalize()} {first.late}, at every point", how]))
    shown = f" {len(sections)} of {len(study.summaries)} points have a section below." if others else ""
    return Section(
        to_pictures([picture], name),
        [Part("", table, caption, anchor(title, name)) for title, table, caption in tables],
        heading,
        f"{caption}.{shown}",
    )


def sweep_table(study: Study) -> Table:
    """Build the table of late accuracy at every point of a sweep, with a mark at each method's chosen point.

    Points are rows, or columns if there are more methods.
    """
    names = list(dict.fromkeys(method.name for summary in study.summaries for method in summary.methods))
    rows = []
    for summary in study.summaries:
        methods = {m.name: m for m in summary.methods}
        cells = [percent(methods[name].measure(methods[name].score)) if name in methods else "-" for name in names]
        marks = [" ← chosen" if study.chosen.get(name) is summary else "" for name in names]
        rows.append([summary.point, *(cell + mark for cell, mark in zip(cells, marks, strict=True))])
    if len(names) > len(rows):
        header, *turned = map(list, zip(["method", *names], *rows, strict=True))
        return Table(header, turned)
    return Table(["point", *names], rows)


# -- several folders ---------------------------------------------------------------------------------------------------

COLUMNS = (*SCORES, WORST_POINT, SWING, Number("worst_decile", percent, "worst tenth of clients"), REFUSED)


def compare(points: Sequence[Point]) -> Section:
    """Return the beginning of a page about these points of several folders."""
    settings = [point.record.experiment.model_dump() for point in points]
    keys = [k for k in ("data", "shift", "model", "rounds", "seeds") if any(s[k] != settings[0][k] for s in settings)]
    differ = f" The experiments differ in {listed(keys)}." if keys else ""
    score = " or ".join(sorted({point.summary.score for point in points}))
    picture = (
        f"{score.capitalize()} of all methods",
        f"{score.capitalize()} over rounds, means over seeds with a band of one standard error.",
        accuracy_of_all([(point.name, point.record) for point in points]),
    )
    starts = itertools.accumulate((len(point.record.names) for point in points), initial=0)
    counted = zip(starts, (point.record.numbered for point in points), strict=False)
    marks = [swatch(look(start + number)) for start, numbered in counted for number, _ in numbered]
    caption = f"Means ± one standard error over seeds.{differ}"
    parts = [Part("All methods", methods_of_all(points), caption, "all-methods", marks)]
    pairs = list(paired(points))
    if pairs:
        numbers = [n for n in (WORST_POINT, SWING) if any(n.name in ours.measures for _, ours, *_ in pairs)]
        rows = []
        for later, ours, first, theirs in pairs:
            common = ", ".join(str(seed) for seed in ours.seeds if seed in theirs.seeds)
            gap = Paired(ours.name, theirs.name, ours.against(theirs, ours.score), ours.same_run(theirs))
            cells = [difference(ours.against(theirs, number.name), number.written) for number in numbers]
            names = f"{later.name}: {ours.name}", f"{first.name}: {theirs.name}"
            rows.append([*names, common or "none in common", difference_cell(gap), *cells])
        table = Table(["method", "against", "which seeds", score, *(number.title for number in numbers)], rows)
        words = ", ".join(f"{mark} {word.format('the other')}" for mark, word in SIGNS.items())
        caption = f"The later folder minus the first one at each common seed, ± one standard error. Signs: {words}."
        parts.append(Part("Differences between folders", table, caption, "differences-between-folders"))
    return Section(to_pictures([picture]), parts)


def methods_of_all(points: Sequence[Point]) -> Table:
    """Build the table of all methods, whose late means may cover other rounds."""
    methods = [(point, method) for point in points for method in point.summary.methods]
    columns = [number for number in COLUMNS if any(number.name in method.measures for _, method in methods)]
    rows = []
    for point, method in methods:
        cells = [column.written(method.measure(column.name)) for column in columns]
        rows.append([f"{point.name}: {method.name}", point.summary.span, *cells])
    return Table(["method", "averaged over", *(column.title for column in columns)], rows)


def paired(points: Sequence[Point]) -> Iterator[tuple[Point, MethodSummary, Point, MethodSummary]]:
    """Yield each method of the later folders with its counterpart in the first folder, at the same point if any.

    The counterpart has the same name, else it is the baseline, else the first method.
    """
    first = [point for point in points if point.folder == points[0].folder]
    for point in points[len(first) :]:
        other = next((candidate for candidate in first if candidate.record.point == point.record.point), first[0])
        methods = {method.name: method for method in other.summary.methods}
        baseline = other.summary.paired[0].baseline if other.summary.paired else next(iter(methods))
        for method in point.summary.methods:
            yield point, method, other, methods.get(method.name, methods[baseline])
